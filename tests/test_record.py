from dataclasses import replace

import pytest

import ompq
from nets import TinyResNet, scenes, seeded
from ompq.allocation.problem import Allocation
from ompq.layers import StoredValues, quantized_layers
from ompq.network.units import Choice
from ompq.quantization.record import network_totals, quantization_of, with_quantization

SAMPLES = scenes(48)


@pytest.mark.parametrize("accounting", ["packed", "paper"])
def test_totals_of_a_network_count_learned_bits_and_stored_values(accounting):
    model = seeded(TinyResNet())
    config = ompq.PlanConfig(
        choices=(4,), pinned={"head": 32}, accounting=accounting, score="smallest_first"
    )
    plan = ompq.plan(model, SAMPLES, "32bits", config)
    network = ompq.quantize(model, plan, SAMPLES)
    assert network_totals(network, plan) == plan.totals
    record = quantization_of(network)
    learned = Choice(6, 8)  # which is not among the plan's choices
    bits = Allocation({**record.allocation, "block1.conv1": learned})
    with_quantization(network, replace(record, allocation=bits))
    quantized_layers(network)["block1.conv2"].rounding = StoredValues("LQ-Nets", 1234)
    found, units = network_totals(network, plan), plan.graph.units
    # Both layers have 8 × 8 × 3 × 3 weights and norms of 8 channels. Besides codes, a
    # packed file has a scale, a zero point and a bias for each channel: 9 bytes.
    weights, norms = 8 * 8 * 9, 2 * 8
    more = 2 * (weights if accounting == "packed" else weights + norms) / 8
    planned = 4 * weights / 8 + 9 * 8
    if accounting == "paper":
        planned = 4 * (weights + norms) / 8
    change = more + 1234 - planned
    assert found["bytes"] == plan.totals["bytes"] + change
    ratio = found["bits_per_parameter"] / plan.totals["bits_per_parameter"]
    assert ratio == pytest.approx(found["bytes"] / plan.totals["bytes"])
    [unit] = (unit for unit in units if unit.name == "block1.conv1")
    assert found["bit_ops"] == plan.totals["bit_ops"] + unit.macs * 2 * 8
    total = sum(one.weights for one in units)
    average = plan.totals["average_bits"] + 2 * weights / total
    assert found["average_bits"] == pytest.approx(average)
