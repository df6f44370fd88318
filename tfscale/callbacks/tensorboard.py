"""TensorBoard's event files, written with what TensorFlow brings along.

`tf.summary.scalar` and `tf.summary.histogram` would ask for the package tensorboard, and count once
more, in bins of their own, what is counted already. An event is a tensor and the name of the plugin
that draws it.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf


def write(writer, step: int, scalars: Mapping, histograms: Mapping) -> None:
    """Writes one step and flushes.

    Args:
        writer: as `tf.summary.create_file_writer` returns it.
        step: place on the axis.
        scalars: from a tag to a number.
        histograms: from a tag to the counts, a dictionary from integers e to the number of values
            in [e, e + 1); an empty one is left out.
    """
    with writer.as_default(step):
        for tag, value in scalars.items():
            _write(tag, tf.constant(value, tf.float32), "scalars", "DATA_CLASS_SCALAR")
        for tag, counts in histograms.items():
            if counts:
                bins = [(e, e + 1, counts.get(e, 0)) for e in range(min(counts), max(counts) + 1)]
                _write(tag, tf.constant(bins, tf.float64), "histograms", "DATA_CLASS_TENSOR")
    writer.flush()


def _write(tag: str, tensor, plugin: str, data_class: str) -> None:
    plugin_data = tf.compat.v1.SummaryMetadata.PluginData(plugin_name=plugin)
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=plugin_data, data_class=data_class)
    tf.summary.write(tag, tensor, metadata=metadata)
