"""Draws the figures of the page on policies: `python docs/figures.py`, with `tfscale[bench]`.

All of them are measured, none is sketched: the formats by converting numbers, the gradients by
`tfscale.profile`, the scales by training.
"""

from __future__ import annotations

import pathlib
import sys

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfscale
from tfscale.cli import demo_training

sys.path.append(str(pathlib.Path(__file__).parent.parent))
from benchmarks.trainings.plots import STYLE

STEPS = 240
BURST_STEPS = 32_000  # of the figure with a burst of overflows
HERE = pathlib.Path(__file__).parent / "img"
# Told apart by dashes and labels, so that a print in black and white says the same.
DASHES = {"float16": "-", "bfloat16": "--", "float32": ":"}


def save(figure, name: str) -> None:
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def formats() -> None:
    """The largest relative error of rounding, by magnitude, in three formats."""
    exponents = np.arange(-140, 128)
    fractions = np.random.default_rng(0).uniform(1, 2, 2000)
    values = np.ldexp(fractions[None, :], exponents[:, None])
    figure, axes = plt.subplots(figsize=(7, 3))
    for dtype, dashes in DASHES.items():
        rounded = tf.cast(tf.cast(values, dtype), tf.float64)
        error = np.max(np.abs(rounded - values) / values, axis=1)
        error[~np.isfinite(error)] = np.nan  # it became infinite
        axes.plot(exponents, error, dashes, color="black")
    ticks = [-126, -96, -64, -24, 0, 16, 64, 127]
    axes.set_yscale("log", base=2)
    axes.set_ylim(2.0**-26, 4)
    axes.set_yticks([2.0**-24, 2.0**-18, 2.0**-11, 2.0**-8, 2.0**-4, 1])
    axes.set_xticks(ticks, [f"$2^{{{n}}}$" for n in ticks])
    axes.set_xlabel("magnitude of the number")
    axes.set_ylabel("largest relative error")
    for x, y, where, text in (
        (18, 2.0**-11, "left", "float16, up to 65504"),
        (-28, 1.3, "right", "float16: becomes zero"),
        (70, 2.0**-7.6, "left", "bfloat16"),
        (70, 2.0**-23.6, "left", "float32"),
    ):
        axes.text(x, y, text, ha=where, va="bottom" if y != 2.0**-11 else "center")
    save(figure, "formats")


def shares() -> None:
    """Which share of the demo's gradients float16 loses, by loss scale."""
    keras.utils.set_random_seed(0)
    (x, y), _ = demo_training.digits(0)
    model = demo_training.build("mixed_float16")
    model.compile("adam", demo_training.loss())
    profile = tfscale.profile(model, x, y, batch_size=demo_training.BATCH, steps=4)
    found = profile.total
    powers = np.arange(0, 33)
    figure, axes = plt.subplots(figsize=(7, 2.8))
    lost = [found.lost(2.0**k) for k in powers]
    poor = [found.lost(2.0**k) + found.subnormal(2.0**k) for k in powers]
    axes.plot(powers, poor, "--", color="black")
    axes.plot(powers, lost, "-", color="black")
    axes.text(6.6, 0.2, "become zero")
    axes.text(9.2, 0.7, "become zero or lose bits")
    axes.axvspan(found.headroom, powers[-1], color="0.85")
    axes.text(found.headroom + 0.2, 0.45, "the largest\nbecome infinite")
    proposed = int(np.log2(profile.scale))
    axes.axvline(proposed, color="black", linewidth=0.8, linestyle=":")
    axes.text(proposed + 0.2, 0.92, "proposed")
    axes.set_xlim(0, powers[-1])
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xticks(powers[::4], [f"$2^{{{k}}}$" for k in powers[::4]])
    axes.set_xlabel("loss scale")
    axes.set_ylabel("share of the gradients")
    save(figure, "shares")


def digits() -> tuple[np.ndarray, np.ndarray]:
    x, labels = load_digits(return_X_y=True)
    return (x / 16.0).astype("float32"), labels


def small_model() -> keras.Model:
    """The same each time, on digits."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    return keras.Sequential(
        [
            keras.Input((64,)),
            dense(32, "relu", dtype="mixed_float16"),
            dense(32, "relu", dtype="mixed_float16"),
            dense(10, dtype="float32"),
        ]
    )


def draw_scale(room, label: str, used: np.ndarray, skipped: np.ndarray) -> None:
    """The scale over the steps, with a cross where one was skipped."""
    steps = np.arange(len(used))
    room.plot(steps, used, color="black", linewidth=1, drawstyle="steps-post")
    room.plot(steps[skipped], used[skipped], "x", color="black", markersize=5)
    room.set_yscale("log", base=2)
    room.set_title(f"{label}: {skipped.sum()} of {len(used)} steps skipped")


def scales() -> None:
    """The scale of three policies over the steps of one training, and what each skipped."""
    policies = {
        "Dynamic(initial_scale=2**24, growth_interval=30)": tfscale.Dynamic(
            initial_scale=2.0**24, growth_interval=30
        ),
        "the same with hysteresis=2": tfscale.Dynamic(
            initial_scale=2.0**24, growth_interval=30, hysteresis=2
        ),
        "Static(2**15)": tfscale.Static(2.0**15),
    }
    x, labels = digits()
    figure, axes = plt.subplots(len(policies), sharex=True, sharey=True, figsize=(7, 4.6))
    for (label, policy), room in zip(policies.items(), axes, strict=True):
        model = small_model()
        # XLA may keep chains of float16 operations in float32 on a CPU.
        tfscale.compile(
            model,
            tfscale.wrap(keras.optimizers.Adam(1e-2), policy),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        used, skipped = [], []
        for step in range(STEPS):
            rows = np.random.default_rng(step).choice(len(x), 32, replace=False)
            used.append(float(model.optimizer.loss_scale))
            logs = model.train_on_batch(x[rows], labels[rows], return_dict=True)
            skipped.append(logs["skipped_steps"] > sum(skipped))
        draw_scale(room, label, np.array(used), np.array(skipped))
    axes[1].set_ylabel("loss scale")
    axes[-1].set_xlabel("step; a cross is a step that was skipped")
    figure.tight_layout()
    save(figure, "scales")


def with_burst(policy: tfscale.Dynamic) -> np.ndarray:
    """The scale of each step of a training in which 12 batches in a row overflow."""
    x, labels = map(tf.constant, digits())
    model = small_model()
    variables = model.trainable_variables
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.01), policy)
    optimizer.build(variables)

    @tf.function
    def train():
        used = tf.TensorArray(tf.float32, BURST_STEPS)
        for step in tf.range(BURST_STEPS):
            rows = tf.random.stateless_uniform([32], [0, step], 0, len(x), tf.int32)
            in_burst = tf.logical_and(step >= 5000, step < 5012)
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    tf.gather(labels, rows), model(tf.gather(x, rows))
                )
                scaled = optimizer.scale_loss(tf.reduce_mean(losses))
                scaled *= tf.where(in_burst, 2.0**100, 1.0)
            used = used.write(step, optimizer.loss_scale)
            gradients = tape.gradient(scaled, [v.value for v in variables])
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return used.stack()

    return train().numpy()


def recovery() -> None:
    """What a burst of overflows does to the scale, with and without recovery."""
    figure, axes = plt.subplots(2, sharex=True, sharey=True, figsize=(7, 3.4))
    for interval, room in zip((None, 20), axes, strict=True):
        used = with_burst(tfscale.Dynamic(recovery_interval=interval))
        draw_scale(room, f"recovery_interval={interval}", used, used > [*used[1:], np.inf])
    figure.supylabel("loss scale", fontsize=9)
    axes[-1].set_xlabel("step; a cross is a step that was skipped")
    figure.tight_layout()
    save(figure, "recovery")


if __name__ == "__main__":
    with plt.rc_context(STYLE):
        formats()
        shares()
        scales()
        recovery()
