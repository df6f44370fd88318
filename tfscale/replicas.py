"""One decision for all replicas of a `tf.distribute` strategy.

First the gradients are summed over the replicas, then the sum is checked. The sum is what will be
applied, and it is equal on all replicas, so they decide alike without another collective. The inner
optimizer must then not sum again, and a branch must be taken by all replicas together.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale import _compat, gradients, graph, trace_log
from tfscale.gradients import Gradient

_BUFFER = 25 * 2**20  # bytes, as in PyTorch's DistributedDataParallel

# One number holds two counts: of non-finite losses, in multiples of `_LOSS`, and of non-finite
# gradients. It is exact in float32 for up to 4096 replicas.
_LOSS = 2.0**12


def active() -> bool:
    """Whether this code runs in one of several replicas of a strategy.

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
    # One replica needs nothing special.
    return not isinstance(tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy)


def check_setting(optimizer_variables: Sequence[Any], model_variables: Sequence[Any]) -> None:
    """Raises if the current strategy cannot train this model with this optimizer.

    Args:
        optimizer_variables: some variables that the optimizer made in its constructor.
        model_variables: the model's variables.

    Raises:
        ValueError: a variable was made outside of the strategy's scope, so that all replicas would
            write to one copy; or all replicas are in one XLA cluster.
    """
    if _compat.replicas_share_a_cluster():
        raise ValueError(
            "The replicas of a strategy cannot share one XLA cluster, which jit_compile=True "
            "around `strategy.run` makes. On GPUs compile what the strategy runs: in `fit` with "
            "`tfscale.compile(model, ..., jit_compile=True)`, in a custom loop with "
            "`strategy.run(tf.function(step, jit_compile=True), args=...)`. On CPUs leave XLA off."
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
    """Calls `build()` once for all replicas, outside of any graph being traced."""

    def lifted(_: Any) -> None:
        with tf.init_scope():
            build()

    context = tf.distribute.get_replica_context()
    if context is not None and _compat.merge_call_works():
        # The default strategy has a context too, where `merge_call` is a plain call.
        context.merge_call(lifted)
    else:
        lifted(None)


def total(grads: Sequence[Gradient | None], *flags: tf.Tensor) -> tuple[Any, ...]:
    """Sums gradients over the replicas; a flag that is False on one replica is False on all.

    Args:
        grads: list of tensors, `IndexedSlices` and None, with None at the same places on every
            replica.
        *flags: bool tensors of this replica, summed in the same collectives as the gradients.

    Returns:
        The list of sums and the combined flags, equal on all replicas. Half precision is summed in
        float32, so that many replicas cannot make it overflow.
    """
    wide = [gradients.map_values(gradients.upcast_half, g) for g in grads]
    if _compat.strategy_without_merge_call():
        # XLA has no collective that gathers rows.
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
    """The indices of the gradients that each buffer sums together.

    A buffer has one dtype. If XLA compiles the replicas, it sends several buffers during the
    backward pass, those of the last layers first, whose gradients are ready first. But not if that
    pass contains collectives itself, such as those of a synchronized BatchNorm: no buffer may be
    sent at the same time, so one waits for all of them.
    """
    by_dtype = collections.defaultdict(list)
    for place, gradient in reversed(list(enumerate(grads))):
        if gradient is not None:
            by_dtype[gradient.dtype].append(place)
    dense = [g for g in grads if isinstance(g, tf.Tensor)]
    if not _compat.strategy_without_merge_call() or any(
        operation.type.startswith("Collective") for operation in graph.ancestors(dense)
    ):
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
    """Sums `values`, of one dtype, together with `flags`, of float32, over the replicas.

    XLA compiles each replica separately and orders collectives only if one needs another. With
    different orders the replicas would wait for each other forever. So each collective needs the
    flags of the one before.
    """
    trace = None if _compat.merge_call_works() else trace_log.current()
    if trace is not None:
        _compat.drop_collective_keys()
        before = trace.last_flags
        if before is not None and before.graph in graph.function_graphs():
            # Adds 0, because no flag is negative, but XLA does not know that.
            flags += tf.cast(tf.reduce_any(before < 0), tf.float32)
    carrier = values[0].dtype if values else tf.float32
    *values, summed = tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, [*values, tf.cast(flags, carrier)]
    )
    flags = tf.cast(tf.math.real(summed), tf.float32)
    if trace is not None:
        trace.last_flags = flags
    return values, flags


def mean(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The means of numbers over the replicas, of integers rounded towards zero, as int64.

    TensorFlow keeps int32 on the host.
    """
    count = tf.distribute.get_replica_context().num_replicas_in_sync
    wide = [tf.cast(value, tf.float64) for value in values]
    sums, _ = _all_reduce(wide, tf.zeros([1]))
    return [
        tf.cast(
            _with_static_shape(total, value) / count,
            value.dtype if value.dtype.is_floating else tf.int64,
        )
        for total, value in zip(sums, values, strict=True)
    ]


def mean_of_parts(strategy: tf.distribute.Strategy, value: Any) -> tf.Tensor:
    """The mean of what each replica returned, or the one value that all have returned."""
    parts = strategy.experimental_local_results(value)
    return tf.convert_to_tensor(parts[0]) if len(parts) == 1 else tf.reduce_mean(parts, axis=0)


def of_first(values: Any) -> Any:
    """The first replica's values, as the result of every replica.

    A strategy that gets one result from all replicas copies nothing between them.
    """

    def merged(strategy: tf.distribute.Strategy, values: Any) -> Any:
        return tf.nest.map_structure(lambda value: _first(strategy, value), values)

    return tf.distribute.get_replica_context().merge_call(merged, args=(values,))


def _with_static_shape(total: Any, here: Any) -> Any:
    """Sets the static shape of `total` if it is known, because XLA needs it."""
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
    """Combines two flags over the replicas after the caller has reduced the gradients.

    Args:
        finite: scalar bool tensor, whether the gradients here were finite.
        loss_finite: scalar bool tensor, whether the loss here was finite.
        reduce_flag: function that sums a scalar float32 tensor over all replicas; None uses the
            current strategy.

    Returns:
        The two flags, equal on all replicas. Without a strategy and a `reduce_flag`, `finite` is
        equal because the reduced gradients are, and the loss counts as finite.
    """
    bad = tf.where(finite, 0.0, 1.0) + tf.where(loss_finite, 0.0, _LOSS)
    if reduce_flag is not None:
        bad = tf.reshape(tf.cast(reduce_flag(bad), tf.float32), [])
    elif active():
        _, bad = _all_reduce([], bad)
    else:
        return finite, tf.constant(True)
    return tf.equal(tf.math.floormod(bad, _LOSS), 0), bad < _LOSS


def can_run_alone(mode: str) -> bool:
    """Whether each replica can run its step in `mode` without `merge_call`."""
    if not active() or mode == "cond" or _compat.strategy_without_merge_call():
        return True
    strategy = tf.distribute.get_strategy()
    return mode == "compiled" and _compat.strategy_without_merge_call_in_clusters(strategy)


def can_agree() -> bool:
    """Whether a collective is possible here: not in a branch that a replica may not take."""
    return not active() or _compat.strategy_without_merge_call() or _compat.merge_call_works()


def call_once(function: Callable[..., Any]) -> None:
    """Calls `function()`, which writes variables that all replicas share, only once."""
    if not active() or _compat.strategy_without_merge_call():
        function()
    else:
        tf.distribute.get_replica_context().merge_call(
            lambda strategy, functions: _first(strategy, functions)(), args=(function,)
        )


def decide(step: Any, mode: str) -> None:
    """Calls `step.decide` once for all replicas together.

    The `run` that it passes calls `step.apply()` on every replica, also in a branch.

    Args:
        step: this replica's `Step`.
        mode: "cond" or "select"; with `merge_call` always "cond".
    """
    inner = step.optimizer.inner_optimizer
    if not active() or _compat.strategy_without_merge_call():
        # Even for one replica Keras' all-reduce is a custom gradient. TensorFlow never frees those,
        # and with them it would keep the graph of every traced step function.
        with _compat.per_replica_update(inner):
            step.decide(step.apply, mode)
        return

    def merged(strategy: tf.distribute.Strategy, steps: Any) -> None:
        def run() -> None:
            with _compat.merge_call_update(inner, _branch):
                strategy.extended.call_for_each_replica(_apply, args=(steps,))

        _first(strategy, steps).decide(run, mode)

    tf.distribute.get_replica_context().merge_call(merged, args=(step,))


@tf.autograph.experimental.do_not_convert
def _apply(step: Any) -> None:
    step.apply()


def _branch(pred: Any, yes: Callable[..., Any], no: Callable[..., Any], *args: Any) -> None:
    """`tf.cond` inside a replica, whose branches may call `merge_call`.

    Args:
        pred: scalar bool tensor, equal on all replicas.
        yes: function of `args` that returns nothing and captures no tensor.
        no: the same, for False.
        *args: arguments of the function, on each replica.
    """

    def merged(strategy: tf.distribute.Strategy, pred: Any, args: tuple[Any, ...]) -> Any:
        def on_each(function: Callable[..., Any]) -> tf.Tensor:
            strategy.extended.call_for_each_replica(function, args=args)
            return tf.constant(True)

        tf.cond(_first(strategy, pred), lambda: on_each(yes), lambda: on_each(no))

    tf.distribute.get_replica_context().merge_call(merged, args=(pred, args))


def _first(strategy: tf.distribute.Strategy, value: Any) -> Any:
    return strategy.experimental_local_results(value)[0]
