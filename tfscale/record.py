"""What an optimizer counted, as plain Python and in sentences."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from tfscale import counters
from tfscale.skips import Skips, are_often, count, describe_scale


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
        nonfinite_losses: steps applied although a loss that `scale_loss` was given since the last
            update was not finite, because the gradients were. That may have been the loss of an
            earlier step, which the loop left out, or of validation.
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
    def of(cls, counts: Any, *, nonfinite: Iterable[tuple[str, int]], **others: Any) -> Record:
        """The record of a vector of counters.

        Args:
            counts: int64 array of shape `[counters.SIZE]`.
            nonfinite: iterable of pairs of a variable's path and its number of non-finite steps.
            **others: the attributes that are not counted there.
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
        # Among equal counts the one nearest to the output is first: infinities spread backwards.
        backwards = list(reversed(counted.items()))
        return cls(
            steps=n[counters.STEPS],
            applied=counters.batches(n) - counters.skipped(n),
            skipped_overflow=n[counters.SKIPPED_OVERFLOW],
            skipped_loss=n[counters.SKIPPED_LOSS],
            skipped_linked=n[counters.SKIPPED_LINKED],
            growths=n[counters.GROWTHS],
            backoffs=n[counters.BACKOFFS],
            at_floor=n[counters.AT_FLOOR],
            retries=n[counters.RETRIES],
            skipped_in_a_row=int(counters.in_a_row(counts)),
            longest_run=n[counters.LONGEST_RUN],
            last_skip=n[counters.LAST_SKIP],
            changes=tuple(ScaleChange(*change) for change in counters.changes(counts)),
            nonfinite=dict(sorted(backwards, key=lambda item: -item[1])),
            **others,
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
            return f"no steps yet; {describe_scale(self.policy, self.scale)}"
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
        parts.append(describe_scale(self.policy, self.scale) + (moved if self.changes else ""))
        if self.skipped == self.skipped_linked > 0 and not self.is_at_floor:
            parts.append("the record of the linked optimizer says why")
        elif self.skipped:
            parts.append(self._verdict(batches))
        return "; ".join(parts)

    def skips(self, since: Record | None = None) -> Skips:
        """What was left out, to be judged.

        Args:
            since: an earlier record of the optimizer, to leave out what it has counted.
        """

        def new(name: str) -> int:
            return getattr(self, name) - (getattr(since, name) if since else 0)

        return Skips(
            new("skipped"),
            new("steps") - new("retries"),
            by_loss=new("skipped_loss"),
            ever_applied=self.applied > 0,
            policy=self.policy,
            scale=self.scale,
            at_floor=self.is_at_floor,
            all_at_floor=0 < new("skipped_overflow") == new("at_floor"),
            grown=self.grown,
            in_a_row=self.skipped_in_a_row,
            often=are_often(self.skipped, self.steps - self.retries),
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
