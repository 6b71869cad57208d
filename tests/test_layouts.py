"""Where the samples are: first, later, in windows, or nowhere."""

from collections import namedtuple

import pytest
import torch
from torch import nn

from nets import seeded
from ompq.allocation.solver import Allocation
from ompq.errors import QuantizationError
from ompq.graph import Choice, trace
from ompq.quantization import quantization_of, quantize
from ompq.reconstruction import ReconstructConfig, reconstruct
from ompq.reconstruction.blocks import Arguments, Layout, gather, layout_of
from ompq.reconstruction.rounding import RoundingConfig
from ompq.samples import Samples

Pair = namedtuple("Pair", "x mask")


@pytest.mark.parametrize(
    ("one", "two", "layout"),
    [
        ((1, 6, 4), (2, 6, 4), Layout()),
        ((6, 1, 4), (6, 2, 4), Layout(1)),
        ((3, 7), (6, 7), Layout(0, 3)),
        ((1, 6), (1, 6), Layout(None)),
        ((), (), Layout(None)),
    ],
)
def test_two_shapes_tell_the_layout(one, two, layout):
    assert layout_of(one, two) == layout
    tensor = torch.randn(two, generator=torch.Generator().manual_seed(0))
    sorted_ = layout.sorted(tensor)
    assert len(sorted_) == (1 if layout.axis is None else 2)
    assert torch.equal(layout.restored(sorted_), tensor)


@pytest.mark.parametrize("two", [(2, 2), (3, 1), (1,)])
def test_a_tensor_without_one_dimension_of_samples_is_refused(two):
    with pytest.raises(QuantizationError, match=r"shape \(1, 1\) with one sample has"):
        layout_of((1, 1), two)


def test_what_samples_share_stays_in_its_place():
    x, mask = torch.arange(12.0).reshape(3, 2, 2), torch.ones(3, 1)
    arguments = Arguments(
        ((Pair(x, mask), 0.5), {"flag": True}), [Layout(1), Layout(None)]
    )
    (own,) = arguments.own(arguments.example)
    assert torch.equal(own, x.movedim(1, 0))
    (pair, half), rest = arguments.filled([2 * own])
    assert isinstance(pair, Pair)
    assert torch.equal(pair.x, 2 * x)
    assert pair.mask is mask
    assert (half, rest) == (0.5, {"flag": True})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, *, mask, positions, gain):
        return x + self.two(torch.relu(self.one(x + positions)) * mask) * gain


class Sequences(nn.Module):
    """Blocks called by name, with a mask, positions and a number for all samples."""

    def __init__(self, *, first):
        super().__init__()
        self.first = first
        self.stem, self.block, self.head = nn.Linear(8, 8), Block(), nn.Linear(8, 5)
        self.positions = nn.Parameter(torch.randn(1, 6, 8))
        self.register_buffer("mask", (torch.arange(6) < 4)[:, None])

    def forward(self, x):  # (N, 6, 8)
        x, positions, mask = torch.relu(self.stem(x)), self.positions, self.mask
        if self.first:  # (6, N, 8)
            x, positions = x.transpose(0, 1), positions.transpose(0, 1)
            mask = mask[:, None]
        gain = torch.tensor(0.5)
        x = self.block(x=x, mask=mask, positions=positions, gain=gain)
        return self.head(x.mean(0 if self.first else 1))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("loss", ["squared", "fisher"])
@pytest.mark.parametrize("count", [6, 20])  # six is the length of a sequence too
def test_blocks_with_shared_arguments_are_reconstructed(first, loss, count):
    model = seeded(Sequences(first=first))
    samples = torch.randn(count, 6, 8, generator=torch.Generator().manual_seed(0))
    bits = {name: Choice(3, 8) for name in trace(model, samples).names}
    quantized = quantize(model, Allocation(bits), samples)
    given = Samples.of(samples)
    cache = gather(
        quantized, model, ("block", "block"), given, batch_size=6, limit=1 << 30
    )
    assert [tuple(t.shape) for t in cache.inputs] == [(count, 6, 8)]
    with torch.no_grad():
        found = cache.call(model.block, [cache.float_inputs[0][2:5]])
    torch.testing.assert_close(found, cache.targets[2:5])
    rounding = RoundingConfig(iterations=100, batch_size=5)
    config = ReconstructConfig(rounding=rounding, loss=loss, batch_size=6)
    result = reconstruct(quantized, model, samples, config)
    errors = {e.block: e for e in quantization_of(result).errors}
    assert errors["block"].improved
