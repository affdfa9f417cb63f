"""What people watch while a run goes on: one live line on a terminal, plain lines elsewhere, and ``metrics.jsonl``."""

import dataclasses
import json
import time
import warnings
from pathlib import Path
from typing import Any

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Column

from pols_jax.errors import FileError, RunWarning
from pols_jax.files import finite, read_bytes, reading, write_text
from pols_jax.schema import decode, parse_json

# Where no line can be redrawn, a new one is printed this often, beside those of the validation split.
_SECONDS_BETWEEN_LINES = 60.0
# And one with the time that is left, as soon as so much was trained that it can be told.
_SECONDS_BEFORE_ESTIMATE = 5.0


class Progress:
    """The line that shows how a run is doing: redrawn on a terminal, printed now and then elsewhere.

    Examples:
      >>> import io
      >>> out = io.StringIO()
      >>> with Progress("batch_cross_entropy", 100, console=Console(file=out, width=120)) as progress:
      ...     progress.update(100, loss=0.5, steps_per_second=50.0)
      ...     progress.validated(accuracy=0.9, auprc=0.8, violation_rate=0.01)
      >>> print(out.getvalue().strip())
      batch_cross_entropy  step 100/100  50.0 steps/s  loss 0.5000  accuracy 0.900  1-AUPRC 0.200  violations 0.0100
    """

    def __init__(self, title: str, total_steps: int, *, quiet: bool = False, console: Console | None = None):
        self.title, self.total_steps, self.quiet = title, total_steps, quiet
        self.console = console or Console()
        self._step, self._training, self._validation = 0, "", ""
        self._last_line, self._interval = time.monotonic(), _SECONDS_BEFORE_ESTIMATE
        self._live = _live_line(self.console) if self.console.is_terminal and not quiet else None
        self._task = rich_progress.TaskID(0)

    def __enter__(self) -> "Progress":
        if self._live:
            self._task = self._live.add_task(self.title, total=self.total_steps, state="starting ...")
            self._live.start()
        return self

    def __exit__(self, *exc_info) -> None:
        if self._live:
            self._live.stop()

    def waiting(self, what: str) -> None:
        """Says what takes its time before the first step."""
        if self._live:
            self._live.update(self._task, state=f"{what} ...")
        else:
            self.note(f"{self.title}: {what} ...")

    def update(self, step: int, *, loss: float, steps_per_second: float) -> None:
        """Shows a new step."""
        if not self._training:  # the first dispatch compiles, and its speed tells nothing
            self._last_line = time.monotonic()
        speed = f"{steps_per_second:{'.1f' if steps_per_second >= 1 else '.3g'}} steps/s"
        self._step, self._training = step, f"{speed}  loss {loss:.4f}"
        time_left = f"{duration((self.total_steps - step) / steps_per_second)} left"
        if self._live:
            self._live.update(self._task, completed=step, state=f"{self._training}  {time_left}")
        elif time.monotonic() - self._last_line > self._interval:
            self._interval = _SECONDS_BETWEEN_LINES
            self.note(f"{self._line()}  {time_left}")

    def validated(self, *, accuracy: float, auprc: float, violation_rate: float) -> None:
        """Shows a new look at the validation split; on a terminal this line stays."""
        self._validation = (
            f"accuracy {accuracy:.3f}  1-AUPRC {1 - auprc:.3f}  violations {violation_rate:.4f}"
        )
        self.note(self._line())

    def note(self, text: str) -> None:
        """Says something that the user should know."""
        self._last_line = time.monotonic()
        if not self.quiet:
            self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def warn(self, text: str) -> None:
        """Says something that went wrong, even when quiet."""
        self.console.print(text, style="yellow", soft_wrap=True, highlight=False, markup=False)

    def _line(self) -> str:
        parts = (self.title, f"step {self._step}/{self.total_steps}", self._training, self._validation)
        return "  ".join(filter(None, parts))


def duration(seconds: float) -> str:
    """Writes a number of seconds as days, hours, minutes and seconds."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d " * (days > 0) + f"{hours:02}:{minutes:02}:{seconds:02}"


def _live_line(console: Console) -> rich_progress.Progress:
    """One line as wide as the terminal; where that is narrow the title is cut, and not the time left."""
    return rich_progress.Progress(
        rich_progress.TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
        rich_progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
        rich_progress.TextColumn("{task.fields[state]}", markup=False, table_column=Column(no_wrap=True)),
        console=console,
        refresh_per_second=4,
        transient=True,
        expand=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsEntry:
    """What a line of ``metrics.jsonl`` holds.

    Attributes:
      step: How many steps were done.
      learning_rate: That of the last of them.
      loss: The mean over the steps since the line before.
      accuracy: The same, on the training images as they were seen.
      steps_per_second: The same.
      validation: What was measured on the validation split.
      diverged: Whether the run ended here because its loss was no longer finite.
      stopped: Whether the run ended here because its accuracy had not improved for long enough.
    """

    step: int
    learning_rate: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    steps_per_second: float | None = None
    validation: dict[str, float] = dataclasses.field(default_factory=dict)
    diverged: bool = False
    stopped: bool = False


def ended_early(record: dict[str, Any], newest_step: int | None) -> bool:
    """Whether a run ended with this record, before all its steps were done, and has the checkpoint of that step."""
    return bool(record.get("stopped")) and record["step"] == newest_step


class MetricsLog:
    """``metrics.jsonl``: one JSON object per line, each a `MetricsEntry`.

    Args:
      path: The file; it is created with the first record.
      first_step: Records after this step are removed first: a resumed run writes them again.
    """

    def __init__(self, path: Path, *, first_step: int | None = None):
        self.path = path
        if first_step is not None and path.exists():
            kept = [record for record in self.records() if record["step"] <= first_step]
            write_text(path, "".join(map(_line, kept)))

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(record))
        except OSError as error:
            raise FileError(f"{self.path} could not be written ({error.strerror}).") from error

    def records(self) -> list[dict[str, Any]]:
        """All records that can be read.

        A last line that was cut off by a crash is left out in silence, and other lines that are no records with a
        `RunWarning`.
        """
        with reading(self.path):
            try:
                *lines, rest = read_bytes(self.path).split(b"\n")
            except FileNotFoundError:
                return []
        records, wrong = [], []
        for number, line in enumerate([*lines, rest], 1):
            try:
                record = parse_json(line)
                known = MetricsEntry.__dataclass_fields__
                decode(MetricsEntry, {n: v for n, v in dict(record).items() if n in known})
                records.append(record)
            except (ValueError, TypeError) as error:
                if number <= len(lines):
                    wrong.append((number, str(error).rstrip(".")))
        if wrong:
            (number, why), count = wrong[0], len(wrong)
            more = f", and {count - 1} more" if count > 1 else ""
            warnings.warn(
                f"{self.path}: line {number} is no record ({why}){more}; the others are used.",
                RunWarning,
                stacklevel=2,
            )
        return records


def _line(record: dict[str, Any]) -> str:
    return json.dumps(finite(record)) + "\n"
