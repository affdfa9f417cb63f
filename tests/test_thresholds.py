"""Thresholds from validation counts: each rule against a search through all candidates."""

import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax import metrics
from pols_jax.class_blocks import ScoredSplit
from pols_jax.config import ConfigError
from pols_jax.thresholds import MIN_EXAMPLES, Rule, Thresholds


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
    thresholds.save(tmp_path)
    for name, saved in vars(Thresholds.load(tmp_path)).items():
        np.testing.assert_array_equal(saved, getattr(thresholds, name))


def test_a_run_without_thresholds_is_told_how_to_get_them(tmp_path):
    with pytest.raises(ConfigError, match=r"has no thresholds yet; make them with eval_slc\.py"):
        Thresholds.load(tmp_path)


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
