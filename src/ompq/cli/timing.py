"""latency: how long each layer takes on this machine's CPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
from rich.console import RenderableType

from ompq.cli.options import NetworkOptions, OutputOptions, option
from ompq.cli.screen import muted, opened
from ompq.cli.settings import check_writable, load_network
from ompq.cli.tables import Column, fitted
from ompq.costs import FLOAT_BITS, LatencyTable
from ompq.files import write_text
from ompq.graph.units import Choice
from ompq.latency import measure_latency

# Every width that a plan may ask for: those up to 8 bits are measured together.
_WIDTHS = (*range(2, 9), FLOAT_BITS)
_INTEGER, _FLOAT = str(Choice(8, 8)), str(Choice(FLOAT_BITS, FLOAT_BITS))

LatencyOutput = Annotated[
    Path, option("--output", "-o", metavar="FILE", text="Where the table is saved.")
]


def latency(
    network: NetworkOptions,
    output: OutputOptions,
    file: LatencyOutput,
    threads: Annotated[
        int,
        option(min=1, metavar="NUMBER", text="Threads a layer may use. Default: 1."),
    ] = 1,
    repeats: Annotated[
        int,
        option(
            min=1, metavar="NUMBER", text="Runs the median is taken of. Default: 20."
        ),
    ] = 20,
) -> None:
    """Measure each layer on this CPU, for budgets in milliseconds.

    Examples:
      ompq latency torchvision:resnet18 -o latency.json
      ompq latency net.py:make --weights none --threads 4 -o latency.json

    Give the file to ompq plan --latency. A CPU computes every width of 8 bits or
    fewer with 8-bit integers, so all of them get the same time. Shapes alone decide,
    so neither weights nor data are needed.
    """
    with opened(output) as screen:
        check_writable(file)
        with muted():  # random weights are no reason to warn here
            named = replace(network, weights=network.weights or "none")
            model = load_network(named, screen)
        with screen.stage("measuring the layers") as progress:
            table = measure_latency(
                model.module,
                torch.zeros(1, *model.input_shape),
                [Choice(weight, given) for weight in _WIDTHS for given in _WIDTHS],
                repeats=repeats,
                threads=threads,
                progress=progress,
            )
        write_text(file, json.dumps(table, indent=1))
        if screen.json:
            about = {"network": model.name, "threads": threads, "file": str(file)}
            screen.show_json({**about, "milliseconds": table})
            return
        if not screen.quiet:
            screen.show(_table(table, screen.out.width), "")
        integer, floating = (
            sum(row[key] for row in table.values()) for key in (_INTEGER, _FLOAT)
        )
        screen.show(
            f"{model.name}: {len(table)} layers, {integer:.3g} ms in 8 bits or fewer, "
            f"{floating:.3g} ms as float, saved to {file}"
        )


def _table(table: LatencyTable, width: int) -> RenderableType:
    rows = table.values()
    return fitted(
        [
            Column("layer", list(table), "left", shorten=True),
            Column("2 to 8 bits, ms", [f"{row[_INTEGER]:.4f}" for row in rows]),
            Column("float, ms", [f"{row[_FLOAT]:.4f}" for row in rows]),
        ],
        width,
    )
