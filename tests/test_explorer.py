import pytest

from ompq.allocation.problem import Allocation
from ompq.report.explorer import axis_costs, explorer_data, solution
from reports import toy_plan


def test_the_costs_that_a_budget_limits_have_a_slider_each():
    several = toy_plan("3.9KiB,0.004GBOPs")
    assert axis_costs(several) == ["bytes", "bit_ops", "weight_bits"]
    axes = explorer_data(several, steps=3)["axes"]
    assert [axis["plan"] for axis in axes] == [-1, -1, -1]
    bits = toy_plan("4bits")
    assert axis_costs(bits) == ["weight_bits", "bytes"]
    axes = explorer_data(bits, steps=3)["axes"]
    assert axes[0]["solutions"][axes[0]["plan"]] == solution(bits)


@pytest.mark.parametrize("pinned", [{}, {"@first": (None, 32), "@last": (None, 4)}])
def test_choices_are_embedded_as_an_allocation_saves_them(pinned):
    plan = toy_plan(pinned=pinned)
    data = explorer_data(plan, steps=2)
    units = zip(data["names"], data["plan"], data["inputs"], strict=True)
    copied = {name: data["saved"][bits][int(column)] for name, column, bits in units}
    assert copied == plan.allocation.to_json()
    assert Allocation.from_json(copied) == plan.allocation
