"""How an ONNX file stores a weight of 2 to 8 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a process that only times a file need not hold torch
    from ompq.integer.arithmetic import IntegerWeight

DOMAIN = "ompq"  # of the functions, which travel inside the file
_PARTS = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}

Array = NDArray[Any]


@dataclass(frozen=True)
class StoredWeight:
    """How one weight is stored.

    Attributes:
        name: The layer.
        bits: Width of its codes.
        container: ``int8``, or the planes, for example ``planes 4+1``.
        bytes: What codes, offsets, scales and bias take.
    """

    name: str
    bits: int
    container: str
    bytes: int


def plane_parts(weight: "IntegerWeight") -> tuple[int, ...]:
    """Return the widths of a weight's planes, highest part first; () for bytes."""
    return _PARTS.get(weight.bits, ()) if weight.affine else ()


def pack_plane(codes: Array, bits: int) -> Array:
    """Pack codes of 1, 2 or 4 bits into bytes, the first into the lowest bits.

    Args:
        codes: uint8, (n,), each below 2^bits.
        bits: Width of a code.

    Returns:
        uint8, (ceil(n * bits / 8),).

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


def planes(weight: "IntegerWeight") -> list[Array]:
    """Return the packed planes of a weight, highest part first."""
    codes = weight.codes.numpy().reshape(-1)
    found, rest = [], weight.bits
    for bits in plane_parts(weight):
        rest -= bits
        found.append(pack_plane((codes >> rest) & ((1 << bits) - 1), bits))
    return found


def unpack_function(bits: int, opset: int) -> Any:
    """Return the function that turns the planes of a weight into signed bytes.

    Its inputs are the planes, then offsets and stretches, uint8 (O, 1, ...) or (); its
    attributes the number of weights and their shape; its output int8 of that shape.

    Args:
        bits: Width of the codes, 2 to 7.
        opset: Version of the standard operators.
    """
    from onnx import TensorProto, helper

    names = [f"p{part}" for part in _PARTS[bits]]
    nodes = [
        _given("count", "count"),
        _given("shape", "shape"),
        _constant("first", [0], np.int64),
        _constant("all", [-1], np.int64),
    ]
    for name, part in zip(names, _PARTS[bits], strict=True):
        nodes += _plane_nodes(name, part)
    nodes += _joined(names, _PARTS[bits])
    unit = 2 if bits <= 6 else 1
    nodes += [
        helper.make_node("Reshape", ["codes", "shape"], ["shaped"]),
        _constant("unit", unit, np.int32),
        helper.make_node("Mul", ["shaped", "unit"], ["halves"]),
        helper.make_node("Cast", ["offset"], ["offset32"], to=TensorProto.INT32),
        helper.make_node("Sub", ["halves", "offset32"], ["centred"]),
        helper.make_node("Cast", ["stretch"], ["stretch32"], to=TensorProto.INT32),
        helper.make_node("Mul", ["centred", "stretch32"], ["stretched"]),
        helper.make_node("Cast", ["stretched"], ["weight"], to=TensorProto.INT8),
    ]
    return helper.make_function(
        DOMAIN,
        f"Weight{bits}",
        [*names, "offset", "stretch"],
        ["weight"],
        nodes,
        [helper.make_opsetid("", opset)],
        ["count", "shape"],
    )


def _plane_nodes(name: str, bits: int) -> list[Any]:
    """Return the nodes that turn a plane into its parts, int32, (n,)."""
    from onnx import TensorProto, helper

    node = helper.make_node
    return [
        _constant(f"{name}s", list(range(0, 8, bits)), np.uint8),
        _constant(f"{name}m", (1 << bits) - 1, np.uint8),
        node("Unsqueeze", [name, "all"], [f"{name}b"]),
        node(
            "BitShift",
            [f"{name}b", f"{name}s"],
            [f"{name}r"],
            direction="RIGHT",
        ),
        node("BitwiseAnd", [f"{name}r", f"{name}m"], [f"{name}a"]),
        node("Reshape", [f"{name}a", "all"], [f"{name}f"]),
        node("Slice", [f"{name}f", "first", "count"], [f"{name}e"]),
        node("Cast", [f"{name}e"], [f"{name}c"], to=TensorProto.INT32),
    ]


def _joined(names: Sequence[str], parts: Sequence[int]) -> list[Any]:
    """Return the nodes that add up the parts: ``high * 2^width of low + low``."""
    from onnx import helper

    nodes, so_far = [], f"{names[0]}c"
    for name, part in zip(names[1:], parts[1:], strict=True):
        nodes += [
            _constant(f"{name}w", 1 << part, np.int32),
            helper.make_node("Mul", [so_far, f"{name}w"], [f"{name}h"]),
            helper.make_node("Add", [f"{name}h", f"{name}c"], [f"{name}t"]),
        ]
        so_far = f"{name}t"
    nodes.append(helper.make_node("Identity", [so_far], ["codes"]))
    return nodes


def _constant(name: str, value: Any, kind: Any) -> Any:
    from onnx import helper, numpy_helper

    tensor = numpy_helper.from_array(np.array(value, dtype=kind))
    return helper.make_node("Constant", [], [name], value=tensor)


def _given(name: str, attribute: str) -> Any:
    """Return a constant whose value is an attribute of the function's caller."""
    from onnx import AttributeProto, helper

    node = helper.make_node("Constant", [], [name])
    node.attribute.append(
        AttributeProto(
            name="value_ints", ref_attr_name=attribute, type=AttributeProto.INTS
        )
    )
    return node
