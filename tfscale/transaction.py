"""The train step as one transaction: a skip undoes the whole step.

An optimizer alone protects only its own variables. When it skips a step, the forward pass has
already written BatchNorm's moving statistics, and the loss still enters the epoch's mean.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfscale import _compat, gradients, policies, replicas
from tfscale.optimizer import LossScaleOptimizer


@tf.autograph.experimental.do_not_convert
def train_step(model: keras.Model, data: Any, retry: int = 0) -> dict[str, Any]:
    """One training step that is applied or skipped as a whole.

    It runs the forward pass, scales the loss and computes the gradients. If they are not finite, it
    restores everything: variables and optimizer, BatchNorm's statistics and all other non-trainable
    floating state, loss tracker and metrics. Only seed generators, the scale and tfscale's counters
    change. A non-finite loss does not lower the scale. If its gradients are finite nevertheless,
    the step is applied, but the batch does not count in the epoch's loss and metrics.

    Args:
        model: a compiled `keras.Model` whose optimizer is a `tfscale.LossScaleOptimizer`.
        data: a batch: `x`, `(x, y)` or `(x, y, sample_weight)`.
        retry: how often the batch runs again, at the lowered scale, after an overflow.

    Returns:
        The logs of Keras' train step, and `loss_scale` and `skipped_steps` (scalar tensors).

    Raises:
        TypeError: the model's optimizer is not tfscale's.
        ValueError: the model has no loss.

    Example:
    >>> import keras, tfscale
    >>> class MyModel(keras.Model):
    ...     def train_step(self, data):
    ...         return {**tfscale.train_step(self, data), "mine": 1.0}
    """
    check_retry(retry)
    optimizer = model.optimizer
    if not isinstance(optimizer, LossScaleOptimizer):
        raise TypeError(
            "train_step() needs a model compiled with a tfscale optimizer. Write "
            "tfscale.compile(model, optimizer, ...) or "
            "model.compile(optimizer=tfscale.wrap(optimizer), ...). "
            f"Received: optimizer={optimizer!r}"
        )
    if tf.executing_eagerly():
        # A graph is traced again once all variables exist. Here they must exist first, or there
        # would be nothing to restore.
        _compat.build(model, data)
    logs, overflowed = _attempt(model, data)
    if retry and isinstance(optimizer.policy, policies.Dynamic):
        logs = _again(model, data, retry, logs, overflowed)
    return {
        **logs,
        "loss_scale": optimizer.loss_scale,
        "skipped_steps": _compat.for_logs(optimizer.skipped_steps),
    }


def _attempt(model: keras.Model, data: Any) -> tuple[dict[str, Any], tf.Tensor]:
    """Runs the batch once; returns the logs and whether it overflowed with a finite loss."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    optimizer = model.optimizer
    tracker = _compat.loss_tracker(model)
    own = set(map(id, tracker.variables))
    state = _with_values(_compat.state_variables(model))
    # Before the loss is computed, which updates the metrics of single losses.
    metrics = _with_values(v for v in _compat.metric_variables(model) if id(v) not in own)
    with tf.GradientTape() as tape:
        y_pred = _compat.forward(model, x)
        loss = _compat.compute_loss(model, x, y, y_pred, sample_weight)
        scaled = optimizer.scale_loss(loss)
    finite = gradients.all_finite([loss])
    weights = model.trainable_weights
    if weights:
        pairs = zip(tape.gradient(scaled, weights), weights, strict=True)
        applied = optimizer.apply_or_skip(pairs)
    else:
        warnings.warn("The model does not have any trainable weights.")
        applied = finite
    _restore_unless(applied, state)
    # A non-finite loss must not enter the epoch's mean, even if its step is applied.
    counts = tf.logical_and(applied, finite)
    batch = tf.shape(next(part for part in tf.nest.flatten(x) if part is not None))[0]
    loss = _compat.undo_replica_mean(loss)
    tracker.update_state(
        tf.where(counts, loss, tf.zeros_like(loss)), sample_weight=tf.where(counts, batch, 0)
    )
    logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    # Before any batch counts, the mean would be 0, which looks like a perfect loss. Then the logs
    # show this batch.
    empty = tf.equal(tf.convert_to_tensor(tracker.count), 0)
    if metrics:
        _restore_unless(counts, metrics)
        as_it_is, clean = tf.logical_or(counts, empty), model.get_metrics_result()
        logs = {
            name: tf.where(as_it_is, value, clean[name]) if name in clean else value
            for name, value in logs.items()
        }
    if tracker.name in logs:
        logs[tracker.name] = tf.where(empty, tf.cast(loss, tf.float32), logs[tracker.name])
    return logs, tf.logical_and(tf.logical_not(applied), finite)


def _again(
    model: keras.Model, data: Any, retry: int, logs: dict[str, Any], overflowed: Any
) -> dict[str, Any]:
    """Repeats a batch that overflowed, at most `retry` times; returns the logs of the last try."""
    if replicas.active() and not _compat.strategy_without_merge_call():
        raise ValueError(
            "`retry` does not work under a tf.distribute strategy of several replicas, because a "
            f"graph cannot repeat their step. Received: retry={retry}. Leave it at 0, or "
            "on GPUs compile with jit_compile=True."
        )

    def once_more(tries: tf.Tensor, _: Any, logs: dict[str, Any]) -> tuple[Any, ...]:
        model.optimizer.reports.count_retry()
        new, overflowed = _attempt(model, data)
        return tries + 1, overflowed, tf.nest.pack_sequence_as(logs, tf.nest.flatten(new))

    return tf.while_loop(
        lambda tries, overflowed, logs: tf.logical_and(overflowed, tries < retry),
        once_more,
        (tf.constant(0), overflowed, logs),
    )[2]


def _with_values(variables: Iterable[Any]) -> list[tuple[Any, tf.Tensor]]:
    return [(v, tf.convert_to_tensor(v)) for v in variables]


def _restore_unless(keep: tf.Tensor, saved: list[tuple[Any, tf.Tensor]]) -> None:
    """Restores the values of variables, unless the scalar bool tensor `keep` is True."""
    if tf.executing_eagerly() and keep:
        return
    for variable, value in saved:
        variable.assign(tf.where(keep, tf.convert_to_tensor(variable), value))


def check_retry(retry: Any) -> None:
    """Raises if `retry` is not an integer of at least 0."""
    if not isinstance(retry, numbers.Integral) or isinstance(retry, bool) or retry < 0:
        raise ValueError(f"`retry` must be an integer of at least 0. Received: retry={retry!r}")
