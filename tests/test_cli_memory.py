import os
import subprocess
import sys

import pytest

from ompq.cli import memory
from ompq.cli.memory import keep_freed_memory

GNU = sys.platform == "linux" and "glibc" in os.confstr("CS_GNU_LIBC_VERSION")
FAULTS = """
import resource, sys
from ompq.cli.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
import torch
for _ in range(10):  # until pieces of this size are there
    torch.empty(1 << 24).fill_(1.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.empty(1 << 24).fill_(1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not GNU, reason="needs the GNU C library")
def test_large_pieces_are_cleared_by_the_system_only_once():
    counts = {}
    for what in ("keep", "leave"):
        command = [sys.executable, "-c", FAULTS, what]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        counts[what] = int(run.stdout)
    assert counts["keep"] < counts["leave"] / 4


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_are_left_alone(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()


def test_other_systems_and_libraries_are_left_alone(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert not keep_freed_memory()
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _name: object())
    assert not keep_freed_memory()
