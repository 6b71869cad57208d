"""Memory that is freed is kept for the next time."""

import ctypes
import os
import sys

# As malloc.h of the GNU C library numbers them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have the C library keep what tensors free, where it is one that can.

    By default it hands every large piece back, and the next layer asks for it anew:
    the system then clears its pages once more, which on a virtual machine takes longer
    than the layer (half of a forward pass of MobileNetV2). The price is a somewhat
    larger process.

    Returns:
        Whether it will; not, if the user has settings of their own.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(
        mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _LARGEST)
    )
