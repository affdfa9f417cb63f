"""`fit` trains one run and never loses it.

A run directory holds ``config.json`` (the config, the data and the software), ``class_names.json``, ``metrics.jsonl``
and ``checkpoints/``. Starting in the directory of an unfinished run goes on with it, bit for bit.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from pols_jax import __version__
from pols_jax.data import Dataset
from pols_jax.data.iterators import streams_closed
from pols_jax.errors import CheckpointError, ConfigError, InterruptedRunError, reason_of
from pols_jax.files import check_space
from pols_jax.settings import flag
from pols_jax.signals import Noted, noted_signals
from pols_jax.training.checkpoints import Checkpoints, Saved, newest_step
from pols_jax.training.config import Experiment, RunConfig, RunOptions
from pols_jax.training.continuing import Outcome, best_look, check_run_dir, ended_before, write_run_files
from pols_jax.training.feasibility import check_feasible
from pols_jax.training.hosts import check_same_settings, largest_of_hosts, peers_told, same_on_all_hosts
from pols_jax.training.learning import TrainState
from pols_jax.training.optimizers import make_schedule
from pols_jax.training.placement import check_batch_size
from pols_jax.training.progress import MetricsLog, Progress
from pols_jax.training.run_dirs import locked
from pols_jax.training.starting import Start, load_start, without_backbone
from pols_jax.training.stored_arrays import tree_bytes
from pols_jax.training.trainer import Trainer

S = TypeVar("S", RunConfig, Experiment)

# A dispatch takes about this long: signals are heard and the progress line moves after each.
_DISPATCH_SECONDS = 1.0


def fit(
    config: RunConfig,
    dataset: Dataset,
    run_dir: str | Path,
    *,
    options: RunOptions | None = None,
    start: Start | None = None,
) -> Outcome:
    """Trains one run to its last step, from the newest checkpoint if there is one.

    Args:
      config: The run.
      dataset: Its data.
      run_dir: The run directory; created if it does not exist.
      options: How to run.
      start: The weights that ``config.init_from`` names, if they are there already.

    Returns:
      How the run ended. A run that had ended before is not trained again.

    Raises:
      ConfigError: if the directory holds a run of another config or data, another process trains in it, the batch cannot
        be split, the images are too small for the network, or a step does not fit in memory; nothing is written then.
      InterruptedRunError: after Ctrl-C, SIGTERM or SIGHUP, once a checkpoint is saved; after the last step as well.
      CheckpointError: if a checkpoint cannot be written, or none can be read.

    Examples:
      >>> import tempfile
      >>> from pols_jax.data import load
      >>> config = RunConfig(width=0.1, characters="0030-0039", batch_size=32, steps=2)
      >>> dataset = load("glyphs", **config.options())
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     outcome = fit(config, dataset, Path(folder) / "run", options=RunOptions(quiet=True))
      >>> outcome.status, outcome.step
      ('finished', 2)
    """
    options, run_dir = options or RunOptions(), Path(run_dir)
    has_own_start = start is None
    config, start = settled(config, dataset, run_dir, options, start)
    check_run_dir(run_dir, config, dataset)
    with locked(run_dir):
        check_run_dir(run_dir, config, dataset)  # once more: somebody may have started and ended here since
        ended = ended_before(run_dir, config)
        if ended is not None:
            return ended
        if start is not None and has_own_start and jax.process_index() == 0:
            with _writing(run_dir):
                start.save(run_dir)
        return _Run(config, dataset, run_dir, options, start).train()


def settled(
    setup: S, dataset: Dataset, run_dir: Path, options: RunOptions, start: Start | None
) -> tuple[S, Start | None]:
    """Checks settings before anything is written, on all hosts; returns them in full, and the weights to start from."""
    check_batch_size(setup.batch_size, jax.device_count())
    check_feasible(setup.runs()[0], dataset)
    start = start or load_start(setup, dataset, run_dir)
    if start is not None:
        setup = dataclasses.replace(setup, pixels=setup.pixels or start.info.pixels)
    check_same_settings(shared_settings(setup, dataset, run_dir, options))
    return setup, start


def shared_settings(
    setup: RunConfig | Experiment, dataset: Dataset, run_dir: Path, options: RunOptions
) -> dict[str, Any]:
    """What has to be the same on all hosts that train together, by the names that an error gives it."""
    data = (dataset.provenance.get(key) for key in ("content_sha256", "fingerprint"))
    return {
        **{flag(name): value for name, value in setup.to_json().items()},
        **{flag(name): getattr(options, name) for name in ("checkpoint_every", "keep_checkpoints", "on_nan")},
        "--run-dir": str(run_dir),
        "the newest checkpoint in --run-dir": newest_step(run_dir),
        "the data of --dataset": next(filter(None, data), None),
        "the number of classes": dataset.num_classes,
        "the version of pols-jax": __version__,
    }


class _Run:
    """One run from its (newest) checkpoint to its end."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, run_dir: Path, options: RunOptions, start: Start | None
    ):
        self.config, self.dataset, self.run_dir, self.options = config, dataset, run_dir, options
        self.start, self.trains_head = start, config.train == "head"
        self.is_first_host = jax.process_index() == 0
        self.trainer = Trainer(config, dataset, num_workers=options.workers or 0)
        self.schedule = make_schedule(config)
        self.title = f"{config.loss} ({', '.join(config.choices(separator=' '))})"
        self.steps_per_second: float | None = None

    def train(self) -> Outcome:
        if self.is_first_host:
            check_space(self.run_dir, tree_bytes(self.trainer.template()))
            with _writing(self.run_dir):
                write_run_files(self.run_dir, self.config, self.dataset, self.start and self.start.info)
        quiet = self.options.quiet or not self.is_first_host
        with (
            noted_signals() as noted,
            Checkpoints(self.run_dir, keep=self.options.keep_checkpoints) as checkpoints,
            Progress(self.title, self.config.steps, quiet=quiet) as progress,
            _tensorboard(self.run_dir, self.options.tensorboard and self.is_first_host) as board,
            peers_told(),
            streams_closed(),
        ):
            self.checkpoints, self.progress, self.board = checkpoints, progress, board
            if self.trains_head:
                self.trainer = Trainer(self.config, self._features(noted))
            return self._to_the_end(self._start(), noted)

    def _to_the_end(self, state: TrainState, noted: Noted) -> Outcome:
        """Takes the steps that are left; looks at the validation split, logs and saves in between."""
        self.progress.waiting("compiling")
        step = self.trainer.step_of(state)
        with _writing(self.run_dir):
            first_step = step if self.is_first_host else None
            self.log = MetricsLog(self.run_dir / "metrics.jsonl", first_step=first_step)
        looks = [r for r in self.log.records() if r.get("validation") and r["step"] <= step]
        sums, since = np.zeros(4), time.monotonic()
        while step < self.config.steps:
            began = time.monotonic()
            state, totals = self.trainer.advance(state, self._next_stop(step))
            last_loss = float(totals.last_loss)
            steps_done, step = int(totals.steps), self.trainer.step_of(state)
            self.steps_per_second = steps_done / (time.monotonic() - began)
            sums += np.array([totals.loss, totals.correct, totals.examples, totals.steps], np.float64)
            if not np.isfinite(last_loss):
                return self._diverged(step)
            self.progress.update(step, loss=sums[0] / sums[3], steps_per_second=self.steps_per_second)
            stopped_by = largest_of_hosts(noted.number)
            is_last = step == self.config.steps
            is_stopped = False
            if step % self.config.evaluate_every == 0 or is_last:
                state = self.trainer.caught_up(state)
                validation = self.trainer.validate(state)
                if not np.isfinite(validation["loss"]):
                    return self._diverged(step)
                self.progress.validated(**{n: validation[n] for n in ("accuracy", "auprc", "violation_rate")})
                looks.append({"step": step, "validation": validation})
                is_stopped = self._is_enough(looks) and not is_last
                self._log_look(step, sums, time.monotonic() - since, validation, is_stopped)
                sums, since = np.zeros(4), time.monotonic()
                self._save(step, state, validation["accuracy"])
            elif stopped_by or step % self.options.checkpoint_every == 0:
                self._save(step, state, None)
            if is_stopped or (stopped_by and not is_last):
                break
        self.checkpoints.wait()
        place = self.checkpoints.directory / str(step)
        # Once more: a signal may have come in the last dispatch, or while the last checkpoint was written.
        stop_if_heard(
            noted.number,
            f"Stopped at step {step}; saved in {place}. Start again with the same --run-dir to go on.",
        )
        if not looks or looks[-1]["step"] < step:  # the run had ended before, and its metrics are gone
            looks.append({"step": step, "validation": self.trainer.validate(state)})
            self._log_look(step, sums, time.monotonic() - since, looks[-1]["validation"])
        return Outcome(self.run_dir, self.config, "finished", step, best_look(looks))

    def _features(self, noted: Noted) -> Dataset:
        """The features of the images, which the output layer is trained on alone."""
        assert self.start is not None
        is_terminal = self.progress.console.is_terminal

        def report(done: int, total: int) -> None:
            if noted.number and jax.process_count() == 1:  # several hosts stop together, at the first step
                raise InterruptedRunError(
                    "Stopped while computing features; start again to go on.", noted.number
                )
            if is_terminal or done == 1:  # elsewhere every report would be a line
                self.progress.waiting(f"computing features, batch {done:,} of {total:,}")

        return self.start.features(self.config, self.dataset, report)

    def _is_enough(self, looks: list[dict[str, Any]]) -> bool:
        """Whether the accuracy has not improved for as many looks as the config allows; all hosts agree."""
        accuracies = [look["validation"]["accuracy"] for look in looks]
        since_best = len(accuracies) - 1 - accuracies.index(max(accuracies))
        is_enough = self.config.stop_after is not None and since_best >= self.config.stop_after
        return bool(largest_of_hosts(int(is_enough)))

    def _whole(self, state: TrainState) -> TrainState:
        """A state, or a template, as checkpoints hold it, with the backbone in any case."""
        return self.start.with_backbone(state) if self.start and self.trains_head else state

    def _start(self) -> TrainState:
        """The state of the newest checkpoint that can be read, or a new one."""
        template = self._whole(self.trainer.template())
        self.checkpoints.prepare(template)
        saved = self.checkpoints.restore_newest(template)
        if saved is None:
            if self.start is not None:
                self.progress.note(f"{self.title}: {self.start.info.what}")
            return self.trainer.init(self.start)
        self._set_damaged_aside(saved)
        self.progress.note(f"{self.title}: resumed at step {saved.step}")
        return self.trainer.place(without_backbone(saved.state) if self.trains_head else saved.state)

    def _set_damaged_aside(self, saved: Saved) -> None:
        """Moves newer checkpoints away that cannot be read: no checkpoint could be saved before their steps."""
        for step, problem in saved.problems.items():
            if self.is_first_host:
                place = self.checkpoints.set_aside(step)
                self.progress.warn(f"{problem} It is now in {place}. Going on from checkpoint {saved.step}.")
        same_on_all_hosts(saved.step)  # no host saves before all is moved

    def _next_stop(self, step: int) -> int:
        """The step to dispatch up to: the next event, or about a second of work."""
        every = (self.config.evaluate_every, self.options.checkpoint_every)
        stops = [self.config.steps, *((step // n + 1) * n for n in every)]
        # The first dispatch is one step: it compiles, and tells nothing about the speed.
        in_a_second = max(1, int((self.steps_per_second or 1) * _DISPATCH_SECONDS))
        return same_on_all_hosts(min(*stops, step + in_a_second))

    def _save(self, step: int, state: TrainState, validation_accuracy: float | None) -> None:
        self.checkpoints.save(
            step,
            self._whole(self.trainer.stored(state)),
            config=self.config.to_json(),
            data=self.dataset.provenance,
            validation_accuracy=validation_accuracy,
        )

    def _log_look(self, step: int, sums, seconds: float, validation, is_stopped: bool = False) -> None:
        loss, correct, examples, steps = (float(value) for value in sums)
        record = {
            "step": step,
            "learning_rate": self._learning_rate(step),
            "loss": loss / steps if steps else None,
            "accuracy": correct / examples if examples else None,
            "steps_per_second": steps / seconds,
            "validation": validation,
            **({"stopped": True} if is_stopped else {}),
        }
        self._log(record)
        if self.board is not None:
            for name in ("learning_rate", "loss", "accuracy", "steps_per_second"):
                if record[name] is not None:
                    self.board.add_scalar(f"train/{name}", record[name], step)
            for name, value in validation.items():
                self.board.add_scalar(f"validation/{name}", value, step)

    def _learning_rate(self, step: int) -> float:
        """The learning rate of the step that led here."""
        update = (step - 1) // self.config.accumulate
        return float(np.asarray(self.schedule(np.float32(update * self.config.accumulate))))

    def _log(self, record: dict[str, Any]) -> None:
        if self.is_first_host:
            with _writing(self.run_dir):
                self.log.write(record)

    def _diverged(self, step: int) -> Outcome:
        self.checkpoints.wait()
        self._log({"step": step, "learning_rate": self._learning_rate(step), "diverged": True})
        return Outcome(self.run_dir, self.config, "diverged", step, {})


def _tensorboard(run_dir: Path, wanted: bool) -> AbstractContextManager[Any]:
    if not wanted:
        return nullcontext()
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError("--tensorboard needs a package: pip install 'pols-jax[tensorboard]'.") from error
    return SummaryWriter(str(run_dir / "tensorboard"))


def stop_if_heard(signal_number: int, message: str) -> None:
    """Raises an `InterruptedRunError` on every host, if one of them heard a signal (0 for none)."""
    if stopped_by := largest_of_hosts(signal_number):
        raise InterruptedRunError(message, stopped_by)


@contextmanager
def _writing(run_dir: Path) -> Iterator[None]:
    """A full disk, or a directory that is gone, is an error in one sentence."""
    try:
        yield
    except OSError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        raise CheckpointError(
            f"{run_dir} cannot be written to ({reason_of(cause)}); free some space or mend the directory, and start "
            "again to resume."
        ) from error
