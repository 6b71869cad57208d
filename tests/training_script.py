"""Trains a toy network in a process of its own, which is killed, or in several.

python training_script.py FOLDER [--kill-at STEP]
"""

import argparse
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import ompq
from nets import TinyResNet, scenes, seeded
from quantized import quantized

CONFIG = ompq.TrainConfig(
    epochs=2,
    batch_size=8,
    learning_rate=0.05,
    checkpoint_steps=3,
    report_steps=1,
    seed=5,
)
QUICK = ompq.TrainConfig(
    epochs=2, batch_size=8, learning_rate=0.05, step_rate=1.0, report_steps=1
)


@dataclass(frozen=True)
class ToyData:
    """Training data in memory, shared out image by image."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self):
        return len(self.targets)

    def epoch(self, number, *, batch_size, seed=0, start=0, shard=(0, 1)):
        generator = torch.Generator().manual_seed(100 * seed + number)
        order = torch.randperm(len(self), generator=generator)
        for at in range(start, len(self) // batch_size):
            picked = order[at * batch_size : (at + 1) * batch_size]
            picked = picked[shard[0] :: shard[1]]
            yield self.inputs[picked], self.targets[picked]


def toy(bits: int = 3, activation: int = 4):
    """Return a float network, its quantized form and labelled data.

    All in float64: a difference in the order of sums must not tip a rounding.
    """
    inputs = scenes(32)
    model = seeded(TinyResNet())
    network = quantized(model, inputs, weight=bits, activation=activation)
    with torch.no_grad():
        logits = model(inputs)
    targets = (logits - logits.mean(0)).argmax(1)
    return model.double(), network.double(), ToyData(inputs.double(), targets)


def made(data: ToyData):
    """Return the data in eight batches of four images."""
    return [(data.inputs[i::8], data.targets[i::8]) for i in range(8)]


def kept():
    """Return the toy with a parameter that no pass reaches, and settings that keep
    norms, frozen from the start so that processes need not share statistics.
    """
    model, network, data = toy()
    network.spare = nn.Parameter(torch.ones(2, 2).double())
    config = replace(CONFIG, batch_norm="fold-and-train", freeze_norm_epoch=0)
    return model, network, data, config


def hawq():
    """Return the toy and HAWQ-V3's settings, but for the rate and the epochs."""
    model, network, data = toy(bits=4, activation=6)
    recipe = ompq.TrainConfig.from_protocol("hawq-v3")
    config = replace(recipe, epochs=2, batch_size=8, learning_rate=0.05, report_steps=1)
    return model, network, data, config


def loss(network: nn.Module, data: ToyData) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(network(data.inputs), data.targets))


def state(network: nn.Module):
    return {key: value.contiguous() for key, value in network.state_dict().items()}


def equal(one, other):
    """Whether two networks hold the same bits."""
    first, second = state(one), state(other)
    return all(torch.equal(first[key], second[key]) for key in second)


def train(folder: Path, kill_at: int | None = None) -> None:
    torch.set_num_threads(1)
    _, network, data = toy()

    def progress(done, _total, _message):
        if done == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    for name, batches in (("shared", data), ("made", made(data))):
        trained = ompq.train(
            network, batches, CONFIG, checkpoint=folder / name, progress=progress
        )
        keep(trained, folder / f"{name}.safetensors")
    for name, (model, network, data, config) in (("kept", kept()), ("hawq", hawq())):
        trained = ompq.train(network, data, config, teacher=model)
        keep(trained, folder / f"{name}.safetensors")


def keep(trained: nn.Module, path: Path) -> None:
    if os.environ.get("RANK", "0") == "0":
        save_file(state(trained), path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()
    train(options.folder, options.kill_at)
