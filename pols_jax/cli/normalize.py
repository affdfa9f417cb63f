"""``pols normalize``: one logit as good as all of them, for a run that is trained already."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from pols_jax.cli.compiling import keep_compiled_programs
from pols_jax.cli.flags import Page, parse
from pols_jax.cli.loading import said_by_loaders
from pols_jax.cli.running import HostFlags, announce, draws_bars
from pols_jax.errors import shell_word


@dataclasses.dataclass(frozen=True)
class Flags(HostFlags):
    """Fit normalizers to trained runs.

    Attributes:
      run_dirs: Run directories, or directories of them; by default the newest experiment in runs/.
      rows: How many rows the normalizer has: a number, affine (which costs nothing), or choose, on the validation split.
      seed: Decides start and order of the fit.
      use: The checkpoint that is best on the validation split, or the last one.
      data_dir: Where prepared tfds data sets are; by default TFDS_DATA_DIR, or else tfds's own place.
      quiet: No progress bar.
      compilation_cache: Keep compiled programs for the next start.
    """

    run_dirs: tyro.conf.Positional[tuple[Path, ...]] = ()
    rows: str = "256"
    seed: int = 0
    use: Literal["best", "last"] = "best"
    data_dir: Path | None = None
    quiet: bool = False
    compilation_cache: bool = True


PAGE = Page(
    "pols normalize",
    "[RUN_DIR...] [FLAGS]",
    "Fit a normalizer to a trained network: what is subtracted from one logit to make it as good as all of them. It takes no "
    "labels and no new training. Evaluation and search use it from then on.",
    """
pols normalize runs/mine               # 256 rows
pols normalize runs/mine --rows choose # the fewest of affine, 256 and 1,024 rows that are nearly the best
""",
    {
        "what to fit": "run_dirs rows use seed data_dir",
        "output": "quiet compilation_cache",
        "hosts": "coordinator num_processes process_id host_timeout",
    },
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fits what the flags name."""
    flags = parse(Flags, arguments, PAGE)
    announce("starting JAX ...")
    if flags.compilation_cache:
        keep_compiled_programs()
    with flags.joined():
        fit(flags)


def fit(flags: Flags) -> None:
    """Fits what the flags name, once all hosts are there."""
    import jax

    from pols_jax.evaluation.adopting import refuse_adopted
    from pols_jax.evaluation.normalizing import check_rows, normalize
    from pols_jax.training.runs import Run, find_runs

    check_rows(flags.rows)
    refuse_adopted(flags.run_dirs)
    run_dirs = find_runs(flags.run_dirs)
    for run_dir in run_dirs:
        Run.open(run_dir, use=flags.use)  # a run that cannot be used is found before the first one is fitted
    for run_dir in run_dirs:
        announce(f"fitting {run_dir} ...")
        with said_by_loaders(announce, draws_bars=draws_bars(quiet=flags.quiet)):
            rungs = normalize(
                run_dir,
                rows=flags.rows,
                data_dir=flags.data_dir,
                seed=flags.seed,
                use=flags.use,
                quiet=flags.quiet,
            )
        if jax.process_index() == 0:
            print(report(run_dir, rungs), flush=True)


def report(run_dir: Path, rungs: Sequence) -> str:
    """What the rungs of the ladder gave, a line each, and which one is kept."""
    from pols_jax.training.run_normalizer import rows_in_words

    lines = [f"{run_dir}: 1-AUPRC of one logit, on the validation split"]
    for normalizer, auprc, _ in rungs:
        name, fit = "raw", ""
        if normalizer is not None:
            name = rows_in_words(normalizer.num_rows)
            fit = f"  (log Z: R^2 {normalizer.fit.r_squared:.3f}, error {normalizer.fit.error:.2f})"
        lines.append(f"  {name:>12}  {1 - auprc:.4f}{fit}")
    lines.append(
        f"Kept: {rows_in_words(rungs[-1].normalizer.num_rows)}. Next: pols eval {shell_word(run_dir)}"
    )
    return "\n".join(lines)
