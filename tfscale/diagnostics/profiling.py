"""Measure how small and how large a model's gradients are, and propose a loss scale.

float16 holds magnitudes from 2**-24 to 65504; those up to 2**-25 become zero. Multiplying the loss
by `s` multiplies every gradient by `s`. So a histogram of the base-2 exponents of all gradients
shows, for every power of two, which share would be lost and how far the largest is from overflow.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2 (arXiv:1710.03740).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import keras
import tensorflow as tf

from tfscale.diagnostics import layers, running
from tfscale.diagnostics.batches import batches
from tfscale.diagnostics.passes import Stats
from tfscale.diagnostics.profile_report import Profile
from tfscale.diagnostics.ranges import BIAS, FLOAT16_MAX, GradientRange, exponent, merge, percent
from tfscale.gradients import all_finite, values
from tfscale.policies import Dynamic, NoScaling, Static

# The share of the non-zero values that may be lost, as in the paper.
TOLERATED = 1e-3
# Powers of two to keep free below the overflow, since gradients grow and shrink in training.
MARGIN = 3
# A window of fewer powers of two is too narrow for one constant scale.
NARROW = 3
# The largest and the smallest scale at which a float16 model is measured.
HIGHEST, LOWEST = 2.0**24, 2.0**-16


def profile(
    model: keras.Model,
    data: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    steps: int = 8,
    batch_size: int = 32,
    loss: running.LossLike = None,
) -> Profile:
    """Measure the range of a model's gradients and propose a loss scale.

    `profile` measures the gradients of every trainable variable and of every layer's output, in
    training mode and in the model's dtypes. A float16 model would lose its small gradients before
    they could be measured. So its loss is scaled, by up to `2**24`, as far as the largest gradient
    allows; the scale is divided by 4 until no gradient of the batch overflows. Then the gradients
    are divided by it in float32. So the histogram shows what scale 1 would lose, down to `2**-25`
    divided by that scale, which is `measured_scale` in the result.

    A scale fits if less than 0.1 % of the non-zero gradients of the variables and of the
    activations would be lost, and if it stays a factor of 8 below the overflow. If 1 fits, or if
    the model computes in bfloat16, the proposal is `NoScaling`; if several powers of two fit,
    `Static` with the middle one; if too few fit, `Dynamic`. Gradients in float32, such as those of
    a float32 head in a float16 model, do not count, nor does the output of a float32 model, which
    should stay in float32.

    The model runs eagerly, one layer at a time (XLA keeps some float16 chains in float32, which
    loses less), and is left as it was: weights, statistics, metrics, seeds and the optimizer. A
    generator or an iterator is advanced by the batches taken from it. Embeddings are measured in
    the rows that the batch used. The loss is that of `compile`, of `compute_loss`, or `loss`. If
    the model has a custom `train_step`, that step runs eagerly, with optimizers that update
    nothing, and every loss that it differentiates with respect to variables counts.

    Args:
        model: a compiled Keras model, or any Keras model together with `loss`.
        data: what `fit` takes: arrays `(x, y)` or `(x, y, sample_weight)`, an iterable of such
            batches (`tf.data.Dataset`, `keras.utils.PyDataset`, generator), or `x` alone.
        y: targets, if `data` is `x` alone.
        sample_weight: weights, if `data` is `x` alone.
        steps: the most batches to measure.
        batch_size: size of a batch of arrays. Gradients depend on it: use that of the training.
        loss: name of a Keras loss, a `keras.losses.Loss`, or a function of (y_true, y_pred).

    Returns:
        A `Profile`.

    Raises:
        ValueError: the model has no loss, there is no batch, or no batch has finite gradients.
        TypeError: `model` is not a Keras model, or `fit` would not take `data`.

    Example:
        >>> import keras, numpy as np, tfscale
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> x, y = np.ones((64, 4), "float32"), np.zeros((64, 1), "float32")
        >>> tfscale.profile(model, x, y).proposal
        'NoScaling()'
    """
    loss = running.resolve_loss(model, loss)
    if loss is None and not model.compiled:
        raise ValueError(
            f"Model {model.name!r} is not compiled, so there is no loss to differentiate: call "
            "model.compile(...) first, or pass `loss=`, such as loss='mse'."
        )
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1. Received: steps={steps}")
    variables: dict[int | str, GradientRange] = {}
    activations: dict[int | str, GradientRange] = {}
    scales: list[float] = []
    skipped, dtype = 0, "float32"
    own_step = running.has_own_step(model, loss)
    for batch in itertools.islice(batches(data, y, sample_weight, batch_size), steps):
        if own_step:
            recorded = running.run_step(model, batch)
        else:
            recorded = running.run_eagerly(model, batch, loss)
        if not recorded.losses:
            raise ValueError(
                f"The loss of {model.name!r} needs targets: pass `(x, y)` or `y=`. Received none."
            )
        dtype = recorded.compute_dtype
        sources = _sources(model, recorded)
        scale, gradients = _scaled_gradients(recorded, [s.value for s in sources], scales)
        if not gradients:
            skipped += 1
            continue
        scales.append(scale)
        for source, gradient in zip(sources, gradients, strict=True):
            if gradient is not None:
                table = variables if source.is_variable else activations
                found = GradientRange.of(source.name, values(gradient), scale, source.counted)
                table[source.key] = table[source.key] + found if source.key in table else found
    if not scales:
        raise ValueError(
            f"None of the {skipped} batches has a finite loss and finite gradients: "
            "tfscale.find_nonfinite(model, batch) names the layer where that begins."
            if skipped
            else "`data` holds no batch. Create an iterator again once it is exhausted."
        )
    rows = [tuple(table.values()) for table in (variables, activations)]
    policy, reason = _propose(merge("variables", rows[0]), merge("", rows[1]), dtype)
    return Profile(
        model.name, len(scales), skipped, dtype, min(scales), rows[0], rows[1], policy, reason
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Source:
    """Something to differentiate with respect to: a variable, or what a layer returned."""

    value: keras.Variable | tf.Tensor
    is_variable: bool
    key: int | str
    name: str
    counted: bool


def _sources(model: keras.Model, recorded: layers.ForwardPass) -> list[_Source]:
    sources = []
    owners = recorded.owners()
    half = recorded.compute_dtype == "float16"
    for v in model.trainable_variables:
        call = owners.get(id(v))
        name = f"{call.name}/{v.name}" if call else v.path
        counted = not half or (call is not None and call.compute_dtype == "float16")
        sources.append(_Source(v, True, id(v), name, counted))
    seen = set()
    model_outputs = {id(t) for t in recorded.outputs}
    for event in recorded.events:
        name = event.call.name
        for t in event.tensors if event.kind == "output" else ():
            if id(t) not in seen:  # a layer may return its input, or what a layer in it returns
                seen.add(id(t))
                counted = t.dtype == tf.float16 if half else id(t) not in model_outputs
                sources.append(_Source(t, False, name, name, counted))
    return sources


def _scaled_gradients(
    recorded: layers.ForwardPass, sources: list[keras.Variable | tf.Tensor], scales: list[float]
) -> tuple[float, list[Any]]:
    """The highest scale found at which all gradients are finite, and those gradients, if any.

    `scales` are those of earlier batches.
    """
    if not bool(tf.math.is_finite(recorded.loss)):
        return 1.0, []
    half = recorded.compute_dtype == "float16"
    scale = scales[-1] if scales else 1.0
    gradients = recorded.gradients(sources, scale)
    if half and not scales and all_finite(gradients):
        # As high as the gradients allow that are not zero at scale 1. All may be zero.
        present = [values(g) for g in gradients if g is not None]
        largest = max((Stats.of(g).largest for g in present), default=0.0)
        scale = min(2.0 ** exponent(FLOAT16_MAX / largest), HIGHEST) if largest else HIGHEST
        gradients = recorded.gradients(sources, scale)
    while not all_finite(gradients):
        if not half or scale < LOWEST:
            return scale, []
        scale /= 4
        gradients = recorded.gradients(sources, scale)
    return scale, gradients


def _propose(
    variables: GradientRange, activations: GradientRange, dtype: str
) -> tuple[NoScaling | Static | Dynamic, str]:
    """The policy for these ranges, and the reason."""
    groups = [group for group in (variables, activations) if group.nonzero]
    if dtype == "bfloat16":
        return NoScaling(), "bfloat16 has the exponent range of float32: nothing is out of reach."
    if not groups:
        return NoScaling(), (
            "Every gradient is exactly zero, which no scale can fix: is everything frozen, or the "
            "loss constant?"
        )
    highest = min(group.headroom for group in groups if group.headroom is not None) - MARGIN
    lowest = -BIAS
    while any(group.lost(2.0**lowest) >= TOLERATED for group in groups):
        lowest += 1
    why = (
        f"{'If computed in float16: at' if dtype == 'float32' else 'At'} scale 1 float16 loses "
        f"{percent(variables.lost())} of the non-zero gradients of the variables and "
        f"{percent(activations.lost())} of those of the activations, and the largest is "
        f"{max(group.largest for group in groups):.2g}"
    )
    if lowest <= 0 <= highest:
        return NoScaling(), f"{why}: a factor of 2**{highest + MARGIN} from the overflow."
    window = (
        f"2**{lowest} is the smallest scale that loses less than {percent(TOLERATED)}, "
        f"2**{highest} the largest that keeps a factor of {2**MARGIN} below the overflow"
    )
    if highest - lowest >= NARROW:
        middle = (lowest + highest) // 2
        return Static(2.0**middle), f"{why}. {window}; 2**{middle} lies in the middle."
    top = 2.0 ** min(highest, 24)
    policy = Dynamic(initial_scale=top, min_scale=min(1.0, top))
    return policy, f"{why}. {window}: too narrow a window for one constant scale."
