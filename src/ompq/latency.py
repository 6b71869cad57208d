"""measure_latency(): milliseconds of each unit in ONNX Runtime, on this machine's CPU.

Each unit becomes an ONNX model of its own, as it would stand inside an exported
network: float, or 8-bit integers from input to output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from torch import nn

from ompq.costs import FLOAT_BITS
from ompq.errors import MissingExtraError, QuantizationError, shortened
from ompq.graph.observation import ModuleCall, record
from ompq.graph.tracing import trace
from ompq.graph.units import Choice, LayerGraph
from ompq.samples import Progress, Samples, first_samples, model_device, to_device

_WARM_UP = 3  # runs that are not counted: the first ones allocate memory
_INTEGER_BITS = 8  # the widest integers
_OPSET, _IR_VERSION = 17, 8  # old enough for every ONNX Runtime that ompq supports


@dataclass(frozen=True)
class _Work:
    """One call of a layer: all that its time depends on.

    Attributes:
        integer: Whether it is computed with 8-bit integers.
        weight: Shape of the weight, (out, in/groups, kernel, kernel) or (in, out).
        given: Shape of the input, (N, C, H, W) or (rows, in).
        made: Shape of the output, (N, C, H, W) or (rows, out).
        settings: Attributes of the convolution; empty for a linear layer.
    """

    integer: bool
    weight: tuple[int, ...]
    given: tuple[int, ...]
    made: tuple[int, ...]
    settings: tuple[tuple[str, int | tuple[int, ...]], ...] = ()


def measure_latency(
    model: nn.Module,
    samples: Samples,
    choices: Sequence[Choice],
    *,
    repeats: int = 20,
    threads: int = 1,
    progress: Progress | None = None,
) -> dict[str, dict[str, float]]:
    """Measure how long each unit takes at each choice, for a budget in ms.

    CPU runtimes compute every width of 8 bits or fewer with 8-bit integers. So all
    such choices of a unit are measured once and get the same number: fewer bits
    make a network smaller but, on a CPU, no faster than 8 bits. A choice whose weight
    or input is 32 bits wide is measured in float.

    Units that do the same work are measured once. A unit that is called several times
    takes the time of all its calls. What lies between units is not measured; what is
    needed to start a single layer is, and in a whole network part of it goes away.
    So sums compare plans rather than foretell the time of the network.

    Args:
        model: The network; only its shapes matter, not its weights.
        samples: Inputs; the first one is enough.
        choices: Bits to measure, each from 2 to 8, or 32 for float.
        repeats: How many runs the median is taken of.
        threads: How many threads a layer may use.
        progress: Called as measurements are done.

    Returns:
        Unit → {"W4A8": milliseconds, ...}, which ``PlanConfig(latency=...)`` takes.

    Raises:
        QuantizationError: A unit is neither a called Linear nor a Conv2d.
        MissingExtraError: onnx or onnxruntime is not installed.
        ValueError: repeats, threads or choices cannot be.
    """
    _check(choices, repeats, threads)
    _libraries()
    graph = trace(model, samples)
    calls = _calls(model, samples, graph)
    rows = {
        name: {
            choice: [_work(module, call, choice) for module, call in calls[name]]
            for choice in choices
        }
        for name in graph.names
    }
    work = [one for row in rows.values() for several in row.values() for one in several]
    times = _times(work, repeats, threads, progress)
    return {
        name: {str(choice): sum(times[one] for one in row[choice]) for choice in row}
        for name, row in rows.items()
    }


def _check(choices: Sequence[Choice], repeats: int, threads: int) -> None:
    for name, value in (("repeats", repeats), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name}={value} is too small; use 1 or more")
    widths = (*range(2, _INTEGER_BITS + 1), FLOAT_BITS)
    wrong = [str(c) for c in choices if not {c.weight, c.activation} <= {*widths}]
    if wrong or not choices:
        raise ValueError(
            f"choices {shortened(wrong) or 'are empty'}: "
            "give bits from 2 to 8, or 32 for float"
        )


def _libraries() -> tuple[Any, Any]:
    try:
        import onnx.helper
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(error.name or "onnx", "onnx") from error
    return onnx, onnxruntime


def _calls(
    model: nn.Module, samples: Samples, graph: LayerGraph
) -> dict[str, list[tuple[nn.Module, ModuleCall]]]:
    """Return the calls of each unit, those of layers that share its weight too."""
    owner = {id(model.get_parameter(u.parameter)): u.name for u in graph.units}
    found: dict[str, list[tuple[nn.Module, ModuleCall]]] = {n: [] for n in graph.names}
    batch = to_device(first_samples(samples, 1), model_device(model))
    for call in record(model, batch).module_calls:
        module = model.get_submodule(call.name)
        name = owner.get(id(module._parameters.get("weight")))
        if name is not None and isinstance(module, nn.Linear | nn.Conv2d):
            found[name].append((module, call))
    missing = [f"{u.name} ({u.kind})" for u in graph.units if not found[u.name]]
    if missing:
        raise QuantizationError(
            f"{shortened(missing)} cannot be measured: only Linear and Conv2d layers "
            "that are called can; add these to the latency table from another source"
        )
    return found


def _work(module: nn.Module, call: ModuleCall, choice: Choice) -> _Work:
    integer = max(choice) <= _INTEGER_BITS
    given, made = call.input_shape, call.output_shape
    if not isinstance(module, nn.Conv2d):
        assert isinstance(module, nn.Linear)  # _calls has seen to it
        rows, (outputs, inputs) = prod(given[:-1]), module.weight.shape
        return _Work(integer, (inputs, outputs), (rows, inputs), (rows, outputs))
    given, made = ((1, *s) if len(s) == 3 else s for s in (given, made))
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    # From the shapes, so that every mode of padding is right, and so are layers that
    # pad their input themselves.
    missing = [
        max(0, (made[i + 2] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 - size)
        for i, size in enumerate(given[2:])
    ]
    settings: dict[str, int | tuple[int, ...]] = {
        "group": module.groups,
        "strides": stride,
        "dilations": dilation,
        "pads": (*(m // 2 for m in missing), *(m - m // 2 for m in missing)),
    }
    shape = tuple(module.weight.shape)
    return _Work(integer, shape, given, made, tuple(settings.items()))


def _times(
    work: Sequence[_Work], repeats: int, threads: int, progress: Progress | None
) -> Mapping[_Work, float]:
    """Return the milliseconds of each different piece of work."""
    distinct = list(dict.fromkeys(work))
    report = progress or (lambda _done, _total, _message: None)
    times = {}
    for done, one in enumerate(distinct):
        report(done, len(distinct), "measuring the layers")
        times[one] = _time(one, repeats, threads)
    report(len(distinct), len(distinct), "done")
    return times


def _time(work: _Work, repeats: int, threads: int) -> float:
    run = _runner(work, threads)
    seconds = []
    for _ in range(_WARM_UP + repeats):
        start = perf_counter()
        run()
        seconds.append(perf_counter() - start)
    return 1000 * median(seconds[_WARM_UP:])


def _runner(work: _Work, threads: int) -> Callable[[], Any]:
    _, runtime = _libraries()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = runtime.InferenceSession(
        layer_model(work), options, providers=["CPUExecutionProvider"]
    )
    values = np.random.default_rng(0).integers(0, 256, work.given, dtype=np.uint8)
    given = values if work.integer else values.astype(np.float32) / 256
    return lambda: session.run(None, {"input": given})


def layer_model(work: _Work) -> bytes:
    """Return an ONNX model of one layer; of integers, from input to output."""
    onnx, _ = _libraries()
    helper, types = onnx.helper, onnx.TensorProto
    kind = types.UINT8 if work.integer else types.FLOAT
    inner = ("x", "w", "b", "y") if work.integer else ("input", "weight", "bias", "out")
    settings: dict[str, Any] = dict(work.settings)
    node = helper.make_node(
        "Conv" if settings else "Gemm", inner[:3], inner[3:], **settings
    )
    graph = helper.make_graph(
        _surrounded(node, helper, axis=0 if settings else 1)
        if work.integer
        else [node],
        "layer",
        [helper.make_tensor_value_info("input", kind, work.given)],
        [helper.make_tensor_value_info("out", kind, work.made)],
        [onnx.numpy_helper.from_array(v, k) for k, v in _constants(work).items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR_VERSION,
    )
    return bytes(model.SerializeToString())


def _surrounded(node: Any, helper: Any, *, axis: int) -> list[Any]:
    """Return the layer between DequantizeLinear and QuantizeLinear."""
    to_float, to_integer = "DequantizeLinear", "QuantizeLinear"
    make = helper.make_node
    return [
        make(to_float, ["input", "scale", "zero"], ["x"]),
        make(to_float, ["weight", "scales", "zeros"], ["w"], axis=axis),
        make(to_float, ["bias", "bias_scales", "bias_zeros"], ["b"], axis=0),
        node,
        make(to_integer, ["y", "out_scale", "zero"], ["out"]),
    ]


def _constants(work: _Work) -> dict[str, Any]:
    """Return weight, bias (batch norm ends up there too) and scales."""
    channels = work.made[1]
    weight = np.random.default_rng(1).integers(-127, 128, work.weight, dtype=np.int8)
    if not work.integer:
        return {
            "weight": weight.astype(np.float32) / 127,
            "bias": np.zeros(channels, np.float32),
        }
    scales = np.full(channels, 1 / 127, np.float32)
    scale = np.float32(1 / 256)
    return {
        "weight": weight,
        "scales": scales,
        "zeros": np.zeros(channels, np.int8),
        "bias": np.zeros(channels, np.int32),
        "bias_scales": scales * scale,
        "bias_zeros": np.zeros(channels, np.int32),
        "scale": np.asarray(scale),
        "zero": np.asarray(128, np.uint8),
        "out_scale": np.asarray(1 / 16, np.float32),
    }
