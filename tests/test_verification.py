import pytest
import torch
from torch import nn

from ompq.errors import ExportError
from ompq.layers import activation_quantizers
from ompq.onnx.verification import (
    Agreement,
    Tolerance,
    compare_outputs,
    traced_tolerance,
)
from ompq.quantization import quantize
from ompq.samples import Samples


def test_agreement_counts_images_and_codes():
    first = torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0], [0.0, 3.0]])
    second = first.clone()
    second[0] = torch.tensor([0.0, 3.0])
    codes = [(torch.tensor([1, 2]), torch.tensor([1, 5]))]
    found = compare_outputs([first], [second], codes)
    assert found.images == 4
    assert found.top1 == 0.75
    assert found.logits == pytest.approx(3 / (9 / 2) ** 0.5)
    assert (found.codes, found.codes_equal, found.codes_furthest) == (2, 0.5, 3)
    assert str(found) == (
        "top-1 equal on 75.00% of 4 images, logits within 1.4e+00, "
        "50.00000% of codes equal and the rest within 3"
    )


def test_equal_outputs_agree_wholly():
    logits = torch.zeros(3, 2)
    found = compare_outputs([logits], [logits])
    assert (found.top1, found.logits, found.codes) == (1.0, 0.0, 0)
    assert str(found) == "top-1 equal on 100.00% of 3 images, equal logits"
    codes = [(torch.tensor([1, 2]), torch.tensor([1, 2]))]
    same = compare_outputs([logits], [logits], codes)
    assert str(same).endswith("equal logits, all codes equal")


def test_no_image_is_an_error():
    with pytest.raises(ValueError, match="no image to compare"):
        compare_outputs([torch.zeros(0, 2)], [torch.zeros(0, 2)])


def test_outputs_must_match_in_number_and_shape():
    one, two = torch.zeros(2, 3), torch.zeros(2, 4)
    with pytest.raises(
        ValueError, match=r"shapes \[\(2, 3\)\] and \[\(2, 4\)\] do not"
    ):
        compare_outputs([one], [two])
    with pytest.raises(ValueError, match="do not match"):
        compare_outputs([one, two], [one])


def test_the_worst_output_counts_and_nan_never_agrees():
    logits, other = torch.ones(2, 3), torch.ones(2, 4)
    found = compare_outputs([logits, other], [logits, other + 0.5])
    assert (found.top1, found.logits) == (1.0, 0.5)
    wrong = compare_outputs([logits], [logits * float("nan")])
    with pytest.raises(ExportError, match="logits within inf"):
        Tolerance().require(wrong, "network")


REFUSED = {
    "codes": Agreement(8, top1=1.0, logits=0.0, codes=9, codes_equal=0.0),
    "far": Agreement(8, 1.0, 0.0, codes=9999, codes_equal=0.9999, codes_furthest=2),
    "logits": Agreement(8, top1=1.0, logits=0.1),
    "exact": Agreement(8, top1=1.0, logits=5e-4, codes=9),
    "top-1": Agreement(31, top1=30 / 31, logits=0.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_must_agree_in_codes_and_logits(name):
    with pytest.raises(
        ExportError,
        match=r"disagrees with the network: top-1 .* 99.5% of top-1 and 99.9% of codes",
    ):
        Tolerance().require(REFUSED[name], "network")


def test_single_ties_and_steps_are_tolerated():
    Tolerance().require(Agreement(32, top1=31 / 32, logits=1e-6), "network")
    Tolerance(logits=0.01).require(
        Agreement(8, 1.0, 5e-3, codes=9999, codes_equal=0.9995, codes_furthest=1), "net"
    )
    assert Tolerance().logits == 1e-3


@torch.no_grad()
def test_few_samples_show_what_last_digits_change():
    # Halfway between two codes, noise decides which one it is. One noise may decide
    # like no noise for a single sample; it must not be taken for the network's.
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 3, bias=False))
    network = quantize(network, {"0": (8, 4)}, torch.rand(32, 1))
    (quantizer,) = activation_quantizers(network).values()
    for code in range(4, 12):
        sample = (code + 0.5) * quantizer.scale.reshape(1, 1)
        allowed = traced_tolerance(network, Samples.of(sample)).logits
        assert allowed > 2 / 15  # what is allowed if no code changes
