import re

import numpy as np
import pytest
import torch
from torch import nn

from nets import Chain, TinyMobileNet, TinyResNet, TwoInputs, images, seeded
from ompq.errors import QuantizationError
from ompq.integer.arithmetic import CodeGrid
from ompq.integer.lowering import lower, output_names
from ompq.integer.operators import Average, Convolution, Flatten, Product, Quantize, Sum
from ompq.layers import activation_quantizers, quantized_layers
from quantized import quantized


def test_residual_network_becomes_steps():
    steps = lower(quantized(seeded(TinyResNet()), images()), images())
    assert [type(step.operator) for step in steps.steps] == [
        Quantize,
        *[Convolution] * 3,
        Sum,
        *[Convolution] * 3,
        Sum,
        Average,
        Flatten,
        Product,
    ]
    names = [step.name for step in steps.steps]
    assert names[:4] == ["input", "stem", "block1.conv1", "block1.conv2"]
    assert len(set(names)) == len(names)
    assert steps.input_shape == (3, 8, 8)
    block = steps.steps[4]
    assert block.inputs == (3, 1)
    assert (block.low, block.shape) == (0.0, (8, 8, 8))
    assert steps.steps[-1].grid.wide
    assert steps.outputs == {"logits": len(names) - 1}


def test_clipping_goes_into_the_codes():
    steps = lower(quantized(seeded(TinyMobileNet()), images()), images())
    stem = steps.steps[1]
    assert (stem.low, stem.high) == (0.0, 6.0)
    assert stem.grid.zero_point == 0
    grid = CodeGrid(scale=0.03, zero_point=0, bits=8)
    assert grid.limits(0.0, 6.0) == (0, 200)
    assert CodeGrid(scale=0.1, zero_point=10, bits=4).limits(-0.5, 9.0) == (5, 15)
    assert CodeGrid(scale=0.1, zero_point=10, bits=4).reach == 10


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
