"""From evaluation records to tables: on the terminal, in Markdown and in CSV.

A record is the `SlcRecord` that `pols_jax.evaluation.evaluate` returns and writes as ``slc.json``. Records hold the
measures; tables print one minus them, as the paper does: smaller is better.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pols_jax.evaluation import paper_results
from pols_jax.evaluation.slc_records import MEASURES, SlcRecord, ThresholdScore, read_class_arrays
from pols_jax.losses import ALIGNED, LOSSES
from pols_jax.metrics import relative_improvement
from pols_jax.tables import Column, Table, to_csv
from pols_jax.training.runs import Run

SCORES: Mapping[str, str] = {
    "one logit": "slc",
    "with normalizer": "normalized",
    "all logits": "all_logits",
}
"""What a class may be scored by -> the field of `SlcRecord` that has its measures. One that no run has is not shown."""

_PAPER = {"slc": paper_results.ONE_LOGIT, "all_logits": paper_results.ALL_LOGITS}
_MEASURES = ("1-AUPRC", "1-P@0.9", "1-P@0.99")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      name: The loss, or what else the line is about.
      errors: Field of `SCORES` -> one minus each of `MEASURES`; None leaves a cell empty.
      form: How errors are printed.
      record: What else is printed; None where there is nothing.
      is_quoted: Whether the numbers are the paper's.
      ends_section: Whether a line is drawn below.
    """

    name: str
    errors: Mapping[str, tuple[float | None, ...]]
    form: str = "{:.4f}"
    record: SlcRecord | None = None
    is_quoted: bool = False
    ends_section: bool = False


def slc_csv(records: Sequence[SlcRecord]) -> str:
    """Writes one line per run with the measures themselves (not one minus them) at full precision.

    Examples:
      >>> slc_csv([]).split(",")[:2]
      ['loss', 'dataset']
    """
    training = ("loss", "dataset", "split", "run", "step", "learning_rate", "batch_size")
    first = (*training, "num_examples", "num_classes")
    last = ("accuracy", "violation_rate", "separation_margin")
    measures = [(field, measure) for field in SCORES.values() for measure in MEASURES]
    rows = []
    for values in (record.to_json() for record in sort_by_loss(records)):
        measured = [(values[field] or {}).get(measure) for field, measure in measures]
        rows.append([*(values[name] for name in first), *measured, *(values[name] for name in last)])
    return to_csv([*first, *map("_".join, measures), *last], rows)


def per_class_csv(runs: Sequence[str | Path]) -> str:
    """Writes the measures of each class by each score, one line per evaluated run and class.

    The cells of a class without examples are empty.
    """
    opened = [Run.open(run) for run in runs]
    found = [read_class_arrays(run) for run in opened]
    names = [f"{group}{measure}" for group in ("", "normalized_", "all_logits_") for measure in MEASURES]
    measures = [name for name in names if any(name in arrays for arrays in found)]
    rows = []
    for run, arrays in zip(opened, found, strict=True):
        empty = np.full(run.num_classes, np.nan)
        columns = [arrays.get(name, empty).tolist() for name in ("class_sizes", *measures)]
        for class_id, (name, size, *values) in enumerate(zip(run.class_names, *columns, strict=True)):
            rows.append([run.config.loss, class_id, name, size, *(None if v != v else v for v in values)])
    return to_csv(["loss", "class_id", "class", "num_examples", *measures], rows)


def threshold_tables(records: Sequence[SlcRecord]) -> list[Table]:
    """What the thresholds that were chosen on the validation split really give, one table for each data set.

    There is one row per loss and rule: for a threshold per class and for one threshold for all classes, the mean recall,
    the mean precision, and in how many classes the wanted value was reached.
    """
    return [_threshold_table(group) for group in group_by_data(records)]


def _threshold_table(records: Sequence[SlcRecord]) -> Table:
    lines, last = [], set()
    for record in sort_by_loss(records):
        rules: dict[str, dict[str, ThresholdScore]] = {}
        for entry in record.thresholds:
            rules.setdefault(entry.rule, {})[entry.chosen_for] = entry
        lines += [(record.loss, rule, scores) for rule, scores in rules.items()]
        last.add(len(lines) - 1)

    def column(heading: str, kind: str, cell: Callable[[ThresholdScore], Any], form: str = "{}") -> Column:
        return Column(heading, lambda line: cell(line[2][kind]) if kind in line[2] else None, form)

    def held(entry: ThresholdScore) -> str | None:
        count = entry.num_classes_promise_held
        return None if count is None else f"{count}/{entry.num_classes}"

    columns = [Column("loss", lambda line: line[0]), Column("rule", lambda line: line[1])]
    for name, kind in {"per class": "class", "one for all": "all classes"}.items():
        columns += [
            column(f"{name}: recall", kind, lambda entry: entry.mean_recall, "{:.3f}"),
            column(f"{name}: precision", kind, lambda entry: entry.mean_precision, "{:.3f}"),
            column(f"{name}: held in", kind, held),
        ]
    score = "one logit with normalizer" if any(record.normalized for record in records) else "one logit"
    title = f"{records[0].dataset}: thresholds of {score}, chosen on validation and measured on {records[0].split}"
    return Table.of(title, columns, lines, num_names=2, ruled=frozenset(last))


def slc_tables(records: Sequence[SlcRecord]) -> list[Table]:
    """One table for each data set: the errors with each score, accuracy, and how far the principle holds.

    The notes below it say that in plain words.
    """
    return [_slc_table(group) for group in group_by_data(records)]


def _slc_table(records: Sequence[SlcRecord]) -> Table:
    rows = slc_rows(records)

    def error(row: Row, field: str, i: int) -> str | None:
        value = row.errors[field][i] if field in row.errors else None
        return None if value is None else row.form.format(value)

    shown = {title: field for title, field in SCORES.items() if any(field in row.errors for row in rows)}
    columns = [
        Column("loss", lambda row: row.name),
        *(
            Column(f"{title}: {measure}", lambda row, field=field, i=i: error(row, field, i))
            for title, field in shown.items()
            for i, measure in enumerate(_MEASURES)
        ),
        Column("accuracy", lambda row: getattr(row.record, "accuracy", None), "{:.4f}"),
        Column("violations", lambda row: getattr(row.record, "violation_rate", None), "{:.2e}"),
        Column("margin", lambda row: getattr(row.record, "separation_margin", None), "{:.2f}"),
    ]
    if any(record.steps not in (None, record.step) for record in records):
        columns.insert(1, Column("step", lambda row: row.record and _step_of(row.record)))
    title = (
        f"{records[0].dataset}, {records[0].split} split: {records[0].num_examples:,} examples of "
        f"{records[0].num_classes:,} classes. Smaller is better, but for accuracy and margin."
    )
    ruled, dimmed = (
        frozenset(i for i, row in enumerate(rows) if getattr(row, name))
        for name in ("ends_section", "is_quoted")
    )
    return Table.of(title, columns, rows, ruled=ruled, dimmed=dimmed, notes=conclusions(records))


def _step_of(record: SlcRecord) -> str:
    """Which step was measured, where that is not the last one of every run."""
    return f"{record.step:,} ({'last' if record.steps in (None, record.step) else 'best'})"


def slc_rows(records: Sequence[SlcRecord]) -> list[Row]:
    """Builds the lines of the table of one data set.

    That is one line per run in the order of `LOSSES`, not aligned ones first, each followed by the paper's line where the
    paper has one; last, the mean relative improvement, if there are runs of both kinds.
    """
    rows: list[Row] = []
    ordered = sorted(sort_by_loss(records), key=lambda record: record.loss in ALIGNED)
    for i, record in enumerate(ordered):
        measured = {field: getattr(record, field) for field in SCORES.values()}
        errors = {field: measures.errors() for field, measures in measured.items() if measures}
        rows.append(Row(record.loss, errors, record=record))
        tables = {field: table.get(record.dataset, {}) for field, table in _PAPER.items()}
        quoted = {field: table[record.loss] for field, table in tables.items() if record.loss in table}
        if quoted:
            rows.append(Row("  in the paper", quoted, "{:.3f}", is_quoted=True))
        is_last = i + 1 == len(ordered)
        if is_last or (ordered[i + 1].loss in ALIGNED) != (record.loss in ALIGNED):
            rows[-1] = dataclasses.replace(rows[-1], ends_section=True)
    if improvement := mean_improvement({record.loss: record.slc.errors() for record in records}):
        rows.append(Row("mean relative improvement", {"slc": improvement}, "{:.1%}"))
        if in_paper := paper_results.IMPROVEMENT.get(records[0].dataset):
            rows.append(Row("  in the paper", {"slc": in_paper}, "{:.1%}", is_quoted=True))
    return rows


def mean_improvement(errors: Mapping[str, Sequence[float]]) -> tuple[float | None, ...] | None:
    """How much smaller the mean error of the aligned losses is, for each measure; None unless there are both kinds.

    A measure in which the others make no error has None.

    Examples:
      >>> mean_improvement({"cross_entropy": [0.4], "batch_cross_entropy": [0.1]})
      (0.75,)
      >>> mean_improvement({"cross_entropy": [0.0], "batch_cross_entropy": [0.0]})
      (None,)
    """
    kinds = [
        [values for loss, values in errors.items() if (loss in ALIGNED) is kind] for kind in (True, False)
    ]
    if not all(kinds):
        return None
    aligned, others = (np.asarray(kind, np.float32) for kind in kinds)
    return tuple(
        float(relative_improvement(ours, theirs)) if theirs.any() else None
        for ours, theirs in zip(aligned.T, others.T, strict=True)
    )


def conclusions(records: Sequence[SlcRecord]) -> list[str]:
    """What the records of one data set say, in plain words and whichever way it falls.

    A sentence on the best loss of each kind, aligned or not, compares its one logit with all its logits; if there are
    both, another one compares the two.
    """
    best = []
    for is_aligned in (False, True):
        candidates = [record for record in sort_by_loss(records) if (record.loss in ALIGNED) is is_aligned]
        if candidates:
            best.append(max(candidates, key=lambda record: record.slc.auprc))
    sentences, errors = [], []
    for record in best:
        one, every = 1 - record.slc.auprc, 1 - record.all_logits.auprc
        verdict = f"costs {one - every:.3f}" if one >= every else f"wins {every - one:.3f}"
        sentences.append(
            f"{record.loss}: 1-AUPRC is {one:.3f} with one logit and {every:.3f} with all logits; "
            f"one logit alone {verdict}."
        )
        if record.normalized is not None:
            error = 1 - record.normalized.auprc
            rows = "affine" if record.normalizer_rows == 1 else f"{record.normalizer_rows:,} rows"
            sentences[-1] += f" With its normalizer ({rows}) one logit has {error:.3f}."
        errors.append(one)
    if len(best) == 2 and errors[0] > 0:
        change = errors[1] / errors[0] - 1
        sentences.append(
            f"One logit of {best[1].loss} makes {abs(change):.1%} {'less' if change < 0 else 'more'} error than "
            f"one logit of {best[0].loss}.".replace("%", " %")
        )
    return sentences


def group_by_data(records: Sequence[SlcRecord]) -> list[list[SlcRecord]]:
    """Records of the same data and split together, in the order in which they first appear."""
    groups: dict[tuple[Any, ...], list[SlcRecord]] = {}
    for record in records:
        groups.setdefault((record.dataset, record.split, record.num_classes), []).append(record)
    return list(groups.values())


def sort_by_loss(records: Sequence[SlcRecord]) -> list[SlcRecord]:
    """Records in the order of `LOSSES`."""
    order = list(LOSSES)
    return sorted(records, key=lambda record: order.index(record.loss))
