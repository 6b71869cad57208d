"""The engine of training: Accelerate, for one process or many machines."""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ompq.errors import MissingExtraError
from ompq.training.settings import TrainConfig


class Alone:
    """What training needs of an ``Accelerator``, for one process without Accelerate."""

    num_processes = 1
    process_index = 0
    is_main_process = True
    sync_gradients = True

    def prepare(self, *objects: Any) -> Any:
        """Return the objects as they are."""
        return objects

    def accumulate(self, _model: Any) -> AbstractContextManager[None]:
        """Do nothing: every batch is a step."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_grad_norm_(self, parameters: Iterable[Tensor], longest: float) -> Tensor:
        """Cut the gradients to a length; return the one that they had."""
        return nn.utils.clip_grad_norm_(parameters, longest)

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes: the tensor."""
        return tensor

    def wait_for_everyone(self) -> None:
        """Return at once."""


def make_engine(
    config: TrainConfig, device: torch.device, *, unused: bool = False
) -> Any:
    """Return an ``Accelerator``, or :class:`Alone` where one process can do without.

    Args:
        config: Says how many batches make a step.
        device: Where the network is.
        unused: Whether a pass may not reach all parameters: several processes must
            then look for those that get no gradient, or wait for it in vain.

    Raises:
        MissingExtraError: As :func:`check_installed`.
    """
    check_installed(config)
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
    except ImportError:
        return Alone()
    # Networks and batches are placed here: they follow the network that was given.
    return Accelerator(
        gradient_accumulation_steps=config.accumulate,
        device_placement=False,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused)],
        # Without it processes on CPUs would not find each other. For one process it
        # would only forbid a later run on another device.
        cpu=_processes() > 1 and device.type == "cpu",
    )


def check_installed(config: TrainConfig) -> None:
    """Make sure that what the settings need besides PyTorch is there.

    Raises:
        MissingExtraError: Several processes, or gradients of several batches, need
            Accelerate; scalars need TensorBoard.
    """
    wanted = {
        "accelerate": ("train", _processes() > 1 or config.accumulate > 1),
        "torch.utils.tensorboard": ("tensorboard", config.tensorboard is not None),
    }
    for module, (extra, needed) in wanted.items():
        if needed:
            try:
                import_module(module)
            except ImportError as error:
                name = module.rpartition(".")[2]
                raise MissingExtraError(name, extra) from error


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
