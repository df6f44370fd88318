"""List what in a model is dangerous in half precision. The model is inspected, not run.

The exit status is 0 if nothing was found, 1 if something was found, 2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tfscale.cli.model_files import load_model
from tfscale.diagnostics.linting import lint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m tfscale lint`."""
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="file written by model.save('model.keras')"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings; return the exit status.

    Raises:
        BadInput: the file cannot be read.
    """
    findings = lint(load_model(args.model, instead="tfscale.lint(model)"))
    print(findings)
    return 1 if findings else 0
