"""bench: an exported network beside the float one, on this machine."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from ompq.cli.options import OutputOptions, option
from ompq.cli.screen import Screen, muted, opened
from ompq.cli.tables import Column, facts, fitted
from ompq.costs import in_bytes
from ompq.errors import ModelError
from ompq.models import load_model
from ompq.onnx.inspection import (
    Timing,
    input_shape,
    installed_runtimes,
    network_name,
    time_files,
    without_gain,
)
from ompq.onnx.model import float_model

OnnxFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="An ONNX file of ompq export.")
]


def bench(
    file: OnnxFile,
    output: OutputOptions,
    reference: Annotated[
        str | None,
        option(
            "--float",
            metavar="NETWORK",
            text="The float network, by name or as an ONNX file. Default: the one "
            "that the file names.",
        ),
    ] = None,
    threads: Annotated[
        int, option(min=1, metavar="NUMBER", text="Threads of a run. Default: 1.")
    ] = 1,
    repeats: Annotated[
        int,
        option(min=1, metavar="NUMBER", text="Runs of each, in turn. Default: 50."),
    ] = 50,
    batch: Annotated[
        int, option(min=1, metavar="NUMBER", text="Images of a run. Default: 1.")
    ] = 1,
) -> None:
    """Measure an exported network beside the float one, on this machine's CPU.

    Examples:
      ompq bench net.onnx
      ompq bench net.onnx --float torchvision:resnet18 --threads 4
      ompq bench net.onnx --float float.onnx --repeats 200 --json

    Runs take turns; medians are shown. Memory is that of a process of its own. Other
    work on the machine disturbs it. OpenVINO is measured too, if it is installed.
    """
    with opened(output) as screen, TemporaryDirectory() as work:
        remarks = without_gain(file)
        shape = (batch, *input_shape(file))
        with screen.stage("writing the float network"), muted():
            floats = _float(file, reference, shape[1:], Path(work))
        timings: list[Timing] = []
        for runtime in installed_runtimes():
            with screen.stage(f"measuring in {runtime}"):
                timings += time_files(
                    {"float": floats, "quantized": file},
                    shape,
                    repeats=repeats,
                    threads=threads,
                    runtime=runtime,
                )
        sizes = {"float": floats.stat().st_size, "quantized": file.stat().st_size}
        _show(timings, sizes, remarks, screen)


def _float(
    file: Path, reference: str | None, shape: tuple[int, ...], work: Path
) -> Path:
    name = reference or network_name(file)
    if not name:
        raise ModelError(
            f"{file} does not name its network; give --float NETWORK, or an ONNX file"
        )
    if name.endswith(".onnx"):
        return Path(name)
    model = load_model(name, "none").module  # any weights take the same time
    path = work / "float.onnx"
    content = float_model(model, torch.zeros(2, *shape))
    path.write_bytes(content.SerializeToString())
    return path


def _show(
    timings: list[Timing], sizes: dict[str, int], remarks: list[str], screen: Screen
) -> None:
    if screen.json:
        rows: list[dict[str, Any]] = [
            {**one.to_json(), "file_bytes": sizes[one.name]} for one in timings
        ]
        screen.show_json({"rows": rows, "without_gain": remarks})
        return
    if screen.quiet:
        for one in timings:
            screen.show(
                f"{one.runtime}, {one.name}: {one.milliseconds:.3g} ms, "
                f"{one.ratio:.2f} times as fast as float"
            )
        return
    columns = [
        Column("runtime", [one.runtime for one in timings], "left"),
        Column("network", [one.name for one in timings], "left"),
        Column("ms", [f"{one.milliseconds:.2f}" for one in timings]),
        Column("speed-up", [f"{one.ratio:.2f} ×" for one in timings]),
        Column("load, s", [f"{one.load_seconds:.3f}" for one in timings]),
        Column("file", [in_bytes(sizes[one.name]) for one in timings]),
        Column(
            "memory",
            [in_bytes(one.memory.peak - one.memory.start) for one in timings],
        ),
    ]
    screen.show(fitted(columns, screen.out.width))
    if remarks:
        titles = ["gains no time", *[""] * len(remarks)]
        screen.show("", facts(list(zip(titles, remarks, strict=False))))
