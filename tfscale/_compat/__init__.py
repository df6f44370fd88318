"""Every private name of Keras and TensorFlow that tfscale uses, each with a test.

If a release drops one, `tests/compat` fails first.
"""

from tfscale._compat.lookup import KERAS
from tfscale._compat.models import (
    Functional,
    add_to_fit,
    build,
    casts,
    compute_loss,
    for_logs,
    forward,
    hide_from_lists,
    live_layers,
    loss_tracker,
    makes_functional,
    metric_variables,
    model_of,
    own_variables,
    patch_fit,
    state_variables,
    sub_layers,
    undo_replica_mean,
)
from tfscale._compat.optimizers import (
    UNREAD_BY_WRAPPER,
    added_rows,
    built_on,
    excluded_from_weight_decay,
    merge_call_update,
    per_replica_update,
    set_built_on,
    set_untracked,
    sub_optimizers,
    tf_variable,
    track,
    tracked,
    variable_key,
)
from tfscale._compat.tensorflow import (
    creation_number,
    drop_collective_keys,
    has_several_workers,
    in_xla_context,
    is_control_flow,
    is_recorded,
    merge_call_works,
    outlined,
    replicas_share_a_cluster,
    strategy_without_merge_call,
    strategy_without_merge_call_in_clusters,
    xla_reduce_or,
)
