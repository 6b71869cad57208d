"""Offloading: weights stay in host memory and are copied to the device when needed.

Accelerate's hooks replace offloaded weights by placeholders without values. Scores and
grids read the weights between calls, so here the weights stay where they are, and only
the calls of torch functions that read them are given copies on the device.
"""

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

from ompq.amounts import in_bytes, parse_bytes
from ompq.errors import DeviceMemoryError

# Attributes of a tensor that are tensors; the others need no copy.
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}
# Functions that read no values, or must act on the parameter itself.
_METADATA = {
    "size", "dim", "numel", "nelement", "element_size", "stride", "is_floating_point",
    "is_complex", "is_contiguous", "data_ptr", "untyped_storage", "storage_offset",
    "__len__", "__hash__", "__set__", "register_hook", "requires_grad_", "detach_",
}  # fmt: skip
_THREAD = local()  # its ``models`` are the networks offloaded in this thread


class DeviceMemory:
    """A least-recently-used cache of weights on a device.

    Attributes:
        limit_bytes: Maximum size of the copies on the device.
        device: Where networks run.
        peak_bytes: Largest size so far.
    """

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.limit_bytes, self.device = limit_bytes, device
        self.peak_bytes = 0
        # id → (weight, its version, its copy); the most recently used come last.
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._lock = RLock()

    def fetch(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """Return copies on the device, by id; evict others if necessary."""
        with self._lock:
            wanted = {id(tensor): tensor for tensor in tensors}
            needed = sum(tensor.nbytes for tensor in wanted.values())
            self.check(needed)
            others = [key for key in self._copies if key not in wanted]
            used = needed + sum(self._copies[key][2].nbytes for key in others)
            for key in others:
                if used > self.limit_bytes:
                    used -= self._copies.pop(key)[2].nbytes
            for key, tensor in wanted.items():
                found = self._copies.pop(key, None)
                if found is None or found[1] != tensor._version:
                    copy = tensor.detach().to(self.device, copy=True)
                    found = tensor, tensor._version, copy
                self._copies[key] = found
            used = sum(copy.nbytes for _, _, copy in self._copies.values())
            self.peak_bytes = max(self.peak_bytes, used)
            return {key: self._copies[key][2] for key in wanted}

    def check(self, needed: int) -> None:
        """Raise a DeviceMemoryError if the limit is smaller than ``needed`` bytes."""
        if needed > self.limit_bytes:
            raise DeviceMemoryError(
                f"device_memory={in_bytes(self.limit_bytes)} does not hold the "
                f"{in_bytes(needed)} of weights needed at once; raise it"
            )

    def forget(self) -> None:
        """Remove all copies."""
        with self._lock:
            self._copies.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd saves of a tensor: for a copy, the weight and a view."""
        with self._lock:
            address = tensor.untyped_storage().data_ptr()
            for weight, _, copy in self._copies.values():
                if address and copy.untyped_storage().data_ptr() == address:
                    view = tensor.size(), tensor.stride(), tensor.storage_offset()
                    return weight, view
        return tensor

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor that :meth:`pack` was given."""
        if isinstance(saved, Tensor):
            return saved
        weight, view = saved
        return self.fetch([weight])[id(weight)].as_strided(*view)


_memory: DeviceMemory | None = None


@contextmanager
def device_memory(
    limit: str, device: str | torch.device = "cuda"
) -> Iterator[DeviceMemory]:
    """Run networks whose weights are in host memory on a device.

    Inside the context, weights are copied to the device when a call reads them. The
    copies take at most ``limit``, for example ``"8GiB"``; the activations of one batch
    take memory in addition.

    Raises:
        DeviceMemoryError: A single layer exceeds the limit.
    """
    global _memory
    outer = _memory
    _memory = memory = DeviceMemory(
        parse_bytes(limit, "device_memory"), torch.device(device)
    )
    try:
        yield memory
    finally:
        _memory = outer
        memory.forget()


def offloading() -> bool:
    """Return whether weights stay in host memory and visit the device."""
    return _memory is not None


def running_device(stored: torch.device) -> torch.device:
    """Return the device on which a network runs whose weights are on ``stored``."""
    return stored if _memory is None or stored.type != "cpu" else _memory.device


def to_host(model: nn.Module) -> nn.Module:
    """Move a network to host memory if weights are offloaded; return it."""
    return model if _memory is None else model.to("cpu")


@contextmanager
def visiting(*models: nn.Module) -> Iterator[None]:
    """If weights are offloaded, give calls in this thread copies on the device."""
    running: list[nn.Module] = getattr(_THREAD, "models", [])
    memory = _memory
    if memory is None or all(model in running for model in models):
        yield
        return
    _THREAD.models = [*running, *models]
    try:
        with saved_tensors_hooks(memory.pack, memory.unpack), _Fetch(memory, models):
            yield
    finally:
        _THREAD.models = running


@contextmanager
def staying(module: nn.Module) -> Iterator[None]:
    """If weights are offloaded, keep those of a module on the device for the block."""
    memory = _memory
    if memory is None:
        yield
        return
    weights = [*module.parameters(), *module.buffers()]
    memory.forget()
    memory.check(size := sum(each.nbytes for each in weights))
    memory.peak_bytes = max(memory.peak_bytes, size)
    devices = {each.device for each in weights}
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
        if devices == {torch.device("cpu")}:
            module.to("cpu")
            # Moving a module replaces its buffers, but not its parameters. A paused
            # pass identifies offloaded tensors by id, so the old buffers are put back.
            for part, name, buffer in buffers:
                new = part._buffers.get(name)
                if new is not None and new.shape == buffer.shape:
                    part._buffers[name] = buffer.copy_(new)


class _UseCopy(torch.autograd.Function):
    """Returns the copy of a weight; gradients go back to the weight on the host."""

    @staticmethod
    def forward(_context: Any, _weight: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Any:
        return gradient.cpu(), None


class _Fetch(TorchFunctionMode):
    """Replaces offloaded weights among the arguments of calls by copies."""

    def __init__(self, memory: DeviceMemory, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.memory = memory
        every = (chain(model.parameters(), model.buffers()) for model in models)
        tensors = chain.from_iterable(every)
        self.weights = {id(t): t for t in tensors if t.device.type == "cpu"}

    def _is_offloaded(self, tensor: Tensor) -> bool:
        # A layer may get a new parameter while a pass is paused.
        new = isinstance(tensor, nn.Parameter) and tensor.device.type == "cpu"
        return id(tensor) in self.weights or new

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        tensors = (t for t in tree_flatten(given)[0] if isinstance(t, Tensor))
        read = [tensor for tensor in tensors if self._is_offloaded(tensor)]
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
            if read and name == "device":
                return self.memory.device
            read = read if name in _VIEWS else []
        if not read or name in _METADATA:
            return func(*given[0], **given[1])
        copies = self.memory.fetch(read)
        if torch.is_grad_enabled():
            for tensor in read:
                if tensor.requires_grad:
                    copies[id(tensor)] = _UseCopy.apply(tensor, copies[id(tensor)])
        moved_args, moved_kwargs = tree_map_only(
            Tensor, lambda tensor: copies.get(id(tensor), tensor), given
        )
        output = func(*moved_args, **moved_kwargs)
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place and args and id(args[0]) in copies:
            with torch.no_grad():
                args[0].copy_(copies[id(args[0])])
            return args[0]
        return output
