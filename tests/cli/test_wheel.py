"""The wheel, installed in a fresh environment and used outside of the repository."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel as the build backend makes it."""
    pytest.importorskip("hatchling", reason="the wheel is built with hatchling, which is in the extra `test`")
    folder = tmp_path_factory.mktemp("wheel")
    program = f"from hatchling.build import build_wheel; build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def pols(wheel, tmp_path_factory):
    """Runs `pols` of an environment that has the wheel, and the packages that it needs from this one."""
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home / "environment", symlinks=True)
    python = home / "environment" / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    (packages,) = (home / "environment" / "lib").glob("*/site-packages")
    # A path in a .pth file lends packages, but not what is installed there for editing, such as this repository.
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words):
        program = home / "environment" / "bin" / "pols"
        return subprocess.run(
            [str(program), *map(str, words)],
            cwd=home,
            env=environment | {"JAX_NUM_CPU_DEVICES": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )

    return run


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"pols_jax", "pols_jax-0.1.0.dist-info"}
    assert "pols_jax/py.typed" in names
    page = {name.rpartition("/")[2] for name in names if name.startswith("pols_jax/search/serving/page/")}
    assert page == {"index.html", "page.css", "icon.svg", "page.js", "server.js", "words.js"}
    assert not [name for name in names if {"tests", "results", "tools"} & set(name.split("/"))]


def test_the_wheel_brings_the_command(pols):
    done = pols("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, "pols 0.1.0\n", "")
    done = pols("search", "runs/mine", "photos")
    assert (done.returncode, done.stderr) == (2, "Say what to look for: --query NAME.\n")


@pytest.mark.slow
def test_the_wheel_trains_and_searches_outside_of_the_repository(pols):
    small = "--characters 0030-0031 --width 0.05 --batch-size 16 --steps 2 --loss batch_cross_entropy --run-dir runs/mine"
    done = pols("train", *small.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert "pols search runs/mine --split test --query='DIGIT ZERO'" in done.stdout
    done = pols("search", "runs/mine", "--split", "test", "--query", "digit one", "--threshold", "-1e9")
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 hits in 6 pictures" in done.stdout
