"""Linked optimizers, as for a GAN: an overflow in one skips the step of all."""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from tfscale.optimizer import LossScaleOptimizer
from tfscale.step import apply_steps


class Link:
    """Optimizers that step together; made by `link`."""

    def __init__(self, optimizers: tuple[LossScaleOptimizer, ...]) -> None:
        self.optimizers = optimizers

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self,
        *grads_and_vars: Iterable[tuple[tf.Tensor | tf.IndexedSlices | None, keras.Variable]],
        unscaled: bool | None = None,
    ) -> tf.Tensor:
        """Applies the gradients of all linked optimizers, or skips all of them.

        Args:
            *grads_and_vars: for each optimizer, in the order given to `link`, an iterable of pairs
                of a gradient of its scaled loss and a variable.
            unscaled: as in `LossScaleOptimizer.apply_gradients`, for all optimizers.

        Returns:
            Scalar bool tensor: whether the step was applied.

        Raises:
            ValueError: not one argument for each linked optimizer, or an empty one.
        """
        if len(grads_and_vars) != len(self.optimizers):
            raise ValueError(
                f"apply_gradients() needs one list of pairs for each of the {len(self.optimizers)} "
                f"linked optimizers. Received: {len(grads_and_vars)} arguments."
            )
        pairs = [list(p) for p in grads_and_vars]
        if not all(pairs):
            raise ValueError("Each linked optimizer needs gradients. Received: an empty list.")
        steps = [
            optimizer.make_step([g for g, _ in p], [v for _, v in p], unscaled)
            for optimizer, p in zip(self.optimizers, pairs, strict=True)
        ]
        return apply_steps(steps)


def link(*optimizers: LossScaleOptimizer) -> Link:
    """Links optimizers, so that an overflow in one of them skips the step of all.

    Each optimizer keeps its own scale, and only the one that overflowed lowers it. Without a link,
    one network of a pair trains on while the other skips its steps.

    Args:
        *optimizers: two or more wrapped optimizers, as made by `tfscale.wrap`.

    Returns:
        A `Link`. Call its `apply_gradients` instead of those of the optimizers.

    Raises:
        TypeError: an argument is not a tfscale optimizer.
        ValueError: fewer than two optimizers, or one of them twice.

    Example:
    >>> import tensorflow as tf, keras, tfscale
    >>> a = tfscale.wrap(keras.optimizers.SGD(1.0), 8.0)
    >>> b = tfscale.wrap(keras.optimizers.SGD(1.0), 8.0)
    >>> v, w = keras.Variable(1.0), keras.Variable(1.0)
    >>> with tf.GradientTape(persistent=True) as tape:
    ...     loss_a, loss_b = a.scale_loss(v * 2.0), b.scale_loss(w * float("inf"))
    >>> pairs_a = [(tape.gradient(loss_a, v.value), v)]
    >>> pairs_b = [(tape.gradient(loss_b, w.value), w)]
    >>> bool(tfscale.link(a, b).apply_gradients(pairs_a, pairs_b))
    False
    >>> float(v)
    1.0
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, LossScaleOptimizer):
            raise TypeError(
                "link() needs tfscale optimizers: write tfscale.link(tfscale.wrap(a), "
                f"tfscale.wrap(b)). Received: {optimizer!r}"
            )
    if len({id(o) for o in optimizers}) < max(2, len(optimizers)):
        raise ValueError(f"link() needs two or more different optimizers. Received: {optimizers}")
    return Link(optimizers)
