"""Weights that stay on the host and visit the device, call by call.

Accelerate's hooks put placeholders without values where the weights were. Scores and
grids read the weights, so here these stay, and the calls that read them get copies.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from threading import RLock, local
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ompq.errors import DeviceMemoryError

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "GB": 10**9, "MB": 10**6}
# Attributes of a tensor that are tensors; the others need no copy.
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}
# Functions that read no values, or concern the parameter itself.
_ABOUT = {
    "size", "dim", "numel", "nelement", "element_size", "stride", "is_floating_point",
    "is_complex", "is_contiguous", "data_ptr", "untyped_storage", "storage_offset",
    "__len__", "__hash__", "register_hook", "requires_grad_", "detach_",
}  # fmt: skip
_RUNNING = local()  # in each thread: the networks whose weights visit


class DeviceMemory:
    """What weights take on a device.

    Attributes:
        limit_bytes: The most.
        device: Where networks run.
        peak_bytes: The most there has been.
    """

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.limit_bytes, self.device = limit_bytes, device
        self.peak_bytes = 0
        # By id: the weight, its version and its copy, the last used at the end.
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._lock = RLock()

    def fetch(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """Return copies on the device, by id; others have to leave for them."""
        with self._lock:
            wanted = {id(tensor): tensor for tensor in tensors}
            self._make_room(wanted)
            for key, tensor in wanted.items():
                found = self._copies.pop(key, None)
                if found is None or found[1] != tensor._version:
                    copy = tensor.detach().to(self.device, copy=True)
                    found = tensor, tensor._version, copy
                self._copies[key] = found
            taken = sum(copy.nbytes for _, _, copy in self._copies.values())
            self.peak_bytes = max(self.peak_bytes, taken)
            return {key: self._copies[key][2] for key in wanted}

    def _make_room(self, wanted: dict[int, Tensor]) -> None:
        needed = sum(tensor.nbytes for tensor in wanted.values())
        self.check(needed)
        others = [key for key in self._copies if key not in wanted]
        taken = needed + sum(self._copies[key][2].nbytes for key in others)
        for key in others:
            if taken <= self.limit_bytes:
                return
            taken -= self._copies.pop(key)[2].nbytes

    def check(self, needed: int) -> None:
        """Refuse what takes more than there may be.

        Raises:
            DeviceMemoryError: It does.
        """
        if needed > self.limit_bytes:
            raise DeviceMemoryError(
                f"device_memory={self.limit_bytes / 2**20:.1f}MiB does not hold the "
                f"{needed / 2**20:.1f} MiB of weights needed at once; give more"
            )

    def forget(self) -> None:
        """Remove all copies."""
        with self._lock:
            self._copies.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return what a backward pass keeps of a tensor: not the copy of a weight."""
        with self._lock:
            place = tensor.untyped_storage().data_ptr()
            for weight, _, copy in self._copies.values():
                if place and copy.untyped_storage().data_ptr() == place:
                    form = tensor.size(), tensor.stride(), tensor.storage_offset()
                    return weight, form
        return tensor

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor that :meth:`pack` was given."""
        if isinstance(kept, Tensor):
            return kept
        weight, form = kept
        return self.fetch([weight])[id(weight)].as_strided(*form)


_memory: DeviceMemory | None = None


@contextmanager
def device_memory(
    limit: str, device: str | torch.device = "cuda"
) -> Iterator[DeviceMemory]:
    """Run networks that are in host memory on a device, with few weights there.

    Verbs under it run networks whose weights are on the CPU on the device. The weights
    visit it, call by call, and take at most ``limit``, for example ``"8GiB"``; what a
    network computes from one batch comes on top.

    Raises:
        DeviceMemoryError: A layer takes more.
    """
    global _memory
    before = _memory
    _memory = made = DeviceMemory(_bytes(limit), torch.device(device))
    try:
        yield made
    finally:
        _memory = before
        made.forget()


def _bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(\w+)\s*", text)
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise ValueError(
            f"device_memory={text} is not an amount of memory; write for example 8GiB"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def running_device(stored: torch.device) -> torch.device:
    """Return where a network runs whose weights are stored on a device."""
    return stored if _memory is None or stored.type != "cpu" else _memory.device


def to_host(model: nn.Module) -> nn.Module:
    """Return a network with all of it on the host, if its weights only visit."""
    return model if _memory is None else model.to("cpu")


@contextmanager
def visiting(*models: nn.Module) -> Iterator[None]:
    """Let weights of networks visit the device in this thread, if that is wanted."""
    running: list[nn.Module] = getattr(_RUNNING, "models", [])
    memory = _memory
    if memory is None or all(model in running for model in models):
        yield
        return
    _RUNNING.models = [*running, *models]
    try:
        with saved_tensors_hooks(memory.pack, memory.unpack), _Visits(memory, models):
            yield
    finally:
        _RUNNING.models = running


@contextmanager
def staying(module: nn.Module) -> Iterator[None]:
    """Keep all weights of a module on the device, if these are to visit it at all."""
    memory = _memory
    if memory is None:
        yield
        return
    weights = [*module.parameters(), *module.buffers()]
    memory.forget()
    memory.check(size := sum(each.nbytes for each in weights))
    memory.peak_bytes = max(memory.peak_bytes, size)
    home = {each.device for each in weights}
    buffers = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        module.to(memory.device)
        yield
    finally:
        if home == {torch.device("cpu")}:
            module.to("cpu")
            # A parameter outlives the move, a buffer does not, and a paused pass knows
            # by identity what visits.
            for part, name, buffer in buffers:
                new = part._buffers.get(name)
                if new is not None and new.shape == buffer.shape:
                    part._buffers[name] = buffer.copy_(new)


class _Copy(torch.autograd.Function):
    """Takes a weight's copy for the weight; gradients go back to the host."""

    @staticmethod
    def forward(_context: Any, _weight: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Any:
        return gradient.cpu(), None


class _Visits(TorchFunctionMode):
    """Gives copies on the device to calls that read weights."""

    def __init__(self, memory: DeviceMemory, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.memory = memory
        every = (chain(model.parameters(), model.buffers()) for model in models)
        held = chain.from_iterable(every)
        self.held = {id(each): each for each in held if each.device.type == "cpu"}

    def _visits(self, tensor: Tensor) -> bool:
        # Learning may give a layer another parameter while a pass is paused.
        new = isinstance(tensor, nn.Parameter) and tensor.device.type == "cpu"
        return id(tensor) in self.held or new

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        every = (t for t in tree_flatten(given)[0] if isinstance(t, Tensor))
        read = [tensor for tensor in every if self._visits(tensor)]
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
            if read and name == "device":
                return self.memory.device
            read = read if name in _VIEWS else []
        if not read or name in _ABOUT:
            return func(*given[0], **given[1])
        copies = self.memory.fetch(read)
        if torch.is_grad_enabled():
            for tensor in read:
                if tensor.requires_grad:
                    copies[id(tensor)] = _Copy.apply(tensor, copies[id(tensor)])
        moved_args, moved = tree_map_only(
            Tensor, lambda tensor: copies.get(id(tensor), tensor), given
        )
        output = func(*moved_args, **moved)
        changed = name.endswith("_") and not name.endswith("__")
        if changed and args and id(args[0]) in copies:
            with torch.no_grad():
                args[0].copy_(copies[id(args[0])])
            return args[0]
        return output
