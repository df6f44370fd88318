"""Read the files of the command line: a model in Keras' format, and arrays in NumPy's.

Every fault of a file is reported in one sentence: what was expected, what was received, how to fix
it.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

_ARRAYS = ("x", "y", "sample_weight")
_HOW = "write it with numpy.savez('batch.npz', x=x, y=y)"


class BadInput(ValueError):
    """The user's input cannot be used; the message is the sentence to print."""


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of a library's error, without decoration."""
    # Keras puts the cause behind one of these, last where errors are nested, and in bold type.
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
        compiled: whether to load what the model was compiled with, too.

    Raises:
        BadInput: there is no such file, it is of another format, or Keras cannot load it, or not
            without running what a stranger may have written into it.
    """
    if tuple(map(int, keras.version().split(".")[:2])) < (3, 12):
        # It imports and calls what a file names, or reads the files that it points to.
        raise BadInput(
            "This command needs Keras 3.12 or newer, because an older one may run what a stranger "
            f"wrote into a file. If you trust yours, load it in Python and call {instead}. "
            f"Received: Keras {keras.version()}, {path}"
        )
    if not path.is_file():
        raise BadInput(
            f"MODEL must be a file that exists, written by model.save('model.keras'). "
            f"Received: {path}"
        )
    if path.suffix != ".keras" or not zipfile.is_zipfile(path):
        raise BadInput(
            "MODEL must be in Keras' own format: load it as you did before, then write it with "
            f"model.save('model.keras'). Received another format: {path}"
        )
    # A file may name any class with any arguments: deserializing it may raise anything.
    try:
        with warnings.catch_warnings():
            # Raised for an optimizer that has made no step yet; the commands ignore its state.
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
    return model


def load_arrays(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Load `x`, `y` and, if it is there, `sample_weight` (else None).

    Args:
        path: a file that `numpy.savez("batch.npz", x=x, y=y)` wrote.

    Raises:
        BadInput: there is no such file, it is of another format, lacks an array, or its arrays
            differ in length.
    """
    if not path.is_file():
        raise BadInput(f"--data must be a file that exists: {_HOW}. Received: {path}")
    if not zipfile.is_zipfile(path):
        raise BadInput(f"--data must be an .npz file: {_HOW}. Received another format: {path}")
    with np.load(path) as file:
        if missing := [name for name in _ARRAYS[:2] if name not in file]:
            raise BadInput(
                f"--data must hold the arrays x and y, and sample_weight if you like: {_HOW}. "
                f"Received: {path} without {' and '.join(missing)}, but with "
                f"{', '.join(file.files) or 'nothing'}"
            )
        try:
            arrays = {name: file[name] for name in _ARRAYS if name in file}
        # Arrays of Python objects would have to be unpickled.
        except (ValueError, zipfile.BadZipFile) as error:
            raise BadInput(
                f"--data must hold arrays of numbers: {_HOW}. Received: {path}, where NumPy says: "
                f"{first_sentence(error)}"
            ) from error
    lengths = {array.shape[:1] for array in arrays.values()}
    if len(lengths) > 1 or lengths & {(), (0,)}:
        raise BadInput(
            "--data must hold arrays of the same length, one entry for each sample and at least "
            f"one: {_HOW}. Received: {shapes(arrays)}"
        )
    return arrays["x"], arrays["y"], arrays.get("sample_weight")


def shapes(arrays: Mapping[str, np.ndarray]) -> str:
    """Return a text such as "x (64, 8) float32, y (64,) int64"."""
    return ", ".join(f"{name} {array.shape} {array.dtype}" for name, array in arrays.items())
