"""Every private name of Keras and TensorFlow that tfscale uses, each with a test.

A release that drops one fails first in `tests/compat`.
"""

from tfscale._compat.lookup import KERAS
from tfscale._compat.models import (
    Functional,
    build,
    build_from_local_batch,
    casts,
    compute_loss,
    for_logs,
    forward,
    loss_tracker,
    makes_functional,
    metric_variables,
    own_variables,
    state_variables,
    sub_layers,
    undo_replica_mean,
)
from tfscale._compat.optimizers import (
    UNREAD_BY_WRAPPER,
    added_rows,
    built_on,
    check_wrapper_arguments,
    excluded_from_weight_decay,
    merge_call_update,
    per_replica_update,
    set_built_on,
    sub_optimizers,
    tf_variable,
    track,
    tracked,
    variable_key,
)
from tfscale._compat.tensorflow import (
    NO_INLINE,
    has_several_workers,
    in_xla_context,
    outer_graphs,
    outlined,
    replica_can_meet,
    replicas_share_a_cluster,
    strategy_without_merge_call,
    strategy_without_merge_call_in_clusters,
    xla_reduce_or,
)

rarely = outlined  # renamed; the core follows
native = tf_variable  # renamed; the core follows
together = merge_call_update  # renamed; the core follows
apart = per_replica_update  # renamed; the core follows
whole_loss = undo_replica_mean  # renamed; the core follows

__all__ = [
    "KERAS",
    "NO_INLINE",
    "UNREAD_BY_WRAPPER",
    "Functional",
    "added_rows",
    "build",
    "build_from_local_batch",
    "built_on",
    "casts",
    "check_wrapper_arguments",
    "compute_loss",
    "excluded_from_weight_decay",
    "for_logs",
    "forward",
    "has_several_workers",
    "in_xla_context",
    "loss_tracker",
    "makes_functional",
    "merge_call_update",
    "metric_variables",
    "outer_graphs",
    "outlined",
    "own_variables",
    "per_replica_update",
    "replica_can_meet",
    "replicas_share_a_cluster",
    "set_built_on",
    "state_variables",
    "strategy_without_merge_call",
    "strategy_without_merge_call_in_clusters",
    "sub_layers",
    "sub_optimizers",
    "tf_variable",
    "track",
    "tracked",
    "undo_replica_mean",
    "variable_key",
    "xla_reduce_or",
]
