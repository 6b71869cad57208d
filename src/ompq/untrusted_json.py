"""Untrusted JSON: every value is checked, and every error says where."""

import json
import math
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

from ompq.errors import shorten

_LARGEST_FILE = 1 << 28  # bytes
_MOST_VALUES = 1 << 23
_MAX_DIGITS = 19  # a signed 64-bit integer has no more
_Record = TypeVar("_Record")  # a dataclass


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
    """Return the bytes of a file, of which there may be only so many.

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
    """Parse JSON whose numbers are finite and fit 64 bits; see :func:`read_json`.

    Args:
        most: Largest number of values: a few bytes of text make objects of a hundred.
    """
    if sum(map(text.count, ",[{")) > most:
        raise ValueError(f"it holds more than {most:,} values")
    try:
        data = json.loads(
            text, parse_int=_integer, parse_float=_number, parse_constant=_number
        )
        if "\\ud" in text.lower():  # a lone surrogate cannot be encoded
            json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it is not JSON ({error.msg} at {where})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("it holds text that is not Unicode") from error
    return data


def _integer(digits: str) -> int:
    count = len(digits.lstrip("-"))
    if count > _MAX_DIGITS:
        raise ValueError(
            f"it holds an integer of {count} digits (limit: {_MAX_DIGITS})"
        )
    return int(digits)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds the number {text:.20}, which is not finite")
    return value


_LARGEST = 2**63 - 1  # the largest count a file may hold


def json_object(value: Any, what: str) -> dict[str, Any]:
    """Return a JSON object; like its siblings, raise a ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, not {_brief(value)}")
    return value


def json_list(value: Any, what: str, most: int = 2**20) -> list[Any]:
    """Return a JSON list of at most ``most`` entries."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(
            f"{what} must be a list of at most {most:,} entries, not {_brief(value)}"
        )
    return value


def json_text(value: Any, what: str) -> str:
    """Return a JSON string."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be text, not {_brief(value)}")
    return value


def json_whole(value: Any, what: str, low: int = 0, high: int = _LARGEST) -> int:
    """Return a whole number within limits."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(
            f"{what} must be a whole number from {low} to {high}, not {_brief(value)}"
        )
    return value


def json_number(value: Any, what: str) -> float:
    """Return a finite number."""
    if type(value) not in (int, float) or not -1e300 <= value <= 1e300:
        raise ValueError(f"{what} must be a finite number, not {_brief(value)}")
    return float(value)


def json_table(value: Any, what: str, shape: tuple[int, ...]) -> list[Any]:
    """Return nested lists of finite numbers, of a given shape."""
    rows = json_list(value, what)
    if len(rows) != shape[0]:
        raise ValueError(f"{what} must have {shape[0]} entries, not {len(rows)}")
    if len(shape) == 1:
        return [json_number(entry, what) for entry in rows]
    return [json_table(row, what, shape[1:]) for row in rows]


def _brief(value: Any) -> str:
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}..."


def json_flag(value: Any, what: str) -> bool:
    """Return a JSON boolean."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false, not {_brief(value)}")
    return value


def json_record(kind: type[_Record], value: Any) -> _Record:
    """Return a dataclass built from a JSON object after checking keys and types.

    Fields may be ``str``, ``int`` (at least -1), ``float``, ``bool``, other such
    dataclasses, or tuples of any length of one of these.
    """
    name = kind.__name__
    given = json_object(value, name)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    missing = [n for n, f in known.items() if f.default is MISSING and n not in given]
    unknown = [key for key in given if key not in known]
    if missing or unknown:
        what, names = ("lacks", missing) if missing else ("has no field", unknown)
        raise ValueError(f"{name} {what} {shorten(names):.200}")
    return kind(**{n: _check(one, n, known[n].type) for n, one in given.items()})


def _check(value: Any, what: str, kind: Any) -> Any:
    if is_dataclass(kind):
        return json_record(cast(type, kind), value)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return tuple(_check(one, what, inner) for one in json_list(value, what))
    if kind is int:
        return json_whole(value, what, -1)
    return {str: json_text, float: json_number, bool: json_flag}[kind](value, what)
