"""The names of everything that is run; reading them needs no TensorFlow."""

from __future__ import annotations

import ast
import contextlib

# From a training's name to the entry of Keras' logs that says how good the model is.
TRAININGS = {"lm": "val_loss", "images": "val_accuracy", "denoiser": "val_loss"}

# From a variant's name to its dtype policy; the order is that of tables and pictures.
VARIANTS = {
    "float32": "float32",
    "float16": "mixed_float16",  # not scaled
    "keras": "mixed_float16",  # what `compile` does by itself
    "wrap": "mixed_float16",
    "compile": "mixed_float16",
    "bfloat16": "mixed_bfloat16",
}

FAULTS = {
    "nan": "a NaN in one sample of every 200th batch",
    "outlier": "every 100th batch with a loss 1e9 times as large",
    "burst": "12 such batches in a row, from step 300 on",
}
WITH_FAULTS = {"trainings": tuple(TRAININGS), "variants": ("keras", "wrap", "compile")}


def parse(name: str) -> tuple[str, dict[str, float]]:
    """The variant and the fields of `tfscale.Dynamic` in a name such as "wrap(hysteresis=2)".

    Raises:
        ValueError: there is no such variant, or it has no such settings.
    """
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse(name, mode="eval").body
        if not isinstance(tree, ast.Call):
            tree = ast.Call(tree, [], [])
        base = ast.unparse(tree.func)
        scales = base in ("wrap", "compile")
        if base in VARIANTS and not tree.args and (scales or not tree.keywords):
            return base, {k.arg or "": _number(k.value) for k in tree.keywords}
    raise ValueError(
        f"A variant must be one of {', '.join(VARIANTS)}, and wrap and compile may have settings "
        f"of tfscale.Dynamic as in wrap(growth_interval=200, max_scale=2**20). Received: {name!r}"
    )


def _number(node: ast.expr) -> float:
    """A literal or a power of two."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return ast.literal_eval(node.left) ** ast.literal_eval(node.right)
    return ast.literal_eval(node)
