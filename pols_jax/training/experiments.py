"""Several runs at once: one per loss, or one per value that is to be chosen on the validation split."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from pols_jax.data import Dataset
from pols_jax.errors import ConfigError, DivergenceError
from pols_jax.files import write_json
from pols_jax.signals import noted_signals
from pols_jax.training.checkpoints import newest_step
from pols_jax.training.config import Experiment, RunConfig
from pols_jax.training.fitting import Outcome, RunOptions, check_run_dir, fit, settled, stop_if_heard
from pols_jax.training.run_dirs import locked
from pols_jax.training.run_files import read_experiment, read_run_info, read_sweep_file
from pols_jax.training.starting import Start


def run_experiment(
    experiment: Experiment,
    dataset: Dataset,
    run_dir: str | Path,
    *,
    options: RunOptions | None = None,
    start: Start | None = None,
) -> list[Outcome]:
    """Trains every run of an experiment, and chooses the best of each loss on the validation split.

    With one run, ``run_dir`` is its directory; with several, each is a folder of it, and where several values were tried
    for a loss, ``sweep.json`` says which was chosen and why. With ``experiment.sweep_steps`` the runs to choose among are
    in the folder ``sweep``, and the chosen settings are trained again, for ``experiment.steps``.

    Args:
      experiment: What to train.
      dataset: Its data.
      run_dir: The directory for everything that is written.
      options: How to run.
      start: The weights that ``experiment.init_from`` names, if they are there already.

    Returns:
      The chosen run of each loss, in the order of the paper's tables. A loss whose runs all diverged is left out.

    Raises:
      DivergenceError: if a run diverged and ``options.on_nan`` says to stop, or if no run is left.
      ConfigError: as `fit`; all run directories are checked before the first run starts.
      InterruptedRunError: after a signal; no further run is started.

    Examples:
      >>> import tempfile
      >>> from pols_jax.data import load
      >>> losses = ("cross_entropy", "batch_cross_entropy")
      >>> experiment = Experiment(loss=losses, width=0.1, characters="0030-0039", batch_size=32, steps=2)
      >>> dataset = load("glyphs", **experiment.options())
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     outcomes = run_experiment(experiment, dataset, folder, options=RunOptions(quiet=True))
      >>> [outcome.run_dir.name for outcome in outcomes]
      ['cross_entropy', 'batch_cross_entropy']
    """
    options, run_dir = options or RunOptions(), Path(run_dir)
    experiment, start = settled(experiment, dataset, run_dir, options, start)
    _check_home(run_dir, has_several=len(experiment.runs()) > 1)
    _check_folders(run_folders(experiment, run_dir), dataset)
    with locked(run_dir):
        if start is not None and jax.process_index() == 0:
            start.save(run_dir)
        return _run_experiment(experiment, dataset, run_dir, options, start)


def _run_experiment(
    experiment: Experiment, dataset: Dataset, run_dir: Path, options: RunOptions, start: Start | None
) -> list[Outcome]:
    if experiment.is_sweep() and experiment.sweep_steps is not None:
        folders, is_sweep = _after_short_sweep(experiment, dataset, run_dir, options, start), False
    else:
        folders, is_sweep = run_folders(experiment, run_dir), experiment.is_sweep()
    _check_folders(folders, dataset)
    if len(folders) > 1:
        _write_experiment(experiment, run_dir)
    on_nan = options.on_nan or ("skip-run" if experiment.is_sweep() else "stop")
    outcomes = []
    with noted_signals() as noted:
        for folder, config in folders.items():
            stop_if_heard(
                noted.number,
                f"Stopped before {folder}. Start again with the same --run-dir {run_dir} to go on.",
            )
            outcome = fit(config, dataset, folder, options=options, start=start)
            if outcome.status == "diverged" and on_nan == "stop":
                raise DivergenceError(_divergence(outcome))
            outcomes.append(outcome)
            if is_sweep and jax.process_index() == 0:
                write_json(run_dir / "sweep.json", _sweep_report(outcomes, run_dir, experiment.choose_by))
    chosen = [
        best for loss in experiment.losses() if (best := choose(outcomes, loss, by=experiment.choose_by))
    ]
    if not chosen:
        raise DivergenceError(" ".join(_divergence(outcome) for outcome in outcomes))
    return chosen


def _after_short_sweep(
    experiment: Experiment, dataset: Dataset, run_dir: Path, options: RunOptions, start: Start | None
) -> dict[Path, RunConfig]:
    """Chooses among several values by short runs; returns the runs that are to be trained in full."""
    runs = experiment.runs()
    several = tuple(loss for loss in experiment.losses() if sum(run.loss == loss for run in runs) > 1)
    assert experiment.sweep_steps is not None
    short = dataclasses.replace(experiment, loss=several, steps=experiment.sweep_steps, sweep_steps=None)
    _check_folders(run_folders(short, run_dir / "sweep"), dataset)
    _check_folders({run_dir / loss: _saved_or_first(runs, run_dir / loss) for loss in several}, dataset)
    _write_experiment(experiment, run_dir)
    outcomes = run_experiment(short, dataset, run_dir / "sweep", options=options, start=start)
    chosen = {run.loss: run for run in runs if run.loss not in several}
    chosen |= {outcome.config.loss: outcome.config for outcome in outcomes}
    return {
        run_dir / loss: dataclasses.replace(chosen[loss], steps=experiment.steps)
        for loss in experiment.losses()
        if loss in chosen
    }


def _saved_or_first(runs: Sequence[RunConfig], folder: Path) -> RunConfig:
    """Of the runs of the loss that the folder is named after, the one most like what the folder holds; or the first."""
    candidates = [run for run in runs if run.loss == folder.name]
    saved = read_run_info(folder)
    return min(candidates, key=lambda run: len(run.differences(saved.config)) if saved else 0)


def _check_home(run_dir: Path, *, has_several: bool) -> None:
    """Raises if the directory holds something that the runs would hide, or that would hide them."""
    others = {
        "adopted.json": "an adopted network",
        "export.json": "an export",
        "feature_index.json": "an index",
    }
    others["config.json" if has_several else "experiment.json"] = (
        "a run, and cannot hold several" if has_several else "several runs, and cannot be one itself"
    )
    for file, what in others.items():
        if (run_dir / file).exists():
            raise ConfigError(f"{run_dir} holds {what}; name another --run-dir.")


def _check_folders(folders: Mapping[Path, RunConfig], dataset: Dataset) -> None:
    for folder, config in folders.items():
        check_run_dir(folder, config, dataset)


def _write_experiment(experiment: Experiment, run_dir: Path) -> None:
    if jax.process_index() == 0:
        write_json(run_dir / "experiment.json", experiment.to_json())


def saved_experiment(run_dir: str | Path) -> Experiment | None:
    """The experiment that a directory was started with; None if it holds none."""
    saved = read_run_info(run_dir)
    return read_experiment(run_dir) if saved is None else Experiment.of_run(saved.config)


def read_sweep(run_dir: str | Path) -> dict[str, Any] | None:
    """What an experiment tried and chose on the validation split, by loss; None if there was nothing to choose."""
    for path in (Path(run_dir) / "sweep.json", Path(run_dir) / "sweep" / "sweep.json"):
        if sweep := read_sweep_file(path):
            return sweep[0]
    return None


def choose(
    outcomes: Sequence[Outcome], loss: str, *, by: Literal["accuracy", "auprc"] = "accuracy"
) -> Outcome | None:
    """The run of a loss that does best on the validation split; in a tie, the one with the smaller validation loss."""
    candidates = [o for o in outcomes if o.config.loss == loss and o.status == "finished"]
    return max(candidates, key=lambda o: (o.validation[by], -o.validation["loss"]), default=None)


def run_folders(experiment: Experiment, run_dir: str | Path) -> dict[Path, RunConfig]:
    """The directory of every run of an experiment."""
    run_dir, runs = Path(run_dir), experiment.runs()
    if len(runs) == 1:
        return {run_dir: runs[0]}
    if experiment.is_sweep():
        return {run_dir / "-".join([run.loss, *run.choices(separator="")]): run for run in runs}
    return {run_dir / run.loss: run for run in runs}


def _sweep_report(
    outcomes: Sequence[Outcome], run_dir: Path, by: Literal["accuracy", "auprc"]
) -> dict[str, Any]:
    """What ``sweep.json`` says."""
    report = {}
    for loss in dict.fromkeys(outcome.config.loss for outcome in outcomes):
        runs = [
            {
                "run": str(outcome.run_dir.relative_to(run_dir)),
                "learning_rate": outcome.config.learning_rate,
                **outcome.config.loss_options(),
                "status": outcome.status,
                "step": outcome.step,
                "validation": outcome.validation,
            }
            for outcome in outcomes
            if outcome.config.loss == loss
        ]
        chosen, why = None, "Every run diverged."
        if best := choose(outcomes, loss, by=by):
            chosen = str(best.run_dir.relative_to(run_dir))
            measure = {"accuracy": "accuracy", "auprc": "AUPRC of one logit"}[by]
            why = (
                f"The highest validation {measure}, {best.validation[by]:.4f}, of {len(runs)} runs; in a tie the smaller "
                "validation loss."
            )
        report[loss] = {"chosen": chosen, "why": why, "runs": runs}
    return report


def _divergence(outcome: Outcome) -> str:
    newest = newest_step(outcome.run_dir)
    left = "no checkpoint was saved before" if newest is None else f"the last good checkpoint is {newest}"
    rate = outcome.config.learning_rate
    return (
        f"The loss of {outcome.run_dir} was no longer finite at step {outcome.step}, with learning rate {rate:g}; "
        f"{left}. Try a smaller --learning-rate."
    )
