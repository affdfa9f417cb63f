"""The tables of README and docs, made from the records in ``results/``.

A record of an experiment is what ``pols train --record`` wrote, see `pols_jax.evaluation.experiment_records`; here it goes by the name
of its file. Everything that was chosen was chosen on the validation split, and studies of hyperparameters show the
validation split alone.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pols_jax.benchmarking.records import Record
from pols_jax.evaluation import paper_results
from pols_jax.evaluation.slc_records import SlcRecord
from pols_jax.evaluation.slc_tables import (
    mean_improvement,
    slc_tables,
    sort_by_loss,
)
from pols_jax.losses import ALIGNED, LOSSES
from pols_jax.tables import Table
from pols_jax.training.config import RunConfig

ExperimentRecord = Mapping[str, Any]

# What a sweep may vary.
_SETTINGS = ("learning_rate", "margin", "alpha", "num_noise", "noise")


@dataclasses.dataclass(frozen=True)
class Study:
    """What one hyperparameter does.

    Attributes:
      title: What is varied, in words.
      setting: The field of `pols_jax.training.RunConfig` that is varied.
      records: The names of the records that vary it.
    """

    title: str
    setting: str
    records: tuple[str, ...]


STUDIES: Mapping[str, Study] = {
    "alpha": Study("alpha of self-normalization", "alpha", ("study_alpha",)),
    "margin": Study("margin of the max-margin losses", "margin", ("study_margin",)),
    "num_noise": Study("noise classes of NCE", "num_noise", ("study_num_noise",)),
    "batch_size": Study(
        "batch size, with the same number of examples seen",
        "batch_size",
        tuple(f"study_batch_size_{size}" for size in (32, 128, 512)),
    ),
    "bias_start": Study(
        "where the biases of the output layer start",
        "bias_init",
        tuple(f"study_bias_start_{start}" for start in (0, 3, 6, 9)),
    ),
}
"""The studies of hyperparameters, by name."""

BY_CLASSES = ("glyphs_10", "glyphs_100", "glyphs_1000", "glyphs")
"""Records of drawn characters that differ in the number of classes alone."""

MNIST_SEEDS = ("mnist_seed_1", "mnist_seed_2", "mnist_seed_3")
"""Records of MNIST that differ in the seed alone."""

CIFAR100_HALF = "cifar100_half_"
"""What the names of the records of CIFAR-100 at half of the width begin with; each has losses of its own."""

CJK = ("cjk", "cjk_adam")
"""Records of the 42,174 Chinese, Japanese and Korean characters that differ in the optimizer."""

CJK_8000 = ("cjk_8000", "cjk_8000_adam")
"""The same with 8,000 of the characters, where optimizers and learning rates are chosen."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a study: the value of the setting, the loss, and what the run measured on the validation split."""

    value: float
    loss: str
    validation: Mapping[str, float]


def study_points(study: Study, records: Mapping[str, ExperimentRecord]) -> list[Point]:
    """The runs of a study, by loss and value.

    Examples:
      >>> run = {"config": {"loss": "max_margin", "margin": 2.0}, "training": [{"validation": {"accuracy": 0.5}}]}
      >>> study_points(STUDIES["margin"], {"study_margin": {"sweep": None, "runs": [run]}})
      [Point(value=2.0, loss='max_margin', validation={'accuracy': 0.5})]
    """
    points = []
    for name in study.records:
        record = records[name]
        if record["sweep"] is None:
            points += [
                Point(getattr(config, study.setting), config.loss, run["training"][-1]["validation"])
                for run in record["runs"]
                for config in [RunConfig.from_json(run["config"])]
            ]
        else:
            points += [
                Point(run[study.setting], loss, run["validation"])
                for loss, tried in record["sweep"].items()
                for run in tried["runs"]
                if run["status"] == "finished"
            ]
    order = list(LOSSES)
    return sorted(points, key=lambda point: (order.index(point.loss), point.value))


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return Table("", headings, rows).markdown()


def study_table(study: Study, records: Mapping[str, ExperimentRecord]) -> str:
    """What a study measured on the validation split."""
    rows = [
        [
            point.loss,
            f"{point.value:g}",
            f"{1 - point.validation['auprc']:.3f}",
            f"{point.validation['accuracy']:.3f}",
            f"{point.validation['violation_rate']:.1e}",
        ]
        for point in study_points(study, records)
    ]
    setting = study.setting.replace("_", " ")
    table = _markdown(
        ["loss", setting, "validation: one logit 1-AUPRC", "validation: accuracy", "violations"], rows
    )
    return f"{table}\n\n{_trained([records[name] for name in study.records])}"


def tried_table(records: Sequence[ExperimentRecord]) -> str:
    """Everything that several experiments tried, with what it measured on the validation split.

    Examples:
      >>> runs = [
      ...     {"learning_rate": 0.1, "status": "finished", "validation": {"auprc": 0.75, "accuracy": 0.5}},
      ...     {"learning_rate": 1.0, "status": "diverged", "validation": {}},
      ... ]
      >>> config = {"model": "mlp", "hidden_sizes": [], "width": 1, "steps": 9, "batch_size": 4, "optimizer": "adam", "seed": 0}
      >>> record = {"experiment": {"optimizer": "adam"}, "sweep": {"cross_entropy": {"runs": runs}}}
      >>> record |= {"runs": [{"config": config}], "environment": {"host": {"cores": 2}, "commit": "1a2b3c"}}
      >>> print(tried_table([record]))
      | loss | learning rate | validation: one logit 1-AUPRC | validation: accuracy |
      | --- | --- | --- | --- |
      | cross_entropy | 0.1 | 0.250 | 0.500 |
      | cross_entropy | 1 | diverged |  |
      <BLANKLINE>
      mlp, 9 steps of 4, adam, seed 0, on 2 cores of a CPU, commit 1a2b3c.
    """
    runs = [
        (loss, {"optimizer": record["experiment"]["optimizer"], **run})
        for loss in LOSSES
        for record in records
        for run in record["sweep"].get(loss, {"runs": []})["runs"]
    ]
    names = _varied([run for _, run in runs], ("optimizer", *_SETTINGS))
    rows = []
    for loss, run in runs:
        settings = [run.get(name, "") for name in names]
        measured = run["validation"]
        rows.append(
            [
                loss,
                *(f"{value:g}" if isinstance(value, float) else str(value) for value in settings),
                *(
                    (f"{1 - measured['auprc']:.3f}", f"{measured['accuracy']:.3f}")
                    if run["status"] == "finished"
                    else (run["status"], "")
                ),
            ]
        )
    headings = [name.replace("_", " ") for name in names]
    table = _markdown(["loss", *headings, "validation: one logit 1-AUPRC", "validation: accuracy"], rows)
    return f"{table}\n\n{_trained(records)}"


def _varied(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """The settings that have several values among the runs that have them at all."""
    return [name for name in names if len({run[name] for run in runs if name in run}) > 1]


def full_table(records: Sequence[ExperimentRecord]) -> str:
    """Every measure of an experiment on the test split, beside the paper's, and what was chosen on validation.

    Args:
      records: Its records; several if its losses were trained by several commands.
    """
    (table,) = slc_tables([test for record in records for test in _tests(record)])
    # Of a group of columns, only the first says its name; the margin is left out.
    headings = [h if h.endswith("1-AUPRC") else h.split(": ")[-1] for h in table.headings[:-1]]
    shown = Table(table.title, headings, [row[:-1] for row in table.rows])
    return "\n\n".join([shown.markdown(), *table.notes, _chosen(records)])


def seeds_table(records: Sequence[ExperimentRecord]) -> str:
    """Mean and range over the seeds of an experiment on the test split, beside the paper's numbers."""
    by_seed = [{test.loss: test for test in _tests(record)} for record in records]
    losses = [loss for loss in LOSSES if all(loss in tests for tests in by_seed)]
    dataset = by_seed[0][losses[0]].dataset
    fields = ("slc", "normalized", "all_logits")

    rows = []
    for loss in losses:
        tests = [tests[loss] for tests in by_seed]
        errors = {
            field: np.array([m.errors() for test in tests if (m := getattr(test, field))]) for field in fields
        }
        cells = [*errors["slc"].T, errors["normalized"][:, 0], errors["all_logits"][:, 0]]
        shown = [_spread(values, ".4f") for values in cells]
        rows.append([loss, *shown, _spread([test.accuracy for test in tests], ".4f")])
        quoted = [f"{value:.3f}" for value in paper_results.ONE_LOGIT[dataset][loss]]
        every = paper_results.ALL_LOGITS[dataset].get(loss)
        rows.append(["in the paper", *quoted, "", "" if every is None else f"{every[0]:.3f}", ""])
    gains = [mean_improvement({loss: tests[loss].slc.errors() for loss in losses}) for tests in by_seed]
    shown = [_spread(values, ".1%") for values in zip(*gains, strict=True)]  # MNIST always leaves an error
    rows.append(["mean relative improvement", *shown, "", "", ""])
    quoted = [f"{value:.1%}" for value in paper_results.IMPROVEMENT[dataset]]
    rows.append(["in the paper", *quoted, "", "", ""])
    headings = ["loss", "one logit: 1-AUPRC", "1-P@0.9", "1-P@0.99"]
    headings += ["with an affine normalizer: 1-AUPRC", "all logits: 1-AUPRC", "accuracy"]
    seeds = [str(record["experiment"]["seed"]) for record in records]
    commits = dict.fromkeys(record["environment"]["commit"] for record in records)
    how = _chosen(records[:1]).partition(", seed")[0]
    note = f"{how}; mean (smallest to largest) of seeds {', '.join(seeds)}; commit {', '.join(commits)}."
    return f"{_markdown(headings, rows)}\n\n{note}"


def trials_table(record: Mapping[str, Any]) -> str:
    """What a study of `validation_study` tried, and how that did on the validation split.

    Examples:
      >>> trials = [{"settings": {"optimizer": "sgd", "epsilon": 0.0}, "validation": {"auprc": 0.75, "accuracy": 0.5}}]
      >>> trials += [{"settings": {"optimizer": "adam", "epsilon": 1e-6}, "validation": {}}]
      >>> print(trials_table({"trials": trials}))
      | optimizer | epsilon | validation: one logit 1-AUPRC | validation: accuracy |
      | --- | --- | --- | --- |
      | sgd | 0 | 0.2500 | 0.5000 |
      | adam | 1e-06 | diverged |  |
    """
    rows = []
    for trial in record["trials"]:
        measured = trial["validation"]
        cells = (
            [f"{1 - measured['auprc']:.4f}", f"{measured['accuracy']:.4f}"] if measured else ["diverged", ""]
        )
        rows.append(
            [*(f"{v:g}" if isinstance(v, float) else str(v) for v in trial["settings"].values()), *cells]
        )
    names = [name.replace("_", " ") for name in record["trials"][0]["settings"]]
    table = _markdown([*names, "validation: one logit 1-AUPRC", "validation: accuracy"], rows)
    made = [f"Commit {record['environment']['commit']}."] if "environment" in record else []
    return "\n\n".join([table, *made, *_trained_in_full(record.get("full", []))])


def _trained_in_full(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the best trial of a study reaches on the test split when it is trained in full, in a sentence."""
    if not runs:
        return []
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in runs[0]["settings"].items())
    errors = _spread([1 - run["test"]["auprc"] for run in runs], ".4f")
    accuracies = _spread([run["test"]["accuracy"] for run in runs], ".4f")
    seeds = ", ".join(str(run["seed"]) for run in runs)
    return [
        f"The best of them in full, {runs[0]['config']['steps']:,} steps with {settings}: 1-AUPRC {errors} and accuracy "
        f"{accuracies} on the test split, mean (smallest to largest) of seeds {seeds}."
    ]


def _spread(values: Sequence[float], form: str) -> str:
    """The mean of some values, and their range."""
    mean, least, most = (format(float(f(values)), form) for f in (np.mean, min, max))
    return f"{mean} ({least} to {most})"


def short_table(record: ExperimentRecord, losses: Sequence[str] = tuple(LOSSES)) -> str:
    """What an experiment says at a glance, on the test split."""
    rows = []
    optimizers = {run["config"]["loss"]: run["config"]["optimizer"] for run in record["runs"]}
    for test in sort_by_loss([test for test in _tests(record) if test.loss in losses]):
        shared = next(
            entry
            for entry in test.thresholds
            if (entry.rule, entry.chosen_for) == ("precision=0.9", "all classes")
        )
        cells = [
            f"{1 - test.slc.auprc:.3f}",
            f"{1 - test.all_logits.auprc:.3f}",
            f"{test.accuracy:.3f}",
            "" if shared.mean_recall is None else f"{shared.mean_recall:.3f}",
        ]
        name = test.loss
        if len(set(optimizers.values())) > 1:
            name += f" ({optimizers[test.loss]})"
        rows.append([name, "yes" if test.loss in ALIGNED else "no", *cells])
    return _markdown(
        [
            *("loss", "aligned", "**one logit**: 1-AUPRC", "all logits: 1-AUPRC", "accuracy"),
            "recall with one threshold for all classes, precision 0.9",
        ],
        rows,
    )


def drawn_table(exact: ExperimentRecord, sampled: ExperimentRecord) -> str:
    """What NCE with all classes and with drawn ones reaches, step by step and minute by minute."""
    rows = []
    for record in (exact, sampled):
        run = next(
            each for each in record["runs"] if each["config"]["loss"] == "noise_contrastive_estimation"
        )
        config, per_second = run["config"], run["steps_per_second"]
        for look in run["training"]:
            validation = look["validation"]
            rows.append(
                [
                    f"{config['head']}, {config['num_noise']:,} noise classes",
                    f"{look['step']:,}",
                    f"{look['step'] / per_second / 60:.1f}",
                    f"{1 - validation['auprc']:.3f}",
                    f"{validation['accuracy']:.3f}",
                ]
            )
    headings = ("head", "steps", "minutes", "validation: one logit 1-AUPRC", "validation: accuracy")
    return _markdown(headings, rows)


def best_of(records: Sequence[ExperimentRecord]) -> ExperimentRecord:
    """Of several experiments on the same data, the run of each loss whose one logit does best on the validation split.

    Examples:
      >>> def record(optimizer, auprc):
      ...     config = {"loss": "max_margin", "optimizer": optimizer}
      ...     return {"runs": [{"config": config, "training": [{"validation": {"auprc": auprc}}]}]}
      >>> [run["config"]["optimizer"] for run in best_of([record("adam", 0.5), record("momentum", 0.7)])["runs"]]
      ['momentum']
    """
    best: dict[str, Any] = {}
    for run in (run for record in records for run in record["runs"]):
        loss = run["config"]["loss"]
        if loss not in best or _validation_auprc(run) > _validation_auprc(best[loss]):
            best[loss] = run
    return {"runs": list(best.values())}


def _validation_auprc(run: Mapping[str, Any]) -> float:
    return run["training"][-1]["validation"]["auprc"]


def common_losses(records: Sequence[ExperimentRecord]) -> list[str]:
    """The losses that learned in all of some experiments: at least half of the best accuracy on the validation split.

    Examples:
      >>> def record(**accuracies):
      ...     return {
      ...         "runs": [
      ...             {"config": {"loss": loss}, "training": [{"validation": {"accuracy": accuracy}}]}
      ...             for loss, accuracy in accuracies.items()
      ...         ]
      ...     }
      >>> common_losses([record(cross_entropy=0.8, max_margin=0.1), record(cross_entropy=0.8, max_margin=0.7)])
      ['cross_entropy']
    """
    learned = []
    for record in records:
        accuracies = {
            run["config"]["loss"]: run["training"][-1]["validation"]["accuracy"] for run in record["runs"]
        }
        learned.append({loss for loss, value in accuracies.items() if value >= max(accuracies.values()) / 2})
    return [loss for loss in LOSSES if all(loss in losses for losses in learned)]


def errors_by_loss(record: ExperimentRecord, losses: Sequence[str]) -> dict[str, tuple[float, float]]:
    """One minus the AUPRC on the test split, with one logit and with all logits."""
    tests = sort_by_loss([test for test in _tests(record) if test.loss in losses])
    return {test.loss: (1 - test.slc.auprc, 1 - test.all_logits.auprc) for test in tests}


def _tests(record: ExperimentRecord) -> list[SlcRecord]:
    """What the runs of an experiment measured on the test split."""
    return [SlcRecord.from_json(run["test"]) for run in record["runs"]]


def one_logit_improvement(errors: Mapping[str, tuple[float, float]]) -> float | None:
    """How much smaller the mean error of one logit is with the aligned losses; None where there is no error to reduce.

    Args:
      errors: What `errors_by_loss` returned.

    Examples:
      >>> round(one_logit_improvement({"cross_entropy": (0.4, 0.1), "batch_cross_entropy": (0.1, 0.1)}), 3)
      0.75
    """
    improvement = mean_improvement({loss: [one] for loss, (one, _) in errors.items()})
    return improvement[0] if improvement else None


def classes_table(records: Mapping[str, ExperimentRecord]) -> str:
    """The error of one logit against the number of classes, for the losses that every experiment has."""
    chosen = [records[name] for name in BY_CLASSES]
    losses = common_losses(chosen)
    rows = []
    for record in chosen:
        errors = errors_by_loss(record, losses)
        improvement = one_logit_improvement(errors)
        rows.append(
            [
                f"{record['num_classes']:,}",
                *(f"{one:.3f}" for one, _ in errors.values()),
                f"{errors['cross_entropy'][1]:.3f}",
                "" if improvement is None else f"{improvement:.0%}".replace("%", " %"),
            ]
        )
    headings = ["k", *losses, "cross_entropy, all logits", "relative improvement"]
    return f"{_markdown(headings, rows)}\n\n{_trained(chosen)}"


def commands_table(minutes: Mapping[str, float], commands: Mapping[str, str]) -> str:
    """Which command made which record, and how many minutes of training or of timed calls that were.

    Examples:
      >>> print(commands_table({"glyphs": 1.6}, {"glyphs": "train.py --record results/glyphs.json"}))
      | record | command | time |
      | --- | --- | --- |
      | `glyphs.json` | `python train.py --record results/glyphs.json` | 2 min |
    """
    rows = [
        [f"`{name}.json`", f"`python {command.removeprefix('python ')}`", f"{max(1, minutes[name]):.0f} min"]
        for name, command in commands.items()
    ]
    return _markdown(["record", "command", "time"], rows)


def _trained(records: Sequence[ExperimentRecord]) -> str:
    """How the networks of some records were trained, in a sentence; values in which they differ stand side by side."""
    configs = [run["config"] for record in records for run in record["runs"]]
    cores = max(record["environment"]["host"]["cores"] for record in records)
    commits = " / ".join(dict.fromkeys(record["environment"]["commit"] for record in records))
    starts: dict[str, list[str]] = {}
    for config in configs:
        if config.get("init_from"):
            starts.setdefault(config["init_from"], []).append(config["loss"])
    started = "".join(f" Started from {start}: {', '.join(losses)}." for start, losses in starts.items())
    return f"{_how(configs)}, on {cores} core{'s' * (cores > 1)} of a CPU, commit {commits}.{started}"


def _how(configs: Sequence[Mapping[str, Any]]) -> str:
    """Network, steps, optimizer and seed of some runs.

    Examples:
      >>> config = {"model": "mlp", "hidden_sizes": [8], "width": 1, "steps": 9, "batch_size": 4, "optimizer": "adam", "seed": 0}
      >>> _how([config, config | {"seed": 1}])
      'mlp 8, 9 steps of 4, adam, seed 0 / 1'
    """

    def of(name: str, form: str = "") -> str:
        return " / ".join(dict.fromkeys(format(config[name], form) for config in configs))

    network = of("model")
    if configs[0]["hidden_sizes"]:
        network += " " + "-".join(map(str, configs[0]["hidden_sizes"]))
    if configs[0]["width"] != 1:
        network += f" at width {of('width', 'g')}"
    return f"{network}, {of('steps', ',')} steps of {of('batch_size')}, {of('optimizer')}, seed {of('seed')}"


def _chosen(records: Sequence[ExperimentRecord]) -> str:
    """How the networks were trained, and the settings that were chosen on the validation split."""
    how = _trained(records)
    chosen = []
    for loss, tried in (sweep for record in records for sweep in (record["sweep"] or {}).items()):
        varied = _varied(tried["runs"], _SETTINGS)
        best = next((run for run in tried["runs"] if run["run"] == tried["chosen"]), None)
        if best is not None and varied:
            settings = ", ".join(f"{name.replace('_', ' ')} {best[name]}" for name in varied)
            chosen.append(f"{loss} {settings}")
    return f"{how} Chosen on the validation split: {'; '.join(chosen)}." if chosen else how


def normalizer_tables(entries: Sequence[Mapping[str, Any]]) -> dict[str, Callable[[], str]]:
    """What normalizers add to trained runs, and what they cost to fit, by the names of the tables.

    Args:
      entries: The runs that ``results/tools/normalizer_study.py`` measured.

    Returns:
      Functions that make the tables.
    """
    return {
        "normalizers": lambda: _normalizer_errors(entries),
        "normalizers_cost": lambda: _normalizer_costs(entries),
        "normalizers_short": lambda: _normalizer_summary(entries),
    }


def export_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """What the dtype of exported rows changes.

    Args:
      entries: The runs that ``results/tools/export_study.py`` measured.

    Returns:
      A table in Markdown.
    """
    columns = [
        "loss",
        "normalizer",
        "rows",
        "bytes of the rows",
        "1-AUPRC",
        "change of AUPRC",
        "recall",
        "precision",
    ]
    rows = []
    for entry in entries:
        exact = entry["exports"][0]
        for export in entry["exports"]:
            rows.append(
                [
                    entry["loss"],
                    {None: "none", 1: "affine"}.get(entry["normalizer"], f"{entry['normalizer']} rows"),
                    export["rows_dtype"],
                    f"{export['rows_bytes']:,}",
                    f"{1 - export['auprc']:.5f}",
                    "" if export is exact else f"{export['auprc'] - exact['auprc']:+.5f}",
                    f"{export['shared_threshold_recall']:.4f}",
                    f"{export['shared_threshold_precision']:.4f}",
                ]
            )
    return _markdown(columns, rows)


def normalizer_errors(entry: Mapping[str, Any]) -> tuple[float, float, float]:
    """1-AUPRC of one logit, of one logit with the largest normalizer that was measured, and of all logits."""
    first, *rungs, last = entry["scores"]
    return tuple(1 - score["auprc"] for score in (first, rungs[-1], last))  # type: ignore[return-value]


def query_cost_table(record: Record) -> str:
    """What one query reads and takes, beside the backbone: from a benchmark of heads with normalizers."""
    num_classes, case = 2**16, {"num_classes": 2**16}
    backbone = record.find("backbone")
    assert backbone is not None
    d = backbone.case["num_features"]
    heads = {
        "one logit, also with an affine normalizer": ("head_one_logit", 1),
        "one logit and 256 rows": ("head_one_logit_normalized_256", 257),
        "one logit and 1,024 rows": ("head_one_logit_normalized_1024", 1025),
        "all logits": ("head_all_logits", num_classes),
    }
    rows = []
    for name, (variant, num_rows) in heads.items():
        measured = record.find(variant, **case)
        assert measured is not None
        rows.append([name, f"{num_rows:,}", f"{measured.median_ms:.2g}"])
    heading = f"ms, {num_classes:,} classes, d = {d:,}"
    return _markdown(["score", "rows of the output layer or normalizer that are read", heading], rows)


_NORMALIZER_SCORES = ("one logit", "affine", "256 rows", "1024 rows", "all logits")


def _normalizer_errors(entries: Sequence[Mapping[str, Any]]) -> str:
    def cell(scores: Mapping[str, Any], name: str) -> str:
        if name not in scores:
            return ""
        score = scores[name]
        return f"{1 - score['auprc']:.{3 if score['auprc'] < 0.99 else 4}f} ({score['shared_threshold_recall']:.2f})"

    rows = []
    for entry in entries:
        scores = {score["score"]: score for score in entry["scores"]}
        rows.append([_data(entry), entry["loss"], *(cell(scores, name) for name in _NORMALIZER_SCORES)])
    table = _markdown(["data", "loss", *(f"{name}: 1-AUPRC (recall)" for name in _NORMALIZER_SCORES)], rows)
    networks: dict[str, list[str]] = {}
    for entry in entries:
        networks.setdefault(_how([entry["config"]]), []).append(_data(entry))
    trained = [f"{'; '.join(dict.fromkeys(data))}: {how}." for how, data in networks.items()]
    commits = dict.fromkeys(entry["environment"]["commit"] for entry in entries)
    return f"{table}\n\nNetworks: {' '.join(trained)} Commits {', '.join(commits)}."


def _data(entry: Mapping[str, Any]) -> str:
    return f"{entry['dataset']}, {entry['num_classes']:,} classes"


def _normalizer_summary(entries: Sequence[Mapping[str, Any]]) -> str:
    """Cross-entropy by the number of classes: one logit, with the fewest rows that open clusters, and all logits."""
    rows = []
    for entry in entries:
        if entry["loss"] != "cross_entropy" or entry["dataset"] != "glyphs" or entry["num_classes"] < 2000:
            continue
        scores = {score["score"]: score for score in entry["scores"]}
        num_rows = min(rows for rows in (256, 1024) if rows**2 >= 16 * entry["num_classes"])
        names = ("one logit", f"{num_rows} rows", "all logits")
        cells = [f"{1 - scores[name]['auprc']:.3f}" for name in names]
        recalls = [f"{scores[name]['shared_threshold_recall']:.2f}" for name in names]
        rows.append(
            [
                f"{entry['num_classes']:,}",
                cells[0],
                f"{cells[1]} ({num_rows:,} rows)",
                cells[2],
                " / ".join(recalls),
            ]
        )
    headings = (
        "classes",
        "one logit",
        "one logit with normalizer",
        "all logits",
        "recall with one threshold: one / with / all",
    )
    return _markdown(headings, rows)


def _normalizer_costs(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for entry in entries:
        fits = {score["score"]: score for score in entry["scores"] if "fit_seconds" in score}
        rows.append(
            [
                _data(entry),
                entry["loss"],
                f"{entry['num_fitted']:,}",
                *(
                    f"{fits[name]['fit_seconds']:.0f} s, R² {fits[name]['r_squared']:.3f}"
                    if name in fits
                    else ""
                    for name in _NORMALIZER_SCORES[1:-1]
                ),
            ]
        )
    return _markdown(["data", "loss", "features", *_NORMALIZER_SCORES[1:-1]], rows)


def ocr_table(record: Mapping[str, Any]) -> str:
    """What one logit of a network that somebody else trained is worth, with and without normalizers.

    Args:
      record: What ``results/tools/ocr_study.py`` measured.

    Returns:
      A table in Markdown, and a line about the pictures.
    """
    headings = [
        "score",
        "rows of the output layer or normalizer that are read",
        "1-AUPRC",
        "recall",
        "precision",
    ]
    rows = [
        [
            score["score"],
            f"{score['rows_read']:,}",
            f"{1 - score['auprc']:.3f}",
            f"{score['shared_threshold_recall']:.3f}",
            f"{score['shared_threshold_precision']:.3f}",
        ]
        for score in record["scores"]
    ]
    network, pictures = record["network"], record["num_pictures"]
    summary = (
        f"{network['package']} {network['version']}: {network['num_classes']:,} classes, {network['num_features']} features. "
        f"{record['num_characters']:,} characters are drawn: {pictures['fitting']:,} pictures without labels for fitting, "
        f"{pictures['validation']:,} for validation, {pictures['test']:,} for the test, in other faces each. Accuracy {record['accuracy']:.3f}. "
        f"Chosen on the validation face: {record['chosen']}."
    )
    return f"{_markdown(headings, rows)}\n\n{summary}"


_QUESTIONS = {
    "search": "pictures of a class",
    "names": "completion of a name",
    "thumbnail": "a thumbnail",
    "thresholds": "thresholds of a class",
    "decide": "a decision about an upload",
    "all": "**all**",
}


def serve_tables(record: Mapping[str, Any]) -> dict[str, Callable[[], str]]:
    """What clients waited for ``pols serve``, by the names of the tables.

    Args:
      record: What ``results/tools/serve_load.py`` measured.

    Returns:
      Functions that make the tables.
    """
    return {"serve": lambda: _serve_times(record["load"]), "serve_completion": lambda: _completion(record)}


def _serve_times(load: Mapping[str, Any]) -> str:
    headings = ["question", "requests", "median ms", "p90 ms", "p99 ms", "longest ms"]
    names = ("median_ms", "p90_ms", "p99_ms", "max_ms")
    rows = [
        [title, f"{times['num_requests']:,}", *(f"{times[name]:.0f}" for name in names)]
        for kind, title in _QUESTIONS.items()
        for times in [load["all"] if kind == "all" else load["kinds"][kind]]
    ]
    summary = (
        f"{load['num_clients']} clients, {load['seconds']:.0f} s, {load['num_pictures']:,} pictures, {load['num_classes']:,} classes: "
        f"{load['requests_per_second']:.0f} answers per second, {load['num_errors']} errors."
    )
    return f"{_markdown(headings, rows)}\n\n{summary}"


def _completion(record: Mapping[str, Any]) -> str:
    times, cores = record["completion"], record["environment"]["host"]["cores"]
    return (
        f"Completing a name among {times['num_names']:,}: median {times['median_ms']:.1f} ms, p99 {times['p99_ms']:.1f} ms "
        f"({cores} cores, {record['environment']['host']['cpu']})."
    )
