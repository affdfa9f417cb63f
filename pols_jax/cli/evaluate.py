"""``pols eval``: run directories -> the paper's Tables 1 and 2 on one screen."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from pols_jax.cli.compiling import keep_compiled_programs
from pols_jax.cli.flags import Page, parse
from pols_jax.cli.loading import said_by_loaders
from pols_jax.cli.running import HostFlags, announce, draws_bars
from pols_jax.errors import RunError, unknown_name
from pols_jax.files import check_directory, check_writable, write_json, write_text
from pols_jax.settings import Count, check_settings


@dataclasses.dataclass(frozen=True)
class Flags(HostFlags):
    """Measure trained runs with one logit and with all logits.

    Attributes:
      run_dirs: Run directories, or directories of them (of a sweep, the chosen runs count); by default the newest
        experiment in runs/.
      json: Write the records of all runs to this file; each run gets its own slc.json in any case.
      markdown: Write the tables to this file, in Markdown.
      csv: Write one line per run to this file.
      per_class: Write one line per run and class to this file, in CSV.
      figures: Draw figures into this directory, as PNG and SVG.
      figure_class: The class whose logits are drawn; by default the one in the middle of the list.
      data_dir: Where prepared tfds data sets are; by default TFDS_DATA_DIR, or else tfds's own place.
      use: The checkpoint that is best on the validation split, or the last one.
      batch_size: Images that go through the network together, at most.
      quiet: No progress bar.
      compilation_cache: Keep compiled programs for the next start.
    """

    run_dirs: tyro.conf.Positional[tuple[Path, ...]] = ()
    json: Path | None = None
    markdown: Path | None = None
    csv: Path | None = None
    per_class: Path | None = None
    figures: Path | None = None
    figure_class: str | None = None
    data_dir: Path | None = None
    use: Literal["best", "last"] = "best"
    batch_size: Count = 1024
    quiet: bool = False
    compilation_cache: bool = True

    def __post_init__(self):
        """Checks the values."""
        check_settings(self)


PAGE = Page(
    "pols eval",
    "[RUN_DIR...] [FLAGS]",
    "Measure trained networks with one logit and with all logits, choose thresholds on the validation split, and print "
    "the paper's Tables 1 and 2.",
    """
pols eval                          # the newest experiment in runs/
pols eval runs/mine --markdown table.md --figures figures
""",
    {
        "what to measure": "run_dirs use data_dir batch_size",
        "output": "json markdown csv per_class figures figure_class quiet compilation_cache",
        "hosts": "coordinator num_processes process_id host_timeout",
    },
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluates what the flags name."""
    flags = parse(Flags, arguments, PAGE)
    check_writable(flags.json, flags.markdown, flags.csv, flags.per_class)
    check_directory(flags.figures)
    announce("starting JAX ...")
    if flags.compilation_cache:
        keep_compiled_programs()
    with flags.joined():
        measure(flags)


def measure(flags: Flags) -> None:
    """Evaluates what the flags name, once all hosts are there."""
    import jax

    from pols_jax.evaluation import slc_tables
    from pols_jax.evaluation.adopting import Adopted, ladder_table
    from pols_jax.evaluation.measuring import evaluate
    from pols_jax.tables import print_tables, to_markdown
    from pols_jax.training.run_files import is_adopted
    from pols_jax.training.runs import Run, find_runs

    if any(map(is_adopted, flags.run_dirs)):
        others = [directory for directory in flags.run_dirs if not is_adopted(directory)]
        if others or flags.json or flags.csv or flags.per_class or flags.figures:
            raise RunError(
                "An adopted network was measured when it was adopted; pols eval prints that table again, by itself, and "
                "takes no flag but --markdown."
            )
        tables = [ladder_table(Adopted.open(path).info, title=str(path)) for path in flags.run_dirs]
        print_tables(tables)
        write_text(flags.markdown, to_markdown(tables) + "\n")
        return
    run_dirs = find_runs(flags.run_dirs)
    for run_dir in run_dirs:
        # A run that cannot be used is found before the first one is measured.
        run = Run.open(run_dir, use=flags.use)
        if flags.figure_class is not None and flags.figure_class not in run.class_names:
            raise RunError(unknown_name(f"class of {run_dir}", flags.figure_class, run.class_names))
    options = {
        "data_dir": flags.data_dir,
        "batch_size": flags.batch_size,
        "histograms": flags.figures is not None,
        "histogram_class": flags.figure_class,
        "use": flags.use,
        "quiet": flags.quiet,
    }
    announce(f"measuring {len(run_dirs)} run(s) ...")
    with said_by_loaders(announce, draws_bars=draws_bars(quiet=flags.quiet)):
        records = [evaluate(run_dir, **options) for run_dir in run_dirs]
    if jax.process_index() > 0:
        return  # the first host writes
    tables = [*slc_tables.slc_tables(records), *slc_tables.threshold_tables(records)]
    print_tables(tables)
    write_json(flags.json, [record.to_json() for record in records])
    write_text(flags.markdown, to_markdown(tables) + "\n")
    write_text(flags.csv, slc_tables.slc_csv(records))
    if flags.per_class is not None:
        write_text(flags.per_class, slc_tables.per_class_csv(run_dirs))
    if flags.figures is not None:
        from pols_jax.evaluation import figures

        figures.draw_all(run_dirs, flags.figures)
