"""Trains real models in several precisions, with and without a scaled loss, and compares them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.trainings.data import default_folder, fetch
from benchmarks.trainings.driver import Driver, Json
from benchmarks.trainings.names import FAULTS, TRAININGS, VARIANTS, WITH_FAULTS, parse
from benchmarks.trainings.report import tables

PARTS = ("quality", "faults", "memory", "timing")


def parser() -> argparse.ArgumentParser:
    """The options of `python -m benchmarks.trainings`."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.trainings",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add(
        "what",
        choices=["fetch", "all", *PARTS, *TRAININGS, "table", "plot"],
        help="fetch the data; run everything, or one part or training; show the results",
    )
    add("--data", type=Path, help="folder of the data; else that in TFSCALE_DATA, else a cache")
    add("--out", type=Path, default=Path("trainings.json"), help="file of results, also of earlier")
    add("--only", default="", help="only these parts, trainings, variants, faults: lm,keras,wrap")
    add(
        "--policy",
        action="append",
        default=[],
        metavar="VARIANT",
        help="one more variant, with settings of tfscale.Dynamic: 'wrap(growth_interval=200)'",
    )
    add("--seeds", type=int, default=3, help="seeds of a training")
    add("--fault-seeds", type=int, default=1, help="seeds of a training with faults")
    add("--steps", type=int, help="steps of a training, a multiple of --every")
    add("--every", type=int, help="steps between validations")
    add("--rounds", type=int, default=5, help="rounds of a timing")
    add("--timed-steps", type=int, default=50, help="timed steps of a round")
    add("--limit", type=int, default=8 * 2**30, help="bytes of memory to find the batch for")
    add("--jobs", type=int, default=1, help="processes side by side")
    add("--seconds", type=float, default=1e6, help="time after which all processes are ended")
    add("--tiny", action="store_true", help="sizes for a test")
    return made


def jobs(args: argparse.Namespace) -> list[Json]:
    """The jobs that the options ask for.

    Raises:
        ValueError: a name is unknown.
    """
    only = set(filter(None, args.only.split(",")))
    known = {*PARTS, *TRAININGS, *VARIANTS, *FAULTS}
    if only - known:
        raise ValueError(
            f"--only must name some of {', '.join((*PARTS, *TRAININGS, *VARIANTS, *FAULTS))}. "
            f"Received: {', '.join(sorted(only - known))}"
        )
    for name in args.policy:
        parse(name)

    def chosen(names: Iterable[str]) -> list[str]:
        names = list(names)
        return [n for n in names if n in only] if only & set(names) else names

    parts = [args.what] if args.what in PARTS else chosen(PARTS)
    if args.what in TRAININGS:
        parts = chosen(["quality"])
    sizes = {"steps": args.steps, "every": args.every}
    common = {
        "tiny": args.tiny,
        "data": str(args.data),
        "sizes": {name: value for name, value in sizes.items() if value is not None},
    }
    own: dict[str, Json] = {
        "quality": {"seeds": list(range(args.seeds))},
        "faults": {"seeds": list(range(args.fault_seeds)), "faults": chosen(FAULTS)},
        "memory": {"limit": args.limit},
        "timing": {"timed_steps": args.timed_steps},
    }
    found = []
    for part in parts:
        faulty = part == "faults"
        trainings = WITH_FAULTS["trainings"] if faulty else TRAININGS
        variants = WITH_FAULTS["variants"] if faulty else VARIANTS
        for training in [args.what] if args.what in TRAININGS else chosen(trainings):
            for variant in [*chosen(variants), *args.policy]:
                job = {"part": part, "training": training, "variant": variant}
                found.append({**job, **common, **own[part]})
    return found


def _show(what: str, path: Path) -> int:
    data = json.loads(path.read_text())
    if what == "table":
        print(tables(data))
    else:
        from benchmarks.trainings.plots import draw

        print(*draw(data, path), sep="\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 1 if something is left to run or failed."""
    args = parser().parse_args(argv)
    args.data = args.data or default_folder()
    try:
        if args.what == "fetch":
            fetch(args.data)
            return 0
        if args.what in ("plot", "table"):
            return _show(args.what, args.out)
        todo = jobs(args)
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if Driver(args.out, args.jobs, args.seconds).run(todo, args.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
