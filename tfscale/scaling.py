"""The loss scale of one optimizer: its policy, its variables, and whether `Auto` uses it."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfscale import float16, gradients, policies
from tfscale.carried import Carried
from tfscale.policies import ScaleState


class Scaling:
    """See the module.

    Args:
        policy: the policy that moves the scale.
        variables: what the policy carries from step to step, as variables of the optimizer.
    """

    def __init__(self, policy: policies.Policy, variables: ScaleState) -> None:
        self.policy = policy
        self.variables = variables
        self._uses_float16: bool | None = None  # whether the losses do; None before the first
        self._seen_in_graph = self._layers_asked = False

    def change_policy(self, **changes: Any) -> None:
        """Changes fields of a `Dynamic` policy; raises a ValueError for another one."""
        if not isinstance(self.policy, policies.Dynamic):
            raise ValueError(
                f"{self.policy} has no {', '.join(changes)}. Wrap the optimizer with another "
                "policy: tfscale.wrap(optimizer, tfscale.Dynamic(...))"
            )
        self.policy = dataclasses.replace(self.policy, **changes)

    # What it is.

    def examine(self, losses: list[tf.Tensor], variables: list[Any], *, is_built: bool) -> None:
        """Finds out for `Auto` whether `losses` depend on float16, unless that is known for good.

        For the arguments see `float16.uses_float16`; `is_built`: whether all variables are known.
        """
        eager = tf.executing_eagerly()
        if self._seen_in_graph or (eager and self._layers_asked):
            return
        self._layers_asked |= eager and is_built
        # Unknown counts as yes.
        found = float16.uses_float16(losses, variables, anywhere=True) is not False
        # Other functions may have been traced for it: a later one must not scale differently.
        self._uses_float16, self._seen_in_graph = found, found and not eager

    def is_wanted(self, grads: list[Any], variables: list[Any]) -> bool:
        """Whether these gradients, of an unscaled loss, should be of a scaled one."""
        if not isinstance(self.policy, policies.Auto):
            return self.policy.is_scaling
        values = [gradients.values(g) for g in grads if g is not None]
        return bool(float16.uses_float16(values, variables))

    def policy_in_use(self) -> str:
        """As `Record.policy`: "none" also where `Auto` knows that scaling is unused."""
        auto_is_off = isinstance(self.policy, policies.Auto) and self._uses_float16 is False
        if not self.policy.is_scaling or auto_is_off:
            return "none"
        return "dynamic" if isinstance(self.policy, policies.Dynamic) else "static"

    def current(self) -> tf.Tensor:
        """The scale now in force, whether or not `Auto` uses it."""
        return self.policy.clamp(tf.convert_to_tensor(self.variables.scale))

    def in_use(self) -> tf.Tensor:
        """The scale now in force, 1 where scaling is known to be unused."""
        return tf.constant(1.0) if self.policy_in_use() == "none" else self.current()

    def facts(self) -> dict[str, Any]:
        """What a `Record` says of the scale."""
        policy, scale = self.policy_in_use(), float(self.in_use())
        is_at_floor = policy == "dynamic" and policies.is_at_floor(self.policy, scale)
        return {"policy": policy, "scale": scale, "is_at_floor": is_at_floor}

    @property
    def state(self) -> ScaleState:
        """What the policy carries from step to step, as tensors."""
        return ScaleState(*map(tf.convert_to_tensor, self.variables))

    def assign(self, state: ScaleState) -> None:
        """Sets what the policy carries from step to step."""
        for variable, part in zip(self.variables, state, strict=True):
            variable.assign(part)

    def restart(self) -> None:
        """Sets the policy's first scale."""
        self.variables.scale.assign(self.policy.initial_scale)

    # How it moves.

    def policy_for(self, carried: Carried) -> policies.Policy:
        """The policy of a step; without a scaled loss it is the guard alone."""
        if carried.scale is None:
            return policies.NoScaling(self.policy.skip_nonfinite)
        return self.policy

    def update(
        self, policy: policies.Policy, finite: tf.Tensor, keep_scale: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sets the scale of the next step, unless `keep_scale`; returns this one and that one."""
        before = self.state
        moved = policy.update(before, finite)
        after = ScaleState(
            *(tf.where(keep_scale, old, new) for new, old in zip(moved, before, strict=True))
        )
        if policy.is_scaling:
            self.assign(after)
        return policy.clamp(before.scale), policy.clamp(after.scale)
