"""``pols export``: a trained network as files that JAX and NumPy can use without this package."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from pols_jax.cli.flags import Page, parse
from pols_jax.cli.running import announce
from pols_jax.errors import ConfigError, shell_word


@dataclasses.dataclass(frozen=True)
class Flags:
    """Export a trained network.

    Attributes:
      run_dir: A trained run, or an experiment that consists of one.
      out: The directory to write; it must not exist yet.
      rows_dtype: What the rows of the classes are stored in; int8 has a scale for each row.
      raw: Leave the normalizer out.
      use: The checkpoint that is best on the validation split, or the last one; by default the one that was evaluated.
      quiet: No progress bar.
    """

    run_dir: tyro.conf.Positional[Path]
    out: Path | None = None
    rows_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    raw: bool = False
    use: Literal["best", "last"] | None = None
    quiet: bool = False


PAGE = Page(
    "pols export",
    "RUN_DIR --out DIR [FLAGS]",
    "Write a trained network as files that JAX and NumPy can use without this package: one StableHLO program that serves every "
    "class, the rows of the classes, their names and thresholds.",
    """
pols export runs/mine --out exported
pols export runs/mine --out exported --rows-dtype int8   # a quarter of the bytes
pols search exported photos --query "digit seven"        # an export is searched as a run is
""",
    {"what to export": "run_dir rows_dtype raw use", "output": "out quiet"},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Exports what the flags name."""
    flags = parse(Flags, arguments, PAGE)
    if flags.out is None:
        raise ConfigError("Say where to write it: --out DIR.")
    announce("starting JAX ...")
    from pols_jax.search.exporting import export

    announce(f"exporting {flags.run_dir} ...")
    manifest = export(
        flags.run_dir, flags.out, rows_dtype=flags.rows_dtype, raw=flags.raw, use=flags.use, quiet=flags.quiet
    )
    width = max(map(len, manifest.files))
    for name, file in manifest.files.items():
        print(f"{name:{width}}  {file.num_bytes:>14,} bytes")
    print(
        f"{manifest.num_classes:,} classes, {manifest.num_features:,} features, for {', '.join(manifest.platforms)}. "
        f"Next: pols search {shell_word(flags.out)} PATH... --query NAME",
        flush=True,
    )
