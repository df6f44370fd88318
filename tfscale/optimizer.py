"""The optimizer that users see: it scales the loss, and unscales and checks the gradients.

`LossScaleOptimizer` subclasses Keras' class, so that `compile()` does not wrap it again and
`isinstance` checks hold. It keeps Keras' variables and their order, so that files work with both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfscale import (
    _compat,
    eager_log,
    gradients,
    misuse,
    policies,
    replicas,
    saving,
    settings,
    validation,
)
from tfscale.handoff import Handoff
from tfscale.inner_attributes import InnerAttributes
from tfscale.keras2 import Keras2Names
from tfscale.master_weights import Masters
from tfscale.record import Record
from tfscale.reporting import Reports
from tfscale.scaling import Scaling
from tfscale.settings import Settings
from tfscale.step import Step, apply_steps, count_overflow

do_not_convert = tf.autograph.experimental.do_not_convert
Structure = TypeVar("Structure")  # a tensor, or lists, tuples and dicts of tensors


@keras.saving.register_keras_serializable(package="tfscale")
class LossScaleOptimizer(Keras2Names, InnerAttributes, Settings):
    """Wraps an optimizer: scales the loss, unscales and checks the gradients, skips bad steps.

    `tfscale.wrap` is the usual way to make one. The constructor is that of
    `keras.optimizers.LossScaleOptimizer`, which this class can replace anywhere.

    A skipped step changes only the scale and the counters. Variables, slots, `iterations`,
    schedules, moving averages and accumulators stay as they were.

    Attributes that only the inner optimizer has are read and set through this one: `weight_decay`,
    `clipnorm`, `use_ema`, `gradient_accumulation_steps`, `momentum` and the like.

    Args:
        inner_optimizer: the `keras.optimizers.Optimizer` that updates the variables.
        initial_scale: scale of the first step; None means 2**15.
        dynamic_growth_steps: applied steps in a row until the scale grows; None means 2000.
        name: name of this optimizer.
        policy: a policy (`Dynamic`, `Static`, `NoScaling`, `Auto`), its name, or a number for
            `Static`. None means, as in Keras, `Dynamic` with the two arguments above.
        update: "auto", "cond", "select" or "compiled": how a step is skipped inside a graph.
            All give the same numbers; "auto" picks the one measured fastest.
        master_weights: "auto" or True keeps a float32 copy of each variable in float16 or
            bfloat16; False updates the variable itself.

    Raises:
        TypeError: `inner_optimizer` is not a Keras optimizer, or already scales its loss.
        ValueError: an argument is out of range or unknown.

    Example:
    >>> import keras, tfscale
    >>> optimizer = tfscale.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)
    >>> float(optimizer.loss_scale), int(optimizer.skipped_steps)
    (1024.0, 0)

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018 (arXiv:1710.03740).
    """

    # Declared here, so that a custom inner optimizer may have attributes of these names.
    step_counter: Any = None
    dynamic_scale: Any = None
    built: bool
    masters: Masters
    reports: Reports

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
        *,
        policy: policies.Policy | str | float | None = None,
        update: str = "auto",
        master_weights: bool | str = "auto",
        **kwargs: Any,
    ) -> None:
        keras_meaning = policy is None
        given = {"initial_scale": initial_scale, "dynamic_growth_steps": dynamic_growth_steps}
        policy = settings.check(inner_optimizer, given, policy, update, master_weights, kwargs)
        super().__init__(inner_optimizer, name=name)
        inner_optimizer.loss_scale_factor = None  # it would unscale a second time
        # As in Keras: the gradients come from a scaled loss, whoever scaled it.
        self.assumes_scaled = keras_meaning
        self._update_mode = update
        self._master_weights = master_weights
        self.set_masters(Masters())
        self.handoff = Handoff()
        self._scaled_before = False
        # Not in `build`: a graph traced before it would contain the scale as a constant.
        self.step_counter = self._scalar("step_counter", "int", 0)
        self.dynamic_scale = self._scalar("dynamic_scale", "float32", policy.initial_scale)
        hysteresis = getattr(policy, "hysteresis", 1)
        self._hysteresis_left = self._scalar("hysteresis_left", "int64", hysteresis)
        # `_build_inner` tracks it last, because older files do not have it.
        with keras.name_scope(self.name, caller=self):
            held = keras.Variable(0.0, dtype="float32", trainable=False, name="held_scale")
        variables = (self.dynamic_scale, self.step_counter, self._hysteresis_left, held)
        _compat.set_untracked(self, "scaling", Scaling(policy, policies.ScaleState(*variables)))
        _compat.set_untracked(self, "reports", Reports(self.add_variable, self.scaling))
        _compat.set_untracked(self, "deferred_state", {})  # see `saving`
        saving.defer_loads(inner_optimizer)

    def _scalar(self, name: str, dtype: str, value: float) -> keras.Variable:
        return self.add_variable((), keras.initializers.Constant(value), dtype, name=name)

    # Reading.

    @property
    def loss_scale(self) -> tf.Tensor:
        """Scalar float32 tensor: the current scale; 1 if scaling is known to be unused."""
        self.reports.warn_if_stalled()
        return self.scaling.in_use()

    @property
    def iterations(self) -> keras.Variable:
        """The inner optimizer's counter of applied steps."""
        return self.inner_optimizer.iterations

    @property
    def skipped_steps(self) -> tf.Tensor:
        """Scalar int64 tensor: batches skipped so far, by an overflow or a non-finite loss."""
        return self.reports.skipped_steps()

    def record(self) -> Record:
        """Everything counted so far. It waits for the device, so do not call it in every step.

        Returns:
            A `tfscale.Record`: the steps, the skips and their reasons, the last changes of the
            scale, and the variables with non-finite gradients.

        Example:
        >>> import tensorflow as tf, keras, tfscale
        >>> optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), "dynamic")
        >>> v = keras.Variable(1.0, name="v")
        >>> for factor in (1.0, float("inf")):
        ...     with tf.GradientTape() as tape:
        ...         scaled = optimizer.scale_loss(v * 1.0)
        ...     gradient = tape.gradient(scaled, v.value)
        ...     _ = optimizer.apply_gradients([(gradient * factor, v)])
        >>> print(optimizer.record())  # doctest: +NORMALIZE_WHITESPACE
        skipped 1 of 2 steps; only non-finite: v, 1 time; 1 by overflow, 1 in a row at most;
        loss scale 16384 (0 growths, 1 backoff). Normal: a skip now and then is how the scale is
        found.
        """
        return self.reports.record()

    def nonfinite_report(self) -> dict[str, int]:
        """As `record().nonfinite`: how often each variable, by path, had non-finite gradients."""
        return self.record().nonfinite

    # The step.

    @do_not_convert
    def build(self, var_list: Iterable[Any]) -> None:
        """Creates the inner optimizer's variables; a second call changes nothing.

        Args:
            var_list: list of the trainable variables.
        """
        variables = list(var_list)
        if self.built:
            return
        if self.whole_step is not None:
            self.whole_step.restore(self)
        if not variables:  # Keras' loader of old .h5 files passes none
            variables = getattr(_compat.model_of(self), "trainable_variables", [])
        if not variables:
            return

        # Outside of a graph that is being traced, where an assignment would run in every step.
        replicas.build_once(lambda: self._build_inner(variables))
        _compat.set_built_on(self, variables)
        self.built = True

    def set_masters(self, masters: Masters) -> None:
        """Uses these float32 copies, and tracks their variables."""
        _compat.set_untracked(self, "masters", masters)
        for copied in masters.copies:
            _compat.track(self, copied)

    def _build_inner(self, variables: list[Any]) -> None:
        if self.inner_optimizer.built:
            self.masters.check(variables, self.master_weights)
        else:
            self.set_masters(Masters(variables if self.master_weights else ()))
            self.masters.build(self.inner_optimizer, variables)
        self.reports.build(variables, self.add_variable)
        _compat.track(self, self.scaling.variables.held_scale)
        saving.load_deferred(self)
        self._restart_unused_scale()

    @do_not_convert
    def scale_loss(self, loss: Structure) -> Structure:
        """The loss times the scale, in at least float32. Call it inside the tape.

        Args:
            loss: number, tensor, or nested structure of them, in any floating dtype.

        Returns:
            The scaled loss, in the same structure. Half precision becomes float32, because the
            scaled loss would overflow it. Where scaling is unused, the loss unchanged.

        Example:
        >>> import keras, tfscale
        >>> optimizer = tfscale.wrap(keras.optimizers.SGD(), 1024.0)
        >>> float(optimizer.scale_loss(0.5))
        512.0
        """
        if not ((self._scaled_before and tf.executing_eagerly()) or replicas.active()):
            # A `tf.train.Checkpoint` may have restored the scale without calling the optimizer.
            self._scaled_before = True
            with tf.init_scope():
                self._restart_unused_scale()
        losses = [validation.to_floating(part) for part in tf.nest.flatten(loss)]
        if isinstance(self.policy, policies.Auto):
            self.scaling.examine(losses, self._known_variables(), is_built=self.built)
        unused = self.scaling.policy_in_use() == "none"
        scale = self.handoff.common_scale(None if unused else self.scaling.current())
        if scale is None:
            self.handoff.loss_scaled(losses, losses, None)
            return loss
        wide = [gradients.upcast_half(part) for part in losses]
        scaled = [part * tf.cast(scale, part.dtype) for part in wide]
        self.handoff.loss_scaled(losses, scaled, scale)
        return tf.nest.pack_sequence_as(loss, scaled)

    @do_not_convert
    def unscale(self, grads: Structure) -> Structure:
        """The gradients divided by the scale, in at least float32, for clipping or penalties.

        `apply_gradients` does not divide them again. Non-finite elements become NaN, which every
        way of clipping keeps, so `apply_gradients` skips the step. `unscale` itself lowers the
        scale and counts the skipped step, because the loop may not call `apply_gradients` then.
        If it does, nothing is counted twice.

        Args:
            grads: list (or structure) of gradients of the scaled loss: tensors, `IndexedSlices`
                and None.

        Returns:
            The unscaled gradients, in the same structure.

        Raises:
            ValueError: `unscale` returned some of these gradients itself.

        Example:
        >>> import tensorflow as tf, keras, tfscale
        >>> optimizer = tfscale.wrap(keras.optimizers.SGD(1.0), 1024.0)
        >>> variable = keras.Variable([1.0])
        >>> with tf.GradientTape() as tape:
        ...     scaled = optimizer.scale_loss(2.0 * variable[0])
        >>> grads = optimizer.unscale(tape.gradient(scaled, [variable]))
        >>> float(grads[0][0])
        2.0
        >>> _ = optimizer.apply_gradients([(tf.clip_by_norm(grads[0], 1.0), variable)])
        >>> float(variable[0])
        0.0
        """
        flat = [validation.to_gradient(g) for g in tf.nest.flatten(grads)]
        carried = self.handoff.carried(
            flat, self.scaling, assume_scaled=self.assumes_scaled, to_unscale=True
        )
        divided = list(map(gradients.unscale, flat, carried.divisors))
        check = None
        if self.policy.skip_nonfinite:
            check = gradients.check_finite(divided if policies.amplifies(self.policy) else flat)
            count_overflow(self, carried, check.finite)
            divided = [gradients.with_nan(g) for g in divided]
        self.handoff.gradients_unscaled(flat, divided, check)
        return tf.nest.pack_sequence_as(grads, divided)

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[tf.Tensor | tf.IndexedSlices | None, keras.Variable]],
        skip_gradients_aggregation: bool = False,
        *,
        unscaled: bool | None = None,
        reduce_flag: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> keras.Variable:
        """Unscales and checks the gradients, then applies them or skips the step.

        Under a `tf.distribute` strategy it first sums the gradients over the replicas, then
        unscales, checks and clips the sum, so that all replicas make the same decision.

        Args:
            grads_and_vars: iterable of pairs of a gradient of the scaled loss and its variable.
            skip_gradients_aggregation: True if you have already summed the gradients over the
                replicas (Horovod, custom collectives). Call `unscale` after that sum.
            unscaled: True if all gradients went through `unscale`, False if none did. None finds
                out: in a graph by what each is computed from, in eager code by when it was made.
            reduce_flag: function that sums a scalar float32 tensor over all replicas; the scalar
                is 0 on a replica where all is finite. For replicas that TensorFlow does not know
                of. Without it, they agree only because their reduced gradients are equal, and a
                non-finite loss counts as an overflow.

        Returns:
            The inner optimizer's `iterations`: the number of applied steps.

        Raises:
            TypeError: `reduce_flag` is not a function.
            ValueError: all gradients are None; one does not have the shape of its variable; it is
                unknown which of them are unscaled; the call is in the cross-replica context; or the
                optimizer or a variable was made outside of the current strategy's scope. An error
                changes nothing.
        """
        self.apply_or_skip(
            grads_and_vars,
            skip_gradients_aggregation,
            unscaled=unscaled,
            reduce_flag=reduce_flag,
        )
        return self.iterations

    @do_not_convert
    def apply_or_skip(
        self,
        grads_and_vars: Iterable[tuple[tf.Tensor | tf.IndexedSlices | None, keras.Variable]],
        skip_gradients_aggregation: bool = False,
        *,
        unscaled: bool | None = None,
        reduce_flag: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> tf.Tensor:
        """As `apply_gradients`, but returns whether the step was applied.

        Args:
            grads_and_vars: iterable of pairs of a gradient of the scaled loss and its variable.
            skip_gradients_aggregation: as in `apply_gradients`.
            unscaled: as in `apply_gradients`.
            reduce_flag: as in `apply_gradients`.

        Returns:
            Scalar bool tensor, the same on every replica: True where the step was applied.
        """
        pairs = list(grads_and_vars)
        return self._apply(
            [g for g, _ in pairs],
            [v for _, v in pairs],
            unscaled,
            reduced=skip_gradients_aggregation,
            reduce_flag=reduce_flag,
        )

    @do_not_convert
    def apply(
        self,
        grads: Iterable[tf.Tensor | tf.IndexedSlices | None],
        trainable_variables: Iterable[keras.Variable] | None = None,
        *,
        unscaled: bool | None = None,
    ) -> None:
        """As `apply_gradients`, with gradients and variables in two lists.

        Args:
            grads: list of gradients of the scaled loss: tensors, `IndexedSlices` and None.
            trainable_variables: list of as many variables; None means those given to `build`.
            unscaled: as in `apply_gradients`.
        """
        self._apply(list(grads), trainable_variables, unscaled)

    def _apply(
        self,
        grads: list[Any],
        variables: Iterable[Any] | None,
        unscaled: bool | None,
        **reduction: Any,
    ) -> tf.Tensor:
        if not grads:
            replicas.active()  # raises in a cross-replica context, as `make_step` does
            return tf.constant(True)
        return apply_steps([self.make_step(grads, variables, unscaled, **reduction)])

    def make_step(
        self,
        grads: Sequence[Any],
        variables: Iterable[Any] | None,
        unscaled: bool | None = None,
        *,
        reduced: bool = False,
        reduce_flag: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> Step:
        """Checks the arguments, which are those of `apply` and `Step`, and returns the `Step`."""
        shared = replicas.active()  # raises in a cross-replica context
        validation.check_options(unscaled, reduce_flag)
        if variables is None:
            if not self.built:
                raise ValueError(
                    "apply() without `trainable_variables` needs a built optimizer: call "
                    "`optimizer.build(model.trainable_variables)` first."
                )
            variables = self._known_variables()
        variables = list(variables)
        given, grads = grads, [validation.to_gradient(g) for g in grads]
        for before, gradient in zip(given, grads, strict=True):
            eager_log.remember_parts(before, gradient)
        validation.check(grads, variables)
        if shared:
            own = [self.variables[0], self.inner_optimizer.variables[0]]
            replicas.check_setting(own, variables)
        carried = self.handoff.carried(
            grads, self.scaling, assume_scaled=self.assumes_scaled, unscaled=unscaled
        )
        self.build(variables)
        if (
            unscaled is None
            and self.policy.is_scaling
            and not self.assumes_scaled
            and self.handoff.lacks_loss(grads)
            and self.scaling.is_wanted(grads, self._known_variables())
        ):
            self.handoff.warn_once(misuse.UNSCALED_LOSS)
        with tf.control_dependencies(carried.checks):
            self.handoff.applied(carried.taken)
            if carried.checks:
                grads = [gradients.map_values(tf.identity, g) for g in grads]
        return Step(self, grads, variables, carried, reduced=reduced, reduce_flag=reduce_flag)

    def check_finite(self, grads: Iterable[Any]) -> tf.Tensor:
        """Scalar bool tensor: whether all elements of all gradients are finite."""
        return gradients.all_finite([validation.to_gradient(g) for g in grads])

    def _known_variables(self) -> list:
        return _compat.built_on(self) if self.built else []

    # The inner optimizer.

    @property
    def variables(self) -> list[keras.Variable]:
        """List of all variables: this optimizer's own, then the inner optimizer's."""
        return _compat.tracked(self) + self.inner_optimizer.variables

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Called when `fit` ends: finishes the inner optimizer and warns about skipped steps."""
        self.masters.finalize(self.inner_optimizer, var_list)
        self.reports.warn_skips()

    # Configuration and state.

    def _restart_unused_scale(self) -> None:
        """Sets the scale to the policy's first if the loaded scale was never used."""
        if self.reports.never_scaled(int(self.step_counter.numpy())):
            self.scaling.restart()

    def save_own_variables(self, store: Any) -> None:
        """Writes this optimizer's own variables; Keras' saver visits the inner optimizer itself."""
        saving.save(self, store)

    def load_own_variables(self, store: Any) -> None:
        """Reads a file of tfscale, of Keras' LossScaleOptimizer or of a plain optimizer."""
        saving.load(self, store)
        self._is_loaded()

    def _is_loaded(self) -> None:
        self._restart_unused_scale()
        self.reports.ignore_earlier_skips()

    def set_weights(self, weights: Iterable[np.ndarray]) -> None:
        """Sets all variables.

        Args:
            weights: list of arrays as in `variables` of this optimizer, of Keras'
                LossScaleOptimizer around the same inner optimizer, or of the inner optimizer alone.

        Raises:
            ValueError: the number of arrays or their shapes do not fit, or the optimizer is not
                built. Nothing is set then.
        """
        saving.set_weights(self, list(weights))
        self._is_loaded()
