"""The study of a network that somebody else trained: its record, and that its command with fewer characters makes one like it."""

import importlib.metadata
import json
from pathlib import Path

import ocr_study
import pytest
import results_tables

from pols_jax.errors import DataError

RECORD = Path(__file__).parents[2] / "results" / "ocr.json"
is_recorded = pytest.mark.skipif(not RECORD.exists(), reason="results/ocr.json is not recorded yet")


def scores(record):
    return {score["score"]: score for score in record["ocr"]["scores"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The record of 20 characters, where everything is installed that it needs."""
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    try:
        importlib.metadata.version(ocr_study.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{ocr_study.PACKAGE} is not installed")
    try:
        ocr_study.find_faces()
    except DataError as error:
        pytest.skip(f"the fonts are not here: {error}")
    path = tmp_path_factory.mktemp("study") / "ocr.json"
    ocr_study.main([str(path), "--max-characters", "20"])
    return json.loads(path.read_text())


def test_the_study_of_a_few_characters_measures_every_score_and_makes_a_table(made):
    study = made["ocr"]
    assert study["network"]["last_nodes"] == ["MatMul", "Add", "Softmax"]
    assert (study["network"]["num_classes"], study["network"]["num_features"]) == (6625, 120)
    assert study["num_pictures"] == {"fitting": 120, "validation": 20, "test": 40}
    # There are fewer features than 256 rows need.
    assert list(scores(made)) == ["one logit", "affine", "all logits"]
    assert scores(made)["all logits"]["auprc"] >= scores(made)["one logit"]["auprc"]
    assert "| all logits | 6,625 |" in results_tables.ocr_table(study)


@is_recorded
def test_the_command_with_fewer_characters_writes_a_record_of_the_same_form(made):
    kept = json.loads(RECORD.read_text())
    assert made["environment"].keys() == kept["environment"].keys()
    assert made["ocr"].keys() == kept["ocr"].keys()
    assert made["ocr"]["network"].keys() == kept["ocr"]["network"].keys()
    for name, score in scores(made).items():
        assert score.keys() == scores(kept)[name].keys()


@is_recorded
def test_the_record_says_what_was_measured_and_how():
    record = json.loads(RECORD.read_text())
    assert record["environment"]["command"].startswith("python results/tools/ocr_study.py results/ocr.json")
    study = record["ocr"]
    assert len(study["network"]["sha256"]) == 64
    assert study["num_characters"] >= 3_000
    faces = study["faces"]
    assert len({*faces["fitting"], *faces["validation"], *faces["test"]}) == sum(map(len, faces.values()))
    for split, names in faces.items():
        assert study["num_pictures"][split] == len(names) * study["num_characters"]
    assert list(scores(record)) == ["one logit", "affine", "256 rows", "1024 rows", "all logits"]
