"""Export of any network whose graph PyTorch can write, with integers where quantized.

Weights are integers that a DequantizeLinear or, where no kernel multiplies integers, a
product turns into floats. Activations are rounded by pairs of QuantizeLinear and
DequantizeLinear. Everything else is float, and so are products with weights that have
group-wise scales.
"""

import io
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from keyword import iskeyword
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ompq.bit_widths import FLOAT_BITS
from ompq.errors import ExportError, QuantizationError, shorten
from ompq.grids import Grid, integer_weight, of_groups
from ompq.integer.arithmetic import CodeGrid, IntegerWeight
from ompq.integer.lowering import code_grid, input_names, output_names
from ompq.layers import (
    ActivationQuantizer,
    LogQuantizer,
    activation_quantizers,
    plain_class,
    quantized_layers,
)
from ompq.network.dataflow import OUTSIDE, Dataflow
from ompq.network.graph import bias_key
from ompq.network.observation import copy_network, is_script, open_modules, tensors_in
from ompq.network.passive import CLIPS, COPIES, LAYOUTS, MERGES, POOLS, VIEWS
from ompq.network.units import Choice, Unit
from ompq.packed.format import broadcast_grid, in_steps, quantized_units
from ompq.quantization.record import quantization_of
from ompq.runtimes.inspection import LENGTH
from ompq.runtimes.onnx.weight_containers import (
    ZERO_OF_UNSIGNED,
    Array,
    StoredWeight,
    Unpacking,
    as_tensor,
    grid_names,
)
from ompq.samples import (
    Batch,
    Samples,
    SamplesLike,
    call,
    evaluating,
    map_batch,
    model_device,
    to_device,
)

_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_DOMAIN, _WEIGHT = "ompq", "Weight"  # placeholder node for a weight
_MULTIPLIED = {"Conv", "Gemm", "MatMul"}  # computed by 8-bit kernels
_WEIGHTED = _MULTIPLIED | {"ConvTranspose"}
_BYTE, _LARGEST_CODE = 8, 255  # bits of a byte, and its largest value
_BLOCKS_OPSET = 21  # the first in which blocks of a tensor have scales
_PASSED = LAYOUTS | POOLS  # runtimes let the codes of their input pass
# Nodes that runtimes compute with integers, and nodes that compute nothing.
_INTEGER = POOLS | _MULTIPLIED | {"Add", "AveragePool", "GlobalAveragePool"}
_SILENT = VIEWS | COPIES | MERGES | {
    "Cast", "Constant", "ConstantOfShape", "Range", "Shape", _QUANTIZE, _DEQUANTIZE,
}  # fmt: skip


@dataclass(frozen=True)
class TracedModel:
    """The content of a file."""

    model: Any
    weights: tuple[StoredWeight, ...]
    network: nn.Module  # with its biases rounded as in the file
    floats: Mapping[str, int]  # kind of node that computes with floats → how many
    float_layers: tuple[str, ...] = ()  # quantized, but multiplied as floats
    length: int = 0  # of the samples, if texts may have any; 0 if their shape is fixed


def traced_model(
    quantized: nn.Module, samples: SamplesLike, opset: int, *, lengths: bool = True
) -> TracedModel:
    """Return the file of any quantized network.

    Args:
        lengths: Whether texts may have other lengths than the samples, if PyTorch can
            write such a graph.

    Raises:
        ExportError: PyTorch cannot write the network as ONNX, or the opset is too old
            for group-wise scales.
    """
    record = quantization_of(quantized)
    units, size = quantized_units(record), record.graph.group_size
    if size and opset < _BLOCKS_OPSET:
        raise ExportError(
            f"groups of {size} weights have scales of their own, which opset={opset} "
            f"cannot express: use {_BLOCKS_OPSET} or later"
        )
    network = _host_copy(quantized)
    for unit in units:
        _hold(network, unit, opset)
    for quantizer in activation_quantizers(network).values():
        if not isinstance(quantizer, LogQuantizer):  # no ONNX node rounds like it
            _mark(quantizer, opset)
    batch = Samples.of(samples).first_batch(2)
    length = text_length(batch) if lengths else 0
    written, length = _written_texts(network, quantized, batch, opset, length)
    rounded = copy_network(quantized)
    state = rounded.state_dict()
    sizes = [state[unit.parameter].numel() for unit in units]
    graph = _Graph(written, Unpacking(opset, sizes))
    stored = []
    for unit in units:
        bits = record.allocation[unit.name].weight
        stored.append(graph.store(unit, *_codes(state, unit, bits)))
    for unit in units:
        if unit.name in graph.biases:
            state[bias_key(unit)].copy_(graph.biases[unit.name])
    graph.finish()
    floats = dict(graph.floats())
    slow = tuple(graph.float_layers)
    return TracedModel(graph.model, tuple(stored), rounded, floats, slow, length)


def float_model(model: nn.Module, samples: SamplesLike, opset: int = 21) -> Any:
    """Return the ONNX file of a float network, as PyTorch writes it."""
    network = _host_copy(model)
    return _written(network, model, Samples.of(samples).first_batch(2), opset)


def _host_copy(model: nn.Module) -> nn.Module:
    """Return a copy that PyTorch can write, in host memory."""
    scripts = [name for name, m in open_modules(model) if is_script(m)]
    if scripts:
        raise ExportError(
            f"{shorten(scripts)}: PyTorch cannot write TorchScript modules as ONNX; "
            "build the network from the modules that were compiled"
        )
    return copy_network(model).cpu()


class _Held(nn.Module):
    """A placeholder node for a weight, which holds its unit's name."""

    def __init__(self, unit: str, opset: int) -> None:
        super().__init__()
        self.unit, self.opset = unit, opset

    def forward(self, weight: Tensor) -> Any:
        given: Any = {"dtype": torch.float32, "shape": weight.shape}
        kind, version = f"{_DOMAIN}::{_WEIGHT}", self.opset
        node = torch.onnx.ops.symbolic
        made = node(kind, (), {"unit": self.unit}, version=version, **given)
        return made.to(weight.dtype)


def _hold(network: nn.Module, unit: Unit, opset: int) -> None:
    """Replace a unit's weight by a placeholder node, wherever it is read."""
    weight = network.get_parameter(unit.parameter)
    layer = quantized_layers(network).get(unit.name)
    if layer is not None:
        layer.check_uniform()
        layer.__class__ = plain_class(layer)
    for module in list(network.modules()):
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if parameter is weight:
                held = _Held(unit.name, opset)
                parametrize.register_parametrization(module, leaf, held, unsafe=True)
                if isinstance(module, nn.RNNBase):
                    module.register_forward_pre_hook(_read_weights)


def _read_weights(module: Any, _args: Any) -> None:
    """Update the list of weights that a recurrent layer keeps."""
    module._flat_weights = [getattr(module, key) for key in module._flat_weights_names]


class _Marked(ActivationQuantizer):
    """Writes the ONNX nodes that round in the file."""

    opset: int

    def forward(self, x: Tensor) -> Any:
        node: Any = partial(torch.onnx.ops.symbolic, shape=x.shape, version=self.opset)
        grid = (self.get_buffer("step"), self.get_buffer("zero"))
        codes = node(_QUANTIZE, (x.float(), *grid), dtype=torch.uint8)
        if self.bits < _BYTE:
            ends = (self.get_buffer("low"), self.get_buffer("high"))
            codes = node("Clip", (codes, *ends), dtype=torch.uint8)
        return node(_DEQUANTIZE, (codes, *grid), dtype=torch.float32).to(x.dtype)


def _mark(quantizer: ActivationQuantizer, opset: int) -> None:
    grid = code_grid(quantizer)
    quantizer.register_buffer("step", torch.tensor(grid.scale))
    for name, code in (("zero", grid.zero_point), ("low", 0), ("high", grid.qmax)):
        quantizer.register_buffer(name, torch.tensor(code, dtype=torch.uint8))
    quantizer.__class__ = _Marked
    cast(_Marked, quantizer).opset = opset


def text_length(batch: Batch) -> int:
    """Return the number of tokens of each text in a batch; 0 if there are no texts."""
    kinds = (torch.int32, torch.int64)
    texts = (t for t in tensors_in(batch) if t.dim() == 2 and t.dtype in kinds)
    return next((text.shape[1] for text in texts), 0)


def cut_texts(batch: Batch, length: int) -> Batch:
    """Return the first tokens of each text, and what belongs to them."""
    whole = text_length(batch)
    return map_batch(
        batch, lambda t: t[:, :length] if t.dim() > 1 and t.shape[1] == whole else t
    )


def _written_texts(
    network: nn.Module, original: nn.Module, batch: Batch, opset: int, length: int
) -> tuple[Any, int]:
    """Return a graph that takes texts of any length, if possible, and their length.

    The length is 0 if the graph takes only inputs of one shape.
    """
    if length:
        with suppress(ExportError):  # PyTorch may be able to write this length alone
            model = _written(network, original, batch, opset, length)
            model.metadata_props.add(key=LENGTH, value=str(length))
            _name_lengths(model)
            return model, length
    return _written(network, original, batch, opset), 0


def _name_lengths(model: Any) -> None:
    """Name the second dimension of texts "length", which PyTorch only numbers."""
    dims = [
        dim
        for value in (*model.graph.input, *model.graph.output)
        for dim in value.type.tensor_type.shape.dim
    ]
    unnamed = {dim.dim_param for dim in dims} - {"", "batch"}
    for dim in dims if len(unnamed) == 1 else ():
        if dim.dim_param in unnamed:
            dim.dim_param = LENGTH


def _written(
    network: nn.Module, original: nn.Module, batch: Batch, opset: int, length: int = 0
) -> Any:
    """Return the graph of a network that computes what the original does.

    If ``length`` is given, second dimensions of this size are those of texts and may
    change.
    """
    if not hasattr(torch.onnx, "ops"):
        raise ExportError(
            f"PyTorch {torch.__version__} cannot write this network; PyTorch 2.8 or "
            "newer is needed"
        )
    network = _named_plainly(network)
    arguments = () if isinstance(batch, dict) else tuple(tensors_in(batch))
    named = batch if isinstance(batch, dict) else {}
    names = input_names(batch)
    try:
        with evaluating(original):
            outputs = call(original, to_device(batch, model_device(original)))
        with evaluating(network), _quiet():
            program: Any = torch.onnx.export(
                network,
                arguments,
                None,
                kwargs=named,
                dynamo=True,
                input_names=names,
                output_names=output_names(outputs),
                dynamic_shapes=_dynamic_shapes(network, arguments, named, length),
                opset_version=opset,
                verbose=False,
            )
    except Exception as error:
        reason = _plain(error)
        raise ExportError(
            f"PyTorch cannot write the network as ONNX: {reason}. A network whose "
            "path depends on values, such as a detector, can be exported by the part "
            "that takes a batch; the cause of this error is PyTorch's whole report"
        ) from error
    written = program.model_proto
    _strip(written)
    return written


def _dynamic_shapes(
    network: nn.Module, args: Any, kwargs: Any, length: int
) -> dict[str, Any]:
    """Return which dimensions of the inputs may change, by parameter of ``forward``."""
    first = {0: torch.export.Dim("batch")}
    # Which lengths are possible depends on the network, and PyTorch finds out.
    both = {**first, 1: torch.export.Dim.DYNAMIC}

    def shapes(given: Any) -> Any:
        if isinstance(given, Tensor):
            text = length > 0 and given.dim() > 1 and given.shape[1] == length
            return both if text else first
        if isinstance(given, dict):
            return {key: shapes(each) for key, each in given.items()}
        return tuple(map(shapes, given))

    bound = signature(network.forward).bind(*args, **kwargs)
    return {name: shapes(given) for name, given in bound.arguments.items()}


class _Single(nn.Module):
    """The class of a network on one device that was an ``nn.DataParallel``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule("module")(*args, **kwargs)


class _Flat(nn.Module):
    """Runs a network with parameters and buffers of its own, under plain names."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.hidden = [network]  # in a list, so that its modules are not this one's
        self.eval()
        state = dict(network.named_parameters())
        self.buffered = dict(network.named_buffers())
        self.names = [*state, *self.buffered]
        for number, name in enumerate(self.names):
            if name in state:
                self.register_parameter(f"state_{number}", state[name])
            else:
                self.register_buffer(f"state_{number}", self.buffered[name])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = (getattr(self, f"state_{number}") for number in range(len(self.names)))
        state = dict(zip(self.names, own, strict=True))
        return torch.func.functional_call(self.hidden[0], state, args, kwargs)


def _named_plainly(network: nn.Module) -> nn.Module:
    """Return a network with plain module names, which PyTorch turns into code."""
    if isinstance(network, nn.DataParallel):
        network.__class__ = _Single  # type: ignore[assignment]
    parts = {part for name, _ in network.named_modules() for part in name.split(".")}
    plain = all(re.fullmatch(r"\w*", part) and not iskeyword(part) for part in parts)
    return network if plain else _Flat(network)


def _plain(error: Exception) -> str:
    """Return the first sentence of an error, without colours."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().partition("\n")[0]
    return line.partition(". This is step")[0].rstrip(".")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's own warnings and messages."""
    names = ("torch.onnx", "torch.fx.experimental.symbolic_shapes")
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    fast = torch.backends.mha.get_fastpath_enabled()
    for logger in levels:
        logger.setLevel(logging.ERROR)
    # ONNX has no operator for the fused kernel of a whole attention.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        # Where it fails, it prints all that it has traced: thousands of lines.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(fast)


def _strip(model: Any) -> None:
    """Remove traces of the machine that wrote it: stack traces, paths, comments."""
    model.producer_name, model.producer_version = "ompq", ""
    model.doc_string = ""
    del model.metadata_props[:]
    graph = model.graph
    graph.name, graph.doc_string = "network", ""
    del graph.metadata_props[:]
    del graph.value_info[:]
    for part in (graph.node, graph.initializer, graph.input, graph.output):
        for one in part:
            one.doc_string = ""
            del one.metadata_props[:]


def _codes(state: Mapping[str, Tensor], unit: Unit, bits: int) -> tuple[Tensor, Grid]:
    """Return a unit's codes, and their grid, shaped to broadcast with them."""
    scale, zero_point, weight = (
        state[f"{unit.parameter}{name}"].detach().cpu()
        for name in ("_scale", "_zero_point", "")
    )
    grid = broadcast_grid(Grid(scale, zero_point, bits), unit, weight.device)
    return grid.quantize(weight), grid


def _whole(codes: Tensor, grid: Grid) -> IntegerWeight:
    """Return a weight as integers that give exactly its float values."""
    values, factor = integer_weight(codes, grid.zero_point, grid.bits)
    return IntegerWeight(
        codes=codes,
        bits=grid.bits,
        unit=round(1 / factor),
        offset=(grid.zero_point / factor).int(),
        stretch=torch.ones((), dtype=torch.int32),
        values=values,
        scale=grid.scale * factor,
        bias=torch.zeros((), dtype=torch.int32),
    )


def _passes(operation: "_Node") -> bool:
    return operation.function in _PASSED


def _clips(operation: "_Node") -> bool:
    return operation.function in CLIPS


def _is_dequantized(name: str, made: Mapping[str, Any]) -> bool:
    """Whether a tensor comes from codes, given the nodes that make tensors."""
    while name in made and made[name].op_type in LAYOUTS:
        name = made[name].input[0]
    return name in made and made[name].op_type == _DEQUANTIZE


def _names_read(nodes: Iterable[Any]) -> set[str]:
    """Return the names of tensors that nodes read, also inside loops and branches."""
    found: set[str] = set()
    for node in nodes:
        found.update(node.input)
        for given in node.attribute:
            for graph in (given.g, *given.graphs):
                found |= _names_read(graph.node)
    return found


class _Use(NamedTuple):
    """A node that multiplies codes with a weight."""

    node: Any
    turned: Any  # the node that transposes the weight before it, or None
    source: CodeGrid  # grid of the codes
    step: str  # name of the constant that holds their scale


class _Node(NamedTuple):
    """A node as a walk through the graph sees it."""

    node: Any
    inputs: tuple[int, ...]  # nodes that compute what it reads; OUTSIDE for others

    @property
    def function(self) -> str:
        return str(self.node.op_type)


class _Graph:
    """The graph of a network while its weights are replaced by integers."""

    def __init__(self, model: Any, unpacking: Unpacking) -> None:
        self.model, self.unpacking = model, unpacking
        self.nodes = list(model.graph.node)
        self.made: list[Any] = []  # nodes that compute weights; they come first
        self.constants: dict[str, Any] = {t.name: t for t in model.graph.initializer}
        self.outputs = {output.name for output in model.graph.output}
        self._share_grids()
        self._drop_idle_relus()
        self.places = {n: at for at, one in enumerate(self.nodes) for n in one.output}
        self.dataflow = self._dataflow()
        self.float_layers: list[str] = []  # whose weights no 8-bit kernel multiplies
        self.multiplied: list[Any] = []  # nodes that 8-bit kernels compute
        self.biases: dict[str, Tensor] = {}  # of units, rounded to whole steps
        self.held: dict[str, list[Any]] = {}  # unit → placeholders of its weight
        for node in self.nodes:
            if node.domain == _DOMAIN:
                unit = node.attribute[0].s.decode()
                self.held.setdefault(unit, []).append(node)

    def _dataflow(self) -> Dataflow[_Node]:
        """Return who reads what; of what passes values on, only the values count."""
        found = []
        for node in self.nodes:
            names = node.input[:1] if node.op_type in _PASSED else node.input
            inputs = (self.places.get(name, OUTSIDE) for name in names)
            found.append(_Node(node, tuple(inputs)))
        returned = {self.places[name] for name in self.outputs & self.places.keys()}
        return Dataflow(found, returned)

    def _share_grids(self) -> None:
        """Name scales and zero points of activations by value, so they are shared."""
        for node in self.nodes:
            if node.op_type in (_QUANTIZE, _DEQUANTIZE, "Clip"):
                for at, given in enumerate(node.input[1:], start=1):
                    value = self._value(given)
                    if value.dtype == np.uint8:
                        kind = "code" if node.op_type == "Clip" else "zero"
                        name = f"{kind}/{value:03d}"
                    elif node.op_type != "Clip":
                        name = grid_names(float(value), 0)[0]
                    else:
                        continue
                    node.input[at] = self._constant(name, value)

    def _drop_idle_relus(self) -> None:
        """Remove each ReLU that reads values of a grid that begins at 0.

        ONNX Runtime would remove it itself, find a convolution of codes with a float
        weight, and round that weight to 8 bits in its own way.
        """
        positive = {
            node.output[0]
            for node in self.nodes
            if node.op_type == _DEQUANTIZE and not self._value(node.input[2]).any()
        }
        idle = {
            node.output[0]: node
            for node in self.nodes
            if node.op_type == "Relu" and node.input[0] in positive
        }
        for name in self.outputs & idle.keys():
            del idle[name]
        for node in self.nodes:
            for at, name in enumerate(node.input):
                if name in idle:
                    node.input[at] = idle[name].input[0]
        self.nodes = [n for n in self.nodes if n.output[0] not in idle]

    def _value(self, name: str) -> Array:
        from onnx import numpy_helper

        value = self.constants[name]
        array: Array = (
            value if isinstance(value, np.ndarray) else numpy_helper.to_array(value)
        )
        return array

    def _constant(self, name: str, value: Any) -> str:
        self.constants[name] = value
        return name

    def _node(self, kind: str, inputs: list[str], output: str, **given: Any) -> str:
        from onnx import helper

        self.made.append(helper.make_node(kind, inputs, [output], **given))
        return output

    def store(self, unit: Unit, codes: Tensor, grid: Grid) -> StoredWeight:
        """Replace the placeholders of a unit's weight by integers."""
        name, places = unit.name, self.held.get(unit.name, [])
        if not places:
            raise ExportError(
                f"{name}: its weight is not in the graph that PyTorch wrote; pin it to "
                "32 bits to keep it float"
            )
        # The accumulator of an 8-bit kernel has one scale, so groups are not supported.
        grouped = unit.group_size > 0 and grid.scale.shape == codes.shape
        use = None if grouped else self._use(places)
        weight = None if use is None else self._multiplied(unit, codes, grid, use)
        if weight is None:
            self.float_layers += [name] * (unit.kind != "embedding")
            make = self._blocks if grouped else self._product
            weight = make(unit, codes, grid)
            for place in places:
                self._node("Identity", [f"{name}/weight"], place.output[0])
        own = {k: v for k, v in self.constants.items() if k.startswith(f"{name}/")}
        return StoredWeight.of(name, weight, own)

    def _product(self, unit: Unit, codes: Tensor, grid: Grid) -> IntegerWeight:
        """Turn a weight into floats by a multiplication, which no runtime fuses."""
        name, weight = unit.name, _whole(codes, grid)
        self._unpack(name, weight)
        if unit.kind == "transposed":
            self._transposed(name, weight.scale.flatten().numpy())
            return weight
        self._node("Cast", [f"{name}/bytes"], f"{name}/levels", to=1)
        given = [f"{name}/levels", f"{name}/scale"]
        self._constant(f"{name}/scale", weight.scale.numpy())
        self._node("Mul", given, f"{name}/weight")
        return weight

    def _transposed(self, name: str, scale: Array) -> None:
        """Dequantize the weight and bias of a transposed convolution.

        Between codes, ONNX Runtime would round float weights in its own way.
        """
        given = [
            f"{name}/bytes",
            self._constant(f"{name}/scale", scale),
            self._constant(f"{name}/zeros", np.zeros(len(scale), np.int8)),
        ]
        self._node(_DEQUANTIZE, given, f"{name}/weight", axis=1)
        [place, *others] = self.held[name]
        node = None if others else self._reader(place)
        source = None if node is None else self._dequantized(node.input[0])
        shift = node.input[2] if node is not None and len(node.input) > 2 else ""
        if node is None or source is None or shift not in self.constants:
            return
        bias = self._value(shift)
        # The channels of all groups have the same scales.
        step = np.resize(scale, len(bias)) * np.float32(self._value(source.input[1]))
        codes = np.rint(bias / step).astype(np.int32)
        self.biases[name] = torch.from_numpy(codes * step)
        given = [
            self._constant(f"{name}/bias", codes),
            self._constant(f"{name}/unit", step),
        ]
        node.input[2] = self._node(_DEQUANTIZE, given, f"{name}/shift", axis=0)

    def _blocks(self, unit: Unit, codes: Tensor, grid: Grid) -> IntegerWeight:
        """Dequantize a weight whose groups have scales and zero points."""
        name, size = unit.name, unit.shared_by(Choice(grid.bits, FLOAT_BITS))
        if not in_steps(grid.zero_point, grid.bits):
            raise ExportError(
                f"{name}: ONNX cannot hold the minima of blocks of GGUF; plan without "
                "target='gguf'"
            )
        # Codes are stored as they are, around the middle one.
        middle = torch.full((1, 1), float(1 << (grid.bits - 1)))
        weight = _whole(codes, replace(grid, zero_point=middle))
        weight = replace(weight, scale=of_groups(weight.scale, size))
        zeros = of_groups(grid.zero_point - middle, size) * weight.unit
        self._unpack(name, weight)
        given = [
            f"{name}/bytes",
            self._constant(f"{name}/scale", weight.scale.numpy()),
            self._constant(f"{name}/zeros", zeros.to(torch.int8).numpy()),
        ]
        self._node(_DEQUANTIZE, given, f"{name}/weight", axis=1, block_size=size)
        return weight

    def _use(self, places: Sequence[Any]) -> _Use | None:
        """Return the 8-bit multiplication with a weight, if it is its only use."""
        node, turned = self._reader(places[0]) if len(places) == 1 else None, None
        if node is not None and node.op_type == "Transpose":
            node, turned = self._reader(node), node
        if node is None or node.op_type not in _MULTIPLIED or self._scaled(node):
            return None
        source = self._dequantized(node.input[0])
        if source is None or (node.op_type == "Conv" and not self._rounded(node)):
            return None
        step, zero = source.input[1:3]
        clip = self._producer(source)
        highest = (
            self._value(clip.input[2]) if clip.op_type == "Clip" else _LARGEST_CODE
        )
        bits = int(highest).bit_length()
        grid = CodeGrid(float(self._value(step)), int(self._value(zero)), bits)
        return _Use(node, turned, grid, step)

    def _producer(self, node: Any) -> Any:
        """Return the node that computes what a node reads first, or None."""
        place = self.places.get(node.input[0])
        return None if place is None else self.dataflow.operations[place].node

    def _reader(self, node: Any) -> Any:
        """Return the only node that reads a node's output, or None."""
        reader = self.dataflow.only_reader(self.places[node.output[0]])
        return None if reader is None else self.dataflow.operations[reader].node

    def _scaled(self, node: Any) -> bool:
        """Whether a Gemm does more than multiply and add."""
        return any(
            one.name in ("alpha", "beta") and one.f != 1 for one in node.attribute
        )

    def _dequantized(self, name: str) -> Any:
        """Return the node that dequantizes a tensor, before any moves; or None."""
        if name not in self.places:
            return None
        walk = self.dataflow.back([self.places[name]], _passes)
        found = [self.dataflow.operations[at].node for at in walk.ends if at != OUTSIDE]
        alone = len(found) == len(walk.ends) == 1 and found[0].op_type == _DEQUANTIZE
        return found[0] if alone else None

    def _rounded(self, node: Any) -> bool:
        """Whether every reader of a node's output, perhaps clipped, quantizes it."""
        clips = self.dataflow.chain(self.places[node.output[0]], _clips)
        *_, (last, _) = (node, ()), *clips
        readers = self.dataflow.readers(self.places[last.output[0]])
        kinds = {self.dataflow.operations[at].function for at in readers}
        return kinds == {_QUANTIZE}

    def _multiplied(
        self, unit: Unit, codes: Tensor, grid: Grid, use: _Use
    ) -> IntegerWeight | None:
        """Store a weight and its bias for an 8-bit kernel; None if it cannot be."""
        name, (node, turned, source, step) = unit.name, use
        shift = node.input[2] if len(node.input) > 2 else ""
        bias = torch.tensor(self._value(shift)) if shift in self.constants else None
        if shift and (bias is None or bias.shape != (len(codes),)):
            return None
        try:
            weight = IntegerWeight.of(codes, grid, bias, source)
        except QuantizationError:  # its sums may exceed 32 bits
            return None
        unsigned = bool(weight.pair_excess(source).max() > 1)
        self._unpack(name, weight, unsigned=unsigned)
        kind, zero = (np.uint8, ZERO_OF_UNSIGNED) if unsigned else (np.int8, 0)
        scale = self._constant(f"{name}/scale", weight.scale.numpy().astype(np.float32))
        zeros = self._constant(f"{name}/zeros", np.full(len(codes), zero, kind))
        place, (given,) = f"{name}/bytes", self.held[name]
        if turned is not None:
            place = self._node("Transpose", [place], f"{name}/turned")
            self.nodes.remove(turned)
            given = turned
        axis = int(turned is not None)
        self._node(_DEQUANTIZE, [place, scale, zeros], given.output[0], axis=axis)
        self.multiplied.append(node)
        if bias is not None:
            self.biases[name] = weight.bias * weight.scale * source.scale
            self._constant(f"{name}/bias", weight.bias.numpy())
            self._node("Mul", [step, scale], f"{name}/unit")
            inputs = [f"{name}/bias", f"{name}/unit"]
            node.input[2] = self._node(_DEQUANTIZE, inputs, f"{name}/shift", axis=0)
        return weight

    def _unpack(
        self, name: str, weight: IntegerWeight, *, unsigned: bool = False
    ) -> None:
        arrays, nodes = self.unpacking.store(name, weight, unsigned=unsigned)
        self.constants |= arrays
        self.made += nodes

    def _guard(self) -> None:
        """Keep ONNX Runtime from rounding float weights, which it does between codes.

        A maximum of one tensor is this tensor, which the runtime does not know.
        """
        from onnx import helper

        made = {name: one for one in [*self.made, *self.nodes] for name in one.output}
        nodes: list[Any] = []
        guarded: set[str] = set()
        for node in self.nodes:
            if self._is_exposed(node) and not _is_dequantized(node.input[1], made):
                plain, name = node.input[0], f"{node.input[0]}/float"
                if name not in guarded:
                    nodes.append(helper.make_node("Max", [plain], [name]))
                guarded.add(name)
                node.input[0] = name
            nodes.append(node)
        self.nodes = nodes

    def _is_exposed(self, node: Any) -> bool:
        """Whether a node reads and returns codes but must compute with floats."""
        if node.op_type not in _WEIGHTED or node in self.multiplied:
            return False
        return self._dequantized(node.input[0]) is not None and self._rounded(node)

    def finish(self) -> None:
        """Move the new nodes and constants into the graph."""
        self._guard()
        graph = self.model.graph
        nodes = [*self.made, *(n for n in self.nodes if n.domain != _DOMAIN)]
        del graph.node[:], graph.initializer[:]
        graph.node.extend(nodes)
        read = _names_read(nodes) | self.outputs
        graph.initializer.extend(
            as_tensor(name, value)
            for name, value in self.constants.items()
            if name in read
        )
        kept = [each for each in self.model.opset_import if each.domain != _DOMAIN]
        del self.model.opset_import[:]
        self.model.opset_import.extend(kept)

    def floats(self) -> Counter[str]:
        """Count the nodes that compute with floats, by kind."""
        return Counter(node.op_type for node in self.nodes if self._is_float(node))

    def _is_float(self, node: Any) -> bool:
        if node.op_type in CLIPS:  # the grid of its codes clips as well
            node = self._producer(node) or node
        if node.op_type in _SILENT or node.domain == _DOMAIN or node in self.multiplied:
            return False
        if node.op_type == "Max" and len(node.input) == 1:
            return False
        read = [name for name in node.input if name and name not in self.constants]
        return node.op_type not in _INTEGER or None in map(self._dequantized, read)
