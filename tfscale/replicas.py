"""One agreed answer over the replicas of a `tf.distribute` strategy.

The gradients are summed over the replicas first and the sum is looked at: that is what will be
applied, and it is the same on every replica, so each of them comes to the same answer without
asking the others. The optimizer then must not sum a second time.
"""

from __future__ import annotations

import tensorflow as tf

from tfscale import _compat, gradients


def active() -> bool:
    """Whether this code runs under a strategy, in the context of one replica.

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
    return True


def build_once(build) -> None:
    """Calls `build()` once for all replicas, outside of any graph that is being traced."""

    def lifted(_):
        with tf.init_scope():
            build()

    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        tf.distribute.get_replica_context().merge_call(lifted)
    else:
        lifted(None)


def total(grads, *flags):
    """Sums gradients over the replicas; a flag that is False on one replica is False on all.

    Args:
        grads: list of tensors, `IndexedSlices` and None, the same Nones on every replica.
        *flags: scalar bool tensors of this replica. They ride along with the gradients, so that
            agreeing on them adds no collective.

    Returns:
        The list of sums and the agreed scalar bools, equal on all replicas. Half precision is
        summed in float32, so that the number of replicas cannot overflow it.
    """
    present = [gradients.cast(g, gradients.wide_dtype(g.dtype)) for g in grads if g is not None]
    raised = tf.stack([tf.cast(tf.logical_not(flag), tf.float32) for flag in flags])
    context = tf.distribute.get_replica_context()
    *summed, bad = context.all_reduce(tf.distribute.ReduceOp.SUM, [*present, raised])
    given = iter(summed)
    sums = [None if g is None else next(given) for g in grads]
    return sums, *(tf.equal(bad[i], 0) for i in range(len(flags)))


def decide(step, grads, flags):
    """What `step(*flags, run)` returns, called where one decision is taken for all replicas.

    `run(update)` calls `update(grads)` on every replica. `step` may put it into a branch.
    """
    context = tf.distribute.get_replica_context()
    if _compat.strategy_without_merge_call():
        return step(*flags, lambda update: update(grads))

    def merged(strategy, grads, flags):
        first = [strategy.experimental_local_results(flag)[0] for flag in flags]

        def run(update):
            strategy.extended.call_for_each_replica(update, args=(grads,))

        return step(*first, run)

    return context.merge_call(merged, args=(grads, flags))
