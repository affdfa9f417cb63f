"""What people watch while a run goes on: one live line on a terminal, plain lines elsewhere, and ``metrics.jsonl``."""

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text


class Progress:
    """The line that shows how a run is doing.

    Args:
      title: What is being trained.
      total_steps: The number of steps of the run.
      quiet: Print only what goes wrong.
      console: Where to print; standard output if None.

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
        self._step, self._fields, self._validation = 0, {}, {}
        live = self.console.is_terminal and not quiet
        self._live = Live(console=self.console, refresh_per_second=4, transient=True) if live else None

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc_info) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, *, loss: float, steps_per_second: float) -> None:
        """Shows a new step."""
        self._step, self._fields = step, {"loss": loss, "steps_per_second": steps_per_second}
        if self._live:
            self._live.update(Text(self.line(with_time_left=True), overflow="ellipsis", no_wrap=True))

    def validated(self, *, accuracy: float, auprc: float, violation_rate: float) -> None:
        """Shows a new look at the validation split; on a terminal this line stays."""
        self._validation = {"accuracy": accuracy, "auprc": auprc, "violation_rate": violation_rate}
        if not self.quiet:
            self.console.print(self.line(), soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        """Says something that the user should know."""
        if not self.quiet:
            self.console.print(text, soft_wrap=True, highlight=False)

    def warn(self, text: str) -> None:
        """Says something that went wrong, even when quiet."""
        self.console.print(text, style="yellow", soft_wrap=True, highlight=False)

    def line(self, *, with_time_left: bool = False) -> str:
        """The line as text."""
        parts = [self.title, f"step {self._step}/{self.total_steps}"]
        if rate := self._fields.get("steps_per_second"):
            parts.append(f"{rate:.1f} steps/s")
        if "loss" in self._fields:
            parts.append(f"loss {self._fields['loss']:.4f}")
        if self._validation:
            parts.append(f"accuracy {self._validation['accuracy']:.3f}")
            parts.append(f"1-AUPRC {1 - self._validation['auprc']:.3f}")
            parts.append(f"violations {self._validation['violation_rate']:.4f}")
        if with_time_left and rate:
            left = time.gmtime((self.total_steps - self._step) / rate)
            parts.append(time.strftime("%H:%M:%S left", left))
        return "  ".join(parts)


class MetricsLog:
    """``metrics.jsonl``: one JSON object per line, each with a ``step``.

    Args:
      path: The file; it is created with the first record.
      first_step: Records after this step are removed first: a resumed run writes them again.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     log = MetricsLog(Path(folder) / "metrics.jsonl")
      ...     log.write({"step": 10, "loss": 0.5})
      ...     log.records()
      [{'step': 10, 'loss': 0.5}]
    """

    def __init__(self, path: Path, *, first_step: int | None = None):
        self.path = path
        if first_step is not None and path.exists():
            kept = [record for record in self.records() if record["step"] <= first_step]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
            os.replace(temporary, path)

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record."""
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All records; a last line that was cut off by a crash is left out."""
        if not self.path.exists():
            return []
        records = []
        for line in self.path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records
