"""ClassBank: the asked logits are those of the whole network, and only the asked rows are read."""

import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from pols_jax.data import scale_pixels
from pols_jax.errors import ConfigError, RunError
from pols_jax.heads import all_logits
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.class_names import ClassNames
from pols_jax.training.checkpoints import Checkpoints
from pols_jax.training.config import RunConfig
from pols_jax.training.network import make_model
from pols_jax.training.runs import Run


@pytest.fixture
def bank(run_dir):
    """A bank that has compiled nothing yet."""
    return ClassBank.open(run_dir)


def full_logits(run_dir, images):
    run = Run.open(run_dir)
    features = run.model.backbone.apply(run.restore_backbone(), scale_pixels(images))
    return np.asarray(all_logits(features, *map(jnp.asarray, run.restore_head())))


def test_logits_of_asked_classes_are_columns_of_all_logits(bank, run_dir, digits):
    expected = full_logits(run_dir, digits.test.images)
    asked = ["DIGIT SEVEN", "DIGIT ZERO", "DIGIT ONE"]
    columns = [digits.class_names.index(name) for name in asked]
    # Products of another shape round differently in the last digits.
    np.testing.assert_allclose(
        bank.logits(digits.test.images, asked), expected[:, columns], rtol=1e-5, atol=1e-5
    )


def test_a_single_class_may_stand_without_a_list(bank, digits):
    images = digits.test.images[:3]
    expected = bank.logits(images, ["digit one"])[:, 0]
    for one in ("digit one", bank.class_id("digit one"), np.int32(bank.class_id("digit one"))):
        np.testing.assert_array_equal(bank.logits(images, one), expected)


def test_floats_that_are_not_scaled_are_refused(bank, digits):
    images = digits.test.images[:2]
    scaled = scale_pixels(images)
    np.testing.assert_array_equal(bank.logits(scaled, "digit one"), bank.logits(images, "digit one"))
    for wrong in (images.astype(np.float32), images.astype(np.int64), scaled * np.nan):
        with pytest.raises(
            ValueError, match=r"images must be uint8, or floats in \[-1, 1\], got \w+ from .* to .*;"
        ):
            bank.logits(wrong, "digit one")


def test_changing_the_query_compiles_nothing(bank, digits):
    images = np.tile(digits.test.images, (3, 1, 1, 1))
    bank.logits(images, ["DIGIT SEVEN"])
    traces = bank.num_traces
    bank.logits(images, ["DIGIT ONE"])
    bank.logits(images, ["DIGIT NINE", "DIGIT TWO", 3])
    assert bank.num_traces == traces > 0


def test_any_number_of_images_needs_programs_for_three_sizes(bank, digits):
    images = np.tile(digits.test.images, (3, 1, 1, 1))
    for count in (1, 2, 7, 8, 9, 64, 65, 3):
        assert bank.logits(images[:count], [0]).shape == (count, 1)
    assert bank.num_traces == 2 * 3, "one for features and one for logits"
    assert bank.logits(images[:0], [0]).shape == (0, 1)


def test_decisions_compare_the_logit_with_the_threshold(bank, run_dir, digits):
    threshold = bank.threshold("digit seven", "recall=0.9")
    expected = bank.logits(digits.test.images, ["DIGIT SEVEN"])[:, 0] >= threshold.value
    np.testing.assert_array_equal(bank.decide(digits.test.images, "DIGIT SEVEN"), expected)
    assert threshold.origin == "all classes", "one validation example per class"
    assert not bank.decide(digits.test.images, "DIGIT SEVEN", rule="1e9").any()


def test_validation_pictures_reach_the_recall_that_was_wanted(bank, digits):
    images, labels = digits.validation.images, digits.validation.labels
    logits = bank.logits(images, list(range(len(bank.names))))
    true = logits[np.arange(len(labels)), labels]
    assert np.mean(true >= bank.threshold(0, "recall=1").value) == 1


def test_a_row_is_that_of_the_head(bank, run_dir):
    kernel, bias = Run.open(run_dir).restore_head()
    row = bank.row("digit seven")
    class_id = bank.class_id("DIGIT SEVEN")
    np.testing.assert_array_equal(row.kernel, kernel[class_id])
    assert row.bias == bias[class_id]


def test_names_match_in_any_case_and_unknown_ones_get_the_nearest(bank):
    assert bank.names[bank.class_id("digit SEVEN")] == "DIGIT SEVEN"
    assert bank.class_id(3) == 3
    with pytest.raises(ConfigError, match=r"no class named 'digit sevn' in .*; the nearest are DIGIT SEVEN"):
        bank.class_id("digit sevn")
    with pytest.raises(ConfigError, match=r"class_names\.json lists them all"):
        bank.class_id("###")
    with pytest.raises(ConfigError, match="Class ids are from 0 to 9, got 10"):
        bank.class_id(10)


def test_names_that_differ_in_case_alone_must_be_written_as_they_are():
    names = ClassNames(("a", "A", "B"), place="run", listed="names")
    assert names.find("A") == 1
    assert names.find("b") == 2
    names = ClassNames(("Straße", "STRASSE"), place="run", listed="names")
    with pytest.raises(ConfigError, match="could be Straße and STRASSE"):
        names.find("strasse")


def test_a_character_finds_the_class_that_is_named_after_it_unless_another_has_its_name(bank):
    assert bank.names[bank.class_id("7")] == "DIGIT SEVEN"
    letters = ClassNames(("LATIN CAPITAL LETTER P", "LATIN CAPITAL LETTER Q"), place="run", listed="names")
    assert letters.find("Q") == 1
    with pytest.raises(
        ConfigError, match=r"There is no class named 'q' in .*; the nearest are LATIN CAPITAL LETTER"
    ):
        letters.find("q")
    composed = ClassNames(("LATIN SMALL LETTER E WITH ACUTE", "U+E000"), place="run", listed="names")
    assert (composed.find("e\u0301"), composed.find("\ue000")) == (0, 1)
    assert ClassNames(("DIGIT ONE", "1"), place="run", listed="names").find("1") == 1


def test_images_of_another_shape_are_an_error(bank):
    with pytest.raises(ValueError, match=r"images must have shape \[m, "):
        bank.logits(np.zeros((1, 5, 5, 3), np.uint8), [0])


def test_a_precision_that_validation_never_reached_is_an_error(bank, monkeypatch):
    thresholds = bank.thresholds
    object.__setattr__(thresholds, "false_passing", thresholds.false_passing + 1000)
    with pytest.raises(
        ConfigError, match=r"no threshold of DIGIT SEVEN reaches precision=0\.99; ask for less"
    ):
        bank.threshold("digit seven", "precision=0.99")


def test_a_directory_without_run_is_an_error(tmp_path):
    with pytest.raises(RunError, match="There is no run in"):
        ClassBank.open(tmp_path)


def bytes_read() -> int:
    # The metric does not exist before the first read.
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def made_up_run(directory, num_classes, num_features):
    """A run directory with a large output layer that was never trained."""
    config = RunConfig(hidden_sizes=(num_features,), characters="0030-0039", steps=1)
    directory.mkdir()
    names = [f"class {i}" for i in range(num_classes)]
    (directory / "class_names.json").write_text(json.dumps(names))
    saved = {"config": config.to_json(), "num_classes": num_classes, "image_shape": [32, 32, 1], "data": {}}
    (directory / "config.json").write_text(json.dumps(saved))
    rng = np.random.default_rng(0)
    head = {
        "kernel": rng.normal(size=(num_classes, num_features)).astype(np.float32),
        "bias": np.zeros(num_classes, np.float32),
    }
    variables = make_model(config, num_classes).backbone.init(
        jax.random.key(0), np.zeros((1, 32, 32, 1), np.float32)
    )
    state = {"params": {"backbone": variables["params"], "head": head}}
    state["batch_stats"] = {"backbone": variables["batch_stats"]}
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, state, config=config.to_json())
        checkpoints.wait()
    return head


@pytest.mark.parametrize(
    ("num_classes", "largest_share"),
    [(2**14, 0.08), pytest.param(2**18, 0.01, marks=pytest.mark.slow)],
)
def test_the_first_query_reads_a_small_share_of_the_head(tmp_path, num_classes, largest_share):
    head = made_up_run(tmp_path / "run", num_classes, 512)
    before = bytes_read()
    bank = ClassBank.open(tmp_path / "run")
    images = np.random.default_rng(1).integers(0, 256, (5, 32, 32, 1)).astype(np.uint8)
    features = bank.features(images)
    backbone_bytes = bytes_read() - before
    logits = bank.logits_of_features(features, [f"Class {num_classes - 7}"])
    row_bytes = bytes_read() - before - backbone_bytes
    head_bytes = sum(array.nbytes for array in head.values())
    assert 0 < row_bytes < largest_share * head_bytes
    # 1024 x 512 weights and batch norm, stored twice at most (data and its metadata): nothing of the head.
    assert backbone_bytes < 2 * 4 * 1024 * 512
    assert np.isfinite(logits).all()


@pytest.mark.slow
def test_the_memory_of_a_query_does_not_grow_with_the_number_of_classes(tmp_path):
    """The head of 2^18 classes is 512 MB; what may grow is the list of names, about 100 bytes each."""
    program = textwrap.dedent(
        """
        import re, sys
        from pathlib import Path
        import numpy as np
        from pols_jax.search.class_bank import ClassBank
        bank = ClassBank.open(sys.argv[1])
        bank.logits(np.zeros((5, 32, 32, 1), np.uint8), ["class 7"])
        # Not getrusage: its peak is inherited from the process that started this one.
        print(1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]))
        """
    )
    peaks = {}
    for num_classes in (2**12, 2**18):
        head = made_up_run(tmp_path / str(num_classes), num_classes, 512)
        command = [sys.executable, "-c", program, str(tmp_path / str(num_classes))]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        peaks[num_classes] = int(result.stdout)
    assert peaks[2**18] - peaks[2**12] < 0.15 * head["kernel"].nbytes
