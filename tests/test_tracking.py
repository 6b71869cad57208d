"""Logs, checkpoints and the best epoch of a training run."""

import json
import os
import signal
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.nn import functional as F

import ompq
from ompq.checkpoints import Store
from ompq.errors import CheckpointError, MissingExtraError, TrainingError
from ompq.training.training_run import Run
from training_script import CONFIG, QUICK, equal, made, toy

HERE = Path(__file__).parent


SCRIPT = HERE / "training_script.py"


@pytest.fixture(scope="module")
def toys():
    return toy()


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
    with pytest.raises(
        CheckpointError, match=r"belongs to another training \(another netw"
    ):
        ompq.train(network, data, replace(QUICK, seed=1), checkpoint=tmp_path)
    (tmp_path / "last.safetensors").write_bytes(b"nothing")
    with pytest.raises(
        CheckpointError, match=r"last.safetensors cannot be resumed: it is not"
    ):
        ompq.train(network, data, QUICK, checkpoint=tmp_path)

    save_file({"x": torch.zeros(1)}, tmp_path / "last.safetensors")
    with pytest.raises(
        CheckpointError, match=r"cannot be resumed: it is a safetensors file"
    ):
        ompq.train(network, data, QUICK, checkpoint=tmp_path)


def test_a_loss_that_is_not_finite_stops_the_run(toys, tmp_path):
    _, network, data = toys
    broken = replace(data, inputs=data.inputs.clone())

    def poison(done, _total, _message):
        if done == 5:
            broken.inputs.fill_(float("nan"))

    words = r"the loss is nan at step 6 of 8; .*last.safetensors holds the network "
    words += r"after step 4. Lower learning_rate=0.05, or set gradient_norm"
    with pytest.raises(TrainingError, match=words):
        ompq.train(network, broken, QUICK, checkpoint=tmp_path, progress=poison)
    assert (tmp_path / "last.safetensors").exists()
    with pytest.raises(TrainingError, match=r"no checkpoint was written"):
        ompq.train(network, broken, QUICK)


def test_broken_weights_are_never_written(toys, tmp_path, monkeypatch):
    _, network, data = toys
    update = Run.update

    def broken(run):
        update(run)
        if run.step == 8:
            run.model.stem.weight.data.fill_(float("inf"))

    monkeypatch.setattr(Run, "update", broken)
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
    told = "no epoch does better on the validation data than the start "
    assert f"{told}(validation top-1 {top1:.4g})" in caplog.text
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
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
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


@pytest.mark.filterwarnings("ignore:.*no supported trackers")
def test_scalars_go_to_a_tracker_of_accelerate(toys, monkeypatch):
    _, network, data = toys
    config = replace(QUICK, logger="wandb")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[wandb\]'"):
        ompq.train(network, data, config)
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    told = []
    monkeypatch.setattr(
        Accelerator, "init_trackers", lambda _, name, config: told.append(config)
    )
    monkeypatch.setattr(
        Accelerator, "log", lambda _, one, step: told.append((one, step))
    )
    monkeypatch.setattr(Accelerator, "end_training", lambda _: told.append("closed"))
    ompq.train(network, data, config)
    assert told[0]["logger"] == "wandb" and told[-1] == "closed"
    assert "loss" in told[1][0] and told[1][1] == 1


def test_checkpoints_hold_what_a_run_needs(toys, tmp_path):
    _, network, data = toys
    ompq.train(network, data, QUICK, checkpoint=tmp_path)
    identity = Run(network, data, QUICK, teacher=None).identity(network)
    last = tmp_path / "last.safetensors"
    text, found = Store(last, "training", identity).read()
    assert text["step"] == 8 and text["best"] == "null"
    assert len(json.loads(text["history"])) == 2
    expected = {f"model/{key}" for key in network.state_dict()} | {"counts"}
    expected |= {f"momentum/{name}" for name, _ in network.named_parameters()}
    assert found.keys() == expected


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("stop_at", [2, 3, 5, 7])
@pytest.mark.parametrize("other", [{}, {"checkpoint_steps": 2, "report_steps": 3}])
def test_a_resumed_run_writes_the_same_history_and_files(
    toys, tmp_path, stop_at, other
):
    _, network, data = toys
    config = replace(QUICK, checkpoint_steps=1)

    def stop(done, _total, _message):
        if done == stop_at:
            raise KeyboardInterrupt

    def train(folder, config=config, progress=None):
        return ompq.train(
            network,
            data,
            config,
            validation=made(data),
            checkpoint=tmp_path / folder,
            progress=progress,
        )

    whole = train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("cut", progress=stop)
    # How often it reports and writes may change from one part to the next.
    assert equal(train("cut", replace(config, **other)), whole)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    last = json.loads((tmp_path / "cut" / "history.json").read_text())[-1]
    assert last["top1"] * 32 == round(last["top1"] * 32)  # of all 32 images


def test_a_history_counts_every_image_once(toys, tmp_path):
    _, network, data = toys
    config = replace(QUICK, epochs=1, batch_size=32, report_steps=5)
    ompq.train(network, data, config, checkpoint=tmp_path)
    (entry,) = json.loads((tmp_path / "history.json").read_text())
    with torch.no_grad():
        logits = network(data.inputs)
    assert entry["loss"] == pytest.approx(F.cross_entropy(logits, data.targets).item())
    assert entry["top1"] == (logits.argmax(1) == data.targets).double().mean().item()


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_bits(tmp_path):
    paths = [str(Path(ompq.__file__).parent.parent), str(HERE)]
    killed = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "--kill-at", "7"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "shared.safetensors").exists()
    _, network, data = toy()
    seen = []
    resumed = ompq.train(
        network,
        data,
        CONFIG,
        checkpoint=tmp_path / "shared",
        progress=lambda done, *_: seen.append(done),
    )
    assert seen == [7, 8]  # the last checkpoint before the kill was that of step 6
    whole = ompq.train(network, data, CONFIG, checkpoint=tmp_path / "whole")
    assert equal(resumed, whole)
    assert files(tmp_path / "shared") == files(tmp_path / "whole")


def test_losses_of_one_name_are_told_apart(toys, tmp_path):
    _, network, data = toys
    made = [
        lambda output, targets: 2 * torch.nn.functional.cross_entropy(output, targets),
        lambda output, targets: 3 * torch.nn.functional.cross_entropy(output, targets),
        torch.nn.CrossEntropyLoss(),
    ]
    ompq.train(network, data, QUICK, loss=made[0], checkpoint=tmp_path)
    for other in made[1:]:
        with pytest.raises(CheckpointError, match="belongs to another training"):
            ompq.train(network, data, QUICK, loss=other, checkpoint=tmp_path)
    smooth = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    ompq.train(network, data, QUICK, loss=made[2], checkpoint=tmp_path / "b")
    with pytest.raises(CheckpointError, match="belongs to another training"):
        ompq.train(network, data, QUICK, loss=smooth, checkpoint=tmp_path / "b")
