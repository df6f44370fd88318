"""Warnings that point at the line of the user's code, not at a line of a package."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
import warnings

import keras
import tensorflow as tf


class LossScaleWarning(UserWarning):
    """Training goes on, but not as you probably intended."""


# By default Python shows a text once per process, so a second run would fail silently.
warnings.filterwarnings("always", category=LossScaleWarning, append=True)

_NOT_THE_USER = tuple(
    os.path.join(os.path.dirname(path), "") for path in (__file__, keras.__file__, tf.__file__)
)
_STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")


def warn(text: str) -> None:
    """Shows a `LossScaleWarning` at the user's line that led here.

    Args:
        text: what is wrong, and how to fix it.
    """
    # `inspect.stack` would search all modules, and a lazy one may raise.
    frames = traceback.walk_stack(inspect.currentframe())
    files = [frame.f_code.co_filename for frame, _ in frames]
    callers = [level for level, path in enumerate(files, 1) if not _is_of_frameworks(path)]
    # Packages such as keras-hub call `fit` for the user.
    users = [level for level in callers if not _is_installed(files[level - 1])]
    warnings.warn(text, LossScaleWarning, stacklevel=(users or callers or [len(files)])[0])


def _is_of_frameworks(path: str) -> bool:
    # AutoGraph runs a copy of the user's function from a temporary file.
    return path.startswith(_NOT_THE_USER) or "__autograph_generated_file" in path


def _is_installed(path: str) -> bool:
    return path.startswith(_STDLIB) or "site-packages" in path or "dist-packages" in path
