import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import ompq
from nets import TinyMobileNet, scenes, seeded
from ompq.allocation.solver import Allocation
from ompq.graph import Choice
from ompq.layers import quantized_layers
from ompq.quantization.calibration import input_grams
from ompq.ranges import FEW_WEIGHTS
from ompq.samples import Samples

LAYERS = {
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (8, 4, 9, 7)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), (8, 4, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, padding="same", groups=4), (8, 4, 7, 7)),
    "reflected": (lambda: nn.Conv1d(2, 5, 4, padding=3, padding_mode="reflect"), 0),
    "volume": (lambda: nn.Conv3d(2, 3, 2), (8, 2, 4, 5, 6)),
    "linear": (lambda: nn.Linear(5, 7), (32, 5)),
    "tokens": (lambda: nn.Linear(5, 7), (8, 9, 5)),
}
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(kind):
    make, shape = LAYERS[kind]
    samples = values(*(shape or (8, 2, 9))) + 3  # most of it is the mean
    return nn.Sequential(make()), samples


def grams(model, samples, **more):
    units = ompq.trace(model, samples).units
    return input_grams(model, units, Samples.of(samples), batch_size=8, **more)


def uniform(model, bits, samples):
    names = ompq.trace(model, samples).names
    return Allocation(dict.fromkeys(names, Choice(bits, 8)))


def outputs(layer, weight, samples):
    """Return what a layer gives with this weight and no bias, (C, positions)."""
    alone = copy.deepcopy(layer)
    alone.weight, alone.bias = nn.Parameter(weight), None
    with torch.no_grad():
        out = alone.double()(samples.double())
    axis = out.dim() - 1 if isinstance(layer, nn.Linear) else 1
    return out.movedim(axis, 0).flatten(1)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_gram_tells_what_an_error_does_to_outputs(kind, centred):
    model, samples = network(kind)
    error = values(*model[0].weight.shape, seed=1).double()
    changed = outputs(model[0], error, samples)
    size = changed.var(1, correction=0) if centred else changed.square().mean(1)
    (gram,) = grams(model, samples, centred=centred).values()
    rows = error.flatten(1)
    gram = gram.double().expand(len(rows), -1, -1)
    found = torch.einsum("ck,ckl,cl->c", rows, gram, rows)
    # Besides it, the ridge: a part of the inputs' mean square, as of a weight each.
    weight, count = rows.shape[1], changed.shape[1]
    diagonal = gram.diagonal(dim1=1, dim2=2).mean(1)
    ridge = diagonal * (weight / count) / (1 + weight / count)
    expected = size + ridge * rows.square().sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_channels_of_many_weights_and_transposed_ones_are_left_out():
    model = nn.Sequential(
        nn.Conv2d(3, FEW_WEIGHTS, 1),
        nn.Conv2d(FEW_WEIGHTS, FEW_WEIGHTS + 1, 1),
        nn.Conv2d(FEW_WEIGHTS + 1, 4, 1),
        nn.ConvTranspose2d(4, 4, 2),
    )
    found = grams(seeded(model), values(4, 3, 4, 4))
    assert {name: g.shape for name, g in found.items()} == {
        "0": (1, 3, 3),
        "1": (1, FEW_WEIGHTS, FEW_WEIGHTS),
    }
    assert grams(seeded(nn.Sequential(nn.Linear(80, 3))), values(4, 80)) == {}


def test_projections_inside_an_attention_are_left_out():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x)[0]

    model, samples = seeded(Attention()), values(4, 5, 8)
    kinds = {unit.name: unit.kind for unit in ompq.trace(model, samples).units}
    assert "attention" in kinds.values()
    assert all(kinds[name] != "attention" for name in grams(model, samples))


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 1234.567])
def test_inputs_that_never_vary_leave_all_errors_alike(value):
    model = seeded(nn.Sequential(nn.Linear(3, 2)))
    (gram,) = grams(model, torch.full((6, 3), value)).values()
    torch.testing.assert_close(gram[0], torch.eye(3))


class OneByOne(nn.Module):
    """Convolves images one at a time, without an axis for samples."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return torch.stack([self.conv(one) for one in x])


def test_an_axis_for_samples_is_not_needed():
    model, samples = seeded(OneByOne()), scenes(4)
    alone = nn.Sequential(copy.deepcopy(model.conv))
    units = ompq.trace(alone, samples).units
    (gram,) = input_grams(alone, units, Samples.of(samples), batch_size=8).values()
    unit = replace(units[0], name="conv")
    found = input_grams(model, [unit], Samples.of(samples), batch_size=8)
    torch.testing.assert_close(found["conv"], gram)


def test_the_network_is_left_as_it_was_and_batches_are_told():
    model, samples = seeded(TinyMobileNet()).train(), scenes(20)
    before = copy.deepcopy(model.state_dict())
    told = []
    grams(model, samples, report=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_ranges_by_outputs_lower_the_error_of_outputs():
    model, samples, others = seeded(TinyMobileNet()), scenes(32), scenes(32, seed=7)
    errors = []
    for output_error in (False, True):
        config = ompq.QuantizeConfig(output_error=output_error)
        bits = uniform(model, 3, samples)
        quantized = ompq.quantize(model, bits, samples, config)
        with torch.no_grad():
            errors.append((quantized(others) - model(others)).square().mean())
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize(
    ("bits", "power", "same"), [(3, 2.0, False), (3, 2.4, True), (8, 2.0, True)]
)
def test_other_powers_and_fine_grids_keep_the_error_of_weights(bits, power, same):
    model, samples = seeded(TinyMobileNet()), scenes(16)
    scales = []
    for output_error in (False, True):
        config = ompq.QuantizeConfig(weight_power=power, output_error=output_error)
        allocation = uniform(model, bits, samples)
        quantized = ompq.quantize(model, allocation, samples, config)
        layers = quantized_layers(quantized).values()
        scales.append(torch.cat([layer.weight_scale for layer in layers]))
    assert torch.equal(*scales) == same


@pytest.mark.cuda
@cuda
def test_cuda_finds_the_same_grams():
    model, samples = seeded(TinyMobileNet()), scenes(20)
    here = grams(model, samples)
    there = grams(model.cuda(), samples.cuda())
    assert here.keys() == there.keys()
    for name, gram in here.items():
        assert there[name].is_cuda
        torch.testing.assert_close(there[name].cpu(), gram, rtol=1e-3, atol=1e-4)
