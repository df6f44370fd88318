"""Result files, and the table and picture that show them.

Measuring needs neither rich nor matplotlib: a machine with a GPU writes the file, any other one
shows it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
_LONGEST_BAR = 2.5  # a longer bar is cut, because it would leave no room for the others
_MISSING = "{} needs {}, which is not installed; install it with: pip install 'tfscale[bench]'"
RATIO = "ratio: median of per-round ratios"


def load(paths: list[Path]) -> dict[str, Any]:
    """Reads result files into one; if two contain the same pair, the later file counts.

    Args:
        paths: files that a measurement wrote.

    Returns:
        Environment and settings of the last file, and the results of all. The variants of a
        workload have the order of `COLORS`.

    Raises:
        ValueError: a path names no such file, or the files are from different cards, or from quick
            and full sizes.
    """
    files = [_read(path) for path in paths]
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

    return {**files[-1], "results": sorted(merged.values(), key=place)}


def _read(path: Path) -> dict[str, Any]:
    try:
        file = json.loads(path.read_text())
        file["environment"], file["settings"], file["results"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--from must name files that `python -m benchmarks` wrote. Received: {path}"
        ) from error
    return file


def save(data: dict[str, Any], path: Path) -> None:
    """Writes results in one step, so that a run that is killed leaves a complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


def with_quartiles(ratio: float, quartiles: tuple[float, float] | None) -> str:
    """A ratio as text, with its quartiles if there are any: "1.030 (1.021 to 1.042)"."""
    if quartiles is None:
        return f"{ratio:.3f}"
    low, high = quartiles
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"


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
    table = Table(title=_caption(data), caption=f"{RATIO} (quartiles)", title_justify="left")
    for column in ("workload", "variant"):
        table.add_column(column, no_wrap=True)
    for column in ("ms", "ratio", "of", "trace s", "first step s", "peak MiB"):
        table.add_column(column, justify="right", no_wrap=column == "ratio")
    before = None
    for r in data["results"]:
        if before not in (None, r["workload"]):
            table.add_section()
        workload = "" if r["workload"] == before else r["workload"]
        before = r["workload"]
        if r["ms"] is None:
            table.add_row(workload, r["variant"], "failed" if r["error"] else "")
            continue
        ratio = "" if r["ratio"] is None else with_quartiles(r["ratio"], r["ratio_quartiles"])
        state, step = r["state_bytes"], r["step_bytes"]
        table.add_row(
            workload,
            r["variant"],
            f"{r['ms']:.3f}",
            ratio,
            r["baseline"],
            f"{r['trace_s']:.1f}",
            f"{r['first_step_s']:.1f}",
            "" if step is None else f"{(state + step) / 2**20:.0f}",
        )
    console = Console()
    # In a pipe there is no terminal width to respect, and a cut table is no record.
    Console(width=max(console.width, 120)).print(table)


def chart(data: dict[str, Any]) -> Figure:
    """Draws the ratios as bars, with one panel for each workload; the baseline is 1."""
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
        "Time of a step relative to the step without loss scaling\n"
        f"{RATIO}; whiskers: quartiles\n{_caption(data)}",
        fontsize=9,
    )
    if not panels:
        return figure
    widest = max(r["ratio"] for p in panels.values() for r in p)
    heights = [len(p) + 0.8 for p in panels.values()]
    grid = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)
    for axes, (workload, results) in zip(grid[:, 0], panels.items(), strict=True):
        _draw_panel(axes, results)
        axes.set_title(workload, fontsize=8, loc="left")
    grid[0, 0].set_xlim(0, 1.1 * min(max(widest, 1.0), _LONGEST_BAR))
    return figure


def _draw_panel(axes: Any, results: list[dict[str, Any]]) -> None:
    names = [r["variant"] for r in results]
    # For each bar: low, ratio, high, cut to what is shown.
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
    texts = [f"{r['ratio']:.2f}" + (", cut" if r["ratio"] > _LONGEST_BAR else "") for r in results]
    for label in axes.bar_label(bars, texts, padding=3, fontsize=7):
        # The line at 1 must not cross a figure.
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
