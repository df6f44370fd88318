"""The pictures of a file of results: curves with their spread over the seeds, and the faults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.trainings.names import FAULTS, TRAININGS
from benchmarks.trainings.report import Json, results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "figure.dpi": 150,
    "figure.facecolor": "white",  # opaque: the same on a light and on a dark page
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "tfscale",
}
# Color, dashes and width. Curves that coincide show as a thin line within a wide one.
LINES: dict[str, tuple[str, str, float]] = {
    "float32": ("#b8b8b8", "-", 4.5),
    "float16": ("#d1495b", "-", 1.5),
    "keras": ("#e8a33d", "-", 2.8),
    "wrap": ("#1b6ca8", "-", 1.4),
    "compile": ("#0b3c5d", (0, (4, 4)), 1.4),  # type: ignore[dict-item]
    "bfloat16": ("#5f9e6e", ":", 1.6),
}
LABELS = {
    "float16": "float16, not scaled",
    "keras": "Keras' LossScaleOptimizer",
    "wrap": "tfscale.wrap",
    "compile": "tfscale.compile",
}
TITLES = {
    "lm": "language model: validation loss",
    "images": "image classifier: validation accuracy",
    "denoiser": "denoiser: validation loss",
}
_FURTHER = ("#7b3fa0", "#a0522d", "#2f8f8f", "#555555")


def draw(data: Json, path: Path) -> list[Path]:
    """Draws what the results have.

    Args:
        data: the results.
        path: their file; the pictures go beside it, with `-curves`, `-faults-lm` and so on added to
            its name.

    Returns:
        The pictures.
    """
    import matplotlib.pyplot as plt

    made = []
    with plt.rc_context(STYLE):
        figures = {"curves": curves(data)}
        figures |= {f"faults-{training}": faults(data, training) for training in TRAININGS}
        for name, figure in figures.items():
            if figure is not None:
                made.append(path.with_name(f"{path.stem}-{name}.svg"))
                figure.savefig(made[-1], metadata={"Date": None}, bbox_inches="tight")
                plt.close(figure)
    return made


def curves(data: Json) -> Figure | None:
    """The metric of each training over the steps: mean, and least to largest of the seeds."""
    import matplotlib.pyplot as plt

    shown = [t for t in TRAININGS if results(data, "quality", t)]
    if not shown:
        return None
    figure, rooms = plt.subplots(1, len(shown), figsize=(3.6 * len(shown), 3), squeeze=False)
    for training, axes in zip(shown, rooms[0], strict=True):
        metric = TRAININGS[training]
        found = results(data, "quality", training)
        shown_values = []
        for variant, result in found.items():
            runs = [r for r in result.get("runs", []) if r["curve"]]
            if runs:
                values = _numbers([r["curve"][metric] for r in runs])
                _line(axes, variant, list(found), runs[0]["every"], values)
                shown_values.append(values)
        _limit(axes, shown_values)
        axes.set_title(TITLES[training])
        axes.set_xlabel("step")
    _legend(figure, rooms[0])
    return figure


def faults(data: Json, training: str) -> Figure | None:
    """Metric, loss scale and BatchNorm's statistics over the steps, for each fault."""
    import matplotlib.pyplot as plt

    found = results(data, "faults", training)
    runs = {v: [r for r in result.get("runs", []) if r["curve"]] for v, result in found.items()}
    shown = [f for f in FAULTS if any(r["fault"] == f for rs in runs.values() for r in rs)]
    if not shown:
        return None
    moving = any("statistics" in r for rs in runs.values() for r in rs)
    metric = TRAININGS[training]
    height = 2.2 * (2 + moving)
    figure, rooms = plt.subplots(
        2 + moving,
        len(shown),
        figsize=(3.6 * len(shown), height),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    clean = results(data, "quality", training).get("float32", {}).get("runs", [])
    shown_values = []
    for fault, column in zip(shown, rooms.T, strict=True):
        if clean:
            values = _numbers([r["curve"][metric] for r in clean])
            _line(column[0], "float32", list(found), clean[0]["every"], values)
            shown_values.append(values)
        for variant, all_runs in runs.items():
            chosen = [r for r in all_runs if r["fault"] == fault]
            if not chosen:
                continue
            values = _numbers([r["curve"][metric] for r in chosen])
            _line(column[0], variant, list(found), chosen[0]["every"], values)
            shown_values.append(values)
            # The scale of one run: a mean over the seeds would be at none that was used.
            steps, scales = zip(*chosen[0]["scale"], (chosen[0]["steps"], None), strict=True)
            heights = [*scales[:-1], scales[-2]]
            column[1].plot(steps, heights, drawstyle="steps-post", **_style(variant, list(found)))
            if moving:
                statistics = _numbers([r["statistics"] for r in chosen])
                _line(column[2], variant, list(found), chosen[0]["every"], statistics)
        column[0].set_title(FAULTS[fault])
        column[1].set_yscale("log", base=2)
        column[-1].set_xlabel("step")
    _limit(rooms[0, 0], shown_values)
    rooms[0, 0].set_ylabel(TITLES[training].split(": ")[1])
    rooms[1, 0].set_ylabel("loss scale")
    if moving:
        rooms[2, 0].set_ylabel("largest moving statistic\n(a cross: not finite)")
    _legend(figure, rooms[0])
    return figure


def _numbers(rows: list[list[float | None]]) -> np.ndarray:
    return np.array([[np.nan if v is None else v for v in row] for row in rows], float)


def _style(variant: str, variants: list[str]) -> dict[str, Any]:
    label = LABELS.get(variant, variant)
    if variant in LINES:
        color, dashes, width = LINES[variant]
    else:
        further = [v for v in variants if v not in LINES]
        color, dashes, width = _FURTHER[further.index(variant) % len(_FURTHER)], "-", 1.2
    return {"color": color, "linestyle": dashes, "linewidth": width, "label": label}


def _line(axes: Axes, variant: str, variants: list[str], every: int, values: np.ndarray) -> None:
    """Mean and range of the rows of `values`; crosses below where one is not finite."""
    steps = np.arange(1, values.shape[1] + 1) * every
    style = _style(variant, variants)
    axes.plot(steps, values.mean(0), **style)
    axes.fill_between(
        steps, values.min(0), values.max(0), color=style["color"], alpha=0.2, linewidth=0
    )
    broken = ~np.isfinite(values).all(0)
    place = 0.04 + 0.05 * (variants.index(variant) if variant in variants else 0)
    axes.plot(
        steps[broken],
        np.full(broken.sum(), place),
        "x",
        color=style["color"],
        markersize=4,
        transform=axes.get_xaxis_transform(),
    )


def _limit(axes: Axes, curves: list[np.ndarray]) -> None:
    """Cuts the start off, whose values would flatten all the rest."""
    settled = [values[:, values.shape[1] // 5 :] for values in curves]
    numbers = np.concatenate([v[np.isfinite(v)] for v in settled] or [np.array([])])
    if len(numbers):
        margin = 0.05 * (numbers.max() - numbers.min()) or 0.01
        axes.set_ylim(numbers.min() - margin, numbers.max() + margin)


def _legend(figure: Figure, rooms: Any) -> None:
    entries: dict[str, Any] = {}
    for axes in rooms:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.tight_layout()
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=min(6, len(entries)),
        frameon=False,
    )
