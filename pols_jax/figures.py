"""Figures from evaluated runs: true and false logits, precision and recall, AUPRC by class.

Every figure is written as PNG and as SVG. Series differ in lightness, line style or hatching beside colour, so that
they stay apart in grey print and for the colour-blind (colours of Okabe and Ito).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pols_jax.losses import ALIGNED
from pols_jax.runs import Run

_TRUE, _FALSE = "#D55E00", "#56B4E9"
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw_all(run_dirs: Sequence[str | Path], directory: str | Path) -> list[Path]:
    """Draws every figure of some runs that were evaluated with ``histograms=True``.

    Args:
      run_dirs: Run directories. Histograms compare two of them: the first that is not aligned and the first that is, if
        there are both.
      directory: Where the files go.

    Returns:
      The files that were written.
    """
    runs = [Run.open(run_dir) for run_dir in run_dirs]
    arrays = [dict(np.load(run.directory / "slc.npz")) for run in runs]
    pair = _two_kinds(runs)
    two_runs, two_arrays = [runs[i] for i in pair], [arrays[i] for i in pair]
    figures = {
        "logits_of_one_class": logits_of_one_class(two_runs, two_arrays),
        "logits_of_all_classes": logits_of_all_classes(two_runs, two_arrays),
        "precision_recall": precision_recall(runs, arrays),
        "auprc_by_class": auprc_by_class(runs, arrays),
    }
    return [path for name, figure in figures.items() for path in save_figure(figure, Path(directory) / name)]


def logits_of_one_class(runs: Sequence[Run], arrays: Sequence[dict[str, np.ndarray]]) -> Figure:
    """Draws the logits of one class for examples that belong to it and for all others: the paper's Figure 2."""
    figure, panels = _panels(len(runs))
    for run, values, axes in zip(runs, arrays, panels, strict=True):
        logits, is_true = values["class_logits"], values["class_labels"]
        bins = np.linspace(logits.min(), logits.max(), 61)
        others = np.histogram(logits[~is_true], bins)[0]
        own = np.histogram(logits[is_true], bins)[0]
        two_histograms(axes, bins, own, others)
        axes.set_title(f"{run.config.loss}: {run.class_names[int(values['class_id'])]}", fontsize=9)
    return figure


def logits_of_all_classes(runs: Sequence[Run], arrays: Sequence[dict[str, np.ndarray]]) -> Figure:
    """Draws all true and all false logits of the split."""
    figure, panels = _panels(len(runs))
    for run, values, axes in zip(runs, arrays, panels, strict=True):
        two_histograms(axes, values["bins"], values["true_histogram"], values["false_histogram"])
        axes.set_title(f"{run.config.loss}: all {run.num_classes:,} classes", fontsize=9)
    return figure


def precision_recall(runs: Sequence[Run], arrays: Sequence[dict[str, np.ndarray]]) -> Figure:
    """Draws the precision at each recall, averaged over classes, with one logit (solid) and all logits (dashed)."""
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for i, (run, values) in enumerate(zip(runs, arrays, strict=True)):
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "markevery": (3 * i % 10, 10),
            "markersize": 5,
            "drawstyle": "steps-pre",
        }
        recall = values["curve_recall"]
        axes.plot(recall, values["curve_precision"], label=f"{run.config.loss}, one logit", **style)
        axes.plot(
            recall,
            values["all_logits_curve_precision"],
            label=f"{run.config.loss}, all logits",
            linestyle=(0, (4, 2)),
            markerfacecolor="white",
            **style,
        )
    axes.set(xlabel="recall", ylabel="precision, mean over classes", xlim=(0, 1), ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def auprc_by_class(runs: Sequence[Run], arrays: Sequence[dict[str, np.ndarray]]) -> Figure:
    """Draws the AUPRC of every class with one logit, from the worst class to the best."""
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for i, (run, values) in enumerate(zip(runs, arrays, strict=True)):
        auprc = np.sort(values["auprc"][~np.isnan(values["auprc"])])
        share = (np.arange(len(auprc)) + 0.5) / len(auprc)
        axes.plot(
            share,
            auprc,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            markevery=(0.02 * i, 0.1),
            markersize=5,
            label=f"{run.config.loss}, mean {auprc.mean():.3f}",
        )
    axes.set(
        xlabel="share of the classes, worst first", ylabel="AUPRC with one logit", xlim=(0, 1), ylim=(0, 1.02)
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Writes a figure as PNG and SVG.

    Args:
      figure: The figure.
      path: The file without its suffix.

    Returns:
      The two files.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     [file.name for file in save_figure(Figure(), Path(folder) / "empty")]
      ['empty.png', 'empty.svg']
    """
    files = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(4.5 * count, 3.2), layout="constrained")
    return figure, [figure.add_subplot(1, count, i + 1) for i in range(count)]


def two_histograms(axes: Axes, bins: np.ndarray, true: np.ndarray, false: np.ndarray) -> None:
    """Draws counts on a logarithmic scale: the few false logits among the true ones are what matters."""
    for counts, label, style in (
        (false, "false logits", {"facecolor": _FALSE, "edgecolor": _FALSE}),
        (true, "true logits", {"facecolor": "none", "edgecolor": _TRUE, "hatch": "////", "linewidth": 1.2}),
    ):
        patch_style: dict[str, Any] = {"fill": True, "baseline": 0.5, **style}
        axes.stairs(np.maximum(counts, 0.5), bins, label=f"{label} ({counts.sum():,})", **patch_style)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5, top=4 * max(false.max(), true.max()))  # room for the legend
    axes.set(xlabel="logit", ylabel="number of logits")
    axes.legend(fontsize=8, loc="upper left")


def _two_kinds(runs: Sequence[Run]) -> list[int]:
    """The first run whose loss is not aligned and the first whose loss is; two of a kind if there is only one."""
    kinds = [run.config.loss in ALIGNED for run in runs]
    firsts = [kinds.index(kind) for kind in (False, True) if kind in kinds]
    others = [i for i in range(len(runs)) if i not in firsts]
    return sorted((firsts + others)[:2])
