import copy
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import ompq
from nets import TinyMobileNet, TinyResNet, images, scenes, seeded, values
from ompq.allocation import Allocation
from ompq.graph import trace
from ompq.layers import activation_quantizers, quantized_layers
from ompq.quantization.calibration import _loss, input_grams, read_ranges, weigh_ranges
from ompq.quantization.sites import find_sites
from ompq.ranges import (
    FEW_WEIGHTS,
    activation_grid,
    observe_range,
    value_bins,
    with_importance,
)
from ompq.recording import record
from ompq.samples import Samples
from ompq.units import Choice


def silent(*_):
    """Report nothing."""


def weighed(model, samples):
    """Return the sites of a network and what is known of each."""
    graph = trace(model, samples)
    bits = {name: Choice(8, 8) for name in graph.names}
    sites, _ = find_sites(model, record(model, samples[:1]), graph, bits)
    samples = Samples.of(samples)
    seen = read_ranges(model, samples, sites, batch_size=64, report=silent)
    return (
        sites,
        seen,
        weigh_ranges(model, samples, sites, seen, batch_size=16, report=silent),
    )


def quantize(model, samples, bits=8, **more):
    names = trace(model, samples).names
    allocation = Allocation({name: Choice(8, bits) for name in names})
    return ompq.quantize(model, allocation, samples, ompq.QuantizeConfig(**more))


def scales(quantized):
    found = activation_quantizers(quantized).items()
    return {name: quantizer.scale.item() for name, quantizer in found}


class Deaf(nn.Module):
    """Passes on two values, the second of which nobody listens to."""

    def __init__(self, loud):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.first.weight.data = torch.diag(torch.tensor([1.0, loud]))
        self.last.weight.data = torch.tensor([[1.0, 0.0]])

    def forward(self, x):
        return self.last(self.first(x))


def test_importance_is_the_sum_of_squared_gradients_in_each_bin():
    x = torch.tensor([0.1, -0.3, 0.1, 0.9, 2.0])
    gradient = torch.tensor([1.0, 2.0, 3.0, 0.5, 0.0])
    seen = observe_range(x)
    found = with_importance(seen, value_bins(seen, x), gradient)
    for value, expected in [(0.1, 10), (-0.3, 4), (0.9, 0.25), (2.0, 0)]:
        nearest = (seen.values - value).abs().argmin()
        assert found.importance[nearest] == expected
    assert found.importance.sum() == 14.25
    twice = with_importance(found, value_bins(seen, x), gradient)
    assert torch.equal(twice.importance, 2 * found.importance)


def test_importance_of_a_network_is_that_of_autograd():
    model, samples = seeded(TinyMobileNet()), images(8)
    sites, seen, found = weighed(model, samples)
    (at,) = (i for i, p in enumerate(sites) if p.after == ("blocks.1",))
    kept = {}

    def keep(_module, _args, output):
        output.retain_grad()
        kept["output"] = output

    handle = model.blocks[1].register_forward_hook(keep)
    loss = _loss(model(samples), torch.Generator().manual_seed(0))
    handle.remove()
    loss.backward()
    expected = kept["output"].grad.double().square().sum()
    torch.testing.assert_close(found[at].importance.sum(), expected)
    assert all(
        torch.equal(a.counts, b.counts) for a, b in zip(seen, found, strict=True)
    )


def test_values_that_do_not_matter_are_cut_off():
    samples = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    model = Deaf(loud=4.0)
    heard, unheard = model.first(samples).detach().unbind(1)

    def cost(scale, zero_point):
        values = torch.stack([heard, unheard])
        codes = ((values / scale).round() + zero_point).clamp(0, 15)
        errors = ((codes - zero_point) * scale - values).square().mean(1)
        return (0.9 * errors[0] + 0.1 * errors.mean()).item()

    found, plain = (
        activation_quantizers(quantize(model, samples, 4, activation_range=method))[
            "first.output_quantizer"
        ]
        for method in ("fisher", "mse")
    )
    best = min(
        cost(0.02 * k, zero_point) for k in range(1, 100) for zero_point in range(16)
    )
    assert cost(found.scale, found.zero_point) < 1.05 * best
    assert found.scale < 0.8 * plain.scale


@pytest.mark.parametrize("frozen", [True, False])
def test_network_and_its_flags_stay_as_they_were(frozen):
    model = seeded(TinyResNet()).requires_grad_(not frozen)
    before = {name: p.clone() for name, p in model.named_parameters()}
    weighed(model, images(4))
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and parameter.requires_grad is not frozen
        assert torch.equal(parameter, before[name])


def test_ranges_are_the_same_every_time_and_without_gradients():
    model, samples = seeded(TinyMobileNet()), images(32)
    first = scales(quantize(model, samples))
    with torch.no_grad():
        assert scales(quantize(model, samples)) == first
    assert scales(quantize(model, samples, activation_range="mse")) != first


def test_tokens_reach_gradients_through_parameters():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

        def forward(self, words):
            return self.head(self.embedding(words))

    words = torch.randint(10, (8, 5), generator=torch.Generator().manual_seed(0))
    model = seeded(Words())
    _, _, found = weighed(model, words)
    # The output has no classes: signs are drawn.
    assert [each.importance.sum() > 0 for each in found] == [True]


def test_network_without_gradients_weighs_all_values_alike(caplog):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))

        @torch.no_grad()
        def forward(self, x):
            return self.body(x)

    samples = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    model = seeded(Frozen())
    with caplog.at_level(logging.WARNING):
        found = scales(quantize(model, samples))
    assert "all values of an activation get the same weight: the network cannot be" in (
        caplog.text
    )
    assert found == scales(quantize(model, samples, activation_range="mse"))


def test_sites_that_no_gradient_reaches_weigh_all_values_alike():
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    seen = observe_range(x)
    nothing = with_importance(seen, value_bins(seen, x), torch.zeros(100))
    broken = with_importance(seen, value_bins(seen, x), torch.full((100,), torch.nan))
    plain = activation_grid(seen, 4, "mse")
    for known in (seen, nothing, broken):
        assert torch.equal(activation_grid(known, 4, "fisher").scale, plain.scale)


def test_squared_gradients_are_the_fisher_information_of_the_logits():
    logits = torch.tensor([[2.0, 0.0, -1.0]]).repeat(20_000, 1).requires_grad_()
    _loss(logits, torch.Generator().manual_seed(0)).backward()
    p = logits.detach()[0].softmax(0)
    found = logits.grad.square().mean(0)
    torch.testing.assert_close(found, p * (1 - p), atol=0.01, rtol=0)
    values = torch.zeros(4, 2, 3, requires_grad=True)
    _loss(values, torch.Generator().manual_seed(0)).backward()
    assert torch.equal(values.grad.abs(), torch.ones(4, 2, 3))
    assert values.grad.sum().abs() < 24


def test_average_of_single_values_passes_them_on():
    def network(size):
        pool = nn.AdaptiveAvgPool2d(1)
        layers = nn.Conv2d(3, 4, size), nn.ReLU(), pool, nn.Flatten(), nn.Linear(4, 2)
        return seeded(nn.Sequential(*layers))

    assert "2.output_quantizer" in scales(quantize(network(3), images(8)))
    assert "2.output_quantizer" not in scales(quantize(network(8), images(8)))


class Same(nn.Conv2d):
    """Pads in its forward, more at the end than at the start."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (1, 2, 1, 2)))


LAYERS = {
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (8, 4, 9, 7)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), (8, 4, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, padding="same", groups=4), (8, 4, 7, 7)),
    "reflected": (lambda: nn.Conv1d(2, 5, 4, padding=3, padding_mode="reflect"), 0),
    "volume": (lambda: nn.Conv3d(2, 3, 2), (8, 2, 4, 5, 6)),
    "linear": (lambda: nn.Linear(5, 7), (32, 5)),
    "tokens": (lambda: nn.Linear(5, 7), (8, 9, 5)),
    "padded in forward": (lambda: Same(2, 3, 5, stride=2), (8, 2, 4, 4)),
}
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


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
