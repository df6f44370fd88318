"""Random training loops do what the rule says: each finite gradient is divided once, by its scale.

Most programs run operation by operation in eager code; the rest run in functions, in loops, under
XLA and on replicas. `programs.py` has the operations and the oracle. TFSCALE_PROGRAMS says
how many.
"""

import copy
import dataclasses
import functools
import os

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, event, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from programs import (
    CLIPPINGS,
    HUGE,
    Add,
    Apply,
    Clip,
    Eval,
    Guard,
    Linked,
    Loss,
    Oracle,
    OutOfScope,
    Real,
    Settings,
    Unscale,
    Zero,
    mismatch,
)

import tfscale

pytestmark = pytest.mark.slow

PROGRAMS = int(os.environ.get("TFSCALE_PROGRAMS", "100"))
# The same hundred each time; new ones where somebody asks for a number.
FIXED = "TFSCALE_PROGRAMS" not in os.environ
SHRINK = os.environ.get("TFSCALE_PROGRAMS_SHRINK", "1") == "1"  # takes minutes in eager code
ALL = (0, 1, 2)  # each optimizer has three variables
REFUSALS = (ValueError, tf.errors.InvalidArgumentError)


def examples(share, **more):
    return settings(
        phases=[phase for phase in Phase if SHRINK or phase not in (Phase.shrink, Phase.explain)],
        report_multiple_bugs=False,
        max_examples=max(1, round(PROGRAMS * share)),
        deadline=None,
        derandomize=FIXED,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        **more,
    )


# What a program is drawn from.

REGS = st.sampled_from([0, 0, 0, 1, 1, 2])
OF = st.sampled_from([0, 0, 1])
WHICH = st.sampled_from([ALL, ALL, ALL, (0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
AT = st.sampled_from([0.5, 1.0, 2.0, 64.0])
VALUES = {"finite": 1.5, "large": 1e37, "nan": np.nan, "inf": np.inf, "-inf": -np.inf}
VALUE = st.sampled_from(["finite"] * 6 + list(VALUES))
BAD = {"overflow": HUGE, "nan": np.nan, "inf": np.inf}
SLOPES = st.sampled_from(["finite"] * 5 + ["overflow", "overflow", "nan", "inf"])
SETTINGS = st.builds(
    Settings,
    initial=st.sampled_from([4.0, 8.0, 32.0]),
    lowest=st.sampled_from([2.0, 4.0]),
    highest=st.sampled_from([32.0, 64.0]),
    interval=st.integers(1, 3),
    hysteresis=st.integers(1, 2),
    shapes=st.sampled_from([(1, 2, 3), (1, 2, 3), (2, 1, 3), (2, 2, 1), (1, 1, 1)]),
)
APPLY = st.builds(Apply, REGS, WHICH)
CLIP = st.builds(Clip, REGS, WHICH, st.sampled_from(CLIPPINGS), AT)
GUARD = st.builds(
    lambda by, apply, clip: Guard(
        apply.reg, by, (*(dataclasses.replace(c, reg=apply.reg) for c in clip), apply)
    ),
    st.sampled_from(["loss", "norm"]),
    APPLY,
    st.lists(CLIP, max_size=1),
)
CHANGE = st.builds(Unscale, REGS, WHICH) | CLIP | st.builds(Zero, REGS, WHICH)
BETWEEN = st.lists(CHANGE, max_size=2)
LINKED = st.builds(Linked, st.permutations([0, 1, 2]).map(lambda p: tuple(p[:2])))
MIDDLE = (
    CHANGE
    | APPLY
    | st.builds(Unscale, st.just(0), st.just(ALL))
    | st.builds(Add, REGS, REGS)
    | GUARD
    | LINKED
    | st.builds(Loss, OF, REGS, WHICH)
    | st.builds(Eval, OF)
)
DATA = st.tuples(VALUE, SLOPES, st.integers(0, 2), st.integers(0, 2**16))


def with_reg(op, reg):
    """The same for another register."""
    if isinstance(op, Guard):
        op = dataclasses.replace(op, body=tuple(with_reg(inner, reg) for inner in op.body))
    return dataclasses.replace(op, reg=reg)


def numbers(shapes, drawn):
    """The loss and the slopes of each variable, for each replica, that `drawn` stands for.

    Args:
        shapes: sizes of the variables.
        drawn: for each replica a tuple of `DATA`.
    """
    losses, slopes = [], [[] for _ in shapes]
    for value, kind, place, seed in drawn:
        random = np.random.RandomState(seed)
        losses.append(VALUES[value])
        for i, size in enumerate(shapes):
            slope = random.choice([-4, -3, -2, -1, 1, 2, 3, 4], size).astype("float32")
            if kind != "finite" and i == place:
                slope[random.randint(size)] = BAD[kind] * random.choice([-1, 1])
            slopes[i].append(slope)
    return np.array(losses, "float32"), [np.stack(s) for s in slopes]


def tensors(data, replica=0):
    if data is None:
        return ()  # `tf.nest` takes None for a leaf
    return tf.constant(data[0][replica]), [tf.constant(s[replica]) for s in data[1]]


# Eager code.


class EagerLoops(RuleBasedStateMachine):
    """One operation a rule, all in eager code."""

    @initialize(first=SETTINGS, second=SETTINGS)
    def start(self, first, second):
        self.settings = [first, second]
        self.real, self.oracle = Real(self.settings), Oracle(self.settings)
        self.env, self.saved = {}, None
        self.check("start")

    def do(self, op, drawn=None):
        op = self.oracle.possible(op)
        if op is None:
            return
        data = None if drawn is None else numbers(self.settings[op.of].shapes, [drawn])
        before = copy.deepcopy(self.oracle)
        self.oracle.refusable = False
        try:
            self.oracle.run(op, data)
        except OutOfScope:
            self.oracle = before
            return
        try:
            self.real.run(self.env, op, tensors(data))
        except REFUSALS as error:
            if not self.oracle.refusable:
                raise AssertionError(f"{op} must not raise") from error
            event("refused")
            self.oracle = before
        self.check(f"{op} {data}")

    def check(self, after):
        found = mismatch(self.real, self.oracle)
        assert not found, f"{after}: {found}"

    @rule(op=MIDDLE, drawn=DATA)
    def one(self, op, drawn):
        self.do(op, drawn if isinstance(op, Loss | Eval) else None)

    @rule(of=OF, reg=REGS, drawn=DATA, ops=BETWEEN, which=WHICH)
    def step(self, of, reg, drawn, ops, which):
        self.steps(of, reg, drawn, ops, Apply(reg, which))

    @rule(of=OF, reg=REGS, drawn=DATA, which=WHICH, ops=BETWEEN, last=APPLY | GUARD)
    def step_with_unscale(self, of, reg, drawn, which, ops, last):
        self.steps(of, reg, drawn, [Unscale(reg, which), *ops], last)

    @rule(of=OF, reg=REGS, drawn=DATA, clip=CLIP, zero=st.booleans(), last=APPLY | GUARD)
    def step_with_clipping(self, of, reg, drawn, clip, zero, last):
        ops = [Unscale(reg, ALL), clip, *([Zero(reg, ALL)] if zero else [])]
        self.steps(of, reg, drawn, ops, last)

    @rule(of=OF, reg=REGS, drawn=DATA, evaluated=DATA, ops=BETWEEN)
    def step_with_evaluation(self, of, reg, drawn, evaluated, ops):
        self.do(Loss(of, reg, ALL), drawn)
        for op in [Unscale(reg, ALL), *ops]:
            self.do(with_reg(op, reg))
        self.do(Eval(of), evaluated)
        self.do(Apply(reg, ALL))

    @rule(of=OF, drawn=st.lists(DATA, min_size=2, max_size=4))
    def loop_with_a_guard(self, of, drawn):
        for batch in drawn:
            self.steps(of, 0, batch, [Unscale(0, ALL)], Guard(0, "norm", (Apply(0, ALL),)))

    @rule(drawn=st.tuples(DATA, DATA), ops=BETWEEN)
    def step_of_linked(self, drawn, ops):
        for k in range(2):
            self.do(Loss(k, k, ALL), drawn[k])
        for op in ops:
            self.do(op)
        self.do(Linked((0, 1)))

    def steps(self, of, reg, drawn, ops, last):
        self.do(Loss(of, reg, ALL), drawn)
        for op in [*ops, last]:
            self.do(with_reg(op, reg))

    @rule()
    def wrap_again(self):
        assert all(tfscale.wrap(optimizer) is optimizer for optimizer in self.real.optimizers)
        self.check("wrap again")

    @rule()
    def save(self):
        self.saved = [
            (optimizer.saved(), [v.numpy() for v in real.variables], [v.numpy() for v in variables])
            for optimizer, real, variables in zip(
                self.oracle.optimizers, self.real.optimizers, self.real.variables, strict=True
            )
        ]
        self.check("save")

    @precondition(lambda self: self.saved)
    @rule(anew=st.booleans())
    def load(self, anew):
        if anew:
            self.start_anew()
        for k, (state, own, weights) in enumerate(self.saved):
            self.oracle.optimizers[k].load(state)
            self.real.optimizers[k].set_weights(own)
            for v, w in zip(self.real.variables[k], weights, strict=True):
                v.assign(w)
        self.forget()
        self.check("load")

    def start_anew(self):
        self.real.optimizers = [self.real.optimizer(k) for k in range(2)]
        self.real.link()
        for optimizer in self.oracle.optimizers:
            optimizer.bad_loss, optimizer.seen, optimizer.calls = False, set(), []

    def forget(self):
        self.env, self.oracle.regs = {}, {}
        for optimizer in self.oracle.optimizers:
            optimizer.pending = 0

    @precondition(lambda self: all(not (o.bad_loss or o.seen) for o in self.oracle.optimizers))
    @rule()
    def resume(self):
        """From a checkpoint, in another optimizer."""
        old, variables = self.real.optimizers, self.real.variables
        manager = tf.train.Checkpoint(optimizers=old)
        path = manager.write(os.path.join(os.environ["TFSCALE_PROGRAMS_TMP"], "checkpoint"))
        self.start_anew()
        tf.train.Checkpoint(optimizers=self.real.optimizers).read(path)
        assert variables is self.real.variables
        self.forget()
        self.check("resume")


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.setenv("TFSCALE_PROGRAMS_TMP", str(tmp_path))


TestEagerLoops = EagerLoops.TestCase
TestEagerLoops.settings = examples(0.25, stateful_step_count=8)


# Functions.


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps in functions.

    Attributes:
        optimizers: `Settings` of each.
        parts: pairs of a list of operations and how they run: "here", "function" or "jit".
        outer: what is around the parts: "eager", "function", "jit", "loop" or "jit loop".
        calls: for each call, for each operation that has data, `DATA` of each replica; a loop runs
            all calls at once.
        replicas: how many.
    """

    optimizers: tuple
    parts: tuple
    outer: str
    calls: tuple
    replicas: int = 1

    @property
    def ops(self):
        return [op for ops, _ in self.parts for op in ops]

    def data(self, call):
        found = iter(call)
        return [
            numbers(self.optimizers[op.of].shapes, next(found))
            if isinstance(op, Loss | Eval)
            else None
            for op in self.ops
        ]


@st.composite
def programs(draw, outers, hows=("here",), replicas=1):
    optimizers = tuple(draw(st.tuples(SETTINGS, SETTINGS)))
    drawn = draw(st.lists(MIDDLE, min_size=1, max_size=8))
    drawn = [Loss(draw(OF), 0, ALL), *drawn, Apply(draw(REGS), ALL), Apply(0, ALL)]
    if replicas > 1:  # one may not take a branch that the others leave out
        drawn = [op for op in drawn if not isinstance(op, Guard)]
    cuts = sorted(draw(st.integers(1, len(drawn) - 1)) for _ in range(len(hows) - 1))
    edges = [0, *cuts, len(drawn)]
    outer = draw(st.sampled_from(outers))
    # What can be done at all does not depend on the numbers.
    scratch, parts = Oracle(optimizers), []
    for place, how in enumerate(hows):
        scratch.where = where(outer, how, place, 0)
        ops = []
        for op in drawn[edges[place] : edges[place + 1]]:
            before = copy.deepcopy(scratch)
            op = scratch.possible(op)
            if op is None:
                continue
            sizes = optimizers[getattr(op, "of", 0)].shapes
            try:
                scratch.run(op, numbers(sizes, [("finite", "finite", 0, 0)]))
                ops.append(op)
            except OutOfScope:
                scratch = before
        parts.append((tuple(ops), how))
    ops = [op for part, _ in parts for op in part]
    number = sum(isinstance(op, Loss | Eval) for op in ops)
    one = st.tuples(*[st.tuples(*[DATA] * replicas)] * number)
    calls = tuple(draw(st.lists(one, min_size=2, max_size=4)))
    return Program(optimizers, tuple(parts), outer, calls, replicas)


def where(outer, how, place, call):
    """What the oracle calls the function in which a part runs."""
    if how != "here":
        return (place, call)
    return "eager" if outer == "eager" else ("outer", call)


class Functions:
    """The functions of a program."""

    def __init__(self, program, real):
        self.program, self.real = program, real
        self.functions = [self._part(ops, how) for ops, how in program.parts]
        step = self._loop if "loop" in program.outer else self._step
        jit = program.outer.startswith("jit")
        if program.outer != "eager":
            step = tf.function(step, autograph=False, jit_compile=jit)
        self.step = step

    def _part(self, ops, how):
        def run(env, data):
            own = {reg: [of, loss, list(grads)] for reg, (of, loss, grads) in env.items()}
            for op, numbers in zip(ops, data, strict=True):
                self.real.run(own, op, numbers)
            return own

        if how == "here":
            return run
        function = tf.function(
            lambda of, tensors, data: self._without_of(run(self._with_of(of, tensors), data)),
            autograph=False,
            jit_compile=how == "jit",
        )
        after = {}

        def call(env, data):
            of = tuple(sorted((reg, entry[0]) for reg, entry in env.items()))
            after.update(dict(of))
            after.update({op.reg: op.of for op in ops if isinstance(op, Loss)})
            found = function(of, self._without_of(env), data)
            return self._with_of(tuple(after.items()), found)

        return call

    @staticmethod
    def _without_of(env):
        return {str(reg): (loss, grads) for reg, (_, loss, grads) in env.items()}

    @staticmethod
    def _with_of(of, tensors):
        of = dict(of)
        return {int(reg): [of[int(reg)], loss, list(g)] for reg, (loss, g) in tensors.items()}

    def _step(self, data):
        env, start = {}, 0
        for (ops, _), function in zip(self.program.parts, self.functions, strict=True):
            if ops:
                env = function(env, data[start : start + len(ops)])
            start += len(ops)

    def _loop(self, data):
        """`data` is stacked: one row for each iteration."""
        number = len(self.program.calls)

        def body(i):
            self._step(tf.nest.map_structure(lambda x: x[i], data))
            return [i + 1]

        tf.while_loop(lambda i: i < number, body, [tf.constant(0)])


class Wanted:
    """The oracle of a program, and all weights that it may leave behind where it may raise."""

    def __init__(self, program):
        self.program = program
        self.oracle = Oracle(program.optimizers, program.replicas)
        self.call_number = 0

    def step(self, oracle, data, moments):
        self.call_number += 1
        oracle.regs, start = {}, 0
        for place, (ops, how) in enumerate(self.program.parts):
            oracle.where = where(self.program.outer, how, place, self.call_number)
            for op, values in zip(ops, data[start : start + len(ops)], strict=True):
                moments.append(copy.deepcopy(oracle))
                oracle.run(op, values)
            start += len(ops)
        moments.append(copy.deepcopy(oracle))


def run_program(program):
    """Runs a program with tfscale and with the oracle, and compares."""
    note(str(program))
    real, wanted = Real(program.optimizers), Wanted(program)
    functions = Functions(program, real)
    datas = [program.data(call) for call in program.calls]
    batches = [datas] if "loop" in program.outer else [[data] for data in datas]
    xla = program.outer.startswith("jit") or any(how == "jit" for _, how in program.parts)
    for batch in batches:
        oracle, moments = copy.deepcopy(wanted.oracle), []
        oracle.refusable = False
        skipping = copy.deepcopy(oracle)
        skipping.skip_refusable = True
        try:
            for data in batch:
                wanted.step(oracle, data, moments)
            for data in batch:
                wanted.step(skipping, data, [])
        except OutOfScope:
            event("out of scope")
            return
        inputs = [list(map(tensors, data)) for data in batch]
        if "loop" in program.outer:
            inputs = tf.nest.map_structure(lambda *x: tf.stack(x), *inputs)
        else:
            (inputs,) = inputs
        try:
            functions.step(inputs)
        except REFUSALS as error:
            if not oracle.refusable:
                raise AssertionError(f"{program} must not raise") from error
            event("refused")
            found = [mismatch(real, moment, weights_only=True) for moment in moments]
            assert "" in found, f"{program} raises and changes variables: {found}"
            return
        found = mismatch(real, oracle)
        if oracle.refusable and xla:
            event("may be skipped under XLA")
            found = found and mismatch(real, skipping, weights_only=True)
            assert not found, f"{program}: {found}"
            return
        assert not found, f"{program}: {found}"
        wanted.oracle = oracle


@examples(0.04)
@given(program=programs(["function"]))
def test_programs_in_one_function(program):
    run_program(program)


@examples(0.04)
@given(
    program=st.sampled_from(
        [
            ("function", "function"),
            ("function", "here"),
            ("here", "function"),
            ("function", "here", "function"),
            ("function", "jit"),
            ("jit", "jit"),
        ]
    ).flatmap(lambda hows: programs(["eager"], hows))
)
def test_programs_in_two_functions(program):
    run_program(program)


@examples(0.03)
@given(
    program=st.sampled_from([("here", "function"), ("function", "here")]).flatmap(
        lambda hows: programs(["function", "function", "jit"], hows)
    )
)
def test_programs_with_a_nested_function(program):
    run_program(program)


@examples(0.02)
@given(program=programs(["loop", "jit loop"]))
def test_programs_in_a_loop_in_a_graph(program):
    run_program(program)


@examples(0.03)
@given(program=programs(["jit"]))
def test_programs_under_xla(program):
    run_program(program)


# Replicas.


@functools.lru_cache
def strategy():
    """One for the process: two that use collectives cannot share it."""
    devices = ["CPU:0", "CPU:1"]
    return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())


def per_replica(*values):
    return strategy().experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


@examples(0.02)
@given(program=programs(["eager", "function"], replicas=2))
def test_programs_on_two_replicas(program):
    note(str(program))
    with strategy().scope():
        real = Real(program.optimizers)
    wanted = Wanted(program)
    parts = dataclasses.replace(program, outer="eager")
    step = Functions(parts, real).step
    run = lambda data: strategy().run(step, args=(data,))  # noqa: E731
    run = tf.function(run, autograph=False) if program.outer == "function" else run
    for call in program.calls:
        data, oracle = program.data(call), copy.deepcopy(wanted.oracle)
        oracle.refusable = False
        try:
            wanted.step(oracle, data, [])
        except OutOfScope:
            return

        rows = [[tensors(d, replica) for d in data] for replica in range(2)]
        inputs = tf.nest.map_structure(per_replica, *rows)
        try:
            run(inputs)
        except REFUSALS as error:
            if not oracle.refusable:
                raise AssertionError(f"{program} must not raise") from error
            return
        found = mismatch(real, oracle)
        assert not found, f"{program}: {found}"
        wanted.oracle = oracle
