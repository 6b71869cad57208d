"""How fast an exported file loads and runs, and in how much memory."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from ompq.errors import ExportError, check_counts
from ompq.optional_libraries import optional_library
from ompq.runtimes.inspection import load_onnx, text_tokens


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

    if Path(path).suffix == ".tflite":
        return _litert_inputs(path, batch)
    if Path(path).suffix == ".pte":
        return _executorch_inputs(path, batch)
    found, model = [], load_onnx(Path(path))
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


@dataclass(frozen=True)
class Runtime:
    """A library that runs files."""

    module: str  # what is imported
    extra: str  # of ompq, which installs it
    suffix: str  # of the files that it runs


RUNTIMES = {
    "onnxruntime": Runtime("onnxruntime", "onnx", ".onnx"),
    "openvino": Runtime("openvino", "openvino", ".onnx"),
    "litert": Runtime("ai_edge_litert", "litert", ".tflite"),
    "executorch": Runtime("executorch", "executorch", ".pte"),
}
_WARM_UP = 3  # runs that are not timed: they fill caches
_LOADS = 3  # of a file; the median counts

# Run in a process of its own; prints the memory with the runtime alone, and the peak.
_WEIGH = """
import json, sys
from ompq.runtimes.benchmark import Input, library_of, most_memory, runner
path, threads, runtime, given = sys.argv[1:]
library_of(runtime)
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
class Contestant:
    """A file in a runtime."""

    name: str
    path: Path
    runtime: str = "onnxruntime"


@dataclass(frozen=True)
class Timing:
    """Time and memory of a file in a runtime."""

    name: str
    runtime: str  # for example ``onnxruntime 1.31.1``
    batch: int  # samples per run
    milliseconds: float  # median of a run
    ratio: float  # median, run by run, of the first contestant's time to this one's
    load_seconds: float  # median of a load
    memory: MemoryUse  # of a process of its own

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def installed_runtimes() -> tuple[str, ...]:
    """Return the runtimes that are installed."""
    return tuple(name for name, one in RUNTIMES.items() if find_spec(one.module))


def library_of(runtime: str, part: str = "") -> Any:
    """Import a runtime, or a part of it."""
    one = RUNTIMES[runtime]
    return optional_library(one.module + part, one.extra)


def time_files(
    contestants: Sequence[Contestant],
    *,
    batch: int = 1,
    repeats: int = 50,
    threads: int = 1,
) -> list[Timing]:
    """Measure several files of one network; the first is the reference.

    Runs alternate, so that a slow moment affects all alike.

    Raises:
        MissingExtraError: A runtime is not installed.
        ExportError: It cannot run a file.
    """
    check_counts(batch=batch, repeats=repeats, threads=threads)
    given = [(one.path, inputs_of(one.path, batch), threads) for one in contestants]
    runs = [
        runner(*files, one.runtime)
        for one, files in zip(contestants, given, strict=True)
    ]
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(_WARM_UP + repeats):
        for run, own in zip(runs, seconds, strict=True):
            start = perf_counter()
            run()
            if number >= _WARM_UP:
                own.append(perf_counter() - start)
    return [
        Timing(
            name=one.name,
            runtime=runtime_version(one.runtime),
            batch=batch,
            milliseconds=1000 * median(own),
            ratio=median(a / b for a, b in zip(seconds[0], own, strict=True)),
            load_seconds=load_seconds(*files, one.runtime),
            memory=peak_memory(*files, one.runtime),
        )
        for one, own, files in zip(contestants, seconds, given, strict=True)
    ]


def runtime_version(runtime: str) -> str:
    """Return a runtime's name and version."""
    number = version(RUNTIMES[runtime].module.replace("_", "-"))
    return f"{runtime} {number.partition('-')[0]}"


def runner(
    path: str | Path,
    inputs: Sequence[Input],
    threads: int = 1,
    runtime: str = "onnxruntime",
) -> Callable[[], Any]:
    """Load a file and return a function that runs it once."""
    arrays = [one.made() for one in inputs]
    load = {
        "onnxruntime": _onnxruntime,
        "openvino": _openvino,
        "litert": _litert,
        "executorch": _executorch,
    }
    try:
        return load[runtime](str(path), threads, arrays)
    except Exception as error:
        # ONNX Runtime's own errors derive from nothing more particular.
        own = type(error).__module__.startswith("onnxruntime")
        if not own and not isinstance(error, RuntimeError | ValueError):
            raise
        first = str(error).strip().splitlines()[0]
        raise ExportError(f"{runtime} cannot load {path}: {first}") from error


def session_of(model: str | bytes, threads: int) -> Any:
    """Load a file, or its content, into ONNX Runtime for this machine's CPU."""
    library = library_of("onnxruntime")
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
    compiled = compile_openvino(path, threads)
    return lambda: compiled(arrays)


def compile_openvino(path: str, threads: int) -> Any:
    """Load a file into OpenVINO for this machine's CPU."""
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    return only_core(library_of("openvino").Core).compile_model(path, "CPU", settings)


def _litert(path: str, threads: int, arrays: list[Any]) -> Callable[[], Any]:
    (array,) = arrays
    interpreter = _litert_interpreter(path, threads)
    index = interpreter.get_input_details()[0]["index"]
    interpreter.resize_tensor_input(index, array.shape)
    interpreter.allocate_tensors()

    def run() -> None:
        interpreter.set_tensor(index, array)
        interpreter.invoke()

    return run


def _litert_interpreter(path: str | Path, threads: int = 1) -> Any:
    library = library_of("litert", ".interpreter")
    return library.Interpreter(str(path), num_threads=threads)


def _litert_inputs(path: str | Path, batch: int) -> list[Input]:
    try:
        details = _litert_interpreter(path).get_input_details()
    except (ValueError, RuntimeError) as error:
        raise ExportError(f"litert cannot load {path}: {error}") from error
    return [
        Input((batch, *one["shape"][1:].tolist()), one["dtype"].__name__, one["name"])
        for one in details
    ]


def _executorch(path: str, _threads: int, arrays: list[Any]) -> Callable[[], Any]:
    """Return a function that runs samples one by one, as such a file takes them."""
    import torch

    (array,) = arrays
    samples = torch.from_numpy(array)[:, None]
    method = _executorch_method(path)
    return lambda: [method.execute((one,)) for one in samples]


def _executorch_method(path: str | Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own use of what Python deprecates
        library = library_of("executorch", ".runtime")
    program = library.Runtime.get().load_program(Path(path).read_bytes())
    return program.load_method("forward")


def _executorch_inputs(path: str | Path, batch: int) -> list[Input]:
    try:
        about = _executorch_method(path).metadata
    except (OSError, RuntimeError) as error:
        raise ExportError(f"executorch cannot load {path}: {error}") from error
    kinds = {1: "int8", 6: "float32"}  # of torch.ScalarType
    found = [about.input_tensor_meta(at) for at in range(about.num_inputs())]
    return [
        Input((batch, *one.sizes()[1:]), kinds.get(one.dtype(), "float32"))
        for one in found
    ]


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
