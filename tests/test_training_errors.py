"""What training refuses, and in which words."""

from dataclasses import replace

import pytest
import torch

import ompq
from ompq.errors import DataError, QuantizationError
from training_script import QUICK, equal, made, toy


@pytest.fixture(scope="module")
def toys():
    return toy()


@pytest.mark.parametrize("more", [{"distill": 0.5}, {"batch_norm": "fold-and-train"}])
def test_what_needs_the_float_network_says_so(toys, more):
    _, network, data = toys
    with pytest.raises(ValueError, match=r"need the float network; pass teacher="):
        ompq.train(network, data, replace(QUICK, **more))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epochs": 0}, r"epochs=0 must be at least 1"),
        ({"epochs": 2.5}, r"epochs=2.5 must be a whole number"),
        ({"epochs": True}, r"epochs=True must be a whole number"),
        ({"warmup": -1}, r"warmup=-1 must be at least 0"),
        ({"gradient_norm": float("nan")}, r"gradient_norm=nan must be at least 0"),
        ({"momentum": 2}, r"momentum=2 must be from 0 to 1"),
        ({"weight_decay": "x"}, r"weight_decay='x' must be a number"),
        ({"compile": 1}, r"compile=1 must be true or false"),
        ({"tensorboard": 3}, r"tensorboard=3 must be a folder's name"),
        ({"learning_rate": 0.0}, r"learning_rate=0.0 must be above 0, and finite"),
        ({"distill": 1.5}, r"distill=1.5 must be from 0 to 1"),
        ({"keep": "all"}, r"keep='all' must be one of best, last"),
        ({"activations": "no"}, r"activations='no' must be one of step, clip, fixed"),
    ],
)
def test_wrong_settings_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        ompq.TrainConfig(**wrong)


@pytest.mark.parametrize("targets", [torch.zeros(5), torch.zeros(4).long(), [0] * 5])
def test_targets_that_are_no_classes_are_refused(toys, targets):
    _, network, data = toys
    words = r"targets are .* for 5 inputs; training needs whole numbers of shape \(5,\)"
    with pytest.raises(DataError, match=words):
        ompq.train(network, [(data.inputs[:5], targets)], QUICK)


def test_classes_may_be_whole_numbers_of_any_width(toys):
    _, network, data = toys
    wide, short = made(data), [(inputs, t.int()) for inputs, t in made(data)]
    assert equal(ompq.train(network, short, QUICK), ompq.train(network, wide, QUICK))


@pytest.mark.parametrize("read", [lambda _: [], iter])
def test_validation_that_gives_nothing_is_refused(toys, read):
    _, network, data = toys
    with pytest.raises(
        DataError, match=r"validation gave no images; it is read once b"
    ):
        ompq.train(network, data, QUICK, validation=read(made(data)))


def test_wrong_batches_are_refused(toys):
    model, network, data = toys
    with pytest.raises(TypeError, match=r"batches is generator without a length; tr"):
        ompq.train(network, (one for one in made(data)), QUICK)
    with pytest.raises(DataError, match=r"no step in an epoch: 32 images, fewer than"):
        ompq.train(network, data, replace(QUICK, batch_size=64))
    with pytest.raises(DataError, match=r"no step in an epoch: 0 batches for 1 a step"):
        ompq.train(network, [], QUICK)
    with pytest.raises(DataError, match=r"a batch is Tensor; training needs \(inputs"):
        ompq.train(network, [data.inputs], QUICK)
    with pytest.raises(ValueError, match=r"batch_size=8 cannot be shared evenly by 1 "):
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


def test_a_graph_of_a_step_needs_a_gpu(toys):
    _, network, data = toys
    words = r"cuda_graph needs one process on a GPU without accumulation, not 1 on cpu"
    with pytest.raises(ValueError, match=words):
        ompq.train(network, data, replace(QUICK, cuda_graph=True))
