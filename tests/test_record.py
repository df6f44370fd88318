"""The record against a plain Python model of it: what was skipped, why, and by which variable."""

import dataclasses
import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import STEP_MODES, execute, slow_jit
from hypothesis import given, settings
from hypothesis import strategies as st

import tfscale
from tfscale.skips import Skips

# One of the variables has none, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")

POLICY = tfscale.Dynamic(initial_scale=4.0, growth_interval=2, min_scale=1.0, max_scale=16.0)
NAMES = ["kernel", "table", "bias", "unused"]


class Run:
    """A step in which chosen gradients are not finite: `step(names, loss)`."""

    def __init__(self, mode, policy=POLICY, clip=False):
        how, update = STEP_MODES[mode]
        self.variables = [
            keras.Variable(np.ones(shape, "float32"), name=name)
            for name, shape in zip(NAMES, [(2, 2), (5, 2), (3,), (1,)], strict=True)
        ]
        self.optimizer = tfscale.wrap(keras.optimizers.SGD(0.01), policy, update=update)
        self.optimizer.build(self.variables)
        self.start = [v.numpy() for v in self.optimizer.variables]
        self.clip = clip
        self._call = execute(how, self._step, autograph=False)

    def _step(self, factors, loss):
        optimizer, (kernel, table, bias, _) = self.optimizer, self.variables
        with tf.GradientTape() as tape:
            rows = tf.gather(table.value, tf.constant([1, 1, 4]))
            value = tf.reduce_sum(kernel.value) + tf.reduce_sum(rows) + tf.reduce_sum(bias.value)
            scaled = optimizer.scale_loss(value * loss)
        grads = tape.gradient(scaled, [v.value for v in self.variables])
        kernel, table, bias, unused = grads
        table = tf.IndexedSlices(table.values * factors[1], table.indices, table.dense_shape)
        grads = [kernel * factors[0], table, bias * factors[2], unused]
        if self.clip:
            grads = optimizer.unscale(grads)
            grads, _ = tf.clip_by_global_norm(grads, 1.0)
        optimizer.apply_gradients(zip(grads, self.variables, strict=True))

    def step(self, bad=(), loss=1.0):
        factors = [np.inf if name in bad else 1.0 for name in NAMES]
        self._call(tf.constant(factors, tf.float32), tf.constant(loss, tf.float32))

    def reset(self):
        self.optimizer.set_weights(self.start)
        for variable in self.variables:
            variable.assign(np.ones(variable.shape, "float32"))


@functools.cache
def traced_run(mode, clip):
    return Run(mode, clip=clip)


def run_in(mode, clip=False):
    """Before its first step, but traced by whoever ran it first."""
    run = traced_run(mode, clip)
    run.reset()
    return run


def model_of_the_record(events):
    """The rule of the scale and of the record, in plain Python."""
    scale, good, row = 4.0, 0, 0
    record = dict.fromkeys(
        ["steps", "applied", "skipped_overflow", "skipped_loss", "growths", "backoffs"], 0
    )
    record |= {"at_floor": 0, "longest_run": 0, "last_skip": 0}
    changes, nonfinite = [], dict.fromkeys(NAMES, 0)
    for number, (bad, loss) in enumerate(events, 1):
        before = scale
        record["steps"] = number
        if bad or not np.isfinite(loss):
            row += 1
            record["last_skip"] = number
            for name in NAMES[:3]:
                nonfinite[name] += name in bad or not np.isfinite(loss)
        if not np.isfinite(loss):
            record["skipped_loss"] += 1
        elif bad:
            record["skipped_overflow"] += 1
            scale, good = max(scale / 2, 1.0), 0
            record["at_floor"] += scale == 1.0
        else:
            row, good = 0, good + 1
            record["applied"] += 1
            if good == 2:
                scale, good = min(scale * 2, 16.0), 0
        record["longest_run"] = max(record["longest_run"], row)
        if scale != before:
            record["growths" if scale > before else "backoffs"] += 1
            changes.append((number, scale))
    record |= {"skipped_in_a_row": row, "scale": scale, "changes": changes}
    return record | {"nonfinite": {name: n for name, n in nonfinite.items() if n}}


EVENTS = st.lists(
    st.tuples(
        st.sets(st.sampled_from(NAMES[:3]), max_size=2), st.sampled_from([1.0] * 8 + [np.nan])
    ),
    max_size=24,
)


@pytest.mark.parametrize(
    ("mode", "clip"),
    [
        ("eager", False),
        ("cond", True),
        *[
            pytest.param(*more, marks=pytest.mark.slow)
            for more in [
                ("select", False),
                ("jit", True),
            ]
        ],
    ],
)
def test_a_record_equals_its_model_in_plain_python(mode, clip):
    run = run_in(mode, clip)

    @settings(max_examples=15, deadline=None)
    @given(EVENTS)
    def check(events):
        run.reset()
        for event in events:
            run.step(*event)
        found = run.optimizer.record().to_dict()
        expected = model_of_the_record(events)
        found["changes"] = [(change["step"], change["scale"]) for change in found["changes"]]
        assert {key: found[key] for key in expected} == expected
        order = list(found["nonfinite"].values())
        assert order == sorted(order, reverse=True)

    check()


def test_of_equally_bad_variables_the_last_is_named():
    run = run_in("cond")
    run.step(bad=NAMES[:3])
    assert list(run.optimizer.record().nonfinite) == NAMES[:3][::-1]
    assert f"gradients of 3 variables non-finite, most often: {NAMES[2]}, 1 time" in str(
        run.optimizer.record()
    )


def test_a_bad_loss_counts_for_no_variable():
    run = run_in("cond")
    run.step(loss=np.nan)
    assert "non-finite" not in str(run.optimizer.record())


@pytest.mark.parametrize("mode", ["cond", slow_jit])
def test_the_last_256_changes_are_kept_and_no_more(mode):
    policy = tfscale.Dynamic(growth_interval=1)
    run = Run(mode, policy)
    for step in range(300):
        run.step(["bias"] if step % 2 else [])
    run.step(loss=np.nan)  # changes nothing
    changes = run.optimizer.record().changes
    assert [change.step for change in changes] == list(range(45, 301))
    assert [change.scale for change in changes] == [65536.0, 32768.0] * 128


def test_a_scale_not_a_power_of_two_is_kept_exactly():
    run = Run("eager", tfscale.Dynamic(initial_scale=1000.1, backoff_factor=0.3))
    run.step(["bias"])
    (change,) = run.optimizer.record().changes
    assert change.scale == float(run.optimizer.loss_scale) == np.float32(np.float32(1000.1) * 0.3)


@pytest.mark.parametrize(
    ("policy", "mode"), [(tfscale.Static(8.0), "eager"), (tfscale.NoScaling(), "cond")], ids=str
)
def test_a_fixed_policy_counts_skips_and_variables(policy, mode):
    run = Run(mode, policy)
    for bad in ([], ["table"], ["table", "bias"]):
        run.step(bad)
    record = run.optimizer.record()
    assert (record.applied, record.skipped, record.changes) == (1, 2, ())
    assert record.nonfinite == {"table": 2, "bias": 1}
    assert run.optimizer.nonfinite_report() == record.nonfinite


def test_the_record_comes_back_with_the_file(tmp_path):
    def make():
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, name="head")], name="model"
        )
        model.compile(tfscale.wrap("sgd", POLICY), "mse", run_eagerly=True)
        return model

    model, x, y = make(), np.ones((4, 2)), np.ones((4, 1))
    model.train_on_batch(x, y)
    model.train_on_batch(x * 1e30, y)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    fresh = make()
    fresh.load_weights(path)
    fresh.optimizer.build(fresh.trainable_variables)
    record = fresh.optimizer.record()
    assert record.skipped == 1
    assert record == model.optimizer.record()
    assert record.nonfinite == {"model/head/kernel": 1}


def test_the_record_goes_on_when_wrapped_again():
    run = run_in("cond")
    run.step(["bias"])
    again = tfscale.wrap(run.optimizer, POLICY, update="select")
    assert again.record() == run.optimizer.record()


def test_linked_optimizers_name_their_own_variables():
    one, other = (tfscale.wrap(keras.optimizers.SGD(0.1), POLICY) for _ in range(2))
    a, b = keras.Variable(1.0, name="a"), keras.Variable(1.0, name="b")
    with tf.GradientTape(persistent=True) as tape:
        losses = one.scale_loss(a * 1.0), other.scale_loss(b * 1.0)
    bad = tape.gradient(losses[1], b.value) * np.inf
    tfscale.link(one, other).apply_gradients([(tape.gradient(losses[0], a.value), a)], [(bad, b)])
    assert (one.record().skipped_linked, one.record().nonfinite) == (1, {})
    assert (other.record().skipped_overflow, other.record().nonfinite) == (1, {"b": 1})


def test_a_gradient_that_is_bad_after_unscale_is_named():
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.1), POLICY)
    a, b = keras.Variable([1.0], name="a"), keras.Variable([1.0], name="b")
    optimizer.scale_loss(1.0)
    good, bad = optimizer.unscale([tf.ones([1]), tf.ones([1])])
    optimizer.apply_gradients([(good, a), (bad * np.inf, b)])
    assert optimizer.record().nonfinite == {"b": 1}


def test_a_step_on_some_variables_names_the_right_one():
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.1), POLICY)
    a, b, c = (keras.Variable([1.0], name=name) for name in "abc")
    optimizer.build([a, b, c])
    optimizer.scale_loss(1.0)
    optimizer.apply_gradients([(tf.constant([np.inf]), c), (tf.constant([1.0]), a)])
    assert optimizer.record().nonfinite == {"c": 1}


@pytest.mark.parametrize("jit", [None, True])
def test_gradients_unscaled_outside_are_no_constants(jit):
    optimizer, variable = tfscale.wrap(keras.optimizers.SGD(0.1), POLICY), keras.Variable([1.0])
    optimizer.build([variable])
    apply = tf.function(lambda g: optimizer.apply_gradients([(g, variable)]), jit_compile=jit)
    for value in (np.inf, 1.0, 1.0):
        optimizer.scale_loss(tf.constant(1.0))
        (gradient,) = optimizer.unscale([tf.constant([value])])
        apply(tf.clip_by_value(gradient, -1.0, 1.0))
    record = optimizer.record()
    assert (record.skipped, sum(record.nonfinite.values()) <= 1) == (1, True)


def test_an_applied_step_names_no_variable():
    policy = tfscale.NoScaling(skip_nonfinite=False)
    one, other = (tfscale.wrap(keras.optimizers.SGD(0.1), policy) for _ in range(2))
    a, b = keras.Variable([1.0], name="a"), keras.Variable([1.0], name="b")
    one.build([a]), other.build([b])

    @tf.function(jit_compile=True)
    def step(bad):
        losses = [one.scale_loss(tf.constant(1.0)), other.scale_loss(tf.constant(1.0))]
        (gradient,) = one.unscale([bad])
        tfscale.link(one, other).apply_gradients([(gradient, a)], [(tf.ones([1]), b)])
        return losses

    step(tf.constant([np.inf]))
    assert (one.record().skipped, one.record().nonfinite) == (0, {})


def test_an_overflow_that_the_loop_zeroes_is_not_named():
    optimizer, v = tfscale.wrap(keras.optimizers.SGD(0.1), POLICY), keras.Variable([1.0])
    optimizer.build([v])

    @tf.function(jit_compile=True, autograph=False)  # XLA counts in each step
    def step(gradient):
        optimizer.scale_loss(tf.constant(1.0))
        (gradient,) = optimizer.unscale([gradient])
        gradient = tf.where(tf.math.is_nan(gradient), 0.0, gradient)
        optimizer.apply_gradients([(gradient, v)])

    step(tf.constant([np.inf]))
    record = optimizer.record()
    assert (record.applied, record.nonfinite) == (1, {})


@pytest.mark.slow
@pytest.mark.parametrize("clips", [False, True])
def test_nonfinite_gradients_of_any_replica_are_found(clips):
    # Not by collectives: two strategies of one process that use them get in each other's way.
    reduction = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], reduction)
    with strategy.scope():
        variables = [keras.Variable([1.0], name=name) for name in ("a", "b", "c")]
        optimizer = tfscale.wrap(keras.optimizers.SGD(0.1), POLICY)

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(sum(tf.reduce_sum(v.value) for v in variables))
        grads = tape.gradient(scaled, [v.value for v in variables])
        grads[1] *= factor
        if clips:
            grads, _ = tf.clip_by_global_norm(optimizer.unscale(grads), 1.0)
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    for bad in (0, 1):
        per_replica = strategy.experimental_distribute_values_from_function(
            lambda context, bad=bad: tf.constant(
                np.inf if context.replica_id_in_sync_group == bad else 1.0
            )
        )
        strategy.run(step, args=(per_replica,))
    record = optimizer.record()
    assert (record.steps, record.skipped_overflow, record.nonfinite) == (2, 2, {"b": 2})


def test_a_good_step_pays_nothing_for_the_record():
    run = run_in("cond")
    graph = run._call.get_concrete_function(
        tf.TensorSpec([4], tf.float32), tf.TensorSpec([], tf.float32)
    ).graph
    assert not [op.type for op in graph.get_operations() if op.type in ("PyFunc", "EagerPyFunc")]
    functions = {f.signature.name: f.node_def for f in graph.as_graph_def().library.function}
    types = [op.type for op in graph.get_operations()]
    assert types.count("IsFinite") == 2  # of the sum of the gradients, and of the loss
    update, count = [op for op in graph.get_operations() if op.type == "If"]
    for branch in (update, count):
        good, bad = (
            [node.op for node in functions[branch.get_attr(name).name]]
            for name in ("then_branch", "else_branch")
        )
        assert "AssignVariableOp" in good
        assert not {"L2Loss", "Any", "All", "IsFinite"} & set(good)
        # What a bad step does is one operation, not a hundred that a good one has to pass by.
        assert [op for op in bad if op.endswith("PartitionedCall")] == ["StatefulPartitionedCall"]
        assert not {"IsFinite", "AssignVariableOp"} & set(bad)


def test_variables_with_equal_paths_are_distinguished():
    optimizer = tfscale.wrap(keras.optimizers.SGD(0.1), POLICY)
    twins = [keras.Variable([1.0], name="twin") for _ in range(2)]
    optimizer.build(twins)
    optimizer.scale_loss(1.0)
    optimizer.apply_gradients([(tf.constant([1.0]), twins[0]), (tf.constant([np.inf]), twins[1])])
    assert optimizer.record().nonfinite == {"twin (2)": 1}


def record_of(**changes):
    run = run_in("cond").optimizer.record()
    return dataclasses.replace(run, **changes)


def test_a_record_is_frozen_and_fits_into_json():
    run = run_in("cond")
    run.step(["bias"])
    record = run.optimizer.record()
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.steps = 3
    again = json.loads(json.dumps(record.to_dict()))
    assert again["changes"] == [{"step": 1, "scale": 2.0}]
    assert (again["skipped"], again["nonfinite"]) == (1, {"bias": 1})


# The sentences that several verdicts share.
LOSS = (
    "came from a loss that was not finite before it was scaled, which no scale can fix: the data "
    "holds NaN or infinity, the forward pass overflows (float16 ends at 65504), or weights are "
    "already NaN. tfscale.find_nonfinite(model, batch) shows which"
)
CAUSE = (
    "tfscale.find_nonfinite(model, batch) shows the cause. If the gradients are NaN, or not finite "
    "in float32 either, look for sqrt, log, norm or a division at 0. If they overflow, "
)
TOO_LARGE = (
    "the loss itself may be too large (no step was applied, so it is not the learning rate): "
    "scale it down"
)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "no steps yet; loss scale 4"),
        ({"steps": 1200}, "skipped 0 of 1,200 steps; loss scale 4"),
        ({"steps": 1200, "scale": 2.0**26}, "skipped 0 of 1,200 steps; loss scale 2**26"),
        (
            {"steps": 10, "skipped_linked": 4, "longest_run": 1},
            "skipped 4 of 10 steps; 4 by a linked optimizer, 1 in a row at most; loss scale 4. "
            "The record of the linked optimizer shows why.",
        ),
        (
            {
                "steps": 1200,
                "skipped_overflow": 3,
                "longest_run": 2,
                "last_skip": 40,
                "nonfinite": {"decoder/dense_2/kernel": 3, "decoder/dense_2/bias": 1},
                "backoffs": 3,
                "changes": (tfscale.ScaleChange(40, 4.0),),
            },
            "skipped 3 of 1,200 steps; gradients of 2 variables non-finite, most often: "
            "decoder/dense_2/kernel, 3 times; "
            "3 by overflow, 2 in a row at most; loss scale 4 (0 growths, 3 backoffs). "
            "Normal: the scale was found within the first 40 steps.",
        ),
        (
            {"steps": 100, "skipped_overflow": 2, "longest_run": 1, "last_skip": 90, "retries": 1},
            "skipped 1 of 99 steps; 2 bad attempts: 2 by overflow, 1 in a row at most, 1 of them "
            "run again; loss scale 4. Normal: a skip now and then is how the scale is found.",
        ),
        (
            {
                "steps": 65,
                "skipped_overflow": 9,
                "skipped_loss": 1,
                "longest_run": 3,
                "retries": 8,
                "applied": 55,
            },
            "skipped 2 of 57 steps; 10 bad attempts: 9 by overflow, 1 by a loss that was not "
            "finite, 3 in a row at most, 8 of them run again; loss scale 4. Not normal: "
            f"1 skip {LOSS}.",
        ),
        (
            {"steps": 60, "skipped_overflow": 60, "longest_run": 60, "is_at_floor": True},
            "skipped 60 of 60 steps; 60 by overflow, 60 in a row at most; loss scale 4. Not "
            "normal: the scale is at its floor and gradients are still not finite: "
            f"{CAUSE}{TOO_LARGE}, run the layer that overflows in float32, train in bfloat16, or "
            "allow a lower scale with tfscale.wrap(optimizer, min_scale=2.0**-10).",
        ),
        (
            {
                "steps": 60,
                "skipped_overflow": 1,
                "longest_run": 1,
                "policy": "none",
                "scale": 1.0,
                "applied": 59,
            },
            "skipped 1 of 60 steps; 1 by overflow, 1 in a row at most; no loss scaling. Not "
            f"normal: there is no loss scale to lower: {CAUSE}lower the learning rate, or run the "
            "layer that overflows in float32.",
        ),
        (
            {
                "steps": 60,
                "skipped_overflow": 30,
                "longest_run": 1,
                "policy": "static",
                "applied": 30,
            },
            "skipped 30 of 60 steps; 30 by overflow, 1 in a row at most; loss scale 4. Not normal: "
            "that is too many: take a smaller scale or the policy tfscale.Dynamic(), which finds "
            "one, or lower the learning rate.",
        ),
        (
            {"steps": 60, "skipped_loss": 1, "longest_run": 1},
            "skipped 1 of 60 steps; 1 by a loss that was not finite, 1 in a row at most; loss "
            f"scale 4. Not normal: 1 skip {LOSS}.",
        ),
        (
            {"steps": 60, "skipped_overflow": 30, "longest_run": 1, "applied": 30},
            "skipped 30 of 60 steps; 30 by overflow, 1 in a row at most; loss scale 4. Not "
            "normal: that is too many: start lower with tfscale.wrap(optimizer, "
            "initial_scale=...), take a longer growth_interval, or lower the learning rate.",
        ),
    ],
    ids=[
        "none",
        "good",
        "large",
        "linked",
        "calibration",
        "retried",
        "retried and skipped",
        "floor",
        "no scale",
        "static",
        "loss",
        "often",
    ],
)
def test_a_record_says_whether_the_skips_are_normal(changes, text):
    assert str(record_of(**changes)) == text


def verdict(skipped, steps, last_skip=None, **changes):
    """What the record says at its end of so many overflows."""
    changes = {"applied": steps - skipped, "last_skip": last_skip or steps - 1, **changes}
    return str(record_of(steps=steps, skipped_overflow=skipped, **changes)).partition(". ")[2]


@pytest.mark.parametrize("policy", ["dynamic", "static"])
@pytest.mark.parametrize(("skipped", "steps"), [(6, 11), (8, 10), (19, 20), (21, 400)])
def test_too_many_skips_for_the_search_are_not_normal(skipped, steps, policy):
    text = verdict(skipped, steps, policy=policy)
    assert text.startswith("Not normal: that is too many: ")
    assert text.endswith("or lower the learning rate.")


@pytest.mark.parametrize(
    ("skipped", "steps", "last_skip", "text"),
    [
        (1, 2, 1, "Normal: the scale was found within the first step."),
        (3, 10, 3, "Normal: the scale was found within the first 3 steps."),
        (15, 31, 15, "Normal: the scale was found within the first 15 steps."),
        (3, 4, 3, "Normal so far: the scale is being found."),
        (5, 6, 5, "Normal so far: the scale is being found."),
        (6, 12, 11, "Normal: a skip now and then is how the scale is found."),
        (21, 420, 419, "Normal: a skip now and then is how the scale is found."),
    ],
)
def test_the_search_for_the_scale_is_normal(skipped, steps, last_skip, text):
    assert verdict(skipped, steps, last_skip) == text


def test_a_search_with_retries_is_counted_in_attempts():
    text = verdict(3, 10, 3, retries=2)
    assert text == "Normal: the scale was found within the first 3 attempts."


def test_starting_at_the_floor_counts_like_a_fall():
    assert "the scale is at its floor" in verdict(19, 20, at_floor=19)
    # Now and then a skip is no harm there.
    assert verdict(1, 100, at_floor=1).startswith("Normal")
    assert "floor" not in verdict(19, 20, at_floor=19, policy="static")


@pytest.mark.parametrize("policy", ["dynamic", "static", "none"])
@pytest.mark.parametrize("floor", [False, True])
def test_learning_rate_is_not_named_before_it_matters(policy, floor):
    text = verdict(20, 20, policy=policy, is_at_floor=floor)
    assert "lower the learning rate" not in text
    assert text.count(CAUSE + TOO_LARGE) == 1
    # A `fit` without an applied step may follow one with a rate that was too high.
    skips = Skips(20, 20, 0, True, policy, 4.0, floor, False)
    assert "lower the learning rate" in skips.advice()


def test_reading_warns_if_every_step_was_skipped():
    run = Run("eager")
    for _ in range(24):
        run.step(loss=np.nan)
    assert int(run.optimizer.skipped_steps) == 24
    run.step(loss=np.nan)
    with pytest.warns(tfscale.LossScaleWarning, match="25 of 25 training steps were skipped"):
        _ = run.optimizer.loss_scale
    run.optimizer.record()  # only once


def test_reading_is_quiet_once_a_step_was_applied():
    run = Run("eager")
    run.step()
    run.optimizer.record()
    for _ in range(26):
        run.step(loss=np.nan)
    run.optimizer.record()


def test_a_record_names_too_high_a_learning_rate():
    run = Run("eager")
    run.optimizer.learning_rate = 1e4
    run.step()
    run.step(loss=np.nan)
    assert run.optimizer.record().grown == ""
    run.step(loss=np.nan)
    record = run.optimizer.record()
    assert record.grown.startswith("the largest weight, in ")
    assert f"Not normal: the learning rate is probably too high: {record.grown}. Load" in str(
        record
    )


def after_fit(skips=2, steps=100, by_loss=0, policy="dynamic", at_floor=False):
    return Skips(skips, steps, by_loss, True, policy, 8.0, at_floor, False).advice()


def test_the_advice_after_fit_is_a_sentence():
    assert after_fit() == (
        "2 of 100 training steps were skipped; loss scale 8. That is normal while the scale is "
        "being found. You need not do anything."
    )
    assert after_fit(skips=1).startswith("1 of 100 training steps was skipped; ")


def test_the_advice_after_fit_names_what_tells_more():
    which = " optimizer.record() shows how often each variable was not finite"
    many, floor, bad = after_fit(50), after_fit(at_floor=True), after_fit(by_loss=2)
    assert many.endswith(f"{which}, tfscale.find_nonfinite(model, batch) in which layer it began.")
    assert floor.endswith(f"{which}.")
    assert floor.count("find_nonfinite") == 1
    # The record names no variable for a bad loss.
    assert bad.endswith(f"2 skips {LOSS}.")
