"""Write TensorBoard's event files with TensorFlow alone.

`tf.summary.scalar` and `tf.summary.histogram` need the package tensorboard, and the latter would
count again in its own bins. An event is a tensor and the name of the plugin that draws it.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf


def write(
    writer: tf.summary.SummaryWriter,
    step: int,
    scalars: Mapping[str, float],
    histograms: Mapping[str, Mapping[int, int]],
) -> None:
    """Write one step and flush.

    Args:
        writer: what `tf.summary.create_file_writer` returned.
        step: position on the axis.
        scalars: from a tag to a number.
        histograms: from a tag to a mapping from integers e to the number of values in [e, e + 1).
            Empty ones are omitted.
    """
    with writer.as_default(step):
        for tag, value in scalars.items():
            _write(tag, tf.constant(value, tf.float32), "scalars", "DATA_CLASS_SCALAR")
        for tag, counts in histograms.items():
            if counts:
                bins = [(e, e + 1, counts.get(e, 0)) for e in range(min(counts), max(counts) + 1)]
                _write(tag, tf.constant(bins, tf.float64), "histograms", "DATA_CLASS_TENSOR")
    writer.flush()


def _write(tag: str, tensor: tf.Tensor, plugin: str, data_class: str) -> None:
    plugin_data = tf.compat.v1.SummaryMetadata.PluginData(plugin_name=plugin)
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=plugin_data, data_class=data_class)
    tf.summary.write(tag, tensor, metadata=metadata)
