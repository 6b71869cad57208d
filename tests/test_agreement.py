import pytest
import torch

from ompq.onnx.verification import compare_outputs


def test_agreement_counts_images_and_codes():
    first = torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0], [0.0, 3.0]])
    second = first.clone()
    second[0] = torch.tensor([0.0, 3.0])
    codes = [(torch.tensor([1, 2]), torch.tensor([1, 5]))]
    found = compare_outputs(first, second, codes)
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
    found = compare_outputs(logits, logits)
    assert (found.top1, found.logits, found.codes) == (1.0, 0.0, 0)
    assert "codes" not in str(found)


def test_no_image_is_an_error():
    with pytest.raises(ValueError, match="no image to compare"):
        compare_outputs(torch.zeros(0, 2), torch.zeros(0, 2))
