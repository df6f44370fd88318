"""Run a model eagerly on one batch and keep every tensor that enters and leaves its layers.

`profile` and `find_nonfinite` both examine what lives between the layers. Every Keras layer, and
every operation in a functional model's graph, is called through `keras.Operation.__call__`. While a
model runs here, that one method also records the floating tensors that go in and come out. So
subclassed, nested and shared layers, and the cells of recurrent ones, need no case of their own. A
gradient tape around it then yields the gradient of any of these tensors at any loss scale, without
running the forward pass again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfscale import _compat

HALF = ("float16", "bfloat16")

_LOCK = threading.RLock()

LossLike: TypeAlias = str | keras.losses.Loss | Callable[[Any, Any], Any] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of one layer.

    Attributes:
        name: the layers around it, from outside in, and its own: "block/mha/query". The model is
            left out.
        number: how often this layer was called before, 0 for the first time.
        operation: the layer (or operation of a functional graph).
    """

    name: str
    number: int
    operation: keras.Operation

    @property
    def compute_dtype(self) -> str | None:
        """The dtype the layer computes in; None for an operation without one of its own."""
        return getattr(self.operation, "compute_dtype", None)


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """Floating tensors that enter (`kind` is "input") or leave ("output") a layer."""

    call: Call
    kind: str
    tensors: tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPass:
    """A forward pass, ready for any number of backward passes.

    Attributes:
        events: in the order of execution.
        loss: scalar float32 tensor; None for a batch without the targets that the loss needs.
        outputs: the floating tensors that the model returned.
        tape: it recorded the forward pass.
    """

    events: tuple[Event, ...]
    loss: tf.Tensor | None
    outputs: tuple[tf.Tensor, ...]
    tape: tf.GradientTape

    def gradients(self, sources: Sequence[Any], scale: float = 1.0) -> list[Any]:
        """Differentiate `scale * loss`.

        Args:
            sources: tensors and variables.
            scale: the loss scale.

        Returns:
            For each source a tensor or `tf.IndexedSlices`, or None if the loss does not depend on
            it.
        """
        return self.tape.gradient(self.loss, list(sources), output_gradients=tf.constant(scale))

    def owners(self) -> list[tuple[keras.Variable, Call]]:
        """Return every variable with the first call of the innermost layer that holds it."""
        owners: dict[int, tuple[keras.Variable, Call]] = {}
        for event in self.events:
            # A layer returns before the one around it: the first to come is the innermost.
            if event.kind == "output":
                for variable in getattr(event.call.operation, "variables", ()):
                    owners.setdefault(id(variable), (variable, event.call))
        return list(owners.values())

    @property
    def compute_dtype(self) -> str:
        """The narrowest: "float16" or "bfloat16" if any layer computes in it, or "float32"."""
        used = {event.call.compute_dtype for event in self.events}
        used.update(t.dtype.name for event in self.events for t in event.tensors)
        return next((dtype for dtype in HALF if dtype in used), "float32")


def run_eagerly(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    loss: keras.losses.Loss | None = None,
) -> ForwardPass:
    """Run `model` in training mode on one batch, eagerly, and record it.

    BatchNorm statistics, seeds and metrics change: see `preserve_state`.

    Args:
        model: a built Keras model.
        x: inputs, as in `fit`.
        y: targets, as in `fit`.
        sample_weight: as in `fit`.
        loss: what `resolve_loss` returned; None stands for the loss of `compile`.
    """
    x, y, sample_weight = (as_tensors(part) for part in (x, y, sample_weight))
    events: list[Event] = []

    def on_enter(call: Call, inputs: Any) -> None:
        events.append(Event(call, "input", float_tensors(inputs)))

    def on_exit(call: Call, outputs: Any) -> None:
        events.append(Event(call, "output", float_tensors(outputs)))

    eager_before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)  # to record layers inside a user's tf.function as well
    try:
        with tf.GradientTape(persistent=True) as tape:
            with layer_hooks(on_enter, on_exit):
                predicted = model(x, training=True)
            total = None
            # A model may be compiled without a loss and add its own while it is called.
            adds_own = model.compiled and getattr(model, "loss", None) is None
            if y is not None or (loss is None and adds_own):
                total = _total_loss(model, loss, x, y, predicted, sample_weight)
    finally:
        tf.config.run_functions_eagerly(eager_before)
    return ForwardPass(tuple(events), total, float_tensors(predicted), tape)


@contextlib.contextmanager
def layer_hooks(
    on_enter: Callable[[Call, Any], None], on_exit: Callable[[Call, Any], None]
) -> Iterator[None]:
    """Within: every layer calls `on_enter(call, inputs)` and `on_exit(call, outputs)`."""
    stack: list[keras.Operation] = []
    counts: dict[int, int] = {}
    thread = threading.get_ident()
    original = keras.Operation.__call__

    def call_with_hooks(self: keras.Operation, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or not _is_part(self, stack):
            return original(self, *args, **kwargs)
        stack.append(self)
        number = counts[id(self)] = counts.get(id(self), -1) + 1
        call = Call("/".join(o.name for o in stack[1:]) or self.name, number, self)
        try:
            on_enter(call, (args, kwargs))
            outputs = original(self, *args, **kwargs)
            on_exit(call, outputs)
        finally:
            stack.pop()
        return outputs

    with _LOCK:
        keras.Operation.__call__ = call_with_hooks
        try:
            yield
        finally:
            keras.Operation.__call__ = original


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
def preserve_state(model: keras.Model, x: Any) -> Iterator[None]:
    """Within: the model may run in training mode. Afterwards all of its state is as before.

    State is every variable (weights, statistics, states, seeds) and metric. A model that has no
    variables yet is built first, by a call on `x` in inference mode.
    """
    if not model.built:
        model(as_tensors(x), training=False)
    variables = [*model.variables, *model.metrics_variables]
    # Replica by replica: a metric may hold another part of its sum on each.
    replicas = model.distribute_strategy.experimental_local_results
    copies = [copy for v in variables for copy in replicas(_compat.tf_variable(v))]
    saved = [(copy, copy.numpy()) for copy in copies]
    known = {id(v) for v in variables}
    try:
        yield
    finally:
        for variable, value in saved:
            variable.assign(value)
        for metric in model.metrics:  # the loss makes its own on its first call
            if any(id(v) not in known for v in metric.variables):
                metric.reset_state()


def resolve_loss(model: keras.Model, loss: LossLike) -> keras.losses.Loss | None:
    """Return `loss` as a Keras loss; None, for the loss of `compile`, stays None.

    Raises:
        TypeError: `model` is no Keras model.
        ValueError: there is no loss at all.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: {model!r}")
    if loss is None:
        if not model.compiled:
            raise ValueError(
                f"Model {model.name!r} is not compiled, so there is no loss to differentiate: call "
                "model.compile(...) first, or pass `loss=`, such as loss='mse'."
            )
        return None
    found = keras.losses.get(loss)
    return found if isinstance(found, keras.losses.Loss) else _FunctionLoss(found)


class _FunctionLoss(keras.losses.Loss):
    """A function of (y_true, y_pred), reduced over the batch as `compile` does it."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(name=getattr(function, "__name__", "loss"))
        self.function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.function(y_true, y_pred)


def _total_loss(
    model: keras.Model,
    loss: keras.losses.Loss | None,
    x: Any,
    y: Any,
    predicted: Any,
    sample_weight: Any,
) -> tf.Tensor:
    if loss is None:
        parts = [model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight)]
    else:
        parts = [loss(y, predicted, sample_weight=sample_weight), *model.losses]
    return tf.add_n([tf.reduce_sum(tf.cast(part, tf.float32)) for part in parts])


def batches(
    data: Any, y: Any = None, sample_weight: Any = None, batch_size: int = 32
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield batches `(x, y, sample_weight)` of whatever `fit` takes.

    Args:
        data: arrays (or a list or dictionary of arrays) with `y` beside them, a tuple `(x, y)` or
            `(x, y, sample_weight)` of arrays, or an iterable of batches such as a
            `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator.
        y: an array of targets, where `data` is the array of inputs alone.
        sample_weight: an array of weights, likewise.
        batch_size: of arrays; an iterable has its own.
    """
    is_data = isinstance(data, tf.data.Dataset | keras.utils.PyDataset | Iterator)
    if isinstance(data, tuple) and y is None and len(data) in (2, 3):
        data, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    elif y is None and (is_data or (isinstance(data, Iterable) and not _is_arrays(data))):
        is_indexed = isinstance(data, keras.utils.PyDataset)
        for batch in map(data.__getitem__, _indices(data)) if is_indexed else data:
            yield keras.utils.unpack_x_y_sample_weight(batch)
        return
    arrays = (data, y, sample_weight)
    for leaf in keras.tree.flatten(arrays):
        if leaf is not None and not hasattr(leaf, "shape"):
            raise TypeError(
                "`data` must be arrays `(x, y)` or `(x, y, sample_weight)`, or an iterable of such "
                f"batches (a tf.data.Dataset, a keras.utils.PyDataset, a generator). Received a "
                f"{type(leaf).__name__} where an array was expected: {leaf!r}"[:400]
            )
    size = next(leaf.shape[0] for leaf in keras.tree.flatten(arrays) if leaf is not None)
    for start in range(0, size, batch_size):
        cut = slice(start, start + batch_size)
        yield keras.tree.map_structure(lambda a, cut=cut: None if a is None else a[cut], arrays)


def _indices(dataset: keras.utils.PyDataset) -> Iterable[int]:
    try:
        return range(len(dataset))
    except TypeError:
        return itertools.count()  # an endless one


def _is_arrays(data: Any) -> bool:
    """Whether `data` is an array, or a list or dictionary of arrays."""
    leaves = data.values() if isinstance(data, dict) else data if type(data) is list else [data]
    return all(hasattr(leaf, "shape") for leaf in leaves)


def as_tensors(structure: Any) -> Any:
    """Convert as `fit` does: floating arrays to Keras' float type, everything else as it is."""

    def convert(leaf: Any) -> Any:
        if hasattr(leaf, "__array__") and not isinstance(leaf, tf.Tensor):
            array = np.asarray(leaf)
            if np.issubdtype(array.dtype, np.floating):
                array = array.astype(keras.config.floatx())
            return tf.convert_to_tensor(array)
        return leaf

    return keras.tree.map_structure(convert, structure)
