"""The tables of the records that only this project's pages show; those of ``pols bench`` are in the package.

python results/tools/own_tables.py RECORD...
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pols_jax.benchmarking import speed_tables
from pols_jax.benchmarking.records import Record
from pols_jax.benchmarking.speed_tables import class_name, ratio, time_cell, times_cell
from pols_jax.benchmarking.timing import Measurement
from pols_jax.tables import Column, Table, print_tables


def tables_of(record: Record) -> list[Table]:
    """Makes the tables of any record of this project, finished or not."""
    makers = {
        "convolutions": convolution_tables,
        "large_k": large_k_tables,
        "large_k_training": large_k_training_tables,
        "head": head_tables,
        "stream": stream_tables,
        "training": training_tables,
        "startup": startup_tables,
        "search_index": search_index_tables,
    }
    return makers.get(record.benchmark, speed_tables.speed_tables)(record)


def convolution_tables(record: Record) -> list[Table]:
    """One table for each program; one row for every layer and batch size, one column for every form."""
    forms = ("xla", "im2col", "winograd")

    def fastest(m: Measurement) -> float | None:
        found = [measured for form in forms if (measured := record.find(form, **m.case))]
        return ratio(m, min(found, key=lambda measured: measured.median_ms, default=None))

    columns = [
        Column("layer", lambda m: m.case["layer"]),
        Column("batch", lambda m: m.case["batch_size"]),
        Column("the table's form, ms", time_cell),
        *(
            Column(f"{form}, ms", lambda m, form=form: time_cell(record.find(form, **m.case)))
            for form in forms
        ),
        Column("the table's / fastest", fastest, "{:.2f}"),
    ]
    return [
        Table.of(
            f"One convolution, {program}",
            columns,
            [m for m in record.measurements if m.variant == "auto" and m.case["program"] == program],
        )
        for program in record.values("program")
    ]


def head_tables(record: Record) -> list[Table]:
    """Training the output layer on features against training the whole network."""

    def epoch_seconds(m: Measurement) -> float:
        return int(m.case["num_images"]) / int(m.case["images_per_call"]) * m.median_ms / 1e3

    words = {"whole": "the whole network", "head": "the output layer alone, on features"}
    case = record.measurements[0].case
    columns = [
        Column("what is trained", lambda m: words[m.variant]),
        Column("an epoch, s", epoch_seconds, "{:.3g}"),
        Column("times faster", lambda m: epoch_seconds(record.measurements[0]) / epoch_seconds(m), "{:,.0f}"),
    ]
    title = f"{case['model']}, {case['num_images']} images of 224 x 224, {case['num_classes']:,} classes"
    return [Table.of(title, columns, record.measurements)]


def startup_tables(record: Record) -> list[Table]:
    """How long a process takes to its first answer, before and now."""
    words = {
        "import_jax": "`import jax`",
        "import_class_bank": "`import jax, pols_jax; pols_jax.ClassBank`",
        "search_first_start": "`pols search`, one picture, first start",
        "search_second_start": "`pols search`, one picture, second start",
        "training_first_start": "`pols train`, to its first step, first start",
        "training_second_start": "`pols train`, to its first step, second start",
    }

    def seconds(variant: str, checkout: str) -> float | None:
        measured = record.find(variant, checkout=checkout)
        return None if measured is None else measured.median_ms / 1e3

    def gain(variant: str) -> float | None:
        return ratio(record.find(variant, checkout="baseline"), record.find(variant, checkout="now"))

    columns = [
        Column("what", lambda variant: words[variant]),
        Column("before, s", lambda variant: seconds(variant, "baseline"), "{:.2f}"),
        Column("now, s", lambda variant: seconds(variant, "now"), "{:.2f}"),
        Column("before / now", gain, "x{:.2f}"),
    ]
    return [Table.of("From the start of a process", columns, [name for name in words if record.find(name)])]


def large_k_tables(record: Record) -> list[Table]:
    """Losses class block by class block, and steps on the output layer, for many classes."""

    def measured(variant: str) -> list[Measurement]:
        return [m for m in record.measurements if m.variant == variant]

    def dense(linear: Measurement) -> Measurement | None:
        case = {name: value for name, value in linear.case.items() if name != "temporary_bytes"}
        return record.find("dense", **case)

    def temporary(m: Measurement | None) -> float | None:
        return None if m is None else int(m.case["temporary_bytes"]) / 1e6

    k = Column("k", lambda m: class_name(int(m.case["num_classes"])))
    losses = [
        Column("loss", lambda m: m.case["loss"]),
        Column("m", lambda m: m.case["num_examples"]),
        Column("d", lambda m: m.case["num_features"]),
        k,
        Column("dense, ms", lambda m: time_cell(dense(m), spread=True)),
        Column("linear, ms", lambda m: time_cell(m, spread=True)),
        Column("linear / dense", lambda m: ratio(m, dense(m)), "{:.2f}"),
        Column("dense: temporary memory", lambda m: temporary(dense(m)), "{:,.0f} MB"),
        Column("linear: temporary memory", temporary, "{:,.0f} MB"),
    ]
    sampled, momentum = measured("sampled_step"), measured("momentum_step")
    steps = [
        k,
        Column("ms", lambda m: time_cell(m, spread=True)),
        Column("times the smallest k", lambda m: ratio(m, sampled[0]), "{:.2f}"),
    ]
    memory = "memory beyond parameters and momentum"
    momentum_steps = [
        k,
        Column("ms", time_cell),
        Column(memory, lambda m: int(m.case["bytes_beyond_state"]) / 1e9, "{:.2f} GB"),
    ]
    of_momentum = f"A step of momentum on the output layer with batch cross-entropy{_sizes(momentum)}"
    return [
        Table.of("Value and gradients of features, kernel and bias", losses, measured("linear")),
        Table.of(f"A step of sampled NCE on the output layer{_sizes(sampled)}", steps, sampled),
        Table.of(of_momentum, momentum_steps, momentum),
    ]


def large_k_training_tables(record: Record) -> list[Table]:
    """Steps with drawn and with all classes, one table for each size of the batch."""

    def speed(m: Measurement) -> float:
        return int(m.case["steps"]) / m.median_ms * 1e3

    def table(measurements: Sequence[Measurement]) -> Table:
        columns = [
            Column("--head", lambda m: m.variant),
            Column("k", lambda m: class_name(int(m.case["num_classes"]))),
            Column("classes in a step", lambda m: int(m.case["num_drawn"]), "{:,}"),
            Column("steps per second", speed, "{:,.3g}"),
            Column("of the first row", lambda m: speed(m) / speed(measurements[0]), "{:.2g}"),
            Column(
                "parameters and optimizer state", lambda m: int(m.case["state_bytes"]) / 1e6, "{:,.0f} MB"
            ),
            Column("memory beyond that", lambda m: int(m.case["bytes_beyond_state"]) / 1e6, "{:,.1f} MB"),
        ]
        title = f"Steps of NCE with momentum{_sizes(measurements).rpartition(',')[0]}"
        return Table.of(title, columns, measurements)

    sizes = record.values("num_examples")
    return [table([m for m in record.measurements if m.case["num_examples"] == size]) for size in sizes]


def training_tables(record: Record) -> list[Table]:
    """Our training loop against one that is written by hand."""
    by_hand = record.find("hand_written_scan")
    columns = [
        Column("", lambda m: m.variant.replace("_", " ")),
        Column("steps per second", lambda m: 1e3 * int(m.case["steps"]) / m.median_ms, "{:,.0f}"),
        Column("of the hand-written scan", lambda m: ratio(by_hand, m), "{:.2f}"),
    ]
    return [Table.of("Training the MLP on images that the device holds", columns, record.measurements)]


def search_index_tables(record: Record) -> list[Table]:
    """Queries of an index against reading its features."""
    words = {
        "read": "reading the features",
        "query": "a query",
        "open_and_query": "opening the index, and a query",
        "query_8_classes": "a query for 8 classes",
        "query_normalizer": "a query with a normalizer of 256 rows",
        "query_float16": "a query of float16 features",
    }
    read = record.find("read")
    columns = [
        Column("", lambda m: words[m.variant]),
        Column("ms", lambda m: time_cell(m, spread=True)),
        Column("times reading", lambda m: ratio(m, read), "{:.2f}"),
    ]
    cases = [m.case for m in record.measurements[:1]]
    sizes = [
        f": {case['num_pictures']:,} pictures, {case['num_features']} float32 features" for case in cases
    ]
    return [Table.of("".join(["An index", *sizes]), columns, record.measurements)]


def stream_tables(record: Record) -> list[Table]:
    """Pictures per second that workers decode."""

    def before(m: Measurement) -> Measurement | None:
        return record.find("one worker", **m.case) or record.find("decoded in full", **m.case)

    columns = [
        Column("JPEGs of", lambda m: m.case["size"]),
        Column("", lambda m: m.variant),
        Column("pictures per second", lambda m: 1e3 * int(m.case["pictures"]) / m.median_ms, "{:,.3g}"),
        Column("speed-up", lambda m: times_cell(ratio(before(m), m))),
    ]
    return [Table.of("Reading and decoding to 224 x 224", columns, record.measurements)]


def _sizes(measurements: Sequence[Measurement]) -> str:
    """The sizes that a step was measured with, as the end of a title."""
    names = {"num_examples": "m = {}", "num_features": "d = {}", "num_noise": "{} noise classes"}
    cases = [m.case for m in measurements[:1]]
    return "".join(f", {form.format(case[n])}" for case in cases for n, form in names.items() if n in case)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print_tables(tables_of(Record.load(Path(path))))
