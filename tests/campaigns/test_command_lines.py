"""Hostile command lines: valid flags with values that nobody meant, in every combination that a seed gives."""

import contextlib
import faulthandler
import io
import random
import shutil
import signal
import sys
import warnings

import pytest
from PIL import Image

from pols_jax import cli
from pols_jax.cli import bench, evaluate, search, train
from pols_jax.cli.flags import _fields

SECONDS = 300  # a line that takes longer hangs
LINES = {"train": 200, "eval": 90, "search": 120, "bench": 90}

# Values of no type in particular.
TEXTS = (
    *(
        "",
        " ",
        "abc",
        "-",
        "-1",
        "0",
        "1",
        "1e3",
        "nan",
        "inf",
        "-inf",
        "1.5",
        "0x10",
        "None",
        "True",
        "--",
        "=",
        "%s",
    ),
    *(
        "2147483648",
        "99999999999999999999",
        "9" * 5000,
        "1e400",
        "日本",
        "１",
        "caf\udce9",
        "\x1b[2J",
        "a\nb",
        "x" * 3000,
    ),
    *(
        "[/x]",
        "[red]",
        "{0}",
        "~",
        "$HOME",
        "*",
        "folder:",
        "folder:nowhere",
        "folder:empty",
        "folder:file",
        "glyfs",
    ),
)
# Places that cannot be written, or are not what they should be; "made" below says what is there.
PATHS = (
    "",
    ".",
    "empty",
    "file",
    "file/below",
    "nowhere/below",
    "dangling",
    "caf\udce9",
    "a\nb.json",
    "[/x].png",
    "x" * 300,
)

# What every line of a verb has, so that one that is accepted is done in seconds.
SMALL = {
    "train": {
        "--characters": ["0030-0031"],
        "--width": ["0.05"],
        "--steps": ["1"],
        "--batch-size": ["16"],
        "--loss": ["batch_cross_entropy"],
        "--no-evaluate": [],
        "--run-dir": ["new"],
        "--quiet": [],
    },
    "eval": {"--quiet": [], "--batch-size": ["8"]},
    "search": {"--query": ["digit one"], "--threshold": ["0"]},
    "bench": {"--networks": ["mlp"], "--classes": ["3"], "--batch-size": ["1"], "--batches": ["1"]},
}
FLAGS = {"train": train.Flags, "eval": evaluate.Flags, "search": search.Flags, "bench": bench.LogitsSettings}
# Other hosts are waited for, which is a campaign of its own; a preset may take hours.
LEFT_OUT = {"coordinator", "num_processes", "process_id"}
PLACES = {
    "run_dir",
    "record",
    "json",
    "markdown",
    "csv",
    "per_class",
    "figures",
    "sheet",
    "profile",
    "data_dir",
}
EXTREMES = {
    "preset": ("glifs", "Glyphs", "mnist ", ""),
    "model": ("alexnet", "vgg16", "inception_v3", "resnet", "MLP"),
    "head": ("linear", "blockwise", "sharded", "dens"),
    "mesh": ("data=2", "data=0,class=1", "data=99,class=99", "class=4,data=2", "data=2,class=4"),
    "batch_size": ("17", "100000000", "2147483640", "8"),
    "hidden_sizes": ("1000000 1000000", "0", "4 4", "10000000000"),
    "characters": ("0039-0030", "zzzz", "110000-110005", "D800-DFFF", "0030"),
    "threshold": ("recall=2", "recall=", "precision=-1", "precision=nan", "f1=3", "nan", "inf", "-1e9"),
    "fonts": ("/dev/null", "nowhere.ttf", "file", "*.ttf"),
    "image_size": ("0", "5000", "9999999", "1"),
    "device": ("cpu:99", "gpu", "cpu:-1", "cpu:x", "abacus"),
    "seed": ("2147483647", "1099511627776"),
    "learning_rate": ("swep", "1e-300", "1e300", "0", "0.1 nan"),
    "query": ("digit", "DIGIT ONE", "0", "digit two"),
    "split": ("tset", "test"),
    "classes": ("0", "5000000000", "2147483647"),
    "num_devices": ("0", "9", "8"),
}


class _TooLongError(BaseException):
    pass


@contextlib.contextmanager
def time_limit(seconds):
    def stop(number, frame):
        raise _TooLongError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    # For a hang that no signal reaches.
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def hostile_line(verb, rng, run):
    """One command line: what every line has, changed by one to three flags with hostile values."""
    fields = {name: field for name, field in _fields(FLAGS[verb]).items() if name not in LEFT_OUT}
    given = {name: list(values) for name, values in SMALL[verb].items()}
    words = []
    for name in rng.sample(
        [n for n, field in fields.items() if not field.is_positional], rng.choice((1, 1, 1, 2, 3))
    ):
        flag = "--" + name.replace("_", "-")
        if fields[name].plain is bool:
            flag, values = rng.choice((flag, flag.replace("--", "--no-", 1))), rng.choice(([], [], ["yes"]))
        else:
            pool = PATHS if name in PLACES else EXTREMES.get(name, ()) * 3 + TEXTS
            values = rng.choice(pool).split(" ") if rng.random() < 0.9 else []
        given.pop(flag, None)
        words += [f"{flag}={values[0]}", *values[1:]] if values and rng.random() < 0.3 else [flag, *values]
        if rng.random() < 0.08:
            words += [flag, *values]  # given twice
    if rng.random() < 0.05:
        words += [rng.choice(("--stepps", "-x", "--no-such-flag=3", "---", "--help=yes")), "3"]
    words = [word for name, values in given.items() for word in (name, *values)] + words
    place = run if rng.random() < 0.7 else rng.choice(PATHS)
    if verb == "eval":
        words = [str(place), *words]
    elif verb == "search":
        paths = rng.choice(
            (["pictures"], ["pictures"], [], ["empty"], ["file"], ["/dev/null"], ["no\x1b*"], ["-"])
        )
        words = [str(place), *paths, *words]
    elif verb == "bench" and rng.random() < 0.3:
        words = rng.choice(
            (["losses", "--classes", "7"], ["metrics", "--examples", "0"], ["report", "file"], ["reprot"])
        )
    return [verb, *words]


def make(place):
    """What is in the directory that a line starts in."""
    (place / "empty").mkdir(parents=True)
    (place / "file").write_text("neither a picture nor a record")
    (place / "dangling").symlink_to(place / "gone")
    (place / "pictures").mkdir()
    Image.new("L", (32, 32)).save(place / "pictures" / "a.png")
    (place / "pictures" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")


def listing(place):
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def problem_of(line, place, capsys):
    """What is wrong with how a command line ended; None if nothing is."""
    make(place)
    before = listing(place)
    capsys.readouterr()
    try:
        with time_limit(SECONDS), warnings.catch_warnings(), contextlib.chdir(place):
            warnings.simplefilter("ignore")
            code = cli.main(line)
    except SystemExit as exit_:
        code = exit_.code
    except _TooLongError:
        return f"no end within {SECONDS} s"
    except Exception as error:
        return f"traceback: {type(error).__name__}: {str(error)[:200]}"
    err = capsys.readouterr().err
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if code == 2 and len(err.strip().splitlines()) != 1:
        return f"not one sentence: {err[:300]!r}"
    if code == 2 and listing(place) != before:
        return f"left behind: {sorted(set(listing(place)) - set(before))}"
    return None


@pytest.mark.campaign
def test_every_command_line_ends_in_a_result_or_in_one_sentence(tally, tmp_path, capsys, monkeypatch):
    """Command lines"""
    run = tmp_path / "run"
    small = [word for name, values in SMALL["train"].items() for word in (name, *values)]
    small = [word for word in small if word != "--no-evaluate"]
    small[small.index("--run-dir") + 1] = str(run)
    assert cli.main(["train", *small]) == 0
    # Benchmarks replace the handlers of signals, which the lines that follow should not inherit.
    set_handler = signal.signal
    monkeypatch.setattr(
        signal,
        "signal",
        lambda number, handler: set_handler(number, handler) if number == signal.SIGALRM else None,
    )
    monkeypatch.setattr("sys.stdin", io.StringIO())
    rng = random.Random(14)
    for verb, count in LINES.items():
        for index in range(count):
            line = hostile_line(verb, rng, run)
            place = tmp_path / f"{verb}{index}"
            problem = problem_of(line, place, capsys)
            shutil.rmtree(place)
            tally.tried(problem and f"pols {line!r}: {problem}")
