"""The loss scale of one optimizer: its policy, its variables, and whether `Auto` scales."""

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
        variables: the state of the policy, as variables of the optimizer.
    """

    def __init__(self, policy: policies.Policy, variables: ScaleState) -> None:
        self.policy = policy
        self.variables = variables
        self._uses_float16: bool | None = None  # whether the losses do; None before the first
        self._seen_in_graph = self._layers_asked = False

    def change_policy(self, **changes: Any) -> None:
        """Changes fields of a `Dynamic` policy; raises a ValueError for any other policy."""
        if not isinstance(self.policy, policies.Dynamic):
            raise ValueError(
                f"{self.policy} has no {', '.join(changes)}. Wrap the optimizer with another "
                "policy: tfscale.wrap(optimizer, tfscale.Dynamic(...))"
            )
        self.policy = dataclasses.replace(self.policy, **changes)

    # Reading.

    def examine(self, losses: list[tf.Tensor], variables: list[Any], *, is_built: bool) -> None:
        """Finds out for `Auto` whether `losses` depend on float16, unless that is settled.

        For the arguments see `float16.uses_float16`; `is_built` says if all variables are known.
        """
        eager = tf.executing_eagerly()
        if self._seen_in_graph or (eager and self._layers_asked):
            return
        self._layers_asked |= eager and is_built
        # Unknown counts as yes.
        found = float16.uses_float16(losses, variables, anywhere=True) is not False
        # A graph that was traced with scaling settles it: later functions must scale too.
        self._uses_float16, self._seen_in_graph = found, found and not eager

    def is_wanted(self, grads: list[Any], variables: list[Any]) -> bool:
        """Whether the loss of these gradients should have been scaled."""
        if not isinstance(self.policy, policies.Auto):
            return self.policy.is_scaling
        values = [gradients.values(g) for g in grads if g is not None]
        return bool(float16.uses_float16(values, variables))

    def policy_in_use(self) -> str:
        """As `Record.policy`: "none" also if `Auto` knows that scaling is unused."""
        auto_is_off = isinstance(self.policy, policies.Auto) and self._uses_float16 is False
        if not self.policy.is_scaling or auto_is_off:
            return "none"
        return "dynamic" if isinstance(self.policy, policies.Dynamic) else "static"

    def current(self) -> tf.Tensor:
        """The current scale, whether or not `Auto` uses it."""
        return self.policy.clamp(tf.convert_to_tensor(self.variables.scale))

    def in_use(self) -> tf.Tensor:
        """The current scale; 1 if scaling is known to be unused."""
        return tf.constant(1.0) if self.policy_in_use() == "none" else self.current()

    def facts(self) -> dict[str, Any]:
        """The fields of a `Record` that describe the scale."""
        policy, scale = self.policy_in_use(), float(self.in_use())
        is_at_floor = policy == "dynamic" and policies.is_at_floor(self.policy, scale)
        return {"policy": policy, "scale": scale, "is_at_floor": is_at_floor}

    @property
    def state(self) -> ScaleState:
        """The state of the policy, as tensors."""
        return ScaleState(*map(tf.convert_to_tensor, self.variables))

    def assign(self, state: ScaleState) -> None:
        """Sets the state of the policy."""
        for variable, part in zip(self.variables, state, strict=True):
            variable.assign(part)

    def restart(self) -> None:
        """Sets the scale to the policy's first."""
        self.variables.scale.assign(self.policy.initial_scale)

    # Moving.

    def policy_for(self, carried: Carried) -> policies.Policy:
        """The policy of a step; without a scaled loss it only skips non-finite gradients."""
        if carried.scale is None:
            return policies.NoScaling(self.policy.skip_nonfinite)
        return self.policy

    def update(
        self, policy: policies.Policy, finite: tf.Tensor, moves: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Moves the scale where `moves`; returns the scales of this step and the next."""
        state = self.state
        before = state._replace(scale=policy.clamp(state.scale))
        moved = policy.update(before, finite)
        after = tf.nest.map_structure(lambda new, old: tf.where(moves, new, old), moved, before)
        if policy.is_scaling:
            self.assign(after)
        return before.scale, after.scale
