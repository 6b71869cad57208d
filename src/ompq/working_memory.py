"""Host memory: how much a run may work in.

Results never depend on what else the machine is doing: what a run computes follows from
its limit, and the limit from the user, or else from a few fixed sizes.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from ompq.amounts import in_bytes, parse_bytes
from ompq.errors import HostMemoryError

DEFAULT_BYTES = 2 << 30
# What a process takes besides: the interpreter, PyTorch and its kernels.
BASE_BYTES = 600 << 20
_LEAST_BYTES = 256 << 20
_limit = DEFAULT_BYTES


@contextmanager
def host_memory(limit: str | None) -> Iterator[int]:
    """Limit the memory that verbs work in, besides networks and samples.

    Inside the context, calibration uses smaller batches, and reconstruction keeps what
    exceeds the limit in a temporary file. None means 2 GiB or, if the machine has less
    free memory, half of that, or a quarter.

    Raises:
        HostMemoryError: The limit is below 256 MiB, or more than what is free.
    """
    global _limit
    size = _affordable() if limit is None else parse_bytes(limit, "memory")
    if size < _LEAST_BYTES:
        raise HostMemoryError(
            f"memory={in_bytes(size)} is too little to work in; give at least "
            f"{in_bytes(_LEAST_BYTES)}"
        )
    outer, _limit = _limit, size
    try:
        yield size
    finally:
        _limit = outer


def working_bytes() -> int:
    """Return how much memory a verb may work in."""
    return _limit


def _affordable() -> int:
    """Return the default, halved until it fits what is free, but at most twice."""
    size, free = DEFAULT_BYTES, free_bytes()
    while size > DEFAULT_BYTES // 4 and size + BASE_BYTES > free:
        size //= 2
    return size


def check_free(needed: int) -> None:
    """Raise a HostMemoryError if less memory is free than a run needs."""
    if needed > (free := free_bytes()):
        raise HostMemoryError(
            f"this run needs about {in_bytes(needed)} of memory, but {in_bytes(free)} "
            "are free; give fewer samples or a smaller memory limit, or close other "
            "programs"
        )


def release() -> None:
    """Return what was freed to the system.

    The C library keeps what a thread has freed for this thread, and each forward pass
    that can be paused has its own.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    """Return glibc's function, or None with another library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def free_bytes() -> int:
    """Return the free memory of the machine, or of the container if that is less."""
    found = [_meminfo("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * 2**40]
    for folder, limit, used in _CONTAINERS:
        try:
            text = (folder / limit).read_text().strip()
            found.append(int(text) - int((folder / used).read_text()))
        except (OSError, ValueError):  # there is none, or it is "max"
            continue
    return max(min(found), 0)


def resident_bytes() -> int:
    """Return the memory that this process has now, 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


# Where Linux keeps the limit of a container, and what it uses.
_CONTAINERS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
    ),
)


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) << 10 if found else None
