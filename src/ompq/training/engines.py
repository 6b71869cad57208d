"""The engine of training: Accelerate, for one process or many machines."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

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

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes: the tensor."""
        return tensor

    def wait_for_everyone(self) -> None:
        """Return at once."""


def make_engine(config: TrainConfig, device: torch.device) -> Any:
    """Return an ``Accelerator``, or :class:`Alone` where one process can do without.

    Args:
        config: Says how many batches make a step.
        device: Where the network is.

    Raises:
        MissingExtraError: Several processes, or gradients of several batches, need
            Accelerate, and it is not installed.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    try:
        from accelerate import Accelerator
    except ImportError as error:
        if several or config.accumulate > 1:
            raise MissingExtraError("accelerate", "train") from error
        return Alone()
    # Networks and batches are placed here: they follow the network that was given.
    return Accelerator(
        gradient_accumulation_steps=config.accumulate,
        device_placement=False,
        # Without it processes on CPUs would not find each other. For one process it
        # would only forbid a later run on another device.
        cpu=several and device.type == "cpu",
    )
