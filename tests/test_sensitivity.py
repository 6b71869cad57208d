import copy

import numpy as np
import pytest
import torch
from torch import nn

from nets import TinyMobileNet, TinyResNet, images, seeded
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.outputs import drawn_classes
from ompq.scores import sensitivity
from ompq.scores.sensitivity import Sensitivity
from ompq.scores.weight_noise import noise_ratios, quickly_rounded
from ompq.weight_ranges import search_weight
from tables import CHOICES, score_inputs


class Tables(nn.Module):
    """Adds up what three tables say of tokens, of their places and of all of them."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 12)
        self.places = nn.Embedding(5, 12)
        self.kinds = nn.Embedding(2, 12)
        self.inner = nn.Linear(12, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, ids):
        places = torch.arange(ids.shape[1])[None]
        kinds = self.kinds(torch.zeros_like(ids))
        summed = self.words(ids) + kinds + self.places(places)
        return self.head(self.inner(summed.tanh()).relu().mean(1))


def token_ids(count=8):
    return torch.randint(30, (count, 5), generator=torch.Generator().manual_seed(2))


def test_sensitivity_does_not_depend_on_batches(monkeypatch):
    network, inputs = seeded(TinyMobileNet()), images(8)
    graph = trace(network, inputs)
    whole = Sensitivity()(score_inputs(graph, network, inputs, CHOICES)).damage
    monkeypatch.setattr("ompq.scores.sensitivity._CPU_BATCH", 4)
    monkeypatch.setattr("ompq.scores.sensitivity._CPU_MACS", 0)
    parts = Sensitivity()(score_inputs(graph, network, inputs, CHOICES)).damage
    # But for the means, which are those of a batch.
    assert parts == pytest.approx(whole, rel=0.5)


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


def rounded(network, name, bits):
    weight = network.get_parameter(f"{name}.weight").detach()
    return weight if bits == 32 else search_weight(weight, bits).fake(weight)


def expected_divergence(network, unit, rounded, inputs, labels, counts):
    """Half the mean square of d log p, one channel's centred error at a time.

    Of the classifier's error, the geometric mean of that and of all channels at once.
    """
    twin = copy.deepcopy(network).double()
    module = twin.get_submodule(unit.name)
    kept = {}
    with module.register_forward_hook(lambda _m, args, out: kept.update(x=args, y=out)):
        twin(inputs)
    plain = copy.deepcopy(module)
    plain.weight.copy_(rounded)
    error = plain(*kept["x"]) - kept["y"]
    axes = [axis for axis in range(error.dim()) if axis != 1]
    error = error - error.mean(axes, keepdim=True)

    def squares(part):
        moved, ends = torch.zeros_like(error), []
        moved[:, part] = error[:, part]
        for step in (1e-4, -1e-4):
            with module.register_forward_hook(lambda _m, _a, y, d=step: y + d * moved):
                log_p = twin(inputs).log_softmax(1)
            ends.append(log_p.gather(1, labels[:, None])[:, 0])
        return float((((ends[0] - ends[1]) / 2e-4).square() * counts).sum())

    total = sum(squares(slice(c, c + 1)) for c in range(error.shape[1]))
    if error.dim() == 2:
        total = (total * squares(slice(None))) ** 0.5
    return total / 2 / len(inputs)


def test_sensitivity_is_noise_times_what_of_it_finite_differences_expect():
    network, inputs = seeded(TinyMobileNet()), images(6)
    graph = trace(network, inputs)
    choices = [Choice(bits, 32) for bits in (2, 4, 8)]
    found = Sensitivity(spatial=0.25)(score_inputs(graph, network, inputs, choices))
    noise, expected = np.zeros((len(graph), 3)), np.zeros((len(graph), 2))
    with torch.no_grad():
        log_p = network(inputs).log_softmax(1)
        drawn = drawn_classes(log_p, torch.Generator().manual_seed(0), 6)
        for row, unit in enumerate(graph.units):
            [rounding] = quickly_rounded(network, [unit], choices)
            noise[row] = noise_ratios([rounding], choices)[0]
            weight = network.get_parameter(unit.parameter)
            expected[row] = [
                expected_divergence(network, unit, rounded, inputs.double(), *drawn)
                for rounded in weight + rounding.errors(tuple(choices[:2]))
            ]
    means = expected**0.7 * noise[:, :2] ** 0.3
    shapes = [unit.weight_shape for unit in graph.units]  # (out, in, height, width)
    spatial = [len(s) == 4 and s[1] > 1 and s[2] > 1 for s in shapes]
    assert 0 < sum(spatial) < len(spatial)
    means[spatial] /= 4
    ratio = found.damage[:, :2] / means
    assert ratio == pytest.approx(np.full_like(ratio, ratio[0, 0]), rel=2e-3)
    # Above 4 bits the divergence is taken to follow the noise.
    by_noise = found.damage[:, 1] * noise[:, 2] / noise[:, 1]
    assert found.damage[:, 2] == pytest.approx(by_noise)
    assert found.orm is not None


@pytest.mark.parametrize("certain", [0.0, 6.0])
def test_drawn_classes_average_squared_gradients_over_the_answers(certain):
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    logits[:, 0] += certain
    log_p = logits.log_softmax(1)
    generator = torch.Generator().manual_seed(1)
    direction = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0])
    p = log_p.exp()
    # The gradient of class k's log probability is onehot(k) - p.
    along = direction - (p * direction).sum(1, keepdim=True)  # (3, 5)
    exact = (p * along.square()).sum(1)
    labels, counts = drawn_classes(log_p.repeat(4000, 1), generator, 12000)
    squares = along.repeat(4000, 1).gather(1, labels[:, None])[:, 0].square()
    found = (squares * counts).reshape(4000, 3).mean(0)
    assert found.tolist() == pytest.approx(exact.tolist(), rel=0.1)


def test_sensitivity_sees_weights_inside_attention_and_tied_ones(caplog):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(11, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens):  # (N, T)
            x = self.words(tokens)
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.head(x.mean(1))

    network = seeded(Attending())
    tokens = torch.arange(24).reshape(6, 4) % 11
    graph = trace(network, tokens)
    damage = Sensitivity()(score_inputs(graph, network, tokens, CHOICES)).damage
    assert "attention.in_proj" in graph.names
    assert not caplog.text
    assert (np.diff(damage, axis=1) < 0).all()


def test_sensitivity_chooses_activation_bits_too():
    network, inputs = seeded(TinyMobileNet()), images(6)
    graph = trace(network, inputs)
    choices = [Choice(4, 4), Choice(4, 8), Choice(8, 8), Choice(32, 32)]
    damage = Sensitivity()(score_inputs(graph, network, inputs, choices)).damage
    assert (np.diff(damage, axis=1) < 0).all()
    assert (damage[:, 3] == 0).all()


class Mixed(nn.Module):
    """Convolutions of several kinds, then a linear layer over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=(2, 1), dilation=(2, 1), groups=4)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.along = nn.Conv1d(8, 12, 3, padding=1)
        self.linear = nn.Linear(12, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.depthwise(self.grouped(self.stem(x)).relu()).relu()
        x = self.along(x.flatten(2)).relu()
        return self.head(self.linear(x.transpose(1, 2)).relu().mean(1))


@pytest.mark.parametrize("make", [Mixed, TinyMobileNet, TinyResNet])
def test_gradients_by_sample_give_what_outputs_of_errors_give(monkeypatch, make):
    network, inputs = seeded(make()), images(6, size=16)
    graph = trace(network, inputs)
    used, found = [], {}
    of = sensitivity._SampleGradients.of

    def recorded(*args):
        used.append(of(*args))
        return used[-1]

    for fewest in (1, 10**9):
        monkeypatch.setattr(sensitivity, "_FEWEST_POSITIONS", fewest)
        monkeypatch.setattr(sensitivity._SampleGradients, "of", recorded)
        given = score_inputs(graph, network, inputs, CHOICES)
        found[fewest] = Sensitivity()(given).damage
    both = len(used) // 2
    assert sum(one is not None for one in used[:both]) >= len(graph) - 1
    assert used[both:] == [None] * both
    np.testing.assert_allclose(found[1], found[10**9], rtol=1e-4)


def test_an_input_that_is_changed_later_leaves_the_noise_to_decide(monkeypatch, caplog):
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            x = self.first(x).relu()
            y = self.second(x)
            x.mul_(2)
            return self.head((x + y).mean((2, 3)))

    monkeypatch.setattr(sensitivity, "_FEWEST_POSITIONS", 1)
    network, inputs = seeded(Changed()), images(4)
    graph = trace(network, inputs)
    damage = Sensitivity()(score_inputs(graph, network, inputs, CHOICES)).damage
    assert np.isfinite(damage).all()
    assert "what a layer reads is changed in place later" in caplog.text


def expected_of_table(network, table, errors, ids):
    """Return half the mean square, over inputs, of gradient · error by channel."""
    read = []
    keep = table.register_forward_hook(lambda _m, _a, y: read.append(y))
    log_p = network(ids).log_softmax(1)
    keep.remove()
    generator = torch.Generator().manual_seed(0)
    classes, weights = drawn_classes(log_p, generator, len(ids))
    rows = []
    for n, (label, weight) in enumerate(zip(classes, weights, strict=True)):
        [slope] = torch.autograd.grad(log_p[n, label], read[0], retain_graph=True)
        rows.append(weight * (slope[n] * errors[ids[n]]).sum(0).square().sum())
    return float(sum(rows)) / 2 / len(ids)


def test_nothing_corrects_the_mean_error_of_a_table():
    network, ids = seeded(Tables()), token_ids()
    graph = trace(network, ids)
    choices = [Choice(2, 32), Choice(3, 32)]
    damage = Sensitivity()(score_inputs(graph, network, ids, choices)).damage
    by_hand = {}
    for name in ("words", "kinds"):
        [unit] = [one for one in graph.units if one.name == name]
        [rounding] = quickly_rounded(network, [unit], choices)
        errors = rounding.errors(tuple(choices))[0]
        # Every token is of the first kind.
        by_token = errors if name == "words" else errors[:1].expand(30, -1)
        table = network.get_submodule(name)
        expected = expected_of_table(network, table, by_token, ids)
        noise = noise_ratios([rounding], choices)[0, 0]
        by_hand[name] = expected**0.7 * noise**0.3
    at = graph.names.index
    found = damage[at("kinds"), 0] / damage[at("words"), 0]
    # The same row is read everywhere: less its mean, the error would be nothing.
    assert found == pytest.approx(by_hand["kinds"] / by_hand["words"], rel=1e-3)


def test_nothing_repairs_tables():
    network, ids = seeded(Tables()), token_ids()
    graph = trace(network, ids)
    given = score_inputs(graph, network, ids, CHOICES)
    alike = Sensitivity(tables=1.0)(given).damage
    found = Sensitivity(tables=3.0)(given).damage
    tables = [unit.kind == "embedding" for unit in graph.units]
    assert sum(tables) == 3
    for row, table in enumerate(tables):
        assert found[row] == pytest.approx(alike[row] * (3 if table else 1))
