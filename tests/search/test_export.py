"""`pols export`: what is exported scores as the run does, opens like a run, and is written at once or not at all."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.export
import numpy as np
import pytest
from PIL import Image
from random_runs import IMAGES, SHAPE, make_run, with_thresholds

from pols_jax import cli
from pols_jax.errors import ConfigError, RunError, RunWarning
from pols_jax.metrics.thresholds import DEFAULT_RULES, MIN_EXAMPLES, Thresholds
from pols_jax.search import exporting
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.exported import Exported
from pols_jax.search.exporting import export, plain_thresholds, stored_rows
from pols_jax.training.checkpoint_reading import HeadRows
from pols_jax.training.runs import Run
from pols_jax.training.stored_arrays import crc32

FILES = {
    *("export.json", "score.stablehlo", "rows.npy", "scales.npy", "biases.npy"),
    *("class_names.json", "thresholds.json", "thresholds.npz"),
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return with_thresholds(make_run(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture(scope="module")
def exported(run_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("exports") / "exported"
    export(run_dir, out, rows_dtype="int8", quiet=True)
    return out


@pytest.fixture
def copy(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "copy")


def ask(directory, images, class_id):
    """The scores of a class by the program alone."""
    program = jax.export.deserialize((directory / "score.stablehlo").read_bytes())
    manifest = json.loads((directory / "export.json").read_text())
    rows, scales, biases = (np.load(directory / f"{name}.npy") for name in ("rows", "scales", "biases"))
    rows = rows.view(manifest["rows_dtype"])
    row = rows[class_id].astype(np.float32) * scales[class_id]
    read_by_normalizer = (rows, scales, biases) if "rows" in manifest["program"] else ()
    score, features = jax.jit(program.call)(images, row, biases[class_id], *read_by_normalizer)
    return np.asarray(score), np.asarray(features)


@pytest.mark.parametrize(
    ("options", "normalizer_rows"),
    [
        ({}, 1),
        ({"dtype": "bfloat16"}, 16),
        ({"num_own": 6}, 4),
        ({"num_own": 6, "dtype": "bfloat16"}, 4),
        ({"model": "cnn", "width": 0.03}, 0),
        ({"model": "cnn", "width": 0.03, "dtype": "bfloat16"}, 16),
    ],
)
@pytest.mark.filterwarnings("ignore:The export has no thresholds")
def test_the_program_scores_as_the_run_does(options, normalizer_rows, tmp_path):
    run_dir = make_run(tmp_path / "run", normalizer_rows, **options)
    export(run_dir, tmp_path / "out", quiet=True)
    bank, reopened = ClassBank.open(run_dir), ClassBank.open(tmp_path / "out")
    expected, features = bank.logits(IMAGES, [3, 7]), bank.features(IMAGES)
    assert np.std(expected) > 0.1
    # The run computes convolutions as products and the export does not: in 16 bits, sums in another order may round apart.
    # Rows that a normalizer reads are rounded in the run, and as they are stored in the export.
    rounds_apart = "dtype" in options and ("model" in options or "num_own" in options)
    near = functools.partial(
        np.testing.assert_allclose, **dict.fromkeys(("rtol", "atol"), 2**-8 if rounds_apart else 1e-5)
    )
    near(reopened.logits(IMAGES, [3, 7]), expected)
    for size in (1, 3, 64):
        score, looked = ask(tmp_path / "out", IMAGES[:size], 7)
        assert score.dtype == looked.dtype == np.float32
        near(score, expected[:size, 1])
        near(looked, features[:size])


def test_one_program_serves_every_class_and_batch_size_on_every_platform(exported):
    opened = Exported.open(exported)
    images, row, bias = opened.program.in_avals
    assert opened.program.platforms == ("cpu", "cuda", "tpu") == opened.manifest.platforms
    assert (images.dtype, images.shape[1:], row.shape, bias.shape) == (np.uint8, SHAPE, (50,), ())
    assert jax.export.is_symbolic_dim(images.shape[0])
    assert [jax.export.is_symbolic_dim(out.shape[0]) for out in opened.program.out_avals] == [True, True]
    bank = ClassBank.open(exported)
    for name in bank.names:
        bank.logits(IMAGES[:3], name)
    assert bank.num_traces == 2  # one for features and one for logits, of one batch size


@pytest.mark.parametrize("rows_dtype", ["float32", "bfloat16", "int8"])
def test_rows_are_stored_in_the_dtype_that_is_asked_for(rows_dtype, run_dir, exported, tmp_path):
    out = exported
    if rows_dtype != "int8":
        out = tmp_path / "out"
        export(run_dir, out, rows_dtype=rows_dtype, quiet=True)
    kernel, bias = Run.open(run_dir).restore_head()
    rows, biases = Exported.open(out).rows.read([4, 2])
    np.testing.assert_array_equal(biases, bias[[4, 2]])
    stored = np.load(out / "rows.npy", mmap_mode="r")
    assert stored.nbytes == kernel.size * {"float32": 4, "bfloat16": 2, "int8": 1}[rows_dtype]
    half_a_step = {
        "float32": 0 * kernel,
        "bfloat16": np.abs(kernel) * 2.0**-8,
        "int8": np.abs(kernel).max(axis=1, keepdims=True) / 127 / 2 * (1 + 1e-5) + 0 * kernel,
    }[rows_dtype]
    assert np.all(np.abs(rows - kernel[[4, 2]]) <= half_a_step[[4, 2]])
    assert {path.name for path in out.iterdir()} == FILES


def test_int8_rows_are_exact_at_zeros_and_never_overflow():
    tiny = np.float32(1e-44)
    kernel = np.array([[0, 0, 0], [127, -127, 1], [tiny, -tiny, 0], [3e38, -3e38, 0]], np.float32)
    rows, scales = stored_rows(kernel, "int8")
    decoded = rows.astype(np.float32) * scales[:, None]
    np.testing.assert_array_equal(decoded[:2], kernel[:2])
    assert scales[0] == 1
    np.testing.assert_allclose(decoded[3], kernel[3], rtol=1e-6)
    assert np.isfinite(decoded).all()
    smallest = (
        np.float32(2**-149) * np.arange(1, 600, dtype=np.float32)[:, None]
    )  # scales round down to almost nothing
    rows, scales = stored_rows(smallest, "int8")
    assert np.all(rows >= 0)
    assert np.all(scales > 0)


def test_a_row_that_is_not_finite_is_refused_and_nothing_is_left(run_dir, tmp_path, monkeypatch):
    blocks = HeadRows.blocks

    def with_nan(self):
        for kernel, bias in blocks(self):
            kernel[3, 1] = np.nan
            yield kernel, bias

    monkeypatch.setattr(HeadRows, "blocks", with_nan)
    with pytest.raises(
        ConfigError, match=r"The row of class 3 \(DIGIT THREE\) of the run in .* is not finite;"
    ):
        export(run_dir, tmp_path / "out", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_rows_are_read_and_checked_in_blocks(run_dir, tmp_path, monkeypatch):
    blocks = HeadRows.blocks

    def of_three(self):
        for kernel, bias in blocks(self):
            for start in range(0, len(bias), 3):
                yield kernel[start : start + 3], bias[start : start + 3]

    monkeypatch.setattr(HeadRows, "blocks", of_three)
    manifest = export(run_dir, tmp_path / "out", quiet=True)
    assert (manifest.rows_per_block, len(manifest.rows_crc32)) == (3, 4)
    kernel, bias = Run.open(run_dir).restore_head()
    rows, biases = Exported.open(tmp_path / "out").rows.read(list(range(10)))
    np.testing.assert_array_equal(rows, kernel)
    np.testing.assert_array_equal(biases, bias)
    path = tmp_path / "out" / "rows.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of the last class
    path.write_bytes(content)
    opened = Exported.open(tmp_path / "out")
    opened.rows.read([8])
    with pytest.raises(
        RunError, match=r"Rows 9 to 9 of .* are damaged; export the run again with pols export"
    ):
        opened.rows.read([9])


def test_all_rows_come_in_order_from_an_old_checkpoint_too(run_dir):
    expected = Run.open(run_dir).restore_head()
    head = HeadRows(run_dir)
    for is_old in (False, True):
        for array, rows in zip((head._kernel, head._bias), expected, strict=True):
            if is_old:  # it has one checksum
                array.chunk_rows, array._crc32 = None, crc32(rows)
        for found, wanted in zip(zip(*head.blocks(), strict=True), expected, strict=True):
            np.testing.assert_array_equal(np.concatenate(found), wanted)


def test_an_export_opens_like_a_run(run_dir, exported):
    bank, reopened = ClassBank.open(run_dir), ClassBank.open(exported)
    assert reopened.names == bank.names
    assert reopened.image_shape == bank.image_shape == SHAPE
    for rule in ("recall=0.9", "precision=0.4", "f1", "recall=0.77"):
        assert reopened.threshold("digit seven", rule) == bank.threshold("digit seven", rule)
    features = reopened.features(IMAGES)
    np.testing.assert_array_equal(
        reopened.logits_of_features(features, [1, 2]), reopened.logits(IMAGES, [1, 2])
    )
    with pytest.raises(ValueError, match="images must be uint8 for an exported network, got float32"):
        reopened.features(IMAGES.astype(np.float32))
    with pytest.raises(ValueError, match=r"images must have shape \[m, 32, 32, 1\], got \(64, 32, 32\)"):
        reopened.features(IMAGES[..., 0])
    with pytest.raises(
        ConfigError, match=r"There is no class named 'digit sevn'.*the nearest are DIGIT SEVEN"
    ):
        reopened.row("digit sevn")


def test_thresholds_in_json_are_those_of_a_bank(exported):
    plain = json.loads((exported / "thresholds.json").read_text())
    thresholds = Exported.open(exported).thresholds()
    assert list(plain) == [str(rule) for rule in DEFAULT_RULES]
    for rule in DEFAULT_RULES:
        for class_id in range(10):
            expected = thresholds.of_class(rule, class_id).value
            found = plain[str(rule)]["per_class"].get(str(class_id), plain[str(rule)]["common"])
            assert found == (None if np.isnan(expected) else expected)


def test_a_class_with_enough_examples_has_its_own_threshold_in_json():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], [MIN_EXAMPLES, MIN_EXAMPLES - 1])
    passing = np.arange(1, len(labels) + 1)
    logits = np.sort(rng.normal(size=len(labels)).astype("f"))[::-1]
    thresholds = Thresholds(labels, logits, passing, passing, 0 * passing)
    for rule, plain in plain_thresholds(thresholds, num_classes=3).items():
        parsed = next(known for known in DEFAULT_RULES if str(known) == rule)
        assert plain["per_class"] == {"0": thresholds.of_class(parsed, 0).value}
        assert plain["common"] == thresholds.of_class(parsed, 1).value == thresholds.of_class(parsed, 2).value


def test_a_run_without_thresholds_is_exported_with_a_warning(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "run" / "thresholds.npz").unlink()
    with pytest.warns(
        RunWarning, match=r"The export has no thresholds. The run in .* has no thresholds yet; make them"
    ):
        export(tmp_path / "run", tmp_path / "out", quiet=True)
    bank = ClassBank.open(tmp_path / "out")
    with pytest.raises(RunError, match=r"was exported without thresholds; evaluate the run with pols eval"):
        bank.threshold("digit seven")
    assert bank.decide(IMAGES, "digit seven", rule="-1000").all()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("score.stablehlo", r"score.stablehlo is damaged: its checksum is another one; export the run again"),
        ("class_names.json", r"class_names.json is damaged"),
        ("thresholds.npz", r"thresholds.npz is damaged"),
        ("rows.npy", r"Rows 0 to 9 of .* are damaged"),
        ("scales.npy", r"Rows 0 to 9 of .* are damaged"),
        ("biases.npy", r"Rows 0 to 9 of .* are damaged"),
    ],
)
def test_a_changed_byte_is_noticed(name, sentence, copy):
    content = bytearray((copy / name).read_bytes())
    content[-2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(RunError, match=sentence):
        ClassBank.open(copy).decide(IMAGES, "digit seven")


@pytest.mark.parametrize("name", sorted(FILES - {"thresholds.json"}))
def test_a_missing_or_cut_file_is_one_sentence(name, copy):
    path = copy / name
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(RunError, match=rf"{name} (is damaged|cannot be read|cannot be used)"):
        ClassBank.open(copy).decide(IMAGES, "digit seven")
    path.unlink()
    with pytest.raises(
        RunError, match=r"(is damaged \(it is not there|cannot be read: No such file|There is no run)"
    ):
        ClassBank.open(copy).decide(IMAGES, "digit seven")


def change(copy, **changes):
    path = copy / "export.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_manifest_that_cannot_be_used_is_one_sentence(copy):
    for changes, sentence in (
        (
            {"format": 2, "more": 1},
            r"newer version of pols_jax \(format 2, this one reads 1\); update pols_jax",
        ),
        ({"more": 1}, r"export.json cannot be used: 'more' is unknown here"),
        ({"rows_dtype": "int4", "more": 1}, r"export.json cannot be used"),
        ({"num_classes": 0}, r"export.json cannot be used: a size is below 1"),
        ({"rows_crc32": []}, r"export.json cannot be used: 0 checksums are not one for each block"),
        (
            {"rows_crc32": [1], "num_features": 7},
            r"rows.npy is damaged: it holds int8 \[10, 50\] instead of int8 \[10, 7\]",
        ),
    ):
        before = (copy / "export.json").read_text()
        change(copy, **changes)
        with pytest.raises(RunError, match=sentence):
            ClassBank.open(copy)
        (copy / "export.json").write_text(before)


def test_an_export_for_another_jax_is_one_sentence(exported, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(jax.export, "minimum_supported_calling_convention_version", 98)
        patch.setattr(jax.export, "maximum_supported_calling_convention_version", 99)
        with pytest.raises(
            RunError,
            match=rf"was exported with jax {jax.__version__} and cannot be used with jax .* \(calling convention \d+, and "
            r"this one takes 98 to 99\); install that version, or export the run again",
        ):
            ClassBank.open(exported)

    def deserialize(content):
        raise NotImplementedError("deserialize unsupported version 77")

    monkeypatch.setattr(jax.export, "deserialize", deserialize)
    with pytest.raises(RunError, match=r"cannot be used with jax .* \(deserialize unsupported version 77\)"):
        ClassBank.open(exported)


def test_the_same_run_gives_the_same_bytes_without_paths_of_this_machine(run_dir, exported, tmp_path):
    export(run_dir, tmp_path / "again", rows_dtype="int8", quiet=True)
    for path in exported.iterdir():
        if path.suffix != ".npz":  # such an archive has times in it
            assert (
                path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
                or path.name == "export.json"
            )
    program = (exported / "score.stablehlo").read_bytes()
    assert str(Path(exporting.__file__).parents[1]).encode() not in program
    assert b"exporting.py" not in program


def test_an_export_that_fails_leaves_nothing(run_dir, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "_stored_file", stop)
    with pytest.raises(KeyboardInterrupt):
        export(run_dir, tmp_path / "deep" / "out", quiet=True)
    assert list((tmp_path / "deep").iterdir()) == []


@pytest.fixture
def pols(capsys):
    def run(*words):
        capsys.readouterr()
        code = cli.main([*map(str, words)])
        return code, *capsys.readouterr()

    return run


def test_pols_export_and_pols_search_work_together(run_dir, pols, tmp_path):
    for i in range(5):
        Image.fromarray(IMAGES[i, ..., 0]).save(tmp_path / f"{i}.png")
    code, output, errors = pols("export", run_dir, "--out", tmp_path / "out", "--quiet")
    assert (code, errors) == (0, "")
    assert "rows.npy" in output
    assert f"Next: pols search {tmp_path / 'out'} PATH... --query NAME" in output
    found = {}
    for place in (run_dir, tmp_path / "out"):
        words = [
            "--query",
            "digit seven",
            "--query",
            "digit one",
            "--json",
            tmp_path / "hits.json",
            "--quiet",
        ]
        code, *_ = pols("search", place, tmp_path / "*.png", *words)
        assert code == 0
        found[place] = json.loads((tmp_path / "hits.json").read_text())
    assert len(found[run_dir]["hits"]) > 0
    hits, same = (
        {(hit["picture"], hit["class"]): hit["logit"] for hit in each["hits"]} for each in found.values()
    )
    assert same == pytest.approx(hits, rel=1e-5, abs=1e-5)


def test_wrong_input_is_one_sentence_and_exit_code_2(run_dir, exported, pols, tmp_path):
    unfinished = shutil.copytree(run_dir, tmp_path / "unfinished")
    config = json.loads((unfinished / "config.json").read_text())
    config["config"]["steps"] = 9
    (unfinished / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    for words, sentence in (
        (["export", run_dir], "Say where to write it: --out DIR."),
        (
            ["export", run_dir, "--out", exported],
            "exists already; name another directory with --out, or move it away.",
        ),
        (["export", run_dir, "--out", out, "--rows-dtype", "int4"], "int4"),
        (["export", unfinished, "--out", out], "is not finished: step 2 of 9."),
        (["export", tmp_path / "nothing", "--out", out], "There is no run in"),
        (["export", exported, "--out", out], "is an export already; name a run"),
        (["search", exported, "--split", "test", "--query", "digit one"], "name pictures instead of --split"),
    ):
        code, output, errors = pols(*words)
        assert (code, output, errors.count("\n")) == (2, "", 1)
        assert sentence in errors
    assert not out.exists()
    with pytest.raises(ConfigError, match="There is no dtype of rows named 'int4'; did you mean int8"):
        export(run_dir, out, rows_dtype="int4")


@pytest.mark.filterwarnings("ignore:The export has no thresholds")
def test_the_raw_logits_are_asked_for_when_exporting(run_dir, tmp_path):
    make_run(tmp_path / "run", normalizer_rows=1)
    export(tmp_path / "run", tmp_path / "normalized", quiet=True)
    with pytest.raises(
        ConfigError, match="was exported with its normalizer; for the raw logits, export the run with --raw"
    ):
        ClassBank.open(tmp_path / "normalized", raw=True)
    export(tmp_path / "run", tmp_path / "raw", raw=True, quiet=True)
    images = IMAGES[:3]
    np.testing.assert_allclose(
        ClassBank.open(tmp_path / "raw", raw=True).logits(images, 7),
        ClassBank.open(run_dir).logits(images, 7),
        rtol=1e-5,
        atol=1e-5,
    )
