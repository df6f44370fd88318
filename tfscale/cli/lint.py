"""What in this model is dangerous in half precision? It is looked at, not run.

Ends with status 0 if nothing was found, 1 if something was, 2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m tfscale lint`."""
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="file written by model.save('model.keras')"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the findings. Returns the exit status."""
    from tfscale.cli.model_files import BadInput, load_model
    from tfscale.diagnostics.linting import lint

    try:
        model = load_model(args.model, instead="tfscale.lint(model)")
    except BadInput as error:
        print(f"tfscale lint: {error}", file=sys.stderr)
        return 2
    findings = lint(model)
    print(findings)
    return 1 if findings else 0
