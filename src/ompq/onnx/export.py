"""export_onnx(): a file that is small, runs with int8 kernels, and is verified."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ompq.costs import Budget
from ompq.errors import ExportError, QuantizationError, shortened
from ompq.files import replacing
from ompq.integer.arithmetic import CodeGrid
from ompq.integer.finalization import finalize
from ompq.integer.lowering import INPUT, Steps, lower
from ompq.integer.operators import Convolution, Layer, Node, Product, Step
from ompq.onnx.containers import (
    ZERO_OF_UNSIGNED,
    Array,
    StoredWeight,
    Unpacking,
    as_tensor,
    grid_names,
)
from ompq.onnx.inspection import NETWORK
from ompq.onnx.traced import TracedModel, traced_model
from ompq.onnx.verification import (
    Agreement,
    Tolerance,
    against_codes,
    against_simulated,
    libraries,
    open_session,
    require_codes,
    steps_tolerance,
    traced_tolerance,
)
from ompq.quantization import quantization_of
from ompq.samples import Samples, SamplesLike, first_tensor

_WEAK = 0.5  # a limit that tells little, relative to the size of outputs
SMALLEST_OPSET = 18  # the first with a mask of bits
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportResult:
    """A verified file."""

    path: Path
    bytes: int
    opset: int  # version of the standard operators in it
    weights: tuple[StoredWeight, ...]
    simulated: Agreement  # agreement of ONNX Runtime with the finalized network
    # Agreement of ONNX Runtime with the integer engine, codes included; None where
    # integers do not cover the network.
    engine: Agreement | None
    # Agreement of ONNX Runtime with the network as it was given. It equals
    # ``simulated`` if that was finalized already.
    given: Agreement
    runtime: str  # what it was verified with, for example ``onnxruntime 1.31.1``
    # Whether no processor's 8-bit kernels can saturate. False only where
    # ``saturation_safe=False`` was asked for: then processors without VNNI compute
    # something else, unless a session's option ``session.x64quantprecision`` is "1".
    saturation_safe: bool
    # Kinds of nodes that compute with floats, and how many there are of each; and why
    # not everything is in integers. Empty where it is.
    floats: Mapping[str, int]
    reason: str
    # How far outputs were allowed to be from the network's, as ``simulated.logits``.
    limit: float


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
        quantized: From :func:`ompq.quantize`, perhaps reconstructed or trained. It
            is finalized first (:func:`ompq.finalize`). Where integers do not cover it,
            the file computes with floats between them.
        path: The file to write; nothing is left there when verification fails.
        samples: Inputs to verify with; all are run. The file must agree with the
            network in its outputs and its codes; see :class:`Tolerance`.
        opset: Version of the standard operators.
        engine_images: How many samples the integer engine, which is slower, runs.
        network: The network's name, for example ``torchvision:resnet18``.
        saturation_safe: Whether the file is right on processors without VNNI too, whose
            8-bit kernels saturate. Weights of 8 bits are then restricted to about 7 in
            convolutions (see :func:`ompq.finalize`) and unsigned in the other layers.
        budget: The plan's; a file above what it allows for ONNX is not written.

    Returns:
        Where the file is, how large, and how nearly it agrees. In a file of integers
        (``floats`` is empty) codes are equal to the last bit, and so are outputs of
        layers; an output that is computed from codes with floats, such as a final
        average, agrees within ``simulated.logits``. An input that holds NaN gives
        numbers in the file, since no integer stands for it, and NaN in PyTorch.

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
    if finalized is None:
        made = _of_traced(traced_model(quantized, samples, opset), samples, reason)
    else:
        steps = lower(finalized, samples)
        graph = OnnxGraph(steps, opset, saturation_safe=saturation_safe)
        made = _of_steps(graph, finalized, saturation_safe=saturation_safe)
    if network:
        made.model.metadata_props.add(key=NETWORK, value=network)
    _check_size(path, made.model.ByteSize(), budget)
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


def _check_size(path: str | Path, size: int, budget: Budget | str | None) -> None:
    excess = "" if budget is None else Budget.of(budget).excess("onnx_bytes", size)
    if excess:
        raise ExportError(f"{path}: {excess}")


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
    """Return a network that integers compute; or None, and why they cannot."""
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
    """Return how a file agrees with the network and with the integer engine."""
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
    """Warn of layers that saturate on some processors; return whether any does."""
    layers = steps.saturating()
    if layers:
        _logger.warning(
            "%s: 8-bit products saturate on processors without VNNI, and results "
            'differ there unless the session option session.x64quantprecision is "1"',
            shortened(layers),
        )
    return bool(layers)


_LARGEST_CODE = 255  # of a byte


class OnnxGraph:
    """The graph of a network while it is written, node by node."""

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
        if isinstance(operator, Convolution) and step.grid.wide:
            values = self._integer_convolution(step, operator)
        else:
            inputs = [self._values(source) for source in step.inputs] or [INPUT]
            values = inputs[0] if node is None else self._computed(step, node, inputs)
        if step.grid.wide:
            return self._limited(step, values)
        inputs = [values, *self._grid(step.grid)]
        codes = self._node("QuantizeLinear", inputs, f"{step.name}/codes")
        return self._clipped(step, codes)

    def _moved(self, step: Step, node: Node) -> str:
        (source,) = step.inputs
        inputs = [self.values[source] if step.grid.wide else self.codes[source]]
        for name, value in node.constants.items():
            if value is not None:
                inputs.append(self._constant(f"{step.name}/{name}", value, np.int64))
            elif not step.grid.wide:
                inputs.append(self._grid(step.grid)[1])
        return self._node(node.kind, inputs, f"{step.name}/codes", **node.attributes)

    def _values(self, position: int) -> str:
        """Return the tensor of a step's values; dequantizes its codes once."""
        if position not in self.values:
            grid = self._grid(self.steps.steps[position].grid)
            inputs, name = [self.codes[position], *grid], f"/v{position}"
            self.values[position] = self._node("DequantizeLinear", inputs, name)
        return self.values[position]

    def _grid(self, grid: CodeGrid) -> tuple[str, str]:
        scale, zero = grid_names(grid.scale, grid.zero_point)
        self._constant(scale, grid.scale, np.float32)
        self._constant(zero, grid.zero_point, np.uint8)
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
        """Add a convolution whose sums are not rounded: runtimes fuse no such Conv."""
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
