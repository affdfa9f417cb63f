"""Rebuilds every measured table and figure of README and docs from the records in ``results/``.

A page says where a table goes by two comments, and everything between them is replaced::

    <!-- results: glyphs -->
    <!-- end -->

Figures are written to ``docs/images`` under their names, as SVG.

python results/tools/rebuild.py
"""

import io
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import own_tables
import results_figures
import results_tables
from matplotlib.figure import Figure

from pols_jax.benchmarking import speed_figures
from pols_jax.benchmarking.records import Record
from pols_jax.errors import ConfigError
from pols_jax.files import write_text
from pols_jax.schema import read_json
from pols_jax.tables import to_markdown

_PLACE = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_QUICKSTART = ("cross_entropy", "batch_cross_entropy")
_CJK = ("cross_entropy", "noise_contrastive_estimation")
_MNIST = ("binary_cross_entropy", "batch_cross_entropy")
Experiments = Mapping[str, Mapping[str, Any]]
Benchmarks = Mapping[str, Record]


def read_records(directory: str | Path) -> tuple[Experiments, Benchmarks]:
    """Reads all records of a directory, by the names of their files.

    Args:
      directory: Where the records are.

    Returns:
      The records of ``pols train --record``, and those of benchmarks.

    Raises:
      ConfigError: if there is none, or one of a benchmark that was stopped.

    Examples:
      >>> read_records("no/such/directory")
      Traceback (most recent call last):
      pols_jax.errors.ConfigError: There is no record in no/such/directory; name a directory such as results/.
    """
    experiments, benchmarks = {}, {}
    for path in sorted(Path(directory).glob("*.json")):
        record = read_json(path, error=ConfigError)
        if record.keys() & {
            "normalizers",
            "exports",
            "serve",
            "hosts",
            "ocr",
            "trials",
        }:  # not for a table of experiments
            continue
        if "benchmark" in record:
            benchmarks[path.stem] = Record.load(path)
            if not benchmarks[path.stem].finished:
                raise ConfigError(f"The benchmark of {path} was stopped before its end; run it again.")
        else:
            experiments[path.stem] = record
    if not experiments and not benchmarks:
        raise ConfigError(f"There is no record in {directory}; name a directory such as results/.")
    return experiments, benchmarks


def tables(experiments: Experiments, benchmarks: Benchmarks) -> dict[str, Callable[[], str]]:
    """Every table that a page may ask for, by its name.

    Examples:
      >>> sorted(tables({}, {}))[:3]
      ['by_classes', 'commands', 'quickstart']
    """
    available: dict[str, Callable[[], str]] = {
        "by_classes": lambda: results_tables.classes_table(experiments),
        "commands": lambda: _commands(experiments, benchmarks),
        "quickstart": lambda: results_tables.short_table(experiments["glyphs"], _QUICKSTART),
    }
    for name, record in experiments.items():
        available[name] = lambda record=record: results_tables.full_table([record])
        available[f"{name}_short"] = lambda record=record: results_tables.short_table(record)
        if record["sweep"] is not None:
            available[f"{name}_tried"] = lambda record=record: results_tables.tried_table([record])
    if half := [r for name, r in experiments.items() if name.startswith(results_tables.CIFAR100_HALF)]:
        available["cifar100_half"] = lambda: results_tables.full_table(half)
    if set(results_tables.CJK_8000) <= set(experiments):
        both = [experiments[name] for name in results_tables.CJK_8000]
        available["cjk_tried"] = lambda: results_tables.tried_table(both)
    if set(results_tables.CJK) <= set(experiments):
        available["cjk_best"] = lambda: results_tables.short_table(_cjk(experiments))
    if set(results_tables.MNIST_SEEDS) <= set(experiments):
        seeds = [experiments[name] for name in results_tables.MNIST_SEEDS]
        available["mnist_seeds"] = lambda: results_tables.seeds_table(seeds)
    if {"cjk", "cjk_sampled"} <= set(experiments):
        pair = experiments["cjk"], experiments["cjk_sampled"]
        available["cjk_drawn"] = lambda: results_tables.drawn_table(*pair)
    if "speed_normalizer" in benchmarks:
        available["query_cost"] = lambda: results_tables.query_cost_table(benchmarks["speed_normalizer"])
    for name, study in results_tables.STUDIES.items():
        available[f"study_{name}"] = lambda study=study: results_tables.study_table(study, experiments)
    for name, record in benchmarks.items():
        made = own_tables.tables_of(record)
        available[name] = lambda made=made: to_markdown(made)
        available[f"{name}_summary"] = lambda made=made: made[-1].markdown()
    return available


def figures(experiments: Experiments, benchmarks: Benchmarks) -> dict[str, Callable[[], Figure]]:
    """Every figure, by the name of its file.

    Examples:
      >>> list(figures({}, {}))
      []
    """
    available: dict[str, Callable[[], Figure]] = {}
    if set(results_tables.BY_CLASSES) <= set(experiments):
        available["by_classes"] = lambda: results_figures.classes_figure(experiments)
    if "glyphs" in experiments:
        available["glyph_logits"] = lambda: results_figures.logits_figure(experiments["glyphs"], _QUICKSTART)
    if set(results_tables.CJK) <= set(experiments):
        available["cjk_errors"] = lambda: results_figures.errors_figure(_cjk(experiments))
        available["cjk_logits"] = lambda: results_figures.logits_figure(_cjk(experiments), _CJK)
    if "mnist" in experiments:
        available["mnist_logits"] = lambda: results_figures.logits_figure(experiments["mnist"], _MNIST)
    for name, study in results_tables.STUDIES.items():
        if set(study.records) <= set(experiments):
            available[f"study_{name}"] = lambda study=study: results_figures.study_figure(study, experiments)
    for name, record in benchmarks.items():
        if record.find("all_logits") and len(record.values("num_classes")) > 1:
            networks, batch_sizes = record.values("network"), record.values("batch_size")
            network = "inception_v3" if "inception_v3" in networks else networks[0]  # the paper's Figure 1
            for size in batch_sizes:
                figure = f"{name}_{size}" if len(batch_sizes) > 1 else name
                available[f"{figure}_speed_up"] = lambda r=record, m=size: (
                    speed_figures.speed_up_against_classes(r, m)
                )
                available[f"{figure}_time"] = lambda r=record, m=size, n=network: (
                    speed_figures.time_against_classes(r, n, m)
                )
    return available


def rebuild(results: str | Path, root: str | Path) -> list[Path]:
    """Fills in every table of the pages and draws every figure again.

    Args:
      results: The directory of the records.
      root: The directory of README.md and docs/.

    Returns:
      The files whose content changed.

    Raises:
      ConfigError: if a page asks for a table that no record makes.
    """
    experiments, benchmarks = read_records(results)
    available, root, changed = tables(experiments, benchmarks), Path(root), []
    drawn = figures(experiments, benchmarks)
    if (path := Path(results) / "normalizers.json").exists():
        entries = read_json(path, error=ConfigError)["normalizers"]
        available |= results_tables.normalizer_tables(entries)
        if any(entry["num_classes"] < 100 and entry["dataset"] == "glyphs" for entry in entries):
            drawn["normalizers"] = lambda: results_figures.normalizers_figure(entries)
    if (path := Path(results) / "export.json").exists():
        exports = read_json(path, error=ConfigError)["exports"]
        available["export"] = lambda: results_tables.export_table(exports)
    if (path := Path(results) / "serve.json").exists():
        available |= results_tables.serve_tables(read_json(path, error=ConfigError)["serve"])
    if (path := Path(results) / "ocr.json").exists():
        ocr = read_json(path, error=ConfigError)
        made = f"Commit {ocr['environment']['commit']}."
        available["ocr"] = lambda: f"{results_tables.ocr_table(ocr['ocr'])} {made}"
    for path in sorted(Path(results).glob("study_*.json")):
        if "trials" in (record := read_json(path, error=ConfigError)):
            available[path.stem] = lambda record=record: results_tables.trials_table(record)
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        if not page.exists():
            continue
        old = page.read_text(encoding="utf-8")
        new = fill_in(old, available, page)
        if new != old:
            write_text(page, new)
            changed.append(page)
    images = root / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    for name, draw in drawn.items():
        path = images / f"{name}.svg"
        old = path.read_bytes() if path.exists() else b""
        save_svg(draw(), path)
        if path.read_bytes() != old:
            changed.append(path)
    return changed


def fill_in(text: str, available: Mapping[str, Callable[[], str]], page: Path) -> str:
    r"""Replaces what is between the comments of a page.

    Examples:
      >>> page = "<!-- results: speed -->\nold\n<!-- end -->"
      >>> print(fill_in(page, {"speed": lambda: "new"}, Path("README.md")))
      <!-- results: speed -->
      new
      <!-- end -->
    """

    def replace(place: re.Match[str]) -> str:
        start, name, end = place.groups()
        if name not in available:
            raise ConfigError(f"{page} asks for the table {name}, and no record makes it.")
        return f"{start}{available[name]()}\n{end}"

    return _PLACE.sub(replace, text)


def save_svg(figure: Figure, path: Path) -> None:
    """Writes a figure so that the same figure makes the same file.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder) / "empty.svg"
      ...     save_svg(Figure(), path)
      ...     path.stat().st_size > 0
      True
    """
    with matplotlib.rc_context({"svg.hashsalt": "pols_jax", "svg.fonttype": "path"}):
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    # Lines end without blanks, as editors and git want them.
    write_text(path, "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n")


def _commands(experiments: Experiments, benchmarks: Benchmarks) -> str:
    minutes = {name: record["training_minutes"] for name, record in experiments.items()}
    commands = {name: record["environment"]["command"] for name, record in experiments.items()}
    for name, record in benchmarks.items():
        minutes[name] = sum(time for m in record.measurements for time in m.times_ms) / 60e3
        commands[name] = record.environment["command"]
    return results_tables.commands_table(minutes, commands)


def _cjk(experiments: Experiments) -> Mapping[str, Any]:
    return results_tables.best_of([experiments[name] for name in results_tables.CJK])


def main() -> int:
    """Rebuilds the pages and figures of this checkout, and says which of them changed."""
    root = Path(__file__).parents[2]
    try:
        changed = rebuild(root / "results", root)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(f"changed: {path.relative_to(root)}" for path in changed) or "Nothing changed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
