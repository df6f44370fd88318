"""Prints the table of rules for the scale on the page on policies: `python docs/scale_rules.py`.

A run is a list of the largest scales that do not overflow, one a step. Scales are their logarithms
to base 2, and a state is a list of the scale, the good steps in a row and the scale that has held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

STEPS, GROWTH, RECOVERY, LOWEST, HIGHEST = 60_000, 2000, 20, 0, 24

State = list[float]
Run = tuple[str, np.ndarray, np.ndarray]  # what fits but for rare batches, what fits in each step


def usual(state: State, finite: bool) -> None:
    step(state, finite, GROWTH)


def proportional(state: State, finite: bool) -> None:
    step(state, finite, max(1, GROWTH * 2.0 ** (state[0] - 15)))


def step(state: State, finite: bool, interval: float) -> None:
    state[1] = state[1] + 1 if finite else 0
    if not finite:
        state[0] -= 1
    elif state[1] >= interval:
        state[0] += 1
        state[1] = 0


def recovering(state: State, finite: bool) -> None:
    scale, good, held = state
    if finite and good + 1 >= GROWTH:
        state[2] = max(held, scale)
    if not finite and good >= RECOVERY:
        state[2] = min(held, scale)
    usual(state, finite)
    if state[1] and state[1] % RECOVERY == 0 and scale + 1 < held:
        state[0] += 1


def runs(rng: np.random.Generator) -> Iterator[Run]:
    steps, noise = np.arange(STEPS), rng.normal(0, 0.7, STEPS)
    always = np.full(STEPS, 15.5)

    def without(bad: np.ndarray, drop: float) -> tuple[np.ndarray, np.ndarray]:
        return always, np.where(bad, always - drop, always)

    yield "always 2¹⁵·⁵", always, always
    yield "and one burst of 12 overflows", *without((steps >= 20_000) & (steps < 20_012), 30)
    yield "the same, in the first 2000 steps", *without((steps >= 1000) & (steps < 1012), 30)
    # What fits in 1999 of 2000 steps is 3.3 standard deviations lower.
    yield "noisy around 2²¹", always + 5.5 - 2.3, always + 5.5 + noise
    yield "noisy around 2⁶", always - 9.5 - 2.3, always - 9.5 + noise
    fallen = np.where(steps < 20_000, 15.5, 5.5)
    yield "falls by 2¹⁰ for good", fallen, fallen
    falling = 15.5 - 10 * steps / STEPS
    yield "falls slowly by 2¹⁰", falling, falling
    yield "one batch in 100 overflows", *without(rng.random(STEPS) < 0.01, 10)


def count(rule: Callable[[State, bool], None], usually: np.ndarray, fits: np.ndarray) -> list[int]:
    """The skipped steps, and those with a scale more than four times below what usually fits."""
    state, skipped, low = [15.0, 0, 15.0], 0, 0
    for most, limit in zip(usually.tolist(), fits.tolist(), strict=True):
        finite = state[0] <= limit
        skipped += not finite
        low += state[0] < most - 2
        rule(state, finite)
        state[0] = min(max(state[0], LOWEST), HIGHEST)
    return [skipped, low]


if __name__ == "__main__":
    for name, usually, fits in runs(np.random.default_rng(0)):
        cells = [
            "{:,} skipped, {:,} low".format(*count(rule, usually, fits))
            for rule in (usual, recovering, proportional)
        ]
        print("|", name, "|", " | ".join(cells), "|")
