"""Record every tensor that enters or leaves the layers of a model while it runs eagerly.

`profile` and `find_nonfinite` both examine the tensors between layers. Every Keras layer, and every
operation in a functional model's graph, is called through `keras.Operation.__call__`. While a model
runs here, that method also records its floating inputs and outputs. So subclassed, nested and
shared layers, and the cells of recurrent ones, need no special case. A gradient tape around the run
then gives the gradient of any of these tensors at any loss scale, without another forward pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale import _compat

HALF = ("float16", "bfloat16")

_LOCK = threading.RLock()


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of one layer.

    Attributes:
        name: names of the layers around it, outermost first, and its own: "block/mha/query". The
            model is omitted.
        number: how often this layer was called before, 0 for the first time.
        operation: the layer (or operation of a functional graph).
    """

    name: str
    number: int
    operation: keras.Operation

    @property
    def compute_dtype(self) -> str | None:
        """The dtype that the layer computes in; None for an operation without one."""
        return getattr(self.operation, "compute_dtype", None)


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """Floating tensors that enter (`kind` is "input") or leave ("output") a layer."""

    call: Call
    kind: str
    tensors: tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TapedLoss:
    """A loss that a step differentiates.

    Attributes:
        tape: it recorded the loss.
        value: the loss, not scaled; from the model's own step in its original dtype and shape.
        scale: the current loss scale.
        variables: ids of the `tf.Variable`s with respect to which the step differentiates it; None
            for all.
    """

    tape: tf.GradientTape
    value: tf.Tensor
    scale: float
    variables: frozenset[int] | None = None

    def gradients(self, sources: Sequence[Any], scale: float | None) -> list[Any]:
        """`ForwardPass.gradients` for this loss alone."""
        factor = tf.cast(self.scale if scale is None else scale, self.value.dtype)
        found = self.tape.gradient(
            self.value, sources, output_gradients=tf.ones_like(self.value) * factor
        )
        pairs = zip(sources, found, strict=True)
        return [gradient if self._is_wanted(source) else None for source, gradient in pairs]

    def _is_wanted(self, source: Any) -> bool:
        if self.variables is None or isinstance(source, tf.Tensor):
            return True
        return id(_compat.tf_variable(source)) in self.variables


def _sum(gradients: Sequence[Any]) -> Any:
    present = [gradient for gradient in gradients if gradient is not None]
    # A sum is dense; a single gradient of an embedding stays as it is.
    return tf.add_n(present) if len(present) > 1 else next(iter(present), None)


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPass:
    """A forward pass, ready for any number of backward passes.

    Attributes:
        events: in the order of execution.
        losses: none for a batch without the targets that the loss needs; several if the model's own
            step has several backward passes.
        outputs: the floating tensors that the model returned; none for the model's own step.
    """

    events: tuple[Event, ...]
    losses: tuple[TapedLoss, ...]
    outputs: tuple[tf.Tensor, ...]

    @functools.cached_property
    def loss(self) -> tf.Tensor | None:
        """Scalar float32 tensor: the sum of the losses; None without any."""
        parts = [tf.reduce_sum(tf.cast(loss.value, tf.float32)) for loss in self.losses]
        return tf.add_n(parts) if parts else None

    def gradients(self, sources: Sequence[Any], scale: float | None = None) -> list[Any]:
        """Differentiate `scale * loss`.

        Args:
            sources: tensors and variables.
            scale: the loss scale; None for the current one.

        Returns:
            For each source a tensor or `tf.IndexedSlices`, or None if no loss depends on it.
        """
        of_losses = [loss.gradients(sources, scale) for loss in self.losses]
        return [_sum(gradients) for gradients in zip(*of_losses, strict=True)]

    def owners(self) -> dict[int, Call]:
        """Return the first call of the innermost layer that holds a variable, by its id."""
        owners: dict[int, Call] = {}
        for event in self.events:
            # A layer returns before the one around it, so the first is the innermost.
            if event.kind == "output":
                for variable in getattr(event.call.operation, "variables", ()):
                    owners.setdefault(id(variable), event.call)
        return owners

    @property
    def compute_dtype(self) -> str:
        """The narrowest dtype: "float16" or "bfloat16" if a layer computes in it, or "float32"."""
        used = {event.call.compute_dtype for event in self.events}
        used.update(t.dtype.name for event in self.events for t in event.tensors)
        return next((dtype for dtype in HALF if dtype in used), "float32")


@contextlib.contextmanager
def recorded_events(model: keras.Model) -> Iterator[list[Event]]:
    """Within the context, records what enters and leaves the layers, also in a `tf.function`."""
    events: list[Event] = []

    def record(call: Call, kind: str, structure: Any) -> None:
        events.append(Event(call, kind, float_tensors(structure)))

    eager_before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        with layer_hook(model, record):
            yield events
    finally:
        tf.config.run_functions_eagerly(eager_before)


@contextlib.contextmanager
def layer_hook(model: keras.Model, hook: Callable[[Call, str, Any], None]) -> Iterator[None]:
    """Within the context, layers call `hook`, before and after their own work.

    Args:
        model: the model, whose name is omitted from its layers' names.
        hook: a function of the call, "input" or "output", and those inputs or outputs.
    """
    stack: list[keras.Operation] = []
    counts: dict[int, int] = {}

    def call_with_hook(original: Any, self: keras.Operation, *args: Any, **kwargs: Any) -> Any:
        if not _is_part(self, stack):
            return original(self, *args, **kwargs)
        stack.append(self)
        number = counts[id(self)] = counts.get(id(self), -1) + 1
        name = "/".join(o.name for o in stack if o is not model)
        call = Call(name or self.name, number, self)
        try:
            hook(call, "input", (args, kwargs))
            outputs = original(self, *args, **kwargs)
            hook(call, "output", outputs)
        finally:
            stack.pop()
        return outputs

    with replaced_method(keras.Operation, "__call__", call_with_hook):
        yield


def _is_part(operation: keras.Operation, stack: list[keras.Operation]) -> bool:
    """Whether it is a layer or a node of a functional graph, not a temporary of `keras.ops`."""
    if isinstance(operation, keras.Layer) or not stack:
        return True
    return any(operation is node for node in getattr(stack[-1], "operations", ()))


def float_tensors(structure: Any) -> tuple[tf.Tensor, ...]:
    """Return the dense floating eager tensors in a nested structure."""
    return tuple(
        leaf
        for leaf in keras.tree.flatten(structure)
        if isinstance(leaf, tf.Tensor)
        and leaf.dtype.is_floating
        and not tf.is_symbolic_tensor(leaf)
    )


@contextlib.contextmanager
def replaced_method(cls: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Within the context, this thread calls `method(original, self, ...)` instead of `cls.name`.

    Args:
        cls: a class that defines the method itself.
        name: name of the method.
        method: a function whose first argument is the method that it replaces.
    """
    original, thread = vars(cls)[name], threading.get_ident()

    @tf.autograph.experimental.do_not_convert
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        return method(original, *args, **kwargs)

    with _LOCK:
        setattr(cls, name, replaced)
        try:
            yield
        finally:
            setattr(cls, name, original)
