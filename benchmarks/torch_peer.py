"""The same shapes in PyTorch, eager and under autocast, with and without its GradScaler."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from benchmarks import workloads
from benchmarks.workloads import Workload


class Block(nn.Module):
    """The pre-norm encoder layer of `workloads.transformer`."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        """Creates the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.dense = nn.Sequential(nn.Linear(width, ffn), nn.GELU(), nn.Linear(ffn, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for a batch of sequences."""
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.dense(self.norm2(x))


class Residual(nn.Module):
    """A layer of `workloads.mlp`."""

    def __init__(self, width: int) -> None:
        """Creates the layer."""
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for a batch of vectors."""
        return x + torch.relu(self.dense(x))


def transformer(size: dict[str, Any]) -> nn.Module:
    """The model of `workloads.transformer`."""
    width = size["width"]
    blocks = [Block(width, size["heads"], size["ffn"]) for _ in range(size["layers"])]
    vocabulary = size["vocabulary"]
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.Linear(width, vocabulary))


def resnet50(size: dict[str, Any]) -> nn.Module:
    """The model of `workloads.resnet50`, from torchvision."""
    import torchvision

    return torchvision.models.resnet50(num_classes=size["classes"])


def mlp(size: dict[str, Any]) -> nn.Module:
    """The model of `workloads.mlp`."""
    width = size["width"]
    blocks = [Residual(width) for _ in range(size["layers"])]
    for block in blocks:
        nn.init.normal_(block.dense.weight, std=(size["layers"] * width) ** -0.5)
    return nn.Sequential(*blocks, nn.Linear(width, width))


MODELS = {
    workloads.transformer: transformer,
    workloads.resnet50: resnet50,
    workloads.mlp: mlp,
}
"""The PyTorch model for each workload's `build`."""


class TorchCase:
    """A PyTorch model, Adam and optionally GradScaler; eager, so nothing is traced."""

    trace_s = 0.0

    def __init__(self, workload: Workload, scaler: bool, quick: bool) -> None:
        """Builds the model and runs one step."""
        torch.manual_seed(0)
        size = workload.quick_size if quick else workload.size
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = MODELS[workload.build](size).to(self.device)
        x, y = workload.build(**size)[1]
        self.x, self.y = torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device)
        if self.x.ndim == 4:
            self.x = self.x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler(self.device, enabled=scaler)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.variables = len(list(self.model.parameters()))
        start = time.perf_counter()
        self.run(1)
        self.first_step_s = time.perf_counter() - start

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, dtype=torch.float16):
            logits = self.model(self.x)
            loss = nn.functional.cross_entropy(logits.flatten(0, -2).float(), self.y.flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def run(self, steps: int) -> float:
        """Runs the steps, waits for the last one, and returns its loss."""
        for _ in range(steps):
            loss = self._step()
        return float(loss)

    def memory(self) -> tuple[int, int] | None:
        """Bytes on the GPU: the permanent state, and what a step adds at its peak."""
        if self.device == "cpu":
            return None
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        held = [*self.model.parameters(), *self.model.buffers(), *states]
        state = sum(t.numel() * t.element_size() for t in held if torch.is_tensor(t))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(2)
        return state, torch.cuda.max_memory_allocated() - before

    def scale(self) -> float | None:
        """The loss scale now."""
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else None
