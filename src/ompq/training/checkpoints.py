"""Where a training stands, in files.

Order of images, augmentation and dropout follow from the seed and the number of the
step, so that there is no generator whose state would have to be kept.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ompq.checkpoints import read_checkpoint, write_checkpoint
from ompq.training.settings import TrainConfig

_KIND = "training"
_MODEL, _MOMENTUM = "model/", "momentum/"
LAST, BEST = "last.safetensors", "best.safetensors"
# What may differ between a run and its continuation: it changes no result.
_FREE = {"checkpoint_steps", "report_steps", "tensorboard"}


@dataclass(frozen=True, eq=False)
class State:
    """Where a training stands.

    Attributes:
        step: How many steps are done.
        best: Accuracy of the best epoch so far; None before the first.
        model: The network's ``state_dict``.
        momentum: Parameter's name → momentum.
        history: What was measured, epoch by epoch.
    """

    step: int
    best: float | None
    model: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    history: tuple[Mapping[str, Any], ...] = ()


def run_identity(quantized: nn.Module, length: int, config: TrainConfig) -> str:
    """Return what must be equal for a checkpoint to continue a run.

    Args:
        quantized: The network that training starts from.
        length: Batches an epoch.
        config: The settings.
    """
    settings = {k: v for k, v in asdict(config).items() if k not in _FREE}
    digest = hashlib.sha256(json.dumps([settings, length]).encode())
    for tensor in quantized.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_state(path: Path, state: State, identity: str) -> None:
    """Write a checkpoint, whole or not at all."""
    parts = ((_MODEL, state.model), (_MOMENTUM, state.momentum))
    tensors = {
        prefix + name: tensor
        for prefix, named in parts
        for name, tensor in named.items()
    }
    text = {
        "step": str(state.step),
        "best": json.dumps(state.best),
        "history": json.dumps(state.history),
    }
    write_checkpoint(path, tensors, text, kind=_KIND, identity=identity)


def read_state(path: Path, identity: str) -> State:
    """Read a checkpoint.

    Raises:
        CheckpointError: It is none, or of another run.
    """
    tensors, text = read_checkpoint(path, kind=_KIND, identity=identity)
    return State(
        step=int(text["step"]),
        best=json.loads(text["best"]),
        model=_under(tensors, _MODEL),
        momentum=_under(tensors, _MOMENTUM),
        history=tuple(json.loads(text["history"])),
    )


def momentum_of(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return parameter's name → momentum, for those that have one by now."""
    buffers = {name: optimizer.state.get(p, {}) for name, p in named.items()}
    return {
        name: state["momentum_buffer"]
        for name, state in buffers.items()
        if state.get("momentum_buffer") is not None
    }


def restore_momentum(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    momentum: Mapping[str, Tensor],
) -> None:
    """Give the optimizer the momentum that a checkpoint holds."""
    for name, tensor in momentum.items():
        parameter = named[name]
        buffer = torch.empty_like(parameter).copy_(tensor)
        optimizer.state[parameter]["momentum_buffer"] = buffer


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
