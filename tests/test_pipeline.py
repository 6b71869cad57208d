import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models, ops

import ompq
from nets import (
    Chain,
    TinyMobileNet,
    TinyResNet,
    images,
    scenes,
    seeded,
    tokens,
    values,
)
from ompq.allocation.problem import Allocation
from ompq.entropy_coding.rates import to_multiples
from ompq.errors import PlanError, QuantizationError
from ompq.grids import Grid
from ompq.layers import QuantizedConv2d, activation_quantizers, quantized_layers
from ompq.network.graph import bias_key
from ompq.network.units import Choice
from ompq.quantization.activation_sites import ActivationSite
from ompq.quantization.assembly import assemble, quantizer_names
from ompq.weight_ranges import search_weight

SAMPLES = scenes(48)


def uniform(network, bits, activation=8, samples=SAMPLES):
    names = ompq.trace(network, samples).names
    return Allocation({name: Choice(bits, activation) for name in names})


def relative_error(model, other, batch):
    with torch.no_grad():
        wanted = model(batch)
        return ((other(batch) - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("make", [TinyResNet, TinyMobileNet, Chain])
def test_eight_bits_change_little_and_fewer_more(make):
    model = seeded(make())
    errors = [
        relative_error(model, ompq.quantize(model, uniform(model, b), SAMPLES), SAMPLES)
        for b in (8, 4, 2)
    ]
    assert errors[0] < 0.05
    assert errors == sorted(errors)


def test_norms_are_folded_and_structure_is_kept():
    model = seeded(TinyResNet())
    quantized = ompq.quantize(model, uniform(model, 8), SAMPLES)
    assert isinstance(quantized.block1.bn1, nn.Identity)
    assert set(quantized_layers(quantized)) == set(ompq.trace(model, SAMPLES).names)
    kept = {k for k in model.state_dict() if "bn" not in k and "norm" not in k}
    kept = {k for k in kept if "downsample.1" not in k}
    assert kept <= set(quantized.state_dict())
    assert not any(
        p.requires_grad
        for p in activation_quantizers(quantized)["input_quantizer"].parameters()
    )
    moved = copy.deepcopy(quantized).to(torch.float32)
    assert torch.equal(moved(SAMPLES), quantized(SAMPLES))


def test_restored_moments_bring_means_together():
    model = seeded(TinyMobileNet())
    plain = ompq.QuantizeConfig(restore_moments=False)
    results = [
        ompq.quantize(model, uniform(model, 3), SAMPLES, config)
        for config in (plain, ompq.QuantizeConfig())
    ]
    with torch.no_grad():
        wanted = model(SAMPLES).mean(0)
        gaps = [(q(SAMPLES).mean(0) - wanted).abs().max().item() for q in results]
    assert gaps[1] < 0.1 * gaps[0]


def test_layer_without_a_bias_gets_one():
    network = nn.Sequential(nn.Linear(4, 3, bias=False))
    samples = 1 + torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    model = seeded(network)
    allocation = uniform(model, 2, samples=samples)
    plain = ompq.QuantizeConfig(restore_moments=False)
    results = [
        ompq.quantize(model, allocation, samples, config)
        for config in (plain, ompq.QuantizeConfig())
    ]
    assert [quantized[0].bias is None for quantized in results] == [True, False]
    with torch.no_grad():
        gaps = [(q(samples) - model(samples)).mean(0).norm() for q in results]
    assert gaps[1] < 0.1 * gaps[0]


def test_residual_operands_lie_on_grids():
    model = seeded(TinyResNet())
    quantized = ompq.quantize(model, uniform(model, 4, activation=4), SAMPLES)
    seen = {}
    quantized.block2.conv1.register_forward_pre_hook(
        lambda m, args: seen.update(x=args[0])
    )
    quantized(SAMPLES)
    quantizer = quantized.block1.output_quantizer
    codes = seen["x"] / quantizer.scale + quantizer.zero_point
    torch.testing.assert_close(codes, codes.round(), atol=1e-3, rtol=0)
    assert codes.min() >= 0
    assert codes.max() <= 15


def test_float_units_and_float_activations():
    model = seeded(Chain())
    bits = Allocation({"conv": Choice(32, 8), "head": Choice(4, 32)})
    quantized = ompq.quantize(model, bits, SAMPLES)
    assert list(quantized_layers(quantized)) == ["head"]
    # The network's input, and what the average over positions reads.
    assert len(activation_quantizers(quantized)) == 2
    only = Allocation({"conv": Choice(4, 32), "head": Choice(4, 32)})
    assert not activation_quantizers(ompq.quantize(model, only, SAMPLES))


def test_plan_and_allocation_give_the_same_network():
    model = seeded(TinyResNet())
    plan = ompq.plan(model, SAMPLES, "4bits")
    first = ompq.quantize(model, plan, SAMPLES)
    second = ompq.quantize(model, plan.allocation, SAMPLES)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key])
    record = ompq.quantization_of(first)
    assert record.allocation == plan.allocation


def test_wrong_plans_are_refused():
    model = seeded(Chain())
    plan = ompq.plan(seeded(TinyResNet()), SAMPLES, "4bits")
    with pytest.raises(PlanError, match="made for another network"):
        ompq.quantize(model, plan, SAMPLES)
    with pytest.raises(QuantizationError, match="the allocation has no bits for head"):
        ompq.quantize(model, Allocation({"conv": Choice(4, 8)}), SAMPLES)
    with pytest.raises(TypeError, match=r'must be a Plan, .* \{"\*": 4\}, not 4'):
        ompq.quantize(model, 4, SAMPLES)
    for bits in ("W4A8", 3.5, (4,), None):
        given = re.escape(repr(bits))
        words = rf"'head': {given} is not a valid bit width; write 4, \(4, 8\)"
        with pytest.raises(TypeError, match=words):
            ompq.quantize(model, {"*": 4, "head": bits}, SAMPLES)
    with pytest.raises(
        ValueError, match="'sum_bits' of QuantizeConfig must be one of 8, 16"
    ):
        ompq.QuantizeConfig(sum_bits=12)


def test_layer_that_pads_in_its_own_forward_is_quantized():
    class Padded(nn.Conv2d):
        def forward(self, x):
            return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))

    model = seeded(nn.Sequential(Padded(3, 4, 3), nn.Conv2d(4, 2, 1)))
    made = ompq.quantize(model, uniform(model, 8), SAMPLES)
    assert list(quantized_layers(made)) == ["0", "1"]
    with torch.no_grad():
        off = (made(SAMPLES) - model(SAMPLES)).square().mean()
        assert off < 1e-3 * model(SAMPLES).square().mean()


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "squeezenet1_1"])
def test_real_networks_quantize(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = models.get_model(name, weights=None).eval()
    samples = scenes(4, size=64)
    quantized = ompq.quantize(model, uniform(model, 8, samples=samples), samples)
    assert relative_error(model, quantized, samples) < 0.2


def test_progress_is_told():
    seen = []
    model = seeded(Chain())
    config = ompq.QuantizeConfig(batch_size=3)
    ompq.quantize(
        model,
        uniform(model, 4),
        SAMPLES,
        config,
        progress=lambda *step: seen.append(step),
    )
    assert seen[0] == (0, 4, "observing the network")
    assert seen[-1] == (4, 4, "done")
    batches = -(-len(SAMPLES) // 3)
    ranges = [step[:2] for step in seen if step[2] == "calibrating activations"]
    read = [(n, batches) for n in range(1, batches + 1)]
    assert ranges == [(1, 4), *read, *read]  # and again, to weigh them
    units = len(ompq.trace(model, SAMPLES))
    rounding = [step[:2] for step in seen if step[2] == "rounding weights"]
    # The inputs are read first, then each unit is rounded.
    assert rounding == [(2, 4), *read, *((n, units) for n in range(1, units + 1))]


def test_progress_knows_how_many_batches_a_list_gives():
    seen = []
    model = seeded(Chain())
    several = [SAMPLES[:4], SAMPLES[4:]]
    ompq.quantize(
        model, uniform(model, 4), several, progress=lambda *step: seen.append(step)
    )
    assert (1, 1, "calibrating activations") in seen  # joined: 8 images


class Meter(nn.Module):
    """Writes down the largest batch that any copy of it gets."""

    largest = 0

    def forward(self, x):
        Meter.largest = max(Meter.largest, len(x))
        return x


@pytest.mark.parametrize("size", [1, 5])
def test_no_module_sees_more_samples_than_the_batch_size(size):
    depthwise = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), Meter())
    model = seeded(
        nn.Sequential(
            nn.Sequential(Meter(), nn.Conv2d(3, 4, 3), nn.ReLU()),
            depthwise,
            nn.Sequential(nn.Flatten(), nn.Linear(64, 5), Meter()),
        )
    )
    bits = {name: Choice(6, 8) for name in ompq.trace(model, scenes(4)).names}
    Meter.largest = 0
    config = ompq.QuantizeConfig(batch_size=size)
    quantized = ompq.quantize(model, Allocation(bits), scenes(40), config)
    assert Meter.largest == size
    rounding = ompq.RoundingConfig(iterations=2, batch_size=size)
    learn = ompq.ReconstructConfig(rounding=rounding, batch_size=size)
    ompq.reconstruct(quantized, model, scenes(40), learn)
    # Two samples show which dimension grows with the samples.
    assert Meter.largest == max(size, 2)


def quantized_at(network, samples, bits=3):
    bits = dict.fromkeys(ompq.trace(network, samples).names, Choice(bits, 8))
    config = ompq.QuantizeConfig(output_error=False)
    return ompq.quantize(network, Allocation(bits), samples, config)


def by_hand(network, samples, bits=3):
    graph = ompq.trace(network, samples)
    return assemble(
        network,
        graph,
        dict.fromkeys(graph.names, Choice(bits, 8)),
        (),
        weight_grid=lambda _u, w, axis: (search_weight(w, bits, channel_dim=axis), w),
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
    (first, *_) = ompq.quantization_of(made).sites
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


def test_every_site_gets_its_own_quantizer():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    graph = ompq.trace(network, images())
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

    units = ompq.trace(Net(), images()).units
    assert {bias_key(unit) for unit in units} == {
        "parts.attention.in_proj.bias",
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


def test_fused_transformer_layers_compute_with_rounded_weights():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = seeded(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    samples = values(4, 5, 8)
    bits = dict.fromkeys(ompq.trace(model, samples).names, Choice(3, 32))
    made = ompq.quantize(model, Allocation(bits), samples)
    outputs = []
    for grad in (False, True):  # fused kernels run only without gradients
        with torch.set_grad_enabled(grad):
            outputs.append(made(samples).detach())
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act", ["", "FrozenBatchNormAct2d", "BatchNormAct2d"])
def test_batch_norms_of_other_libraries_are_folded(act):
    if act:
        norm = getattr(pytest.importorskip("timm.layers"), act)(6)
    else:
        norm = ops.FrozenBatchNorm2d(6)
    body = [nn.Conv2d(3, 6, 3, bias=False), norm, nn.ReLU(), nn.Conv2d(6, 4, 1)]
    model = seeded(nn.Sequential(*body))
    norm.running_mean.copy_(values(6))
    norm.running_var.copy_(values(6, seed=2).square() + 0.5)
    norm.weight.data.copy_(values(6, seed=3))
    assert [unit.norm for unit in ompq.trace(model, SAMPLES).units] == ["1", ""]
    made = ompq.quantize(model, uniform(model, 8), SAMPLES)
    assert not any("BatchNorm" in type(module).__name__ for module in made.modules())
    with torch.no_grad():
        wanted, got = model(SAMPLES), made(SAMPLES)
    assert (got - wanted).square().mean() < 1e-3 * wanted.square().mean()
    assert ompq.finalize(made, SAMPLES)(SAMPLES).shape == wanted.shape


def test_groups_round_as_by_hand_and_lose_less():
    model, samples = tokens(), images(16)
    bits = {"*": (3, 32)}
    config = ompq.QuantizeConfig(group_size=32, restore_moments=False)
    made = ompq.quantize(model, bits, samples, config)
    for name, layer in quantized_layers(made).items():
        projection = name == "attention.in_proj"
        key = "attention.in_proj_weight" if projection else f"{name}.weight"
        weight = model.get_parameter(key)
        if name in ("embed", "head"):
            assert layer.weight_scale.dim() == 1
            continue
        assert layer.weight_scale.shape == (len(weight), -(-weight.shape[1] // 32))
        assert "group_size=32" in repr(layer)
        for row, column in ((0, 0), (3, 33), (7, weight.shape[1] - 1)):
            scale = layer.weight_scale[row, column // 32].item()
            zero = layer.weight_zero_point[row, column // 32].item()
            code = min(max(round(weight[row, column].item() / scale + zero), 0), 7)
            value = layer.rounded_weight()[row, column].item()
            assert value == pytest.approx(scale * (code - zero), rel=1e-5)
    assert made.attention.in_proj.weight_scale.shape == (120, 2)
    bits = {"*": (32, 32), "up": (3, 32), "down": (3, 32)}
    # Rounded to nearest, so that the scales alone make the difference.
    config = ompq.QuantizeConfig(output_error=False)
    whole = ompq.quantize(model, bits, samples, config)
    grouped = ompq.quantize(model, bits, samples, replace(config, group_size=32))

    def error(network):
        with torch.no_grad():
            return (network(samples) - model(samples)).square().mean()

    assert error(grouped) < 0.6 * error(whole)


def test_a_plan_says_what_groups_there_are():
    model, samples = tokens(), images(8)
    plan = ompq.plan(model, samples, "4bits", ompq.PlanConfig(group_size=32))
    made = ompq.quantize(model, plan, samples)
    assert ompq.quantization_of(made).graph.group_size == 32
    assert quantized_layers(made)["up"].group_size == 32
    ompq.quantize(model, plan, samples, ompq.QuantizeConfig(group_size=32))
    words = "group_size=64, but the plan was made for scales of groups of 32: plan with"
    with pytest.raises(PlanError, match=words):
        ompq.quantize(model, plan, samples, ompq.QuantizeConfig(group_size=64))
    plain = ompq.plan(model, samples, "4bits")
    with pytest.raises(PlanError, match="made for scales of whole channels"):
        ompq.quantize(model, plain, samples, ompq.QuantizeConfig(group_size=64))


def test_a_group_of_zeros_does_not_spoil_the_others():
    model = seeded(nn.Sequential(nn.Flatten(), nn.Linear(192, 6)))
    with torch.no_grad():
        model[1].weight[2, 64:128] = 0
        model[1].weight *= 1e-3
    config = ompq.QuantizeConfig(group_size=64, restore_moments=False)
    made = ompq.quantize(model, {"*": (6, 32)}, images(4), config)[1]
    found, given = made.rounded_weight(), model[1].weight
    assert (found[2, 64:128] == 0).all()
    assert (found - given).square().sum() < 2e-3 * given.square().sum()
    assert torch.equal(to_multiples(made.weight_scale), made.weight_scale)


class Renamed(nn.Module):
    """A layer and its norm that have two names each, and are called by both."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = (
            nn.Conv2d(3, 3, 1),
            nn.BatchNorm2d(3),
            nn.Linear(3, 4),
        )
        self.again, self.other = self.first, self.norm

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.head(self.other(self.again(x)).relu().mean((2, 3)))


def test_a_layer_of_two_names_is_quantized_under_both(tmp_path):
    model, samples = seeded(Renamed()), scenes(16)
    quantized = ompq.quantize(model, {"*": (3, 8)}, samples)
    assert quantized.again is quantized.first
    assert quantized.other is quantized.norm
    assert isinstance(quantized.again, QuantizedConv2d)
    ompq.save(quantized, tmp_path / "net.ompq.safetensors")
    loaded = ompq.load(tmp_path / "net.ompq.safetensors", model)
    assert loaded.again is loaded.first
    assert torch.equal(loaded(samples), quantized(samples))


def test_networks_in_double_precision_are_told_what_to_do_before_the_work():
    model, told = seeded(Chain()).double(), []
    words = r"conv, head are float64, .* network in float32: model.float\(\)"
    with pytest.raises(QuantizationError, match=words):
        ompq.quantize(
            model, {"*": 4}, images().double(), progress=lambda *a: told.append(a)
        )
    assert len(told) <= 2  # nothing was calibrated
    ompq.quantize(
        model, {"*": (32, 32)}, images().double()
    )  # files hold what stays float


def test_a_method_that_would_leave_the_scales_out_says_what_to_type(tmp_path):
    class Savable(Chain):
        def save_pretrained(self, folder):
            raise AssertionError("the float network's")

    model = seeded(Savable())
    quantized = ompq.quantize(model, {"*": 4}, images())
    for one in (quantized, copy.deepcopy(quantized)):
        with pytest.raises(QuantizationError, match="without their scales; .* ompq.sa"):
            one.save_pretrained(tmp_path)
    with pytest.raises(AssertionError):
        model.save_pretrained(tmp_path)
    ompq.save(quantized, tmp_path / "a")
    with pytest.raises(QuantizationError, match="without their scales"):
        ompq.load(tmp_path / "a", model).save_pretrained(tmp_path)
