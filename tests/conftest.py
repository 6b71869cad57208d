"""Settings of the whole suite."""

import gc
import os
from functools import cache

import torch
from torch.onnx._internal import _lazy_import

from ompq.report import page

# Toy networks are too small to share between threads, and the suite runs in processes.
torch.set_num_threads(1)

# Reports solve a hundred budgets for their slider; few tests move it.
page.STEPS = 8

# Set in the processes of pytest-xdist; a test that wants a width says so itself.
os.environ.pop("COLUMNS", None)

# At every export PyTorch asks anew which functions there are, and parses the source of
# hundreds of them: as long as the export of a toy network. They stay the same.
exporter = _lazy_import.onnxscript_apis
exporter.get_torchlib_ops = cache(
    lambda: type(exporter).__getattr__(exporter, "get_torchlib_ops")()
)

# Files that take longest run first: at the end, one of them would keep one process busy
# while the others wait.
LONGEST = (
    *("traced_graph", "onnx_files", "reproduction", "decoders", "file_commands"),
    *("network_commands_training", "network_commands", "parallel", "docs", "demo"),
    *("block_loop", "working_memory", "smallest_network", "rates", "packed_files"),
    *(
        "offload",
        "audits",
        "known_networks",
        "attention",
        "refinement",
        "page",
        "catalogue",
    ),
    *("computation", "plan_commands", "error_feedback", "block_data", "pipeline"),
)


def pytest_collection_modifyitems(items):
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish():
    # What is imported by now stays. Looking through all of it again and again takes a
    # fifth of the time of an export.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure():
    gc.unfreeze()  # or else libraries complain of leaks
