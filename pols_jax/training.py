"""`fit` trains one run and never loses it.

A run directory holds ``config.json`` (the config, the data and the software), ``class_names.json``, ``metrics.jsonl``
and ``checkpoints/``. Starting in the directory of an unfinished run goes on with it, bit for bit.
"""

import dataclasses
import importlib.metadata
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from pols_jax.checkpoints import Checkpoints, newest_step, read_config
from pols_jax.config import LOSS_FLAGS, ConfigError, RunConfig
from pols_jax.data import Dataset
from pols_jax.learning import Learner, TrainState, train_step
from pols_jax.mesh_training import make_trainer
from pols_jax.optimizers import make_schedule
from pols_jax.progress import MetricsLog, Progress
from pols_jax.trainer import Trainer, check_batch_size

__all__ = [
    "InterruptedRunError",
    "Learner",
    "Outcome",
    "RunOptions",
    "TrainState",
    "Trainer",
    "check_run_dir",
    "choices_text",
    "fit",
    "make_run_dir",
    "train_step",
    "write_json",
]

# A dispatch takes about this long: signals are heard and the progress line moves after each.
_DISPATCH_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run, as opposed to what: settings that do not change the trained model.

    Attributes:
      checkpoint_every: Steps between two checkpoints; there is one at every look at the validation split as well.
      keep_checkpoints: How many of the newest checkpoints to keep, beside the best on the validation split.
      on_nan: What to do when a loss is no longer finite: stop, or skip-run to go on with the next run. By default
        skip-run where several values are tried for a loss, and stop otherwise.
      quiet: Print only what goes wrong.
      tensorboard: Write TensorBoard event files into the run directory as well.
    """

    checkpoint_every: int = 2000
    keep_checkpoints: int = 2
    on_nan: Literal["stop", "skip-run"] | None = None
    quiet: bool = False
    tensorboard: bool = False

    def __post_init__(self):
        """Checks the settings."""
        for name in ("checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}."
                )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      run_dir: Its directory.
      config: Its config.
      status: ``finished``, or ``diverged`` if the loss, of training or of validation, was no longer finite.
      step: The last step.
      validation: What `Trainer.validate` measured last; empty if nothing was.
    """

    run_dir: Path
    config: RunConfig
    status: Literal["finished", "diverged"]
    step: int
    validation: dict[str, float]


class InterruptedRunError(RuntimeError):
    """The run was stopped by a signal, after a checkpoint was saved.

    Attributes:
      signal_number: The signal.
    """

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


def fit(
    config: RunConfig, dataset: Dataset, run_dir: str | Path, *, options: RunOptions | None = None
) -> Outcome:
    """Trains one run to its last step, from the newest checkpoint if there is one.

    Args:
      config: The run.
      dataset: Its data.
      run_dir: The run directory; created if it does not exist.
      options: How to run.

    Returns:
      How the run ended. A run that had ended before is not trained again.

    Raises:
      ConfigError: if the directory holds a run of another config or data, or the batch cannot be split; nothing is
        written then.
      InterruptedRunError: after SIGTERM or Ctrl-C, once a checkpoint is saved.
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
    options = options or RunOptions()
    run_dir = Path(run_dir)
    check_batch_size(config.batch_size, jax.device_count())
    check_run_dir(run_dir, config, dataset)
    ended = _ended_before(run_dir, config)
    if ended is not None:
        return ended
    return _Run(config, dataset, run_dir, options).train()


class _Run:
    """One run from its (newest) checkpoint to its end."""

    def __init__(self, config: RunConfig, dataset: Dataset, run_dir: Path, options: RunOptions):
        self.config, self.dataset, self.run_dir, self.options = config, dataset, run_dir, options
        self.is_first_host = jax.process_index() == 0
        self.trainer = make_trainer(config, dataset)
        self.schedule = make_schedule(config)
        self.steps_per_second: float | None = None

    def train(self) -> Outcome:
        if self.is_first_host:
            _write_run_files(self.run_dir, self.config, self.dataset)
        quiet = self.options.quiet or not self.is_first_host
        with (
            Checkpoints(self.run_dir, keep=self.options.keep_checkpoints) as checkpoints,
            Progress(_title(self.config), self.config.steps, quiet=quiet) as progress,
            _heard_signals() as signals,
            _tensorboard(self.run_dir, self.options.tensorboard and self.is_first_host) as board,
        ):
            self.checkpoints, self.progress, self.board = checkpoints, progress, board
            state = self._start()
            step = self.trainer.step_of(state)
            log = MetricsLog(self.run_dir / "metrics.jsonl", first_step=step) if self.is_first_host else None
            validation: dict[str, float] = {}
            sums, since = np.zeros(4), time.monotonic()
            while step < self.config.steps:
                began = time.monotonic()
                state, totals = self.trainer.advance(state, self._next_stop(step))
                last_loss = float(totals.last_loss)
                steps_done, step = int(totals.steps), self.trainer.step_of(state)
                self.steps_per_second = steps_done / (time.monotonic() - began)
                sums += np.array([totals.loss, totals.correct, totals.examples, totals.steps], np.float64)
                if not np.isfinite(last_loss):
                    return self._diverged(step, log)
                progress.update(step, loss=sums[0] / sums[3], steps_per_second=self.steps_per_second)
                stopped_by = _any_host(signals[0] if signals else 0)
                is_last = step == self.config.steps
                if step % self.config.evaluate_every == 0 or is_last:
                    validation = self.trainer.validate(state)
                    if not np.isfinite(validation["loss"]):
                        return self._diverged(step, log)
                    progress.validated(**{n: validation[n] for n in ("accuracy", "auprc", "violation_rate")})
                    self._log(log, step, sums, time.monotonic() - since, validation)
                    sums, since = np.zeros(4), time.monotonic()
                    self._save(step, state, validation["accuracy"])
                elif stopped_by or step % self.options.checkpoint_every == 0:
                    self._save(step, state, None)
                if stopped_by and not is_last:
                    checkpoints.wait()
                    raise InterruptedRunError(
                        f"Stopped at step {step}; saved in {checkpoints.directory / str(step)}. "
                        "Start again with the same --run-dir to go on.",
                        stopped_by,
                    )
            checkpoints.wait()
        return Outcome(self.run_dir, self.config, "finished", step, validation)

    def _start(self) -> TrainState:
        """The state of the newest checkpoint that can be read, or a new one."""
        template = self.trainer.learner.init(self.dataset.image_shape)
        saved = self.checkpoints.restore_newest(template)
        if saved is None:
            return self.trainer.place(template)
        for problem in saved.problems:
            self.progress.warn(f"{problem} Going on from checkpoint {saved.step}.")
        self.progress.note(f"{_title(self.config)}: resumed at step {saved.step}")
        return self.trainer.place(saved.state)

    def _next_stop(self, step: int) -> int:
        """The step to dispatch up to: the next event, or about a second of work."""
        every = (self.config.evaluate_every, self.options.checkpoint_every)
        stops = [self.config.steps, *((step // n + 1) * n for n in every)]
        # The first dispatch is one step: it compiles, and tells nothing about the speed.
        in_a_second = max(1, int((self.steps_per_second or 1) * _DISPATCH_SECONDS))
        return _same_on_all_hosts(min(*stops, step + in_a_second))

    def _save(self, step: int, state: TrainState, validation_accuracy: float | None) -> None:
        self.checkpoints.save(
            step,
            self.trainer.whole(state),
            config=self.config.to_json(),
            validation_accuracy=validation_accuracy,
        )

    def _log(self, log: MetricsLog | None, step: int, sums, seconds: float, validation) -> None:
        loss, correct, examples, steps = (float(value) for value in sums)
        record = {
            "step": step,
            "learning_rate": self._learning_rate(step),
            "loss": loss / steps if steps else None,
            "accuracy": correct / examples if examples else None,
            "steps_per_second": steps / seconds,
            "validation": validation,
        }
        if log is not None:
            log.write(record)
        if self.board is not None:
            for name in ("learning_rate", "loss", "accuracy", "steps_per_second"):
                self.board.add_scalar(f"train/{name}", record[name], step)
            for name, value in validation.items():
                self.board.add_scalar(f"validation/{name}", value, step)

    def _learning_rate(self, step: int) -> float:
        """The learning rate of the step that led here."""
        return float(np.asarray(self.schedule(np.float32(step - 1))))

    def _diverged(self, step: int, log: MetricsLog | None) -> Outcome:
        self.checkpoints.wait()
        if log is not None:
            log.write({"step": step, "learning_rate": self._learning_rate(step), "diverged": True})
        return Outcome(self.run_dir, self.config, "diverged", step, {})


def check_run_dir(run_dir: Path, config: RunConfig, dataset: Dataset) -> None:
    """Raises unless the run can be written to, or continued in, the directory. Writes nothing.

    Raises:
      ConfigError: if it cannot be written, or holds a run of another config or data.

    Examples:
      >>> import tempfile
      >>> from pols_jax.data import load
      >>> config = RunConfig(characters="0030-0039")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     check_run_dir(Path(folder) / "run", config, load("glyphs", **config.options()))
    """
    existing = run_dir.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--run-dir {run_dir} cannot be written to; name a directory that can.")
    saved = read_config(run_dir)
    if saved is None:
        return
    differences = config.differences(RunConfig.from_json(saved["config"]))
    if differences:
        raise ConfigError(
            f"{run_dir} holds a run of another config: {'; '.join(differences)}. Name another --run-dir, or the "
            "settings of that run."
        )
    if not dataset.is_the_data_of(saved["data"]):
        raise ConfigError(
            f"{run_dir} was trained on other data of the name {dataset.name}; name another --run-dir."
        )


def _ended_before(run_dir: Path, config: RunConfig) -> Outcome | None:
    """The outcome of a run that has already ended."""
    records = MetricsLog(run_dir / "metrics.jsonl").records()
    last = records[-1] if records else {}
    if last.get("diverged"):
        return Outcome(run_dir, config, "diverged", last["step"], {})
    if last.get("step") == config.steps == newest_step(run_dir):
        return Outcome(run_dir, config, "finished", config.steps, last["validation"])
    return None


def make_run_dir(run_dir: Path) -> None:
    """Creates a directory for runs.

    Raises:
      ConfigError: if that is not possible.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     make_run_dir(Path(folder) / "runs" / "first")
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--run-dir {run_dir} cannot be created ({error.strerror}); name another."
        ) from error


def _write_run_files(run_dir: Path, config: RunConfig, dataset: Dataset) -> None:
    make_run_dir(run_dir)
    if read_config(run_dir) is not None:
        return
    write_json(run_dir / "class_names.json", list(dataset.class_names))
    packages = ("pols-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    content = {
        "config": config.to_json(),
        "loss": config.loss,
        "dataset": config.dataset,
        "num_classes": dataset.num_classes,
        "image_shape": list(dataset.image_shape),
        "data": dataset.provenance,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }
    write_json(run_dir / "config.json", content)


def _title(config: RunConfig) -> str:
    return f"{config.loss} ({', '.join(choices_text(config, separator=' '))})"


def choices_text(config: RunConfig, *, separator: str) -> list[str]:
    """What distinguishes the runs of one loss: the learning rate and the loss's own settings.

    Examples:
      >>> choices_text(RunConfig(loss="max_margin", learning_rate=0.1, margin=2.0), separator=" ")
      ['lr 0.1', 'margin 2']
    """
    values = {name: getattr(config, name) for name in LOSS_FLAGS.get(config.loss, ())}
    texts = {
        n: f"{v:g}" if isinstance(v, int | float) else str(v) for n, v in values.items() if v is not None
    }
    return [f"lr{separator}{config.learning_rate:g}", *(f"{n}{separator}{v}" for n, v in texts.items())]


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file at once or not at all.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_json(Path(folder) / "a.json", {"b": 1})
      ...     json.loads((Path(folder) / "a.json").read_text())
      {'b': 1}
    """
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


@contextmanager
def _heard_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT instead of dying; a second one ends the program at once."""
    heard: list[int] = []

    def hear(number, frame):
        heard.append(number)
        signal.signal(number, previous[number])

    try:
        previous = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not in the main thread: whoever runs the threads handles signals
        yield heard
        return
    try:
        yield heard
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _tensorboard(run_dir: Path, wanted: bool) -> Iterator[Any]:
    if not wanted:
        yield None
        return
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError("--tensorboard needs a package: pip install 'pols-jax[tensorboard]'.") from error
    with SummaryWriter(str(run_dir / "tensorboard")) as writer:
        yield writer


def _any_host(value: int) -> int:
    """The largest value over all hosts."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def _same_on_all_hosts(value: int) -> int:
    """The first host's value."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
