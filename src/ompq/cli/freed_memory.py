"""Freed memory stays with the process, which is faster than asking again."""

import ctypes
import os
import sys

# Constants of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _LARGEST = -1, -3, (1 << 31) - 1
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory, unless the user has tuned it.

    By default it returns every large block to the system, and the next layer requests
    it again. Clearing its pages each time took half of a forward pass of MobileNetV2 on
    a virtual machine. The price is a somewhat larger process.

    Returns:
        Whether the setting was changed.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _USER_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return bool(
        mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _LARGEST)
    )
