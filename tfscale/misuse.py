"""What is wrong with a call in an own loop, in words: errors and warnings."""

from __future__ import annotations


def unscaled_twice() -> ValueError:
    """The error for `unscale` of what `unscale` returned."""
    return ValueError(
        "unscale() was given gradients that it has returned itself, and would divide them "
        "by the scale a second time. Call it once for the gradients of a step: "
        "`grads = optimizer.unscale(grads)`."
    )


def given_to_unscale() -> ValueError:
    """The error for applying what `unscale` was given, with its result left unused."""
    return ValueError(
        "These gradients were given to unscale(), which leaves them as they are, still "
        "multiplied by the scale. Apply what it returned: "
        "`grads = optimizer.unscale(grads)`, then `apply_gradients(zip(grads, variables))`. "
        "If you mean the scaled ones: `apply_gradients(..., unscaled=False)`."
    )


_OUTRIGHT = (
    "Unscale all of them in one call, `grads = optimizer.unscale(grads)`, or say what they are: "
    "`apply_gradients(..., unscaled=True)` if all of them are unscaled, "
    "`apply_gradients(..., unscaled=False)` if none is."
)


def ambiguous(grads: int) -> ValueError:
    """The error for gradients that may be unscaled or not.

    Args:
        grads: the number of them.
    """
    return ValueError(
        f"Some gradients went through unscale(), and it is not known which of these {grads} are "
        "computed from them: they were changed, or a loss was scaled, after it. "
        f"{_OUTRIGHT}"
    )


def mixed() -> ValueError:
    """The error for a gradient computed from unscaled and from scaled ones."""
    return ValueError(
        "A gradient is computed both from what unscale() returned and from gradients that are "
        f"still multiplied by the scale, as a norm over both is. {_OUTRIGHT}"
    )


UNSCALED_LOSS = (
    "Gradients of an unscaled loss were applied: small float16 gradients are lost. They "
    "were applied as they are, not divided by the scale. Scale the loss inside the tape: "
    "`scaled = optimizer.scale_loss(loss)`, then `tape.gradient(scaled, variables)`."
)

BYPASSED = (
    "The gradients are those of the loss before `scale_loss` multiplied it, but they are "
    "divided by the loss scale anyway, so that the model hardly learns. "
    "Differentiate what `scale_loss` returned: `scaled = optimizer.scale_loss(loss)` "
    "inside the tape, then `tape.gradient(scaled, variables)`."
)
