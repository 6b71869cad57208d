"""Batches: which are refused, and which targets are classes."""

from dataclasses import replace

import pytest
import torch

import ompq
from ompq.errors import DataError, QuantizationError
from training_script import QUICK, equal, made, toy


@pytest.fixture(scope="module")
def toys():
    return toy()


@pytest.mark.parametrize("targets", [torch.zeros(5), torch.zeros(4).long(), [0] * 5])
def test_targets_that_are_no_classes_are_refused(toys, targets):
    _, network, data = toys
    words = r"targets are .* for 5 inputs; training needs class indices, integ.*\(5,\)"
    with pytest.raises(DataError, match=words):
        ompq.train(network, [(data.inputs[:5], targets)], QUICK)


def test_classes_may_be_whole_numbers_of_any_width(toys):
    _, network, data = toys
    wide, short = made(data), [(inputs, t.int()) for inputs, t in made(data)]
    assert equal(ompq.train(network, short, QUICK), ompq.train(network, wide, QUICK))


def test_wrong_batches_are_refused(toys):
    model, network, data = toys
    with pytest.raises(TypeError, match=r"batches is generator without a length; tr"):
        ompq.train(network, (one for one in made(data)), QUICK)
    with pytest.raises(
        DataError, match=r"no step: 32 images, but batch_size=64; lower it"
    ):
        ompq.train(network, data, replace(QUICK, batch_size=64))
    with pytest.raises(DataError, match=r"an epoch has no step: 0 batches, but a st"):
        ompq.train(network, [], QUICK)
    foreign = [(data.inputs, torch.full((32,), 99))]
    with pytest.raises(DataError, match=r"Target 99 .* 5 outputs: .* indices, 0 to 4"):
        ompq.train(network, foreign, QUICK)
    with pytest.raises(DataError, match=r"a batch is Tensor; training needs \(inputs"):
        ompq.train(network, [data.inputs], QUICK)
    with pytest.raises(ValueError, match=r"batch_size=8 cannot be split evenly over 1"):
        ompq.train(network, data, replace(QUICK, accumulate=3))
    with pytest.raises(QuantizationError, match=r"TinyResNet is not quantized"):
        ompq.train(model, data, QUICK)


def test_an_epoch_that_ends_early_is_an_error(toys):
    _, network, data = toys

    class Short(list):
        def __iter__(self):
            return iter(self[:2])

    with pytest.raises(DataError, match=r"epoch 1 ended after 2 of 8 batches; batch"):
        ompq.train(network, Short(made(data)), QUICK)
