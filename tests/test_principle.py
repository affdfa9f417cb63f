"""The Principle of Logit Separation: its margin, whether it holds, and how often it is violated."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings, strategies as st

from pols_jax.principle import holds, separation_margin, violation_rate

# Compiled once for each of the six shapes.
jitted_margin, jitted_holds = jax.jit(separation_margin), jax.jit(holds)


@settings(max_examples=30)
@given(
    num_examples=st.sampled_from([1, 2, 7]), num_classes=st.sampled_from([2, 5]), seed=st.integers(0, 2**16)
)
def test_margin_and_violations_equal_a_visit_to_every_pair(num_examples, num_classes, seed):
    rng = np.random.default_rng(seed)
    # Few distinct values, so that ties between true and false logits are common.
    logits = rng.integers(-3, 4, (num_examples, num_classes)).astype(np.float32)
    labels = rng.integers(0, num_classes, num_examples, dtype=np.int32)
    margin = oracles.separation_margin(logits, labels)
    assert jitted_margin(logits, labels) == margin
    assert jitted_holds(logits, labels) == (margin > 0)
    np.testing.assert_allclose(
        violation_rate(logits, labels), oracles.violation_rate(logits, labels), rtol=1e-6
    )


@pytest.mark.parametrize("num_examples", [63, 64, 65, 130])
def test_violations_are_counted_in_blocks_of_rows_without_losing_one(num_examples):
    rng = np.random.default_rng(num_examples)
    logits = rng.normal(size=(num_examples, 4)).astype(np.float32)
    labels = rng.integers(0, 4, num_examples, dtype=np.int32)
    np.testing.assert_allclose(
        violation_rate(logits, labels), oracles.violation_rate(logits, labels), rtol=1e-6
    )


def test_a_tie_of_a_true_and_a_false_logit_violates_the_principle():
    logits, labels = jnp.array([[1.0, 0.0], [1.0, 2.0]]), jnp.array([0, 1])
    assert separation_margin(logits, labels) == 0
    assert not holds(logits, labels)
    # Pairs (true, false): (1, 0) right, (1, 1) tied, (2, 0) right, (2, 1) right: one of four.
    assert violation_rate(logits, labels) == 0.25


def test_separated_logits_have_no_violations_and_reversed_ones_have_all():
    labels = np.arange(6) % 3
    separated = np.where(labels[:, None] == np.arange(3), 1.0, -1.0).astype(np.float32)
    assert holds(separated, labels)
    assert violation_rate(separated, labels) == 0
    assert violation_rate(-separated, labels) == 1


def test_the_three_measures_run_under_jit_and_vmap_and_read_16_bit_logits():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 5, 4)).astype(np.float32)
    labels = rng.integers(0, 4, (3, 5), dtype=np.int32)
    for measure in (separation_margin, holds, violation_rate):
        stacked = jax.jit(jax.vmap(measure))(logits, labels)
        apart = [measure(logits[i], labels[i]) for i in range(3)]
        np.testing.assert_allclose(stacked, apart, rtol=1e-6)
        low = measure(jnp.asarray(logits[0], jnp.bfloat16), labels[0])
        np.testing.assert_array_equal(
            low, measure(jnp.asarray(logits[0], jnp.bfloat16).astype(jnp.float32), labels[0])
        )


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_out_of_range_gives_nan_and_does_not_hold(label):
    logits, labels = jnp.eye(3), jnp.array([0, 1, label])
    assert np.isnan(separation_margin(logits, labels))
    assert not holds(logits, labels)
    assert np.isnan(violation_rate(logits, labels))


def test_wrong_input_is_an_error_that_names_the_argument():
    for measure in (separation_margin, holds, violation_rate):
        with pytest.raises(ValueError, match="logits must have 2 axes"):
            measure(np.ones(3, np.float32), np.int32(0))
        with pytest.raises(TypeError, match="labels must be integers"):
            measure(np.ones((2, 3), np.float32), np.ones(2, np.float32))
        with pytest.raises(ValueError, match="labels must have the shape of logits"):
            measure(np.ones((2, 3), np.float32), np.ones(3, np.int32))


def test_one_class_has_no_pairs_and_no_violation_rate():
    with pytest.raises(ValueError, match="logits must have at least two classes"):
        violation_rate(np.ones((2, 1), np.float32), np.zeros(2, np.int32))


@pytest.mark.parametrize("measure", [separation_margin, holds, violation_rate])
def test_an_empty_set_is_refused_in_one_sentence(measure):
    with pytest.raises(ValueError, match="logits must have at least one example"):
        measure(np.zeros((0, 3), np.float32), np.zeros(0, np.int32))


def test_a_label_that_int32_does_not_have_gives_nan_and_never_wraps_to_a_class():
    logits, labels = np.array([[2.0, 1.0], [0.0, 1.5]], np.float32), np.array([0, 2**32 + 1])
    assert np.isnan(separation_margin(logits, labels))
    assert np.isnan(violation_rate(logits, labels))
    assert not holds(logits, labels)
