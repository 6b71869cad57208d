"""Norms that are kept while their layers are trained: they must not run away."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import ompq
from ompq.quantization.layers import quantized_layers
from ompq.training.norms import Variances, keep_norms
from training_script import toy


def small_toy(bits):
    """As the toy of the other tests, in single precision, which overflows sooner."""
    model, network, data = toy(bits=bits)
    return model.float(), network.float(), replace(data, inputs=data.inputs.float())


def kept_norms(network):
    layers = quantized_layers(network).values()
    return [layer.norm.norm for layer in layers if layer.norm is not None]


def grown(norms, began, inputs, limit):
    """Return the most by which a variance grows in 100 passes that learn nothing."""
    for _ in range(100):
        inputs()
        limit()
    found = zip(norms, began, strict=True)
    return max((norm.running_var / old).max().item() for norm, old in found)


@torch.no_grad()
def test_variances_run_away_without_limits_and_stay_within_them():
    for limited, least, most in ((False, 1e10, float("inf")), (True, 0, 257)):
        model, network, data = small_toy(2)
        keep_norms(network, model)
        norms, variances = kept_norms(network.train()), Variances(network)
        began = [norm.running_var.clone() for norm in norms]
        for norm in norms:
            norm.weight.mul_(0.1)  # as if a norm had learned to be small

        found = grown(
            norms,
            began,
            lambda net=network, x=data.inputs: net(x),
            variances.limit if limited else lambda: None,
        )
        assert least <= found <= most


@pytest.mark.parametrize("bits", [2, 3])
def test_training_stands_rates_that_make_norms_run_away(bits):
    model, network, data = small_toy(bits)
    config = ompq.TrainConfig(
        epochs=20,
        batch_size=8,
        learning_rate=0.5,
        batch_norm="fold-and-train",
        freeze_norm_epoch=18,
    )
    trained = ompq.train(network, data, config, teacher=model)
    with torch.no_grad():
        before = F.cross_entropy(network(data.inputs), data.targets)
        after = F.cross_entropy(trained(data.inputs), data.targets)
    assert after < before


@torch.no_grad()
def test_a_norm_that_is_almost_nothing_divides_by_nothing_small():
    model, network, data = small_toy(2)
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.weight.fill_(1e-30)
    keep_norms(network, model)
    assert network.train()(data.inputs).isfinite().all()
    assert all(norm.running_var.isfinite().all() for norm in kept_norms(network))
