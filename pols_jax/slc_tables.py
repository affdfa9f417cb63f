"""From evaluation records to tables: on the terminal, in Markdown and in CSV.

A record is what `pols_jax.evaluation.evaluate` returns and writes as ``slc.json``. Records hold the measures; tables print
one minus them, as the paper does: smaller is better.
"""

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from pols_jax import paper_results
from pols_jax.evaluation import MEASURES
from pols_jax.losses import ALIGNED, LOSSES
from pols_jax.metrics import relative_improvement
from pols_jax.runs import Run

Record = Mapping[str, Any]

_HEADINGS = {"auprc": "1-AUPRC", "precision_at_0.9": "1-P@0.9", "precision_at_0.99": "1-P@0.99"}
_THRESHOLD_COLUMNS = (
    "loss",
    "rule",
    *(
        f"{kind}: {measure}"
        for kind in ("per class", "one for all")
        for measure in ("recall", "precision", "held in")
    ),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      name: The loss, or what else the line is about.
      one_logit: One minus each of `MEASURES` with one logit; None where there is no number.
      all_logits: The same with all logits.
      accuracy: Classification accuracy.
      violation_rate: The share of pairs that violate the principle.
      separation_margin: The smallest true logit minus the largest false one.
      is_quoted: Whether the numbers are the paper's.
      ends_section: Whether a line is drawn below.
      is_percentage: Whether the errors are to be printed in percent.
    """

    name: str
    one_logit: tuple[float | None, ...]
    all_logits: tuple[float | None, ...] = (None, None, None)
    accuracy: float | None = None
    violation_rate: float | None = None
    separation_margin: float | None = None
    is_quoted: bool = False
    ends_section: bool = False
    is_percentage: bool = False

    def cells(self) -> list[str]:
        """The line as text."""
        number = "{:.1%}" if self.is_percentage else "{:.3f}" if self.is_quoted else "{:.4f}"
        errors = [*self.one_logit, *self.all_logits]
        return [
            self.name,
            *("" if error is None else number.format(error) for error in errors),
            "" if self.accuracy is None else f"{self.accuracy:.4f}",
            "" if self.violation_rate is None else f"{self.violation_rate:.2e}",
            "" if self.separation_margin is None else f"{self.separation_margin:.2f}",
        ]


def slc_table(records: Sequence[Record], *, console: Console | None = None) -> None:
    """Prints the table of some runs, one block for each data set, and what it says in plain words.

    Args:
      records: Evaluation records, in any order.
      console: Where to print; standard output if None.

    Examples:
      >>> measures = {"auprc": 0.5, "precision_at_0.9": 0.25, "precision_at_0.99": 0.125}
      >>> record = {"loss": "cross_entropy", "dataset": "glyphs", "split": "test", "num_classes": 10,
      ...           "num_examples": 30, "slc": measures, "all_logits": measures, "accuracy": 0.5,
      ...           "violation_rate": 0.01, "separation_margin": -1.0}
      >>> out = io.StringIO()
      >>> slc_table([record], console=Console(file=out, width=140))
      >>> "cross_entropy" in out.getvalue()
      True
    """
    console = console or _standard_output()
    for group in group_by_data(records):
        lines = [(row.cells(), row.ends_section, "dim" if row.is_quoted else None) for row in slc_rows(group)]
        _print_table(console, _title(group[0]), _column_names(), lines, names=1, first_part=3)
        for sentence in conclusions(group):
            console.print(sentence, soft_wrap=True, highlight=False)


def slc_markdown(records: Sequence[Record]) -> str:
    """Writes the same table in Markdown, with what the thresholds give on the test split.

    Examples:
      >>> print(slc_markdown([]))
      <BLANKLINE>
    """
    parts = []
    for group in group_by_data(records):
        parts += [
            f"### {_title(group[0])}",
            markdown_table(_column_names(), [r.cells() for r in slc_rows(group)]),
        ]
        parts += conclusions(group)
        parts += [
            f"Thresholds chosen on the validation split, measured on {group[0]['split']}:",
            markdown_table(
                _THRESHOLD_COLUMNS, [cells for r in sort_by_loss(group) for cells in threshold_cells(r)]
            ),
        ]
    return "\n\n".join(parts) + "\n"


def slc_csv(records: Sequence[Record]) -> str:
    """Writes one line per run with the measures themselves (not one minus them) at full precision.

    Examples:
      >>> slc_csv([]).split(",")[:2]
      ['loss', 'dataset']
    """
    single = (
        "loss",
        "dataset",
        "split",
        "run",
        "step",
        "learning_rate",
        "batch_size",
        "num_examples",
        "num_classes",
    )
    ends = ("accuracy", "violation_rate", "separation_margin")
    groups = ("slc", "all_logits")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*single, *(f"{group}_{measure}" for group in groups for measure in MEASURES), *ends])
    for record in sort_by_loss(records):
        measures = [record[group][measure] for group in groups for measure in MEASURES]
        writer.writerow([*(record[n] for n in single), *measures, *(record[n] for n in ends)])
    return out.getvalue()


def per_class_csv(runs: Sequence[str | Path]) -> str:
    """Writes one line per run and class, from the evaluated run directories.

    Args:
      runs: Run directories that hold ``slc.npz`` and ``class_names.json``.

    Returns:
      CSV with the measures of each class with one logit and with all logits; empty cells for a class without examples.
    """
    measures = [f"{group}{measure}" for group in ("", "all_logits_") for measure in MEASURES]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["loss", "class_id", "class", "num_examples", *measures])
    for run in map(Run.open, runs):
        with np.load(run.directory / "slc.npz") as arrays:
            columns = [arrays[name].tolist() for name in ("class_sizes", *measures)]
        for class_id, (name, size, *values) in enumerate(zip(run.class_names, *columns, strict=True)):
            writer.writerow([run.config.loss, class_id, name, size, *("" if v != v else v for v in values)])
    return out.getvalue()


def threshold_table(records: Sequence[Record], *, console: Console | None = None) -> None:
    """Prints what the thresholds that were chosen on the validation split really give.

    Args:
      records: Evaluation records, in any order.
      console: Where to print; standard output if None.
    """
    console = console or _standard_output()
    lines = []
    for record in sort_by_loss(records):
        for i, (loss, *cells) in enumerate(rules := threshold_cells(record)):
            lines.append((["" if i else loss, *cells], i == len(rules) - 1, None))
    title = "Thresholds chosen on the validation split"
    _print_table(console, title, _THRESHOLD_COLUMNS, lines, names=2, first_part=3)


def threshold_cells(record: Record) -> list[list[str]]:
    """What each threshold rule gives, one line per rule.

    A line has the loss and the rule; then, for a threshold per class and for one threshold for all classes, the mean
    recall, the mean precision, and in how many classes the wanted value was reached.

    Examples:
      >>> entry = {"mean_recall": 0.5, "mean_precision": None, "num_classes": 9, "num_classes_promise_held": 4}
      >>> kinds = [entry | {"rule": "recall=0.9", "chosen_for": kind} for kind in ("class", "all classes")]
      >>> threshold_cells({"loss": "max_margin", "thresholds": kinds})
      [['max_margin', 'recall=0.9', '0.500', '', '4/9', '0.500', '', '4/9']]
    """
    rules: dict[str, list[str]] = {}
    for entry in record["thresholds"]:
        held = entry["num_classes_promise_held"]
        rules.setdefault(entry["rule"], [record["loss"], entry["rule"]]).extend(
            [
                *("" if entry[n] is None else f"{entry[n]:.3f}" for n in ("mean_recall", "mean_precision")),
                "" if held is None else f"{held}/{entry['num_classes']}",
            ]
        )
    return list(rules.values())


def slc_rows(records: Sequence[Record]) -> list[Row]:
    """Builds the lines of the table of one data set.

    Args:
      records: Evaluation records of one data set, in any order.

    Returns:
      One line per run in the order of `LOSSES`, not aligned ones first, each followed by the paper's line where the paper
      has one; last, the mean relative improvement, if there are runs of both kinds.
    """
    rows: list[Row] = []
    ordered = sorted(sort_by_loss(records), key=lambda record: record["loss"] in ALIGNED)
    for i, record in enumerate(ordered):
        dataset, loss = record["dataset"], record["loss"]
        rows.append(
            Row(
                loss,
                _errors(record["slc"]),
                _errors(record["all_logits"]),
                record["accuracy"],
                record["violation_rate"],
                record["separation_margin"],
            )
        )
        if quoted := paper_results.ONE_LOGIT.get(dataset, {}).get(loss):
            in_full = paper_results.ALL_LOGITS.get(dataset, {}).get(loss, (None, None, None))
            rows.append(Row("  in the paper", quoted, in_full, is_quoted=True))
        next_loss = ordered[i + 1]["loss"] if i + 1 < len(ordered) else None
        if next_loss is None or (next_loss in ALIGNED) != (loss in ALIGNED):
            rows[-1] = dataclasses.replace(rows[-1], ends_section=True)
    if improvement := mean_improvement({record["loss"]: _errors(record["slc"]) for record in records}):
        rows.append(Row("mean relative improvement", improvement, is_percentage=True))
        if in_paper := paper_results.IMPROVEMENT.get(records[0]["dataset"]):
            rows.append(Row("  in the paper", in_paper, is_quoted=True, is_percentage=True))
    return rows


def mean_improvement(errors: Mapping[str, Sequence[float]]) -> tuple[float, ...] | None:
    """How much smaller the mean error of the aligned losses is, for each measure.

    Args:
      errors: Loss -> one minus each measure.

    Returns:
      `relative_improvement` of each measure, or None unless there are losses of both kinds.

    Examples:
      >>> mean_improvement({"cross_entropy": [0.4], "batch_cross_entropy": [0.1]})
      (0.75,)
    """
    kinds = [
        [values for loss, values in errors.items() if (loss in ALIGNED) is kind] for kind in (True, False)
    ]
    if not all(kinds):
        return None
    aligned, others = (np.asarray(kind, np.float32) for kind in kinds)
    return tuple(float(relative_improvement(*columns)) for columns in zip(aligned.T, others.T, strict=True))


def conclusions(records: Sequence[Record]) -> list[str]:
    """What the records of one data set say, in plain words and whichever way it falls.

    Args:
      records: Evaluation records of one data set, in any order.

    Returns:
      A sentence on the best loss of each kind, aligned or not, that compares its one logit with all its logits; and if
      there are both, a sentence that compares the two.

    Examples:
      >>> def record(loss, one, every):
      ...     return {"loss": loss, "slc": {"auprc": one}, "all_logits": {"auprc": every}}
      >>> for line in conclusions([record("cross_entropy", 0.6, 0.8), record("batch_cross_entropy", 0.75, 0.78)]):
      ...     print(line)
      cross_entropy: 1-AUPRC is 0.400 with one logit and 0.200 with all logits; one logit alone costs 0.200.
      batch_cross_entropy: 1-AUPRC is 0.250 with one logit and 0.220 with all logits; one logit alone costs 0.030.
      One logit of batch_cross_entropy makes 37.5 % less error than one logit of cross_entropy.
    """
    best = []
    for is_aligned in (False, True):
        candidates = [record for record in sort_by_loss(records) if (record["loss"] in ALIGNED) is is_aligned]
        if candidates:
            best.append(max(candidates, key=lambda record: record["slc"]["auprc"]))
    sentences, errors = [], []
    for record in best:
        one, every = (1 - record[scores]["auprc"] for scores in ("slc", "all_logits"))
        verdict = f"costs {one - every:.3f}" if one >= every else f"wins {every - one:.3f}"
        sentences.append(
            f"{record['loss']}: 1-AUPRC is {one:.3f} with one logit and {every:.3f} with all logits; "
            f"one logit alone {verdict}."
        )
        errors.append(one)
    if len(best) == 2 and errors[0] > 0:
        change = errors[1] / errors[0] - 1
        sentences.append(
            f"One logit of {best[1]['loss']} makes {abs(change):.1%} {'less' if change < 0 else 'more'} error than "
            f"one logit of {best[0]['loss']}.".replace("%", " %")
        )
    return sentences


def group_by_data(records: Sequence[Record]) -> list[list[Record]]:
    """Records of the same data and split together, in the order in which they first appear."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault((record["dataset"], record["split"], record["num_classes"]), []).append(record)
    return list(groups.values())


def sort_by_loss(records: Sequence[Record]) -> list[Record]:
    """Records in the order of `LOSSES`."""
    order = list(LOSSES)
    return sorted(records, key=lambda record: order.index(record["loss"]))


def _errors(measures: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(1 - measures[name] for name in MEASURES)


def _title(record: Record) -> str:
    return (
        f"{record['dataset']}, {record['split']} split: {record['num_examples']:,} examples of "
        f"{record['num_classes']:,} classes. Smaller is better, but for accuracy and margin."
    )


def _column_names() -> list[str]:
    groups = [
        f"{group} {_HEADINGS[measure]}" for group in ("one logit", "all logits") for measure in MEASURES
    ]
    return ["loss", *groups, "accuracy", "violations", "margin"]


def _standard_output() -> Console:
    console = Console()
    # A file or a pipe has no width of its own: nothing is to be cut off there.
    return console if console.is_terminal else Console(width=160)


def _print_table(
    console: Console,
    title: str,
    headings: Sequence[str],
    lines: Sequence[tuple[Sequence[str], bool, str | None]],
    *,
    names: int,
    first_part: int,
) -> None:
    """Prints a table; where the terminal is too narrow, in two parts that both have the columns of names.

    Args:
      console: Where to print.
      title: What is above the table.
      headings: One per column; a colon or the beginning of a measure starts a second line.
      lines: The cells of each line, whether a rule is drawn below it, and its style.
      names: How many of the first columns are names.
      first_part: How many columns of numbers the first part has.
    """

    def part(columns: Sequence[int]) -> Table:
        table = Table(title=title, title_justify="left", box=box.HORIZONTALS, padding=(0, 1, 0, 0))
        for i in columns:
            heading = headings[i].replace(" 1-", "\n1-").replace(": ", "\n")
            if i < names:
                table.add_column(heading, overflow="fold")
            else:
                table.add_column(heading, justify="right", no_wrap=True)
        for cells, ends_section, style in lines:
            table.add_row(*(cells[i] for i in columns), end_section=ends_section, style=style)
        return table

    everything = range(len(headings))
    whole = part(everything)
    unlimited = console.options.update(max_width=1000)
    if console.measure(whole, options=unlimited).maximum <= console.width:
        console.print(whole)
        return
    cut = names + first_part
    for columns in (everything[:cut], [*everything[:names], *everything[cut:]]):
        console.print(part(columns))


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    Examples:
      >>> print(markdown_table(["k", "ms"], [["1", "2.00"]]))
      | k | ms |
      | --- | --- |
      | 1 | 2.00 |
    """
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines)
