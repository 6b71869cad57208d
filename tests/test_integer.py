import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nets import TinyMobileNet, TinyResNet, images, seeded
from ompq.errors import QuantizationError
from ompq.evaluation import evaluate
from ompq.integer import IntegerNetwork
from ompq.integer.finalization import finalize
from ompq.integer.lowering import Steps, lower
from ompq.models.networks import CifarResNet, demo_data, demo_network
from quantized import quantized


class Fire(nn.Module):
    """SqueezeNet in small: pooling with a ceiling, branches joined, no linear layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU())
        self.pool = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.left = nn.Sequential(nn.Conv2d(6, 4, 1), nn.ReLU())
        self.right = nn.Sequential(nn.Conv2d(6, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Sequential(
            nn.Dropout(0.5), nn.Conv2d(8, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )

    def forward(self, x):
        x = self.pool(self.stem(x))
        x = torch.cat([self.left(x), self.right(x)], 1)
        return torch.flatten(self.head(x), 1)


class Vgg(nn.Sequential):
    """VGG in small: pooling between convolutions, several linear layers."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 16),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(16, 5),
        )


class Shared(nn.Module):
    """One ReLU6 with two callers, so that quantizers stand before it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)
        self.act = nn.ReLU6()

    def forward(self, x):
        return self.act(self.second(self.act(self.first(x)))).mean((2, 3))


NETWORKS = {
    "resnet": lambda: seeded(TinyResNet()),
    "mobilenet": lambda: seeded(TinyMobileNet()),
    "fire": lambda: seeded(Fire()),
    "vgg": lambda: seeded(Vgg()),
    "cifar": lambda: seeded(CifarResNet(8)),
}


@pytest.mark.parametrize("activation", [3, 8])
@pytest.mark.parametrize("name", NETWORKS)
def test_integers_agree_with_the_simulated_network(name, activation):
    size = 32 if name == "cifar" else 8
    samples = images(8, size)
    network = quantized(NETWORKS[name](), samples, activation=activation)
    network = finalize(network, samples)
    engine = IntegerNetwork.from_quantized(network, samples)
    engine.assert_integer_only(samples[:2])
    found = engine(images(6, size, seed=3))
    with torch.no_grad():
        expected = network(images(6, size, seed=3))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


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


def test_logits_are_integers_with_a_scale():
    samples = images(8)
    engine = IntegerNetwork.from_quantized(
        quantized(NETWORKS["resnet"](), samples), samples
    )
    codes = engine.input_codes(samples)
    assert codes.dtype == torch.uint8
    (logits,) = engine.integer_outputs(codes)
    assert logits.dtype == torch.int32
    scale = engine.steps.steps[-1].grid.scale
    assert torch.equal((logits.double() * scale).float(), engine(samples))
    assert logits.abs().max() > 2**20  # fine enough for any comparison


def test_many_images_run_in_parts(monkeypatch):
    samples = images(8)
    engine = IntegerNetwork.from_quantized(
        quantized(NETWORKS["resnet"](), samples), samples
    )
    whole = engine(samples)
    monkeypatch.setattr("ompq.integer._ELEMENTS", 1)
    assert torch.equal(engine(samples), whole)


def test_network_may_end_in_a_clipped_sum():
    class Ending(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.last = nn.Linear(4, 4)
            self.function = function

        def forward(self, x):
            return self.function(self.last(F.relu(self.conv(x)).mean((2, 3))))

    for function in (F.relu, lambda x: x.clamp(-0.1, 0.2)):
        network = finalize(
            quantized(seeded(Ending(function)), images(), weight=8), images()
        )
        engine = IntegerNetwork.from_quantized(network, images())
        with torch.no_grad():
            expected = network(images(4, seed=3))
        found = engine(images(4, seed=3))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_network_may_end_in_codes():
    samples = images(8)
    steps = lower(quantized(NETWORKS["resnet"](), samples), samples)
    engine = IntegerNetwork(Steps(steps.steps[:5], steps.input_shape, {"codes": 4}))
    grid = steps.steps[4].grid
    expected = grid.scale * (
        IntegerNetwork(steps).codes(samples)[4].float() - grid.zero_point
    )
    torch.testing.assert_close(engine(samples), expected)


def test_images_of_another_size_are_refused():
    samples = images(8)
    engine = IntegerNetwork.from_quantized(
        quantized(NETWORKS["resnet"](), samples), samples
    )
    with pytest.raises(ValueError, match=r"shape \(3, 9, 9\) do not fit.*\(3, 8, 8\)"):
        engine(images(2, 9))


def test_a_float_inside_is_found(monkeypatch):
    samples = images(8)
    engine = IntegerNetwork.from_quantized(
        quantized(NETWORKS["resnet"](), samples), samples
    )

    def cheat(self, values):
        return values[0].float().sum((2, 3), keepdim=True).long()

    monkeypatch.setattr("ompq.integer.operators.Average.compute", cheat)
    with pytest.raises(
        QuantizationError, match="computes with floats, .* not integer-only"
    ):
        engine.assert_integer_only(samples)


def test_float_numbers_are_found_as_well(monkeypatch):
    samples = images(8)
    engine = IntegerNetwork.from_quantized(
        quantized(NETWORKS["resnet"](), samples), samples
    )
    monkeypatch.setattr(
        "ompq.integer.operators.Average.compute",
        lambda self, values: torch.pow(values[0].sum((2, 3), True), 1.0),
    )
    with pytest.raises(QuantizationError, match="computes with floats"):
        engine.assert_integer_only(samples)
