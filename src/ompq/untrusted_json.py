"""Untrusted JSON: every value is checked, and every error says where."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, overload

import msgspec
from msgspec import Meta

from ompq.errors import shorten

_LARGEST_FILE = 1 << 28  # bytes
_MOST_VALUES = 1 << 23
_LARGEST = 2**63 - 1  # the largest whole number that a file may hold
_Value = TypeVar("_Value")

# What fields of records that files hold may be, beside text, booleans and their tuples.
Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
Index = Annotated[int, Meta(ge=-1, le=_LARGEST)]  # -1 stands for none
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]


def whole_number(low: int, high: int) -> Any:
    """Return the type of whole numbers within limits."""
    return Annotated[int, Meta(ge=low, le=high)]


def row_type(*kinds: Any) -> Any:
    """Return a list type with these entries; an ellipsis repeats the previous one."""
    return tuple.__class_getitem__(kinds)


def number_table(*shape: int) -> Any:
    """Return the type of nested lists of numbers of a shape."""
    kind: Any = Number
    for size in reversed(shape):
        kind = Annotated[list[kind], Meta(min_length=size, max_length=size)]
    return kind


def record_type(**kinds: Any) -> Any:
    """Return the type of objects with entries of these types, and perhaps others.

    A pair of a type and a default makes an entry optional.
    """
    fields = [
        (name, *kind) if isinstance(kind, tuple) else (name, kind)
        for name, kind in kinds.items()
    ]
    return msgspec.defstruct("Record", fields, kw_only=True)


def read_json(path: str | Path) -> Any:
    """Read a JSON file; error messages are fragments to which callers add the path."""
    try:
        return parse_json(read_limited(Path(path)).decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    except IsADirectoryError as error:
        raise ValueError("it is a folder") from error
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error


def read_limited(path: Path, most: int = _LARGEST_FILE) -> bytes:
    """Return the bytes of a file, refusing more than a limit.

    Raises:
        ValueError: It is larger, or no ordinary file, such as ``/dev/zero``.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError("it is not an ordinary file")
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def parse_json(text: str, most: int = _MOST_VALUES) -> Any:
    """Parse JSON, in which all numbers must be finite; see :func:`read_json`.

    Args:
        most: Largest number of values: a few bytes of text make objects of a hundred.
    """
    if sum(map(text.count, ",[{")) > most:
        raise ValueError(f"it holds more than {most:,} values")
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except msgspec.DecodeError as error:
        reason, _, place = str(error).partition(" (byte ")
        reason = reason.removeprefix("JSON is malformed: ")
        if place:
            before = text.encode()[: int(place.rstrip(")"))].decode(errors="ignore")
            line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
            reason += f" at line {line}, column {column}"
        raise ValueError(f"it is not JSON ({reason})") from error


@overload
def convert_json(data: Any, kind: type[_Value], what: str) -> _Value: ...
@overload
def convert_json(data: Any, kind: Any, what: str) -> Any: ...
def convert_json(data: Any, kind: Any, what: str) -> Any:
    """Return parsed JSON as a type, after checking all of it.

    Args:
        kind: A type that msgspec can convert to: dataclasses, whose fields must all be
            known, named tuples, lists, dictionaries, :data:`Count`, ...
        what: Name of the data in error messages.

    Raises:
        ValueError: It is not of this type. The message says where, and what is there.

    Example:
        >>> convert_json([1, 2.5], list[Count], "sizes")
        Traceback (most recent call last):
        ValueError: sizes[1] must be a whole number, not 2.5
    """
    try:
        found = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_explanation(str(error), data, what)) from error
    _check_fields(data, found, what)
    return found


def _check_fields(data: Any, found: Any, what: str) -> None:
    """Raise a ValueError if a dataclass was given fields that it does not have."""
    if isinstance(found, tuple):
        for index, made in enumerate(found):
            if not is_dataclass(made):
                break
            _check_fields(data[index], made, f"{what}[{index}]")
    elif is_dataclass(found):
        known = [field.name for field in fields(found)]
        if unknown := [name for name in data if name not in known]:
            raise ValueError(f"{what} has no field {shorten(unknown):.200}")
        for name in data:
            _check_fields(data[name], getattr(found, name), f"{what}.{name}")


# Names of types in msgspec's messages and in ours.
_WORDS = {
    "int": "a whole number",
    "float": "a finite number",
    "str": "text",
    "bytes": "base64",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def _explanation(message: str, data: Any, what: str) -> str:
    """Return msgspec's message in our words, with the value that is wrong."""
    reason, _, path = message.partition(" - at `$")
    # The keys of dictionaries are not told.
    path, key, _ = path.rstrip("`").partition("[...]")
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        data = data[name or int(index)]
    where = f"an entry of {what}{path}" if key else f"{what}{path}"
    if lacking := re.match(r"Object missing required field `(.*)`", reason):
        return f"{where} lacks {lacking[1]}"
    if (wrong := re.match(r"Expected `([\w |]+)`(.*?)(, got .*)?$", reason)) is None:
        return f"{where}: {reason}"
    kinds = " or ".join(_WORDS.get(one, one) for one in wrong[1].split(" | "))
    limit = wrong[2].replace(">=", "at least").replace("<=", "at most")
    limit = re.sub("^ at ", " of at ", limit)
    return f"{where} must be {kinds}{limit}" + ("" if key else f", not {_brief(data)}")


def _brief(value: Any) -> str:
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}..."
