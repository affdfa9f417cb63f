"""Learning: one pure `train_step`, and `Trainer`, which runs it on all devices.

The batch is split over the devices, and the loss is that of the whole batch: a loss that compares examples sees those
of the other devices too, batch norm takes its statistics over all of them, and the gradients are averaged. N devices
train the model that one device would train.

Data that fits in memory lives on the devices, and many steps run per dispatch in one compiled loop. Other data is
streamed, one dispatch per step. Both run the same `train_step`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from pols_jax import metrics, principle
from pols_jax.config import ConfigError, RunConfig
from pols_jax.data import (
    ArraySplit,
    Batch,
    Dataset,
    Split,
    StreamSplit,
    evaluation_batches,
    sample_batch,
    stream_batches,
)
from pols_jax.losses import MeanLoss, make_loss
from pols_jax.models import MODELS, Classifier
from pols_jax.optimizers import make_optimizer

AXIS = "batch"
"""The name of the device axis that the batch is split over."""

# The weight of the auxiliary classifier's loss in the recipe of Inception-v3.
_AUXILIARY_WEIGHT = 0.4
# While training, single-logit metrics are measured on as many classes as keep the scores below this number.
_MAX_SCORES = 2**26
_EVALUATION_BATCH = 1024


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

    Examples:
      >>> from pols_jax.config import RunConfig
      >>> from pols_jax.data import load
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

    @classmethod
    def from_config(cls, config: RunConfig, dataset: Dataset, *, axis_name: str | None = None) -> "Learner":
        """Builds the network, loss and optimizer that a config asks for."""
        model = make_model(config, dataset.num_classes, axis_name=axis_name)
        loss = make_loss(config.loss, **_loss_options(config, dataset))
        return cls(model, loss, make_optimizer(config), config.seed)

    def init(self, image_shape: tuple[int, int, int]) -> TrainState:
        """Creates the state before the first step."""
        key = jax.random.key(self.seed)
        variables = self.model.init(key, jnp.zeros((1, *image_shape), jnp.float32))
        params, batch_stats = variables["params"], variables.get("batch_stats", {})
        return TrainState(jnp.zeros((), jnp.int32), params, batch_stats, self.optimizer.init(params))


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
      >>> from pols_jax.data import load
      >>> config = RunConfig(width=0.1, characters="0030-0039")
      >>> dataset = load("glyphs", **config.options())
      >>> learner = Learner.from_config(config, dataset)
      >>> state = learner.init(dataset.image_shape)
      >>> batch = next(iter(evaluation_batches(dataset.train, batch_size=32)))
      >>> state, totals = jax.jit(train_step, static_argnums=0)(learner, state, batch)
      >>> int(state.step), int(totals.examples)
      (1, 32)
    """
    image, label, mask = (jnp.asarray(leaf) for leaf in batch)
    dropout_key = jax.random.fold_in(jax.random.key(learner.seed), state.step)
    if axis_name is not None:
        dropout_key = jax.random.fold_in(dropout_key, lax.axis_index(axis_name))

    def objective(params):
        outputs: Any = learner.model.apply(
            {"params": params, "batch_stats": state.batch_stats},
            image,
            train=True,
            mask=mask,
            rngs={"dropout": dropout_key},
            mutable=["batch_stats", "auxiliary"],
        )
        logits, updates = outputs
        loss = partial(learner.loss, labels=label, where=mask, axis_name=axis_name)
        value = loss(logits)
        if "auxiliary" in updates:
            value += _AUXILIARY_WEIGHT * loss(updates["auxiliary"]["auxiliary_logits"])
        return value, (logits, updates.get("batch_stats", {}))

    (value, (logits, batch_stats)), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    correct = jnp.sum((jnp.argmax(logits, axis=-1) == label) & mask).astype(jnp.float32)
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


def _loss_options(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
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


class Trainer:
    """Runs `train_step` on every device of every host, and looks at the validation split.

    Args:
      config: The run.
      dataset: Its data.

    Raises:
      ConfigError: if the batch cannot be split over the devices.

    Examples:
      >>> from pols_jax.data import load
      >>> config = RunConfig(width=0.1, characters="0030-0039", batch_size=32)
      >>> trainer = Trainer(config, load("glyphs", **config.options()))
      >>> state, totals = trainer.advance(trainer.init(), until=3)
      >>> int(totals.steps), sorted(trainer.validate(state))
      (3, ['accuracy', 'auprc', 'loss', 'num_classes', 'violation_rate'])
    """

    def __init__(self, config: RunConfig, dataset: Dataset):
        check_batch_size(config.batch_size, jax.device_count())
        self.config = config
        self.dataset = dataset
        self.learner = Learner.from_config(config, dataset, axis_name=AXIS)
        self.num_traces = 0  # how often the training program was compiled
        self._resident = None
        self._stream: Iterator[Batch] | None = None
        self._advance = jax.pmap(
            self._advance_on_device, axis_name=AXIS, in_axes=(0, 0, None), donate_argnums=0
        )
        self._step = jax.pmap(self._step_on_device, axis_name=AXIS, donate_argnums=0)
        self._validate = jax.pmap(self._validate_on_device, axis_name=AXIS, in_axes=(0, 0, None))

    def replicate(self, state: TrainState) -> TrainState:
        """Puts a state on every device."""
        return replicate(state)

    def init(self) -> TrainState:
        """Creates the state before the first step, on every device."""
        return replicate(self.learner.init(self.dataset.image_shape))

    def advance(self, state: TrainState, until: int) -> tuple[TrainState, Totals]:
        """Trains until a step is reached, or the loss is no longer finite.

        Args:
          state: The replicated state; it is consumed.
          until: The step to stop at.

        Returns:
          The state, and totals over the steps that were done.
        """
        train = self.dataset.train
        if isinstance(train, StreamSplit):
            return self._advance_by_stream(train, state, until)
        if self._resident is None:
            self._resident = replicate((train.images, train.labels))
        state, totals = self._advance(state, self._resident, jnp.asarray(until, jnp.int32))
        return state, unreplicate(totals)

    def _advance_by_stream(self, train, state, until):
        step = int(unreplicate(state.step))
        if self._stream is None:
            self._stream = stream_batches(
                train,
                seed=self.config.seed,
                start_step=step,
                batch_size=self.config.batch_size,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
            )
        sums = Totals.zero()
        while step < until:
            state, totals = self._step(state, _split_over_devices(next(self._stream)))
            totals = unreplicate(totals)
            sums = jax.tree.map(jnp.add, sums, totals)._replace(last_loss=totals.last_loss)
            step += 1
            if not np.isfinite(totals.last_loss):
                break
        return state, sums

    def _step_on_device(self, state, batch):
        self.num_traces += 1
        return train_step(self.learner, state, batch, axis_name=AXIS)

    def _advance_on_device(self, state, resident, until):
        """Runs as many steps as are asked for; the number is not part of the program, so it compiles once."""
        self.num_traces += 1
        images, labels = resident

        def step(carry):
            state, sums = carry
            batch = sample_batch(
                images,
                labels,
                state.step,
                seed=self.config.seed,
                batch_size=self.config.batch_size,
                augment=self.dataset.augment,
                shard=lax.axis_index(AXIS),
                num_shards=jax.device_count(),
            )
            state, totals = train_step(self.learner, state, batch, axis_name=AXIS)
            sums = jax.tree.map(jnp.add, sums, totals)._replace(last_loss=totals.last_loss)
            return state, sums

        def goes_on(carry):
            state, sums = carry
            return (state.step < until) & jnp.isfinite(sums.last_loss)

        return lax.while_loop(goes_on, step, (state, Totals.zero()))

    def validate(self, state: TrainState) -> dict[str, float]:
        """Measures the model on the validation split.

        Returns:
          ``loss`` and ``accuracy``; ``auprc`` with one logit, averaged over classes; and ``violation_rate``, the share
          of pairs that violate the principle. The last two are taken over at most `_MAX_SCORES` scores: with very
          many classes, over ``num_classes`` of them at equal distances.
        """
        split, num_classes = self.dataset.validation, self.dataset.num_classes
        num_columns = max(1, min(num_classes, _MAX_SCORES // len(split)))
        columns = jnp.asarray(np.linspace(0, num_classes - 1, num_columns).round().astype(np.int32))
        outputs = [
            jax.tree.map(np.asarray, unreplicate(self._validate(state, _split_over_devices(batch), columns)))
            for batch in _batches_for_all_hosts(split)
        ]
        sizes = np.array([out["examples"] for out in outputs])
        scores, labels, real = (
            np.concatenate([out[n] for out in outputs]) for n in ("scores", "label", "mask")
        )
        scores, labels = scores[real], labels[real]
        # -1 for an example of a class that is not among the columns: a negative for each of them.
        places = np.full(num_classes, -1, np.int32)
        places[np.asarray(columns)] = np.arange(num_columns)
        places = places[labels]
        slc = metrics.slc_metrics(jnp.asarray(scores), jnp.asarray(places))
        return {
            "loss": float(np.sum([out["loss"] * out["examples"] for out in outputs]) / sizes.sum()),
            "accuracy": float(np.sum([out["correct"] for out in outputs]) / sizes.sum()),
            "auprc": float(slc["auprc"]),
            "violation_rate": _violation_rate(scores[places >= 0], places[places >= 0]),
            "num_classes": int(slc["num_classes"]),
        }

    def _validate_on_device(self, state, batch, columns):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits: Any = self.learner.model.apply(variables, batch.image)
        correct = jnp.sum((jnp.argmax(logits, axis=-1) == batch.label) & batch.mask)
        scores = logits if len(columns) == logits.shape[1] else logits[:, columns]
        gathered = lax.all_gather((scores, batch.label, batch.mask), AXIS, tiled=True)
        return {
            "loss": self.learner.loss(logits, batch.label, where=batch.mask, axis_name=AXIS),
            "correct": lax.psum(correct, AXIS),
            "examples": lax.psum(jnp.sum(batch.mask), AXIS),
            **dict(zip(("scores", "label", "mask"), gathered, strict=True)),
        }


def _violation_rate(scores, labels) -> float:
    if scores.shape[1] < 2:
        return 0.0  # one class has no false logit
    return float(principle.violation_rate(jnp.asarray(scores), jnp.asarray(labels)))


def check_batch_size(batch_size: int, num_devices: int) -> None:
    """Raises unless the batch can be split evenly over the devices.

    Examples:
      >>> check_batch_size(100, 8)
      Traceback (most recent call last):
      pols_jax.config.ConfigError: --batch-size 100 cannot be split over 8 devices; the nearest sizes are 96 and 104.
    """
    if batch_size % num_devices:
        below = batch_size // num_devices * num_devices
        nearest = f"{below} and {below + num_devices}" if below else f"{num_devices}"
        raise ConfigError(
            f"--batch-size {batch_size} cannot be split over {num_devices} devices; "
            f"the nearest sizes are {nearest}."
        )


def replicate(tree: Any) -> Any:
    """Puts a copy of every leaf on each local device, along a new first axis, as pmap wants it.

    Examples:
      >>> replicate(np.arange(3)).shape == (jax.local_device_count(), 3)
      True
    """
    copies = jax.pmap(lambda leaves, _: leaves, axis_name=AXIS, in_axes=(None, 0))
    return copies(tree, np.arange(jax.local_device_count()))


def unreplicate(tree: Any) -> Any:
    """Takes the first device's copy of every leaf.

    Examples:
      >>> unreplicate(replicate(np.arange(3))).tolist()
      [0, 1, 2]
    """
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _split_over_devices(batch: Batch) -> Batch:
    num_devices = jax.local_device_count()
    return jax.tree.map(lambda leaf: leaf.reshape((num_devices, -1, *leaf.shape[1:])), batch)


def _batches_for_all_hosts(split: Split) -> Iterator[Batch]:
    # Not larger than the split, and a multiple of the number of devices.
    num_devices = jax.device_count()
    batch_size = -(-min(_EVALUATION_BATCH, len(split)) // num_devices) * num_devices
    return evaluation_batches(
        split, batch_size=batch_size, process_index=jax.process_index(), process_count=jax.process_count()
    )
