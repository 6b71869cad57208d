from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from nets import TinyMobileNet, TinyResNet, scenes, seeded, values
from ompq.allocation.problem import Allocation
from ompq.configs import QuantizeConfig
from ompq.costs import can_be_coded, coded_bytes
from ompq.entropy_coding.rates import code_bytes
from ompq.layers import quantized_layer, quantized_layers
from ompq.network.graph import trace
from ompq.network.observation import Visited
from ompq.network.units import Choice
from ompq.quantization import corrected_targets, pipeline
from ompq.quantization.corrected_targets import corrected_target
from ompq.quantization.error_feedback import ridged, round_with_feedback
from ompq.quantization.pipeline import quantize
from ompq.weight_ranges import search_weight

BATCHES, ROWS, INPUTS, CHANNELS = 8, 50, 6, 5


def rounded_layer(bits):
    """Return a linear layer of few bits, with the weight it was made from."""
    layer = seeded(nn.Linear(INPUTS, CHANNELS))
    weight = layer.weight.detach().clone()
    return quantized_layer(layer, search_weight(weight, bits)), weight


def twins(weight, lost):
    """Return what a float layer returned, and what the quantized one read and returned.

    The float layer's inputs are those of the other, mixed and with some noise.
    """
    mixed = torch.eye(INPUTS) + lost * values(INPUTS, INPUTS, seed=3)
    read = [values(ROWS, INPUTS, seed=10 + at) for at in range(BATCHES)]
    noise = [values(ROWS, INPUTS, seed=50 + at) for at in range(BATCHES)]
    pairs = zip(read, noise, strict=True)
    wanted = [(x @ mixed.T + lost * n) @ weight.T + 1.0 for x, n in pairs]
    return wanted, [Visited(x, x @ weight.T) for x in read]


def covariance(x):
    return (x - x.mean(0)).T @ (x - x.mean(0)) / len(x)


def test_the_target_is_that_of_least_squares(monkeypatch):
    monkeypatch.setattr(corrected_targets, "_RIDGES", (0.0,))
    monkeypatch.setattr(corrected_targets, "_STRENGTHS", (0.0, 1.0))
    layer, weight = rounded_layer(8)
    wanted, read = twins(weight, 0.3)
    inputs = torch.stack([one.input for one in read])
    # The samples that judge help to fit in the end. Both parts have means of their own.
    judges = torch.arange(BATCHES).remainder(4).eq(3)
    parts = [inputs[part].flatten(0, 1) for part in (judges, ~judges)]
    gram = sum(covariance(part) * len(part) for part in parts) / (BATCHES * ROWS)
    found = corrected_target(layer, weight, gram[None, None], wanted, read)
    of_part = torch.stack([judges, ~judges], 1).float().repeat_interleave(ROWS, 0)
    columns = torch.cat([inputs.flatten(0, 1), of_part], 1).double().numpy()
    best, *_ = np.linalg.lstsq(columns, torch.cat(wanted).double().numpy(), rcond=None)
    np.testing.assert_allclose(found.weight.numpy(), best[:INPUTS].T, atol=1e-4)
    assert found.ridge == 0


def test_held_out_samples_choose_as_an_exhaustive_search_does():
    layer, weight = rounded_layer(3)
    wanted, read = twins(weight, 0.2)
    gram = covariance(torch.cat([one.input for one in read]))[None, None]
    judging = [3, 7]  # every fourth
    fitting = [at for at in range(BATCHES) if at not in judging]

    def centred(rows):
        return rows - rows.mean(0)

    def joined(each, at):
        return centred(torch.cat([each[i] for i in at]))

    inputs = [one.input for one in read]
    lost = [y - x @ weight.T for x, y in zip(inputs, wanted, strict=True)]
    x, y = joined(inputs, fitting), joined(lost, fitting)
    judged_x, judged_y = joined(inputs, judging), joined(lost, judging)
    errors = {}
    for ridge, strength in product((0.03, 0.3), (0.0, 0.5, 1.0)):
        matrix = ridged(gram, ridge)
        shift = (y.T @ x / len(x)) @ torch.linalg.inv(matrix[0, 0])
        grid, stored = round_with_feedback(
            weight + strength * shift,
            layer.grid_like_weight(),
            gram,
            refit=True,
            ridge=ridge,
        )
        change = grid.fake(stored) - weight
        errors[ridge, strength] = float((judged_x @ change.T - judged_y).square().sum())
    (ridge, strength) = min(errors, key=errors.get)
    assert strength > 0
    found = corrected_target(layer, weight, gram, wanted, read)
    x, y = (centred(torch.cat(each)) for each in (inputs, lost))
    # Fitted on both parts, each about its own means.
    parts = [(joined(inputs, at), joined(lost, at)) for at in (fitting, judging)]
    both = sum(b.T @ a for a, b in parts) / len(x)
    shift = both @ torch.linalg.inv(ridged(gram, ridge)[0, 0])
    assert found.ridge == ridge
    torch.testing.assert_close(found.weight, weight + strength * shift)


def test_what_does_not_carry_over_to_other_samples_is_not_corrected():
    layer, weight = rounded_layer(8)
    wanted, read = twins(weight, 0.0)
    for at, outputs in enumerate(wanted):
        if at % 4 != 3:  # the batches that a target is fitted on
            outputs += 3 * read[at].input[:, :CHANNELS]
    gram = covariance(torch.cat([one.input for one in read]))[None, None]
    found = corrected_target(layer, weight, gram, wanted, read)
    # Another ridge may round better; the layer's own weight is the target.
    assert found is None or torch.equal(found.weight, weight)


def test_outputs_of_other_shapes_are_left_alone():
    layer, weight = rounded_layer(4)
    wanted, read = twins(weight, 0.2)
    wanted[0] = wanted[0][:-1]
    gram = covariance(torch.cat([one.input for one in read]))[None, None]
    assert corrected_target(layer, weight, gram, wanted, read) is None


def quantized_at(network, choice, *, corrected):
    bits = {
        unit.name: choice
        if not choice.rate or can_be_coded(unit, choice)
        else Choice(8, 8)
        for unit in trace(network, scenes(256)).units
    }
    allocation = Allocation(bits)
    config = QuantizeConfig(corrected_targets=corrected)
    return quantize(network, allocation, scenes(256), config)


@pytest.mark.parametrize("network", [TinyResNet, TinyMobileNet])
def test_corrected_networks_are_nearer_to_the_float_one(network):
    model = seeded(network(), seed=4)
    unseen = scenes(256, seed=9)
    with torch.no_grad():
        wanted = model(unseen)
        plain, ours = (
            (quantized_at(model, Choice(3, 8), corrected=each)(unseen) - wanted)
            .square()
            .sum()
            for each in (False, True)
        )
    assert ours < plain


def test_corrected_coded_layers_keep_their_rates():
    model = seeded(TinyResNet(), seed=4)
    plain, made = (
        quantized_layers(quantized_at(model, Choice(8, 8, 2.5), corrected=each))
        for each in (False, True)
    )
    coded = [name for name, layer in made.items() if layer.rate]
    assert len(coded) > 2
    assert any(not torch.equal(plain[n].codes(), made[n].codes()) for n in coded)
    for name in coded:
        limit = coded_bytes(made[name].weight.numel(), 2.5)
        assert code_bytes(made[name].codes()) <= limit


def test_the_same_samples_give_the_same_network():
    model = seeded(TinyMobileNet())
    one, two = (quantized_at(model, Choice(3, 8), corrected=True) for _ in range(2))
    for key, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[key]), key


def test_a_correction_that_takes_the_network_farther_is_not_kept(monkeypatch):
    def spoil(self, *_args):
        for layer in quantized_layers(self.quantized).values():
            layer.weight.data.neg_()
            layer.bias.data.mul_(-50)

    monkeypatch.setattr(corrected_targets.CorrectionPass, "run", spoil)
    model = seeded(TinyResNet(), seed=4)
    plain, ours = (
        quantized_at(model, Choice(3, 8), corrected=each).state_dict()
        for each in (False, True)
    )
    assert all(torch.equal(value, ours[key]) for key, value in plain.items())


@pytest.mark.parametrize(("count", "fitted"), [(248, None), (256, 224), (1024, 512)])
def test_the_samples_that_judge_take_no_part(count, fitted, monkeypatch):
    seen = {}
    run, judged = corrected_targets.CorrectionPass.run, pipeline.divergences_of

    def running(self, samples, *args):
        seen["fitted"] = samples.first_batch(len(samples))
        return run(self, samples, *args)

    def judging(networks, model, samples, output):
        seen["judging"] = samples.first_batch(len(samples))
        return judged(networks, model, samples, output)

    monkeypatch.setattr(corrected_targets.CorrectionPass, "run", running)
    monkeypatch.setattr(pipeline, "divergences_of", judging)
    model, samples = seeded(TinyResNet()), scenes(count)
    names = trace(model, samples).names
    bits = Allocation(dict.fromkeys(names, Choice(4, 8)))
    quantize(model, bits, samples, QuantizeConfig(corrected_targets=True))
    if fitted is None:
        assert not seen
    else:
        assert torch.equal(seen["fitted"], samples[:fitted])
        assert torch.equal(seen["judging"], samples[fitted : fitted + 256])
