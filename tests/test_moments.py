import pytest
import torch
from torch import nn

from nets import values
from ompq.layers import quantized_layer
from ompq.quantization.moments import Moments, output_moments, restore_moments
from ompq.weight_ranges import search_weight


def distances(rows):
    """Return the mean distance of each row's values from their mean."""
    return torch.stack([(row - row.mean()).abs().mean() for row in rows])


def quantized(layer, bits=2):
    with torch.no_grad():
        layer.weight.copy_(values(*layer.weight.shape))
    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    grid = search_weight(layer.weight.detach(), bits, channel_dim=axis)
    return quantized_layer(layer, grid).requires_grad_(False)


LAYERS = {
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), (16, 4, 7, 7)),
    "without bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (16, 4, 7, 7)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (16, 4, 7, 7)),
    "linear": (lambda: nn.Linear(5, 7), (64, 5)),
    "tokens": (lambda: nn.Linear(5, 7), (16, 9, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2), (16, 4, 5, 5)),
}


def of_samples(output, axis=1):
    """Return each sample's mean and mean distance from the mean of all, by loops."""
    rows = output.movedim(axis, 1).flatten(2) if output.dim() > 2 else output[..., None]
    centre = rows.mean((0, 2))
    means = torch.stack([row.mean(1) for row in rows])
    distances = [(row - centre[:, None]).abs().mean(1) for row in rows]
    return means, torch.stack(distances)


def agreed(output, mean, spread, axis=1):
    """Return moments of which all samples say the same: no chance is in them."""
    means, spreads = of_samples(output, axis)
    return Moments(means + mean - means.mean(0), spreads + spread - spreads.mean(0))


def shrunk(changes):
    """Return what James and Stein would make of samples' changes."""
    changes = changes.double().numpy()
    mean = changes.mean(0)
    chance = (changes.std(0, ddof=1) ** 2 / len(changes)).sum()
    return mean * max(0.0, 1 - chance / (mean**2).sum())


@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_get_the_moments_and_codes_stay(kind):
    make, shape = LAYERS[kind]
    layer, x = quantized(make()), values(*shape, seed=1) + 0.5
    codes = layer.codes()
    axis = -1 if kind in ("linear", "tokens") else 1
    start = layer(x)
    channels = start.shape[axis]
    mean = values(channels, seed=2)
    flat = start.movedim(axis, 0).flatten(1)
    spread = distances(flat) * torch.linspace(0.6, 1.9, channels)
    wanted = agreed(start, mean, spread, axis)
    restore_moments({"a": layer}, {"a": wanted}, [lambda: layer(x)])
    out = layer(x).movedim(axis, 0).flatten(1)
    torch.testing.assert_close(out.mean(1), mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(distances(out), spread, atol=1e-5, rtol=1e-4)
    assert torch.equal(layer.codes(), codes)


@pytest.mark.parametrize("kind", LAYERS)
def test_moments_are_those_of_each_sample(kind):
    make, shape = LAYERS[kind]
    layer, x = make(), values(*shape)
    found = output_moments({"a": layer}, [lambda: layer(x)])["a"]
    axis = -1 if kind in ("linear", "tokens") else 1
    for one, other in zip(found, of_samples(layer(x), axis), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [0.0, 0.05, 1.0])
def test_what_may_be_chance_is_not_restored(size):
    layer, x = quantized(nn.Linear(5, 40)), values(64, 5, seed=1)
    found = Moments(*of_samples(layer(x)))
    noise = values(64, 40, seed=2) + size * values(40, seed=3)
    wanted = Moments(found.mean + noise, found.spread)
    unit = found.spread.mean(0)
    expected = layer.bias + unit * torch.tensor(shrunk(noise / unit)).float()
    plain = noise.mean(0).norm()
    before, scale = layer.bias.clone(), layer.weight_scale.clone()
    restore_moments({"a": layer}, {"a": wanted}, [lambda: layer(x)])
    torch.testing.assert_close(layer.bias, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(layer.weight_scale, scale)
    # Nearly nothing of what is chance alone, nearly all of what is sure.
    share = (layer.bias - before).norm() / plain
    assert share < 0.5 if size == 0 else share > 0.1
    assert size < 1 or share > 0.95


def test_a_single_sample_is_believed():
    layer, x = quantized(nn.Conv2d(4, 6, 3)), values(1, 4, 7, 7, seed=1)
    wanted = agreed(layer(x), values(6, seed=2), distances(layer(x)[0].flatten(1)))
    restore_moments({"a": layer}, {"a": wanted}, [lambda: layer(x)])
    mean = layer(x).mean((0, 2, 3))
    torch.testing.assert_close(mean, values(6, seed=2), atol=1e-5, rtol=1e-4)


def test_later_layers_see_the_corrected_ones_before_them():
    layers = nn.Sequential(
        quantized(nn.Linear(5, 7)), nn.ReLU(), quantized(nn.Linear(7, 3))
    )
    x = values(64, 5, seed=1)
    out = layers[0](x)
    first = agreed(out, values(7, seed=2), 1.3 * distances(out.T))
    # What the second gets once the first has been corrected, computed by hand.
    inner = layers[2](torch.relu(1.3 * (out - out.mean(0)) + values(7, seed=2)))
    spread = 0.8 * distances(inner.T)
    wanted = {"0": first, "2": agreed(inner, values(3, seed=3), spread)}
    restore_moments({"0": layers[0], "2": layers[2]}, wanted, [lambda: layers(x)])
    found = layers(x)
    torch.testing.assert_close(found.mean(0), values(3, seed=3), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(distances(found.T), spread, atol=1e-5, rtol=1e-4)


def test_dead_and_exploding_channels_are_not_blown_up():
    layer = quantized(nn.Linear(5, 2))
    with torch.no_grad():
        layer.weight[0] = -1e-9  # rounds to the same code everywhere or nearly
    x = values(64, 5)
    before = layer.weight_scale.clone()
    spread = distances(layer(x).T)
    wanted = agreed(layer(x), torch.zeros(2), 100 * spread + 1)
    restore_moments({"a": layer}, {"a": wanted}, [lambda: layer(x)])
    assert (layer.weight_scale <= 2.001 * before).all()


def test_channels_that_hardly_vary_do_not_speak_for_the_others():
    layer, x = quantized(nn.Linear(5, 6)), values(64, 5, seed=1)
    layer.weight[0] = layer.weight_scale[0] = 1e-12
    found = Moments(*of_samples(layer(x)))
    wanted = Moments(found.mean.clone(), found.spread)
    wanted.mean[:, 0] += 1e-6  # nothing to the others, much to this channel
    wanted.mean[:, 1:] += values(64, 5, seed=2)
    before = layer.bias.clone()
    restore_moments({"a": layer}, {"a": wanted}, [lambda: layer(x)])
    plain = values(64, 5, seed=2).mean(0)
    assert (layer.bias - before)[1:].norm() < 0.7 * plain.norm()
    assert layer.bias.isfinite().all()


def test_groups_that_share_scales_get_means_only():
    layer = quantized(nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2))
    x, scale = values(16, 4, 5, 5), layer.weight_scale.clone()
    wanted = agreed(layer(x), values(6, seed=4), torch.ones(6))
    restore_moments({"a": layer}, {"a": wanted}, [lambda: layer(x)])
    assert torch.equal(layer.weight_scale, scale)
    torch.testing.assert_close(
        layer(x).mean((0, 2, 3)), values(6, seed=4), atol=1e-5, rtol=1e-4
    )


def test_modules_that_run_twice_are_left_out():
    layer = nn.Linear(3, 3)
    found = output_moments({"a": layer}, [lambda: layer(layer(values(4, 3)))])
    assert found == {}
