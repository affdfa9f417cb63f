"""What glyph batches cost beside a training step: `python results/tools/throughput.py`.

Times drawing and augmenting a batch on the device, and one Adam step of the paper's MLP (two dense layers of
500 with batch norm) on such a batch, in turns, so that both see the same machine.
"""

import argparse
import functools

import jax

from pols_jax.benchmarking.timing import Variant, measure
from pols_jax.data import ArraySplit, load, sample_batch
from pols_jax.training.config import RunConfig
from pols_jax.training.learning import Learner, train_step


def variants(batch_size: int, *, max_classes: int | None = None) -> list[Variant]:
    """Makes the two variants: a batch, and a training step on a batch that is there.

    Examples:
      >>> [variant.name for variant in variants(8, max_classes=10)]
      ['batch', 'step']
    """
    dataset = load("glyphs", max_classes=max_classes)
    assert isinstance(dataset.train, ArraySplit)
    arrays = jax.device_put((dataset.train.images, dataset.train.labels))
    draw = jax.jit(functools.partial(sample_batch, seed=0, batch_size=batch_size, augment=dataset.augment))
    config = RunConfig(optimizer="adam", schedule="constant", batch_size=batch_size)
    learner = Learner.from_config(config, dataset)
    step = jax.jit(train_step, static_argnums=0, donate_argnums=1)
    batch, states = draw(*arrays, 0), [learner.init(dataset.image_shape)]

    def train(call: int):
        states[0], totals = step(learner, states[0], batch)
        return totals

    return [Variant("batch", lambda call: draw(*arrays, call)), Variant("step", train)]


def main() -> None:
    """Prints the two times and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=50)
    arguments = parser.parse_args()
    batch, step = measure(variants(arguments.batch_size), repetitions=arguments.repetitions)
    print(f"batch of {arguments.batch_size} augmented glyphs: {batch.median_ms:6.2f} ms")
    print(f"MLP training step on that batch: {step.median_ms:6.2f} ms")
    print(f"ratio: {100 * batch.median_ms / step.median_ms:.1f} %")


if __name__ == "__main__":
    main()
