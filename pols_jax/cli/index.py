"""``pols index``: the features of many pictures, computed once, to be asked about any class."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from pols_jax.cli.compiling import keep_compiled_programs
from pols_jax.cli.flags import Page, parse
from pols_jax.cli.running import announce, listed_paths
from pols_jax.errors import ConfigError, printable, shell_word


@dataclasses.dataclass(frozen=True)
class Flags:
    """Compute the features of pictures once.

    Attributes:
      run_dir: A trained run, or an experiment that consists of one; or an index, to export it.
      paths: Files, folders, patterns, or - for a list of paths on standard input.
      out: The directory of the index; what is there already is brought up to date.
      dtype: What features are stored in; by default what the index has, or float32.
      shard: I/N: take the I-th of N parts of the pictures, for N machines with an index each.
      export: Write everything into one file INDEX/export.parquet as well, for a vector database.
      quiet: No progress bar.
      compilation_cache: Keep compiled programs for the next start.
    """

    run_dir: tyro.conf.Positional[Path]
    paths: tyro.conf.Positional[tuple[str, ...]] = ()
    out: Path | None = None
    dtype: Literal["float32", "float16"] | None = None
    shard: str = "1/1"
    export: Literal["parquet"] | None = None
    quiet: bool = False
    compilation_cache: bool = True


PAGE = Page(
    "pols index",
    "RUN_DIR PATH... --out INDEX [FLAGS]",
    "Compute the features of every picture once, so that pols search INDEX answers for any class without looking at them "
    "again. Run it again to take in new, changed and vanished pictures; after a kill, it goes on where it was.",
    """
pols index runs/mine photos --out photos.index
pols search photos.index --query "digit seven"
pols index runs/mine photos --out part1 --shard 1/2     # on one machine, and 2/2 on another
pols search part1 part2 --query "digit seven"
pols index photos.index --export parquet
""",
    {"what to index": "run_dir paths shard", "output": "out dtype export quiet compilation_cache"},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Brings an index up to date; returns 1 if files were skipped."""
    flags = parse(Flags, arguments, PAGE)
    shard = _shard(flags.shard)
    announce("starting JAX ...")
    if flags.compilation_cache:
        keep_compiled_programs()
    from pols_jax.evaluation.measuring import progress_bars
    from pols_jax.search.class_bank import ClassBank
    from pols_jax.search.index import FeatureIndex, is_index, update_index
    from pols_jax.search.index_export import export_index
    from pols_jax.search.pictures import listed_pictures

    if is_index(flags.run_dir):
        if flags.paths or flags.out or not flags.export:
            raise ConfigError(
                f"{flags.run_dir} is an index; name the run first: pols index RUN_DIR PATH... --out {shell_word(flags.run_dir)}."
            )
        index = FeatureIndex.open(flags.run_dir)
        print(f"Exported {printable(export_index(index, ClassBank.open(index.run_dir), flags.run_dir))}.")
        return 0
    if flags.out is None:
        raise ConfigError("Name the directory of the index: --out INDEX.")
    if not flags.paths:
        raise ConfigError("Name the pictures to index: files, folders, patterns, or - for a list.")
    announce(f"opening {flags.run_dir} ...")
    bank = ClassBank.open(flags.run_dir)
    sources = [path for path in flags.paths if path != "-"]
    listed = listed_pictures(listed_paths()) if "-" in flags.paths else ()

    def skip(_: str, why: str) -> None:
        print(f"skipped: {why}", file=sys.stderr)

    announce("looking for pictures ...")
    with progress_bars(quiet=flags.quiet) as progress:
        task = progress.add_task("pictures", total=None)
        update = update_index(
            bank,
            [*sources, *listed],
            flags.out,
            dtype=flags.dtype,
            shard=shard,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            on_skip=skip,
        )
        index = FeatureIndex.open(flags.out)
        if bank.estimator is not None:
            progress.update(task, description="normalizer", total=None)
            index.normalizers(bank)
    print(
        f"{printable(flags.out)}: {update.num_pictures:,} pictures; {len(update.added):,} new, {len(update.changed):,} changed, "
        f"{len(update.vanished):,} vanished, {update.num_broken:,} broken."
    )
    if flags.export:
        print(f"Exported {printable(export_index(index, bank, flags.out))}.")
    print(f"Next: pols search {shell_word(flags.out)} --query NAME")
    return 1 if update.broken else 0


def _shard(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    shard, num_shards = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= shard <= num_shards:
        raise ConfigError(f"--shard is I/N with I from 1 to N, such as 1/4, got {text!r:.40}.")
    return shard - 1, num_shards
