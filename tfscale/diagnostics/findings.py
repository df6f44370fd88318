"""What `lint` says: where, why it hurts, and the line that mends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Finding:
    """One danger.

    Attributes:
        rule: a short name that stays the same, such as "float16-output".
        where: the layer, variable or optimizer.
        why: why it hurts, in a sentence that goes on from `where`.
        mend: the line of code that mends it.
    """

    rule: str
    where: str
    why: str
    mend: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why} [{self.rule}]\n    {self.mend}"

    def to_dict(self) -> dict[str, str]:
        """Plain Python, for JSON."""
        return dataclasses.asdict(self)


class Findings(tuple):
    """A tuple of `Finding` with a readable `str`.

    Attributes:
        model: name of the model.
        traced: whether the operations of the forward pass could be looked at.
    """

    model: str
    traced: bool

    def __new__(cls, findings: Iterable[Finding], model: str, traced: bool) -> Findings:
        self = super().__new__(cls, findings)
        self.model = model
        self.traced = traced
        return self

    def __str__(self) -> str:
        number = {0: "no finding", 1: "1 finding"}.get(len(self), f"{len(self)} findings")
        lines = [f"{self.model}: {number}", *(f"{i}. {f}" for i, f in enumerate(self, 1))]
        if not self.traced:
            lines.append(
                "(Only layers and optimizer were looked at: the shapes of the inputs are not known "
                "yet. Call the model on a batch first.)"
            )
        return "\n".join(lines)


def head(names: list[str]) -> str:
    """The first name, and how many follow."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def becomes_zero(value: Any) -> bool:
    """Whether it is a positive number that float16 rounds to zero."""
    return isinstance(value, int | float) and value > 0 and float(np.float16(value)) == 0
