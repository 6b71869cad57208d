"""A run of training: checkpoints, the best epoch, progress, its result."""

import sys
import types
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ompq
from nets import TinyResNet, scenes, seeded
from ompq.errors import CheckpointError, MissingExtraError, TrainingError
from ompq.training.run import Run, read_state
from quantized import quantized
from training_script import QUICK, equal, made, toy


@pytest.fixture(scope="module")
def toys():
    return toy()


def test_a_trained_network_is_saved_loaded_and_exported(tmp_path):
    inputs = scenes(32)
    model = seeded(TinyResNet())
    network = quantized(model, inputs, weight=(3, 4, 8), activation=6)
    targets = model(inputs).argmax(1)
    trained = ompq.train(network, [(inputs, targets)], replace(QUICK, epochs=3))
    ompq.save(trained, tmp_path / "net.ompq.safetensors")
    loaded = ompq.load(tmp_path / "net.ompq.safetensors", TinyResNet)
    with torch.no_grad():
        assert torch.equal(loaded(inputs), trained(inputs))
    result = ompq.export_onnx(trained, tmp_path / "net.onnx", inputs)
    assert result.engine.top1 == result.simulated.top1 == 1.0


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


def test_a_finished_run_is_not_run_again(toys, tmp_path):
    _, network, data = toys
    first = ompq.train(network, data, QUICK, checkpoint=tmp_path)
    seen = []
    again = ompq.train(
        network, data, QUICK, checkpoint=tmp_path, progress=lambda *a: seen.append(a)
    )
    assert equal(first, again)
    assert not seen


def test_checkpoints_of_other_runs_and_files_are_refused(toys, tmp_path):
    _, network, data = toys
    ompq.train(network, data, QUICK, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=r"belongs to another run \(other netw"):
        ompq.train(network, data, replace(QUICK, seed=1), checkpoint=tmp_path)
    (tmp_path / "last.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"last.safetensors is no checkpoint: "):
        ompq.train(network, data, QUICK, checkpoint=tmp_path)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "last.safetensors")
    with pytest.raises(CheckpointError, match=r"is no checkpoint of a training"):
        ompq.train(network, data, QUICK, checkpoint=tmp_path)


def test_a_loss_that_is_not_finite_stops_the_run(toys, tmp_path):
    _, network, data = toys
    broken = replace(data, inputs=data.inputs.clone())

    def poison(done, _total, _message):
        if done == 5:
            broken.inputs.fill_(float("nan"))

    words = r"the loss is nan by step 6 of 8; .*last.safetensors holds the network "
    words += r"after step 4. Lower learning_rate=0.05, or set gradient_norm"
    with pytest.raises(TrainingError, match=words):
        ompq.train(network, broken, QUICK, checkpoint=tmp_path, progress=poison)
    assert (tmp_path / "last.safetensors").exists()
    with pytest.raises(TrainingError, match=r"no checkpoint was written"):
        ompq.train(network, broken, QUICK)


def test_broken_weights_are_never_written(toys, tmp_path, monkeypatch):
    _, network, data = toys
    move = Run._move

    def broken(run):
        move(run)
        if run.step == 7:
            run.model.stem.weight.data.fill_(float("inf"))

    monkeypatch.setattr(Run, "_move", broken)
    words = r"stem.weight are not finite after step 8; .*after step 4"
    with pytest.raises(TrainingError, match=words):
        ompq.train(network, data, QUICK, checkpoint=tmp_path)


def test_the_best_epoch_is_returned(toys, tmp_path, caplog):
    _, network, data = toys
    batches = made(data)
    wild = replace(QUICK, learning_rate=1e3, gradient_norm=1.0)
    kept = ompq.train(network, data, wild, validation=batches, checkpoint=tmp_path)
    assert equal(kept, network)  # nothing was better than the start
    top1 = ompq.evaluate(network, batches).top1
    told = f"no epoch does better on the validation data than the start, {top1:.2%}"
    assert told.replace("%", " %") in caplog.text
    caplog.clear()
    last = ompq.train(network, data, replace(wild, keep="last"), validation=batches)
    assert not equal(last, network)
    # Also when the run is resumed.
    again = ompq.train(network, data, wild, validation=batches, checkpoint=tmp_path)
    assert equal(again, network)
    good = ompq.train(network, data, replace(QUICK, epochs=6), validation=batches)
    assert ompq.evaluate(good, batches).top1 > top1
    assert caplog.text.count("no epoch does better") == 1  # when it was resumed


def test_progress_tells_loss_accuracy_and_speed(toys, tmp_path):
    _, network, data = toys
    seen = []
    ompq.train(
        network,
        data,
        replace(QUICK, report_steps=3),
        validation=made(data),
        checkpoint=tmp_path,
        progress=lambda *told: seen.append(told),
    )
    assert [(done, total) for done, total, _ in seen] == [
        (3, 8),
        (4, 8),
        (6, 8),
        (8, 8),
    ]
    assert seen[-1][2].startswith("epoch 2/2: loss ")
    assert "images/s" in seen[-1][2] and "top-1" in seen[-1][2]
    history = (tmp_path / "history.json").read_text()
    assert history.count('"validation"') == 2


def test_scalars_go_to_tensorboard(toys, monkeypatch, tmp_path):
    _, network, data = toys
    config = replace(QUICK, tensorboard=str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    words = r"tensorboard is not installed. Run: pip install 'ompq\[tensorboard\]'"
    with pytest.raises(MissingExtraError, match=words):
        ompq.train(network, data, config)
    written = []

    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path)

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def close(self):
            written.append("closed")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    ompq.train(network, data, config, validation=made(data))
    assert ("loss", 1) in written and ("rate", 8) in written
    assert ("validation top-1", 8) in written and written[-1] == "closed"


def test_checkpoints_hold_what_a_run_needs(toys, tmp_path):
    _, network, data = toys
    ompq.train(network, data, QUICK, checkpoint=tmp_path)
    from ompq.training.run import run_identity

    found = read_state(tmp_path / "last.safetensors", run_identity(network, 4, QUICK))
    assert found.step == 8 and found.best is None and len(found.history) == 2
    assert found.model.keys() == network.state_dict().keys()
    assert found.momentum.keys() == {name for name, _ in network.named_parameters()}
