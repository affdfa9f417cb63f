"""The seven losses: values and gradients against the oracle, goldens, precision, padding and edge cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from oracles import ANY_K, CASES, NUM_CLASSES, ORACLES, central_difference, problem, value_and_gradient

from pols_jax import losses
from pols_jax.losses import LOSSES, make_loss

every_case = pytest.mark.parametrize(
    ("name", "hyperparameters"), CASES, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
every_loss = pytest.mark.parametrize("name", LOSSES)
BATCH_LOSSES = ("batch_cross_entropy", "batch_max_margin")

_COMPILED = {}


def jitted_value_and_grad(name, **hyperparameters):
    """Compiled once for all tests, to be quick; `test_losses_across_devices` compares eager with jit."""
    key = (name, repr(hyperparameters))
    if key not in _COMPILED:
        _COMPILED[key] = jax.jit(jax.value_and_grad(make_loss(name, **hyperparameters)))
    return _COMPILED[key]


@pytest.mark.parametrize("name", ORACLES)
def test_the_oracles_hand_derived_gradient_is_the_slope_of_its_value(name):
    hyperparameters = ANY_K[name]
    logits, labels = problem()
    logits = logits.astype(np.float64)
    slope = central_difference(lambda z: value_and_gradient(name, z, labels, **hyperparameters)[0], logits)
    _, gradient = value_and_gradient(name, logits, labels, **hyperparameters)
    # Central differences with step 1e-5 are good to 1e-10 in the step and 1e-16 / 1e-5 * |loss| in the rounding.
    np.testing.assert_allclose(gradient, slope, atol=2e-9)


@every_case
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_the_oracle_in_float32(name, hyperparameters, seed):
    logits, labels = problem(seed=seed)
    value, gradient = jitted_value_and_grad(name, **hyperparameters)(logits, labels)
    expected_value, expected_gradient = value_and_gradient(name, logits, labels, **hyperparameters)
    # A few roundings of float32 (6e-8) on numbers up to about 20.
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-6)


@every_case
def test_value_and_gradient_equal_the_oracle_in_float64(name, hyperparameters, x64):
    logits, labels = problem()
    logits = logits.astype(np.float64)
    if "noise_probs" in hyperparameters:
        hyperparameters = {
            **hyperparameters,
            "noise_probs": hyperparameters["noise_probs"].astype(np.float64),
        }
    value, gradient = jitted_value_and_grad(name, **hyperparameters)(logits, labels)
    assert value.dtype == gradient.dtype == jnp.float64
    expected_value, expected_gradient = value_and_gradient(name, logits, labels, **hyperparameters)
    np.testing.assert_allclose(value, expected_value, rtol=1e-14)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-14)


@every_loss
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_logits_are_accumulated_in_float32(name, dtype):
    hyperparameters = ANY_K[name]
    logits, labels = problem()
    logits = jnp.asarray(logits, dtype)
    value, gradient = jitted_value_and_grad(name, **hyperparameters)(logits, labels)
    assert value.dtype == jnp.float32
    assert gradient.dtype == dtype
    # The oracle sees the same rounded logits, so that the value has the precision of float32, not of 16 bits.
    expected_value, expected_gradient = value_and_gradient(
        name, logits.astype(jnp.float32), labels, **hyperparameters
    )
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    # The gradient is rounded once, on the way out: half a unit in the last place (2^-9 or 2^-12), and float16 loses
    # digits below its smallest normal number, 6e-5. Where a logit has two gradients (as true logit and among all k)
    # these are added in float32.
    np.testing.assert_allclose(gradient.astype(jnp.float32), expected_gradient, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("name", "hyperparameters"), [case for case in CASES if case[0] not in BATCH_LOSSES])
def test_per_example_losses_take_any_leading_axes_and_give_one_value_each(name, hyperparameters):
    logits, labels = problem(12)
    loss = jax.jit(functools.partial(LOSSES[name], **hyperparameters))
    values = loss(logits.reshape(3, 2, 2, NUM_CLASSES), labels.reshape(3, 2, 2))
    expected = ORACLES[name].loss(logits.astype(np.float64), labels, **hyperparameters)
    assert values.shape == (3, 2, 2)
    np.testing.assert_allclose(values.ravel(), expected, rtol=1e-6)
    one = loss(logits[0], labels[0])
    assert one.shape == ()
    np.testing.assert_allclose(one, expected[0], rtol=1e-6)


def test_goldens_computed_by_hand():
    logits, labels = jnp.array([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]]), jnp.array([0, 1])
    # Row 0: e^2 + e^1 + e^0 = 7.389056 + 2.718282 + 1 = 11.107338, log = 2.407606.
    # Row 1: e^0 + e^3 + e^1 = 1 + 20.085537 + 2.718282 = 23.803819, log = 3.169846.
    golden = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    # logZ - z_y: 2.407606 - 2 and 3.169846 - 3.
    golden(losses.cross_entropy(logits, labels), [0.40760596, 0.16984602])
    # max(0, margin - z_y + rival): 2 - 2 + 1 = 1 and 2 - 3 + 1 = 0; with margin 1: 0 and max(0, -1) = 0.
    golden(losses.max_margin(logits, labels, margin=2.0), [1.0, 0.0])
    golden(losses.max_margin(logits, labels), [0.0, 0.0])
    # CE + 0.5 * logZ^2: 0.407606 + 0.5 * 5.796566 and 0.169846 + 0.5 * 10.047924.
    golden(losses.self_normalization(logits, labels, alpha=0.5), [3.30588894, 5.19380782])
    # t = 3 and q uniform over 3 classes make log(t q) = 0: sp(-z_y) + sum_j sp(z_j), with
    # sp(0) = 0.693147, sp(1) = 1.313262, sp(2) = 2.126928, sp(3) = 3.048587, sp(-2) = 0.126928, sp(-3) = 0.048587:
    # 0.126928 + 2.126928 + 1.313262 + 0.693147 and 0.048587 + 0.693147 + 3.048587 + 1.313262.
    golden(
        losses.noise_contrastive_estimation(logits, labels, num_noise=3), [4.26026489, 5.10358356], rtol=2e-6
    )
    # The same without the true class in the sum: 0.126928 + 1.313262 + 0.693147 and 0.048587 + 0.693147 + 1.313262.
    golden(losses.binary_cross_entropy(logits, labels), [2.13333688, 2.05499622])
    # log(11.107338 + 23.803819) - (2 + 3) / 2 - log 2 = 3.552806 - 2.5 - 0.693147.
    golden(losses.batch_cross_entropy(logits, labels), 0.35965927)
    # True logits 2 and 3, false ones up to 1: the batch term (1/2) max(0, 2 - 2 + 1) = 0.5, mean max-margin 0.5.
    golden(losses.batch_max_margin(logits, labels, margin=2.0), 1.0)
    # With margin 0.5 all is separated by more: 0.
    golden(losses.batch_max_margin(logits, labels, margin=0.5), 0.0)


@pytest.mark.parametrize("name", [n for n in LOSSES if "margin" not in n])
def test_smooth_losses_pass_the_numerical_check_of_first_and_second_derivatives(name, x64):
    logits, labels = problem(3, 3)
    loss = make_loss(name, **ANY_K[name])
    check_grads(jax.jit(lambda z: loss(z, labels)), (logits.astype(np.float64),), order=2, modes=["rev"])


@pytest.mark.parametrize("name", [n for n in LOSSES if "margin" in n])
def test_margin_losses_pass_the_numerical_check_of_first_derivatives_away_from_their_kinks(name, x64):
    logits, labels = problem(3, 3)
    loss = make_loss(name)
    check_grads(jax.jit(lambda z: loss(z, labels)), (logits.astype(np.float64),), order=1)


@every_loss
def test_forward_mode_and_the_hessian_agree_with_reverse_mode(name):
    logits, labels = problem()
    loss = make_loss(name, **ANY_K[name])
    direction = jnp.asarray(problem(seed=9)[0])
    _, slope = jax.jit(lambda z, dz: jax.jvp(lambda z: loss(z, labels), (z,), (dz,)))(logits, direction)
    np.testing.assert_allclose(
        slope, jnp.sum(jitted_value_and_grad(name, **ANY_K[name])(logits, labels)[1] * direction), rtol=1e-5
    )
    hessian = jax.jit(jax.hessian(loss))(logits, labels).reshape(35, 35)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-6)
    # Every loss is convex in the logits (self-normalization only where log Z >= 0, as in this problem).
    assert np.linalg.eigvalsh(np.asarray(hessian, np.float64)).min() > -1e-6


@every_case
def test_padding_changes_neither_value_nor_gradient_whatever_it_holds(name, hyperparameters):
    logits, labels = problem(7)
    where = np.array([True, False, True, True, False, True, False])
    padded_logits = np.where(
        where[:, None], logits, np.array([np.nan, np.inf, -np.inf, 1e38, np.nan], np.float32)
    )
    padded_labels = np.where(where, labels, -1)
    run = jitted_value_and_grad(name, **hyperparameters)
    value, gradient = run(padded_logits, padded_labels, where=where)
    expected_value, expected_gradient = value_and_gradient(name, logits, labels, where, **hyperparameters)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-6)
    assert (gradient[~where] == 0).all()


@every_loss
def test_a_mask_may_leave_one_row(name):
    logits, labels = problem()
    where = np.arange(7) == 1
    one_row, gradient = jitted_value_and_grad(name, **ANY_K[name])(logits, labels, where=where)
    expected_value, expected_gradient = value_and_gradient(name, logits, labels, where, **ANY_K[name])
    np.testing.assert_allclose(one_row, expected_value, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-6)


def test_a_mask_may_be_a_python_list():
    logits, labels = problem(3)
    for name in ("cross_entropy", "batch_cross_entropy"):
        assert make_loss(name)(logits, labels, where=[True, False, True]).shape == ()


@every_loss
def test_an_all_masked_batch_gives_zero_and_zero_gradients(name):
    logits, labels = problem()
    value, gradient = jitted_value_and_grad(name, **ANY_K[name])(
        logits * np.nan, labels, where=np.zeros(7, bool)
    )
    assert value == 0
    assert (gradient == 0).all()


@every_loss
@pytest.mark.parametrize("pattern", ["random signs", "all equal", "true low", "true high", "one huge"])
def test_values_and_gradients_stay_finite_and_right_for_logits_of_ten_thousand(name, pattern):
    m, k = 7, NUM_CLASSES
    _, labels = problem(m, k)
    is_true = labels[:, None] == np.arange(k)
    logits = {
        "random signs": 1e4 * np.sign(problem(m, k, seed=3)[0]),
        "all equal": np.full((m, k), 1e4),
        "true low": np.where(is_true, -1e4, 1e4),
        "true high": np.where(is_true, 1e4, -1e4),
        "one huge": np.where(np.arange(m * k).reshape(m, k) == 5, 1e4, 0.0),
    }[pattern].astype(np.float32)
    value, gradient = jitted_value_and_grad(name, **ANY_K[name])(logits, labels)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    expected, _ = value_and_gradient(name, logits, labels, **ANY_K[name])
    # Small parts beside large ones are kept to the precision of the large ones, and no worse than 1e-3.
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-3)


def test_a_small_cross_entropy_survives_beside_logits_of_ten_thousand():
    logits, labels = np.array([[1e4, 1e4 - 1.0]], np.float32), np.array([0])
    # log(1 + e^-1) = 0.313262; computed as 10000.313 - 10000 it would be 0.3135 (float32 steps by 0.00098 there).
    for name in ("cross_entropy", "batch_cross_entropy"):
        np.testing.assert_allclose(jax.jit(make_loss(name))(logits, labels), 0.31326169, rtol=1e-6)


@every_loss
@pytest.mark.parametrize("shape", [(7, NUM_CLASSES), (5, 2)])
def test_all_equal_logits_have_the_oracles_value_and_gradients_that_are_a_subgradient(name, shape):
    m, k = shape
    labels = np.arange(m, dtype=np.int32) % k
    logits = np.full((m, k), 0.5, np.float32)
    value, gradient = jitted_value_and_grad(name, **ANY_K[name])(logits, labels)
    expected_value, expected_gradient = value_and_gradient(name, logits, labels, **ANY_K[name])
    np.testing.assert_allclose(value, expected_value, rtol=1e-6, atol=1e-7)
    if "margin" not in name:
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    else:
        # At a tie any of the tied logits may have the slope, but what true logits lose false logits gain.
        is_true = labels[:, None] == np.arange(k)
        total = np.abs(expected_gradient).sum() / 2
        np.testing.assert_allclose(-gradient[is_true].sum(), total, atol=1e-6)
        np.testing.assert_allclose(gradient[~is_true].sum(), total, atol=1e-6)


@pytest.mark.parametrize("name", ["max_margin", "batch_max_margin"])
def test_ties_at_the_maximum_give_a_valid_subgradient_of_a_convex_loss(name):
    labels = np.array([0, 1, 2])
    tied = np.array([[1.0, 2.0, 2.0], [2.0, 1.0, 2.0], [2.0, 0.0, 1.0]], np.float32)
    loss = jax.jit(make_loss(name))
    value, gradient = jitted_value_and_grad(name)(tied, labels)
    for seed in range(20):
        step = problem(3, 3, seed=seed)[0]
        # A convex function lies above each of its tangents; 1e-5 for rounding of values of about 5.
        assert loss(tied + step, labels) >= value + np.sum(gradient * step) - 1e-5


@every_loss
@pytest.mark.parametrize("num_classes", [1, 2])
def test_one_and_two_classes_equal_the_oracle(name, num_classes):
    logits, labels = problem(5, num_classes, seed=2)
    value, gradient = jitted_value_and_grad(name, **ANY_K[name])(logits, labels)
    expected_value, expected_gradient = value_and_gradient(name, logits, labels, **ANY_K[name])
    np.testing.assert_allclose(value, expected_value, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-6)


def test_batch_cross_entropy_of_one_example_is_its_cross_entropy():
    logits, labels = problem(1)
    value, gradient = jitted_value_and_grad("batch_cross_entropy")(logits, labels)
    expected, expected_gradient = jitted_value_and_grad("cross_entropy")(logits, labels)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-7)


def test_batch_cross_entropy_reaches_its_minimum_of_zero_without_rounding_below_it():
    labels = np.arange(100) % 10
    logits = np.where(labels[:, None] == np.arange(10), 50.0, -50.0).astype(np.float32)
    assert jax.jit(losses.batch_cross_entropy)(logits, labels) == 0.0
