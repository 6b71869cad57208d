import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nets import TinyResNet, images, seeded
from ompq.errors import QuantizationError
from ompq.integer.arithmetic import CodeGrid, IntegerWeight
from ompq.integer.lowering import lower
from ompq.integer.operators import (
    OPERATORS,
    Average,
    Codes,
    Concatenate,
    Convolution,
    Flatten,
    FunctionCall,
    MaxPool,
    Pad,
    PixelShuffle,
    Product,
    Quantize,
    Requantize,
    Slice,
    Sum,
    Upsample,
)
from ompq.layers import activation_quantizers
from quantized import quantized


class Body(nn.Module):
    """Two layers with a function of the test between them."""

    def __init__(self, function):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.act = nn.ReLU()
        self.function = function
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x):
        return self.head(self.function(self.act(self.conv(x)))).mean((2, 3))


def kinds(steps):
    return [type(step.operator) for step in steps.steps]


def lowered(function, **given):
    network = seeded(Body(function))
    return lower(quantized(network, images(), 8, **given), images())


CASES = {
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), MaxPool),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2), Average),
    "padded_avg": (lambda x: F.avg_pool2d(x, 3, 1, 1), Average),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 4), Average),
    "keepdim": (lambda x: x.mean((-2, -1), keepdim=True), Average),
    "cat": (lambda x: torch.cat([x[:, :2], x[:, 2:]], 1), Concatenate),
    "slice": (lambda x: x[:, :, ::2, 1:], Slice),
    "pad": (lambda x: F.pad(x, (1, 0, 2, 1)), Pad),
    "dropout": (lambda x: F.dropout(x, 0.5, training=False), Average),
    "same size": (lambda x: F.adaptive_avg_pool2d(x, 8), Average),
    "same shape": (lambda x: x.view(x.size(0), 6, 8, 8).contiguous(), Average),
    "clamp": (lambda x: x.clamp(0, 1.5), Average),
    "relu6": (lambda x: torch.relu_(F.relu6(x)), Average),
    "relu again": (lambda x: F.relu(x), Average),
    "sum": (lambda x: x + F.max_pool2d(x, 3, 1, 1), Sum),
}


@pytest.mark.parametrize("name", CASES)
def test_every_operator_is_found(name):
    function, kind = CASES[name]
    assert kind in kinds(lowered(function))


def test_slices_and_sides_are_counted_without_the_batch():
    steps = lowered(CASES["slice"][0]).steps
    (step,) = (s for s in steps if isinstance(s.operator, Slice))
    assert step.operator.ranges == ((0, 6, 1), (0, 8, 2), (1, 8, 1))
    assert step.shape == (6, 4, 7)
    (step,) = (s for s in lowered(CASES["pad"][0]).steps if isinstance(s.operator, Pad))
    assert step.operator.sides == ((0, 0), (2, 1), (1, 0))


REFUSED = {
    "hardswish": (
        F.hardswish,
        "hardswish in the network has no integer kernel; there are",
    ),
    "constant": (
        lambda x: x + torch.ones(6, 8, 8),
        "add in the network reads a tensor without a grid, from a constant",
    ),
    "number": (lambda x: x + 1, "adds something other than two tensors"),
    "alpha": (lambda x: torch.add(x, x, alpha=2), "adds something other than two"),
    "broadcast": (
        lambda x: x + x[:, :, :1, :1],
        r"adds shapes \(6, 8, 8\) and \(6, 1, 1\)",
    ),
    "adaptive": (
        lambda x: F.adaptive_avg_pool2d(x, 3),
        "averages 8 × 8 to 3 × 3, which does not divide it",
    ),
    "ceil": (
        lambda x: F.avg_pool2d(x, 3, ceil_mode=True),
        "averages windows of unequal size",
    ),
    "edges": (
        lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False),
        "averages windows of unequal size",
    ),
    "mean": (
        lambda x: x.mean(1, keepdim=True).expand(-1, 6, -1, -1),
        r"averages over dimensions 1, not \(2, 3\)",
    ),
    "batch": (
        lambda x: x.reshape(1, -1, 8, 8).reshape(x.shape),
        "moves values between the images",
    ),
    "view": (
        lambda x: x.view(-1, 6, 4, 16),
        r"reshapes \(6, 8, 8\) to \(6, 4, 16\), not to a row",
    ),
    "cat": (lambda x: torch.cat([x, x], 2), "concatenates along dimension 2, not 1"),
    "index": (lambda x: x[:, :, 0:1, 0][..., None], "selects single elements"),
    "images": (lambda x: x[1:], "selects single elements or images of the batch"),
    "reflect": (
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        "pads with something other than zeros",
    ),
    "value": (lambda x: F.pad(x, (1, 1), value=2.0), "pads with something other"),
    "crop": (lambda x: F.pad(x, (-1, 0)), "pads the batch or by a negative number"),
    "tensor": (
        lambda x: x.clamp(min=torch.tensor(0.1)),
        "clamp in the network clips to a tensor",
    ),
    "range": (lambda x: x.clamp(1, 2), r"clips to \[1.0, 2.0\], which does not"),
    "chunk": (lambda x: torch.cat(x.chunk(2, 1), 1), "chunk in the network has no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_integers_cannot_do_is_refused_by_name(name):
    function, words = REFUSED[name]
    with pytest.raises(QuantizationError, match=words):
        lowered(function)


def test_different_grids_cannot_be_joined():
    sources = tuple(
        Codes(step, CodeGrid(scale, 0, 8), (2, 4, 4))
        for step, scale in enumerate((0.1, 0.2))
    )
    call = FunctionCall("cat", sources, {"dim": 1}, (4, 4, 4), same_batch=True)
    join, _ = OPERATORS["cat"]
    with pytest.raises(
        QuantizationError, match="concatenates tensors on different grids"
    ):
        join(call)


def test_an_operator_needs_a_tensor_of_the_network():
    relu, _ = OPERATORS["relu"]
    with pytest.raises(QuantizationError, match="does not come from the input"):
        relu(FunctionCall("relu", (None,), {}, (3,), same_batch=True))


def test_moves_before_the_quantizer_come_after_it():
    steps = lowered(lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 2)[:, :, 1:])
    names = kinds(steps)
    at = names.index(Pad)
    assert names[at - 1 : at + 3] == [Convolution, Pad, MaxPool, Slice]
    assert [step.shape for step in steps.steps[at : at + 3]] == [
        (6, 10, 10),
        (6, 5, 5),
        (6, 4, 5),
    ]


def test_clipping_after_the_quantizer_clips_codes():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1)
            self.act = nn.ReLU6()

        def forward(self, x):
            x = self.act(self.first(x))
            return self.act(self.second(x)).mean((2, 3))

    network = quantized(seeded(Shared()), images(), 8)
    # The ReLU6 has two callers, so the quantizer stands before it.
    quantizer = activation_quantizers(network)["first.output_quantizer"]
    with torch.no_grad():
        quantizer.scale.fill_(0.04)
    steps = lower(network, images())
    (step,) = (s for s in steps.steps if isinstance(s.operator, Requantize))
    assert step.grid.limits(step.low, step.high) == (0, 150)


def integers(*shape, low=-20, high=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def weight_of(values):
    channels = values.shape[0]
    nothing = torch.zeros(channels, dtype=torch.int32)
    return IntegerWeight(
        codes=values.to(torch.uint8),
        bits=8,
        unit=1,
        offset=nothing,
        stretch=nothing,
        values=values.to(torch.int8),
        scale=torch.ones(channels, dtype=torch.float64),
        bias=integers(channels, seed=9),
    )


@pytest.mark.parametrize(
    ("shape", "groups", "stride", "padding", "dilation"),
    [
        ((6, 4, 3, 3), 1, (1, 1), (1, 1, 1, 1), (1, 1)),
        ((6, 4, 1, 1), 1, (2, 2), (0, 0, 0, 0), (1, 1)),
        ((4, 1, 3, 3), 4, (2, 1), (1, 1, 1, 1), (1, 1)),
        ((8, 1, 3, 3), 4, (1, 1), (1, 1, 1, 1), (1, 1)),
        ((6, 2, 3, 2), 2, (1, 2), (0, 1, 1, 2), (2, 1)),
    ],
    ids=["plain", "pointwise", "depthwise", "multiplied", "grouped"],
)
def test_convolution_equals_that_of_torch(shape, groups, stride, padding, dilation):
    x = integers(3, 4, 9, 8)
    weight = weight_of(integers(*shape, seed=1))
    operator = Convolution(weight, stride, padding, dilation, groups)
    found = operator.compute([x])
    top, left, bottom, right = padding
    expected = F.conv2d(
        F.pad(x.double(), (left, right, top, bottom)),
        weight.values.double(),
        weight.bias.double(),
        stride,
        0,
        dilation,
        groups,
    )
    assert found.dtype == torch.int32
    assert torch.equal(found.double(), expected)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("size", [7, 8, 9, 11])
@pytest.mark.parametrize(
    ("window", "stride", "padding", "dilation"),
    [(3, 2, 0, 1), (3, 2, 1, 1), (2, 3, 1, 1), (3, 1, 1, 2), (2, 2, 0, 1)],
)
def test_largest_codes_equal_max_pooling(size, window, stride, padding, dilation, ceil):
    codes = integers(2, 3, size, size, low=-128, high=128)
    operator = MaxPool(
        (window, window), (stride, stride), (padding,) * 2, (dilation,) * 2, ceil
    )
    expected = F.max_pool2d(
        codes.double(), window, stride, padding, dilation, ceil_mode=ceil
    )
    assert torch.equal(operator.compute([codes]).double(), expected)


def test_window_sums_are_averages_times_their_size():
    x = integers(2, 3, 8, 6)
    whole = Average((8, 6), (8, 6), (0, 0), whole=True)
    assert torch.equal(whole.compute([x])[:, :, 0, 0], x.sum((2, 3)))
    part = Average((3, 2), (2, 2), (1, 1), whole=False)
    expected = F.avg_pool2d(x.double(), (3, 2), (2, 2), (1, 1)) * 6
    torch.testing.assert_close(part.compute([x]).double(), expected)


@pytest.mark.parametrize(("kernel", "stride"), [((2, 2), 2), ((4, 4), 2), ((6, 3), 3)])
def test_a_transposed_convolution_is_a_convolution_and_a_shuffle(kernel, stride):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-9, 10, (4, 3, *kernel), generator=generator)
    x = torch.randint(-9, 10, (2, 3, 5, 6), generator=generator)
    bias = torch.arange(4)
    expected = F.conv_transpose2d(
        x.double(), values.transpose(0, 1).double(), bias.double(), stride
    )
    channels = torch.ones(4, dtype=torch.int32)
    weight = IntegerWeight(
        codes=(values + 128).to(torch.uint8),
        bits=8,
        unit=1,
        offset=128 * channels,
        stretch=channels,
        values=values.to(torch.int8),
        scale=channels.double(),
        bias=bias.int(),
    ).by_phase(stride)
    assert weight.affine
    rows, columns = (side // stride - 1 for side in kernel)
    sides = (rows, columns, rows, columns)
    convolution = Convolution(weight, (1, 1), sides, (1, 1), 1)
    found = PixelShuffle(stride).compute([convolution.compute([x.int()])])
    assert found.dtype == torch.int32
    assert torch.equal(found.double(), expected)


@pytest.mark.parametrize("factors", [(2, 2), (3, 1)])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_values_are_repeated_as_pytorch_resizes(factors, mode):
    x = torch.arange(24).reshape(1, 2, 3, 4)
    expected = F.interpolate(x.float(), scale_factor=factors, mode=mode)
    assert torch.equal(Upsample(factors).compute([x]).float(), expected)


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
