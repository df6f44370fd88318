"""Models with a `train_step` of their own, in the shape of examples of keras.io, but tiny."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.model_optimizers import optimizers_of

L = keras.layers


def data(n=16, width=4):
    return np.random.default_rng(0).normal(size=(n, width)).astype("float32")


def mlp(name, width, *units):
    """Dense layers `name_0`, `name_1` and so on; the last one in float32."""
    last = len(units) - 1
    dense = [
        L.Dense(n, "relu" if i < last else None, name=f"{name}_{i}", **_float32_if(i == last))
        for i, n in enumerate(units)
    ]
    return keras.Sequential([keras.Input((width,)), *dense], name=name)


def _float32_if(last):
    return {"dtype": "float32"} if last else {}


def update(optimizer, tape, scaled, network):
    weights = network.trainable_weights
    optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))


class Adversaries(keras.Model):
    """Two networks, each with an optimizer (DCGAN)."""

    def __init__(self):
        super().__init__(name="adversaries")
        self.discriminator = mlp("discriminator", 4, 8, 1)
        self.generator = mlp("generator", 3, 8, 4)

    def compile(self, d_optimizer, g_optimizer, **arguments):
        super().compile(**arguments)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, real):
        n = tf.shape(real)[0]
        fake = self.generator(tf.random.normal((n, 3)))
        labels = tf.concat([tf.ones((n, 1)), tf.zeros((n, 1))], 0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(tf.concat([fake, real], 0)))
            scaled = self.d_optimizer.scale_loss(d_loss)
        update(self.d_optimizer, tape, scaled, self.discriminator)
        return {"d_loss": d_loss, "g_loss": self.train_generator(n)}

    def train_generator(self, n):
        with tf.GradientTape() as tape:
            fake = self.generator(tf.random.normal((n, 3)))
            g_loss = self.loss_fn(tf.zeros((n, 1)), self.discriminator(fake))
            scaled = self.g_optimizer.scale_loss(g_loss)
        update(self.g_optimizer, tape, scaled, self.generator)
        return g_loss


class Cycle(keras.Model):
    """Four networks, four optimizers in a dictionary, one tape (CycleGAN)."""

    def __init__(self):
        super().__init__(name="cycle")
        self.to_y, self.to_x = mlp("to_y", 4, 8, 4), mlp("to_x", 4, 8, 4)
        self.judge_x, self.judge_y = mlp("judge_x", 4, 4, 1), mlp("judge_y", 4, 4, 1)

    def compile(self, **optimizers):
        super().compile()
        self.optimizers = optimizers

    def train_step(self, batch):
        x, y = batch
        mean = tf.reduce_mean
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.to_y(x, training=True), self.to_x(y, training=True)
            cycled = mean(tf.abs(self.to_x(fake_y) - x)) + mean(tf.abs(self.to_y(fake_x) - y))
            losses = {
                "to_y": mean((self.judge_y(fake_y) - 1) ** 2) + cycled,
                "to_x": mean((self.judge_x(fake_x) - 1) ** 2) + cycled,
                "judge_x": mean(self.judge_x(fake_x) ** 2 + (self.judge_x(x) - 1) ** 2),
                "judge_y": mean(self.judge_y(fake_y) ** 2 + (self.judge_y(y) - 1) ** 2),
            }
            scaled = {name: self.optimizers[name].scale_loss(losses[name]) for name in losses}
        for name, loss in scaled.items():
            update(self.optimizers[name], tape, loss, getattr(self, name))
        return losses


class Contrastive(keras.Model):
    """An encoder that is built by its first call, a probe with an optimizer of its own (SimCLR)."""

    def __init__(self):
        super().__init__(name="contrastive")
        self.augment = L.GaussianNoise(0.1, dtype="float32")
        self.encoder = keras.Sequential(
            [L.Dense(8, "relu"), L.BatchNormalization(), L.Dense(4, dtype="float32")],
            name="encoder",
        )
        self.probe = mlp("probe", 4, 2)

    def compile(self, contrastive_optimizer, probe_optimizer, **arguments):
        super().compile(**arguments)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.accuracy]

    def train_step(self, batch):
        x, labels = batch
        with tf.GradientTape() as tape:
            one, two = (
                tf.math.l2_normalize(self.encoder(self.augment(x, training=True), training=True), 1)
                for _ in range(2)
            )
            target = tf.range(tf.shape(x)[0])
            logits = tf.matmul(one, two, transpose_b=True)
            loss = keras.losses.sparse_categorical_crossentropy(target, logits, from_logits=True)
            scaled = self.contrastive_optimizer.scale_loss(loss)  # a loss for each sample
        update(self.contrastive_optimizer, tape, scaled, self.encoder)
        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(x, training=False))
            scaled = self.probe_optimizer.scale_loss(self.probe_loss(labels, logits))
        update(self.probe_optimizer, tape, scaled, self.probe)
        self.accuracy.update_state(labels, logits)
        return {"c_loss": tf.reduce_mean(loss), "p_acc": self.accuracy.result()}


class Autoencoder(keras.Model):
    """No `call` and no loss of `compile` (the variational autoencoder)."""

    def __init__(self):
        super().__init__(name="autoencoder")
        self.encoder, self.decoder = mlp("encoder", 4, 8, 4), mlp("decoder", 2, 8, 4)
        self.seed = keras.random.SeedGenerator(0)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def train_step(self, x):
        with tf.GradientTape() as tape:
            mean, log_var = tf.split(self.encoder(x), 2, axis=1)
            noise = keras.random.normal(tf.shape(mean), seed=self.seed)
            decoded = self.decoder(mean + tf.exp(0.5 * log_var) * noise)
            divergence = -0.5 * (1 + log_var - mean**2 - tf.exp(log_var))
            loss = tf.reduce_mean((decoded - x) ** 2) + tf.reduce_mean(divergence)
            scaled = self.optimizer.scale_loss(loss)
        update(self.optimizer, tape, scaled, self)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


class Distiller(keras.Model):
    """A student that learns from a frozen teacher (knowledge distillation)."""

    def __init__(self):
        super().__init__(name="distiller")
        self.teacher, self.student = mlp("teacher", 4, 8, 3), mlp("student", 4, 4, 3)
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def train_step(self, batch):
        x, labels = batch
        soft = keras.losses.KLDivergence()
        wanted = tf.nn.softmax(self.teacher(x, training=False) / 3.0)
        with tf.GradientTape() as tape:
            found = self.student(x, training=True)
            hard = self.compute_loss(x, labels, found)
            loss = hard + soft(wanted, tf.nn.softmax(found / 3.0))
            scaled = self.optimizer.scale_loss(loss)
        update(self.optimizer, tape, scaled, self.student)
        return {"loss": loss}


class Diffusion(keras.Model):
    """Predicts noise, and keeps a moving average of its network (denoising diffusion)."""

    def __init__(self):
        super().__init__(name="diffusion")
        self.network, self.average = mlp("network", 5, 8, 4), mlp("average", 5, 8, 4)
        self.average.set_weights(self.network.get_weights())

    def train_step(self, x):
        time = tf.random.uniform((tf.shape(x)[0], 1))
        noise = tf.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            noisy = tf.sqrt(1 - time) * x + tf.sqrt(time) * noise
            predicted = self.network(tf.concat([noisy, time], 1), training=True)
            loss = self.loss(noise, predicted)
            scaled = self.optimizer.scale_loss(loss)
        update(self.optimizer, tape, scaled, self.network)
        for weight, mean in zip(self.network.weights, self.average.weights, strict=True):
            mean.assign(0.99 * mean + 0.01 * weight)
        return {"loss": loss}


def wrap(**settings):
    return tfscale.wrap(keras.optimizers.Adam(1e-2), "dynamic", **settings)


def adversaries(**arguments):
    model = Adversaries()
    model.compile(wrap(), wrap(), **arguments)
    return model


def cycle():
    model = Cycle()
    model.compile(to_y=wrap(), to_x=wrap(), judge_x=wrap(), judge_y=wrap())
    return model


def contrastive(**arguments):
    model = Contrastive()
    model.compile(wrap(), wrap(), **arguments)
    return model


def autoencoder(**arguments):
    model = Autoencoder()
    model.compile(wrap(), **arguments)
    return model


def distiller(**arguments):
    model = Distiller()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrap(), loss=loss, **arguments)
    return model


def diffusion(**arguments):
    model = Diffusion()
    model.compile(wrap(), loss=keras.losses.MeanSquaredError(), **arguments)
    return model


def batch_of(make, n=16):
    """A batch that the model of `make` takes."""
    x = data(n)
    if make is cycle:
        return x, x[::-1].copy()
    return (x, np.arange(n) % 2) if make in (contrastive, distiller) else x


def everything_of(model):
    """The values of all that a training step may write."""
    optimizers = optimizers_of(model).values()
    variables = [*model.variables, *(v for o in optimizers for v in o.variables)]
    variables += [v for metric in model.metrics for v in metric.variables]
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]
