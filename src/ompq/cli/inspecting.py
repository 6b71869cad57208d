"""inspect: what a packed network or an ONNX file holds, byte by byte."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from ompq.cli.options import OutputOptions
from ompq.cli.screen import Screen, opened
from ompq.cli.tables import Column, facts, fitted
from ompq.costs import in_bytes
from ompq.onnx.inspection import OnnxAccount, inspect_onnx
from ompq.packing import PROMISED_BYTES, PROMISED_SHARE, Account, inspect_file

PackedFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A packed network of ompq quantize, or an ONNX file of ompq export.",
    ),
]


def inspect(file: PackedFile, output: OutputOptions) -> None:
    """Tell what a network takes on disk, item by item.

    Examples:
      ompq inspect out/network.ompq.safetensors
      ompq inspect out/network.ompq.safetensors --json
      ompq inspect net.onnx

    For a packed network the plan's figures stand next to it. A damaged file is an
    error.
    """
    if file.is_dir():
        raise ValueError(f"{file} is a folder; name the file in it")
    with opened(output) as screen:
        if file.suffix == ".onnx":
            _show_onnx(inspect_onnx(file), screen)
            return
        account = inspect_file(file)
        if screen.json:
            screen.show_json(account.to_json())
        elif screen.quiet:
            screen.show(f"{file}: {_size(account)}")
        else:
            width = screen.out.width
            screen.show(
                unit_table(account, width),
                "",
                item_table(account, width),
                "",
                facts(_facts(account)),
            )


def _show_onnx(account: OnnxAccount, screen: Screen) -> None:
    if screen.json:
        screen.show_json(account.to_json())
        return
    size = f"{account.path}: {in_bytes(account.bytes)}"
    if screen.quiet:
        screen.show(size)
        return
    layers, items = account.layers, account.items
    columns = [
        Column("layer", list(layers), "left", shorten=True),
        Column("bits", [str(account.bits[name]) for name in layers]),
        Column("bytes", [in_bytes(count) for count in layers.values()]),
    ]
    rows = [*items.items(), ("file", account.bytes)]
    sums = [
        Column("item", [name for name, _ in rows], "left"),
        Column("bytes", [f"{count:,}" for _, count in rows]),
    ]
    width = screen.out.width
    screen.show(fitted(columns, width), "", fitted(sums, width), "", size)


def unit_table(account: Account, width: int) -> RenderableType:
    """Return what each unit takes."""
    units = account.units
    rows = [one.bytes for one in units]
    columns = [
        Column("layer", [one.unit.name for one in units], "left", shorten=True),
        Column("kind", [one.unit.kind for one in units], "left", rank=4),
        Column("bits", [str(one.bits) for one in units]),
        Column("weights", [in_bytes(row.weights) for row in rows], rank=1),
        Column("scales", [in_bytes(row.scales) for row in rows], rank=2),
        Column("zeros", [in_bytes(row.zero_points) for row in rows], rank=3),
        Column("biases", [in_bytes(row.biases) for row in rows], rank=2),
        Column("all", [in_bytes(row.total) for row in rows]),
    ]
    return fitted(columns, width)


def item_table(account: Account, width: int) -> RenderableType:
    """Return what each item takes, in the file and in the plan, to the byte."""
    rows = [
        (name.replace("_", " "), account.items[name], account.planned[name])
        for name in account.items
    ]
    rows.append(("file", account.file_bytes, account.planned_bytes))
    columns = [
        Column("item", [name for name, _, _ in rows], "left"),
        Column("bytes", [f"{found:,}" for _, found, _ in rows]),
        Column("plan", [f"{planned:,}" for _, _, planned in rows]),
        Column("more", [f"{n - p:+,}" if n != p else "" for _, n, p in rows], rank=1),
    ]
    return fitted(columns, width)


def _facts(account: Account) -> list[tuple[str, str]]:
    about, plan = account.about, account.about["plan"]
    versions = [f"{name} {number}" for name, number in about["versions"].items()]
    rows = [("network", about["network"] or "not named"), ("by", ", ".join(versions))]
    if plan is not None:
        rows.append(("plan", f"{plan['budget']} by {plan['score']}, {plan['hash']}"))
    kept = "within" if account.file_bytes <= account.promised_bytes else "beyond"
    promise = f"{PROMISED_SHARE:.0%} + {in_bytes(PROMISED_BYTES)}"
    return [
        *rows,
        ("bits", f"{account.average_bits:.3f} a weight on average"),
        ("size", f"{_size(account)}: {kept} the {promise} that are promised"),
    ]


def _size(account: Account) -> str:
    planned = account.planned_bytes
    return (
        f"{in_bytes(account.file_bytes)}, {account.file_bytes / planned - 1:+.2%} of "
        f"the plan's {in_bytes(planned)}"
    )
