"""What benchmarks share: commit, machine, timing, results as JSON.

Several processes may share the work through a folder; a run that was cut goes on.
"""

import argparse
import fcntl
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ompq.allocation.problem import Allocation
from ompq.network.graph import trace
from ompq.network.units import Choice

RESULTS = Path(__file__).parent / "results"
CODE = ("src", "benchmarks/*.py")  # what a result depends on
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def arguments(
    description: str | None, networks: Iterable[str], work: str = ""
) -> argparse.ArgumentParser:
    """Return a parser of what most benchmarks are told.

    ``work`` is the folder for what a run that was cut goes on from, if there is one.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=networks, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    if work:
        parser.add_argument("--work", type=Path, default=Path(work))
    return parser


def commit() -> str:
    """Return the commit of the code that runs, marked where files differ from it.

    A copy without its repository says which commit it is in ``OMPQ_COMMIT``.
    """
    if "OMPQ_COMMIT" in os.environ:
        return os.environ["OMPQ_COMMIT"]

    def git(*words: str) -> str:
        root = Path(__file__).parent.parent
        command = ["git", "-C", str(root), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", *CODE)
    return git("log", "-1", "--format=%h", "--", *CODE) + ("+" if changed else "")


def machine() -> dict[str, Any]:
    """Name the machine and the versions that produced a result."""
    import scipy
    import torchvision

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "scipy": scipy.__version__,
    }


def everywhere(model, samples, choice: Choice) -> Allocation:
    """Return the same bits for all units of a network."""
    return Allocation(dict.fromkeys(trace(model, samples[:1]).names, choice))


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor()}"


def synchronise() -> None:
    """Wait for the device, so that a clock reads what was done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function: Callable[[], Any]) -> float:
    """Return the time of one call."""
    synchronise()
    start = time.perf_counter()
    function()
    synchronise()
    return time.perf_counter() - start


def alternating(
    functions: dict[str, Callable[[], Any]], repeats: int
) -> dict[str, list[float]]:
    """Time several functions in turn, so that a slow moment hits all alike."""
    for function in functions.values():
        function()  # warm up
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(seconds(function))
    return times


def median_ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """Return the median over repeats of time(one) / time(other)."""
    pairs = zip(times[one], times[other], strict=True)
    return statistics.median(a / b for a, b in pairs)


def command_line(folder: Path) -> str:
    """Return the command that is running, without the folders of this machine."""
    words = [w for w in sys.argv[1:] if w not in ("--out", str(folder))]
    words = [re.sub(r"(^|=)/.*", r"\1FOLDER", word) for word in words]
    return " ".join(["python", Path(sys.argv[0]).name, *words])


def save(name: str, rows: Any, folder: Path = RESULTS, **more: Any) -> None:
    """Write a result with the command, commit and machine that produced it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = command_line(folder)
    about = {"command": command, "commit": commit(), "machine": machine()}
    data = {**about, **more, "rows": rows}
    # Others may read it meanwhile.
    new = folder / f".{name}-{os.getpid()}.json"
    new.write_text(json.dumps(data, indent=1) + "\n")
    new.replace(folder / f"{name}.json")
    print(f"wrote {name}.json")


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
