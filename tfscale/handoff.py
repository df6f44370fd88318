"""What `scale_loss` and `unscale` tell the `apply` that follows them.

Loss and update may live in one `tf.function`, in two, or in eager code. Where both are in the same
graph the word is passed on as tensors. A tensor of one graph means nothing in another, so the word
is also left in variables, which are read where no tensors are at hand. A variable for each part,
because to assign a constant or a whole tensor costs less than to put a vector together.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from tfscale import _compat, ancestry, gradients

_UNSCALED = -1.0  # a scale that is none: its absolute value divides by nothing


class Seen(NamedTuple):
    """Gradients as they were before anybody clipped.

    Attributes:
        guilty: function that tells which of them are not finite, see `gradients.look`.
        number: how many there are.
    """

    guilty: Any
    number: int


class Word(NamedTuple):
    """What `apply` hears.

    Attributes:
        told: whether a loss went through `scale_loss` (Python bool).
        scale: scalar float32 tensor that the loss was multiplied by, or None where it was not.
        scaled: whether it was: True, or a scalar bool tensor where only the run can tell.
        loss_finite: scalar bool tensor.
        unscaled: whether the gradients are unscaled already: Python bool, or a tensor where only
            the run can tell.
        gradients_finite: scalar bool tensor: what `unscale` saw before anybody clipped.
        before_clipping: `Seen` by `unscale`, None where that is not known.
    """

    told: bool
    scale: Any
    scaled: Any
    loss_finite: Any
    unscaled: Any
    gradients_finite: Any
    before_clipping: Any


@dataclasses.dataclass
class _Note:
    """Tensors that are valid in one graph (None: eager code) and in the graphs inside it."""

    graph: Any
    scale: Any = None
    losses: list = dataclasses.field(default_factory=list)  # as they were before
    loss_finite: Any = None
    heard: bool = False  # an `apply` has used the loss; the next one starts afresh
    unscaled: bool = False
    gradients_finite: Any = None
    before_clipping: Any = None

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


class _Local(threading.local):
    """What each replica thread knows by itself."""

    note: _Note | None = None
    # Weak references to what `unscale` was given, and to what it returned.
    scaled: list | tuple = ()
    unscaled: list | tuple = ()
    # What eager `unscale` saw, if it was not finite.
    before_clipping: Seen | None = None
    # The graph in which gradients were unscaled, how many no `apply` took yet, and whether one took
    # any of them.
    split: tuple = (None, 0, False)


class Handoff:
    """See the module. One for each optimizer; each replica thread has notes of its own."""

    def __init__(self):
        self._local = _Local()
        # Made here: a variable that is made while a function is traced has it traced twice. Under a
        # strategy each replica would need its own: there, loss and update share a function, or
        # eager code.
        self._scale = tf.Variable(_UNSCALED, trainable=False, name="scale")  # that of the last loss
        self._loss_finite = tf.Variable(True, trainable=False, name="loss_finite")
        self._unscaled = tf.Variable(False, trainable=False, name="unscaled")
        self._gradients_finite = tf.Variable(True, trainable=False, name="gradients_finite")
        self._told = False
        self._scaled = False  # some loss was multiplied by a scale
        self._unscales = False  # somebody calls `unscale`

    def loss(self, losses, finite, scale):
        """Losses are about to be scaled.

        Args:
            losses: list of tensors.
            finite: scalar bool tensor, whether they are finite.
            scale: scalar float32 tensor, or None for losses that need no scaling.

        Returns:
            The scale to use: all losses of a step carry the same.
        """
        self._local.split = _Local.split
        note = self._new_note()
        if note is not None:
            if note.loss_finite is not None and not note.heard:
                if note.scale is None and scale is not None:
                    raise ValueError(
                        "The losses of one step must be scaled alike, but an earlier one was left "
                        "as it is because nothing in it is float16, and this one depends on "
                        "float16. Scale them in one call, `optimizer.scale_loss([loss1, loss2])`, "
                        'or scale all of them: tfscale.wrap(optimizer, "dynamic").'
                    )
                scale = note.scale
                earlier = note.loss_finite
            else:
                earlier = tf.constant(True)
            note.scale = scale
            note.loss_finite = tf.logical_and(earlier, _innocent(finite, note.gradients_finite))
            note.losses = losses if note.heard else [*note.losses, *losses]
            note.heard = False
            # What was unscaled before went into this loss, as a penalty does: it is scaled anew.
            note.unscaled = False
        self._told = True
        self._scaled |= scale is not None
        if not tf.distribute.has_strategy():
            known = self._gradients_finite.read_value() if self._unscales else None
            earlier = self._loss_finite.read_value()
            self._loss_finite.assign(tf.logical_and(earlier, _innocent(finite, known)))
            self._scale.assign(_UNSCALED if scale is None else scale)
            self._unscaled.assign(False)
        return scale

    def gradients(self, finite, guilty, count: int) -> None:
        """Gradients were unscaled.

        Args:
            finite: scalar bool tensor, whether they were finite before.
            guilty: function that tells which are not, see `gradients.look`.
            count: number of gradients.
        """
        note, seen = self._new_note(), Seen(guilty, count)
        # An eager step whose gradients are fine need not keep a second set of them.
        keep = not (tf.executing_eagerly() and finite)
        graph, left, taken = self._local.split
        left = left if graph is _graph() and not taken else 0
        self._local.split = (_graph(), left + count, False)
        self._local.before_clipping = seen if note is None and keep else None
        if note is not None:
            if note.gradients_finite is not None:
                note.gradients_finite = tf.logical_and(note.gradients_finite, finite)
            else:
                note.gradients_finite = finite
            note.unscaled = True
            note.before_clipping = seen
        self._unscales = True
        if not tf.distribute.has_strategy():
            earlier = self._gradients_finite.read_value()
            self._gradients_finite.assign(tf.logical_and(earlier, finite))
            self._unscaled.assign(True)

    def check_not_unscaled(self, grads) -> None:
        """Raises where gradients come out of `unscale` already.

        Raises:
            ValueError: some of them do, and would be divided by the scale once more.
        """
        known = _alive(self._local.unscaled)
        if any(id(g) in known for g in grads):
            raise ValueError(
                "unscale() was given gradients that it has returned itself, and would divide them "
                "by the scale a second time. Call it once for the gradients of a step: "
                "`grads = optimizer.unscale(grads)`."
            )

    def remember(self, scaled, unscaled) -> None:
        """Notes which gradients were given to `unscale` and which it returned.

        Args:
            scaled: list of gradients, with Nones.
            unscaled: list of as many.
        """
        both = zip(scaled, unscaled, strict=True)
        pairs = [(a, b) for a, b in both if a is not None and a is not b]
        self._local.scaled = [weakref.ref(a) for a, _ in pairs]
        self._local.unscaled = [weakref.ref(b) for _, b in pairs]

    def are_unscaled(self, grads) -> bool:
        """Whether `grads` are what `unscale` returned.

        Raises:
            ValueError: some of them are what it was given, and would be taken for unscaled; or
                they are not known to be unscaled, and an earlier `apply` took only some of those
                that are.
        """
        present = [g for g in grads if g is not None]
        scaled = _alive(self._local.scaled)
        if any(id(g) in scaled for g in present):
            raise ValueError(
                "These gradients were given to unscale(), which leaves them as they are, still "
                "multiplied by the scale. Apply what it returned: "
                "`grads = optimizer.unscale(grads)`, then `apply_gradients(zip(grads, variables))`."
            )
        known = _alive(self._local.unscaled)
        unscaled = bool(self._local.unscaled) and all(id(g) in known for g in present)
        self._check_split(len(grads), unscaled)
        return unscaled

    def passed_by(self, grads) -> bool:
        """Whether `grads` are of a loss as it was before it was scaled, as far as a graph shows."""
        note = self._valid_note()
        if tf.executing_eagerly() or note is None or note.scale is None:
            return False
        tensors = [gradients.values(g) for g in grads if g is not None]
        return ancestry.pass_by(note.scale, tensors, note.losses)

    def scale(self, current):
        """The scale that the gradients of this step carry, or None.

        Args:
            current: function that returns the scale now in force.
        """
        note = self._valid_note()
        if note is not None and note.loss_finite is not None:
            return note.scale
        if tf.distribute.has_strategy():
            return current() if self._scaled else None
        if tf.executing_eagerly() and not self._scaled:
            return None
        # In a graph that was traced before any loss was scaled, too: it may run after one was.
        return tf.abs(self._scale.read_value())

    @property
    def told(self) -> bool:
        """Whether any loss went through `scale_loss` so far."""
        return self._told

    def take(self, current, scales: bool) -> Word:
        """The word for this `apply`; the next one needs a new word.

        Args:
            current: function that returns the scale now in force.
            scales: whether a loss is to be expected that is multiplied by a scale.
        """
        yes = tf.constant(True)
        scale, scaled = self.scale(current), True
        note = self._valid_note()
        expected = self._told or self._unscales or (scales and not tf.executing_eagerly())
        stored = expected and not tf.distribute.has_strategy()
        loss_finite = self._loss_finite.read_value() if stored else yes
        unscaled, gradients_finite, with_loss = False, yes, False
        if note is not None and note.loss_finite is not None:
            # Of earlier calls of this function, say for micro-batches, the variable alone knows.
            loss_finite, with_loss = tf.logical_and(note.loss_finite, loss_finite), True
        elif stored and not tf.executing_eagerly():
            scaled = self._scale.read_value() > 0
        if note is not None and note.gradients_finite is not None:
            unscaled, gradients_finite = note.unscaled, note.gradients_finite
            if stored:
                earlier = self._gradients_finite.read_value()
                gradients_finite = tf.logical_and(gradients_finite, earlier)
        elif stored and (self._unscales or not with_loss):
            unscaled = self._unscaled.read_value()
            unscaled = bool(unscaled) if tf.executing_eagerly() else unscaled
            gradients_finite = self._gradients_finite.read_value()
        before_clipping = self._local.before_clipping
        if not tf.executing_eagerly():
            before_clipping = None  # they would be constants of this graph for ever
        self._local.before_clipping = None
        if note is not None:
            before_clipping, note.before_clipping = note.before_clipping, None
            note.heard, note.unscaled, note.gradients_finite = True, False, None
        if stored:
            # The scale stays: a second `apply` of the same loss divides by it too.
            self._loss_finite.assign(True)
            self._unscaled.assign(False)
            self._gradients_finite.assign(True)
        told = self._told
        return Word(told, scale, scaled, loss_finite, unscaled, gradients_finite, before_clipping)

    def _check_split(self, count: int, unscaled: bool) -> None:
        # A clipped gradient is a new tensor, which does not tell that it was unscaled.
        graph, left, taken = self._local.split
        if not left or graph is not _graph():
            return
        if taken and not unscaled:
            raise ValueError(
                f"{left} of the gradients that unscale() was given have not been applied yet, and "
                "it is not known whether these are among them. Apply all of them in one call, or "
                "call unscale() for the gradients of each apply_gradients() by themselves."
            )
        self._local.split = (graph, max(0, left - count), True)

    def _valid_note(self) -> _Note | None:
        note = self._local.note
        return note if note is not None and note.valid() else None

    def _new_note(self) -> _Note | None:
        """The note of this graph. None in eager code, where the variable always tells the truth:
        a function that was traced before writes the variable, but no note."""
        eager = tf.executing_eagerly()
        if eager and not tf.distribute.has_strategy():
            self._local.note = None
            return None
        note = self._valid_note()
        if note is None or not note.here():
            graph = None if eager else weakref.ref(_graph())
            note = self._local.note = _Note(graph)
        return note


def _graph():
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _alive(references) -> set[int]:
    """The ids of what is still there; nothing else that is there can have one of them."""
    return {id(found) for found in (reference() for reference in references) if found is not None}


def _innocent(finite, gradients_finite):
    """Whether the loss is finite, or was made infinite by gradients that went into it."""
    if gradients_finite is None:
        return finite
    return tf.logical_or(finite, tf.logical_not(gradients_finite))
