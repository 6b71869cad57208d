"""Tensors on disk: a scratch file for what exceeds the memory to work in."""

import os
import tempfile
from pathlib import Path
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

_FIRST = torch.zeros(1, dtype=torch.long)
_LARGEST_HALF = 1 << 15  # what the largest value of a sample becomes in half precision


class ScratchFile:
    """A temporary file without a name: it vanishes with the process, however that ends.

    Freed ranges are used again.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None  # opened when it is first needed
        self._end = 0
        self._free: list[tuple[int, int]] = []  # start and size

    def write(self, tensor: Tensor) -> int:
        """Write a contiguous tensor; return where it starts."""
        start = self._allocate(tensor.nbytes)
        self.rewrite(tensor, start)
        return start

    def rewrite(self, tensor: Tensor, start: int) -> None:
        """Write a contiguous tensor where one of its size was."""
        data = _bytes_of(tensor)
        done = 0
        while done < len(data):  # a call writes 2 GiB at most
            done += os.pwrite(self._file(), data[done:], start + done)

    def read(self, into: Tensor, start: int) -> None:
        """Fill a contiguous tensor with what was written from ``start`` on."""
        data = _bytes_of(into)
        done = 0
        while done < len(data):
            found = os.preadv(self._file(), [data[done:]], start + done)
            if not found:
                raise OSError("the temporary file ended early")
            done += found

    def free(self, start: int, size: int) -> None:
        """Give a range back."""
        self._free.append((start, size))

    def _file(self) -> int:
        if self._descriptor is None:
            self._descriptor, name = tempfile.mkstemp(prefix="ompq-")
            Path(name).unlink()
        return self._descriptor

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _allocate(self, size: int) -> int:
        for at, (start, free) in enumerate(self._free):
            if free >= size:
                self._free[at : at + 1] = (
                    [(start + size, free - size)] if free > size else []
                )
                return start
        start, self._end = self._end, self._end + size
        return start


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


class StoredRows:
    """A tensor (N, ...) in a scratch file, in half precision where it is float.

    Each sample has a scale of its own, so that nothing overflows. It has what is needed
    of a tensor: ``shape``, ``len()`` and :meth:`index_select`.
    """

    def __init__(self, file: ScratchFile, tensor: Tensor) -> None:
        """Store samples."""
        self._file, self._dtype = file, tensor.dtype
        self._stored = torch.half if tensor.is_floating_point() else tensor.dtype
        self.device = torch.device("cpu")
        self.shape = torch.Size([0, *tensor.shape[1:]])
        self._row_bytes = tensor.shape[1:].numel() * self._stored.itemsize
        self._starts: list[int] = []  # where each sample lies in the file
        self._ranges: list[tuple[int, int]] = []  # what is taken: start and size
        self._scales = torch.ones(0)
        self.append(tensor)

    def append(self, tensor: Tensor) -> None:
        """Add samples."""
        if not len(tensor):
            return
        tensor = tensor.detach().cpu()
        scale = torch.ones(len(tensor))
        if self._dtype.is_floating_point:
            rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
            # A power of two, so that it changes no digits.
            largest = rows.abs().amax(1).float().clamp_min(1e-30)
            scale = torch.ldexp(
                torch.ones(()).expand_as(largest), torch.frexp(largest).exponent
            )
            scale = scale / _LARGEST_HALF
            tensor = rows / scale[:, None].to(rows)
        start = self._file.write(tensor.to(self._stored).contiguous())
        self._ranges.append((start, len(tensor) * self._row_bytes))
        self._starts += [start + at * self._row_bytes for at in range(len(tensor))]
        self._scales = torch.cat([self._scales, scale])
        self.shape = torch.Size([len(self._scales), *self.shape[1:]])

    def mul_(self, factor: float) -> None:
        """Multiply all samples, as a tensor does."""
        self._scales *= factor

    def __len__(self) -> int:
        return len(self._scales)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return len(self) * self._row_bytes

    def index_select(self, _axis: int, index: Tensor) -> Tensor:
        """Return the samples with these indices, (len(index), ...)."""
        found = torch.empty((len(index), *self.shape[1:]), dtype=self._stored)
        for row, at in zip(found, index.tolist(), strict=True):
            self._file.read(row, self._starts[at])
        if not self._dtype.is_floating_point:
            return found
        scales = self._scales[index].view(-1, *[1] * (found.dim() - 1))
        return found.to(self._dtype).mul_(scales.to(self._dtype))

    def __del__(self) -> None:
        for start, size in self._ranges:
            self._file.free(start, size)


Rows: TypeAlias = Tensor | StoredRows


class Parked:
    """A tensor whose memory is given up until it is needed again."""

    def __init__(self, file: ScratchFile, tensor: Tensor) -> None:
        """Store a tensor that owns its memory, and free that."""
        self._file, self._tensor = file, ref(tensor)
        self._bytes, self._shape = tensor.nbytes, (1, tensor.numel())
        self._store(tensor)

    @property
    def alive(self) -> bool:
        """Whether anything still refers to the tensor."""
        return self._tensor() is not None

    def park(self) -> None:
        """Free the memory again; the tensor is stored anew if it has changed."""
        tensor = self._tensor()
        if tensor is not None and tensor._version != self._version:
            self._store(tensor)
        elif tensor is not None:
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Read the tensor back."""
        if (tensor := self._tensor()) is not None:
            tensor.untyped_storage().resize_(self._bytes)
            self._flat(tensor).copy_(self._rows.index_select(0, _FIRST))
            self._version = tensor._version

    def _store(self, tensor: Tensor) -> None:
        self._rows = StoredRows(self._file, self._flat(tensor))
        self._version = tensor._version
        tensor.untyped_storage().resize_(0)

    def _flat(self, tensor: Tensor) -> Tensor:
        """Return all of the tensor's memory as one row."""
        return tensor.detach().as_strided(self._shape, (self._shape[1], 1))


def owns_memory(tensor: Tensor) -> bool:
    """Return whether nothing but this tensor's elements lies in its memory."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return whole and tensor.device.type == "cpu" and tensor.is_floating_point()
