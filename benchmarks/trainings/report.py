"""What a file of results says: a table for each training."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.trainings.names import TRAININGS, VARIANTS

Json = dict[str, Any]


def results(data: Json, part: str, training: str) -> dict[str, Json]:
    """From each variant to its result, in the order of `VARIANTS`; others come last."""
    start = f"{part}/{training}/"
    found = {k.removeprefix(start): v for k, v in data["jobs"].items() if k.startswith(start)}
    return {n: found[n] for n in [*VARIANTS, *sorted(found.keys() - VARIANTS)] if n in found}


def row(data: Json, training: str, variant: str) -> Json:
    """All that is known of one variant.

    Returns:
        `final` (mean, least and largest over the seeds; None in place of a mean if a run was not
        finite), `skipped` steps of all seeds, `ms` a step, `ratio` of that to float32,
        `peak_bytes`, `batch` that fits into the limit, and `lost`, the shares of the gradients of
        the variables and of all gradients that float16 loses at scale 1 at the end. What was not
        measured is missing.
    """

    def get(part: str) -> Json:
        return results(data, part, training).get(variant, {})

    found: Json = {}
    runs = get("quality").get("runs")
    if runs:
        found["final"] = spread(r["final"] for r in runs)
        found["skipped"] = sum(len(r["skipped"]) for r in runs)
    timing = get("timing")
    if timing.get("rounds_ms"):
        found["ms"] = statistics.median(timing["rounds_ms"])
        base = results(data, "timing", training).get("float32", {}).get("rounds_ms", [])
        if len(base) == len(timing["rounds_ms"]):
            pairs = zip(timing["rounds_ms"], base, strict=True)
            found["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
    if timing.get("peak_bytes"):
        found["peak_bytes"] = timing["peak_bytes"]
    if get("memory").get("batch"):
        found["batch"] = get("memory")["batch"]
    if "gradients_lost" in get("quality"):
        end = get("quality")["gradients_lost"]["end"]
        found["lost"] = end["variables_at_1"], end["all_at_1"]
    return found


def spread(values: Iterable[float | None]) -> tuple[float, float, float] | None:
    """Mean, least and largest; None if one of them is."""
    found = list(values)
    numbers = [v for v in found if v is not None]
    if len(numbers) < len(found):
        return None
    return sum(numbers) / len(numbers), min(numbers), max(numbers)


def tables(data: Json) -> str:
    """A Markdown table for each training."""
    lines = []
    for training, metric in TRAININGS.items():
        names = list(VARIANTS)
        names += [v for v in results(data, "quality", training) if v not in VARIANTS]
        rows = {name: row(data, training, name) for name in names}
        if not any(rows.values()):
            continue
        lines += [
            f"| {training} | {metric} (range) | skipped | ms | to float32 | peak GiB | batch |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(f"| {name} | {' | '.join(_cells(found))} |" for name, found in rows.items() if found),
        ]
        if "lost" in rows["wrap"]:
            of = "{:.2%} of the gradients of the variables and {:.2%} of all gradients"
            lines += ["", f"At scale 1, float16 loses {of.format(*rows['wrap']['lost'])}."]
        lines.append("")
    return "\n".join(lines)


def _cells(found: Json) -> list[str]:
    final = "" if "final" not in found else "not finite"
    if found.get("final"):
        final = "{:.4f} ({:.4f} to {:.4f})".format(*found["final"])
    return [
        final,
        str(found.get("skipped", "")),
        f"{found['ms']:.2f}" if "ms" in found else "",
        f"{found['ratio']:.2f}" if "ratio" in found else "",
        f"{found['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in found else "",
        str(found.get("batch", "")),
    ]
