"""Tables and budgets that people read."""

import io

import numpy as np
import pytest
from rich.console import Console

from ompq.allocation import Problem
from ompq.cli.console import Column, facts, fitted, middle_cut
from ompq.cli.decisions import budget_rows
from ompq.cli.views import as_budget, operation_budgets, reasons, size_budgets
from ompq.costs import Budget, Cost
from ompq.units import Choice, Skipped

LONG = "encoder.layers.encoder_layer_11.self_attention.out_proj"


def rendered(table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def columns() -> list[Column]:
    return [
        Column("layer", ["conv1", LONG], "left", shorten=True),
        Column("kind", ["pointwise", "linear"], "left", rank=1),
        Column("shape", ["64×3×7×7", "768×768"], rank=2),
        Column("bits", ["8", "4"]),
    ]


def test_a_wide_table_is_whole():
    text = "\n".join(rendered(fitted(columns(), 200), 200))
    assert LONG in text
    assert "768×768" in text


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 90, 100])
def test_a_table_keeps_to_its_width_without_being_cut_by_the_terminal(width):
    lines = rendered(fitted(columns(), width), width)
    assert max(map(len, lines)) <= width
    assert lines[0].split()[0] == "layer"
    assert lines[0].endswith("bits")
    assert lines[-1].endswith(" 4")
    assert len(lines) == 4
    # the name keeps its two ends, however narrow
    assert lines[3].startswith("encoder.la")
    assert "out_proj" in lines[3]


def test_columns_go_by_rank():
    widths = {width: rendered(fitted(columns(), width), 200)[0] for width in (60, 45)}
    assert "kind" in widths[60] and "shape" in widths[60]
    assert "kind" in widths[45] and "shape" not in widths[45]


def test_rich_markup_in_names_is_text():
    table = fitted([Column("layer", ["[red]x[/red]"], "left")], 40)
    assert "[red]x[/red]" in rendered(table, 40)[-1]
    assert "[b]y" in rendered(facts([("name", "[b]y")]), 40)[0]


def test_names_are_cut_in_the_middle():
    assert middle_cut("conv1", 5) == "conv1"
    assert middle_cut("features.12.block.3.1", 12) == "featur…k.3.1"
    assert all(len(middle_cut(LONG, n)) == n for n in range(3, len(LONG)))


@pytest.mark.parametrize("value", [2.8345678, 0.0012345, 11.19, 99999.0, 1234567.8])
def test_a_budget_is_rounded_up_so_that_it_can_be_met(value):
    text = as_budget(value, "MiB")
    assert Budget.parse(text).size_mib >= value
    assert Budget.parse(text).size_mib == pytest.approx(value, rel=2e-3)


def test_budgets_of_one_table_have_one_unit():
    assert size_budgets([512.0, 30_000.0]) == ["0.5000KiB", "29.30KiB"]
    assert size_budgets([512.0, 2.0**20]) == ["0.0004883MiB", "1.000MiB"]
    assert operation_budgets([1e6, 2.5e8]) == ["1.000MBOPs", "250.0MBOPs"]
    assert operation_budgets([1e6, 2.5e9])[1] == "2.500GBOPs"
    assert as_budget(0.0, "ms") == "0ms"


def test_uniform_bits_give_a_pinned_unit_what_it_may_get():
    choices = (Choice(2, 8), Choice(4, 8), Choice(8, 8))
    size = np.array([[2.0, 4.0, 8.0], [20.0, 40.0, 80.0]])
    costs = {
        "bytes": Cost("bytes", size, constant=1.0, reference=400.0),
        "weight_bits": Cost("weight_bits", 8 * size, reference=88.0),
        "bit_ops": Cost("bit_ops", size),
        "milliseconds": Cost("milliseconds", size),
    }
    problem = Problem(
        names=("stem", "fc"),
        choices=choices,
        damage=np.zeros((2, 3)),
        costs=costs,
        allowed=np.array([[False, False, True], [True, True, False]]),
        groups=np.arange(2),
    )
    rows = {row["mark"]: row for row in budget_rows(problem)}
    assert rows["all W2A8"]["bytes"] == 1 + 8 + 20
    assert rows["all W4A8"]["bytes"] == 1 + 8 + 40
    assert rows["all W8A8"]["bytes"] == 1 + 8 + 40  # the nearest that fc may get
    assert rows["smallest"]["percent"] == 100 * 29 / 400
    assert rows["largest"]["average_bits"] == 8 * 48 / 88


def test_what_stays_float_is_collapsed():
    lines = reasons(
        [
            Skipped("ln1", "LayerNorm stays float: 1,024 parameters"),
            Skipped("aux.conv", "never called in the forward pass"),
            Skipped("ln2", "LayerNorm stays float: 512 parameters"),
            Skipped("token", "Embedding stays float: 10 parameters"),
            Skipped("aux.fc", "never called in the forward pass"),
        ]
    )
    assert lines == [
        "2 LayerNorm stay float: 1,536 parameters (ln1, ln2)",
        "1 Embedding stays float: 10 parameters (token)",
        "aux.conv, aux.fc: never called in the forward pass",
    ]
