"""export_onnx(): a file that is small, runs with int8 kernels, and is verified."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor, inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ompq.costs import SUM_BITS, Budget
from ompq.errors import ExportError, MissingExtraError, QuantizationError, shortened
from ompq.files import replacing
from ompq.integer import INPUT, IntegerNetwork, Steps, finalize, input_names, lower
from ompq.integer.arithmetic import CodeGrid
from ompq.integer.operators import Convolution, Layer, Node, Product, Step
from ompq.layers import LogQuantizer, activation_quantizers
from ompq.onnx import NETWORK, session_of
from ompq.onnx.containers import (
    ZERO_OF_UNSIGNED,
    Array,
    StoredWeight,
    Unpacking,
    as_tensor,
    grid_names,
)
from ompq.onnx.traced import TracedModel, traced_model
from ompq.quantization import quantization_of
from ompq.recording import tensors_in
from ompq.samples import (
    Batch,
    Samples,
    SamplesLike,
    attached,
    batch_length,
    call,
    class_rows,
    evaluating,
    first_tensor,
    model_device,
    to_device,
)

SMALLEST_OPSET = 18  # the first with a mask of bits
_TINY = torch.finfo(torch.float32).tiny
# From this many images on, a single one that differs may be a tie.
_ENOUGH_IMAGES = 32
_BATCH = 64  # samples at a time
_NOISES = 4  # runs with noise; a single one may change no code by chance
_WATCHED = 8  # samples whose codes are compared everywhere
_CODES_APART = 0.02  # mean difference of codes that ties of rounding explain
_LAST_DIGITS = 1e-6  # of floats, relative to a tensor's usual size
_WEAK = 0.5  # a tolerance, relative to the size of outputs, that shows little
_LARGEST_CODE = 255  # of a byte
_STREAM_OPSET = 21  # the first whose codes may have 16 bits
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Agreement:
    """How closely two versions of a network agree on the same images."""

    images: int
    top1: float  # fraction of rows of logits whose largest is the same; 1 if not ranked
    # Largest difference of two logits, over the root mean square of all of that output;
    # the largest of all outputs.
    logits: float
    codes: int = 0  # number of activation codes compared
    codes_equal: float = 1.0  # fraction of them that are equal
    codes_furthest: int = 0  # largest difference of two codes, in steps
    # Whether the largest number of a row is compared: not if there are several outputs,
    # or one number a row.
    ranked: bool = True

    def with_codes(self, other: "Agreement") -> "Agreement":
        """Return the same with the codes of a comparison on fewer images."""
        names = ("codes", "codes_equal", "codes_furthest")
        return replace(self, **{name: getattr(other, name) for name in names})

    def __str__(self) -> str:
        what = "logits" if self.ranked else "outputs"
        text = f"{what} within {self.logits:.1e}" if self.logits else f"equal {what}"
        if self.ranked:
            text = f"top-1 equal on {self.top1:.2%} of {self.images} images, {text}"
        else:
            text = f"{text} on {self.images} samples"
        if not self.codes:
            return text
        if self.codes_equal == 1:
            return f"{text}, all codes equal"
        return (
            f"{text}, {self.codes_equal:.5%} of codes equal and the rest within "
            f"{self.codes_furthest}"
        )


def compare_outputs(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    codes: Iterable[tuple[Tensor, Tensor]] = (),
) -> Agreement:
    """Compare outputs (N, ...), and codes if there are any.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
        >>> print(compare_outputs([logits], [logits + 0.001]))
        top-1 equal on 100.00% of 2 images, logits within 7.1e-04
    """
    shapes = [[tuple(output.shape) for output in each] for each in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"outputs of shapes {shapes[0]} and {shapes[1]} do not match")
    if not len(first[0]):
        raise ValueError("there is no image to compare outputs on")
    count, equal, furthest = 0, 0, 0
    for one, other in codes:
        apart = (one.int() - other.int()).abs()
        count += apart.numel()
        equal += int((apart == 0).sum())
        furthest = max(furthest, int(apart.max()))
    one, other = class_rows(first[0]), class_rows(second[0])
    ranked = len(first) == 1 and one.shape[1] > 1
    same = (one.argmax(1) == other.argmax(1)).double().mean()
    return Agreement(
        images=len(first[0]),
        top1=float(same) if ranked else 1.0,
        logits=max(map(_furthest, first, second)),
        codes=count,
        codes_equal=equal / count if count else 1.0,
        codes_furthest=furthest,
        ranked=ranked,
    )


def _furthest(first: Tensor, second: Tensor) -> float:
    """Return the largest difference over the root mean square; infinity for NaN."""
    size = first.double().square().mean().sqrt().clamp(min=_TINY)
    apart = (first.double() - second.double()).abs().max()
    return float((apart / size).nan_to_num(inf))


@dataclass(frozen=True)
class Tolerance:
    """How much an exported file may differ from the network."""

    # Largest difference of two logits, over their root mean square.
    logits: float = 1e-3
    exact_logits: float = 1e-4  # the same where all codes are equal: float rounding
    # Smallest fraction of images with the same top-1. One of 32 or more may differ.
    top1: float = 0.995
    codes_equal: float = 0.999  # smallest fraction of codes that are equal
    codes_furthest: int = 1  # largest difference of two codes, in steps

    def limit(self, found: Agreement) -> float:
        """Return how much logits may differ: less if all codes are equal."""
        exact = found.codes and found.codes_equal == 1
        return self.exact_logits if exact else self.logits

    def require(self, found: Agreement, against: str) -> None:
        """Raise an ExportError if a file does not compute what it should."""
        allowed = floor(found.images * (1 - self.top1) + 1e-9)
        if found.images >= _ENOUGH_IMAGES:
            allowed = max(1, allowed)
        logits = self.limit(found)
        if (
            round(found.images * (1 - found.top1)) > allowed
            or found.logits > logits
            or found.codes_equal < self.codes_equal
            or found.codes_furthest > self.codes_furthest
        ):
            raise ExportError(
                f"the file disagrees with the {against}: {found}. At least "
                f"{self.top1:.1%} of top-1 and {self.codes_equal:.1%} of codes must be "
                f"equal, codes within {self.codes_furthest} and logits within "
                f"{logits:.1e}. Nothing was written; please report this with the "
                "network and the versions of onnxruntime and the processor"
            )


def steps_tolerance(steps: Steps) -> Tolerance:
    """Return the tolerance of an integer network: logits within about one step."""
    return Tolerance(logits=2 / min(step.grid.qmax for step in steps.steps))


def traced_tolerance(network: nn.Module, samples: Samples) -> Tolerance:
    """Return the tolerance of a network with floats between its integers.

    Floats differ in their last digits between runtimes, which changes some codes, and
    these change others. How much depends on the network. So it is run with noise of
    that size before its quantizers; outputs may differ by four times as much as they
    do then, or by one step of a grid. A few samples are run several times, because a
    single run may change no code by chance.
    """
    quantizers = activation_quantizers(network).values()
    if not quantizers:
        return Tolerance()
    batch = samples.first_batch(_BATCH)
    plain, _ = _observed(network, batch)
    step = 2 / min((1 << quantizer.bits) - 1 for quantizer in quantizers)
    found = max(
        compare_outputs(plain, _observed(network, batch, noise=seed)[0]).logits
        for seed in range(-(-_BATCH // batch_length(batch)))
    )
    # If outputs are that close, top-1 differs only in a tie.
    return Tolerance(logits=max(step, 4 * found), top1=0.0)


def require_codes(model: Any, network: nn.Module, samples: Samples) -> None:
    """Raise an ExportError unless a traced file rounds activations to the right codes.

    A wrong scale in one node shows in its codes even if the outputs hide it. Codes may
    differ from the network's, on average, by four times what noise in the last digits
    of floats does to them, plus a fiftieth of a step.
    """
    clipped = {n.input[0]: n.output[0] for n in model.graph.node if n.op_type == "Clip"}
    names = [n.output[0] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    batch = to_device(samples.first_batch(_WATCHED), torch.device("cpu"))
    _, found = _with_codes(model, [clipped.get(name, name) for name in names], batch)
    _, plain = _observed(network, batch)
    noisy = [_observed(network, batch, noise=seed)[1] for seed in range(_NOISES)]
    for name, codes in zip(names, found, strict=True):
        # The exporter merges and moves nodes, so compare with the codes of every place.
        alike = (
            (_distance(ours, codes), max(_distance(ours, other) for other in moved))
            for ours, *moved in zip(plain, *noisy, strict=True)
            if ours.shape == codes.shape
        )
        apart, noise = min(alike, default=(inf, 0.0))
        if apart > 4 * noise + _CODES_APART:
            raise ExportError(
                f"the file rounds {name} to codes that differ from the network's by "
                f"{apart:.3g} on average; the last digits of floats explain "
                f"{noise:.3g}. Nothing was written; please report this with the "
                "network and the version of onnxruntime"
            )


def _with_codes(
    model: Any, names: Sequence[str], batch: Batch
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a file; return its outputs, and the tensors of these names."""
    from onnx import ModelProto, helper

    watched = ModelProto()
    watched.CopyFrom(model)
    count = len(watched.graph.output)
    watched.graph.output.extend(map(helper.make_empty_tensor_value_info, names))
    results = run_session(open_session(watched.SerializeToString()), batch)
    return results[:count], results[count:]


def _distance(first: Tensor, second: Tensor) -> float:
    return float((first - second.int()).abs().double().mean())


def _observed(
    network: nn.Module, batch: Batch, *, noise: int | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a network; return its outputs, and the codes of uniform grids in order.

    With ``noise``, a seed, noise is added to the last digits before each quantizer.
    """
    quantizers = activation_quantizers(network).values()
    generator = torch.Generator().manual_seed(noise or 0)
    codes: list[Tensor] = []

    def disturb(_quantizer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = args
        drawn = torch.randn(x.shape, generator=generator).to(x)
        return (x + drawn * x.square().mean().sqrt() * _LAST_DIGITS,)

    def note(quantizer: Any, _args: Any, output: Tensor) -> None:
        if quantizer.enabled and not isinstance(quantizer, LogQuantizer):
            levels = (output / quantizer.scale).round() + quantizer.zero_point
            codes.append(levels.int().cpu())

    hooks = [one.register_forward_hook(note) for one in quantizers]
    if noise is not None:
        hooks += [one.register_forward_pre_hook(disturb) for one in quantizers]
    with evaluating(network), attached(hooks):
        output = call(network, to_device(batch, model_device(network)))
    return [tensor.float().cpu() for tensor in tensors_in(output)], codes


def libraries() -> tuple[Any, Any]:
    """Return onnx and onnxruntime."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(error.name or "onnx", "onnx") from error
    return onnx, onnxruntime


def open_session(model: Path | bytes) -> Any:
    """Load a file, or its content, for this machine's CPU, as users do."""
    source = model if isinstance(model, bytes) else str(model)
    return session_of(source, torch.get_num_threads())


def run_session(session: Any, batch: Batch) -> list[Tensor]:
    """Return the outputs for a batch, tensors of (N, ...), the logits first."""
    read = {each.name for each in session.get_inputs()}
    given = {
        name: (one.float() if one.is_floating_point() else one).numpy()
        for name, one in zip(input_names(batch), tensors_in(batch), strict=True)
        if name in read
    }
    return [torch.from_numpy(output) for output in session.run(None, given)]


def against_simulated(
    quantized: nn.Module, session: Any, samples: Samples
) -> Agreement:
    """Compare the outputs of a file with those of a network in PyTorch."""
    ours: list[list[Tensor]] = []
    theirs: list[list[Tensor]] = []
    device = model_device(quantized)
    for batch in samples.batches(_BATCH):
        with evaluating(quantized):
            outputs = tensors_in(call(quantized, to_device(batch, device)))
        ours.append([output.float().cpu() for output in outputs])
        theirs.append(run_session(session, to_device(batch, torch.device("cpu"))))
    first, second = (
        [torch.cat(parts) for parts in zip(*found, strict=True)]
        for found in (ours, theirs)
    )
    return compare_outputs(first, second)


def against_codes(
    model: Any,
    names: Mapping[int, str],
    network: nn.Module,
    steps: Steps,
    images: Tensor,
) -> tuple[Agreement, Agreement]:
    """Compare a file and its codes with the finalized network and with the engine.

    ``names`` holds the name of the tensor of each step's codes.
    """
    outputs, results = _with_codes(model, list(names.values()), images)
    found = dict(zip(names, results, strict=True))
    expected, codes = _observed(network, images)
    places = zip(steps.sites, codes, strict=True)
    pairs = [(one, found[at]) for at, one in places if at is not None]
    simulated = compare_outputs(expected, outputs, pairs)
    engine = IntegerNetwork(steps)
    own = engine.codes(images)
    pairs = [(own[at], one) for at, one in found.items()]
    return simulated, compare_outputs([*engine.run(images).values()], outputs, pairs)


@dataclass(frozen=True)
class ExportResult:
    """A verified file."""

    path: Path
    bytes: int
    opset: int
    weights: tuple[StoredWeight, ...]
    simulated: Agreement  # agreement of ONNX Runtime with the finalized network
    # Agreement with the integer engine, codes included; None if some of it is float.
    engine: Agreement | None
    given: Agreement  # agreement with the network as it was given, before finalizing
    runtime: str  # what it was verified with, for example ``onnxruntime 1.31.1``
    # Whether no processor's 8-bit kernels can saturate. If False, processors without
    # VNNI give other results unless the session option ``session.x64quantprecision``
    # is "1".
    saturation_safe: bool
    floats: Mapping[str, int]  # number of nodes of each kind that compute with floats
    reason: str  # why not everything is in integers; "" if everything is
    limit: float  # how much logits were allowed to differ, as ``simulated.logits``


def export_onnx(  # noqa: PLR0913
    quantized: nn.Module,
    path: str | Path,
    samples: SamplesLike,
    *,
    opset: int = 21,
    engine_images: int = 8,
    network: str = "",
    saturation_safe: bool = True,
    budget: Budget | str | None = None,
) -> ExportResult:
    """Write a quantized network as ONNX and verify that it computes the same.

    Args:
        quantized: From :func:`ompq.quantize`, possibly reconstructed or trained. It is
            finalized first (:func:`ompq.finalize`). If some operation has no integer
            kernel, the file computes with floats there.
        path: Nothing is left there if verification fails.
        samples: Inputs to verify outputs and codes with; see :class:`Tolerance`.
        engine_images: How many samples the integer engine, which is slower, runs.
        network: The network's name, for example ``torchvision:resnet18``.
        saturation_safe: Whether the file is also right on processors without VNNI,
            whose 8-bit kernels saturate. Weights of 8 bits are then restricted to about
            7 in convolutions (see :func:`ompq.finalize`) and unsigned elsewhere.
        budget: A file that exceeds its limit for ONNX is not written.

    Returns:
        The file's size and agreement. In a file of integers (``floats`` is empty) codes
        and outputs of layers are equal to the last bit; an output computed from codes
        with floats, such as a final average, agrees within ``simulated.logits``. For an
        input with NaN the file returns numbers, but PyTorch returns NaN.

    Raises:
        MissingExtraError: onnx or onnxruntime is not installed.
        ExportError: The file does not compute what the network computes, exceeds the
            budget, or PyTorch cannot write its graph.
    """
    onnx, runtime = libraries()
    if opset < SMALLEST_OPSET:
        raise ValueError(f"opset={opset} is too old: use {SMALLEST_OPSET} or later")
    samples = Samples.of(samples)
    finalized, reason = as_integers(quantized, samples, saturation_safe=saturation_safe)
    _check_streams(quantized, opset, reason)
    if finalized is None:
        made = _of_traced(traced_model(quantized, samples, opset), samples, reason)
    else:
        steps = lower(finalized, samples)
        graph = OnnxGraph(steps, opset, saturation_safe=saturation_safe)
        made = _of_steps(graph, finalized, saturation_safe=saturation_safe)
    if network:
        made.model.metadata_props.add(key=NETWORK, value=network)
    if budget is not None:
        excess = Budget.of(budget).excess("onnx_bytes", made.model.ByteSize())
        if excess:
            raise ExportError(f"{path}: {excess}")
    onnx.checker.check_model(made.model, full_check=True)
    with replacing(path) as temporary:
        temporary.write_bytes(made.model.SerializeToString())
        session = open_session(temporary)
        simulated, engine = _verify(made, session, samples, engine_images)
        as_given = against_simulated(quantized, session, samples)
    return ExportResult(
        path=Path(path),
        bytes=Path(path).stat().st_size,
        opset=opset,
        weights=tuple(made.weights),
        simulated=simulated,
        engine=engine,
        given=as_given,
        runtime=f"onnxruntime {runtime.__version__}",
        saturation_safe=made.saturation_safe,
        floats=made.floats,
        reason=made.reason,
        limit=made.tolerance.limit(simulated),
    )


def _check_streams(quantized: nn.Module, opset: int, reason: str) -> None:
    """Raise an ExportError if 16-bit residual streams have no nodes in the file."""
    if all(site.bits <= SUM_BITS for site in quantization_of(quantized).sites):
        return
    advice = "quantize with sum_bits=8"
    if opset < _STREAM_OPSET:
        raise ExportError(
            f"opset={opset} has no nodes for the 16-bit residual streams; use "
            f"{_STREAM_OPSET} or later, or {advice}"
        )
    if reason:
        raise ExportError(
            f"16-bit residual streams can be exported only with integers throughout "
            f"({reason}); {advice}"
        )


@dataclass(frozen=True)
class _Made:
    """A file's content, and what it is compared with."""

    model: Any
    weights: Sequence[StoredWeight]
    network: nn.Module
    tolerance: Tolerance
    steps: Steps | None = None
    codes: Mapping[int, str] = field(default_factory=dict)
    saturation_safe: bool = True
    floats: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""


def as_integers(
    quantized: nn.Module, samples: Samples, *, saturation_safe: bool
) -> tuple[nn.Module | None, str]:
    """Return a finalized network, or None and why integers cannot compute it."""
    if not quantization_of(quantized).sites:
        return None, "activations are float"
    try:
        return finalize(quantized, samples, saturation_safe=saturation_safe), ""
    except QuantizationError as error:
        return None, str(error)


def _of_steps(
    graph: "OnnxGraph", finalized: nn.Module, *, saturation_safe: bool
) -> _Made:
    return _Made(
        graph.model(),
        graph.weights,
        finalized,
        steps_tolerance(graph.steps),
        steps=graph.steps,
        codes=graph.codes,
        saturation_safe=saturation_safe or not _warned(graph.steps),
    )


def _verify(
    made: _Made, session: Any, samples: Samples, engine_images: int
) -> tuple[Agreement, Agreement | None]:
    """Return the file's agreement with the network and with the integer engine."""
    simulated = against_simulated(made.network, session, samples)
    made.tolerance.require(simulated, "simulated network")
    if made.steps is None:
        require_codes(made.model, made.network, samples)
        return simulated, None
    images = first_tensor(samples.first_batch(engine_images))
    given = (made.model, made.codes, made.network, made.steps, images)
    found, engine = against_codes(*given)
    made.tolerance.require(found, "simulated network")
    made.tolerance.require(engine, "integer engine")
    return simulated.with_codes(found), engine


def _of_traced(traced: TracedModel, samples: Samples, reason: str) -> _Made:
    tolerance = traced_tolerance(traced.network, samples)
    if tolerance.logits > _WEAK:
        _logger.warning(
            "the last digits of floats change the network's outputs so much that the "
            "file is only compared within %.2g of their size; check its accuracy",
            tolerance.logits,
        )
    return _Made(
        traced.model,
        traced.weights,
        traced.network,
        tolerance,
        floats=traced.floats,
        reason=reason,
    )


def _warned(steps: Steps) -> bool:
    """Warn about layers that saturate on some processors; return whether any does."""
    layers = steps.saturating()
    if layers:
        _logger.warning(
            "%s: 8-bit products saturate on processors without VNNI, and results "
            'differ there unless the session option session.x64quantprecision is "1"',
            shortened(layers),
        )
    return bool(layers)


class OnnxGraph:
    """The ONNX graph of integer steps, built node by node."""

    def __init__(
        self, steps: Steps, opset: int, *, saturation_safe: bool = True
    ) -> None:
        self.steps = steps
        self.opset = opset
        self.unsigned = set(steps.saturating() if saturation_safe else ())
        layers = (each.operator for each in steps.steps)
        sizes = [one.weight.codes.numel() for one in layers if isinstance(one, Layer)]
        self.unpacking = Unpacking(opset, sizes)
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}
        self.weights: list[StoredWeight] = []
        self.codes: dict[int, str] = {}  # step → name of the tensor of its codes
        self.values: dict[int, str] = {}
        for position, step in enumerate(steps.steps):
            found = self.values if step.grid.wide else self.codes
            found[position] = self._step(step)

    def model(self) -> Any:
        """Return the whole file's content."""
        from onnx import helper

        outputs = []
        for name, position in self.steps.outputs.items():
            self._node("Identity", [self._values(position)], name)
            outputs.append(_described(name, self.steps.steps[position].shape))
        graph = helper.make_graph(
            self.nodes,
            "network",
            [_described(INPUT, self.steps.input_shape)],
            outputs,
            [as_tensor(name, one) for name, one in self.constants.items()],
        )
        opset = helper.make_opsetid("", self.opset)
        return helper.make_model(
            graph,
            producer_name="ompq",
            ir_version=helper.find_min_ir_version_for([opset]),
            opset_imports=[opset],
        )

    def _node(self, kind: str, inputs: list[str], output: str, **given: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [output], **given))
        return output

    def _constant(self, name: str, value: Any, kind: Any) -> str:
        self.constants[name] = np.array(value, dtype=kind)
        return name

    def _step(self, step: Step) -> str:
        """Add a step; return the tensor of its codes, or of wide values."""
        node, operator = step.operator.node(), step.operator
        if node is not None and node.on_codes:
            return self._moved(step, node)
        same_grid = step.grid in self.steps.sources(step)
        if node is None and same_grid:
            return self._clipped(step, self.codes[step.inputs[0]])
        if isinstance(operator, Layer):
            self._weight(step, operator)
        in_bytes = step.grid.dtype == torch.uint8
        # Runtimes fuse only convolutions to bytes; others would add up floats.
        if isinstance(operator, Convolution) and not in_bytes:
            values = self._integer_convolution(step, operator)
        else:
            inputs = [self._values(source) for source in step.inputs] or [INPUT]
            values = inputs[0] if node is None else self._computed(step, node, inputs)
        if not in_bytes:  # there is no Clip of 16 bits
            values = self._limited(step, values)
        if step.grid.wide:
            return values
        inputs = [values, *self._grid(step.grid)]
        codes = self._node("QuantizeLinear", inputs, f"{step.name}/codes")
        return self._clipped(step, codes) if in_bytes else codes

    def _moved(self, step: Step, node: Node) -> str:
        (source,) = step.inputs
        in_bytes = step.grid.dtype == torch.uint8  # ONNX Runtime pads no 16-bit codes
        inputs = [self.codes[source] if in_bytes else self._values(source)]
        for name, value in node.constants.items():
            if value is not None:
                inputs.append(self._constant(f"{step.name}/{name}", value, np.int64))
            elif in_bytes:
                inputs.append(self._grid(step.grid)[1])
        name = f"{step.name}/codes"
        if in_bytes or step.grid.wide:
            return self._node(node.kind, inputs, name, **node.attributes)
        moved = self._node(node.kind, inputs, f"{step.name}/values", **node.attributes)
        return self._node("QuantizeLinear", [moved, *self._grid(step.grid)], name)

    def _values(self, position: int) -> str:
        """Return the tensor of a step's values; dequantizes its codes once."""
        if position not in self.values:
            grid = self._grid(self.steps.steps[position].grid)
            inputs, name = [self.codes[position], *grid], f"/v{position}"
            self.values[position] = self._node("DequantizeLinear", inputs, name)
        return self.values[position]

    def _grid(self, grid: CodeGrid) -> tuple[str, str]:
        kind: Any = np.uint8 if grid.dtype == torch.uint8 else np.uint16
        scale, zero = grid_names(grid.scale, grid.zero_point, kind)
        self._constant(scale, grid.scale, np.float32)
        self._constant(zero, grid.zero_point, kind)
        return scale, zero

    def _limited(self, step: Step, values: str) -> str:
        if (step.low, step.high) == (-inf, inf):
            return values
        ends = [
            self._constant(f"{step.name}/{name}", end, np.float32)
            if isfinite(end)
            else ""
            for name, end in (("low", step.low), ("high", step.high))
        ]
        return self._node("Clip", [values, *ends], f"{step.name}/clip")

    def _clipped(self, step: Step, codes: str) -> str:
        low, high = step.grid.limits(step.low, step.high)
        if (low, high) == (0, _LARGEST_CODE):
            return codes
        ends = [self._constant(f"code/{end:03d}", end, np.uint8) for end in (low, high)]
        return self._node("Clip", [codes, *ends], f"{step.name}/clip")

    def _weight(self, step: Step, layer: Layer) -> None:
        """Add a layer's weight as bytes, its bias, and the accumulator's step."""
        name, weight = step.name, layer.weight
        unsigned = name in self.unsigned
        arrays, nodes = self.unpacking.store(name, weight, unsigned=unsigned)
        arrays[f"{name}/scale"] = weight.scale.numpy().astype(np.float32)
        arrays[f"{name}/bias"] = weight.bias.numpy()
        if unsigned:
            zeros = np.full(len(weight.scale), ZERO_OF_UNSIGNED, np.uint8)
            arrays[f"{name}/zeros"] = zeros
        elif isinstance(layer, Product):
            # ONNX Runtime fuses a Gemm only with the zeros written out.
            arrays[f"{name}/zeros"] = np.zeros(len(weight.scale), np.int8)
        self.weights.append(StoredWeight.of(name, weight, arrays))
        self.constants |= arrays
        self.nodes += nodes
        (source,) = self.steps.sources(step)
        given = [self._grid(source)[0], f"{name}/scale"]
        self._node("Mul", given, f"{self.unpacking.short}/unit")

    def _computed(self, step: Step, node: Node, inputs: list[str]) -> str:
        """Add the node that computes values from values."""
        name, short = step.name, self.unpacking.short
        if isinstance(step.operator, Layer):
            given = [f"{name}/bytes", f"{name}/scale"]
            given += [f"{name}/zeros"] * (f"{name}/zeros" in self.constants)
            shift = [f"{name}/bias", f"{short}/unit"]
            inputs += [
                self._node("DequantizeLinear", given, f"{short}/weight", axis=0),
                self._node("DequantizeLinear", shift, f"{short}/shift", axis=0),
            ]
        return self._node(node.kind, inputs, f"{name}/values", **node.attributes)

    def _integer_convolution(self, step: Step, operator: Convolution) -> str:
        """Add a convolution whose sums are not rounded, which runtimes do not fuse."""
        from onnx import TensorProto

        name, (source,) = step.name, step.inputs
        zero = self._grid(self.steps.steps[source].grid)[1]
        inputs, given = [self.codes[source], f"{name}/bytes", zero], operator.node()
        if name in self.unsigned:  # here ONNX Runtime takes one zero point for all
            inputs.append(self._constant("middle", ZERO_OF_UNSIGNED, np.uint8))
        self._node("ConvInteger", inputs, f"{name}/products", **given.attributes)
        shape = self._constant("channels", (1, -1, 1, 1), np.int64)
        short = self.unpacking.short
        bias = self._node("Reshape", [f"{name}/bias", shape], f"{short}/bias")
        unit = self._node("Reshape", [f"{short}/unit", shape], f"{short}/units")
        self._node("Add", [f"{name}/products", bias], f"{short}/sums")
        self._node("Cast", [f"{short}/sums"], f"{short}/floats", to=TensorProto.FLOAT)
        inputs = [f"{short}/floats", unit]
        return self._node("Mul", inputs, f"{name}/values")


def _described(name: str, shape: tuple[int, ...]) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])
