"""How budgets and layers are written."""

import pytest

from ompq.budgets import Budget
from ompq.cli.views import as_budget, operation_budgets, reasons, size_budgets
from ompq.network.units import Skipped


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


def test_what_stays_float_is_collapsed():
    lines = reasons(
        [
            Skipped.parameters_of("ln1", "LayerNorm", 1024),
            Skipped("aux.conv", "never called in the forward pass"),
            Skipped.parameters_of("ln2", "LayerNorm", 512),
            Skipped.parameters_of("token", "Embedding", 10),
            Skipped("aux.fc", "never called in the forward pass"),
            Skipped("old", "Norm stays float: 7 parameters"),  # of a plan of 0.1
            Skipped.parameters_of("(network)", "Odd", 1),
        ]
    )
    assert lines == [
        "2 LayerNorm stay float: 1,536 parameters (ln1, ln2)",
        "1 Embedding stays float: 10 parameters (token)",
        "1 Odd stays float: 1 parameter (network)",
        "aux.conv, aux.fc: never called in the forward pass",
        "old: Norm stays float: 7 parameters",
    ]
