"""What the commands ask of their arguments and of their environment."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path


def number(text: str, what: str, low: float, high: float) -> int:
    """A whole number within bounds, or an error that says `what` it must be."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"must be {what}. Received: {text}")
    return value


def at_least_1(text: str) -> int:
    """A whole number, at least 1."""
    return number(text, "a whole number, at least 1", 1, float("inf"))


def picture(text: str) -> Path:
    """The path of a .png file that can be written."""
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


def require(who: str, *packages: str) -> None:
    """Raises an ImportError that says how to install it if an optional package is not installed."""
    if missing := [name for name in packages if not importlib.util.find_spec(name)]:
        # Not the extra `demo`: its TensorFlow for CPUs would stand in the way of one for GPUs.
        install_as = {"sklearn": "scikit-learn"}
        install = sorted({install_as.get(name, "'tfscale[bench]'") for name in missing})
        raise ImportError(
            f"{who} needs {', '.join(missing)}, not installed here; "
            f"install with: pip install {' '.join(install)}"
        )
