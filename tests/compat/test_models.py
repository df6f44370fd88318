"""Keras' layers, models and trainer answer what `tfscale._compat` asks them."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfscale import _compat
from tfscale._compat.models import build_from_local_batch

L = keras.layers


class Nested(L.Layer):
    """A layer with a layer and a metric in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = L.BatchNormalization()
        self.mean = keras.metrics.Mean()

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        self.mean.update_state(tf.reduce_sum(x))
        return self.inner(x, training=training)


def nested_model() -> keras.Model:
    x = keras.Input((2,))
    return keras.Model(x, L.Dense(1)(L.Dropout(0.5)(Nested()(x))))


def ids(variables: list[keras.Variable]) -> set[int]:
    return {id(v) for v in variables}


def test_layers_and_their_variables() -> None:
    model = nested_model()
    nested = model.layers[1]
    assert _compat.sub_layers(nested) == [nested.inner]
    assert nested.inner in _compat.sub_layers(model)
    assert _compat.sub_layers(model, deep=False) == model.layers
    assert _compat.sub_layers(object.__new__(Nested)) == []
    assert _compat.own_variables(nested) == []
    assert _compat.own_variables(nested, deep=True) == [nested.inner.gamma, nested.inner.beta]
    statistics = [nested.inner.moving_mean, nested.inner.moving_variance]
    assert ids(statistics) <= ids(_compat.state_variables(model))
    assert not ids(_compat.state_variables(model)) & ids(model.trainable_variables)


def test_live_layers_are_those_that_something_holds() -> None:
    layer = L.Dense(1)
    model = nested_model()
    alive = {id(each) for each in _compat.live_layers()}
    assert {id(layer), id(model), id(model.layers[1].inner)} <= alive


def test_a_model_is_found_by_its_optimizer() -> None:
    model = nested_model()
    model.compile("sgd", loss="mse")
    assert _compat.model_of(model.optimizer) is model
    assert _compat.model_of(keras.optimizers.SGD()) is None


def test_logs_are_hidden_from_lists_only() -> None:
    class Logging(keras.Model):
        def train_step(self, data: Any) -> dict[str, float]:
            return {"loss": 1.0, "more": 2.0}

    model = Logging()
    model.compile("sgd", run_eagerly=True)
    _compat.hide_from_lists(model, ["more"])
    x = np.ones((2, 1))
    assert model.train_on_batch(x) == 1.0
    assert model.train_on_batch(x, return_dict=True) == {"loss": 1.0, "more": 2.0}


def test_state_variables_are_those_a_call_writes() -> None:
    spectral = L.SpectralNormalization(L.Dense(1))
    model = keras.Sequential([keras.Input((2,)), L.Dense(2, trainable=False), spectral])
    found = ids(_compat.state_variables(model))
    assert id(model.layers[0].kernel) not in found
    assert id(spectral.kernel) in found


def test_parts_of_a_train_step() -> None:
    model = nested_model()
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    x, y = tf.ones((4, 2)), tf.ones((4, 1))
    _compat.build(model, (x, y, None))
    assert model.optimizer.built
    found = ids(_compat.metric_variables(model))
    for metric in (model.layers[1].mean, _compat.loss_tracker(model), *model.metrics):
        assert metric.variables
        assert ids(metric.variables) <= found
    mean = model.layers[1].inner.moving_mean.numpy()
    y_pred = _compat.forward(model, x)
    assert not np.array_equal(model.layers[1].inner.moving_mean.numpy(), mean)  # in training
    loss = _compat.compute_loss(model, x, y, y_pred, None)
    np.testing.assert_allclose(loss, tf.reduce_mean((y_pred - y) ** 2), rtol=1e-6)


def test_model_is_built_from_a_local_batch() -> None:
    model = keras.Sequential([L.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    build_from_local_batch(model)
    x = np.ones((4, 2), "float32")
    model.fit(tf.data.Dataset.from_tensors((x, x[:, :1])), verbose=0, shuffle=False)
    assert model.built
    assert len(model.trainable_variables) == 2


def test_fit_of_one_worker_is_not_patched() -> None:
    model = keras.Sequential([L.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    _compat.patch_fit(model)
    assert not {"train_step", "test_step"} & set(vars(model))


def test_undo_replica_mean(two_replicas: tf.distribute.Strategy) -> None:
    model = keras.Sequential([keras.Input((2,)), L.Dense(1)])
    model.compile(loss="mse")
    x, y = tf.ones((4, 2)), tf.ones((4, 1))
    one = _compat.compute_loss(model, x, y, model(x), None)
    np.testing.assert_array_equal(_compat.undo_replica_mean(one), one)

    def replica() -> Any:
        return _compat.undo_replica_mean(_compat.compute_loss(model, x, y, model(x), None))

    for loss in two_replicas.run(replica).values:
        np.testing.assert_allclose(loss, one, rtol=1e-6)


def test_progress_bar_shows_a_count() -> None:
    bar = keras.utils.Progbar(target=2, verbose=1)
    for count in (1, 2):
        bar.update(count, [("skips", _compat.for_logs(tf.constant(1, tf.int64)))])
    assert float(_compat.for_logs(tf.constant(3, tf.int64))) == 3


def test_forward_without_a_training_argument() -> None:
    class Bare(keras.Model):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return 2.0 * x

    assert float(_compat.forward(Bare(), tf.ones(()))) == 2.0


def test_casts_are_found_where_they_are_operations() -> None:
    x = keras.Input((2,))
    layers = [L.Dense(1, dtype="mixed_float16"), L.Dense(1)]
    for model in (keras.Sequential([x, *layers]), keras.Model(x, layers[1](layers[0](x)))):
        dtypes = [cast.dtype for cast in _compat.casts(model)]
        assert dtypes == (["float16", "float32"] if _compat.KERAS < (3, 10) else [])
    assert _compat.casts(layers[0]) == []


def test_functional_models() -> None:
    x = keras.Input((2,))
    assert _compat.makes_functional((x, x), {})
    assert _compat.makes_functional((x,), {"outputs": x})
    assert _compat.makes_functional((), {"inputs": x, "outputs": x})
    assert not _compat.makes_functional((), {"name": "x"})
    assert isinstance(keras.Model(x, L.Dense(1)(x)), _compat.Functional)


class Watch(keras.callbacks.Callback):
    def __init__(self, watched: list[str]) -> None:
        super().__init__()
        self.watched = watched

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.watched.append(f"{self.model.name} {epoch}")


class Watched(list[str]):
    """A list that can be referred to weakly."""


def test_a_callback_joins_the_fit_that_runs() -> None:
    seen = Watched()

    class Inner(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            for _ in range(2):  # it joins once
                _compat.add_to_fit(seen, Watch)
            return super().train_step(data)

    inputs = keras.Input((2,))
    model = Inner(inputs, L.Dense(1)(inputs), name="inner")
    model.compile("sgd", "mse", run_eagerly=False, jit_compile=False)
    x, y = np.ones((2, 2)), np.ones((2, 1))
    _compat.add_to_fit(seen, Watch)  # no `fit` runs
    model.fit(x, y, epochs=2, verbose=0)
    assert seen == ["inner 0", "inner 1"]
    seen.clear()
    model.fit(x, y, verbose=0)  # which traces nothing
    assert seen == ["inner 0"]


@pytest.mark.parametrize("owner", [object, keras.Model])
def test_a_callback_joins_no_fit_but_that_of_keras(owner: type) -> None:
    def fit(self: Any) -> int:
        callbacks = keras.callbacks.CallbackList([Broken()])
        _compat.add_to_fit(Watched(), Watch)
        return len(callbacks.callbacks)

    assert fit(None) == type("Loop", (owner,), {"fit": fit})().fit() == 1


class Broken(keras.callbacks.Callback):
    @property
    def watched(self) -> Any:
        raise RuntimeError("a property of the user's")


def test_a_callback_of_the_user_is_not_asked_for_names() -> None:
    seen = Watched()

    class Model(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            _compat.add_to_fit(seen, Watch)
            return super().train_step(data)

    model = Model([keras.Input((2,)), L.Dense(1)], name="model")
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[Broken()])
    assert seen == ["model 0"]


def test_a_replaced_fit_of_the_class_is_still_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watched()
    original = keras.Model.fit
    monkeypatch.setattr(keras.Model, "fit", lambda *args, **kwargs: original(*args, **kwargs))
    model = keras.Sequential([keras.Input((2,)), L.Dense(1)], name="model")
    model.compile("sgd", "mse", run_eagerly=True)
    steps = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda *_, **__: _compat.add_to_fit(seen, Watch)
    )
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[steps])
    assert seen == ["model 0"]
