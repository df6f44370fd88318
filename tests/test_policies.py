"""The rule: bounded for ever, growth after exactly N good steps, nonsense refused at once."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import execute

import tfscale
from tfscale import policies, policy_config

GOOD, OVERFLOW, BAD_LOSS = 0, 1, 2


# A model of the rule, and the tensors against it.


def rule(p, state, event):
    """The rule in plain Python (and float32, as the scale is); `event` is one of the three."""
    scale, good, left, held = state
    low, high, growth = map(np.float32, (p.min_scale, p.max_scale, p.growth_factor))
    recovery = p.recovery_interval or p.growth_interval  # never before the growth
    scale = np.clip(scale, low, high)
    if event == GOOD:
        good += 1
        if good >= p.growth_interval:
            held = max(held, scale)
            scale, good, left = scale * growth, 0, p.hysteresis
        elif good % recovery == 0 and scale * growth < held:
            scale = scale * growth
    elif event == OVERFLOW:
        if good >= recovery:
            held = min(held, scale)
        good, left = 0, max(left - 1, 0)
        if left == 0:
            scale = scale * np.float32(p.backoff_factor)
    return np.clip(scale, low, high), good, left, held


def run_rule(policy, events, state=None):
    """The scale, good steps, hysteresis left and held scale after each event, by the model."""
    first = np.float32(policy.initial_scale)
    state = state or (first, 0, policy.hysteresis, first)
    history = []
    with np.errstate(over="ignore"):
        for event in events:
            state = rule(policy, state, event)
            history.append(state)
    return [np.array(column) for column in zip(*history, strict=True)]


def run_training(policy, events, how=None):
    """The same, by a real optimizer that meets these events in one function.

    If not told `how`, it runs a few events eagerly, and more in a graph.
    """
    how = how or ("eager" if len(events) < 30 else "graph")
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), policy)
    optimizer.build([variable])
    dtypes = (tf.float32, tf.int64, tf.int64, tf.float32)

    def train(events):
        columns = [tf.TensorArray(dtype, len(events)) for dtype in dtypes]
        for i in tf.range(len(events)):
            loss = tf.where(events[i] == BAD_LOSS, np.nan, 1.0)
            gradient = optimizer.scale_loss(loss) * tf.ones(2)
            bad = tf.stack([0.0, tf.where(events[i] == OVERFLOW, np.inf, 0.0)])
            optimizer.apply_gradients([(gradient + bad, variable)])
            state = optimizer.scaling.state._replace(scale=optimizer.loss_scale)
            columns = [
                column.write(i, tf.cast(value, dtype))
                for column, value, dtype in zip(columns, state, dtypes, strict=True)
            ]
        return [column.stack() for column in columns]

    history = [column.numpy() for column in execute(how, train)(tf.constant(events, tf.int32))]
    history[3] = np.where(history[3] == 0, np.float32(policy.initial_scale), history[3])
    return history, optimizer, variable.numpy()


def dynamic_policies():
    exponents = st.integers(-8, 40)
    return st.builds(
        lambda bounds, at, growth, backoff, interval, hysteresis, recovery: tfscale.Dynamic(
            initial_scale=2.0 ** (min(bounds) + at * (max(bounds) - min(bounds))),
            min_scale=2.0 ** min(bounds),
            max_scale=2.0 ** max(bounds),
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=interval,
            hysteresis=hysteresis,
            recovery_interval=recovery,
        ),
        st.tuples(exponents, exponents),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.sampled_from([2.0, 2.0, 2.0, 1.1, 1.7, 16.0, 1e30]),
        st.sampled_from([0.5, 0.5, 0.5, 0.9, 0.3, 2.0**-4, 1e-30]),
        st.integers(1, 9),
        st.integers(1, 4),
        st.sampled_from([None, 1, 2, 3]),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tfscale.LossScaleWarning")  # of runs that skip every step
@pytest.mark.parametrize("how", ["eager", "graph", "jit"])
@hypothesis.settings(
    max_examples=5,
    deadline=None,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # each try traces a graph
)
@hypothesis.given(dynamic_policies(), st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1))
@hypothesis.example(policies.Dynamic(hysteresis=3, recovery_interval=2), 0, 1.0, 0.2)
def test_a_training_follows_the_rule_step_by_step(how, policy, seed, share_bad, share_loss):
    rng = np.random.default_rng(seed)
    steps = 30 if how == "eager" else 600
    bad = rng.random(steps) < share_bad
    events = np.where(bad, np.where(rng.random(steps) < share_loss, BAD_LOSS, OVERFLOW), GOOD)

    history, optimizer, variable = run_training(policy, events, how)

    for got, wanted in zip(history, run_rule(policy, events), strict=True):
        np.testing.assert_array_equal(got, wanted)
    applied = int(np.sum(events == GOOD))
    np.testing.assert_array_equal(variable, [-applied, -applied])  # unscaled by what scaled it
    assert int(optimizer.iterations) == applied
    assert int(optimizer.skipped_steps) == len(events) - applied
    assert np.all(history[0] >= np.float32(policy.min_scale))
    assert np.all(history[0] <= np.float32(policy.max_scale))


def repeat(policy, finite, steps, state=None, interval_between=1):
    """`steps` updates with the same `finite`; the scales after each `interval_between` of them."""

    @tf.function(jit_compile=True)
    def run(scale, good, left):
        state = policies.ScaleState(scale, good, left)
        seen = tf.TensorArray(tf.float32, steps // interval_between)
        for i in tf.range(steps // interval_between):
            for _ in tf.range(interval_between):
                state = policy.update(state, tf.constant(finite))
            seen = seen.write(i, state.scale)
        return seen.stack()

    scale, good, left = state or (policy.initial_scale, 0, getattr(policy, "hysteresis", 1))
    return run(
        tf.constant(scale, tf.float32), tf.constant(good, tf.int32), tf.constant(left, tf.int32)
    ).numpy()


def test_each_overflow_takes_the_backoff_factor():
    policy = tfscale.Dynamic(initial_scale=1024.0, backoff_factor=0.125)
    assert repeat(policy, finite=False, steps=3).tolist() == [128.0, 16.0, 2.0]


def test_the_scale_never_grows_to_infinity():
    scales = repeat(tfscale.Dynamic(), finite=True, steps=300_000, interval_between=2000)
    assert np.all(np.isfinite(scales))
    assert scales[0] == 2.0**16
    assert scales[-1] == 2.0**24


def test_the_scale_never_falls_to_zero():
    scales = repeat(tfscale.Dynamic(), finite=False, steps=500)
    assert scales[0] == 2.0**14
    assert np.all(scales >= 1.0)
    assert scales[-1] == 1.0


def test_one_good_interval_leaves_the_floor():
    policy = tfscale.Dynamic(growth_interval=10)
    scales = repeat(policy, finite=True, steps=10, state=(1.0, 0, 0))
    assert scales.tolist() == [1.0] * 9 + [2.0]


def test_a_huge_growth_factor_stops_at_the_ceiling():
    policy = tfscale.Dynamic(growth_factor=3e38, growth_interval=1, max_scale=3e38)
    assert np.all(repeat(policy, finite=True, steps=5) == np.float32(3e38))


@pytest.mark.parametrize("interval", [1, 2, 7])
def test_growth_comes_after_exactly_n_good_steps(interval):
    policy = tfscale.Dynamic(growth_interval=interval, initial_scale=4.0)
    history, _, _ = run_training(policy, [GOOD] * (3 * interval))
    assert history[0].tolist() == [4.0 * 2 ** ((i + 1) // interval) for i in range(3 * interval)]


def test_resuming_with_a_smaller_interval_still_grows():
    policy = tfscale.Dynamic(growth_interval=10, initial_scale=4.0)
    scales = repeat(policy, finite=True, steps=11, state=(4.0, 1500, 1))
    assert scales.tolist() == [8.0] * 10 + [16.0]


def test_a_run_resumed_with_other_bounds_obeys_these():
    policy = tfscale.Dynamic(max_scale=64.0, initial_scale=4.0)
    assert float(policy.clamp(tf.constant(2.0**20))) == 64.0
    assert float(policy.clamp(tf.constant(np.inf))) == 64.0
    assert float(policy.clamp(tf.constant(0.0))) == 1.0
    assert float(policy.clamp(tf.constant(np.nan))) == 1.0
    optimizer, variable = tfscale.wrap("sgd", policy), keras.Variable(1.0)
    optimizer.dynamic_scale.assign(2.0**20)
    gradient = optimizer.scale_loss(1.0) * np.inf
    optimizer.apply_gradients([(gradient, variable)])
    assert float(optimizer.loss_scale) == 32.0


def test_resuming_with_a_smaller_hysteresis_obeys_it():
    policy = tfscale.Dynamic(hysteresis=2, initial_scale=4.0)
    assert repeat(policy, finite=False, steps=2, state=(4.0, 0, 9)).tolist() == [4.0, 2.0]


def test_hysteresis_is_refilled_only_by_a_growth():
    policy = tfscale.Dynamic(hysteresis=3, growth_interval=2, initial_scale=16.0)
    events = [
        *(OVERFLOW, OVERFLOW, OVERFLOW, OVERFLOW),  # two are only skipped, then each one lowers
        *(GOOD, OVERFLOW),  # a good step refills nothing
        *(GOOD, GOOD),  # a growth does
        *(OVERFLOW, GOOD, OVERFLOW, OVERFLOW),
    ]
    history, optimizer, _ = run_training(policy, events)
    assert history[0].tolist() == [16, 16, 8, 4, 4, 2, 2, 4, 4, 4, 4, 2]
    assert int(optimizer.skipped_steps) == 8


def test_growth_at_the_ceiling_refills_the_hysteresis():
    policy = tfscale.Dynamic(hysteresis=2, growth_interval=1, initial_scale=4.0, max_scale=4.0)
    history, _, _ = run_training(policy, [OVERFLOW, GOOD, OVERFLOW, OVERFLOW])
    assert history[0].tolist() == [4, 4, 4, 2]


def test_a_bad_loss_moves_neither_scale_nor_counters():
    policy = tfscale.Dynamic(growth_interval=2, initial_scale=4.0, hysteresis=2)
    history, optimizer, _ = run_training(policy, [GOOD, BAD_LOSS, BAD_LOSS, GOOD])
    assert history[0].tolist() == [4, 4, 4, 8]
    assert history[1].tolist() == [1, 1, 1, 0]
    assert history[2].tolist() == [2, 2, 2, 2]
    assert int(optimizer.skipped_steps) == 2


def test_a_floor_below_one_is_reached_and_kept():
    policy = tfscale.Dynamic(min_scale=2.0**-10, initial_scale=1.0)
    scales = repeat(policy, finite=False, steps=20)
    assert scales[0] == 0.5
    assert scales[-1] == 2.0**-10


def test_a_floor_that_float32_rounds_up_is_reached():
    policy = tfscale.Dynamic(min_scale=0.1, initial_scale=1.0)
    _, optimizer, _ = run_training(policy, [OVERFLOW] * 9)
    with pytest.warns(tfscale.LossScaleWarning, match="at its floor"):
        optimizer.finalize_variable_values([])


BURST = tfscale.Dynamic(growth_interval=40, recovery_interval=2, max_scale=2.0**15)


@pytest.mark.parametrize("when", ["first steps", "after a growth"])
def test_the_scale_recovers_from_a_burst(when):
    before = [GOOD] * (50 if when == "after a growth" else 3)
    burst = [OVERFLOW, GOOD, BAD_LOSS, *[OVERFLOW] * 11]
    history, _, _ = run_training(BURST, before + burst + [GOOD] * 40)
    scales = history[0][len(before) + len(burst) :]
    # Fast to half of what has held, then once more after a whole interval of good steps.
    assert scales.tolist() == [2.0 ** min(3 + n // 2, 14 + n // 40) for n in range(1, 41)]


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_a_lasting_fall_costs_one_more_skip(hysteresis):
    skips = {}
    for recovery in (None, 2):
        policy = dataclasses.replace(BURST, recovery_interval=recovery, hysteresis=hysteresis)
        state, skips[recovery] = (np.float32(2.0**15), 0, hysteresis, np.float32(2.0**15)), 0
        for _ in range(39):
            event = GOOD if state[0] < 2.0**5 else OVERFLOW
            state, skips[recovery] = rule(policy, state, event), skips[recovery] + event
    assert skips[None] == 11 + hysteresis - 1
    assert skips[2] == skips[None] + 1


@pytest.mark.parametrize("policy", [tfscale.Static(24.0), tfscale.NoScaling()], ids=repr)
def test_a_fixed_scale_never_moves(policy):
    history, _, variable = run_training(policy, [GOOD, OVERFLOW, BAD_LOSS, GOOD])
    assert set(history[0].tolist()) == {policy.initial_scale}
    assert variable.tolist() == [-2.0, -2.0]


# What is refused, and in which words.


class Refused:
    """A number-like object that is none, with a recognisable representation."""

    def __repr__(self):
        return "<refused>"


NUMBERS = [None, "4", "x", True, [1.0], {}, Refused(), 1j, float("nan"), float("inf"), 10**400]
SCALES = [*NUMBERS, 0, 0.0, -1.0, -float("inf"), 1e39, 1e-40, np.array([1.0, 2.0])]
COUNTS = [None, "4", True, 0, -1, 2.5, 2.0, float("nan"), 2**31, [1], Refused()]

NONSENSE = [
    *[(tfscale.Dynamic, name, value) for name in ("min_scale", "max_scale") for value in SCALES],
    *[(tfscale.Dynamic, "initial_scale", value) for value in [*SCALES, 0.5, 2.0**25]],
    *[
        (tfscale.Dynamic, "growth_factor", value)
        for value in [*NUMBERS, 1, 1.0, 0.5, 0, -2.0, 1e39, 1 + 1e-9]
    ],
    *[
        (tfscale.Dynamic, "backoff_factor", value)
        for value in [*NUMBERS, 0, 0.0, 1, 1.5, -0.5, 1 - 1e-9]
    ],
    *[(tfscale.Dynamic, name, v) for name in ("growth_interval", "hysteresis") for v in COUNTS],
    *[(tfscale.Dynamic, "recovery_interval", value) for value in COUNTS if value is not None],
    *[(tfscale.Static, "scale", value) for value in SCALES],
    *[(tfscale.Static, "skip_nonfinite", value) for value in (None, 0, 1, "yes")],
    *[(tfscale.NoScaling, "skip_nonfinite", value) for value in (None, 0, 1, "no")],
]


def short(value):
    return repr(value)[:20]


@pytest.mark.parametrize(("kind", "name", "value"), NONSENSE, ids=short)
def test_nonsense_is_refused_at_once(kind, name, value):
    arguments = {"scale": 4.0} if kind is tfscale.Static else {}
    with pytest.raises(ValueError) as error:
        kind(**{**arguments, name: value})
    message = str(error.value)
    assert name in message
    assert kind.__name__ in message
    assert "must be" in message or "needs" in message
    assert repr(value)[:40] in message


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"initial_scale=4.0, .* min_scale=8.0, max_scale=2.0"):
        tfscale.Dynamic(min_scale=8.0, initial_scale=4.0, max_scale=2.0)


@pytest.mark.parametrize(
    "value", [np.float32(4), np.float16(4), np.int64(4), 4, np.float64(4)], ids=repr
)
def test_any_real_number_is_a_scale(value):
    assert policy_config.get(value) == tfscale.Static(4.0)
    assert tfscale.Dynamic(initial_scale=value).initial_scale == 4.0
    assert type(tfscale.Dynamic(initial_scale=value).initial_scale) is float


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        ("dynamik", ValueError),
        ("", ValueError),
        (0, ValueError),
        (-4.0, ValueError),
        (float("nan"), ValueError),
        (True, TypeError),
        (False, TypeError),
        (Refused(), TypeError),
        ([], TypeError),
        (b"auto", TypeError),
        (np.array([1.0, 2.0]), TypeError),
        (tfscale.Dynamic, TypeError),
        (tfscale.Static, TypeError),
        (keras.optimizers.SGD, TypeError),
        ({"name": "dynamik"}, ValueError),
        ({"name": "dynamic", "growth": 3}, ValueError),
        ({"scale": 3.0}, ValueError),
    ],
    ids=short,
)
def test_what_is_no_policy_is_refused_at_once(policy, error):
    with pytest.raises(error) as raised:
        tfscale.wrap(keras.optimizers.SGD(), policy)
    message = str(raised.value)
    received = policy if not isinstance(policy, dict) else list(policy.values())[-1]
    assert repr(received)[:20] in message or str(received) in message or "scale" in message
    assert "must be" in message or "has no setting" in message or "needs" in message


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"scale_factor": 2.0}, "growth_factor"),
        ({"init_scale": 4.0}, "Did you mean 'initial_scale'? It has: policy,"),
        ({"initial_scale": -1.0}, "-1.0"),
        ({"dynamic_growth_steps": 0}, "growth_interval=0"),
        ({"dynamic_growth_steps": 3, "growth_interval": 3}, "twice"),
        ({"policy": "none", "initial_scale": 4.0}, "NoScaling has no setting 'initial_scale'"),
        ({"policy": 4.0, "growth_interval": 4}, "Static has no setting 'growth_interval'"),
        ({"policy": tfscale.Dynamic(), "growth_interval": 4}, "growth_interval"),
        ({"policy": "static"}, "needs its scale"),
        ({"update": "fast"}, "'fast'"),
        ({"update": None}, "None"),
        ({"update": ["cond"]}, "cond"),
        ({"update": "Select"}, "'select'"),
    ],
    ids=short,
)
def test_unfitting_settings_are_refused_at_once(settings, says):
    with pytest.raises(ValueError) as error:
        tfscale.wrap(keras.optimizers.SGD(), **settings)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"initial_scale": 0.0}, "initial_scale=0.0"),
        ({"initial_scale": "big"}, "'big'"),
        ({"initial_scale": float("inf")}, "inf"),
        ({"dynamic_growth_steps": 0}, "=0"),
        ({"policy": 4.0, "initial_scale": 4.0}, "not both"),
    ],
    ids=short,
)
def test_the_constructor_refuses_nonsense_too(arguments, says):
    with pytest.raises(ValueError) as error:
        tfscale.LossScaleOptimizer(keras.optimizers.SGD(), **arguments)
    assert says in str(error.value)


# Names, numbers and configs.

ALL = [
    tfscale.Auto(),
    tfscale.Auto(growth_interval=3),
    tfscale.Dynamic(),
    tfscale.Dynamic(initial_scale=4.0, hysteresis=2, min_scale=0.25, recovery_interval=5),
    tfscale.Static(3.0),
    tfscale.Static(3.0, skip_nonfinite=False),
    tfscale.NoScaling(),
    tfscale.NoScaling(skip_nonfinite=False),
]


@pytest.mark.parametrize("policy", ALL, ids=repr)
def test_a_policy_comes_back_from_its_config(policy):
    config = policy_config.to_config(policy)
    before = dict(config)
    again = policy_config.get(config)
    assert again == policy
    assert type(again) is type(policy)
    assert config == before


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        ({}, tfscale.Auto()),
        ({"policy": None}, tfscale.Auto()),
        ({"policy": "AUTO"}, tfscale.Auto()),
        ({"policy": "Dynamic"}, tfscale.Dynamic()),
        ({"policy": "none"}, tfscale.NoScaling()),
        ({"policy": "static", "scale": 8}, tfscale.Static(8.0)),
        ({"policy": 8, "skip_nonfinite": False}, tfscale.Static(8.0, skip_nonfinite=False)),
        ({"hysteresis": 2}, tfscale.Dynamic(hysteresis=2)),
        ({"policy": "Auto", "hysteresis": 2}, tfscale.Dynamic(hysteresis=2)),
        ({"initial_scale": 8, "dynamic_growth_steps": 5}, tfscale.Dynamic(8.0, growth_interval=5)),
    ],
    ids=short,
)
def test_what_names_which_policy(arguments, policy):
    got = tfscale.wrap(keras.optimizers.SGD(), **arguments).policy
    assert got == policy
    assert type(got) is type(policy)


@pytest.mark.parametrize("policy", ALL, ids=repr)
def test_a_policy_cannot_be_changed_by_accident(policy):
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.skip_nonfinite = True


def test_a_subclass_of_a_policy_tells_it_is_not_saved():
    class Own(tfscale.Dynamic):
        pass

    with pytest.raises(TypeError, match="Own"):
        policy_config.to_config(Own())
