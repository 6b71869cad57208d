"""How an ONNX file stores a weight of 2 to 8 bits, and the nodes that unpack it.

A code is split into parts of 4, 2 and 1 bits, each packed densely. Parts of 4 bits are
ONNX's own INT4 or, like the others, numbers of 8 or 16 bits that look up several codes
at once in a table; small integer arithmetic does the rest. Runtimes compute all of it
once, when they load the file, in integers of 8 or 16 bits, so that ONNX Runtime and
OpenVINO give the same bytes.

ONNX Runtime folds constants in passes over the graph, and frees intermediate results
only after a pass. So large networks are unpacked in stages, one per pass: the weights
of a stage depend on a number that is known one pass later than that of the stage
before. INT4 cannot wait for its stage, because the Cast that reads it takes no other
input. So weights that wait are looked up in tables, unless they have no other part.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ompq.integer.arithmetic import IntegerWeight


_PARTS = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
_INT4_OPSET = 21  # the first with INT4
_CUBE, _EIGHT = (2, 2, 2), 8  # tables give codes in cubes of eight
_WIDE = 1 << 16  # from this many codes on, a table of 16 bits is worth its size
_STAGES = 8  # ONNX Runtime makes at most ten passes
_AT_ONCE = 1 << 21  # codes that one stage may hold; another stage takes milliseconds
ZERO_OF_UNSIGNED = 128  # zero point of weights stored as unsigned bytes

Array = NDArray[Any]


@dataclass(frozen=True)
class StoredWeight:
    """How one weight is stored."""

    name: str
    bits: int
    container: str  # ``int8``, ``uint8``, or the parts, for example ``planes 4+1``
    bytes: int  # of codes, offsets, scales and bias

    @classmethod
    def of(
        cls, name: str, weight: "IntegerWeight", constants: Mapping[str, Any]
    ) -> "StoredWeight":
        """Return how constants of a graph store a weight."""
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
    """Return a constant, an array or already an ONNX tensor, as an ONNX tensor."""
    from onnx import numpy_helper

    return value if hasattr(value, "raw_data") else numpy_helper.from_array(value, name)


def grid_names(scale: float, zero_point: int, kind: Any = np.uint8) -> tuple[str, str]:
    """Return the names of the scale and the zero point of a grid.

    Equal numbers share a name, and all names have the same length, so that a file's
    size does not depend on the numbers.
    """
    code = f"{zero_point:03d}" if kind == np.uint8 else f"{zero_point:05d}"
    return f"scale/{np.float32(scale).tobytes().hex()}", f"zero/{code}"


class Unpacking:
    """Stores the weights of one file, and writes the nodes that unpack them.

    ``sizes`` holds the number of codes of each weight, in the order of storing.
    """

    def __init__(self, opset: int, sizes: Sequence[int]) -> None:
        self.opset, self.weights = opset, 0
        self.stages = _stages(sizes)
        self.stage = 0  # of the current weight; 0 waits for nothing
        self.written: set[str] = set()  # outputs of nodes, which weights may share

    def alone(self, number: int) -> "Unpacking":
        """Return another that stores this weight as if it were the only one."""
        found = Unpacking(self.opset, ())
        found.stages, found.weights = self.stages, number
        return found

    @property
    def short(self) -> str:
        """A prefix for intermediate tensors, which no layer's name has."""
        return f"/{self.weights}"

    def store(
        self, name: str, weight: "IntegerWeight", *, unsigned: bool = False
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return constants and nodes that compute a weight's bytes, ``name/bytes``.

        Unsigned bytes have zero point 128. Kernels that would saturate with signed
        bytes add products of two unsigned ones in 32 bits.
        """
        self.stage = self.stages[self.weights]
        self.weights += 1
        if not plane_parts(weight):
            values = weight.values.numpy()
            if unsigned:
                values = (values.astype(np.int16) + ZERO_OF_UNSIGNED).astype(np.uint8)
            return {f"{name}/bytes": values}, []
        written = _Unpacked(name, weight, self)
        written.write(unsigned=unsigned)
        return written.constants, written.nodes


def _stages(sizes: Sequence[int]) -> list[int]:
    """Return the stage in which each weight is unpacked, given its number of codes.

    A stage holds the largest weight that is left, and as many of the smallest as it has
    room for. So few weights have to wait.
    """
    left = deque(sorted(range(len(sizes)), key=lambda place: sizes[place]))
    found, stage, rest = [0] * len(sizes), 0, sum(sizes)
    while left:
        held, room = 0, max(_AT_ONCE, rest / (_STAGES - stage))
        while left and held < room:
            place = left.popleft() if held else left.pop()
            found[place] = stage
            held += sizes[place]
        stage, rest = stage + 1, rest - held
    return found


class _Unpacked:
    """Constants and nodes that turn the parts of a weight into its bytes.

    The sum of the parts is ``(unit * code - centre) * stretch``; from it,
    ``(offset - centre) * stretch`` is subtracted for each channel.
    """

    def __init__(self, name: str, weight: "IntegerWeight", file: Unpacking) -> None:
        self.name, self.weight, self.file = name, weight, file
        self.short = file.short
        self.shape = tuple(weight.codes.shape)
        self.constants: dict[str, Any] = {}
        self.nodes: list[Any] = []
        self.own = 0  # count of outputs that have a number instead of a name
        parts, waits = plane_parts(weight), file.stage > 0
        # Parts of 4 bits are signed, like INT4: 8 is subtracted from their codes.
        self.centre = weight.unit << (weight.bits - 1) if parts[0] == 4 else 0
        self.int4 = file.opset >= _INT4_OPSET and not (waits and len(parts) > 1)
        self.stretch = weight.per_channel(weight.stretch).numpy().astype(np.int64)
        self.same = bool((self.stretch == self.stretch.flat[0]).all())
        if self.same:
            self.stretch = self.stretch.reshape(-1)[:1]

    def write(self, *, unsigned: bool) -> None:
        """Write all constants and nodes."""
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
        if not self.same:
            given = self._constant(f"{self.name}/stretch", self.stretch.astype(kind))
            total = self._apply("Mul", [total, given])
        if unsigned:
            if narrow:
                total = self._apply("Cast", [total], to=TensorProto.INT16)
            narrow, kind, to = False, np.int16, TensorProto.UINT8
            shift = shift - ZERO_OF_UNSIGNED
        given = self._constant(f"{self.name}/offset", shift.astype(kind))
        if narrow:
            self._apply("Sub", [total, given], f"{self.name}/bytes")
        else:
            total = self._apply("Sub", [total, given])
            self._apply("Cast", [total], f"{self.name}/bytes", to=to)

    def _sum(self, kind: Any) -> str:
        """Add up the parts; those from tables are added before they are reshaped."""
        codes, rest = self.weight.codes.numpy().reshape(-1), self.weight.bits
        high, total = "", ""
        for part in plane_parts(self.weight):
            rest -= part
            own = (codes >> rest) & ((1 << part) - 1)
            times = (self.weight.unit << rest) * (self.stretch[0] if self.same else 1)
            factor = self._constant(
                f"times/{times:03d}/{kind().itemsize}", kind([times])
            )
            if part == 4 and self.int4:
                high = self._nibbles(own, factor, kind)
                continue
            found = self._looked_up(own, part, factor, kind)
            total = self._apply("Add", [total, found]) if total else found
        if not total:
            return high
        total = self._shaped(total)
        return self._apply("Add", [high, total]) if high else total

    def _nibbles(self, codes: Array, factor: str, kind: Any) -> str:
        """Store a part of 4 bits as INT4, minus 8, in the weight's own shape."""
        from onnx import TensorProto, helper

        name = f"{self.name}/plane4"
        packed = pack_plane(codes ^ 8, 4).tobytes()  # minus 8, in two's complement
        self.constants[name] = helper.make_tensor(
            name, TensorProto.INT4, self.shape, packed, raw=True
        )
        to = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        found = self._apply("Cast", [name], to=to)
        return self._apply("Mul", [found, self._late(factor, to)])

    def _looked_up(self, codes: Array, part: int, factor: str, kind: Any) -> str:
        """Store a part as numbers, each the index of a row in a table.

        Numbers of 16 bits need fewer lookups, but their table takes half a megabyte,
        and ONNX Runtime copies it whenever it is read.
        """
        from onnx import TensorProto

        wide = part > 1 and codes.size >= _WIDE
        together = (16 if wide else 8) // part  # codes of a row
        inner = together.bit_length() - 1  # of the dimensions of a cube
        table = self._table(part, kind, _CUBE[:inner], wide=wide)
        table = self._apply("Mul", [table, factor], f"/t{part}x{together}/{factor}")
        filled = np.zeros(-(-codes.size // _EIGHT) * _EIGHT, np.uint8)
        filled[: codes.size] = codes
        packed, rows = pack_plane(filled, part), (-1, *_CUBE[inner:])
        packed = packed.view("<u2" if wide else "u1").reshape(rows)
        plane = self._constant(f"{self.name}/plane{part}", packed)
        if self.file.stage:
            shape = self._constant(f"rows/{len(rows)}", np.array(rows))
            late = self._late(shape, TensorProto.INT64)
            plane = self._apply("Reshape", [plane, late])
        chosen = self._apply("Cast", [plane], to=TensorProto.INT32)
        return self._apply("Gather", [table, chosen])

    def _table(self, part: int, kind: Any, row: tuple[int, ...], *, wide: bool) -> str:
        """Return a table of the codes in one byte, or in two; ``row`` is a row's shape.

        Codes of 4 bits are stored minus 8.
        """
        codes = (np.arange(256)[:, None] >> np.arange(0, 8, part)) & ((1 << part) - 1)
        codes, name = codes - 8 * (part == 4), f"table/{part}/{kind().itemsize}"
        of_byte = row[1:] if wide else row
        table = self._constant(name, codes.astype(kind).reshape(-1, *of_byte))
        if not wide:
            return table
        shapes = {"low": (1, 256, -1), "high": (256, 1, -1), "all": (256, 256, 1)}
        for key, shape in shapes.items():
            self._constant(f"table/{key}", np.array(shape))
        halves = []
        for key in ("low", "high"):
            half = self._apply("Reshape", [table, f"table/{key}"], f"/{name}/{key}")
            halves.append(self._apply("Expand", [half, "table/all"], f"{half}/all"))
        both = self._apply("Concat", halves, f"/{name}/both", axis=2)
        rows = self._constant(f"table/rows{part}", np.array((-1, *row)))
        return self._apply("Reshape", [both, rows], f"/{name}")

    def _shaped(self, found: str) -> str:
        """Reshape codes from tables, which are in cubes, to the weight's shape."""
        count = self.weight.codes.numel()
        if count % _EIGHT:
            flat = self._constant("shape/flat", np.array([-1]))
            found = self._apply("Reshape", [found, flat])
            first = self._constant("shape/first", np.array([0]))
            last = self._constant(f"shape/{count}", np.array([count]))
            found = self._apply("Slice", [found, first, last])
        shape = f"shape/{'x'.join(map(str, self.shape))}"
        self._constant(shape, np.array(self.shape))
        return self._apply("Reshape", [found, shape])

    def _late(self, constant: str, kind: int) -> str:
        """Return a constant that is not known before the weight's stage."""
        from onnx import TensorProto

        number = self.file.stage
        if not number:
            return constant
        one = self._stage(number)
        if kind != TensorProto.INT64:
            one = self._apply("Cast", [one], f"/l{number}/{kind}", to=kind)
        return self._apply("Mul", [constant, one], f"/l{number}/{constant}")

    def _stage(self, number: int) -> str:
        """Return the name of a 1 that is known ``number`` passes after the first.

        A Dropout, which only passes its input on, cannot be folded. It is removed
        before the next pass, because by then the shape of its mask is known and nothing
        reads the mask any more.
        """
        from onnx import TensorProto

        if not number:
            return self._constant("shape/one", np.array([1]))
        before, name = self._stage(number - 1), f"/s{number}"
        zero = self._apply("ConstantOfShape", [before], f"{name}/zero")
        self._apply("Dropout", [zero], f"{name}/same", f"{name}/mask")
        one = self._apply("Shape", [f"{name}/mask"], f"{name}/shape")
        late = self._apply(
            "Cast", [f"{name}/same"], f"{name}/late", to=TensorProto.INT64
        )
        return self._apply("Add", [one, late], name)

    def _apply(self, kind: str, inputs: list[str], *outputs: str, **given: Any) -> str:
        """Add a node, unless another weight has added the same one.

        Outputs without a name are numbered, which takes less space in the file.
        """
        from onnx import helper

        if not outputs:
            outputs, self.own = (f"{self.short}/{self.own}",), self.own + 1
        if outputs[0] not in self.file.written:
            self.file.written.add(outputs[0])
            self.nodes.append(helper.make_node(kind, inputs, outputs, **given))
        return outputs[0]

    def _constant(self, name: str, value: Any) -> str:
        self.constants[name] = value
        return name
