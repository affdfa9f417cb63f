"""Compiled programs are kept for the next start, and whatever is wrong with the cache costs no more than time."""

import os
import subprocess
import sys

import jax
import pytest

from pols_jax.cli import compiling, search
from pols_jax.errors import PolsError

# Slow to compile, fast to run; and how often it was compiled instead of read. Its input is NumPy's, so that it is the
# only program: one that takes about as long as is worth keeping is sometimes kept in the first start, sometimes later.
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from pols_jax.cli.compiling import keep_compiled_programs
misses = []
jax.monitoring.register_event_listener(lambda name, **_: misses.append(name) if name.endswith("cache_misses") else None)
keep_compiled_programs()
def sorted_often(x):
    for i in range(20):
        x = jnp.sort(jnp.sin(x + i))
    return x.sum()
print(float(jax.jit(sorted_often)(np.arange(9, dtype=np.float32))), len(misses))
"""


def start(cache_home):
    """Runs the program in a new process; returns the sum, and how many programs were compiled."""
    unset = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"XDG_CACHE_HOME": str(cache_home)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    value, misses = done.stdout.split()
    return float(value), int(misses)


def test_the_second_start_compiles_nothing_and_a_damaged_cache_is_no_error(tmp_path):
    first, misses = start(tmp_path)
    assert misses == 1
    assert start(tmp_path) == (first, 0)
    (entry,) = (tmp_path / "pols_jax" / "compiled").glob("jit_sorted_often*")
    entry.write_bytes(entry.read_bytes()[:100])
    assert start(tmp_path)[0] == first
    entry.write_bytes(b"")
    start(tmp_path)
    assert entry.stat().st_size > 100


def test_a_cache_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "pols_jax").write_text("not a directory")
    start(tmp_path)


def test_a_cache_of_the_users_own_is_left_as_it_is():
    before = jax.config.values["jax_compilation_cache_dir"]
    assert before
    compiling.keep_compiled_programs()
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_the_flag_turns_it_off(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(search, "keep_compiled_programs", lambda: calls.append(1))
    for flags in ([], ["--no-compilation-cache"]):
        with pytest.raises(PolsError):
            search.main([str(tmp_path), "picture.png", "--query", "seven", *flags])
        assert calls == [1]
