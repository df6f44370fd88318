"""What `scale_loss` and `unscale` tell the `apply` that follows them.

Loss and update may live in one `tf.function`, in two, or in eager code. Where both are in the same
graph the word is passed on as a tensor. Where they are not, a tensor of the one graph means nothing
in the other, so it is also left in variables; they are read only where no tensor is at hand.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from tfscale import _compat


class Word(NamedTuple):
    """What `apply` hears.

    Attributes:
        scaled: whether the loss went through `scale_loss` (Python bool).
        loss_finite: scalar bool tensor.
        unscaled: whether the gradients are unscaled already: Python bool, or a tensor where only
            the run can tell.
        gradients_finite: scalar bool tensor: what `unscale` saw before anybody clipped.
    """

    scaled: bool
    loss_finite: Any
    unscaled: Any
    gradients_finite: Any


@dataclasses.dataclass
class _Note:
    """Tensors that are valid in one graph (None: eager code) and in the graphs inside it."""

    graph: Any
    loss_finite: Any = None
    heard: bool = False  # an `apply` has used `loss_finite`; the next loss starts afresh
    gradients_finite: Any = None

    def valid(self) -> bool:
        graph = self.graph and self.graph()
        if self.graph is None:
            return tf.executing_eagerly()
        return any(outer is graph for outer in _compat.outer_graphs())

    def here(self) -> bool:
        """Whether the note was written in this very graph, not in one around it."""
        return self.valid() and (
            self.graph is None or self.graph() is tf.compat.v1.get_default_graph()
        )


class Handoff:
    """See the module. One for each optimizer; each replica thread has notes of its own."""

    def __init__(self):
        self._local = threading.local()
        # Made here: a variable that is made while a function is traced has it traced twice.
        self._variables = {
            name: tf.Variable(True, trainable=False, name=name)
            for name in ("loss_finite", "gradients_finite", "not_unscaled")
        }
        self._written: set[str] = set()
        self.scaled = False

    def loss(self, finite) -> None:
        """A loss was scaled; `finite` (scalar bool tensor) says whether it was finite."""
        self.scaled = True
        note = self._note()
        first = note.loss_finite is None or note.heard
        note.loss_finite = finite if first else tf.logical_and(note.loss_finite, finite)
        note.heard = False
        self._write("loss_finite", finite)

    def gradients(self, finite) -> None:
        """Gradients were unscaled; `finite` says whether they were finite before."""
        note = self._note()
        if note.gradients_finite is not None:
            finite = tf.logical_and(note.gradients_finite, finite)
        note.gradients_finite = finite
        self._write("gradients_finite", finite)
        self._write("not_unscaled", tf.constant(False))

    def take(self) -> Word:
        """The word for this `apply`; the next one needs a new word."""
        yes = tf.constant(True)
        note = getattr(self._local, "note", None)
        if note is not None and not note.valid():
            note = None
        if note is not None and note.loss_finite is not None:
            loss_finite = note.loss_finite
            note.heard = True
        else:
            loss_finite = self._read("loss_finite", yes)
        if note is not None and note.gradients_finite is not None:
            unscaled, gradients_finite = True, note.gradients_finite
            note.gradients_finite = None
        elif "not_unscaled" in self._written:
            unscaled = tf.logical_not(self._read("not_unscaled", yes))
            gradients_finite = self._read("gradients_finite", yes)
        else:
            unscaled, gradients_finite = False, yes
        if not tf.distribute.has_strategy():
            for name in sorted(self._written):
                self._variables[name].assign(True)
        return Word(self.scaled, loss_finite, unscaled, gradients_finite)

    def _note(self) -> _Note:
        note = getattr(self._local, "note", None)
        if note is None or not note.here():
            eager = tf.executing_eagerly()
            graph = None if eager else weakref.ref(tf.compat.v1.get_default_graph())
            note = self._local.note = _Note(graph)
        return note

    def _write(self, name: str, flag) -> None:
        # Under a strategy each replica would need its own: there, loss and update share a function.
        if tf.distribute.has_strategy():
            return
        self._written.add(name)
        variable = self._variables[name]
        variable.assign(tf.logical_and(variable, flag))

    def _read(self, name: str, default):
        if name not in self._written or tf.distribute.has_strategy():
            return default
        return self._variables[name].read_value()
