"""How fast an exported file loads and runs, and in how much memory."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from ompq.errors import ExportError, check_counts
from ompq.optional_libraries import optional_library
from ompq.runtimes.inspection import load_exported, text_tokens


@dataclass(frozen=True)
class Input:
    """An input of a file: its shape with the batch, NumPy type and name."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    name: str = "input"

    def made(self) -> Any:
        """Return noise, or zeros for integers, which every embedding table has."""
        if not np.issubdtype(self.dtype, np.floating):
            return np.zeros(self.shape, self.dtype)
        noise = np.random.default_rng(0).normal(size=self.shape)
        return noise.astype(self.dtype)


def inputs_of(path: str | Path, batch: int = 1) -> list[Input]:
    """Return the inputs of a file, for a batch of this size."""
    from onnx.helper import tensor_dtype_to_np_dtype

    found, model = [], load_exported(Path(path))
    for one in model.graph.input:
        kind = one.type.tensor_type
        sizes = [
            text_tokens(model) if size.dim_param else int(size.dim_value)
            for size in kind.shape.dim
        ][1:]
        try:
            dtype = tensor_dtype_to_np_dtype(kind.elem_type).name
        except KeyError as error:
            raise ExportError(
                f"{path}: the input {one.name!r} has an unknown type"
            ) from error
        found.append(Input((batch, *sizes), dtype, one.name))
    return found


_EXTRAS = {"onnxruntime": "onnx", "openvino": "openvino"}
RUNTIMES = tuple(_EXTRAS)
_WARM_UP = 3  # runs that are not timed: they fill caches
_LOADS = 3  # of a file; the median counts

# Run in a process of its own; prints the memory with the runtime alone, and the peak.
_WEIGH = """
import json, sys
from ompq.runtimes.benchmark import Input, most_memory, runner
path, threads, runtime, given = sys.argv[1:]
__import__(runtime)
start = most_memory()
inputs = [Input(**one) for one in json.loads(given)]
run = runner(path, inputs, int(threads), runtime)
for _ in range(3):
    run()
print(start, most_memory())
"""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a process that loads and runs a file, in bytes."""

    start: int  # before the file is loaded: Python and the runtime
    peak: int


@dataclass(frozen=True)
class Timing:
    """Time and memory of a file in a runtime."""

    name: str  # one of the names passed to :func:`time_files`
    runtime: str  # for example ``onnxruntime 1.31.1``
    milliseconds: float  # median of a run
    ratio: float  # median, run by run, of the first file's time to this one's
    load_seconds: float  # median of a load
    memory: MemoryUse  # of a process of its own

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def installed_runtimes() -> tuple[str, ...]:
    """Return the runtimes that are installed."""
    return tuple(name for name in RUNTIMES if find_spec(name) is not None)


def time_files(
    files: Mapping[str, Path],
    inputs: Sequence[Input],
    *,
    repeats: int = 50,
    threads: int = 1,
    runtime: str = "onnxruntime",
) -> list[Timing]:
    """Measure several ONNX files, by name; the first is the reference.

    All take the same inputs. Runs alternate, so that a slow moment affects all alike.

    Raises:
        MissingExtraError: The runtime is not installed.
        ExportError: It cannot run a file.
    """
    check_counts(repeats=repeats, threads=threads)
    version = optional_library(runtime, _EXTRAS[runtime]).__version__
    runs = {name: runner(f, inputs, threads, runtime) for name, f in files.items()}
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
            load_seconds=load_seconds(files[name], inputs, threads, runtime),
            memory=peak_memory(files[name], inputs, threads, runtime),
        )
        for name, own in seconds.items()
    ]


def runner(
    path: str | Path,
    inputs: Sequence[Input],
    threads: int = 1,
    runtime: str = "onnxruntime",
) -> Callable[[], Any]:
    """Load a file and return a function that runs it once."""
    arrays = [one.made() for one in inputs]
    load = {"onnxruntime": _onnxruntime, "openvino": _openvino}[runtime]
    try:
        return load(str(path), threads, arrays)
    except Exception as error:
        # ONNX Runtime's own errors derive from nothing more particular.
        own = type(error).__module__.startswith("onnxruntime")
        if not own and not isinstance(error, RuntimeError):
            raise
        first = str(error).strip().splitlines()[0]
        raise ExportError(f"{runtime} cannot load {path}: {first}") from error


def session_of(model: str | bytes, threads: int) -> Any:
    """Load a file, or its content, into ONNX Runtime for this machine's CPU."""
    library = optional_library("onnxruntime", "onnx")
    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    return library.InferenceSession(model, options, providers=providers)


def _onnxruntime(path: str, threads: int, arrays: list[Any]) -> Callable[[], Any]:
    session = session_of(path, threads)
    names = [one.name for one in session.get_inputs()]
    given = dict(zip(names, arrays, strict=True))
    return lambda: session.run(None, given)


def _openvino(path: str, threads: int, arrays: list[Any]) -> Callable[[], Any]:
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    core = only_core(optional_library("openvino", "openvino").Core)
    compiled = core.compile_model(path, "CPU", settings)
    return lambda: compiled(arrays)


@cache
def only_core(kind: Callable[[], Any]) -> Any:
    """Return the one OpenVINO core that this process may have.

    Each core installs a stack for signals and, when freed, restores the one before. If
    that belonged to another core, already freed, the next signal ends the process.
    """
    return kind()


def most_memory() -> int:
    """Return the peak memory of this process, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        (held,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
        return 1024 * int(held)
    except (OSError, ValueError):  # not Linux; this may include the parent's memory
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def load_seconds(
    path: str | Path,
    inputs: Sequence[Input],
    threads: int = 1,
    runtime: str = "onnxruntime",
) -> float:
    """Return the median time that a runtime takes to load a file."""
    seconds = []
    for _ in range(_LOADS):
        start = perf_counter()
        runner(path, inputs, threads, runtime)
        seconds.append(perf_counter() - start)
    return median(seconds)


def peak_memory(
    path: str | Path,
    inputs: Sequence[Input],
    threads: int = 1,
    runtime: str = "onnxruntime",
) -> MemoryUse:
    """Return the memory of a process that loads a file and runs it."""
    given = json.dumps([asdict(one) for one in inputs])
    words = [str(path), str(threads), runtime, given]
    done = subprocess.run(
        [sys.executable, "-c", _WEIGH, *words], capture_output=True, text=True
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason was given"]
        raise ExportError(f"{runtime} fails on {path}: {last[0][:300]}")
    start, peak = done.stdout.split()
    return MemoryUse(int(start), int(peak))
