"""Figures from evaluated runs: true and false logits, precision and recall, AUPRC by class.

Every figure is written as PNG and as SVG. Series differ in lightness, line style or hatching beside color, so that
they stay apart in gray print and for the color-blind (colors of Okabe and Ito).
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pols_jax.evaluation.slc_records import read_class_arrays
from pols_jax.files import make_directory, write_bytes
from pols_jax.losses import ALIGNED
from pols_jax.training.runs import Run

_TRUE, _FALSE = "#D55E00", "#56B4E9"
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw_all(run_dirs: Sequence[str | Path], directory: str | Path) -> list[Path]:
    """Draws every figure of some runs that were evaluated with ``histograms=True``; returns the files.

    Histograms compare two runs: the first that is not aligned and the first that is, if there are both.
    """
    runs = [Run.open(run_dir) for run_dir in run_dirs]
    arrays = [read_class_arrays(run, for_figures=True) for run in runs]
    pair = _two_kinds(runs)
    two_runs, two_arrays = [runs[i] for i in pair], [arrays[i] for i in pair]
    figures = {
        "logits_of_one_class": logits_of_one_class(two_runs, two_arrays),
        "logits_of_all_classes": logits_of_all_classes(two_runs, two_arrays),
        "precision_recall": precision_recall(runs, arrays),
        "auprc_by_class": auprc_by_class(runs, arrays),
    }
    make_directory(directory)
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
    """Draws the precision at each recall, averaged over classes, with one logit (solid), the normalizer (dotted), all (dashed)."""
    figure, axes = _one_panel(xlabel="recall", ylabel="precision, mean over classes")
    for i, (run, values) in enumerate(zip(runs, arrays, strict=True)):
        style = _style(i) | {"markevery": (3 * i % 10, 10), "drawstyle": "steps-pre"}
        recall = values["curve_recall"]
        axes.plot(recall, values["curve_precision"], label=f"{run.config.loss}, one logit", **style)
        if "normalized_curve_precision" in values:
            label = f"{run.config.loss}, one logit with normalizer"
            axes.plot(
                recall, values["normalized_curve_precision"], label=label, linestyle=(0, (1, 1)), **style
            )
        axes.plot(
            recall,
            values["all_logits_curve_precision"],
            label=f"{run.config.loss}, all logits",
            linestyle=(0, (4, 2)),
            markerfacecolor="white",
            **style,
        )
    axes.legend(fontsize=8)
    return figure


def auprc_by_class(runs: Sequence[Run], arrays: Sequence[dict[str, np.ndarray]]) -> Figure:
    """Draws the AUPRC of every class with one logit, from the worst class to the best."""
    figure, axes = _one_panel(xlabel="share of the classes, worst first", ylabel="AUPRC with one logit")
    for i, (run, values) in enumerate(zip(runs, arrays, strict=True)):
        auprc = np.sort(values["auprc"][~np.isnan(values["auprc"])])
        share = (np.arange(len(auprc)) + 0.5) / len(auprc)
        label = f"{run.config.loss}, mean {auprc.mean():.3f}"
        axes.plot(share, auprc, markevery=(0.02 * i, 0.1), label=label, **_style(i))
    axes.legend(fontsize=8)
    return figure


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Writes a figure as PNG and SVG, and returns the two files; ``path`` has no suffix."""
    files = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "svg")]
    for file in files:
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=150, format=file.suffix[1:])
        write_bytes(file, drawn.getvalue())
    return files


def _one_panel(**labels: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, 1), ylim=(0, 1.02), **labels)
    axes.grid(alpha=0.3)
    return figure, axes


def _style(series: int) -> dict[str, Any]:
    return {
        "color": COLORS[series % len(COLORS)],
        "marker": MARKERS[series % len(MARKERS)],
        "markersize": 5,
    }


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
