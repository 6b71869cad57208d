"""Exported ONNX files: where their bytes go, and how fast they run.

Nothing here imports torch, so that a process can weigh what a runtime alone takes.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from ompq.errors import ExportError, MissingExtraError, check_counts, shortened
from ompq.skeleton import parsed_onnx

# What a constant is, by the last part of its name.
_ITEMS = {
    "bytes": "weights",
    "plane": "weights",
    "offset": "zero points",
    "stretch": "zero points",
    "zeros": "zero points",
    "scale": "scales",
    "bias": "biases",
}
_PLANES = {f"plane{bits}": bits for bits in (1, 2, 4)}


@dataclass(frozen=True)
class OnnxAccount:
    """The bytes of a file."""

    path: Path
    bytes: int
    # Bytes by item, which add up to the file. ``float`` is what is stored unchanged,
    # ``graph`` everything that is not a constant: nodes, names, unpacking.
    items: Mapping[str, int]
    layers: Mapping[str, int]  # layer → bytes of its constants
    bits: Mapping[str, int]  # layer → width of its weight's codes; 8 if it is bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "path": str(self.path),
            "file_bytes": self.bytes,
            "items": dict(self.items),
            "units": [
                {"name": name, "weight_bits": self.bits[name], "bytes": size}
                for name, size in self.layers.items()
            ],
        }


def inspect_onnx(path: str | Path) -> OnnxAccount:
    """Read the account of a file that :func:`ompq.export_onnx` wrote.

    Raises:
        MissingExtraError: onnx is not installed.
        ExportError: The file cannot be read, or another program wrote it.
    """
    model = load_exported(Path(path))
    items: dict[str, int] = {}
    layers: dict[str, int] = {}
    planes: Counter[str] = Counter()
    for tensor in model.graph.initializer:
        layer, _, kind = tensor.name.rpartition("/")
        size = len(tensor.raw_data)
        item = _item(layer, kind)
        items[item] = items.get(item, 0) + size
        if item not in ("activations", "float", "graph"):
            layers[layer] = layers.get(layer, 0) + size
            planes[layer] += _PLANES.get(kind, 0)
    total = Path(path).stat().st_size
    items["graph"] = total - sum(items.values()) + items.get("graph", 0)
    bits = {layer: planes[layer] or 8 for layer in layers}
    return OnnxAccount(Path(path), total, items, layers, bits)


def _item(layer: str, kind: str) -> str:
    if layer in ("scale", "zero", "code"):  # of a tensor's grid; layers share them
        return "activations"
    if layer.partition("/")[0] in ("table", "shape", "times"):  # for unpacking
        return "graph"
    if not layer:  # named as in the network, because it stays float
        return "float"
    return "weights" if kind.startswith("plane") else _ITEMS.get(kind, "activations")


def load_exported(path: Path) -> Any:
    """Return the content of a file that :func:`ompq.export_onnx` wrote."""
    try:
        model = parsed_onnx(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read as ONNX: {error}") from error
    if model.producer_name != "ompq":
        writer = model.producer_name or "another program"
        raise ExportError(
            f"{path} was written by {ascii(writer[:80])[1:-1]}, not by ompq, and "
            "cannot be itemised"
        )
    graph = model.graph
    names = [tensor.name for tensor in graph.initializer]
    for node in graph.node:
        names += [node.op_type, *node.input, *node.output]
    sound = all(
        isinstance(name, str)  # text that is not Unicode comes as bytes
        and name.isprintable()
        and len(name) < _LONGEST_NAME
        for name in names
    )
    if not (sound and graph.input and all(node.output for node in graph.node)):
        raise ExportError(f"{path} is damaged: names in it are not those of a network")
    return model


_THIN = 4  # input channels that an 8-bit dot product takes at once
_LONGEST_NAME = 2000  # of a tensor: a layer's name and a word
NETWORK = "network"  # the entry of a file's metadata that names the network


def without_gain(path: str | Path) -> list[str]:
    """Return a sentence for each thing that gains no speed; needs no runtime."""
    model = load_exported(Path(path))
    graph, bits = model.graph, inspect_onnx(path).bits
    if not any(node.op_type == "QuantizeLinear" for node in graph.node):
        return [
            "activations are float: weights become floats when the file is loaded, so "
            "that it is smaller and not faster"
        ]
    found = []
    narrow = [name for name, width in bits.items() if width < 8]
    if narrow:
        found.append(
            f"{len(narrow)} of {len(bits)} layers below 8 bits ({shortened(narrow, 3)})"
            ": they save size, not time; a CPU computes them in 8 bits"
        )
    convolutions = _convolutions(model, bits)
    depthwise = [layer for layer, groups in convolutions.items() if groups > 1]
    if depthwise:
        found.append(
            f"depthwise or grouped convolutions ({shortened(depthwise, 3)}): "
            "8 bits gain less there than elsewhere"
        )
    thin = [
        layer
        for layer, groups in convolutions.items()
        if groups == 1 and 0 < _weight_shape(model, layer)[1] < _THIN
    ]
    if thin:
        found.append(
            f"convolutions of fewer than {_THIN} channels ({shortened(thin, 3)}): "
            "8 bits gain nothing there, and may cost"
        )
    clips = [n for n in graph.node if n.op_type == "Clip" and "codes" in n.input[0]]
    if clips:
        found.append(
            f"{len(clips)} tensors below 8 bits, or clipped: a Clip of codes each, "
            "which takes time that 8 bits would not"
        )
    return found


def network_name(path: str | Path) -> str:
    """Return the name of the network in a file's metadata, or ""."""
    entries = load_exported(Path(path)).metadata_props
    return next((str(one.value) for one in entries if one.key == NETWORK), "")


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

    found = []
    for one in load_exported(Path(path)).graph.input:
        kind = one.type.tensor_type
        sizes = [int(size.dim_value) for size in kind.shape.dim][1:]
        try:
            dtype = tensor_dtype_to_np_dtype(kind.elem_type).name
        except KeyError as error:
            raise ExportError(
                f"{path}: the input {one.name!r} is of no known type"
            ) from error
        found.append(Input((batch, *sizes), dtype, one.name))
    return found


def _convolutions(model: Any, layers: Collection[str]) -> dict[str, int]:
    """Return the groups of each layer that is a convolution.

    PyTorch names nodes after their operator, so a layer is found by its weight.
    """
    made = {node.output[0]: node for node in model.graph.node if node.output}
    found = {}
    for node in model.graph.node:
        if node.op_type != "Conv" or len(node.input) < 2:
            continue
        unseen, name = dict(made), node.input[1]
        while name.rpartition("/")[0] not in layers and name in unseen:
            name = next(iter(unseen.pop(name).input), "")
        if (layer := name.rpartition("/")[0]) in layers:
            groups = (int(one.i) for one in node.attribute if one.name == "group")
            found[layer] = next(groups, 1)
    return found


def _weight_shape(model: Any, layer: str) -> tuple[int, ...]:
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for name in (f"{layer}/bytes", f"{layer}/plane4"):
        if name in tensors and len(tensors[name].dims) > 1:
            return tuple(tensors[name].dims)
    # It is stored in planes: go back from its bytes to the node that sets their shape.
    made = {node.output[0]: node for node in model.graph.node}
    node = made.pop(f"{layer}/bytes", None)
    while node is not None and node.op_type != "Reshape":
        node = made.pop(node.input[0], None) if node.input else None
    shape = node.input[1] if node is not None and len(node.input) > 1 else ""
    if shape not in tensors:
        return (0, 0)  # the file is damaged
    sizes = np.frombuffer(tensors[shape].raw_data[:64], dtype="<i8")
    return tuple(map(int, sizes)) if len(sizes) > 1 else (0, 0)


RUNTIMES = ("onnxruntime", "openvino")
_WARM_UP = 3  # runs that are not timed: they fill caches
_LOADS = 3  # of a file; the median counts

# Run in a process of its own; prints the memory with the runtime alone, and the peak.
_WEIGH = """
import json, sys
from ompq.onnx import Input, load_runtime, most_memory, runner
path, threads, runtime, given = sys.argv[1:]
load_runtime(runtime)
start = most_memory()
inputs = [Input(**one) for one in json.loads(given)]
run = runner(path, inputs, int(threads), runtime)
for _ in range(3):
    run()
print(start, most_memory())
"""


@dataclass(frozen=True)
class Memory:
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
    memory: Memory  # of a process of its own

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def installed_runtimes() -> tuple[str, ...]:
    """Return the runtimes that are installed."""
    return tuple(name for name in RUNTIMES if find_spec(name) is not None)


def load_runtime(name: str) -> Any:
    """Import a runtime."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtraError(name, "onnx") from error


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
    version = load_runtime(runtime).__version__
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
    library = load_runtime("onnxruntime")
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
    core = only_core(load_runtime("openvino").Core)
    compiled = core.compile_model(path, "CPU", settings)
    return lambda: compiled(arrays)


@cache
def only_core(kind: Callable[[], Any]) -> Any:
    """Return OpenVINO's core, of which a process must have only one.

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
) -> Memory:
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
    return Memory(int(start), int(peak))
