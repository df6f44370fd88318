"""Random training loops: what they consist of, how TensorFlow runs them, and what has to come out.

A program is a list of operations on registers. A register holds the gradients of one loss, one for
each variable. `Real` runs an operation with tfscale, `Oracle` works out the same in plain numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale

CLIPPINGS = ("value", "norm", "global", "hand")
HUGE = 2.0**127  # is infinite as soon as any scale multiplies it; no scale here is below 2
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Loss:
    """Scales a loss of optimizer `of`, and puts its gradients into `reg`; the rest is frozen."""

    of: int
    reg: int
    active: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Eval:
    """Scales a loss that is never differentiated."""

    of: int


@dataclasses.dataclass(frozen=True)
class Unscale:
    """Unscales those gradients of `which` that still are scaled."""

    reg: int
    which: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Clip:
    reg: int
    which: tuple[int, ...]
    how: str
    at: float


@dataclasses.dataclass(frozen=True)
class Zero:
    """Puts 0 in the place of NaN."""

    reg: int
    which: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Add:
    """Adds the gradients of `other` to those of `reg`, as micro-batches do."""

    reg: int
    other: int


@dataclasses.dataclass(frozen=True)
class Apply:
    reg: int
    which: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Linked:
    """Applies the registers of both optimizers together."""

    regs: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Guard:
    """Runs `body` only if the loss of `reg`, or the norm of its gradients, is finite."""

    reg: int
    by: str
    body: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """One optimizer and its variables."""

    initial: float = 8.0
    lowest: float = 2.0
    highest: float = 64.0
    interval: int = 2
    hysteresis: int = 1
    shapes: tuple[int, ...] = (1, 2, 3)

    def policy(self):
        return tfscale.Dynamic(
            initial_scale=self.initial,
            min_scale=self.lowest,
            max_scale=self.highest,
            growth_interval=self.interval,
            hysteresis=self.hysteresis,
        )


KNOWN = {
    "stale in eager code",
    "loss between unscale and clipping",
    "clipped after unscale of others",
    "losses unscaled one after the other",
    "loss between unscale and another function",
    "scaled ones in another function beside unscaled ones",
}
"""What is unknown, or a known limit. Programs end before it."""


class OutOfScope(Exception):
    """The program applies gradients of unknown origin, and does not declare them."""


def known(name):
    if name in KNOWN:
        raise OutOfScope(name)


# In plain numbers.


@dataclasses.dataclass
class Gradient:
    """What the oracle knows of a gradient.

    Attributes:
        value: array of shape `[replicas, size]`.
        scale: what it is multiplied by, 1 once it is unscaled.
        of: the optimizer of its loss.
        loss: serial number of that loss.
        origin: serial numbers of what it is computed from: losses positive, `unscale` negative.
        where: the function in which it was made, "eager" outside.
        time: number of the operation that made it.
        changed: something came between `tape.gradient` or `unscale` and now.
        applied: whether it was already; all clipped forms share the list.
    """

    value: Any
    scale: float
    of: int
    loss: int
    origin: frozenset[int]
    where: Any
    time: int
    changed: bool = False
    applied: list[bool] = dataclasses.field(default_factory=lambda: [False])

    @property
    def raw(self):
        return all(n > 0 for n in self.origin)

    @property
    def unscaled(self):
        return all(n < 0 for n in self.origin)


class Scale:
    """The rule, for one optimizer."""

    def __init__(self, settings, replicas):
        self.settings = settings
        self.weights = [np.zeros(n) for n in settings.shapes]
        self.scale, self.good, self.left = settings.initial, 0, settings.hysteresis
        self.applied = self.skipped = 0
        self.bad_loss = False  # since the last update
        self.seen: set[int] = set()  # losses whose overflow `unscale` saw since the last update
        self.last_loss = 0
        self.last_scale = settings.initial
        self.pending = 0  # gradients of the last loss that are unscaled and not applied
        self.waiting = 0  # gradients unscaled since the last update
        self.calls: list[tuple[int, int]] = []  # time and serial of each eager call

    def saved(self):
        return (
            self.scale, self.good, self.left, self.applied, self.skipped, list(self.weights)
        )  # fmt: skip

    def load(self, saved):
        self.scale, self.good, self.left, self.applied, self.skipped, weights = saved
        self.weights = list(weights)

    def overflow(self):
        """A step is skipped; only with a finite loss is the scale the cause."""
        self.skipped += 1
        if self.bad_loss:
            return
        self.good, self.left = 0, max(self.left - 1, 0)
        if self.left == 0:
            self.scale = max(self.scale / 2, self.settings.lowest)

    def step(self, finite, partners_finite=True):
        """Whether the step is applied."""
        if not finite:
            if not self.seen:
                self.overflow()
        elif not partners_finite:
            self.skipped += 1
        else:
            self.applied += 1
            self.good += 1
            if self.good >= self.settings.interval:
                self.scale = min(self.scale * 2, self.settings.highest)
                self.good, self.left = 0, self.settings.hysteresis
        self.bad_loss, self.seen = False, set()
        self.waiting = 0
        return finite and partners_finite


class Oracle:
    """What has to come out. `refusable` is True after an update that may raise instead."""

    def __init__(self, settings, replicas=1):
        self.optimizers = [Scale(s, replicas) for s in settings]
        self.regs: dict[int, list[Gradient | None]] = {}
        self.loss_finite: dict[int, bool] = {}
        self.serial, self.clock = itertools.count(1), itertools.count(1)
        self.where: Any = "eager"
        self.refusable = False
        self.skip_refusable = False  # as XLA does, which cannot raise

    def run(self, op, data):
        self.time = next(self.clock)
        getattr(self, type(op).__name__.lower())(op, data)

    def loss(self, op, data):
        scale = self._scaled(op.of, data[0])
        serial = self.optimizers[op.of].last_loss
        grads: list[Gradient | None] = [None] * len(data[1])
        for i in op.active:
            with np.errstate(over="ignore"):
                value = (data[1][i] * np.float32(scale)).astype("float32")
            grads[i] = Gradient(
                value, scale, op.of, serial, frozenset([serial]), self.where, self.time
            )
        self.regs[op.reg] = grads
        self.loss_finite[op.reg] = bool(np.isfinite(data[0]).all())

    def eval(self, op, data):
        self._scaled(op.of, data[0])

    def _scaled(self, of, values):
        optimizer = self.optimizers[of]
        optimizer.last_loss, optimizer.last_scale = next(self.serial), optimizer.scale
        optimizer.pending = 0
        optimizer.bad_loss |= not np.isfinite(values).all()
        if self.where == "eager":
            optimizer.calls.append((self.time, optimizer.last_loss))
        return optimizer.scale

    def to_unscale(self, op):
        grads = self.regs[op.reg]
        return [i for i in op.which if grads[i] is not None and grads[i].raw]

    def unscale(self, op, data):
        grads, places = self.regs[op.reg], self.to_unscale(op)
        optimizer = self.optimizers[grads[places[0]].of]
        for i in places:
            if grads[i].where != self.where and grads[i].loss != optimizer.last_loss:
                raise OutOfScope
            if self.where == "eager" and grads[i].scale != optimizer.last_scale:
                known("stale in eager code")
        losses = {grads[i].loss for i in places}
        if not all(np.isfinite(grads[i].value).all() for i in places):
            if not losses & optimizer.seen:
                if optimizer.seen and optimizer.pending:
                    known("losses unscaled one after the other")
                optimizer.overflow()
                optimizer.bad_loss = False  # it explains this overflow, not the next one
            optimizer.seen |= losses
        serial = -next(self.serial)
        if self.where == "eager":
            optimizer.calls.append((self.time, serial))
        for i in places:
            old = grads[i]
            value = np.where(np.isfinite(old.value), old.value / np.float32(old.scale), np.nan)
            grads[i] = dataclasses.replace(
                old, value=value.astype("float32"), scale=1.0, origin=frozenset([serial]),
                where=self.where, time=self.time, changed=False, applied=[False],
            )  # fmt: skip
        optimizer.pending += len(places)
        optimizer.waiting += len(places)

    def _present(self, reg, which):
        return [i for i in which if self.regs[reg][i] is not None]

    def _change(self, reg, places, values, origins):
        for i, value, origin in zip(places, values, origins, strict=True):
            self.regs[reg][i] = dataclasses.replace(
                self.regs[reg][i], value=value.astype("float32"), origin=origin,
                where=self.where, time=self.time, changed=True,
            )  # fmt: skip

    def clip(self, op, data):
        places = self._present(op.reg, op.which)
        grads = [self.regs[op.reg][i] for i in places]
        origins = [g.origin for g in grads]
        with np.errstate(all="ignore"):
            values = clipped([g.value for g in grads], op.how, op.at)
        if op.how in ("global", "hand"):
            origins = [frozenset().union(*origins)] * len(grads)
        self._change(op.reg, places, values, origins)

    def zero(self, op, data):
        places = self._present(op.reg, op.which)
        grads = [self.regs[op.reg][i] for i in places]
        values = [np.where(np.isnan(g.value), 0.0, g.value) for g in grads]
        self._change(op.reg, places, values, [g.origin for g in grads])

    def can_add(self, op):
        """Whether both are of one optimizer and of one scale, or both unscaled."""
        pairs = zip(self.regs.get(op.reg, ()), self.regs.get(op.other, ()), strict=False)
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        return (
            op.reg != op.other
            and bool(both)
            and all(
                a.of == b.of and ((a.raw and b.raw) or (a.unscaled and b.unscaled)) for a, b in both
            )
        )

    def add(self, op, data):
        pairs = zip(self.regs[op.reg], self.regs[op.other], strict=True)
        for i, (a, b) in enumerate(pairs):
            if a is None or b is None:
                continue
            if a.scale != b.scale:
                raise OutOfScope
            with np.errstate(all="ignore"):
                value = a.value + b.value
            self._change(op.reg, [i], [value], [a.origin | b.origin])
            self.regs[op.reg][i].loss = max(a.loss, b.loss)

    def guard(self, op, data):
        if op.by == "loss":
            taken = self.loss_finite[op.reg]
        else:
            grads = [g.value for g in self.regs[op.reg] if g is not None]
            with np.errstate(all="ignore"):
                taken = all(np.isfinite(norm(grads)))
        before = {reg: list(grads) for reg, grads in self.regs.items()}
        for inner in op.body:
            if taken:
                self.run(inner, data)
            elif isinstance(inner, Apply | Linked):
                regs = inner.regs if isinstance(inner, Linked) else [inner.reg]
                for reg in regs:  # a function may refuse it while it is traced
                    self.refusable |= not self.is_sure(self._list(reg, inner))
        self.regs = before  # what a branch changes stays there

    def possible(self, op):
        """`op`, without what makes no sense here; None where nothing is left of it."""
        if isinstance(op, Loss | Eval):
            return op
        if isinstance(op, Linked):
            lists = [self._list(reg, op) for reg in op.regs]
            return op if all(lists) and [grads[0].of for grads in lists] == [0, 1] else None
        if op.reg not in self.regs:
            return None
        if isinstance(op, Guard):
            body = tuple(inner for inner in map(self.possible, op.body) if inner is not None)
            return dataclasses.replace(op, body=body) if body else None
        if isinstance(op, Unscale):
            op = dataclasses.replace(op, which=tuple(self.to_unscale(op)))
            return op if op.which else None
        if isinstance(op, Add):
            return op if self.can_add(op) else None
        return op if self._list(op.reg, op) else None

    def _list(self, reg, op):
        grads = self.regs.get(reg, [])
        which = getattr(op, "which", range(len(grads)))
        return [grads[i] for i in which if i < len(grads) and grads[i] is not None]

    def apply(self, op, data):
        self._apply([self._list(op.reg, op)], [op.reg])

    def linked(self, op, data):
        lists = [self._list(reg, op) for reg in op.regs]
        self._apply(lists, op.regs)

    def _apply(self, lists, regs):
        sure = all(self.is_sure(grads) for grads in lists)
        self.refusable |= not sure
        totals = []
        for grads in lists:
            with np.errstate(all="ignore"):
                totals.append([g.value.sum(0) for g in grads])
        finite = [all(np.isfinite(t).all() for t in total) for total in totals]
        if self.skip_refusable and not sure:
            finite = [False] * len(lists)
        for k, grads in enumerate(lists):
            optimizer = self.optimizers[grads[0].of]
            if optimizer.step(finite[k], all(finite[:k] + finite[k + 1 :])):
                for g, total in zip(grads, totals[k], strict=True):
                    i = next(i for i, x in enumerate(self.regs[regs[k]]) if x is g)
                    optimizer.weights[i] = optimizer.weights[i] - total / g.scale
            for g in grads:
                g.applied[0] = True
            taken = [g for g in grads if g.unscaled]
            optimizer.pending = max(0, optimizer.pending - len(taken))

    def is_sure(self, grads):
        """Whether it can be known which gradients are unscaled, so that nothing may raise."""
        if not grads:
            return True
        optimizer = self.optimizers[grads[0].of]
        again = any(g.applied[0] and not g.raw for g in grads) and any(g.changed for g in grads)
        if again and self.where == "eager":
            raise OutOfScope  # what was unscaled counts until it is applied
        foreign = [g for g in grads if g.where != self.where]
        if foreign:
            # Only their number and the last loss tell of those made in another function.
            if any(g.applied or (g.raw and g.loss != optimizer.last_loss) for g in foreign):
                raise OutOfScope
            if optimizer.waiting and not optimizer.pending:
                return False  # a loss came after `unscale`
            if any(g.unscaled and g.loss != optimizer.last_loss for g in foreign):
                known("loss between unscale and another function")
            if optimizer.pending and any(g.raw for g in foreign):
                known("scaled ones in another function beside unscaled ones")
            if len(foreign) < len(grads) or not all(g.raw or g.unscaled for g in grads):
                return False
            raw = all(g.raw for g in grads)
            latest = all(g.loss == optimizer.last_loss for g in grads)
            return latest and (
                (raw and not optimizer.pending)
                or (all(g.unscaled for g in grads) and optimizer.pending >= len(grads))
            )
        if self.where != "eager":
            return all(g.raw or g.unscaled for g in grads)
        if any(g.raw and g.scale != optimizer.last_scale for g in grads):
            known("stale in eager code")
        changed = [g for g in grads if g.changed]
        origins = set().union(*(g.origin for g in grads))
        times = [t for t, n in optimizer.calls if n in origins and n < 0]
        if changed and any(times[0] < t < times[-1] for t, n in optimizer.calls if n > 0 and times):
            known("loss between unscale and clipping")
        sure = True
        for g in changed:
            # The last call before it was made has to be the one that it comes from.
            call = ([n for t, n in optimizer.calls if t < g.time] or [0])[-1]
            if call > 0 and not g.raw:
                known("loss between unscale and clipping")
            if call < 0 and not g.unscaled:
                known("clipped after unscale of others")
            since = min((t for t, n in optimizer.calls if n in g.origin), default=g.time)
            if g.unscaled and any(n > 0 and since < t < g.time for t, n in optimizer.calls):
                known("loss between unscale and clipping")
            sure &= g.origin == {call}
        if not sure:
            return False
        return len({next(iter(g.origin)) for g in changed if g.unscaled}) <= 1


def norm(values):
    return np.sqrt(sum((v * v).sum(1) for v in values))


def clipped(values, how, at):
    """What TensorFlow's clipping makes of arrays of shape `[replicas, size]`."""
    if how == "value":
        return [np.clip(v, -at, at) for v in values]
    if how == "norm":
        norms = [norm([v])[:, None] for v in values]
        return [v * at / np.maximum(n, at) for v, n in zip(values, norms, strict=True)]
    total = norm(values)[:, None]
    if how == "global":
        factor = at * np.minimum(1 / total, 1 / at) + (total - total)
    else:
        factor = np.minimum(1.0, at / total)
    return [v * factor for v in values]


# With tfscale.


class Real:
    """Variables and optimizers."""

    def __init__(self, settings):
        self.settings = settings
        self.variables = [
            [
                keras.Variable(np.zeros(n, "float32"), name=f"v{k}{i}")
                for i, n in enumerate(s.shapes)
            ]
            for k, s in enumerate(settings)
        ]
        self.optimizers = [self.optimizer(k) for k in range(len(settings))]
        self.link()

    def link(self):
        if len(self.optimizers) > 1:
            self.linked_optimizers = tfscale.link(*self.optimizers)

    def optimizer(self, k):
        made = tfscale.wrap(keras.optimizers.SGD(1.0), self.settings[k].policy())
        made.build(self.variables[k])
        return made

    def run(self, env, op, data):
        getattr(self, type(op).__name__.lower())(env, op, data)

    def loss(self, env, op, data):
        value, slopes = data
        variables = self.variables[op.of]
        with tf.GradientTape() as tape:
            loss = value
            for i in op.active:
                v = tf.convert_to_tensor(variables[i].value)
                zero = v - tf.stop_gradient(v)
                loss += tf.reduce_sum(tf.math.multiply_no_nan(slopes[i], zero))
            scaled = self.optimizers[op.of].scale_loss(loss)
        found = tape.gradient(scaled, [variables[i].value for i in op.active])
        grads: list[Any] = [None] * len(variables)
        for i, g in zip(op.active, found, strict=True):
            grads[i] = g
        env[op.reg] = [op.of, loss, grads]

    def eval(self, env, op, data):
        self.optimizers[op.of].scale_loss(data[0])

    def unscale(self, env, op, data):
        of, _, grads = env[op.reg]
        unscaled = self.optimizers[of].unscale([grads[i] for i in op.which])
        for i, g in zip(op.which, unscaled, strict=True):
            grads[i] = g

    def clip(self, env, op, data):
        grads = env[op.reg][2]
        places = [i for i in op.which if grads[i] is not None]
        values = [grads[i] for i in places]
        if op.how == "value":
            values = [tf.clip_by_value(g, -op.at, op.at) for g in values]
        elif op.how == "norm":
            values = [tf.clip_by_norm(g, op.at) for g in values]
        elif op.how == "global":
            values = tf.clip_by_global_norm(values, op.at)[0]
        else:
            factor = tf.minimum(1.0, op.at / tf.linalg.global_norm(values))
            values = [g * factor for g in values]
        for i, g in zip(places, values, strict=True):
            grads[i] = g

    def zero(self, env, op, data):
        grads = env[op.reg][2]
        for i in op.which:
            if grads[i] is not None:
                grads[i] = tf.where(tf.math.is_nan(grads[i]), 0.0, grads[i])

    def add(self, env, op, data):
        ours, theirs = env[op.reg][2], env[op.other][2]
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a is not None and b is not None:
                ours[i] = a + b

    def guard(self, env, op, data):
        _, loss, grads = env[op.reg]
        if op.by == "norm":
            loss = tf.linalg.global_norm([g for g in grads if g is not None])

        def body():
            own = {reg: [of, x, list(grads)] for reg, (of, x, grads) in env.items()}
            for inner in op.body:
                self.run(own, inner, data)
            return True

        if tf.executing_eagerly():
            if bool(tf.math.is_finite(loss)):
                body()
        else:
            tf.cond(tf.math.is_finite(loss), body, lambda: False)

    def pairs(self, env, reg, which=None):
        of, _, grads = env[reg]
        which = range(len(grads)) if which is None else which
        return [(grads[i], self.variables[of][i]) for i in which if grads[i] is not None]

    def apply(self, env, op, data):
        pairs = self.pairs(env, op.reg, op.which)
        self.optimizers[env[op.reg][0]].apply_gradients(pairs)

    def linked(self, env, op, data):
        pairs = [self.pairs(env, reg) for reg in op.regs]
        self.linked_optimizers.apply_gradients(*pairs)


def number(variable):
    return int(keras.ops.convert_to_numpy(variable))


def mismatch(real, oracle, *, weights_only=False):
    """What differs between both, as text; empty where nothing does."""
    found = []
    for k, (optimizer, wanted) in enumerate(zip(real.optimizers, oracle.optimizers, strict=True)):
        for i, (v, w) in enumerate(zip(real.variables[k], wanted.weights, strict=True)):
            got = keras.ops.convert_to_numpy(v)
            if not np.all(np.abs(got - w) <= TOLERANCE * (1 + np.abs(w))):
                found.append(f"variable {i} of {k}: {got} instead of {w}")
        if weights_only:
            continue
        scale = float(optimizer.loss_scale)
        for name, got, expected in (
            ("scale", scale, wanted.scale),
            ("iterations", number(optimizer.iterations), wanted.applied),
            ("skipped", int(optimizer.skipped_steps), wanted.skipped),
            ("good steps", number(optimizer.step_counter), wanted.good),
        ):
            if got != expected:
                found.append(f"{name} of {k}: {got} instead of {expected}")
        if not wanted.settings.lowest <= scale <= wanted.settings.highest:
            found.append(f"scale of {k} is out of bounds")
    return "; ".join(found)
