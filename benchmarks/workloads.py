"""What is trained: a model, one batch of random data and an optimizer, at full and at quick size.

Each answers one question: many bytes (transformer), many kernels (ResNet-50), many small variables
(deep MLP, small variables), sparse gradients (embedding), the everyday case (convnet).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Workload:
    """One training problem.

    Attributes:
        name: name on the command line.
        build: makes the model and one batch `(x, y)` for it from the keyword arguments in `size`;
            `y` are int64 labels for a sparse cross-entropy from logits.
        size: keyword arguments of `build`, full size.
        quick_size: the same for a CPU.
        jit: whether XLA compiles the whole step (`jit_compile=True`); else it is a plain graph.
        optimizer: makes the optimizer to be wrapped.
        train_step: measure `compile()` and the model's own `train_step` instead of a custom loop.
        default_in: the runs that measure it by default: "quick", and at full size "gpu" and "cpu".
        torch: whether `torch_peer` has the same model.
    """

    name: str
    build: Callable[..., tuple[keras.Model, Batch]]
    size: dict[str, Any]
    quick_size: dict[str, Any]
    jit: bool
    optimizer: Callable[[], keras.optimizers.Optimizer]
    train_step: bool = False
    default_in: tuple[str, ...] = ("quick", "gpu")
    torch: bool = False


def adam() -> keras.optimizers.Optimizer:
    """Two slots for each variable."""
    return keras.optimizers.Adam(1e-4)


def sgd() -> keras.optimizers.Optimizer:
    """No slots."""
    return keras.optimizers.SGD(1e-3)


def _labels(classes: int, shape: tuple[int, ...]) -> np.ndarray:
    # int64, because TensorFlow keeps int32 arguments of a function on the host.
    return np.random.default_rng(1).integers(0, classes, shape, dtype=np.int64)


def _noise(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def transformer(
    layers: int, width: int, heads: int, ffn: int, vocabulary: int, sequence: int, batch: int
) -> tuple[keras.Model, Batch]:
    """A pre-norm encoder over tokens that predicts a token at every position."""
    x = inputs = keras.Input((sequence,), dtype="int64")
    x = keras.layers.Embedding(vocabulary, width)(x)
    for _ in range(layers):
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads)(h, h)
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(width)(keras.layers.Dense(ffn, activation="gelu")(h))
    # Logits belong in float32. In float16, TensorFlow's kernel for plain graphs also takes seven
    # times as long for a bias gradient of this width as soon as scaling makes it nonzero.
    model = keras.Model(inputs, keras.layers.Dense(vocabulary, dtype="float32")(x))
    tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, sequence), dtype=np.int64)
    return model, (tokens, _labels(vocabulary, (batch, sequence)))


def resnet50(pixels: int, classes: int, batch: int) -> tuple[keras.Model, Batch]:
    """Keras' ResNet-50 with random weights."""
    model = keras.applications.ResNet50(
        weights=None, input_shape=(pixels, pixels, 3), classes=classes, classifier_activation=None
    )
    return model, (_noise((batch, pixels, pixels, 3)), _labels(classes, (batch,)))


def mlp(layers: int, width: int, batch: int) -> tuple[keras.Model, Batch]:
    """A residual multilayer perceptron: two variables per layer, and two of the head."""
    x = inputs = keras.Input((width,))
    for _ in range(layers):
        # Branches this small keep the sum of hundreds of layers within float16's range.
        small = keras.initializers.VarianceScaling(1 / layers)
        x = x + keras.layers.Dense(width, activation="relu", kernel_initializer=small)(x)
    model = keras.Model(inputs, keras.layers.Dense(width, dtype="float32")(x))
    return model, (_noise((batch, width)), _labels(width, (batch,)))


def embedding(rows: int, width: int, classes: int, batch: int) -> tuple[keras.Model, Batch]:
    """One look-up per sample in a large table, whose gradient is `IndexedSlices`; a small head."""
    inputs = keras.Input((1,), dtype="int64")
    x = keras.layers.Flatten()(keras.layers.Embedding(rows, width)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(classes, dtype="float32")(x))
    ids = np.random.default_rng(0).integers(0, rows, (batch, 1), dtype=np.int64)
    return model, (ids, _labels(classes, (batch,)))


def convnet(pixels: int, filters: int, classes: int, batch: int) -> tuple[keras.Model, Batch]:
    """A small convolutional network on grey images."""
    x = inputs = keras.Input((pixels, pixels, 1))
    for i in range(2):
        x = keras.layers.Conv2D(filters << i, 3, strides=2, padding="same", activation="relu")(x)
        x = keras.layers.BatchNormalization()(x)
    head = keras.layers.Dense(classes, dtype="float32")
    model = keras.Model(inputs, head(keras.layers.Flatten()(x)))
    return model, (_noise((batch, pixels, pixels, 1)), _labels(classes, (batch,)))


_TRANSFORMER = Workload(
    "transformer-xla",
    transformer,
    {
        "layers": 4,
        "width": 768,
        "heads": 12,
        "ffn": 3072,
        "vocabulary": 15000,
        "sequence": 128,
        "batch": 32,
    },
    {
        "layers": 1,
        "width": 32,
        "heads": 2,
        "ffn": 64,
        "vocabulary": 100,
        "sequence": 16,
        "batch": 4,
    },
    jit=True,
    optimizer=adam,
)
_RESNET = Workload(
    "resnet50-xla",
    resnet50,
    {"pixels": 224, "classes": 1000, "batch": 64},
    {"pixels": 32, "classes": 10, "batch": 2},
    jit=True,
    optimizer=adam,
    default_in=("gpu",),  # on a CPU, tracing and compiling 160 layers alone takes minutes
)
_MLP = Workload(
    "mlp-xla",
    mlp,
    {"layers": 200, "width": 64, "batch": 128},
    {"layers": 10, "width": 16, "batch": 8},
    jit=True,
    optimizer=adam,
    default_in=("gpu",),
)

_ALL = (
    _TRANSFORMER,
    replace(_TRANSFORMER, name="transformer-graph", jit=False, torch=True),
    replace(
        _TRANSFORMER,
        name="transformer-b128-xla",
        size={**_TRANSFORMER.size, "batch": 128},
        default_in=("gpu",),
    ),
    replace(
        _TRANSFORMER,
        name="transformer-b128-graph",
        size={**_TRANSFORMER.size, "batch": 128},
        jit=False,
        default_in=(),
        torch=True,
    ),
    _RESNET,
    replace(_RESNET, name="resnet50-graph", jit=False, torch=True),
    replace(_RESNET, name="resnet50-train-step", train_step=True),
    _MLP,
    replace(_MLP, name="mlp-graph", jit=False, default_in=("quick", "gpu"), torch=True),
    Workload(
        "embedding-graph",
        embedding,
        {"rows": 1_000_000, "width": 64, "classes": 10, "batch": 256},
        {"rows": 100_000, "width": 16, "classes": 10, "batch": 256},
        jit=False,
        optimizer=sgd,
        default_in=("quick", "gpu", "cpu"),
    ),
    Workload(
        "small-variables-graph",
        mlp,
        {"layers": 99, "width": 8, "batch": 8},
        {"layers": 49, "width": 8, "batch": 8},
        jit=False,
        optimizer=sgd,
        default_in=("quick", "cpu"),
    ),
    Workload(
        "convnet-train-step",
        convnet,
        {"pixels": 28, "filters": 16, "classes": 10, "batch": 128},
        {"pixels": 28, "filters": 8, "classes": 10, "batch": 32},
        jit=False,
        optimizer=adam,
        train_step=True,
        default_in=("quick", "cpu"),
    ),
)
WORKLOADS: dict[str, Workload] = {w.name: w for w in _ALL}
