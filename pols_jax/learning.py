"""Learning: one pure `train_step`, and `Trainer`, which runs it on all devices.

The batch is split over the devices, and the loss is that of the whole batch: a loss that compares examples sees those
of the other devices too, batch norm takes its statistics over all of them, and the gradients are averaged. N devices
train the model that one device would train.

Data that fits in memory lives on the devices, and many steps run per dispatch in one compiled loop. Other data is
streamed, one dispatch per step. Both run the same `train_step`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

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
from pols_jax.heads import class_logits
from pols_jax.linear_losses import make_linear_loss
from pols_jax.linear_output import LinearOutput
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
      linear_output: The output layer with its loss, if it is computed without all the logits; None if ``loss`` is taken
        from logits.

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
      >>> from pols_jax.data import load
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
        self._prepare(config, dataset)
        self.learner = Learner.from_config(config, dataset, axis_name=AXIS)
        self._advance = jax.pmap(
            self._advance_on_device, axis_name=AXIS, in_axes=(0, 0, None), donate_argnums=0
        )
        self._step = jax.pmap(self._step_on_device, axis_name=AXIS, donate_argnums=0)
        self._validate = jax.pmap(self._validate_on_device, axis_name=AXIS, in_axes=(0, 0, None))

    def _prepare(self, config: RunConfig, dataset: Dataset) -> None:
        self.config = config
        self.dataset = dataset
        self.num_traces = 0  # how often the training program was compiled
        self._resident = None
        self._stream: Iterator[Batch] | None = None

    def place(self, state: TrainState) -> TrainState:
        """Puts a whole state on the devices."""
        return replicate(state)

    def whole(self, state: TrainState) -> TrainState:
        """Takes a state from the devices, as it was before `place`."""
        return unreplicate(state)

    def step_of(self, state: TrainState) -> int:
        """The number of steps that a state on the devices has done."""
        return int(self._first(state.step))

    def init(self) -> TrainState:
        """Creates the state before the first step, on every device."""
        return self.place(self.learner.init(self.dataset.image_shape))

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
            self._resident = self._put_resident((train.images, train.labels))
        state, totals = self._advance(state, self._resident, jnp.asarray(until, jnp.int32))
        return state, self._first(totals)

    # What a trainer on a mesh does in another way: data on the devices, a batch on them, and back.
    def _put_resident(self, arrays: Any) -> Any:
        return replicate(arrays)

    def _split(self, batch: Batch) -> Batch:
        return _split_over_devices(batch)

    def _first(self, tree: Any) -> Any:
        return unreplicate(tree)

    def _advance_by_stream(self, train, state, until):
        step = self.step_of(state)
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
            state, totals = self._step(state, self._split(next(self._stream)))
            totals = self._first(totals)
            sums = jax.tree.map(jnp.add, sums, totals)._replace(last_loss=totals.last_loss)
            step += 1
            if not np.isfinite(totals.last_loss):
                break
        return state, sums

    def _step_on_device(self, state, batch):
        self.num_traces += 1
        return train_step(self.learner, state, batch, axis_name=AXIS)

    def _advance_on_device(self, state, resident, until):
        return self._advance_with(state, resident, until, self._sampled_step_on_device)

    def _sampled_step_on_device(self, state, images, labels):
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
        return train_step(self.learner, state, batch, axis_name=AXIS)

    def _advance_with(self, state, resident, until, sampled_step):
        """Runs as many steps as are asked for; the number is not part of the program, so it compiles once."""
        self.num_traces += 1

        def step(carry):
            state, sums = carry
            state, totals = sampled_step(state, *resident)
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
            jax.tree.map(np.asarray, self._first(self._validate(state, self._split(batch), columns)))
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
        out = measure_validation(self.learner, state, batch, columns, axis_name=AXIS)
        gathered = lax.all_gather({name: out[name] for name in _PER_EXAMPLE}, AXIS, tiled=True)
        return out | lax.psum({name: out[name] for name in ("correct", "examples")}, AXIS) | gathered


_PER_EXAMPLE = ("scores", "label", "mask")


def measure_validation(
    learner: Learner,
    state: TrainState,
    batch: Batch,
    columns: Int[Array, " columns"],
    *,
    axis_name: str | None,
) -> dict[str, Array]:
    """Measures one batch of the validation split: its loss, and this device's part of everything else.

    Examples:
      >>> from pols_jax.data import load
      >>> config = RunConfig(width=0.1, characters="0030-0039")
      >>> dataset = load("glyphs", **config.options())
      >>> learner = Learner.from_config(config, dataset)
      >>> batch = next(iter(evaluation_batches(dataset.validation, batch_size=8)))
      >>> state = learner.init(dataset.image_shape)
      >>> measured = measure_validation(learner, state, batch, jnp.arange(10), axis_name=None)
      >>> measured["scores"].shape
      (8, 10)
    """
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    outputs: Any = learner.model.apply(variables, batch.image, method=learner.method)
    loss, is_correct = learner.measure(state.params, outputs, batch, axis_name=axis_name)
    if learner.linear_output is None:
        scores = outputs if len(columns) == outputs.shape[1] else outputs[:, columns]
    else:
        scores = class_logits(*learner.output_layer(state.params, outputs), columns)
    label, mask = jnp.asarray(batch.label), jnp.asarray(batch.mask)
    return {
        "loss": loss,
        "correct": jnp.sum(is_correct & mask),
        "examples": jnp.sum(mask),
        "scores": scores,
        "label": label,
        "mask": mask,
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
