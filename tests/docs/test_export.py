"""The program of docs/export.md uses an export without this package."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from random_runs import IMAGES, make_run, with_thresholds

from pols_jax.search.class_bank import ClassBank
from pols_jax.search.exporting import export

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# Importing a module that is None raises an ImportError.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(('pols_jax', 'flax', 'optax', 'orbax', 'PIL')))\n"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return with_thresholds(make_run(tmp_path_factory.mktemp("runs") / "run"))


def test_the_program_has_twenty_lines():
    assert len([line for line in PROGRAM.splitlines() if line]) <= 20


@pytest.mark.parametrize("rows_dtype", ["bfloat16", "int8"])
def test_the_program_answers_as_the_bank_does_without_this_package(rows_dtype, run_dir, tmp_path):
    export(run_dir, tmp_path / "exported", rows_dtype=rows_dtype, quiet=True)
    np.save(tmp_path / "images.npy", IMAGES)
    command = [sys.executable, "-P", "-W", "error", "-c", WITHOUT + PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    bank = ClassBank.open(tmp_path / "exported")
    expected = bank.decide(IMAGES, "DIGIT SEVEN", rule="recall=0.9")
    assert done.stdout == f"{expected}\n"
    assert expected.any()
    assert not expected.all()


def test_this_package_cannot_be_imported_there():
    command = [sys.executable, "-c", WITHOUT + "import pols_jax.search"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
