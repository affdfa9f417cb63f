"""A run is never lost and never mixed up, with a stand-in for the trainer: no network is compiled, and only the state counts."""

import dataclasses
import json
import shutil
import signal
from types import SimpleNamespace

import chex
import numpy as np
import pytest

from pols_jax.errors import CheckpointError, ConfigError, InterruptedRunError
from pols_jax.training import experiments, fitting
from pols_jax.training.checkpoint_reading import HeadRows
from pols_jax.training.checkpoints import Checkpoints, newest_step
from pols_jax.training.config import Experiment, RunConfig
from pols_jax.training.experiments import read_sweep, run_experiment, saved_experiment
from pols_jax.training.fitting import RunOptions, fit
from pols_jax.training.progress import MetricsLog
from pols_jax.training.runs import Run, find_runs

CONFIG = RunConfig(
    characters="0030-0039", width=0.05, batch_size=32, steps=12, evaluate_every=4, learning_rate=0.01
)
OPTIONS = RunOptions(quiet=True)


class QuickTrainer:
    """What `fit` needs of a trainer; the state of a step is a function of the step before."""

    def __init__(self, config, dataset, *, num_workers=0):
        self.config, self.dataset, self.learner = config, dataset, SimpleNamespace(init=self.init)

    def template(self):
        return self.init()

    def init(self, start=None):
        head = {"kernel": np.ones((10, 4), np.float32), "bias": np.zeros(10, np.float32)}
        return {"params": {"head": head}, "step": np.int32(0)}

    def place(self, state):
        return state

    def stored(self, state):
        return state

    def step_of(self, state):
        return int(state["step"])

    def advance(self, state, until):
        steps = until - int(state["step"])
        kernel = state["params"]["head"]["kernel"] * np.float32(1.5) ** steps
        head = {"kernel": kernel, "bias": state["params"]["head"]["bias"] + np.float32(steps)}
        loss = 1.0 if self.config.learning_rate < 1e20 else float("inf")
        totals = SimpleNamespace(last_loss=loss, loss=loss, correct=1, examples=32 * steps, steps=steps)
        return {"params": {"head": head}, "step": np.int32(until)}, totals

    def caught_up(self, state):
        return state

    def validate(self, state):
        accuracy = self.config.learning_rate * self.step_of(state) / 100
        return {"loss": 1.0, "accuracy": accuracy, "auprc": 0.5, "violation_rate": 0.5}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(fitting, "Trainer", QuickTrainer)


@pytest.fixture
def quick_run(digits, quick, tmp_path):
    fit(CONFIG, digits, tmp_path / "quick", options=OPTIONS)
    return tmp_path / "quick"


def quick_state(run_dir):
    with Checkpoints(run_dir) as checkpoints:
        return checkpoints.restore_newest(QuickTrainer(None, None).init(None)).state


def damage_head(run_dir, step):
    kernel = run_dir / "checkpoints" / str(step) / "state" / "params.head.kernel"
    next(path for path in kernel.iterdir() if path.name != ".zarray").write_bytes(b"damaged")


def two_losses():
    return dataclasses.replace(Experiment.of_run(CONFIG), loss=("cross_entropy", "max_margin"), steps=4)


@pytest.mark.parametrize("moment", ["last dispatch", "last save", "between"])
def test_a_signal_at_the_end_of_a_run_starts_no_further_run(digits, quick, tmp_path, monkeypatch, moment):
    if moment == "last dispatch":
        advance = QuickTrainer.advance

        def advance_and_signal(trainer, state, until):
            if until == 4:
                signal.raise_signal(signal.SIGTERM)
            return advance(trainer, state, until)

        monkeypatch.setattr(QuickTrainer, "advance", advance_and_signal)
    elif moment == "last save":
        save = Checkpoints.save
        monkeypatch.setattr(
            Checkpoints, "save", lambda *args, **kw: (save(*args, **kw), signal.raise_signal(signal.SIGTERM))
        )
    else:
        fit_one = experiments.fit
        monkeypatch.setattr(
            experiments,
            "fit",
            lambda *args, **kw: (fit_one(*args, **kw), signal.raise_signal(signal.SIGTERM))[0],
        )
    sentence = "Stopped before .*max_margin" if moment == "between" else "Stopped at step 4; saved in "
    with pytest.raises(InterruptedRunError, match=sentence) as raised:
        run_experiment(two_losses(), digits, tmp_path, options=OPTIONS)
    assert raised.value.exit_code == 143
    assert newest_step(tmp_path / "cross_entropy") == 4
    assert not (tmp_path / "max_margin").exists()


def test_signal_handlers_are_put_back(digits, quick, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    fit(CONFIG, digits, tmp_path / "run", options=OPTIONS)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_damaged_newest_checkpoint_is_reported_and_training_goes_on_from_the_one_before(
    quick_run, digits, tmp_path, monkeypatch, capsys
):
    run_dir, advance = tmp_path / "run", QuickTrainer.advance

    def advance_and_signal(trainer, state, until):
        if until == 8:
            signal.raise_signal(signal.SIGTERM)
        return advance(trainer, state, until)

    monkeypatch.setattr(QuickTrainer, "advance", advance_and_signal)
    with pytest.raises(InterruptedRunError):
        fit(CONFIG, digits, run_dir, options=OPTIONS)
    damage_head(run_dir, 8)
    monkeypatch.setattr(QuickTrainer, "advance", advance)
    fit(CONFIG, digits, run_dir, options=OPTIONS)
    said = capsys.readouterr().out.replace("\n", " ")
    assert "Checkpoint 8" in said
    assert "Going on from checkpoint 4" in said
    chex.assert_trees_all_equal(quick_state(run_dir), quick_state(quick_run))


def test_damage_of_the_last_checkpoint_is_mended_by_starting_again(quick_run, digits, tmp_path, capsys):
    run_dir = shutil.copytree(quick_run, tmp_path / "run")
    damage_head(run_dir, 12)
    assert fit(CONFIG, digits, run_dir, options=OPTIONS).step == 12
    said = capsys.readouterr().out.replace("\n", " ")
    assert "Going on from checkpoint 8" in said
    assert str(run_dir / "damaged-checkpoints" / "12") in said
    chex.assert_trees_all_equal(quick_state(run_dir), quick_state(quick_run))
    assert (run_dir / "damaged-checkpoints" / "12").is_dir()


@pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", "state/_METADATA"])
def test_a_run_whose_files_of_orbax_are_damaged_goes_on(quick_run, digits, tmp_path, file):
    run_dir = shutil.copytree(quick_run, tmp_path / "run")
    for step in (4, 8):
        if (path := run_dir / "checkpoints" / str(step) / file).exists():
            path.write_bytes(b"{damaged")
    damage_head(run_dir, 12)
    assert fit(CONFIG, digits, run_dir, options=OPTIONS).step == 12
    chex.assert_trees_all_equal(quick_state(run_dir), quick_state(quick_run))


def test_checkpoints_of_another_run_are_not_continued_when_the_config_is_gone(quick_run, digits, tmp_path):
    run_dir = shutil.copytree(quick_run, tmp_path / "run")
    (run_dir / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"checkpoint \d+ of another config: --seed 3 instead of 0\. Name another"
    ):
        fit(dataclasses.replace(CONFIG, seed=3), digits, run_dir, options=OPTIONS)
    other = dataclasses.replace(digits, provenance={**digits.provenance, "content_sha256": "other"})
    with pytest.raises(ConfigError, match="was trained on other data"):
        fit(CONFIG, other, run_dir, options=OPTIONS)
    assert not (run_dir / "config.json").exists()
    assert fit(CONFIG, digits, run_dir, options=OPTIONS).status == "finished"


def test_a_config_of_another_run_beside_the_checkpoints_is_an_error(quick_run, tmp_path):
    run_dir = shutil.copytree(quick_run, tmp_path / "run")
    content = json.loads((run_dir / "config.json").read_text())
    content["config"]["seed"] = 3
    (run_dir / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="checkpoint 12 of another config: --seed 3 instead of 0"):
        Run.open(run_dir)


def test_a_run_is_found_by_a_path_with_dots_in_it(quick_run, digits):
    roundabout = quick_run / "checkpoints" / ".." / ".." / quick_run.name  # tensorstore takes no such path
    assert HeadRows(roundabout).shape == (10, 4)
    assert fit(CONFIG, digits, roundabout, options=OPTIONS).status == "finished"


def test_runs_are_not_put_where_they_would_hide_others(quick_run, digits, tmp_path):
    with pytest.raises(
        ConfigError, match="quick holds a run, and cannot hold several; name another --run-dir"
    ):
        run_experiment(two_losses(), digits, quick_run, options=OPTIONS)
    assert not (quick_run / "experiment.json").exists()
    run_experiment(two_losses(), digits, tmp_path / "both", options=OPTIONS)
    with pytest.raises(ConfigError, match="both holds several runs, and cannot be one itself"):
        run_experiment(Experiment.of_run(CONFIG), digits, tmp_path / "both", options=OPTIONS)
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "feature_index.json").touch()
    with pytest.raises(ConfigError, match="index holds an index"):
        run_experiment(Experiment.of_run(CONFIG), digits, tmp_path / "index", options=OPTIONS)


def test_a_quick_run_whose_metrics_are_gone_is_measured_again(quick_run, digits, tmp_path):
    run_dir = shutil.copytree(quick_run, tmp_path / "run")
    (run_dir / "metrics.jsonl").unlink()
    outcome = fit(CONFIG, digits, run_dir, options=OPTIONS)
    whole = MetricsLog(quick_run / "metrics.jsonl").records()
    assert outcome.validation == whole[-1]["validation"]
    assert [record["step"] for record in MetricsLog(run_dir / "metrics.jsonl").records()] == [12]


def test_a_run_directory_that_is_deleted_while_training_is_one_sentence(digits, quick, tmp_path, monkeypatch):
    run_dir, validate = tmp_path / "run", QuickTrainer.validate
    monkeypatch.setattr(QuickTrainer, "validate", lambda *args: (validate(*args), shutil.rmtree(run_dir))[0])
    with pytest.raises(
        CheckpointError, match=r"cannot be written to \(No such file or directory\); free some"
    ):
        fit(CONFIG, digits, run_dir, options=OPTIONS)
    assert not run_dir.exists()


def test_a_validation_loss_that_is_not_finite_ends_the_run_too(digits, quick, tmp_path, monkeypatch):
    validate = QuickTrainer.validate
    monkeypatch.setattr(QuickTrainer, "validate", lambda *args: validate(*args) | {"loss": float("nan")})
    outcome = fit(CONFIG, digits, tmp_path / "run", options=OPTIONS)
    assert (outcome.status, outcome.validation) == ("diverged", {})
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_sweep_drops_diverged_rates_and_says_which_run_was_chosen_and_why(digits, quick, tmp_path):
    experiment = dataclasses.replace(
        Experiment.of_run(CONFIG),
        loss=("max_margin",),
        optimizer="sgd",
        schedule="constant",
        learning_rate=(1e30, 0.1),
        steps=4,
    )
    outcomes = run_experiment(experiment, digits, tmp_path, options=OPTIONS)
    (chosen,) = outcomes
    assert (chosen.config.loss, chosen.config.learning_rate) == ("max_margin", 0.1)
    report = json.loads((tmp_path / "sweep.json").read_text())["max_margin"]
    assert report["chosen"] == chosen.run_dir.name
    assert "validation accuracy" in report["why"]
    statuses = {run["run"]: run["status"] for run in report["runs"]}
    assert statuses["max_margin-lr1e+30-margin1"] == "diverged"
    assert statuses["max_margin-lr0.1-margin1"] == "finished"
    assert saved_experiment(tmp_path) == experiment


def test_a_short_sweep_chooses_what_is_trained_in_full(digits, quick, tmp_path):
    experiment = dataclasses.replace(
        Experiment.of_run(CONFIG), loss=("cross_entropy",), learning_rate=(0.01, 0.5), sweep_steps=3
    )
    (outcome,) = run_experiment(experiment, digits, tmp_path, options=OPTIONS)
    assert (outcome.run_dir, outcome.step) == (tmp_path / "cross_entropy", 12)
    tried = read_sweep(tmp_path)["cross_entropy"]["runs"]
    assert [run["step"] for run in tried] == [3, 3]
    assert outcome.config.learning_rate == 0.5, "the more accurate one"
    assert find_runs([tmp_path]) == [tmp_path / "cross_entropy"]
    assert saved_experiment(tmp_path) == experiment
    (again,) = run_experiment(experiment, digits, tmp_path, options=OPTIONS)  # nothing is trained twice
    assert again.validation == outcome.validation


def test_tensorboard_files_hold_the_metrics(digits, quick, tmp_path):
    options = dataclasses.replace(OPTIONS, tensorboard=True)
    fit(CONFIG, digits, tmp_path / "run", options=options)
    events = list((tmp_path / "run" / "tensorboard").iterdir())
    assert len(events) == 1
    assert b"validation/auprc" in events[0].read_bytes()
