"""Whatever a run is saved as, it goes on as if nothing had happened; a file that does not fit
changes nothing."""

import copy
import dataclasses
import functools
import os
import pickle
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, multi, values
from versions import need_multi_optimizer

import tfscale
from tfscale import _compat

L = keras.layers
BAD = 1e36  # a gradient that overflows float32 as long as the scale is above 340
POLICY = tfscale.Dynamic(initial_scale=2.0**10, growth_interval=3, hysteresis=2)


@keras.saving.register_keras_serializable("test_saving")
def linear_loss(y_true, y_pred):
    """Its gradient is as large as the target."""
    return tf.reduce_sum(y_true * y_pred, axis=-1)


def small(optimizer, units=3, **compile_args):
    # Other weights each time, so that none of them can be equal without having been loaded.
    model = keras.Sequential([keras.Input((4,)), L.Dense(units, "tanh")])
    compile_args = {"loss": linear_loss, "run_eagerly": True, **compile_args}
    model.compile(optimizer=optimizer, **compile_args)
    return model


def wrapped(inner=None, policy=POLICY, **settings):
    return tfscale.wrap(inner or keras.optimizers.Adam(0.01), policy, **settings)


def batch(step):
    """The batch of this step; that of steps 3 and 4 overflows, as long as the scale is large."""
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(4, 4)).astype("float32"), rng.normal(size=(4, 1)).astype("float32")
    return x, y * (BAD if step in (3, 4) else 1)


def train(model, steps):
    for step in steps:
        model.train_on_batch(*batch(step))
    return model


def state(model):
    return values(model.variables + model.optimizer.variables)


def inner_state(model):
    return values(getattr(model.optimizer, "inner_optimizer", model.optimizer).variables)


def built_afresh(optimizer):
    model = small(wrapped(optimizer))
    model.optimizer.build(model.trainable_variables)
    return values(model.optimizer.variables)


# The ways to save and to restore.


def by_model(model, fresh, path):
    model.save(path / "m.keras")
    return keras.models.load_model(path / "m.keras")


def by_weights(model, fresh, path):
    fresh.load_weights(saved(model, path))
    return fresh


def saved(model, path):
    model.save_weights(path / "m.weights.h5")
    return path / "m.weights.h5"


def by_weights_into_built(model, fresh, path):
    return by_weights(model, train(fresh, [7, 8]), path)


def by_set_weights(model, fresh, path):
    fresh.set_weights(model.get_weights())
    model.optimizer.build(model.trainable_variables)
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.optimizer.set_weights(values(model.optimizer.variables))
    return fresh


def by_checkpoint(model, fresh, path):
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path / "c")
    tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer).restore(saved)
    return fresh


def by_checkpoint_into_built(model, fresh, path):
    return by_checkpoint(model, train(fresh, [7, 8]), path)


def by_copy(model, fresh, path):
    return copy.deepcopy(model)


WAYS = [
    by_model,
    by_weights,
    by_weights_into_built,
    by_set_weights,
    by_checkpoint,
    by_checkpoint_into_built,
    by_copy,
]


@pytest.fixture(scope="module")
def whole():
    """The start and the end of a run: it skips twice, backs off once and grows twice."""
    model = small(wrapped())
    start = model.get_weights()
    train(model, range(9))
    assert int(model.optimizer.skipped_steps) == 2
    assert float(model.optimizer.loss_scale) == 2.0**11
    return start, state(model)


# Between the skips, and later each way, where nothing has the value that it starts with.
RESUMED = [(by_weights, 4), *(pytest.param(way, 7, marks=pytest.mark.slow) for way in WAYS)]


@pytest.mark.parametrize(("way", "phase"), RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(way, phase, whole, tmp_path):
    start, end = whole
    begun = small(wrapped())
    begun.set_weights(start)
    resumed = way(train(begun, range(phase)), small(wrapped()), tmp_path)
    assert resumed is not begun
    assert resumed.optimizer.policy == POLICY
    resumed.optimizer.build(resumed.trainable_variables)
    assert_same(state(resumed), state(begun))
    assert_same(state(train(resumed, range(phase, 9))), end)


@pytest.mark.slow
def test_a_resumed_fit_equals_the_uninterrupted_one(tmp_path):
    x, y = (np.concatenate(parts) for parts in zip(*map(batch, range(6)), strict=True))
    fit = {"batch_size": 4, "shuffle": False, "verbose": 0}
    make = lambda: small(wrapped(), run_eagerly=False, jit_compile=False)  # noqa: E731
    whole = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfscale.LossScaleWarning)
        whole.fit(x[:16], y[:16], **fit)
        resumed = [way(whole, make(), tmp_path) for way in (by_model, by_weights)]
        whole.fit(x[16:], y[16:], **fit)
        for model in resumed:
            model.fit(x[16:], y[16:], **fit)
            assert_same(state(model), state(whole))


@pytest.fixture(scope="module")
def in_float16():
    keras.config.set_dtype_policy("float16")
    return train(small(wrapped()), range(1))


@pytest.mark.parametrize("way", [by_model, by_weights, by_weights_into_built, by_checkpoint])
def test_master_weights_come_back(way, in_float16, tmp_path):
    keras.config.set_dtype_policy("float16")
    resumed = way(in_float16, small(wrapped()), tmp_path)
    resumed.optimizer.build(resumed.trainable_variables)
    assert len(resumed.optimizer.masters.copies) == 2
    assert_same(state(resumed), state(in_float16))


def test_settings_come_back_from_a_model_file(tmp_path):
    optimizer = wrapped(
        keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)),
        tfscale.Auto(8.0, growth_interval=7),
        update="select",
        master_weights=False,
    )
    loaded = by_model(train(small(optimizer), range(1)), None, tmp_path).optimizer
    assert type(loaded) is tfscale.LossScaleOptimizer
    assert loaded.get_config() == optimizer.get_config()


@pytest.fixture(scope="module")
def without_held_scale():
    """A run of an optimizer from before the variable of that name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_compat, "track", lambda optimizer, variable: None)
        model = train(small(wrapped()), range(6))
    assert "held_scale" not in [v.name for v in model.optimizer.variables]
    return model


@pytest.mark.parametrize(
    "built",
    [pytest.param(False, id="unbuilt"), pytest.param(True, id="built", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("way", [by_weights, by_set_weights, by_checkpoint])
def test_state_from_before_held_scales_is_read(way, built, without_held_scale, tmp_path):
    source = without_held_scale
    target = small(wrapped(policy=dataclasses.replace(POLICY, recovery_interval=1)))
    if built:
        train(target, range(5))
    way(source, target, tmp_path)
    target.optimizer.build(target.trainable_variables)
    state = list(map(float, target.optimizer.scaling.state))
    # A checkpoint leaves alone what it does not hold.
    kept = 2.0**10 if built and way is by_checkpoint else 0.0
    assert state == [2.0**10, 1, 0, kept]
    assert_same(inner_state(target), inner_state(source))


# Callbacks.


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_fit_comes_back_from_its_backup(tmp_path):
    x, y = (np.concatenate(parts) for parts in zip(*map(batch, range(4)), strict=True))
    fit = {"batch_size": 4, "shuffle": False, "verbose": 0, "epochs": 4}
    start = small(wrapped()).get_weights()

    def run(*callbacks):
        model = small(wrapped())
        model.set_weights(start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tfscale.LossScaleWarning)
            model.fit(x, y, callbacks=list(callbacks), **fit)
        return model

    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    with pytest.raises(KeyboardInterrupt):
        run(backup, Interrupt())
    resumed = run(keras.callbacks.BackupAndRestore(tmp_path))
    assert_same(state(resumed), state(run()))


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_model_checkpoint_is_complete(weights_only, tmp_path):
    x, y = (np.concatenate(parts) for parts in zip(*map(batch, range(2)), strict=True))
    path = tmp_path / ("m.weights.h5" if weights_only else "m.keras")
    model = small(wrapped())
    saver = keras.callbacks.ModelCheckpoint(path, save_weights_only=weights_only)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[saver])
    if weights_only:
        loaded = small(wrapped())
        loaded.load_weights(path)
        loaded.optimizer.build(loaded.trainable_variables)
    else:
        loaded = keras.models.load_model(path)
    assert_same(state(loaded), state(model))


def test_skips_of_the_saved_run_do_not_warn_again(tmp_path):
    model = train(small(wrapped()), range(5))
    assert int(model.optimizer.skipped_steps) == 2
    resumed = by_weights(model, small(wrapped()), tmp_path)
    x, y = batch(0)
    resumed.fit(x, y, verbose=0)  # warnings are errors
    assert int(resumed.optimizer.skipped_steps) == 2


# Files of other optimizers, and for them.


def chosen():
    need_multi_optimizer()
    optimizers = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)
    return keras.optimizers.MultiOptimizer(lambda v: optimizers["kernel" in v.path])


INNER = {
    "adam": lambda: keras.optimizers.Adam(0.1),
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
    ),
    "multi": multi,
    "chosen": chosen,
}
KINDS = {
    "tfscale": wrapped,
    "keras": lambda inner: keras.optimizers.LossScaleOptimizer(inner, 16.0, dynamic_growth_steps=3),
    "plain": lambda inner: inner,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Makes a model after some steps, and its file; one of each kind, which no test changes."""

    @functools.cache
    def make(kind, inner="adam", units=3, steps=(0, 1, 5, 6)):
        keras.utils.set_random_seed(1)  # no model of a test begins with these weights
        model = train(small(KINDS[kind](INNER[inner]()), units), steps)
        return model, saved(model, tmp_path_factory.mktemp("trained"))

    return make


def into(*quick, slow):
    """Each kind of file, into each of `quick` before and after it is built.

    Each of `slow` is another pair of kind and inner optimizer, before it is built.
    """
    pairs = [(kind, inner, built) for kind in KINDS for inner in quick for built in (False, True)]
    params = [
        pytest.param(
            kind,
            inner,
            built,
            marks=[pytest.mark.slow] * (inner not in quick),
            id=f"{kind}-{inner}-{'built' if built else 'unbuilt'}",
        )
        for kind, inner, built in [*pairs, *((*pair, False) for pair in slow)]
    ]
    return pytest.mark.parametrize(("kind", "inner", "built"), params)


@into(
    "adam",
    "multi",
    slow=[
        ("tfscale", "chosen"),
        ("keras", "chosen"),
        ("plain", "chosen"),
        ("tfscale", "schedule"),
        ("keras", "schedule"),
        ("plain", "sgd"),
    ],
)
def test_a_file_of_any_kind_is_read(inner, kind, built, trained):
    source, path = trained(kind, inner)
    target = small(wrapped(INNER[inner]()))
    if built:
        train(target, [7, 8])
    target.load_weights(path)
    target.optimizer.build(target.trainable_variables)
    assert_same(inner_state(target), inner_state(source))
    assert_same(target.get_weights(), source.get_weights())
    scale = {"tfscale": 2.0**11, "keras": 32.0, "plain": 2.0**10}[kind]
    assert float(target.optimizer.loss_scale) == scale
    good = {"tfscale": 1, "keras": 1, "plain": 2 if built else 0}[kind]
    assert int(target.optimizer.step_counter.numpy()) == good
    train(target, range(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "kind"),
    [("adam", "tfscale"), ("multi", "keras"), ("adam", "plain"), ("multi", "plain")],
)
def test_saving_again_keeps_what_waits_for_the_build(inner, kind, trained, tmp_path):
    source, path = trained(kind, inner)
    between = small(wrapped(INNER[inner]()))
    between.load_weights(path)
    target = by_weights(between, small(wrapped(INNER[inner]())), tmp_path)
    target.optimizer.build(target.trainable_variables)
    between.optimizer.build(between.trainable_variables)
    assert_same(inner_state(target), inner_state(source))
    assert_same(state(target), state(between))


@pytest.mark.parametrize("kind", KINDS)
def test_wrapping_again_keeps_what_waits_for_the_build(kind, trained):
    source, path = trained(kind)
    target = small(wrapped(keras.optimizers.Adam(0.1)))
    target.load_weights(path)
    optimizer = tfscale.wrap(target.optimizer, update="select")
    target.compile(optimizer=optimizer, loss=linear_loss)
    optimizer.build(target.trainable_variables)
    assert_same(inner_state(target), inner_state(source))
    assert float(optimizer.loss_scale) == {"tfscale": 2.0**11, "keras": 32.0}.get(kind, 2.0**10)


@into(
    "adam",
    "chosen",
    slow=[
        ("tfscale", "multi"),
        ("keras", "multi"),
        ("plain", "multi"),
        ("tfscale", "sgd"),
        ("keras", "schedule"),
        ("plain", "momentum"),
    ],
)
def test_a_file_from_before_the_first_step_is_read(inner, kind, built, trained):
    source, path = trained(kind, inner, steps=())
    target = small(wrapped(INNER[inner]()))
    if built:
        target.optimizer.build(target.trainable_variables)
        with warnings.catch_warnings():
            # A plain optimizer warns there as well.
            warnings.filterwarnings("ignore", "Skipping variable loading")
            target.load_weights(path)
    else:
        target.load_weights(path)
    assert_same(target.get_weights(), source.get_weights())
    train(target, range(1))
    assert int(target.optimizer.iterations.numpy()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keras", "plain"])
@pytest.mark.parametrize("inner", ["adam", "sgd", "schedule"])
def test_keras_reads_what_it_can_of_a_tfscale_file(inner, kind, tmp_path):
    source = train(small(wrapped(INNER[inner]())), [0, 1, 5, 6])
    target = train(small(KINDS[kind](INNER[inner]())), [7])
    path = saved(source, tmp_path)
    with pytest.warns(UserWarning, match="Skipping variable loading") as caught:
        target.load_weights(path)
    assert len(caught) == 1
    assert_same(target.get_weights(), source.get_weights())
    if kind == "keras":
        assert_same(inner_state(target), inner_state(source))


def test_set_weights_takes_arrays_of_any_kind(trained):
    for kind in KINDS:
        source, _ = trained(kind, "multi")
        target = small(wrapped(multi()))
        target.optimizer.build(target.trainable_variables)
        target.optimizer.set_weights(values(source.optimizer.variables))
        assert_same(inner_state(target), inner_state(source))
        scale = {"tfscale": 2.0**11, "keras": 32.0, "plain": 2.0**10}[kind]
        assert float(target.optimizer.loss_scale) == scale


def test_a_keras_model_file_stays_keras_and_is_wrapped(trained, tmp_path):
    source, _ = trained("keras")
    loaded = by_model(source, None, tmp_path)
    assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer
    optimizer = tfscale.wrap(loaded.optimizer)
    assert_same(values(optimizer.inner_optimizer.variables), inner_state(source))
    assert float(optimizer.loss_scale) == 32.0
    assert int(optimizer.step_counter.numpy()) == 1


def test_the_old_h5_format_keeps_the_whole_optimizer(tmp_path):
    source = train(small(wrapped(), loss=keras.losses.MeanSquaredError()), range(1))
    source.save(tmp_path / "m.h5")
    loaded = keras.models.load_model(tmp_path / "m.h5")
    assert loaded.optimizer.policy == POLICY
    assert_same(state(loaded), state(source))


def by_pickle(model, path):
    return pickle.loads(pickle.dumps(model))


def by_clone(model, path):
    return keras.models.clone_model(model)


def by_config(model, path):
    twin = type(model).from_config(model.get_config())
    twin.compile_from_config(model.get_compile_config())
    return twin


def by_h5(model, path):
    model.save(path / "m.h5")
    return keras.models.load_model(path / "m.h5")


WHOLE = [by_pickle, by_clone, by_config, by_h5, lambda m, path: by_copy(m, None, path)]


@pytest.mark.parametrize("way", WHOLE, ids=["pickle", "clone", "config", "h5", "deepcopy"])
def test_a_copy_keeps_the_whole_step_and_its_retry(way, tmp_path):
    model = keras.Sequential([keras.Input((4,)), L.BatchNormalization(), L.Dense(1)])
    loss = keras.losses.MeanSquaredError()
    tfscale.compile(model, wrapped(policy=2.0**10), loss=loss, retry=1, run_eagerly=True)
    twin = way(train(model, range(1)), tmp_path)
    if not twin.compiled:
        pytest.skip("this Keras does not compile a clone")
    twin.run_eagerly = True  # an .h5 file forgets it
    before = twin.get_weights()
    x, y = batch(0)
    assert twin.train_on_batch(x * np.nan, y, return_dict=True)["skipped_steps"] == 1
    assert_same(twin.get_weights(), before)
    assert twin.optimizer.whole_step.retry == 1


def test_an_unbuilt_copy_without_the_step_names_a_fix():
    model = keras.Sequential([L.BatchNormalization(), L.Dense(1)])
    tfscale.compile(model, wrapped(), loss="mse", retry=1, run_eagerly=True)
    twin = by_config(model, None)
    with pytest.warns(tfscale.LossScaleWarning, match=r"tfscale\.compile\(model, .*retry=1"):
        train(twin, range(1))
    tfscale.compile(twin, twin.optimizer, loss="mse", retry=1, run_eagerly=True)
    train(twin, range(1))  # warnings are errors


def test_a_copied_optimizer_keeps_a_models_own_step():
    class Own(keras.Sequential):
        def train_step(self, data):
            return {"own": 1.0}

    model = tfscale.compile(small("sgd"), "sgd", loss="mse")
    own = Own([keras.Input((4,)), L.Dense(1)])
    own.compile(keras.optimizers.deserialize(keras.optimizers.serialize(model.optimizer)))
    own.optimizer.build(own.trainable_variables)
    assert own.train_step(batch(0)) == {"own": 1.0}


def test_another_wrapped_optimizer_keeps_the_whole_step():
    model = tfscale.compile(small("sgd"), "sgd", loss="mse", retry=1)
    model.compile(wrapped(), loss="mse", run_eagerly=True)
    twin = by_pickle(train(model, range(1)), None)
    assert twin.optimizer.whole_step.retry == 1


@pytest.mark.parametrize("kind", ["tfscale", "keras", "plain"])
def test_what_is_loaded_reads_as_saved_before_a_step(kind, trained):
    _, path = trained(kind)
    model = small(wrapped(keras.optimizers.Adam(0.3)))
    model.load_weights(path)
    target = model.optimizer
    scale = {"tfscale": 2.0**11, "keras": 32.0, "plain": 2.0**10}[kind]
    assert not target.built
    assert (int(target.iterations), float(target.loss_scale)) == (4, scale)
    np.testing.assert_allclose(float(target.learning_rate), 0.1, rtol=1e-6)


def test_a_deep_copy_of_an_optimizer_keeps_its_counts():
    optimizer = train(small(wrapped()), range(6)).optimizer
    twin = copy.deepcopy(optimizer)
    for each in (twin, optimizer):
        assert (int(each.iterations), int(each.skipped_steps)) == (4, 2)
    assert float(twin.loss_scale) == float(optimizer.loss_scale)


# Files that do not fit.


class Unreadable(dict):
    """Entries of which one cannot be read."""

    def __getitem__(self, name):
        if name == "3":
            raise OSError("checksum error")
        return super().__getitem__(name)


@pytest.mark.parametrize("built", [False, True], ids=["unbuilt", "built"])
def test_a_file_that_breaks_off_changes_nothing(built, trained):
    source = trained("tfscale")[0].optimizer
    target = small(wrapped(keras.optimizers.Adam(0.1)))
    if built:
        train(target, [7])
    before = values(target.optimizer.variables)
    own, inner = {}, Unreadable()
    source.save_own_variables(own)
    source.inner_optimizer.save_own_variables(inner)
    target.optimizer.load_own_variables(own)
    with pytest.raises(OSError, match="checksum"):
        target.optimizer.inner_optimizer.load_own_variables(inner)
    assert_same(values(target.optimizer.variables), before)
    train(target, [5])


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_model_loads_nothing(kind, trained):
    _, path = trained(kind, units=5)
    target = train(small(wrapped(keras.optimizers.Adam(0.1))), [7])
    before = values(target.optimizer.variables)
    with pytest.raises(ValueError, match="could not be loaded"):
        target.load_weights(path)
    assert_same(values(target.optimizer.variables), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_model_raises_when_unbuilt(kind, trained):
    _, path = trained(kind, units=5)
    target = small(wrapped(keras.optimizers.Adam(0.1)))
    fresh = built_afresh(keras.optimizers.Adam(0.1))
    with pytest.raises(ValueError, match="could not be loaded"):
        target.load_weights(path)
    # Who goes on all the same starts afresh.
    with pytest.warns(UserWarning, match="has shape"):
        target.optimizer.build(target.trainable_variables)
    assert_same(values(target.optimizer.variables), fresh)
    train(target, range(1))


@pytest.mark.slow
@pytest.mark.parametrize("built", [False, True], ids=["unbuilt", "built"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_optimizer_is_keras_warning(kind, built, tmp_path):
    source = train(small(KINDS[kind](keras.optimizers.SGD(0.1))), [0, 1, 5, 6])
    target = small(wrapped(keras.optimizers.Adam(0.1)))
    fresh = built_afresh(keras.optimizers.Adam(0.1))
    if built:
        train(target, [7, 8])
        before = values(target.optimizer.variables)
    path = saved(source, tmp_path)

    def load_and_build():
        target.load_weights(path)
        target.optimizer.build(target.trainable_variables)

    with pytest.warns(UserWarning, match="Skipping variable loading"):
        load_and_build()
    after = values(target.optimizer.variables)
    if built:
        assert_same(after, before)
    else:
        assert_same(after, fresh)
    train(target, range(2))


def test_set_weights_that_do_not_fit_change_nothing():
    optimizer = wrapped(keras.optimizers.Adam(0.1))
    train(small(optimizer), [7])
    before = values(optimizer.variables)
    with pytest.raises(ValueError, match=f"and {len(before)} arrays.*Received: 3 arrays"):
        optimizer.set_weights(before[:3])
    wrong = [np.ones_like(a) for a in before]
    wrong[-1] = np.ones((5, 5), "float32")
    with pytest.raises(ValueError, match=r"has shape \(3,\).*\(5, 5\).*Nothing was loaded"):
        optimizer.set_weights(wrong)
    assert_same(values(optimizer.variables), before)


@pytest.mark.parametrize(
    ("scale", "read"), [(0.0, 1.0), (2.0**30, 2.0**24), (float("inf"), 2.0**24)]
)
def test_a_scale_out_of_bounds_comes_back_within_them(scale, read, tmp_path):
    # Keras' wrapper has no bounds: a run of it may have left a scale of 0 or infinity.
    source = small(KINDS["keras"](keras.optimizers.Adam(0.1)))
    source.optimizer.build(source.trainable_variables)
    source.optimizer.dynamic_scale.assign(scale)
    source.optimizer.step_counter.assign(2)  # the scale would grow in the next step
    target = by_weights(source, small(wrapped(keras.optimizers.Adam(0.1))), tmp_path)
    target.optimizer.build(target.trainable_variables)
    assert float(target.optimizer.loss_scale) == read
    train(target, range(1))
    assert float(target.optimizer.loss_scale) == min(2 * read, 2.0**24)
    assert all(np.all(np.isfinite(v)) for v in state(target))


# Other processes.

ANOTHER_PROCESS = """
import sys
import keras

model = keras.models.load_model(sys.argv[1], compile=False)
print("predicts:", model(keras.ops.ones((4, 4))).shape)
try:
    keras.models.load_model(sys.argv[1])
except Exception as error:
    print("refused:", str(error).splitlines()[-1])

import numpy as np
import tfscale

model = keras.models.load_model(sys.argv[1])
np.savez(sys.argv[2], *[v.numpy() for v in model.variables + model.optimizer.variables])
model.fit(np.ones((4, 4), "float32"), np.ones((4, 3), "float32"), verbose=0)
assert type(model.optimizer) is tfscale.LossScaleOptimizer
"""


@pytest.mark.slow
def test_a_process_goes_on_once_it_imports_tfscale(tmp_path):
    model = train(small(wrapped(), loss="mse", run_eagerly=False, jit_compile=False), range(3))
    model.save(tmp_path / "m.keras")
    python = [sys.executable, "-W", "error::UserWarning"]
    done = subprocess.run(
        [*python, "-c", ANOTHER_PROCESS, tmp_path / "m.keras", tmp_path / "arrays.npz"],
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "arrays.npz") as arrays:
        assert_same([arrays[f"arr_{i}"] for i in range(len(arrays.files))], state(model))
    # Without the import it predicts, and the error names what to do.
    predicts, *refused = done.stdout.splitlines()
    assert predicts == "predicts: (4, 3)"
    if _compat.KERAS < (3, 9):  # it imports by itself what a file names
        return
    (said,) = refused
    assert "tfscale>LossScaleOptimizer" in said
    assert "imported" in said
    assert "`import tfscale` before loading" in said


def test_a_trained_model_is_exported(tmp_path):
    model = train(small(wrapped()), range(1))
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    x, _ = batch(0)
    np.testing.assert_allclose(exported.serve(x), model(x), rtol=1e-5)
