"""One pass over a list of gradients: checks whether they are finite, and unscales them.

A gradient is a dense tensor, an `IndexedSlices` (only its values are checked; it is never made
dense) or None, in any floating or complex dtype.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfscale import _compat

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices

_BITS = 31  # flags in one int32; its sign is that of the loss
_LOSS = -(2**31)


class FiniteCheck(NamedTuple):
    """What `check_finite` found.

    Attributes:
        finite: scalar bool tensor, True if every element of every gradient is finite.
        nonfinite_mask: function without arguments that returns a bool tensor with an element for
            each gradient, True if it is not finite. Outside of XLA it checks again, so call it in
            the branch of a bad step.
        loss_finite: the argument of `check_finite`, passed through the check.
    """

    finite: Any
    nonfinite_mask: Any
    loss_finite: Any

    def finite_ones(self, number: int) -> tf.Tensor:
        """Bool tensor of shape `[number]`, in a graph: which of the gradients are finite."""
        if _compat.in_xla_context():
            return ~self.nonfinite_mask()
        return ~tf.cond(self.finite, lambda: tf.zeros([number], tf.bool), self.nonfinite_mask)


def values(gradient: Gradient) -> tf.Tensor:
    """The dense tensor that holds the numbers of `gradient`."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def all_finite(gradients: Sequence[Gradient | None]) -> tf.Tensor:
    """Whether every element of every gradient is finite.

    Args:
        gradients: list of dense tensors, `IndexedSlices` and None, of any floating or complex
            dtype and any shape.

    Returns:
        Scalar bool tensor; True for an empty list.

    Example:
    >>> import tensorflow as tf
    >>> from tfscale import gradients
    >>> bool(gradients.all_finite([tf.ones([3]), None, tf.constant([1.0, float("inf")])]))
    False
    """
    return check_finite(gradients).finite


def check_finite(
    gradients: Sequence[Gradient | None], loss_finite: tf.Tensor | None = None
) -> FiniteCheck:
    """Whether every element of every gradient is finite, and which gradient is not.

    Gradients of one shape are checked together, with one reduction instead of one for each
    variable. Under XLA each gradient has its own bit, and the reduction is a bitwise or, which
    shows at no cost which gradient is not finite. Elsewhere they are summed: an infinity or a NaN
    survives every addition, so if the sum is finite, all of them are. If a sum is not finite, each
    gradient is checked.

    Args:
        gradients: as for `all_finite`.
        loss_finite: scalar bool tensor, or None. It does not change the answer: see
            `_check_finite_xla`.

    Returns:
        `FiniteCheck`.
    """
    parts = [_real_parts(g) for g in gradients]
    tensors = [part for p in parts for part in p]
    if not tensors:
        finite, mask = tf.constant(True), lambda: tf.zeros([len(gradients)], tf.bool)
    elif all(tensor.shape.rank == 0 for tensor in tensors):
        # For scalars, neither a sum nor a branch would pay off.
        finite, mask = _all(list(map(tf.math.is_finite, tensors))), lambda: _nonfinite_mask(parts)
    elif _compat.in_xla_context():
        return _check_finite_xla(parts, loss_finite)
    else:
        finite, mask = _finite_sums(tensors), lambda: _nonfinite_mask(parts)
    return FiniteCheck(finite, mask, loss_finite)


def unscale(gradient: Gradient | None, scale: tf.Tensor | None) -> Any:
    """`gradient / scale` in at least float32; None stays None, slices stay slices.

    Args:
        gradient: dense tensor, `IndexedSlices` or None.
        scale: scalar float32 tensor; None leaves the gradient as it is.

    Returns:
        float32 for float16, bfloat16 and float32, else the dtype of `gradient`.
    """

    def divided(tensor: tf.Tensor) -> tf.Tensor:
        tensor = upcast_half(tensor)
        return tensor / tf.cast(scale, tensor.dtype)

    return gradient if scale is None else map_values(divided, gradient)


def with_nan(gradient: Gradient | None) -> Any:
    """`gradient` with NaN for each element that is not finite.

    Clipping turns an infinity into a finite number, but keeps NaN.
    """

    def marked(tensor: tf.Tensor) -> tf.Tensor:
        finite = functools.reduce(tf.logical_and, map(tf.math.is_finite, _real_parts(tensor)))
        return tf.where(finite, tensor, tf.constant(float("nan"), tensor.dtype))

    return map_values(marked, gradient)


def without_rows_unless(keep: tf.Tensor, gradient: Gradient | None) -> Any:
    """An `IndexedSlices` with zero values unless `keep`; anything else unchanged.

    Under XLA it is unchanged too: there the number of rows depends on none of the values, and XLA
    cannot infer shapes from a result of the check.

    Args:
        keep: scalar bool tensor.
        gradient: dense tensor, `IndexedSlices` or None.
    """
    if not isinstance(gradient, tf.IndexedSlices) or _compat.in_xla_context():
        return gradient
    nothing = tf.zeros([], gradient.dtype)
    return map_values(lambda values: tf.where(keep, values, nothing), gradient)


def upcast_half(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` in float32 if it is in half precision, else unchanged."""
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor


def cast(gradient: Gradient | None, dtype: tf.DType) -> Any:
    """`gradient` in `dtype`; None stays None, slices stay slices."""
    return map_values(lambda tensor: tf.cast(tensor, dtype), gradient)


def in_one_graph(gradients: list[Any]) -> list:
    """The gradients as tensors of one graph, as Keras needs; some may come from an outer graph."""
    tensors = [values(g) for g in gradients if g is not None]
    graphs = {id(t.graph) for t in tensors if hasattr(t, "graph")}  # eager ones have none
    if len(graphs) < 2:
        return gradients
    return [None if g is None else tf.identity(g) for g in gradients]


def map_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Gradient | None) -> Any:
    """Applies `function` to the values; None stays None, slices stay slices."""
    if gradient is None:
        return None
    numbers = function(values(gradient))
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(numbers, gradient.indices, gradient.dense_shape)
    return numbers


def _real_parts(gradient: Gradient | None) -> list:
    """The real tensors that hold the numbers of `gradient`: none, one, or two if it is complex."""
    if gradient is None:
        return []
    tensor = values(gradient)
    return [tf.math.real(tensor), tf.math.imag(tensor)] if tensor.dtype.is_complex else [tensor]


def _finite(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(tensor))


def _finite_sums(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether all tensors are finite, judged from sums of those of one shape."""
    # Half the squared norm: one kernel that reads each sum once.
    sums = [tf.add_n(list(map(upcast_half, group))) for group in _groups(tensors)]
    norms = [tf.cast(tf.nn.l2_loss(total), tf.float32) for total in sums]
    finite = tf.math.is_finite(norms[0] if len(norms) == 1 else tf.add_n(norms))
    # Finite numbers above 1e19 overflow a sum of squares: that rare path checks again, exactly.
    exactly = _compat.outlined(lambda: _all(list(map(_finite, tensors))))
    return tf.cond(finite, lambda: tf.constant(True), exactly)


def _all(flags: Sequence[tf.Tensor]) -> tf.Tensor:
    return flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags))


def _groups(tensors: Sequence[tf.Tensor]) -> Iterable[list[tf.Tensor]]:
    """The tensors in lists of equal shape and dtype."""
    groups = collections.defaultdict(list)
    for tensor in tensors:
        shape = tuple(tensor.shape) if tensor.shape.is_fully_defined() else id(tensor)
        groups[shape, tensor.dtype].append(tensor)
    return groups.values()


def _nonfinite_mask(parts: Sequence[list[tf.Tensor]]) -> tf.Tensor:
    """Bool tensor of shape `[len(parts)]`: which gradient is not finite, from their real parts."""
    if _compat.in_xla_context():
        return _check_finite_xla(parts).nonfinite_mask()
    flags = [_all(list(map(_finite, p))) if p else tf.constant(True) for p in parts]
    return tf.logical_not(tf.stack(flags))


def _check_finite_xla(
    parts: Sequence[list[tf.Tensor]], loss_finite: tf.Tensor | None = None
) -> FiniteCheck:
    """`check_finite` under XLA: one reduction for 31 tensors of a shape, no arithmetic.

    The flag of the loss goes through the reduction of the gradient that is known first, that of
    the last layer. XLA orders a program by the memory that it needs. Where the loss may wait, an
    order that computes all weight gradients last, from inputs that have left the cache, can look
    the cheaper one (a transformer took 1.07 instead of 1.03 of an unscaled step).
    """
    tensors = [part for p in parts for part in p]
    carrier = None
    if loss_finite is not None:  # the last tensor that is sure to have an element
        carrier = next((t for t in reversed(tensors) if t.shape.num_elements()), None)
    found, flags = [], []
    order: list[int] = []
    for group in _groups(tensors):
        for start in range(0, len(group), _BITS):
            chunk = group[start : start + _BITS]
            masks = [1 << i for i in range(len(chunk))]
            bits = [tf.where(tf.math.is_finite(t), 0, m) for t, m in zip(chunk, masks, strict=True)]
            if any(tensor is carrier for tensor in chunk):
                bits.append(tf.where(loss_finite, 0, _LOSS))
            found.append(_compat.xla_reduce_or(functools.reduce(tf.bitwise.bitwise_or, bits)))
            flags.append(tf.not_equal(tf.bitwise.bitwise_and(found[-1], masks), 0))
            order.extend(map(id, chunk))
    everything = tf.stack(found)
    if carrier is not None:
        loss_finite = tf.reduce_all(everything >= 0)
        everything = tf.bitwise.bitwise_and(everything, ~_LOSS)

    def nonfinite_mask() -> tf.Tensor:
        place = {tensor: i for i, tensor in enumerate(order)}
        # A complex gradient has two parts, None has none: the last flag stands for a finite part.
        none = len(order)
        places = [[place[id(part)] for part in p] + [none] * (2 - len(p)) for p in parts]
        return tf.reduce_any(tf.gather(tf.concat([*flags, [False]], 0), places), axis=1)

    return FiniteCheck(tf.reduce_all(tf.equal(everything, 0)), nonfinite_mask, loss_finite)
