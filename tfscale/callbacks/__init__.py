"""Callbacks that show what loss scaling does while `fit` runs, and that end a run that stalls."""

from tfscale.callbacks.monitor import LossScaleMonitor
from tfscale.callbacks.stall_guard import StallGuard

__all__ = ["LossScaleMonitor", "StallGuard"]
