"""Search over files, folders, patterns, feeds and splits: what is found, what is skipped, and the exit codes."""

import importlib.util
import io
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pols_jax.cli import running as cli
from pols_jax.errors import DataError
from pols_jax.metrics.thresholds import Rule
from pols_jax.search import searching
from pols_jax.search.pictures import Picture, find_pictures, listed_pictures, split_pictures
from pols_jax.search.searching import Findings, make_queries, search


def queries(bank, *names, rule="recall=0.9"):
    return make_queries(bank, names, Rule.parse(rule))


def test_hits_are_the_pictures_whose_logit_passes(bank, digits, pictures):
    asked = queries(bank, "digit seven", "digit two")
    findings = search(bank, asked, find_pictures([str(pictures)]))
    files = sorted(str(path) for path in pictures.iterdir())
    order = [int(Path(file).stem[-2:]) for file in files]
    logits = bank.logits(digits.test.images[order], [7, 2])
    passes = logits >= np.array([query.threshold.value for query in asked], np.float32)
    expected = {(files[i], asked[j].name) for i, j in np.argwhere(passes)}
    assert {(hit.picture, hit.query.name) for hit in findings.hits} == expected
    assert expected
    assert findings.num_pictures == 30
    best = findings.best_first()
    margins = [hit.logit - hit.query.threshold.value for hit in best]
    assert margins == sorted(margins, reverse=True)


def test_a_split_gives_what_its_files_give(bank, digits, pictures):
    asked = queries(bank, "digit seven")
    from_files = search(bank, asked, find_pictures([str(pictures / "*.png")]))
    from_split = search(bank, asked, split_pictures(digits.test, "test", digits.class_names))
    assert sorted(hit.logit for hit in from_split.hits) == pytest.approx(
        sorted(h.logit for h in from_files.hits)
    )
    assert all(hit.picture.startswith("test[") for hit in from_split.hits)


def test_pictures_of_other_modes_and_sizes_are_found(bank, digits, tmp_path):
    image = digits.test.images[np.flatnonzero(digits.test.labels == 7)[0], ..., 0]
    picture = Image.fromarray(image)
    gray16 = Image.fromarray(image.astype(np.uint16) * 257)
    rotated = picture.rotate(90)  # the EXIF tag says how to turn it back
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {
        "gray.png": lambda path: picture.save(path),
        "rgba.png": lambda path: picture.convert("RGBA").save(path),
        "palette.png": lambda path: picture.convert("P").save(path),
        "gray16.png": lambda path: gray16.save(path),
        "large.png": lambda path: picture.resize((320, 320)).save(path),
        "rotated.png": lambda path: rotated.save(path, exif=exif),
    }
    for name, save in files.items():
        save(tmp_path / name)
    findings = search(bank, queries(bank, "digit seven", rule="-1e9"), find_pictures([str(tmp_path)]))
    logits = {Path(hit.picture).name: hit.logit for hit in findings.hits}
    assert logits.keys() == files.keys()
    for name, logit in logits.items():
        # Enlarging and shrinking again changes pixels; nothing else does.
        assert logit == pytest.approx(logits["gray.png"], abs=1.0 if name == "large.png" else 1e-4), name


def test_broken_files_are_named_counted_and_skipped(bank, pictures, tmp_path):
    whole = next(pictures.iterdir())
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "cut.png").write_bytes(whole.read_bytes()[:60])
    (tmp_path / "empty.png").touch()
    shutil.copy(whole, tmp_path / "whole.png")
    named = []
    findings = search(
        bank,
        queries(bank, "digit seven", rule="-1e9"),
        find_pictures([str(tmp_path)]),
        on_skip=lambda name, why: named.append(Path(name).name),
    )
    assert named == ["cut.png", "empty.png", "notes.txt"]
    assert [Path(hit.picture).name for hit in findings.hits] == ["whole.png"]
    assert [skipped["picture"] for skipped in findings.to_json()["skipped"]] == [
        n for n, _ in findings.skipped
    ]


def test_what_is_no_regular_file_is_named_counted_and_skipped(bank, pictures, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "dangling.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "script.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    )
    shutil.copy(next(pictures.iterdir()), tmp_path / "whole.png")
    for paths in ([str(tmp_path)], [f"{tmp_path}/*.*"], sorted(map(str, tmp_path.glob("*[!g].png")))):
        findings = search(bank, queries(bank, "digit seven", rule="-1e9"), find_pictures(paths))
        assert [Path(hit.picture).name for hit in findings.hits] == ["whole.png"]
        reasons = {Path(name).name: why for name, why in findings.skipped}
        assert "it is a named pipe" in reasons["pipe.png"]
        assert "it is a device" in reasons["zero.png"]


ODD_NAMES = [
    b"caf\xe9.png",
    b"\x1b[31mred\x1b[0m.png",
    b"two\nlines.png",
    b"[bold].png",
    "\u202ecod.png".encode(),
]


@pytest.fixture
def odd_pictures(pictures, tmp_path):
    """Pictures whose names are not UTF-8, control a terminal, or are markup, in a folder that closes a markup tag."""
    folder = tmp_path / "a[" / "x]"
    folder.mkdir(parents=True)
    for name in ODD_NAMES:
        shutil.copy(next(pictures.iterdir()), os.path.join(folder, os.fsdecode(name)))
    (folder / "no\x1b[2J.png").write_text("no picture")
    return folder


def test_pictures_with_odd_names_are_found_and_shown_safely(run_script, run_dir, odd_pictures, tmp_path):
    record, sheet = tmp_path / "hits.json", tmp_path / "hits.png"
    outputs = ("--threshold", "-1e9", "--json", record, "--sheet", sheet)
    code, out, err = run_script(run_dir, odd_pictures, "--query", "digit seven", *outputs)
    assert code == 1, "one was skipped"
    assert "5 hits in 6 pictures" in out
    for text in (out, err):
        assert text.replace("\n", "").isprintable()
    for shown in (
        "caf\\xe9.png",
        "\\x1b[31mred\\x1b[0m.png",
        "two\\nlines.png",
        "[bold].png",
        "\\u202ecod.png",
    ):
        assert f"{odd_pictures}/{shown}" in out
    assert "no\\x1b[2J.png cannot be decoded" in err
    names = {Path(hit["picture"]).name for hit in json.loads(record.read_bytes().decode())["hits"]}
    assert names == {"caf\\xe9.png", *(name.decode() for name in ODD_NAMES[1:])}, (
        "as they are, if they are UTF-8"
    )
    assert sheet.stat().st_size


def test_listed_paths_need_not_be_utf8(run_script, run_dir, odd_pictures):
    listed = b"".join(
        os.fsencode(odd_pictures) + b"/" + name + b"\n" for name in (ODD_NAMES[0], b"caf\r\xe9.png")
    )
    stdin = io.TextIOWrapper(io.BytesIO(listed), encoding="utf-8")
    code, out, err = run_script(run_dir, "-", "--query", "digit seven", "--threshold", "-1e9", stdin=stdin)
    assert code == 1
    assert "1 hit in 2 pictures" in out
    assert "caf\\r\\xe9.png cannot be decoded: No such file" in err


def test_names_in_errors_cannot_control_the_terminal(run_script, run_dir, tmp_path):
    code, _, err = run_script(run_dir, f"{tmp_path}/\x07\udce9.png", "--query", "digit seven")
    assert code == 2
    assert err == f"There is no file, folder or pattern {tmp_path}/\\x07\\xe9.png.\n"
    code, _, err = run_script(tmp_path / "\x1b[2J", tmp_path, "--query", "digit seven")
    assert code == 2
    assert "\x1b" not in err


def test_a_feed_is_answered_before_its_next_picture_arrives(bank, pictures):
    answers: queue.Queue = queue.Queue()
    files = sorted(map(str, pictures.iterdir()))[:3]

    def feed():
        for file in files:
            yield Picture(file, file)
            # Blocks until the hit is reported: a search that waits for a full batch would never go on.
            assert answers.get(timeout=60) == file

    findings = search(
        bank, queries(bank, "digit seven", rule="-1e9"), feed(), on_hit=lambda hit: answers.put(hit.picture)
    )
    assert [hit.picture for hit in findings.hits] == files


def test_an_error_of_the_source_is_raised(bank):
    def broken():
        raise OSError("the disk is gone")
        yield

    with pytest.raises(OSError, match="the disk is gone"):
        search(bank, queries(bank, "digit seven"), broken())


def test_folders_are_read_in_order_and_without_hidden_files(tmp_path):
    for name in ("b/2.png", "a/1.png", ".hidden/3.png", "a/.4.png", "5.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [str(Path(picture.name).relative_to(tmp_path)) for picture in find_pictures([str(tmp_path)])]
    assert found == ["5.png", "a/1.png", "b/2.png"]


def test_an_empty_folder_and_an_empty_pattern_are_errors(tmp_path):
    for path in (tmp_path, tmp_path / "*.png"):
        with pytest.raises(DataError, match="There is no picture in"):
            find_pictures([str(path)])


def test_the_sheet_keeps_the_best_hits_only(bank, monkeypatch):
    monkeypatch.setattr(searching, "_SHEET_HITS", 3)
    (query,) = queries(bank, "digit seven", rule="0")
    findings = Findings()
    for i, logit in enumerate([1.0, 5.0, 2.0, 4.0, 3.0]):
        findings.add(searching.Hit(logit, query, f"{i}.png"), np.full((32, 32, 1), 10 * i, np.uint8))
    sheet = np.asarray(findings.sheet())
    cell = 136
    shown = [sheet[60, i * cell + 60, 0] for i in range(sheet.shape[1] // cell)]
    assert shown == [10, 30, 40]  # the gray levels of the pictures with logits 5, 4 and 3
    assert len(findings.hits) == 5


# The script itself.


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Runs search.py with some arguments; returns exit code, output and errors."""
    path = Path(__file__).parents[2] / "search.py"
    spec = importlib.util.spec_from_file_location("search_script", path)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "search_script", script)
    spec.loader.exec_module(script)

    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["search.py", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        capsys.readouterr()
        code = cli.run(script.main)
        return code, *capsys.readouterr()

    return run


def test_a_search_loads_neither_data_sets_nor_what_trains_and_draws(run_dir, pictures):
    heavy = {"optax", "orbax", "tensorflow_datasets", "grain", "matplotlib", "fontTools", "sklearn"}
    program = "import sys; from pols_jax.cli import main; code = main(sys.argv[1:]); print(*sys.modules); sys.exit(code)"
    picture = min(pictures.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", program, "search", run_dir, picture, "--query", "digit seven"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "1 picture." in done.stdout
    assert not {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()} & heavy


def test_the_script_prints_hits_and_writes_files(run_script, run_dir, pictures, tmp_path):
    sheet, record = tmp_path / "hits.png", tmp_path / "hits.json"
    code, out, err = run_script(
        run_dir, "--query", "digit seven", pictures, "--sheet", sheet, "--json", record, "--threshold", "-1e9"
    )
    assert (code, err) == (0, "")
    assert "30 hits in 30 pictures." in out
    assert out.count("digit_seven") == 3, "each hit is printed once"
    assert len(json.loads(record.read_text())["hits"]) == 30
    with Image.open(sheet) as image:
        assert image.width > 8 * 128


def test_the_script_takes_paths_from_standard_input(run_script, run_dir, pictures):
    files = sorted(map(str, pictures.iterdir()))[:2]
    code, out, err = run_script(
        run_dir, "-", "--query", "DIGIT SEVEN", "--threshold", "-1e9", stdin="\n".join([*files, "no.png"])
    )
    assert code == 1, "a file was skipped"
    assert "2 hits in 3 pictures" in out
    assert "no.png" in err
    assert "Skipped 1 of 3 pictures." in err


def test_the_script_searches_a_split(run_script, run_dir):
    code, out, _ = run_script(
        run_dir, "--split", "test", "--query", "digit seven", "--query", "digit one", "--quiet"
    )
    assert code == 0
    assert "in 30 pictures" in out
    assert "DIGIT SEVEN: recall=0.9, threshold" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_search_that_writes_what_it_found(
    run_script, run_dir, pictures, tmp_path, monkeypatch, number
):
    file, (reader, writer) = str(next(pictures.iterdir())), os.pipe()
    hits = iter([lambda: None, lambda: signal.raise_signal(number)])
    monkeypatch.setattr(searching.Hit, "__str__", lambda hit: next(hits, lambda: None)() or "hit")
    with open(reader) as feed, open(writer, "w") as pipe:  # open, as a live feed is
        pipe.write(f"{file}\n{file}\n")
        pipe.flush()
        sheet, record = tmp_path / "hits.png", tmp_path / "hits.json"
        code, out, err = run_script(
            *(run_dir, "-", "--query", "digit seven", "--threshold", "-1e9"),
            *("--sheet", sheet, "--json", record),
            stdin=feed,
        )
    assert (code, err) == (128 + number, "Stopped.\n")
    assert len(json.loads(record.read_text())["hits"]) == 2
    with Image.open(sheet) as image:
        assert image.width > 128
    assert "2 hits in 2 pictures" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{run}", "{pictures}"], "Say what to look for"),
        (["{run}", "--query", "digit seven"], "Name the pictures to search"),
        (["{run}", "{pictures}", "--query", "digit sevn"], "the nearest are DIGIT SEVEN"),
        (
            ["{run}", "{pictures}", "--query", "digit one", "--threshold", "recall"],
            "The threshold rule 'recall'",
        ),
        (["{run}", "{empty}", "--query", "digit one"], "There is no picture in"),
        (["{run}", "{empty}/gone.png", "--query", "digit one"], "There is no file"),
        (["{empty}", "{pictures}", "--query", "digit one"], "There is no run in"),
        (["{run}", "{pictures}", "--query", "digit one", "--split", "test"], "Give either PATHs or --split"),
        (["{run}", "{pictures}", "--query", "digit one", "--sheet", "{empty}/hits.txt"], "must be an image"),
        (["{run}", "{pictures}", "--query", "digit one", "--sheet", "{empty}/hits.xbm"], "must be an image"),
        (
            ["{run}", "{pictures}", "--query", "1", "--sheet", "{empty}/a.png", "--json", "{empty}/./a.png"],
            "to be written twice",
        ),
        (
            ["{run}", "{pictures}", "--query", "digit one", "--json", "{empty}/no/hits.json"],
            "is not a directory",
        ),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    run_script, run_dir, pictures, tmp_path, arguments, sentence
):
    places = {"run": run_dir, "pictures": pictures, "empty": tmp_path}
    code, _, err = run_script(*(argument.format(**places) for argument in arguments))
    assert code == 2
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_run_that_was_not_evaluated_can_be_searched_with_a_number(run_script, run_dir, pictures, tmp_path):
    copy = shutil.copytree(run_dir, tmp_path / "run")
    (copy / "thresholds.npz").unlink()
    code, _, err = run_script(copy, pictures, "--query", "digit seven")
    assert code == 2
    assert "pols eval" in err
    assert run_script(copy, pictures, "--query", "digit seven", "--threshold", "0")[0] == 0


def test_a_damaged_row_is_found_before_anything_is_searched(run_script, run_dir, pictures, tmp_path):
    copy, record = shutil.copytree(run_dir, tmp_path / "run"), tmp_path / "hits.json"
    (step,) = (copy / "checkpoints").iterdir()
    chunk = step / "state" / "params.head.bias" / "0"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, out, err = run_script(
        copy, pictures, "--query", "digit seven", "--threshold", "0", "--json", record
    )
    assert (code, out) == (1, "")
    assert f"Checkpoint {step.name}" in err
    assert len(err.splitlines()) == 1
    assert not record.exists()


def test_lines_without_a_path_are_left_out():
    assert [picture.name for picture in listed_pictures(["a.png\n", "\n", "b c.png\r\n"])] == [
        "a.png",
        "b c.png",
    ]
