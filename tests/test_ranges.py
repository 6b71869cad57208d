import numpy as np
import pytest
import torch

import ompq.ranges
from ompq.ranges import (
    DEFAULT_KIND,
    kind_rule,
    minmax_weight,
    percentile_weight,
    search_weight,
)

KINDS = ("affine", "midrise", "midtread", "symmetric")
FITS = (minmax_weight, percentile_weight, search_weight)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed channels of different sizes and centres, as networks have them."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, generator=generator)
    size = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) + 0.1
    return (normal * normal.abs() + 0.3 * size) * size


def noise_of(weight: torch.Tensor, fake: torch.Tensor) -> float:
    return float((weight - fake).square().sum() / weight.square().sum())


def zeros_of(kind: str, bits: int) -> list[float]:
    qmax = 2**bits - 1
    if bits > 6:
        return [2 ** (bits - 1)]
    return {
        "affine": [z / 2 for z in range(2 * qmax + 1)],
        "midrise": [qmax / 2],
        "midtread": [2 ** (bits - 1)],
        "symmetric": [2 ** (bits - 1) - 1],
    }[kind]


def least_error(row: np.ndarray, bits: int, kind: str, power: float) -> float:
    """The least error of one channel over every zero and 400 scales of each."""
    qmax = 2**bits - 1 - (kind == "symmetric" and bits <= 6)
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
    fit = search_weight(weight, bits, kind=kind, power=power)
    errors = (weight - fit.grid.fake(weight)).abs().double().pow(power).sum(1)
    rows = weight.double().numpy()
    least = np.array([least_error(row, bits, kind, power) for row in rows])
    ratio = errors.numpy() / least
    assert ratio.mean() < 1.02
    assert ratio.max() < 1.15


def test_search_at_eight_bits_is_near_brute_force():
    weight = weights(6, 300)
    fit = search_weight(weight, 8)
    errors = (weight - fit.grid.fake(weight)).double().square().sum(1).numpy()
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
    return sum(error[:, j] * gram[:, j, k] * error[:, k] for j, k in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 4])
def test_search_with_a_gram_equals_brute_force(bits, kind):
    weight, gram = weights(8, 9, seed=bits), grams(8, 9)
    fit = search_weight(weight, bits, kind=kind, gram=gram)
    errors = output_errors(weight, fit.grid.fake(weight), gram).numpy()
    qmax = 2**bits - 1 - (kind == "symmetric" and bits <= 6)
    least = np.full(8, np.inf)
    for zero_point in zeros_of(kind, bits):
        for part in np.geomspace(0.2 / qmax, 2.2, 400):
            scale = part * weight.abs().amax(1, keepdim=True)
            codes = (weight / scale + zero_point).round().clamp(0, qmax)
            fake = scale * (codes - zero_point)
            least = np.minimum(least, output_errors(weight, fake, gram).numpy())
    ratio = errors / least
    assert ratio.mean() < 1.35  # a jagged function of the range: luck counts
    plain = search_weight(weight, bits, kind=kind).grid.fake(weight)
    assert errors.sum() < 0.9 * output_errors(weight, plain, gram).sum()


def test_a_gram_of_independent_inputs_changes_nothing():
    weight = weights(6, 20)
    plain, same = search_weight(weight, 3), search_weight(weight, 3, gram=torch.eye(20))
    torch.testing.assert_close(same.grid.scale, plain.grid.scale)
    assert torch.equal(same.grid.zero_point, plain.grid.zero_point)


def test_a_gram_may_be_shared_by_all_channels():
    weight, gram = weights(10, 20), grams(1, 20)
    shared = search_weight(weight, 3, gram=gram[0]).grid
    each = search_weight(weight, 3, gram=gram.expand(10, -1, -1)).grid
    torch.testing.assert_close(shared.scale, each.scale)
    assert torch.equal(shared.zero_point, each.zero_point)


@pytest.mark.parametrize("channels", [1, 10])
def test_pieces_do_not_change_the_grid_of_a_gram(channels, monkeypatch):
    weight, gram = weights(10, 60), grams(channels, 60)
    whole = search_weight(weight, 3, gram=gram).grid
    monkeypatch.setattr(ompq.ranges, "elements_at_once", lambda _device: 200)
    pieces = search_weight(weight, 3, gram=gram).grid
    torch.testing.assert_close(pieces.scale, whole.scale)
    assert torch.equal(pieces.zero_point, whole.zero_point)


@pytest.mark.parametrize("bits", range(2, 9))
def test_no_kind_has_less_noise_than_the_default(bits):
    weight = weights(12, 80)
    noise = {
        kind: float(search_weight(weight, bits, kind=kind).noise) for kind in KINDS
    }
    assert min(noise.values()) > 0.98 * noise[DEFAULT_KIND]
    if bits > 6:
        assert len(set(noise.values())) == 1


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_grids_have_the_zeros_of_their_kind(bits, kind, fit):
    found = fit(weights(5, 20), bits, kind=kind)
    assert found.grid.bits == bits
    assert found.grid.narrow == (kind == "symmetric" and bits <= 6)
    assert set(found.grid.zero_point.flatten().tolist()) <= set(zeros_of(kind, bits))
    assert (found.grid.scale > 0).all()
    assert found.grid.scale.shape == found.grid.zero_point.shape == (5, 1)


@pytest.mark.parametrize("fit", FITS)
def test_noise_is_what_the_grid_loses(fit):
    weight = weights(8, 3, 3, 3)
    found = fit(weight, 3)
    assert float(found.noise) == pytest.approx(
        noise_of(weight, found.grid.fake(weight))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_minmax_clips_nothing(kind):
    weight = weights(16, 50)
    for bits in (2, 5, 8):
        grid = minmax_weight(weight, bits, kind=kind).grid
        error = (weight - grid.fake(weight)).abs()
        # A free zero is rounded to a half, which moves the ends by a quarter step.
        assert (error <= 0.751 * grid.scale).all()
        steps = error / grid.scale
        assert steps.max() <= (0.751 if kind == "affine" and bits <= 6 else 0.5001)


def test_percentile_spans_the_quantiles():
    weight = weights(4, 1000)
    grid = percentile_weight(weight, 8, fraction=0.9).grid
    low = np.quantile(weight.double().numpy(), 0.05, axis=1)
    high = np.quantile(weight.double().numpy(), 0.95, axis=1)
    expected = np.maximum(high / 127, -low / 128)
    assert grid.scale[:, 0].numpy() == pytest.approx(expected, rel=1e-4)
    everything = percentile_weight(weight, 4, fraction=1.0).grid
    assert torch.equal(everything.scale, minmax_weight(weight, 4).grid.scale)


@pytest.mark.parametrize("kind", KINDS)
def test_search_is_never_worse_than_the_whole_range(kind):
    weight = weights(20, 9)
    for bits in (2, 4, 8):
        searched = search_weight(weight, bits, kind=kind).grid.fake(weight)
        whole = minmax_weight(weight, bits, kind=kind).grid.fake(weight)
        errors = [(weight - fake).square().sum(1) for fake in (searched, whole)]
        assert (errors[0] <= errors[1] * 1.0001).all()


def test_a_higher_power_clips_less():
    weight = weights(16, 100)
    square = search_weight(weight, 3)
    higher = search_weight(weight, 3, power=4.0)
    worst = [(weight - f.grid.fake(weight)).abs().amax(1) for f in (square, higher)]
    assert worst[1].mean() < worst[0].mean()
    assert higher.noise > square.noise


@pytest.mark.parametrize("fit", FITS)
def test_channels_may_be_any_dimension(fit):
    weight = weights(6, 4, 3)
    expected = fit(weight, 3)
    found = fit(weight.transpose(0, 1), 3, channel_dim=1)
    assert found.grid.scale.shape == (1, 6, 1)
    assert torch.equal(found.grid.scale.flatten(), expected.grid.scale.flatten())
    assert torch.equal(
        found.grid.zero_point.flatten(), expected.grid.zero_point.flatten()
    )
    backwards = fit(weight.movedim(0, -1), 3, channel_dim=-1)
    assert torch.equal(backwards.grid.scale.flatten(), expected.grid.scale.flatten())


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_channels_of_zeros_stay_zero(bits, kind, fit):
    weight = torch.stack([torch.zeros(9), weights(1, 9)[0]])
    found = fit(weight, bits, kind=kind)
    assert found.grid.fake(weight)[0].tolist() == [0] * 9
    assert found.grid.scale[0].item() == 1
    assert float(fit(torch.zeros(3, 4), bits, kind=kind).noise) == 0


@pytest.mark.parametrize("value", [0.3, -0.3, 1e-6])
def test_equal_and_single_weights_are_exact(value):
    for shape in ((2, 9), (2, 1)):
        weight = torch.full(shape, value)
        for bits in (2, 3, 6):
            assert float(search_weight(weight, bits).noise) < 1e-12
            assert float(minmax_weight(weight, bits).noise) < 1e-12
        assert float(search_weight(weight, 8).noise) < 1e-4


def test_pieces_and_half_precision_do_not_change_the_grid(monkeypatch):
    weight = weights(10, 60).half()
    whole = search_weight(weight, 3)
    monkeypatch.setattr(ompq.ranges, "elements_at_once", lambda _device: 3000)
    pieces = search_weight(weight.float(), 3)
    assert torch.equal(whole.grid.scale, pieces.grid.scale)
    assert torch.equal(whole.grid.zero_point, pieces.grid.zero_point)


def test_the_weight_is_left_alone():
    weight = weights(4, 30).requires_grad_()
    before = weight.detach().clone()
    for fit in FITS:
        assert not fit(weight, 4).grid.scale.requires_grad
    assert torch.equal(weight.detach(), before)


@pytest.mark.parametrize("fit", FITS)
def test_wrong_arguments_are_refused(fit):
    weight = weights(2, 5)
    with pytest.raises(ValueError, match="bits=1 .* integer from 2 to 8"):
        fit(weight, 1)
    with pytest.raises(ValueError, match="kind='round' is unknown: choose from affine"):
        fit(weight, 4, kind="round")
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="weight holds NaN or infinity"):
            fit(torch.tensor([[1.0, bad]]), 4)
    with pytest.raises(ValueError, match="is empty"):
        fit(torch.empty(2, 0), 4)


def test_wrong_fractions_and_powers_are_refused():
    for fraction in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"fraction=.* above 0 and at most 1"):
            percentile_weight(weights(2, 5), 4, fraction=fraction)
    for power in (1.0, float("nan")):
        with pytest.raises(ValueError, match=r"power=.* must be at least 2"):
            search_weight(weights(2, 5), 4, power=power)


def test_rules_know_whether_the_zero_is_free():
    assert kind_rule(4, "affine").free
    assert not kind_rule(7, "affine").free
    assert kind_rule(2, "symmetric")[1:] == (2, 1)


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_cuda_finds_grids_as_good(bits, fit):
    weight = weights(48, 16, 3, 3)
    here, there = fit(weight, bits), fit(weight.cuda(), bits)
    assert there.grid.scale.is_cuda
    assert float(there.noise) == pytest.approx(float(here.noise), rel=2e-3)
    same = torch.isclose(there.grid.scale.cpu(), here.grid.scale, rtol=1e-4)
    assert same.float().mean() > 0.9
