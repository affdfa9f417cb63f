"""Strict arithmetic, eight fake devices and reproducible examples for every test."""

import os

# Before the first import of jax: the number of devices is fixed when the backend starts.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time goes into compiling small programs. How well LLVM optimises them changes no result that is tested.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("pols_jax", derandomize=True, deadline=None)
hypothesis.settings.load_profile("pols_jax")


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
