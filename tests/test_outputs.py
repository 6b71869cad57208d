"""Outputs: what is recognised, and divergences against formulas, SciPy and loops."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax
from torch import nn
from torch.nn import functional as F

import ompq
from nets import images, seeded, values
from ompq.configs import parse_output
from ompq.errors import GoalError, SampleError, ScoreError
from ompq.outputs import (
    CLASSES,
    Outputs,
    box_overlaps,
    drawn_classes,
    output_kinds,
    value_rows,
)
from ompq.runtimes.verification import compare_outputs
from ompq.samples import Samples
from ompq.smallest_network import meets_goal

TOKENS = torch.randint(9, (4, 6))
PICTURES = images(4)


def kinds(returned, batch=PICTURES, output=None, model=None):
    return output_kinds(returned, batch, output, model=model)


@pytest.mark.parametrize(
    ("shape", "batch", "kind"),
    [
        ((4, 10), PICTURES, "classes"),
        ((4, 1), PICTURES, "values"),
        ((4,), PICTURES, "values"),
        ((4, 21, 8, 8), PICTURES, "classes"),
        ((4, 1, 8, 8), PICTURES, "values"),
        ((4, 1, 2, 2), PICTURES, "values"),
        ((4, 3, 8, 8), PICTURES, "values"),  # an image as the input is
        ((4, 3, 16, 16), PICTURES, "values"),  # larger than the input
        ((4, 3, 4, 4), PICTURES, "classes"),
        ((4, 8, 8), PICTURES, "values"),  # a depth of each pixel
        ((4, 100, 92), PICTURES, "classes"),
        ((4, 6, 50), TOKENS, "classes"),
        ((4, 6, 1), TOKENS, "values"),
        ((4, 1, 50), TOKENS[:, :1], "classes"),
        ((4, 1, 160), torch.zeros(4, 1, 160), "values"),
    ],
)
def test_a_shape_says_what_an_output_is(shape, batch, kind):
    assert kinds(values(*shape), batch) == (kind,)


def test_a_key_says_what_an_output_is():
    hidden = values(4, 6, 16)
    assert kinds({"last_hidden_state": hidden, "pooler_output": values(4, 16)}) == (
        "embedding",
        "embedding",
    )
    assert kinds({"image_embeds": values(4, 16)}) == ("embedding",)
    assert kinds({"predicted_depth": values(4, 7, 5)}) == ("values",)
    found = {"logits": values(4, 2), "hidden_states": (hidden, hidden)}
    assert kinds(found, TOKENS) == ("classes", "ignored", "ignored")
    assert kinds({"out": values(4, 21, 8, 8), "aux": values(4, 21, 8, 8)}) == (
        "classes",
        "ignored",
    )


def test_vectors_of_length_one_are_embeddings_and_so_is_what_has_no_classes():
    assert kinds(F.normalize(values(4, 16))) == ("embedding",)
    assert kinds(values(4, 16), model=SimpleNamespace(num_classes=0)) == ("embedding",)


def test_a_network_may_say_that_it_regresses():
    model = SimpleNamespace(config=SimpleNamespace(problem_type="regression"))
    assert kinds({"logits": values(4, 3)}, TOKENS, model=model) == ("values",)


def test_states_that_have_no_sample_dimension_are_ignored():
    assert kinds((values(4, 10), values(2, 4, 8))) == ("classes", "ignored")
    assert kinds(values(6, 4, 10), TOKENS) == ("classes",)  # the only output there is


def test_a_given_kind_overrides_what_is_recognised():
    assert kinds(values(4, 10), output="values") == ("values",)
    two = values(4, 10), values(2, 4, 8), values(4, 1)
    assert kinds(two, output="embedding") == ("embedding", "ignored", "embedding")
    assert kinds(two, output="classes,values,ignored")[1] == "values"


def test_wrong_kinds_are_refused():
    with pytest.raises(
        ValueError, match="output='logits' must be classes, values, emb"
    ):
        kinds(values(4, 10), output="logits")
    with pytest.raises(
        ValueError, match=r"has 2 kinds, but the network returns 1 float .*\(4, 10\)"
    ):
        kinds(values(4, 10), output="classes,values")
    with pytest.raises(SampleError, match="returned Tensor without a float tensor"):
        kinds(TOKENS)
    for config in (ompq.PlanConfig, ompq.QuantizeConfig):
        with pytest.raises(
            ValueError, match="'output' of .* must be classes, values, emb"
        ):
            config(output="classes,x")


def test_another_number_of_outputs_is_refused():
    with pytest.raises(SampleError, match=r"returns 2 float tensors, but 1 outputs we"):
        CLASSES.read((values(4, 10), values(4, 2)))


def test_divergence_of_classes_is_scipys():
    expected, found = values(4, 6, 5), values(4, 6, 5, seed=1)
    p, q = (softmax(t.double().numpy(), axis=2) for t in (expected, found))
    wanted = rel_entr(p, q).sum(2).mean(1)  # tokens of an input are averaged
    got = CLASSES.divergences([expected], [found], 4)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def measured(kind, *tensors):
    return Outputs.measured([kind], [[tensor] for tensor in tensors])


def test_divergence_of_values_is_that_of_two_normal_distributions():
    expected = 3 + values(4, 2, 5, 5) * torch.tensor([0.1, 40.0])[:, None, None]
    found = expected + values(4, 2, 5, 5, seed=1) * 0.05
    outputs = measured("values", expected[:3], expected[3:])
    got = outputs.divergences([expected], [found], 4)
    sigma = expected.double().numpy().std((0, 2, 3), keepdims=True)
    apart = (found.double() - expected.double()).numpy() / sigma
    np.testing.assert_allclose(got, (apart**2 / 2).mean((1, 2, 3)), rtol=1e-4)


def test_values_may_have_any_unit():
    expected, found = values(8, 3), values(8, 3, seed=1)
    scale = torch.tensor([1.0, 1e-4, 1e4])
    one = measured("values", expected).divergences([expected], [found], 8)
    scaled = expected * scale, found * scale
    other = measured("values", scaled[0]).divergences([scaled[0]], [scaled[1]], 8)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=0)


def test_constant_values_are_compared_with_their_size():
    expected = torch.full((4, 1), 5.0)
    got = measured("values", expected).divergences([expected], [expected + 0.05], 4)
    assert got.tolist() == pytest.approx([0.5] * 4, rel=1e-4)  # off by a hundredth
    single = torch.full((1, 1), 5.0)
    got = measured("values", single).divergences([single], [single + 1], 1)
    assert got.tolist() == pytest.approx([0.04 / 2])


def test_divergence_of_embeddings_is_one_minus_cosine():
    expected, found = values(4, 6, 16), values(4, 6, 16, seed=1)
    wanted = 1 - F.cosine_similarity(expected, found, dim=2).mean(1)
    outputs = measured("embedding", expected)
    got = outputs.divergences([expected], [found], 4)
    torch.testing.assert_close(got.float(), wanted)
    assert outputs.divergences([expected], [7 * expected], 4).abs().max() < 1e-12


def test_several_outputs_add_up():
    one, two = values(4, 10), values(4, 1)
    outputs = Outputs.measured(["classes", "ignored", "values"], [[one, one, two]])
    found = [values(4, 10, seed=1), values(4, 1, seed=2)]
    parts = CLASSES.divergences([one], found[:1], 4) + measured(
        "values", two
    ).divergences([two], found[1:], 4)
    torch.testing.assert_close(outputs.divergences([one, two], found, 4), parts)
    assert outputs.read((one, one, two))[1] is two
    assert str(outputs) == "classes,ignored,values"


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("classes", (3, 5)),
        ("classes", (3, 4, 5)),
        ("values", (3, 5)),
        ("values", (3, 2, 2, 2)),
        ("embedding", (3, 5)),
        ("embedding", (3, 4, 5)),
    ],
)
def test_half_the_mean_squared_gradient_is_the_divergence_of_a_small_error(kind, shape):
    tensor, error = values(*shape).double(), 1e-3 * values(*shape, seed=1).double()
    outputs = measured(kind, tensor)
    wanted = outputs.divergences([tensor], [tensor + error], 3)
    many = tensor.repeat(4000, *[1] * (len(shape) - 1)).requires_grad_()
    loss = outputs.drawn_loss([many], torch.Generator().manual_seed(0), 12000)
    (gradient,) = torch.autograd.grad(loss, many)
    along = (gradient.view(4000, *shape) * error).flatten(2).sum(2)
    found = (along.square().mean(0) / 2).tolist()
    assert found == pytest.approx(wanted.tolist(), rel=0.15)
    # And so is half the squared distance of the features.
    [one], [other] = (outputs.features([x], 3) for x in (tensor, tensor + error))
    apart = (one - other).square().sum() / 2
    assert apart.item() == pytest.approx(wanted.sum().item(), rel=0.05)


def test_squared_gradients_are_the_fisher_information_of_logits():
    logits = torch.tensor([[2.0, 0.0, -1.0]]).repeat(20_000, 1).requires_grad_()
    CLASSES.drawn_loss([logits], torch.Generator().manual_seed(0), 20_000).backward()
    p = logits.detach()[0].softmax(0)
    torch.testing.assert_close(
        logits.grad.square().mean(0), p * (1 - p), atol=0.01, rtol=0
    )


def test_classes_of_many_rows_count_as_one_input():
    log_p = values(12, 5).log_softmax(1)
    _, weights = drawn_classes(log_p, torch.Generator().manual_seed(0), 3)
    assert weights.tolist() == [0.25] * 12


def boxes(*rows):
    """Return one image's detections: (x1, y1, x2, y2, label, score) each."""
    table = torch.tensor(rows or [[0.0] * 6])[: len(rows)]
    return {"boxes": table[:, :4], "labels": table[:, 4].long(), "scores": table[:, 5]}


def test_detections_are_compared_by_what_is_found_twice():
    cat, dog = (0.0, 0, 4, 4, 1, 0.9), (8.0, 8, 12, 12, 2, 0.5)
    half = (0.0, 0, 4, 2.4, 1, 0.9)  # overlaps by 0.6
    first = [boxes(cat, dog), boxes(cat), boxes(), boxes(cat), boxes(cat)]
    second = [boxes(dog, cat), boxes(half), boxes(), boxes(), boxes((*cat[:4], 2, 0.9))]
    outputs = Outputs(("detections",), (None,))
    assert kinds(first) == ("detections",)
    read = [outputs.read(one) for one in (first, second)]
    assert len(read[0]) == 15
    wanted = [0, 1 - 0.6, 0, 1, 1]
    got = outputs.divergences(*read, 5).tolist()
    assert got == pytest.approx(wanted, abs=1e-6)


def test_overlaps_of_boxes_by_counting_cells():
    made = torch.randint(0, 9, (20, 2, 2), generator=torch.Generator().manual_seed(0))
    corners = torch.cat([made.amin(1), made.amax(1) + 1], 1).float()

    def cells(box):
        x1, y1, x2, y2 = map(int, box)
        return {(x, y) for x in range(x1, x2) for y in range(y1, y2)}

    sets = [cells(box) for box in corners]
    wanted = [[len(a & b) / len(a | b) for b in sets] for a in sets]
    np.testing.assert_allclose(box_overlaps(corners, corners), wanted, rtol=1e-6)


def test_rows_of_values_are_channels_of_images_and_coordinates_of_vectors():
    assert value_rows(values(4, 3, 5, 6)).shape == (4 * 5 * 6, 3)
    assert value_rows(values(4, 3)).shape == (4, 3)
    assert value_rows(values(4, 7, 3)).shape == (84, 1)
    assert value_rows(values(4)).shape == (4, 1)


class Denoiser(nn.Module):
    """Predicts a picture of one channel; most layers matter little."""

    def __init__(self):
        super().__init__()
        widths = [1, 8, 8, 8, 1]
        pairs = pairwise(widths)
        self.layers = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in pairs)

    def forward(self, x):
        y = x
        for layer in self.layers[:-1]:
            y = layer(y).relu()
        return x - self.layers[-1](y)


def pictures(count=16, seed=0):
    return values(count, 1, 12, 12, seed=seed)


@pytest.fixture(scope="module")
def denoiser():
    return seeded(Denoiser())


@pytest.mark.parametrize("score", ["sensitivity", "output_divergence"])
def test_a_denoiser_uses_its_budget(denoiser, score):
    config = ompq.PlanConfig(score=score)
    plan = ompq.plan(denoiser, pictures(), "4bits", config)
    assert plan.output == "values"
    assert (plan.scores.damage[:, :-1] > plan.scores.damage[:, 1:]).all()
    assert plan.totals["average_bits"] > 3.5
    noise = ompq.plan(
        denoiser, pictures(), "4bits", ompq.PlanConfig(score="weight_noise")
    )
    ratio = plan.scores.damage / noise.scores.damage
    assert ratio.max() > 1.5 * ratio.min()  # it is not the noise alone


def test_the_kind_travels_with_the_plan_and_the_network(denoiser, tmp_path):
    plan = ompq.plan(denoiser, pictures(), "4bits", ompq.PlanConfig(output="embedding"))
    plan.save(tmp_path / "plan.json")
    assert ompq.Plan.load(tmp_path / "plan.json").output == "embedding"
    quantized = ompq.quantize(denoiser, plan, pictures())
    assert ompq.quantization_of(quantized).output == "embedding"
    found = ompq.evaluate(quantized, Samples.of(pictures()), reference=denoiser)
    assert found.output == "embedding"
    assert "cosine 0." in repr(found)
    found = ompq.evaluate(
        quantized, Samples.of(pictures()), reference=denoiser, output="values"
    )
    assert found.output == "values"
    other = ompq.QuantizeConfig(output="values")
    again = ompq.quantize(denoiser, plan, pictures(), other)
    assert ompq.quantization_of(again).output == "values"


@pytest.mark.parametrize("size", [1, 5, 16])
def test_evaluation_of_values_does_not_depend_on_batches(denoiser, size):
    quantized = ompq.quantize(denoiser, {"*": 4}, pictures())
    batches = [(part, None) for part in pictures(16, seed=3).split(size)]
    found = ompq.evaluate(quantized, iter(batches), reference=denoiser)
    with torch.no_grad():
        ours, theirs = (
            net(pictures(16, seed=3)).double() for net in (quantized, denoiser)
        )
    wanted = float((ours - theirs).square().mean() / theirs.var(correction=0) / 2)
    assert found.divergence == pytest.approx(wanted, rel=1e-4)
    assert found.agreement is None
    decibels = -10 * np.log10(2 * wanted)
    assert f"{decibels:.1f} dB, 16 samples" in repr(found)


def test_goals_of_values_are_divergences(denoiser):
    plan = ompq.plan(denoiser, pictures(), "4bits")
    result = ompq.evaluate(
        ompq.quantize(denoiser, plan, pictures()),
        Samples.of(pictures()),
        reference=denoiser,
    )
    assert meets_goal(result, ompq.Goal(max_divergence=1.0))
    assert not meets_goal(result, ompq.Goal(max_divergence=1e-9))
    with pytest.raises(GoalError, match="min_agreement=0.9 cannot be measured"):
        meets_goal(result, ompq.Goal(min_agreement=0.9))


def test_refinement_measures_values(denoiser):
    plan = ompq.plan(denoiser, pictures(), "4bits")
    refined = ompq.refine(
        plan, denoiser, pictures(32), ompq.RefineConfig(count=4, trusted=9)
    )
    assert len(refined.measured) == 4
    assert all(one.divergence > 0 for one in refined.measured)


@pytest.mark.parametrize("loss", ["fisher", "low_rank_fisher"])
def test_losses_of_reconstruction_know_values(denoiser, loss):
    quantized = ompq.quantize(denoiser, {"*": (3, 8)}, pictures())
    rounding = ompq.RoundingConfig(iterations=100, batch_size=8)
    config = ompq.ReconstructConfig(rounding=rounding, loss=loss)
    found = ompq.reconstruct(quantized, denoiser, pictures(), config)
    batches = Samples.of(pictures(seed=5))
    before, after = (
        ompq.evaluate(net, batches, reference=denoiser).divergence
        for net in (quantized, found)
    )
    assert 0 < after < before


def test_tuning_of_values_lowers_their_error(denoiser):
    quantized = ompq.quantize(denoiser, {"*": (4, 4)}, pictures(64))
    rounding = ompq.RoundingConfig(iterations=10, batch_size=8)
    config = ompq.ReconstructConfig(rounding=rounding)
    tuned = ompq.quantization_of(
        ompq.reconstruct(quantized, denoiser, pictures(64), config)
    ).tuned
    assert tuned.improved
    assert tuned.after < tuned.before


class Blind(nn.Module):
    """Returns logits that do not depend on its weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return 0 * self.second(self.first(x)) + 1


def test_a_score_without_any_difference_is_an_error(caplog):
    model, inputs = seeded(Blind()), values(8, 4)
    with pytest.raises(
        ScoreError, match="'output_divergence' finds every choice of every layer"
    ):
        ompq.plan(model, inputs, "4bits", ompq.PlanConfig(score="output_divergence"))
    plan = ompq.plan(model, inputs, "4bits")
    assert "no error of a weight reaches the output, which was read as classes" in (
        caplog.text
    )
    assert plan.totals["average_bits"] > 3


def test_packed_files_keep_the_kind(denoiser, tmp_path):
    quantized = ompq.quantize(denoiser, {"*": 4}, pictures())
    ompq.save(quantized, tmp_path / "net.ompq.safetensors")
    again = ompq.load(tmp_path / "net.ompq.safetensors", denoiser)
    assert ompq.quantization_of(again).output == "values"


@pytest.mark.parametrize(
    ("text", "words"), [(3, "must be text, not 3"), ("x", "must be classes, .* 'x'")]
)
def test_files_with_another_kind_are_refused(text, words):
    with pytest.raises(ValueError, match=f"output {words}"):
        parse_output(text)


def test_only_classes_are_ranked_when_a_file_is_verified():
    rows = values(4, 16)
    assert compare_outputs([rows], [rows]).ranked
    assert not compare_outputs([rows], [rows], classes=False).ranked
