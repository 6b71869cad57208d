"""Learned levels of LQ-Nets against brute force, and its recipe end to end."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import ompq
from nets import values
from ompq.errors import QuantizationError
from ompq.lab.weight_rules.lq_nets import (
    LearnedLevels,
    fitted_basis,
    level_values,
    nearest_codes,
    signs_of,
)
from ompq.layers import StoredValues, quantized_layers
from training_script import loss, toy

RECIPE = replace(
    ompq.TrainConfig.from_protocol("lq-nets"),
    epochs=4,
    batch_size=8,
    learning_rate=0.05,
    report_steps=1,
)


def levels(basis):
    signs = itertools.product((-1, 1), repeat=len(basis))
    return sorted(sum(s * v for s, v in zip(row, basis, strict=True)) for row in signs)


@pytest.mark.parametrize("bits", [2, 3])
def test_weights_take_the_nearest_sum_of_the_basis(bits):
    rows, basis = values(2, 30), values(2, bits, seed=1).abs()
    found = level_values(nearest_codes(rows, basis), basis)
    for row, own, rounded in zip(rows.tolist(), basis.tolist(), found, strict=True):
        expected = [min(levels(own), key=lambda level: abs(level - w)) for w in row]
        assert rounded.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_basis_is_the_least_squares_one():
    rows, basis = values(2, 50).double(), torch.tensor([[0.4, 0.9], [0.3, 0.6]])
    basis = basis.double()
    codes = nearest_codes(rows, basis)
    found = fitted_basis(rows, codes, basis)
    for row, own, code in zip(rows, found, codes, strict=True):
        signs = signs_of(2, row)[code].numpy()
        expected, *_ = np.linalg.lstsq(signs, row.numpy(), rcond=None)
        assert own.numpy() == pytest.approx(expected, rel=1e-3)


def test_a_step_moves_the_basis_a_tenth_of_the_way():
    _, network, _ = toy(bits=3)
    rule = LearnedLevels(network)
    layer = rule.layers[0]
    with torch.no_grad():
        layer.weight.mul_(1.3)
    before = layer.weight_basis.clone()
    rows = layer.weight.detach().flatten(1)
    fitted = fitted_basis(rows, nearest_codes(rows, before), before)
    rule.update()
    assert torch.allclose(layer.weight_basis, 0.9 * before + 0.1 * fitted)


def test_fitted_levels_round_better_than_uniform_ones():
    _, network, _ = toy(bits=2)
    rows = values(8, 200).double() ** 3
    for layer in quantized_layers(network).values():
        layer.weight.data = rows.clone()
    rule = LearnedLevels(network)
    learned = (rule.layers[0].rounded_weight() - rows).norm()
    uniform = torch.linspace(-1, 1, 4).double() * rows.abs().amax(1, keepdim=True)
    near = (rows[..., None] - uniform[:, None]).abs().min(-1).values.norm()
    assert learned < 0.7 * near


def test_lq_nets_learns_and_says_that_it_has_no_integers(tmp_path):
    model, network, data = toy(bits=3, activation=8)
    trained = ompq.train(network, data, RECIPE, teacher=model)
    assert trained.state_dict().keys() == network.state_dict().keys()
    assert loss(trained, data) < loss(network, data)
    for layer in quantized_layers(trained).values():
        assert isinstance(layer.rounding, StoredValues)
        assert all(len(row.unique()) <= 8 for row in layer.weight)
        channels = len(layer.weight)
        codes = -(-layer.weight.numel() * 3 // 8)
        assert layer.rounding.bytes == codes + 4 * 3 * channels + 4 * channels
    words = "LQ-Nets leaves weights on no uniform grid"
    with pytest.raises(QuantizationError, match=words):
        ompq.save(trained.float(), tmp_path / "net.ompq.safetensors")
    with pytest.raises(QuantizationError, match=words):
        ompq.finalize(trained.float(), data.inputs.float())


def test_a_stopped_training_resumes_to_the_same_levels(tmp_path):
    model, network, data = toy(bits=3, activation=8)
    config = replace(RECIPE, epochs=2, checkpoint_steps=1)

    def stop(done, _total, _message):
        if done == 6:
            raise KeyboardInterrupt

    whole = ompq.train(network, data, config, teacher=model)
    again = {"teacher": model, "checkpoint": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        ompq.train(network, data, config, progress=stop, **again)
    resumed = ompq.train(network, data, config, **again)
    for one, other in zip(
        whole.state_dict().values(), resumed.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
