"""`fit` on several workers, where Keras' trainer stops before the first step.

It takes a batch that is spread over the workers for a tensor, and it averages the logs of a step
along an axis that they do not have.
"""

from __future__ import annotations

import tensorflow as tf

from tfscale import _compat


def mend_fit(model) -> None:
    """Makes `fit` and `evaluate` work under a `MultiWorkerMirroredStrategy` of several workers.

    Args:
        model: a compiled model; under any other strategy it is left as it is.
    """
    if not _compat.has_several_workers(model.distribute_strategy):
        return
    _compat.build_from_local_batch(model)
    for name in ("train_step", "test_step"):
        setattr(model, name, _with_averaged_logs(getattr(model, name)))


def _with_averaged_logs(step):
    def stepped(data):
        return tf.nest.map_structure(_with_axis, step(data))

    return tf.autograph.experimental.do_not_convert(stepped)


def _with_axis(value):
    value = tf.convert_to_tensor(value)
    return value[None] if value.shape.rank == 0 else value
