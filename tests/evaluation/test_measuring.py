"""Evaluation: what is written is what scikit-learn finds in the raw logits, and nothing leaks from test."""

import dataclasses
import errno
import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score, precision_recall_curve

from pols_jax import principle
from pols_jax.data import ArraySplit, evaluation_batches, load
from pols_jax.errors import CheckpointError, ConfigError, DataError, FileError, RunError
from pols_jax.evaluation.experiment_records import write_experiment_record
from pols_jax.evaluation.measuring import evaluate
from pols_jax.evaluation.slc_records import MEASURES, SlcRecord, read_class_arrays, read_slc
from pols_jax.metrics.thresholds import DEFAULT_RULES, Thresholds
from pols_jax.training.config import Experiment, RunConfig
from pols_jax.training.experiments import run_experiment
from pols_jax.training.fitting import RunOptions
from pols_jax.training.run_files import read_experiment
from pols_jax.training.runs import Run, find_runs

QUIET = RunOptions(quiet=True)


@pytest.fixture(scope="module")
def dataset(digits):
    return digits


@pytest.fixture(scope="module")
def experiment(digits_experiment, tmp_path_factory):
    """Two small runs, cross-entropy and batch cross-entropy."""
    return shutil.copytree(digits_experiment, tmp_path_factory.mktemp("runs") / "experiment")


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
    return np.asarray(run.model.apply(variables, batch.images)), np.asarray(batch.labels)


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
    for scores, found in ((logits, record.slc), (softmax(logits), record.all_logits)):
        expected = sklearn_measures(scores, labels)
        for name, value in zip(MEASURES, found.values(), strict=True):
            # float32 ratios of counts, averaged
            np.testing.assert_allclose(value, expected[name], atol=1e-6, err_msg=name)
    assert record.accuracy == np.mean(logits.argmax(axis=1) == labels)
    arrays = jnp.asarray(logits), jnp.asarray(labels)
    np.testing.assert_allclose(record.violation_rate, principle.violation_rate(*arrays), rtol=1e-5)
    np.testing.assert_allclose(record.separation_margin, principle.separation_margin(*arrays), rtol=1e-4)
    assert (record.num_examples, record.num_classes) == (len(labels), 10)


def test_the_record_is_written_into_the_run(experiment, dataset, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    record = evaluate(run_dir, dataset=dataset, quiet=True)
    written = json.loads((run_dir / "slc.json").read_text())
    assert written == record.to_json()
    expected = {
        "loss": "cross_entropy",
        "dataset": "glyphs",
        "split": "test",
        "step": 100,
        "normalized": None,
    }
    assert expected.items() <= written.items()
    assert set(written["slc"]) == set(written["all_logits"]) == set(MEASURES)
    assert SlcRecord.from_json(written) == record == read_slc(Run.open(run_dir))


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
    for name in ("slc", "all_logits"):
        assert getattr(record, name).values() == pytest.approx(getattr(expected, name).values(), abs=1e-6)
    assert record.accuracy == expected.accuracy
    assert record.violation_rate == pytest.approx(expected.violation_rate, rel=1e-6)
    assert record.separation_margin == pytest.approx(expected.separation_margin, rel=1e-5)
    for entry, same in zip(record.thresholds, expected.thresholds, strict=True):
        for field, value in vars(same).items():
            found = getattr(entry, field)
            assert found == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)


def thresholds_of(run_dir):
    run = Run.open(run_dir)
    return Thresholds.load(run_dir, checkpoint=run.checkpoint, num_classes=run.num_classes)


def test_no_test_label_is_used_to_choose_thresholds(experiment, dataset, record):
    chosen = thresholds_of(experiment / "cross_entropy")
    wrong = np.random.default_rng(1).permutation(dataset.test.labels)
    other = dataclasses.replace(dataset, test=ArraySplit(dataset.test.images, wrong))
    mistaken = evaluate(experiment / "cross_entropy", dataset=other, quiet=True)
    assert mistaken.slc.auprc < record.slc.auprc, "the labels do matter to the measures"
    for name, values in vars(thresholds_of(experiment / "cross_entropy")).items():
        np.testing.assert_array_equal(values, getattr(chosen, name))


def test_the_record_says_what_thresholds_give_on_test(experiment, record, raw):
    logits, labels = raw
    thresholds = thresholds_of(experiment / "cross_entropy")
    is_true = labels[:, None] == np.arange(10)
    entries = iter(record.thresholds)
    for rule in DEFAULT_RULES:
        for chosen in (thresholds.per_class(rule, num_classes=10), np.full(10, thresholds.shared(rule))):
            entry = next(entries)
            measured = ~np.isnan(chosen)
            passes = logits[:, measured] >= chosen[measured]
            positives = (passes & is_true[:, measured]).sum(axis=0)
            recall = positives / is_true[:, measured].sum(axis=0)
            precision = positives[passes.any(axis=0)] / passes.sum(axis=0)[passes.any(axis=0)]
            assert entry.rule == str(rule)
            assert entry.mean_recall == (pytest.approx(recall.mean()) if measured.any() else None)
            assert entry.mean_precision == (pytest.approx(precision.mean()) if len(precision) else None)
            if rule.kind == "recall":
                assert entry.num_classes_promise_held == np.count_nonzero(recall >= rule.value)


def test_another_split_has_a_file_of_its_own(experiment, dataset, record):
    other = evaluate(experiment / "cross_entropy", dataset=dataset, split="validation", quiet=True)
    assert other.num_examples == len(dataset.validation)
    assert json.loads((experiment / "cross_entropy" / "slc-validation.json").read_text()) == other.to_json()
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


@pytest.mark.parametrize("chosen", ["..", "../other", "/etc", "link", "gone", "", "a/b", "nul\0"])
def test_a_sweep_cannot_point_outside_of_its_directory(experiment, tmp_path, chosen):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    shutil.copytree(experiment / "cross_entropy", tmp_path / "other")
    (sweep / "link").symlink_to(tmp_path / "other")
    (sweep / "sweep.json").write_text(json.dumps({"cross_entropy": {"chosen": chosen}}))
    with pytest.raises(
        RunError, match=r"sweep\.json cannot be used: cross_entropy\.chosen is .* no run beside it"
    ):
        find_runs([sweep])


def copied_run(experiment, tmp_path):
    return shutil.copytree(experiment / "cross_entropy", tmp_path / "run")


def test_a_run_without_checkpoint_is_an_error(experiment, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(RunError, match="has no checkpoint"):
        evaluate(run_dir)


def test_a_run_that_never_finished_is_an_error(experiment, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    (run_dir / "checkpoints" / "100").rename(run_dir / "checkpoints" / "20")
    with pytest.raises(RunError, match="is not finished: step 20 of 100"):
        evaluate(run_dir)


def test_a_diverged_run_is_an_error(experiment, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    (run_dir / "metrics.jsonl").write_text('{"step": 7, "diverged": true}\n')
    with pytest.raises(RunError, match="diverged at step 7"):
        evaluate(run_dir)


def test_a_damaged_checkpoint_is_an_error(experiment, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    shutil.rmtree(run_dir / "checkpoints" / "100" / "state" / "params.head.bias")
    with pytest.raises(CheckpointError):
        evaluate(run_dir, quiet=True)


def test_data_that_is_gone_or_has_changed_is_an_error(experiment, tmp_path, dataset):
    run_dir = copied_run(experiment, tmp_path)
    with pytest.raises(RunError, match="has changed"):
        evaluate(run_dir, dataset=load("glyphs", characters="0030-0038"))
    run, config = Run.open(run_dir), RunConfig(dataset=f"folder:{tmp_path}/gone", steps=100)
    gone = dataclasses.replace(run, info=dataclasses.replace(run.info, config=config, dataset=config.dataset))
    with pytest.raises(DataError, match="is not a directory"):
        gone.load_dataset()


def test_a_folder_is_found_from_another_directory(experiment, tmp_path, monkeypatch):
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "there" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (8, 8), (9 * i, 0, len(name))).save(tmp_path / "there" / name / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    config = RunConfig(dataset="folder:there", steps=40, image_size=8)
    dataset, run = load(config.dataset, **config.options()), Run.open(copied_run(experiment, tmp_path))
    data = {"dataset": config.dataset, "data": dataset.provenance, "num_classes": 2, "image_shape": (8, 8, 3)}
    info = dataclasses.replace(run.info, config=config, **data)
    monkeypatch.setattr(Run, "class_names", ("a", "b"))
    monkeypatch.chdir("/")
    moved = dataclasses.replace(run, info=info).load_dataset()
    assert moved.is_the_data_of(dataset.provenance)


# Files of a run that are damaged, swapped, or about something else.


def test_measurements_of_another_run_are_refused(experiment, dataset, record, tmp_path):
    run_dir, other = copied_run(experiment, tmp_path), experiment / "batch_cross_entropy"
    evaluate(other, dataset=dataset, quiet=True)
    run = Run.open(run_dir)
    for name, read in (
        ("thresholds.npz", lambda: thresholds_of(run_dir)),
        ("slc.npz", lambda: read_class_arrays(run)),
        ("slc.json", lambda: read_slc(run)),
    ):
        read()
        shutil.copy(other / name, run_dir / name)
        with pytest.raises(RunError, match=rf"{name} was .*measured on .*; evaluate again with pols eval"):
            read()


def test_measurements_that_do_not_say_what_was_measured_are_refused(experiment, record, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    with np.load(run_dir / "thresholds.npz") as arrays:
        np.savez_compressed(run_dir / "thresholds.npz", **{n: arrays[n] for n in arrays if n != "checkpoint"})
    with pytest.raises(RunError, match="but on an unknown checkpoint; evaluate again"):
        thresholds_of(run_dir)


def test_the_config_of_another_run_is_refused(experiment, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    shutil.copy(experiment / "batch_cross_entropy" / "config.json", run_dir)
    with pytest.raises(
        ConfigError, match="holds checkpoint 100 of another config: --loss batch_cross_entropy"
    ):
        Run.open(run_dir)


def test_class_names_of_another_run_are_refused(experiment, tmp_path):
    run_dir = copied_run(experiment, tmp_path)
    names = json.loads((run_dir / "class_names.json").read_text())
    for wrong, why in (
        (names[::-1], "that of another run"),
        (names[1:], "9 names, and the run 10 classes"),
        ([names[0], *names[:-1]], "a name twice"),
        ([*names[:-1], 7], r"\[9\] must be text, got 7"),
        (dict(enumerate(names)), "must be a list, got an object"),
    ):
        (run_dir / "class_names.json").write_text(json.dumps(wrong))
        with pytest.raises(RunError, match=why):
            _ = Run.open(run_dir).class_names


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda saved: saved["config"].update(steps="forty"),
            r"config\.steps must be a whole number, got 'forty'",
        ),
        (lambda saved: saved["config"].update(steps=-1), "--steps must be at least 1, got -1"),
        (lambda saved: saved["config"].update(fonts="a"), r"config\.fonts must be a list, got 'a'"),
        (
            lambda saved: saved["config"].update(flux=1),
            r"config\.'flux' is unknown here: .*newer version of pols_jax",
        ),
        (lambda saved: saved.update(num_classes=True), "num_classes must be a whole number, got True"),
        (lambda saved: saved.update(image_shape=[28, 28]), "image_shape must have 3 entries, got 2"),
        (lambda saved: saved.update(image_shape=[28, 28, 0]), "image_shape is that of no image"),
        (lambda saved: saved.pop("data"), "data is missing"),
        (
            lambda saved: saved.update(loss="max_margin"),
            "loss is 'max_margin', and config.loss 'cross_entropy'",
        ),
    ],
)
def test_a_config_that_is_wrong_names_the_field(experiment, tmp_path, change, why):
    saved = json.loads((experiment / "cross_entropy" / "config.json").read_text())
    change(saved)
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(RunError, match=rf"config\.json cannot be used: {why}"):
        Run.open(tmp_path)


def test_a_read_only_run_directory_is_found_before_the_work(experiment, dataset, tmp_path, monkeypatch):
    run_dir = copied_run(experiment, tmp_path)
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: not (mode & os.W_OK and "run" in str(path)) and access(path, mode)
    )
    monkeypatch.setattr(Run, "restore_backbone", None)
    with pytest.raises(ConfigError, match="permission denied"):
        evaluate(run_dir, dataset=dataset, quiet=True)


def test_an_evaluation_that_cannot_be_written_leaves_the_old_one(
    experiment, dataset, record, tmp_path, monkeypatch
):
    run_dir = copied_run(experiment, tmp_path)
    before = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"thresholds\.npz could not be written \(No space left on device\)"):
        evaluate(run_dir, dataset=dataset, quiet=True)
    assert {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before


def test_a_run_that_changes_while_it_is_measured_gets_no_wrong_files(
    experiment, dataset, tmp_path, monkeypatch
):
    run_dir = copied_run(experiment, tmp_path)
    for path in run_dir.glob("*.npz"):
        path.unlink()
    restore_head = Run.restore_head

    def restore_and_change(run, classes):
        meta = run_dir / "checkpoints" / "100" / "meta" / "metadata"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"saved": "again"}))
        return restore_head(run, classes)

    monkeypatch.setattr(Run, "restore_head", restore_and_change)
    with pytest.raises(CheckpointError, match="its metadata has changed"):
        evaluate(run_dir, dataset=dataset, quiet=True)
    assert not list(run_dir.glob("*.npz"))


def test_the_record_of_an_experiment_holds_its_settings_and_what_each_run_measured(
    experiment, dataset, tmp_path
):
    run_dir = shutil.copytree(experiment, tmp_path / "experiment")
    settings = read_experiment(run_dir)
    outcomes = run_experiment(
        settings, dataset, run_dir, options=QUIET
    )  # they have ended: nothing is trained again
    record = write_experiment_record(
        tmp_path / "record.json", settings, dataset, outcomes, run_dir=run_dir, environment={"commit": "a"}
    )
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert Experiment.from_json(record["experiment"]) == settings
    assert (record["environment"], record["num_classes"], record["sweep"]) == ({"commit": "a"}, 10, None)
    assert record["data"] == dataset.provenance
    assert record["training_minutes"] >= 0
    for run, outcome in zip(record["runs"], outcomes, strict=True):
        assert RunConfig.from_json(run["config"]) == outcome.config
        assert run["test"] == read_slc(Run.open(outcome.run_dir)).to_json()
        assert [entry["step"] for entry in run["training"]] == [100]
        assert len(run["bins"]) == len(run["true_histogram"]) + 1
        assert len(run["curve_recall"]) == len(run["curve_precision"])


@pytest.mark.parametrize("name", ["thresholds", "best_classes", "worst_classes"])
def test_a_record_that_lost_an_entry_of_a_list_is_not_used(experiment, dataset, tmp_path, name):
    run_dir = copied_run(experiment, tmp_path)
    if not (run_dir / "slc.json").exists():
        evaluate(run_dir, dataset=dataset, quiet=True)
    content = json.loads((run_dir / "slc.json").read_text())
    content[name].pop()
    (run_dir / "slc.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match=f"cannot be used: {name}"):
        read_slc(Run.open(run_dir))
