"""What an optimizer counted, as plain Python and as text."""

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
    """What an optimizer did so far, as `LossScaleOptimizer.record` returns it.

    `str(record)` summarizes it, `record.to_dict()` is for a logger.

    Attributes:
        steps: steps applied or skipped; a batch that `tfscale.compile(retry=...)` ran again counts
            each time.
        applied: steps that updated the variables.
        skipped_overflow: steps skipped because a gradient was not finite, by the optimizer or, if
            `unscale` saw it, by the loop.
        skipped_loss: steps skipped because a gradient was not finite, and the loss was not finite
            either before it was scaled; they do not lower the scale.
        skipped_linked: steps skipped because a linked optimizer's gradients were not finite.
        nonfinite_losses: steps applied, because their gradients were finite, although a loss passed
            to `scale_loss` since the last update was not. It may be the loss of a step that the
            loop skipped, or of validation.
        growths: how often the scale grew.
        backoffs: how often the scale was lowered.
        at_floor: overflows with the scale at the lowest one that the policy allows.
        retries: skipped batches that were run again.
        skipped_in_a_row: steps skipped since the last one that was applied.
        longest_run: the most steps skipped in a row so far.
        last_skip: number of the last step that was skipped, from 1; 0 if none was.
        policy: how the scale moves: "dynamic", "static", or "none" if none is used.
        scale: the current scale, 1 if none is used.
        is_at_floor: whether that is the lowest scale that the policy allows, and not its first.
        changes: the last 256 changes of the scale, oldest first.
        nonfinite: from the path of a variable to the number of skipped steps in which its gradient
            was not finite, if any. The largest number comes first; among equal ones, the variable
            nearest to the output, where infinities come from.
        grown: if the skips are not normal, the weight that has grown far too large since the first
            step, as with too high a learning rate; empty if there is none.
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
        """Makes a record from a vector of counters.

        Args:
            counts: int64 array of shape `[counters.SIZE]`.
            nonfinite: pairs of a variable's path and its number of non-finite steps.
            **others: all other attributes.
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
            skipped_in_a_row=counters.in_a_row(counts),
            longest_run=n[counters.LONGEST_RUN],
            last_skip=n[counters.LAST_SKIP],
            changes=tuple(ScaleChange(*change) for change in counters.changes(counts)),
            nonfinite=dict(sorted(backwards, key=lambda item: -item[1])),
            **others,
        )

    @property
    def skipped(self) -> int:
        """Batches skipped for any reason, without those that ran again and were applied."""
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
            many = f"gradients of {n} variables non-finite, most often"
            which = "only non-finite" if n == 1 else many
            parts.append(f"{which}: {path}, {count(times, 'time')}")
        reasons = {
            "overflow": self.skipped_overflow,
            "a loss that was not finite": self.skipped_loss,
            "a linked optimizer": self.skipped_linked,
        }
        by = ", ".join(f"{n:,} by {reason}" for reason, n in reasons.items() if n)
        in_a_row = f"{self.longest_run:,} in a row at most"
        if self.retries:
            # Every attempt has a cause, so the causes do not add up to the skipped batches.
            attempts = count(self.skipped + self.retries, "bad attempt")
            parts.append(f"{attempts}: {by}, {in_a_row}, {self.retries:,} of them run again")
        elif by:
            parts.append(f"{by}, {in_a_row}")
        moved = f" ({count(self.growths, 'growth')}, {count(self.backoffs, 'backoff')})"
        parts.append(describe_scale(self.policy, self.scale) + (moved if self.changes else ""))
        facts = "; ".join(parts)
        if self.skipped == self.skipped_linked > 0 and not self.is_at_floor:
            return f"{facts}. The record of the linked optimizer shows why."
        return f"{facts}. {self._verdict(batches)}." if self.skipped else facts

    def skips(self, since: Record | None = None) -> Skips:
        """The skipped batches, to be judged.

        Args:
            since: an earlier record of the optimizer, whose counts are subtracted.
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
            return f"Not normal: {trouble}"
        if self.policy == "static":
            return "Normal: a skip now and then costs less than a lower scale"
        if self.last_skip <= self.steps // 2:
            first = "attempt" if self.retries else "step"
            if self.last_skip > 1:
                first = count(self.last_skip, first)
            return f"Normal: the scale was found within the first {first}"
        if 2 * self.skipped > batches:
            return "Normal so far: the scale is being found"
        return "Normal: a skip now and then is how the scale is found"
