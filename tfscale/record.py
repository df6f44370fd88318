"""What an optimizer counted, as plain Python and in sentences."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from tfscale import counters
from tfscale.policies import scale_text

# So many skips may find the scale, even if they are most of the first steps.
_HANDFUL = 5
# From 2**24, the highest first scale by default, down to 1.
_SEARCH = 24


@dataclasses.dataclass(frozen=True)
class ScaleChange:
    """One change of the loss scale.

    Attributes:
        step: number of the step that made it, from 1; the next step is the first to use it.
        scale: the new scale.
    """

    step: int
    scale: float


@dataclasses.dataclass(frozen=True)
class Record:
    """What an optimizer did so far; made by `LossScaleOptimizer.record`.

    `str(record)` says it in sentences, `record.to_dict()` gives it to a logger.

    Attributes:
        steps: steps taken or skipped; a batch that `tfscale.compile(retry=...)` ran again counts
            each time.
        applied: steps that updated the variables.
        skipped_overflow: steps left out because a gradient was not finite, by the optimizer or, if
            `unscale` saw it, by the loop.
        skipped_loss: of the steps with a gradient that was not finite, those in which the loss was
            not finite either, before it was scaled; they do not lower the scale.
        skipped_linked: steps left out because a linked optimizer's were not finite.
        nonfinite_losses: steps applied although a loss since the last one was not finite, because
            the gradients were.
        growths: times the scale grew.
        backoffs: times the scale was lowered.
        at_floor: overflows with the scale at the lowest one that the policy allows.
        retries: skipped batches that were run again.
        skipped_in_a_row: steps skipped since the last one that was applied.
        longest_run: most steps ever skipped in a row.
        last_skip: number of the last step that was skipped, from 1; 0 if none was.
        policy: how the scale moves: "dynamic", "static", or "none" where none is used.
        scale: the scale in force, 1 where none is used.
        is_at_floor: whether that is the lowest one that the policy allows, and not its first.
        changes: the last 256 changes of the scale, oldest first.
        nonfinite: for each variable with a gradient that was not finite in some skipped step, its
            path and the number of such steps. The largest number comes first, among equal ones the
            variable nearest to the output, where infinities come from.
        grown: if the skips are not normal, the weight that has grown far too large since the first
            step, as after too high a learning rate; empty if there is none.
    """

    steps: int
    applied: int
    skipped_overflow: int
    skipped_loss: int
    skipped_linked: int
    nonfinite_losses: int
    growths: int
    backoffs: int
    at_floor: int
    retries: int
    skipped_in_a_row: int
    longest_run: int
    last_skip: int
    policy: str
    scale: float
    is_at_floor: bool
    changes: tuple[ScaleChange, ...]
    nonfinite: dict[str, int]
    grown: str = ""

    @classmethod
    def of(
        cls,
        counts: Any,
        *,
        nonfinite_losses: int,
        policy: str,
        scale: float,
        is_at_floor: bool,
        nonfinite: Iterable[tuple[str, int]],
    ) -> Record:
        """The record of a vector of counters.

        Args:
            counts: int64 array of shape `[counters.SIZE]`.
            nonfinite_losses: see `Record`.
            policy: see `Record`.
            scale: the scale in force.
            is_at_floor: see `Record`.
            nonfinite: iterable of pairs of a variable's path and its number of non-finite steps.
        """
        n = [int(c) for c in counts[: counters.COUNTERS]]
        counted: dict[str, int] = {}
        seen: collections.Counter = collections.Counter()
        for path, times in nonfinite:
            seen[path] += 1
            # Keras allows two variables with one path.
            name = path if seen[path] == 1 else f"{path} ({seen[path]})"
            if times:
                counted[name] = int(times)
        # Of equal counts the one nearest to the output comes first: infinities spread backwards.
        backwards = list(reversed(counted.items()))
        return cls(
            steps=n[counters.STEPS],
            applied=counters.batches(n) - counters.skipped(n),
            skipped_overflow=n[counters.SKIPPED_OVERFLOW],
            skipped_loss=n[counters.SKIPPED_LOSS],
            skipped_linked=n[counters.SKIPPED_LINKED],
            nonfinite_losses=nonfinite_losses,
            growths=n[counters.GROWTHS],
            backoffs=n[counters.BACKOFFS],
            at_floor=n[counters.AT_FLOOR],
            retries=n[counters.RETRIES],
            skipped_in_a_row=int(counters.in_a_row(counts)),
            longest_run=n[counters.LONGEST_RUN],
            last_skip=n[counters.LAST_SKIP],
            policy=policy,
            scale=scale,
            is_at_floor=is_at_floor,
            changes=tuple(ScaleChange(*change) for change in counters.changes(counts)),
            nonfinite=dict(sorted(backwards, key=lambda item: -item[1])),
        )

    @property
    def skipped(self) -> int:
        """Batches left out, whatever the reason; one that was run again and applied is not."""
        return self.skipped_overflow + self.skipped_loss + self.skipped_linked - self.retries

    def to_dict(self) -> dict[str, Any]:
        """All attributes and `skipped`, of types that `json.dumps` takes."""
        return {**dataclasses.asdict(self), "skipped": self.skipped}

    def __str__(self) -> str:
        batches = self.steps - self.retries
        if not self.steps:
            return f"no steps yet; {_scale_text(self.policy, self.scale)}"
        parts = [f"skipped {self.skipped:,} of {batches:,} steps"]
        if self.nonfinite and self.skipped_overflow:  # after a bad loss all of them are bad
            path, times = next(iter(self.nonfinite.items()))
            n = len(self.nonfinite)
            which = "only non-finite" if n == 1 else f"most often non-finite of {n} variables"
            parts.append(f"{which}: {path}, {count(times, 'time')}")
        reasons = {
            "overflow": self.skipped_overflow,
            "a loss that was not finite": self.skipped_loss,
            "a linked optimizer": self.skipped_linked,
        }
        reasons = {reason: n for reason, n in reasons.items() if n}
        by = ", ".join(f"{n:,} by {reason}" for reason, n in reasons.items())
        in_a_row = f"{self.longest_run:,} in a row at most"
        if self.retries:
            # The causes are those of every attempt, so they do not add up to the batches left out.
            attempts = count(self.skipped + self.retries, "bad attempt")
            parts.append(f"{attempts}: {by}, {in_a_row}, {self.retries:,} of them run again")
        elif reasons:
            parts.append(f"{by}, {in_a_row}")
        moved = f" ({count(self.growths, 'growth')}, {count(self.backoffs, 'backoff')})"
        parts.append(_scale_text(self.policy, self.scale) + (moved if self.changes else ""))
        if self.skipped == self.skipped_linked > 0 and not self.is_at_floor:
            parts.append("the record of the linked optimizer says why")
        elif self.skipped:
            parts.append(self._verdict(batches))
        return "; ".join(parts)

    def skips(self) -> Skips:
        """The same, to be judged."""
        return Skips(
            self.skipped,
            self.steps - self.retries,
            by_loss=self.skipped_loss,
            ever_applied=self.applied > 0,
            policy=self.policy,
            scale=self.scale,
            at_floor=self.is_at_floor,
            all_at_floor=0 < self.skipped_overflow == self.at_floor,
            grown=self.grown,
        )

    def _verdict(self, batches: int) -> str:
        trouble = self.skips().what_is_wrong()
        if trouble is not None:
            return f"not normal: {trouble}"
        if self.policy == "static":
            return "normal: a skip now and then costs less than a lower scale"
        if self.last_skip <= self.steps // 2:
            first = "attempt" if self.retries else "step"
            if self.last_skip > 1:
                first = count(self.last_skip, first)
            return f"normal: the scale was found within the first {first}"
        if 2 * self.skipped > batches:
            return "normal so far: the scale is being found"
        return "normal: a skip now and then is how the scale is found"


def _scale_text(policy: str, scale: float) -> str:
    return "no loss scaling" if policy == "none" else f"loss scale {scale_text(scale)}"


def count(n: int, singular: str) -> str:
    """`n` with its noun: "1 step", "1,200 steps"."""
    return f"{n:,} {singular if n == 1 else singular + 's'}"


def remedies(ever_applied: bool, *others: str) -> str:
    """What to do about gradients that no loss scale makes finite.

    A check for finite gradients cannot tell a NaN from an overflow, so both are named.

    Args:
        ever_applied: whether any step was; if none was, it is not the learning rate.
        *others: further remedies of an overflow, the last one with its "or".
    """
    first = (
        "lower the learning rate"
        if ever_applied
        else "the loss itself may be too large (no step was applied, so it is not the learning "
        "rate): scale it down"
    )
    return (
        "tfscale.find_nonfinite(model, batch) shows the cause: if the gradients are NaN, or not "
        "finite in float32 either, look for sqrt, log, norm or a division at 0; if they overflow, "
        f"{', '.join([first, *others])}"
    )


@dataclasses.dataclass(frozen=True)
class Skips:
    """The batches that were left out over some steps, and whether that is normal.

    Attributes:
        skips: batches left out.
        steps: batches seen.
        by_loss: of the skips, those by a loss that was not finite.
        ever_applied: whether the optimizer ever applied a step, in these steps or before.
        policy: see `Record`.
        scale: the scale in force.
        at_floor: whether the scale is the lowest that the policy allows, and not its first.
        all_at_floor: whether the scale was there at every overflow, even if it began there.
        grown: see `Record`.
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

    def is_stall(self, epoch_ends: bool) -> bool:
        """Whether all steps were skipped and the next ones will be, as far as can be known.

        Args:
            epoch_ends: whether these are all steps of an epoch.
        """
        if not 0 < self.steps == self.skips:
            return False
        is_found = self.policy != "dynamic" or self.at_floor or self.all_at_floor
        return self.steps > _SEARCH or (epoch_ends and (self.by_loss == self.skips or is_found))

    def too_many(self) -> bool:
        """Whether there are more than the search for the scale explains."""
        if self.skips == self.steps or (self.skips > _HANDFUL and 2 * self.skips > self.steps):
            return True
        return self.skips > 20 and self.skips > 0.05 * self.steps

    def what_is_wrong(self) -> str | None:
        """Why so many skips are not normal and what to do, or None if they are."""
        if self.grown:
            return (
                f"the learning rate is probably too high: {self.grown}; load weights from before "
                "and lower it, or, if such a weight is right here, search with "
                "tfscale.find_nonfinite(model, batch)"
            )
        if self.by_loss:
            return (
                f"{count(self.by_loss, 'skip')} came from a loss that was not finite before it was "
                "scaled, which no scale can fix: the data holds NaN or infinity, the forward pass "
                "overflows (float16 ends at 65504), or weights are NaN already; "
                "tfscale.find_nonfinite(model, batch) shows which"
            )
        in_float32 = "run the layer that overflows in float32"
        if self.policy == "none":
            return "there is no loss scale to lower: " + remedies(
                self.ever_applied, f"or {in_float32}"
            )
        # A static scale is always at its floor.
        stuck = self.all_at_floor and self.policy == "dynamic"
        if self.at_floor or (stuck and self.too_many()):
            return "the scale is at its floor and gradients are still not finite: " + (
                remedies(
                    self.ever_applied,
                    in_float32,
                    "train in bfloat16",
                    "or allow a lower scale with tfscale.wrap(optimizer, min_scale=2.0**-10)",
                )
            )
        if not self.too_many():
            return None
        if self.policy == "static":
            lower = "take a smaller scale or the policy tfscale.Dynamic(), which finds one"
        else:
            lower = "start lower with tfscale.wrap(optimizer, initial_scale=...)"
        if not self.ever_applied:
            more = remedies(False, f"or {in_float32}")
            return f"no step was applied: {lower}; if that does not help, {more}"
        if self.policy != "static":
            lower += ", take a longer growth_interval"
        return f"that is too many: {lower}, or lower the learning rate"

    def advice(self, name: str = "") -> str:
        """What `fit` says when steps were skipped, or the scale is at its floor.

        Args:
            name: of the optimizer, if there are several.
        """
        trouble = self.what_is_wrong()
        more = ""
        if trouble is None:
            verdict = "that is normal while the scale is being found; nothing to do"
            if self.policy == "static":
                verdict = "that is normal now and then; nothing to do"
        else:
            verdict = trouble
            if not (self.by_loss or self.grown):  # of these the record names no variable
                more = " optimizer.record() shows how often each variable was not finite"
                layer = ", tfscale.find_nonfinite(model, batch) in which layer it began."
                more += "." if "find_nonfinite" in trouble else layer
        were = "was" if self.skips == 1 else "were"
        return (
            f"{name}{': ' if name else ''}{self.skips:,} of {self.steps:,} training steps {were} "
            f"skipped; {_scale_text(self.policy, self.scale)}. {verdict[0].upper()}{verdict[1:]}."
            f"{more}"
        )
