"""The parts that the models are made of."""

from __future__ import annotations

from typing import Any

import keras

layers = keras.layers


class AddPositions(keras.layers.Layer):
    """Adds a trained vector for each position of a sequence."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Makes the vectors."""
        self.positions = self.add_weight(
            shape=shape[1:], initializer=keras.initializers.RandomNormal(stddev=0.02)
        )

    def call(self, x: Any) -> Any:
        """Adds them to `x`, of shape `[batch, positions, width]`."""
        return x + keras.ops.cast(self.positions, x.dtype)


def attention_block(x: Any, heads: int) -> Any:
    """Causal attention and two dense layers, each behind a normalization."""
    width = x.shape[-1]
    h = layers.LayerNormalization()(x)
    h = layers.MultiHeadAttention(heads, width // heads)(h, h, use_causal_mask=True)
    x = layers.Add()([x, h])
    h = layers.LayerNormalization()(x)
    h = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(h))
    return layers.Add()([x, h])


def residual_block(x: Any, filters: int, strides: int) -> Any:
    """Two convolutions with BatchNorm, and a short cut."""

    def convolution(x: Any, size: int, strides: int) -> Any:
        x = layers.Conv2D(filters, size, strides=strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    h = layers.ReLU()(convolution(x, 3, strides))
    h = convolution(h, 3, 1)
    if strides > 1 or x.shape[-1] != filters:
        x = convolution(x, 1, strides)
    return layers.ReLU()(layers.Add()([x, h]))


def noise_block(x: Any, time: Any, channels: int, groups: int) -> Any:
    """Two convolutions with GroupNorm, which are told the amount of noise, and a short cut."""
    h = layers.Activation("silu")(layers.GroupNormalization(groups)(x))
    h = layers.Conv2D(channels, 3, padding="same")(h)
    shift = layers.Reshape((1, 1, channels))(layers.Dense(channels)(time))
    h = layers.Add()([h, shift])
    h = layers.Activation("silu")(layers.GroupNormalization(groups)(h))
    h = layers.Conv2D(channels, 3, padding="same")(h)
    if x.shape[-1] != channels:
        x = layers.Conv2D(channels, 1)(x)
    return layers.Add()([x, h])
