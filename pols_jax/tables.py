"""One table, shown in three ways: on the terminal, in Markdown and in CSV."""

import csv
import dataclasses
import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

__all__ = ["Column", "Table", "print_tables", "to_csv", "to_markdown"]


class Column(NamedTuple):
    """What a table says about each of its items.

    Attributes:
      heading: The name of the column. Neighbors whose headings begin with the same words and a colon are a group.
      cell: Item -> what the table shows of it; None leaves the cell empty.
      form: How it is shown.
    """

    heading: str
    cell: Callable[[Any], Any]
    form: str = "{}"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table as text.

    Attributes:
      title: What it shows.
      headings: The names of the columns.
      rows: The cells of each row, as many as there are headings.
      num_names: How many of the first columns say what a row is about; all others are numbers.
      ruled: The rows with a line below them, on the terminal.
      dimmed: The rows that are dimmed, on the terminal.
      notes: Sentences below the table.

    Examples:
      >>> columns = [Column("loss", lambda run: run[0]), Column("error", lambda run: run[1], "{:.2f}")]
      >>> table = Table.of("Runs", columns, [("max_margin", 0.125), ("cross_entropy", None)])
      >>> print(table.markdown())
      | loss | error |
      | --- | --- |
      | max_margin | 0.12 |
      | cross_entropy |  |
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int = 1
    ruled: frozenset[int] = frozenset()
    dimmed: frozenset[int] = frozenset()
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, title: str, columns: Sequence[Column], items: Iterable[Any], **options: Any) -> "Table":
        """Makes one row of each item; the options are further attributes."""
        values = ([(column.form, column.cell(item)) for column in columns] for item in items)
        rows = [["" if value is None else form.format(value) for form, value in row] for row in values]
        return cls(title, [column.heading for column in columns], rows, **options)

    def markdown(self) -> str:
        """The table alone, without title and notes."""
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines)


def print_tables(tables: Sequence[Table], *, console: Console | None = None) -> None:
    """Prints tables, on standard output by default; one that is too wide comes in parts, each with the names of the rows."""
    if console is None:
        console = Console(markup=False, emoji=False)  # names are not markup
        if not console.is_terminal:
            console.width = 200  # a file or a pipe has no width of its own
    for table in tables:
        for part in _parts(table, console):
            console.print(part)
        for note in table.notes:
            console.print(note, soft_wrap=True, markup=False, highlight=False)


def to_markdown(tables: Sequence[Table]) -> str:
    """Writes tables in Markdown, with titles and notes.

    Examples:
      >>> print(to_markdown([Table("Speed", ["k", "ms"], [["1", "2.00"]], notes=["Two cores."])]))
      ### Speed
      <BLANKLINE>
      | k | ms |
      | --- | --- |
      | 1 | 2.00 |
      <BLANKLINE>
      Two cores.
    """
    parts = [part for table in tables for part in (f"### {table.title}", table.markdown(), *table.notes)]
    return "\n\n".join(parts)


def to_csv(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    r"""Writes a table in CSV with all digits; None is an empty cell.

    Examples:
      >>> to_csv(["loss", "error"], [["max_margin", 1 / 3], ["cross_entropy", None]])
      'loss,error\nmax_margin,0.3333333333333333\ncross_entropy,\n'
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([headings, *rows])
    return out.getvalue()


def _parts(table: Table, console: Console) -> list[RichTable]:
    """As few parts as fit, cut between groups of columns."""
    names, numbers = range(table.num_names), range(table.num_names, len(table.headings))

    def group(i: int) -> Any:
        before, colon, _ = table.headings[i].partition(": ")
        return before if colon else i

    unlimited = console.options.update(max_width=1000)
    parts: list[list[int]] = [[]]
    for _, columns in itertools.groupby(numbers, group):
        added = list(columns)
        longer = _drawn(table, [*names, *parts[-1], *added])
        if parts[-1] and console.measure(longer, options=unlimited).maximum > console.width:
            parts.append([])
        parts[-1] += added
    return [_drawn(table, [*names, *part]) for part in parts]


def _drawn(table: Table, columns: Sequence[int]) -> RichTable:
    drawn = RichTable(title=table.title, title_justify="left", box=box.HORIZONTALS, padding=(0, 1, 0, 0))
    for i in columns:
        heading = table.headings[i].replace(": ", "\n")
        if i < table.num_names:
            drawn.add_column(heading, overflow="fold")
        else:
            drawn.add_column(heading, justify="right", no_wrap=True)
    above = None
    for number, row in enumerate(table.rows):
        style = "dim" if number in table.dimmed else None
        # Of several names, the first stands once in each section.
        is_repeated = table.num_names > 1 and row[0] == above
        cells = ("" if i == 0 and is_repeated else row[i] for i in columns)
        drawn.add_row(*cells, end_section=number in table.ruled, style=style)
        above = None if number in table.ruled else row[0]
    return drawn
