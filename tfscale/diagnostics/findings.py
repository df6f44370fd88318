"""What `lint` reports: where a danger is, why it hurts, and the line that fixes it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Finding:
    """One danger.

    Attributes:
        rule: a short, stable name, such as "float16-output".
        where: the layer, variable or optimizer.
        why: why it hurts; the sentence continues from `where`.
        fix: the line of code that fixes it.
    """

    rule: str
    where: str
    why: str
    fix: str

    def __init__(
        self, rule: str, where: str, why: str, fix: str | None = None, *, mend: str | None = None
    ) -> None:
        """Take the attributes; `mend` is the old name of `fix`."""
        if mend is not None:
            _warn_of_mend()
            fix = mend
        if fix is None:
            raise TypeError("`fix` must be the line of code that fixes it. Received: none")
        vars(self).update(rule=rule, where=where, why=why, fix=fix)

    @property
    def mend(self) -> str:
        """The old name of `fix`."""
        _warn_of_mend()
        return self.fix

    def __str__(self) -> str:
        return f"{self.where}: {self.why} [{self.rule}]\n    {self.fix}"

    def to_dict(self) -> dict[str, str]:
        """Plain Python, for JSON."""
        return dataclasses.asdict(self)


def _warn_of_mend() -> None:
    warnings.warn("`mend` of a Finding is now called `fix`.", DeprecationWarning, stacklevel=3)


class Findings(tuple[Finding, ...]):
    """A tuple of `Finding` with a readable `str`.

    Attributes:
        model: name of the model.
        traced: whether `lint` could inspect the operations of the forward pass.
    """

    model: str
    traced: bool

    def __new__(cls, findings: Iterable[Finding], model: str, traced: bool) -> Findings:
        """Make the tuple and set the attributes."""
        self = super().__new__(cls, findings)
        self.model = model
        self.traced = traced
        return self

    def __str__(self) -> str:
        number = {0: "no finding", 1: "1 finding"}.get(len(self), f"{len(self)} findings")
        lines = [f"{self.model}: {number}", *(f"{i}. {f}" for i, f in enumerate(self, 1))]
        if not self.traced:
            lines.append(
                "(Only the layers and the optimizer were inspected: the shapes of the inputs are "
                "not known yet. Call the model on a batch first.)"
            )
        return "\n".join(lines)


def summarize(names: Sequence[str]) -> str:
    """Return the first name, and how many follow."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def underflows_float16(value: object) -> bool:
    """Whether `value` is a positive number that float16 rounds to zero."""
    return isinstance(value, int | float) and value > 0 and float(np.float16(value)) == 0
