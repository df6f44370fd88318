"""Read the files of the command line: a model in Keras' format, and arrays in NumPy's.

An error about a file says what was expected, what was received, and how to fix it.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import keras
import numpy as np

from tfscale.cli.arguments import BadInput

# x, y (each an array, or a structure of several) and sample_weight.
Arrays: TypeAlias = tuple[Any, Any, np.ndarray | None]

_ARRAYS = ("x", "y", "sample_weight")
_HOW = "write it with numpy.savez('batch.npz', x=x, y=y)"


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of a library's error, without decoration."""
    # Keras puts the cause after one of these, of nested errors after the last, in bold type.
    text = re.split(r"Exception encountered(?: when calling .*\(\)\.|:)", str(error))[-1]
    # TensorFlow puts the names of its kernels around it.
    text = re.sub(r"\x1b\[\d*m|\{\{.*?\}\}|\[Op:\w+\].*", "", text)
    first = next((line.strip() for line in text.splitlines() if line.strip()), repr(error))
    return re.split(r"\. (?=[A-Z])", first)[0]


def load_model(path: Path, instead: str, compiled: bool = True) -> keras.Model:
    """Load a model.

    Args:
        path: a file that `model.save("model.keras")` wrote.
        instead: the call that does the same in Python, where the user's own classes are known.
        compiled: whether to load the arguments of `compile` too.

    Raises:
        BadInput: the file does not exist, has another format, or Keras cannot load it, or only by
            running code that the file may contain.
    """
    if tuple(map(int, keras.version().split(".")[:2])) < (3, 12):
        # Older versions import and call what a file names, or read files that it points to.
        raise BadInput(
            "This command needs Keras 3.12 or newer: older versions may run code from a file that "
            f"you did not write. If you trust the file, load it in Python and call {instead}. "
            f"Received: Keras {keras.version()}, {path}"
        )
    if not path.is_file():
        raise BadInput(
            f"MODEL must be a file that exists, written by model.save('model.keras'). "
            f"Received: {path}"
        )
    if path.suffix != ".keras" or not zipfile.is_zipfile(path):
        raise BadInput(
            "MODEL must be a complete file in Keras' own format: load it as you did before, then "
            f"write it with model.save('model.keras'). Received another format: {path}"
        )
    # A file may name any class with any arguments: deserializing it may raise anything.
    try:
        with warnings.catch_warnings():
            # Keras warns about an optimizer that has made no step; the commands ignore its state.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model = keras.saving.load_model(path, compile=compiled)
    except Exception as error:
        raise BadInput(
            f"MODEL must be a .keras file that Keras can load alone; if it needs classes or "
            f"functions of your own, load it in Python and call {instead}. Received: {path}, where "
            f"Keras says: {first_sentence(error)}"
        ) from error
    if not isinstance(model, keras.Model):
        raise BadInput(
            f"MODEL must be a keras.Model: save that, not a part of it. Received: {path}, which "
            f"holds a {type(model).__name__}"
        )
    scaled = keras.optimizers.LossScaleOptimizer
    if model.compiled and not isinstance(model.optimizer, scaled) and _was_scaled(path):
        # Keras wraps only under the global dtype policy of the training, which no file stores.
        model.optimizer = scaled(model.optimizer)
    return model


def _was_scaled(path: Path) -> bool:
    with zipfile.ZipFile(path) as file, file.open("model.weights.h5") as weights:
        return "optimizer/inner_optimizer" in h5py.File(weights)


def load_arrays(path: Path, model: keras.Model) -> Arrays:
    """Load `x`, `y` and, if present, `sample_weight` (else None).

    Args:
        path: a file written by `numpy.savez("batch.npz", x=x, y=y)`, or one with an array for each
            of several inputs or outputs, by its name.
        model: the model that takes them.

    Raises:
        BadInput: the file does not exist, has another format, lacks an array, or its arrays differ
            in length.
    """
    if not path.is_file():
        raise BadInput(f"--data must be a file that exists: {_HOW}. Received: {path}")
    if not zipfile.is_zipfile(path):
        raise BadInput(f"--data must be an .npz file: {_HOW}. Received another format: {path}")
    try:
        by_name = [
            keras.tree.map_structure(lambda tensor: tensor.name, model.input),
            keras.tree.pack_sequence_as(model.output, model.output_names),
        ]
    except (AttributeError, ValueError):  # a subclassed model does not know them
        by_name = []
    with np.load(path) as file:
        sides: list[Any] = ["x", "y", "sample_weight" if "sample_weight" in file else None]
        for side, structure in enumerate(by_name):
            if set(keras.tree.flatten(structure)) <= set(file):
                sides[side] = structure
        if missing := [name for name in sides[:2] if isinstance(name, str) and name not in file]:
            names = keras.tree.flatten(by_name)
            raise BadInput(
                f"--data must hold the arrays x and y"
                f"{', or one for each of ' + ', '.join(names) if len(names) > 2 else ''}, and "
                f"sample_weight if you like: {_HOW}. Received: {path} without "
                f"{' and '.join(missing)}, but with {', '.join(file.files) or 'nothing'}"
            )
        try:
            x, y, weight = keras.tree.map_structure(lambda name: name and file[name], sides)
        # Arrays of Python objects would have to be unpickled.
        except (ValueError, zipfile.BadZipFile) as error:
            raise BadInput(
                f"--data must hold arrays of numbers: {_HOW}. Received: {path}, where NumPy says: "
                f"{first_sentence(error)}"
            ) from error
    arrays = x, y, weight
    leaves = [leaf for leaf in keras.tree.flatten(arrays) if leaf is not None]
    lengths = {leaf.shape[:1] for leaf in leaves}
    if len(lengths) > 1 or lengths & {(), (0,)}:
        raise BadInput(
            "--data must hold arrays of the same length, one entry for each sample and at least "
            f"one: {_HOW}. Received: {shapes(arrays)}"
        )
    return arrays


def shapes(arrays: Arrays) -> str:
    """Return a text such as "x (64, 8) float32, y (64,) int64"."""
    leaves = [leaf for leaf in keras.tree.flatten_with_path(arrays) if leaf[1] is not None]
    return ", ".join(
        " ".join(map(str, (_ARRAYS[path[0]], *path[1:], array.shape, array.dtype)))
        for path, array in leaves
    )
