"""Measures what loss scaling costs on this machine, and shows it as a table and a picture."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from benchmarks.measure import Session, environment, gpus
from benchmarks.report import RATIO, chart, load, print_table, save
from benchmarks.variants import BASELINES, VARIANTS
from benchmarks.workloads import WORKLOADS

_RESULTS = Path(__file__).parent / "results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m benchmarks`."""
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: under 3 minutes on a CPU"
    )
    parser.add_argument(
        "--workloads", metavar="A,B", help="what to train (default: what suits the machine)"
    )
    parser.add_argument(
        "--variants", metavar="A,B", help="how to scale (default: all; fewer with --quick)"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of workloads and variants, and stop"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="rounds, each of which times every variant once (default: 7 on a GPU; 21 short ones on"
        " a CPU, which other programs disturb)",
    )
    parser.add_argument(
        "--steps", type=int, help="steps in a timed block (default: about 2 s over all rounds)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="start no further variant after this time (default: 150 with --quick)",
    )
    parser.add_argument(
        "--out", type=Path, default=_RESULTS, help="folder for the JSON file and the picture"
    )
    parser.add_argument(
        "--from",
        dest="files",
        nargs="+",
        type=Path,
        metavar="JSON",
        help="measure nothing and show these results; several are also saved as one",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, or reads, and shows.

    Args:
        args: the parsed options of `add_arguments`.

    Returns:
        The exit status: 1 if a variant failed, 2 if an option is wrong.

    Raises:
        ImportError: results are to be shown, and rich or matplotlib is not installed.
    """
    try:
        if args.files:
            data, path = load(args.files), args.out / args.files[-1].name
            args.out.mkdir(parents=True, exist_ok=True)
            if len(args.files) > 1:
                save(data, path)
        else:
            path = _measure(args)
            if path is None:
                return 0
            data = load([path])
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        print_table(data)
        picture = path.with_suffix(".png")
        chart(data).savefig(picture, dpi=150)
        print(f"wrote {picture}")
    except ImportError as error:
        if args.files:
            raise
        print(f"{error}\nThen show the results with: python -m benchmarks --from {path}")
    return int(any(r["error"] for r in data["results"]))


def _choose(given: str | None, known: list[str], default: list[str], what: str) -> list[str]:
    chosen = default if given is None else given.split(",")
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(
            f"--{what} must name some of {', '.join(known)}. Received: {', '.join(unknown)}"
        )
    return chosen


def _measure(args: argparse.Namespace) -> Path | None:
    """Measures into a new file and returns its path; None after `--list`."""
    known = [*VARIANTS, *BASELINES]
    if args.list:
        print("workloads:", *WORKLOADS, sep="\n  ")
        print("variants:", *known, sep="\n  ")
        return None
    kind = "quick" if args.quick else "gpu" if gpus() else "cpu"
    default = [w.name for w in WORKLOADS.values() if kind in w.default_in]
    usual = [v.name for v in VARIANTS.values() if v.quick or not args.quick]
    if importlib.util.find_spec("torch") is not None:
        usual += BASELINES
    workloads = _choose(args.workloads, list(WORKLOADS), default, "workloads")
    variants = _choose(args.variants, known, usual, "variants")

    for gpu in gpus():
        tf.config.experimental.set_memory_growth(gpu, True)
    found = environment()
    card = "cpu" if found["card"] == "none" else found["card"]
    name = f"{found['date'][:10]} {card} {'quick' if args.quick else ''}".strip().lower()
    path: Path = args.out / (re.sub(r"[^a-z0-9]+", "-", name) + ".json")
    rounds = args.rounds or (7 if gpus() else 21)
    seconds = args.seconds or (150.0 if args.quick else float("inf"))
    print(f"{RATIO} (quartiles)")
    session = Session(path, args.quick, rounds, args.steps, seconds)
    for workload in workloads:
        session.measure(WORKLOADS[workload], variants)
    print(f"wrote {path}")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command `python -m benchmarks` and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
