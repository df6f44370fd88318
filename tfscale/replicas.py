"""One agreed answer over the replicas of a `tf.distribute` strategy.

The gradients are summed over the replicas first, and the sum is checked: it is what will be
applied, and it is the same on every replica, so that each of them finds the same answer without
another exchange. The optimizer then must not sum a second time, and whatever it does under a
condition has to be decided where all replicas meet, not inside one of them.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale import _compat, gradients, trace_log
from tfscale.gradients import Gradient

_BUFFER = 25 * 2**20  # bytes; DistributedDataParallel of PyTorch has found the same to be good

# One number holds two facts: its multiples count bad losses, the rest bad gradients. Up to 4096
# replicas it is exact in float32.
_LOSS = 2.0**12


def active() -> bool:
    """Whether this code runs under a strategy of several replicas, in the context of one.

    Raises:
        ValueError: in the cross-replica context of a strategy.
    """
    if not tf.distribute.has_strategy():
        return False
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "apply() must be called in a replica context: call the train step through "
            "`strategy.run(step, args=...)`."
        )
    # With one replica, all that works without a strategy works here.
    return not isinstance(tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy)


def scope_of(model: keras.Model) -> contextlib.AbstractContextManager[Any]:
    """Context in which `model`'s variables were made, for those of its optimizer and metrics."""
    strategy = model.distribute_strategy
    inside = strategy is tf.distribute.get_strategy()
    return contextlib.nullcontext() if inside else strategy.scope()


def check_setting(optimizer_variables: Sequence[Any], model_variables: Sequence[Any]) -> None:
    """Raises where the current strategy cannot train this model with this optimizer.

    Args:
        optimizer_variables: some variables that the optimizer made in its constructor.
        model_variables: the model's variables.

    Raises:
        ValueError: one was made out of the strategy's scope, so that every replica would write
            its one copy; or all replicas were put into one XLA cluster.
    """
    if _compat.replicas_share_a_cluster():
        raise ValueError(
            "The replicas of a strategy cannot share one XLA cluster, as jit_compile=True round "
            "`strategy.run` asks for. On GPUs compile what the strategy runs, in `fit` with "
            "`tfscale.compile(model, ..., jit_compile=True)`, in an own loop with "
            "`strategy.run(tf.function(step, jit_compile=True), args=...)`."
        )
    strategy = tf.distribute.get_strategy()
    for owner, variables in (("optimizer", optimizer_variables), ("model", model_variables)):
        for variable in variables:
            if not strategy.extended.variable_created_in_scope(_compat.tf_variable(variable)):
                raise ValueError(
                    f"The {owner} must be made in the scope of the strategy that trains it: "
                    "`with strategy.scope(): model = ...; optimizer = tfscale.wrap(...)`. "
                    f"Received: variable {getattr(variable, 'path', variable.name)} of the "
                    f"{owner}, which is not in the scope of this {type(strategy).__name__}."
                )


def build_once(build: Callable[[], Any]) -> None:
    """Calls `build()` once for all replicas, outside of any graph that is being traced."""

    def lifted(_: Any) -> None:
        with tf.init_scope():
            build()

    context = tf.distribute.get_replica_context()
    if context is not None and _compat.merge_call_works():
        # The default strategy has a context too, in which a meeting is a mere call.
        context.merge_call(lifted)
    else:
        lifted(None)


def total(grads: Sequence[Gradient | None], *flags: tf.Tensor) -> tuple[Any, ...]:
    """Sums gradients over the replicas; a flag that is False on one replica is False on all.

    Args:
        grads: list of tensors, `IndexedSlices` and None, the same Nones on every replica.
        *flags: bool tensors of this replica. They ride along with the gradients, so that agreeing
            on them adds no collective.

    Returns:
        The list of sums and the agreed bools, equal on all replicas. Half precision is
        summed in float32, so that the number of replicas cannot overflow it.
    """
    wide: list[Any] = [
        g if g is None else gradients.cast(g, gradients.wide_dtype(g.dtype)) for g in grads
    ]
    if _compat.strategy_without_merge_call():
        # None of XLA's collectives gathers rows.
        wide = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in wide]
    raised = [tf.reshape(tf.cast(tf.logical_not(flag), tf.float32), [-1]) for flag in flags]
    summed = tf.concat(raised, 0)
    for places in _buffers(wide):
        sums, summed = _all_reduce([wide[place] for place in places], summed)
        for place, value in zip(places, sums, strict=True):
            wide[place] = _with_static_shape(value, wide[place])
    parts = tf.split(summed, [part.shape[0] for part in raised])
    return wide, *(
        tf.reshape(part == 0, flag.shape) for part, flag in zip(parts, flags, strict=True)
    )


def _buffers(grads: list[Gradient | None]) -> list[list[int]]:
    """Which gradients, by their places in the list, are summed in one buffer.

    A buffer has one dtype. Where XLA compiles the replicas, it is sent while the backward pass goes
    on, so there are several; they begin with the last layers, whose gradients are ready first.
    """
    by_dtype = collections.defaultdict(list)
    for place, gradient in reversed(list(enumerate(grads))):
        if gradient is not None:
            by_dtype[gradient.dtype].append(place)
    if not _compat.strategy_without_merge_call():
        return list(by_dtype.values())
    buffers: list[list[int]] = []
    for dtype, places in by_dtype.items():
        filled = _BUFFER
        for place in places:
            size = (grads[place].shape.num_elements() or 0) * dtype.size
            if filled + size > _BUFFER:
                buffers.append([])
                filled = 0
            buffers[-1].append(place)
            filled += size
    return buffers


def _all_reduce(values: list[Any], flags: tf.Tensor) -> tuple[list[Any], tf.Tensor]:
    """Sums `values`, of one dtype, and with them `flags`, of float32, over the replicas.

    XLA compiles each replica by itself and orders collectives only where one needs another. In two
    orders the replicas would wait for each other for ever, so each needs the flags of the one
    before it.
    """
    trace = None if _compat.merge_call_works() else trace_log.current()
    if trace is not None:
        _compat.drop_collective_keys()
        before = trace.last_flags()
        if before is not None:
            # No flag is ever negative, which XLA does not know.
            flags += tf.cast(tf.reduce_any(before < 0), tf.float32)
    carrier = values[0].dtype if values else tf.float32
    *values, summed = tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, [*values, tf.cast(flags, carrier)]
    )
    flags = tf.cast(tf.math.real(summed), tf.float32)
    if trace is not None:
        trace.flags_summed(flags)
    return values, flags


def _with_static_shape(total: Any, here: Any) -> Any:
    """Sets the shape of `total` where it is known, which XLA needs."""
    if not isinstance(here, tf.IndexedSlices):
        total.set_shape(here.shape)
        return total
    context = tf.distribute.get_replica_context()
    one_process = isinstance(context.strategy, tf.distribute.MirroredStrategy)
    if tf.executing_eagerly() or not one_process or not _compat.merge_call_works():
        return total

    def rows_of_all(strategy: tf.distribute.Strategy, indices: Any) -> int | None:
        parts = strategy.experimental_local_results(indices)  # one, if all replicas share a tensor
        rows = [part.shape[0] for part in parts]
        return None if None in rows else sum(rows) * strategy.num_replicas_in_sync // len(parts)

    rows = context.merge_call(rows_of_all, args=(here.indices,))
    values, indices = tf.identity(total.values), tf.identity(total.indices)
    values.set_shape([rows, *here.values.shape[1:]])
    indices.set_shape([rows])
    return tf.IndexedSlices(values, indices, here.dense_shape)


def agree(
    finite: tf.Tensor, loss_finite: tf.Tensor, reduce_flag: Callable[[tf.Tensor], Any] | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Agrees on two flags where the caller has reduced the gradients.

    Args:
        finite: scalar bool tensor, whether the gradients here were finite.
        loss_finite: scalar bool tensor, whether the loss here was finite.
        reduce_flag: function that sums a scalar float32 tensor over all replicas, or None for the
            current strategy's own sum.

    Returns:
        The two flags, equal on all replicas. With neither a strategy nor a `reduce_flag` only
        `finite` can be equal everywhere, because the gradients are; the loss counts as finite.
    """
    bad_gradients = tf.where(finite, 0.0, 1.0)
    bad = bad_gradients + tf.where(loss_finite, 0.0, _LOSS)
    if reduce_flag is not None:
        bad = tf.reshape(tf.cast(reduce_flag(bad), tf.float32), [])
    elif active():
        _, bad = _all_reduce([], bad)
    else:
        return finite, tf.constant(True)
    return tf.equal(tf.math.floormod(bad, _LOSS), 0), bad < _LOSS


def can_run_alone(mode: str) -> bool:
    """Whether each replica can take its step in `mode` by itself, without meeting the others."""
    if not active() or mode == "cond" or _compat.strategy_without_merge_call():
        return True
    return mode == "compiled" and _compat.strategy_without_merge_call_in_clusters()


def can_agree() -> bool:
    """Whether the replicas can exchange something here: not in a branch, which one may not take."""
    if not active() or _compat.strategy_without_merge_call():
        return True
    in_branch = not tf.executing_eagerly() and _compat.is_control_flow(
        tf.compat.v1.get_default_graph()
    )
    return _compat.merge_call_works() and not in_branch


def call_once(function: Callable[..., Any]) -> None:
    """Calls `function()`, which writes variables that the replicas share, once for all of them."""
    if not active() or _compat.strategy_without_merge_call():
        function()
    else:
        tf.distribute.get_replica_context().merge_call(
            lambda strategy, functions: _first(strategy, functions)(), args=(function,)
        )


def decide(step: Any, finite: tf.Tensor, partners_finite: tf.Tensor | None, mode: str) -> tf.Tensor:
    """What `step.decide(finite, partners_finite, run, mode)` returns, for all replicas the same.

    `run()` calls `step.apply()` on every replica; `step.decide` may put it into a branch.

    Args:
        step: this replica's `Step`.
        finite: scalar bool tensor, equal on all replicas.
        partners_finite: the same for linked optimizers, or None.
        mode: "cond" or "select"; where the replicas meet it is "cond".
    """
    inner = step.optimizer.inner_optimizer
    if not active() or _compat.strategy_without_merge_call():
        # Keras' all-reduce is a custom gradient even for one replica: TensorFlow keeps it for ever,
        # and with it the graph of every step function that was traced.
        with _compat.per_replica_update(inner):
            return step.decide(finite, partners_finite, step.apply, mode)

    def merged(strategy: tf.distribute.Strategy, steps: Any, flags: tuple[Any, ...]) -> Any:
        def run() -> None:
            with _compat.merge_call_update(inner, _branch):
                strategy.extended.call_for_each_replica(_apply, args=(steps,))

        first = [None if flag is None else _first(strategy, flag) for flag in flags]
        return _first(strategy, steps).decide(*first, run)

    flags = finite, partners_finite
    return tf.distribute.get_replica_context().merge_call(merged, args=(step, flags))


@tf.autograph.experimental.do_not_convert
def _apply(step: Any) -> None:
    step.apply()


def _branch(pred: Any, yes: Callable[..., Any], no: Callable[..., Any], *args: Any) -> None:
    """`tf.cond` from within a replica, for branches in which the replicas meet again.

    Args:
        pred: scalar bool tensor, equal on all replicas.
        yes: function of `args` that returns nothing and touches no tensor of its surroundings.
        no: the same, for False.
        *args: what each replica gives to the function.
    """

    def merged(strategy: tf.distribute.Strategy, pred: Any, args: tuple[Any, ...]) -> Any:
        def on_each(function: Callable[..., Any]) -> tf.Tensor:
            strategy.extended.call_for_each_replica(function, args=args)
            return tf.constant(True)

        tf.cond(_first(strategy, pred), lambda: on_each(yes), lambda: on_each(no))

    tf.distribute.get_replica_context().merge_call(merged, args=(pred, args))


def _first(strategy: tf.distribute.Strategy, value: Any) -> Any:
    return strategy.experimental_local_results(value)[0]
