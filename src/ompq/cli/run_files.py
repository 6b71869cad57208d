"""``ompq run FILE``: a command with the options that a file holds."""

import tomllib
from collections.abc import Mapping
from datetime import date
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from ompq.cli.command_registry import COMMANDS
from ompq.optional_libraries import optional_library
from ompq.untrusted_json import read_limited

_LARGEST, _DEEPEST = 1 << 16, 16  # bytes of a file, and values inside values

# Option after the file → the file's options that it makes void.
_WITHOUT = {"--effort": ("iterations", "merge-blocks", "tune-epochs")}


def run_file(file: Path, more: list[str] | None) -> None:
    """Run the command that a file names, with its options and those that override."""
    kind, given = _config(file)
    more = more or []
    name = given.pop("command", None)
    if not isinstance(name, str) or name not in COMMANDS or name == "run":
        example = {"TOML": 'command = "quantize"', "YAML": "command: quantize"}[kind]
        raise ValueError(
            f"{file} must name its command, for example {example}"
            + (f"; there is no {name!r}" if name else "")
        )
    for option in set(more) & set(_WITHOUT):
        for key in _WITHOUT[option]:
            given.pop(key, None)
    command = COMMANDS[name].load()
    places = [one.name for one in command.params if one.param_type_name == "argument"]
    words = [str(given.pop(place)) for place in places if place in given]
    for key, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one is not False:
                words += [f"--{key}"] if one is True else [f"--{key}", str(one)]
    with command.make_context(f"ompq {name}", [*words, *more]) as context:
        command.invoke(context)


def _config(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the format of a configuration file (TOML or YAML), and its contents."""
    kind, read = "TOML", tomllib.loads
    if file.suffix in (".yaml", ".yml"):
        kind, read = "YAML", partial(_parse_yaml, optional_library("yaml", "yaml"))
    try:
        given = read(read_limited(file, _LARGEST).decode())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # PyYAML also raises errors of its converters
        raise ValueError(f"{file} is not {kind}: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{file} must hold options by name, like command: quantize")
    _check_values(file, given)
    return kind, given


def _check_values(file: Path, given: Mapping[str, Any]) -> None:
    """Raise a ValueError for a value that no option has."""
    for key, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            if key != "command" and not isinstance(
                one, str | int | float | date | NoneType
            ):
                raise ValueError(
                    f"{file}: {key} must be a text, a number, true or false, or a list "
                    f"of these, not {type(one).__name__}"
                )


def _parse_yaml(yaml: Any, text: str) -> Any:
    """Parse YAML without aliases, which could expand without limit.

    Aliases can stand for any amount of data, and PyYAML takes minutes for a few
    thousand nested brackets.
    """
    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken):
            raise ValueError("it holds an alias (*name); write the value out")
        name = type(token).__name__
        depth += name.endswith(("SequenceStartToken", "MappingStartToken"))
        depth -= name.endswith("EndToken") and not name.startswith(("Stream", "Docum"))
        if depth > _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
    return yaml.safe_load(text)
