"""Find what is dangerous in half precision in a model, without running it.

`lint` inspects the layers (their dtypes, variables and epsilons), the operations of the forward
pass (`lint_graph`), and the arguments of `compile`. A rule reports only certain harm: a model that
follows Keras' mixed precision guide has no finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tfscale import _compat
from tfscale.diagnostics import lint_graph
from tfscale.diagnostics.findings import Finding, Findings, summarize, underflows_float16
from tfscale.model_optimizers import names_in_step, optimizers_of, own_train_step
from tfscale.policies import Auto, NoScaling

_SCALES = {"scale_loss", "get_scaled_loss", "minimize", "train_step"}
_UNSCALES = {"unscale", "get_unscaled_gradients"}
_CLIPS = {"clip_by_global_norm", "clip_by_norm", "clip_by_value", "global_norm"}


def lint(model: keras.Model) -> Findings:
    """Find set-ups that hurt in float16 or bfloat16.

    Layers: float16 and bfloat16 in one model; float16 variables without float32 masters.

    Operations of the forward pass, if the shapes of the inputs are known (a functional or
    sequential model, or one that was called once): outputs or a final softmax in float16; sums and
    means over more elements than float16 can count; an epsilon that float16 rounds to zero beneath
    a division, root or logarithm, or a limit that it rounds to infinity; large layers in float32 or
    float64 between narrower ones. `lint` does not see inside loops. If the shapes are unknown, it
    checks the attribute `epsilon` of custom layers instead.

    Compiled models: float16 without any loss scaling; loss scaling without float16; a loss in
    float16; an optimizer's epsilon that float16 rounds to zero; settings on Keras' wrapper, which
    only its inner optimizer reads; scaling twice; and a custom `train_step` that does not scale its
    loss, or clips gradients that are still scaled. `lint` cannot see a training loop outside of the
    model.

    Args:
        model: a Keras model, compiled or not. It is neither run nor changed.

    Returns:
        `Findings`: a tuple of `Finding`, empty if all is well. Its `str` is a report.

    Raises:
        TypeError: `model` is not a Keras model.

    Example:
        >>> import keras, tfscale
        >>> inputs = keras.Input((4,))
        >>> outputs = keras.layers.Dense(3, "softmax", dtype="mixed_float16")(inputs)
        >>> [finding.rule for finding in tfscale.lint(keras.Model(inputs, outputs))]
        ['float16-output']
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: {model!r}")
    layers = list(_layers(model, "", set()))
    traced = lint_graph.trace(model)
    optimizers = optimizers_of(model)
    found = [
        *_mixed_halves(layers),
        *_float16_variables(model, [*optimizers.values()]),
        # The operations show which epsilon is used in float16; an attribute may be unused.
        *(lint_graph.check(traced) if traced else _epsilons(layers)),
    ]
    if model.compiled:
        if traced:
            float16 = traced.uses_float16
        else:  # the dtype of a layer that only holds others says nothing about those
            leaves = (layer for _, layer in layers if not _compat.sub_layers(layer))
            float16 = any(layer.compute_dtype == "float16" for layer in leaves)
        found += _losses(model)
        for name, optimizer in optimizers.items():
            where = f"optimizer {(optimizer.name if len(optimizers) == 1 else name)!r}"
            found += [
                *_scaling(optimizer, where, float16),
                *_wrapped_settings(optimizer, name),
                *_optimizer_epsilon(model, optimizer),
            ]
        if float16:
            found += _train_step(model, [*optimizers.values()])
    # One layer may cause a finding in several operations or calls.
    once = {(finding.rule, finding.where): finding for finding in reversed(found)}
    return Findings(reversed(once.values()), model=model.name, traced=traced is not None)


def _layers(layer: keras.Layer, path: str, seen: set[int]) -> Iterator[tuple[str, keras.Layer]]:
    """The layer itself and every layer in it, once, each with its path."""
    if id(layer) not in seen:
        seen.add(id(layer))
        yield path or layer.name, layer
        for part in _compat.sub_layers(layer, deep=False):
            yield from _layers(part, f"{path}/{part.name}" if path else part.name, seen)


def _mixed_halves(layers: list[tuple[str, keras.Layer]]) -> Iterator[Finding]:
    by_dtype: dict[str, list[str]] = {"float16": [], "bfloat16": []}
    for path, layer in layers:
        if layer.compute_dtype in by_dtype and layer.trainable_variables:
            by_dtype[layer.compute_dtype].append(path)
    if all(by_dtype.values()):
        fewer, more = sorted(by_dtype, key=lambda dtype: len(by_dtype[dtype]))
        yield Finding(
            "mixed-halves",
            summarize(by_dtype[fewer]),
            f"computes in {fewer}, other layers in {more}: every tensor between them loses the "
            "bits of the one and the range of the other.",
            f'make these layers with dtype="mixed_{more}"',
        )


def _float16_variables(model: keras.Model, optimizers: list[Any]) -> Iterator[Finding]:
    paths = [v.path for v in model.trainable_variables if v.dtype == "float16"]
    if paths and not any(map(_has_masters, optimizers)):
        yield Finding(
            "float16-variables",
            summarize(paths),
            "is kept in float16: an update smaller than 1/2048 of the weight is rounded away, and "
            "training silently stalls.",
            'keras.config.set_dtype_policy("mixed_float16")  # instead of "float16"',
        )


def _has_masters(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it has float32 copies of float16 variables, or will have once it is built."""
    if getattr(getattr(optimizer, "inner_optimizer", None), "built", False):
        return bool(getattr(optimizer, "masters", None))
    return bool(getattr(optimizer, "master_weights", False))


def _epsilons(layers: list[tuple[str, keras.Layer]]) -> Iterator[Finding]:
    for path, layer in layers:
        # Keras' own normalizations compute in float32 inside, whatever their policy.
        if layer.compute_dtype != "float16" or type(layer).__module__.startswith("keras."):
            continue
        for name in ("epsilon", "eps"):
            value = getattr(layer, name, None)
            if underflows_float16(value):
                yield Finding(
                    "epsilon",
                    path,
                    f"{name}={value:g} is zero in float16, so it guards against nothing.",
                    f"{type(layer).__name__}({name}=1e-3)  # at least 6e-8, or dtype='float32'",
                )


def _losses(model: keras.Model) -> Iterator[Finding]:
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        dtype = getattr(loss, "dtype", None) or keras.config.floatx()
        if loss is not None and dtype == "float16":
            name = loss if isinstance(loss, str) else getattr(loss, "name", type(loss).__name__)
            yield Finding(
                "float16-loss",
                f"loss {name!r}",
                "is computed in float16: its sum overflows at 65504, and so does a loss scale of "
                "65536.",
                'keras.config.set_floatx("float32")  # or the loss with dtype="float32"',
            )


def _scaling(optimizer: keras.optimizers.Optimizer, where: str, float16: bool) -> Iterator[Finding]:
    wrapped = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if float16 and not wrapped and not getattr(optimizer, "loss_scale_factor", None):
        yield Finding(
            "no-loss-scaling",
            where,
            "does not scale the loss, and layers compute in float16: gradients below 3e-8 vanish.",
            "model.compile(optimizer=tfscale.wrap(optimizer), ...)",
        )
    # Auto does not scale such a model either.
    scales = not isinstance(getattr(optimizer, "policy", None), Auto | NoScaling)
    if wrapped and not float16 and scales:
        yield Finding(
            "needless-loss-scaling",
            where,
            "scales the loss, and no layer computes in float16: bfloat16 and float32 have the "
            "range to do without.",
            "model.compile(optimizer=tfscale.wrap(optimizer), ...)  # decides by the dtypes",
        )
    if wrapped and isinstance(optimizer.inner_optimizer, keras.optimizers.LossScaleOptimizer):
        yield Finding(
            "scaled-twice",
            where,
            "wraps an optimizer that scales the loss itself: the gradients are divided twice.",
            "model.compile(optimizer=optimizer.inner_optimizer, ...)",
        )


def _wrapped_settings(optimizer: keras.optimizers.Optimizer, attribute: str) -> Iterator[Finding]:
    # tfscale's own wrapper passes these settings on.
    if type(optimizer) is not keras.optimizers.LossScaleOptimizer:
        return
    for name, default in _compat.UNREAD_BY_WRAPPER.items():
        value = getattr(optimizer, name, default)
        if value != default:
            yield Finding(
                "setting-on-wrapper",
                f"optimizer {optimizer.name!r}",
                f"{name}={value!r} is set on the wrapper, which never reads it.",
                f"model.{attribute}.inner_optimizer.{name} = {value!r}",
            )
    factor = getattr(optimizer.inner_optimizer, "loss_scale_factor", None)
    if factor:
        yield Finding(
            "scaled-twice",
            f"optimizer {optimizer.inner_optimizer.name!r}",
            f"loss_scale_factor={factor!r} divides gradients that the wrapper has divided already.",
            f"model.{attribute}.inner_optimizer.loss_scale_factor = None",
        )


def _optimizer_epsilon(
    model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> Iterator[Finding]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    value = getattr(inner, "epsilon", None)
    in_float16 = any(v.dtype == "float16" for v in model.trainable_variables)
    if in_float16 and underflows_float16(value) and not _has_masters(optimizer):
        yield Finding(
            "epsilon",
            f"optimizer {inner.name!r}",
            f"epsilon={value:g} is zero in the float16 of the variables: updates divide by zero.",
            f"{type(inner).__name__}(epsilon=1e-4)  # or float32 variables",
        )


def _train_step(model: keras.Model, optimizers: list[Any]) -> Iterator[Finding]:
    scaling = [o for o in optimizers if isinstance(o, keras.optimizers.LossScaleOptimizer)]
    if own_train_step(model) is None or not scaling:
        return
    names = names_in_step(model)
    applies = names & {"apply_gradients", "apply"}
    where = f"{type(model).__name__}.train_step"
    if applies and not names & _SCALES:
        # Keras' wrapper always divides, and so does tfscale's as a drop-in for it.
        divides = any(getattr(optimizer, "assumes_scaled", True) for optimizer in scaling)
        harm = (
            "the optimizer still divides them by the loss scale, so the model hardly learns."
            if divides
            else "they are applied as they are, and small float16 gradients are lost."
        )
        yield Finding(
            "loss-not-scaled",
            where,
            f"applies gradients of a loss that was never scaled: {harm}",
            "loss = self.optimizer.scale_loss(loss)  # before tape.gradient",
        )
    elif applies and names & _CLIPS and not names & _UNSCALES:
        yield Finding(
            "clips-scaled-gradients",
            where,
            "clips gradients that are still multiplied by the loss scale: the threshold means "
            "something else whenever the scale changes.",
            "gradients = self.optimizer.unscale(gradients)  # tfscale's, before clipping",
        )
