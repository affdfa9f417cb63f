"""`Trainer` runs `train_step` on every device of every host.

Data that fits in memory lives on the devices, and many steps run per dispatch in one compiled loop where that is
fast (see `loops_on_device`). Other data is streamed, one dispatch per step. All run the same `train_step`.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from pols_jax import metrics, principle
from pols_jax.config import ConfigError, RunConfig
from pols_jax.data import (
    Batch,
    Dataset,
    Split,
    StreamSplit,
    evaluation_batches,
    sample_batch,
    stream_batches,
)
from pols_jax.heads import class_logits
from pols_jax.learning import Learner, Totals, TrainState, train_step

AXIS = "batch"
"""The name of the device axis that the batch is split over."""

# While training, single-logit metrics are measured on as many classes as keep the scores below this number.
_MAX_SCORES = 2**26
_EVALUATION_BATCH = 1024


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
        # XLA does not leave out a sum over one device: without it a step of the MLP on a CPU is 4 % faster.
        self._axis_name = AXIS if jax.device_count() > 1 else None
        self.learner = Learner.from_config(config, dataset, axis_name=self._axis_name)
        self._advance = jax.pmap(
            self._advance_on_device, axis_name=AXIS, in_axes=(0, 0, None), donate_argnums=0
        )
        self._step = jax.pmap(self._step_on_device, axis_name=AXIS, donate_argnums=0)
        self._validate = jax.pmap(self._validate_on_device, axis_name=AXIS, in_axes=(0, 0, None))

    def _prepare(self, config: RunConfig, dataset: Dataset) -> None:
        self.config = config
        self.dataset = dataset
        self.num_traces = 0  # how often the training program was compiled
        self._loops = loops_on_device(config)
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
        if self._loops:
            state, totals = self._advance(state, self._resident, jnp.asarray(until, jnp.int32))
            return state, self._first(totals)
        return self._advance_by_steps(state, until, lambda state: self._advance(state, self._resident, 0))

    # What a trainer on a mesh does in another way: data on the devices, a batch on them, and back.
    def _put_resident(self, arrays: Any) -> Any:
        return replicate(arrays)

    def _split(self, batch: Batch) -> Batch:
        return _split_over_devices(batch)

    def _first(self, tree: Any) -> Any:
        return unreplicate(tree)

    def _advance_by_stream(self, train, state, until):
        if self._stream is None:
            self._stream = stream_batches(
                train,
                seed=self.config.seed,
                start_step=self.step_of(state),
                batch_size=self.config.batch_size,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
            )
        batches = self._stream
        return self._advance_by_steps(
            state, until, lambda state: self._step(state, self._split(next(batches)))
        )

    def _advance_by_steps(self, state, until, step):
        """Dispatches one step at a time."""
        sums = Totals.zero()
        for _ in range(self.step_of(state), until):
            state, totals = step(state)
            totals = self._first(totals)
            sums = jax.tree.map(jnp.add, sums, totals)._replace(last_loss=totals.last_loss)
            if not np.isfinite(totals.last_loss):
                break
        return state, sums

    def _step_on_device(self, state, batch):
        self.num_traces += 1
        return train_step(self.learner, state, batch, axis_name=self._axis_name)

    def _advance_on_device(self, state, resident, until):
        return self._advance_with(state, resident, until, self._sampled_step_on_device)

    def _sampled_step_on_device(self, state, images, labels):
        shard, num_shards = lax.axis_index(AXIS), jax.device_count()
        batch = self._sample(state, images, labels, shard=shard, num_shards=num_shards)
        return train_step(self.learner, state, batch, axis_name=self._axis_name)

    def _sample(self, state, images, labels, **shard) -> Batch:
        """The batch of the state's step, or one shard of it."""
        return sample_batch(
            images,
            labels,
            state.step,
            seed=self.config.seed,
            batch_size=self.config.batch_size,
            augment=self.dataset.augment if self.config.augment else None,
            **shard,
        )

    def _advance_with(self, state, resident, until, sampled_step):
        """Runs as many steps as are asked for; the number is not part of the program, so it compiles once."""
        self.num_traces += 1
        if not self._loops:
            return sampled_step(state, *resident)

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
        out = measure_validation(self.learner, state, batch, columns, axis_name=self._axis_name)
        gathered = lax.all_gather({name: out[name] for name in _PER_EXAMPLE}, AXIS, tiled=True)
        return out | lax.psum({name: out[name] for name in ("correct", "examples")}, AXIS) | gathered


def loops_on_device(config: RunConfig) -> bool:
    """Whether many steps run in one compiled loop.

    On a CPU, XLA compiles a convolution inside a loop without the library that makes it fast: the paper's CNN at an
    eighth of its width takes 6.6 s a step there, and 0.47 s outside (batch 128, one core). Such networks are
    dispatched step by step, which costs nothing beside them.

    Examples:
      >>> loops_on_device(RunConfig(model="mlp"))
      True
    """
    return config.model == "mlp" or jax.default_backend() != "cpu"


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
