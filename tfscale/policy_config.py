"""Policies from names, numbers and configs, and back."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from tfscale.policies import Auto, Dynamic, NoScaling, Policy, Static

_BY_NAME = {"auto": Auto, "dynamic": Dynamic, "static": Static, "none": NoScaling}

DYNAMIC_FIELDS = tuple(field.name for field in dataclasses.fields(Dynamic))


def get(policy: Any, settings: dict[str, Any] | None = None) -> Policy:
    """The policy that `policy` and `settings` mean.

    Args:
        policy: a policy (returned unchanged), its name ("auto", "dynamic", "static", "none"), a
            number (`Static`), a config made by `to_config`, or None (`Dynamic` if there are
            settings, otherwise `Auto`).
        settings: fields of `Dynamic`, or of the named policy.

    Raises:
        ValueError: an unknown name or setting, or settings together with a policy object.
        TypeError: `policy` is none of these.

    Example:
    >>> from tfscale import policy_config
    >>> policy_config.get(1024.0)
    Static(scale=1024.0, skip_nonfinite=True)
    """
    settings = dict(settings or {})
    if isinstance(policy, Policy):
        if settings:
            raise ValueError(
                "Settings cannot be added to a policy object: put them into the policy. "
                f"Received: policy={policy}, {settings}"
            )
        return policy
    if isinstance(policy, dict):
        settings = {**policy, **settings}
        policy = settings.pop("name", "dynamic")
    elif policy is None or (isinstance(policy, str) and policy.lower() == "auto"):
        policy = "dynamic" if settings else "auto"
    elif isinstance(policy, numbers.Real) and not isinstance(policy, bool):
        policy, settings = "static", {"scale": policy, **settings}
    kind = _BY_NAME.get(policy.lower()) if isinstance(policy, str) else None
    if kind is None:
        error = ValueError if isinstance(policy, str) else TypeError
        raise error(
            '`policy` must be an instance such as tfscale.Dynamic(), a number, "auto", "dynamic" '
            f'or "none". Received: policy={policy!r}'
        )
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(
            f"{kind.__name__} has no setting {', '.join(map(repr, unknown))}. "
            f"It has: {', '.join(known)}."
        )
    if kind is Static and "scale" not in settings:
        raise ValueError("The static policy needs its scale: write tfscale.wrap(optimizer, 1024.0)")
    return kind(**settings)


def to_config(policy: Policy) -> dict[str, Any]:
    """A plain dictionary that `get` turns back into an equal policy."""
    for name, kind in _BY_NAME.items():
        if kind is type(policy):
            return {"name": name, **dataclasses.asdict(policy)}
    raise TypeError(
        "Only tfscale's own policies can be saved, a subclass cannot. Received: "
        f"policy={policy} of type {type(policy).__name__}"
    )
