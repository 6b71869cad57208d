import numpy as np
import pytest
import torch

from ompq.activation_ranges import (
    activation_grid,
    fake_quantize_tensor,
    observe_range,
    tensor_noise,
)
from weight_ranges_cases import activations, cuda, observe


def test_minmax_reaches_both_ends():
    seen = observe(torch.tensor([-1.0, 0.3]), torch.tensor([2.0]))
    grid = activation_grid(seen, 8, "minmax")
    assert grid.scale.item() == pytest.approx(3 / 255)
    assert grid.zero_point.item() == round(255 / 3)
    assert grid.scale.shape == grid.zero_point.shape == ()


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_is_a_code_and_zero_itself_is_exact(bits, method):
    for x in (activations(3000), activations(3000).relu(), -activations(3000).relu()):
        grid = activation_grid(observe(x), bits, method)
        zero_point = grid.zero_point.item()
        assert zero_point == round(zero_point)
        assert 0 <= zero_point <= 2**bits - 1
        assert grid.fake(torch.zeros(1)).item() == 0
    assert (
        activation_grid(observe(activations(99).relu()), bits, method).zero_point == 0
    )


def test_percentile_is_that_of_the_values():
    x = activations(20000)
    seen = observe(x)
    grid = activation_grid(seen, 8, "percentile", fraction=0.98)
    low, high = np.quantile(x.double().numpy(), [0.01, 0.99])
    two_bins = 4 * 2.0 ** seen.exponent.item() / 4096
    assert grid.scale.item() * 255 == pytest.approx(high - low, abs=two_bins)
    assert grid.zero_point.item() == pytest.approx(-low / grid.scale.item(), abs=1.5)
    whole = activation_grid(seen, 8, "percentile", fraction=1.0)
    assert whole.scale == activation_grid(seen, 8, "minmax").scale


def least_activation_error(x: np.ndarray, bits: int, power: float) -> float:
    """The least error over every zero and 500 scales of each."""
    qmax = 2**bits - 1
    best = np.inf
    for zero_point in range(qmax + 1) if x.min() < 0 else [0]:
        for scale in np.abs(x).max() * np.geomspace(0.02 / qmax, 1, 500):
            fake = scale * (
                np.clip(np.round(x / scale + zero_point), 0, qmax) - zero_point
            )
            best = min(best, (np.abs(fake - x) ** power).mean())
    return best


@pytest.mark.parametrize("power", [2.0, 2.4])
@pytest.mark.parametrize(("bits", "sign"), [(2, -1), (3, -1), (4, 0), (6, 0)])
def test_activation_search_is_near_brute_force(bits, sign, power):
    x = activations(1500).clamp(min=sign * 99.0)
    seen = observe(*x.split(400))
    grid = activation_grid(seen, bits, power=power)
    error = (grid.fake(x) - x).abs().double().pow(power).mean().item()
    assert error < 1.06 * least_activation_error(x.double().numpy(), bits, power)


def test_activation_noise_is_what_the_grid_loses():
    x = activations(40, 30)
    noise = tensor_noise(x, [2, 4, 8])
    for bits, found in zip((2, 4, 8), noise.tolist(), strict=True):
        error = (x - fake_quantize_tensor(x, bits)).square().sum()
        assert found == pytest.approx((error / x.square().sum()).item(), rel=1e-4)
    assert tensor_noise(torch.zeros(9), [2, 8]).tolist() == [0, 0]


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse"])
def test_constant_tensors_are_held(method):
    assert activation_grid(observe(torch.zeros(5)), 4, method).scale == 1
    for value in (3.0, -3.0, 1e-20):
        x = torch.full((7,), value)
        fake = activation_grid(observe(x), 4, method).fake(x)
        assert fake.tolist() == pytest.approx(x.tolist(), rel=0.04)


def test_wrong_activation_arguments_are_refused():
    seen = observe(activations(9))
    with pytest.raises(ValueError, match="bits=12 .* integer from 2 to 8"):
        activation_grid(seen, 12)
    with pytest.raises(ValueError, match="method='kl' is unknown; use minmax, "):
        activation_grid(seen, 8, "kl")
    with pytest.raises(ValueError, match=r"fraction=2.0 must be above 0 and at most 1"):
        activation_grid(seen, 8, "percentile", fraction=2.0)
    with pytest.raises(ValueError, match=r"activations of shape \(0, 3\) are empty"):
        observe_range(torch.empty(0, 3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_reported(bad):
    seen = observe(activations(9), torch.tensor([1.0, bad]), activations(9))
    with pytest.raises(ValueError, match="activations hold NaN or infinity"):
        activation_grid(seen, 8)


@pytest.mark.cuda
@cuda
def test_cuda_sees_activations_and_does_the_same():
    batches = [activations(1000, 40, seed=i) for i in range(3)]
    here, there = observe(*batches), observe(*(b.cuda() for b in batches))
    assert torch.equal(here.counts, there.counts.cpu())
    for method in ("minmax", "percentile", "mse"):
        one, other = (activation_grid(seen, 4, method) for seen in (here, there))
        assert other.scale.item() == pytest.approx(one.scale.item(), rel=0.02)
