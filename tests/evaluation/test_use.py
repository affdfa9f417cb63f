"""Which checkpoint is used: the best on the validation split, the last one, or the one that was evaluated."""

import dataclasses
import json
import shutil

import pytest

from pols_jax.errors import RunError, RunWarning
from pols_jax.evaluation.measuring import evaluate
from pols_jax.evaluation.normalizing import normalize
from pols_jax.evaluation.slc_tables import slc_tables
from pols_jax.search.class_bank import ClassBank
from pols_jax.tables import to_markdown
from pols_jax.training.config import RunConfig
from pols_jax.training.fitting import RunOptions, fit
from pols_jax.training.runs import Run
from pols_jax.training.trainer import Trainer

# The settings of tests/training/test_fitting.py: its programs are compiled already.
CONFIG = RunConfig(
    characters="0030-0039", width=0.05, batch_size=32, steps=12, evaluate_every=4, learning_rate=0.01
)


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """A run whose third look of four was the best."""
    run_dir, accuracies = tmp_path_factory.mktemp("trained") / "run", iter((0.5, 0.75, 0.75, 0.25))
    validate, config = Trainer.validate, dataclasses.replace(CONFIG, evaluate_every=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "validate", lambda *a: validate(*a) | {"accuracy": next(accuracies)})
        outcome = fit(config, digits, run_dir, options=RunOptions(quiet=True, keep_checkpoints=1))
    assert outcome.validation["accuracy"] == 0.75
    assert outcome.step == 12
    return run_dir


@pytest.fixture
def run_dir(trained, tmp_path):
    """A copy, to evaluate it."""
    return shutil.copytree(trained, tmp_path / "run")


def test_the_best_checkpoint_is_measured_by_default_and_the_table_says_its_step(run_dir, digits):
    best = evaluate(run_dir, dataset=digits, quiet=True)
    assert (best.step, best.steps) == (9, 12)  # the later one of two that are as good
    assert "9 (best)" in to_markdown(slc_tables([best]))
    last = evaluate(run_dir, dataset=digits, use="last", quiet=True)
    assert (last.step, last.steps) == (12, 12)
    assert "(last)" not in to_markdown(slc_tables([last]))  # where all are, there is nothing to say
    assert best.checkpoint != last.checkpoint
    assert best.slc != last.slc


def test_search_uses_the_checkpoint_that_was_evaluated(run_dir, digits):
    assert ClassBank.open(run_dir).run.step == 9  # not evaluated yet
    evaluate(run_dir, dataset=digits, use="last", quiet=True)
    bank = ClassBank.open(run_dir)
    assert bank.run.step == 12
    assert bank.threshold(3).value is not None
    other = ClassBank.open(run_dir, use="best")
    assert other.run.step == 9
    with pytest.raises(
        RunError, match=r"not at step 9; make .* with pols eval \S*run --use best, or leave --use out"
    ):
        other.threshold(3)
    normalize(run_dir, rows="affine", dataset=digits, quiet=True)  # fitted to the best
    with pytest.warns(RunWarning, match="belongs to another checkpoint"):
        assert ClassBank.open(run_dir).normalizer is None
    evaluate(run_dir, dataset=digits, quiet=True)
    assert ClassBank.open(run_dir).run.step == 9
    assert ClassBank.open(run_dir).normalizer is not None


def test_a_run_that_was_evaluated_at_its_last_step_still_opens_there(run_dir, digits):
    evaluate(run_dir, dataset=digits, use="last", quiet=True)
    record = json.loads((run_dir / "slc.json").read_text())
    del record["steps"]  # as older versions wrote it
    (run_dir / "slc.json").write_text(json.dumps(record))
    assert Run.open(run_dir).step == 12
    record["checkpoint"] = "7-gone"
    (run_dir / "slc.json").write_text(json.dumps(record))
    assert Run.open(run_dir).step == 9
    (run_dir / "slc.json").write_text("{")
    assert Run.open(run_dir).step == 9
