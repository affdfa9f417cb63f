"""A network that was trained elsewhere, as a directory: its output layer, a normalizer, thresholds and names.

The rows are stored as those of a run, in a checkpoint that holds nothing else: they are read one at a time and checked.
``adopted.json`` says what was tried; the checkpoint holds a copy of it, so that a change is noticed.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from pols_jax import training
from pols_jax.errors import CheckpointError, ConfigError, RunError
from pols_jax.evaluation.foreign_heads import ForeignHead, Ladder, climb, no_thresholds
from pols_jax.evaluation.normalizing import Rung, fit_progress
from pols_jax.files import check_new, check_space, new_directory, write_json
from pols_jax.metrics.thresholds import DEFAULT_RULES, Thresholds
from pols_jax.normalizers import Normalizer
from pols_jax.schema import decode, encode, read_record
from pols_jax.tables import Column, Table
from pols_jax.training.checkpoint_reading import HeadRows, StoredCheckpoint
from pols_jax.training.run_files import is_adopted
from pols_jax.training.run_normalizer import read_normalizer, rows_in_words, score_id, write_normalizer

_ADVICE = "Adopt the network again with pols adopt."
# An adopted network has one checkpoint, and it was trained for an unknown number of steps.
_STEP = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """What a normalizer gave.

    Attributes:
      rows: How many rows it has: 1 if it is affine, None for the raw logits.
      auprc: AUPRC of one logit with it, on the validation examples; None without their labels.
      precision: Its precision at recall 0.9, likewise.
      r_squared: The share of the variance of log Z that it explains, on features it was not fitted to.
      error: The root of the mean squared error of log Z, likewise.
    """

    rows: int | None
    auprc: float | None
    precision: float | None
    r_squared: float | None
    error: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdoptedInfo:
    """What ``adopted.json`` holds.

    Attributes:
      num_classes: The number of classes k.
      num_features: The width d of the output layer.
      class_names_sha256: What ties ``class_names.json`` to the network.
      num_examples: How many examples there were to fit normalizers to.
      num_validation: How many validation examples with labels there were.
      tried: What was tried, fewest rows first.
      kept: Which of those is used.
      all_logits: AUPRC and precision at recall 0.9 of all logits; None without validation examples.
      thresholds: The threshold for all classes by some rules; None where none satisfies the rule.
    """

    num_classes: int
    num_features: int
    class_names_sha256: str
    num_examples: int
    num_validation: int
    tried: tuple[Tried, ...]
    kept: int
    all_logits: tuple[float, float] | None
    thresholds: dict[str, float | None]

    def __post_init__(self):
        """Checks what types cannot say."""
        if not 0 <= self.kept < len(self.tried):
            raise ConfigError(f"kept is {self.kept}, and {len(self.tried)} were tried.")


@dataclasses.dataclass(frozen=True)
class Adopted:
    """An adopted network on disk.

    Attributes:
      directory: Where it is.
      info: What ``adopted.json`` says.
      checkpoint: What identifies its output layer.
    """

    directory: Path
    info: AdoptedInfo
    checkpoint: str

    @classmethod
    def open(cls, directory: str | Path) -> "Adopted":
        """Opens what `adopt` wrote.

        Raises:
          RunError: if there is none, or a file of it cannot be used.
          CheckpointError: if its output layer is damaged.
        """
        directory = Path(directory)
        path = directory / "adopted.json"
        info = read_record(AdoptedInfo, path)
        stored = StoredCheckpoint(directory, _STEP)
        try:
            is_same = decode(AdoptedInfo, stored.meta["config"]) == info
        except CheckpointError as error:
            raise CheckpointError(f"{error} {_ADVICE}") from error
        except ConfigError:
            is_same = False
        if not is_same:
            raise RunError(f"{path} does not belong to the network beside it, or was changed. {_ADVICE}")
        return cls(directory, info, stored.identity)

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return str(self.directory)

    @property
    def num_classes(self) -> int:
        """The number of classes k."""
        return self.info.num_classes

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """One name per class."""
        path = self.directory / "class_names.json"
        names: tuple[str, ...] = read_record(tuple[str, ...], path)  # type: ignore[assignment]
        if _names_hash(names) != self.info.class_names_sha256:
            raise RunError(f"{path} is that of another network, or was changed; bring the old one back.")
        return names

    @functools.cached_property
    def normalizer(self) -> Normalizer | None:
        """What is subtracted from its logits; None if the raw logits were chosen."""
        if self.info.tried[self.info.kept].rows is None:
            return None
        normalizer = read_normalizer(
            self.directory,
            checkpoint=self.checkpoint,
            shape=(self.num_classes, self.info.num_features),
            head=lambda: (*self.head_rows().rows(0, self.num_classes), 0),
            advice="adopt the network again with pols adopt",
        )
        if normalizer is None:
            raise RunError(
                f"The normalizer of {self.directory} is missing or that of another network. {_ADVICE}"
            )
        return normalizer

    def head_rows(self) -> HeadRows:
        """The output layer, whose rows are read one at a time."""
        return HeadRows(self.directory, step=_STEP, advice=_ADVICE)

    def thresholds(self, normalizer: Normalizer | None) -> Thresholds:
        """What the thresholds of a score follow from; a `RunError` if there were no validation labels."""
        if not self.info.num_validation:
            raise no_thresholds(self.place)
        return Thresholds.load(
            self.directory,
            checkpoint=score_id(self.checkpoint, normalizer),
            num_classes=self.num_classes,
            normalized=normalizer is not None,
            advice="with pols adopt, or give a number",
        )


def refuse_adopted(directories: Iterable[str | Path]) -> None:
    """Raises a `RunError` if one of the directories is that of an adopted network: its features are not kept."""
    for directory in directories:
        if is_adopted(directory):
            raise RunError(
                f"{directory} is no run, but an adopted network; fit another normalizer with pols adopt --rows."
            )


def adopt(
    head: ForeignHead, out: str | Path, *, rows: str = "choose", seed: int = 0, quiet: bool = False
) -> AdoptedInfo:
    """Fits normalizers to an output layer and writes a directory that `ClassBank.open` opens, at once or not at all.

    Args:
      head: The output layer.
      out: The directory; it must not exist yet.
      rows: As for `climb`.
      seed: Decides start and order of the fits.
      quiet: No progress bar.

    Returns:
      What was tried and kept; `ladder_table` makes a table of it.

    Raises:
      ConfigError: if the directory exists or cannot be made, or as `climb` does.
      FileError: if a file cannot be written; there is no directory then.

    Examples:
      >>> import tempfile
      >>> import numpy as np
      >>> rng = np.random.default_rng(0)
      >>> head = ForeignHead.checked(rng.normal(size=(20, 4)), None, None, features=rng.normal(2.0, size=(100, 4)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     info = adopt(head, f"{folder}/network", quiet=True)
      ...     names = Adopted.open(f"{folder}/network").class_names
      >>> [tried.rows for tried in info.tried], info.kept, len(names)
      ([None, 1], 1, 20)
    """
    check_new(out)
    check_space(Path(out).absolute().parent, 2 * head.kernel.nbytes)
    with fit_progress(quiet=quiet) as report:
        ladder = climb(head, rows=rows, seed=seed, on_progress=report)
    info = _info(head, ladder)
    with new_directory(out) as directory:
        _write(directory, head, ladder, info)
    return info


def ladder_table(info: AdoptedInfo, *, title: str) -> Table:
    """Shows what was tried on an adopted network, and what it is used with."""
    columns = [Column("score", lambda line: line[0])]
    if info.num_validation:
        columns += [
            Column("1-AUPRC", lambda line: None if line[1].auprc is None else 1 - line[1].auprc, "{:.4f}"),
            Column("precision at recall 0.9", lambda line: line[1].precision, "{:.4f}"),
        ]
    columns += [
        Column("log Z: R^2", lambda line: line[1].r_squared, "{:.4f}"),
        Column("log Z: error", lambda line: line[1].error, "{:.3f}"),
    ]
    lines = [(_in_words(tried), tried) for tried in info.tried]
    if info.all_logits is not None:
        lines.append(("all logits", _tried(Rung(None, *info.all_logits))))
    by = "AUPRC on the validation examples" if info.num_validation else "how well log Z is estimated"
    chosen = f" (the fewest rows that are nearly the best, by {by})" if len(info.tried) > 2 else ""
    notes = [
        f"{info.num_classes:,} classes, {info.num_features:,} features; {info.num_examples:,} examples, "
        f"{info.num_validation:,} validation examples with labels.",
        f"Kept: {_in_words(info.tried[info.kept])}{chosen}.",
    ]
    found = [f"{rule}: {value:.3f}" for rule, value in info.thresholds.items() if value is not None]
    if found:
        notes.append(f"One threshold for all classes: {'; '.join(found)}.")
    return Table.of(title, columns, lines, notes=notes)


def _in_words(tried: Tried) -> str:
    return "one logit" if tried.rows is None else f"one logit, {rows_in_words(tried.rows)}"


def _tried(rung: Rung) -> Tried:
    normalizer, auprc, precision = rung
    if normalizer is None:
        return Tried(rows=None, auprc=auprc, precision=precision, r_squared=None, error=None)
    r_squared, error, _ = normalizer.fit
    return Tried(rows=normalizer.num_rows, auprc=auprc, precision=precision, r_squared=r_squared, error=error)


def _info(head: ForeignHead, ladder: Ladder) -> AdoptedInfo:
    thresholds = ladder.thresholds
    shared = {} if thresholds is None else {str(rule): thresholds.shared(rule) for rule in DEFAULT_RULES}
    return AdoptedInfo(
        num_classes=head.num_classes,
        num_features=head.shape[1],
        class_names_sha256=_names_hash(head.class_names),
        num_examples=0 if head.features is None else len(head.features),
        num_validation=0 if head.validation is None else len(head.validation[1]),
        tried=tuple(map(_tried, ladder.rungs)),
        kept=ladder.rungs.index(ladder.chosen),
        all_logits=ladder.all_logits,
        thresholds={rule: value if value == value else None for rule, value in shared.items()},
    )


def _write(directory: Path, head: ForeignHead, ladder: Ladder, info: AdoptedInfo) -> None:
    state = {"params": {"head": {"kernel": head.kernel, "bias": head.bias}}}
    with training.Checkpoints(directory) as checkpoints:
        checkpoints.save(_STEP, state, config=encode(info))
        checkpoints.wait()
    identity = StoredCheckpoint(directory, _STEP).identity
    normalizer = ladder.chosen.normalizer
    if normalizer is not None:
        write_normalizer(directory, normalizer, checkpoint=identity)
    for each in dict.fromkeys((None, normalizer)):
        thresholds = ladder.thresholds if each is normalizer else ladder.thresholds_of(each)
        if thresholds is not None:
            thresholds.save(directory, checkpoint=score_id(identity, each), normalized=each is not None)
    write_json(directory / "class_names.json", list(head.class_names))
    write_json(directory / "adopted.json", encode(info))


def _names_hash(names: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()
