"""What became of the steps: counted while they run, read and told on request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale import _compat, counters
from tfscale.record import Record, Skips
from tfscale.warnings import warn


class Reports:
    """Mixin of `LossScaleOptimizer`: its counters, and what is said of them."""

    @property
    def skipped_steps(self: Any):
        """Scalar int64 tensor: batches left out so far, by an overflow or a non-finite loss."""
        return counters.skipped(tf.convert_to_tensor(self._counters))

    def record(self: Any) -> Record:
        """Everything that was counted so far; it waits for the device, so not in every step.

        Returns:
            A `tfscale.Record`: numbers of steps, skips and their reasons, the last changes of the
            scale, and the variables whose gradients were not finite.

        Example:

        >>> import tensorflow as tf, keras, tfscale
        >>> optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), "dynamic")
        >>> v = keras.Variable(1.0, name="v")
        >>> for factor in (1.0, float("inf")):
        ...     with tf.GradientTape() as tape:
        ...         scaled = optimizer.scale_loss(v * 1.0)
        ...     gradient = tape.gradient(scaled, v.value)
        ...     _ = optimizer.apply_gradients([(gradient * factor, v)])
        >>> print(optimizer.record())  # doctest: +NORMALIZE_WHITESPACE
        skipped 1 of 2 steps; only non-finite: v, 1 time; 1 by overflow, 1 in a row at most;
        loss scale 16384 (0 growths, 1 backoff); normal: a skip now and then is how the scale is
        found
        """
        times = [] if self._nonfinite is None else self._nonfinite.numpy()
        paths = [getattr(v, "path", v.name) for v in self._known_variables()]
        scale = float(self.loss_scale)
        return Record.of(
            self._counters.numpy(),
            nonfinite_losses=int(self._nonfinite_losses.numpy()),
            policy=self.policy_in_use(),
            scale=scale,
            is_at_floor=self._is_at_floor(scale),
            nonfinite=zip(paths, times, strict=self._nonfinite is not None),
        )

    def nonfinite_report(self: Any) -> dict[str, int]:
        """The guilty variables: path and number of steps, as in `record().nonfinite`."""
        return self.record().nonfinite

    def _is_at_floor(self: Any, scale: float) -> bool:
        if self.policy_in_use() != "dynamic":
            return False
        return scale <= float(np.float32(self._policy.min_scale)) < self._policy.initial_scale

    def count_step(self: Any, *, is_counted, finite, loss_finite, partners_finite, **scale) -> None:
        """Counts a step for `record`, unless it is counted; for the rest see `counters.advance`."""
        before = tf.convert_to_tensor(self._counters)
        flags = {"finite": finite, "loss_finite": loss_finite, "partners_finite": partners_finite}
        after = counters.advance(before, **flags, **scale)
        skip = tf.logical_and(is_counted, tf.logical_not(finite))
        self._counters.assign(tf.where(skip, before, after))
        applied = tf.logical_and(finite, partners_finite)
        bad_loss = tf.logical_and(applied, tf.logical_not(loss_finite))
        self._nonfinite_losses.assign_add(tf.cast(bad_loss, tf.int64))

    def count_applied(self: Any, was_scaled: bool) -> None:
        """Counts a step that was applied, where nothing of the scale changes with it."""
        self._counters.assign_add(counters.APPLIED)
        if was_scaled:
            self.step_counter.assign_add(1)

    def count_nonfinite(self: Any, mask, variables) -> None:
        """Counts the variables of a skipped step whose gradients were not finite, for `record`.

        Args:
            mask: bool tensor of shape `[len(variables)]`, True where the gradient is not finite.
            variables: list of variables.
        """
        place = {id(v): i for i, v in enumerate(variables)}
        order = [place.get(id(v), len(variables)) for v in self._model_variables]
        if order != list(range(len(variables))):
            mask = tf.gather(tf.concat([mask, [False]], 0), order)
        counts = tf.convert_to_tensor(self._nonfinite) + tf.cast(mask, tf.int64)
        self._nonfinite.assign(counts)

    def count_retry(self: Any) -> None:
        """Notes that the batch of the skipped step is run again, so that it is not left out."""
        self._counters.assign(counters.retry(tf.convert_to_tensor(self._counters)))

    def _tell(self: Any) -> None:
        now = self._counters.numpy()
        new, self._told = now - self._told, now
        steps, skips = int(counters.batches(new)), int(counters.skipped(new))
        scale = float(self.loss_scale)
        at_floor = self._is_at_floor(scale)
        if steps <= 0 or skips <= 0:
            return
        told = Skips(
            skips,
            steps,
            by_loss=int(new[counters.SKIPPED_LOSS]),
            ever_applied=bool(counters.batches(now) > counters.skipped(now)),
            policy=self.policy_in_use(),
            scale=scale,
            at_floor=at_floor,
            all_at_floor=bool(0 < new[counters.SKIPPED_OVERFLOW] == new[counters.AT_FLOOR]),
        )
        warn(told.advice())
        paths = _nonfinite_state_paths(self._known_variables())
        if paths:
            warn(
                "Not finite after skipped steps, so that evaluate() and predict() will not be "
                f"either: {', '.join(paths)}. Keras' own train step writes such state before the "
                "optimizer can skip. Put these variables back, from saved weights or with "
                "`variable.assign(...)`, and compile with tfscale.compile(model, optimizer, ...), "
                "which leaves them alone on a skip."
            )


def nonfinite_paths(variables: Iterable[Any]) -> list[str]:
    """Paths of those floating `variables` that hold an infinity or a NaN."""
    floating = [v for v in variables if tf.as_dtype(v.dtype).is_floating]
    return [
        v.path for v in floating if not tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(v)))
    ]


def _nonfinite_state_paths(variables: Iterable[Any]) -> list[str]:
    """Sorted paths of the state that an optimizer of `variables` does not guard and is not finite.

    That is floating variables that are not trained, such as the moving statistics of BatchNorm, in
    the layers and models that own `variables`.
    """
    wanted = {id(_compat.tf_variable(v)) for v in variables}
    state: dict[int, Any] = {}
    for layer in _compat.live_layers():
        own = _compat.own_variables(layer, deep=True)
        if any(id(_compat.tf_variable(v)) in wanted for v in own):
            state.update({id(v): v for v in _compat.state_variables(layer)})
    return sorted(nonfinite_paths(state.values()))
