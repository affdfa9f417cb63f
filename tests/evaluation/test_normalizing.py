"""The normalizer of a run: fitted without labels, written whole, used by evaluation and search, never that of another step."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from pols_jax.cli import main
from pols_jax.data import ArraySplit, StreamSplit
from pols_jax.errors import ConfigError, RunError, RunWarning
from pols_jax.evaluation import normalizing
from pols_jax.evaluation.figures import precision_recall
from pols_jax.evaluation.measuring import evaluate
from pols_jax.evaluation.normalizing import normalize
from pols_jax.evaluation.slc_records import read_class_arrays
from pols_jax.evaluation.slc_tables import per_class_csv, slc_csv, slc_tables
from pols_jax.heads import all_logits
from pols_jax.search.class_bank import ClassBank
from pols_jax.training.features import split_features
from pols_jax.training.run_normalizer import normalizer_path
from pols_jax.training.runs import Run


@pytest.fixture(scope="module")
def dataset(digits):
    return digits


@pytest.fixture(scope="module")
def trained(digits_experiment, tmp_path_factory):
    """A run as training leaves it."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    evaluated = shutil.ignore_patterns("slc*", "*.npz")
    return shutil.copytree(digits_experiment / "cross_entropy", directory, ignore=evaluated)


@pytest.fixture(autouse=True)
def short_fits(monkeypatch):
    """Enough steps to tell a fit from none."""
    fitter = normalizing.fit_normalizer
    monkeypatch.setattr(
        normalizing, "fit_normalizer", lambda *args, **options: fitter(*args, num_steps=60, **options)
    )


@pytest.fixture(scope="module")
def normalized(trained, dataset, tmp_path_factory):
    """The same run with 8 rows, evaluated with figures."""
    directory = shutil.copytree(trained, tmp_path_factory.mktemp("normalized") / "run")
    rungs = normalize(directory, rows="8", dataset=dataset, quiet=True)
    return directory, rungs, evaluate(directory, dataset=dataset, histograms=True, quiet=True)


def features_of(run, split):
    return split_features(run.model, run.restore_backbone(), split)


def test_the_record_has_what_scikit_learn_finds_in_the_normalized_logits(normalized, dataset):
    directory, rungs, record = normalized
    run = Run.open(directory)
    features, labels = features_of(run, dataset.test)
    logits = np.asarray(all_logits(features, *map(np.asarray, run.restore_head())))
    scores = logits - np.asarray(run.normalizer(features))[:, None]
    expected = np.mean([average_precision_score(labels == c, scores[:, c]) for c in np.unique(labels)])
    assert record.normalized is not None
    np.testing.assert_allclose(record.normalized.auprc, expected, atol=1e-6)
    assert record.normalizer_rows == 8
    assert (rungs[0].normalizer, rungs[-1].normalizer.num_rows) == (None, 8)
    raw = evaluate(shutil.copytree(directory, directory.with_name("raw")), dataset=dataset, quiet=True)
    assert raw.slc == record.slc
    assert raw.all_logits == record.all_logits


def test_tables_figures_and_csv_show_the_three_scores_side_by_side(normalized):
    directory, _, record = normalized
    (table,) = slc_tables([record])
    text = table.markdown()
    assert (
        text.index("one logit: 1-AUPRC")
        < text.index("with normalizer: 1-AUPRC")
        < text.index("all logits: 1-AUPRC")
    )
    assert "With its normalizer (8 rows) one logit has" in table.notes[0]
    assert "normalized_auprc" in slc_csv([record])
    assert "normalized_auprc" in per_class_csv([directory]).partition("\n")[0]
    run = Run.open(directory)
    (axes,) = precision_recall([run], [read_class_arrays(run, for_figures=True)]).axes
    _, labels = axes.get_legend_handles_labels()
    assert labels == [
        f"cross_entropy, {score}" for score in ("one logit", "one logit with normalizer", "all logits")
    ]


def test_with_as_many_rows_as_classes_the_record_has_the_all_logits_numbers(trained, dataset, tmp_path):
    directory = shutil.copytree(trained, tmp_path / "run")
    normalize(directory, rows="10", dataset=dataset, quiet=True)
    record = evaluate(directory, dataset=dataset, quiet=True)
    np.testing.assert_allclose(record.normalized.auprc, record.all_logits.auprc, atol=1e-6)


def test_fitting_sees_no_labels_and_the_same_seed_gives_the_same_file(
    trained, dataset, tmp_path, monkeypatch
):
    shuffled = ArraySplit(dataset.train.images, np.roll(dataset.train.labels, 7))
    others = ArraySplit(dataset.validation.images, np.roll(dataset.validation.labels, 3))
    strange = dataclasses.replace(dataset, train=shuffled, validation=others)
    monkeypatch.setattr(Run, "check_dataset", lambda run, data: None)
    rows = []
    for i, data in enumerate((dataset, dataset, strange)):
        directory = shutil.copytree(trained, tmp_path / str(i))
        normalize(directory, rows="8", dataset=data, quiet=True)
        rows.append(jax.tree.leaves(Run.open(directory).normalizer))
    for same in rows[1:]:
        for a, b in zip(rows[0], same, strict=True):
            np.testing.assert_array_equal(a, b)


def test_search_uses_the_normalizer_and_raw_leaves_it_out(normalized, dataset):
    directory, _, record = normalized
    run, images = Run.open(directory), dataset.test.images[:9]
    bank, raw = ClassBank.open(directory), ClassBank.open(directory, raw=True)
    features, _ = features_of(run, ArraySplit(images, dataset.test.labels[:9]))
    estimates = np.asarray(run.normalizer(features))
    np.testing.assert_allclose(bank.logits(images, 3), raw.logits(images, 3) - estimates, atol=1e-4)
    assert raw.normalizer is None
    assert bank.threshold(3).value != raw.threshold(3).value
    (shared,) = [
        entry.threshold
        for entry in record.thresholds
        if entry.rule == "recall=0.9" and entry.chosen_for == "all classes"
    ]
    assert bank.threshold(3).value == pytest.approx(shared)


def test_an_affine_one_is_folded_into_the_row(trained, dataset, tmp_path):
    directory = shutil.copytree(trained, tmp_path / "run")
    normalize(directory, rows="affine", dataset=dataset, quiet=True)
    bank, raw = ClassBank.open(directory), ClassBank.open(directory, raw=True)
    normalizer, images = bank.normalizer, dataset.test.images[:9]
    np.testing.assert_allclose(
        bank.row(3).kernel, raw.row(3).kernel - np.asarray(normalizer.kernel[0]), rtol=1e-6
    )
    features, _ = features_of(bank.run, ArraySplit(images, dataset.test.labels[:9]))
    expected = raw.logits(images, 3) - np.asarray(normalizer(features))
    np.testing.assert_allclose(bank.logits(images, 3), expected, atol=1e-4)


def test_choose_keeps_the_fewest_rows_that_are_nearly_the_best(trained, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(normalizing, "LADDER", (0, 4, 10))
    directory = shutil.copytree(trained, tmp_path / "run")
    rungs = normalize(directory, rows="choose", dataset=dataset, quiet=True)
    assert len(rungs) == 4
    best = max(rung.auprc for rung in rungs[1:])
    kept = rungs[-1]
    assert 1 - kept.auprc <= 1.02 * (1 - best)
    fewer = [rung for rung in rungs[1:-1] if rung.normalizer.num_rows < kept.normalizer.num_rows]
    assert all(1 - rung.auprc > 1.02 * (1 - best) for rung in fewer)
    assert Run.open(directory).normalizer.num_rows == kept.normalizer.num_rows


def test_the_normalizer_of_another_checkpoint_is_not_used(normalized, trained, tmp_path):
    directory, _, _ = normalized
    copy = shutil.copytree(directory, tmp_path / "run")
    with np.load(normalizer_path(copy)) as arrays:
        np.savez(normalizer_path(copy), **{**arrays, "checkpoint": np.array("another")})
    with pytest.warns(RunWarning, match="belongs to another checkpoint and is not used"):
        assert Run.open(copy).normalizer is None


def test_a_damaged_normalizer_file_is_one_sentence_and_raw_search_still_works(normalized, dataset, tmp_path):
    directory, _, _ = normalized
    copy = shutil.copytree(directory, tmp_path / "run")
    path = normalizer_path(copy)
    content = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for position in rng.integers(len(content), size=20).tolist():
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            found = Run.open(copy).normalizer
        except RunError as error:
            assert "pols normalize" in str(error)  # noqa: PT017
        else:  # a bit that means nothing, such as a date
            np.testing.assert_array_equal(found.kernel, Run.open(directory).normalizer.kernel)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(RunError, match="pols normalize"):
        ClassBank.open(copy)
    assert ClassBank.open(copy, raw=True).logits(dataset.test.images[:2], 1).shape == (2,)


def test_a_fit_that_is_stopped_leaves_the_run_as_it_was(trained, dataset, tmp_path, monkeypatch):
    directory = shutil.copytree(trained, tmp_path / "run")
    before = sorted(path.name for path in directory.iterdir())

    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(normalizing, "fit_normalizer", stop)
    with pytest.raises(KeyboardInterrupt):
        normalize(directory, dataset=dataset, quiet=True)
    assert sorted(path.name for path in directory.iterdir()) == before


def test_too_few_pictures_for_the_rows_are_wrong_input(trained, dataset, tmp_path, monkeypatch):
    directory = shutil.copytree(trained, tmp_path / "run")
    few = ArraySplit(dataset.train.images[:2], dataset.train.labels[:2])
    monkeypatch.setattr(normalizing, "_PASSES", 2)  # six features in all
    monkeypatch.setattr(Run, "check_dataset", lambda run, data: None)
    with pytest.raises(ConfigError, match="need at least as many features"):
        normalize(directory, rows="9", dataset=dataclasses.replace(dataset, train=few), quiet=True)


def test_streamed_pictures_are_cropped_at_random(trained, dataset, tmp_path, monkeypatch):
    from PIL import Image

    records = []
    for i, (image, label) in enumerate(
        zip(dataset.train.images[:50], dataset.train.labels[:50], strict=True)
    ):
        Image.fromarray(image.squeeze()).save(tmp_path / f"{i}.png")
        records.append((str(tmp_path / f"{i}.png"), int(label)))
    streamed = StreamSplit(records=records, image_shape=dataset.image_shape)
    monkeypatch.setattr(Run, "check_dataset", lambda run, data: None)
    directory = shutil.copytree(trained, tmp_path / "run")
    rungs = normalize(directory, rows="8", dataset=dataclasses.replace(dataset, train=streamed), quiet=True)
    assert rungs[-1].normalizer.fit.num_features >= 100


def test_the_command_fits_and_says_what_it_gained(trained, tmp_path, capsys):
    directory = shutil.copytree(trained, tmp_path / "run")
    assert main(["normalize", str(directory), "--rows", "affine", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "raw" in printed
    assert "Kept: affine. Next: pols eval" in printed
    assert main(["normalize", str(directory), "--rows", "lots"]) == 2
    assert "a number such as 256, affine or choose, got lots" in capsys.readouterr().err
