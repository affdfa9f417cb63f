"""``pols bench``: the cost of one logit against that of all; flags -> record -> tables and figures."""

import dataclasses
import functools
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from pols_jax.benchmarking.settings import (
    LogitsSettings,
    LossSettings,
    MetricSettings,
    NetworkSettings,
    Settings,
    find_devices,
)
from pols_jax.cli.flags import Page, parse
from pols_jax.cli.running import announce
from pols_jax.errors import ConfigError, unknown_name
from pols_jax.files import check_directory, check_writable, write_text


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


OUTPUTS = ("json", "markdown", "figures", "profile", "append")
"""Flags that say where something is written: no part of what was measured."""

BENCHMARKS: dict[str, tuple[type[Settings], str]] = {
    "logits": (LogitsSettings, "logits_speed:run_logits"),
    "losses": (LossSettings, "loss_speed:run_losses"),
    "metrics": (MetricSettings, "metric_speed:run_metrics"),
    "networks": (NetworkSettings, "network_speed:run_networks"),
}
"""Every benchmark: its flags, and the function of `pols_jax.benchmarking` that measures."""

EXAMPLES = """
pols bench                                    # a short set, within five minutes on two cores
pols bench --preset paper --json speed.json   # the paper's Table 3
pols bench losses --peer torch
pols bench metrics
pols bench networks --peer torch              # forward passes of all networks against PyTorch
pols bench report speed.json                  # the tables of a record again
"""
GROUPS = {
    "what to measure": "preset networks program examples classes batch_size width convolutions batches repetitions "
    "max_scores programs dtype device num_devices peer",
    "output": f"records {' '.join(OUTPUTS)}",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark, or the report, that the first word of the command line names; logits if it names none."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = words.pop(0) if words[:1] and not words[0].startswith("-") else "logits"
    if verb not in (*BENCHMARKS, "report"):
        raise ConfigError(
            unknown_name("benchmark", verb, (*BENCHMARKS, "report")) + " See: pols bench --help."
        )
    if verb == "report":
        report = parse(Report, words, _page(verb, "RECORD... [FLAGS]", Report))
        if not report.records:
            raise ConfigError("Name the records to show: pols bench report FILE...")
        check_writable(report.markdown)
        check_directory(report.figures)
        from pols_jax.benchmarking.records import Record

        show([Record.load(path) for path in report.records], report.markdown, report.figures)
        return
    kind, function = BENCHMARKS[verb]
    settings = parse(kind, words, _page(verb, "[FLAGS]", kind))
    if isinstance(settings, LogitsSettings):
        settings = settings.resolved()
    announce("starting JAX ...")
    settings.check()
    run = pkgutil.resolve_name(f"pols_jax.benchmarking.{function}")
    show([benchmark(verb, settings, run)], settings.markdown, settings.figures)


def benchmark(verb: str, settings: Any, run: Any) -> Any:
    """Runs a benchmark; what was measured is in the record's file even if it is stopped."""
    from rich.console import Console

    from pols_jax.benchmarking.records import Record, Recorder, describe_environment

    environment = describe_environment(find_devices(settings.device, getattr(settings, "num_devices", 1)))
    values = {name: v for name, v in dataclasses.asdict(settings).items() if name not in OUTPUTS}
    console = Console(stderr=True, markup=False, emoji=False)
    say = functools.partial(console.print, soft_wrap=True, highlight=False)
    try:
        record = Record(verb, values, environment)
        if getattr(settings, "append", False) and settings.json.exists():
            record = record.added_to(Record.load(settings.json))
        with Recorder(record, settings.json) as recorder:
            run(settings, recorder, say=say)
    except KeyboardInterrupt:
        if settings.json is not None:
            say(f"{settings.json} holds what was measured so far.")
        raise
    return recorder.record


def show(records: Sequence[Any], markdown: Path | None, figures: Path | None) -> None:
    """Prints the tables of records, and writes them and the figures where they are wanted."""
    from pols_jax.benchmarking.speed_figures import draw_speed
    from pols_jax.benchmarking.speed_tables import speed_tables
    from pols_jax.tables import print_tables, to_markdown

    tables = [table for record in records for table in speed_tables(record)]
    print_tables(tables)
    write_text(markdown, to_markdown(tables) + "\n")
    for record in records:
        if figures is not None and record.benchmark == "logits":
            draw_speed(record, figures)


def _page(verb: str, usage: str, kind: type) -> Page:
    about = (kind.__doc__ or "").partition("\n")[0]
    if verb != "logits":
        return Page(f"pols bench {verb}", usage, about, EXAMPLES, GROUPS)
    more = "pols bench losses --help, metrics --help and networks --help list the flags of the others."
    return Page("pols bench", f"[{'|'.join(BENCHMARKS)}] {usage}", about, EXAMPLES, GROUPS, more)
