"""Loss scaling for Keras 3 on TensorFlow: correct, cheap, and transparent.

>>> import keras, tfscale
>>> optimizer = tfscale.wrap(keras.optimizers.Adam(1e-3))
"""

import importlib
import importlib.util
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from tfscale._version import __version__

# Imported when it is first used: most runs only train, and do not examine a model.
_LAZY = {
    "callbacks": ["LossScaleMonitor", "StallGuard"],
    "diagnostics.findings": ["Finding", "Findings"],
    "diagnostics.linting": ["lint"],
    "diagnostics.nonfinite": ["find_nonfinite"],
    "diagnostics.nonfinite_report": ["NonFiniteReport"],
    "diagnostics.profile_report": ["Profile"],
    "diagnostics.profiling": ["profile"],
    "diagnostics.ranges": ["GradientRange"],
    "linking": ["Link", "link"],
    "optimizer": ["LossScaleOptimizer"],
    "policies": ["Auto", "Dynamic", "NoScaling", "Static"],
    "record": ["Record", "ScaleChange"],
    "training": ["Model", "compile"],
    "transaction": ["train_step"],
    "warnings": ["LossScaleWarning"],
    "wrapping": ["wrap"],
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
    from tfscale.linking import Link, link
    from tfscale.optimizer import LossScaleOptimizer
    from tfscale.policies import Auto, Dynamic, NoScaling, Static
    from tfscale.record import Record, ScaleChange
    from tfscale.training import Model, compile
    from tfscale.transaction import train_step
    from tfscale.warnings import LossScaleWarning
    from tfscale.wrapping import wrap

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


def load_tensorflow() -> None:
    """Import TensorFlow and what trains, so that Keras knows the classes that a file may name.

    Raises:
        ImportError: TensorFlow is not installed.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "tfscale needs TensorFlow, which is not installed here; install it with: "
            "pip install 'tfscale[cpu]', or pip install 'tfscale[gpu]' for NVIDIA GPUs"
        )
    importlib.import_module("tfscale.training")


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# The command line imports it where a command needs it: that takes seconds.
_started = [pathlib.Path(argument).stem for argument in sys.orig_argv[1:3]]
_in_a_program = _started[:1] != ["tfscale"] and _started != ["-m", "tfscale"]
if _in_a_program:
    load_tensorflow()
