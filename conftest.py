"""Strict arithmetic, eight fake devices and reproducible examples for every test."""

import os
from pathlib import Path

# Before the first import of jax: the number of devices is fixed when the backend starts.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A device blocks a thread of XLA's pool in every collective in which it waits; with one thread per core, programs for
# eight devices hang now and then, and XLA aborts them (`pols_jax.training.hosts.joining.give_threads`).
os.environ.setdefault("NPROC", "64")
# Most of the time goes into compiling small programs. How well LLVM optimizes them changes no result that is tested.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
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


@pytest.fixture(autouse=True)
def a_readers_settings(request):
    """Run the programs of the documentation as a reader would, with JAX's own rules of promotion (optax needs them)."""
    if request.path.suffix != ".md":
        yield
    else:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
