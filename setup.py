"""For tools that need this file; pyproject.toml has the settings."""

from setuptools import setup

setup()
