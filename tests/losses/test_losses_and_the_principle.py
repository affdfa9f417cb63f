"""Which losses force the Principle of Logit Separation, and how each is related to losses that others have written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from oracles import ANY_K, batch_cross_entropy_with_epsilon

from pols_jax import losses
from pols_jax.losses import ALIGNED, LOSSES, make_loss
from pols_jax.principle import holds, separation_margin

NOT_ALIGNED = tuple(name for name in LOSSES if name not in ALIGNED)


def problem():
    return oracles.problem(6, 4)


def counter_example(a):
    """Two examples whose own true logit wins by `a`, while a false logit of the first is above the second's true one."""
    return jnp.array([[2.0 * a, a], [-2.0 * a, -a]], jnp.float32), jnp.array([0, 1])


@pytest.mark.parametrize("a", [1.0, 3.0, 10.0, 100.0])
def test_the_counter_example_violates_the_principle_at_every_scale(a):
    logits, labels = counter_example(a)
    assert not holds(logits, labels)
    assert separation_margin(logits, labels) == -2.0 * a  # the true logit -a against the false logit a


def test_on_the_counter_example_the_losses_that_are_not_aligned_go_to_zero():
    # Each example's own gap is a: CE is log(1 + e^-a), max-margin is max(0, 1 - a).
    for a in (1.0, 10.0, 20.0):
        value = make_loss("cross_entropy")(*counter_example(a))
        # log(1 + x) in float32 knows x to 6e-8, the distance from 1 to the next number.
        np.testing.assert_allclose(value, np.log1p(np.exp(-a)), atol=1e-7)
    assert make_loss("cross_entropy")(*counter_example(100.0)) == 0
    assert make_loss("max_margin")(*counter_example(1.0)) == 0


@pytest.mark.parametrize("name", sorted(ALIGNED))
def test_on_the_counter_example_every_aligned_loss_stays_away_from_its_minimum(name):
    loss = jax.jit(make_loss(name, **ANY_K[name]))
    # The true class counts among NCE's noise: with t q = 1 its two terms are sp(-z) + sp(z), never below 2 log 2.
    minimum = 2.0 * np.log(2.0) if name == "noise_contrastive_estimation" else 0.0
    values = [loss(*counter_example(a)) for a in np.geomspace(0.01, 1000, 60)]
    # The nearest is self-normalization at alpha = 0.1, with 0.57 at a = 0.69.
    assert min(values) > minimum + 0.5


@pytest.mark.parametrize("name", sorted(ALIGNED))
def test_gradient_descent_on_an_aligned_loss_ends_with_the_principle_holding(name):
    num_problems = 48
    rng = np.random.default_rng(0)
    # Padded to one shape and masked, so that one program is compiled for all problems.
    num_examples, num_classes = rng.integers(1, 7, num_problems), rng.integers(2, 6, num_problems)
    is_example, is_class = np.arange(6) < num_examples[:, None], np.arange(5) < num_classes[:, None]
    labels = np.where(is_example, rng.integers(0, num_classes[:, None], (num_problems, 6)), -1).astype(
        np.int32
    )
    scales = rng.choice([0.1, 1.0, 5.0], num_problems)[:, None, None]
    start = (scales * rng.normal(size=(num_problems, 6, 5))).astype(np.float32)
    # A class beyond the problem's is one that no example ever has and no gradient ever leaves: it is masked by -100.
    ends = np.asarray(jax.vmap(functools.partial(descend, name))(start, labels, is_example, is_class))
    for end, label, m, k in zip(ends, labels, num_examples, num_classes, strict=True):
        assert oracles.separation_margin(end[:m, :k], label[:m]) > 0


@functools.partial(jax.jit, static_argnames="name")
def descend(name, start, labels, is_example, is_class, num_steps=4000):
    """Minimizes a loss over free logits by plain gradient descent."""
    loss = make_loss(name, **ANY_K[name])
    # The batch losses give one logit a slope of about 1 / m; the hinge's slope does not fade, so its steps must be small.
    step_size = 0.05 if name == "batch_max_margin" else 0.5

    def mean_loss(logits):
        return loss(jnp.where(is_class[None, :], logits, -100.0), labels, where=is_example)

    return jax.lax.fori_loop(0, num_steps, lambda _, z: z - step_size * jax.grad(mean_loss)(z), start)


@pytest.mark.parametrize("name", NOT_ALIGNED)
def test_gradient_descent_on_a_loss_that_is_not_aligned_need_not_end_with_the_principle_holding(name):
    # The second example starts 10 lower than the first; no gradient ever moves a row as a whole.
    start, labels = np.array([[5.0, 5.0], [-5.0, -5.0]], np.float32), np.array([0, 1])
    end = descend(name, start, labels, np.ones(2, bool), np.ones(2, bool))
    assert make_loss(name)(end, labels) < 0.01
    assert not holds(end, labels)
    np.testing.assert_allclose(end.sum(axis=1), start.sum(axis=1), atol=1e-3)


def test_noise_contrastive_estimation_is_at_rest_where_true_logits_are_zero_whatever_the_noise():
    noise_probs = np.array([0.6, 0.3, 0.09, 0.01], np.float32)
    logits = np.where(np.eye(4, dtype=bool), 0.0, -50.0).astype(np.float32)
    loss = make_loss("noise_contrastive_estimation", num_noise=10, noise_probs=noise_probs)
    # 1e-7 is a rounding of float32; the false logits still fall, by no more than e^-50.
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(logits, np.arange(4)), np.zeros((4, 4)), atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_losses_that_are_not_aligned_ignore_a_shift_of_one_example(name):
    logits, labels = problem()
    shift = np.array([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], np.float32)[:, None]
    loss = jax.jit(make_loss(name, **ANY_K[name]))
    difference = abs(loss(logits + shift, labels) - loss(logits, labels))
    # Rounding of float32 logits of about 20 is below 1e-5.
    assert difference < 1e-5 if name in NOT_ALIGNED else difference > 0.1


@pytest.mark.parametrize("name", LOSSES)
def test_a_common_shift_is_ignored_by_the_losses_that_only_compare_logits(name):
    logits, labels = problem()
    loss = jax.jit(make_loss(name, **ANY_K[name]))
    difference = abs(loss(logits + np.float32(3.0), labels) - loss(logits, labels))
    compares_only = {"cross_entropy", "max_margin", "batch_cross_entropy", "batch_max_margin"}
    assert difference < 1e-5 if name in compares_only else difference > 0.1


def test_cross_entropy_is_optaxs():
    logits, labels = problem()
    np.testing.assert_allclose(
        losses.cross_entropy(logits, labels),
        optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels),
        rtol=1e-5,
        atol=1e-6,
    )


def test_max_margin_is_optaxs_multiclass_hinge_at_margin_one():
    logits, labels = problem()
    np.testing.assert_allclose(
        losses.max_margin(logits, labels, margin=1.0),
        optax.losses.multiclass_hinge_loss(logits, labels),
        rtol=1e-6,
        atol=1e-6,
    )


def test_binary_cross_entropy_is_optaxs_sigmoid_cross_entropy_summed_over_the_classes():
    logits, labels = problem()
    one_hot = jax.nn.one_hot(labels, 4)
    np.testing.assert_allclose(
        losses.binary_cross_entropy(logits, labels),
        optax.losses.sigmoid_binary_cross_entropy(logits, one_hot).sum(axis=-1),
        rtol=1e-6,
    )


def test_batch_cross_entropy_is_optaxs_softmax_cross_entropy_over_the_whole_batch_minus_log_m():
    logits, labels = problem()
    one_hot = jax.nn.one_hot(labels, 4)
    np.testing.assert_allclose(
        losses.batch_cross_entropy(logits, labels) + np.log(6.0),
        optax.losses.softmax_cross_entropy(logits, one_hot / 6.0, axis=None),
        rtol=1e-6,
    )


def test_batch_cross_entropy_is_the_limit_of_the_authors_form_as_its_epsilon_goes_to_zero(x64):
    logits, labels = problem()
    logits = logits.astype(np.float64)
    exact = losses.batch_cross_entropy(logits, labels)
    epsilons = (1e-4, 1e-6, 1e-8, 1e-10)
    errors = [abs(batch_cross_entropy_with_epsilon(logits, labels, epsilon) - exact) for epsilon in epsilons]
    # d/d epsilon of the mean of log(1/m + e) - log(q + e) is at most mean(1 / q): the error shrinks with epsilon.
    slope = errors[0] / epsilons[0]
    for error, epsilon in zip(errors[1:], epsilons[1:], strict=True):
        assert error < 2 * slope * epsilon + 1e-13
    assert errors[0] > 1e-4  # at the larger epsilon the two forms do differ
