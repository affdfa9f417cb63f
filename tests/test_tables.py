"""One table on the terminal, in Markdown and in CSV."""

import io

from rich.console import Console

from pols_jax.tables import Column, Table, print_tables, to_csv, to_markdown

WIDE = Table(
    "Errors",
    [
        "loss",
        *(f"{score}: {measure}" for score in ("one logit", "all logits") for measure in ("first", "second")),
    ],
    [["cross_entropy", "0.1111", "0.2222", "0.3333", "0.4444"], ["max_margin", "0.5", "0.6", "", "0.8"]],
)


def printed(table, width):
    out = io.StringIO()
    print_tables([table], console=Console(file=out, width=width))
    return out.getvalue()


def test_a_table_that_fits_is_one_and_a_wide_one_is_cut_between_groups_with_the_names_in_each_part():
    assert printed(WIDE, 80).count("Errors") == 1
    parts = printed(WIDE, 45).split("Errors")[1:]
    assert len(parts) == 2
    assert all("cross_entropy" in part and "max_margin" in part for part in parts)
    assert "0.2222" in parts[0]
    assert "0.3333" not in parts[0]
    assert "0.3333" in parts[1]
    assert "0.4444" in parts[1]


def test_no_cell_is_lost_however_narrow_the_terminal_is():
    for width in range(25, 90, 5):
        text = printed(WIDE, width)
        assert all(cell in text for row in WIDE.rows for cell in row[1:])


def test_a_missing_number_is_an_empty_cell():
    table = Table.of(
        "k", [Column("k", lambda k: k), Column("half", lambda k: None if k else 0.5, "{:.2f}")], [0, 1]
    )
    assert table.rows == [["0", "0.50"], ["1", ""]]
    assert to_csv(["k", "half"], [[0, 0.5], [1, None]]) == "k,half\n0,0.5\n1,\n"


def test_the_first_of_several_names_stands_once_in_a_section_and_in_every_line_of_markdown():
    rows = [["a", "x", "1"], ["a", "y", "2"], ["a", "x", "3"]]
    table = Table("Names", ["loss", "rule", "value"], rows, num_names=2, ruled=frozenset({1}))
    names = [line.split()[0] for line in printed(table, 80).splitlines() if line.strip()[-1:].isdigit()]
    assert names == ["a", "y", "a"]
    assert to_markdown([table]).count("| a |") == 3


def test_notes_are_below_the_table_on_the_terminal_and_in_markdown():
    table = Table("Speed", ["k", "ms"], [["1", "2.00"]], notes=["Two [cores]."])
    assert printed(table, 80).endswith("Two [cores].\n")
    assert to_markdown([table]).endswith("| 1 | 2.00 |\n\nTwo [cores].")
