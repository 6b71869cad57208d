import json
import math

import pytest
import torch
from torch import nn

from ompq.errors import DataError, ModelError
from ompq.evaluation import evaluate
from ompq.evaluation_result import Evaluation
from ompq.samples import Samples, class_rows


class Table(nn.Module):
    """Logits are the inputs plus a learned offset."""

    def __init__(self, classes=6, scale=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        offset = scale * torch.randn(classes, generator=generator)
        self.offset = nn.Parameter(offset)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x) + self.offset


def labelled(count=50, classes=6):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(count, classes, generator=generator)
    return logits, torch.randint(classes, (count,), generator=generator)


def in_batches(inputs, targets, size=16):
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def test_accuracy_equals_counting_by_hand():
    inputs, targets = labelled()
    rows = list(zip(inputs.tolist(), targets.tolist(), strict=True))
    right = [row.index(max(row)) == target for row, target in rows]
    five = [row[target] > min(row) for row, target in rows]  # not the last of six
    result = evaluate(Table(), in_batches(inputs, targets))
    assert result.count == 50
    assert result.top1 == pytest.approx(sum(right) / 50)
    assert result.top5 == pytest.approx(sum(five) / 50)
    assert result.correctness().tolist() == right
    assert len(result.correct) == 7  # bits, not bytes
    assert result.images_per_second > 0
    assert result.agreement is None
    assert result.drop is None


def test_top5_needs_five_classes():
    inputs, targets = labelled(classes=4)
    assert evaluate(Table(4), [(inputs, targets)]).top5 is None
    inputs, targets = labelled(classes=5)
    assert evaluate(Table(5), [(inputs, targets)]).top5 == 1.0


def test_comparison_with_a_reference_equals_loops():
    inputs, targets = labelled()
    model, reference = Table(scale=0.5), Table()
    result = evaluate(model, in_batches(inputs, targets), reference=reference)
    divergence, agreed, differences = [], [], []
    for row, target in zip(inputs.double(), targets.tolist(), strict=True):
        p = torch.softmax(row, 0).tolist()
        logits = row + model.offset.detach().double()
        q = torch.softmax(logits, 0).tolist()
        terms = [a * math.log(a / b) for a, b in zip(p, q, strict=True)]
        divergence.append(sum(terms))
        mine, other = q.index(max(q)), p.index(max(p))
        agreed.append(mine == other)
        differences.append((other == target) - (mine == target))
    mean = sum(differences) / 50
    variance = sum((d - mean) ** 2 for d in differences) / 50
    assert result.agreement == pytest.approx(sum(agreed) / 50)
    assert result.divergence == pytest.approx(sum(divergence) / 50, rel=1e-4)
    assert result.drop == pytest.approx(mean)
    assert result.drop_error == pytest.approx(math.sqrt(variance / 50))


def test_network_agrees_with_itself():
    model = Table()
    result = evaluate(model, [labelled()], reference=model)
    assert (result.agreement, result.divergence, result.drop) == (1.0, 0.0, 0.0)
    assert result.drop_error == 0.0


def test_drop_between_two_evaluations_is_the_drop_from_the_reference():
    batches = in_batches(*labelled())
    model, reference = Table(scale=0.5), Table()
    compared = evaluate(model, batches, reference=reference)
    drop, error = compared.drop_from(evaluate(reference, batches))
    assert drop == pytest.approx(compared.drop)
    assert error == pytest.approx(compared.drop_error)
    assert error > 0


def test_drop_needs_the_same_images():
    inputs, targets = labelled()
    result = evaluate(Table(), [(inputs, targets)])
    fewer = evaluate(Table(), [(inputs[:40], targets[:40])])
    with pytest.raises(ValueError, match=r"different images \(50 and 40, or other"):
        result.drop_from(fewer)
    others = evaluate(Table(), [(inputs, targets.flip(0))])
    with pytest.raises(ValueError, match="evaluate both on the same batches"):
        result.drop_from(others)


def test_users_metrics_are_averaged_over_images_not_batches():
    inputs, targets = labelled(50)
    result = evaluate(
        Table(),
        in_batches(inputs, targets, 32),  # 32 and 18 images
        metrics={
            "loss": lambda o, t: nn.functional.cross_entropy(o, t).item(),
            "mean target": lambda _, t: t.float().mean(),
        },
    )
    expected = nn.functional.cross_entropy(inputs, targets).item()
    assert result.metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert result.metrics["mean target"] == pytest.approx(targets.float().mean().item())


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.ones(2, 3), r"a tensor of shape \(2, 3\)"),
        (None, "NoneType"),
        ("good", "str"),
    ],
)
def test_metric_that_is_no_number_is_named(value, what):
    with pytest.raises(ValueError, match=f"metric 'mine' returned {what}, not one"):
        evaluate(Table(), [labelled()], metrics={"mine": lambda *_: value})


def test_metric_without_a_value_is_named():
    metrics = {"mine": lambda *_: float("nan")}
    with pytest.raises(ValueError, match="metric 'mine' returned NaN for a batch: lea"):
        evaluate(Table(), [labelled()], metrics=metrics)
    metrics = {"mine": lambda *_: float("inf")}  # as the perplexity of a bad network
    assert evaluate(Table(), [labelled()], metrics=metrics).metrics["mine"] == math.inf


def test_json_round_trip_is_lossless():
    result = evaluate(
        Table(scale=0.5),
        [labelled()],
        reference=Table(),
        metrics={"one": lambda *_: 1.0},
    )
    text = json.dumps(result.to_json(), allow_nan=False)
    assert Evaluation.from_json(json.loads(text)) == result


def test_network_is_left_as_found():
    model, reference = Table(), Table()
    model.train()
    model.dropout.eval()
    reference.train()
    evaluate(model, [labelled()], reference=reference)
    assert (model.training, model.dropout.training) == (True, False)
    assert reference.dropout.training
    assert torch.is_grad_enabled()
    assert model.offset.grad is None


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return {"logits": x} if self.wrap is dict else (x, "more")


@pytest.mark.parametrize("wrap", [dict, tuple])
def test_outputs_may_be_dicts_and_tuples(wrap):
    result = evaluate(Wrapped(wrap), [labelled()])
    assert result.top1 == evaluate(Table(), [labelled()]).top1


class Sum(nn.Module):
    def forward(self, a, b):
        return a + b


def test_inputs_may_be_several_tensors():
    inputs, targets = labelled()
    expected = evaluate(Table(), [(inputs, targets)]).top1
    zeros = torch.zeros_like(inputs)
    assert evaluate(Sum(), [((inputs, zeros), targets)]).top1 == expected
    named = {"a": inputs, "b": zeros}
    assert evaluate(Sum(), [(named, targets)]).top1 == expected


def test_batches_may_be_an_iterator_and_progress_knows_what_is_left():
    batches = in_batches(*labelled(), 25)
    calls: list[tuple[int, int | None, str]] = []

    def generated():
        yield from batches

    result = evaluate(Table(), batches, progress=lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(1, 2), (2, 2)]
    assert calls[-1][2] == f"evaluating: top-1 {result.top1:.1%}"
    calls.clear()
    evaluate(Table(), generated(), progress=lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(1, None), (2, None)]


def test_data_loader_works():
    dataset = torch.utils.data.TensorDataset(*labelled())
    loader = torch.utils.data.DataLoader(dataset, batch_size=20)
    result = evaluate(Table(), loader)
    assert result.top1 == evaluate(Table(), [labelled()]).top1


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "batches are empty"),
        ([(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))], "batches are empty"),
        ([torch.zeros(2, 6)], "batch 0 is Tensor; it must be"),
        ([(torch.zeros(2, 6),)], r"batch 0 is tuple; it must be \(inputs, targets"),
        ([(torch.zeros(2, 6), 3)], "batch 0 has 2 inputs and int; give one class"),
        (
            [labelled(), (torch.zeros(4, 6), torch.tensor([1, 2]))],
            r"batch 1 has 4 inputs and targets of shape \(2,\)",
        ),
        (
            [(torch.zeros(2, 6), torch.tensor([0.5, 0.5]))],
            "torch.float32; give one class index per input",
        ),
        (
            [(torch.zeros(2, 6), torch.tensor([0, 6]))],
            "target 6 is out of range: the network has 6 outputs, 0 to 5",
        ),
        ([(torch.zeros(2, 6), torch.tensor([0, -1]))], "target -1 is out of range"),
    ],
)
def test_batches_that_cannot_be_used(batches, words):
    with pytest.raises(DataError, match=words):
        evaluate(Table(), batches, progress=lambda *_: None)  # type: ignore[arg-type]


def test_outputs_that_are_no_logits():
    targets = torch.tensor([0, 1])
    with pytest.raises(ModelError, match=r"returned shape \(2, 6, 3, 3\); accuracy"):
        evaluate(nn.Identity(), [(torch.zeros(2, 6, 3, 3), targets)])
    bad = torch.zeros(2, 6)
    bad[1, 2] = float("nan")
    with pytest.raises(ModelError, match="NaN or infinity for 1 of 2 images"):
        evaluate(Table(), [(bad, targets)])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_devices_agree():
    batches = in_batches(*labelled())
    on_cpu = evaluate(Table(scale=0.5), batches, reference=Table())
    on_gpu = evaluate(Table(scale=0.5).cuda(), batches, reference=Table())
    assert on_gpu.correct == on_cpu.correct
    assert on_gpu.divergence == pytest.approx(on_cpu.divergence, rel=1e-5)


class Dense(nn.Module):
    """Four classes at each of 3 × 3 places, from an image of four channels."""

    def __init__(self, scale=0.0):
        super().__init__()
        self.offset = nn.Parameter(scale * torch.arange(4.0).view(1, 4, 1, 1))

    def forward(self, x):
        return {"out": x + self.offset, "aux": x}


def test_without_labels_a_network_is_compared_with_the_reference():
    inputs, targets = labelled()
    model, reference = Table(scale=0.5), Table()
    known = evaluate(model, [(inputs, targets)], reference=reference)
    found = evaluate(model, Samples.of(inputs), reference=reference)
    assert found.agreement == known.agreement
    assert found.divergence == pytest.approx(known.divergence)
    assert (found.top1, found.interval, found.drop, found.count) == (None,) * 3 + (50,)
    assert Evaluation.from_json(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(ValueError, match="there is no top-1 to compare"):
        found.drop_from(known)
    with pytest.raises(ValueError, match="the drop is not known"):
        _ = found.drop_interval
    with pytest.raises(DataError, match="samples have no targets: give a reference"):
        evaluate(model, Samples.of(inputs))


def test_classes_at_many_places_are_averaged_over_these():
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(6, 4, 3, 3, generator=generator)
    found = evaluate(Dense(0.4), Samples.of(images), reference=Dense())
    mine, other = Dense(0.4)(images)["out"], images
    assert found.agreement == pytest.approx(
        float((mine.argmax(1) == other.argmax(1)).double().mean())
    )
    kl = nn.functional.kl_div(
        mine.log_softmax(1), other.log_softmax(1), reduction="none", log_target=True
    )
    assert found.divergence == pytest.approx(float(kl.detach().sum(1).mean()), rel=1e-5)


def test_tokens_have_their_classes_last():
    tokens = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(5))
    assert torch.equal(class_rows(tokens), tokens.flatten(0, 1))
    assert class_rows(torch.zeros(3)).shape == (3, 1)


def test_one_number_for_each_input_may_be_nan_as_well():
    class Sum(nn.Module):
        def forward(self, x):
            return x.sum(1)

    def error(output, targets):
        return (output - targets).abs().mean()

    inputs = torch.arange(6.0).view(3, 2)
    found = evaluate(Sum(), [(inputs, torch.zeros(3))], metrics={"error": error})
    assert found.metrics["error"] == (1 + 5 + 9) / 3
    with pytest.raises(ModelError, match="NaN or infinity for 1 of 3 images"):
        evaluate(
            Sum(),
            [(inputs / torch.tensor([[1.0], [0.0], [1.0]]), torch.zeros(3))],
            metrics={"error": error},
        )


def test_metrics_get_what_the_network_returns_and_any_targets():
    images, masks = torch.randn(4, 4, 3, 3), torch.zeros(4, 3, 3, dtype=torch.long)
    targets = {"masks": masks, "names": ["a", "b", "c", "d"]}

    def places(output, given):
        assert given["names"] == targets["names"]
        return (output["out"].argmax(1) == given["masks"]).double().mean()

    batches = [(images, targets)]
    found = evaluate(Dense(9.0), batches, reference=Dense(), metrics={"places": places})
    assert found.metrics["places"] == float(
        (Dense(9.0)(images)["out"].argmax(1) == 0).double().mean()
    )
    assert found.reference_metrics["places"] == float(
        (images.argmax(1) == 0).double().mean()
    )
    assert found.top1 is None
    labels = torch.zeros(4, dtype=torch.long)
    with pytest.raises(ModelError, match=r"returned shape \(4, 4, 3, 3\); accuracy"):
        evaluate(Dense(), [(images, labels)])


def test_the_drop_has_a_paired_interval():
    batches = in_batches(*labelled())
    found = evaluate(Table(scale=0.5), batches, reference=Table())
    low, high = found.drop_interval
    assert (low + high) / 2 == pytest.approx(found.drop)
    assert (high - low) / 2 == pytest.approx(1.96 * found.drop_error, rel=1e-3)


def test_processes_must_read_the_same_batches(monkeypatch):
    """As if two processes shared them, whose loaders shuffle differently."""
    network, inputs = nn.Linear(3, 5), torch.zeros(4, 3)
    orders = [torch.arange(4), torch.arange(4).flip(0)]
    readers = iter(orders)

    class Shuffled:
        def __iter__(self):
            return iter([(inputs, next(readers))])

    monkeypatch.setattr("ompq.evaluation.process_count", lambda: 2)
    with pytest.raises(DataError, match="the processes read different batches"):
        evaluate(network, Shuffled())


def test_an_edited_evaluation_does_not_claim_more_images_than_it_knows():
    data = Evaluation(0.5, None, 8, (0.2, 0.8), 1.0, correct=b"\x0f").to_json()
    assert Evaluation.from_json(data).correctness().sum() == 4
    edited = Evaluation.from_json({**data, "count": 10**12})
    with pytest.raises(ValueError, match="1000000000000 images says of only 8 whether"):
        edited.drop_from(edited)
