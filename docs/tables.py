"""Writes the tables of measurements: `python docs/tables.py` after new results.

The text between the marks in the pages comes from the files in `benchmarks/results`. Of several
results for the same card and work, the newest file counts.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT))
from benchmarks.trainings import report  # noqa: E402
from benchmarks.trainings.names import VARIANTS as PRECISIONS  # noqa: E402
from benchmarks.trainings.plots import LABELS, TITLES  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
LINK = "../benchmarks/results/"
MARKS = "<!-- from benchmarks/results, written by docs/tables.py -->", "<!-- until here -->"

WORK = {
    "transformer-xla": "transformer, 51 M parameters, batch 32, `jit_compile=True`",
    "transformer-b128-xla": "transformer, batch 128, `jit_compile=True`",
    "transformer-graph": "transformer, batch 32, plain graph",
    "transformer-b128-graph": "transformer, batch 128, plain graph",
    "resnet50-xla": "ResNet-50, batch 64, `jit_compile=True`",
    "resnet50-graph": "ResNet-50, batch 64, plain graph",
    "resnet50-train-step": "ResNet-50, batch 64, the whole `train_step`, `jit_compile=True`",
    "mlp-xla": "200-layer MLP, 402 small variables, `jit_compile=True`",
    "mlp-graph": "200-layer MLP, plain graph",
    "small-variables-graph": "99-layer MLP of width 8, plain graph",
    "embedding-graph": "embedding 1 M x 64, plain graph",
    "convnet-train-step": "small convnet, the whole `train_step`, plain graph",
    "replicas": "{} GPUs, `MirroredStrategy`, the transformer, batch 32 each",
    "replicas-fit-b32": "{} GPUs, `fit`, batch 32 each",
    "replicas-fit-b128": "{} GPUs, `fit`, batch 128 each",
    "replicas-own_loop-b32": "{} GPUs, custom loop, batch 32 each",
    "replicas-own_loop-b128": "{} GPUs, custom loop, batch 128 each",
}
VARIANTS = {
    "tfscale-unguarded": "scaled, no check",
    "keras": "Keras' LossScaleOptimizer",
    "tfscale": "tfscale",
    "tfscale-step": "`tfscale.compile`",
    "tfscale, XLA on each replica": "tfscale, XLA on each GPU",
    "torch-scaler": "PyTorch's GradScaler, against PyTorch",
}
REPLICAS = {
    "none": "plain optimizer",
    "keras": "Keras' LossScaleOptimizer",
    "tfscale": "tfscale, plain graph",
    "tfscale, XLA on each replica": "tfscale, XLA on each GPU",
    "tfscale, XLA on each replica, steps_per_execution=10": "with `steps_per_execution=10`",
    "tfscale, XLA, one device": "tfscale with XLA, one GPU",
}


def results() -> dict[str, dict[str, Any]]:
    """For each card: its files, versions, and from a work to its results by variant."""
    cards: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        data = json.loads(path.read_text())
        if data.get("settings", {}).get("quick"):
            continue
        environment = data["environment"]
        card = environment.get("card") or environment["cards"][0]
        works: dict[str, dict[str, Any]] = {}
        for result in data.get("results", data.get("times", [])):
            if not result.get("error") and result.get("ratio"):
                works.setdefault(result.get("workload", "replicas"), {})[result["variant"]] = result
        if "devices" in environment:
            works = {f"{w} {len(environment['devices'])}": found for w, found in works.items()}
        found = cards.setdefault(card, {"files": {}, "environment": environment, "works": {}})
        found["environment"] = {**found["environment"], **environment}
        for work, variants in works.items():
            found["works"][work] = variants
            found["files"][work] = path.name
    return cards


def label(work: str) -> str:
    name, _, devices = work.partition(" ")
    return WORK.get(name, name).format(devices)


def order(work: str) -> tuple[int, str]:
    names = list(WORK)
    name = work.partition(" ")[0]
    return (names.index(name) if name in names else len(names), work)


def figure(result: dict[str, Any] | None, quartiles: bool) -> str:
    """The ratio to the plain step, and the quartiles over the rounds."""
    if result is None:
        return ""
    digits = 1 if result["ratio"] >= 2.95 else 2
    text = f"{result['ratio']:.{digits}f}"
    if quartiles and result.get("ratio_quartiles"):
        low, high = result["ratio_quartiles"]
        text += f" ({low:.{digits}f} to {high:.{digits}f})"
    return text


def table(found: dict[str, Any], variants: list[str], detailed: bool) -> str:
    """A Markdown table of one card."""
    works = sorted(found["works"], key=order)
    shown = [v for v in variants if any(v in found["works"][work] for work in works)]
    head = ["work", *(["plain step"] if detailed else []), *(VARIANTS[v] for v in shown)]
    rows = [head, ["---"] * len(head)]
    for work in works:
        here = found["works"][work]
        if not any(v in here for v in shown):
            continue
        plain = [f"{here['none']['ms']:.2f} ms" if "none" in here else ""] if detailed else []
        rows.append([label(work), *plain, *(figure(here.get(v), detailed) for v in shown)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def newest(cards: dict[str, dict[str, Any]]) -> str:
    """The card measured last; a CPU (card "none") only if there is no other."""
    return max(cards, key=lambda card: (card != "none", cards[card]["environment"]["date"]))


def for_performance() -> str:
    cards, parts = results(), []
    for card in sorted(cards, key=lambda c: (c != newest(cards), c)):
        found = cards[card]
        versions = found["environment"]
        files = ", ".join(f"[{n}]({LINK}{n})" for n in sorted(set(found["files"].values())))
        parts += [
            f"### {'CPU' if card == 'none' else card}",
            table(found, list(VARIANTS), detailed=True),
            f"TensorFlow {versions['tensorflow']}, Keras {versions['keras']}. From {files}.",
        ]
    return "\n\n".join(parts)


def for_readme() -> str:
    cards = results()
    found = cards[newest(cards)]
    works = {w: v for w, v in found["works"].items() if not w.startswith("replicas")}
    return table({**found, "works": works}, ["keras", "tfscale"], detailed=False)


def for_replicas() -> str:
    """Milliseconds of a step on several GPUs, beside one with XLA."""
    cards = results()
    works = cards[newest(cards)]["works"]
    rows = [["ms a step", *REPLICAS.values()], ["---"] * (len(REPLICAS) + 1)]
    for work in sorted((w for w in works if w.startswith("replicas")), key=order):
        here = works[work]
        rows.append([label(work), *(f"{here[v]['ms']:.1f}" if v in here else "" for v in REPLICAS)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def trainings() -> pathlib.Path:
    return max((RESULTS / "trainings").glob("*.json"))


def for_trainings() -> str:
    file = trainings()
    link = f"{LINK}trainings/{file.name}"
    return f"{report.tables(json.loads(file.read_text()))}\nFrom [{file.name}]({link})."


def trainings_for_readme() -> str:
    """The final result of each training, as a mean over the seeds."""
    data = json.loads(trainings().read_text())
    rows = [["", *(LABELS.get(v, v) for v in PRECISIONS)], ["---"] * (len(PRECISIONS) + 1)]
    for training, title in TITLES.items():
        ends = [report.row(data, training, v)["final"][0] for v in PRECISIONS]
        rows.append([title.replace(":", ","), *(f"{end:.3f}" for end in ends)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


PAGES = {
    "docs/performance.md": [for_performance],
    "docs/does_it_work.md": [for_trainings],
    "docs/distributed.md": [for_replicas],
    "README.md": [trainings_for_readme, for_readme, for_replicas],
}


def written(page: str) -> str:
    """The text of the page with tables from the files."""
    start, end = map(re.escape, MARKS)
    parts = re.split(f"{start}.*?{end}", (ROOT / page).read_text(), flags=re.DOTALL)
    tables = PAGES[page]
    if len(parts) != len(tables) + 1:
        raise ValueError(
            f"{page} needs the marks {MARKS} {len(tables)} times, found {len(parts) - 1} times"
        )
    text = parts[0]
    for made, after in zip(tables, parts[1:], strict=True):
        text += f"{MARKS[0]}\n\n{made()}\n\n{MARKS[1]}{after}"
    return text


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).write_text(written(name))
