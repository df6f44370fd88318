"""Texts of the errors and warnings about wrong calls in a custom loop."""

SCALED_UNLIKE = (
    "An earlier loss of this step was not scaled because nothing in it is float16, but this loss "
    "depends on float16. Scale both in one call, `optimizer.scale_loss([loss1, loss2])`, or always "
    'scale: tfscale.wrap(optimizer, "dynamic").'
)

TWICE_UNSCALED = (
    "unscale() received gradients that are already unscaled, and would divide them by the scale a "
    "second time. Call it once for the gradients of a step: `grads = optimizer.unscale(grads)`."
)

RESULT_UNUSED = (
    "These gradients were passed to unscale(), which does not change them: they are still scaled. "
    "Apply what it returned: `grads = optimizer.unscale(grads)`, then "
    "`apply_gradients(zip(grads, variables))`. If you mean the scaled ones: "
    "`apply_gradients(..., unscaled=False)`."
)

_OUTRIGHT = (
    "Unscale all gradients in one call, `grads = optimizer.unscale(grads)`, or declare them: "
    "`apply_gradients(..., unscaled=True)` if all are unscaled, "
    "`apply_gradients(..., unscaled=False)` if none is."
)

AMBIGUOUS = (
    "Some gradients went through unscale(), and it is unknown which of these gradients come from "
    f"them, because they were changed, or another loss was scaled, since then. {_OUTRIGHT}"
)

MIXED = (
    "A gradient is computed from both unscaled and scaled gradients, such as by a norm over both. "
    f"{_OUTRIGHT}"
)

UNSCALED_LOSS = (
    "Gradients of an unscaled loss were applied. They were not divided by the scale, but small "
    "float16 gradients are lost. Scale the loss inside the tape: "
    "`scaled = optimizer.scale_loss(loss)`, then `tape.gradient(scaled, variables)`."
)

BYPASSED = (
    "The gradients are those of the loss before `scale_loss` multiplied it. They are still divided "
    "by the loss scale, so the model hardly learns. Call `scaled = "
    "optimizer.scale_loss(loss)` inside the tape, then `tape.gradient(scaled, variables)`."
)
