"""The tables of networks against PyTorch, and of convolutions in all their forms."""

import dataclasses
from collections.abc import Callable

from pols_jax.benchmarking.records import Record
from pols_jax.benchmarking.speed_tables import ratio, time_cell
from pols_jax.benchmarking.timing import Measurement
from pols_jax.tables import Column, Table


def network_tables(record: Record) -> list[Table]:
    """One table of forward passes and one of training steps: one row for every network, batch size and width."""

    def other(variant: str) -> Callable[[Measurement], Measurement | None]:
        keys = ("network", "batch_size", "width")

        def find(m: Measurement) -> Measurement | None:
            found = record.find(variant, **{key: m.case[key] for key in keys})
            if found is None:
                return None
            steps = int(found.case.get("steps", 1))  # one call may do several
            return dataclasses.replace(found, times_ms=[ms / steps for ms in found.times_ms])

        return find

    forward, step, loop = other("forward_auto"), other("step_auto"), other("steps_in_loop")
    names = [
        Column("network", lambda m: m.case["network"]),
        Column("width", lambda m: m.case["width"]),
        Column("batch", lambda m: m.case["batch_size"]),
    ]

    def against(xla: str, torch: str, ours: Callable[[Measurement], Measurement | None]) -> list[Column]:
        def memory(m: Measurement) -> str:
            now, before = ours(m), other(xla)(m)
            if now is None or before is None or "memory_bytes" not in now.case:
                return ""
            sizes = int(now.case["memory_bytes"]), int(before.case["memory_bytes"])
            return f"{sizes[0] / 1e6:,.0f} MB, x{sizes[0] / sizes[1]:.2f}"

        return [
            Column("XLA's convolutions, ms", lambda m: time_cell(other(xla)(m))),
            Column("PyTorch, ms", lambda m: time_cell(other(torch)(m))),
            Column("ours / XLA's", lambda m: ratio(ours(m), other(xla)(m)), "{:.2f}"),
            Column("ours / PyTorch", lambda m: ratio(ours(m), other(torch)(m)), "{:.2f}"),
            Column("memory, against XLA's", memory),
        ]

    forwards = [
        *names,
        Column("ms", lambda m: time_cell(forward(m), spread=True)),
        *against("forward_xla", "torch_forward", forward),
    ]
    steps = [
        *names,
        Column("in a compiled loop, ms", lambda m: time_cell(loop(m), spread=True)),
        Column("alone, ms", lambda m: time_cell(step(m))),
        *against("step_xla", "torch_step", loop),
    ]

    def table_of(variant: str, title: str, columns: list[Column]) -> Table:
        return Table.of(title, columns, [m for m in record.measurements if m.variant == variant])

    tables = [
        table_of("forward_auto", "Forward pass, images to features", forwards),
        table_of("step_auto", "Training step", steps),
    ]
    return [table for table in tables if table.rows]


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
