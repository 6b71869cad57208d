"""The structure of a packed file: JSON that names everything in its other tensors."""

import zlib
from collections.abc import Iterator
from typing import Any

from ompq.errors import OmpqError
from ompq.files import shown
from ompq.untrusted_json import convert_json, parse_json

PACKED_FORMAT = "ompq-packed/3"
GRAPH = "graph"  # the tensor of a packed file that holds the ONNX file
MOST_NAMED = 1 << 20  # values in the structure: fifty thousand layers
_LARGEST = 1 << 24  # bytes; inflating it must not fill the memory
# What reading data of the wrong kind raises; RecursionError is a RuntimeError.
BROKEN = (
    *(ArithmeticError, AttributeError, LookupError, OverflowError, TypeError),
    *(ValueError, OmpqError, RuntimeError, zlib.error),
)


def read_structure(deflated: bytes) -> dict[str, Any]:
    """Return the structure; a ValueError says what is wrong.

    Its size is limited before it is parsed, and so is the number of its values.
    """
    text = zlib.decompressobj().decompress(deflated, _LARGEST + 1)
    if len(text) > _LARGEST:
        raise ValueError(f"a structure of more than {_LARGEST:,} bytes")
    data = convert_json(
        parse_json(text.decode(), MOST_NAMED), dict[str, Any], "structure"
    )
    if any(shown(one) != one for one in _texts(data)):
        raise ValueError("a text is not printable, or too long")
    return data


def reason_of(error: BaseException) -> str:
    """Return why something is broken, as short text that any terminal shows."""
    return ascii(f"{type(error).__name__}: {error}"[:300])[1:-1]


def _texts(data: Any) -> Iterator[str]:
    rest = [data]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            rest += one
        elif isinstance(one, dict):
            rest += [*one, *one.values()]
