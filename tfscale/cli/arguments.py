"""Check the commands' options, paths and installed packages, and report input that is bad."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path


class BadInput(ValueError):
    """The user's input cannot be used; the message is the sentence to print."""


def number(text: str, what: str, low: int, high: float) -> int:
    """Return a whole number within bounds.

    Args:
        text: the option's value.
        what: what it must be, for the error message.
        low: the smallest allowed number, not negative.
        high: the largest allowed number.

    Raises:
        argparse.ArgumentTypeError: `text` is no such number.
    """
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"must be {what}. Received: {text}")
    return value


def at_least_1(text: str) -> int:
    """Return a whole number, at least 1, or raise."""
    return number(text, "a whole number, at least 1", 1, float("inf"))


def picture(text: str) -> Path:
    """Return the path of a .png file that can be written, or raise."""
    path = Path(text)
    if path.suffix.lower() != ".png" or path.is_dir():
        raise argparse.ArgumentTypeError(f"must name a .png file. Received: {text}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must lie in a folder that exists: {path.parent} does not. Received: {text}"
        )
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"must lie in a folder that can be written to. Received: {text}"
        )
    return path


def require(*packages: str) -> None:
    """Raise an ImportError that says how to install an optional package if one is missing.

    Args:
        *packages: names as they are imported.
    """
    if missing := [name for name in packages if not importlib.util.find_spec(name)]:
        extra = "demo" if "sklearn" in missing else "bench"
        raise ImportError(
            f"this command needs {', '.join(missing)}, not installed here; "
            f"install with: pip install 'tfscale[{extra}]', in a checkout pip install '.[{extra}]'"
        )
