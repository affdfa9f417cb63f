"""The command `pols`: its verbs, its help, and the README's path from training to search."""

import errno
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from pols_jax import cli
from pols_jax.cli import adopt, bench, evaluate, flags, index, search, serve, train
from pols_jax.training.presets import PRESETS

ROOT = Path(__file__).parents[2]


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


def test_without_a_verb_the_verbs_are_listed(pols):
    code, out, err = pols()
    assert (code, err) == (0, "")
    assert all(f"  {verb} " in out for verb in cli.COMMANDS)
    assert pols("--help") == (0, out, "")


def test_the_version_is_said(pols):
    assert pols("--version") == (0, "pols 0.1.0\n", "")


def test_a_mistyped_verb_is_exit_code_2_with_the_nearest_names(pols):
    code, _, err = pols("trian", "--steps", "3")
    assert code == 2
    assert err.startswith("There is no command named 'trian'; did you mean train")


PAGES = {
    "train": (train.Flags, train.PAGE),
    "eval": (evaluate.Flags, evaluate.PAGE),
    "adopt": (adopt.Flags, adopt.PAGE),
    "index": (index.Flags, index.PAGE),
    "search": (search.Flags, search.PAGE),
    "serve": (serve.Flags, serve.PAGE),
    "bench": (bench.LogitsSettings, bench._page("logits", "[FLAGS]", bench.LogitsSettings)),
    "bench losses": (bench.LossSettings, bench._page("losses", "[FLAGS]", bench.LossSettings)),
    "bench metrics": (bench.MetricSettings, bench._page("metrics", "[FLAGS]", bench.MetricSettings)),
    "bench report": (bench.Report, bench._page("report", "RECORD...", bench.Report)),
}


@pytest.mark.parametrize("command", PAGES)
def test_help_fits_two_screens_and_keeps_the_lines_of_the_examples(pols, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = pols(*command.split(), "--help")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 100
    _, page = PAGES[command]
    for example in page.examples.strip().splitlines():
        assert f"  {example}" in lines


@pytest.mark.parametrize("command", PAGES)
def test_every_flag_has_a_text_and_stands_in_a_group(command):
    kind, page = PAGES[command]
    fields = flags._fields(kind)
    assert not [name for name, field in fields.items() if not field.text]
    assert "\nother\n" not in flags.help_page(kind, page), "name its group in the page of the command"


def test_the_presets_are_a_table_of_their_own(pols):
    code, out, _ = pols("train", "--presets")
    assert code == 0
    assert all(name in out for name in PRESETS)
    assert "time" in out
    _, page, _ = pols("train", "--help")
    assert "cifar100-quick" not in page


def test_flags_are_read_without_jax():
    heavy = ("jax", "flax", "optax", "orbax", "matplotlib", "tensorflow_datasets")
    program = (
        "import sys; from pols_jax.cli import adopt, bench, evaluate, search, serve, train; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("eval --batch-size 0", "--batch-size must be at least 1, got 0."),
        ("eval --batch-size 1e3", "--batch-size must be a whole number, got '1e3'."),
        ("eval --figure-class=", "--figure-class must not be empty."),
        ("eval nowhere --figures fig", "There is no run in nowhere; train one with pols train."),
        ("search", "That is not: pols search RUN_DIR|INDEX PATH... --query NAME [FLAGS]."),
        ("search nowhere", "Say what to look for: --query NAME."),
        (
            "search nowhere photos --query cat --split tst",
            "--split must be train or validation or test, got 'tst'.",
        ),
        ("search nowhere photos --query cat", "There is no run in nowhere; train one with pols train."),
        ("search nowhere photos --query cat --threshold", "--threshold needs a value."),
        ("search nowhere photos --query cat --threshold 1 --threshold 2", "--threshold is given twice"),
        ("search nowhere photos --query cat --sheets a.png", "did you mean --sheet"),
        ("serve", "Say what to serve: pols serve RUN --folder FOLDER, or pols serve INDEX."),
        ("serve nowhere --port 0", "There is no run in nowhere; train one with pols train."),
        ("serve nowhere --folder missing", "There is no folder missing to watch"),
        ("serve nowhere --index here", "--index says where the index of a --folder is kept"),
        ("serve nowhere --port 65536", "--port must be at most 65,535, got 65536."),
        ("serve nowhere --host 192.0.2.1", "Port 8000 of 192.0.2.1 cannot be used: "),
        ("bench --batches 0", "--batches must be at least 1, got 0."),
        (f"eval --json {'x' * 300}", "--json names a file with more than 255 bytes"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2_and_leaves_nothing(
    pols, words, sentence, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code, out, err = pols(*words.split())
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_error_shows_what_would_move_the_cursor_with_escapes(pols):
    code, _, err = pols("eval", "no\x1b[2Jrun\x07\nat all")
    assert code == 2
    assert r"no\x1b[2Jrun\x07\nat all" in err


def test_what_the_system_refuses_is_one_sentence_and_a_defect_keeps_its_traceback(pols, monkeypatch):
    def fail(error):
        def main(words):
            raise error

        monkeypatch.setattr(train, "main", main)

    fail(OSError(errno.ENOSPC, "No space left on device", "runs/mine"))
    assert pols("train") == (1, "", "No space left on device: runs/mine.\n")
    fail(FileNotFoundError(errno.ENOENT, "No such file or directory", "forgotten"))
    with pytest.raises(FileNotFoundError):
        pols("train")


def test_no_memory_is_one_sentence(pols, monkeypatch):
    def fail(words):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 137438953472 bytes.\nmore")

    monkeypatch.setattr(train, "main", fail)
    code, _, err = pols("train")
    assert code == 1
    assert err.startswith("There is not enough memory (RESOURCE_EXHAUSTED: Out of memory")
    assert err.count("\n") == 1


def test_train_says_what_it_does_and_its_next_commands_work(pols, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # nothing is drawn yet
    # The network of `digits_experiment`: its programs are compiled already.
    small = "--characters 0030-0039 --width 0.1 --batch-size 32 --steps 2 --loss batch_cross_entropy"
    code, out, err = pols("train", *small.split())
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:3] == ["Starting JAX ...", "Loading glyphs ...", "Drawing 10 characters in 12 faces ..."]
    assert lines[3].startswith(
        "glyphs: 80 pictures to learn from, 10 to validate and 30 to test, of 10 classes (8 pictures each). Images of 32 x 32 "
        "x 1, --augment auto; mlp with 54,410 parameters, on 8 x cpu; 2 steps of 32, 0.667 epochs. Writing to runs/glyphs-"
    )
    assert lines[4].endswith("compiling ...")
    (run,) = (tmp_path / "runs").iterdir()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("  pols ")]
    assert [command[:3] for command in commands] == [
        ["pols", verb, f"runs/{run.name}"] for verb in ("search", "eval")
    ]
    code, out, _ = pols(*commands[0][1:], "--threshold", "-1e9")
    assert code == 0
    assert "30 hits in 30 pictures" in out
    # The directory of an experiment stands for its only run.
    (tmp_path / "experiment").mkdir()
    run.rename(tmp_path / "experiment" / "batch_cross_entropy")
    code, out, _ = pols(
        "search", "experiment", "--split", "test", "--query", "digit one", "--threshold", "-1e9"
    )
    assert code == 0
    assert "30 hits in 30 pictures" in out


@pytest.mark.filterwarnings("default::pols_jax.errors.DataWarning")
def test_what_is_decoded_is_said_before_it_is_and_warnings_are_sentences(pols, tmp_path):
    for name in ("train/cat/1", "train/cat/2", "train/dog/1", "train/dog/2", "test/cat/1", "test/dog/1"):
        path = tmp_path / "photos" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), "red" if "cat" in name else "blue").save(path)
    (tmp_path / "photos/train/cat/notes.txt").write_text("no picture")
    flags = f"--dataset folder:{tmp_path / 'photos'} --model mlp --image-size 8 --width 0.02 --steps 1 --batch-size 8"
    code, out, err = pols("train", *flags.split(), "--loss", "max_margin", "--run-dir", tmp_path / "run")
    assert code == 0
    assert "Pictures are shrunk to 8 x 8: nine of ten are at least 30 pixels high and wide" in out
    assert out.index("Loading folder:") < out.index("Decoding 6 pictures ...") < out.index("compiling ...")
    (warning,) = [line for line in err.splitlines() if "notes.txt" in line]
    assert warning.startswith("Warning: 1 file is left out as unusable: ")
    assert "With its normalizer (2 rows)" in out
