"""A network that was trained elsewhere, as arrays: its single logits, its normalizer, its thresholds."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from pols_jax.errors import ConfigError, RunError
from pols_jax.evaluation import normalizing
from pols_jax.heads import all_logits
from pols_jax.normalizers import fit_normalizer, log_normalizer
from pols_jax.search.class_bank import ClassBank

NUM_CLASSES, NUM_FEATURES = 60, 6


@pytest.fixture(autouse=True)
def short_fits(monkeypatch):
    """Enough steps to tell a fit from none, and a ladder for few classes."""
    fitter = normalizing.fit_normalizer
    monkeypatch.setattr(
        normalizing, "fit_normalizer", lambda *args, **options: fitter(*args, num_steps=100, **options)
    )
    monkeypatch.setattr(normalizing, "LADDER", (0, 16, 1024))


def examples(kernel, seed, count=600):
    """Features of examples, some of which the network is far surer about than others."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % len(kernel)
    sure = rng.uniform(0.3, 3.0, (count, 1))
    return (sure * (kernel[labels] + 0.3 * rng.normal(size=(count, kernel.shape[1])) + 1)).astype("f"), labels


@pytest.fixture(scope="module")
def network():
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(NUM_CLASSES, NUM_FEATURES)).astype("f")
    bias = rng.normal(size=NUM_CLASSES).astype("f")
    return kernel, bias


@pytest.fixture
def arrays(network):
    """What one gives to `from_arrays`."""
    kernel, bias = network
    features, _ = examples(kernel, 1)
    return {"kernel": kernel, "bias": bias, "features": features, "validation": examples(kernel, 2)}


def test_without_features_the_logits_are_those_of_the_output_layer(network):
    kernel, bias = network
    features, _ = examples(kernel, 3, 70)
    bank = ClassBank.from_arrays(kernel, bias, [f"class {i}" for i in range(NUM_CLASSES)])
    expected = np.asarray(all_logits(features, kernel, bias))
    np.testing.assert_allclose(
        bank.logits_of_features(features, ["CLASS 7", 3]), expected[:, [7, 3]], rtol=1e-5, atol=1e-5
    )
    assert bank.normalizer is None
    assert bank.logits_of_features(features[:0], "class 7").shape == (0,)
    np.testing.assert_array_equal(bank.row(7).kernel, kernel[7])


def test_the_ladder_is_climbed_and_the_fewest_rows_that_are_nearly_the_best_are_kept(arrays):
    bank = ClassBank.from_arrays(**arrays)
    assert [rung.normalizer and rung.normalizer.num_rows for rung in bank.ladder] == [None, 1, 16]
    errors = [rung.error for rung in bank.ladder]
    kept = next(rung for rung in bank.ladder if rung.error <= 1.02 * min(errors))
    assert bank.normalizer is kept.normalizer is not None
    assert kept.error < errors[0]


def test_the_score_is_the_logit_minus_the_normalizer_and_its_auprc_is_scikit_learns(arrays):
    features, labels = arrays["validation"]
    for rows in ("affine", 16):
        bank = ClassBank.from_arrays(**arrays, normalizer=rows)
        scores = bank.logits_of_features(features, range(NUM_CLASSES))
        raw = np.asarray(all_logits(features, arrays["kernel"], arrays["bias"]))
        np.testing.assert_allclose(
            scores, raw - np.asarray(bank.normalizer(features))[:, None], rtol=1e-4, atol=1e-4
        )
        per_class = [average_precision_score(labels == c, scores[:, c]) for c in range(NUM_CLASSES)]
        np.testing.assert_allclose(bank.ladder[-1].auprc, np.mean(per_class), atol=1e-5)


def test_with_as_many_rows_as_classes_the_score_is_the_log_probability(arrays):
    bank = ClassBank.from_arrays(**arrays, normalizer=NUM_CLASSES)
    features = arrays["features"][:9]
    kernel, bias = arrays["kernel"], arrays["bias"]
    expected = np.asarray(all_logits(features, kernel, bias))[:, 5] - np.asarray(
        log_normalizer(features, kernel, bias)
    )
    np.testing.assert_allclose(bank.logits_of_features(features, 5), expected, atol=1e-4)


def test_without_labels_the_choice_is_by_how_well_log_z_is_estimated(arrays):
    arrays["validation"] = None
    bank = ClassBank.from_arrays(**arrays)
    assert [rung.auprc for rung in bank.ladder] == [None] * 3
    left = [1.0, *(1 - rung.normalizer.fit.r_squared for rung in bank.ladder[1:])]
    assert [rung.error for rung in bank.ladder] == left
    assert bank.normalizer.num_rows == 16
    with pytest.raises(
        RunError, match=r"no thresholds for this network, because no validation labels .*a number\."
    ):
        bank.threshold(3, "recall=0.9")
    assert bank.threshold(3, "0.5").value == 0.5


def test_fitting_sees_no_labels(arrays):
    features, labels = arrays["validation"]
    rows = [
        ClassBank.from_arrays(**{**arrays, "validation": (features, given)}, normalizer=16).normalizer.kernel
        for given in (labels, np.roll(labels, 7))
    ]
    np.testing.assert_array_equal(*rows)


def test_thresholds_are_those_of_the_score_that_is_used(arrays):
    bank = ClassBank.from_arrays(**arrays)
    features, labels = arrays["validation"]
    scores = bank.logits_of_features(features, range(NUM_CLASSES))
    threshold = bank.threshold(3, "recall=0.9")
    assert threshold.origin == "class", "ten validation examples of each class"
    assert np.sum(scores[labels == 3, 3] >= threshold.value) == 9


def test_pictures_are_asked_about_through_features_of(arrays):
    pictures = list(arrays["features"][:5])
    bank = ClassBank.from_arrays(**arrays, features_of=np.stack)
    expected = bank.logits_of_features(arrays["features"][:5], 3)
    np.testing.assert_array_equal(bank.logits(pictures, 3), expected)
    np.testing.assert_array_equal(bank.decide(pictures, 3), expected >= bank.threshold(3).value)
    wrong = ClassBank.from_arrays(arrays["kernel"], features_of=lambda pictures: np.zeros((2, 3)))
    with pytest.raises(
        ConfigError, match=r"features_of must give an array of shape \[5, 6\], got \[2, 3\]\."
    ):
        wrong.logits(pictures, 3)
    with pytest.raises(
        ConfigError, match=r"cannot look at pictures; give features_of=.*logits_of_features\."
    ):
        ClassBank.from_arrays(arrays["kernel"]).decide(pictures, 3, rule="1")
    with pytest.raises(ConfigError, match="no network that looks at pictures"):
        _ = bank.run


def test_a_normalizer_that_is_there_already_is_used(arrays):
    normalizer = fit_normalizer(arrays["features"], arrays["kernel"], arrays["bias"], num_rows=0)
    bank = ClassBank.from_arrays(**arrays, normalizer=normalizer)
    assert bank.normalizer is normalizer
    assert bank.ladder[1].auprc is not None
    with pytest.raises(ConfigError, match="The normalizer is for 6 features, and kernel has 5"):
        ClassBank.from_arrays(np.ones((9, 5)), normalizer=normalizer)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16])
def test_any_floating_point_kernel_is_multiplied_in_float32(arrays, dtype):
    kernel = arrays["kernel"].astype(dtype)
    bank = ClassBank.from_arrays(kernel, arrays["bias"])
    features = arrays["features"][:9]
    expected = features @ kernel.astype("f").T + arrays["bias"]
    np.testing.assert_allclose(
        bank.logits_of_features(features, [3, 4]), expected[:, [3, 4]], rtol=1e-5, atol=1e-5
    )


def changed(array, value):
    array = array.copy()
    array.flat[7] = value
    return array


WRONG = {
    r"looks transposed: it has the shape \[6, 60\], and there are 60 numbers in bias; give kernel\.T\.": lambda a: {
        "kernel": a["kernel"].T
    },
    r"looks transposed: .*, and there are 6 columns in features; give kernel\.T\.": lambda a: {
        "kernel": a["kernel"].T,
        "bias": None,
    },
    r"looks transposed: .*, and there are 60 names; give kernel\.T\.": lambda a: {
        "kernel": a["kernel"].T,
        "bias": None,
        "features": None,
        "validation": None,
        "class_names": [str(i) for i in range(60)],
    },
    r"features must have shape \[n, 5\] to fit kernel of shape \[60, 5\], got \[600, 6\]": lambda a: {
        "kernel": a["kernel"][:, :5]
    },
    r"kernel must have two axes, got shape \[360\]": lambda a: {"kernel": a["kernel"].reshape(-1)},
    r"kernel must have a row for each class, got shape \[0, 6\]": lambda a: {"kernel": a["kernel"][:0]},
    r"kernel must be floating-point numbers, got dtype int64": lambda a: {
        "kernel": a["kernel"].astype(np.int64)
    },
    r"kernel must be finite numbers": lambda a: {"kernel": changed(a["kernel"], np.inf)},
    r"^features must be finite numbers; some are NaN": lambda a: {"features": changed(a["features"], np.nan)},
    r"validation features must be finite numbers": lambda a: {
        "validation": (changed(a["validation"][0], np.nan), a["validation"][1])
    },
    r"bias must have 60 numbers, as kernel has rows, got 59": lambda a: {"bias": a["bias"][1:]},
    r"num_rows=50 rows need at least as many features, got 40": lambda a: {
        "features": a["features"][:40],
        "normalizer": 50,
    },
    r"Rows of a normalizer are .* got many": lambda a: {"normalizer": "many"},
    r"A normalizer is fitted to features, and there are none": lambda a: {
        "features": None,
        "normalizer": "affine",
    },
    r"a name for each of the 60 classes, got 59": lambda a: {"class_names": [str(i) for i in range(59)]},
    r"the classes 2 and 3 are both named '1'": lambda a: {
        "class_names": ["a", "b", "1", "1", *map(str, range(3, 59))]
    },
    r"Names must not be empty, and that of class 59": lambda a: {"class_names": [*map(str, range(59)), " "]},
    r"validation labels must be in \[0, 60\), got 0 to 60": lambda a: {
        "validation": (a["validation"][0], changed(a["validation"][1], 60))
    },
    r"validation labels must be one per row .*, 600, got shape \[599\]": lambda a: {
        "validation": (a["validation"][0], a["validation"][1][1:])
    },
    r"validation labels must be whole numbers, got dtype float64": lambda a: {
        "validation": (a["validation"][0], a["validation"][1] * 1.0)
    },
}


@pytest.mark.parametrize("sentence", WRONG)
def test_arrays_that_do_not_fit_are_one_sentence(arrays, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        ClassBank.from_arrays(**{**arrays, **WRONG[sentence](arrays)})
    assert "\n" not in str(error.value)


def test_features_of_another_width_are_an_error(arrays):
    with pytest.raises(ValueError, match=r"features must have shape \[m, 6\], got \[2, 5\]"):
        ClassBank.from_arrays(arrays["kernel"]).logits_of_features(np.zeros((2, 5)), 0)


def test_names_may_be_bytes_and_a_perfect_score_may_round_up(arrays):
    names = np.array([f"class {i}".encode() for i in range(NUM_CLASSES)])
    assert ClassBank.from_arrays(arrays["kernel"], class_names=names).names[7] == "class 7"
    rungs = [normalizing.Rung(None, 0.5), normalizing.Rung(None, 1 + 1e-7), normalizing.Rung(None, 1.0)]
    assert normalizing.choose_rung(rungs) is rungs[1]


def test_an_unknown_name_gets_the_nearest(arrays):
    bank = ClassBank.from_arrays(arrays["kernel"], class_names=[f"class {i}" for i in range(NUM_CLASSES)])
    with pytest.raises(ConfigError, match="no class named 'clas 7' in this network; the nearest are class 7"):
        bank.class_id("clas 7")
    with pytest.raises(ConfigError, match="; names lists them all"):
        bank.class_id("?")
