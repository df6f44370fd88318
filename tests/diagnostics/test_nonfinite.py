"""The layer that is named is the one at fault, and nothing is named where nothing is wrong."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tfscale.diagnostics.nonfinite import find_nonfinite

L = keras.layers
NARROW = "mixed_float16"


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)


def batch(n=8, width=4):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, width)).astype("float32"), np.zeros((n, 1), "float32")


def chain(*layers, optimizer="sgd", **compile_args):
    """Layers between a fine first layer and a float32 head, all in one model."""
    model = keras.Sequential([keras.Input((4,)), *layers, L.Dense(1, dtype="float32", name="head")])
    model.compile(optimizer=optimizer, loss="mse", **compile_args)
    return model


def constant(value):
    return keras.initializers.Constant(value)


def test_clean_model_gives_a_clean_report():
    model = chain(L.Dense(4, dtype=NARROW), L.BatchNormalization(dtype=NARROW))
    report = find_nonfinite(model, batch())
    assert report.clean
    assert report.forward is None
    assert report.backward is None
    assert not report.inputs
    assert not report.weights
    assert "All finite" in str(report)


def test_names_the_layer_that_overflows_float16():
    model = chain(
        L.Dense(8, dtype=NARROW, name="fine"),
        L.Dense(8, dtype=NARROW, name="big", kernel_initializer=constant(30000.0)),
        L.Dense(8, dtype=NARROW, name="later"),
    )
    x, y = batch()
    report = find_nonfinite(model, (x, y))
    assert report.forward.layer == "big"
    assert report.forward.kind == "Dense"
    assert report.forward.place == "output"
    assert report.forward.dtype == "float16"
    assert report.forward.infs > 0
    received = model.layers[0](x)
    assert report.forward.largest_before == float(tf.reduce_max(tf.abs(received)))
    assert report.forward.finite_in_float32 is True
    assert report.forward.largest_in_float32 > 65504
    assert report.compute_dtype == "float16"
    assert "`big` (Dense)" in str(report)
    assert "range of half precision" in str(report)


def test_reports_that_float32_would_not_hold_it():
    class Square(L.Layer):
        def call(self, x):
            return tf.square(tf.square(x))

    model = chain(
        L.Dense(4, dtype="float16", name="big", kernel_initializer=constant(1000.0)),
        *(Square(dtype="float32", name=f"square_{i}") for i in range(4)),
    )
    report = find_nonfinite(model, batch())
    assert report.forward.layer.startswith("square")
    assert report.forward.finite_in_float32 is False
    assert "not finite either" in str(report)


def test_float32_model_is_not_compared_with_itself():
    model = chain(L.Dense(4, kernel_initializer=constant(3e38), name="big"))
    report = find_nonfinite(model, batch())
    assert report.forward.layer == "big"
    assert report.forward.finite_in_float32 is None
    assert report.compute_dtype == "float32"


@pytest.mark.parametrize(("value", "field"), [(np.nan, "nans"), (-np.inf, "infs")])
def test_counts_what_is_wrong_in_which_input(value, field):
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    model = keras.Model({"a": a, "b": b}, L.Dense(1)(L.Concatenate()([a, b])))
    model.compile(loss="mse")
    x, y = batch()
    bad = x.copy()
    bad[2, 1] = bad[3, 0] = value
    report = find_nonfinite(model, ({"a": x, "b": bad}, y))
    assert [i.name for i in report.inputs] == ["x['b']"]
    assert getattr(report.inputs[0], field) == 2
    assert report.inputs[0].size == 32
    assert "x['b']" in str(report)
    assert not report.clean


def test_names_targets_and_weights_of_samples_too():
    x, y = batch()
    nan = np.full_like(y, np.nan)
    report = find_nonfinite(chain(L.Dense(4)), (x, nan, nan[:, 0]))
    assert [i.name for i in report.inputs] == ["y", "sample_weight"]
    assert report.forward.place == "loss"
    assert report.forward.layer == ""


def test_reports_that_the_weights_were_ruined_before():
    model = chain(L.Dense(4, name="ruined"))
    model.layers[0].bias.assign(np.full(4, np.nan, "float32"))
    report = find_nonfinite(model, batch())
    assert [w.name for w in report.weights] == [model.layers[0].bias.path]
    assert report.forward.layer == "ruined"


def test_ruined_statistics_are_put_on_a_forward_pass():
    model = chain(L.BatchNormalization(name="norm"), L.Dense(4, name="dense"))
    norm, dense = model.layers[0], model.layers[1]
    norm.moving_mean.assign(np.full(4, np.nan, "float32"))
    report = find_nonfinite(model, batch())
    (bad,) = report.weights
    assert (bad.name, bad.trained) == (norm.moving_mean.path, False)
    assert "No update writes it: the forward pass of an earlier step did" in str(report)
    assert "an earlier update caused it" not in str(report)
    dense.bias.assign(np.full(4, np.nan, "float32"))
    text = str(find_nonfinite(model, batch()))
    assert text.index("an earlier update") < text.index("dense/bias") < text.index("Untrained")


def test_too_high_a_learning_rate_is_named():
    optimizer = tfscale.wrap(keras.optimizers.SGD(1e3))
    model = chain(L.Dense(4, dtype=NARROW), optimizer=optimizer, run_eagerly=True)
    x, y = batch()
    assert "learning rate" not in str(find_nonfinite(model, (x * 1e6, y)))
    model.train_on_batch(x, y)
    report = find_nonfinite(model, (x * 1e6, y))
    assert report.cause.startswith("The learning rate is too high (1000): the largest weight, in")
    assert report.cause in str(report)
    assert find_nonfinite(model, (x * np.nan, y)).cause == ""  # the data is


def test_a_loss_makes_up_for_compile():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, L.Dense(1, dtype=NARROW, name="narrow")(inputs))
    x, y = batch()
    assert find_nonfinite(model, (x, y), loss="mse").clean
    report = find_nonfinite(model, (x, y + np.inf), loss="mse")
    assert [bad.name for bad in report.inputs] == ["y"]


def test_input_beyond_float16_is_put_on_the_cast():
    x, y = batch()
    report = find_nonfinite(chain(L.Dense(4, dtype=NARROW, name="first")), (x * 1e6, y))
    assert not report.inputs
    assert (report.forward.layer, report.forward.place) == ("first", "input")
    assert report.forward.largest_before == pytest.approx(np.abs(x).max() * 1e6)
    assert report.forward.finite_in_float32
    assert "cast to float16" in str(report)


def test_log_of_zero():
    class Log(L.Layer):
        def call(self, x):
            return keras.ops.log(keras.ops.relu(x))

    report = find_nonfinite(chain(L.Dense(4), Log(name="log")), batch())
    assert report.forward.layer == "log"
    assert report.forward.infs > 0
    assert not np.isfinite(report.loss)
    assert "no gradient means anything" in str(report)


def test_fault_of_a_block_is_not_put_on_its_layers():
    class Block(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = L.Dense(4, kernel_initializer="ones", name="inner")

        def call(self, x):
            return self.inner(x) * 1e30 * 1e30

    x, y = np.ones((8, 4), "float32"), np.zeros((8, 1), "float32")
    report = find_nonfinite(chain(Block(name="block")), (x, y))
    assert report.forward.layer == "block"
    assert report.forward.largest_before == 4.0


def test_fault_between_layers_of_a_subclassed_model():
    class Between(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = L.Dense(4, name="a"), L.Dense(1, name="b")

        def call(self, x):
            return self.b(tf.math.log(0.0 * self.a(x)))

    model = Between()
    model.compile(loss="mse")
    report = find_nonfinite(model, batch())
    assert (report.forward.layer, report.forward.place) == ("b", "input")
    assert "outside of any layer" in str(report)


def test_exploding_recurrent_net_names_cell_and_step():
    model = keras.Sequential(
        [
            keras.Input((10, 4)),
            L.SimpleRNN(
                8, activation=None, recurrent_initializer=constant(1.0), dtype=NARROW, name="rnn"
            ),
            L.Dense(1, dtype="float32"),
        ]
    )
    model.compile(loss="mse")
    x = np.ones((4, 10, 4), "float32")
    report = find_nonfinite(model, (x, np.zeros((4, 1), "float32")))
    assert report.forward.layer.startswith("rnn/")
    # The state grows eightfold a step, so it takes about five steps from 1 to 65504.
    assert 3 <= report.forward.call <= 8
    assert f"call number {report.forward.call + 1}" in str(report)


def test_gradient_explodes_after_a_finite_forward_pass():
    class Root(L.Layer):
        def call(self, x):
            return tf.sqrt(x)

    model = chain(L.Dense(4, kernel_initializer="zeros", name="zero"), Root(name="root"))
    x, y = batch()
    report = find_nonfinite(model, (x, y + 1))
    assert report.forward is None
    assert (report.backward.layer, report.backward.place) == ("root", "input")
    assert report.backward.infs > 0
    assert report.backward.largest_before < 100
    assert "`root` (Root)" in str(report)


def test_gradient_of_a_variable_alone():
    class Scale(L.Layer):
        def build(self, shape):
            self.gain = self.add_weight(shape=(), initializer="zeros", name="gain")

        def call(self, x):
            return tf.stop_gradient(x) + tf.sqrt(self.gain)

    x, y = batch()
    report = find_nonfinite(chain(L.Dense(4), Scale(name="scale")), (x, y + 1))
    assert (report.backward.layer, report.backward.place) == ("scale", "gain")


def test_no_variable_hides_another_of_its_name():
    class Twins(L.Layer):
        def build(self, shape):
            self.root = self.add_weight(shape=(), initializer="zeros", name="gain")
            self.plain = self.add_weight(shape=(), initializer="ones", name="gain")

        def call(self, x):
            return tf.stop_gradient(x) + tf.sqrt(self.root) + self.plain

    x, y = batch()
    report = find_nonfinite(chain(L.Dense(4), Twins(name="twins")), (x, y + 1))
    assert (report.backward.layer, report.backward.place) == ("twins", "gain")


def test_one_branch_is_not_named_for_the_other():
    class Root(L.Layer):
        def call(self, x):
            return tf.sqrt(tf.square(0.0 * x)) + x

    inputs = keras.Input((4,))
    stem = L.Dense(4, name="stem")(inputs)
    bad, good = Root(name="bad")(stem), L.Dense(4, name="good")(stem)
    model = keras.Model(inputs, L.Dense(1, name="head")(L.Add(name="sum")([bad, good])))
    model.compile(loss="mse")
    report = find_nonfinite(model, batch())
    assert (report.backward.layer, report.backward.place) == ("stem", "output")
    assert report.backward.users == ("bad", "good")
    assert "`bad`, `good`" in str(report)


def test_gradients_are_seen_at_the_optimizers_scale():
    def model(scale):
        inner = keras.optimizers.SGD()
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale)
        return chain(L.Dense(4, dtype=NARROW, name="narrow"), optimizer=optimizer)

    x, y = batch()
    assert find_nonfinite(model(2.0), (x, y + 1)).clean
    report = find_nonfinite(model(2.0**40), (x, y + 1))
    assert report.scale == 2.0**40
    assert report.forward is None
    assert report.backward.dtype == "float16"
    assert report.backward.finite_in_float32
    narrow = chain(
        L.Dense(4, dtype=NARROW), optimizer=keras.optimizers.SGD(loss_scale_factor=2.0**40)
    )
    assert find_nonfinite(narrow, (x, y + 1)).backward is not None


def test_a_harmless_infinite_mask_is_reported_as_such():
    class Mask(L.Layer):
        def call(self, x):
            return tf.concat([x, tf.fill(tf.shape(x), -np.inf)], axis=-1)

    report = find_nonfinite(chain(Mask(name="mask"), L.Softmax()), batch())
    assert report.forward.layer == "mask"
    assert report.backward is None
    assert "does no harm" in str(report)


def test_without_targets_only_the_forward_pass_counts():
    x, y = batch()
    model = chain(L.Dense(4, kernel_initializer=constant(3e38), name="big"))
    bare = keras.Sequential([keras.Input((4,)), L.Dense(1)])
    report = find_nonfinite(model, x)
    assert report.forward.layer == "big"
    assert report.loss is None
    assert find_nonfinite(bare, (x, y)).clean
    assert "Backward pass: not run" in str(find_nonfinite(bare, (x, y)))
    assert find_nonfinite(bare, (x, y), loss="mse").loss is not None
    with pytest.raises(TypeError, match=r"keras\.Model"):
        find_nonfinite("model", (x, y))


def test_find_nonfinite_leaves_the_model_as_it_was():
    model = chain(
        L.Dense(4, dtype=NARROW, kernel_initializer=constant(30000.0)),
        L.BatchNormalization(dtype=NARROW),
        L.Dropout(0.5, dtype=NARROW),
        L.Dense(4, dtype="float16"),
        optimizer="adam",
        run_eagerly=True,
    )
    x, y = batch()
    model.train_on_batch(x, y)
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in variables]
    policies = [layer.dtype_policy for layer in model.layers]
    report = find_nonfinite(model, (x, y))
    assert report.forward is not None
    assert report.forward.finite_in_float32 is not None
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
    assert policies == [layer.dtype_policy for layer in model.layers]
    assert all(type(policy) is keras.DTypePolicy for policy in policies)


def test_layer_that_insists_on_float16_hides_nothing():
    class Insists(L.Layer):
        def call(self, x):
            return tf.ensure_shape(x, x.shape) * tf.constant(1e4, tf.float16)

    model = chain(L.Dense(4, dtype=NARROW), Insists(dtype=NARROW, name="insists"))
    x, y = batch()
    report = find_nonfinite(model, (x * 100, y))
    assert report.forward.layer == "insists"
    assert report.forward.finite_in_float32 is None
    assert model.layers[0].compute_dtype == "float16"


def test_report_is_frozen_and_its_dictionary_is_json():
    report = find_nonfinite(chain(L.Dense(4, kernel_initializer=constant(3e38))), batch())
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.loss = 0.0
    assert json.loads(json.dumps(report.to_dict()))["clean"] is False


def test_a_report_is_true_where_there_is_something():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    x, y = np.ones((2, 4), "float32"), np.ones((2, 1), "float32")
    assert not tfscale.find_nonfinite(model, (x, y))
    assert tfscale.find_nonfinite(model, (x * np.nan, y))


def test_a_whole_data_set_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    data = tf.data.Dataset.from_tensors((tf.ones((2, 4)), tf.ones((2, 1))))
    for whole in (data, iter(data)):
        with pytest.raises(TypeError, match="for batch in data"):
            tfscale.find_nonfinite(model, whole, loss="mse")
