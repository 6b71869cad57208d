"""What cannot be packed, and files that do not fit a network."""

import pytest
import torch
from torch import nn

from nets import Chain, TinyResNet, seeded
from ompq.errors import PackedFileError, PlanError, QuantizationError
from ompq.packing import load, save
from ompq.quantization import quantization_of
from packing_tools import Attention, fake_plan, mixed, quantized


@pytest.fixture
def file(tmp_path):
    return tmp_path / "net.ompq.safetensors"


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
