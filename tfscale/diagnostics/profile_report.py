"""What `profile` found: the ranges, the proposal, a table and a picture."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tfscale.diagnostics.plots import plot_ranges
from tfscale.diagnostics.ranges import GradientRange, exponent, merge, percent
from tfscale.policies import Dynamic, NoScaling, Static


@dataclasses.dataclass(frozen=True)
class Profile:
    """What `profile` found. Print it, `plot` it, or read its fields.

    Attributes:
        model: name of the model.
        steps: number of measured batches.
        skipped: number of batches skipped because their loss or a gradient was not finite at any
            scale.
        compute_dtype: "float16", "bfloat16" or "float32", the narrowest in the model.
        measured_scale: the smallest loss scale at which a batch was measured (1 except in float16).
        variables: one `GradientRange` for every trainable variable that has a gradient.
        activations: the same for the output of every layer.
        policy: the proposal, ready for `tfscale.wrap(optimizer, profile.policy)`.
        reason: why, in a sentence.
    """

    model: str
    steps: int
    skipped: int
    compute_dtype: str
    measured_scale: float
    variables: tuple[GradientRange, ...]
    activations: tuple[GradientRange, ...]
    policy: NoScaling | Static | Dynamic
    reason: str

    @property
    def scale(self) -> float:
        """The proposed loss scale, or the one to start from; 1 for `NoScaling`."""
        return self.policy.initial_scale

    @property
    def proposal(self) -> str:
        """The policy as a line of code."""
        if isinstance(self.policy, Static):
            return f"Static({power(self.scale)})"
        if isinstance(self.policy, Dynamic):
            lowest = self.policy.min_scale
            floor = "" if lowest == 1 else f", min_scale={power(lowest)}"
            return f"Dynamic(initial_scale={power(self.scale)}{floor})"
        return "NoScaling()"

    @property
    def all_variables(self) -> GradientRange:
        """The gradients of all variables that are in float16 (or would be)."""
        return merge("variables", self.variables)

    @property
    def all_activations(self) -> GradientRange:
        """The gradients of all activations that are in float16 (or would be)."""
        return merge("activations", self.activations)

    @property
    def total(self) -> GradientRange:
        """The gradients of both."""
        return merge("in all", self.variables + self.activations)

    def worst(self, number: int = 5) -> list[GradientRange]:
        """Return the gradients that lose the largest share at scale 1, the worst first.

        Args:
            number: the most gradients to return.
        """
        rows = [r for r in self.variables + self.activations if r.counted and r.lost()]
        return sorted(rows, key=lambda r: r.lost(), reverse=True)[:number]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the histograms at scale 1 and at the proposed scale, and a map of all layers.

        Args:
            path: file to write; its suffix sets the format (png, svg, pdf).

        Raises:
            ImportError: matplotlib is not installed.
        """
        plot_ranges(
            path,
            f"Gradients of {self.model!r}: {count_batches(self.steps)} in {self.compute_dtype}",
            self.activations,
            self.variables,
            self.scale,
            type(self.policy).__name__,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain Python, for JSON."""
        return {
            "model": self.model,
            "steps": self.steps,
            "skipped": self.skipped,
            "compute_dtype": self.compute_dtype,
            "measured_scale": self.measured_scale,
            "proposal": self.proposal,
            "scale": self.scale,
            "reason": self.reason,
            "lost_at_1": {"variables": self.all_variables.lost(), "all": self.total.lost()},
            "lost_at_scale": {
                "variables": self.all_variables.lost(self.scale),
                "all": self.total.lost(self.scale),
            },
            "variables": [r.to_dict() for r in self.variables],
            "activations": [r.to_dict() for r in self.activations],
        }

    def __str__(self) -> str:
        measured = f"measured in {self.compute_dtype}"
        if self.compute_dtype == "float16":
            measured += f" at loss scale {power(self.measured_scale)}, divided in float32"
        at = [1.0] if self.scale == 1 else [1.0, self.scale]
        worst = self.worst()
        width = max(12, *(len(r.name) for r in worst), 0)
        head = f"{'':{width}} {'values':>11} {'zero':>7}"
        for scale in at:
            head += f" {'lost at ' + power(scale):>13} {'subnormal':>9}"
        head += f" {'largest':>8} {'headroom':>8}"
        lines = [
            f"Gradients of {self.model!r}, {count_batches(self.steps, self.skipped)}, {measured}",
            head,
            *(_row(r, at, width) for r in (self.all_variables, self.all_activations, self.total)),
        ]
        if worst:
            lines += ["lose most at scale 1:", *(_row(r, at, width) for r in worst)]
        lines += [
            "(lost: becomes zero in float16; subnormal: keeps fewer than 11 bits; both as a share "
            "of the values that are not zero)",
            f"Proposal: {self.proposal}. {self.reason}",
        ]
        return "\n".join(lines)


def count_batches(steps: int, skipped: int = 0) -> str:
    """Return "1 batch", "2 batches, 1 skipped (not finite)" and so on."""
    measured = "1 batch" if steps == 1 else f"{steps} batches"
    return f"{measured}, {skipped} skipped (not finite)" if skipped else measured


def power(scale: float) -> str:
    """Return a power of two as "1" or "2**e"."""
    return "1" if scale == 1 else f"2**{exponent(scale)}"


def _row(r: GradientRange, scales: list[float], width: int) -> str:
    row = f"{r.name:{width}} {r.zeros + r.nonzero:>11,} {percent(r.zero_share):>7}"
    for scale in scales:
        row += f" {percent(r.lost(scale)):>13} {percent(r.subnormal(scale)):>9}"
    headroom = "-" if r.headroom is None else f"2**{r.headroom}"
    return row + f" {r.largest:>8.2g} {headroom:>8}"
