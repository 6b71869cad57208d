import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nets import Chain, images, seeded
from ompq.allocation.solver import Allocation
from ompq.graph import Choice, bias_key, trace
from ompq.layers import QuantizedConv2d, activation_quantizers
from ompq.quantization import (
    QuantizeConfig,
    assemble,
    quantization_of,
    quantize,
    quantizer_names,
)
from ompq.quantization.sites import ActivationSite
from ompq.quantizers import Grid
from ompq.ranges import search_weight


def quantized_at(network, samples, bits=3):
    bits = dict.fromkeys(trace(network, samples).names, Choice(bits, 8))
    config = QuantizeConfig(output_error=False)
    return quantize(network, Allocation(bits), samples, config)


def by_hand(network, samples, bits=3):
    graph = trace(network, samples)
    return assemble(
        network,
        graph,
        dict.fromkeys(graph.names, Choice(bits, 8)),
        (),
        weight_grid=lambda _u, w, axis: search_weight(w, bits, channel_dim=axis),
        activation_grids=(),
    )


def test_assembled_network_has_rounded_weights_and_leaves_the_float_one():
    network = seeded(Chain())
    before = copy.deepcopy(network.state_dict())
    made = by_hand(network, images())
    assert isinstance(made.conv, QuantizedConv2d)
    grid = search_weight(before["conv.weight"], 3)
    plain = copy.deepcopy(network)
    with torch.no_grad():
        plain.conv.weight.copy_(grid.fake(before["conv.weight"]))
        plain.head.weight.copy_(
            search_weight(before["head.weight"], 3).fake(before["head.weight"])
        )
        torch.testing.assert_close(made(images()), plain(images()))
    assert all(torch.equal(network.state_dict()[k], v) for k, v in before.items())


class Functional(nn.Module):
    """A weight that a function reads while its layer is never called."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.linear(x.mean((2, 3)), self.inner.weight, self.inner.bias)
        return self.head(F.relu(x))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(F.relu(self.one(x.mean((2, 3)))))


@pytest.mark.parametrize(
    ("kind", "parameter"), [(Functional, "inner.weight"), (Tied, "one.weight")]
)
def test_weights_that_others_read_are_rounded_where_they_are(kind, parameter):
    network = seeded(kind())
    made = quantized_at(network, images(16))
    weight = made.get_parameter(parameter).detach()
    grid = search_weight(network.get_parameter(parameter).detach(), 3)
    assert torch.equal(weight, grid.fake(network.get_parameter(parameter).detach()))
    state = made.state_dict()
    assert torch.equal(state[f"{parameter}_scale"], grid.scale.flatten())
    assert torch.equal(state[f"{parameter}_zero_point"], grid.zero_point.flatten())


def test_tied_weights_stay_tied():
    made = quantized_at(seeded(Tied()), images(16))
    assert made.two.weight is made.one.weight


def test_a_sequential_does_not_run_the_quantizer_of_its_input():
    layers = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Flatten())
    made = quantized_at(seeded(layers), images(16))
    assert [len(made), len(made[0])] == [2, 2]
    assert list(activation_quantizers(made)) == ["0.0.input_quantizer"]
    (first, *_) = quantization_of(made).sites
    assert first.before == ("",)
    layer = made[0][0]
    with torch.no_grad():
        x = layer.input_quantizer(images())
        expected = F.conv2d(x, layer.rounded_weight(), layer.bias).relu().flatten(1)
        assert torch.equal(made(images()), expected)


def test_quantizers_of_one_place_have_different_names():
    network = nn.ModuleDict({"a": nn.Identity()})
    before = [ActivationSite((at,), 8, (), ("a",)) for at in (1, 2, 3)]
    sites = [
        *before,
        ActivationSite((4,), 8, ("a",), ()),
        ActivationSite((-1,), 8, (), ("",)),
    ]
    assert quantizer_names(network, sites) == [
        "a.input_quantizer",
        "a.input_quantizer_2",
        "a.input_quantizer_3",
        "a.output_quantizer",
        "input_quantizer",
    ]


def test_every_point_gets_its_own_quantizer():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    graph = trace(network, images())
    sites = [ActivationSite((0,), 8, ("1",), ()), ActivationSite((1,), 4, ("1",), ())]
    made = assemble(
        network,
        graph,
        {"0": Choice(32, 32)},
        sites,
        weight_grid=lambda *_: pytest.fail("the unit stays float"),
        activation_grids=[
            Grid(torch.tensor(step), torch.tensor(0.0), bits)
            for step, bits in ((0.5, 8), (1.0, 4))
        ],
    )
    found = activation_quantizers(made)
    assert {name: q.bits for name, q in found.items()} == {
        "1.output_quantizer": 8,
        "1.output_quantizer_2": 4,
    }


def test_biases_are_named_after_their_weights():
    attention = nn.MultiheadAttention(4, 2)
    network = nn.ModuleDict({"attention": attention, "fc": nn.Linear(4, 2)})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = network

        def forward(self, x):
            x = x.flatten(2)[..., :4]
            return self.parts["fc"](self.parts["attention"](x, x, x)[0])

    units = trace(Net(), images()).units
    assert {bias_key(unit) for unit in units} == {
        "parts.attention.in_proj_bias",
        "parts.attention.out_proj.bias",
        "parts.fc.bias",
    }


def test_activation_inside_a_batch_norm_outlives_its_folding():
    class NormAct(nn.BatchNorm2d):  # as timm has it
        def __init__(self, channels):
            super().__init__(channels)
            self.drop, self.act = nn.Identity(), nn.ReLU6()

        def forward(self, x):
            return self.act(self.drop(super().forward(x)))

    first, last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
    network = seeded(nn.Sequential(first, NormAct(4), last))
    norm = nn.BatchNorm2d(4).eval()
    norm.load_state_dict(network[1].state_dict())
    apart = nn.Sequential(first, norm, nn.ReLU6(), last).eval()
    made = quantized_at(network, images())
    with torch.no_grad():
        assert torch.equal(made(images()), quantized_at(apart, images())(images()))
    assert "1.act.output_quantizer" in activation_quantizers(made)
