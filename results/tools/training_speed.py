"""Does training cost more than its steps? `Trainer` against a scan of the same step that one would write by hand.

    python results/tools/training_speed.py results/speed_training.json

The paper's MLP on images of MNIST's size, held by the device. One dispatch of `Trainer` and one call of the scan do the
same number of steps, in turn, in one process.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from recording import recording

from pols_jax.benchmarking.timing import Variant
from pols_jax.data import ArraySplit, Dataset, sample_batch
from pols_jax.training.config import RunConfig
from pols_jax.training.learning import Learner, train_step
from pols_jax.training.trainer import Trainer

# Steps per call: about a second of work on two cores, as in a real run.
_STEPS = 200


def random_dataset(num_examples: int, image_shape: tuple[int, int, int], num_classes: int) -> Dataset:
    """Random pictures; what they show does not matter to the time.

    Examples:
      >>> random_dataset(50, (28, 28, 1), 10).num_classes
      10
    """
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num_examples, *image_shape), dtype=np.uint8)
    train = ArraySplit(images, rng.integers(num_classes, size=num_examples, dtype=np.int32))
    few = ArraySplit(train.images[:8], train.labels[:8])
    names = tuple(map(str, range(num_classes)))
    return Dataset("random", names, image_shape, train, few, few, provenance={})


def training_variants(config: RunConfig, dataset: Dataset, *, steps: int) -> list[Variant]:
    """Makes the two variants, each of which does ``steps`` more steps when called.

    Examples:
      >>> config, dataset = RunConfig(width=0.1, batch_size=32), random_dataset(64, (28, 28, 1), 10)
      >>> [variant.name for variant in training_variants(config, dataset, steps=2)]
      ['trainer', 'hand_written_scan']
    """
    trainer = Trainer(config, dataset)
    learner = Learner.from_config(config, dataset)
    states = {"trainer": trainer.init(), "scan": learner.init(dataset.image_shape)}
    assert isinstance(dataset.train, ArraySplit)
    images, labels = jnp.asarray(dataset.train.images), jnp.asarray(dataset.train.labels)

    @jax.jit(donate_argnums=0)
    def scan(state, images, labels):
        def step(state, _):
            batch = sample_batch(images, labels, state.step, seed=config.seed, batch_size=config.batch_size)
            return train_step(learner, state, batch)

        return lax.scan(step, state, length=steps)

    def by_trainer(call: int):
        states["trainer"], totals = trainer.advance(states["trainer"], (call + 1) * steps)
        return totals

    def by_scan(call: int):
        states["scan"], totals = scan(states["scan"], images, labels)
        return totals

    case = {"steps": steps, "batch_size": config.batch_size}
    return [Variant("trainer", by_trainer, case), Variant("hand_written_scan", by_scan, case)]


def main() -> None:
    """Measures, writes the record and prints its table."""
    config = RunConfig(optimizer="momentum", schedule="constant", learning_rate=0.1, batch_size=128)
    with recording("training") as recorder:
        variants = training_variants(config, random_dataset(60_000, (28, 28, 1), 10), steps=_STEPS)
        recorder.measure(variants, repetitions=41)


if __name__ == "__main__":
    main()
