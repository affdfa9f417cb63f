"""Evaluation: what is written is what scikit-learn finds in the raw logits, and nothing leaks from test."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score, precision_recall_curve

from pols_jax import principle
from pols_jax.checkpoints import CheckpointError
from pols_jax.config import Experiment, RunConfig
from pols_jax.data import ArraySplit, DataError, evaluation_batches, load
from pols_jax.evaluation import MEASURES, evaluate
from pols_jax.experiments import run_experiment
from pols_jax.runs import Run, RunError, find_runs
from pols_jax.thresholds import DEFAULT_RULES, Thresholds
from pols_jax.training import RunOptions

QUIET = RunOptions(quiet=True)


@pytest.fixture(scope="module")
def dataset():
    return load("glyphs", max_classes=30)


@pytest.fixture(scope="module")
def experiment(dataset, tmp_path_factory):
    """Two small runs, cross-entropy and batch cross-entropy."""
    directory = tmp_path_factory.mktemp("runs") / "experiment"
    settings = Experiment(max_classes=30, width=0.1, batch_size=64, steps=40, evaluate_every=40)
    run_experiment(settings, dataset, directory, options=QUIET)
    return directory


@pytest.fixture(scope="module")
def record(experiment, dataset):
    return evaluate(experiment / "cross_entropy", dataset=dataset, histograms=True, quiet=True)


@pytest.fixture(scope="module")
def raw(experiment, dataset):
    """All logits of the test split from the whole network, and the labels."""
    run = Run.open(experiment / "cross_entropy")
    kernel, bias = run.restore_head()
    variables = {
        name: {"backbone": tree} | ({"head": {"kernel": kernel, "bias": bias}} if name == "params" else {})
        for name, tree in run.restore_backbone().items()
    }
    (batch,) = evaluation_batches(dataset.test, batch_size=len(dataset.test))
    return np.asarray(run.model.apply(variables, batch.image)), np.asarray(batch.label)


def softmax(logits):
    exps = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return exps / exps.sum(axis=1, keepdims=True)


def sklearn_measures(scores, labels):
    def precision_at(recall, is_positive, column):
        precisions, recalls, _ = precision_recall_curve(is_positive, column)
        return precisions[:-1][recalls[:-1] >= recall][-1]  # thresholds ascend: the last one is the highest

    columns = [(labels == c, scores[:, c]) for c in np.unique(labels)]
    return {
        "auprc": np.mean([average_precision_score(*column) for column in columns]),
        "precision_at_0.9": np.mean([precision_at(0.9, *column) for column in columns]),
        "precision_at_0.99": np.mean([precision_at(0.99, *column) for column in columns]),
    }


def test_the_record_is_what_scikit_learn_finds_in_the_raw_logits(record, raw):
    logits, labels = raw
    for scores, found in ((logits, record["slc"]), (softmax(logits), record["all_logits"])):
        expected = sklearn_measures(scores, labels)
        for name in MEASURES:
            # float32 ratios of counts, averaged
            np.testing.assert_allclose(found[name], expected[name], atol=1e-6, err_msg=name)
    assert record["accuracy"] == np.mean(logits.argmax(axis=1) == labels)
    arrays = jnp.asarray(logits), jnp.asarray(labels)
    np.testing.assert_allclose(record["violation_rate"], principle.violation_rate(*arrays), rtol=1e-5)
    np.testing.assert_allclose(record["separation_margin"], principle.separation_margin(*arrays), rtol=1e-4)
    assert (record["num_examples"], record["num_classes"]) == (len(labels), 30)


def test_the_record_is_written_into_the_run(experiment, record):
    assert json.loads((experiment / "cross_entropy" / "slc.json").read_text()) == record
    assert {
        "loss": "cross_entropy",
        "dataset": "glyphs",
        "split": "test",
        "step": 40,
    }.items() <= record.items()


def test_batch_size_and_block_size_do_not_change_the_record(experiment, dataset, record):
    again = evaluate(experiment / "cross_entropy", dataset=dataset, batch_size=17, block_size=1, quiet=True)
    assert_same_numbers(again, record)


def test_the_order_of_the_examples_does_not_change_the_record(experiment, dataset, record):
    order = np.random.default_rng(0).permutation(len(dataset.test))
    shuffled = ArraySplit(dataset.test.images[order], dataset.test.labels[order])
    again = evaluate(
        experiment / "cross_entropy", dataset=dataclasses.replace(dataset, test=shuffled), quiet=True
    )
    assert_same_numbers(again, record)


def assert_same_numbers(record, expected):
    """Equal but for the last digits of logits, which depend on the shapes of the products."""
    assert record.keys() == expected.keys()
    for name in ("slc", "all_logits"):
        for measure, value in expected[name].items():
            assert record[name][measure] == pytest.approx(value, abs=1e-6)
    assert record["accuracy"] == expected["accuracy"]
    assert record["violation_rate"] == pytest.approx(expected["violation_rate"], rel=1e-6)
    assert record["separation_margin"] == pytest.approx(expected["separation_margin"], rel=1e-5)
    for entry, same in zip(record["thresholds"], expected["thresholds"], strict=True):
        for field, value in same.items():
            assert entry[field] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)


def test_no_test_label_is_used_to_choose_thresholds(experiment, dataset, record):
    chosen = Thresholds.load(experiment / "cross_entropy")
    wrong = np.random.default_rng(1).permutation(dataset.test.labels)
    other = dataclasses.replace(dataset, test=ArraySplit(dataset.test.images, wrong))
    mistaken = evaluate(experiment / "cross_entropy", dataset=other, quiet=True)
    assert mistaken["slc"]["auprc"] < record["slc"]["auprc"], "the labels do matter to the measures"
    for name, values in vars(Thresholds.load(experiment / "cross_entropy")).items():
        np.testing.assert_array_equal(values, getattr(chosen, name))


def test_the_record_says_what_thresholds_give_on_test(experiment, record, raw):
    logits, labels = raw
    thresholds = Thresholds.load(experiment / "cross_entropy")
    is_true = labels[:, None] == np.arange(30)
    entries = iter(record["thresholds"])
    for rule in DEFAULT_RULES:
        for chosen in (thresholds.per_class(rule, num_classes=30), np.full(30, thresholds.shared(rule))):
            entry = next(entries)
            measured = ~np.isnan(chosen)
            passes = logits[:, measured] >= chosen[measured]
            positives = (passes & is_true[:, measured]).sum(axis=0)
            recall = positives / is_true[:, measured].sum(axis=0)
            precision = positives[passes.any(axis=0)] / passes.sum(axis=0)[passes.any(axis=0)]
            assert entry["rule"] == str(rule)
            assert entry["mean_recall"] == (pytest.approx(recall.mean()) if measured.any() else None)
            assert entry["mean_precision"] == (pytest.approx(precision.mean()) if len(precision) else None)
            if rule.kind == "recall":
                assert entry["num_classes_promise_held"] == np.count_nonzero(recall >= rule.value)


def test_another_split_has_a_file_of_its_own(experiment, dataset, record):
    other = evaluate(experiment / "cross_entropy", dataset=dataset, split="validation", quiet=True)
    assert other["num_examples"] == len(dataset.validation)
    assert json.loads((experiment / "cross_entropy" / "slc-validation.json").read_text()) == other
    assert json.loads((experiment / "cross_entropy" / "slc.json").read_text())["split"] == "test"


def test_a_directory_stands_for_its_runs(experiment):
    assert [path.name for path in find_runs([experiment])] == ["cross_entropy", "batch_cross_entropy"]
    assert find_runs([experiment / "cross_entropy"]) == [experiment / "cross_entropy"]
    assert find_runs(root=experiment.parent) == find_runs([experiment])


def test_a_sweep_stands_for_the_chosen_runs(experiment, tmp_path):
    for name in ("cross_entropy", "batch_cross_entropy"):
        (tmp_path / name).mkdir()
        shutil.copy(experiment / name / "config.json", tmp_path / name)
    chosen = {"batch_cross_entropy": {"chosen": "batch_cross_entropy"}, "cross_entropy": {"chosen": None}}
    (tmp_path / "sweep.json").write_text(json.dumps(chosen))
    assert find_runs([tmp_path]) == [tmp_path / "batch_cross_entropy"]


def copied_run(experiment, tmp_path):
    return shutil.copytree(experiment / "cross_entropy", tmp_path / "run")


def test_a_run_without_checkpoint_is_an_error(experiment, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(RunError, match="has no checkpoint"):
        evaluate(run_dir)


def test_a_run_that_never_finished_is_an_error(experiment, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    (run_dir / "checkpoints" / "40").rename(run_dir / "checkpoints" / "20")
    with pytest.raises(RunError, match="is not finished: step 20 of 40"):
        evaluate(run_dir)


def test_a_diverged_run_is_an_error(experiment, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    (run_dir / "metrics.jsonl").write_text('{"step": 7, "diverged": true}\n')
    with pytest.raises(RunError, match="diverged at step 7"):
        evaluate(run_dir)


def test_a_damaged_checkpoint_is_an_error(experiment, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    shutil.rmtree(run_dir / "checkpoints" / "40" / "state" / "params.head.bias")
    with pytest.raises(CheckpointError):
        evaluate(run_dir, quiet=True)


def test_data_that_is_gone_or_has_changed_is_an_error(experiment, tmp_path, dataset):
    run_dir = copied_run(experiment, tmp_path)
    with pytest.raises(RunError, match="has changed"):
        evaluate(run_dir, dataset=load("glyphs", max_classes=29))
    saved = json.loads((run_dir / "config.json").read_text())
    saved["config"] = RunConfig(dataset=f"folder:{tmp_path}/gone", steps=40).to_json()
    (run_dir / "config.json").write_text(json.dumps(saved))
    with pytest.raises(DataError, match="is not a directory"):
        evaluate(run_dir)
