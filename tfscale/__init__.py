"""Loss scaling for Keras 3 on TensorFlow: correct, nearly free, and transparent.

>>> import keras, tfscale
>>> optimizer = tfscale.wrap(keras.optimizers.Adam(1e-3))
"""

import importlib
from typing import TYPE_CHECKING, Any

from tfscale._version import __version__
from tfscale.linking import Link, link
from tfscale.optimizer import LossScaleOptimizer
from tfscale.policies import Auto, Dynamic, NoScaling, Static
from tfscale.record import Record, ScaleChange
from tfscale.training import Model, compile, train_step
from tfscale.warnings import LossScaleWarning
from tfscale.wrapping import wrap

# Imported when it is first used: most runs only train, and do not examine a model.
_LAZY = {
    "Finding": "diagnostics.findings",
    "Findings": "diagnostics.findings",
    "GradientRange": "diagnostics.ranges",
    "LossScaleMonitor": "callbacks",
    "NonFiniteReport": "diagnostics.nonfinite_report",
    "Profile": "diagnostics.profile_report",
    "StallGuard": "callbacks",
    "find_nonfinite": "diagnostics.nonfinite",
    "lint": "diagnostics.linting",
    "profile": "diagnostics.profiling",
}
if TYPE_CHECKING:
    from tfscale.callbacks import LossScaleMonitor, StallGuard
    from tfscale.diagnostics.findings import Finding, Findings
    from tfscale.diagnostics.linting import lint
    from tfscale.diagnostics.nonfinite import find_nonfinite
    from tfscale.diagnostics.nonfinite_report import NonFiniteReport
    from tfscale.diagnostics.profile_report import Profile
    from tfscale.diagnostics.profiling import profile
    from tfscale.diagnostics.ranges import GradientRange

__all__ = [
    "Auto",
    "Dynamic",
    "Finding",
    "Findings",
    "GradientRange",
    "Link",
    "LossScaleMonitor",
    "LossScaleOptimizer",
    "LossScaleWarning",
    "Model",
    "NoScaling",
    "NonFiniteReport",
    "Profile",
    "Record",
    "ScaleChange",
    "StallGuard",
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


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
