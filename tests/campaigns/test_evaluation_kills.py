"""An evaluation that is killed leaves the files of the one before, and two trainings do not share a directory."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pols_jax.data import load
from pols_jax.evaluation.measuring import evaluate
from pols_jax.evaluation.slc_records import read_class_arrays, read_slc
from pols_jax.metrics.thresholds import Rule
from pols_jax.search.class_bank import ClassBank
from pols_jax.search.pictures import split_pictures
from pols_jax.search.searching import make_queries, search
from pols_jax.training.config import RunConfig
from pols_jax.training.fitting import RunOptions, fit
from pols_jax.training.progress import MetricsLog
from pols_jax.training.runs import Run

ROOT = Path(__file__).parents[2]
CONFIG = RunConfig(characters="0030-0039", width=0.05, batch_size=32, steps=8, evaluate_every=4)

# Forks once per line of its input, before JAX has started, so that what is imported is imported once. The child evaluates
# the run, and kills itself: some seconds after it began, or at one of the calls that write its files, when half of the
# content has reached the disk.
PROGRAM = """
import os, signal, stat, sys, threading, warnings
warnings.simplefilter("ignore")
from pols_jax import files
from pols_jax.evaluation.measuring import evaluate

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def killing(call, calls, moment):
    def count(*arguments):
        calls.append(call)
        if len(calls) == moment:
            if call is fsync and stat.S_ISREG(os.fstat(arguments[0]).st_mode):
                os.truncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
            kill()
        return call(*arguments)
    return count

fsync, replace = os.fsync, os.replace
for line in sys.stdin:
    kind, moment = line.split()
    child = os.fork()
    if child == 0:
        if kind == "call":
            calls = []
            files.os.fsync, files.os.replace = (killing(call, calls, float(moment)) for call in (fsync, replace))
        else:
            threading.Timer(float(moment), kill).start()
        evaluate(sys.argv[1], quiet=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def environment():
    return os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def answers(run_dir, digits):
    bank = ClassBank.open(run_dir)
    queries = make_queries(bank, digits.class_names, Rule.parse("recall=0.9"))
    findings = search(bank, queries, split_pictures(digits.test, "test", digits.class_names))
    # Pictures are taken as they are decoded, and the last digits of a logit depend on its batch.
    hits = sorted((hit["picture"], hit["class"], hit["threshold"]) for hit in findings.to_json()["hits"])
    run = Run.open(run_dir)
    arrays = {name: array.tolist() for name, array in read_class_arrays(run).items()}
    return hits, read_slc(run).to_json(), arrays


@pytest.mark.campaign
def test_kills_during_evaluation(tmp_path, tally):
    """Kills during evaluation"""
    digits, run_dir = load("glyphs", **CONFIG.options()), tmp_path / "run"
    fit(CONFIG, digits, run_dir, options=RunOptions(quiet=True))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run_dir)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def evaluate_and_kill(kind, moment):
        process.stdin.write(f"{kind} {moment}\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    try:
        # Once to the end: what it finds, and how long that takes.
        assert evaluate_and_kill("call", 0) == 0
        began = time.monotonic()
        assert evaluate_and_kill("call", 0) == 0
        seconds = time.monotonic() - began
        expected, rng = answers(run_dir, digits), random.Random(0)
        for number in range(20):
            # Three files, each with a sync, a replacement, and a sync of the directory.
            kind, moment = ("call", 1 + number) if number < 9 else ("time", rng.uniform(0.0, 1.05 * seconds))
            code = evaluate_and_kill(kind, moment)
            try:
                assert code == -signal.SIGKILL or (kind == "time" and code == 0), code
                assert answers(run_dir, digits) == expected
                failure = None
            except Exception as error:
                failure = f"{kind} {moment}: {error!r:.500}"
            tally.tried(failure)
    finally:
        process.kill()
        process.communicate()
    assert evaluate(run_dir, dataset=digits, quiet=True).num_examples == len(digits.test)


def train(run_dir, *flags):
    small = "--characters 0030-0039 --width 0.05 --batch-size 32 --learning-rate 0.01 --no-evaluate --quiet"
    command = [sys.executable, str(ROOT / "train.py"), *small.split(), "--run-dir", str(run_dir), *flags]
    return subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=run_dir.parent,
    )


@pytest.mark.campaign
def test_pairs_of_trainings_in_one_directory(tmp_path, tally):
    """Pairs of trainings in one directory"""
    flags = {
        "one": ["--loss", "cross_entropy", "--steps", "1500", "--evaluate-every", "500"],
        "two": ["--loss", "cross_entropy", "max_margin", "--steps", "750", "--evaluate-every", "250"],
    }
    expected = {}
    for kind, arguments in flags.items():
        process = train(tmp_path / kind, *arguments)
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output
        expected[kind] = metrics_of(tmp_path / kind)
    rng = random.Random(0)
    for number in range(6):
        kind, run_dir = ("one", "two")[number % 2], tmp_path / f"pair-{number}"
        first = train(run_dir, *flags[kind])
        time.sleep(rng.choice([0.0, 0.0, rng.uniform(0, 2)]))
        second = train(run_dir, *flags[kind])
        said = [process.communicate(timeout=900)[0] for process in (first, second)]
        codes = sorted([first.returncode, second.returncode])
        sentence = re.search(r"Process (\d+) on .* trains in .*; wait until it has ended", "".join(said))
        try:
            assert codes == [0, 2], said
            assert sentence, said
            assert int(sentence[1]) in (first.pid, second.pid)
            assert metrics_of(run_dir) == expected[kind]
            failure = None
        except AssertionError as error:
            failure = f"pair {number}: {error}"
        tally.tried(failure)


def metrics_of(run_dir):
    """What every run below a directory measured: the same bits for runs that nobody disturbed."""
    return {
        str(path.relative_to(run_dir)): json.dumps(
            [(entry["step"], entry["validation"]) for entry in MetricsLog(path).records()]
        )
        for path in sorted(run_dir.rglob("metrics.jsonl"))
    }
