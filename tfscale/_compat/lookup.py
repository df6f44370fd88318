"""The version of Keras, and private names that move between releases."""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import keras
import tensorflow as tf

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfscale needs Keras on the TensorFlow backend. Received: "
        f"keras.backend.backend()={keras.backend.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=tensorflow (or the `backend` entry of ~/.keras/keras.json) before the "
        "first import of keras."
    )

P = ParamSpec("P")
R = TypeVar("R")

KERAS = tuple(int(part) for part in keras.version().split(".")[:2])
"""Major and minor version of Keras."""


def find(*places: str) -> Any:
    """Imports a private name from the first of several places that has it.

    Args:
        *places: `module:name`, the current place and earlier ones.

    Returns:
        The object. If no place has it, a class without instances that raises an error when it is
        called, so that `import tfscale` works and only what needs the name fails.
    """
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue

    class Missing:
        def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
            fail(f"no {' or '.join(places)}")

    return Missing


def needs_private_names(function: Callable[P, R]) -> Callable[P, R]:
    """Turns an AttributeError into the error of `fail` if `function` uses a name that is gone.

    An AttributeError from deeper inside, for instance from a user's model, passes unchanged.
    """

    @functools.wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except AttributeError as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            own = frame.f_globals is function.__globals__
            if not own or not (error.name or "").startswith("_"):
                raise
            fail(f"no `{error.name}` in {type(error.obj).__name__}")

    return explained


def fail(what: str) -> NoReturn:
    """Raises an error that says what these versions of Keras and TensorFlow lack."""
    raise NotImplementedError(
        f"This version of tfscale does not support Keras {keras.version()} with TensorFlow "
        f"{tf.__version__}: they have {what}. Install a newer tfscale, or an older Keras and "
        "TensorFlow."
    )
