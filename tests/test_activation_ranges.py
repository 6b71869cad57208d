import logging

import pytest
import torch
from torch import nn

import ompq
from nets import TinyMobileNet, TinyResNet, images, seeded
from ompq.allocation.solver import Allocation
from ompq.graph import Choice, trace
from ompq.layers import activation_quantizers
from ompq.quantization.calibration import _loss, read_ranges, weigh_ranges
from ompq.quantization.sites import find_sites
from ompq.ranges import activation_grid, observe_range, value_bins, with_importance
from ompq.recording import record
from ompq.samples import Samples


def silent(*_):
    """Report nothing."""


def weighed(model, samples):
    """Return the points of a network and what is known of each."""
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
    assert "ranges of activations weigh all values alike: the network cannot be" in (
        caplog.text
    )
    assert found == scales(quantize(model, samples, activation_range="mse"))


def test_points_that_no_gradient_reaches_weigh_all_values_alike():
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


def test_average_of_single_values_hands_them_on():
    def network(size):
        pool = nn.AdaptiveAvgPool2d(1)
        layers = nn.Conv2d(3, 4, size), nn.ReLU(), pool, nn.Flatten(), nn.Linear(4, 2)
        return seeded(nn.Sequential(*layers))

    assert "2.output_quantizer" in scales(quantize(network(3), images(8)))
    assert "2.output_quantizer" not in scales(quantize(network(8), images(8)))
