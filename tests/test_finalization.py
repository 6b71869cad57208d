import copy

import pytest
import torch
from torch import nn

from nets import TinyMobileNet, TinyResNet, images, seeded
from ompq.errors import QuantizationError
from ompq.integer import IntegerNetwork, finalization
from ompq.integer.arithmetic import CodeGrid
from ompq.integer.finalization import clear_scale, finalize
from ompq.integer.lowering import lower
from ompq.integer.operators import Average, Requantize, Sum
from ompq.layers import activation_quantizers, quantized_layers
from ompq.quantization import QuantizeConfig, quantization_of, quantize
from ompq.reconstruction import ReconstructConfig, reconstruct
from ompq.reconstruction.rounding import RoundingConfig
from quantized import quantized, simulated_codes

NETWORKS = {"resnet": TinyResNet, "mobilenet": TinyMobileNet}


def finalized(name="resnet", **given):
    network = quantized(seeded(NETWORKS[name]()), images(16), **given)
    return finalize(network, images())


@pytest.mark.parametrize("activation", [4, 8])
@pytest.mark.parametrize("name", NETWORKS)
def test_simulated_codes_equal_those_of_integers(name, activation):
    network = finalized(name, activation=activation)
    engine = IntegerNetwork.from_quantized(network, images())
    found = engine.codes(images(8, seed=7))
    expected, logits = simulated_codes(network, images(8, seed=7))
    compared = 0
    for step, codes in zip(engine.steps.steps, found, strict=True):
        if not step.grid.wide and codes.shape == expected[step.quantizer][0].shape:
            assert torch.equal(codes.int(), expected[step.quantizer][0]), step.name
            compared += 1
    assert compared >= 9
    torch.testing.assert_close(engine(images(8, seed=7)), logits, rtol=1e-5, atol=1e-5)


def test_finalized_network_gives_the_same_for_any_batch():
    network = finalized("mobilenet")
    with torch.no_grad():
        together = network(images(8))
        alone = torch.cat([network(image[None]) for image in images(8)])
        double = copy.deepcopy(network).double()(images(8).double())
    assert torch.equal(together, alone)
    torch.testing.assert_close(double.float(), together, rtol=1e-5, atol=1e-6)


def test_finalizing_changes_little_and_only_a_copy():
    given = quantized(seeded(TinyResNet()), images(16), weight=8)
    before = {key: value.clone() for key, value in given.state_dict().items()}
    network = finalize(given, images(), saturation_safe=False)
    assert all(torch.equal(before[k], v) for k, v in given.state_dict().items())
    assert all(layer.integers is None for layer in quantized_layers(given).values())
    assert set(network.state_dict()) == set(before)
    for key, value in network.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0.009, atol=0)
    with torch.no_grad():
        x = images(8, seed=7)
        error = (network(x) - given(x)).norm() / given(x).norm()
    assert error < 0.02


def test_finalizing_twice_is_finalizing_once():
    once = finalized()
    twice = finalize(once, images())
    assert all(
        torch.equal(value, twice.state_dict()[key])
        for key, value in once.state_dict().items()
    )


@pytest.mark.parametrize("window", [2, 8, 24])
@pytest.mark.parametrize("scale", [0.0171, 0.49999, 1.0])
def test_a_cleared_scale_is_cleared_for_good(scale, window):
    # With a window of 24 not all results can be kept off the middle.
    source = CodeGrid(0.02, 0, 8)
    pool = Average((window, window), (window, window), (0, 0), False)
    results = pool.possible_results([source])
    once = clear_scale(results, CodeGrid(scale, 3, 4))
    assert once == pytest.approx(scale, rel=0.008)
    assert clear_scale(results, CodeGrid(once, 3, 4)) == once


def test_steps_that_share_a_grid_are_cleared_together():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
            self.pool, self.other = nn.AvgPool2d(2), nn.AvgPool2d(2)
            self.last = nn.Conv2d(6, 2, 1)

        def forward(self, x):
            joined = torch.cat(
                (self.pool(self.first(x)), self.other(self.second(x))), 1
            )
            return self.last(joined).flatten(1)

    once = finalize(quantized(seeded(Joined()), images(), weight=8), images())
    steps = lower(once, images()).steps
    pools = [step for step in steps if isinstance(step.operator, Average)]
    assert len(pools) == 2 and pools[0].quantizer == pools[1].quantizer
    for step in pools:
        results = step.operator.possible_results([steps[step.inputs[0]].grid])
        assert (
            margin(results.tolist(), step.grid.scale, step.grid.zero_point, 255) >= 4e-5
        )
    twice = finalize(once, images()).state_dict()
    assert all(torch.equal(v, twice[k]) for k, v in once.state_dict().items())


def test_finalized_network_can_be_reconstructed_and_finalized_again():
    model = seeded(TinyResNet())
    given = finalize(quantized(model, images(16), weight=3), images())
    config = ReconstructConfig(rounding=RoundingConfig(iterations=5))
    better = finalize(reconstruct(given, model, images(16), config), images())
    record = quantization_of(better)
    assert record.errors and len(record.links) == len(quantized_layers(better))
    with torch.no_grad():
        engine = IntegerNetwork.from_quantized(better, images())
        torch.testing.assert_close(
            better(images(8)), engine(images(8)), rtol=1e-5, atol=1e-5
        )


def test_what_is_not_quantized_cannot_be_finalized():
    with pytest.raises(QuantizationError, match="TinyResNet is not quantized"):
        finalize(TinyResNet(), images())


def test_finalized_network_still_learns():
    network = finalized(weight=8)
    for quantizer in activation_quantizers(network).values():
        quantizer.scale.requires_grad_()
    network(images(4)).square().sum().backward()
    assert all(
        quantizer.scale.grad is not None
        for quantizer in activation_quantizers(network).values()
    )


def test_a_copy_of_a_finalized_network_has_its_own_grids():
    network = finalized(weight=8)
    other = copy.deepcopy(network)
    layer = quantized_layers(other)["stem"]
    own = {id(module) for module in other.modules()}
    assert id(layer.integers.source) in own
    assert id(layer.integers.target) in own


def test_layer_that_is_called_twice_keeps_its_float_arithmetic():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)
            self.first, self.second = nn.ReLU(), nn.ReLU()
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            x = self.second(self.conv(self.first(self.conv(x))))
            return self.head(x.mean((2, 3)))

    layers = quantized_layers(
        finalize(quantized(seeded(Twice()), images(), weight=8), images())
    )
    assert layers["conv"].integers is None
    assert layers["head"].integers is not None


def test_what_integers_cannot_do_cannot_be_finalized():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GELU(), nn.Conv2d(4, 2, 1))
    with pytest.raises(QuantizationError, match="gelu in 1 has no integer kernel"):
        finalize(quantized(seeded(network), images(), weight=8), images())


def margin(values, scale, zero_point, qmax):
    """Return the least distance from a half, result by result."""
    distances = [
        abs(value / scale + zero_point - int(value / scale + zero_point) - 0.5)
        for value in values
        if -1 < value / scale + zero_point < qmax + 1
    ]
    return min(distances)


def test_no_sum_lies_halfway():
    first, second = CodeGrid(0.02, 3, 4), CodeGrid(0.03, 0, 4)
    target = CodeGrid(0.04, 5, 4)  # (0.02 * 3) / 0.04 is a half
    values = [
        first.scale * (a - first.zero_point) + second.scale * (b - second.zero_point)
        for a in range(16)
        for b in range(16)
    ]
    assert margin(values, target.scale, 5, 15) < 1e-9
    scale = clear_scale(Sum().possible_results([first, second]), target)
    assert scale == pytest.approx(target.scale, rel=0.008)
    assert margin(values, scale, 5, 15) >= 4e-5


def test_no_average_lies_halfway():
    source = CodeGrid(0.02, 0, 8)
    results = Average((2, 2), (2, 2)).possible_results([source])
    scale = clear_scale(results, source)
    values = [source.scale * total / 4 for total in range(4 * 255 + 1)]
    assert margin(values, source.scale, 0, 255) < 1e-9
    assert margin(values, scale, 0, 255) >= 4e-5


def test_scales_that_are_clear_stay_and_huge_averages_too():
    source = CodeGrid(0.02, 0, 8)
    whole = Average((64, 64), (64, 64), whole=True).possible_results([source])
    assert clear_scale(whole, source) == source.scale
    other = CodeGrid(float(torch.tensor(0.0231)), 0, 8)
    assert clear_scale(Requantize().possible_results([source]), other) == other.scale


@pytest.mark.parametrize("safe", [False, True])
def test_weights_of_convolutions_are_made_safe(safe):
    network = finalize(
        quantized(seeded(TinyResNet()), images(16), weight=8),
        images(),
        saturation_safe=safe,
    )
    steps = lower(network, images())
    found = set(steps.saturating())
    # An image and a linear layer get unsigned weights in the file.
    assert found <= {"stem", "head"} if safe else found > {"stem", "head"}
    for step in steps.steps:
        if hasattr(step.operator, "weight"):  # not more than needed
            assert step.operator.weight.values.int().abs().max() > 50


def test_what_a_grid_clips_stays_clipped_where_it_is_made_coarser():
    given = quantized(seeded(TinyResNet()), images(16), weight=8)
    layer = quantized_layers(given)["block1.conv1"]
    with torch.no_grad():
        layer.weight[0, 0, 0, :2] = 100.0
    expected = layer.rounded_weight().amax()
    network = finalize(given, images())
    found = quantized_layers(network)["block1.conv1"].rounded_weight().amax()
    assert found.item() == pytest.approx(expected.item(), rel=0.02)


def test_weights_are_quantized_once_until_they_change(monkeypatch):
    network = finalized(weight=8)
    calls = []
    original = finalization.layer_weight
    monkeypatch.setattr(
        finalization, "layer_weight", lambda *a: calls.append(a) or original(*a)
    )
    with torch.no_grad():
        first = network(images(4))
        assert torch.equal(network(images(4)), first)
        assert len(calls) == len(quantized_layers(network))
        network.head.bias += 1.0
        torch.testing.assert_close(network(images(4)), first + 1.0, rtol=0, atol=1e-4)
        assert len(calls) == len(quantized_layers(network)) + 1
        network.block1.conv1.weight_scale.mul_(1.1)
        assert not torch.equal(network(images(4)), first + 1.0)
        assert len(calls) == len(quantized_layers(network)) + 2


def test_layers_that_do_not_saturate_keep_their_bits():
    given = quantized(seeded(TinyMobileNet()), images(16), weight=8)
    network = finalize(given, images())
    for (name, before), after in zip(
        quantized_layers(given).items(), quantized_layers(network).values(), strict=True
    ):
        kept = before.weight.dim() == 2 or before.weight.shape[1] < 4
        assert torch.equal(before.weight_scale, after.weight_scale) == kept, name


def test_coarser_channels_keep_their_sums():
    given = quantized(seeded(TinyResNet(width=16)), images(16), weight=8)
    network = finalize(given, images())
    layers = quantized_layers(network)
    found, nearest = [], []
    for name, before in quantized_layers(given).items():
        after = layers[name]
        changed = after.weight_scale != before.weight_scale
        if not changed.any():
            continue
        low, high = -128 * before.weight_scale, 127 * before.weight_scale
        like = (-1, *[1] * (before.weight.dim() - 1))
        exact = before.weight.clamp(low.view(like), high.view(like))
        grid = after.grid_like_weight()
        for made, errors in ((after.rounded_weight(), found), (exact, nearest)):
            steps = (grid.fake(made) - exact) / grid.scale
            errors.append(steps.flatten(1).sum(1)[changed].abs().max().item())
    assert max(found) < 1.0 < max(nearest)
    assert set(lower(network, images()).saturating()) <= {"stem", "head"}


def test_groups_have_no_integer_form():
    network = seeded(nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.ReLU()))
    config = QuantizeConfig(group_size=64)
    made = quantize(network, {"*": 4}, images(8), config)
    words = "has a scale for each group of 64 weights and so no integer kernel"
    with pytest.raises(QuantizationError, match=words):
        finalize(made, images(8))
    same, arithmetic = finalization.finalized(made, images(8))
    assert same is made and words in arithmetic
