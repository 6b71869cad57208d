"""``ompq-runtime``: inspect and unpack packed files on a device, without PyTorch."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ompq.errors import OmpqError
from ompq.files import library_version
from ompq.packed.embedded_graph import unpack
from ompq.packed.summary import summarize


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    given = _parser().parse_args(arguments)
    try:
        lines = given.run(given)
    except OmpqError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ompq-runtime",
        description="Inspect and unpack networks that ompq has packed.",
    )
    version = f"ompq {library_version()}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspecting = commands.add_parser("inspect", help="Show what a packed file holds.")
    inspecting.add_argument("file", type=Path, help="A packed file.")
    inspecting.set_defaults(run=_inspect)
    unpacking = commands.add_parser("unpack", help="Write the ONNX file inside it.")
    unpacking.add_argument("file", type=Path, help="A packed file with its graph.")
    unpacking.add_argument(
        "-o", "--output", type=Path, help="The ONNX file. Default: FILE.onnx."
    )
    unpacking.set_defaults(run=_unpack)
    return parser


def _inspect(given: argparse.Namespace) -> list[str]:
    return [*summarize(given.file).lines()]


def _unpack(given: argparse.Namespace) -> list[str]:
    output = given.output or given.file.with_suffix(".onnx")
    return [f"{output}: {unpack(given.file, output):,} bytes"]


if __name__ == "__main__":
    sys.exit(main())
