"""Draws what TensorBoard shows of a short run: `python docs/img/tensorboard.py`.

A float16 model with small gradients starts at scale 1; in the second of three epochs a few batches
overflow. All of the picture is read back from the event file that `LossScaleMonitor` wrote.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile

import keras
import matplotlib
import numpy as np
import tensorflow as tf
from matplotlib import pyplot as plt

import tfscale

PICTURE = pathlib.Path(__file__).with_suffix(".png")
FREQ = 8  # batches
BATCH = 32


def train(folder: str) -> None:
    """Writes an event file: 360 steps; the gradients of 200 to 203 overflow."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((16,)),
            *(keras.layers.Dense(64, activation="tanh") for _ in range(4)),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    policy = tfscale.Dynamic(initial_scale=1.0, growth_interval=16)
    optimizer = tfscale.wrap(keras.optimizers.Adam(1e-3), policy)
    tfscale.compile(model, optimizer, loss="mse", loss_weights=2.0**-18)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120 * BATCH, 16)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    probe = x[:BATCH], y[:BATCH]
    bad = y.copy()
    bad[80 * BATCH : 84 * BATCH] *= 1e12
    monitor = tfscale.LossScaleMonitor(FREQ, data=probe, log_dir=folder)
    for targets in (y, bad, y):
        model.fit(x, targets, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[monitor])


def read(folder: str) -> dict[str, dict[int, np.ndarray]]:
    """From a tag to its tensors over the steps."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for path in sorted(pathlib.Path(folder).glob("events*")):
        for raw in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(raw.numpy())
            for value in event.summary.value:
                tensor = tf.make_ndarray(value.tensor)
                found.setdefault(value.tag.removeprefix("tfscale/"), {})[event.step] = tensor
    return found


def draw(found: dict[str, dict[int, np.ndarray]], path: pathlib.Path) -> None:
    matplotlib.use("Agg")
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), layout="constrained", sharex=True)
    steps = {tag: list(values) for tag, values in found.items()}
    panels = (
        ("loss_scale", "tfscale/loss_scale", axes[0, 0]),
        ("skipped_steps", "tfscale/skipped_steps", axes[0, 1]),
        ("underflow_share", "tfscale/underflow_share", axes[1, 0]),
    )
    for tag, title, ax in panels:
        values = np.array([float(v) for v in found[tag].values()])
        if tag == "underflow_share":
            ax.plot(steps[tag], 100 * values, color="tab:orange")
            ax.set_ylabel("lost in float16 (% of the gradients)")
            ax.set_ylim(bottom=0)
        else:
            ax.step(steps[tag], values, where="post", color="tab:blue")
        ax.set_title(title, fontsize=10, loc="left")
        ax.grid(alpha=0.3)
    axes[0, 0].set_yscale("log", base=2)
    axes[0, 0].set_ylabel("loss scale")
    axes[0, 1].set_ylabel("batches left out so far")
    axes[1, 0].set_xlabel("step")

    ax = axes[1, 1]
    histograms = found["gradient_exponents"]
    low = int(min(bins[0, 0] for bins in histograms.values()))
    low = max(low, -45)
    high = int(max(bins[-1, 1] for bins in histograms.values()))
    shares = np.zeros((high - low, len(histograms)))
    for column, bins in enumerate(histograms.values()):
        for left, _, count in bins:
            shares[max(int(left), low) - low, column] += 100 * count / bins[:, 2].sum()
    at = steps["gradient_exponents"]
    edges = [*at, 2 * at[-1] - at[-2]]
    image = ax.pcolormesh(edges, np.arange(low, high + 1), shares, cmap="Greys", rasterized=True)
    limit = [-25 - np.log2(float(v)) for v in found["loss_scale"].values()]
    ax.step([*at, edges[-1]], [*limit, limit[-1]], where="post", color="tab:red", linewidth=1.3)
    ax.text(at[1], low + 0.5, "below the line: lost at this scale", color="tab:red", fontsize=8)
    ax.set_title("tfscale/gradient_exponents", fontsize=10, loc="left")
    ax.set_ylabel("exponent of the gradient, $\\log_2|g|$")
    ax.set_xlabel("step")
    figure.colorbar(image, ax=ax, label="share of the gradients (%)")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(path: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
        draw(read(folder), path)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
