"""The command line `python -m tfscale COMMAND`: it finds the command's module and runs it.

A command is a module of `tfscale.cli` with `add_arguments(parser)` and `run(args) -> int`, which
may raise `BadInput`. Only the module that is asked for is imported. `bench` is not in the package:
its module is in the folder `benchmarks` of a checkout.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tfscale import __version__, load_tensorflow
from tfscale.cli.arguments import BadInput

_COMMANDS = {
    "bench": "measure what loss scaling costs on this machine",
    "demo": "train one model in four precisions and show what float16 loses without scaling",
    "lint": "list what in a saved model is dangerous in half precision",
    "profile": "measure a model's gradients and say which loss scale they need, if any",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        argv: arguments without the program's name; None means those of this process.

    Raises:
        SystemExit: with status 2 after a wrong option, 0 after `--help` and `--version`.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="tfscale",
        description="Loss scaling for Keras 3 on TensorFlow.",
        epilog="The commands need TensorFlow: pip install 'tfscale[cpu]' or 'tfscale[gpu]'.",
    )
    parser.add_argument("--version", action="version", version=f"tfscale {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {name: commands.add_parser(name, help=text) for name, text in _COMMANDS.items()}
    # argparse must know a command's options before it parses, and the others' need no import.
    asked = next((argument for argument in argv if argument in _COMMANDS), None)
    try:
        if asked is not None:
            module = _load(asked)
            parsers[asked].description = module.__doc__
            parsers[asked].formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(parsers[asked])
        args = parser.parse_args(argv)  # exits if no command is asked for
        return module.run(args)
    except (ImportError, BadInput) as error:
        print(f"tfscale {asked}: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1
    except KeyboardInterrupt:
        return 130


def _load(command: str) -> ModuleType:
    # TensorFlow reads both when it is imported. No line of its log among the output:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if command == "demo":
        # oneDNN needs 6 times as long for the float16 gradients of such small layers, and which
        # kernels it has depends on the CPU.
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    load_tensorflow()
    if command != "bench":
        return importlib.import_module(f"tfscale.cli.{command}")
    root = Path(__file__).resolve().parent.parent
    if not (root / "benchmarks" / "__main__.py").exists():
        raise ImportError("this command needs a checkout of the repository, not only the package.")
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.__main__")


if __name__ == "__main__":
    sys.exit(main())
