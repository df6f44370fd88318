"""Loss scaling for Keras 3 on TensorFlow: right, nearly free, and it tells you what it did.

>>> import keras, tfscale
>>> optimizer = tfscale.wrap(keras.optimizers.Adam(1e-3))
"""

from tfscale._version import __version__
from tfscale.culprit import NonFiniteReport, find_nonfinite
from tfscale.findings import Finding, Findings
from tfscale.linking import Link, link
from tfscale.lint import lint
from tfscale.optimizer import LossScaleOptimizer, LossScaleWarning
from tfscale.policies import Auto, Dynamic, NoScaling, Static
from tfscale.profile import GradientRange, Profile, profile
from tfscale.record import Record, ScaleChange
from tfscale.training import Model, compile, train_step
from tfscale.wrapping import wrap

__all__ = [
    "Auto",
    "Dynamic",
    "Finding",
    "Findings",
    "GradientRange",
    "Link",
    "LossScaleOptimizer",
    "LossScaleWarning",
    "Model",
    "NoScaling",
    "NonFiniteReport",
    "Profile",
    "Record",
    "ScaleChange",
    "Static",
    "__version__",
    "compile",
    "find_nonfinite",
    "link",
    "lint",
    "profile",
    "train_step",
    "wrap",
]
