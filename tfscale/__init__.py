"""Loss scaling for Keras 3 on TensorFlow: right, nearly free, and it tells you what it did.

>>> import keras, tfscale
>>> optimizer = tfscale.wrap(keras.optimizers.Adam(1e-3))
"""

from tfscale._version import __version__
from tfscale.linking import Link, link
from tfscale.optimizer import LossScaleOptimizer, LossScaleWarning
from tfscale.policies import Auto, Dynamic, NoScaling, Static
from tfscale.training import Model, compile, train_step
from tfscale.wrapping import wrap

__all__ = [
    "Auto",
    "Dynamic",
    "Link",
    "LossScaleOptimizer",
    "LossScaleWarning",
    "Model",
    "NoScaling",
    "Static",
    "__version__",
    "compile",
    "link",
    "train_step",
    "wrap",
]
