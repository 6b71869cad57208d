import copy
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchvision import models

from nets import Chain, TinyMobileNet, TinyResNet, images, seeded
from ompq.allocation.solver import Allocation
from ompq.errors import PackedFileError
from ompq.graph import Choice, trace
from ompq.integer.finalization import finalize
from ompq.layers import quantized_layers
from ompq.models.demo_network import DemoNetwork
from ompq.packing import load, save
from ompq.packing.bitstream import unpack_bits
from ompq.packing.format import read_contents
from ompq.quantization import (
    Quantization,
    assemble,
    quantization_of,
    quantize,
    with_quantization,
)
from ompq.quantization.sites import find_sites
from ompq.quantizers import Grid
from ompq.ranges import search_weight
from ompq.reconstruction import ReconstructConfig, reconstruct
from ompq.reconstruction.rounding import RoundingConfig
from ompq.recording import record
from packing_tools import Attention, Odd, fake_plan, mixed, quantized

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
def test_settled_network_comes_back_settled(kind, file):
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


def quickly_quantized(network, samples, widths):
    """As quantize() does, with ranges that need no search."""
    graph = trace(network, samples)
    order = random.Random(0)
    bits = Allocation({n: Choice(order.choice(widths), 8) for n in graph.names})
    sites, lost = find_sites(network, record(network, samples), graph, bits)

    def weight_grid(unit, weight, axis):
        return search_weight(weight, bits[unit.name].weight, channel_dim=axis)

    made = assemble(
        network,
        graph,
        bits,
        sites,
        weight_grid=weight_grid,
        activation_grids=[
            Grid(torch.tensor(0.05), torch.tensor(3.0), site.bits) for site in sites
        ],
    )
    return with_quantization(
        made, Quantization(graph, bits, tuple(sites), (*graph.skipped, *lost))
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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_networks_on_a_gpu_are_saved_and_loaded(file):
    saved = quantized(seeded(TinyResNet()))
    save(copy.deepcopy(saved).cuda(), file)
    assert_same_outputs(saved, load(file, TinyResNet))
    on_gpu = load(file, lambda: TinyResNet().cuda())
    assert {p.device.type for p in on_gpu.state_dict().values()} == {"cuda"}
    assert_same_outputs(saved.cuda(), on_gpu, images(8, seed=5).cuda())
