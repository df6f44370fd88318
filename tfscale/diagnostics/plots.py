"""Draw a gradient profile: what float16 loses before and after scaling, and in which layer.

The first two panels follow figure 3 of Micikevicius et al., "Mixed Precision Training", ICLR 2018
(arXiv:1710.03740). The ranges of float16 differ in hatching and labels as well as in colour, so
that the picture works in black and white.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfscale.diagnostics.ranges import (
    ROUNDS_TO_ZERO,
    SMALLEST_NORMAL,
    GradientRange,
    merge,
    percent,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Beyond 2**16 float16 is infinite.
_TOO_LARGE = 16
# The most rows of the map that all get a label; of more rows, only some do.
_LABELLED_ROWS = 70
_ROW_INCHES = 0.17

_VARIABLES, _ACTIVATIONS = "#22436e", "#e0a030"


def plot_ranges(
    path: str | os.PathLike[str],
    title: str,
    activations: Sequence[GradientRange],
    variables: Sequence[GradientRange],
    scale: float,
    policy: str,
) -> None:
    """Draw the ranges of gradients into a file.

    At the top is the histogram of the exponents of all gradients, at scale 1 and at the proposed
    scale, over the ranges of float16. Below is a map with a row for every variable and layer, in
    the order of use; a darker bin has a larger share of the row's values.

    Args:
        path: file to write; its suffix sets the format (png, svg, pdf).
        title: what was measured.
        activations: the gradients of the layers' outputs.
        variables: the gradients of the variables.
        scale: the proposed loss scale.
        policy: the name of the proposed policy.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Profile.plot needs matplotlib: pip install 'tfscale[bench]'.") from error

    rows = [r for r in (*activations, *variables) if r.nonzero]
    groups = (merge("activations", activations), merge("variables", variables))
    total = merge("all", groups)
    shift = round(math.log2(scale))
    low, high = _limits(rows, shift)
    map_inches = min(max(len(rows), 4), _LABELLED_ROWS) * _ROW_INCHES
    # A Figure of its own, not pyplot: the caller's backend and figures stay as they are.
    figure = Figure(figsize=(11, 4.6 + map_inches + 1.0), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(4.1, map_inches + 0.9))
    left = figure.add_subplot(grid[0, 0])
    right = figure.add_subplot(grid[0, 1], sharex=left, sharey=left)
    for axes, moved in ((left, 0), (right, shift)):
        _histogram(axes, groups, moved, low, high)
    left.set_ylabel("share of all values (%)")
    handles, labels = left.get_legend_handles_labels()
    # Below the names of the ranges, and in the order in which the bars are stacked.
    left.legend(
        handles[::-1],
        labels[::-1],
        fontsize=8,
        framealpha=0.95,
        loc="upper right",
        bbox_to_anchor=(0.99, 0.8),
    )
    left.set_title(f"At loss scale 1\n{_losses(total, 1.0)}", fontsize=10)
    proposed = "1, no scaling" if shift == 0 else f"2$^{{{shift}}}$ ({policy})"
    right.set_title(f"At the proposed loss scale: {proposed}\n{_losses(total, scale)}", fontsize=10)
    outputs = sum(bool(r.nonzero) for r in activations)
    _map(figure.add_subplot(grid[1, :]), rows, outputs, low, high)
    zeros = percent(total.zero_share)
    figure.suptitle(f"{title}, {zeros} exact zeros (not drawn)", fontweight="bold")
    figure.savefig(path, dpi=130)


def _limits(ranges: list[GradientRange], shift: int) -> tuple[int, int]:
    """First and last exponent to draw: those of all values, and all of float16."""
    used = [e for r in ranges for e in r.histogram()]
    used += [e + shift for e in used]
    return max(min([*used, ROUNDS_TO_ZERO - 4]), -70), min(max([*used, _TOO_LARGE + 2]), 50)


def _losses(total: GradientRange, scale: float) -> str:
    lost, subnormal = percent(total.lost(scale)), percent(total.subnormal(scale))
    return f"lost {lost}, subnormal {subnormal} of the non-zero values"


def _histogram(
    axes: Axes, groups: tuple[GradientRange, ...], shift: int, low: int, high: int
) -> None:
    total = sum(r.zeros + r.nonzero for r in groups) or 1
    _shade(axes, low, high)
    bottom = np.zeros(high + 1 - low)
    for r, colour, hatch in zip(groups, (_ACTIVATIONS, _VARIABLES), ("", "////"), strict=True):
        height = _shares(r, total, low, high, shift)
        axes.bar(
            range(low, high + 1),
            height,
            bottom=bottom,
            align="edge",
            width=1.0,
            color=colour,
            edgecolor="white" if hatch else "black",
            linewidth=0.3,
            hatch=hatch,
            label=f"gradients of {r.name}",
            zorder=3,
        )
        bottom = bottom + height
    # Room above the bars for the names of the ranges and the legend.
    peak = bottom.max() or 1.0
    axes.set_ylim(0, max(1.45 * peak, axes.get_ylim()[1]))
    axes.set_xlim(low, high + 1)
    axes.set_xlabel("exponent of the scaled gradient, $\\log_2|g|$")


def _shares(r: GradientRange, total: int, low: int, high: int, shift: int = 0) -> np.ndarray:
    """Values by exponent from `low` to `high`, in percent of `total`; those beyond at the ends."""
    shares = np.zeros(high + 1 - low)
    for exponent, count in r.histogram().items():
        shares[min(max(exponent + shift, low), high) - low] += 100 * count / total
    return shares


def _ranges(low: int, high: int) -> tuple[tuple[str, int, int, str, str], ...]:
    """float16's ranges: name, first exponent, end, grey, hatch."""
    return (
        ("lost (zero)", low, ROUNDS_TO_ZERO, "0.80", "xx"),
        ("subnormal", ROUNDS_TO_ZERO, SMALLEST_NORMAL, "0.90", ".."),
        ("normal", SMALLEST_NORMAL, _TOO_LARGE, "1.00", ""),
        ("infinite", _TOO_LARGE, high + 1, "0.80", "++"),
    )


def _shade(axes: Axes, low: int, high: int) -> None:
    for name, start, end, grey, hatch in _ranges(low, high):
        axes.axvspan(start, end, facecolor=grey, edgecolor="0.65", hatch=hatch, linewidth=0)
        axes.axvline(start, color="0.35", linewidth=0.8, zorder=2)
        axes.text(
            (start + end) / 2,
            0.985,
            name,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=8,
            rotation=90 if end - start < 8 else 0,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
            zorder=4,
        )


def _map(axes: Axes, rows: list[GradientRange], outputs: int, low: int, high: int) -> None:
    axes.set_title(
        "Each layer and variable at loss scale 1; dashed: the limits of float16's ranges",
        fontsize=10,
    )
    axes.set_xlabel("exponent of the gradient, $\\log_2|g|$")
    if not rows:
        axes.text(0.5, 0.5, "every gradient is zero", ha="center", transform=axes.transAxes)
        return
    image = axes.imshow(
        [_shares(r, r.nonzero, low, high) for r in rows],
        cmap="Greys",
        aspect="auto",
        interpolation="nearest",
        extent=(low, high + 1, len(rows), 0),
        vmin=0,
    )
    for _, start, _, _, _ in _ranges(low, high)[1:]:
        axes.axvline(start, color="tab:red", linewidth=1.0, linestyle="--")
    axes.axhline(outputs, color="black", linewidth=1.2)
    every = math.ceil(len(rows) / _LABELLED_ROWS)
    axes.set_yticks(
        [i + 0.5 for i in range(0, len(rows), every)],
        [_short(r.name) for r in rows[::every]],
        fontsize=7,
    )
    axes.set_ylabel(
        "layer outputs, then variables" + (f" (every {every}th named)" if every > 1 else "")
    )
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=30)
    bar.set_label("share of the row's non-zero values (%)")


def _short(name: str, limit: int = 38) -> str:
    return name if len(name) <= limit else "…" + name[1 - limit :]
