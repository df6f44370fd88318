"""Does this model need loss scaling, and which scale? Its gradients are measured and drawn.

MODEL is a file written by model.save('model.keras'), which also needs --data, or the word demo, for
the model and the digits of `python -m tfscale demo`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfscale.cli import arguments
from tfscale.cli.arguments import BadInput
from tfscale.cli.model_files import Arrays, first_sentence, load_arrays, load_model, shapes
from tfscale.diagnostics.batches import batches
from tfscale.diagnostics.profile_report import Profile, count_batches, power
from tfscale.diagnostics.profiling import profile
from tfscale.diagnostics.ranges import GradientRange, percent

if TYPE_CHECKING:
    from rich.console import Console

ROWS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m tfscale profile`."""
    parser.add_argument("model", metavar="MODEL", help="a .keras file, or: demo")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE.npz",
        help="file with the arrays x and y (or one for each of several inputs or outputs, by its "
        "name), and sample_weight if you use it; read without shuffling",
    )
    parser.add_argument(
        "--loss",
        help="name of a Keras loss, such as mse (default: what the model is compiled with)",
    )
    parser.add_argument(
        "--steps", type=arguments.at_least_1, default=8, help="batches to measure (default: 8)"
    )
    parser.add_argument(
        "--batch-size",
        type=arguments.at_least_1,
        help="that of the training, since gradients depend on it (default: 32; of the demo: 256)",
    )
    parser.add_argument(
        "--output",
        type=arguments.picture,
        default="tfscale-profile.png",
        metavar="FILE.png",
        help="where to draw the ranges (default: tfscale-profile.png)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, tabulate and draw; return the exit status.

    Raises:
        BadInput: a file, an option or the model in the file cannot be used.
        ImportError: an optional package is not installed.
    """
    arguments.require("matplotlib", "rich", *(["sklearn"] if args.model == "demo" else []))
    from rich.console import Console

    console = Console(highlight=False)
    model, arrays, loss, batch_size = _demo(args) if args.model == "demo" else _files(args)
    found = _measure(model, arrays, loss, args.steps, args.batch_size or batch_size, console)
    print_table(found, console)
    console.print(f"Proposal: {found.proposal}. {found.reason}", markup=False)
    found.plot(args.output)
    console.print(f"The ranges are drawn in {args.output}", markup=False, soft_wrap=True)
    return 0


def _demo(args: argparse.Namespace) -> tuple[keras.Model, Arrays, keras.losses.Loss, int]:
    """Model, arrays, loss and batch size of the demo."""
    from tfscale.cli import demo_training

    if args.data or args.loss:
        raise BadInput(
            "demo brings its own data and loss: leave --data and --loss out, or name a .keras file "
            f"instead of demo. Received: --data {args.data}, --loss {args.loss}"
        )
    keras.utils.set_random_seed(0)
    (x, y), _ = demo_training.digits(0)
    model = demo_training.build("mixed_float16")
    return model, (x, y, None), demo_training.loss(), demo_training.BATCH


def _files(args: argparse.Namespace) -> tuple[keras.Model, Arrays, str | None, int]:
    """Model and arrays of the user's files, the loss if one was named, and the batch size."""
    if args.data is None:
        raise BadInput(
            "--data must name an .npz file with a few batches for the model: write it with "
            "numpy.savez('batch.npz', x=x, y=y). Received: no --data"
        )
    if args.loss is not None:
        try:
            keras.losses.get(args.loss)
        except ValueError as error:
            raise BadInput(
                "--loss must be the name of a Keras loss, such as mse, binary_crossentropy or "
                f"sparse_categorical_crossentropy. Received: {args.loss}"
            ) from error
    path = Path(args.model)
    # With --loss, do not load the file's own loss, which Keras may not find.
    model = load_model(path, "tfscale.profile(model, x, y)", compiled=args.loss is None)
    if args.loss is None and not model.compiled:
        raise BadInput(
            f"The model must be compiled, or its loss be named: add --loss, such as --loss mse. "
            f"Received: {path}, which is not compiled, and no --loss"
        )
    return model, load_arrays(args.data, model), args.loss, 32


def _measure(
    model: keras.Model, arrays: Arrays, loss: Any, steps: int, batch_size: int, console: Console
) -> Profile:
    """Profile and show the progress: a bar on a terminal, otherwise a line."""
    from rich.progress import Progress

    total = min(steps, math.ceil(len(keras.tree.flatten(arrays)[0]) / batch_size))
    if not console.is_terminal:
        console.print(f"Measuring {count_batches(total)} of {batch_size} ...")
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        measured = batches(arrays, batch_size=batch_size)
        shown = progress.track(measured, total=total, description="Measuring the batches")
        try:
            return profile(model, shown, steps=steps, loss=loss)
        except (ValueError, TypeError, tf.errors.OpError) as error:
            raise BadInput(
                f"The arrays must be what the model takes{_expected(model)}, with finite gradients:"
                f" correct the file of --data. Received: {shapes(arrays)}. The error says: "
                f"{first_sentence(error)}"
            ) from error


def _expected(model: keras.Model) -> str:
    try:
        return f" (x {model.input_shape}) and compares with y ({model.output_shape})"
    except (AttributeError, ValueError):  # a subclassed model does not know its shapes
        return ""


def print_table(profile: Profile, console: Console) -> None:
    """Print the ranges of all gradients together, and of those that lose the most."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = [(r.name, r) for r in profile.variables if r.counted]
    rows += [(f"output of {r.name}", r) for r in profile.activations if r.counted]
    rows.sort(key=lambda row: (-row[1].lost(), -row[1].subnormal()))
    note = "Lost: becomes zero in float16, as a share of the values that are not zero."
    if len(rows) > ROWS:
        note += (
            f" Shown are the {ROWS} of {len(rows)} gradients that lose most; the picture has all."
        )
    table = Table(
        title=Text(
            f"Gradients of {profile.model}: {count_batches(profile.steps, profile.skipped)}, "
            f"measured in {profile.compute_dtype}"
        ),
        caption=note,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    scales = [1.0] if profile.scale == 1 else [1.0, profile.scale]
    table.add_column("gradient of", overflow="fold")
    lost = [f"lost\nat {power(scale)}" for scale in scales]
    for heading in ("values", "zero", *lost, "largest", "headroom"):
        table.add_column(heading, justify="right", no_wrap=True)

    def add(name: str, r: GradientRange, last: bool = False) -> None:
        table.add_row(
            Text(name),
            f"{r.zeros + r.nonzero:,}",
            percent(r.zero_share),
            *(percent(r.lost(scale)) for scale in scales),
            f"{r.largest:.2g}",
            "-" if r.headroom is None else f"2**{r.headroom}",
            end_section=last,
        )

    add("all variables", profile.all_variables)
    add("all layer outputs", profile.all_activations, last=True)
    for name, r in rows[:ROWS]:
        add(name, r)
    console.print(table)
