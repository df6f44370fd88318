"""Finds the optimizers that a model's training step uses, by the names of their attributes.

A GAN has two optimizers, CycleGAN four, and `model.optimizer` may be a default of Keras that no
step uses. So this module reads which names the code of the step uses.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import keras


def own_train_step(model: keras.Model) -> types.FunctionType | None:
    """The function of a model's custom `train_step`; None if it is from Keras or tfscale."""
    return _own_function(model.train_step)


def names_in_step(model: keras.Model) -> set[str]:
    """The names that a model's custom training step and the methods it calls use.

    Without a custom step, only `optimizer`.
    """
    names: set[str] = set()
    waiting = [own_train_step(model)]
    while waiting:
        function = waiting.pop()
        new = (_names(function.__code__) if function else {"optimizer"}) - names
        names |= new
        if "train_step" in new:  # Keras' or tfscale's, called from a custom one
            names.add("optimizer")
        for cls in type(model).__mro__:
            found = [vars(cls)[name] for name in new if name in vars(cls)]
            own = [_own_function(getattr(member, "fget", member)) for member in found]
            waiting += [function for function in own if function]
    return names


def optimizers_of(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers that a model's step uses, also those in lists and dictionaries.

    Args:
        model: a Keras model.

    Returns:
        Each optimizer once, by the name of its attribute, with index or key: "optimizers_0". If the
        step seems to use none of them, all optimizers in public attributes.
    """
    names = names_in_step(model)
    held = [(name, part) for name, value in vars(model).items() for part in _parts(name, value)]
    used = [part for name, part in held if name in names] or [
        part for name, part in held if not name.startswith("_")
    ]
    found: dict[str, keras.optimizers.Optimizer] = {}
    for name, optimizer in used:
        if all(optimizer is not other for other in found.values()):
            found[name] = optimizer
    return found


def _parts(name: str, value: Any) -> Iterator[tuple[str, keras.optimizers.Optimizer]]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from _parts(f"{name}_{key}", part)


def _own_function(member: Any) -> types.FunctionType | None:
    """The Python function of a method; None if there is none, or it is from Keras or tfscale."""
    while isinstance(member, functools.partial):
        member = member.func
    member = inspect.unwrap(member) if callable(member) else member
    member = getattr(member, "python_function", member)  # of a tf.function
    function = getattr(member, "__func__", member)
    own = inspect.isfunction(function) and not function.__module__.startswith(
        ("keras.", "tfscale.")
    )
    return function if own else None


def _names(code: types.CodeType) -> set[str]:
    """The names that a function uses, including those of functions inside it."""
    inner = (_names(const) for const in code.co_consts if inspect.iscode(const))
    return set(code.co_names).union(*inner)
