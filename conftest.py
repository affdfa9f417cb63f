"""Strict arithmetic, eight fake devices and reproducible examples for every test."""

import contextlib
import fcntl
import gc
import importlib.metadata
import os
import shutil
import signal
from pathlib import Path

# Before the first import of jax: the number of devices is fixed when the backend starts.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A device blocks a thread of XLA's pool in every collective in which it waits; with one thread per core, programs for
# eight devices hang now and then, and XLA aborts them (`pols_jax.training.hosts.joining.give_threads`).
os.environ.setdefault("NPROC", "64")
# Most of the time goes into compiling small programs. How well XLA optimizes them changes no result that is tested. Its newer
# way to write loops takes twice as long to compile; a flag that another version of XLA does not know would end the process.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10."),
)

# ... and every program is compiled once, whichever worker needs it first; the next run finds it compiled.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# What is drawn or decoded once is kept beside the compiled programs, and not among the user's own files.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent / ".pytest_cache" / "user")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Started with nohup, processes ignore SIGHUP, and tests of that signal would wait forever.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

hypothesis.settings.register_profile("pols_jax", derandomize=True, deadline=None)
hypothesis.settings.load_profile("pols_jax")


class Tally:
    """What a campaign tried, and what went wrong: ``tally.tried(failure)`` once per try, with None if nothing did."""

    def __init__(self):
        self.tries, self.failures = 0, []

    def tried(self, failure: str | None = None) -> None:
        """Counts one try."""
        self.tries += 1
        if failure:
            self.failures.append(failure)


@pytest.fixture
def tally(request, record_property):
    """Counts the tries of a campaign (`pytest -m campaign`); the test fails if one failed, after all were made."""
    counts = Tally()
    yield counts
    title = (request.function.__doc__ or request.node.name).strip().splitlines()[0]
    record_property("campaign", (title, counts.tries, len(counts.failures)))
    assert counts.tries, "a campaign that tried nothing shows nothing"
    assert not counts.failures, "\n".join(counts.failures[:20])


def pytest_terminal_summary(terminalreporter):
    """Prints the table of campaigns."""
    reports = [
        report for key in ("", "passed", "failed", "error") for report in terminalreporter.stats.get(key, [])
    ]
    rows = {
        tuple(value)
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "campaign" and report.when == "teardown"
    }
    if rows:
        terminalreporter.section("campaigns")
        terminalreporter.line("| campaign | tries | failures |\n| --- | --- | --- |")
        for title, tries, failures in sorted(rows):
            terminalreporter.line(f"| {title} | {tries} | {failures} |")


@pytest.fixture
def x64():
    """Run one test in double precision, for comparisons at 1e-12."""
    with jax.enable_x64(True):
        yield


def pytest_collection_finish():
    """Keeps the garbage collector away from all that was imported; it would look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@contextlib.contextmanager
def made_once(directory):
    """Gives the one worker that comes first the directory to make, and the others None when it is made."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unfinished = directory.with_name(f"{directory.name}.unfinished")
        yield None if directory.exists() else unfinished
        if unfinished.exists():
            unfinished.rename(directory)


@pytest.fixture(scope="session")
def digits():
    """Ten classes: 80 pictures to learn from, 10 to validate, 30 to test."""
    from pols_jax.data import load

    return load("glyphs", characters="0030-0039")


@pytest.fixture(scope="session")
def digits_experiment(digits, tmp_path_factory):
    """Two runs that were evaluated, cross_entropy and batch_cross_entropy, for all workers: copy what you change."""
    from pols_jax.evaluation.measuring import evaluate
    from pols_jax.training.config import Experiment
    from pols_jax.training.experiments import run_experiment
    from pols_jax.training.fitting import RunOptions

    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared" / "digits"
    with made_once(directory) as made:
        if made:
            settings = Experiment(
                characters="0030-0039", width=0.1, batch_size=32, steps=100, evaluate_every=100
            )
            run_experiment(settings, digits, made, options=RunOptions(quiet=True))
            for run in ("cross_entropy", "batch_cross_entropy"):
                evaluate(made / run, dataset=digits, histograms=True, quiet=True)
    return directory


@pytest.fixture
def folder_of_a_reader(digits_experiment, tmp_path, monkeypatch):
    """An empty folder with a run in runs/digits, where examples of the documentation run."""
    shutil.copytree(digits_experiment / "batch_cross_entropy", tmp_path / "runs" / "digits")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def a_run_for_examples(request):
    """Gives an example that opens runs/digits that run."""
    examples = getattr(getattr(request.node, "dtest", None), "examples", ())
    if any("runs/digits" in example.source for example in examples):
        request.getfixturevalue("folder_of_a_reader")


@pytest.fixture(autouse=True)
def a_readers_settings(request):
    """Run the programs of the documentation as a reader would, with JAX's own rules of promotion (optax needs them)."""
    if request.path.suffix != ".md":
        yield
    else:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
