"""That the logits are never there: read off the compiled programs, and off XLA's own account of their memory."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from pols_jax.heads import all_logits
from pols_jax.losses import LOSSES, LinearLogits, make_loss

OPTIONS = {"noise_contrastive_estimation": {"num_noise": 100}}


def lower(name, make_logits, num_examples, num_features, num_classes):
    """Value and gradients, forward and backward in one program, for arrays that need not exist."""
    loss = make_loss(name, **OPTIONS.get(name, {}))
    shapes = (
        jax.ShapeDtypeStruct((num_examples, num_features), jnp.float32),
        jax.ShapeDtypeStruct((num_classes, num_features), jnp.float32),
        jax.ShapeDtypeStruct((num_classes,), jnp.float32),
    )
    labels = jax.ShapeDtypeStruct((num_examples,), jnp.int32)
    step = jax.value_and_grad(lambda layer, labels: loss(make_logits(*layer), labels))
    return jax.jit(step).lower(shapes, labels)


def largest_array(lowered):
    """The number of elements of the largest array, in the program as JAX wrote it and as XLA compiled it."""
    written = [x.split("x")[:-1] for x in re.findall(r"tensor<([\dx]*[a-z]\w*)>", lowered.as_text())]
    compiled = [x.split(",") for x in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", lowered.compile().as_text())]
    return max(math.prod(map(int, shape)) for shape in (*written, *compiled))


@pytest.mark.parametrize("name", LOSSES)
def test_no_array_of_examples_times_classes_is_in_the_program(name):
    num_examples, num_features, num_classes = 4096, 8, 16384
    # The largest arrays that have to be there are the kernel and a block of logits (1,024 classes).
    allowed = max(num_classes * num_features, 1024 * num_examples)
    largest = largest_array(lower(name, LinearLogits, num_examples, num_features, num_classes))
    assert largest <= 2 * allowed < num_examples * num_classes


def test_the_program_of_a_dense_loss_has_that_array():
    """The test above can fail."""
    assert largest_array(lower("cross_entropy", all_logits, 4096, 8, 16384)) >= 4096 * 16384


# One loss for each statistic.
@pytest.mark.parametrize(
    "name",
    ["batch_cross_entropy", "batch_max_margin", "binary_cross_entropy", "noise_contrastive_estimation"],
)
def test_temporary_memory_does_not_grow_with_the_classes_and_is_a_twentieth_of_the_logits(name):
    def temporary_bytes(num_classes):
        memory = lower(name, LinearLogits, 1024, 256, num_classes).compile().memory_analysis()
        return memory.temp_size_in_bytes

    few, many = temporary_bytes(2**16), temporary_bytes(2**20)
    assert many <= 1.1 * few
    assert many < 0.05 * (4 * 1024 * 2**20)
