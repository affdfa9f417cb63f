"""`pols index` and `pols search INDEX`: the path of a user from a folder of pictures to hits."""

import json
import os
import shutil

import pytest
from PIL import Image
from random_runs import NAMES, make_run

from pols_jax import cli
from pols_jax.search.index import FeatureIndex


@pytest.fixture
def pols(capsys):
    """Runs a command line of `pols`; returns exit code, output and errors."""

    def run(*words):
        capsys.readouterr()
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", names=NAMES[:2])


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, gray in ((b"one.png", 10), (b"t\x1b[2Jwo.png", 90), (b"caf\xe9.png", 240)):
        Image.new("L", (40, 30), gray).save(os.path.join(folder, os.fsdecode(name)))
    return folder


def test_from_a_folder_to_hits(pols, run_dir, photos, tmp_path):
    index = tmp_path / "index"
    (photos / "notes.txt").write_text("no picture")
    code, out, err = pols("index", run_dir, photos, "--out", index)
    assert code == 1, "one was skipped"
    assert (
        out
        == f"{index}: 3 pictures; 3 new, 0 changed, 0 vanished, 1 broken.\nNext: pols search {index} --query NAME\n"
    )
    assert (
        err
        == f"skipped: {photos}/notes.txt cannot be decoded: it is not a picture in one of the formats JPEG, PNG, WEBP, GIF, BMP.\n"
    )
    code, out, err = pols("index", run_dir, photos, "--out", index)
    assert (code, err) == (0, "")
    assert "3 pictures; 0 new, 0 changed, 0 vanished, 1 broken." in out
    outputs = ("--json", tmp_path / "hits.json", "--sheet", tmp_path / "hits.png")
    code, out, err = pols("search", index, "--query", "1", "--threshold", "-1e9", *outputs)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("DIGIT ONE: -1000000000.0, threshold")
    assert lines[-1] == "3 hits in 3 pictures."
    assert len(lines) == 5, "each hit is printed once"
    assert out.replace("\n", "").isprintable()
    logits = [float(line.split()[0]) for line in lines[1:-1]]
    assert logits == sorted(logits, reverse=True)
    assert len(json.loads((tmp_path / "hits.json").read_text())["hits"]) == 3
    with Image.open(tmp_path / "hits.png") as sheet:
        assert sheet.width > 3 * 128
    # The hits of a direct search.
    (photos / "notes.txt").unlink()
    _, direct, _ = pols("search", run_dir, photos, "--query", "1", "--threshold", "-1e9", "--quiet")
    assert direct.splitlines() == lines
    # A picture that is gone is no hit.
    (photos / "one.png").unlink()
    code, out, err = pols("search", index, "--query", "1", "--threshold", "-1e9")
    assert code == 1
    assert "2 hits in 3 pictures." in out
    assert f"skipped: {photos}/one.png is no longer there; bring the index up to date with pols index." in err


def test_shards_are_searched_as_one_with_the_network_of_a_run_that_moved(pols, run_dir, photos, tmp_path):
    moved = shutil.copytree(run_dir, tmp_path / "first")
    for i in (1, 2):
        code, _, err = pols(
            "index", moved, photos, "--out", tmp_path / f"{i}", "--shard", f"{i}/2", "--dtype", "float16"
        )
        assert (code, err) == (0, "")
    moved.rename(tmp_path / "second")
    both = [tmp_path / "1", tmp_path / "2"]
    code, _, err = pols("search", *both, "--query", "digit one", "--threshold", "-1e9")
    assert code == 2
    assert f"If the run of {both[0]} has moved: pols search RUN_DIR {both[0]}." in err
    code, out, _ = pols("search", tmp_path / "second", *both, "--query", "digit one", "--threshold", "-1e9")
    assert code == 0
    assert "3 hits in 3 pictures." in out


def test_an_index_is_exported(pols, run_dir, photos, tmp_path):
    code, out, _ = pols("index", run_dir, photos, "--out", tmp_path / "index", "--export", "parquet")
    assert (code, out.splitlines()[1]) == (0, f"Exported {tmp_path}/index/export.parquet.")
    content = (tmp_path / "index" / "export.parquet").read_bytes()
    (tmp_path / "index" / "export.parquet").unlink()
    code, out, _ = pols("index", tmp_path / "index", "--export", "parquet")
    assert (code, out) == (0, f"Exported {tmp_path}/index/export.parquet.\n")
    assert (tmp_path / "index" / "export.parquet").read_bytes() == content
    assert len(FeatureIndex.open(tmp_path / "index")) == 3, "it may lie in the index"
    assert pols("index", run_dir, photos, "--out", tmp_path / "index")[0] == 0


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ([], ["0  DIGIT ZERO", "1  DIGIT ONE"]),
        (["ZER"], ["0  DIGIT ZERO"]),
        (["digit ?ne"], ["1  DIGIT ONE"]),
        (["1"], ["1  DIGIT ONE"]),
        (["one", "zero"], ["0  DIGIT ZERO", "1  DIGIT ONE"]),
    ],
)
def test_classes_are_listed(pols, run_dir, pattern, names):
    code, out, err = pols("search", run_dir, "--list-classes", *pattern)
    assert (code, err) == (0, "")
    assert [line.strip() for line in out.splitlines()] == names


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["index", "{run}", "{photos}"], "Name the directory of the index: --out INDEX."),
        (
            ["index", "{run}", "--out", "{new}"],
            "Name the pictures to index: files, folders, patterns, or - for a list.",
        ),
        (
            ["index", "{run}", "{photos}", "--out", "{new}", "--shard", "0/2"],
            "--shard is I/N with I from 1 to N",
        ),
        (
            ["index", "{run}", "{photos}", "--out", "{new}", "--shard", "2"],
            "--shard is I/N with I from 1 to N",
        ),
        (["index", "{run}", "{new}", "--out", "{new}"], "There is no file, folder or pattern"),
        (
            ["index", "{run}", "{photos}", "--out", "{photos}"],
            "is no index, and not empty; name another directory",
        ),
        (
            ["index", "{index}", "{photos}", "--out", "{new}"],
            "is an index; name the run first: pols index RUN_DIR",
        ),
        (["index", "{photos}", "{photos}", "--out", "{new}"], "There is no run in"),
        (["search", "{index}", "--query", "digit on"], "the nearest are DIGIT ONE"),
        (["search", "{index}", "--query", "7"], "There is no class named '7'"),
        (["search", "{index}", "{photos}", "--query", "1"], "Name either indexes or pictures;"),
        (["search", "{index}", "--query", "1", "--split", "test"], "Give either an index or --split"),
        (["search", "{other}", "{index}", "--query", "1"], "holds features of another network ("),
        (["search", "{run}", "--list-classes", "cat"], "No class of {run} matches 'cat'."),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    pols, run_dir, photos, other_run, tmp_path, words, sentence
):
    index = tmp_path / "index"
    assert pols("index", run_dir, photos, "--out", index)[0] == 0
    places = {"run": run_dir, "photos": photos, "new": tmp_path / "new", "index": index, "other": other_run}
    code, _, err = pols(*(word.format(**places) for word in words))
    assert code == 2
    assert sentence.format(**places) in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "new").exists(), "nothing is written"


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "other", names=NAMES[:2], seed=1)
