"""Measure what a single logit is worth: run directories -> Tables 1 and 2 on one screen.

python eval_slc.py                                # the newest experiment in runs/
python eval_slc.py runs/mine --markdown table.md --figures figures
"""

import dataclasses
import json
import sys
from pathlib import Path

import tyro

from pols_jax import cli, figures, slc_tables
from pols_jax.evaluation import evaluate
from pols_jax.output_files import check_writable, make_directory, write_text
from pols_jax.runs import Run, find_runs


@dataclasses.dataclass(frozen=True)
class Flags:
    """Measure trained runs with one logit and with all logits.

    Attributes:
      run_dirs: Run directories, or directories of them (of a sweep, the chosen runs count); by default the newest
        experiment in runs/.
      json: Write the records of all runs to this file; each run gets its own slc.json in any case.
      markdown: Write the tables to this file, in Markdown.
      csv: Write one line per run to this file.
      per_class: Write one line per run and class to this file, in CSV.
      figures: Draw figures into this directory, as PNG and SVG.
      figure_class: The class whose logits are drawn; by default the one in the middle of the list of classes.
      data_dir: Where prepared tfds data sets are; by default TFDS_DATA_DIR, or else tfds's own place.
      batch_size: Images that go through the network together.
      quiet: No progress bar.
    """

    run_dirs: tyro.conf.Positional[tuple[Path, ...]] = ()
    json: Path | None = None
    markdown: Path | None = None
    csv: Path | None = None
    per_class: Path | None = None
    figures: Path | None = None
    figure_class: str | None = None
    data_dir: Path | None = None
    batch_size: int = 1024
    quiet: bool = False


def main() -> None:
    """Evaluates what the flags name."""
    flags = tyro.cli(Flags, description=__doc__)
    check_writable(flags.json, flags.markdown, flags.csv, flags.per_class)
    make_directory(flags.figures)
    run_dirs = find_runs(flags.run_dirs)
    for run_dir in run_dirs:
        Run.open(run_dir)  # a run that cannot be used is found before the first one is measured
    options = {
        "data_dir": flags.data_dir,
        "batch_size": flags.batch_size,
        "histograms": flags.figures is not None,
        "histogram_class": flags.figure_class,
        "quiet": flags.quiet,
    }
    records = [evaluate(run_dir, **options) for run_dir in run_dirs]
    slc_tables.slc_table(records)
    slc_tables.threshold_table(records)
    write_text(flags.json, json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    write_text(flags.markdown, slc_tables.slc_markdown(records))
    write_text(flags.csv, slc_tables.slc_csv(records))
    if flags.per_class is not None:
        write_text(flags.per_class, slc_tables.per_class_csv(run_dirs))
    if flags.figures is not None:
        figures.draw_all(run_dirs, flags.figures)


if __name__ == "__main__":
    sys.exit(cli.run(main))
