"""save(), load() and inspect_file(): what comes back, sizes, and what is refused."""

import copy
import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models

from nets import Chain, Recurrent, TinyMobileNet, TinyResNet, images, seeded, tokens
from ompq.allocation.problem import Allocation
from ompq.configs import PlanConfig, ReconstructConfig, RoundingConfig
from ompq.entropy_coding.bit_packing import unpack_bits
from ompq.entropy_coding.codec import encode
from ompq.errors import PackedFileError, PlanError, QuantizationError
from ompq.files import read_tensors
from ompq.integer.finalization import finalize
from ompq.layers import quantized_layers
from ompq.models.builtin_networks import DemoNetwork
from ompq.network.attention import with_layers
from ompq.network.graph import trace
from ompq.network.observation import record
from ompq.network.units import Choice
from ompq.packed.account import inspect_file
from ompq.packed.format import FORMAT, read_contents
from ompq.packed.packed_files import load, save
from ompq.planning import plan as make_plan
from ompq.quantization.activation_sites import Link, find_sites
from ompq.quantization.equalization import Equalized
from ompq.quantization.pipeline import quantize
from ompq.quantization.record import (
    BlockError,
    Quantization,
    quantization_of,
    with_quantization,
)
from ompq.reconstruction.block_loop import reconstruct
from ompq.weight_ranges import search_weight
from packing_tools import Attention, Odd, assembled, coded, fake_plan, mixed, quantized

NETWORKS = [Chain, TinyResNet, TinyMobileNet, Attention, Odd]


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
        assert torch.equal(loaded[name].weight_zero_point, layer.weight_zero_point)
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
def test_finalized_network_comes_back_finalized(kind, file):
    given = quantized(seeded(kind()))
    saved = finalize(given, images(4))
    save(saved, file)
    loaded = load(file, kind)
    links = quantization_of(loaded).links
    assert links == quantization_of(saved).links != ()
    assert {link.layer for link in links} == {
        name for name, one in quantized_layers(loaded).items() if one.integers
    }
    assert_same_outputs(saved, loaded)
    assert_same_outputs(finalize(loaded, images(4)), saved)
    # Whole numbers do not depend on the size of a batch; floats would.
    with torch.no_grad():
        alone = torch.cat([loaded(one[None]) for one in images(8, seed=5)])
        assert torch.equal(alone, saved(images(8, seed=5)))


def test_links_to_what_the_network_lacks_are_refused(file):
    saved = finalize(quantized(seeded(Chain())), images(4))
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
    codes = unpack_bits(conv.stream.numpy(), 3, conv.unit.weight_shape)
    assert codes.tolist() == saved.conv.codes().tolist()


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


def quickly_quantized(network, samples, widths):
    """As quantize() does, with ranges that need no search."""
    graph = trace(network, samples)
    order = random.Random(0)
    bits = Allocation({n: Choice(order.choice(widths), 8) for n in graph.names})
    sites, lost = find_sites(network, record(network, samples), graph, bits)

    def weight_grid(unit, weight, axis):
        width = bits[unit.name].weight
        return search_weight(weight, width, channel_dim=axis), weight

    made = assembled(network, graph, bits, sites, weight_grid)
    return with_quantization(
        made, Quantization(graph, bits, tuple(sites), (*graph.skipped, *lost))
    )


class LanguageModel(nn.Module):
    """An embedding whose weight the last layer shares, and buffers of many types."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        self.body = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 500, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("order", torch.arange(3000))
        self.register_buffer("exact", torch.rand(500, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(200, 200, dtype=torch.bool))

    def forward(self, tokens):
        return self.head(self.norm(F.relu(self.body(self.embedding(tokens)))))


def chain():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(150)))


def small_transformer():
    network = models.VisionTransformer(32, 8, 3, 4, 64, 128)
    return with_layers(network, torch.zeros(1, 3, 32, 32))


SIZED = {
    "resnet18": (models.resnet18, torch.zeros(1, 3, 32, 32)),
    "mobilenet_v2": (models.mobilenet_v2, torch.zeros(1, 3, 32, 32)),
    "squeezenet1_1": (models.squeezenet1_1, torch.zeros(1, 3, 32, 32)),
    "demo": (DemoNetwork, torch.zeros(1, 1, 8, 8)),
    "chain": (chain, torch.zeros(1, 8)),
    "tied": (LanguageModel, torch.zeros(1, 4, dtype=torch.int64)),
    "odd": (Odd, images(1)),
    "transformer": (small_transformer, torch.zeros(1, 3, 32, 32)),
}


def laden(record):
    """The record after everything that can be written down has been."""
    order = random.Random(0)
    names = [f"{unit.name}.output_quantizer" for unit in record.graph.units]
    errors = [
        BlockError(block, order.random(), order.random() / 10, improved=True)
        for block in record.graph.blocks
    ]
    factors = [
        Equalized(u.norm, u.name, tuple(order.choices(range(-3, 3), k=u.out_channels)))
        for u in record.graph.units
        if u.kind == "depthwise"
    ]
    for u in record.graph.units:
        if u.name.endswith(("in_proj", "out_proj", "mlp.0")):  # as in transformers
            width = u.weight_shape[1]
            exponents = tuple(order.choices(range(5), k=width))
            shifts = tuple(round(order.gauss(0, 40)) for _ in range(width))
            factors.append(
                Equalized(f"{u.block}.ln", u.name, exponents, shifts, 2 * width)
            )
    pairs = zip(record.graph.names, pairwise(["", *names]), strict=True)
    links = [Link(name, *pair) for name, pair in pairs]
    return replace(
        record, errors=tuple(errors), links=tuple(links), equalized=tuple(factors)
    )


@pytest.mark.parametrize("widths", [(2,), (2, 3, 4, 8)])
@pytest.mark.parametrize("name", SIZED)
def test_the_plan_bounds_the_file(name, widths, file):
    make, samples = SIZED[name]
    saved = quickly_quantized(seeded(make()), samples, widths)
    record = quantization_of(saved)
    plan = fake_plan(record.graph, record.allocation)
    save(saved, file, plan=plan, network=f"torchvision:{name}")
    plain = file.stat().st_size
    save(with_quantization(saved, laden(record)), file, plan=plan, network="x" * 99)
    size, promised = file.stat().st_size, plan.totals["bytes"]
    assert plain < size <= promised
    assert promised - size < 0.07 * promised + 500  # as tight as that


@pytest.mark.parametrize("kind", [Chain, TinyResNet, TinyMobileNet, Odd])
@pytest.mark.parametrize("step", [0.1, 0.5, 1.5])
def test_coded_units_come_back_to_the_bit(kind, step, file):
    saved = coded(seeded(kind()), 8.0, step)
    save(saved, file)
    again = load(file, kind)
    assert quantization_of(again) == quantization_of(saved)
    assert_same_outputs(saved, again)


def test_coded_units_are_counted_as_they_are_stored(file):
    saved = coded(seeded(TinyMobileNet()))
    record = quantization_of(saved)
    plan = fake_plan(record.graph, record.allocation)
    save(saved, file, plan=plan)
    account = inspect_file(file)
    assert account.file_bytes == file.stat().st_size == sum(account.items.values())
    assert account.file_bytes <= plan.totals["bytes"]
    assert account.planned == plan.bytes_by_item
    assert account.average_bits == pytest.approx(6)
    # What scales and biases take together is known; a unit takes its part of it.
    vectors = read_tensors(file, FORMAT)[1]
    sizes = {name: t.nbytes for name, t in vectors.items()}
    assert account.items["scales"] == 4 * len(account.units) + sizes["multiples.lzma"]
    assert account.items["biases"] == sizes["halves.lzma"]
    for one in account.units:
        layer = quantized_layers(saved)[one.unit.name]
        shape = (-1, *[1] * (layer.weight.dim() - 1))
        step = layer.weight_scale.reshape(shape)
        codes = ((layer.weight / step).round() + 128).to(torch.uint8).numpy()
        # Scales are bytes times a number; the zero point is known.
        assert one.coded and one.bytes.weights == len(encode(codes))
        channels = one.unit.out_channels
        assert 4 < one.bytes.scales <= channels + 4 == one.planned.scales
        assert one.bytes.biases <= one.planned.biases == 2 * channels
        assert one.bytes.zero_points == 0
        assert one.bytes.total <= one.planned.total
    assert json.dumps(account.to_json())


def test_fixed_widths_are_coded_without_loss_where_asked_and_smaller(file):
    saved = quantized(seeded(TinyResNet()), (4, 8))
    sizes = []
    for coded_too in (False, True):
        save(saved, file, coded=coded_too)
        assert_same_outputs(saved, load(file, TinyResNet))
        account = inspect_file(file)
        assert sum(account.items.values()) == file.stat().st_size
        sizes.append({one.unit.name: one.bytes for one in account.units})
    before, after = sizes
    assert all(after[name].total <= before[name].total for name in before)
    assert sum(one.weights for one in after.values()) < 4000
    assert sum(one.weights for one in before.values()) == 4020


def test_weights_beyond_their_rate_are_told(file, caplog):
    saved = coded(seeded(Chain()), rate=1.0)
    save(saved, file)
    assert "conv, head: coded weights take " in caplog.text
    assert "bytes more than planned" in caplog.text


def test_loading_takes_one_thread_and_gives_the_others_back(file):
    save(quantized(seeded(Chain())), file)
    seen = []

    def construct():
        seen.append(torch.get_num_threads())
        return Chain()

    torch.set_num_threads(3)
    try:
        load(file, construct)
        seen.append(torch.get_num_threads())
        with pytest.raises(PackedFileError):
            load(file.with_name("missing"), construct)
        seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 3, 3]


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


def test_float_units_and_other_state_are_counted(tmp_path):
    path = tmp_path / "net"
    network = seeded(TinyResNet())
    names = trace(network, images()).names
    bits = dict.fromkeys(names, Choice(4, 8)) | {"stem": Choice(32, 32)}
    save(quantize(network, Allocation(bits), images(16)), path)
    account = inspect_file(path)
    stem = account.units[0].bytes
    assert (stem.weights, stem.biases, stem.total) == (4 * 216, 32, 896)
    assert account.items["float"] == 0
    assert sum(account.items.values()) == account.file_bytes
    assert account.about["plan"] is None


def test_plan_of_other_bits_is_refused(file):
    saved = quantized(seeded(Chain()), (3,))
    graph = quantization_of(saved).graph
    with pytest.raises(
        PlanError, match=r"bits differ from the plan's in 2 units \(conv,"
    ):
        save(saved, file, plan=fake_plan(graph, mixed(graph.names, (4,))))
    assert not file.exists()


def test_float_network_is_refused(file):
    with pytest.raises(QuantizationError, match="Chain is not quantized"):
        save(Chain(), file)


def scale_of(network):
    return network.conv.weight_scale


def zero_of(network):
    return network.conv.weight_zero_point


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
    tokens = torch.arange(28).reshape(4, 7) % 20
    saved = quantize(seeded(Recurrent()), {"*": (4, 32)}, tokens)
    with torch.no_grad():
        saved.recurrent.weight_hh_l0.add_(0.001)
    with pytest.raises(QuantizationError, match="hh_l0: its weight was changed"):
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
        (without_norm, "norm is not a batch norm"),
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


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_network_is_planned_saved_and_loaded(layer, file):
    tokens = torch.arange(56).reshape(8, 7) % 20
    model = seeded(Recurrent(layer))
    plan = make_plan(model, tokens, "4bits")
    made = quantize(model, plan, tokens)
    names = ["embedding", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "head"]
    assert list(plan.allocation) == names
    for unit in plan.graph.units[:3]:  # weights only: what they read stays float
        weight = made.get_parameter(unit.parameter)
        bits = plan.allocation[unit.name].weight
        assert all(row.unique().numel() <= 2**bits for row in weight)
        assert not torch.equal(weight, model.get_parameter(unit.parameter))
    save(made, file)
    with torch.no_grad():
        assert torch.equal(load(file, Recurrent(layer))(tokens), made(tokens))


@pytest.mark.parametrize("coded", [False, True])
def test_groups_come_back_and_the_plan_counts_them(file, coded):
    model, samples = tokens(), images(16)
    config = PlanConfig(group_size=32, storage="coded" if coded else "fixed")
    plan = make_plan(model, samples, "12KiB" if coded else "16KiB", config)
    network = quantize(model, plan, samples)
    save(network, file, plan=plan)
    loaded = load(file, tokens)
    assert_same_outputs(network, loaded)
    assert quantization_of(loaded).graph == quantization_of(network).graph
    assert file.stat().st_size <= plan.totals["bytes"] <= (12 if coded else 16) << 10
    rates = [choice.rate for choice in plan.allocation.values()]
    assert any(rates) == coded
    for one in inspect_file(file).units:
        assert one.bytes.scales <= one.planned.scales
        assert one.bytes.scales == one.planned.scales or coded
        # At 8 bits all are the middle code.
        stored = one.planned.zero_points if one.bits.weight < 7 else 0
        assert one.bytes.zero_points == stored or not one.unit.group_size
    shapes = {n: layer.weight_scale.shape for n, layer in named_layers(loaded)}
    for name, layer in named_layers(network):
        assert shapes[name] == layer.weight_scale.shape
        grouped = layer.group_size == 32
        assert grouped == (name not in ("embed", "head") and not layer.rate)
    save(network, file, coded=True)  # units of a fixed width, too, without any loss
    assert_same_outputs(network, load(file, tokens))


def named_layers(network):
    return quantized_layers(network).items()
