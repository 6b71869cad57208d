"""Layers that are called by the names of their arguments, and by position: the same."""

import pytest
import torch
from torch import nn

from nets import scenes, seeded
from ompq.configs import PlanConfig, ReconstructConfig, RoundingConfig
from ompq.integer.finalization import finalize
from ompq.planning import plan
from ompq.quantization.pipeline import quantize
from ompq.reconstruction.block_loop import reconstruct
from ompq.report.histograms import layer_histograms


class ByPosition(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 6, 3)
        self.head = nn.Linear(6, 5)

    def forward(self, images):
        y = torch.relu(self.first(images))
        y = torch.relu(self.second(y))
        return self.head(y.mean((2, 3)))


class ByName(ByPosition):
    def forward(self, images):
        y = torch.relu(self.first(input=images))
        y = torch.relu(self.second(input=y))
        return self.head(input=y.mean((2, 3)))


def made(network, samples):
    """Go the whole path; return plan, logits of each stage, and histograms."""
    config = PlanConfig(
        choices=(3, 4), activation_choices=(4, 8), score="output_divergence"
    )
    bits = plan(network, samples, "3.5bits", config)
    rounded = quantize(network, bits, samples)
    learning = RoundingConfig(iterations=20, batch_size=8)
    better = reconstruct(
        rounded, network, samples, ReconstructConfig(rounding=learning)
    )
    stages = (rounded, better, finalize(better, samples))
    with torch.no_grad():
        logits = [stage(samples) for stage in stages]
    return bits, logits, layer_histograms(better, network, bits, samples)


def test_names_and_positions_give_the_same_network():
    samples = scenes(24)
    one, other = (made(seeded(net()), samples) for net in (ByPosition, ByName))
    assert one[0].allocation == other[0].allocation
    for wanted, found in zip(one[1], other[1], strict=True):
        assert torch.equal(wanted, found)
    assert one[2] == other[2]


def test_inputs_by_name_are_rounded():
    class Named(ByPosition):
        def forward(self, *, images, gain):
            return super().forward(images * gain[:, None, None, None])

    network, images = seeded(Named()), scenes(16)
    samples = {"images": images, "gain": torch.ones(16)}
    bits = plan(network, samples, "4bits", PlanConfig(activation_choices=(4,)))
    quantized, seen = quantize(network, bits, samples), []
    quantized.first.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    with torch.no_grad():
        quantized(**samples)
    assert len(seen[0].unique()) <= 16


@pytest.mark.parametrize("size", [(9, 9), (10, 10)])
def test_transposed_convolutions_keep_the_size_asked_for(size):
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv2d(3, 4, 2, stride=2)
            self.up = nn.ConvTranspose2d(4, 5, 2, stride=2)

        def forward(self, images):
            small = torch.relu(self.down(images))
            return self.up(small, output_size=images.shape[2:]).flatten(1)

    network = seeded(Grows())
    images = torch.rand(8, 3, *size, generator=torch.Generator().manual_seed(0))
    quantized = quantize(network, plan(network, images, "6bits"), images)
    learning = RoundingConfig(iterations=20, batch_size=8)
    better = reconstruct(
        quantized, network, images, ReconstructConfig(rounding=learning)
    )
    with torch.no_grad():
        assert better(images).shape == network(images).shape
