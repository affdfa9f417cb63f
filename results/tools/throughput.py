"""What glyph batches cost beside a training step: `python results/tools/throughput.py`.

Times drawing and augmenting a batch on the device, and one Adam step of the paper's MLP (two dense layers of
500 with batch norm) on such a batch, in turns, so that both see the same machine.
"""

import argparse
import functools
import statistics
import time
from typing import NamedTuple

import flax.linen as nn
import jax
import optax

from pols_jax.data.dataset import ArraySplit
from pols_jax.data.loading import load
from pols_jax.data.sampling import sample_batch


class Throughput(NamedTuple):
    """Median times of one batch and of one training step.

    Attributes:
        batch_ms: Drawing and augmenting a batch.
        step_ms: One training step on a batch that is there.
    """

    batch_ms: float
    step_ms: float

    @property
    def ratio(self) -> float:
        """The batch's time as a share of the step's."""
        return self.batch_ms / self.step_ms


class _Mlp(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(500)(x)))
        return nn.Dense(self.num_classes)(x)


def measure(*, batch_size: int = 256, repetitions: int = 50, max_classes: int | None = None) -> Throughput:
    """Time glyph batches and training steps in turns.

    Args:
        batch_size: Examples in a batch.
        repetitions: How often each is timed, after one untimed call.
        max_classes: Number of glyph classes; by default all.

    Returns:
        The two medians.

    >>> measure(batch_size=8, repetitions=1, max_classes=10).batch_ms > 0
    True
    """
    dataset = load("glyphs", max_classes=max_classes)
    assert isinstance(dataset.train, ArraySplit)
    images, labels = jax.device_put((dataset.train.images, dataset.train.labels))
    draw = jax.jit(functools.partial(sample_batch, seed=0, batch_size=batch_size, augment=dataset.augment))
    batch = draw(images, labels, 0)
    model, optimizer = _Mlp(dataset.num_classes), optax.adam(1e-3)
    variables = model.init(jax.random.key(0), batch.images)

    def loss(params, batch_stats, batch):
        logits, updates = model.apply(
            {"params": params, "batch_stats": batch_stats}, batch.images, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return losses.mean(where=batch.where), updates["batch_stats"]

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        params, batch_stats, optimizer_state = state
        gradients, batch_stats = jax.grad(loss, has_aux=True)(params, batch_stats, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
            updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        return optax.apply_updates(params, updates), batch_stats, optimizer_state

    state = (variables["params"], variables["batch_stats"], optimizer.init(variables["params"]))
    state = jax.block_until_ready(train_step(state, batch))
    batch_ms, step_ms = [], []
    for step in range(repetitions):
        start = time.perf_counter()
        batch = jax.block_until_ready(draw(images, labels, step))
        drawn = time.perf_counter()
        state = jax.block_until_ready(train_step(state, batch))
        batch_ms.append(1e3 * (drawn - start))
        step_ms.append(1e3 * (time.perf_counter() - drawn))
    return Throughput(statistics.median(batch_ms), statistics.median(step_ms))


def main() -> None:
    """Print the two times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=50)
    arguments = parser.parse_args()
    result = measure(batch_size=arguments.batch_size, repetitions=arguments.repetitions)
    print(f"batch of {arguments.batch_size} augmented glyphs: {result.batch_ms:6.2f} ms")
    print(f"MLP training step on that batch: {result.step_ms:6.2f} ms")
    print(f"ratio: {100 * result.ratio:.1f} %")


if __name__ == "__main__":
    main()
