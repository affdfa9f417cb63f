"""`pols adopt`: from a file of arrays to a directory that opens, at once or not at all; what is wrong is one sentence."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from pols_jax import cli
from pols_jax.array_files import read_array_file
from pols_jax.errors import CheckpointError, ConfigError, PolsError, RunError
from pols_jax.evaluation import adopting, normalizing
from pols_jax.search.class_bank import ClassBank

NUM_CLASSES, NUM_FEATURES = 60, 6
NAMES = {np.dtype("f4"): "F32", np.dtype("f2"): "F16", np.dtype(jnp.bfloat16): "BF16", np.dtype("i8"): "I64"}


def examples(kernel, seed, count=300):
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % len(kernel)
    sure = rng.uniform(0.3, 3.0, (count, 1))
    return (sure * (kernel[labels] + 0.3 * rng.normal(size=(count, kernel.shape[1])) + 1)).astype("f"), labels


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(NUM_CLASSES, NUM_FEATURES)).astype("f")
    features, labels = examples(kernel, 2)
    return {
        "kernel": kernel,
        "bias": rng.normal(size=NUM_CLASSES).astype("f"),
        "features": examples(kernel, 1)[0],
        "validation_features": features,
        "validation_labels": labels,
        "names": np.array([f"class {i}" for i in range(NUM_CLASSES)]),
    }


@pytest.fixture
def pols(capsys, tmp_path, monkeypatch):
    """Runs a command line of `pols` in an empty directory; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(line):
        capsys.readouterr()
        code = cli.main(line.split())
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def adopted(arrays, tmp_path_factory):
    """A network that was adopted with 40 rows, half of them those of classes, and what was printed about it."""
    folder = tmp_path_factory.mktemp("adopted")
    np.savez(folder / "network.npz", **arrays)
    fitter = normalizing.fit_normalizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            normalizing, "fit_normalizer", lambda *args, **options: fitter(*args, num_steps=100, **options)
        )
        patch.setattr(normalizing, "LADDER", (0, 40, 1024))
        words = ["adopt", str(folder / "network.npz"), "--out", str(folder / "deep" / "er"), "--quiet"]
        assert cli.main(words) == 0
    return folder / "deep" / "er"


@pytest.fixture
def copy(adopted, tmp_path):
    return shutil.copytree(adopted, tmp_path / "copy")


def write_safetensors(path, arrays):
    """As the safetensors package writes it: the length of the header, the header, the numbers."""
    header, data = {"__metadata__": {"format": "np"}}, b""
    for name, array in arrays.items():
        stop = len(data) + array.nbytes
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": array.shape,
            "data_offsets": [len(data), stop],
        }
        data += array.tobytes()
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)


def test_the_directory_opens_with_names_rows_normalizer_and_thresholds(adopted, arrays):
    bank = ClassBank.open(adopted, features_of=lambda pictures: pictures)
    given = ClassBank.from_arrays(
        arrays["kernel"],
        arrays["bias"],
        list(arrays["names"]),
        validation=(arrays["validation_features"], arrays["validation_labels"]),
        normalizer=bank.normalizer,
    )
    pictures = arrays["features"][:9]
    assert (bank.normalizer.num_rows, bank.normalizer.clusters.num_own) == (40, 20)
    assert bank.names == given.names
    np.testing.assert_allclose(
        bank.logits(pictures, "CLASS 7"), given.logits_of_features(pictures, 7), rtol=1e-6
    )
    for rule in ("recall=0.9", "precision=0.5", "f1"):
        assert bank.threshold(7, rule) == given.threshold(7, rule)
    np.testing.assert_array_equal(
        bank.decide(pictures, 7), given.logits_of_features(pictures, 7) >= given.threshold(7).value
    )


def test_raw_leaves_the_normalizer_out_and_has_thresholds_of_its_own(adopted, arrays):
    raw = ClassBank.open(adopted, raw=True)
    validation = arrays["validation_features"], arrays["validation_labels"]
    given = ClassBank.from_arrays(arrays["kernel"], arrays["bias"], validation=validation)
    np.testing.assert_array_equal(raw.row(7).kernel, arrays["kernel"][7])
    assert raw.threshold(7) == given.threshold(7) != ClassBank.open(adopted).threshold(7)


def test_evaluation_prints_the_table_again(adopted, pols):
    code, out, err = pols(f"eval {adopted} --markdown table.md")
    assert (code, err) == (0, "")
    for text in (
        "1-AUPRC",
        "precision at recall 0.9",
        "one logit, affine",
        "one logit, 40 rows",
        "all logits",
    ):
        assert text in out
    assert "Kept: one logit, 40 rows (the fewest rows that are nearly the best, by AUPRC" in out
    assert "One threshold for all classes: recall=0.9: " in out
    code, _, err = pols(f"eval {adopted} --json record.json")
    assert code == 2
    assert "was measured when it was adopted" in err


def test_search_and_normalize_say_what_to_do_with_an_adopted_network(adopted, pols):
    code, _, err = pols(f"search {adopted} . --query 7")
    assert code == 2
    assert "ask it from Python, with ClassBank.open(DIR, features_of=...)" in err
    code, _, err = pols(f"normalize {adopted}")
    assert code == 2
    assert "is no run, but an adopted network" in err


def test_training_does_not_write_into_an_adopted_network(copy, pols):
    before = sorted(copy.rglob("*"))
    code, _, err = pols(f"train --run-dir {copy} --characters 0030-0039 --loss cross_entropy --steps 1")
    assert (code, err.count("\n")) == (2, 1)
    assert sorted(copy.rglob("*")) == before


def test_features_of_is_refused_for_a_directory_without_network(tmp_path):
    with pytest.raises(RunError, match="There is no run in"):
        ClassBank.open(tmp_path, features_of=np.asarray)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_a_safetensors_file_without_labels_is_measured_by_log_z(pols, arrays, tmp_path, dtype):
    kernel = arrays["kernel"].astype(dtype)
    write_safetensors(
        tmp_path / "head.safetensors",
        {"kernel": kernel.T.copy(), "bias": arrays["bias"], "features": arrays["features"].astype(dtype)},
    )
    (tmp_path / "names.txt").write_text("\n".join(arrays["names"]) + "\n")
    line = "adopt head.safetensors --kernel-layout dk --names names.txt --rows affine --out network --quiet"
    code, out, err = pols(line)
    assert (code, err) == (0, "")
    assert "R^2" in out
    assert "AUPRC" not in out
    bank = ClassBank.open("network")
    assert bank.names[7] == "class 7"
    np.testing.assert_array_equal(
        ClassBank.open("network", raw=True).row("class 7").kernel.astype("f"), kernel[7].astype("f")
    )
    with pytest.raises(RunError, match="no thresholds for network, because no validation labels"):
        bank.threshold(7)


def test_the_safetensors_package_writes_what_is_read(tmp_path):
    package = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    package.save_file({"kernel": np.eye(3, dtype="f")}, tmp_path / "a.safetensors", {"made": "here"})
    np.testing.assert_array_equal(read_array_file(tmp_path / "a.safetensors")["kernel"], np.eye(3))


def test_names_may_be_a_json_list_and_are_the_class_ids_by_default(pols, arrays, tmp_path):
    np.savez("network.npz", kernel=arrays["kernel"])
    (tmp_path / "names.json").write_text(json.dumps([f"é {i}" for i in range(NUM_CLASSES)]))
    assert pols("adopt network.npz --names names.json --rows none --out a --quiet")[0] == 0
    assert pols("adopt network.npz --rows none --out b --quiet")[0] == 0
    assert ClassBank.open("a").names[3] == "é 3"
    assert ClassBank.open("b").names[3] == "3"


def test_a_file_of_another_kind_is_one_sentence(pols, arrays, tmp_path):
    kernel, features = arrays["kernel"], arrays["features"]
    labels = {"validation_features": features[:2], "validation_labels": np.array([0, 60])}
    write_safetensors(tmp_path / "good.safetensors", {"kernel": kernel})
    content = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-9])
    (tmp_path / "short.safetensors").write_bytes(content[:20])
    (tmp_path / "text.npz").write_text("kernel")
    (tmp_path / "few.txt").write_text("a\nb\n")
    (tmp_path / "wrong.json").write_text('{"a": 1}')
    (tmp_path / "there").mkdir()
    files = {
        "good": {"kernel": kernel, "features": features},
        "transposed": {"kernel": kernel.T, "features": features},
        "nan": {"kernel": kernel, "features": features * np.nan},
        "empty": {"features": features},
        "odd": {"kernel": kernel, "feature": features},
        "half": {"kernel": kernel, "features": features, "validation_labels": np.zeros(3, int)},
        "range": {"kernel": kernel, "features": features, **labels},
        "void": {"kernel": kernel.astype(jnp.bfloat16), "features": features},
        "bare": {"kernel": kernel},
        "few": {"kernel": kernel, "features": features[:40]},
    }
    for name, content in files.items():
        np.savez(tmp_path / f"{name}.npz", **content)
    before = sorted(path.name for path in tmp_path.iterdir())
    for words, sentence in {
        "transposed.npz --out a": "there are 6 columns in features; give --kernel-layout dk.",
        "good.npz --out a --kernel-layout dk": "there are 6 columns in features; give --kernel-layout kd.",
        "nan.npz --out a": "features must be finite numbers; some are NaN or infinite.",
        "empty.npz --out a": "there is no array kernel",
        "odd.npz --out a": "There is no array named 'feature'; did you mean features",
        "half.npz --out a": "validation_features and validation_labels belong together",
        "range.npz --out a": "validation labels must be in [0, 60), got 0 to 60.",
        "void.npz --out a": "kernel has a type that npz cannot keep",
        "bare.npz --out a": "there is no array features to fit a normalizer to; add it, or give --rows none.",
        "few.npz --out a --rows 50": "num_rows=50 rows need at least as many features, got 40",
        "good.npz --out a --rows many": "a number such as 256, none, affine or choose, got many.",
        "good.npz --out a --names few.txt": "a name for each of the 60 classes, got 2.",
        "good.npz --out a --names wrong.json": "wrong.json must be a list of names",
        "good.npz --out a --names gone.txt": "gone.txt cannot be read: No such file or directory.",
        "good.npz --out there": "there exists already; name another directory with --out",
        "good.npz --out few.txt/a": "few.txt is not a directory",
        "good.npz": "Say where to write it: --out DIR.",
        "gone.npz --out a": "gone.npz cannot be read: No such file or directory.",
        "text.npz --out a": "text.npz cannot be read: it is damaged",
        "there --out a": "there must be an .npz or a .safetensors file.",
        "cut.safetensors --out a": "it is damaged (kernel ends after the end of the file).",
        "short.safetensors --out a": "it is damaged (it ends within its header, after 20 bytes).",
    }.items():
        code, out, err = pols(f"adopt {words} --quiet")
        assert (code, out, err.count("\n")) == (2, "", 1), words
        assert sentence in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_is_stopped_leaves_nothing(pols, arrays, tmp_path, monkeypatch, error):
    def stop(*args, **options):
        raise error

    np.savez("network.npz", **arrays)
    monkeypatch.setattr(adopting, "write_json", stop)
    code, _, err = pols("adopt network.npz --rows none --out network --quiet")
    assert code in (1, 130)
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["network.npz"]


def test_a_changed_or_missing_file_of_the_directory_is_one_sentence(copy, adopted):
    def ask():
        bank = ClassBank.open(copy)
        bank.class_id("class 7")
        bank.row(7)
        bank.threshold(7)

    def sentence(error, match):
        with pytest.raises(error, match=match):
            ask()
        shutil.rmtree(copy)
        shutil.copytree(adopted, copy)

    info = json.loads((copy / "adopted.json").read_text())
    (copy / "adopted.json").write_text(json.dumps(info | {"kept": 0}))
    sentence(RunError, "does not belong to the network beside it, or was changed. Adopt the network again")
    (copy / "adopted.json").write_text("{")
    sentence(RunError, "adopted.json cannot be read: it is not JSON")
    (copy / "class_names.json").write_text(json.dumps(["a"] * NUM_CLASSES))
    sentence(RunError, "class_names.json is that of another network, or was changed")
    (copy / "normalizer.npz").unlink()
    sentence(RunError, "The normalizer of .* is missing")
    (copy / "normalizer.npz").write_bytes(b"PK")
    sentence(RunError, "it is damaged .*; adopt the network again with pols adopt")
    for change, why in (
        ({"cluster_of": np.full(NUM_CLASSES, 20)}, "its clusters do not fit its rows"),
        ({"num_own": np.array(0)}, "its clusters do not fit its rows"),
        ({"cluster_of": np.zeros(9, int)}, r"cluster_of has the shape \[9\] instead of \[60\]"),
    ):
        with np.load(copy / "normalizer.npz") as stored:
            np.savez(copy / "normalizer.npz", **{**stored, **change})
        sentence(RunError, f"normalizer.npz cannot be used: {why}; adopt the network again with pols adopt")
    (copy / "thresholds-normalized.npz").unlink()
    sentence(RunError, "has no thresholds yet; make them with pols adopt, or give a number")
    shutil.rmtree(copy / "checkpoints" / "0" / "state")
    sentence(CheckpointError, "Adopt the network again with pols adopt")
    shutil.rmtree(copy / "checkpoints")
    sentence(CheckpointError, "Adopt the network again with pols adopt")


def test_a_flipped_bit_of_the_rows_is_noticed_when_they_are_read(copy, adopted):
    rng = np.random.default_rng(0)
    expected = ClassBank.open(adopted).row(7).kernel
    chunks = [path for path in (copy / "checkpoints" / "0" / "state").rglob("*") if path.is_file()]
    noticed = 0
    for path in chunks:
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[int(rng.integers(len(content)))] ^= 16
        path.write_bytes(damaged)
        try:
            np.testing.assert_array_equal(ClassBank.open(copy).row(7).kernel, expected)
        except PolsError as error:
            noticed += "Adopt the network again" in str(error)
        path.write_bytes(content)
    assert noticed >= 2, "kernel and bias"


def test_another_network_is_not_mixed_in(copy, arrays, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("other.npz", **{**arrays, "kernel": arrays["kernel"] + 1})
    assert cli.main(["adopt", "other.npz", "--rows", "affine", "--out", "other", "--quiet"]) == 0
    shutil.copy(tmp_path / "other" / "thresholds-normalized.npz", copy)
    with pytest.raises(ConfigError, match="was not measured on the checkpoint"):
        ClassBank.open(copy).threshold(7)
    shutil.copy(tmp_path / "other" / "adopted.json", copy)
    with pytest.raises(RunError, match="does not belong to the network beside it"):
        ClassBank.open(copy)
