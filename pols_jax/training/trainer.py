"""`Trainer` runs `train_step` where a placement says: on every device of every host, or on a mesh.

Data that fits in memory lives on the devices, and many steps run per dispatch in one compiled loop. Other data is
streamed, one dispatch per step. All run the same `train_step`.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pols_jax import metrics, principle
from pols_jax.data import (
    Batch,
    Dataset,
    StreamSplit,
    augment_batch,
    evaluation_batches,
    find_augmentation,
    prefetch_to_device,
    sample_batch,
    stream_batches,
)
from pols_jax.heads import class_logits
from pols_jax.losses import LinearLogits
from pols_jax.training.class_parallel import ClassParallel
from pols_jax.training.config import RunConfig
from pols_jax.training.features import fitting_batch
from pols_jax.training.learning import Totals, TrainState, train_step
from pols_jax.training.placement import DataParallel, check_batch_size
from pols_jax.training.starting import Start, with_weights

# While training, single-logit metrics are measured on as many classes as keep the scores below this number.
_MAX_SCORES = 2**26


class Trainer:
    """Runs `train_step` on the devices that a config asks for, and looks at the validation split.

    Args:
      config: The run.
      dataset: Its data.
      num_workers: Processes that decode streamed data; with 0, threads of this one do.

    Raises:
      ConfigError: if the batch or the output layer cannot be split over the devices.

    Examples:
      >>> from pols_jax.data import load
      >>> config = RunConfig(width=0.1, characters="0030-0039", batch_size=32)
      >>> trainer = Trainer(config, load("glyphs", **config.options()))
      >>> state, totals = trainer.advance(trainer.init(), until=3)
      >>> int(totals.steps), sorted(trainer.validate(state))
      (3, ['accuracy', 'auprc', 'loss', 'num_classes', 'violation_rate'])
    """

    def __init__(self, config: RunConfig, dataset: Dataset, *, num_workers: int = 0):
        check_batch_size(config.batch_size, jax.device_count())
        self.config = config
        self.dataset = dataset
        # Features that are computed once are not distorted again.
        self.augment = None if config.train == "head" else find_augmentation(config.augment, dataset)
        self.num_workers = num_workers
        self.placement = (ClassParallel if config.head == "sharded" else DataParallel)(config, dataset)
        self.learner = self.placement.learner
        self.num_traces = 0  # how often the training program was compiled
        self._resident = None
        self._stream: Iterator[Batch] | None = None
        self._advance = self.placement.compile(self._advance_program, num_shared=1, trains=True)
        self._step = self.placement.compile(self._step_program, num_shared=0, trains=True)
        self._catch_up = self.placement.compile(self._catch_up_program, num_shared=0, trains=True)
        self._validate = self.placement.compile(self._validate_program, num_shared=1, trains=False)

    def place(self, state: TrainState) -> TrainState:
        """Puts a whole state on the devices."""
        return self.placement.place(state)

    def whole(self, state: TrainState) -> TrainState:
        """Takes a state from the devices of one host, as it was before `place`."""
        return self.placement.whole(state)

    def stored(self, state: TrainState) -> TrainState:
        """What a checkpoint stores of a state on the devices: whole arrays, or `ArrayParts` with the rows of this host."""
        return self.placement.stored(state)

    def template(self) -> TrainState:
        """What a stored state is read into; `place` takes the result."""
        return self.placement.template(jax.eval_shape(lambda: self.learner.init(self.dataset.image_shape)))

    def step_of(self, state: TrainState) -> int:
        """The number of steps that a state on the devices has done."""
        return int(self.placement.first(state.step))

    def init(self, start: Start | None = None) -> TrainState:
        """Creates the state before the first step, on the devices; from some weights, if there are any."""

        def first(variables):
            state = self.learner.init(self.dataset.image_shape)
            return with_weights(state, variables, self.learner.init_optimizer) if variables else state

        return self.placement.init(first, start.variables if start else {})

    def advance(self, state: TrainState, until: int) -> tuple[TrainState, Totals]:
        """Trains until a step is reached, or the loss is no longer finite; consumes the state.

        Returns:
          The state, and totals over the steps that were done.
        """
        train = self.dataset.train
        if isinstance(train, StreamSplit):
            return self._advance_by_stream(train, state, until)
        if self._resident is None:
            self._resident = self.placement.put((train.images, train.labels))
        state, totals = self._advance(state, self._resident, np.int32(until))
        return state, self.placement.first(totals)

    def _advance_by_stream(self, train, state, until):
        if self._stream is None:
            batches = stream_batches(
                train,
                seed=self.config.seed,
                start_step=self.step_of(state),
                batch_size=self.config.batch_size,
                **self.placement.host_part(),
                num_workers=self.num_workers,
            )
            self._stream = prefetch_to_device(batches, put=self.placement.put_batch)
        sums = Totals.zero()
        for _ in range(self.step_of(state), until):
            state, totals = self._step(state, next(self._stream))
            totals = self.placement.first(totals)
            sums = sums.plus(totals)
            if not np.isfinite(totals.last_loss):
                break
        return state, sums

    def _train_step(self, state, batch):
        batch = self.placement.spread(batch)
        return train_step(self.learner, state, batch, axis_name=self.placement.axis_name)

    def _step_program(self, state, batch):
        self.num_traces += 1
        shard = self.placement.shard().get("shard", 0)
        batch = augment_batch(batch, state.step, seed=self.config.seed, augment=self.augment, shard=shard)
        return self._train_step(state, batch)

    def _advance_program(self, state, resident, until):
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
                augment=self.augment,
                **self.placement.shard(),
            )
            state, totals = self._train_step(state, batch)
            return state, sums.plus(totals)

        def goes_on(carry):
            state, sums = carry
            return (state.step < until) & jnp.isfinite(sums.last_loss)

        return lax.while_loop(goes_on, step, (state, Totals.zero()))

    def caught_up(self, state: TrainState) -> TrainState:
        """Brings rows that were not drawn of late where they belong, for a look at all of them; consumes the state.

        When that happens is part of a run: `fit` does it before every look at the validation split, and at no other step.
        """
        return self._catch_up(state, ())[0] if self.learner.sampled is not None else state

    def _catch_up_program(self, state, nothing):
        return self.learner.caught_up(state), nothing

    def validate(self, state: TrainState) -> dict[str, float]:
        """Measures the model on the validation split.

        Returns:
          ``loss`` and ``accuracy``; ``auprc`` with one logit, averaged over classes; and ``violation_rate``, the share
          of pairs that violate the principle. The last two are taken over at most `_MAX_SCORES` scores: with very
          many classes, over ``num_classes`` of them at equal distances.
        """
        split, num_classes = self.dataset.validation, self.dataset.num_classes
        num_columns = max(1, min(num_classes, _MAX_SCORES // len(split)))
        columns = np.linspace(0, num_classes - 1, num_columns).round().astype(np.int32)
        outputs = []
        # Not larger than the split, and a multiple of the number of devices.
        num_devices = jax.device_count()
        batch_size = -(-min(fitting_batch(self.dataset.image_shape), len(split)) // num_devices) * num_devices
        for batch in evaluation_batches(split, batch_size=batch_size, **self.placement.host_part()):
            measured = self._validate(state, self.placement.split(batch), columns)
            outputs.append(jax.tree.map(np.asarray, self.placement.first(measured)))
        num_examples = sum(out["examples"] for out in outputs)
        scores, labels, where = (
            np.concatenate([out[name] for out in outputs]) for name in ("scores", "labels", "where")
        )
        scores, labels = scores[where], labels[where]
        # -1 for an example of a class that is not among the columns: a negative for each of them.
        places = np.full(num_classes, -1, np.int32)
        places[columns] = np.arange(num_columns)
        places = places[labels]
        slc = metrics.slc_metrics(jnp.asarray(scores), jnp.asarray(places))
        violation_rate = 0.0  # one class has no false logit
        if num_columns > 1:
            shown = jnp.asarray(scores[places >= 0]), jnp.asarray(places[places >= 0])
            violation_rate = float(principle.violation_rate(*shown))
        return {
            "loss": float(np.sum([out["loss"] * out["examples"] for out in outputs]) / num_examples),
            "accuracy": float(np.sum([out["correct"] for out in outputs]) / num_examples),
            "auprc": float(slc["auprc"]),
            "violation_rate": violation_rate,
            "num_classes": int(slc["num_classes"]),
        }

    def _validate_program(self, state, batch, columns):
        """Measures one batch of the validation split; what is counted and listed is that of all devices."""
        learner, placement, batch = self.learner, self.placement, self.placement.spread(batch)
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        outputs: Any = learner.model.apply(variables, batch.images, method=learner.method)
        loss, is_correct = learner.measure(state.params, outputs, batch, axis_name=placement.axis_name)
        logits = learner.logits(state.params, outputs)
        if isinstance(logits, LinearLogits):
            scores = class_logits(logits.features, logits.kernel, logits.bias, columns)
        else:
            scores = logits if len(columns) == logits.shape[1] else logits[:, columns]
        where = jnp.asarray(batch.where)
        counts = {"correct": jnp.sum(is_correct & where), "examples": jnp.sum(where)}
        per_example = {"scores": scores, "labels": jnp.asarray(batch.labels), "where": where}
        return {"loss": loss, **placement.total(counts), **placement.gather(per_example)}
