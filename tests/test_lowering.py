import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowering_cases import NETWORKS, finalized
from nets import (
    Chain,
    TinyMobileNet,
    TinyResNet,
    TwoInputs,
    demo_network,
    images,
    seeded,
)
from ompq.errors import QuantizationError
from ompq.evaluation import evaluate
from ompq.integer.engine import IntegerNetwork
from ompq.integer.finalization import finalize
from ompq.integer.lowering import Steps, lower, output_names
from ompq.layers import activation_quantizers, quantized_layers
from ompq.models.builtin_networks import demo_data
from ompq.runtimes.onnx.onnx_files import export_onnx
from quantized import quantized


class Shared(nn.Module):
    """One ReLU6 with two callers, so that quantizers stand before it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)
        self.act = nn.ReLU6()

    def forward(self, x):
        return self.act(self.second(self.act(self.first(x)))).mean((2, 3))


def test_demo_network_keeps_its_accuracy():
    data = demo_data()
    network = finalize(
        quantized(demo_network(), data.train_images[:64], weight=8), data.train_images
    )
    engine = IntegerNetwork.from_quantized(network, data.train_images)
    batches = [(data.test_images[:150], data.test_targets[:150])]
    found = evaluate(engine, batches, reference=network)
    assert found.agreement == 1.0
    assert found.top1 > 0.9


def test_network_may_end_in_codes():
    samples = images(8)
    steps = lower(quantized(NETWORKS["resnet"](), samples), samples)
    engine = IntegerNetwork(Steps(steps.steps[:5], steps.input_shape, {"codes": 4}))
    grid = steps.steps[4].grid
    expected = grid.scale * (
        IntegerNetwork(steps).codes(samples)[4].float() - grid.zero_point
    )
    torch.testing.assert_close(engine(samples), expected)


def test_lowering_leaves_the_network_as_it_was():
    network = quantized(seeded(TinyResNet()), images()).train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    hooks = {n: len(m._forward_hooks) for n, m in network.named_modules()}
    lower(network, images())
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert hooks == {n: len(m._forward_hooks) for n, m in network.named_modules()}
    assert network.training


def test_padding_by_name_and_dilation_are_understood():
    class Same(nn.Sequential):
        pass

    network = Same(nn.Conv2d(3, 4, 3, padding="same", dilation=(1, 2)), nn.ReLU())
    network.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten())
    network.append(nn.Linear(4, 3))
    steps = lower(quantized(seeded(network), images()), images())
    assert steps.steps[1].operator.padding == (1, 2, 1, 2)
    assert steps.steps[1].operator.dilation == (1, 2)


def test_names_of_modules_are_told():
    class Net(nn.Sequential):
        pass

    network = Net(nn.Conv2d(3, 4, 1), nn.Hardswish(), nn.Conv2d(4, 2, 1))
    with pytest.raises(QuantizationError, match="hardswish in 1 has no integer kernel"):
        lower(quantized(seeded(network), images(), 8), images())


def test_layer_that_stays_float_is_refused():
    network = quantized(seeded(Chain()), images(), 8)
    for quantizer in activation_quantizers(network).values():
        quantizer.enabled = False
    with pytest.raises(
        QuantizationError, match="conv reads a tensor without a grid, from input"
    ):
        lower(network, images())


def test_float_convolution_is_refused():
    network = quantized(seeded(Chain()), images(), (32, 8))
    with pytest.raises(QuantizationError, match="conv2d in conv has no integer kernel"):
        lower(network, images())


def test_layers_of_other_kinds_are_refused():
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"))
    with pytest.raises(
        QuantizationError,
        match=re.escape("0 (QuantizedConv2d, 4 dimensions, padding circular) has no"),
    ):
        lower(quantized(seeded(network), images(), 8), images())


def test_several_inputs_and_strange_outputs_are_refused():
    pair = (torch.ones(4, 3), torch.ones(4, 2))
    with pytest.raises(QuantizationError, match="takes 2 inputs; .* supports one"):
        lower(quantized(seeded(TwoInputs()), pair, 8), pair)

    class Blind(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            self.layer(x)
            return torch.zeros(2, 2)

    rows = torch.ones(4, 3)
    with pytest.raises(QuantizationError, match="output does not come from its input"):
        lower(quantized(seeded(Blind()), rows, 8), rows)


def test_too_large_sums_name_their_layer():
    network = quantized(nn.Sequential(nn.Linear(70_000, 1)), torch.ones(2, 70_000), 8)
    layer = quantized_layers(network)["0"]
    with torch.no_grad():
        layer.weight.fill_(-1.0)
        layer.weight_scale.fill_(1 / 128)
    with pytest.raises(QuantizationError, match="0 sums of 70000 products"):
        lower(network, torch.ones(2, 70_000))


def assigned(x):
    x[:, 0] = 1.0
    return x


def through_numpy(x):
    x.numpy()[:, 0] = 1.0
    return x


def through_array(x):
    np.asarray(x)[:, 0] = 1.0
    return x


def through_data(x):
    x.data[:, 0] = 1.0
    return x


def through_a_view(x):
    x[:, :2].relu_()
    return x


def into_another(x):
    return torch.zeros_like(x).copy_(x)


def out_argument(x):
    return torch.add(x, x, out=torch.empty_like(x))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (assigned, "setitem in the network reads or writes a tensor in a way"),
        (
            through_numpy,
            "numpy in the network reads or writes a tensor in a way",
        ),
        (
            through_array,
            "array in the network reads or writes a tensor in a way",
        ),
        (through_data, "data in the network has no integer kernel"),
        (through_a_view, "reads a tensor that was modified in place through a view"),
        (into_another, "zeros_like in the network has no integer kernel"),
        (out_argument, "empty_like in the network has no integer kernel"),
    ],
)
def test_writes_that_a_file_would_lose_are_refused(write, words):
    class Writing(Chain):
        def forward(self, x):
            x = write(self.conv(x))
            return self.head(torch.relu(x).mean((2, 3)))

    network = quantized(seeded(Writing()), images(), 8)
    with pytest.raises(QuantizationError, match=words):
        lower(network, images())


def test_what_tells_only_of_a_tensors_form_is_no_write():
    class Asking(Chain):
        def forward(self, x):
            x = torch.relu(self.conv(x))
            assert len(x) == x.size(0) == x.shape[0] and x.dim() == x.ndim
            assert x.is_contiguous() and x.dtype == torch.float32 and x.numel()
            return self.head(x.mean((2, 3)))

    assert lower(quantized(seeded(Asking()), images(), 8), images()).steps


def test_outputs_must_come_from_the_input_through_a_layer():
    class Returning(Chain):
        answer = staticmethod(lambda _x, logits: logits)

        def forward(self, x):
            return self.answer(x, super().forward(x))

    network = quantized(seeded(Returning()), images(), 8)
    network.answer = lambda x, logits: None
    with pytest.raises(QuantizationError, match="the network returns no tensor"):
        lower(network, images())
    for quantizer in activation_quantizers(network).values():
        quantizer.enabled = False
    network.forward = lambda x: x
    with pytest.raises(QuantizationError, match="output does not come from its input"):
        lower(network, images())


def test_outputs_are_named():
    one, two = torch.zeros(1), torch.zeros(2)
    assert output_names(one) == output_names({"out": one}) == ["logits"]
    assert output_names([one, {"x": two}]) == ["logits", "output_2"]
    assert output_names({"out": one, "aux/2": two}) == ["out", "aux_2"]
    assert output_names({"input": one, "b": two}) == ["logits", "output_2"]


def test_finalized_network_gives_the_same_for_any_batch():
    network = finalized("mobilenet")
    with torch.no_grad():
        together = network(images(8))
        alone = torch.cat([network(image[None]) for image in images(8)])
        double = copy.deepcopy(network).double()(images(8).double())
    assert torch.equal(together, alone)
    torch.testing.assert_close(double.float(), together, rtol=1e-5, atol=1e-6)


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
    assert {id(each) for pair in layer.integers.grids for each in pair} <= own


def test_what_integers_cannot_do_cannot_be_finalized():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GELU(), nn.Conv2d(4, 2, 1))
    with pytest.raises(QuantizationError, match="gelu in 1 has no integer kernel"):
        finalize(quantized(seeded(network), images(), weight=8), images())


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


class UNet(nn.Module):
    """A plain U-Net in small: pooling, a way up, and a skip connection."""

    def __init__(self, up, pool=None):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.pool = pool or nn.MaxPool2d(2)
        self.inner = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU())
        self.up = up
        self.out = nn.Sequential(nn.Conv2d(14, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skip = self.down(x)
        inner = self.up(self.inner(self.pool(skip)))
        return self.head(self.out(torch.cat([inner, skip], 1)))


class Resized(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(12, 6, 1)

    def forward(self, x):
        return self.conv(F.interpolate(x, size=(8, 8)))


WAYS_UP = {
    "transposed": lambda: nn.ConvTranspose2d(12, 6, 2, 2),
    "overlapping": lambda: nn.ConvTranspose2d(12, 6, 4, 2, 1),
    "upsampled": lambda: nn.Sequential(
        nn.Upsample(scale_factor=2), nn.Conv2d(12, 6, 1)
    ),
    "resized": Resized,
    "shuffled": lambda: nn.Sequential(nn.Conv2d(12, 24, 1), nn.PixelShuffle(2)),
}


@pytest.mark.parametrize(("weight", "activation"), [((2, 4, 8, 3), 8), (8, 4)])
@pytest.mark.parametrize("way", WAYS_UP)
def test_a_u_net_is_all_integers(way, weight, activation, tmp_path):
    pytest.importorskip("onnxruntime")
    samples = images(34)
    model = seeded(UNet(WAYS_UP[way](), nn.AvgPool2d(2) if weight == 8 else None))
    network = quantized(model, samples, weight=weight, activation=activation)
    result = export_onnx(network, tmp_path / "unet.onnx", samples)
    assert result.floats == {}
    assert result.simulated.codes_equal == result.engine.codes_equal == 1
    network = finalize(network, samples)
    engine = IntegerNetwork.from_quantized(network, samples)
    engine.assert_integer_only(samples[:2])
    with torch.no_grad():
        torch.testing.assert_close(engine(samples), network(samples))


TRANSPOSED = [
    (nn.ConvTranspose2d(3, 4, 3, 2), r"kernel \(3, 3\), stride \(2, 2\)"),
    (nn.ConvTranspose2d(3, 4, (2, 4), (1, 2)), r"stride \(1, 2\)"),
    (nn.ConvTranspose2d(3, 3, 2, 2, groups=3), "3 groups"),
    (nn.ConvTranspose2d(3, 4, 2, 1, dilation=2), r"dilation \(2, 2\)"),
    (nn.ConvTranspose2d(3, 4, 2, 2, output_padding=1), r"output padding \(1, 1\)\)"),
]


@pytest.mark.parametrize(("layer", "words"), TRANSPOSED)
def test_other_transposed_convolutions_are_refused(layer, words):
    network = quantized(seeded(nn.Sequential(layer, nn.ReLU())), images(), weight=8)
    with pytest.raises(QuantizationError, match=words):
        finalize(network, images())


RESIZED = [
    (nn.Upsample(scale_factor=2, mode="bilinear"), "in mode bilinear"),
    (nn.Upsample(size=(12, 12)), "resizes 8 × 8 to 12 × 12, which is not a multi"),
]


@pytest.mark.parametrize(("resize", "words"), RESIZED)
def test_other_ways_to_resize_are_refused(resize, words):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), resize, nn.Conv2d(4, 2, 1))
    with pytest.raises(QuantizationError, match=words):
        finalize(quantized(seeded(model), images(), weight=8), images())
