"""Make batches as `fit` does, from any data that `fit` takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def batches(
    data: Any, y: Any = None, sample_weight: Any = None, batch_size: int = 32
) -> Iterator[Any]:
    """Yield the batches that `fit` would pass to `train_step`, unchanged.

    Args:
        data: arrays (or a list or dictionary of arrays) to go with `y`, a tuple `(x, y)` or
            `(x, y, sample_weight)` of arrays, or an iterable of batches such as a
            `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator.
        y: an array of targets, if `data` holds only inputs.
        sample_weight: an array of weights, if `data` holds only inputs.
        batch_size: size of a batch of arrays; an iterable has its own.
    """
    if isinstance(data, tuple) and y is None and len(data) in (2, 3):
        data, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    elif y is None and isinstance(data, keras.utils.PyDataset):
        number = data.num_batches  # None of an endless one
        yield from map(data.__getitem__, itertools.count() if number is None else range(number))
        return
    elif y is None and isinstance(data, Iterable) and not _is_arrays(data):
        yield from data
        return
    arrays = (data, y, sample_weight)
    for leaf in keras.tree.flatten(arrays):
        if leaf is not None and not hasattr(leaf, "shape"):
            raise TypeError(
                "`data` must be arrays `(x, y)` or `(x, y, sample_weight)`, or an iterable of such "
                f"batches (a tf.data.Dataset, a keras.utils.PyDataset, a generator). Received a "
                f"{type(leaf).__name__} where an array was expected: {leaf!r}"[:400]
            )
    size = next(leaf.shape[0] for leaf in keras.tree.flatten(arrays) if leaf is not None)
    for start in range(0, size, batch_size):
        cut = slice(start, start + batch_size)
        parts = keras.tree.map_structure(lambda a, cut=cut: None if a is None else a[cut], arrays)
        yield keras.utils.pack_x_y_sample_weight(*parts)


def _is_arrays(data: Any) -> bool:
    """Whether `data` is an array, or a list or dictionary of arrays."""
    leaves = data.values() if isinstance(data, dict) else data if type(data) is list else [data]
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def as_tensors(structure: Any) -> Any:
    """Convert arrays as `fit` does: floating ones to Keras' float type, others unchanged."""

    def convert(leaf: Any) -> Any:
        if hasattr(leaf, "__array__") and not isinstance(leaf, tf.Tensor):
            array = np.asarray(leaf)
            if np.issubdtype(array.dtype, np.floating):
                array = array.astype(keras.config.floatx())
            return tf.convert_to_tensor(array)
        return leaf

    return keras.tree.map_structure(convert, structure)
