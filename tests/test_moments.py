import pytest
import torch
from torch import nn

from ompq.quantization.layers import quantized_layer
from ompq.quantization.moments import Moments, output_moments, restore_moments
from ompq.quantizers.ranges import search_weight


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distances(rows):
    """Return the mean distance of each row's values from their mean."""
    return torch.stack([(row - row.mean()).abs().mean() for row in rows])


def quantized(layer, bits=2):
    with torch.no_grad():
        layer.weight.copy_(values(*layer.weight.shape))
    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    grid = search_weight(layer.weight.detach(), bits, channel_dim=axis).grid
    return quantized_layer(layer, grid).requires_grad_(False)


LAYERS = {
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), (16, 4, 7, 7)),
    "without bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (16, 4, 7, 7)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (16, 4, 7, 7)),
    "linear": (lambda: nn.Linear(5, 7), (64, 5)),
    "tokens": (lambda: nn.Linear(5, 7), (16, 9, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2), (16, 4, 5, 5)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_get_the_moments_and_codes_stay(kind):
    make, shape = LAYERS[kind]
    layer, x = quantized(make()), values(*shape, seed=1) + 0.5
    codes = layer.codes()
    channels = layer(x).shape[-1 if kind in ("linear", "tokens") else 1]
    start = layer(x)
    flat = start.movedim(-1 if kind in ("linear", "tokens") else 1, 0).flatten(1)
    wanted = Moments(
        values(channels, seed=2),
        distances(flat) * torch.linspace(0.6, 1.9, channels),
    )
    restore_moments({"a": layer}, {"a": wanted}, lambda: layer(x))
    out = layer(x).movedim(-1 if kind in ("linear", "tokens") else 1, 0).flatten(1)
    torch.testing.assert_close(out.mean(1), wanted.mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(distances(out), wanted.spread)
    assert torch.equal(layer.codes(), codes)


def test_later_layers_see_the_corrected_ones_before_them():
    layers = nn.Sequential(
        quantized(nn.Linear(5, 7)), nn.ReLU(), quantized(nn.Linear(7, 3))
    )
    x = values(64, 5, seed=1)
    wanted = {
        "0": Moments(values(7, seed=2), torch.ones(7)),
        "2": Moments(values(3, seed=3), torch.ones(3)),
    }
    restore_moments({"0": layers[0], "2": layers[2]}, wanted, lambda: layers(x))
    found = output_moments({"0": layers[0], "2": layers[2]}, lambda: layers(x))
    for name, moments in found.items():
        torch.testing.assert_close(
            moments.mean, wanted[name].mean, atol=1e-5, rtol=1e-4
        )
    inner = layers[1](layers[0](x)) @ layers[2].rounded_weight().T + layers[2].bias
    torch.testing.assert_close(inner.mean(0), wanted["2"].mean, atol=1e-5, rtol=1e-4)


def test_dead_and_exploding_channels_are_not_blown_up():
    layer = quantized(nn.Linear(5, 2))
    with torch.no_grad():
        layer.weight[0] = -1e-9  # rounds to the same code everywhere or nearly
    x = values(64, 5)
    before = layer.weight_scale.clone()
    spread = distances(layer(x).T)
    wanted = Moments(torch.zeros(2), 100 * spread + 1)
    restore_moments({"a": layer}, {"a": wanted}, lambda: layer(x))
    assert (layer.weight_scale <= 2.001 * before).all()


def test_groups_that_share_scales_get_means_only():
    layer = quantized(nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2))
    x, scale = values(16, 4, 5, 5), layer.weight_scale.clone()
    wanted = Moments(values(6, seed=4), torch.ones(6))
    restore_moments({"a": layer}, {"a": wanted}, lambda: layer(x))
    assert torch.equal(layer.weight_scale, scale)
    torch.testing.assert_close(
        layer(x).mean((0, 2, 3)), wanted.mean, atol=1e-5, rtol=1e-4
    )


def test_modules_that_run_twice_are_left_out():
    layer = nn.Linear(3, 3)
    found = output_moments({"a": layer}, lambda: layer(layer(values(4, 3))))
    assert found == {}
