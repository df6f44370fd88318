"""Each danger is found where it is, and a model that is set up right has no finding."""

import dataclasses
import json
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tfscale.diagnostics.findings import Finding
from tfscale.diagnostics.linting import lint

L = keras.layers
NARROW = "mixed_float16"


@pytest.fixture
def policy(request):
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


narrow = pytest.mark.parametrize("policy", [NARROW], indirect=True)


def rules(model):
    findings = lint(model)
    assert all(f.where and f.why and f.fix for f in findings)
    return [f.rule for f in findings]


def chain(*layers, shape=(4,), optimizer=None, loss="mse"):
    """Layers and a float32 head, compiled with loss scaling where Keras would do it."""
    head = L.Dense(1, dtype="float32", name="head")
    model = keras.Sequential([keras.Input(shape), *layers, head])
    model.compile(optimizer=optimizer or tfscale.wrap("sgd"), loss=loss)
    return model


# ---- right models ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    [("MobileNetV2", "mixed_bfloat16"), ("ResNet50", NARROW)],
    indirect=["policy"],
)
def test_keras_applications_have_no_finding(policy, name):
    make = getattr(keras.applications, name)
    base = make(weights=None, include_top=False, input_shape=(32, 32, 3))
    h = L.GlobalAveragePooling2D()(base.output)
    model = keras.Model(base.input, L.Dense(10, "softmax", dtype="float32")(h))
    model.compile("adam", "sparse_categorical_crossentropy")
    findings = lint(model)
    assert findings == ()
    assert findings.traced


class Transformer(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = L.MultiHeadAttention(2, 8, dropout=0.1)
        self.norms = [L.LayerNormalization(epsilon=1e-12), L.LayerNormalization()]
        self.mlp = keras.Sequential([L.Dense(32, "gelu"), L.Dense(16), L.Dropout(0.1)])

    def call(self, x):
        x = self.norms[0](x + self.attention(x, x, use_causal_mask=True))
        return self.norms[1](x + self.mlp(x))


@pytest.mark.parametrize(
    ("subclassed", "policy"), [(False, NARROW), (True, "mixed_bfloat16")], indirect=["policy"]
)
def test_transformer_has_no_finding(policy, subclassed):
    layers = [L.Embedding(50, 16), Transformer(), L.Dense(50, dtype="float32")]

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = layers

        def call(self, x):
            for part in self.parts:
                x = part(x)
            return x

    if subclassed:
        model = Subclassed()
        model(np.zeros((2, 6), "int32"))
    else:
        model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    findings = lint(model)
    assert findings == ()
    assert findings.traced
    assert "no finding" in str(findings)


@narrow
def test_recurrent_and_conv_models_have_no_finding(policy):
    text = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            L.Embedding(9, 8),
            L.LSTM(8),
            L.Dense(1, dtype="float32"),
        ]
    )
    text.compile("adam", "mse")
    assert lint(text) == ()
    image = chain(
        L.Conv2D(4, 3), L.GroupNormalization(2), L.UpSampling2D(), L.Flatten(), shape=(8, 8, 3)
    )
    assert lint(image) == ()


@narrow
def test_small_router_in_float32_is_on_purpose(policy):
    inputs = keras.Input((64,))
    h = L.Dense(64)(inputs)
    gate = L.Dense(2, "softmax", dtype="float32")(h)
    experts = [L.Dense(64)(h) for _ in range(2)]
    mixed = sum(e * gate[:, i : i + 1] for i, e in enumerate(experts))
    model = keras.Model(inputs, L.Dense(1, dtype="float32")(L.Dense(64)(mixed)))
    assert "wide-layer" not in rules(model)


# ---- operations --------------------------------------------------------------------------------


def test_output_in_float16():
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, "softmax", dtype=NARROW, name="out")])
    (finding,) = lint(model)
    assert (finding.rule, finding.where) == ("float16-output", "out")
    assert "softmax" in finding.why
    assert 'dtype="float32"' in finding.fix


def test_softmax_in_float16_that_is_cast_afterwards():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            L.Dense(3, "softmax", dtype=NARROW, name="out"),
            L.Activation("linear", dtype="float32"),
        ]
    )
    (finding,) = lint(model)
    assert (finding.rule, finding.where) == ("float16-softmax", "out")


class Pool(L.Layer):
    def call(self, x):
        return tf.reduce_mean(x, axis=[1, 2])


def test_mean_over_more_elements_than_float16_counts():
    model = chain(Pool(dtype=NARROW, name="pool"), shape=(64, 64, 3))
    (finding,) = lint(model)
    assert (finding.rule, finding.where) == ("long-sum", "pool")
    assert "4,096" in finding.why
    # What the rule says is so: the mean of ones is not one.
    if not tf.config.list_physical_devices("GPU"):
        assert float(tf.reduce_mean(tf.ones([2, 64, 64, 3], tf.float16), [1, 2])[0, 0]) == 0.5
    assert lint(chain(Pool(dtype=NARROW), shape=(32, 32, 3))) == ()
    assert lint(chain(Pool(dtype="float32"), shape=(64, 64, 3))) == ()


class Normalize(L.Layer):
    def __init__(self, how, epsilon, **kwargs):
        super().__init__(**kwargs)
        self.how = how
        self.epsilon = epsilon

    def call(self, x):
        if self.how == "divide":
            return x / (tf.abs(x) + self.epsilon)
        if self.how == "log":
            return tf.math.log(tf.maximum(x, self.epsilon))
        if self.how == "clip":
            return tf.math.log(tf.clip_by_value(x, self.epsilon, 1.0))
        if self.how == "sqrt":
            return tf.sqrt(tf.square(x) + self.epsilon)
        if self.how == "l2":
            return tf.nn.l2_normalize(x, axis=-1, epsilon=self.epsilon)
        wide = tf.cast(x, tf.float32)
        return tf.cast(wide / (tf.abs(wide) + self.epsilon), x.dtype)


@pytest.mark.parametrize("how", ["divide", "log", "clip", "sqrt", "l2"])
def test_epsilon_that_is_zero_in_float16(how):
    (finding,) = lint(chain(Normalize(how, 1e-8, dtype=NARROW, name="norm")))
    assert (finding.rule, finding.where) == ("epsilon", "norm")
    assert lint(chain(Normalize(how, 1e-3, dtype=NARROW))) == ()
    assert lint(chain(Normalize(how, 1e-8, dtype="float32"))) == ()


def test_float32_epsilon_in_a_float16_layer_is_right():
    assert lint(chain(Normalize("in float32", 1e-8, dtype=NARROW))) == ()


def test_limit_that_is_infinite_in_float16():
    # It divides by no less than 1e-12: in float16 a row of zeros becomes NaN.
    (finding,) = lint(chain(L.UnitNormalization(dtype=NARROW, name="unit")))
    assert (finding.rule, finding.where) == ("limit", "unit")


@narrow
def test_layer_left_in_float32_between_narrower_ones(policy):
    model = chain(L.Dense(8), L.Dense(8, dtype="float32", name="left"), L.Dense(8))
    (finding,) = lint(model)
    assert (finding.rule, finding.where) == ("wide-layer", "left")
    assert "float32" in finding.why


@narrow
def test_layer_in_float64_is_named_with_its_dtype(policy):
    (finding,) = lint(chain(L.Dense(8), L.Dense(8, dtype="float64", name="far"), L.Dense(8)))
    assert finding.where == "far"
    assert "float64" in finding.why


def test_innermost_layer_is_named_among_equal_names():
    class Outer(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inside = [Normalize("divide", 1e-3, name="norm", dtype=NARROW)]
            self.inside.append(Normalize("divide", 1e-8, name="norm_1", dtype=NARROW))

        def call(self, x):
            return self.inside[1](self.inside[0](x))

    (finding,) = lint(chain(Outer(name="outer", dtype=NARROW)))
    assert finding.where == "outer/norm_1"


# ---- layers ------------------------------------------------------------------------------------


def test_both_halves_in_one_model():
    model = chain(
        L.Dense(4, dtype=NARROW),
        L.Dense(4, dtype=NARROW),
        L.Dense(4, "relu", dtype="mixed_bfloat16"),
    )
    (finding,) = lint(model)
    assert finding.rule == "mixed-halves"
    assert "mixed_float16" in finding.fix


def test_float16_variables_without_masters():
    optimizer = tfscale.wrap("sgd", master_weights=False)
    model = chain(L.Dense(4, dtype="float16", name="pure"), optimizer=optimizer)
    (finding,) = lint(model)
    assert finding.rule == "float16-variables"
    assert "pure/kernel" in finding.where
    assert "1 more" in finding.where
    optimizer.build(model.trainable_variables)
    assert rules(model) == ["float16-variables"]


def test_float16_variables_with_masters_lose_nothing():
    optimizer = tfscale.wrap(keras.optimizers.Adam(epsilon=1e-8))
    model = chain(L.Dense(4, dtype="float16"), optimizer=optimizer)
    optimizer.build(model.trainable_variables)
    assert optimizer.masters
    assert rules(model) == []


@pytest.mark.xfail(
    not hasattr(tfscale.LossScaleOptimizer, "master_weights"),
    reason="the setting is not public yet",
    strict=True,
)
@pytest.mark.parametrize("setting", ["auto", True])
def test_masters_to_come_are_known_by_the_setting(setting):
    optimizer = tfscale.wrap(keras.optimizers.Adam(epsilon=1e-8), master_weights=setting)
    assert rules(chain(L.Dense(4, dtype="float16"), optimizer=optimizer)) == []


def test_built_before_it_was_wrapped_has_no_masters():
    inner = keras.optimizers.SGD()
    model = chain(L.Dense(4, dtype="float16"), optimizer=inner)
    inner.build(model.trainable_variables)
    model.compile(tfscale.wrap(inner), "mse")
    assert rules(model) == ["float16-variables"]


def test_of_a_model_never_called_only_settings_count():
    class Unknown(keras.Model):
        def __init__(self):
            super().__init__()
            self.norms = {"a": [Normalize("divide", 1e-8, dtype=NARROW, name="norm")]}

        def call(self, x):
            return self.norms["a"][0](x)

    findings = lint(Unknown())
    assert not findings.traced
    assert [f.where for f in findings] == ["norm"]
    assert "Call the model on a batch first" in str(findings)


# ---- what it is compiled with ------------------------------------------------------------------


@narrow
def test_float16_without_loss_scaling(policy):
    model = chain(L.Dense(4))
    model.compile("sgd", "mse", auto_scale_loss=False)
    assert rules(model) == ["no-loss-scaling"]
    model.compile(keras.optimizers.SGD(loss_scale_factor=128.0), "mse", auto_scale_loss=False)
    assert rules(model) == []
    model.compile("sgd", "mse")
    assert rules(model) == []


def test_keras_does_not_scale_one_float16_layer():
    model = chain(L.Dense(4, dtype=NARROW), optimizer="sgd")
    assert rules(model) == ["no-loss-scaling"]


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_loss_scaling_that_nothing_needs(dtype):
    inner = keras.optimizers.SGD()
    for optimizer in (
        keras.optimizers.LossScaleOptimizer(inner),
        tfscale.wrap(keras.optimizers.SGD(), tfscale.Dynamic()),
        tfscale.wrap(keras.optimizers.SGD(), 1024.0),
    ):
        assert rules(chain(L.Dense(4, dtype=dtype), optimizer=optimizer)) == [
            "needless-loss-scaling"
        ]
    for policy in ("auto", "none"):
        optimizer = tfscale.wrap(keras.optimizers.SGD(), policy)
        assert rules(chain(L.Dense(4, dtype=dtype), optimizer=optimizer)) == []


@narrow
@pytest.mark.parametrize(
    ("name", "value"),
    [("clipnorm", 1.0), ("global_clipnorm", 1.0), ("weight_decay", 0.1), ("use_ema", True)],
)
def test_setting_that_only_the_inner_optimizer_reads(policy, name, value):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    setattr(optimizer, name, value)
    (finding,) = lint(chain(L.Dense(4), optimizer=optimizer))
    assert finding.rule == "setting-on-wrapper"
    assert f"inner_optimizer.{name} = {value!r}" in finding.fix
    right = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(**{name: value}))
    assert lint(chain(L.Dense(4), optimizer=right)) == ()
    ours = tfscale.wrap(keras.optimizers.SGD())
    setattr(ours, name, value)
    assert lint(chain(L.Dense(4), optimizer=ours)) == ()


@narrow
def test_scaling_twice(policy):
    twice = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    )
    assert rules(chain(L.Dense(4), optimizer=twice)) == ["scaled-twice"]
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.inner_optimizer.loss_scale_factor = 4.0
    assert rules(chain(L.Dense(4), optimizer=optimizer)) == ["scaled-twice"]


def test_epsilon_of_the_optimizer_in_float16_variables():
    optimizer = tfscale.wrap(keras.optimizers.Adam(epsilon=1e-8), master_weights=False)
    model = chain(L.Dense(4, dtype="float16"), optimizer=optimizer)
    assert rules(model) == ["float16-variables", "epsilon"]
    assert rules(chain(L.Dense(4, dtype=NARROW), optimizer=optimizer)) == []


@narrow
def test_loss_computed_in_float16(policy):
    loss = keras.losses.MeanSquaredError(dtype="float16")
    (finding,) = lint(chain(L.Dense(4), loss=loss))
    assert finding.rule == "float16-loss"
    assert "mean_squared_error" in finding.where
    assert lint(chain(L.Dense(4), loss=keras.losses.MeanSquaredError())) == ()


def own_step(scale, clip, unscale):
    class Own(keras.Model):
        if clip and unscale:

            def train_step(self, batch):
                x, y = batch
                with tf.GradientTape() as tape:
                    loss = self.optimizer.scale_loss(self.compute_loss(y=y, y_pred=self(x)))
                grads = self.optimizer.unscale(tape.gradient(loss, self.trainable_variables))
                grads, _ = tf.clip_by_global_norm(grads, 1.0)
                self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))

        elif clip:

            @tf.function
            def train_step(self, batch):
                x, y = batch
                with tf.GradientTape() as tape:
                    loss = self.optimizer.scale_loss(self.compute_loss(y=y, y_pred=self(x)))
                grads = tape.gradient(loss, self.trainable_variables)
                grads, _ = tf.clip_by_global_norm(grads, 1.0)
                self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))

        elif scale:

            def train_step(self, batch):
                def loss_of(x, y):
                    return self.optimizer.scale_loss(self.compute_loss(y=y, y_pred=self(x)))

                with tf.GradientTape() as tape:
                    loss = loss_of(*batch)
                grads = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))

        else:

            def train_step(self, batch):
                x, y = batch
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(y=y, y_pred=self(x))
                grads = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))

    inputs = keras.Input((4,))
    outputs = L.Dense(1, dtype="float32")(L.Dense(4)(inputs))
    model = Own(inputs, outputs)
    model.compile(tfscale.wrap("sgd"), "mse")
    return model


@narrow
@pytest.mark.parametrize(
    ("scale", "clip", "unscale", "expected"),
    [
        (False, False, False, ["loss-not-scaled"]),
        (True, False, False, []),
        (True, True, False, ["clips-scaled-gradients"]),
        (True, True, True, []),
    ],
)
def test_train_step_unscaled_or_clipping_too_early(policy, scale, clip, unscale, expected):
    assert rules(own_step(scale, clip, unscale)) == expected


def applies_unscaled(optimizer, verb):
    class Own(keras.Model):
        if verb == "apply":

            def train_step(self, batch):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(y=batch[1], y_pred=self(batch[0]))
                self.optimizer.apply(tape.gradient(loss, self.trainable_variables))

        else:

            def train_step(self, batch):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(y=batch[1], y_pred=self(batch[0]))
                grads = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))

    inputs = keras.Input((4,))
    model = Own(inputs, L.Dense(1, dtype="float32")(L.Dense(4, dtype="mixed_float16")(inputs)))
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize("verb", ["apply", "apply_gradients"])
@pytest.mark.parametrize(
    ("make", "dividing"),
    [
        (tfscale.wrap, ()),
        (tfscale.LossScaleOptimizer, ("apply", "apply_gradients")),
        (keras.optimizers.LossScaleOptimizer, ("apply", "apply_gradients")),
    ],
    ids=["wrap", "drop-in", "keras"],
)
def test_an_unscaled_loss_is_reported_with_its_effect(make, dividing, verb):
    model = applies_unscaled(make(keras.optimizers.SGD(1.0)), verb)
    (finding,) = lint(model)
    assert finding.rule == "loss-not-scaled"
    expected = "hardly learns" if verb in dividing else "applied as they are"
    assert expected in finding.why
    # And so it does.
    variable = model.trainable_variables[0]
    before = variable.numpy()
    ones = [tf.ones_like(v) for v in model.trainable_variables]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfscale.LossScaleWarning)
        if verb == "apply":
            model.optimizer.apply(ones, model.trainable_variables)
        else:
            model.optimizer.apply_gradients(zip(ones, model.trainable_variables, strict=True))
    moved = float(np.abs(variable.numpy() - before).max())
    assert moved == pytest.approx(2.0**-15 if verb in dividing else 1.0, rel=1e-2)


# ---- the report --------------------------------------------------------------------------------


def test_report_reads_well_and_findings_are_frozen():
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, dtype="float16", name="out")])
    findings = lint(model)
    assert len(findings) == 2
    text = str(findings)
    assert text.startswith(f"{model.name}: 2 findings")
    assert all(f.where in text and f.fix in text for f in findings)
    with pytest.raises(dataclasses.FrozenInstanceError):
        findings[0].why = ""
    assert Finding(**json.loads(json.dumps(findings[0].to_dict()))) == findings[0]


def test_the_old_name_of_fix_works_and_warns():
    with pytest.warns(DeprecationWarning, match="`fix`"):
        old = Finding("rule", "where", "why", mend="line")
    assert old == Finding("rule", "where", "why", "line") == dataclasses.replace(old)
    with pytest.warns(DeprecationWarning, match="`fix`") as caught:
        assert old.mend == "line"
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match="`fix`"):
        Finding("rule", "where", "why")


@pytest.mark.slow
@narrow
def test_model_is_left_as_it_was(policy):
    model = chain(
        L.Dense(4),
        L.BatchNormalization(),
        L.Dropout(0.5),
        L.ActivityRegularization(0.1, dtype="float32"),
        optimizer=tfscale.wrap("sgd", 8.0),
    )
    model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in model.variables]
    assert lint(model) == ()
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
    assert not any(tf.is_symbolic_tensor(loss) for loss in model.losses)
    assert keras.Operation.__call__.__name__ == "__call__"
    model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)


def test_a_model_is_asked_for():
    with pytest.raises(TypeError, match=r"keras\.Model"):
        lint("model")
