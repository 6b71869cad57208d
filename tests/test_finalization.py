import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowering_cases import NETWORKS, finalized, margin
from nets import TinyMobileNet, TinyResNet, images, seeded
from ompq.configs import QuantizeConfig, ReconstructConfig, RoundingConfig
from ompq.errors import QuantizationError
from ompq.integer import finalization
from ompq.integer.engine import IntegerNetwork
from ompq.integer.finalization import finalize, odd_multiple
from ompq.integer.lowering import lower
from ompq.integer.operators import Average
from ompq.layers import activation_quantizers, quantized_layers
from ompq.quantization.pipeline import quantize
from ompq.quantization.record import quantization_of
from ompq.reconstruction.block_loop import reconstruct
from quantized import quantized, simulated_codes


@pytest.mark.parametrize("network", [TinyResNet, TinyMobileNet])
def test_residual_streams_of_16_bits_are_integers(network):
    model, samples = seeded(network()), images(16)
    wide = quantize(model, {"*": (8, 4)}, samples, QuantizeConfig(sum_bits=16))
    final = finalize(wide, samples)
    engine = IntegerNetwork.from_quantized(final, samples)
    engine.assert_integer_only(samples)
    with torch.no_grad():
        torch.testing.assert_close(engine(samples), final(samples))
    codes = [one for one in engine.codes(samples) if one.dtype == torch.int32]
    assert any(255 < one.max() < 1 << 16 for one in codes)
    quantizers = activation_quantizers(final)
    streams = {n: float(q.scale) for n, q in quantizers.items() if q.bits == 16}
    assert all(math.frexp(scale)[0] == 0.5 for scale in streams.values())
    again = finalize(final, samples).state_dict()
    assert all(torch.equal(t, again[key]) for key, t in final.state_dict().items())


def test_scales_of_readers_are_odd_multiples():
    found = [odd_multiple(scale, 0.25) for scale in (0.01, 0.25, 0.6, 0.8, 1.1)]
    assert found == [0.25, 0.25, 0.75, 0.75, 1.25]


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


def test_finalizing_changes_little_and_only_a_copy():
    given = quantized(seeded(TinyResNet()), images(16), weight=8)
    before = {key: value.clone() for key, value in given.state_dict().items()}
    network = finalize(given, images(), saturation_safe=False)
    assert all(torch.equal(before[k], v) for k, v in given.state_dict().items())
    assert all(layer.integers is None for layer in quantized_layers(given).values())
    assert set(network.state_dict()) == set(before)
    for key, value in network.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0.009, atol=0)
    with torch.no_grad():
        x = images(8, seed=7)
        error = (network(x) - given(x)).norm() / given(x).norm()
    assert error < 0.02


def test_finalizing_twice_is_finalizing_once():
    once = finalized()
    twice = finalize(once, images())
    assert all(
        torch.equal(value, twice.state_dict()[key])
        for key, value in once.state_dict().items()
    )


def test_steps_that_share_a_grid_are_cleared_together():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
            self.pool, self.other = nn.AvgPool2d(2), nn.AvgPool2d(2)
            self.last = nn.Conv2d(6, 2, 1)

        def forward(self, x):
            joined = torch.cat(
                (self.pool(self.first(x)), self.other(self.second(x))), 1
            )
            return self.last(joined).flatten(1)

    once = finalize(quantized(seeded(Joined()), images(), weight=8), images())
    steps = lower(once, images()).steps
    pools = [step for step in steps if isinstance(step.operator, Average)]
    assert len(pools) == 2 and pools[0].quantizer == pools[1].quantizer
    for step in pools:
        results = step.operator.possible_results([steps[step.inputs[0]].grid])
        assert (
            margin(results.tolist(), step.grid.scale, step.grid.zero_point, 255) >= 4e-5
        )
    twice = finalize(once, images()).state_dict()
    assert all(torch.equal(v, twice[k]) for k, v in once.state_dict().items())


def test_finalized_network_can_be_reconstructed_and_finalized_again():
    model = seeded(TinyResNet())
    given = finalize(quantized(model, images(16), weight=3), images())
    config = ReconstructConfig(rounding=RoundingConfig(iterations=5))
    better = finalize(reconstruct(given, model, images(16), config), images())
    record = quantization_of(better)
    assert record.errors and len(record.links) == len(quantized_layers(better))
    with torch.no_grad():
        engine = IntegerNetwork.from_quantized(better, images())
        torch.testing.assert_close(
            better(images(8)), engine(images(8)), rtol=1e-5, atol=1e-5
        )


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.first, self.second = nn.ReLU(), nn.ReLU()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        x = self.second(self.conv(self.first(self.conv(x))))
        return self.head(x.mean((2, 3)))

    @staticmethod
    def stop(_x):
        raise RuntimeError("stop")


def test_each_call_of_a_layer_has_its_own_grids(monkeypatch):
    network = finalize(quantized(seeded(Twice()), images(), weight=8), images())
    calls = [link for link in quantization_of(network).links if link.layer == "conv"]
    assert [link.source for link in calls] == ["input_quantizer", calls[0].target]
    assert len({*calls}) == 2
    engine, codes = IntegerNetwork.from_quantized(network, images()), {}
    for again in (network, copy.deepcopy(network)):
        codes, logits = simulated_codes(again, images())
        torch.testing.assert_close(engine(images()), logits)
        assert {name: len(found) for name, found in codes.items()} == dict.fromkeys(
            activation_quantizers(network), 1
        )
    # A pass that fails between the calls does not disturb the next one.
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="stop"):
        patched.setattr(network.second, "forward", Twice.stop)
        network(images())
    with torch.no_grad():
        assert torch.equal(network(images()), logits)
    assert len(finalize(network, images())._forward_pre_hooks) == len(
        network._forward_pre_hooks
    )


def test_groups_have_no_integer_form():
    network = seeded(nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.ReLU()))
    config = QuantizeConfig(group_size=64)
    made = quantize(network, {"*": 4}, images(8), config)
    words = "has a scale for each group of 64 weights and so no integer kernel"
    with pytest.raises(QuantizationError, match=words):
        finalize(made, images(8))
    same, arithmetic = finalization.finalize_if_possible(made, images(8))
    assert same is made and words in arithmetic
