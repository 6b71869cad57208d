"""Work that processes share through a folder; a run that was cut goes on."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import command_line, commit, save


def once(path: Path, make: Callable[[Path], None]) -> Path:
    """Make a file unless it is there; one process does, the others wait."""
    with locked(path):
        if not path.exists():
            temporary = path.with_name(f"new-{path.name}")
            make(temporary)
            temporary.replace(path)
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes that want the same file waiting."""
    with _lock_file(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Tell whether this process may do a piece of work: the first that asks may.

    The claim ends with the process, however that ends.
    """
    with _lock_file(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _lock_file(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY), "w")


class Rows:
    """The rows of one result, written one by one; a run that was cut goes on.

    Rows of other settings, or of another commit, are dropped: a table is the work of
    one version of the code. Processes may add to one file at once.
    """

    def __init__(
        self, name: str, key: tuple[str, ...], *, out: Path, work: Path, **more: Any
    ) -> None:
        self.name, self.key, self.out, self.work = name, key, out, work
        # As JSON gives them back.
        self.more = json.loads(json.dumps({"commit": commit(), **more}))

    def known(self) -> list[dict[str, Any]]:
        """Return the rows that are there, with these settings."""
        return self._written().get("rows", [])

    def _written(self) -> dict[str, Any]:
        path = self.out / f"{self.name}.json"
        if not path.exists():
            return {}
        data = json.loads(path.read_text())
        same = all(data.get(key) == value for key, value in self.more.items())
        return data if same else {}

    def find(self, *key: Any) -> dict[str, Any] | None:
        """Return the row with these values, if it is there."""
        rows = {tuple(row[name] for name in self.key): row for row in self.known()}
        return rows.get(key)

    def add(self, *new: dict[str, Any]) -> None:
        """Write rows, sorted in with the others."""
        with locked(self.work / self.name):
            written = self._written()
            rows = [*written.get("rows", []), *new]
            rows.sort(key=lambda one: tuple(one[name] for name in self.key))
            # Several commands may have made what is in one file.
            commands = {*written.get("commands", []), command_line(self.out)}
            more = {"commands": sorted(commands), **self.more}
            save(self.name, rows, self.out, **more)
