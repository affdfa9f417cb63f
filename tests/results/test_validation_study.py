"""The tool that compares what no flag changes: its loss is the authors', and a study that was stopped goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import results_tables
import validation_study
from validation_study import Trial, batch_cross_entropy_with_epsilon, run_trial, study

from pols_jax.benchmarking.loss_speed import authors_batch_cross_entropy
from pols_jax.data import load
from pols_jax.errors import DataError
from pols_jax.losses import batch_cross_entropy
from pols_jax.training.config import RunConfig

ROOT = Path(__file__).parents[2]
LOGITS = 4 * jax.random.normal(jax.random.key(0), (8, 5))
LABELS = jnp.array([0, 1, 2, 3, 4, 0, 1, 2])


def test_the_loss_with_epsilon_is_the_authors():
    ours = jax.value_and_grad(batch_cross_entropy_with_epsilon)(LOGITS, LABELS)
    theirs = jax.value_and_grad(authors_batch_cross_entropy)(LOGITS, LABELS)
    assert jnp.allclose(ours[0], theirs[0], rtol=1e-5)
    assert jnp.allclose(ours[1], theirs[1], atol=1e-6)


def test_rows_that_do_not_count_change_neither_its_value_nor_its_gradient():
    where = jnp.arange(8) < 6
    value, gradient = jax.value_and_grad(batch_cross_entropy_with_epsilon)(LOGITS, LABELS, where=where)
    assert jnp.allclose(value, authors_batch_cross_entropy(LOGITS[:6], LABELS[:6]), rtol=1e-5)
    assert jnp.all(gradient[6:] == 0)
    # Without an epsilon it is the batch cross-entropy of the package.
    exact = batch_cross_entropy_with_epsilon(LOGITS, LABELS, where=where, epsilon=0.0)
    assert jnp.allclose(exact, batch_cross_entropy(LOGITS, LABELS, where=where), rtol=1e-5)


def tiny_trials(steps, error):
    for rate in (0.002, 0.004):
        config = RunConfig(characters="0030-0039", width=0.1, batch_size=32, steps=steps, learning_rate=rate)
        yield Trial({"learning_rate": rate}, config)


def test_a_study_that_was_stopped_goes_on_from_its_record(tmp_path, monkeypatch):
    trained = []

    def counted(trial, dataset, **options):
        trained.append(trial.settings)
        return run_trial(trial, dataset, **options)

    monkeypatch.setitem(validation_study.STUDIES, "augmentation", (tiny_trials, 10))
    monkeypatch.setattr(validation_study, "run_trial", counted)
    path = tmp_path / "study_tiny.json"
    study("augmentation", path)
    whole = json.loads(path.read_text())
    assert [trial["settings"]["learning_rate"] for trial in whole["trials"]] == [0.002, 0.004]
    assert all(0 < trial["validation"]["auprc"] <= 1 for trial in whole["trials"])
    path.write_text(json.dumps(whole | {"trials": whole["trials"][:1]}))
    study("augmentation", path)
    assert trained == [{"learning_rate": rate} for rate in (0.002, 0.004, 0.004)]
    assert json.loads(path.read_text())["trials"] == whole["trials"]
    assert results_tables.trials_table(whole).count("\n| 0.00") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", validation_study.STUDIES)
def test_the_command_of_a_study_with_fewer_steps_writes_a_record_of_the_same_form(name, tmp_path):
    kept = json.loads((ROOT / "results" / f"study_{name}.json").read_text())
    try:
        load(kept["trials"][0]["config"]["dataset"])
    except DataError as error:
        pytest.skip(f"the data of this study is not here: {error}")
    tool, path = ROOT / "results/tools/validation_study.py", tmp_path / "record.json"
    command = [sys.executable, tool, name, path, "--steps", "10", "--full-examples", "512"]
    subprocess.run(command, check=True, env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"})
    made = json.loads(path.read_text())
    assert set(made) == set(kept)
    assert len(made["trials"]) == len(kept["trials"])
    assert {tuple(trial["settings"]) for trial in made["trials"]} == {tuple(kept["trials"][0]["settings"])}
