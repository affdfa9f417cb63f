"""Show every picture of a class: one logit per class that is asked for, whatever the number of classes.

python search.py runs/mine photos --query "digit seven"
find photos -name '*.jpg' | python search.py runs/mine - --query cat --query dog --sheet hits.png
python search.py runs/mine --split test --query "digit seven" --threshold precision=0.95
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Literal

import tyro

from pols_jax import cli
from pols_jax.class_bank import ClassBank
from pols_jax.config import ConfigError
from pols_jax.output_files import check_writable, write_text
from pols_jax.picture_sources import named_pictures
from pols_jax.searching import Findings, Hit, check_sheet, make_queries, search
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
    pictures = named_pictures(
        flags.paths, split=flags.split, run=bank.run, lines=sys.stdin, data_dir=flags.data_dir
    )
    for query in queries:
        print(
            f"{query.name}: {rule}, threshold {query.threshold.value:.3f} ({query.threshold.origin})",
            flush=True,
        )

    def show(hit: Hit) -> None:
        if not flags.quiet:
            print(hit, flush=True)

    def warn(_: str, why: str) -> None:
        print(f"skipped: {why}", file=sys.stderr)

    try:
        search(bank, queries, pictures, on_hit=show, on_skip=warn, findings=findings)
    finally:  # after Ctrl-C as well, which is how a live feed ends
        if flags.sheet is not None:
            findings.sheet().save(flags.sheet)
        write_text(flags.json, json.dumps(findings.to_json(), indent=1, ensure_ascii=False) + "\n")
        if findings.skipped:
            print(f"Skipped {len(findings.skipped)} of {findings.num_pictures} pictures.", file=sys.stderr)
        print(findings.summary())
    return 1 if findings.skipped else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
