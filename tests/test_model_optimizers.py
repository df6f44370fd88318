"""Every optimizer that the step of a model uses is found, by the attribute that holds it."""

import keras
import own_steps

import tfscale
from tfscale.model_optimizers import optimizers_of


def test_optimizers_in_attributes_and_dictionaries():
    assert list(optimizers_of(own_steps.adversaries())) == ["d_optimizer", "g_optimizer"]
    four = [f"optimizers_{name}" for name in ("to_y", "to_x", "judge_x", "judge_y")]
    assert list(optimizers_of(own_steps.cycle())) == four
    assert list(optimizers_of(own_steps.autoencoder())) == ["optimizer"]


def test_optimizers_that_no_step_uses_are_not_listed():
    model = own_steps.adversaries()
    model.compile(own_steps.wrap(), own_steps.wrap(), optimizer=own_steps.wrap())
    model.spare = [own_steps.wrap()]
    assert list(optimizers_of(model)) == ["d_optimizer", "g_optimizer"]


def test_optimizers_of_a_step_that_calls_keras_step():
    class Own(keras.Model):
        def train_step(self, batch):
            return super().train_step(batch)

    inputs = keras.Input((4,))
    model = Own(inputs, keras.layers.Dense(1)(inputs))
    model.compile(own_steps.wrap(), "mse")
    assert list(optimizers_of(model)) == ["optimizer"]


def test_optimizers_of_an_unreadable_step_are_all_that_are_held():
    class Own(keras.Model):
        def train_step(self, batch):
            return getattr(self, "st" + "ep")(batch)

    model = Own()
    model.compile(None)
    model.mine = model.alias = own_steps.wrap()
    assert list(optimizers_of(model)) == ["mine"]


def test_lint_judges_by_the_optimizers_of_the_step():
    keras.config.set_dtype_policy("mixed_float16")
    assert not tfscale.lint(own_steps.adversaries())
    model = own_steps.adversaries()
    model.compile(own_steps.wrap(), keras.optimizers.Adam())
    (finding,) = tfscale.lint(model)
    assert (finding.rule, finding.where) == ("no-loss-scaling", "optimizer 'g_optimizer'")
