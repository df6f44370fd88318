"""What does loss scaling cost here? `python -m tfscale bench` measures, tabulates and draws it.

Measuring needs the repository's `benchmarks` folder. Table and picture are made from the JSON file
that it leaves, so that a machine with a GPU needs neither rich nor matplotlib.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

COLORS = {
    "none": "#9aa0a6",
    "keras": "#d1495b",
    "tfscale-unguarded": "#a9d6c5",
    "tfscale": "#1b6ca8",
    "tfscale-cond": "#7fb2d9",
    "tfscale-select": "#3f8fc7",
    "tfscale-compiled": "#124a73",
    "tfscale-step": "#2a9d8f",
    "torch": "#c9b79c",
    "torch-scaler": "#8f6f3f",
}
_LONGEST_BAR = 2.5  # where a bar is cut, so that it does not press the others together
_MISSING = "{} needs {}, which is not installed; mend it with: pip install 'tfscale[bench]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m tfscale bench`."""
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
        "--list", action="store_true", help="name the workloads and variants, and stop"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="rounds, each timing every variant once (default: 7 on a GPU; 21 short ones on a CPU,"
        " where other programs come and go)",
    )
    parser.add_argument(
        "--steps", type=int, help="steps in a timed block (default: about 2 s over all rounds)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="begin no further variant after this time (default: 150 with --quick)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results"),
        help="folder of the JSON file and the pictures",
    )
    parser.add_argument(
        "--from",
        dest="files",
        nargs="+",
        type=Path,
        metavar="JSON",
        help="measure nothing, show these results; of several, their union is saved too",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, or reads, and shows. Returns the exit status: 1 where a variant failed."""
    if args.files:
        try:
            data = load(args.files)
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
        path = args.out / args.files[-1].name
        if len(args.files) > 1:
            save(data, path)
    else:
        try:
            path = _measure(args)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        if path is None:
            return 0
        data = load([path])
        print(f"wrote {path}")
    try:
        print_table(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = path.with_suffix(".png")
        chart(data).savefig(picture, dpi=150)
        print(f"wrote {picture}")
    except ImportError as error:
        if args.files:
            raise
        print(f"{error}\nThen show the results with: python -m tfscale bench --from {path}")
    return int(any(r["error"] for r in data["results"]))


def harness(name: str) -> ModuleType:
    """Imports a module of the repository's `benchmarks` folder.

    Raises:
        ModuleNotFoundError: tfscale runs from an installed package, without the repository.
    """
    # Beside the package in a checkout; the `tfscale` command does not look where it is called from.
    for root in (Path(__file__).resolve().parent.parent, Path.cwd()):
        if str(root) not in sys.path and (root / "benchmarks" / "measure.py").exists():
            sys.path.append(str(root))
    try:
        return importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", f"benchmarks.{name}"):
            raise
        raise ModuleNotFoundError(
            "Measuring needs the folder `benchmarks` of the tfscale repository, which is no part of"
            " the installed package. Clone the repository and run this command in its root."
        ) from error


def _choose(given: str | None, known: list[str], default: list[str], what: str) -> list[str]:
    chosen = default if given is None else given.split(",")
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(
            f"--{what} must name some of {', '.join(known)}. Received: {', '.join(unknown)}"
        )
    return chosen


def _measure(args: argparse.Namespace) -> Path | None:
    workloads = harness("workloads").WORKLOADS
    variants = harness("variants")
    known = [*variants.VARIANTS, *variants.BASELINES]
    if args.list:
        print("workloads:", *workloads, sep="\n  ")
        print("variants:", *known, sep="\n  ")
        return None
    measure = harness("measure")
    kind = "quick" if args.quick else "gpu" if measure.gpus() else "cpu"
    unasked = [w.name for w in workloads.values() if kind in w.unasked]
    usual = [v.name for v in variants.VARIANTS.values() if v.quick or not args.quick]
    if importlib.util.find_spec("torch") is not None:
        usual += variants.BASELINES
    chosen = _choose(args.workloads, list(workloads), unasked, "workloads")
    wanted = _choose(args.variants, known, usual, "variants")

    for gpu in measure.gpus():
        measure.tf.config.experimental.set_memory_growth(gpu, True)
    found = measure.environment()
    card = "cpu" if found["card"] == "none" else found["card"]
    name = f"{found['date'][:10]} {card} {'quick' if args.quick else ''}".strip().lower()
    path: Path = args.out / (re.sub(r"[^a-z0-9]+", "-", name) + ".json")
    rounds = args.rounds or (7 if measure.gpus() else 21)
    seconds = args.seconds or (150.0 if args.quick else float("inf"))
    session = measure.Session(path, args.quick, rounds, args.steps, seconds)
    for workload in chosen:
        session.measure(workloads[workload], wanted)
    return path


def load(paths: list[Path]) -> dict[str, Any]:
    """Reads result files into one: of a pair measured twice, the later file's figures count.

    The variants of a workload come in the order of `COLORS`.

    Raises:
        ValueError: The files come from different cards, or from quick and full sizes.
    """
    files = [json.loads(path.read_text()) for path in paths]
    for key, part in (("card", "environment"), ("quick", "settings")):
        values = {file[part][key] for file in files}
        if len(values) > 1:
            raise ValueError(
                f"Results shown together must agree on `{key}`."
                f" Received: {', '.join(sorted(map(str, values)))}"
            )
    merged = {(r["workload"], r["variant"]): r for file in files for r in file["results"]}
    workloads = list(dict.fromkeys(workload for workload, _ in merged))
    variants = list(dict.fromkeys([*COLORS, *(variant for _, variant in merged)]))

    def place(result: dict[str, Any]) -> tuple[int, int]:
        return workloads.index(result["workload"]), variants.index(result["variant"])

    together = sorted(merged.values(), key=place)
    return {**files[-1], "results": together}


def save(data: dict[str, Any], path: Path) -> None:
    """Writes results so that the file is whole at any moment, also where the run is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


def _caption(data: dict[str, Any]) -> str:
    found = data["environment"]
    card = f"CPU, {found['cores']} cores" if found["card"] == "none" else found["card"]
    versions = [
        f"{n} {found[n]}" for n in ("tensorflow", "keras", "tfscale", "torch") if n in found
    ]
    size = "quick sizes, " if data["settings"]["quick"] else ""
    return f"{card}, {size}{', '.join(versions)}, {found['date'][:10]}"


def print_table(data: dict[str, Any]) -> None:
    """Prints a row for each workload and variant: step time, ratio, tracing, peak memory."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise ImportError(_MISSING.format("The table", "rich")) from error
    table = Table(title=_caption(data), title_justify="left")
    for column in ("workload", "variant"):
        table.add_column(column, no_wrap=True)
    for column in ("ms", "ratio", "of", "trace s", "first step s", "peak MiB"):
        table.add_column(column, justify="right")
    before = None
    for r in data["results"]:
        if before not in (None, r["workload"]):
            table.add_section()
        workload = "" if r["workload"] == before else r["workload"]
        before = r["workload"]
        if r["ms"] is None:
            table.add_row(
                workload, r["variant"], "failed" if r["error"] else "", "", "", "", "", ""
            )
            continue
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.3f}"
        peak = (
            "" if r["step_bytes"] is None else f"{(r['state_bytes'] + r['step_bytes']) / 2**20:.0f}"
        )
        table.add_row(
            workload,
            r["variant"],
            f"{r['ms']:.3f}",
            ratio,
            r["baseline"],
            f"{r['trace_s']:.1f}",
            f"{r['first_step_s']:.1f}",
            peak,
        )
    console = Console()
    # Piped into a file there is no terminal to fit, and a cut table is no record.
    Console(width=max(console.width, 120)).print(table)


def chart(data: dict[str, Any]) -> Any:
    """Draws the ratios as bars, one panel a workload, 1 being the step without loss scaling.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(_MISSING.format("The picture", "matplotlib")) from error
    panels: dict[str, list[dict[str, Any]]] = {}
    for r in data["results"]:
        if r["ratio"] is not None and r["variant"] != r["baseline"]:
            panels.setdefault(r["workload"], []).append(r)
    rows = max(1, sum(len(p) for p in panels.values()))
    figure = Figure(figsize=(8, 1.2 + 0.27 * rows + 0.32 * len(panels)), layout="constrained")
    figure.suptitle(
        f"Time of a step, without loss scaling = 1; whiskers: quartiles\n{_caption(data)}",
        fontsize=9,
    )
    if not panels:
        return figure
    widest = max(r["ratio"] for p in panels.values() for r in p)
    heights = [len(p) + 0.8 for p in panels.values()]
    grid = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)
    for axes, (workload, results) in zip(grid[:, 0], panels.items(), strict=True):
        names = [r["variant"] for r in results]
        # One after the other: low, ratio, high, as far as they are shown.
        spread = [r["ratio_quartiles"] or (r["ratio"], r["ratio"]) for r in results]
        shown = [
            [min(x, _LONGEST_BAR) for x in (low, r["ratio"], high)]
            for r, (low, high) in zip(results, spread, strict=True)
        ]
        ratios = [x for _, x, _ in shown]
        whiskers = [
            [max(0, x - low) for low, x, _ in shown],
            [max(0, high - x) for _, x, high in shown],
        ]
        colors = [COLORS.get(n, "#666666") for n in names]
        bars = axes.barh(names, ratios, color=colors, xerr=whiskers, error_kw={"elinewidth": 0.8})
        texts = [
            f"{r['ratio']:.2f}" + (", cut" if r["ratio"] > _LONGEST_BAR else "") for r in results
        ]
        labels = axes.bar_label(bars, texts, padding=3, fontsize=7)
        for label in labels:  # the line at 1 must not strike a figure through
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        axes.axvline(1, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_title(workload, fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_xlim(0, 1.1 * min(max(widest, 1.0), _LONGEST_BAR))
    return figure
