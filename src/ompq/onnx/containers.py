"""How an ONNX file stores a weight of 2 to 8 bits, and the nodes that unpack it.

A code is cut into parts of 4, 2 and 1 bits, each packed densely. Parts of 4 bits are
ONNX's own INT4; the others are bytes that look up all their codes at once in a table of
256 rows. Small integer arithmetic does the rest. Runtimes compute all of it once, when
they load the file, and every number on the way fits into a byte: so ONNX Runtime and
OpenVINO give the same bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a process that only times a file need not hold torch
    from ompq.integer.arithmetic import IntegerWeight

_PARTS = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
_INT4_OPSET = 21  # the first with INT4
ZERO_OF_UNSIGNED = 128  # the zero point of a weight that is stored as unsigned bytes

Array = NDArray[Any]
# Kind, inputs, output and attributes of a node.
NodeData = tuple[str, list[str], str, dict[str, Any]]


@dataclass(frozen=True)
class StoredWeight:
    """How one weight is stored."""

    name: str
    bits: int
    container: str  # ``int8``, ``uint8``, or the parts, for example ``planes 4+1``
    bytes: int  # what codes, offsets, scales and bias take

    @classmethod
    def of(
        cls, name: str, weight: "IntegerWeight", constants: Mapping[str, Any]
    ) -> "StoredWeight":
        """Return how a weight is stored by constants of a graph."""
        whole = constants.get(f"{name}/bytes")
        parts = "+".join(map(str, plane_parts(weight)))
        container = f"planes {parts}" if whole is None else whole.dtype.name
        size = sum(
            len(one.raw_data) if hasattr(one, "raw_data") else one.nbytes
            for key, one in constants.items()
            if key.startswith(f"{name}/")
        )
        return cls(name, weight.bits, container, size)


def plane_parts(weight: "IntegerWeight") -> tuple[int, ...]:
    """Return the widths of a weight's parts, highest first; () for bytes."""
    return _PARTS.get(weight.bits, ()) if weight.affine else ()


def pack_plane(codes: Array, bits: int) -> Array:
    """Pack n codes of 1, 2 or 4 bits into ceil(n * bits / 8) bytes, lowest bits first.

    Example:
        >>> pack_plane(np.array([1, 2, 3, 0, 1], dtype=np.uint8), 2)
        array([57,  1], dtype=uint8)
    """
    per_byte = 8 // bits
    filled = np.zeros(-(-codes.size // per_byte) * per_byte, dtype=np.uint8)
    filled[: codes.size] = codes
    shifts = np.arange(per_byte, dtype=np.uint8) * bits
    shifted = filled.reshape(-1, per_byte) << shifts
    packed: Array = np.bitwise_or.reduce(shifted, axis=1)
    return packed


def as_tensor(name: str, value: Any) -> Any:
    """Return a constant, an array or a tensor of ONNX already, as a tensor of ONNX."""
    from onnx import numpy_helper

    return value if hasattr(value, "raw_data") else numpy_helper.from_array(value, name)


def grid_names(scale: float, zero_point: int) -> tuple[str, str]:
    """Return what the scale and the zero point of a tensor's grid are called.

    The same numbers have one name, and all names one length: so a file's size does not
    depend on them.
    """
    return f"scale/{np.float32(scale).tobytes().hex()}", f"zero/{zero_point:03d}"


def stored_bytes(
    name: str,
    weight: "IntegerWeight",
    opset: int,
    short: str,
    *,
    unsigned: bool = False,
) -> tuple[dict[str, Any], list[NodeData]]:
    """Return constants and nodes that give a weight as bytes, ``name/bytes``.

    ``short`` is unique in the file, for what is passed on between nodes. Unsigned bytes
    have zero point 128: kernels that would saturate with signed ones add products of
    two unsigned bytes in 32 bits.
    """
    if not plane_parts(weight):
        values = weight.values.numpy()
        if unsigned:
            values = (values.astype(np.int16) + ZERO_OF_UNSIGNED).astype(np.uint8)
        return {f"{name}/bytes": values}, []
    unpacking = _Unpacking(name, weight, opset, short)
    unpacking.write(unsigned=unsigned)
    return unpacking.constants, unpacking.nodes


class _Unpacking:
    """Constants and nodes that turn the parts of a weight into its bytes.

    The sum of the parts is ``(unit * code - centre) * stretch``, and what is taken from
    it, for each channel, ``(offset - centre) * stretch``.
    """

    def __init__(
        self, name: str, weight: "IntegerWeight", opset: int, short: str
    ) -> None:
        self.name, self.weight, self.opset, self.short = name, weight, opset, short
        self.shape = tuple(weight.codes.shape)
        self.constants: dict[str, Any] = {}
        self.nodes: list[NodeData] = []
        # Codes of 2 and 3 bits, which are stretched most, are centred to the half.
        largest = weight.unit * ((1 << weight.bits) - 1)
        half = weight.unit << (weight.bits - 1)
        self.centre = largest // 2 if weight.bits <= 3 else half
        self.stretch = weight.per_channel(weight.stretch).numpy().astype(np.int64)
        self.same = bool((self.stretch == self.stretch.flat[0]).all())
        if self.same:
            self.stretch = self.stretch.reshape(-1)[:1]

    def write(self, *, unsigned: bool) -> None:
        """Write it all."""
        from onnx import TensorProto

        weight = self.weight
        offset = weight.per_channel(weight.offset).numpy().astype(np.int64)
        shift = (offset - self.centre) * self.stretch
        codes = weight.codes.numpy().astype(np.int64)
        products = (codes * weight.unit - self.centre) * self.stretch
        ends = [end(one) for one in (products, shift) for end in (np.min, np.max)]
        narrow = min(ends) >= -128 and max(ends) <= 127
        kind = np.int8 if narrow else np.int16
        total, to = self._sum(kind), TensorProto.INT8
        if unsigned:
            if narrow:
                total = self._apply("Cast", [total], "wider", to=TensorProto.INT16)
            narrow, kind, to = False, np.int16, TensorProto.UINT8
            shift = shift - ZERO_OF_UNSIGNED
        given = self._constant("offset", shift.astype(kind))
        total = self._apply("Sub", [total, given], "bytes" if narrow else "wide")
        if not narrow:
            self._apply("Cast", [total], "bytes", to=to)

    def _sum(self, kind: Any) -> str:
        """Add the parts up, stretched."""
        parts = plane_parts(self.weight)
        codes, rest = self.weight.codes.numpy().reshape(-1), self.weight.bits
        total = ""
        for part in parts:
            rest -= part
            own = (codes >> rest) & ((1 << part) - 1)
            times = self.weight.unit << rest
            if part == 4 and self.opset >= _INT4_OPSET:
                found = self._nibbles(own, times, kind)
            else:
                centre = 0 if total else self.centre
                found = self._looked_up(own, part, (times, centre), kind)
            total = self._apply("Add", [total, found], f"sum{part}") if total else found
        if self.same:
            return total
        given = self._constant("stretch", self.stretch.astype(kind))
        return self._apply("Mul", [total, given], "stretched")

    def _nibbles(self, codes: Array, times: int, kind: Any) -> str:
        """Store a part of 4 bits as INT4, less 8, in the weight's own shape."""
        from onnx import TensorProto, helper

        name = f"{self.name}/plane4"
        packed = pack_plane(codes ^ 8, 4).tobytes()  # less 8, in two's complement
        self.constants[name] = helper.make_tensor(
            name, TensorProto.INT4, self.shape, packed, raw=True
        )
        to = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        found = self._apply("Cast", [name], "nibbles", to=to)
        factor = self.stretch[0] * times if self.same else times
        return self._apply("Mul", [found, self._factor(factor, kind)], "high")

    def _factor(self, factor: int, kind: Any) -> str:
        value = np.array([factor], kind)
        return self._shared(f"times/{factor:03d}/{value.itemsize}", value)

    def _looked_up(
        self, codes: Array, part: int, form: tuple[int, int], kind: Any
    ) -> str:
        """Store a part as bytes, each of which is a row of a table."""
        from onnx import TensorProto

        times, centre = form
        shifts = np.arange(0, 8, part)
        rows = (np.arange(256)[:, None] >> shifts) & ((1 << part) - 1)
        values = (rows * times - centre).astype(kind)
        table = self._shared(f"table/{part}/{times}/{centre}/{values.itemsize}", values)
        if self.same:
            given = self._factor(self.stretch[0], kind)
            table = self._apply("Mul", [table, given], f"table{part}")
        plane = self._constant(f"plane{part}", pack_plane(codes, part))
        chosen = self._apply("Cast", [plane], f"rows{part}", to=TensorProto.INT32)
        found = self._apply("Gather", [table, chosen], f"found{part}")
        if codes.size % len(shifts):
            flat = self._shared("shape/flat", np.array([-1]))
            found = self._apply("Reshape", [found, flat], f"flat{part}")
            first = self._shared("shape/first", np.array([0]))
            count = self._shared(f"shape/{codes.size}", np.array([codes.size]))
            found = self._apply("Slice", [found, first, count], f"cut{part}")
        shape = f"shape/{'x'.join(map(str, self.shape))}"
        self._shared(shape, np.array(self.shape))
        return self._apply("Reshape", [found, shape], f"part{part}")

    def _apply(self, kind: str, inputs: list[str], output: str, **given: Any) -> str:
        # Names of what is only passed on are short: each is in the file twice.
        owner = self.name if output == "bytes" else self.short
        self.nodes.append((kind, inputs, f"{owner}/{output}", given))
        return f"{owner}/{output}"

    def _constant(self, name: str, value: Array) -> str:
        return self._shared(f"{self.name}/{name}", value)

    def _shared(self, name: str, value: Array) -> str:
        self.constants[name] = value
        return name
