"""The settings of the optimizer: checked, read, changed and written to a config."""

from __future__ import annotations

import copy
import numbers
from typing import Any

import keras

from tfscale import _compat, policies, policy_config
from tfscale.scaling import Scaling
from tfscale.update import MODES


class Settings(keras.optimizers.LossScaleOptimizer):
    """The constructor's arguments as attributes of the optimizer, and in its config."""

    whole_step: Any = None  # what `tfscale.compile` gave the model; files and copies carry it
    assumes_scaled: bool
    scaling: Scaling
    _update_mode: str
    _master_weights: bool | str

    @property
    def policy(self) -> policies.Policy:
        """The policy that moves the scale."""
        return self.scaling.policy

    @property
    def update_mode(self) -> str:
        """How a step is skipped inside a graph: "auto", "cond", "select" or "compiled"."""
        return self._update_mode

    @property
    def master_weights(self) -> bool | str:
        """Whether half-precision variables get float32 copies: "auto", True or False."""
        return self._master_weights

    @property
    def initial_scale(self) -> float:
        """Scale of the first step. Setting it before the first step sets the scale."""
        return self.policy.initial_scale

    @initial_scale.setter
    def initial_scale(self, value: Any) -> None:
        if "scaling" in self.__dict__:  # Keras' constructor sets it too
            self.scaling.change_policy(initial_scale=value)
            if not self.built:
                self.scaling.restart()

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Good steps until the scale grows; None where it does not grow."""
        return getattr(self.policy, "growth_interval", None)

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, value: Any) -> None:
        if "scaling" in self.__dict__:
            self.scaling.change_policy(growth_interval=value)

    def get_config(self) -> dict[str, Any]:
        """Keras' four entries, and those of tfscale that are not at their default."""
        config = {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }
        keras_arguments = (self.initial_scale, self.dynamic_growth_steps)
        if not self.assumes_scaled or self.policy != dynamic_like_keras(*keras_arguments):
            config = {"hint": _LOADING, **config, "policy": policy_config.to_config(self.policy)}
        if self._update_mode != "auto":
            config["update"] = self._update_mode
        if self._master_weights != "auto":
            config["master_weights"] = self._master_weights
        if self.whole_step is not None:
            config["whole_step"] = keras.saving.serialize_keras_object(self.whole_step)
        return config

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Any:
        """The inverse of `get_config`; `config` is left as it is."""
        config = dict(config)
        config.pop("hint", None)
        step = config.pop("whole_step", None)
        inner = keras.saving.deserialize_keras_object(
            copy.deepcopy(config.pop("inner_optimizer")), custom_objects=custom_objects
        )
        if config.get("policy") is not None:
            config.pop("initial_scale", None)
            config.pop("dynamic_growth_steps", None)
        made = cls(inner, **config)
        made.whole_step = keras.saving.deserialize_keras_object(step)
        return made


def check(
    inner: Any,
    keras_settings: dict[str, Any],
    policy: Any,
    update: Any,
    master_weights: Any,
    kwargs: dict[str, Any],
) -> policies.Policy:
    """The policy that the constructor's arguments mean; raises where one of them is wrong."""
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "A loss scale optimizer cannot wrap another one: the loss would be scaled twice. "
            f"tfscale.wrap(optimizer) uses its settings. Received: {inner}"
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` must be a Keras optimizer instance such as "
            f"keras.optimizers.Adam(1e-3). Received: {inner!r} of type {type(inner).__name__}"
        )
    given = {name: value for name, value in keras_settings.items() if value is not None}
    if policy is None:
        policy = dynamic_like_keras(**given)
    elif given:
        raise ValueError(
            "Give `initial_scale` and `dynamic_growth_steps` or `policy`, not both: a policy "
            f"has its own scale and interval. Received: {given} and policy={policy!r}"
        )
    policy = policy_config.get(policy)
    if update not in MODES:
        raise ValueError(f"`update` must be one of {MODES}. Received: update={update!r}")
    if not any(master_weights is mode for mode in (True, False)) and master_weights != "auto":
        raise ValueError(
            '`master_weights` must be "auto", True or False. Received: '
            f"master_weights={master_weights!r}"
        )
    unknown = [name for name in kwargs if name not in {"dynamic", *_compat.UNREAD_BY_WRAPPER}]
    if unknown:
        raise ValueError(
            f"LossScaleOptimizer does not support arguments: `{'`, `'.join(unknown)}`."
        )
    for name, default in _compat.UNREAD_BY_WRAPPER.items():
        if kwargs.get(name, default) != default:
            raise ValueError(
                f"LossScaleOptimizer does not support `{name}`. Instead, set `{name}` on the "
                f"`inner_optimizer`. Received: {name}={kwargs[name]!r}"
            )
    if not kwargs.get("dynamic", True):
        raise ValueError(
            "LossScaleOptimizer(dynamic=False) is Keras 2's way to a static scale. Write "
            "tfscale.wrap(optimizer, 128.0), with the scale that you want. Received: "
            f"dynamic={kwargs['dynamic']!r}"
        )
    return policy


# Keras' error about a class that it cannot find ends with the config.
_LOADING = (
    "`import tfscale` before loading this optimizer. A model that only predicts does not need it: "
    "keras.models.load_model(path, compile=False)"
)


def dynamic_like_keras(
    initial_scale: Any = policies.Dynamic.initial_scale,
    dynamic_growth_steps: Any = policies.Dynamic.growth_interval,
) -> policies.Dynamic:
    """Keras' two arguments as `Dynamic`; bounds that such a scale would break give way."""
    low, high = policies.Dynamic.min_scale, policies.Dynamic.max_scale
    is_number = isinstance(initial_scale, numbers.Real)
    # With any other value, the error names `initial_scale` and not a bound.
    if is_number and 0 < initial_scale < policies.FLOAT32_MAX:
        low, high = min(low, initial_scale), max(high, initial_scale)
    return policies.Dynamic(
        initial_scale=initial_scale,
        growth_interval=dynamic_growth_steps,
        min_scale=low,
        max_scale=high,
    )
