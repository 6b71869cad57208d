"""A run of training: its rate, checkpoints, best epoch, progress, processes."""

import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ompq
from ompq.errors import CheckpointError, DataError, MissingExtraError
from ompq.training import training_run
from ompq.training.training_run import Run
from training_script import QUICK, equal, made, state, toy


@pytest.fixture(scope="module")
def toys():
    return toy()


def test_a_graph_of_a_step_needs_a_gpu(toys):
    _, network, data = toys
    words = r"cuda_graph needs one process on a GPU without accumulation, not 1 on cpu"
    with pytest.raises(ValueError, match=words):
        ompq.train(network, data, replace(QUICK, cuda_graph=True))


def test_training_without_accelerate_says_what_to_install(toys, monkeypatch):
    _, network, data = toys
    monkeypatch.setitem(sys.modules, "accelerate", None)
    needed = r"accelerate is not installed. Run: pip install 'ompq\[train\]'"
    with pytest.raises(MissingExtraError, match=needed):
        ompq.train(network, data, QUICK)


@pytest.mark.parametrize("read", [lambda _: [], iter])
def test_validation_that_gives_nothing_is_refused(toys, read):
    _, network, data = toys
    with pytest.raises(
        DataError, match=r"validation yielded no images; it is read once b"
    ):
        ompq.train(network, data, QUICK, validation=read(made(data)))


class ScalingEngine:
    """Multiplies the loss before the backward pass, as Accelerate does for fp16."""

    def __init__(self, engine):
        self.engine = engine
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def prepare(self, model, optimizer):
        self.optimizer = optimizer
        return model, self

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip_grad_norm_(self, parameters, longest):
        self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(parameters, longest)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self):
        self.optimizer.zero_grad()


def test_gradients_of_a_scaled_loss_are_cut_to_the_same_length(toys, monkeypatch):
    _, network, data = toys
    config = replace(QUICK, gradient_norm=0.1)
    expected = state(ompq.train(network, data, config))
    make = training_run._accelerator
    monkeypatch.setattr(
        training_run, "_accelerator", lambda *a: ScalingEngine(make(*a))
    )
    found = state(ompq.train(network, data, config))
    for key, value in expected.items():
        assert torch.allclose(value, found[key], rtol=1e-6), key


def test_a_shuffling_loader_gives_the_same_order_when_resumed(toys, tmp_path):
    _, network, data = toys
    inner = TensorDataset(data.inputs, data.targets)
    loader = DataLoader(inner, batch_size=8, shuffle=True)
    config = replace(QUICK, checkpoint_steps=1)

    def stop(done, _total, _message):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ompq.train(network, loader, config, checkpoint=tmp_path, progress=stop)
    resumed = ompq.train(network, loader, config, checkpoint=tmp_path)
    assert equal(resumed, ompq.train(network, loader, config))


def test_sums_survive_another_number_of_processes(toys):
    _, network, data = toys
    run = Run(network, data, QUICK, teacher=None)
    run.gradients.counts.copy_(torch.tensor([1.0, 2.0, 3.0]))
    state = run.state()
    state["counts"] = torch.tensor([[1.0, 2.0, 8.0], [2.0, 3.0, 8.0]]).double()
    run.restore(state, 3)
    assert run.step == 3
    assert run.counts().tolist() == [[3.0, 5.0, 16.0]]


def test_a_loss_of_one_s_own_trains_as_the_default_does(toys, tmp_path):
    _, network, data = toys
    default = ompq.train(network, data, QUICK)

    def loss(output, targets):
        return torch.nn.functional.cross_entropy(output.float(), targets)

    assert equal(ompq.train(network, data, QUICK, loss=loss), default)
    ompq.train(network, data, QUICK, loss=loss, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another"):
        ompq.train(network, data, QUICK, checkpoint=tmp_path)
