"""Learned widths against their formulas, and FracBits' recipe end to end."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import ompq
from nets import values
from ompq.lab.weight_rules.dorefa import dorefa
from ompq.lab.weight_rules.fracbits import (
    FracBits,
    FractionalWidths,
    mix_widths,
    rounded_widths,
)
from ompq.layers import quantized_layers
from training_script import equal, toy

RECIPE = replace(
    ompq.TrainConfig.from_protocol("fracbits-pact"),
    epochs=5,
    batch_size=8,
    learning_rate=0.05,
    report_steps=1,
)


def test_a_real_width_mixes_its_neighbours():
    weight, width = values(30).double(), torch.tensor(3.2, dtype=torch.float64)
    few, more = (dorefa(weight, torch.tensor(float(n))) for n in (7, 15))
    assert torch.allclose(mix_widths(weight, width), 0.8 * few + 0.2 * more)
    width.requires_grad_()
    mix_widths(weight, width).sum().backward()
    assert width.grad.item() == pytest.approx(float((more - few).sum()))


def test_whole_widths_take_no_more_than_there_is():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        widths = 2 + 6 * torch.rand(4, generator=generator)
        counts = torch.randint(1, 100, (4,), generator=generator).float()
        most = float((counts * torch.tensor([3.0, 4, 3, 4])).sum())
        found = rounded_widths(widths, counts, most)
        # Of all shifts, the least that fits: tried one by one.
        for shift in itertools.count(-800):
            tried = (widths - shift / 100).round().clamp(2, 8)
            if float((tried * counts).sum()) <= most:
                break
        assert float((found * counts).sum()) <= most
        assert float((found * counts).sum()) >= float((tried * counts).sum())
        assert set(found.tolist()) <= set(range(2, 9))


def test_the_penalty_is_the_distance_from_the_planned_bits():
    _, network, _ = toy(bits=4)
    rule = FractionalWidths(network, penalty=2.0)
    assert rule.penalty().item() == 0
    with torch.no_grad():
        rule.widths[0].add_(0.5)
    share = rule.counts[0] / rule.counts.sum()
    assert rule.penalty().item() == pytest.approx(2.0 * 0.5 * share.item())


def test_fracbits_learns_widths_and_ends_in_integers():
    model, network, data = toy(bits=4, activation=8)
    config = replace(RECIPE, step_rate=50.0, weights=FracBits(penalty=0.1))
    trained = ompq.train(network, data, config, teacher=model)
    assert trained.state_dict().keys() == network.state_dict().keys()
    with torch.no_grad():
        before = F.cross_entropy(network(data.inputs), data.targets)
        after = F.cross_entropy(trained(data.inputs), data.targets)
    assert after < before
    layers = quantized_layers(trained)
    counts = {name: layer.weight.numel() for name, layer in layers.items()}
    assert len({layer.bits for layer in layers.values()}) > 1
    assert sum(layers[n].bits * c for n, c in counts.items()) <= 4 * sum(
        counts.values()
    )
    record = ompq.quantization_of(trained)
    for name, layer in layers.items():
        assert record.allocation[name].weight == layer.bits
        assert torch.allclose(layer.rounded_weight(), layer.weight, rtol=1e-9)
    groups = {}
    for unit in record.graph.units:
        groups.setdefault(unit.group, set()).add(layers[unit.name].bits)
    assert all(len(bits) == 1 for bits in groups.values())
    ompq.finalize(trained.float(), data.inputs[:8].float())


def test_a_stopped_training_resumes_to_the_same_widths(tmp_path):
    model, network, data = toy(bits=4, activation=8)
    config = replace(RECIPE, checkpoint_steps=1)

    def stop(done, _total, _message):
        if done == 18:  # after the widths have become whole
            raise KeyboardInterrupt

    whole = ompq.train(network, data, config, teacher=model)
    again = {"teacher": model, "checkpoint": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        ompq.train(network, data, config, progress=stop, **again)
    assert equal(ompq.train(network, data, config, **again), whole)


def test_a_network_of_8_bits_has_no_width_to_learn():
    model, network, data = toy(bits=8)
    with pytest.raises(
        ompq.errors.TrainingError,
        match="FracBits has nothing to learn: every layer has 8",
    ):
        ompq.train(network, data, RECIPE, teacher=model)
