import sys

import pytest

from ompq.cli import freed_memory
from ompq.cli.freed_memory import keep_freed_memory


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_are_left_alone(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()


def test_other_systems_and_libraries_are_left_alone(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert not keep_freed_memory()
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _name: object())
    assert not keep_freed_memory()
