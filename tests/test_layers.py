import copy
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ompq.grids import Grid, learned_step, rounded_to
from ompq.layers import (
    ActivationQuantizer,
    LogQuantizer,
    QuantizedConv2d,
    QuantizedLinear,
    activation_quantizers,
    linear_map,
    plain_class,
    quantized_layer,
    quantized_layers,
    replace_module,
)
from ompq.quantization.pipeline import quantize
from ompq.weight_ranges import search_weight

LAYERS = [
    (nn.Linear(6, 4), (3, 6)),
    (nn.Conv1d(4, 6, 3, groups=2), (3, 4, 9)),
    (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2), (3, 4, 9, 9)),
    (nn.Conv2d(4, 4, 3, groups=4, padding_mode="reflect", padding=1), (2, 4, 6, 6)),
    (nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 5)),
    (nn.ConvTranspose2d(4, 6, 3, groups=2, output_padding=1, stride=2), (2, 4, 5, 5)),
    (nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 3, 3)),
]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda v: str(v)[:22])
def test_quantized_layer_is_the_layer_with_a_rounded_weight(layer, shape):
    axis = 1 if isinstance(layer, nn.modules.conv._ConvTransposeNd) else 0
    grid = search_weight(layer.weight.detach(), 3, channel_dim=axis)
    quantized = quantized_layer(layer, grid)
    plain = copy.deepcopy(layer)
    with torch.no_grad():
        plain.weight.copy_(grid.fake(layer.weight))
    x = random(*shape)
    torch.testing.assert_close(quantized(x), plain(x))
    assert isinstance(quantized, type(layer))
    assert "bits=3" in repr(quantized)
    assert set(plain.state_dict()) < set(quantized.state_dict())
    values = grid.dequantize(quantized.codes())
    torch.testing.assert_close(values, plain.weight)
    torch.testing.assert_close(linear_map(layer, x, layer.weight, layer.bias), layer(x))


class Cast(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Same(nn.Conv2d):
    def forward(self, x):
        x = nn.functional.pad(x, (0, 1, 0, 1))
        return nn.functional.conv2d(x, self.weight, self.bias, self.stride)


def test_layer_whose_forward_only_casts_is_a_plain_one():
    layer = Cast(6, 3)
    made = quantized_layer(layer, search_weight(layer.weight.detach(), 4))
    assert type(made) is QuantizedLinear
    x = random(2, 6)
    torch.testing.assert_close(made(x), F.linear(x, made.rounded_weight(), made.bias))


def test_layer_with_its_own_forward_keeps_it():
    layer = Same(3, 4, 2, 2)
    made = quantized_layer(layer, search_weight(layer.weight.detach(), 4))
    made = copy.deepcopy(made)
    assert type(made).__name__ == "QuantizedSame"
    assert plain_class(made) is Same
    x = random(2, 3, 5, 5)
    padded = F.pad(x, (0, 1, 0, 1))
    expected = F.conv2d(padded, made.rounded_weight(), made.bias, 2)
    torch.testing.assert_close(made(x), expected)
    assert set(made.state_dict()) > {"weight", "bias", "weight_scale"}
    assert made.weight is dict(made.named_parameters())["weight"]


@pytest.mark.parametrize("zero_point", [0.0, 3.0, 7.5])
def test_fast_rounding_has_the_gradients_of_the_plain_one(zero_point):
    results = []
    for function in (rounded_to, lambda grid, x: learned_step(x, grid)):
        x = random(4, 50).requires_grad_()
        scale = torch.tensor(0.2, requires_grad=True)
        grid = Grid(scale, torch.tensor(zero_point), bits=4)
        out = function(grid, x)
        (out * random(4, 50, seed=1)).sum().backward()
        results.append((out.detach(), x.grad, scale.grad))
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain)


def test_fast_rounding_per_channel():
    results = []
    for function in (rounded_to, lambda grid, x: learned_step(x, grid)):
        x = random(3, 40).requires_grad_()
        scale = torch.tensor([[0.1], [0.2], [0.4]], requires_grad=True)
        grid = Grid(scale, torch.tensor([[1.5], [2.0], [1.0]]), bits=2)
        function(grid, x).square().sum().backward()
        results.append((x.grad, scale.grad))
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain)


def test_activation_quantizer_rounds_where_it_is_attached():
    quantizer = ActivationQuantizer(Grid(torch.tensor(0.5), torch.tensor(1.0), bits=2))
    x = torch.tensor([-9.0, 0.2, 0.3, 9.0])
    assert quantizer(x).tolist() == [-0.5, 0.0, 0.5, 1.0]
    module = nn.Identity()
    module.register_forward_hook(quantizer.after)
    assert module(x).tolist() == [-0.5, 0.0, 0.5, 1.0]
    whole = torch.tensor([1, 2])
    assert quantizer.after(module, (), (x, whole))[0].tolist() == [-0.5, 0.0, 0.5, 1.0]
    assert quantizer.before(module, (whole, x), {})[0][0] is whole
    assert quantizer.after(module, (), "text") == "text"
    quantizer.enabled = False
    assert module(x) is x
    assert "bits=2" in repr(quantizer)


def test_dropped_activations_pass_unrounded():
    quantizer = ActivationQuantizer(Grid(torch.tensor(1.0), torch.tensor(0.0), bits=8))
    quantizer.keep = 0.25
    x = torch.full((10_000,), 3.4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        out = quantizer(x)
    assert sorted(out.unique().tolist()) == [3.0, pytest.approx(3.4)]
    assert (out == 3.0).float().mean().item() == pytest.approx(0.25, abs=0.02)


def test_hooks_survive_a_deep_copy():
    network = nn.Sequential(nn.Identity())
    quantizer = ActivationQuantizer(Grid(torch.tensor(1.0), torch.tensor(0.0), bits=2))
    network[0].register_forward_hook(quantizer.after)
    network[0].add_module("output_quantizer", quantizer)
    other = copy.deepcopy(network)
    (copied,) = activation_quantizers(other).values()
    with torch.no_grad():
        copied.scale.mul_(2)
    assert network(torch.tensor(0.9)).item() == 1.0
    assert other(torch.tensor(0.9)).item() == 0.0
    assert other(torch.tensor(1.1)).item() == 2.0


def test_modules_are_found_and_replaced_by_name():
    network = nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 1)), nn.ReLU())
    layer = network[0][0]
    grid = search_weight(layer.weight.detach(), 4)
    replace_module(network, "0.0", quantized_layer(layer, grid))
    assert list(quantized_layers(network)) == ["0.0"]
    assert isinstance(network[0][0], QuantizedConv2d)
    assert len(network[0]) == 1


def test_layers_take_what_the_replaced_ones_take():
    x, up = random(2, 4, 5, 5), nn.ConvTranspose2d(4, 6, 3, stride=2)
    grown = quantized_layer(up, search_weight(up.weight.detach(), 8, channel_dim=1))
    assert torch.equal(grown(input=x), grown(x))
    for size in (None, (11, 12), [2, 6, 12, 11]):
        wanted = up(x, output_size=size)
        found = grown(x, output_size=size)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0)


def test_activation_quantizer_keeps_what_holds_the_tensor():
    class Pair(NamedTuple):
        first: torch.Tensor
        name: str

    class Named(OrderedDict):
        pass

    quantizer = ActivationQuantizer(Grid(torch.tensor(0.5), torch.tensor(1.0), bits=2))
    x, rounded = torch.tensor([-9.0, 0.2, 0.3, 9.0]), [-0.5, 0.0, 0.5, 1.0]
    module = nn.Identity()
    pair = quantizer.after(module, (), Pair(x, "x"))
    assert isinstance(pair, Pair)
    assert (pair.first.tolist(), pair.name) == (rounded, "x")
    named = quantizer.after(module, (), Named(x=x, more=[x]))
    assert isinstance(named, Named)
    assert (named["x"].tolist(), named["more"][0] is x) == (rounded, True)
    assert quantizer.after(module, (), [x, None])[0].tolist() == rounded
    args, kwargs = quantizer.before(module, (), {"input": x})
    assert (args, kwargs["input"].tolist()) == ((), rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shift", [None, 0.5])
def test_rounded_values_have_the_type_of_their_input(dtype, shift):
    grid = Grid(torch.tensor(0.1), torch.tensor(4.0), 8)
    made = ActivationQuantizer(grid) if shift is None else LogQuantizer(grid, shift)
    x = random(5, 4).abs()
    assert made(x.to(dtype)).dtype == dtype
    torch.testing.assert_close(
        made(x.to(dtype).float()), made(x.to(dtype)).float(), rtol=0.01, atol=0.01
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x.bfloat16()).dtype == torch.float32


def test_a_layer_of_half_precision_may_read_rounded_values():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
            self.inside = nn.Linear(4, 4).bfloat16()

        def forward(self, x):
            return self.last(self.inside(self.first(x).relu().bfloat16()).float())

    network, x = Mixed().eval(), random(8, 6)
    rounded = quantize(network, {"*": (8, 8), "inside": (32, 8)}, x)
    with torch.no_grad():
        torch.testing.assert_close(rounded(x), network(x), rtol=0.2, atol=0.1)
