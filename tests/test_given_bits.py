"""Bits that quantize() is given."""

import pytest
import torch

import ompq
from nets import Chain, images, seeded

MODEL = seeded(Chain())


PLAN = ompq.plan(MODEL, images(), "4bits", ompq.PlanConfig(score="weight_noise"))


def test_bits_may_be_a_file_or_patterns(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    expected = ompq.quantize(MODEL, PLAN, images())(images())
    for given in (str(tmp_path / "plan.json"), tmp_path / "plan.json"):
        assert torch.equal(ompq.quantize(MODEL, given, images())(images()), expected)
    mixed = ompq.quantize(MODEL, {"*": 4, "head": (8, 6)}, images())
    bits = ompq.quantization_of(mixed).allocation
    assert dict(bits) == {"conv": ompq.Choice(4, 8), "head": ompq.Choice(8, 6)}
    with pytest.raises(
        ompq.errors.QuantizationError, match=r"no bits for conv; give them, or"
    ):
        ompq.quantize(MODEL, {"head": 4}, images())


def test_a_quantized_network_is_not_quantized_again():
    network = ompq.quantize(MODEL, PLAN, images())
    for again in (
        lambda: ompq.quantize(network, PLAN, images()),
        lambda: ompq.plan(network, images(), "4bits"),
        lambda: ompq.trace(network, images()),
        lambda: ompq.reconstruct(network, network, images()),
        lambda: ompq.refine(PLAN, network, images(64)),
    ):
        with pytest.raises(
            ompq.errors.QuantizationError, match="Chain is already quantized"
        ):
            again()
