"""The train step is one transaction: a skipped batch leaves no trace, an applied one is Keras'."""

import logging
import pathlib
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import FIT_MODES, slow_jit

import tfscale
from tfscale import _compat

# A step that Python runs takes a quarter of the time that it takes to trace one: what has nothing
# to do with graphs is tested so.
EAGER = FIT_MODES["eager"]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype("float32")
Y = RNG.normal(size=(24, 1)).astype("float32")
LABELS = RNG.integers(0, 3, size=24)


@keras.saving.register_keras_serializable(package="test")
class Fuse(keras.layers.Layer):
    """Identity whose gradient is infinite where it exceeds `limit`, as it would be in float16."""

    def __init__(self, limit=65504.0, **kwargs):
        super().__init__(**kwargs)
        self.limit = limit

    def get_config(self):
        return {**super().get_config(), "limit": self.limit}

    def call(self, x):
        @tf.custom_gradient
        def fuse(x):
            def grad(dy):
                return tf.where(tf.abs(dy) > self.limit, tf.constant(np.inf, dy.dtype), dy)

            return x, grad

        return fuse(x)


def net(*layers, inputs=6, outputs=1):
    """Dense, BatchNorm and, before the output, `layers`.

    The first has no bias: its gradient would be rounding error alone, from which Adam makes steps.
    """
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(5, use_bias=False, name="hidden"),
            keras.layers.BatchNormalization(momentum=0.5, name="norm"),
            keras.layers.ReLU(),
            *layers,
            keras.layers.Dense(outputs, name="out"),
            Fuse(dtype="float32"),
        ]
    )


def dynamic(optimizer=None, initial_scale=2.0**10, **settings):
    inner = optimizer or keras.optimizers.SGD(0.001, momentum=0.9)
    return tfscale.wrap(inner, "dynamic", initial_scale=initial_scale, **settings)


def overflow():
    """A batch with a finite loss whose scaled gradient is too large for `Fuse`."""
    return X[:8], np.full((8, 1), 1e4, "float32")


def bad_loss():
    """A batch whose loss is not finite, nor is anything else in the model."""
    return np.full((8, 6), np.inf, "float32"), Y[:8]


BAD = {"overflow": overflow, "loss": bad_loss}


def dataset(*batches):
    whole = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)
    return tf.data.Dataset.from_tensor_slices(whole).batch(8)


def good(n=3):
    return [(X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8]) for i in range(n)]


def values(variables):
    """Number and path, without the model's name, to value."""
    return {f"{i} {v.path.partition('/')[2]}": v.numpy().copy() for i, v in enumerate(variables)}


def assert_same(after, before, but=()):
    """Every variable is as before, other than those whose path contains one of `but`."""
    assert after.keys() == before.keys()
    changed = {k for k in after if not np.array_equal(after[k], before[k], equal_nan=True)}
    assert {k for k in changed if not any(word in k for word in but)} == set()


def everything(model):
    return {
        **values(model.variables),
        **{f"optimizer {k}": v for k, v in values(model.optimizer.variables).items()},
        **{f"metric {k}": v for k, v in values(model.metrics_variables).items()},
    }


def quiet_fit(model, *args, **kwargs):
    """`fit` without tfscale's word on skipped steps at its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfscale.LossScaleWarning)
        return model.fit(*args, verbose=0, shuffle=False, **kwargs)


# An applied step is Keras' own.


def trained(compile_model, make=net, data=None, epochs=1, **kwargs):
    keras.utils.set_random_seed(0)
    model = make()
    compile_model(model, **kwargs)
    keras.utils.set_random_seed(1)
    data = {"x": X, "y": Y, "batch_size": 12} if data is None else data
    history = model.fit(**data, epochs=epochs, verbose=0).history
    return model, history


def keras_step(model, optimizer="sgd", **kwargs):
    model.compile(keras.optimizers.get(optimizer), **kwargs)


def our_step(model, optimizer="sgd", **kwargs):
    inner = keras.optimizers.get(optimizer)
    tfscale.compile(model, tfscale.wrap(inner, "dynamic", initial_scale=4.0), **kwargs)


def assert_equal_training(make=net, data=None, mode="eager", **kwargs):
    """Weights, losses, metrics and logs as with Keras' own step, but for XLA bit for bit."""
    kwargs = {**FIT_MODES[mode], **kwargs}
    keras_model, expected = trained(keras_step, make, data, **kwargs)
    model, history = trained(our_step, make, data, **kwargs)
    assert set(history) - set(expected) == {"loss_scale", "skipped_steps"}
    # XLA may fuse an update with its selection and round once less.
    rtol, atol = (1e-6, 1e-7) if mode == "jit" else (0, 0)
    for name in expected:
        ours, theirs = (np.float32(logs[name]) for logs in (history, expected))
        np.testing.assert_allclose(ours, theirs, rtol, atol, err_msg=name)
    assert history["skipped_steps"] == [0.0] * len(history["loss"])
    for ours, theirs in zip(model.variables, keras_model.variables, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol, atol, err_msg=ours.path)
    return model


SEVERAL_STEPS = "graph-steps_per_execution"


@pytest.mark.parametrize(
    "mode", ["eager", pytest.param(SEVERAL_STEPS, marks=pytest.mark.slow), slow_jit]
)
def test_without_overflow_training_equals_keras(mode):
    if mode == SEVERAL_STEPS and _compat.KERAS < (3, 10):
        pytest.skip("Older Keras ends an epoch early whose batches do not fill the last execution")
    assert_equal_training(
        lambda: net(keras.layers.Dropout(0.3)),
        {"x": X, "y": Y, "batch_size": 8 if mode == SEVERAL_STEPS else 12},
        optimizer="adam",
        loss="mse",
        metrics=["mae"],
        mode=mode.split("-")[0],
        epochs=2,
        steps_per_execution=2 if mode == SEVERAL_STEPS else 1,
    )


def test_sample_weights_train_as_in_keras():
    data = {"x": X, "y": Y, "batch_size": 12, "sample_weight": RNG.uniform(size=24)}
    assert_equal_training(data=data, loss="mse", metrics=["mae"], weighted_metrics=["mse"])


def test_class_weights_train_as_in_keras():
    data = {"x": X, "y": LABELS, "batch_size": 12, "class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert_equal_training(lambda: net(outputs=3), data, loss=loss, metrics=["accuracy"])


def test_validation_data_are_evaluated_as_in_keras():
    data = {"x": X, "y": Y, "batch_size": 12, "validation_data": (X[:8], Y[:8])}
    assert_equal_training(data=data, loss="mse", metrics=["mae"])


def test_a_smaller_last_batch_counts_as_in_keras():
    assert_equal_training(data={"x": X, "y": Y, "batch_size": 15}, loss="mse", metrics=["mae"])


def two_heads():
    inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((6,), name="b")}
    hidden = keras.layers.Dense(4)(keras.layers.Add()(list(inputs.values())))
    outputs = {
        "one": keras.layers.Dense(1, name="one")(hidden),
        "two": keras.layers.Dense(3, name="two")(hidden),
    }
    return keras.Model(inputs, outputs)


TWO_LOSSES = {
    "loss": {
        "one": "mse",
        "two": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
    "loss_weights": {"one": 0.5, "two": 2.0},
    "metrics": {"one": ["mae"], "two": ["accuracy"]},
}


def test_several_inputs_and_outputs_train_as_in_keras():
    x, y = {"a": X, "b": X[::-1]}, {"one": Y, "two": LABELS}
    data = {"x": x, "y": y, "batch_size": 12}
    assert_equal_training(two_heads, data, **TWO_LOSSES)


class Penalized(keras.Model):
    """Losses of its own, on top of a regularizer."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.01))
        self.norm = keras.layers.BatchNormalization()
        self.out = keras.layers.Dense(1, activity_regularizer=keras.regularizers.L1(0.01))

    def call(self, x, training=False):
        hidden = self.norm(self.hidden(x), training=training)
        self.add_loss(0.1 * keras.ops.mean(hidden**2))
        return self.out(hidden)


def test_add_loss_and_regularizers_train_as_in_keras():
    model = assert_equal_training(Penalized, loss="mse")
    assert len(model.losses) == 3


def test_only_added_losses_train_as_in_keras():
    assert_equal_training(Penalized, data={"x": X, "batch_size": 12})


class OwnLoss(keras.Model):
    """Overrides `compute_loss`, with a metric that is written in there."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        return self.out(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = keras.ops.mean(keras.ops.abs(y - y_pred)) + 0.1 * keras.ops.mean(x**2)
        self.seen.update_state(loss)
        return loss


class OldOwnLoss(OwnLoss):
    """The signature before Keras 3.3."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return super().compute_loss(x, y, y_pred, sample_weight)


@pytest.mark.parametrize("make", [OwnLoss, OldOwnLoss])
def test_a_custom_compute_loss_trains_as_in_keras(make):
    assert_equal_training(make)


class OwnMetrics(keras.Model):
    """Overrides `compute_metrics`: adds an entry, changes one, takes one away."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.fuse = Fuse()
        self.biggest = keras.metrics.Mean(name="biggest")

    def call(self, x):
        return self.fuse(self.out(x))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        self.biggest.update_state(keras.ops.max(y_pred))
        logs["rmse"] = keras.ops.sqrt(logs["loss"])
        logs["mae"] = logs["mae"] * 100.0
        logs.pop("biggest")
        return logs


def test_a_custom_compute_metrics_is_that_of_keras():
    assert_equal_training(OwnMetrics, loss="mse", metrics=["mae"])


def test_a_call_without_training_trains_as_in_keras():
    class Plain(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(1)

        def call(self, x):
            return self.out(x)

    assert_equal_training(Plain, loss="mse")


def test_train_on_batch_gives_keras_logs():
    model = net()
    tfscale.compile(model, dynamic(), loss="mse", metrics=["mae"], **EAGER)
    keras_model = keras.models.clone_model(model)
    keras_model.set_weights(model.get_weights())
    keras_model.compile("adam", loss="mse", metrics=["mae"], **EAGER)
    logs = model.train_on_batch(X, Y, return_dict=True)
    expected = keras_model.train_on_batch(X, Y, return_dict=True)
    assert {name: logs[name] for name in expected} == expected
    keras_model.set_weights(model.get_weights())
    assert model.train_on_batch(X, Y) == keras_model.train_on_batch(X, Y)
    model = tfscale.compile(net(), dynamic(), loss="mse", **EAGER)
    model.compile(model.optimizer, loss="mse", **EAGER)  # Keras' compile, tfscale's step
    assert np.ndim(model.train_on_batch(X, Y)) == 0  # no list


@pytest.mark.parametrize(
    ("whole", "bad"), [(True, 0), (True, 9), (False, 9)], ids=["compile-0", "compile-9", "wrap-9"]
)
def test_terminate_on_nan_ends_what_the_page_says(whole, bad):
    model, x = net(), X.copy()
    x[bad] = np.nan
    compiled = tfscale.compile if whole else keras.Model.compile
    compiled(model, dynamic(), loss="mse", **EAGER)
    ends = keras.callbacks.TerminateOnNaN()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfscale.LossScaleWarning)
        model.fit(x, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[ends])
    assert model.stop_training == (bad == 0 or not whole)


# A skipped step leaves no trace.


def table_of_the_page():
    """From (owner, what) to {name of a variable: what docs/training.md says of it}."""
    page = pathlib.Path(__file__).parent.parent / "docs" / "training.md"
    (table,) = re.findall(
        r"^\| owner \| variables \| loss not finite \| overflow \|\n\|[ |-]*\n((?:\|.*\n)*)",
        page.read_text(),
        flags=re.MULTILINE,
    )
    says = {}
    for line in table.splitlines():
        owner, names, loss, overflow = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`(\w+)`", names.partition(":")[0]):
            says.setdefault((owner, "loss"), {})[name] = loss
            says.setdefault((owner, "overflow"), {})[name] = overflow
    return says


@pytest.mark.parametrize("mode", ["eager", slow_jit])
def test_variables_after_a_skip_are_as_documented(mode):
    optimizer = dynamic(
        keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(0.01, 10), use_ema=True, weight_decay=0.1
        )
    )
    # Spectral normalization writes a weight in its forward pass.
    spectral = keras.layers.SpectralNormalization(keras.layers.Dense(4))
    model = net(keras.layers.Dropout(0.3), spectral)
    tfscale.compile(model, optimizer, loss="mse", metrics=["mae", "mse"], **FIT_MODES[mode])
    says = table_of_the_page()
    owners = {"optimizer": ("optimizer", "tfscale"), "metric": ("metrics",)}
    for bad, scale in (("loss", 2.0**10), ("overflow", 2.0**9)):
        quiet_fit(model, dataset(*good(1)))
        before, skipped = everything(model), int(optimizer.skipped_steps)
        # As `train_on_batch`, which sets the metrics back first.
        logs = model.train_function(iter(dataset(BAD[bad]())))
        after = everything(model)
        for key in after:
            rows = [
                row
                for owner in owners.get(key.split()[0], ("model",))
                for name, row in says[owner, bad].items()
                if key.endswith(name)
            ]
            assert len(rows) == 1, f"{key} has {len(rows)} rows"
            changed = not np.array_equal(after[key], before[key])
            assert changed == (rows[0] != "unchanged"), f"{key} is said to be {rows[0]}"
        assert int(logs["skipped_steps"]) == skipped + 1
        assert float(logs["loss_scale"]) == scale
        assert np.isfinite(float(logs["loss"]))


@pytest.mark.parametrize(("bad", "mode"), [("overflow", "eager"), ("loss", "graph")])
@pytest.mark.slow
def test_a_skipped_first_step_leaves_a_fresh_model(bad, mode):
    class Lazy(keras.Model):
        """Makes its variables in the step that is to be taken back."""

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)
            self.norm = keras.layers.BatchNormalization()
            self.fuse = Fuse()

        def call(self, x, training=False):
            return self.fuse(self.norm(self.dense(x), training=training))

    model = Lazy()
    tfscale.compile(model, dynamic(), loss="mse", metrics=["mae"], **FIT_MODES[mode])
    x, y = BAD[bad]()
    quiet_fit(model, dataset((x, np.repeat(y, 4, axis=1))))
    np.testing.assert_array_equal(model.norm.moving_mean, np.zeros(4))
    np.testing.assert_array_equal(model.norm.moving_variance, np.ones(4))
    assert all(not v.numpy().any() for v in model.metrics_variables)
    assert int(model.optimizer.skipped_steps) == 1
    assert int(model.optimizer.iterations) == 0
    assert np.isfinite(model.evaluate(X[:8], np.zeros((8, 4)), verbose=0)).all()


def test_a_step_outside_of_fit_is_undone_as_well():
    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((6,)), norm, keras.layers.Dense(1)])
    tfscale.compile(model, dynamic(), loss="mse", metrics=["mae"])
    first = values(model.variables)
    for step in (model.train_step, tf.function(model.train_step)):
        x, y = map(tf.constant, bad_loss())
        logs = step((x, y))
        assert_same(values(model.variables), first)
        assert int(logs["skipped_steps"]) > 0
        assert all(not v.numpy().any() for v in model.metrics_variables)


@pytest.mark.parametrize("mode", ["eager", slow_jit])
def test_a_poisoned_batch_leaves_no_trace(mode):
    """Two epochs, the batch in the middle of each; `evaluate` is finite and equal."""

    model = net()
    tfscale.compile(model, dynamic(), loss="mse", metrics=["mae"], **FIT_MODES[mode])
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    start = [v.numpy() for v in variables]

    def run(*batches):
        """From the start on, with the step that was traced by the first run."""
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        history = quiet_fit(model, dataset(*batches), epochs=2).history
        return history, values(model.variables), model.evaluate(X, Y, verbose=0)

    a, b = good(2)
    expected, clean, clean_score = run(a, b)
    history, after, score = run(a, bad_loss(), b)
    assert expected["skipped_steps"] == [0.0, 0.0]
    assert history["skipped_steps"] == [1.0, 2.0]
    assert history["loss_scale"] == expected["loss_scale"]
    for name in ("loss", "mae"):
        assert history[name] == expected[name]
    assert_same(after, clean)
    assert np.isfinite(score).all()
    assert score == clean_score


@pytest.mark.slow
def test_logs_of_each_output_leave_the_bad_batch_out():
    def run(*batches):
        keras.utils.set_random_seed(0)
        model = two_heads()
        tfscale.compile(model, dynamic(), **TWO_LOSSES, **EAGER)
        return quiet_fit(model, dataset(*batches), epochs=2).history

    def batch(part, scale=1.0):
        x = {"a": X[part] * np.float32(scale), "b": X[part]}
        return x, {"one": Y[part], "two": LABELS[part]}

    parts = [batch(slice(0, 8)), batch(slice(8, 16))]
    expected = run(*parts)
    history = run(parts[0], batch(slice(16, 24), np.nan), parts[1])
    assert {"one_loss", "two_loss", "one_mae", "two_accuracy"} <= set(history)
    assert history.pop("skipped_steps") == [1.0, 2.0]
    expected.pop("skipped_steps")
    assert history == expected


def test_unlisted_metrics_leave_the_bad_batch_out():
    class Silent(OwnLoss):
        @property
        def metrics(self):
            return []

    model = Silent()
    tfscale.compile(model, dynamic(), **EAGER)
    quiet_fit(model, dataset(good()[0], bad_loss(), good()[1]))
    assert np.isfinite(float(model.seen.result()))
    assert float(model.seen.variables[1]) == 2  # batches


def test_a_custom_compute_metrics_is_finite_again():
    model = OwnMetrics()
    tfscale.compile(model, dynamic(), loss="mse", metrics=["mae"], **EAGER)
    history = quiet_fit(model, dataset(good()[0], bad_loss(), good()[1])).history
    assert np.isfinite([history[name][0] for name in history]).all()
    assert np.isfinite(float(model.biggest.result()))
    assert "biggest" not in history


@pytest.mark.slow
def test_a_bad_batch_in_an_execution_is_undone():
    model = net()
    tfscale.compile(model, dynamic(), loss="mse", steps_per_execution=4, **FIT_MODES["graph"])
    history = quiet_fit(model, dataset(*good(2), bad_loss(), good()[2])).history
    assert history["skipped_steps"] == [1.0]
    assert np.isfinite(history["loss"]).all()
    assert np.isfinite(model.get_layer("norm").moving_variance).all()
    assert int(model.optimizer.iterations) == 3


def test_accumulation_does_not_count_a_skipped_batch():
    model = net()
    optimizer = dynamic(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    tfscale.compile(model, optimizer, loss="mse", **EAGER)
    a, b, _ = good()
    start = model.get_weights()
    quiet_fit(model, dataset(a, bad_loss()))
    np.testing.assert_array_equal(model.get_layer("out").kernel, start[-2])
    quiet_fit(model, dataset(b))
    assert not np.array_equal(model.get_layer("out").kernel, start[-2])


@pytest.mark.slow
def test_a_frozen_backbone_is_not_copied_or_written():
    model = net()
    model.get_layer("hidden").trainable = False
    tfscale.compile(model, dynamic(), loss="mse")
    model.optimizer.build(model.trainable_variables)
    step = tf.function(model.train_step)
    graph = step.get_concrete_function((tf.constant(X), tf.constant(Y))).graph
    kernel, moving_mean = model.get_layer("hidden").kernel, model.get_layer("norm").moving_mean

    def users(variable):
        inside = [t for outer, t in graph.captures if outer is variable.value.handle]
        return sorted(op.type for t in inside for op in t.consumers())

    # The forward pass and nothing else; BatchNorm's statistics are read, kept and put back.
    assert set(users(kernel)) == {"ReadVariableOp"}
    assert len(users(kernel)) <= 2
    assert "AssignVariableOp" in users(moving_mean)
    assert_equal_training(
        lambda: keras.Sequential([_frozen(net()), keras.layers.Dense(1)]), loss="mse"
    )


def _frozen(layer):
    layer.trainable = False
    return layer


# A loss that is not finite.


@pytest.mark.slow
def test_an_overflow_lowers_the_scale_not_a_bad_loss():
    model = net()
    tfscale.compile(model, dynamic(), loss="mse", **FIT_MODES["graph"])
    history = quiet_fit(model, dataset(good()[0], bad_loss()), epochs=3).history
    assert history["loss_scale"] == [2.0**10] * 3
    history = quiet_fit(model, dataset(good()[0], overflow())).history
    assert history["loss_scale"] == [2.0**9]
    assert history["skipped_steps"] == [4.0]


def test_a_bad_loss_keeps_the_scale_in_keras_own_step():
    model = net()
    model.compile(dynamic(), loss="mse", **EAGER)
    quiet_fit(model, dataset(good()[0], bad_loss()))
    assert float(model.optimizer.loss_scale) == 2.0**10
    assert int(model.optimizer.skipped_steps) == 1
    assert np.isfinite(model.get_layer("out").kernel).all()


def test_fit_tells_a_bad_loss_from_an_overflow(caplog):
    model = net()
    tfscale.compile(model, dynamic(), loss="mse", **EAGER)
    with pytest.warns(tfscale.LossScaleWarning, match=r"2 of 5 .*loss that was not finite"):
        model.fit(dataset(*good(), bad_loss(), bad_loss()), verbose=0, shuffle=False)
    with caplog.at_level(logging.INFO, "tfscale"):
        model.fit(dataset(*good(), overflow()), verbose=0, shuffle=False)
    (line,) = caplog.messages
    assert re.search("1 of 4", line)
    assert "not finite" not in line


# Keras' own step with a wrapped optimizer: it warns of what it cannot undo.


def test_poisoned_statistics_are_named_with_the_remedy():
    model = net()
    model.compile(dynamic(), loss="mse", **EAGER)
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        model.fit(dataset(good()[0], bad_loss(), good()[1]), verbose=0, shuffle=False)
    norm = model.get_layer("norm")
    assert not np.isfinite(norm.moving_mean).any()
    assert np.isnan(model.evaluate(X, Y, verbose=0))
    text = "\n".join(str(w.message) for w in caught)
    assert norm.moving_mean.path in text
    assert norm.moving_variance.path in text
    assert "kernel" not in text
    assert "tfscale.compile(" in text
    # The remedy works.
    norm.moving_mean.assign(np.zeros(5))
    norm.moving_variance.assign(np.ones(5))
    tfscale.compile(model, model.optimizer, loss="mse", **EAGER)
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        model.fit(dataset(good()[0], bad_loss(), good()[1]), verbose=0, shuffle=False)
    assert len(caught) == 1
    assert "tfscale.compile(" not in str(caught[0].message)
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


def test_poisoned_statistics_without_weights_are_found():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.BatchNormalization(center=False, scale=False, name="bare"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(dynamic(), loss="mse", **EAGER)
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        model.fit(dataset(good()[0], bad_loss()), verbose=0, shuffle=False)
    assert any("bare/moving_variance" in str(w.message) for w in caught)


def test_statistics_of_other_models_are_not_named():
    other = net()
    other.get_layer("norm").moving_mean.assign(np.full(5, np.nan))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(dynamic(), loss="mse", **EAGER)
    with pytest.warns(tfscale.LossScaleWarning) as caught:
        model.fit(dataset(good()[0], bad_loss()), verbose=0, shuffle=False)
    assert len(caught) == 1


# What is logged.


def test_progress_bar_shows_skipped_steps_and_scale(capsys):
    model = net()
    tfscale.compile(model, dynamic(), loss="mse", **EAGER)
    model.fit(dataset(good()[0], *[overflow()] * 2, good()[1]), verbose=2, shuffle=False)
    shown = capsys.readouterr().out
    # Not an average over the batches, and nothing of tfscale that was not asked for.
    assert "skipped_steps: 2.0000" in shown
    assert "loss_scale: 256.0000" in shown
    assert re.findall(r"- (\w+):", shown) == ["loss", "loss_scale", "skipped_steps"]


def test_evaluate_knows_nothing_of_the_scale():
    model = net()
    tfscale.compile(model, dynamic(), loss="mse", **EAGER)
    history = model.fit(X, Y, validation_data=(X, Y), verbose=0).history
    assert sorted(history) == ["loss", "loss_scale", "skipped_steps", "val_loss"]
    assert list(model.evaluate(X, Y, verbose=0, return_dict=True)) == ["loss"]


def test_an_epoch_of_skips_logs_its_last_batch():
    model = net()
    tfscale.compile(model, dynamic(), loss="mse", metrics=["mae"], **EAGER)
    history = quiet_fit(model, dataset(bad_loss(), bad_loss())).history
    assert np.isnan([history["loss"], history["mae"]]).all()
    assert history["skipped_steps"] == [2.0]
    x, y = overflow()
    history = quiet_fit(model, dataset(bad_loss(), (x, y))).history
    error = np.abs(model(x, training=True) - y)
    np.testing.assert_allclose(history["mae"], error.mean(), rtol=1e-5)
    np.testing.assert_allclose(history["loss"], (error**2).mean(), rtol=1e-5)


def test_a_first_overflow_does_not_terminate_on_nan():
    model = net()
    tfscale.compile(model, dynamic(), loss="mse", **EAGER)
    stop = keras.callbacks.TerminateOnNaN()
    quiet_fit(model, dataset(overflow(), *good(2)), callbacks=[stop])
    assert int(model.optimizer.iterations) == 2


# Which models `compile` takes.


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.BatchNormalization()
        self.out = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.out(self.norm(x, training=training))


def functional():
    inputs = keras.Input((6,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4)(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def already_trained():
    model = functional()
    model.compile("sgd", loss="mse", **EAGER)
    model.fit(X, Y, verbose=0)
    return model


@pytest.mark.parametrize("make", [functional, Subclassed, already_trained])
def test_compile_serves_every_kind_of_model(make):
    model = make()
    assert tfscale.compile(model, keras.optimizers.SGD(0.01), loss="mse", **EAGER) is model
    assert isinstance(model.optimizer, tfscale.LossScaleOptimizer)
    history = quiet_fit(model, dataset(*good(1), bad_loss())).history
    assert history["skipped_steps"] == [1.0]
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


def test_a_model_from_disk_goes_on_with_its_whole_step(tmp_path):
    def fresh():
        keras.utils.set_random_seed(0)
        model = net()
        tfscale.compile(model, dynamic(), loss="mse", **EAGER)
        return model

    stopped = fresh()
    quiet_fit(stopped, dataset(*good(1), overflow()))
    stopped.save(tmp_path / "model.keras")
    quiet_fit(stopped, dataset(*good(1)))
    model = keras.models.load_model(tmp_path / "model.keras")
    quiet_fit(model, dataset(*good(1)))
    for ours, theirs in zip(everything(model).values(), everything(stopped).values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(model.optimizer.skipped_steps) == 1
    history = quiet_fit(model, dataset(bad_loss())).history
    assert history["skipped_steps"] == [2.0]
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


def test_arguments_are_those_of_keras_compile():
    model = net()
    tfscale.compile(model, "sgd", "mse", metrics=["mae"], auto_scale_loss=False, **EAGER)
    assert set(model.fit(X, Y, verbose=0).history) >= {"loss", "mae"}


def test_a_model_with_a_custom_train_step_is_refused():
    class Own(keras.Model):
        def train_step(self, data):
            return {"loss": 0.0}

    with pytest.raises(ValueError, match=r"Own has a custom train_step") as error:
        tfscale.compile(Own(), "sgd", loss="mse")
    assert "logs = tfscale.train_step(self, data)" in str(error.value)
    assert "model.compile(optimizer=tfscale.wrap(optimizer), ...)" in str(error.value)
    # tfscale's step computes the loss of compile(), not the one of the step that it replaces.
    assert "scaled = self.optimizer.scale_loss(loss)" in str(error.value)


@pytest.mark.parametrize("base", [keras.Model, tfscale.Model])
def test_our_step_can_be_called_in_a_custom_step(base):
    class Own(base):
        def __init__(self):
            super().__init__()
            self.net = net()

        def call(self, x, training=False):
            return self.net(x, training=training)

        def train_step(self, data):
            return {**tfscale.train_step(self, data, retry=1), "twice": 2.0}

    model = Own()
    model.compile(dynamic(), loss="mse", **EAGER)
    history = quiet_fit(model, dataset(*good(1), bad_loss())).history
    assert history["twice"] == [2.0]
    assert history["skipped_steps"] == [1.0]
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


def test_a_plain_optimizer_is_refused_with_the_remedy():
    model = net()
    model.compile("sgd", loss="mse")
    with pytest.raises(TypeError, match=r"tfscale.compile\(model.*tfscale.wrap\(optimizer\)"):
        tfscale.train_step(model, (X, Y))


@pytest.mark.parametrize("what", [None, "model", keras.layers.Dense(1)])
def test_only_a_model_can_be_compiled(what):
    with pytest.raises(TypeError, match=r"must be a keras\.Model"):
        tfscale.compile(what, "sgd", loss="mse")


@pytest.mark.parametrize("retry", [-1, 1.5, "2", True, None])
def test_a_retry_that_is_no_count_is_refused(retry):
    for call in (
        lambda: tfscale.compile(net(), "sgd", loss="mse", retry=retry),
        lambda: tfscale.Model(*[keras.Input((1,))] * 2).compile("sgd", retry=retry),
        lambda: tfscale.train_step(net(), (X, Y), retry=retry),
    ):
        with pytest.raises(ValueError, match="`retry` must be an integer of at least 0"):
            call()


def test_a_model_without_any_loss_gets_keras_error():
    model = net()
    tfscale.compile(model, "sgd")
    with pytest.raises(ValueError, match="No loss to compute"):
        model.fit(X, Y, verbose=0)


def test_a_model_without_weights_gets_keras_warning():
    model = _frozen(net())
    tfscale.compile(model, dynamic(), loss="mse", metrics=["mae"])
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        history = model.fit(dataset(*good(2), bad_loss()), verbose=0, shuffle=False).history
    assert np.isfinite(history["loss"]).all()
    assert np.isfinite(history["mae"]).all()


@pytest.mark.slow
def test_float16_overflows_are_trained_through():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    tfscale.compile(model, keras.optimizers.SGD(0.01), loss="mse", **EAGER)
    y = np.full((24, 1), 100.0, "float32")
    before = model.evaluate(X, y, verbose=0)
    history = quiet_fit(model, X, y, epochs=4, batch_size=4).history
    assert 0 < history["skipped_steps"][-1] < 10
    assert history["loss_scale"][-1] == 2.0 ** (15 - history["skipped_steps"][-1])
    assert model.evaluate(X, y, verbose=0) < before


# tfscale.Model.


def test_a_functional_model_of_ours_takes_steps_back():
    inputs = keras.Input((6,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4)(inputs))
    model = tfscale.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", loss="mse", metrics=["mae"], **EAGER)
    history = quiet_fit(model, dataset(*good(1), bad_loss())).history
    assert history["skipped_steps"] == [1.0]
    assert np.isfinite(model.evaluate(X, Y, verbose=0)).all()


def test_a_functional_model_spoils_no_subclassed_one():
    # Keras turns a class that is once used in the functional way into a functional one.
    inputs = keras.Input((6,))
    tfscale.Model(inputs, keras.layers.Dense(1)(inputs))

    class Sub(tfscale.Model):
        def __init__(self):
            super().__init__()
            self.norm = keras.layers.BatchNormalization()
            self.out = keras.layers.Dense(1)

        def call(self, x, training=False):
            return self.out(self.norm(x, training=training))

    model = Sub()
    tfscale.compile(model, "sgd", loss="mse", retry=1, **EAGER)
    history = quiet_fit(model, dataset(*good(1), bad_loss())).history
    assert history["skipped_steps"] == [1.0]
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


@keras.saving.register_keras_serializable(package="test")
class Encoder(tfscale.Model):
    """A subclass that gives inputs and outputs to its base, by name."""

    def __init__(self, width=4, **kwargs):
        inputs = keras.Input((6,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(width)(inputs))
        outputs = keras.layers.Dense(1)(hidden)
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)
        self.width = width

    def get_config(self):
        return {"width": self.width, "name": self.name}


def test_a_subclass_of_ours_may_be_functional(tmp_path):
    model = Encoder(width=3)
    model.compile("sgd", loss="mse", **EAGER)
    history = quiet_fit(model, dataset(*good(1), bad_loss())).history
    assert history["skipped_steps"] == [1.0]
    assert [layer.count_params() for layer in model.layers] == [0, 21, 12, 4]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (type(loaded), loaded.width) == (Encoder, 3)
    assert loaded.evaluate(X, Y, verbose=0) == model.evaluate(X, Y, verbose=0)


@pytest.mark.slow
def test_a_model_of_ours_from_disk_keeps_its_retry(tmp_path):
    inputs = keras.Input((6,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4)(inputs))
    model = tfscale.Model(inputs, Fuse()(keras.layers.Dense(1)(hidden)))
    model.compile(dynamic(initial_scale=2.0**12), loss="mse", retry=10, **EAGER)
    model.fit(dataset(*good()), verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, tfscale.Model)
    assert isinstance(loaded.optimizer, tfscale.LossScaleOptimizer)
    assert_same(values(loaded.variables), values(model.variables))
    assert int(loaded.optimizer.iterations) == 3
    for one in (model, loaded):
        history = quiet_fit(one, dataset(overflow())).history
        assert history["skipped_steps"] == [0.0]
        assert history["loss_scale"] < [2.0**12]
    assert_same(values(loaded.variables), values(model.variables))


def test_a_retry_ignored_by_a_custom_step_is_refused():
    class Own(tfscale.Model):
        def train_step(self, data):
            return tfscale.train_step(self, data)

    with pytest.raises(ValueError, match=r"tfscale.train_step\(self, data, retry=2\)"):
        Own().compile("sgd", loss="mse", retry=2)


# Retry.


@pytest.mark.parametrize(
    "mode", ["eager", pytest.param("jit-steps_per_execution", marks=pytest.mark.slow)]
)
def test_an_overflow_is_run_again_at_the_lowered_scale(mode):
    model = net()
    arguments = {"loss": "mse", "metrics": ["mae"]}
    several = EAGER if mode == "eager" else {**FIT_MODES["jit"], "steps_per_execution": 3}
    tfscale.compile(
        model, dynamic(keras.optimizers.Adam(0.01), 2.0**6), retry=20, **arguments, **several
    )
    start = values(model.variables)
    history = quiet_fit(model, dataset(good()[0], overflow(), good()[1])).history
    # One batch after the other was applied, once, and none was skipped.
    assert history["skipped_steps"] == [0.0]
    assert int(model.optimizer.iterations) == 3
    scale = float(history["loss_scale"][0])
    assert scale < 2.0**5
    assert all(not np.array_equal(v, start[k]) for k, v in values(model.variables).items())
    count = model.metrics_variables[1]
    assert count.path.endswith("count")
    assert float(count) == 24  # each sample once

    reference = net()
    for ours, theirs in zip(reference.variables, start.values(), strict=True):
        ours.assign(theirs)
    optimizer = dynamic(keras.optimizers.Adam(0.01), initial_scale=scale)
    tfscale.compile(reference, optimizer, **arguments, **EAGER)
    expected = quiet_fit(reference, dataset(good()[0], overflow(), good()[1])).history
    assert expected["skipped_steps"] == [0.0]
    for name in ("loss", "mae"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-6)
    for ours, theirs in zip(model.variables, reference.variables, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_batch_is_run_again_only_as_often_as_asked(caplog):
    model = net()
    tfscale.compile(model, dynamic(), loss="mse", retry=2, **EAGER)
    before = values(model.variables)
    history = quiet_fit(model, dataset(overflow())).history
    assert_same(values(model.variables), before)
    assert history["loss_scale"] == [2.0**7]  # one try and two more
    assert history["skipped_steps"] == [1.0]  # one batch
    record = model.optimizer.record()
    assert (record.steps, record.applied, record.retries) == (3, 0, 2)
    assert (record.skipped, record.skipped_overflow, record.skipped_loss) == (1, 3, 0)
    assert (record.growths, record.backoffs, record.at_floor) == (0, 3, 0)
    assert (record.skipped_in_a_row, record.longest_run, record.last_skip) == (3, 3, 3)
    assert record.changes == tuple(tfscale.ScaleChange(n, 2.0 ** (10 - n)) for n in (1, 2, 3))
    with caplog.at_level(logging.INFO, "tfscale"):
        model.fit(dataset(good()[0], overflow()), verbose=0, shuffle=False)
    assert caplog.messages[0].startswith("1 of 2 training steps was skipped")


def test_a_bad_loss_is_not_run_again():
    dropout = keras.layers.Dropout(0.5)
    model = net(dropout)
    tfscale.compile(model, dynamic(), loss="mse", retry=5, **EAGER)
    first = dropout.seed_generator.state.numpy().copy()
    history = quiet_fit(model, dataset(good()[0], bad_loss())).history
    assert history["skipped_steps"] == [1.0]
    assert history["loss_scale"] == [2.0**10]
    assert np.max(dropout.seed_generator.state.numpy() - first) == 2  # one draw a batch


def test_a_scale_that_cannot_move_is_not_tried_again():
    dropout = keras.layers.Dropout(0.5)
    model = net(dropout)
    tfscale.compile(model, tfscale.wrap("sgd", 1024.0), loss="mse", retry=5, **EAGER)
    first = dropout.seed_generator.state.numpy().copy()
    history = quiet_fit(model, dataset(overflow())).history
    assert history["skipped_steps"] == [1.0]
    assert np.max(dropout.seed_generator.state.numpy() - first) == 1


def test_compiling_with_a_plain_optimizer_ends_the_step():
    model = net()
    tfscale.compile(model, "sgd", loss="mse", **EAGER)
    model.compile(model.optimizer.inner_optimizer, loss="mse", **EAGER)
    assert "skipped_steps" not in model.fit(X, Y, verbose=0).history
