"""Histograms of the layers that quantization hurts most."""

import numpy as np
import pytest
import torch
from torch import nn

import ompq
from nets import TinyMobileNet, images, seeded


@pytest.fixture(scope="module")
def found():
    model = seeded(TinyMobileNet())
    made = ompq.plan(model, images(), "3.2bits")
    quantized = ompq.quantize(model, made, images())
    return (
        model,
        made,
        quantized,
        ompq.report.layer_histograms(quantized, model, made, images()),
    )


def test_the_worst_layers_have_weights_and_inputs_each(found):
    _, made, _, histograms = found
    damage = {
        name: made.scores.damage[row, made.columns[row]]
        for row, name in enumerate(made.graph.names)
    }
    worst = sorted(damage, key=lambda name: -damage[name])[:3]
    assert [h.name.split(",")[0] for h in histograms] == [
        n for n in worst for _ in "wi"
    ]
    assert [h.name.endswith("inputs") for h in histograms] == [False, True] * 3


def test_every_weight_is_counted_as_a_code_of_its_channel(found):
    model, made, quantized, histograms = found
    unit = made.graph[histograms[0].name.split(",")[0]]
    layer, norm = quantized.get_submodule(unit.name), model.get_submodule(unit.norm)
    factor = norm.weight / (norm.running_var + norm.eps).sqrt()
    weight = model.get_submodule(unit.name).weight * factor.reshape(-1, 1, 1, 1)
    weight = weight.detach()
    codes = [
        value.item() / scale.item() + zero.item()
        for row, scale, zero in zip(
            weight, layer.weight_scale, layer.weight_zero_point, strict=True
        )
        for value in row.flatten()
    ]
    edges, counts = np.array(histograms[0].edges), histograms[0].counts
    assert sum(counts) == len(codes)
    assert edges[0] == pytest.approx(min(0, *codes), abs=1e-5)
    below = sum(code < edges[32] for code in codes)
    assert sum(counts[:32]) == pytest.approx(below, abs=1)
    bits = made.allocation[unit.name].weight
    assert histograms[0].lines == (("lowest code", 0.0), ("highest code", 2**bits - 1))


def test_inputs_are_the_float_networks_and_the_lines_what_is_read(found):
    model, _, quantized, histograms = found
    name = histograms[1].name.split(",")[0]
    seen = {}
    for key, network in (("float", model), ("quantized", quantized)):
        module = network.get_submodule(name)
        handle = module.register_forward_pre_hook(
            lambda _m, args, key=key: seen.update({key: args[0]})
        )
        with torch.no_grad():
            network(images())
        handle.remove()
    assert sum(histograms[1].counts) == seen["float"].numel()
    read = seen["quantized"]
    assert dict(histograms[1].lines) == {
        "lowest value": float(read.min()),
        "highest value": float(read.max()),
    }


def test_networks_are_left_as_they_were(found):
    model, _, quantized, _ = found
    for network in (model, quantized):
        hooked = [m for m in network.modules() if m._forward_pre_hooks]
        assert all("QuantizedC" not in type(m).__name__ for m in hooked)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_float_layers_are_passed_over_and_constants_have_a_bar():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    nn.init.zeros_(model[0].weight)
    samples = torch.ones(6, 4)
    config = ompq.PlanConfig(pinned={"2": 32}, score="smallest_first")
    made = ompq.plan(model, samples, "32bits", config)
    quantized = ompq.quantize(model, made, samples)
    weights, inputs = ompq.report.layer_histograms(quantized, model, made, samples)
    assert weights.name.startswith("0, weights")
    assert sum(weights.counts) == 16
    assert max(inputs.counts) == 24  # every input is 1


def test_codes_of_coded_layers_are_counted_one_by_one():
    model, samples = (
        seeded(nn.Sequential(nn.Linear(64, 32), nn.ReLU())),
        torch.ones(4, 64),
    )
    config = ompq.PlanConfig(pinned={"0": (8, 8, 2.5)}, score="weight_noise")
    made = ompq.plan(model, samples, "8bits", config)
    quantized = ompq.quantize(model, made, samples)
    inputs, last = ompq.report.layer_histograms(quantized, model, made, samples)
    assert inputs.name == "0, inputs"
    assert last.name == "0, codes: 2.5 bits coded"
    levels = (quantized[0].codes().int() - 128).flatten().tolist()
    middles = [round(edge + 0.5) for edge in last.edges[:-1]]
    assert last.counts == tuple(levels.count(level) for level in middles)
    assert sum(last.counts) == 64 * 32
