"""Measure the cost of one logit against that of all: flags -> record -> table and figures.

python bench_speed.py                                  # a short set, within five minutes on two cores
python bench_speed.py --preset paper --json speed.json # the paper's Table 3
python bench_speed.py losses --peer torch
python bench_speed.py metrics
python bench_speed.py report speed.json                # the tables of a record again
"""

import dataclasses
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from pols_jax import cli
from pols_jax.benchmarking.logits_speed import run_logits
from pols_jax.benchmarking.loss_speed import run_losses
from pols_jax.benchmarking.metric_speed import run_metrics
from pols_jax.benchmarking.records import Record, Recorder, describe_environment
from pols_jax.benchmarking.settings import LogitsSettings, LossSettings, MetricSettings, find_devices
from pols_jax.benchmarking.speed_figures import draw_speed
from pols_jax.benchmarking.speed_tables import print_sheets, sheets, to_markdown
from pols_jax.training import InterruptedRunError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Show the tables of records again, and draw their figures.

    Attributes:
      records: Files that --json wrote.
      markdown: Where to write the tables.
      figures: A folder for the figures.
    """

    records: Annotated[tuple[Path, ...], tyro.conf.Positional]
    markdown: Path | None = None
    figures: Path | None = None


OUTPUTS = ("json", "markdown", "figures", "profile")  # flags that say where something is written
BENCHMARKS = {
    "logits": (LogitsSettings, run_logits),
    "losses": (LossSettings, run_losses),
    "metrics": (MetricSettings, run_metrics),
}


def main() -> None:
    """Runs the benchmark, or the report, that the first word of the command line names; logits if it names none."""
    arguments = sys.argv[1:]
    verb = arguments.pop(0) if arguments[:1] and arguments[0] in (*BENCHMARKS, "report") else "logits"
    described = (
        f"Benchmarks: {', '.join(BENCHMARKS)} (the first word; logits if there is none), or: report FILE..."
    )
    if verb == "report":
        wanted = tyro.cli(Report, args=arguments)
        show([Record.load(path) for path in wanted.records], wanted.markdown, wanted.figures)
        return
    kind, run = BENCHMARKS[verb]
    settings = tyro.cli(kind, args=arguments, description=f"{kind.__doc__.splitlines()[0]}\n\n{described}")
    if isinstance(settings, LogitsSettings):
        settings = settings.resolved()
    settings.check()
    show([benchmark(verb, settings, run)], settings.markdown, settings.figures)


def benchmark(verb: str, settings: Any, run: Any) -> Record:
    """Runs a benchmark; what was measured is in the record's file even if it is stopped."""
    environment = describe_environment(find_devices(settings.device, getattr(settings, "num_devices", 1)))
    # Where output goes is not part of what was measured.
    values = {name: v for name, v in dataclasses.asdict(settings).items() if name not in OUTPUTS}
    signal.signal(signal.SIGTERM, _stop)
    # A program that starts in the background ignores Ctrl-C unless it says otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console(stderr=True)
    with Recorder(Record(verb, values, environment), settings.json) as recorder:
        run(settings, recorder, say=lambda line: console.print(line, soft_wrap=True, highlight=False))
    return recorder.record


def show(records: list[Record], markdown: Path | None, figures: Path | None) -> None:
    """Prints the tables of records, and writes them and the figures where they are wanted."""
    tables = [sheet for record in records for sheet in sheets(record)]
    print_sheets(tables)
    if markdown is not None:
        markdown.write_text(to_markdown(tables) + "\n", encoding="utf-8")
    for record in records:
        if figures is not None and record.benchmark == "logits":
            draw_speed(record, figures)


def _stop(number, _):
    raise InterruptedRunError("Stopped; the record holds what was measured so far.", number)


if __name__ == "__main__":
    sys.exit(cli.run(main))
