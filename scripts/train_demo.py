"""Trains the network of the demonstration and writes its weights into the package.

Run it from anywhere, with the package installed: ``python scripts/train_demo.py``. It
takes about a minute on one CPU core, and the same seed gives the same weights on the
same machine.
"""

import argparse
import logging
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.files import replacing
from ompq.models.builtin_networks import DEMO_WEIGHTS, DemoData, DemoNetwork, demo_data

EPOCHS = 40
SEED = 0

_LOG = logging.getLogger("train_demo")
_BATCH = 64
_RATE = 0.05
_DECAY = 5e-4


def train(data: DemoData, *, epochs: int = EPOCHS, seed: int = SEED) -> DemoNetwork:
    """Return a trained network, in eval mode; the global RNG is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = DemoNetwork().train()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(
        network.parameters(), _RATE, momentum=0.9, nesterov=True, weight_decay=_DECAY
    )
    steps = len(data.train_targets) // _BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _RATE, total_steps=epochs * steps
    )
    for epoch in range(epochs):
        order = torch.randperm(len(data.train_targets), generator=generator)
        total = 0.0
        for chosen in order[: steps * _BATCH].split(_BATCH):
            images = shifted(data.train_images[chosen], generator)
            loss = F.cross_entropy(
                network(images), data.train_targets[chosen], label_smoothing=0.05
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        _LOG.info("epoch %d of %d: loss %.3f", epoch + 1, epochs, total / steps)
    return network.eval()


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image (N, 1, 8, 8) by up to one pixel, with zeros where it leaves."""
    count, _, height, width = images.shape
    padded = F.pad(images, (1, 1, 1, 1))
    corner = torch.randint(3, (2, count, 1), generator=generator)
    rows = (corner[0] + torch.arange(height))[:, :, None]  # (N, H, 1)
    columns = (corner[1] + torch.arange(width))[:, None, :]  # (N, 1, W)
    return padded[torch.arange(count)[:, None, None], 0, rows, columns][:, None]


def correct_answers(network: nn.Module, images: Tensor, targets: Tensor) -> int:
    """Return how many of the images (N, 1, 8, 8) the network reads correctly."""
    with torch.no_grad():
        return int((network(images).argmax(1) == targets).sum())


def main() -> None:
    """Train, report, and write the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEMO_WEIGHTS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # sums in one order: the same weights on every run
    data = demo_data()
    network = train(data, epochs=options.epochs, seed=options.seed)
    for part in ("train", "test"):
        images, targets = (getattr(data, f"{part}_{k}") for k in ("images", "targets"))
        correct = correct_answers(network, images, targets)
        _LOG.info("%s: %d of %d correct", part, correct, len(targets))
    # Without batch norm's counters, which play no part in the network.
    state = {k: v for k, v in network.state_dict().items() if v.is_floating_point()}
    with replacing(options.output) as temporary:
        save_file(state, temporary)
    _LOG.info("%s: %d bytes", options.output, options.output.stat().st_size)


if __name__ == "__main__":
    main()
