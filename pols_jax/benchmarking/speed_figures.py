"""Figures from records of all logits against one: the paper's Figure 1, and the speed-up of every network."""

from pathlib import Path

from matplotlib.figure import Figure

from pols_jax.benchmarking.records import Record
from pols_jax.benchmarking.speed_tables import ratio
from pols_jax.evaluation.figures import save_figure
from pols_jax.files import make_directory

_ALL, _ONE, _BACKBONE = "#D55E00", "#0072B2", "#666666"  # of Okabe and Ito, apart for the color-blind too
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw_speed(record: Record, directory: Path) -> list[Path]:
    """Draws the figures of a record of the logits benchmark; returns the files.

    For each network and batch size that is the time against the number of classes, and for each batch size the speed-up
    of all networks.
    """
    make_directory(directory)
    figures = {}
    for batch_size in record.values("batch_size"):
        for network in record.values("network"):
            if _series(record, "one_logit", network, batch_size):
                figures[f"time_{network}_batch_{batch_size}"] = time_against_classes(
                    record, network, batch_size
                )
        if record.find("all_logits", batch_size=batch_size):
            figures[f"speed_up_batch_{batch_size}"] = speed_up_against_classes(record, batch_size)
    return [path for name, figure in figures.items() for path in save_figure(figure, directory / name)]


def time_against_classes(record: Record, network: str, batch_size: int) -> Figure:
    """Draws the time of one call against the number of classes: the paper's Figure 1."""
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    lines = (("all_logits", "all logits", _ALL, "s-"), ("one_logit", "one logit", _ONE, "o-"))
    for variant, label, color, style in lines:
        series = _series(record, variant, network, batch_size)
        classes = [m.case["num_classes"] for m in series]
        middle = [m.median_ms for m in series]
        low, high = ([abs(m.spread_ms[i] - m.median_ms) for m in series] for i in (0, 1))
        axes.errorbar(classes, middle, yerr=(low, high), fmt=style, color=color, label=label, capsize=2)
    if backbone := record.find("backbone", network=network, batch_size=batch_size):
        axes.axhline(backbone.median_ms, color=_BACKBONE, linestyle=":", label="backbone alone")
    axes.set(xscale="log", xlabel="number of classes", ylabel="ms per call", ylim=(0, None))
    axes.set_title(f"{network}, {batch_size} image{'s' if batch_size > 1 else ''}", fontsize=9)
    axes.legend(frameon=False)
    return figure


def speed_up_against_classes(record: Record, batch_size: int) -> Figure:
    """Draws how many times faster one logit is than all of them, for every network."""
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for i, network in enumerate(record.values("network")):
        points = [
            (m.case["num_classes"], ratio(m, one))
            for m in _series(record, "all_logits", network, batch_size)
            if (one := record.find("one_logit", **m.case))
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=_COLORS[i], marker=_MARKERS[i], label=network, markersize=5
            )
    axes.axhline(1, color=_BACKBONE, linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="number of classes", ylabel="all logits / one logit")
    axes.set_title(f"speed-up, batch size {batch_size}", fontsize=9)
    axes.legend(frameon=False)
    return figure


def _series(record, variant, network, batch_size):
    found = record.find_all(variant, network=network, batch_size=batch_size)
    return sorted(found, key=lambda m: m.case["num_classes"])
