"""``ompq run FILE``: a command with the options that a file holds."""

import tomllib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ompq.cli.commands import COMMANDS
from ompq.errors import MissingExtraError
from ompq.schema import read_limited

_LARGEST = 1 << 16  # bytes of a file

# Option after the file → the file's options that it makes void.
_WITHOUT = {"--no-reconstruct": ("iterations", "merge-blocks", "tune-epochs")}


def run(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="A TOML or YAML file.", show_default=False
        ),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OPTIONS",
            help="Options that override the file's: -o again/.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a command with the options in a TOML or YAML file.

    Examples:
      ompq run out/config.toml --overwrite
      ompq run config.yaml --budget 3.5MiB -o smaller/

    ompq quantize and ompq train write such a file, config.toml, next to their results.
    It holds the command and its options by name. Paths are relative to the current
    directory.
    """
    kind, given = _config(file)
    name = given.pop("command", None)
    if not isinstance(name, str) or name not in COMMANDS or name == "run":
        example = {"TOML": 'command = "quantize"', "YAML": "command: quantize"}[kind]
        raise ValueError(
            f"{file} must name its command, for example {example}"
            + (f"; there is no {name}" if name else "")
        )
    for option in set(more or ()) & set(_WITHOUT):
        for key in _WITHOUT[option]:
            given.pop(key, None)
    command = COMMANDS[name].load(name)
    places = [one.name for one in command.params if one.param_type_name == "argument"]
    words = [str(given.pop(place)) for place in places if place in given]
    for key, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one is not False:
                words += [f"--{key}"] if one is True else [f"--{key}", str(one)]
    with command.make_context(f"ompq {name}", [*words, *(more or [])]) as context:
        command.invoke(context)


def _config(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the format of a configuration file (TOML or YAML), and its contents."""
    kind, read = "TOML", tomllib.loads
    if file.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise MissingExtraError("PyYAML", "yaml") from None
        kind, read = "YAML", partial(_parse_yaml, yaml)
    try:
        given = read(read_limited(file, _LARGEST).decode())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # PyYAML also raises errors of its converters
        raise ValueError(f"{file} is not {kind}: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{file} must hold options by name, like command: quantize")
    return kind, given


def _parse_yaml(yaml: Any, text: str) -> Any:
    """Parse YAML without aliases, which can stand for any amount of data."""
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
        raise ValueError("it holds an alias (*name); write the value out")
    return yaml.safe_load(text)
