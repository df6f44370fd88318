"""Records the calls of `scale_loss` and `unscale` while one `tf.function` is traced.

The graph shows what each gradient is computed from, so no variable has to be read. Branches and
loops belong to their function. A nested `tf.function` has its own log.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfscale import gradients, graph

# Bits: what a gradient is computed from.
UNSCALED = 1  # a result of `unscale`
IN_LOSS = 2  # a result of `unscale` that a later loss contains, as in a gradient penalty
UNSEEN = 4  # a call of a function or branch, which may have called `unscale`
FIRST_SCALE = 8  # the first scaled loss; the next bits are the next losses


@dataclasses.dataclass
class ScaledLoss:
    """One call of `scale_loss`.

    Attributes:
        owner: weak reference to the optimizer's `Handoff`.
        graph: the graph being built then.
        scale: scalar float32 tensor, None if nothing in the loss is float16.
        losses: list of tensors, before scaling.
        applied: whether an update followed.
    """

    owner: weakref.ref[Any]
    graph: Any
    scale: Any
    losses: list[Any]
    applied: bool = False


class TraceLog:
    """The calls of all optimizers in one function; an `owner` is the `Handoff` of an optimizer.

    Attributes:
        last_flags: the result of the last sum over the replicas, None if there is none.
    """

    def __init__(self) -> None:
        self._losses: list[ScaledLoss] = []
        self._returned: dict[graph.Key, int] = {}  # by `unscale`: operations and their bits
        self._given: set[graph.Key] = set()  # to `unscale`: tensors
        self._unscaled_in_branch = False
        # By optimizer and thread: each replica is traced in its own thread, in turns.
        self._before_clipping: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self.last_flags: Any = None

    def loss_scaled(self, owner: Any, losses: list[Any], scale: Any) -> bool:
        """Records a loss, see `ScaledLoss`; returns whether it contains unscaled gradients."""
        used = map(graph.key, graph.ancestors(losses)) if self._returned else ()
        penalties = set(self._returned).intersection(used)
        self._returned.update(dict.fromkeys(penalties, IN_LOSS))
        made_in = graph.function_graphs()[0]
        self._losses.append(ScaledLoss(weakref.ref(owner), made_in, scale, losses))
        return bool(penalties)

    def unscaled(self, owner: Any, pairs: Iterable[tuple[Any, Any]], seen: Any) -> None:
        """Records pairs of a gradient and its unscaled result.

        `take_before_clipping` returns `seen` later.
        """
        for given, returned in pairs:
            if given is not returned:
                self._given.add(graph.key(gradients.values(given)))
                self._returned[graph.key(gradients.values(returned).op)] = UNSCALED
        graphs = graph.function_graphs()
        self._unscaled_in_branch |= len(graphs) > 1
        by_thread = self._before_clipping.setdefault(owner, {})
        by_thread[threading.get_ident()] = graphs[0], seen

    def take_before_clipping(self, owner: Any) -> Any:
        """Returns once the `seen` of an optimizer's last `unscale`, if in reach; otherwise None."""
        by_thread = self._before_clipping.get(owner, {})
        made_in, seen = by_thread.pop(threading.get_ident(), (None, None))
        return seen if made_in in graph.function_graphs() else None

    def was_given(self, tensors: Iterable[Any]) -> bool:
        """Whether one of `tensors` was given to `unscale`."""
        return any(hasattr(t, "graph") and graph.key(t) in self._given for t in tensors)

    def losses_of(self, owner: Any) -> list[ScaledLoss]:
        """The losses of an optimizer whose tensors the current graph can reach."""
        graphs = graph.function_graphs()
        return [s for s in self._losses if s.owner() is owner and s.graph in graphs]

    def bits_reached(self, owner: Any, tensors: list[Any]) -> tuple[list[ScaledLoss], list[int]]:
        """The scaled losses of an optimizer, and the bits of each tensor."""
        scaled = [s for s in self._losses if s.owner() is owner and s.scale is not None]
        marks = dict(self._returned)
        for i, loss in enumerate(scaled):
            marks[graph.key(loss.scale.op)] = FIRST_SCALE << i
        hides = graph.CALLS + graph.BRANCHES if self._unscaled_in_branch else graph.CALLS
        return scaled, graph.marks_reached(tensors, marks, hides, UNSEEN)


def current() -> TraceLog:
    """The log of the function being traced; an empty log in eager code."""
    if tf.executing_eagerly():
        return TraceLog()
    function = graph.function_graphs()[-1]
    if not hasattr(function, "_tfscale_log"):
        # On the graph, because in a dictionary its tensors would keep the graph alive.
        function._tfscale_log = TraceLog()
    return function._tfscale_log
