"""Run directories whose files are damaged, swapped or made up: the same numbers as before, or one sentence."""

import contextlib
import copy
import dataclasses
import io
import json
import os
import random
import shutil
import signal
import warnings

import numpy as np
import pytest

from pols_jax.data import load
from pols_jax.errors import PolsError, RunWarning
from pols_jax.evaluation.measuring import evaluate
from pols_jax.evaluation.slc_records import read_class_arrays, read_slc
from pols_jax.metrics.thresholds import Rule
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.pictures import split_pictures
from pols_jax.search.searching import make_queries, search
from pols_jax.training.config import Experiment, RunConfig
from pols_jax.training.experiments import read_sweep, run_experiment, run_folders, saved_experiment
from pols_jax.training.fitting import RunOptions, check_run_dir, fit
from pols_jax.training.runs import Run, find_runs

CONFIG = RunConfig(characters="0030-0039", width=0.05, batch_size=32, steps=8, evaluate_every=4)
QUIET = RunOptions(quiet=True)
# How often each file is mutated: 150 directories.
TRIES = {
    "config.json": 40,
    "class_names.json": 20,
    "metrics.jsonl": 15,
    "slc.json": 15,
    "slc.npz": 20,
    "thresholds.npz": 20,
    "sweep.json": 10,
    "experiment.json": 10,
}


@pytest.fixture(scope="module")
def digits():
    return load("glyphs", **CONFIG.options())


@pytest.fixture(scope="module")
def home(digits, tmp_path_factory):
    """A run, another one of the same network, and a sweep with its chosen run; the runs are evaluated."""
    root = tmp_path_factory.mktemp("home")
    for name, config in (("run", CONFIG), ("other", dataclasses.replace(CONFIG, seed=1))):
        fit(config, digits, root / name, options=QUIET)
        evaluate(root / name, dataset=digits, histograms=True, quiet=True)
    names = json.loads((root / "other" / "class_names.json").read_text())
    (root / "other" / "class_names.json").write_text(json.dumps(names[::-1]))  # another run, other classes
    sweep = dataclasses.replace(Experiment.of_run(CONFIG), learning_rate=(0.01, 0.1), steps=4)
    run_experiment(sweep, digits, root / "sweep", options=QUIET)
    shutil.copytree(root / "sweep", root / "other_sweep")
    (root / "other_sweep" / "sweep.json").write_text(json.dumps({"cross_entropy": {"chosen": "../run"}}))
    return root


def numbers_of_run(run_dir, digits):
    """Everything that is read from a run directory, as it is used."""
    found = {}
    (only,) = find_runs([run_dir])
    run = Run.open(only)
    bank = ClassBank.open(only)
    queries = make_queries(bank, [digits.class_names[7], digits.class_names[0]], Rule.parse("recall=0.9"))
    findings = search(bank, queries, split_pictures(digits.test, "test", digits.class_names))
    # Pictures are taken as they are decoded, and the last digits of a logit depend on its batch.
    hits = [(hit["picture"], hit["class"], hit["threshold"]) for hit in findings.to_json()["hits"]]
    found["search"] = findings.num_pictures, sorted(hits)
    found["slc.json"] = read_slc(run).to_json() | {"run": ""}
    found["slc.npz"] = {name: array.tolist() for name, array in read_class_arrays(run).items()}
    found["evaluation"] = evaluate(only, dataset=digits, quiet=True).to_json() | {"run": ""}
    return found


def numbers_of_sweep(run_dir, digits):
    """Everything that is read from the directory of a sweep, as it is evaluated or continued."""
    experiment = saved_experiment(run_dir)
    for folder, config in run_folders(experiment, run_dir).items():
        check_run_dir(folder, config, digits)
    (chosen,) = find_runs([run_dir])
    report = next(run for run in read_sweep(run_dir)["cross_entropy"]["runs"] if run["run"] == chosen.name)
    return {"chosen": chosen.name, "accuracy": report["validation"]["accuracy"], "runs": experiment.runs()}


# Mutations of JSON: each gets the content and returns the bytes of a file.

OTHER_VALUES = (None, True, -1, 0, 2.5, 10**18, "", "x", "../..", [], [[]], {}, {"a": 1}, ["x"] * 3)


def paths_of(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in items:
        yield from paths_of(entry, (*path, key))


def changed(rng, content, change):
    """The content with a change at a random place."""
    content = copy.deepcopy(content)
    *path, last = rng.choice([path for path in paths_of(content) if path] or [(0,)])
    holder = content
    for key in path:
        holder = holder[key]
    with contextlib.suppress(IndexError):  # an empty list
        change(holder, last)
    return content


def another_type(rng, content):
    def change(holder, key):
        others = [value for value in OTHER_VALUES if type(value) is not type(holder[key])]
        holder[key] = rng.choice(others)

    return json.dumps(changed(rng, content, change)).encode()


def deletion(rng, content):
    return json.dumps(changed(rng, content, lambda holder, key: holder.pop(key))).encode()


def extra(rng, content):
    def change(holder, key):
        if isinstance(holder, dict):
            holder["from_the_future"] = 1
        else:
            holder.insert(0, holder[key])

    return json.dumps(changed(rng, content, change)).encode()


def a_number(rng, content):
    number = rng.choice(["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "-1", "1e-400"])
    text = json.dumps(changed(rng, content, lambda holder, key: holder.__setitem__(key, "HERE")))
    return text.replace('"HERE"', number).encode()


def depth(rng, content):
    deep = rng.choice(["[" * 100_000, "[" * 50_000 + "]" * 50_000, '{"a":' * 50_000 + "1" + "}" * 50_000])
    return (
        json.dumps(changed(rng, content, lambda h, key: h.__setitem__(key, "HERE")))
        .replace('"HERE"', deep)
        .encode()
    )


def encoding(rng, content):
    text = json.dumps(content, ensure_ascii=False)
    wrong = (
        text.encode("utf-16"),
        text.encode("utf-8-sig"),
        b"\xff" + text.encode(),
        text.encode() + b"\xc3\x28",
    )
    return rng.choice([*wrong, text.replace("e", "\\ud800", 1).encode(), text.replace("a", "\0", 1).encode()])


def a_long_list(rng, content):
    def change(holder, key):
        holder[key] = [holder[key]] * rng.choice([1, 9, 11, 100])

    return json.dumps(changed(rng, content, change)).encode()


OF_JSON = (another_type, another_type, deletion, deletion, extra, a_number, depth, encoding, a_long_list)


# Mutations of npz files.


def saved(arrays, save=np.savez):
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def wrong_dtype(rng, arrays):
    name = rng.choice(sorted(arrays))
    kind = rng.choice(("U5", "S5", "complex64", "float64", "bool", "datetime64[s]", "V8", "object"))
    try:
        array = arrays[name].astype(kind)
    except (TypeError, ValueError):
        array = np.zeros(arrays[name].shape, kind)
    return saved(arrays | {name: array})


def wrong_shape(rng, arrays):
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    forms = [
        array[None],
        np.concatenate([array.reshape(-1)] * 2),
        array.reshape(-1)[:0],
        array.reshape(-1)[1:],
    ]
    return saved(arrays | {name: rng.choice(forms)})


def missing_array(rng, arrays):
    name = rng.choice(sorted(arrays))
    return saved({n: array for n, array in arrays.items() if n != name})


def unknown_array(rng, arrays):
    return saved(arrays | {"from_the_future": np.zeros(3)})


def far_labels(rng, arrays):
    name = "labels" if "labels" in arrays else "class_id"
    return saved(arrays | {name: arrays[name] + rng.choice([10, -10, 2**40])})


def no_archive(rng, arrays):
    file = io.BytesIO()
    np.save(file, arrays[sorted(arrays)[0]])
    return rng.choice([file.getvalue(), b"", b"PK\x05\x06" + bytes(18), b"not a zip"])


def bit_flip(rng, arrays):
    whole = bytearray(saved(arrays, np.savez_compressed))
    whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    return bytes(whole)


OF_ARRAYS = (wrong_dtype, wrong_shape, missing_array, unknown_array, far_labels, no_archive, bit_flip)


# Mutations of any file.


def cut_off(rng, path, other):
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def gone(rng, path, other):
    path.unlink()


def swapped(rng, path, other):
    shutil.copy(other / path.name, path)


def another_file(rng, path, other):
    files = [file for file in sorted(path.parent.iterdir()) if file.is_file() and file != path]
    shutil.copy(rng.choice(files), path)


def no_regular_file(rng, path, other):
    path.unlink()
    kind = rng.choice(["directory", "pipe", "loop", "dangling", "/dev/zero", "/dev/null", "/proc/self/mem"])
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"loop": path, "dangling": "nowhere"}.get(kind, kind))


def garbage(rng, path, other):
    path.write_bytes(rng.randbytes(rng.randrange(1, 300)))


OF_FILES = (cut_off, gone, swapped, swapped, another_file, no_regular_file, garbage)


def mutate(rng, path, other):
    """Changes one file of a run directory; returns what was done."""
    how = rng.choice([*OF_FILES, *(OF_ARRAYS if path.suffix == ".npz" else OF_JSON)])
    if how in OF_FILES:
        how(rng, path, other)
    elif path.suffix == ".npz":
        with np.load(path) as arrays:
            path.write_bytes(how(rng, dict(arrays)))
    elif path.suffix == ".jsonl":
        lines = path.read_bytes().splitlines()
        place = rng.randrange(len(lines))
        lines[place] = how(rng, json.loads(lines[place]))
        path.write_bytes(b"\n".join(lines) + b"\n")
    else:
        path.write_bytes(how(rng, json.loads(path.read_text())))
    return f"{path.name}, {how.__name__}"


@contextlib.contextmanager
def at_most(seconds):
    def stop(*_):
        raise TimeoutError(f"took more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.campaign
def test_hostile_run_directories(home, digits, tmp_path, tally):
    """Hostile run directories"""
    expected = {
        "run": numbers_of_run(shutil.copytree(home / "run", tmp_path / "run"), digits),
        "sweep": numbers_of_sweep(home / "sweep", digits),
    }
    refused = 0
    for file, count in TRIES.items():
        kind = "sweep" if file in ("sweep.json", "experiment.json") else "run"
        read = numbers_of_sweep if kind == "sweep" else numbers_of_run
        for seed in range(count):
            rng = random.Random(f"{file} {seed}")
            run_dir = shutil.copytree(home / kind, tmp_path / "hostile" / kind)
            what = mutate(rng, run_dir / file, home / ("other_sweep" if kind == "sweep" else "other"))
            try:
                with at_most(120), warnings.catch_warnings():
                    warnings.simplefilter("ignore", RunWarning)
                    found = read(run_dir, digits)
                failure = None if found == expected[kind] else f"{what}, seed {seed}: other numbers"
            except PolsError as error:
                refused += 1
                is_sentence = "\n" not in str(error) and len(str(error)) < 1000
                failure = None if is_sentence else f"{what}, seed {seed}: {error!r:.2000} is no sentence"
            except BaseException as error:
                failure = f"{what}, seed {seed}: {error!r:.300}"
            tally.tried(failure)
            shutil.rmtree(tmp_path / "hostile")
    assert refused > 75, "most of these mutations are no longer what they were"
