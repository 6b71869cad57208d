"""Grids of weights and activations against brute force."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from ompq import weight_ranges
from ompq.grids import Grid, like_weight
from ompq.weight_ranges import (
    DEFAULT_KIND,
    QuickGrids,
    Rule,
    as_weights,
    channel_rows,
    elements_at_once,
    minmax_weight,
    quick_grids,
    range_grid,
    row_range,
    row_stacks,
    rule_range,
    search_weight,
    shrunk_weight,
    stacked_rows,
    subsample,
    weight_noises,
)
from weight_ranges_cases import activations, cuda, observe

KINDS = ("affine", "midrise", "midtread", "symmetric")
BITS = (2, 3, 4, 5, 6, 8)


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed channels of different sizes and centres, as networks have them."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, generator=generator)
    size = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) + 0.1
    return (normal * normal.abs() + 0.3 * size) * size


def noise_of(weight: torch.Tensor, grid: Grid) -> float:
    return float((weight - grid.fake(weight)).square().sum() / weight.square().sum())


def zeros_of(kind: str, bits: int) -> list[float]:
    qmax = 2**bits - 1
    if bits > 6 and kind != "symmetric":
        return [2 ** (bits - 1)]
    return {
        "affine": [z / 2 for z in range(2 * qmax + 1)],
        "midrise": [qmax / 2],
        "midtread": [2 ** (bits - 1)],
        "symmetric": [2 ** (bits - 1) - 1],
    }[kind]


def least_error(row: np.ndarray, bits: int, kind: str, power: float) -> float:
    """The least error of one channel over every zero and 400 scales of each."""
    qmax = 2**bits - 1 - (kind == "symmetric")
    best = np.inf
    peak = np.abs(row).max()
    for zero_point in zeros_of(kind, bits):
        scales = peak * np.geomspace(0.2 / qmax, 2.2, 400)[:, None]
        codes = np.clip(np.round(row / scales + zero_point), 0, qmax)
        errors = np.abs(scales * (codes - zero_point) - row) ** power
        best = min(best, errors.sum(1).min())
    return best


@pytest.mark.parametrize("power", [2.0, 2.4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_search_equals_brute_force(bits, kind, power):
    weight = weights(10, 40, seed=bits)
    grid = search_weight(weight, bits, kind=kind, power=power)
    errors = (weight - grid.fake(weight)).abs().double().pow(power).sum(1)
    rows = weight.double().numpy()
    least = np.array([least_error(row, bits, kind, power) for row in rows])
    ratio = errors.numpy() / least
    assert ratio.mean() < 1.02
    assert ratio.max() < 1.15


def test_search_at_eight_bits_is_near_brute_force():
    weight = weights(6, 300)
    grid = search_weight(weight, 8)
    errors = (weight - grid.fake(weight)).double().square().sum(1).numpy()
    least = [least_error(row, 8, "affine", 2) for row in weight.double().numpy()]
    assert (errors / least).max() < 1.1


def grams(channels: int, width: int, seed: int = 0) -> torch.Tensor:
    """Inputs that vary together, as neighbours in an image do, channel by channel."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(channels, width, 3 * width, generator=generator)
    inputs = inputs + 2 * torch.randn(channels, 1, 3 * width, generator=generator)
    return inputs @ inputs.transpose(1, 2) / (3 * width)


def output_errors(weight: torch.Tensor, fake: torch.Tensor, gram: torch.Tensor):
    """Errors of outputs, channel by channel: each pair of weights in a loop."""
    error = (fake - weight).double()
    width = range(weight.shape[1])
    pairs = ((j, k) for j in width for k in width)
    return sum(error[..., j] * gram[:, j, k] * error[..., k] for j, k in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 4])
def test_search_with_a_gram_equals_brute_force(bits, kind):
    weight, gram = weights(8, 9, seed=bits), grams(8, 9)
    grid = search_weight(weight, bits, kind=kind, gram=gram)
    errors = output_errors(weight, grid.fake(weight), gram).numpy()
    qmax = 2**bits - 1 - (kind == "symmetric")
    least = np.full(8, np.inf)
    parts = torch.from_numpy(np.geomspace(0.2 / qmax, 2.2, 400)).view(-1, 1, 1)
    scales = parts * weight.abs().amax(1, keepdim=True)  # (400, channels, 1)
    for zero_point in zeros_of(kind, bits):
        codes = (weight / scales + zero_point).round().clamp(0, qmax)
        tried = output_errors(weight, scales * (codes - zero_point), gram)
        least = np.minimum(least, tried.amin(0).numpy())
    ratio = errors / least
    assert ratio.mean() < 1.35  # a jagged function of the range: luck counts
    plain = search_weight(weight, bits, kind=kind).fake(weight)
    assert errors.sum() < 0.9 * output_errors(weight, plain, gram).sum()


def test_a_gram_of_independent_inputs_changes_nothing():
    weight = weights(6, 20)
    plain, same = search_weight(weight, 3), search_weight(weight, 3, gram=torch.eye(20))
    torch.testing.assert_close(same.scale, plain.scale)
    assert torch.equal(same.zero_point, plain.zero_point)


def test_a_gram_may_be_shared_by_all_channels():
    weight, gram = weights(10, 20), grams(1, 20)
    shared = search_weight(weight, 3, gram=gram[0])
    each = search_weight(weight, 3, gram=gram.expand(10, -1, -1))
    torch.testing.assert_close(shared.scale, each.scale)
    assert torch.equal(shared.zero_point, each.zero_point)


@pytest.mark.parametrize("channels", [1, 10])
def test_pieces_do_not_change_the_grid_of_a_gram(channels, monkeypatch):
    weight, gram = weights(10, 60), grams(channels, 60)
    whole = search_weight(weight, 3, gram=gram)
    monkeypatch.setattr(weight_ranges, "elements_at_once", lambda _device: 200)
    pieces = search_weight(weight, 3, gram=gram)
    torch.testing.assert_close(pieces.scale, whole.scale)
    assert torch.equal(pieces.zero_point, whole.zero_point)


@pytest.mark.parametrize("bits", range(2, 9))
def test_no_kind_has_less_noise_than_the_default(bits):
    weight = weights(12, 80)
    noise = {
        kind: noise_of(weight, search_weight(weight, bits, kind=kind)) for kind in KINDS
    }
    assert min(noise.values()) > 0.98 * noise[DEFAULT_KIND]
    if bits > 6:
        del noise["symmetric"]
        assert len(set(noise.values())) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_grids_have_the_zeros_of_their_kind(bits, kind):
    grid = search_weight(weights(5, 20), bits, kind=kind)
    assert grid.bits == bits
    assert grid.narrow == (kind == "symmetric")
    assert set(grid.zero_point.flatten().tolist()) <= set(zeros_of(kind, bits))
    assert (grid.scale > 0).all()
    assert grid.scale.shape == grid.zero_point.shape == (5, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_search_is_never_worse_than_the_whole_range(kind):
    weight = weights(20, 9)
    for bits in (2, 4, 8):
        searched = search_weight(weight, bits, kind=kind).fake(weight)
        rule = Rule.of([bits], kind)
        scale, zero_point = range_grid(*rule_range(*row_range(weight), rule), rule.qmax)
        narrow = int(rule.qmax) < 2**bits - 1
        whole = Grid(scale[0], zero_point[0], bits, narrow).fake(weight)
        errors = [(weight - fake).square().sum(1) for fake in (searched, whole)]
        assert (errors[0] <= errors[1] * 1.0001).all()


def test_a_higher_power_clips_less():
    weight = weights(16, 100)
    square = search_weight(weight, 3)
    higher = search_weight(weight, 3, power=4.0)
    worst = [(weight - f.fake(weight)).abs().amax(1) for f in (square, higher)]
    assert worst[1].mean() < worst[0].mean()
    assert noise_of(weight, higher) > noise_of(weight, square)


def test_channels_may_be_any_dimension():
    weight = weights(6, 4, 3)
    expected = search_weight(weight, 3)
    found = search_weight(weight.transpose(0, 1), 3, channel_dim=1)
    assert found.scale.shape == (1, 6, 1)
    assert torch.equal(found.scale.flatten(), expected.scale.flatten())
    assert torch.equal(found.zero_point.flatten(), expected.zero_point.flatten())
    backwards = search_weight(weight.movedim(0, -1), 3, channel_dim=-1)
    assert torch.equal(backwards.scale.flatten(), expected.scale.flatten())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_channels_of_zeros_stay_zero(bits, kind):
    weight = torch.stack([torch.zeros(9), weights(1, 9)[0]])
    grid = search_weight(weight, bits, kind=kind)
    assert grid.fake(weight)[0].tolist() == [0] * 9
    assert grid.scale[0].item() == 1


@pytest.mark.parametrize("value", [0.3, -0.3, 1e-6])
def test_equal_and_single_weights_are_exact(value):
    for shape in ((2, 9), (2, 1)):
        weight = torch.full(shape, value)
        for bits in (2, 3, 6):
            assert noise_of(weight, search_weight(weight, bits)) < 1e-12
        assert noise_of(weight, search_weight(weight, 8)) < 1e-4


def test_pieces_and_half_precision_do_not_change_the_grid(monkeypatch):
    weight = weights(10, 60).half()
    whole = search_weight(weight, 3)
    monkeypatch.setattr(weight_ranges, "elements_at_once", lambda _device: 3000)
    pieces = search_weight(weight.float(), 3)
    assert torch.equal(whole.scale, pieces.scale)
    assert torch.equal(whole.zero_point, pieces.zero_point)


def test_the_weight_is_left_alone():
    weight = weights(4, 30).requires_grad_()
    before = weight.detach().clone()
    assert not search_weight(weight, 4).scale.requires_grad
    weight_noises(weight, BITS)
    assert torch.equal(weight.detach(), before)


def test_wrong_arguments_are_refused():
    weight = weights(2, 5)
    with pytest.raises(ValueError, match="bits=1 .* integer from 2 to 8"):
        search_weight(weight, 1)
    with pytest.raises(ValueError, match="kind='round' is unknown; use affine,"):
        search_weight(weight, 4, kind="round")
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="weight holds NaN or infinity"):
            search_weight(torch.tensor([[1.0, bad]]), 4)
    with pytest.raises(ValueError, match="is empty"):
        search_weight(torch.empty(2, 0), 4)


def test_powers_below_two_are_refused():
    for power in (1.0, float("nan")):
        with pytest.raises(ValueError, match=r"power=.* must be at least 2"):
            search_weight(weights(2, 5), 4, power=power)


def test_rules_know_whether_the_zero_is_free():
    assert Rule.of([4], "affine").zero_point.isnan()
    assert Rule.of([7], "affine").zero_point.item() == 64
    symmetric = Rule.of([2], "symmetric")
    assert (symmetric.qmax.item(), symmetric.zero_point.item()) == (2, 1)


@pytest.mark.parametrize("power", [2.0, 2.4])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_search_on_some_weights_is_as_good_as_on_all(bits, power, monkeypatch):
    weight = weights(6, 5000)
    weight[0, 17] = 40.0  # outliers that a sample would miss
    weight[1, 4999] = -30.0
    some = search_weight(weight, bits, power=power).fake(weight)
    monkeypatch.setattr(weight_ranges, "_SEARCHED", 5000)
    every = search_weight(weight, bits, power=power).fake(weight)
    errors = [(fake - weight).abs().pow(power).sum(1) for fake in (some, every)]
    assert (errors[0] < 1.04 * errors[1]).all()


def test_wide_channels_are_read_whole_only_a_few_times(monkeypatch):
    weight, read = weights(4, 20_000), []
    best_of = weight_ranges._best_of

    def counted(best, rows, rule, measure, candidates):
        read.append(rows.shape[1] * len(candidates[0]))
        return best_of(best, rows, rule, measure, candidates)

    monkeypatch.setattr(weight_ranges, "_best_of", counted)
    search_weight(weight, 4)
    assert sum(read) < 12 * 20_000  # 178 with every candidate on every weight


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_cuda_finds_grids_as_good(bits):
    weight = weights(48, 16, 3, 3)
    here, there = search_weight(weight, bits), search_weight(weight.cuda(), bits)
    assert there.scale.is_cuda
    noise = noise_of(weight.cuda(), there)
    assert noise == pytest.approx(noise_of(weight, here), rel=2e-3)
    same = torch.isclose(there.scale.cpu(), here.scale, rtol=1e-4)
    assert same.float().mean() > 0.9


def test_rows_are_channels_whatever_their_dimension():
    weight = torch.arange(24.0).reshape(2, 3, 4)
    assert channel_rows(weight, 0)[1].tolist() == list(range(12, 24))
    assert channel_rows(weight, 1)[2].tolist() == [8, 9, 10, 11, 20, 21, 22, 23]
    assert channel_rows(weight, -1)[0].tolist() == [0, 4, 8, 12, 16, 20]
    assert channel_rows(torch.arange(3).half(), 0).dtype == torch.float32
    assert channel_rows(torch.arange(3), 0).shape == (3, 1)


def test_an_empty_weight_is_refused():
    with pytest.raises(ValueError, match=r"weight of shape \(0, 3\) is empty"):
        channel_rows(torch.empty(0, 3), 0)


def test_ranges_contain_zero():
    low, high = row_range(torch.tensor([[1.0, 2.0], [-3.0, -1.0], [-1.0, 4.0]]))
    assert low.tolist() == [[0], [-3], [-1]]
    assert high.tolist() == [[2], [0], [4]]


@pytest.mark.parametrize(("kind", "top"), [("midrise", 3), ("symmetric", 2)])
def test_a_range_has_the_zero_of_its_rule(kind, top):
    low, high = torch.tensor([[-1.0], [-6.0]]), torch.tensor([[4.0], [1.0]])
    scale, found = range_grid(
        *rule_range(low, high, Rule.of([2], kind)), torch.tensor(top)
    )
    zero_point = top / 2
    assert found.flatten().tolist() == [zero_point, zero_point]
    # The least scale whose first and last levels reach both ends.
    for i in range(2):
        needed = max(high[i].item() / (top - zero_point), -low[i].item() / zero_point)
        assert scale[0, i].item() == pytest.approx(needed)
    free = rule_range(low, high, Rule.of([2], "affine"))
    assert torch.equal(free[0][0], low)
    assert torch.equal(free[1][0], high)


def test_thinning_visits_every_phase_of_a_kernel():
    # 4608 = 512 inputs x 9 taps: every ninth weight would be one tap only.
    rows = torch.arange(4608.0)[None]
    kept = subsample(rows, 512)[0]
    assert 500 <= len(kept) <= 512
    taps = torch.bincount(kept.long() % 9, minlength=9)
    assert taps.min() >= 0.9 * len(kept) / 9
    assert (kept.diff() > 0).all()
    assert torch.equal(subsample(rows, 4608), rows)


def test_work_is_cut_into_pieces_on_every_device():
    assert elements_at_once(torch.device("cpu")) == 2**18
    assert elements_at_once(torch.device("cuda")) > 2**18


def plain_weights(*shape: int, tail: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Gaussian (tail 1) or heavier channels of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, generator=generator)
    size = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) + 0.1
    return normal.sign() * normal.abs() ** tail * size


@pytest.mark.parametrize("tail", [1.0, 1.3])
@pytest.mark.parametrize("shape", [(16, 150), (64, 48, 3, 3), (12, 200, 3, 3)])
def test_noise_is_within_percents_of_the_search(shape, tail):
    weight = plain_weights(*shape, tail=tail)
    some = (2, 3, 5, 8)
    for bits, found in zip(some, weight_noises(weight, some), strict=True):
        full = noise_of(weight, search_weight(weight, bits))
        assert found == pytest.approx(full, rel=0.12)


def test_noise_of_depthwise_channels_is_near_the_search():
    weight = plain_weights(100, 1, 3, 3)
    noise = weight_noises(weight, BITS)
    # With nine weights a search finds lucky grids, and more of them at more bits.
    for bits, found in zip(BITS, noise, strict=True):
        full = noise_of(weight, search_weight(weight, bits))
        assert 0.95 * full < found < (1.2 if bits < 5 else 1.6) * full


def test_gaussian_noise_is_what_the_textbook_says():
    # Max 1960: the least noise of a uniform quantizer for a unit Gaussian.
    weight = torch.randn(16, 4000, generator=torch.Generator().manual_seed(0))
    noise = weight_noises(weight, (2, 3, 4))
    assert noise == pytest.approx([0.1188, 0.03744, 0.01154], rel=0.07)


def test_noise_falls_with_every_bit_and_vanishes_for_zeros():
    noise = weight_noises(plain_weights(20, 300), range(2, 9))
    assert all(a > 2 * b for a, b in pairwise(noise))
    for shape in ((3, 9), (3, 300), (3, 9000)):
        assert weight_noises(torch.zeros(shape), BITS) == [0] * len(BITS)
    some = plain_weights(20, 300)
    some[::2] = 0
    alone = weight_noises(some[1::2], BITS)
    assert weight_noises(some, BITS) == pytest.approx(alone, rel=0.05)


def test_equal_and_single_weights_have_little_noise():
    for shape in ((4, 1), (4, 9), (4, 700)):
        assert max(weight_noises(torch.full(shape, 0.7), BITS)) < 0.01


def test_widths_do_not_influence_each_other():
    for shape in ((30, 9), (30, 400), (60, 700)):
        weight = plain_weights(*shape)
        together = weight_noises(weight, BITS)
        alone = [weight_noises(weight, [bits])[0] for bits in BITS]
        assert together == pytest.approx(alone, rel=1e-5)
        assert weight_noises(weight, []) == []


def test_size_and_order_of_channels_do_not_matter(monkeypatch):
    weight = plain_weights(40, 30, 5)
    noise = weight_noises(weight, BITS)
    assert weight_noises(weight, BITS) == noise
    assert weight_noises(weight * 1e-4, BITS) == pytest.approx(noise, rel=1e-3)
    moved = weight_noises(weight.movedim(0, 2), BITS, channel_dim=2)
    assert moved == pytest.approx(noise, rel=1e-5)
    monkeypatch.setattr(weight_ranges, "elements_at_once", lambda _device: 1000)
    assert weight_noises(weight, BITS) == pytest.approx(noise, rel=1e-5)


def test_noise_of_wrong_arguments_is_refused():
    with pytest.raises(ValueError, match="bits=9 .* integer from 2 to 8"):
        weight_noises(weights(2, 3), [4, 9])
    with pytest.raises(ValueError, match="is empty"):
        weight_noises(torch.empty(0, 3), [4])


def test_noise_of_uneven_channels_is_that_of_the_large_ones():
    """Channels are drawn by their energy: here four of 300 have nearly all of it."""
    weight = torch.rand(300, 60, generator=torch.Generator().manual_seed(0)) * 1e-3
    weight[::75] = plain_weights(4, 60)
    alone = weight_noises(weight[::75], BITS)
    assert weight_noises(weight, BITS) == pytest.approx(alone, rel=0.05)


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("shape", [(64, 9), (64, 64), (64, 2000)])
def test_cuda_gives_the_same_noise(shape):
    weight = plain_weights(*shape)
    there = weight_noises(weight.cuda(), BITS)
    assert there == pytest.approx(weight_noises(weight, BITS), rel=1e-3)


def same(one, other) -> bool:
    fields = ("counts", "exponent", "low", "high")
    return all(torch.equal(getattr(one, f), getattr(other, f)) for f in fields)


def test_batches_in_any_order_give_the_same_knowledge():
    batches = [activations(50, seed=i) * 10.0 ** (i - 3) for i in range(6)]
    whole = observe(torch.cat(batches))
    assert same(observe(*batches), whole)
    assert same(observe(*batches[::-1]), whole)
    assert same(observe(torch.zeros(1), *batches), observe(*batches, torch.zeros(1)))


def test_counts_are_a_histogram():
    x = activations(5000)
    seen = observe(*x.split(700))
    edge = 2.0 ** seen.exponent.item()
    assert x.abs().max() < edge <= 2 * x.abs().max()
    expected, _ = np.histogram(x.double().numpy(), bins=4096, range=(-edge, edge))
    assert seen.counts.tolist() == expected.tolist()
    middles = (np.arange(4096) - 2047.5) * edge / 2048
    assert seen.values.tolist() == pytest.approx(middles.tolist())
    assert (seen.low, seen.high) == (x.min(), x.max())


def test_memory_is_bounded_and_extremes_are_exact():
    x = activations(3, 100, 100, 30)
    x[1, 5, 5, 5], x[2, 7, 7, 7] = 99.5, -77.25
    seen = observe(x, 0.1 * x)
    assert seen.counts.shape == (4096,)
    assert seen.counts.sum() <= 2 * 2**17
    assert (seen.low.item(), seen.high.item()) == (-77.25, 99.5)


@pytest.mark.parametrize("kind", ["affine", "midtread"])
def test_minmax_grids_hold_every_weight(kind):
    weight = weights(5, 7, seed=3)
    weight[4] = 0.0
    grid = minmax_weight(weight, 4, kind=kind)
    for row, scale, zero_point in zip(
        weight.tolist(), grid.scale[:, 0].tolist(), grid.zero_point[:, 0], strict=True
    ):
        low, high = min(*row, 0.0), max(*row, 0.0)
        expected = (high - low) / 15
        if kind == "midtread":  # 8 levels below 0, 7 above
            expected = max(high / 7, -low / 8)
        assert scale == pytest.approx(expected or 1.0, rel=1e-6)
        assert float(zero_point) * 2 == int(zero_point * 2)
    assert (grid.fake(weight) - weight).abs().max() <= 0.76 * grid.scale.max()


@pytest.mark.parametrize("find", [search_weight, minmax_weight, shrunk_weight])
@pytest.mark.parametrize("bits", [3, 8])
def test_groups_have_the_grids_of_weights_of_their_own(find, bits):
    weight = weights(5, 80, seed=3)
    found = find(weight, bits, group_size=32)
    for start in range(0, 80, 32):
        part = weight[:, start : start + 32]
        alone = find(part, bits)
        own = [t[:, start : start + 32] for t in (found.scale, found.zero_point)]
        if part.shape[1] == 32 or find is not search_weight:
            assert torch.equal(own[0], alone.scale.expand_as(part))
            assert torch.equal(own[1], alone.zero_point.expand_as(part))
        lost = (Grid(*own, bits).fake(part) - part).square().sum()
        assert lost <= 1.001 * (alone.fake(part) - part).square().sum()


def quick_noise(grids: QuickGrids) -> torch.Tensor:
    return grids.lost.sum(1) / grids.energy.sum()


def test_noise_of_groups_is_that_of_their_grids():
    weight = weights(9, 100, seed=4)
    bits = (2, 3, 4, 6)
    rows, counts = stacked_rows([channel_rows(weight, 0, 32)], [100])
    grids = quick_grids(rows, bits, counts)
    found = as_weights(grids.errors(rows, slice(None)), weight.shape, 0)
    noise = found.square().sum((1, 2)) / weight.square().sum()
    torch.testing.assert_close(quick_noise(grids), noise, rtol=1e-4, atol=0)
    nearly = weight_noises(weight, bits, group_size=32)
    assert nearly == pytest.approx(noise.tolist(), rel=1e-3)
    assert all(noise < torch.tensor(weight_noises(weight, bits)))
    many = weights(300, 100, seed=5)  # of which some are drawn
    rows, counts = stacked_rows([channel_rows(many, 0, 32)], [100])
    exact = quick_noise(quick_grids(rows, bits, counts)).tolist()
    assert weight_noises(many, bits, group_size=32) == pytest.approx(exact, rel=0.15)


def test_quick_grids_round_as_grids_do():
    weight, bits = weights(5, 3, 4, seed=6), (2, 5, 8)
    rows = channel_rows(weight, 1)
    grids = quick_grids(rows, bits)
    errors = as_weights(grids.errors(rows, slice(1, 3)), weight.shape, 1)
    for column, error in zip((1, 2), errors, strict=True):
        scale, zero_point = (
            like_weight(values[column], weight.shape, 1)
            for values in (grids.scale, grids.zero_point)
        )
        rounded = Grid(scale, zero_point, bits[column]).fake(weight)
        torch.testing.assert_close(weight + error, rounded)
    part = grids.of_rows(slice(1, 3))
    assert torch.equal(
        part.errors(rows[1:3], slice(None)), grids.errors(rows, slice(None))[:, 1:3]
    )
    assert torch.equal(part.energy, rows[1:3].square().sum(1))


@pytest.mark.parametrize("lengths", [(9, 27, 64), (65, 100, 128), (7, 7, 7)])
def test_rows_are_rounded_in_a_stack_as_they_are_alone(lengths):
    several = [weights(6, length, seed=length) for length in lengths]
    rows, counts = stacked_rows(several, lengths)
    if len(set(lengths)) == 1:
        assert counts is None
    else:
        assert counts.sum(1).tolist() == [n for n in lengths for _ in range(6)]
    grids = quick_grids(rows, BITS, counts)
    for at, weight in enumerate(several):
        part = grids.of_rows(slice(6 * at, 6 * at + 6))
        alone = quick_grids(weight, BITS)
        torch.testing.assert_close(part.scale, alone.scale, rtol=1e-4, atol=0)
        assert torch.equal(part.zero_point, alone.zero_point)
        torch.testing.assert_close(part.lost, alone.lost, rtol=1e-4, atol=1e-9)


def test_stacks_hold_weights_of_one_length_or_similar_ones(monkeypatch):
    sizes = [(8, 9), (8, 30), (4, 9), (8, 100), (8, 120), (2, 3000), (2, 3001)]
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert row_stacks(sizes, cpu) == [[0, 2], [1], [3], [4], [5], [6]]
    # A GPU fills rows up where the search tries as many ranges and draws no sample.
    assert row_stacks(sizes, cuda) == [[0, 1, 2], [3, 4], [5], [6]]
    lengths = [1, 64, 65, 256, 257, 1024, 1025]
    stacks = row_stacks([(1, length) for length in lengths], cuda)
    assert stacks == [[0, 1], [2, 3], [4, 5], [6]]
    monkeypatch.setattr(weight_ranges, "elements_at_once", lambda _device: 800)
    assert row_stacks(sizes, cuda) == [[0], [1, 2], [3], [4], [5], [6]]
    assert row_stacks(sizes[:3], cpu) == [[0, 2], [1]]
