"""Batch norms that are kept beside their layers while these are trained."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import ompq
from nets import TinyMobileNet, TinyResNet, scenes, seeded
from ompq.errors import TrainingError
from ompq.layers import quantized_layers
from ompq.training.batch_norms import Variances, fold_norms, keep_norms
from quantized import quantized
from training_script import QUICK, toy


@pytest.fixture(scope="module")
def toys():
    return toy()


@pytest.mark.parametrize("network", [TinyResNet, TinyMobileNet])
def test_kept_norms_compute_what_they_were_folded_to(network):
    inputs = scenes(16).double()
    model = seeded(network()).double()
    made_ = quantized(model.float(), inputs.float(), weight=4).double()
    model.double()
    copied = copy.deepcopy(made_)
    keep_norms(copied, model)
    with torch.no_grad():
        expected = made_(inputs)
        assert torch.allclose(copied(inputs), expected, rtol=1e-9)
        fold_norms(copied)
        assert torch.allclose(copied(inputs), expected, rtol=1e-9)
    assert copied.state_dict().keys() == made_.state_dict().keys()


def test_a_kept_norm_normalises_by_the_batch_until_it_is_frozen(toys):
    model, network, data = toys
    copied = copy.deepcopy(network)
    keep_norms(copied, model)
    layer = quantized_layers(copied)["stem"]
    norm = layer.norm.norm.train()
    x = data.inputs
    out = layer(x)
    # Each channel then has the mean and deviation that the norm says.
    assert torch.allclose(out.mean((0, 2, 3)), norm.bias)
    spread = out.var((0, 2, 3), unbiased=False).sqrt()
    assert torch.allclose(spread, norm.weight.abs(), rtol=1e-3)


@pytest.mark.parametrize("freeze", [0, 1, 5])
def test_fold_and_train_gives_an_ordinary_quantized_network(toys, freeze):
    model, network, data = toys
    config = replace(QUICK, batch_norm="fold-and-train", freeze_norm_epoch=freeze)
    trained = ompq.train(network, data, config, teacher=model)
    assert trained.state_dict().keys() == network.state_dict().keys()
    with torch.no_grad():
        before = F.cross_entropy(network(data.inputs), data.targets)
        after = F.cross_entropy(trained(data.inputs), data.targets)
    assert after < before


def test_norms_without_parameters_get_them():
    inputs = scenes(16)
    model = TinyResNet()
    model.norm = torch.nn.BatchNorm2d(8, affine=False)
    seeded(model.block1), seeded(model.block2)
    network = quantized(model.eval(), inputs, weight=4)
    copied = copy.deepcopy(network)
    keep_norms(copied, model)
    with torch.no_grad():
        assert torch.allclose(copied(inputs), network(inputs), atol=1e-4)
    assert copied.stem.norm.norm.affine and not model.norm.affine


def test_weights_that_are_rounded_where_they_are_stay():
    inputs = scenes(16)
    model = seeded(Tied())
    network = quantized(model, inputs, weight=4)
    batches = [(inputs, torch.arange(16) % 5)]
    trained = ompq.train(network, batches, replace(QUICK, channels_last=False))
    assert torch.equal(trained.second.weight, network.second.weight)
    assert not torch.equal(trained.head.weight, network.head.weight)


class Tied(torch.nn.Module):
    """Two layers with one weight, and a head."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 3, 3, padding=1)
        self.second = torch.nn.Conv2d(3, 3, 3, padding=1)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(3, 5)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(x.mean((2, 3)))


def test_norms_of_another_network_are_refused(toys):
    _, network, data = toys
    config = replace(QUICK, batch_norm="fold-and-train")
    with pytest.raises(TrainingError, match=r"norm is not a batch norm of 8 channels"):
        ompq.train(network, data, config, teacher=TinyMobileNet())


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
