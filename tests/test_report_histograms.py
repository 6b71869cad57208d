"""Histograms of the worst layers, against the networks' own numbers."""

import numpy as np
import pytest
import torch
from torch import nn

from nets import TinyMobileNet, images, seeded
from ompq.plans import PlanConfig, plan
from ompq.quantization import quantize
from ompq.report import worst_histograms


@pytest.fixture(scope="module")
def found():
    model = seeded(TinyMobileNet())
    made = plan(model, images(), "3.2bits")
    quantized = quantize(model, made, images())
    return model, made, quantized, worst_histograms(quantized, model, made, images())


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
        "least read": float(read.min()),
        "greatest read": float(read.max()),
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
    config = PlanConfig(pinned={"2": 32}, score="weight_noise")
    made = plan(model, samples, "32bits", config)
    quantized = quantize(model, made, samples)
    weights, inputs = worst_histograms(quantized, model, made, samples)
    assert weights.name.startswith("0, weights")
    assert sum(weights.counts) == 16
    assert max(inputs.counts) == 24  # every input is 1
