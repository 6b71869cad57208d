import pytest
import torch
from torch import nn

import ompq
from nets import seeded, values
from ompq.errors import ExportError
from ompq.runtimes import verification
from ompq.runtimes.verification import Agreement, Tolerance, compare_outputs

onnx = pytest.importorskip("onnx")


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


def test_only_rows_of_logits_have_a_largest_one():
    # One sentence of two words: the second word's largest logit is another.
    words = torch.tensor([[[3.0, 0.0, 1.0], [0.0, 3.0, 1.0]]])
    changed = torch.tensor([[[3.0, 0.0, 1.0], [0.0, 1.0, 3.0]]])
    assert compare_outputs([words], [changed]).top1 == 0.5
    numbers = torch.tensor([3.0, -4.0])
    for found in (
        compare_outputs([numbers], [numbers + 0.5]),
        compare_outputs([numbers[:, None]], [numbers[:, None] + 0.5]),
        compare_outputs([numbers[:, None]] * 2, [numbers[:, None] + 0.5] * 2),
    ):
        assert str(found) == f"outputs within {0.5 / 12.5**0.5:.1e} on 2 samples"
    same = compare_outputs([words, words], [words, words])
    assert str(same) == "equal outputs on 1 samples"


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


def test_codes_may_differ_as_much_as_any_noise_makes_them_differ(monkeypatch):
    plain = torch.zeros(1000)

    def observed(_network, _batch, *, noise=None):
        moved = plain.clone()
        moved[: {None: 0, 0: 0}.get(noise, 20)] = 1  # the first noise changes no code
        return [], [moved]

    differing = plain.clone()
    monkeypatch.setattr(verification, "_observe", observed)
    monkeypatch.setattr(verification, "_with_codes", lambda *_: ([], [differing]))
    node = onnx.helper.make_node("QuantizeLinear", ["x", "scale"], ["codes"])
    file = onnx.helper.make_model(onnx.helper.make_graph([node], "file", [], []))
    given = file, nn.Linear(1, 1), ompq.Samples.of(torch.zeros(1, 1))
    differing[:90] = 1  # 0.09 on average: 4 times 0.02, and 0.02
    verification.require_codes(*given)
    differing[:110] = 1
    with pytest.raises(ExportError, match=r"by 0.11 on average; .* explain 0.02"):
        verification.require_codes(*given)


def test_a_size_that_pytorch_wrote_into_the_file_is_explained(tmp_path):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.tell = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            state = torch.zeros(len(x), 6)
            return self.tell(self.read(x) + state)

    network, inputs = seeded(Steps()), values(6, 4)
    quantized = ompq.quantize(network, {"*": 8}, inputs)
    words = r"does not run on inputs of shape \(6, 4\).*use x\.shape\[0\] instead"
    with pytest.raises(ExportError, match=words):
        ompq.export(quantized, tmp_path / "net.onnx", inputs)
    assert not [*tmp_path.iterdir()]
