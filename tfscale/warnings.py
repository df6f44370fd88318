"""Warnings that point at the user's own line, not at one of this package or of Keras."""

from __future__ import annotations

import inspect
import os
import warnings

import keras
import tensorflow as tf


class LossScaleWarning(UserWarning):
    """Training goes on, but not as you probably intended."""


# By default Python shows a text only once in a process: a second run would fail in silence.
warnings.filterwarnings("always", category=LossScaleWarning, append=True)

_NOT_THE_USER = tuple(
    os.path.join(os.path.dirname(path), "") for path in (__file__, keras.__file__, tf.__file__)
)


def warn(text: str) -> None:
    """Shows a `LossScaleWarning` for the line that led here.

    Args:
        text: what is wrong, and how to fix it.
    """
    level, frame = 1, inspect.currentframe()
    while frame and frame.f_back and _is_not_the_user(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, LossScaleWarning, stacklevel=level)


def _is_not_the_user(path: str) -> bool:
    # AutoGraph calls a copy of the user's function, in a file that soon is no more.
    return path.startswith(_NOT_THE_USER) or "__autograph_generated_file" in path
