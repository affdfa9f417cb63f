"""The figures of README and docs, made from the records in ``results/``.

Series differ in marker and line style beside color, so that they stay apart in gray print and for the color-blind.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results_tables import (
    BY_CLASSES,
    ExperimentRecord,
    Study,
    common_losses,
    errors_by_loss,
    normalizer_errors,
    one_logit_improvement,
    study_points,
)

from pols_jax.evaluation.figures import COLORS, MARKERS, two_histograms
from pols_jax.losses import ALIGNED, LOSSES


def logits_figure(record: ExperimentRecord, losses: Sequence[str]) -> Figure:
    """Draws all true and all false logits of the test split, one panel per loss, on a common logarithmic scale."""
    runs = {run["config"]["loss"]: run for run in record["runs"]}
    figure = Figure(figsize=(4.5 * len(losses), 3.2), layout="constrained")
    for axes, loss in zip(np.atleast_1d(figure.subplots(1, len(losses), sharey=True)), losses, strict=True):
        run = runs[loss]
        bins, true, false = (np.array(run[name]) for name in ("bins", "true_histogram", "false_histogram"))
        two_histograms(axes, bins, true, false)
        rate = run["test"]["violation_rate"]
        axes.set_title(f"{loss}\n{rate:.1e} of the pairs violate the principle", fontsize=9)
    return figure


def errors_figure(record: ExperimentRecord) -> Figure:
    """Draws what one logit and all logits of each loss miss on the test split, one line per loss."""
    errors = errors_by_loss(record, tuple(LOSSES))
    figure = Figure(figsize=(8, 0.8 + 0.42 * len(errors)), layout="constrained")
    axes = figure.subplots()
    for place, (loss, (one, every)) in enumerate(errors.items()):
        style = _style(loss)
        axes.plot([every, one], [place, place], color=style["color"], linestyle=style["linestyle"])
        axes.plot(one, place, color=style["color"], marker="o", markersize=9, linestyle="")
        axes.plot(
            every,
            place,
            color=style["color"],
            marker="o",
            markersize=9,
            markerfacecolor="white",
            linestyle="",
        )
        axes.annotate(f"{one:.3f}", (one, place), (8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.plot([], [], "ko", markersize=7, label="one logit")
    axes.plot([], [], "ko", markersize=7, markerfacecolor="white", label="all logits")
    largest = max(max(pair) for pair in errors.values())
    axes.set(xlabel="1-AUPRC on the test split; smaller is better", xlim=(0, 1.15 * largest))
    axes.set_yticks(range(len(errors)), list(errors))
    axes.invert_yaxis()
    axes.margins(y=0.2)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def classes_figure(records: Mapping[str, ExperimentRecord]) -> Figure:
    """Draws the error of one logit, and what the aligned losses win, against the number of classes."""
    chosen = [records[name] for name in BY_CLASSES]
    losses = common_losses(chosen)
    classes = [record["num_classes"] for record in chosen]
    errors = [errors_by_loss(record, losses) for record in chosen]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for loss in losses:
        left.plot(classes, [error[loss][0] for error in errors], label=f"{loss}, one logit", **_style(loss))
    style = {**_style("cross_entropy"), "linestyle": ":", "markerfacecolor": "white"}
    left.plot(
        classes, [error["cross_entropy"][1] for error in errors], label="cross_entropy, all logits", **style
    )
    _log_axis(left, "number of classes", "1-AUPRC")
    left.legend(fontsize=7, frameon=False)
    improvements = [(k, one_logit_improvement(error)) for k, error in zip(classes, errors, strict=True)]
    points = [(k, 100 * value) for k, value in improvements if value is not None]
    right.plot(*zip(*points, strict=True), "ko-", markersize=5)
    _log_axis(right, "number of classes", "relative improvement, %")
    right.set_ylim(top=100)
    right.axhline(0, color="#666666", linewidth=1)
    return figure


def normalizers_figure(entries: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws the errors of one logit, of one logit with a normalizer and of all logits against the number of classes.

    Args:
      entries: The runs that ``results/tools/normalizer_study.py`` measured; those of characters are drawn.

    Returns:
      A figure with a panel for each of the losses that were measured from ten classes on.
    """
    glyphs = [entry for entry in entries if entry["dataset"] == "glyphs"]
    losses = [loss for loss in LOSSES if any(e["loss"] == loss and e["num_classes"] == 10 for e in glyphs)]
    figure = Figure(figsize=(2.8 * len(losses), 3.3), layout="constrained")
    for axes, loss in zip(np.atleast_1d(figure.subplots(1, len(losses), sharey=True)), losses, strict=True):
        color = _style(loss)["color"]
        for is_cjk in (False, True):  # other characters, other faces: another line
            own = sorted(
                (
                    e
                    for e in glyphs
                    if e["loss"] == loss and (e["config"]["characters"] is not None) == is_cjk
                ),
                key=lambda entry: entry["num_classes"],
            )
            classes = [entry["num_classes"] for entry in own]
            one, with_normalizer, every = zip(*map(normalizer_errors, own), strict=True)
            label = "" if is_cjk else None
            shared = {"color": color, "markersize": 6}
            axes.plot(classes, one, "o-", label=label or "one logit", **shared)
            axes.plot(classes, with_normalizer, "D-.", label=label or "with normalizer", **shared)
            axes.plot(classes, every, "o:", label=label or "all logits", markerfacecolor="white", **shared)
            if is_cjk:
                axes.axvspan(4500, 90_000, color="#000000", alpha=0.05, linewidth=0)
        axes.set_title(loss, fontsize=9)
        _log_axis(axes, "number of classes", "")
        axes.set_xlim(6, 90_000)
        axes.set_ylim(bottom=0)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[:3], labels[:3], fontsize=8, frameon=False, loc="upper left")
    figure.axes[0].set_ylabel("1-AUPRC on the test split")
    return figure


def study_figure(study: Study, records: Mapping[str, ExperimentRecord]) -> Figure:
    """Draws what a setting does to one logit and to accuracy, on the validation split."""
    points = study_points(study, records)
    values = sorted({point.value for point in points})
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = (("auprc", "one logit: 1-AUPRC"), ("accuracy", "1-accuracy"))
    for axes, (measure, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for loss in dict.fromkeys(point.loss for point in points):
            own = [point for point in points if point.loss == loss]
            error = [1 - point.validation[measure] for point in own]
            axes.plot([point.value for point in own], error, label=loss, **_style(loss))
        if values[0] > 0:
            _log_axis(axes, study.setting.replace("_", " "), label)
        else:
            axes.set(xlabel=study.setting.replace("_", " "), ylabel=label)
            axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7, frameon=False)
    return figure


def _style(loss: str) -> dict[str, Any]:
    number = list(LOSSES).index(loss)
    return {
        "color": COLORS[number],
        "marker": MARKERS[number],
        "markersize": 5,
        "linestyle": "-" if loss in ALIGNED else "--",
    }


def _log_axis(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set(xscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
