"""What a profile must never get wrong: what float16 loses, and that it leaves the model alone."""

import dataclasses
import importlib
import json
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfscale.diagnostics.profiling import profile
from tfscale.policies import Dynamic, NoScaling, Static

L = keras.layers


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)


def data(n=32, width=4):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, width)).astype("float32"), rng.normal(size=(n, 1)).astype("float32")


def dense(dtype="float32", weight=1.0, **compile_args):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            L.Dense(16, "tanh", dtype=dtype, name="hidden"),
            L.Dense(1, dtype="float32", name="head"),
        ]
    )
    model.compile(loss="mse", loss_weights=[weight], **compile_args)
    return model


def conv_net(dtype):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            L.Conv2D(8, 3, dtype=dtype, name="conv_0"),
            L.ReLU(dtype=dtype, name="relu_0"),
            L.Conv2D(8, 3, strides=2, dtype=dtype, name="conv_1"),
            L.ReLU(dtype=dtype, name="relu_1"),
            L.Flatten(dtype=dtype, name="flatten"),
            L.Dense(10, dtype="float32", name="head"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # A small loss weight stands for a long-trained or deep model: its gradients are small.
    model.compile(optimizer="sgd", loss=loss, loss_weights=[2.0**-16])
    return model


def images(n=16):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 12, 12, 3)).astype("float32"), rng.integers(0, 10, n)


def in_float16(values):
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32).astype(np.float16)


class Probe(keras.layers.Layer):
    """Returns its input; the gradient that it passes on is a constant."""

    def __init__(self, gradient, **kwargs):
        super().__init__(**kwargs)
        self.gradient = gradient

    def build(self, shape):
        self.kernel = self.add_weight(
            shape=(len(self.gradient),), initializer="zeros", name="kernel"
        )

    def call(self, x):
        return tf.reduce_sum(self.kernel * self.gradient) + 0.0 * x


def known_gradient(gradient):
    """The profile of the kernel of a model whose gradient is `gradient`."""
    gradient = np.asarray(gradient, "float32")
    model = keras.Sequential([keras.Input((1,)), Probe(gradient, name="probe")])
    loss = lambda y, p: p[0]  # noqa: E731
    result = profile(model, np.ones((1, 1), "float32"), np.ones((1, 1), "float32"), loss=loss)
    return next(r for r in result.variables if r.name == "probe/kernel"), result


def test_shares_are_those_of_a_cast_also_on_the_edges():
    edges = [2.0**-25, np.nextafter(2.0**-25, 1, dtype="float32"), 2.0**-24, 2.0**-14]
    rng = np.random.default_rng(0)
    many = 2.0 ** rng.uniform(-40, 10, 2000)
    gradient = np.concatenate([edges, -np.array(edges), many, np.zeros(7)]).astype("float32")
    found, _ = known_gradient(gradient)
    nonzero = gradient[gradient != 0]
    for k in (0, 3, 11, -4):
        scaled = in_float16(nonzero * np.float32(2.0**k))
        lost = np.mean(scaled == 0)
        # The cast rounds a few values just below 2**-14 up to it.
        subnormal = np.mean((scaled != 0) & (np.abs(nonzero * 2.0**k) < 2.0**-14))
        assert found.lost(2.0**k) == pytest.approx(lost, abs=0), k
        assert found.subnormal(2.0**k) == pytest.approx(subnormal, abs=0), k
    assert found.zeros == 7
    assert found.zero_share == pytest.approx(7 / len(gradient))


def test_histogram_headroom_and_largest_exponent():
    found, _ = known_gradient([0.0, 1.0, -1.5, 2.0, 0.25])
    assert found.histogram() == {-2: 1, 0: 2, 1: 1}
    assert found.largest == 2.0
    assert found.largest_exponent == 1
    assert found.headroom == 14  # 2 * 2**14 = 32768 fits, 65536 does not
    assert np.isinf(in_float16(2.0 * 2.0**15))


def test_empty_histogram_has_no_headroom_or_exponent():
    found, result = known_gradient([0.0, 0.0])
    assert found.headroom is None
    assert found.largest_exponent is None
    assert result.policy == NoScaling()
    assert "exactly zero" in result.reason


def test_proposes_nothing_where_nothing_is_lost():
    result = profile(dense(), *data())
    assert result.policy == NoScaling()
    assert result.scale == 1.0


def test_proposes_a_static_scale_that_loses_less():
    result = profile(dense(weight=2.0**-20), *data())
    assert isinstance(result.policy, Static)
    assert result.all_variables.lost() > 0.01
    for group in (result.all_variables, result.all_activations):
        assert group.lost(result.scale) < 1e-3
        assert group.largest * result.scale * 8 <= 65504
    assert result.proposal in str(result)


def test_proposes_a_dynamic_scale_for_too_wide_a_range():
    _, result = known_gradient([2.0**-40, 2.0**10])
    assert isinstance(result.policy, Dynamic)
    assert result.policy.min_scale <= 2.0 ** (15 - 10 - 3) == result.policy.initial_scale


def test_proposes_a_scale_below_one_on_overflow():
    _, result = known_gradient([2.0**18, 2.0**15])
    assert isinstance(result.policy, Static)
    assert result.scale < 1
    assert 2.0**18 * result.scale * 8 <= 65504


def test_bfloat16_needs_no_scaling():
    result = profile(dense("mixed_bfloat16", weight=2.0**-20), *data())
    assert result.compute_dtype == "bfloat16"
    assert result.policy == NoScaling()


def test_float16_model_shows_what_it_has_lost_already():
    x, y = data()
    narrow = profile(dense("mixed_float16", weight=2.0**-20), x, y)
    keras.utils.set_random_seed(0)
    wide = profile(dense("float32", weight=2.0**-20), x, y)
    assert narrow.compute_dtype == "float16"
    assert narrow.measured_scale > 1
    here, there = (next(r for r in p.activations if r.name == "hidden") for p in (narrow, wide))
    assert here.lost() > 0.5
    assert here.lost() == pytest.approx(there.lost(), abs=0.02)


def test_measuring_scale_falls_until_nothing_overflows():
    result = profile(dense("mixed_float16", weight=2.0**12), *data())
    assert 2.0**-16 <= result.measured_scale <= 2.0**10
    assert all(np.isfinite(r.largest) for r in result.variables + result.activations)
    wide = profile(dense("float32", weight=2.0**12), *data())
    assert result.total.headroom <= wide.total.headroom + 6


def test_measuring_scale_falls_for_an_unseen_overflow():
    class Inside(keras.layers.Layer):
        def call(self, x):
            return x * tf.cast(2.0**-8, x.dtype) * tf.cast(2.0**8, x.dtype)

    def model(dtype):
        keras.utils.set_random_seed(0)
        layers = [L.Dense(4, dtype=dtype, name="d"), Inside(dtype=dtype), L.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(loss="mse")
        return model

    result, wide = (profile(model(dtype), *data()) for dtype in ("mixed_float16", "float32"))
    assert result.measured_scale * 2.0**8 * wide.total.largest < 4 * 65504
    ranges = (next(r for r in p.variables if r.name == "d/kernel") for p in (result, wide))
    assert next(ranges).largest == pytest.approx(next(ranges).largest, rel=0.01)


@pytest.mark.parametrize("dtype", ["mixed_float16", "float16"])
def test_prediction_agrees_with_float16_gradients(dtype):
    x, y = images()
    model = conv_net(dtype)
    result = profile(model, x, y, steps=1, batch_size=16)
    assert isinstance(result.policy, Static), result.reason

    def zeros(scale):
        """Exact zeros among the activations' and the variables' gradients, at this scale."""
        with tf.GradientTape() as tape:
            outputs, h = [], tf.constant(x)
            for layer in model.layers[:-1]:
                h = layer(h)
                outputs.append(h)
            predicted = model.layers[-1](h)
            loss = model.compute_loss(y=tf.constant(y), y_pred=predicted) * scale
        sources = [v for layer in model.layers[:-1] for v in layer.trainable_variables]
        gradients = tape.gradient(loss, sources + outputs[:-1])  # Flatten's repeats the one before
        split = len(sources)
        return [
            np.concatenate([g.numpy().astype("float32").ravel() for g in part])
            for part in (gradients[:split], gradients[split:])
        ]

    at_1, at_proposed, at_measured = (zeros(s) for s in (1.0, result.scale, result.measured_scale))
    names = {r.name: r for r in result.activations}
    acts = [names[n] for n in ("conv_0", "relu_0", "conv_1", "relu_1")]
    for i, ranges in enumerate(([r for r in result.variables if r.counted], acts)):
        nonzero = sum(r.nonzero for r in ranges)
        predicted = sum(r.lost() * r.nonzero for r in ranges) / nonzero
        seen = np.count_nonzero((at_measured[i] != 0) & (at_1[i] == 0)) / nonzero
        kept = np.count_nonzero((at_measured[i] != 0) & (at_proposed[i] == 0)) / nonzero
        assert predicted > 0.01
        assert seen == pytest.approx(predicted, rel=0.25)
        assert kept < 1e-3


class Block(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = [L.Dense(4, "relu", name="first"), L.Dense(4, name="second")]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        self.block = Block(name="block")
        self.head = L.Dense(1, name="head")

    @tf.function
    def call(self, x):
        return self.head(self.block(tf.square(x)))


def test_sees_layers_of_nested_models_in_a_tf_function():
    model = Nested()
    model.compile(loss="mse")
    result = profile(model, *data(), steps=1)
    assert [r.name for r in result.activations] == ["block/first", "block/second", "head"]
    assert {r.name for r in result.variables} == {
        f"{layer}/{v}"
        for layer in ("block/first", "block/second", "head")
        for v in ("kernel", "bias")
    }


def test_activation_gradients_are_those_of_the_tape():
    x, y = data()
    model = dense()
    with tf.GradientTape() as tape:
        hidden = model.layers[0](x)
        loss = model.compute_loss(y=y, y_pred=model.layers[1](hidden))
    expected = tape.gradient(loss, hidden)
    result = profile(model, x, y)
    found = next(r for r in result.activations if r.name == "hidden")
    assert found.largest == float(tf.reduce_max(tf.abs(expected)))
    assert found.nonzero + found.zeros == expected.shape.num_elements()


def test_calls_of_a_shared_layer_count_under_one_name():
    model = keras.Sequential(
        [keras.Input((5, 4)), L.SimpleRNN(3, name="rnn"), L.Dense(1, name="head")]
    )
    model.compile(loss="mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 5, 4)).astype("float32"), np.ones((8, 1), "float32")
    cell = next(r for r in profile(model, x, y).activations if "cell" in r.name)
    assert cell.zeros + cell.nonzero == 8 * 5 * 3


def test_operations_made_in_passing_are_not_named():
    inputs = keras.Input((4, 4, 1))
    h = L.ZeroPadding2D(1, name="pad")(L.Conv2D(2, 1, name="conv")(inputs))
    outputs = L.Dense(1, name="head")(L.Flatten(name="flat")(h + 1.0))
    model = keras.Model(inputs, outputs)
    model.compile(loss="mse")
    x, y = np.ones((4, 4, 4, 1), "float32"), np.ones((4, 1), "float32")
    names = [[r.name for r in profile(model, x, y).activations] for _ in range(2)]
    assert names[0] == names[1]
    assert names[0][:2] == ["conv", "pad"]
    assert len(names[0]) == 5  # the addition is a node of the model's graph


def test_gradients_that_float32_holds_do_not_count():
    # A probability's own gradient is huge, but this layer computes in float32.
    inputs = keras.Input((4,))
    h = L.Dense(3, dtype="mixed_float16", name="narrow")(inputs)
    wide = L.Dense(3, dtype="float32", name="wide")(h)
    model = keras.Model(inputs, wide)
    model.compile(loss="mse")
    x, _ = data()
    result = profile(model, x, np.ones((32, 3), "float32"))
    counted = {r.name: r.counted for r in result.variables + result.activations}
    assert counted["narrow"]
    assert counted["narrow/kernel"]
    assert not counted["wide"]
    assert not counted["wide/kernel"]
    # In a model in float32 everything counts but its output, which should stay in float32.
    counted = {r.name: r.counted for r in profile(dense(), *data()).activations}
    assert counted == {"hidden": True, "head": False}


def stateful_model():
    model = keras.Sequential(
        [
            keras.Input((3, 4), batch_size=8),
            L.SimpleRNN(4, stateful=True),
            L.BatchNormalization(),
            L.Dropout(0.5),
            L.Dense(1, kernel_regularizer="l2"),
        ]
    )
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, 3, 4)).astype("float32"), rng.normal(size=(8, 1)).astype("float32")
    model.fit(x, y, batch_size=8, verbose=0)
    return model, x, y


def state(model):
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


@pytest.mark.slow
def test_profile_leaves_model_and_optimizer_alone():
    model, x, y = stateful_model()
    before = state(model)
    policies = [layer.dtype_policy for layer in model.layers]
    profile(model, x, y, batch_size=8)
    after = state(model)
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert policies == [layer.dtype_policy for layer in model.layers]
    assert keras.Operation.__call__.__name__ == "__call__"
    assert not tf.config.functions_run_eagerly()


@pytest.mark.slow
def test_leaves_the_model_alone_also_where_it_fails():
    model, x, y = stateful_model()
    before = state(model)

    def broken(y_true, y_pred):
        raise RuntimeError("broken loss")

    with pytest.raises(RuntimeError, match="broken loss"):
        profile(model, x, y, loss=broken, batch_size=8)
    for a, b in zip(before, state(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert keras.Operation.__call__.__name__ == "__call__"
    assert not tf.config.functions_run_eagerly()


def test_building_a_model_leaves_it_freshly_built():
    model = keras.Sequential([L.BatchNormalization(), L.Dense(1)])
    model.compile(loss="mse")
    profile(model, *data())
    np.testing.assert_array_equal(model.layers[0].moving_mean, np.zeros(4))


def test_metrics_made_by_the_loss_are_reset():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [L.Dense(1, name="a")(inputs), L.Dense(1, name="b")(inputs)])
    model.compile(loss=["mse", "mae"])
    x, y = data()
    profile(model, x, [y, y])
    assert all(float(v) == 0 for v in model.metrics_variables)


@pytest.mark.parametrize(
    "form", ["x, y", "tuple", "weighted tuple", "dataset", "list", "generator", "PyDataset"]
)
def test_takes_what_fit_takes(form):
    x, y = data(16)
    parts = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 16, 8)]

    class Parts(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return parts[i]

    args = {
        "x, y": (x, y),
        "tuple": ((x, y),),
        "weighted tuple": ((x, y, np.ones(16, "float32")),),
        "dataset": (tf.data.Dataset.from_tensor_slices((x, y)).batch(8),),
        "list": (parts,),
        "generator": ((part for part in parts),),
        "PyDataset": (Parts(),),
    }[form]
    model = dense()
    result = profile(model, *args, batch_size=8)
    assert result.steps == 2
    assert result == profile(model, x, y, batch_size=8)


@pytest.mark.parametrize(("number", "steps"), [(1, 1), (None, 3)])
def test_a_data_set_counts_by_its_num_batches(number, steps):
    class Batches(keras.utils.PyDataset):
        num_batches = number

        def __getitem__(self, i):
            return data(4)

    assert profile(dense(), Batches(), steps=3).steps == steps


def test_sample_weights_scale_the_gradients():
    x, y = data()
    model = dense()
    plain, weighted = profile(model, x, y), profile(model, x, y, np.full(32, 0.25, "float32"))
    assert weighted.total.largest == pytest.approx(plain.total.largest / 4)


def test_inputs_by_name():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    model = keras.Model({"a": a, "b": b}, L.Dense(1)(L.Concatenate()([a, b])))
    model.compile(loss="mse")
    x, y = data()
    assert profile(model, {"a": x, "b": x.astype("float64")}, y).steps == 1


def test_embeddings_are_measured_in_their_used_rows():
    model = keras.Sequential([keras.Input((2,), dtype="int32"), L.Embedding(1000, 3), L.Flatten()])
    model.compile(loss="mse")
    result = profile(model, np.array([[1, 5]] * 4), np.ones((4, 6), "float32"))
    assert result.variables[0].zeros + result.variables[0].nonzero == 4 * 2 * 3


def test_models_with_a_custom_loss_need_no_targets():
    class Own(keras.layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_mean(tf.square(x)))
            return x

    model = keras.Sequential([keras.Input((4,)), L.Dense(2, name="d"), Own()])
    model.compile(optimizer="sgd")
    assert {r.name for r in profile(model, data()[0]).variables} == {"d/kernel", "d/bias"}


def test_loss_by_name_object_and_function_agree():
    x, y = data()
    model = dense()
    results = [
        profile(model, x, y, loss=loss)
        for loss in (
            None,
            "mse",
            keras.losses.MeanSquaredError(),
            lambda t, p: keras.ops.mean((t - p) ** 2, axis=-1),
        )
    ]
    assert all(r.total == results[0].total for r in results)


def test_errors_say_what_to_do():
    x, y = data()
    bare = keras.Sequential([keras.Input((4,)), L.Dense(1)])
    with pytest.raises(ValueError, match=r"compile.*loss="):
        profile(bare, x, y)
    with pytest.raises(TypeError, match=r"keras\.Model"):
        profile("model", x, y)
    with pytest.raises(ValueError, match="steps"):
        profile(dense(), x, y, steps=0)
    with pytest.raises(ValueError, match="needs targets"):
        profile(dense(), x)
    for nothing in ([], iter([])):
        with pytest.raises(ValueError, match="no batch"):
            profile(dense(), nothing)
    with pytest.raises(TypeError, match="array was expected"):
        profile(dense(), ([1, 2], [3, 4]))
    with pytest.raises(ValueError, match="find_nonfinite"):
        profile(dense(), x * np.float32(np.inf), y)


def test_a_nonfinite_batch_is_skipped_and_reported():
    x, y = data()
    bad = np.full_like(x, np.nan)
    result = profile(dense("mixed_float16"), [(x, y), (bad, y), (x, y)])
    assert (result.steps, result.skipped) == (2, 1)
    assert "1 skipped" in str(result)


def test_result_is_frozen_and_its_dictionary_is_json():
    result = profile(dense("mixed_float16", weight=2.0**-20), *data())
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.steps = 3
    read = json.loads(json.dumps(result.to_dict()))
    assert read["proposal"] == result.proposal
    assert len(read["variables"]) == len(result.variables)
    text = str(result)
    assert "lost at 2**" in text
    assert "hidden" in text


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture_leaves_matplotlib_as_it_was(tmp_path, ending):
    matplotlib = pytest.importorskip("matplotlib")
    backend = matplotlib.get_backend()
    path = tmp_path / f"range.{ending}"
    profile(dense("mixed_float16", weight=2.0**-20), *data()).plot(path)
    assert path.stat().st_size > 10_000
    assert matplotlib.get_backend() == backend
    assert (
        "matplotlib.pyplot" not in sys.modules
        or not importlib.import_module("matplotlib.pyplot").get_fignums()
    )


def test_picture_of_gradients_that_are_all_zero(tmp_path):
    _, result = known_gradient([0.0, 0.0])
    result.plot(tmp_path / "zero.png")


def test_picture_names_the_ranges_of_float16(tmp_path):
    path = tmp_path / "range.svg"
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        profile(dense(weight=2.0**-20), *data()).plot(path)
    text = path.read_text()
    for words in ("subnormal", "lost (zero)", "infinite", "hidden/kernel", "share of all values"):
        assert words in text


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    result = profile(dense(), *data())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"tfscale\[bench\]"):
        result.plot(tmp_path / "x.png")


@pytest.mark.slow
def test_mobilenet_loses_little_at_the_proposed_scale():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        base = keras.applications.MobileNetV2(
            weights=None, include_top=False, input_shape=(32, 32, 3), alpha=0.35
        )
        h = L.GlobalAveragePooling2D()(base.output)
        model = keras.Model(base.input, L.Dense(10, dtype="float32")(h))
    finally:
        keras.config.set_dtype_policy("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # So small a weight that scale 1 loses some.
    model.compile(optimizer="sgd", loss=loss, loss_weights=[2.0**-16])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 32, 32, 3)).astype("float32"), rng.integers(0, 10, 8)
    result = profile(model, x, y)
    assert isinstance(result.policy, Static)
    assert result.total.lost() > 0.01
    assert result.all_variables.lost(result.scale) < 1e-3
    assert result.all_activations.lost(result.scale) < 1e-3
