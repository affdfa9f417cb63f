"""From records to tables: on the terminal and in Markdown.

Times are medians, ± half the distance between the first and the third quartile. Ratios compare calls of the same round, and their median
is shown: a slow minute of the machine is in both and drops out.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pols_jax.benchmarking.records import Record
from pols_jax.benchmarking.timing import Measurement
from pols_jax.losses import LOSSES

PAPER_TABLE_3 = {
    "alexnet": {1: 3.6, 2**10: 3.7, 2**14: 4.0, 2**16: 5.7, 2**18: 20.2, 370_727: 76.0},
    "vgg16": {1: 9.4, 2**10: 9.6, 2**14: 9.9, 2**16: 11.4, 2**18: 26.4, 370_727: 80.5},
    "inception_v3": {1: 6.0, 2**10: 6.2, 2**14: 6.5, 2**16: 7.3, 2**18: 18.7, 370_727: 76.6},
    "resnet50": {1: 6.1, 2**10: 6.4, 2**14: 6.6, 2**16: 7.4, 2**18: 19.1, 370_727: 78.0},
    "resnet101": {1: 8.0, 2**10: 8.2, 2**14: 8.3, 2**16: 9.4, 2**18: 23.5, 370_727: 80.4},
}
"""The paper's Table 3: network -> number of classes -> milliseconds for 32 images on a Titan X."""

PAPER_SPEED_UPS = {
    "alexnet": {2**10: 1.04, 2**14: 1.14, 2**16: 1.59, 2**18: 5.68, 370_727: 21.38},
    "vgg16": {2**10: 1.02, 2**14: 1.05, 2**16: 1.20, 2**18: 2.79, 370_727: 8.52},
    "inception_v3": {2**10: 1.03, 2**14: 1.09, 2**16: 1.22, 2**18: 3.11, 370_727: 12.75},
    "resnet50": {2**10: 1.04, 2**14: 1.08, 2**16: 1.20, 2**18: 3.11, 370_727: 12.69},
    "resnet101": {2**10: 1.03, 2**14: 1.04, 2**16: 1.19, 2**18: 2.95, 370_727: 10.10},
}
"""The paper's Table 3: network -> number of classes -> speed-up of one logit over all."""


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A table as text.

    Attributes:
      title: What it shows.
      headings: The names of the columns.
      rows: The cells of each line, as many as there are headings.
    """

    title: str
    headings: list[str]
    rows: list[list[str]]


def sheets(record: Record) -> list[Sheet]:
    """Makes the tables of a record, finished or not.

    Args:
      record: The record.

    Returns:
      The tables of its benchmark.

    Examples:
      >>> times = {"optax_cross_entropy": [2.0, 2.0], "batch_cross_entropy": [2.0, 2.2]}
      >>> record = Record("losses", {}, {})
      >>> record.measurements = [Measurement(name, {"num_classes": 8}, None, ms) for name, ms in times.items()]
      >>> print(to_markdown(sheets(record)))
      ### Value and gradient; smaller is faster
      <BLANKLINE>
      | loss | ms | times optax CE |
      | --- | --- | --- |
      | optax cross_entropy | 2.00 ±0.000 | 1.00 |
      | batch_cross_entropy | 2.10 ±0.050 | 1.05 |
    """
    makers = {
        "logits": _logits_sheets,
        "losses": _loss_sheets,
        "metrics": _metric_sheets,
        "large_k": _large_k_sheets,
        "training": _training_sheets,
    }
    return makers[record.benchmark](record)


def print_sheets(sheets: Sequence[Sheet], *, console: Console | None = None) -> None:
    """Prints tables on the terminal.

    Args:
      sheets: The tables.
      console: Where to print; standard output if None.
    """
    console = console or Console()
    if not console.is_terminal:  # a file or a pipe has no width of its own: nothing is cut off there
        console.width = 200
    for sheet in sheets:
        table = Table(title=sheet.title, title_justify="left")
        table.add_column(sheet.headings[0])
        for heading in sheet.headings[1:]:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in sheet.rows:
            table.add_row(*row, style="dim" if row[0].startswith("paper") else None)
        console.print(table)


def to_markdown(sheets: Sequence[Sheet]) -> str:
    """Writes tables in Markdown.

    Examples:
      >>> print(to_markdown([Sheet("Speed", ["k", "ms"], [["1", "2.00"]])]))
      ### Speed
      <BLANKLINE>
      | k | ms |
      | --- | --- |
      | 1 | 2.00 |
    """
    parts = []
    for sheet in sheets:
        lines = [sheet.headings, ["---"] * len(sheet.headings), *sheet.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"### {sheet.title}\n\n{table}")
    return "\n\n".join(parts)


def ratio(slower: Measurement | None, faster: Measurement | None) -> float | None:
    """How many times longer one takes than the other: the median over the rounds in which both were timed.

    Examples:
      >>> ratio(Measurement("a", {}, None, [2.0, 30.0, 2.2]), Measurement("b", {}, None, [1.0, 15.0, 1.0]))
      2.0
    """
    if slower is None or faster is None:
        return None
    pairs = zip(slower.times_ms, faster.times_ms, strict=False)  # an interrupted round has one time less
    return statistics.median(one / other for one, other in pairs)


def median_interval(slower: Measurement, faster: Measurement) -> tuple[float, float]:
    """Between which values the true median of `ratio` is, with 95 % confidence: two of the sorted ratios.

    Half of all ratios are below the true median, so the number of measured ones below it is nearly always within one
    square root of the half.

    Examples:
      >>> times = [1.0 + i / 100 for i in range(101)]
      >>> median_interval(Measurement("a", {}, None, times), Measurement("b", {}, None, [1.0] * 101))
      (1.4, 1.6)
    """
    ratios = sorted(one / other for one, other in zip(slower.times_ms, faster.times_ms, strict=False))
    middle, reach = (len(ratios) - 1) / 2, 0.98 * math.sqrt(len(ratios))
    first, last = max(0, math.floor(middle - reach)), min(len(ratios) - 1, math.ceil(middle + reach))
    return ratios[first], ratios[last]


def class_name(num_classes: int) -> str:
    """A number of classes as the paper writes it.

    Examples:
      >>> class_name(1), class_name(2**14), class_name(370_727), class_name(5000)
      ('1', '2^14', '2^18.5', '5,000')
    """
    if num_classes == 370_727:
        return "2^18.5"
    power = num_classes.bit_length() - 1
    return f"2^{power}" if num_classes == 2**power and power >= 8 else f"{num_classes:,}"


def _logits_sheets(record: Record) -> list[Sheet]:
    result, summary = [], []
    for network in record.values("network"):
        for batch_size in record.values("batch_size"):
            case = {"network": network, "batch_size": batch_size}
            if record.find("backbone", **case):
                result.append(_network_sheet(record, case))
                summary += _summary_rows(record, case)
    headings = [
        *("network", "batch", "k", "one logit / backbone", "max / min over k", "speed-up", "limit"),
        *("of the limit", "PyTorch head / ours"),
    ]
    return [*result, Sheet("One logit against all of them", headings, summary)] if summary else result


def _network_sheet(record: Record, case) -> Sheet:
    classes = sorted(record.values("num_classes"))
    backbone = record.find("backbone", **case)
    assert backbone is not None

    def row(name, cell):
        return [name, *(cell(num_classes) for num_classes in classes)]

    def times(name, variant, *, spread=False):
        return row(name, lambda k: _time(record.find(variant, **case, num_classes=k), spread=spread))

    def times_longer(variant, of_variant):
        return lambda k: _times(ratio(record.find(variant, **case, num_classes=k), of_variant(k)))

    def missing(k):
        for entry in record.skipped:
            if {**case, "num_classes": k}.items() <= entry["case"].items():
                return f"left out: {entry['kernel_bytes'] / 1e9:.1f} GB"
        return ""

    num_devices = int(backbone.case["num_devices"])
    rows = [
        times("all logits, ms", "all_logits", spread=True),
        times("one logit, ms", "one_logit", spread=True),
        row(
            "speed-up", times_longer("all_logits", lambda k: record.find("one_logit", **case, num_classes=k))
        ),
        row("limit: all / backbone", times_longer("all_logits", lambda k: backbone)),
        times("head alone: all logits, ms", "head_all_logits"),
        times("head alone: one logit, ms", "head_one_logit"),
        times("PyTorch F.linear, ms", "torch_linear"),
        times("PyTorch adaptive softmax, one class", "torch_adaptive_softmax"),
        row("images/s, one logit, all devices", _images_per_second(record, case, num_devices)),
        row("images/s, one logit, each device", _images_per_second(record, case, 1)),
        row("not measured", missing),
        row("paper: all logits, ms for 32", lambda k: _paper(PAPER_TABLE_3, case["network"], k, "{}")),
        row("paper: speed-up", lambda k: _paper(PAPER_SPEED_UPS, case["network"], k, "x{:.2f}")),
    ]
    title = (
        f"{case['network']}, batch size {case['batch_size']}{f' on each of {num_devices} devices' * (num_devices > 1)}, "
        f"d = {backbone.case['num_features']}: the backbone alone takes {_time(backbone, spread=True)} ms"
    )
    return Sheet(title, ["k", *map(class_name, classes)], [line for line in rows if any(line[1:])])


def _summary_rows(record: Record, case) -> list[list[str]]:
    backbone = record.find("backbone", **case)
    ones = [m for m in record.measurements if m.variant == "one_logit" and case.items() <= m.case.items()]
    if not ones:
        return []
    k = max(int(m.case["num_classes"]) for m in ones)
    one, everything = (record.find(name, **case, num_classes=k) for name in ("one_logit", "all_logits"))
    # Relative to the smallest median, round by round.
    flattest = min(ones, key=lambda m: m.median_ms)
    over_smallest = max(ratio(m, flattest) or 0.0 for m in ones)
    speed_up, limit = ratio(everything, one), ratio(everything, backbone)
    head, peer = (record.find(name, **case, num_classes=k) for name in ("head_all_logits", "torch_linear"))
    cells = [
        _ratio_with_interval(one, backbone),
        f"{over_smallest:.3f}" if len(ones) > 1 else "",
        _times(speed_up),
        _times(limit),
        f"{speed_up / limit:.1%}" if speed_up and limit else "",
        _times(ratio(peer, head)),
    ]
    return [[str(case["network"]), str(case["batch_size"]), class_name(k), *cells]]


def _loss_sheets(record: Record) -> list[Sheet]:
    optax = record.find("optax_cross_entropy")
    rivals = ("optax_cross_entropy", "authors_batch_cross_entropy")
    with_torch = any(m.variant.startswith("torch_") for m in record.measurements)
    rows = []
    for name in (*rivals, *LOSSES):
        if measured := record.find(name):
            shown = name.replace("optax_", "optax ").replace("authors_", "authors' ")
            row = [shown, _time(measured, spread=True), _number(ratio(measured, optax))]
            if with_torch:
                peer = record.find(f"torch_{name}")
                row += [_time(peer), _times(ratio(peer, measured))]
            rows.append(row)
    headings = ["loss", "ms", "times optax CE", *(["PyTorch ms", "PyTorch / ours"] if with_torch else [])]
    return [Sheet("Value and gradient; smaller is faster", headings, rows)]


def _metric_sheets(record: Record) -> list[Sheet]:
    others = [name for name in ("scikit_learn", "torchmetrics") if record.find(name)]
    rows = []
    for num_classes in record.values("num_classes"):
        ours = record.find("pols_jax", num_classes=num_classes)
        row = [f"{num_classes:,}", _time(ours, spread=True)]
        for name in others:
            theirs = record.find(name, num_classes=num_classes)
            row += [_time(theirs), _times(ratio(theirs, ours))]
        rows.append(row)
    headings = [cell for name in others for cell in (f"{name} ms", f"{name} / ours")]
    return [Sheet("Exact AUPRC and precision at recall of every class", ["k", "ours, ms", *headings], rows)]


def _large_k_sheets(record: Record) -> list[Sheet]:
    rows = []
    for linear in (m for m in record.measurements if m.variant == "linear"):
        case = {name: value for name, value in linear.case.items() if name != "temporary_bytes"}
        dense = record.find("dense", **case)
        rows.append(
            [
                *(str(case[name]) for name in ("loss", "num_examples", "num_features")),
                class_name(int(case["num_classes"])),
                *(_time(form, spread=True) for form in (dense, linear)),
                _number(ratio(linear, dense)),
                *(
                    "" if form is None else f"{int(form.case['temporary_bytes']) / 1e6:,.0f} MB"
                    for form in (dense, linear)
                ),
            ]
        )
    headings = [
        *("loss", "m", "d", "k", "dense, ms", "linear, ms", "linear / dense"),
        *("dense: temporary memory", "linear: temporary memory"),
    ]
    losses = Sheet("Value and gradients of features, kernel and bias", headings, rows)
    sampled = [m for m in record.measurements if m.variant == "sampled_step"]
    rows = [
        [class_name(int(m.case["num_classes"])), _time(m, spread=True), _number(ratio(m, sampled[0]))]
        for m in sampled
    ]
    steps = Sheet(
        f"A step of sampled NCE on the output layer{_sizes(sampled)}",
        ["k", "ms", "times the smallest k"],
        rows,
    )
    momentum = [m for m in record.measurements if m.variant == "momentum_step"]
    rows = [
        [
            class_name(int(m.case["num_classes"])),
            _time(m),
            f"{int(m.case['bytes_beyond_state']) / 1e9:.2f} GB",
        ]
        for m in momentum
    ]
    title = f"A step of momentum on the output layer with batch cross-entropy{_sizes(momentum)}"
    return [losses, steps, Sheet(title, ["k", "ms", "memory beyond parameters and momentum"], rows)]


def _training_sheets(record: Record) -> list[Sheet]:
    by_hand = record.find("hand_written_scan")
    rows = [
        [
            m.variant.replace("_", " "),
            f"{1e3 * int(m.case['steps']) / m.median_ms:,.0f}",
            _number(None if by_hand is None else ratio(by_hand, m)),
        ]
        for m in record.measurements
    ]
    title = "Training the MLP on images that the device holds"
    return [Sheet(title, ["", "steps per second", "of the hand-written scan"], rows)]


def _sizes(measurements: Sequence[Measurement]) -> str:
    """The sizes that a step was measured with, as the end of a title."""
    names = {"num_examples": "m = {}", "num_features": "d = {}", "num_noise": "{} noise classes"}
    cases = [m.case for m in measurements[:1]]
    return "".join(f", {form.format(case[n])}" for case in cases for n, form in names.items() if n in case)


def _time(measurement: Measurement | None, *, spread: bool = False) -> str:
    if measurement is None:
        return ""
    text = _milliseconds(measurement.median_ms)
    first, third = measurement.spread_ms
    return f"{text} ±{_milliseconds((third - first) / 2)}" if spread else text


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{1 if value >= 100 else 2 if value >= 1 else 3}f}"


def _ratio_with_interval(slower: Measurement | None, faster: Measurement | None) -> str:
    if slower is None or faster is None:
        return ""
    low, high = median_interval(slower, faster)
    return f"{ratio(slower, faster):.3f} ({low:.3f} to {high:.3f})"


def _times(value: float | None) -> str:
    return "" if value is None else f"x{value:.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _paper(numbers, network, num_classes, form) -> str:
    value = numbers.get(network, {}).get(num_classes)
    return "" if value is None else form.format(value)


def _images_per_second(record: Record, case, num_devices):
    def cell(num_classes):
        measured = record.find("one_logit", **case, num_classes=num_classes)
        if measured is None or measured.case["num_devices"] == 1:
            return ""
        return f"{1e3 * case['batch_size'] * num_devices / measured.median_ms:,.1f}"

    return cell
