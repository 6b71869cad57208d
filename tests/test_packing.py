import copy
import random
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models

from nets import Chain, TinyMobileNet, TinyResNet, images, seeded
from ompq.allocation.solving import Allocation, Budget
from ompq.errors import PackedFileError, PlanError, QuantizationError
from ompq.graph.observation import record
from ompq.graph.tracing import trace
from ompq.graph.units import Choice
from ompq.integer.settling import settle
from ompq.models.demo_network import DemoNetwork
from ompq.packing.bitstream import unpack_bits
from ompq.packing.checkpoint import load, save
from ompq.packing.contents import read_contents
from ompq.plans import Plan
from ompq.quantization.assembly import assemble
from ompq.quantization.layers import quantized_layers
from ompq.quantization.placement import find_points
from ompq.quantization.quantizing import (
    Quantization,
    QuantizeConfig,
    quantization_of,
    quantize,
    with_quantization,
)
from ompq.quantizers.grids import Grid
from ompq.quantizers.ranges import minmax_weight
from ompq.reconstruction.reconstructing import ReconstructConfig, reconstruct
from ompq.reconstruction.settings import RoundingConfig
from ompq.scores import ScoreTable


class Attention(nn.Module):
    """Attention, whose projections have no module of their own, and a norm."""

    def __init__(self, **settings):
        super().__init__()
        self.embed = nn.Linear(3, 12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True, **settings)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 4, bias=False)

    def forward(self, x):
        x = self.embed(x.flatten(2).transpose(1, 2))
        return self.head(self.norm(x + self.attention(x, x, x)[0]).mean(1))


class Odd(nn.Module):
    """Transposed and shared layers, a weight handed to a function, odd buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.up = nn.ConvTranspose2d(3, 5, 3, 2, bias=False)
        self.mix = nn.Conv2d(5, 5, 1)
        self.functional = nn.Linear(5, 7)
        self.again = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.again.weight
        self.register_buffer("order", torch.tensor([2, 0, 1, 4, 3, 6, 5]))
        self.register_buffer("wide", torch.tensor([3.5], dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("huge", torch.tensor(1 << 40))

    def forward(self, x):
        x = F.relu(self.mix(F.relu(self.up(self.norm(x))))).mean((2, 3))
        x = F.relu(F.linear(x, self.functional.weight, self.functional.bias))
        return self.tied(F.relu(self.again(x[:, self.order]))) * self.wide.float()


NETWORKS = [Chain, TinyResNet, TinyMobileNet, Attention, Odd]


def mixed(names, widths=(2, 3, 4, 5, 6, 7, 8)):
    pairs = zip(names, cycle(widths), strict=False)
    return Allocation({name: Choice(bits, 8) for name, bits in pairs})


def quantized(network, widths=(2, 3, 4, 5, 6, 7, 8), **config):
    samples = images(16)
    bits = mixed(trace(network, samples).names, widths)
    return quantize(network, bits, samples, QuantizeConfig(**config)).eval()


def assert_same_outputs(one, other, batch=None):
    batch = images(8, seed=5) if batch is None else batch
    with torch.no_grad():
        assert torch.equal(one(batch), other(batch))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "net.ompq.safetensors"


@pytest.mark.parametrize("kind", NETWORKS)
def test_loaded_network_gives_the_same_bits(kind, file):
    saved = quantized(seeded(kind()))
    save(saved, file)
    loaded = load(file, seeded(kind(), seed=9))
    assert_same_outputs(saved, loaded)
    assert set(loaded.state_dict()) == set(saved.state_dict())
    assert quantization_of(loaded) == quantization_of(saved)
    assert not loaded.training
    for name, tensor in saved.state_dict().items():
        if name not in dict(saved.named_parameters()):
            assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("grid", ["affine", "symmetric"])
def test_every_width_comes_back_to_the_bit(bits, grid, file):
    saved = quantized(seeded(TinyResNet(width=5, classes=3)), (bits,), weight_grid=grid)
    save(saved, file)
    loaded = quantized_layers(load(file, TinyResNet(width=5, classes=3)))
    for name, layer in quantized_layers(saved).items():
        with torch.no_grad():
            assert torch.equal(loaded[name].weight, layer.rounded_weight())
            assert torch.equal(loaded[name].rounded_weight(), layer.rounded_weight())
        assert torch.equal(loaded[name].codes(), layer.codes())
        assert torch.equal(loaded[name].weight_scale, layer.weight_scale)
        assert torch.equal(loaded[name].weight_zero, layer.weight_zero)
        assert torch.equal(loaded[name].bias, layer.bias)
        assert (loaded[name].bits, loaded[name].narrow) == (bits, layer.narrow)


def test_reconstructed_network_comes_back_with_its_errors(file):
    network, samples = seeded(TinyMobileNet()), images(16)
    quick = ReconstructConfig(rounding=RoundingConfig(iterations=5, batch_size=8))
    saved = reconstruct(quantized(network), network, samples, quick).eval()
    save(saved, file)
    loaded = load(file, TinyMobileNet)
    assert_same_outputs(saved, loaded)
    errors = quantization_of(loaded).errors
    assert len(errors) == 5
    assert errors == quantization_of(saved).errors


def test_units_that_stay_float_come_back(file):
    network = seeded(TinyResNet())
    bits = dict(mixed(trace(network, images()).names))
    bits["stem"] = bits["head"] = Choice(32, 32)
    saved = quantize(network, Allocation(bits), images(16)).eval()
    save(saved, file)
    assert set(read_contents(file).state) == {
        "stem.weight",
        "stem.bias",
        "head.weight",
        "head.bias",
    }
    assert_same_outputs(saved, load(file, TinyResNet))


def test_networks_without_biases_need_none(file):
    network = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False))
    saved = quantized(network, restore_moments=False)
    save(saved, file)
    loaded = load(file, lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False)))
    assert loaded[0].bias is None
    assert_same_outputs(saved, loaded)


def test_what_is_shared_or_rounded_in_place_is_stored_once(file):
    saved = quantized(seeded(Odd()), (3,))
    save(saved, file)
    contents = read_contents(file)
    assert set(contents.state) == {
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "tied.bias",
        "order",
        "wide",
        "mask",
        "huge",
    }
    kinds = {key: tensor.dtype for key, tensor in contents.state.items()}
    assert kinds["order"] == torch.uint8
    assert (kinds["wide"], kinds["mask"]) == (torch.float64, torch.bool)
    loaded = load(file, Odd)
    assert loaded.tied.weight is loaded.again.weight
    assert loaded.order.dtype == torch.int64
    for unit in ("functional", "again"):  # 3 bits: at most 8 values a channel
        weight = loaded.get_submodule(unit).weight
        assert max(len(row.unique()) for row in weight) <= 8
        assert torch.equal(weight, saved.get_submodule(unit).weight)


@pytest.mark.parametrize("kind", [Chain, TinyResNet, TinyMobileNet])
def test_settled_network_comes_back_settled(kind, file):
    given = quantized(seeded(kind()))
    saved = settle(given, images(4))
    save(saved, file)
    loaded = load(file, kind)
    links = quantization_of(loaded).links
    assert links == quantization_of(saved).links != ()
    assert {link.layer for link in links} == {
        name for name, one in quantized_layers(loaded).items() if one.integers
    }
    assert_same_outputs(saved, loaded)
    assert_same_outputs(settle(loaded, images(4)), saved)
    # Whole numbers do not depend on the size of a batch; floats would.
    with torch.no_grad():
        alone = torch.cat([loaded(one[None]) for one in images(8, seed=5)])
        assert torch.equal(alone, saved(images(8, seed=5)))


def test_links_to_what_the_network_lacks_are_refused(file):
    saved = settle(quantized(seeded(Chain())), images(4))
    record = quantization_of(saved)
    wrong = replace(record, links=(record.links[0]._replace(source="nowhere"),))
    save(with_quantization(saved, wrong), file)
    with pytest.raises(PackedFileError, match="1 units .* .nowhere is missing"):
        load(file, Chain)


def test_file_holds_the_codes_at_their_width(file):
    saved = quantized(seeded(Chain()), (3,))
    save(saved, file)
    conv, head = read_contents(file).units
    assert conv.stream.numel() == -(-6 * 27 * 3 // 8)
    assert head.stream.numel() == -(-4 * 6 * 3 // 8)
    codes = unpack_bits(conv.stream, 3, 6 * 27)
    assert torch.equal(codes, saved.conv.codes().flatten())


@pytest.mark.parametrize("model", [TinyResNet(), TinyResNet().train(), TinyResNet])
def test_arguments_are_left_as_they_were(model, file):
    saved = quantized(seeded(TinyResNet()))
    before = {key: value.clone() for key, value in saved.state_dict().items()}
    given = model if isinstance(model, nn.Module) else nn.Module()
    state, training = copy.deepcopy(given.state_dict()), given.training
    generator = torch.get_rng_state()
    save(saved, file)
    loaded = load(file, model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(saved.state_dict()[k], v) for k, v in before.items())
    assert all(torch.equal(given.state_dict()[k], v) for k, v in state.items())
    assert given.training == training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in given.modules())
    assert not loaded.training
    assert_same_outputs(saved, loaded)


def test_same_network_gives_the_same_bytes(tmp_path):
    saved = quantized(seeded(TinyMobileNet()))
    files = [tmp_path / name for name in ("a", "b", "c")]
    for one in files:
        save(saved, one, network="net.py:make")
    save(load(files[0], TinyMobileNet), files[2], network="net.py:make")
    assert len({one.read_bytes() for one in files}) == 1


def fake_plan(graph, allocation):
    choices = tuple(sorted(set(allocation.values())))
    shape = (len(graph), len(choices))
    return Plan(
        graph=graph,
        choices=choices,
        scores=ScoreTable(damage=np.zeros(shape)),
        allowed=np.ones(shape, dtype=bool),
        budget=Budget.of("32bits"),
        allocation=allocation,
        score_name="nothing",
    )


def quickly_quantized(network, samples, widths):
    """As quantize() does, with ranges that need no search."""
    graph = trace(network, samples)
    order = random.Random(0)
    bits = Allocation({n: Choice(order.choice(widths), 8) for n in graph.names})
    points, lost = find_points(network, record(network, samples), graph, bits)

    def weight_grid(unit, weight, axis):
        return minmax_weight(weight, bits[unit.name].weight, channel_dim=axis).grid

    made = assemble(
        network,
        graph,
        bits,
        points,
        weight_grid=weight_grid,
        activation_grids=[
            Grid(torch.tensor(0.05), torch.tensor(3.0), point.bits) for point in points
        ],
    )
    return with_quantization(
        made, Quantization(graph, bits, tuple(points), (*graph.skipped, *lost))
    )


@pytest.mark.parametrize("widths", [(2,), (2, 3, 4), (8,)])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "demo", "squeezenet1_1"])
def test_file_takes_what_the_plan_promised(name, widths, file):
    make = DemoNetwork if name == "demo" else lambda: models.get_model(name)
    samples = torch.zeros(1, 1, 8, 8) if name == "demo" else torch.zeros(1, 3, 32, 32)
    saved = quickly_quantized(make().eval(), samples, widths)
    made = quantization_of(saved)
    plan = fake_plan(made.graph, made.allocation)
    save(saved, file, plan=plan, network=f"torchvision:{name}")
    size, promised = file.stat().st_size, plan.totals["bytes"]
    assert promised <= size <= 1.01 * promised + 16 * 1024
    assert size - promised < 6 * 1024  # in fact metadata takes much less


def test_plan_and_network_are_written_down(file):
    saved = quantized(seeded(Chain()))
    made = quantization_of(saved)
    plan = fake_plan(made.graph, made.allocation)
    save(saved, file, plan=plan, network="net.py:make")
    about = read_contents(file).about
    assert about["network"] == "net.py:make"
    assert set(about["versions"]) == {"ompq", "torch"}
    assert about["plan"]["hash"] == plan.hash
    assert about["plan"]["bytes"] == plan.totals["bytes"]


def test_plan_of_other_bits_is_refused(file):
    saved = quantized(seeded(Chain()), (3,))
    graph = quantization_of(saved).graph
    with pytest.raises(PlanError, match=r"other bits than the plan in 2 units \(conv,"):
        save(saved, file, plan=fake_plan(graph, mixed(graph.names, (4,))))
    assert not file.exists()


def test_float_network_is_refused(file):
    with pytest.raises(QuantizationError, match="Chain is not quantized"):
        save(Chain(), file)


def scale_of(network):
    return network.conv.weight_scale


def zero_of(network):
    return network.conv.weight_zero


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        (scale_of, 1e-40, r"conv: scales must be within 1e-36 and 1e\+36, not 9.99"),
        (scale_of, float("inf"), "conv: scales must be within .* to inf; quantize"),
        (zero_of, 0.25, r"conv: zero / 0.5 cannot be stored as uint8: \[0.5\]"),
        (zero_of, -1.0, r"conv: zero / 0.5 cannot be stored as uint8: \[-2.0\]"),
        (lambda n: n.conv.bias, float("nan"), "conv: bias cannot .* float32: .nan"),
    ],
)
def test_numbers_that_a_file_cannot_hold_are_refused(tensor, value, message, file):
    saved = quantized(seeded(Chain()), (3,))
    with torch.no_grad():
        tensor(saved)[0] = value
    with pytest.raises(QuantizationError, match=message):
        save(saved, file)
    assert not file.exists()


def test_weight_that_left_its_grid_is_refused(file):
    saved = quantized(seeded(Attention()), (4,))
    with torch.no_grad():
        saved.attention.in_proj_weight.add_(0.001)
    with pytest.raises(QuantizationError, match="attention.in_proj: its weight was"):
        save(saved, file)


def test_state_that_is_no_tensor_is_refused(file):
    class Stateful(nn.Conv2d):
        def get_extra_state(self):
            return {"steps": 3}

    saved = quantized(seeded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())))
    saved.append(Stateful(4, 4, 1))
    with pytest.raises(QuantizationError, match=r"2._extra_state .* is dict, not a"):
        save(saved, file)


OTHERS = [
    (Chain, r"15 units .* \(stem is missing, block1.conv1 is missing"),
    (
        lambda: TinyResNet(width=6),
        r"7 .* \(stem is \(6, 3, 3, 3\) instead of \(8, 3, 3, 3\)",
    ),
    (lambda: TinyResNet(classes=3), r"1 units .* \(head is \(3, 16\) instead of \(5,"),
]


@pytest.mark.parametrize(("model", "message"), OTHERS)
def test_another_network_says_which_units_differ(model, message, file):
    save(quantized(seeded(TinyResNet())), file)
    with pytest.raises(PackedFileError, match=f"made for another network: {message}"):
        load(file, model)


def without_norm():
    network = TinyResNet()
    network.norm = nn.Identity()
    return network


def with_more():
    network = TinyResNet()
    network.more = nn.Linear(2, 2)
    return network


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (without_norm, "norm is no batch norm"),
        (with_more, "more.weight is not in the file, more.bias is not in the file"),
    ],
)
def test_smaller_differences_are_named(model, message, file):
    save(quantized(seeded(TinyResNet())), file)
    with pytest.raises(PackedFileError, match=message):
        load(file, model)


def test_other_float_parts_are_named(file):
    network = seeded(nn.Sequential(nn.Conv2d(3, 4, 1), nn.LayerNorm(8)))
    save(quantized(network), file)
    other = nn.Sequential(nn.Conv2d(3, 4, 1), nn.LayerNorm(7))
    with pytest.raises(PackedFileError, match=r"1.weight is \(7,\) instead of \(8,\)"):
        load(file, other)
    other = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    with pytest.raises(PackedFileError, match="1.weight is missing, 1.bias is missing"):
        load(file, other)


def test_bias_that_the_file_lacks_is_named(file):
    save(
        quantized(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False)), restore_moments=False),
        file,
    )
    with pytest.raises(PackedFileError, match="0 has a bias"):
        load(file, nn.Sequential(nn.Conv2d(3, 4, 3)))


def test_layer_that_cannot_be_replaced_is_named(file):
    class Special(nn.Conv2d):
        pass

    save(quantized(seeded(Chain())), file)
    other = Chain()
    other.conv = Special(3, 6, 3)
    with pytest.raises(QuantizationError, match="conv: Special has a forward"):
        load(file, other)


def test_what_is_no_float_network_is_refused(file):
    saved = quantized(seeded(Chain()))
    save(saved, file)
    with pytest.raises(ValueError, match="quantized already; pass the float network"):
        load(file, saved)
    with pytest.raises(TypeError, match="returns one, not str"):
        load(file, lambda: "resnet18")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_networks_on_a_gpu_are_saved_and_loaded(file):
    saved = quantized(seeded(TinyResNet()))
    save(copy.deepcopy(saved).cuda(), file)
    assert_same_outputs(saved, load(file, TinyResNet))
    on_gpu = load(file, lambda: TinyResNet().cuda())
    assert {p.device.type for p in on_gpu.state_dict().values()} == {"cuda"}
    assert_same_outputs(saved.cuda(), on_gpu, images(8, seed=5).cuda())
