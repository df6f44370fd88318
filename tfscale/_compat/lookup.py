"""The versions of Keras that tfscale knows, and a check of Keras' backend."""

from __future__ import annotations

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfscale needs Keras on the TensorFlow backend. Received: "
        f"keras.backend.backend()={keras.backend.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=tensorflow (or the `backend` entry of ~/.keras/keras.json) before the "
        "first import of keras."
    )

KERAS = tuple(int(part) for part in keras.version().split(".")[:2])
"""Major and minor version of Keras."""
