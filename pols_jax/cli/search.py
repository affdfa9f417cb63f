"""``pols search``: one logit per class that is asked for, whatever the number of classes."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

import tyro

from pols_jax.cli.compiling import keep_compiled_programs
from pols_jax.cli.flags import Page, parse
from pols_jax.cli.loading import said_by_loaders
from pols_jax.cli.running import announce, draws_bars, listed_paths
from pols_jax.errors import ConfigError, RunError, printable, shell_word
from pols_jax.files import check_writable, write_bytes, write_json

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from pols_jax.search import ClassBank, FeatureIndex


@dataclasses.dataclass(frozen=True)
class Flags:
    """Find every picture of a class.

    Attributes:
      run_dir: A trained run, or an experiment that consists of one; or an index.
      paths: Files, folders, patterns, or - for a list of paths on standard input, taken as they arrive; or indexes.
      query: The name of a class, in upper or lower case, or a character; may be given several times.
      list_classes: List the classes whose names hold a text or match a pattern, and all of them without one.
      threshold: recall=R, precision=P or f1, chosen on the validation split, or a number.
      raw: Use the logits as they are, without the normalizer.
      use: The checkpoint that is best on the validation split, or the last one; by default the one that was evaluated.
      split: Search a split of the run's own data set instead of files.
      sheet: Draw the best hits into this image file.
      json: Write all hits to this file.
      data_dir: Where prepared tfds data sets are, for --split.
      quiet: Do not print hits as they come, but all at the end, best first.
      compilation_cache: Keep compiled programs for the next start.
    """

    run_dir: tyro.conf.Positional[Path]
    paths: tyro.conf.Positional[tuple[str, ...]] = ()
    query: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    list_classes: tuple[str, ...] | None = None
    threshold: str = "recall=0.9"
    raw: bool = False
    use: Literal["best", "last"] | None = None
    split: Literal["train", "validation", "test"] | None = None
    sheet: Path | None = None
    json: Path | None = None
    data_dir: Path | None = None
    quiet: bool = False
    compilation_cache: bool = True


PAGE = Page(
    "pols search",
    "RUN_DIR|INDEX PATH... --query NAME [FLAGS]",
    "Find every picture of a class: one logit per class that is asked for, whatever the number of classes.",
    """
pols search runs/mine photos --query "digit seven"
find photos -name '*.jpg' | pols search runs/mine - --query cat --query dog --sheet hits.png
pols search runs/mine --split test --query "digit seven" --threshold precision=0.95
pols search photos.index --query 7                         # what pols index made of photos
pols search runs/mine --list-classes "greek*letter"
""",
    {
        "what to search": "run_dir paths split data_dir",
        "what to find": "query list_classes threshold raw use",
        "output": "sheet json quiet compilation_cache",
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches; returns 1 if files were skipped."""
    flags = parse(Flags, arguments, PAGE)
    if not flags.query and flags.list_classes is None:
        raise ConfigError("Say what to look for: --query NAME.")
    announce("starting JAX ...")
    if flags.compilation_cache:
        keep_compiled_programs()
    from pols_jax.metrics.thresholds import Rule
    from pols_jax.search.pictures import named_pictures
    from pols_jax.search.searching import (
        Findings,
        Hit,
        check_sheet,
        encoded_sheet,
        make_queries,
        search,
        search_index,
    )
    from pols_jax.training.run_normalizer import rows_in_words

    rule = Rule.parse(flags.threshold)
    check_sheet(flags.sheet)
    check_writable(flags.sheet, flags.json)
    bank, index = _opened(flags)
    if flags.list_classes is not None:
        return _list_classes(bank, flags.list_classes)
    if index is None:
        _ = bank.image_shape  # an adopted network cannot look at pictures
    if bank.normalizer is not None:
        announce(f"with its normalizer ({rows_in_words(bank.normalizer.num_rows)}); --raw leaves it out")
    queries, findings = make_queries(bank, flags.query, rule), Findings()
    for query in queries:
        bank.row(query.class_id)  # a damaged row is found before the first picture
    pictures = iter(())
    if index is None:
        with said_by_loaders(announce, draws_bars=draws_bars(quiet=flags.quiet)):
            pictures = named_pictures(
                flags.paths, split=flags.split, bank=bank, lines=listed_paths(), data_dir=flags.data_dir
            )
    for query in queries:
        print(
            f"{printable(query.name)}: {rule}, threshold {query.threshold.value:.3f} ({query.threshold.origin})",
            flush=True,
        )

    line, task = _live_line(quiet=flags.quiet)

    def say(text: str, file: TextIO) -> None:
        if file.isatty() and not line.disable:  # above the line
            line.console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)
        else:
            print(text, file=file, flush=True)

    def show(hit: Hit) -> None:
        if not flags.quiet:
            say(str(hit), sys.stdout)

    def warn(_: str, why: str) -> None:
        say(f"skipped: {why}", sys.stderr)

    try:
        if index is None:
            with line:
                search(
                    bank,
                    queries,
                    pictures,
                    on_hit=show,
                    on_skip=warn,
                    on_progress=lambda findings: line.update(task, description=findings.summary()),
                    findings=findings,
                )
        else:
            findings = search_index(bank, queries, index, on_skip=warn)
    finally:  # after a signal as well: Ctrl-C is how a live feed ends
        write_json(flags.json, findings.to_json())
        if flags.sheet is not None:
            if index is not None:
                findings.draw(bank.image_shape)
            write_bytes(flags.sheet, encoded_sheet(findings.sheet(), flags.sheet))
        if flags.quiet or index is not None:
            print(*findings.best_first(), sep="\n", end="\n" * bool(findings.hits))
        if findings.skipped:
            print(f"Skipped {len(findings.skipped)} of {findings.num_pictures} pictures.", file=sys.stderr)
        print(findings.summary())
    return 1 if findings.skipped else 0


def _live_line(*, quiet: bool) -> "tuple[Progress, TaskID]":
    """A line on a terminal that says how far the search is."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    line = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # it stays what it is: a file or a pipe gets its hits
        disable=not draws_bars(quiet=quiet),
    )
    return line, line.add_task("looking ...", total=None)


def _opened(flags: Flags) -> "tuple[ClassBank, FeatureIndex | None]":
    """The network, and the indexes if some are named; the network of an index if no other is."""
    from pols_jax.search.class_bank import ClassBank
    from pols_jax.search.pictures import is_index

    words = [str(flags.run_dir), *flags.paths]
    indexes = [word for word in words if is_index(word)]
    if not indexes:
        announce(f"opening {flags.run_dir} ...")
        return ClassBank.open(flags.run_dir, raw=flags.raw, use=flags.use), None
    others = [word for word in words if word not in indexes]
    if others not in ([], words[:1]):
        raise ConfigError(
            f"Name either indexes or pictures; {indexes[0]} is an index, and {others[-1]} is none."
        )
    if flags.split is not None:
        raise ConfigError("Give either an index or --split, not both.")
    from pols_jax.search.index import FeatureIndex

    announce(f"opening {', '.join(indexes)} ...")
    index = FeatureIndex.open(*indexes)
    try:
        bank = ClassBank.open(others[0] if others else index.run_dir, raw=flags.raw, use=flags.use)
    except RunError as error:
        if others:
            raise
        raise RunError(
            f"{error} If the run of {indexes[0]} has moved: pols search RUN_DIR {shell_word(indexes[0])}."
        ) from error
    index.check(bank)
    return bank, index


def _list_classes(bank: "ClassBank", patterns: Sequence[str]) -> int:
    found = sorted({i for pattern in patterns or [""] for i in bank.find_classes(pattern)})
    if not found:
        raise ConfigError(f"No class of {bank.place} matches {' or '.join(map(repr, patterns))}.")
    for class_id in found:
        print(f"{class_id:6}  {printable(bank.names[class_id])}")
    return 0
