"""What is wrong with a call in an own loop: the texts of errors and warnings."""

SCALED_UNLIKE = (
    "The losses of one step must be scaled alike, but an earlier one was left as it is because "
    "nothing in it is float16, and this one depends on float16. Scale them in one call, "
    "`optimizer.scale_loss([loss1, loss2])`, or scale all of them: "
    'tfscale.wrap(optimizer, "dynamic").'
)

TWICE_UNSCALED = (
    "unscale() was given gradients that it has returned itself, and would divide them by the scale "
    "a second time. Call it once for the gradients of a step: `grads = optimizer.unscale(grads)`."
)

RESULT_UNUSED = (
    "These gradients were given to unscale(), which leaves them as they are, still multiplied by "
    "the scale. Apply what it returned: `grads = optimizer.unscale(grads)`, then "
    "`apply_gradients(zip(grads, variables))`. If you mean the scaled ones: "
    "`apply_gradients(..., unscaled=False)`."
)

_OUTRIGHT = (
    "Unscale all of them in one call, `grads = optimizer.unscale(grads)`, or say what they are: "
    "`apply_gradients(..., unscaled=True)` if all of them are unscaled, "
    "`apply_gradients(..., unscaled=False)` if none is."
)

AMBIGUOUS = (
    "Some gradients went through unscale(), and it is not known which of these are computed from "
    f"them: they were changed, or a loss was scaled, after it. {_OUTRIGHT}"
)

MIXED = (
    "A gradient is computed both from what unscale() returned and from gradients that are still "
    f"multiplied by the scale, as a norm over both is. {_OUTRIGHT}"
)

UNSCALED_LOSS = (
    "Gradients of an unscaled loss were applied: small float16 gradients are lost. They were "
    "applied as they are, not divided by the scale. Scale the loss inside the tape: "
    "`scaled = optimizer.scale_loss(loss)`, then `tape.gradient(scaled, variables)`."
)

BYPASSED = (
    "The gradients are those of the loss before `scale_loss` multiplied it, but they are divided "
    "by the loss scale anyway, so that the model hardly learns. Differentiate what `scale_loss` "
    "returned: `scaled = optimizer.scale_loss(loss)` inside the tape, then "
    "`tape.gradient(scaled, variables)`."
)
