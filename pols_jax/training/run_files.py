"""The JSON files of a run directory and of an experiment's: what they hold, and how they are read and checked."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pols_jax.errors import ConfigError, RunError
from pols_jax.files import reading, write_json
from pols_jax.losses import LOSSES
from pols_jax.schema import decode, encode, read_json, read_record
from pols_jax.training.config import Experiment, RunConfig

# Larger images than this are a mistake, not a data set.
_MAX_SIDE, _MAX_CHANNELS = 2**16, 2**10
# What every finished run has measured on the validation split.
_VALIDATION = ("loss", "accuracy", "auprc", "violation_rate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartInfo:
    """Which weights a run started from.

    Attributes:
      path: The run or file, as it was named.
      identity: The SHA-256 of the file, or what identifies the checkpoint of the run.
      pixels: What the network was trained with; see `pols_jax.models.Backbone`.
      what: What was taken from it, in words.
    """

    path: str
    identity: str
    pixels: str
    what: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What ``config.json`` holds: everything that a run was started with.

    Attributes:
      config: What determines the model.
      loss: The loss, once more, for whoever only looks into the file.
      dataset: The data set, once more.
      num_classes: The number of classes k.
      image_shape: Height, width and channels of the images.
      class_names_sha256: What ties ``class_names.json`` to the run; None in old directories.
      data: The provenance of the data.
      versions: The versions of the software that started the run.
      devices: What the run was started on.
      start: Which weights it started from; None for random ones.
    """

    config: RunConfig
    loss: str | None = None
    dataset: str | None = None
    num_classes: int
    image_shape: tuple[int, int, int]
    class_names_sha256: str | None = None
    data: dict[str, Any]
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    devices: str = ""
    start: StartInfo | None = None

    def __post_init__(self):
        """Checks what types cannot say."""
        if self.num_classes < 1:
            raise ConfigError(f"num_classes must be positive, got {self.num_classes}.")
        height, width, channels = self.image_shape
        if not (0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE and 0 < channels <= _MAX_CHANNELS):
            raise ConfigError(f"image_shape is that of no image: {list(self.image_shape)}.")
        for name in ("loss", "dataset"):
            if getattr(self, name) not in (None, getattr(self.config, name)):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, and config.{name} {getattr(self.config, name)!r}."
                )


def write_run_info(run_dir: str | Path, info: RunInfo, class_names: Sequence[str]) -> None:
    """Writes ``class_names.json`` and then ``config.json``, which makes the directory that of a run."""
    write_json(Path(run_dir) / "class_names.json", list(class_names))
    tied = dataclasses.replace(info, class_names_sha256=_names_hash(class_names))
    write_json(Path(run_dir) / "config.json", encode(tied))


def read_run_info(run_dir: str | Path) -> RunInfo | None:
    """What a run directory was started with; None if it holds no run."""
    path = Path(run_dir) / "config.json"
    return read_record(RunInfo, path) if _is_there(path) else None


def read_class_names(run_dir: str | Path, info: RunInfo) -> tuple[str, ...]:
    """One name per class of a run; a `RunError` if ``class_names.json`` is missing, damaged, or that of another run."""
    path = Path(run_dir) / "class_names.json"
    names: tuple[str, ...] = read_record(tuple[str, ...], path)  # type: ignore[assignment]
    if len(names) != info.num_classes:
        raise RunError(f"{path} has {len(names)} names, and the run {info.num_classes} classes.")
    if len(set(names)) != len(names):
        raise RunError(f"{path} has a name twice.")
    if info.class_names_sha256 not in (None, _names_hash(names)):
        raise RunError(f"{path} is that of another run, or was changed; bring the old one back.")
    return names


def read_experiment(run_dir: str | Path) -> Experiment | None:
    """The experiment that a directory of several runs was started with; None if it holds none."""
    path = Path(run_dir) / "experiment.json"
    return read_record(Experiment, path) if _is_there(path) else None


def is_adopted(directory: str | Path) -> bool:
    """Whether a directory is that of an adopted network."""
    try:
        return (Path(directory) / "adopted.json").exists()
    except (OSError, ValueError):
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One of the runs that a sweep tried: its folder, its settings, and how it ended."""

    run: str
    learning_rate: float
    margin: float | None = None
    alpha: float | None = None
    num_noise: int | None = None
    noise: str | None = None
    status: Literal["finished", "diverged"]
    step: int
    validation: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepEntry:
    """What ``sweep.json`` says about one loss: the folder of the chosen run, None if every run diverged; why; all runs."""

    chosen: str | None
    why: str = ""
    runs: tuple[SweepRun, ...] = ()


def read_sweep_file(path: str | Path) -> tuple[dict[str, Any], list[Path]] | None:
    """Reads ``sweep.json``: its content as it is, and the directories of the chosen runs; None if there is no such file."""
    path = Path(path)
    if not _is_there(path):
        return None
    content = read_json(path)
    try:
        entries: dict[str, SweepEntry] = decode(dict[str, SweepEntry], content)
        for loss, entry in entries.items():
            _check_sweep_entry(path.parent, loss, entry)
    except ConfigError as error:
        raise RunError(f"{path} cannot be used: {error}") from error
    return content, [path.parent / entry.chosen for entry in entries.values() if entry.chosen is not None]


def _check_sweep_entry(directory: Path, loss: str, entry: SweepEntry) -> None:
    if loss not in LOSSES:
        raise ConfigError(f"{loss!r} is no loss that this version knows.")
    for run in entry.runs:
        missing = [name for name in _VALIDATION if name not in run.validation]
        if missing and run.status == "finished":
            raise ConfigError(f"the validation of {run.run!r} has no {missing[0]}.")
    if entry.chosen is None:
        return
    if entry.runs and entry.chosen not in [run.run for run in entry.runs]:
        raise ConfigError(f"{loss}.chosen is {entry.chosen!r}, which is none of its runs.")
    folder = directory / entry.chosen
    is_beside = entry.chosen == Path(entry.chosen).name and "\0" not in entry.chosen
    if not is_beside or folder.is_symlink() or not (folder / "config.json").is_file():
        raise ConfigError(f"{loss}.chosen is {entry.chosen!r}, which is no run beside it.")


def _names_hash(names: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()


def _is_there(path: Path) -> bool:
    with reading(path):
        return path.exists()
