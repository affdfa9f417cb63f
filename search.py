"""Show every picture of a class: one logit per class that is asked for, whatever the number of classes.

python search.py runs/mine photos --query "digit seven"
find photos -name '*.jpg' | python search.py runs/mine - --query cat --query dog --sheet hits.png
python search.py runs/mine --split test --query "digit seven" --threshold precision=0.95
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

import tyro

from pols_jax import cli
from pols_jax.class_bank import ClassBank
from pols_jax.config import ConfigError
from pols_jax.output_files import check_writable, write_text
from pols_jax.searching import (
    Findings,
    Hit,
    Picture,
    check_sheet,
    find_pictures,
    listed_pictures,
    make_queries,
    search,
    split_pictures,
)
from pols_jax.thresholds import Rule


@dataclasses.dataclass(frozen=True)
class Flags:
    """Show every picture of a class.

    Attributes:
      run_dir: A trained run.
      paths: Files, folders, patterns, or - for a list of paths on standard input, taken as they arrive.
      query: The name of a class, in upper or lower case; may be given several times.
      threshold: recall=R, precision=P or f1, chosen on the validation split, or a number.
      split: Search a split of the run's own data set instead of files.
      sheet: Draw the best hits into this image file.
      json: Write all hits to this file.
      data_dir: Where prepared tfds data sets are, for --split.
      quiet: Do not print hits as they come, only the best at the end.
    """

    run_dir: tyro.conf.Positional[Path]
    paths: tyro.conf.Positional[tuple[str, ...]] = ()
    query: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    threshold: str = "recall=0.9"
    split: Literal["train", "validation", "test"] | None = None
    sheet: Path | None = None
    json: Path | None = None
    data_dir: Path | None = None
    quiet: bool = False


def pictures(flags: Flags, bank: ClassBank) -> Iterator[Picture]:
    """The pictures that the flags name; what is wrong with them is raised at once."""
    if flags.split is not None:
        if flags.paths:
            raise ConfigError("Give either PATHs or --split, not both.")
        dataset = bank.run.load_dataset(data_dir=flags.data_dir)
        return split_pictures(getattr(dataset, flags.split), flags.split, dataset.class_names)
    if not flags.paths:
        raise ConfigError(
            "Name the pictures to search: files, folders, patterns, - for a list, or --split test."
        )
    sources = [listed_pictures(sys.stdin) if path == "-" else find_pictures([path]) for path in flags.paths]
    return chain.from_iterable(sources)


def show(hit: Hit) -> None:
    """Prints a hit."""
    print(f"{hit.logit:9.3f} >= {hit.query.threshold.value:.3f}  {hit.query.name}  {hit.picture}", flush=True)


def report(flags: Flags, findings: Findings) -> None:
    """Prints the hits, best first, and writes the files that are wanted."""
    print(f"{len(findings.hits)} hits in {findings.num_pictures} pictures, best first:")
    for hit in findings.best_first():
        show(hit)
    if findings.skipped:
        print(f"Skipped {len(findings.skipped)} of {findings.num_pictures} pictures.", file=sys.stderr)
    if flags.sheet is not None:
        findings.sheet().save(flags.sheet)
    write_text(flags.json, json.dumps(findings.to_json(), indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    """Searches; returns 1 if files were skipped."""
    flags = tyro.cli(Flags, description=__doc__)
    if not flags.query:
        raise ConfigError("Say what to look for: --query NAME.")
    rule = Rule.parse(flags.threshold)
    check_sheet(flags.sheet)
    check_writable(flags.sheet, flags.json)
    bank = ClassBank.open(flags.run_dir)
    queries, findings = make_queries(bank, flags.query, rule), Findings()
    for query in queries:
        print(
            f"{query.name}: {rule}, threshold {query.threshold.value:.3f} ({query.threshold.origin})",
            flush=True,
        )
    try:
        search(
            bank,
            queries,
            pictures(flags, bank),
            on_hit=(lambda hit: None) if flags.quiet else show,
            on_skip=lambda name, why: print(f"skipped: {why}", file=sys.stderr),
            findings=findings,
        )
    except KeyboardInterrupt:
        report(flags, findings)  # a live feed ends like this
        raise
    report(flags, findings)
    return 1 if findings.skipped else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
