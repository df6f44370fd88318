"""The README as the package index shows it; pyproject.toml has the settings."""

import pathlib
import sys

from setuptools import setup

ROOT = pathlib.Path(__file__).parent
sys.path.append(str(ROOT / "docs"))
import home  # noqa: E402

setup(
    long_description=home.absolute((ROOT / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
