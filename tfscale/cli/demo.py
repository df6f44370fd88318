"""What does float16 lose without loss scaling? One small model, trained four times, shows it.

The model colours every stroke pixel of a handwritten digit with the digit that it belongs to. Its
focal loss is a mean over batch x pixels x classes, 163,840 elements, so the gradient of each is a
few millionths at most. float16 rounds numbers below 3e-8 to zero: the few large gradients of the
strokes survive, but of the many small ones of the background, all are lost at first, and a third
later. That upsets their balance, and the model learns the wrong thing.

The demo takes about 2 minutes on a CPU and writes a picture of the learning curves to the working
directory.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tfscale.cli import arguments

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import TaskID

    from tfscale.cli.demo_training import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m tfscale demo`."""
    parser.add_argument(
        "--seed",
        type=_seed,
        default=0,
        help="for weights, split and order (default: 0)",
    )
    parser.add_argument(
        "--epochs",
        type=arguments.at_least_1,
        default=30,
        help="passes over the training digits (default: 30)",
    )
    parser.add_argument(
        "--output",
        type=arguments.picture,
        default="tfscale-demo.png",
        metavar="FILE.png",
        help="where to draw the learning curves (default: tfscale-demo.png)",
    )


def _seed(text: str) -> int:
    return arguments.number(text, "a whole number from 0 to 2**32 - 1", 0, 2**32 - 1)


def run(args: argparse.Namespace) -> int:
    """Train, tabulate and draw; return the exit status.

    Raises:
        ImportError: an optional package is not installed.
    """
    arguments.require("matplotlib", "rich", "sklearn")
    from rich.console import Console

    from tfscale.cli.demo_training import four_runs

    console = Console(highlight=False)
    console.print(
        "A network learns from gradients: numbers that say how to change its weights. float16, "
        "which is fast on GPUs, turns the smallest ones into zero. Loss scaling multiplies them by "
        "a large number first, so that they survive. Here the same network learns to read digits "
        "four times.\n"
    )
    runs = four_runs()
    train_all(runs, args.seed, args.epochs, console)
    print_table(runs, console)
    draw(runs).savefig(args.output, dpi=150)
    console.print(f"The learning curves are in {args.output}\n", soft_wrap=True)
    exact, unscaled, scaled, _ = (f"{one.accuracy[-1]:.0%}" for one in runs)
    console.print(
        f"In float32, which loses nothing, the network learned the right digit for {exact} of the "
        f"pixels; in float16 for {unscaled}; in float16 with loss scaling for {scaled}."
    )
    return 0


def train_all(runs: list[Run], seed: int, epochs: int, console: Console) -> None:
    """Train the runs one after the other and fill in their results.

    A terminal shows a progress bar for each run, anything else a line.

    Args:
        runs: from `four_runs`.
        seed: of the weights, the split and the order of the digits.
        epochs: passes over the training digits.
        console: where to show the progress.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from tfscale.cli.demo_training import digits, train

    columns = (
        TextColumn("{task.description:17}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[accuracy]}"),
    )
    data = digits(seed)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for one in runs:
            bar = progress.add_task(one.name, total=epochs, accuracy="")

            def advance(one: Run = one, bar: TaskID = bar) -> None:
                progress.update(bar, advance=1, accuracy=f"accuracy {one.accuracy[-1]:.1%}")

            train(one, data, seed, epochs, advance)
            if not console.is_terminal:
                console.print(f"{one.name:17} accuracy {one.accuracy[-1]:.1%}")


def print_table(runs: list[Run], console: Console) -> None:
    """Print the results of the trained runs."""
    from rich.table import Table

    from tfscale.cli.demo_training import HELD_OUT

    table = Table(
        title=f"The right digit for every stroke pixel of {HELD_OUT} held-out digits",
        caption="Gradient lost: share of the gradients of weights and activations that is zero here"
        " but not in float32, mean over the run.",
    )
    table.add_column("run", no_wrap=True)
    for heading in ("held-out accuracy", "skipped steps", "final scale", "gradient lost"):
        table.add_column(heading, justify="right")
    for one in runs:
        table.add_row(
            one.name,
            f"{one.accuracy[-1]:.1%}",
            "-" if one.skipped is None else str(one.skipped),
            "-" if one.scale is None else f"{one.scale:g}",
            f"{sum(one.lost) / len(one.lost):.1%}",
        )
    console.print(table)


def draw(runs: list[Run]) -> Figure:
    """Draw the learning curves of the four trained runs."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    lines: list[dict[str, Any]] = [
        {"color": "#b8bcc2", "linewidth": 7, "solid_capstyle": "round"},
        {"color": "#c8102e", "linewidth": 2.2, "linestyle": "--", "marker": "x"},
        {"color": "#0b3d91", "linewidth": 2.2, "marker": "o", "markersize": 5},
        {"color": "#3d3d3d", "linewidth": 1.4, "linestyle": ":", "marker": "^", "markersize": 5},
    ]
    # Not pyplot, so the caller's backend and figures stay as they are.
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for one, line in zip(runs, lines, strict=True):
        epochs = range(1, len(one.accuracy) + 1)
        axes.plot(epochs, one.accuracy, label=one.name, markevery=max(1, len(epochs) // 10), **line)
    # Labels are at the curves' ends, pushed apart if the ends are close.
    height = 1.0
    for one in sorted(runs, key=lambda one: -one.accuracy[-1]):
        height = min(height - 0.06, one.accuracy[-1])
        axes.annotate(
            f"{one.name}: {one.accuracy[-1]:.0%}",
            (len(one.accuracy), one.accuracy[-1]),
            (1.02, height),
            textcoords=("axes fraction", "data"),
            va="center",
        )
    axes.set(xlabel="epoch", ylabel="held-out accuracy of stroke pixels", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title("The same model, digits and seed in four precisions", loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    return figure
