"""Thresholds from validation counts: each rule against a search through all candidates."""

import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax import metrics
from pols_jax.errors import ConfigError, RunError
from pols_jax.metrics.class_blocks import ScoredSplit
from pols_jax.metrics.thresholds import MIN_EXAMPLES, Rule, Thresholds


@pytest.fixture(scope="module")
def validation():
    """Logits [n, k] that are noisy enough for classes to overlap, their labels, and the thresholds from them."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), [30, 20, 5, 0]).astype(np.int32)
    logits = rng.normal(size=(len(labels), 4)).astype(np.float32)
    logits[np.arange(len(labels)), labels] += 1.5
    # With the identity as the kernel, the features are the logits.
    scored = ScoredSplit(logits, labels, np.eye(4, dtype=np.float32), np.zeros(4, np.float32))
    return logits, labels, Thresholds.from_counts(scored.count(scored.example_stats()))


def best_by_search(rule, scores, is_positive):
    """Tries every score of a positive example."""
    candidates = []
    for threshold in sorted(scores[is_positive & ~np.isnan(scores)]):
        passes = scores >= threshold
        recall = (passes & is_positive).sum() / is_positive.sum()
        precision = (passes & is_positive).sum() / passes.sum()
        candidates.append((threshold, recall, precision, 2 * precision * recall / (precision + recall)))
    if rule.kind == "recall":
        return max(t for t, recall, _, _ in candidates if recall >= rule.value)
    if rule.kind == "precision":
        return min((t for t, _, precision, _ in candidates if precision >= rule.value), default=np.nan)
    best = max(f1 for *_, f1 in candidates)
    return max(t for t, *_, f1 in candidates if f1 == best)


def assert_just_below(threshold, logit):
    """A threshold is the logit of an example, lowered by more than rounding and less than a difference that matters."""
    np.testing.assert_array_less(threshold, logit)
    np.testing.assert_allclose(threshold, logit, rtol=2e-5, atol=2e-5)


RULES = ("recall=0.9", "recall=0.5", "recall=1", "precision=0.8", "precision=0.3", "f1")


@pytest.mark.parametrize("text", RULES)
def test_the_threshold_of_a_class_is_the_best_of_all_candidates(validation, text):
    logits, labels, thresholds = validation
    rule = Rule.parse(text)
    found = thresholds.per_class(rule, num_classes=4)
    assert np.isnan(found[3]), "a class without examples"
    for class_id in range(3):
        expected = best_by_search(rule, logits[:, class_id], labels == class_id)
        assert_just_below(found[class_id], expected)


@pytest.mark.parametrize("text", RULES)
def test_the_threshold_of_all_classes_is_the_best_for_all_logits_together(validation, text):
    logits, labels, thresholds = validation
    is_true = labels[:, None] == np.arange(4)
    expected = best_by_search(Rule.parse(text), logits.ravel(), is_true.ravel())
    assert_just_below(thresholds.shared(Rule.parse(text)), expected)


def test_a_wanted_recall_gives_the_threshold_of_the_metrics(validation):
    logits, labels, thresholds = validation
    expected = metrics.threshold_at_recall(jnp.asarray(logits), jnp.asarray(labels), 0.9)
    assert_just_below(thresholds.per_class(Rule.parse("recall=0.9"), num_classes=4), expected)


def test_a_class_with_few_examples_gets_the_threshold_of_all_classes(validation):
    _, labels, thresholds = validation
    rule = Rule.parse("recall=0.9")
    assert np.count_nonzero(labels == 2) < MIN_EXAMPLES <= np.count_nonzero(labels == 1)
    assert thresholds.of_class(rule, 1) == (thresholds.per_class(rule, num_classes=4)[1], "class")
    assert thresholds.of_class(rule, 2) == (thresholds.shared(rule), "all classes")
    assert thresholds.of_class(Rule.parse("0.25"), 2) == (0.25, "given")


def test_thresholds_come_back_from_disk(validation, tmp_path):
    thresholds = validation[2]
    thresholds.save(tmp_path, checkpoint="7-abc")
    for name, saved in vars(Thresholds.load(tmp_path, checkpoint="7-abc", num_classes=4)).items():
        np.testing.assert_array_equal(saved, getattr(thresholds, name))


def test_thresholds_of_another_checkpoint_or_of_fewer_classes_are_refused(validation, tmp_path):
    validation[2].save(tmp_path, checkpoint="7-abc")
    with pytest.raises(
        RunError, match="not measured on the checkpoint 8-abc of the run, but on 7-abc; evaluate"
    ):
        Thresholds.load(tmp_path, checkpoint="8-abc", num_classes=4)
    with pytest.raises(RunError, match=r"labels are outside \[0, 2\)"):
        Thresholds.load(tmp_path, checkpoint="7-abc", num_classes=2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"labels": None}, "labels is missing"),
        ({"logits": np.zeros(3, np.float32)}, r"logits has the shape \[3\] instead of \["),
        ({"logits": np.zeros((2, 2), np.float32)}, r"logits has the shape \[2, 2\] instead of"),
        ({"labels": np.zeros(5, np.float32)}, "labels has the wrong type, float32"),
        ({"labels": np.array([{}] * 5, object)}, "it is damaged .*allow_pickle"),
        ({"spare": np.zeros(1)}, "it holds 'spare', which a newer version of pols_jax must have written"),
    ],
)
def test_arrays_that_are_no_thresholds_are_named(validation, tmp_path, changes, why):
    arrays = vars(validation[2]) | {"checkpoint": np.array("7-abc")} | changes
    np.savez(tmp_path / "thresholds.npz", **{n: array for n, array in arrays.items() if array is not None})
    with pytest.raises(RunError, match=why):
        Thresholds.load(tmp_path, checkpoint="7-abc", num_classes=4)


def test_no_damaged_byte_of_the_file_goes_unnoticed(validation, tmp_path):
    validation[2].save(tmp_path, checkpoint="7-abc")
    path = tmp_path / "thresholds.npz"
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for place in rng.choice(len(whole), 60, replace=False):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            found = Thresholds.load(tmp_path, checkpoint="7-abc", num_classes=4)
        except RunError:
            continue
        for name, saved in vars(found).items():  # a time or a comment of the archive, not an array
            np.testing.assert_array_equal(saved, getattr(validation[2], name))


def test_a_run_without_thresholds_is_told_how_to_get_them(tmp_path):
    with pytest.raises(ConfigError, match=r"has no thresholds yet; make them with pols eval"):
        Thresholds.load(tmp_path, checkpoint="7-abc", num_classes=4)


@pytest.mark.parametrize(
    "text", ["", "recall", "recall=", "recall=0", "recall=1.5", "precision=x", "f2", "nan", "inf"]
)
def test_a_rule_that_makes_no_sense_is_an_error(text):
    with pytest.raises(ConfigError, match="threshold rule"):
        Rule.parse(text)


@pytest.mark.parametrize("text", ["recall=0.9", "precision=0.95", "f1", "-3.5"])
def test_a_rule_is_printed_as_it_was_written(text):
    assert str(Rule.parse(text)) == text


@pytest.mark.parametrize("text", RULES)
def test_a_logit_that_is_nan_is_never_a_threshold(validation, text):
    logits, labels, _ = validation
    logits = logits.copy()
    logits[[0, 1]] = np.nan
    scored = ScoredSplit(logits, labels, np.eye(4, dtype=np.float32), np.zeros(4, np.float32))
    thresholds = Thresholds.from_counts(scored.count(scored.example_stats()))
    rule = Rule.parse(text)
    is_positive = labels[:, None] == np.arange(4)
    if text == "recall=1":  # two examples of class 0 cannot be found
        assert np.isnan(thresholds.per_class(rule, num_classes=4)[0])
        assert np.isnan(thresholds.shared(rule))
        return
    assert_just_below(
        thresholds.per_class(rule, num_classes=4)[0], best_by_search(rule, logits[:, 0], is_positive[:, 0])
    )
    assert_just_below(thresholds.shared(rule), best_by_search(rule, logits.ravel(), is_positive.ravel()))


@pytest.mark.parametrize("class_id", [0, 1, 2, 3])
def test_the_curve_of_a_class_has_precision_and_recall_as_counted_one_by_one(validation, class_id):
    logits, labels, thresholds = validation
    curve = thresholds.curve(class_id)
    if np.count_nonzero(labels == class_id) >= MIN_EXAMPLES:
        assert curve.origin == "class"
        scores, is_true = logits[:, class_id], labels == class_id
    else:
        assert curve.origin == "all classes"
        scores, is_true = logits.ravel(), (labels[:, None] == np.arange(4)).ravel()
    assert len(curve.thresholds) == np.count_nonzero(is_true) == curve.num_examples
    assert np.all(np.diff(curve.thresholds) < 0)
    for threshold, precision, recall in zip(curve.thresholds, curve.precision, curve.recall, strict=True):
        passes = scores >= threshold
        assert precision == (passes & is_true).sum() / passes.sum()
        assert recall == (passes & is_true).sum() / is_true.sum()
        assert curve.at(float(threshold)) == (precision, recall)
    for text in RULES:
        rule = Rule.parse(text)
        chosen = thresholds.of_class(rule, class_id).value
        assert np.isnan(chosen) or chosen in curve.thresholds
    for threshold in np.linspace(-5, 5, 101):
        passes = scores >= threshold
        precision, recall = curve.at(float(threshold))
        assert recall == pytest.approx((passes & is_true).sum() / is_true.sum())
        if precision is not None:
            assert precision <= (passes & is_true).sum() / passes.sum(), "it promises no more than it has"
    assert curve.at(1e9) == (None, 0.0)
    assert curve.at(-1e9) == (None, 1.0)


def test_a_logit_that_is_no_number_is_on_no_curve_and_counts_as_missed():
    arrays = np.arange(MIN_EXAMPLES)
    logits = np.where(arrays < 3, np.nan, arrays).astype(np.float32)
    positives = np.where(arrays < 3, 0, MIN_EXAMPLES - arrays)
    curve = Thresholds(0 * arrays, logits, positives, positives, 0 * arrays).curve(0)
    assert len(curve.thresholds) == MIN_EXAMPLES - 3
    assert curve.recall[-1] == (MIN_EXAMPLES - 3) / MIN_EXAMPLES
