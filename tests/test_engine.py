import pytest
import torch

from lowering_cases import FINALIZED, NETWORKS, finalized
from nets import images
from ompq.errors import QuantizationError
from ompq.integer.engine import IntegerNetwork
from quantized import quantized, simulated_codes


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
    monkeypatch.setattr("ompq.integer.engine._ELEMENTS", 1)
    assert torch.equal(engine(samples), whole)


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


@pytest.mark.parametrize("activation", [4, 8])
@pytest.mark.parametrize("name", FINALIZED)
def test_simulated_codes_equal_those_of_integers(name, activation):
    network = finalized(name, activation=activation)
    engine = IntegerNetwork.from_quantized(network, images())
    found = engine.codes(images(8, seed=7))
    expected, logits = simulated_codes(network, images(8, seed=7))
    compared = 0
    for step, codes in zip(engine.steps.steps, found, strict=True):
        if not step.grid.wide and codes.shape == expected[step.quantizer][0].shape:
            assert torch.equal(codes.int(), expected[step.quantizer][0]), step.name
            compared += 1
    assert compared >= 9
    torch.testing.assert_close(engine(images(8, seed=7)), logits, rtol=1e-5, atol=1e-5)
