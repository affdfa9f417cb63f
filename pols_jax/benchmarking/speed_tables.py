"""From records to tables.

Times are medians, ± half the distance between the first and the third quartile. Ratios compare calls of the same round, and their median
is shown: a slow minute of the machine is in both and drops out.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from pols_jax.benchmarking.records import Record
from pols_jax.benchmarking.settings import NORMALIZER_ROWS
from pols_jax.benchmarking.timing import Measurement
from pols_jax.errors import ConfigError, unknown_name
from pols_jax.losses import LOSSES
from pols_jax.tables import Column, Table

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


def speed_tables(record: Record) -> list[Table]:
    """Makes the tables of a record, finished or not; a `ConfigError` if ``pols bench`` has no such benchmark.

    Examples:
      >>> from pols_jax.tables import to_markdown
      >>> times = {"optax_cross_entropy": [2.0, 2.0], "batch_cross_entropy": [2.0, 2.2]}
      >>> record = Record("losses", {}, {})
      >>> record.measurements = [Measurement(name, {"num_classes": 8}, None, ms) for name, ms in times.items()]
      >>> print(to_markdown(speed_tables(record)))
      ### Value and gradient; smaller is faster
      <BLANKLINE>
      | loss | ms | times optax CE |
      | --- | --- | --- |
      | optax cross_entropy | 2.00 ±0.000 | 1.00 |
      | batch_cross_entropy | 2.10 ±0.050 | 1.05 |
    """
    makers = {
        "logits": _logits_tables,
        "losses": _loss_tables,
        "metrics": _metric_tables,
        "networks": _network_tables,
    }
    if record.benchmark not in makers:
        raise ConfigError(unknown_name("benchmark", record.benchmark, makers))
    return makers[record.benchmark](record)


def ratio(slower: Measurement | None, faster: Measurement | None) -> float | None:
    """How many times longer one takes than the other: the median over the rounds in which both were timed."""
    if slower is None or faster is None:
        return None
    pairs = zip(slower.times_ms, faster.times_ms, strict=False)  # an interrupted round has one time less
    return statistics.median(one / other for one, other in pairs)


def median_interval(slower: Measurement, faster: Measurement) -> tuple[float, float]:
    """Between which values the true median of `ratio` is, with 95 % confidence: two of the sorted ratios.

    Half of all ratios are below the true median, so the number of measured ones below it is nearly always within one
    square root of the half.
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


def _logits_tables(record: Record) -> list[Table]:
    cases = [
        case
        for network in record.values("network")
        for batch_size in record.values("batch_size")
        if record.find("backbone", **(case := {"network": network, "batch_size": batch_size}))
    ]
    networks, summary = [_classes_table(record, case) for case in cases], _summary_table(record, cases)
    return [*networks, summary] if summary.rows else networks


def _classes_table(record: Record, case: dict[str, Any]) -> Table:
    """One column per number of classes, one row per program."""
    classes = sorted(record.values("num_classes"))
    backbone = record.find("backbone", **case)
    assert backbone is not None
    num_devices = int(backbone.case["num_devices"])

    def find(variant: str, k: int) -> Measurement | None:
        return record.find(variant, **case, num_classes=k)

    def missing(k: int) -> str:
        for entry in record.skipped:
            if {**case, "num_classes": k}.items() <= entry["case"].items():
                return f"left out: {entry['kernel_bytes'] / 1e9:.1f} GB"
        return ""

    def images_per_second(k: int, num_devices: int) -> str:
        measured = find("one_logit", k)
        if measured is None or measured.case["num_devices"] == 1:
            return ""
        return f"{1e3 * case['batch_size'] * num_devices / measured.median_ms:,.1f}"

    def times(variant: str, *, spread: bool = False) -> Callable[[int], str]:
        return lambda k: time_cell(find(variant, k), spread=spread)

    programs = {
        "all logits, ms": times("all_logits", spread=True),
        "one logit, ms": times("one_logit", spread=True),
        "one logit and normalizer of 1,024 rows, ms": times("one_logit_normalized", spread=True),
        "speed-up": lambda k: times_cell(ratio(find("all_logits", k), find("one_logit", k))),
        "limit: all / backbone": lambda k: times_cell(ratio(find("all_logits", k), backbone)),
        "head alone: all logits, ms": times("head_all_logits"),
        "head alone: one logit, ms": times("head_one_logit"),
        "of which an empty program takes, ms": lambda k: time_cell(record.find("empty_program", **case)),
        **{
            f"head alone: one logit and {rows:,} rows, ms": times(f"head_one_logit_normalized_{rows}")
            for rows in NORMALIZER_ROWS
        },
        "head alone: all logits / one logit and 1,024 rows": lambda k: times_cell(
            ratio(find("head_all_logits", k), find("head_one_logit_normalized_1024", k))
        ),
        "PyTorch F.linear, ms": times("torch_linear"),
        "PyTorch adaptive softmax, one class": times("torch_adaptive_softmax"),
        "images/s, one logit, all devices": lambda k: images_per_second(k, num_devices),
        "images/s, one logit, each device": lambda k: images_per_second(k, 1),
        "not measured": missing,
        "paper: all logits, ms for 32": lambda k: str(PAPER_TABLE_3.get(case["network"], {}).get(k, "")),
        "paper: speed-up": lambda k: times_cell(PAPER_SPEED_UPS.get(case["network"], {}).get(k)),
    }
    rows = [[name, *(cell(k) for k in classes)] for name, cell in programs.items()]
    rows = [row for row in rows if any(row[1:])]
    title = (
        f"{case['network']}, batch size {case['batch_size']}{f' on each of {num_devices} devices' * (num_devices > 1)}, "
        f"d = {backbone.case['num_features']}: the backbone alone takes {time_cell(backbone, spread=True)} ms"
    )
    dimmed = frozenset(i for i, row in enumerate(rows) if row[0].startswith("paper"))
    return Table(title, ["k", *map(class_name, classes)], rows, dimmed=dimmed)


def _summary_table(record: Record, cases: Sequence[dict[str, Any]]) -> Table:
    headings = [
        *("network", "batch", "k", "one logit / backbone", "max / min over k", "speed-up", "limit"),
        *("of the limit", "PyTorch head / ours"),
    ]

    rows = []
    for case in cases:
        ones = record.find_all("one_logit", **case)
        if not ones:
            continue
        one, backbone = max(ones, key=lambda m: int(m.case["num_classes"])), record.find("backbone", **case)
        assert backbone is not None
        k, (low, high) = int(one.case["num_classes"]), median_interval(one, backbone)
        programs = ("all_logits", "head_all_logits", "torch_linear")
        every, head, peer = (record.find(name, **case, num_classes=k) for name in programs)
        # Relative to the smallest median, round by round.
        flattest = min(ones, key=lambda m: m.median_ms)
        over_smallest = max(ratio(m, flattest) or 0.0 for m in ones)
        speed_up, limit = ratio(every, one), ratio(every, backbone)
        cells = [
            f"{ratio(one, backbone):.3f} ({low:.3f} to {high:.3f})",
            f"{over_smallest:.3f}" if len(ones) > 1 else "",
            *(times_cell(speed_up), times_cell(limit)),
            f"{speed_up / limit:.1%}" if speed_up and limit else "",
            times_cell(ratio(peer, head)),
        ]
        rows.append([case["network"], str(case["batch_size"]), class_name(k), *cells])
    return Table("One logit against all of them", headings, rows)


def _loss_tables(record: Record) -> list[Table]:
    find = record.find
    optax = find("optax_cross_entropy")
    columns = [
        Column("loss", lambda name: name.replace("optax_", "optax ").replace("authors_", "authors' ")),
        Column("ms", lambda name: time_cell(find(name), spread=True)),
        Column("times optax CE", lambda name: ratio(find(name), optax), "{:.2f}"),
    ]
    if any(m.variant.startswith("torch_") for m in record.measurements):
        columns += [
            Column("PyTorch ms", lambda name: time_cell(find(f"torch_{name}"))),
            Column("PyTorch / ours", lambda name: ratio(find(f"torch_{name}"), find(name)), "x{:.2f}"),
        ]
    names = [name for name in ("optax_cross_entropy", "authors_batch_cross_entropy", *LOSSES) if find(name)]
    return [Table.of("Value and gradient; smaller is faster", columns, names)]


def _metric_tables(record: Record) -> list[Table]:
    columns = [
        Column("n", lambda m: m.case["num_examples"], "{:,}"),
        Column("k", lambda m: m.case["num_classes"], "{:,}"),
        Column("ours, ms", lambda m: time_cell(m, spread=True)),
    ]
    for name in (name for name in ("scikit_learn", "torchmetrics") if record.find(name)):
        columns += [
            Column(f"{name} ms", lambda m, name=name: time_cell(record.find(name, **m.case))),
            Column(f"{name} / ours", lambda m, name=name: ratio(record.find(name, **m.case), m), "x{:.2f}"),
        ]
    title = "Exact AUPRC and precision at recall of every class"
    return [Table.of(title, columns, record.find_all("pols_jax"))]


def _network_tables(record: Record) -> list[Table]:
    """One table of forward passes and one of training steps: one row for every network, batch size and width."""

    def find(variant: str, m: Measurement) -> Measurement | None:
        found = record.find(variant, **{key: m.case[key] for key in ("network", "batch_size", "width")})
        if found is None:
            return None
        steps = int(found.case.get("steps", 1))  # one call may do several
        return dataclasses.replace(found, times_ms=[ms / steps for ms in found.times_ms])

    def times(heading: str, variant: str, *, spread: bool = False) -> Column:
        return Column(heading, lambda m: time_cell(find(variant, m), spread=spread))

    def table(title: str, row: str, own_times: Sequence[Column], *, ours: str, xla: str, torch: str) -> Table:
        def memory(m: Measurement) -> str:
            now, before = find(ours, m), find(xla, m)
            if now is None or before is None or "memory_bytes" not in now.case:
                return ""
            sizes = int(now.case["memory_bytes"]), int(before.case["memory_bytes"])
            return f"{sizes[0] / 1e6:,.0f} MB, x{sizes[0] / sizes[1]:.2f}"

        columns = [
            Column("network", lambda m: m.case["network"]),
            Column("width", lambda m: m.case["width"]),
            Column("batch", lambda m: m.case["batch_size"]),
            *own_times,
            times("XLA's convolutions, ms", xla),
            times("PyTorch, ms", torch),
            Column("ours / XLA's", lambda m: ratio(find(ours, m), find(xla, m)), "{:.2f}"),
            Column("ours / PyTorch", lambda m: ratio(find(ours, m), find(torch, m)), "{:.2f}"),
            Column("memory, against XLA's", memory),
        ]
        return Table.of(title, columns, record.find_all(row))

    forward = [times("ms", "forward_auto", spread=True)]
    step = [times("in a compiled loop, ms", "steps_in_loop", spread=True), times("alone, ms", "step_auto")]
    of_forward = {"ours": "forward_auto", "xla": "forward_xla", "torch": "torch_forward"}
    of_step = {"ours": "steps_in_loop", "xla": "step_xla", "torch": "torch_step"}
    tables = [
        table("Forward pass, images to features", "forward_auto", forward, **of_forward),
        table("Training step", "step_auto", step, **of_step),
    ]
    return [table for table in tables if table.rows]


def time_cell(measurement: Measurement | None, *, spread: bool = False) -> str:
    """The median as a table shows it, with half the distance of the quartiles if asked; nothing if it was not measured."""
    if measurement is None:
        return ""
    text = _milliseconds(measurement.median_ms)
    first, third = measurement.spread_ms
    return f"{text} ±{_milliseconds((third - first) / 2)}" if spread else text


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{1 if value >= 100 else 2 if value >= 1 else 3}f}"


def times_cell(value: float | None) -> str:
    """A ratio as a table shows it; nothing if it was not measured."""
    return "" if value is None else f"x{value:.2f}"
