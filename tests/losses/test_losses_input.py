"""What the seven losses accept: labels, masks, noise and hyperparameters, and what they say about wrong ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ANY_K, ORACLES, problem, value_and_gradient

from pols_jax import losses
from pols_jax.losses import ALIGNED, LOSSES, make_loss
from pols_jax.losses.checks import as_class_ids

every_loss = pytest.mark.parametrize("name", LOSSES)
BATCH_LOSSES = ("batch_cross_entropy", "batch_max_margin")


@every_loss
@pytest.mark.parametrize("dtype", [np.int8, np.uint32])
def test_labels_may_be_of_any_integer_dtype(name, dtype):
    # 200 classes do not fit int8: the number of classes must never be cast to the dtype of the labels.
    logits = problem(4, 200)[0]
    labels = np.array([0, 5, 100, 127], dtype)
    loss = jax.jit(make_loss(name, **ANY_K[name]))
    np.testing.assert_array_equal(loss(logits, labels), loss(logits, labels.astype(np.int32)))


@every_loss
def test_a_label_out_of_range_gives_nan_and_never_the_loss_of_another_class(name):
    loss = jax.jit(make_loss(name, **ANY_K[name]))
    for label in (-1, 5, 2**31 - 1, -(2**31)):
        logits, labels = problem()
        labels[1] = label
        assert np.isnan(loss(logits, labels))
        if name not in BATCH_LOSSES:
            per_example = LOSSES[name](logits, labels, **ANY_K[name])
            np.testing.assert_array_equal(np.isnan(per_example), np.arange(7) == 1)


WIDE = [
    np.array([1, 2**32 + 2], np.int64),
    np.array([1, -(2**32) + 2], np.int64),
    np.array([1, 2**32 - 1], np.uint32),
    np.array([1, 2**63 + 2], np.uint64),
]


@pytest.mark.parametrize("labels", WIDE, ids=lambda labels: f"{labels[1]}")
def test_a_label_that_int32_does_not_have_gives_nan_and_never_wraps_to_a_class(labels):
    logits, layer = np.ones((2, 5), np.float32), (np.ones((2, 3), np.float32), np.ones((5, 3), np.float32))
    for given in (logits, losses.LinearLogits(*layer)):
        values = losses.cross_entropy(given, labels)
        np.testing.assert_array_equal(np.isnan(values), [False, True])
    assert np.isnan(losses.batch_cross_entropy(logits, labels))
    assert as_class_ids(labels, name="labels").tolist() == [1, -1]


@every_loss
def test_a_python_list_of_labels_does_not_wrap_either(name):
    assert np.isnan(make_loss(name, **ANY_K[name])(np.ones((2, 5), np.float32), [1, 2**32 + 2]))


def test_a_64_bit_label_under_jit_gives_nan_too(x64):
    for labels in WIDE:
        values = jax.jit(losses.cross_entropy)(np.ones((2, 5)), labels)
        np.testing.assert_array_equal(np.isnan(values), [False, True])


def test_a_class_that_is_never_noise_is_the_limit_of_a_class_that_is_hardly_ever_noise():
    logits, labels = problem()

    def loss(rare):
        noise_probs = np.array([0.5 - rare, 0.25, 0.25, rare / 2, rare / 2], np.float32)
        return jax.value_and_grad(
            make_loss("noise_contrastive_estimation", num_noise=4, noise_probs=noise_probs)
        )(logits, labels)

    never_value, never_gradient = loss(0.0)
    assert np.isfinite(never_value)
    assert np.isfinite(never_gradient).all()
    assert (never_gradient[:, 3:] == 0).all()
    # t q log(1 + e^z / (t q)) is of order t q log(1 / (t q)) = 2e-7 here.
    almost_value, almost_gradient = loss(1e-9)
    np.testing.assert_allclose(never_value, almost_value, rtol=1e-5)
    np.testing.assert_allclose(never_gradient, almost_gradient, atol=1e-6)


@pytest.mark.parametrize("where_from", ["numpy", "closed over", "traced"])
def test_noise_probs_may_be_a_constant_or_traced_under_jit(where_from):
    logits, labels = problem()
    noise_probs = np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32)
    on_device = jnp.asarray(noise_probs)
    if where_from == "traced":
        value = jax.jit(
            lambda z, q: losses.noise_contrastive_estimation(z, labels, num_noise=2, noise_probs=q)
        )(logits, on_device)
    else:
        q = noise_probs if where_from == "numpy" else on_device
        value = jax.jit(lambda z: losses.noise_contrastive_estimation(z, labels, num_noise=2, noise_probs=q))(
            logits
        )
    expected = ORACLES["noise_contrastive_estimation"].loss(logits, labels, 2, noise_probs)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("noise_probs", "error", "message"),
    [
        ([0.5, 0.5], ValueError, r"noise_probs must have shape \[5\], got shape \(2,\)"),
        ([[0.2] * 5], ValueError, r"noise_probs must have shape \[5\], got shape \(1, 5\)"),
        ([0.2] * 4 + [0.4], ValueError, "noise_probs must sum to one"),
        ([0.5, 0.5, 0.5, -0.5, 0.0], ValueError, "noise_probs must not be negative"),
        ([np.nan] * 5, ValueError, "noise_probs must not be negative"),
        ([1, 0, 0, 0, 0], TypeError, "noise_probs must be floating-point numbers"),
    ],
)
def test_noise_probs_that_are_no_distribution_over_the_classes_are_refused(noise_probs, error, message):
    logits, labels = problem()
    with pytest.raises(error, match=message):
        losses.noise_contrastive_estimation(logits, labels, num_noise=2, noise_probs=np.array(noise_probs))


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("max_margin", "margin"),
        ("batch_max_margin", "margin"),
        ("self_normalization", "alpha"),
        ("noise_contrastive_estimation", "num_noise"),
    ],
)
@pytest.mark.parametrize("value", [0, -1.0, np.float32(-2), float("nan")])
def test_a_hyperparameter_that_is_not_positive_is_an_error_that_names_it(name, argument, value):
    with pytest.raises(ValueError, match=f"{argument} must be positive"):
        make_loss(name, **{argument: value})(*problem())


@pytest.mark.parametrize(
    ("name", "argument", "values"),
    [
        ("max_margin", "margin", [0.5, 1.0, 2.0]),
        ("batch_max_margin", "margin", [0.5, 1.0, 2.0]),
        ("self_normalization", "alpha", [0.05, 0.1, 1.0]),
        ("noise_contrastive_estimation", "num_noise", [1.0, 2.0, 10.0]),
        ("noise_contrastive_estimation", "num_noise", [1, 2, 10]),
    ],
)
def test_hyperparameters_may_be_traced(name, argument, values):
    logits, labels = problem()
    traced = jax.jit(jax.vmap(lambda v: make_loss(name, **{argument: v})(logits, labels)))(jnp.array(values))
    apart = [value_and_gradient(name, logits, labels, **{argument: value})[0] for value in values]
    np.testing.assert_allclose(traced, apart, rtol=1e-6)


WRONG_INPUTS = [
    (np.ones((2, 3), np.int32), np.zeros(2, np.int32), TypeError, "logits must be floating-point"),
    (np.ones((2, 3), np.float32), np.zeros(2, np.float32), TypeError, "labels must be integers"),
    (np.ones((2, 3), np.float32), np.zeros(2, bool), TypeError, "labels must be integers"),
    (np.ones((2, 3), np.float32), np.zeros(3, np.int32), ValueError, "labels must have the shape of logits"),
    (
        np.ones((2, 3), np.float32),
        np.zeros((2, 1), np.int32),
        ValueError,
        "labels must have the shape of logits",
    ),
    (
        np.ones((2, 3), np.float32),
        np.zeros((2, 3), np.int32),
        ValueError,
        "labels must have the shape of logits",
    ),
    (np.ones((2, 0), np.float32), np.zeros(2, np.int32), ValueError, "logits must have shape"),
    (np.float32(1), np.int32(0), ValueError, "logits must have"),
]


@every_loss
@pytest.mark.parametrize("form", ["itself", "make_loss"])
@pytest.mark.parametrize(("logits", "labels", "error", "message"), WRONG_INPUTS)
def test_wrong_logits_or_labels_are_errors_that_name_the_argument(name, form, logits, labels, error, message):
    loss = (
        make_loss(name, **ANY_K[name])
        if form == "make_loss"
        else functools.partial(LOSSES[name], **ANY_K[name])
    )
    with pytest.raises(error, match=message):
        loss(logits, labels)
    with pytest.raises(error, match=message):
        jax.eval_shape(loss, logits, labels)  # at trace time, before anything is computed


def test_make_loss_says_what_is_wrong_with_a_name_or_a_hyperparameter():
    with pytest.raises(ValueError, match=r"no loss named 'crossentropy'; did you mean cross_entropy"):
        make_loss("crossentropy")
    with pytest.raises(TypeError, match="max_margin has no hyperparameter 'alpha'; it takes margin"):
        make_loss("max_margin", alpha=1.0)
    with pytest.raises(
        TypeError, match="cross_entropy has no hyperparameter 'margin'; it takes no hyperparameters"
    ):
        make_loss("cross_entropy", margin=1.0)
    with pytest.raises(TypeError, match="noise_contrastive_estimation needs the hyperparameter 'num_noise'"):
        make_loss("noise_contrastive_estimation")
    with pytest.raises(TypeError, match="batch_cross_entropy has no hyperparameter 'where'"):
        make_loss("batch_cross_entropy", where=None)


def test_there_are_seven_losses_named_after_their_functions_and_five_are_aligned():
    assert tuple(LOSSES) == tuple(ORACLES)
    assert all(getattr(losses, name) is loss for name, loss in LOSSES.items())
    assert set(LOSSES) - ALIGNED == {"cross_entropy", "max_margin"}
    assert len(LOSSES) == 7
