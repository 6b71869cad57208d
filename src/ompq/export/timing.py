"""How long ONNX files take to load and to run, and how much memory: on this CPU.

ONNX Runtime measures always, OpenVINO where it is installed. Memory is measured in
processes of their own, which hold nothing else.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from ompq.errors import ExportError, MissingExtraError

RUNTIMES = ("onnxruntime", "openvino")
_WARM_UP = 3
_LOADS = 3

# Run in a process of its own: memory with the runtime alone, and the most there was.
_WEIGH = """
import sys
from ompq.export.timing import load_runtime, most_memory, runner
path, threads, runtime, *shape = sys.argv[1:]
load_runtime(runtime)
start = most_memory()
run = runner(path, [int(size) for size in shape], int(threads), runtime)
for _ in range(3):
    run()
print(start, most_memory())
"""


@dataclass(frozen=True)
class Memory:
    """Memory of a process that loads and runs a file, in bytes.

    Attributes:
        start: What it holds before the file is loaded: Python and the runtime.
        peak: The most that it ever holds.
    """

    start: int
    peak: int


@dataclass(frozen=True)
class Timing:
    """What a file takes in a runtime.

    Attributes:
        name: Of the file among those that are compared.
        runtime: For example ``onnxruntime 1.31.1``.
        milliseconds: Median of a run.
        ratio: Median, run by run, of the first file's time to this one's.
        load_seconds: Median of a load.
        memory: Of a process of its own.
    """

    name: str
    runtime: str
    milliseconds: float
    ratio: float
    load_seconds: float
    memory: Memory

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def installed_runtimes() -> tuple[str, ...]:
    """Return the runtimes that can be measured here."""
    return tuple(name for name in RUNTIMES if find_spec(name) is not None)


def load_runtime(name: str) -> Any:
    """Import a runtime.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtraError(name, "onnx") from error


def time_files(
    files: Mapping[str, Path],
    shape: Sequence[int],
    *,
    repeats: int = 50,
    threads: int = 1,
    runtime: str = "onnxruntime",
) -> list[Timing]:
    """Measure several files; runs take turns, so that a slow moment hits all alike.

    Args:
        files: Name → ONNX file; the first one is what the others are compared with.
        shape: Of the input, batch included.
        repeats: How many runs the medians are taken of.
        threads: How many threads a run may use.
        runtime: ``onnxruntime`` or ``openvino``.

    Raises:
        MissingExtraError: The runtime is not installed.
        ExportError: It cannot run a file.
        ValueError: repeats or threads are below 1.
    """
    for name, value in (("repeats", repeats), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name}={value} is too small; use 1 or more")
    version = load_runtime(runtime).__version__
    runs = {name: runner(file, shape, threads, runtime) for name, file in files.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(_WARM_UP + repeats):
        for name, run in runs.items():
            start = perf_counter()
            run()
            if number >= _WARM_UP:
                seconds[name].append(perf_counter() - start)
    first = seconds[next(iter(files))]
    return [
        Timing(
            name=name,
            runtime=f"{runtime} {version.partition('-')[0]}",
            milliseconds=1000 * median(own),
            ratio=median(a / b for a, b in zip(first, own, strict=True)),
            load_seconds=load_seconds(files[name], shape, threads, runtime),
            memory=peak_memory(files[name], shape, threads, runtime),
        )
        for name, own in seconds.items()
    ]


def runner(
    path: str | Path,
    shape: Sequence[int],
    threads: int = 1,
    runtime: str = "onnxruntime",
) -> Callable[[], Any]:
    """Load a file and return what runs it once, on noise of a shape.

    Raises:
        ExportError: The runtime cannot load it.
    """
    image = np.random.default_rng(0).normal(size=tuple(shape)).astype(np.float32)
    load = {"onnxruntime": _onnxruntime, "openvino": _openvino}[runtime]
    try:
        return load(load_runtime(runtime), str(path), threads, image)
    except RuntimeError as error:
        raise ExportError(_refused(path, runtime, error)) from error
    except Exception as error:
        # ONNX Runtime's own errors derive from nothing more particular.
        if type(error).__module__.startswith("onnxruntime"):
            raise ExportError(_refused(path, runtime, error)) from error
        raise


def _refused(path: str | Path, runtime: str, error: Exception) -> str:
    return f"{runtime} cannot load {path}: {str(error).strip().splitlines()[0]}"


def _onnxruntime(
    library: Any, path: str, threads: int, image: Any
) -> Callable[[], Any]:
    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = library.InferenceSession(
        path, options, providers=["CPUExecutionProvider"]
    )
    given = {session.get_inputs()[0].name: image}
    return lambda: session.run(None, given)


def _openvino(library: Any, path: str, threads: int, image: Any) -> Callable[[], Any]:
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = library.Core().compile_model(path, "CPU", settings)
    return lambda: compiled([image])


def most_memory() -> int:
    """Return the most memory that this process ever held, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        (held,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
        return 1024 * int(held)
    except (OSError, ValueError):  # no Linux: what started this process counts, too
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def load_seconds(
    path: str | Path,
    shape: Sequence[int],
    threads: int = 1,
    runtime: str = "onnxruntime",
) -> float:
    """Return the median time that a runtime takes to load a file."""
    seconds = []
    for _ in range(_LOADS):
        start = perf_counter()
        runner(path, shape, threads, runtime)
        seconds.append(perf_counter() - start)
    return median(seconds)


def peak_memory(
    path: str | Path,
    shape: Sequence[int],
    threads: int = 1,
    runtime: str = "onnxruntime",
) -> Memory:
    """Return the memory of a process that loads a file and runs it."""
    words = [str(path), str(threads), runtime, *map(str, shape)]
    done = subprocess.run(
        [sys.executable, "-c", _WEIGH, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    start, peak = done.stdout.split()
    return Memory(int(start), int(peak))
