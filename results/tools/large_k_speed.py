"""What the losses without all the logits cost: against the dense form, per step, and with sampled classes.

python results/tools/large_k_speed.py results/large_k.json
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from recording import recording

from pols_jax.benchmarking.timing import Variant
from pols_jax.heads import all_logits
from pols_jax.losses import LinearLogits, batch_cross_entropy, make_loss
from pols_jax.losses.sampled import add_rows, make_noise_sampler, sampled_value_and_grad


def random_layer(num_examples: int, num_features: int, num_classes: int) -> tuple[jax.Array, ...]:
    """Makes features, kernel, bias and labels whose logits are about as large as those of a new network.

    Examples:
      >>> [array.shape for array in random_layer(2, 3, 4)]
      [(2, 3), (4, 3), (4,), (2,)]
    """
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (num_examples, num_features)),
        jax.random.normal(keys[1], (num_classes, num_features)) * num_features**-0.5,
        jnp.zeros(num_classes),
        jax.random.randint(keys[2], (num_examples,), 0, num_classes),
    )


def loss_variants(name: str, num_examples: int, num_features: int, num_classes: int) -> list[Variant]:
    """Makes the dense and the linear form of a loss: value, and gradients of features, kernel and bias.

    Examples:
      >>> [variant.name for variant in loss_variants("cross_entropy", 4, 3, 8)]
      ['dense', 'linear']
    """
    loss, arrays = make_loss(name), random_layer(num_examples, num_features, num_classes)
    case = {"num_examples": num_examples, "num_features": num_features, "num_classes": num_classes}

    def variant(form, logits):
        def value(features, kernel, bias, labels):
            return loss(logits(features, kernel, bias), labels)

        program = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2))).lower(*arrays).compile()
        memory: Any = program.memory_analysis()
        sizes = {"loss": name, **case, "temporary_bytes": memory.temp_size_in_bytes}
        return Variant(form, lambda _: program(*arrays), sizes)

    return [variant("dense", all_logits), variant("linear", LinearLogits)]


def step_variant(num_examples: int, num_features: int, num_classes: int) -> Variant:
    """Makes a step of momentum on an output layer with batch cross-entropy, with everything donated.

    Examples:
      >>> step_variant(4, 3, 8).call(0).shape
      (8, 3)
    """
    features, kernel, bias, labels = random_layer(num_examples, num_features, num_classes)

    def loss(params, features, labels):
        return batch_cross_entropy(LinearLogits(features, *params), labels)

    def step(params, momentum, features, labels):
        grads = jax.grad(loss)(params, features, labels)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum

    params = (kernel, bias)
    state = [params, jax.tree.map(jnp.zeros_like, params)]
    program = jax.jit(step, donate_argnums=(0, 1)).lower(*state, features, labels).compile()

    def call(_):
        state[:] = program(*state, features, labels)
        return state[0][0]

    memory: Any = program.memory_analysis()
    beyond = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    case = {"num_examples": num_examples, "num_features": num_features, "num_classes": num_classes}
    return Variant("momentum_step", call, {**case, "bytes_beyond_state": beyond})


def sampled_variant(num_examples: int, num_features: int, num_classes: int, *, num_noise: int) -> Variant:
    """Makes a step of gradient descent on an output layer with sampled NCE, which writes the touched rows in place.

    Examples:
      >>> sampled_variant(4, 3, 8, num_noise=2).call(0).shape
      (8, 3)
    """
    features, kernel, bias, labels = random_layer(num_examples, num_features, num_classes)
    sampler = make_noise_sampler(np.full(num_classes, 1 / num_classes, np.float32))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(kernel, bias, sampler, features, labels, call):
        key = jax.random.fold_in(jax.random.key(0), call)
        _, _, rows = sampled_value_and_grad(
            key, features, kernel, bias, labels, sampler=sampler, num_noise=num_noise
        )
        return add_rows(kernel, bias, rows, scale=-0.1)

    state = [kernel, bias]

    def call(number: int):
        state[:] = step(*state, sampler, features, labels, jnp.int32(number))
        return state[0]

    case = {"num_examples": num_examples, "num_features": num_features, "num_classes": num_classes}
    return Variant("sampled_step", call, {**case, "num_noise": num_noise})


def main() -> None:
    """Measures everything, writes the record and prints its tables."""
    with recording("large_k") as recorder:
        sampled = [sampled_variant(256, 256, 2**power, num_noise=100) for power in (12, 16, 20)]
        recorder.measure(sampled, repetitions=50, warmup=5)
        del sampled
        recorder.measure([step_variant(256, 256, 2**20)], repetitions=3, warmup=1)
        for name in ("batch_cross_entropy", "binary_cross_entropy", "batch_max_margin"):
            recorder.measure(loss_variants(name, 128, 512, 2**18), repetitions=7, warmup=1)
        recorder.measure(loss_variants("batch_cross_entropy", 1024, 512, 2**18), repetitions=5, warmup=1)


if __name__ == "__main__":
    main()
