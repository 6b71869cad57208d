"""Rounding with error feedback, and the moments of layer inputs that it needs."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ompq
from nets import TinyMobileNet, demo_network, scenes, seeded, values
from ompq import working_memory
from ompq.allocation.problem import Allocation
from ompq.configs import QuantizeConfig
from ompq.costs import can_be_coded, coded_bytes
from ompq.entropy_coding.rates import (
    PRICE,
    ZERO,
    cheapest_codes,
    cheapest_neighbours,
    code_bits,
    code_bytes,
    coded_codes,
)
from ompq.grids import Grid
from ompq.layers import quantized_layers
from ompq.models.builtin_networks import demo_data
from ompq.network.units import Choice
from ompq.quantization import error_feedback, weight_grids
from ompq.quantization.error_feedback import (
    channel_grams,
    coded_with_feedback,
    input_grams,
    round_with_feedback,
)
from ompq.samples import Samples
from ompq.weight_ranges import FEW_WEIGHTS, search_weight


class Same(nn.Conv2d):
    """Pads in its forward, more at the end than at the start."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (1, 2, 1, 2)))


LAYERS = {
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (8, 4, 9, 7)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), (8, 4, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, padding="same", groups=4), (8, 4, 7, 7)),
    "reflected": (lambda: nn.Conv1d(2, 5, 4, padding=3, padding_mode="reflect"), 0),
    "volume": (lambda: nn.Conv3d(2, 3, 2), (8, 2, 4, 5, 6)),
    "linear": (lambda: nn.Linear(5, 7), (32, 5)),
    "tokens": (lambda: nn.Linear(5, 7), (8, 9, 5)),
    "padded in forward": (lambda: Same(2, 3, 5, stride=2), (8, 2, 4, 4)),
}
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def network(kind):
    make, shape = LAYERS[kind]
    samples = values(*(shape or (8, 2, 9))) + 3  # most of it is the mean
    return nn.Sequential(make()), samples


def grams(model, samples, **more):
    units = ompq.trace(model, samples).units
    return input_grams(model, units, Samples.of(samples), batch_size=8, **more)


def uniform(model, bits, samples):
    names = ompq.trace(model, samples).names
    return Allocation(dict.fromkeys(names, Choice(bits, 8)))


def outputs(layer, weight, samples):
    """Return what a layer gives with this weight and no bias, (C, positions)."""
    alone = copy.deepcopy(layer)
    alone.weight, alone.bias = nn.Parameter(weight), None
    with torch.no_grad():
        out = alone.double()(samples.double())
    axis = out.dim() - 1 if isinstance(layer, nn.Linear) else 1
    return out.movedim(axis, 0).flatten(1)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_gram_tells_what_an_error_does_to_outputs(kind, centred):
    model, samples = network(kind)
    error = values(*model[0].weight.shape, seed=1).double()
    changed = outputs(model[0], error, samples)
    size = changed.var(1, correction=0) if centred else changed.square().mean(1)
    (gram,) = grams(model, samples, centred=centred).values()
    rows = error.flatten(1)
    gram = gram[:, 0].double().repeat_interleave(len(rows) // len(gram), 0)
    found = torch.einsum("ck,ckl,cl->c", rows, gram, rows)
    # Besides it, the ridge: a part of the inputs' mean square, as of a weight each.
    weight, count = rows.shape[1], changed.shape[1]
    diagonal = gram.diagonal(dim1=1, dim2=2).mean(1)
    ridge = diagonal * (weight / count) / (1 + weight / count)
    expected = size + ridge * rows.square().sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_long_channels_are_divided_into_parts_of_equal_size(monkeypatch):
    model, samples = seeded(nn.Sequential(nn.Linear(11, 7))), values(40, 11) + 3
    (whole,) = grams(model, samples).values()
    monkeypatch.setattr(error_feedback, "_PARTS", (4,))
    (parts,) = grams(model, samples).values()
    assert whole.shape == (1, 1, 11, 11)
    assert parts.shape == (1, 3, 4, 4)
    ridge = [gram.diagonal() * 0 + ridge_of(gram, 40) for gram in parts[0]]
    for part, own, start in zip(parts[0], ridge, (0, 4, 8), strict=True):
        at = slice(start, min(start + 4, 11))
        without = whole[0, 0] - torch.eye(11) * ridge_of(whole[0, 0], 40)
        expected = torch.zeros(4, 4)
        expected[: at.stop - start, : at.stop - start] = without[at, at]
        torch.testing.assert_close(part, expected + torch.diag(own))


def test_ranges_are_searched_with_the_matrices_of_short_channels():
    whole, own = torch.rand(1, 1, 9, 9), torch.rand(3, 1, 9, 9)
    assert torch.equal(channel_grams(whole, 6), whole[0])
    six = channel_grams(own, 6)
    assert six.shape == (6, 9, 9)
    assert torch.equal(six[2], own[1, 0])
    assert torch.equal(six[3], own[1, 0])
    assert channel_grams(torch.rand(2, 1, FEW_WEIGHTS + 1, FEW_WEIGHTS + 1), 2) is None
    assert channel_grams(torch.rand(1, 2, 480, 480), 8) is None


def ridge_of(gram, count):
    share = len(gram) / count
    return gram.diagonal().mean() * share / (1 + share)


def test_a_sample_of_positions_estimates_the_moments_of_all(monkeypatch):
    model, samples = seeded(nn.Sequential(nn.Conv2d(3, 4, 3))), scenes(128, size=16)
    (every,) = grams(model, samples).values()
    monkeypatch.setattr(error_feedback, "_FEWEST", 2048)
    (some,) = grams(model, samples).values()
    (again,) = grams(model, samples).values()
    assert torch.equal(some, again)
    assert not torch.equal(some, every)
    assert (some - every).norm() < 0.1 * every.norm()


def test_all_samples_are_read():
    model, samples = seeded(nn.Sequential(nn.Linear(5, 3))), values(200, 5)
    (found,) = grams(model, samples).values()
    expected = samples.T.cov(correction=0)
    ridge = expected.diagonal().mean() * 5 / 200
    torch.testing.assert_close(found[0, 0], expected + ridge * torch.eye(5))


@pytest.mark.parametrize(
    ("megabytes", "shape"), [(20, (1, 1, 1500, 1500)), (9, (1, 2, 750, 750))]
)
def test_matrices_are_as_large_as_the_memory_allows(megabytes, shape, monkeypatch):
    monkeypatch.setattr(working_memory, "_limit", megabytes * 10**6)
    model = nn.Sequential(nn.Linear(1500, 2))
    (gram,) = grams(model, values(8, 1500)).values()
    assert gram.shape == shape


def test_a_long_channel_gains_from_the_whole_matrix(monkeypatch):
    """Inputs that are alike in pairs, the two of a pair far apart."""
    model, half = seeded(nn.Sequential(nn.Linear(64, 32))), values(512, 32)
    samples = torch.cat([half, half + 0.1 * values(512, 32, seed=1)], 1)
    errors = []
    for longest in (32, 64):
        monkeypatch.setattr(error_feedback, "_PARTS", (longest,))
        quantized = ompq.quantize(model, {"*": (2, 32)}, samples)
        with torch.no_grad():
            errors.append(float((quantized(samples) - model(samples)).square().mean()))
    assert errors[1] < 0.7 * errors[0]


class Tied(nn.Module):
    """The weight of the embedding is that of the head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.middle = nn.Linear(4, 4)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.middle(self.embedding(x)))


def test_transposed_shared_and_overflowing_weights_are_left_out():
    layers = nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 4, 2), nn.Conv2d(4, 2, 2)
    assert [*grams(seeded(nn.Sequential(*layers)), scenes(4))] == ["0", "2"]
    assert [*grams(seeded(Tied()), torch.arange(8).view(4, 2))] == ["middle"]
    plain = seeded(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    assert [*grams(plain, 1e30 * values(9, 3))] == []


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 1234.567])
def test_inputs_that_never_vary_leave_all_errors_alike(value):
    model = seeded(nn.Sequential(nn.Linear(3, 2)))
    (gram,) = grams(model, torch.full((6, 3), value)).values()
    torch.testing.assert_close(gram[0, 0], torch.eye(3))


def test_squares_may_underflow():
    model = seeded(nn.Sequential(nn.Linear(3, 2)))
    (gram,) = grams(model, 1e-20 * values(9, 3)).values()
    torch.testing.assert_close(gram[0, 0], torch.eye(3))


class OneByOne(nn.Module):
    """Convolves images one at a time, without an axis for samples."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return torch.stack([self.conv(one) for one in x])


def test_an_axis_for_samples_is_not_needed():
    model, samples = seeded(OneByOne()), scenes(4)
    alone = nn.Sequential(copy.deepcopy(model.conv))
    units = ompq.trace(alone, samples).units
    (gram,) = input_grams(alone, units, Samples.of(samples), batch_size=8).values()
    unit = replace(units[0], name="conv", parameter="conv.weight")
    found = input_grams(model, [unit], Samples.of(samples), batch_size=8)
    torch.testing.assert_close(found["conv"], gram)


def test_the_network_is_left_as_it_was_and_batches_are_told():
    model, samples = seeded(TinyMobileNet()).train(), scenes(20)
    before = copy.deepcopy(model.state_dict())
    told = []
    grams(model, samples, report=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def correlated(channels, width, seed=0):
    """Moments of inputs that vary together, as neighbours in an image do."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(channels, width, 3 * width, generator=generator)
    inputs = inputs + 2 * torch.randn(channels, 1, 3 * width, generator=generator)
    return inputs @ inputs.mT / (3 * width)


def output_error(error, gram):
    """The squared error of each channel's output: each pair of weights in a loop."""
    width, error = range(error.shape[1]), error.double()
    return sum(error[:, j] * gram[j, k] * error[:, k] for j in width for k in width)


def with_ridge(gram):
    return gram + error_feedback.PLAIN_RIDGE * gram.diagonal().mean() * torch.eye(
        len(gram)
    )


def fixed_grid(channels, bits):
    scale = torch.linspace(1.0, 2.0, channels)[:, None] / 2 ** (bits - 1)
    return Grid(scale, torch.full_like(scale, 2 ** (bits - 1) - 0.5), bits)


def codes_of(weight, grid, gram, **more):
    """Round rows of weights with one matrix for all channels; return the codes."""
    new, stored = round_with_feedback(weight, grid, gram[None, None], **more)
    return new.quantize(stored)


def test_the_best_codes_of_few_weights_are_nearly_found():
    weight, gram, grid = values(30, 5), correlated(1, 5)[0], fixed_grid(30, 2)
    every = torch.tensor([*itertools.product(range(4), repeat=5)])
    tried = grid.scale[..., None] * (every.T - 1.5) - weight[..., None]  # (30, 5, 1024)
    ridged = with_ridge(gram)
    least = torch.einsum("ckt,kl,clt->ct", tried, ridged, tried).amin(1)
    found = grid.dequantize(codes_of(weight, grid, gram, refit=False)) - weight
    nearest = grid.fake(weight) - weight
    ratio = output_error(found, ridged) / least
    assert ratio.min() > 1 - 1e-5
    assert ratio.mean() < 1.3
    assert (output_error(nearest, ridged) / least).mean() > 3


def test_no_change_of_one_code_would_lower_the_error():
    weight, gram, grid = values(20, 30), correlated(1, 30)[0], fixed_grid(20, 3)
    codes = codes_of(weight, grid, gram, refit=False)
    ridged, error = with_ridge(gram), grid.dequantize(codes) - weight
    least = output_error(error, ridged)
    better = []
    for column, step in itertools.product(range(30), (-1, 1)):
        changed = error.clone()
        changed[:, column] += step * grid.scale[:, 0]
        allowed = (codes[:, column] + step >= 0) & (codes[:, column] + step <= 7)
        better.append(allowed & (output_error(changed, ridged) < 0.999 * least))
    # A few sweeps leave little that one more could improve.
    assert torch.stack(better).sum() < 0.01 * codes.numel()


def gptq(weight, grid, gram):
    """Round column by column, and move the weights after it (Frantar et al., 2022)."""
    weight, inverse = weight.double().clone(), np.linalg.inv(gram.double().numpy())
    codes = []
    for _ in range(weight.shape[1]):
        code = (weight[:, :1] / grid.scale + grid.zero_point).round()
        codes.append(code.clamp(0, grid.qmax))
        error = weight[:, :1] - (codes[-1] - grid.zero_point) * grid.scale
        row = torch.from_numpy(inverse[0] / inverse[0, 0])
        weight = (weight - error * row)[:, 1:]
        # What is left of the inverse is that of the matrix without its first weight.
        inverse = inverse - np.outer(inverse[:, 0], inverse[0]) / inverse[0, 0]
        inverse = inverse[1:, 1:]
    return torch.cat(codes, 1)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_first_sweep_is_that_of_gptq(bits, monkeypatch):
    monkeypatch.setattr(error_feedback, "_SWEEPS", 0)
    monkeypatch.setattr(error_feedback, "_BLOCK", 4)
    weight, gram, grid = values(16, 11), correlated(1, 11)[0], fixed_grid(16, bits)
    found = codes_of(weight, grid, gram, refit=False)
    assert torch.equal(found.double(), gptq(weight, grid, with_ridge(gram)))


def test_groups_and_parts_are_rounded_on_their_own(monkeypatch):
    weight, grams = values(6, 5, 1, 2), correlated(4, 5).view(2, 2, 5, 5)
    grid = search_weight(weight, 3)
    monkeypatch.setattr(error_feedback, "_PARTS", (5,))
    _, stored = round_with_feedback(weight, grid, grams, refit=False)
    rows = stored.view(6, 10)
    for group, part in itertools.product(range(2), repeat=2):
        some = slice(3 * group, 3 * group + 3), slice(5 * part, 5 * part + 5)
        own = replace(
            grid,
            scale=grid.scale.view(6, 1)[some[0]],
            zero_point=grid.zero_point.view(6, 1)[some[0]],
        )
        alone = weight.view(6, 10)[some]
        gram = grams[group, part][None, None]
        _, expected = round_with_feedback(alone, own, gram, refit=False)
        torch.testing.assert_close(rows[some], expected)


def test_the_last_part_may_have_fewer_weights(monkeypatch):
    monkeypatch.setattr(error_feedback, "_PARTS", (4,))
    model, samples = seeded(nn.Sequential(nn.Linear(11, 7))), values(40, 11)
    (gram,) = grams(model, samples).values()
    weight = model[0].weight.detach()
    grid, stored = round_with_feedback(
        weight, search_weight(weight, 3), gram, refit=True
    )
    assert stored.shape == weight.shape
    assert (stored - weight).abs().max() < 2 * grid.scale.max()


@pytest.mark.parametrize("sizes", [(12, 20), (8, 3, 2, 2)])
def test_scales_fit_the_codes_by_least_squares(sizes):
    weight = values(*sizes)
    weight[3] = 0  # a channel that is pruned keeps its scale
    rows = weight.flatten(1)
    gram = correlated(1, rows.shape[1])[0]
    before = search_weight(weight, 3)
    grid, stored = round_with_feedback(weight, before, gram[None, None], refit=True)
    steps = (grid.quantize(stored) - grid.zero_point).flatten(1).double()
    ridged = with_ridge(gram).double()
    fitted = ((steps @ ridged) * rows).sum(1) / ((steps @ ridged) * steps).sum(1)
    expected = torch.where(rows.any(1), fitted, before.scale.flatten())
    torch.testing.assert_close(grid.scale.flatten().double(), expected.double())
    assert grid.scale.shape == before.scale.shape
    assert torch.equal(grid.zero_point, before.zero_point)


def test_weights_stay_where_they_round_to_the_codes_already():
    weight, grid = values(9, 6), fixed_grid(9, 3)
    gram = torch.eye(6)[None, None]  # independent inputs owe each other nothing
    same, stored = round_with_feedback(weight, grid, gram, refit=False)
    inside = (weight / grid.scale + grid.zero_point).clamp(-0.49, 7.49)
    assert same is grid
    near = (inside - inside.round()).abs() < 0.489
    expected = (inside - grid.zero_point) * grid.scale
    torch.testing.assert_close(stored[near], expected[near])
    assert torch.equal(grid.quantize(stored), grid.quantize(weight))


def rounded(model, samples, bits, output_error, **more):
    allocation = uniform(model, bits, samples)
    config = ompq.QuantizeConfig(output_error=output_error, **more)
    return ompq.quantize(model, allocation, samples, config)


def test_feedback_lowers_the_divergence_of_a_trained_network():
    network, data = demo_network(), demo_data()
    with torch.no_grad():
        expected = network(data.test_images).log_softmax(1)
        found = [
            rounded(network, data.train_images[:256], 3, on)(
                data.test_images
            ).log_softmax(1)
            for on in (False, True)
        ]
    nearest, fed = ((expected.exp() * (expected - q)).sum(1).mean() for q in found)
    assert fed < 0.7 * nearest


@pytest.mark.parametrize("group_size", [None, 32])
def test_scales_of_groups_stay_multiples_of_one_number(group_size):
    model, samples = seeded(nn.Sequential(nn.Linear(64, 8))), values(128, 64)
    samples[:, 1:] += samples[:, :1]
    nearest, fed = (
        rounded(model, samples, 3, on, group_size=group_size, restore_moments=False)
        for on in (False, True)
    )
    with torch.no_grad():
        error, lower = (
            (q(samples) - model(samples)).square().mean() for q in (nearest, fed)
        )
    assert lower < 0.8 * error
    scales = [q[0].weight_scale for q in (nearest, fed)]
    assert torch.equal(*scales) == bool(group_size)


@pytest.mark.parametrize(
    ("bits", "more", "same"),
    [
        (3, {}, False),
        (3, {"weight_power": 2.4}, True),
        (3, {"weight_range": "minmax"}, True),
        (3, {"weight_range": "shrink"}, True),
        (8, {}, True),
    ],
)
def test_other_ranges_powers_and_fine_grids_round_to_nearest(bits, more, same):
    model, samples = seeded(TinyMobileNet()), scenes(16)
    codes = []
    for on in (False, True):
        layers = quantized_layers(rounded(model, samples, bits, on, **more))
        codes.append(torch.cat([each.codes().flatten() for each in layers.values()]))
    assert torch.equal(*codes) == same


STEP = 0.5  # of coded weights: about 2.5 bits for values of variance 1


def bits_by_frequency(codes):
    """Return -log2 of how often each code occurs, one entry a weight."""
    _, index, counts = np.unique(codes, return_inverse=True, return_counts=True)
    return -np.log2(counts / codes.size)[index].reshape(codes.shape)


def coded_error(codes, weight, gram):
    return output_error((codes.double() - ZERO) * STEP - weight, with_ridge(gram)).sum()


def test_weights_of_independent_inputs_are_coded_as_without_feedback():
    weight = values(200, 7)
    found = coded_with_feedback(weight, STEP, torch.eye(7)[None, None])
    assert found.dtype == torch.uint8
    assert torch.equal(found, cheapest_codes(weight / STEP + ZERO, rounds=6))


def test_feedback_lowers_the_error_of_coded_weights_at_equal_entropy():
    weight, gram = values(400, 12), correlated(1, 12)[0]
    found = coded_with_feedback(weight, STEP, gram[None, None])
    plain = coded_codes(weight, STEP)
    assert coded_error(found, weight, gram) < 0.4 * coded_error(plain, weight, gram)
    bits, plainly = (bits_by_frequency(c.numpy()).mean() for c in (found, plain))
    assert bits < plainly + 0.15


def test_no_other_neighbour_is_cheaper_when_its_bits_are_counted():
    weight, gram = values(60, 12), correlated(1, 12)[0]
    codes = coded_with_feedback(weight, STEP, gram[None, None])
    ridged = with_ridge(gram)
    price = PRICE * STEP**2 * np.diag(np.linalg.cholesky(ridged.flip(0, 1))) ** 2
    of_code = dict(
        zip(
            codes.flatten().tolist(), bits_by_frequency(codes.numpy()).flat, strict=True
        )
    )
    least = output_error((codes.double() - ZERO) * STEP - weight, ridged)
    cheaper = 0
    for column, step in itertools.product(range(12), (-1, 1)):
        changed = codes.double()
        changed[:, column] += step
        error = output_error((changed - ZERO) * STEP - weight, ridged)
        bits = [
            of_code.get(int(new), 99) - of_code[int(old)]
            for new, old in zip(changed[:, column], codes[:, column], strict=True)
        ]
        gain = least - error - price.mean() * torch.tensor(bits)
        cheaper += int((gain > 0.01 * least).sum())
    assert cheaper < 0.02 * codes.numel()


def test_an_error_of_a_part_costs_what_it_costs_the_channel(monkeypatch):
    monkeypatch.setattr(error_feedback, "_PARTS", (4,))
    weight = values(40, 11)
    gram = torch.zeros(1, 3, 4, 4)
    gram[0] = torch.eye(4) * torch.tensor([1.0, 9.0, 4.0])[:, None, None]
    gram[0, 2, 3:] = 0  # the last part has three weights
    found = coded_with_feedback(weight, STEP, gram)
    ridge = torch.tensor([0.03, 0.27, 0.03 * 3])  # of the mean of each diagonal
    cost = (torch.tensor([1.0, 9.0, 4.0]) + ridge).repeat_interleave(4)[:11]
    position = weight / STEP + ZERO
    codes = cheapest_codes(position)
    for _ in range(3):
        prices = PRICE * cost.mean() / cost
        codes = cheapest_neighbours(position, code_bits(codes), prices)
    assert torch.equal(found.float(), codes)


def test_coded_networks_diverge_less_with_feedback_in_as_many_bytes():
    network, data = demo_network(), demo_data()
    units = ompq.trace(network, data.train_images[:2]).units
    choice = Choice(8, 8, 2.5)
    bits = {u.name: choice if can_be_coded(u, choice) else Choice(8, 8) for u in units}
    with torch.no_grad():
        expected = network(data.test_images).log_softmax(1)
    found = []
    for on in (False, True):
        config = ompq.QuantizeConfig(output_error=on)
        made = ompq.quantize(network, Allocation(bits), data.train_images[:256], config)
        for name, layer in quantized_layers(made).items():
            if bits[name].rate:
                limit = coded_bytes(layer.weight.numel(), 2.5)
                assert code_bytes(layer.codes()) <= limit
        with torch.no_grad():
            q = made(data.test_images).log_softmax(1)
        found.append((expected.exp() * (expected - q)).sum(1).mean())
    assert found[1] < 0.7 * found[0]


def test_the_error_of_outputs_sums_groups_and_parts(monkeypatch):
    monkeypatch.setattr(error_feedback, "_PARTS", (4,))
    error, gram = values(6, 11), values(2, 3, 4, 4)
    expected = 0.0
    for channel, row in enumerate(error):
        for part in range(3):
            piece = row[4 * part : 4 * part + 4]  # the last one has three weights
            matrix = gram[channel // 3, part, : len(piece), : len(piece)]
            expected += float(piece @ matrix @ piece)
    found = error_feedback.feedback_error(error.view(6, 11, 1), gram)
    assert found == pytest.approx(expected, 1e-5)


def test_feedback_that_errs_more_is_not_kept(monkeypatch):
    network, data = demo_network(), demo_data()
    bits = {"*": (8, 8), "head": (8, 8, 2.0)}
    made = [
        ompq.quantize(network, bits, data.train_images[:64], QuantizeConfig(**settings))
        for settings in ({}, {"output_error": False})
    ]
    assert not torch.equal(made[0].head.weight, made[1].head.weight)

    def worse(weight, step, *, gram, ridge):
        return coded_codes(weight, 8 * step)

    monkeypatch.setattr(weight_grids, "coded_with_feedback", worse)
    found = ompq.quantize(network, bits, data.train_images[:64])
    assert torch.equal(found.head.weight, made[1].head.weight)


@pytest.mark.cuda
@cuda
def test_cuda_finds_the_same_moments_and_codes():
    model, samples = seeded(TinyMobileNet()), scenes(20)
    here = grams(model, samples)
    there = grams(copy.deepcopy(model).cuda(), samples.cuda())
    assert here.keys() == there.keys()
    for name, gram in here.items():
        assert there[name].is_cuda
        torch.testing.assert_close(there[name].cpu(), gram, rtol=1e-3, atol=1e-4)
    weight, gram, grid = values(64, 30), correlated(1, 30)[0], fixed_grid(64, 3)
    moved = replace(grid, scale=grid.scale.cuda(), zero_point=grid.zero_point.cuda())
    one = codes_of(weight, grid, gram, refit=False)
    other = codes_of(weight.cuda(), moved, gram.cuda(), refit=False)
    assert other.is_cuda
    assert (one != other.cpu()).float().mean() < 0.01


@pytest.mark.cuda
@cuda
def test_offloaded_networks_keep_their_moments_on_the_host():
    model, samples = seeded(TinyMobileNet()), scenes(20)
    expected = grams(model, samples)
    with ompq.device_memory("8MiB"):
        found = grams(model, samples)
    for name, gram in expected.items():
        assert not found[name].is_cuda
        torch.testing.assert_close(found[name], gram, rtol=1e-3, atol=1e-4)
