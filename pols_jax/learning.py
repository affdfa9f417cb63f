"""Learning: one pure `train_step`, and the network, loss and optimizer that it trains.

The batch may be split over devices, and the loss is that of the whole batch: a loss that compares examples sees those of
the other devices too, batch norm takes its statistics over all of them, and the gradients are averaged. N devices train
the model that one device would train.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pols_jax.config import ConfigError, RunConfig
from pols_jax.data import (
    ArraySplit,
    Batch,
    Dataset,
)
from pols_jax.linear_losses import make_linear_loss
from pols_jax.linear_output import LinearOutput
from pols_jax.losses import MeanLoss, make_loss
from pols_jax.models import MODELS, Classifier
from pols_jax.optimizers import make_optimizer

# The weight of the auxiliary classifier's loss in the recipe of Inception-v3.
_AUXILIARY_WEIGHT = 0.4


class TrainState(NamedTuple):
    """All that training carries from step to step; everything else is a function of the config and the step.

    Attributes:
      step: The number of steps done.
      params: The parameters of the model.
      batch_stats: The running statistics of batch norm.
      opt_state: The state of the optimizer.
    """

    step: Int[Array, ""]
    params: Any
    batch_stats: Any
    opt_state: Any


class Totals(NamedTuple):
    """Sums over steps: divide by ``steps`` or ``examples``.

    Attributes:
      loss: The losses, summed over steps.
      correct: The number of examples whose largest logit was the true one.
      examples: The number of examples.
      steps: The number of steps.
      last_loss: The loss of the last step.
    """

    loss: Float[Array, ""]
    correct: Float[Array, ""]
    examples: Float[Array, ""]
    steps: Int[Array, ""]
    last_loss: Float[Array, ""]

    @classmethod
    def zero(cls) -> "Totals":
        """No steps yet."""
        zero = jnp.zeros((), jnp.float32)
        return cls(zero, zero, zero, jnp.zeros((), jnp.int32), zero)


class Learner(NamedTuple):
    """What is trained and how, as pure functions.

    Attributes:
      model: The network.
      loss: The loss of a whole batch.
      optimizer: The optimizer, with its schedule and weight decay.
      seed: The seed of the run.
      linear_output: The output layer with its loss, if it is computed without all the logits; None if ``loss`` is taken
        from logits.

    Examples:
      >>> from pols_jax.config import RunConfig
      >>> from pols_jax.data import evaluation_batches, load
      >>> config = RunConfig(width=0.1, characters="0030-0039")
      >>> dataset = load("glyphs", **config.options())
      >>> state = Learner.from_config(config, dataset).init(dataset.image_shape)
      >>> state.params["head"]["kernel"].shape
      (10, 50)
    """

    model: Classifier
    loss: MeanLoss
    optimizer: optax.GradientTransformation
    seed: int
    linear_output: LinearOutput | None = None

    @classmethod
    def from_config(cls, config: RunConfig, dataset: Dataset, *, axis_name: str | None = None) -> "Learner":
        """Builds the network, loss and optimizer that a config asks for."""
        model = make_model(config, dataset.num_classes, axis_name=axis_name)
        options = loss_options(config, dataset)
        linear_output = None
        if config.head != "dense":
            linear_output = LinearOutput(make_linear_loss(config.loss, **options))
        loss = make_loss(config.loss, **options)
        return cls(model, loss, make_optimizer(config), config.seed, linear_output)

    def init(self, image_shape: tuple[int, int, int]) -> TrainState:
        """Creates the state before the first step."""
        key = jax.random.key(self.seed)
        variables = self.model.init(key, jnp.zeros((1, *image_shape), jnp.float32))
        params, batch_stats = variables["params"], variables.get("batch_stats", {})
        return TrainState(jnp.zeros((), jnp.int32), params, batch_stats, self.optimizer.init(params))

    def measure(
        self, params: Any, outputs: Float[Array, "batch units"], batch: Batch, *, axis_name: str | None
    ) -> tuple[Float[Array, ""], Bool[Array, " batch"]]:
        """Computes the loss, and which examples are right, from logits or from the features that stand for them."""
        label, mask = jnp.asarray(batch.label), jnp.asarray(batch.mask)
        if self.linear_output is None:
            is_correct = jnp.argmax(outputs, axis=-1) == label
            return self.loss(outputs, label, where=mask, axis_name=axis_name), is_correct
        layer = self.output_layer(params, outputs)
        is_correct = self.linear_output.is_correct(*lax.stop_gradient(layer), label)
        return self.linear_output.loss(*layer, label, where=mask, axis_name=axis_name), is_correct

    def output_layer(
        self, params: Any, features: Float[Array, "batch features"]
    ) -> tuple[Float[Array, "batch features"], Float[Array, "classes features"], Float[Array, " classes"]]:
        """Returns features, kernel and bias in the dtypes that the model computes its logits with."""
        kernel, bias = params["head"]["kernel"], params["head"]["bias"]
        return features.astype(self.model.dtype), kernel.astype(self.model.dtype), bias

    @property
    def method(self) -> str:
        """The method of the model whose outputs `measure` takes."""
        return "__call__" if self.linear_output is None else "features"


def make_model(config: RunConfig, num_classes: int, *, axis_name: str | None = None) -> Classifier:
    """Builds the network that a config asks for, without parameters.

    Args:
      config: The run.
      num_classes: The number of classes k.
      axis_name: The device axis that batch norm synchronises over while training; None to evaluate.

    Examples:
      >>> make_model(RunConfig(model="mlp"), 1000).num_classes
      1000
    """
    dtype = jnp.dtype(config.dtype)
    options: dict[str, Any] = {"width": config.width, "dtype": dtype, "axis_name": axis_name}
    if config.hidden_sizes:
        options["hidden_sizes"] = config.hidden_sizes
    if config.auxiliary:
        options["auxiliary"] = True
    return Classifier(
        MODELS[config.model](**options), num_classes, bias_start=config.first_bias(num_classes), dtype=dtype
    )


def train_step(
    learner: Learner, state: TrainState, batch: Batch, *, axis_name: str | None = None
) -> tuple[TrainState, Totals]:
    """Takes one step. Pure: jit it, pmap it, scan it.

    Args:
      learner: The network, the loss and the optimizer.
      state: The state before the step.
      batch: The examples; under pmap this device's part of them.
      axis_name: The device axis that the batch is split over; None for one device.

    Returns:
      The state after the step, and what happened in it.

    Examples:
      >>> import jax, numpy as np
      >>> from pols_jax.config import RunConfig
      >>> from pols_jax.data import evaluation_batches, load
      >>> config = RunConfig(width=0.1, characters="0030-0039")
      >>> dataset = load("glyphs", **config.options())
      >>> learner = Learner.from_config(config, dataset)
      >>> state = learner.init(dataset.image_shape)
      >>> batch = next(iter(evaluation_batches(dataset.train, batch_size=32)))
      >>> state, totals = jax.jit(train_step, static_argnums=0)(learner, state, batch)
      >>> int(state.step), int(totals.examples)
      (1, 32)
    """
    mask = jnp.asarray(batch.mask)
    dropout_key = jax.random.fold_in(jax.random.key(learner.seed), state.step)
    if axis_name is not None:
        dropout_key = jax.random.fold_in(dropout_key, lax.axis_index(axis_name))

    def objective(params):
        applied: Any = learner.model.apply(
            {"params": params, "batch_stats": state.batch_stats},
            jnp.asarray(batch.image),
            train=True,
            mask=mask,
            rngs={"dropout": dropout_key},
            mutable=["batch_stats", "auxiliary"],
            method=learner.method,
        )
        outputs, updates = applied
        value, is_correct = learner.measure(params, outputs, batch, axis_name=axis_name)
        if "auxiliary" in updates:
            auxiliary_logits = updates["auxiliary"]["auxiliary_logits"]
            label = jnp.asarray(batch.label)
            value += _AUXILIARY_WEIGHT * learner.loss(
                auxiliary_logits, label, where=mask, axis_name=axis_name
            )
        return value, (is_correct, updates.get("batch_stats", {}))

    (value, (is_correct, batch_stats)), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    correct = jnp.sum(is_correct & mask).astype(jnp.float32)
    examples = jnp.sum(mask).astype(jnp.float32)
    if axis_name is not None:
        grads = lax.pmean(grads, axis_name)
        correct, examples = lax.psum((correct, examples), axis_name)
    with jax.numpy_dtype_promotion(
        "standard"
    ):  # optax mixes step counts and floats, which strict promotion forbids
        updates, opt_state = learner.optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    totals = Totals(value, correct, examples, jnp.ones((), jnp.int32), value)
    return TrainState(state.step + 1, params, batch_stats, opt_state), totals


def noise_distribution(name: str, labels: Int[np.ndarray, " examples"], num_classes: int) -> np.ndarray:
    """Builds the distribution of NCE's noise classes, shape ``[k]``.

    Args:
      name: ``uniform``; ``log_uniform``, which falls with the class id as word frequencies fall with rank; or
        ``empirical``, the frequencies of the training labels.
      labels: The training labels.
      num_classes: The number of classes k.

    Examples:
      >>> noise_distribution("empirical", np.array([0, 0, 0, 1]), 2).tolist()
      [0.75, 0.25]
    """
    if name == "empirical":
        weights = np.bincount(labels, minlength=num_classes).astype(np.float64)
    elif name == "log_uniform":
        ranks = np.arange(num_classes, dtype=np.float64)
        weights = np.log((ranks + 2) / (ranks + 1))
    else:
        weights = np.ones(num_classes)
    return (weights / weights.sum()).astype(np.float32)


def loss_options(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """Returns the hyper-parameters of a run's loss, those that depend on the data included.

    Examples:
      >>> from pols_jax.data import evaluation_batches, load
      >>> config = RunConfig(loss="noise_contrastive_estimation", characters="0030-0039")
      >>> loss_options(config, load("glyphs", **config.options()))
      {'num_noise': 10}
    """
    options = config.loss_options()
    if "noise" in options:
        noise = options.pop("noise")
        options["num_noise"] = options["num_noise"] or min(100, dataset.num_classes)
        if noise == "empirical" and not isinstance(dataset.train, ArraySplit):
            raise ConfigError(f"--noise empirical needs labels in memory, and {dataset.name} is streamed.")
        if noise != "uniform":
            labels = dataset.train.labels if isinstance(dataset.train, ArraySplit) else np.array([])
            options["noise_probs"] = noise_distribution(noise, labels, dataset.num_classes)
    return options
