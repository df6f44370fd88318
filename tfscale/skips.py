"""Judges skipped steps: whether so many are normal, and what to do."""

from __future__ import annotations

import dataclasses

from tfscale.policies import scale_text

# The search for the scale may skip this many steps, even if they are most of the first ones.
_HANDFUL = 5
# Skips on the way from 2**24, the highest scale by default, down to 1.
_SEARCH = 24

_IN_FLOAT32 = "run the layer that overflows in float32"

REPLACE_STATE = (
    "Replace them, from saved weights or with `variable.assign(...)`. Keras' own train step writes "
    "such state before the optimizer can skip; tfscale.compile(model, optimizer, ...) keeps a "
    "skipped step from writing it."
)


def describe_scale(policy: str, scale: float) -> str:
    """The current scale, for a sentence."""
    return "no loss scaling" if policy == "none" else f"loss scale {scale_text(scale)}"


def count(n: int, singular: str) -> str:
    """`n` with its noun: "1 step", "1,200 steps"."""
    return f"{n:,} {singular if n == 1 else singular + 's'}"


def are_often(skips: int, steps: int) -> bool:
    """Whether there are more skips than a scale that was found explains."""
    return skips > 20 and skips > 0.05 * steps


def remedies(ever_applied: bool, *others: str) -> str:
    """What to do about gradients that no loss scale makes finite.

    A check for finite gradients cannot distinguish a NaN from an overflow, so this names both.

    Args:
        ever_applied: whether any step was applied; if not, the learning rate is not the cause.
        *others: further remedies for an overflow, the last one with its "or".
    """
    first = (
        "lower the learning rate"
        if ever_applied
        else "the loss itself may be too large (no step was applied, so it is not the learning "
        "rate): scale it down"
    )
    return (
        "tfscale.find_nonfinite(model, batch) shows the cause. If the gradients are NaN, or not "
        "finite in float32 either, look for sqrt, log, norm or a division at 0. If they overflow, "
        f"{', '.join([first, *others])}"
    )


@dataclasses.dataclass(frozen=True)
class Skips:
    """The batches that were skipped over some steps, and whether that is normal.

    Attributes:
        skips: skipped batches.
        steps: batches seen.
        by_loss: skips because of a loss that was not finite.
        ever_applied: whether the optimizer ever applied a step, in these steps or before.
        policy: see `Record`.
        scale: the current scale.
        at_floor: whether the scale is the lowest that the policy allows, and not its first.
        all_at_floor: whether the scale was at its floor at every overflow, even if it began there.
        grown: see `Record`.
        in_a_row: see `skipped_in_a_row` of `Record`; earlier steps count too.
        often: whether `are_often` holds for all steps that the optimizer ever saw.
    """

    skips: int
    steps: int
    by_loss: int
    ever_applied: bool
    policy: str
    scale: float
    at_floor: bool
    all_at_floor: bool
    grown: str = ""
    in_a_row: int = 0
    often: bool = False

    def is_stall(self, epoch_ends: bool) -> bool:
        """Whether all steps were skipped and, as far as is known, the next ones will be.

        Args:
            epoch_ends: whether these are all steps of an epoch.
        """
        if not 0 < self.steps == self.skips:
            return False
        return self.steps > _SEARCH or (
            epoch_ends and (self.by_loss == self.skips or self._is_found())
        )

    def _is_found(self) -> bool:
        """Whether another skip would not lower the scale."""
        return self.policy != "dynamic" or self.at_floor or self.all_at_floor

    def too_many(self) -> bool:
        """Whether there are more skips than the search for the scale explains."""
        if self.skips == self.steps <= _HANDFUL and not self._is_found():
            # The search for the scale may take longer than so short a `fit`.
            return self.in_a_row > _SEARCH or self.often
        most = self.skips > _HANDFUL and 2 * self.skips > self.steps
        return self.skips == self.steps or most or are_often(self.skips, self.steps)

    def what_is_wrong(self) -> str | None:
        """Why so many skips are not normal and what to do, or None if they are."""
        if self.grown:
            return (
                f"the learning rate is probably too high: {self.grown}. Load weights from before "
                "and lower it. If such a weight is normal here, run "
                "tfscale.find_nonfinite(model, batch)"
            )
        if self.by_loss:
            return (
                f"{count(self.by_loss, 'skip')} came from a loss that was not finite before it was "
                "scaled, which no scale can fix: the data holds NaN or infinity, the forward pass "
                "overflows (float16 ends at 65504), or weights are already NaN. "
                "tfscale.find_nonfinite(model, batch) shows which"
            )
        beyond_scale = self.beyond_scale()
        if beyond_scale or not self.too_many():
            return beyond_scale
        if self.policy == "static":
            lower = "take a smaller scale or the policy tfscale.Dynamic(), which finds one"
        else:
            lower = "start lower with tfscale.wrap(optimizer, initial_scale=...)"
        if not self.ever_applied:
            more = remedies(False, f"or {_IN_FLOAT32}")
            return f"no step was applied: {lower}. If that does not help, {more}"
        if self.policy != "static":
            lower += ", take a longer growth_interval"
        return f"that is too many: {lower}, or lower the learning rate"

    def beyond_scale(self) -> str | None:
        """What to do about overflows if the scale cannot go down, or None if it can."""
        if self.policy == "none":
            otherwise = remedies(self.ever_applied, f"or {_IN_FLOAT32}")
            return f"there is no loss scale to lower: {otherwise}"
        # A static scale is always at its floor.
        stuck = self.all_at_floor and self.policy == "dynamic"
        if not (self.at_floor or (stuck and self.too_many())):
            return None
        otherwise = remedies(
            self.ever_applied,
            _IN_FLOAT32,
            "train in bfloat16",
            "or allow a lower scale with tfscale.wrap(optimizer, min_scale=2.0**-10)",
        )
        return f"the scale is at its floor and gradients are still not finite: {otherwise}"

    def advice(self, name: str = "") -> str:
        """What `fit` says when steps were skipped, or the scale is at its floor.

        Args:
            name: of the optimizer, if there are several.
        """
        trouble, more = self.what_is_wrong(), ""
        if trouble is None:
            when = "now and then" if self.policy == "static" else "while the scale is being found"
            verdict = f"That is normal {when}. You need not do anything."
        else:
            verdict = f"{trouble[0].upper()}{trouble[1:]}."
            if not (self.by_loss or self.grown):  # of these the record names no variable
                more = " optimizer.record() shows how often each variable was not finite"
                layer = ", tfscale.find_nonfinite(model, batch) in which layer it began."
                more += "." if "find_nonfinite" in trouble else layer
        were = "was" if self.skips == 1 else "were"
        return (
            f"{name}{': ' if name else ''}{self.skips:,} of {self.steps:,} training steps {were} "
            f"skipped; {describe_scale(self.policy, self.scale)}. {verdict}{more}"
        )
