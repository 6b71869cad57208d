"""export: what ompq quantize made, for other programs."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from ompq.cli.options import OutputOptions, one_of, option
from ompq.cli.screen import Screen, muted, opened
from ompq.cli.settings import check_writable, read_samples
from ompq.cli.tables import facts
from ompq.costs import in_bytes
from ompq.datasets.sources import load_data
from ompq.errors import ModelError, PackedFileError
from ompq.files import replacing
from ompq.models import NamedModel, load_model
from ompq.onnx.export import ExportResult, export_onnx
from ompq.packing import inspect_file, load
from ompq.packing.format import read_contents

FORMATS = ("onnx", "packed")
PACKED, RESULT = "network.ompq.safetensors", "result.json"
_SAMPLES = 64

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE", help="The folder of ompq quantize, or a packed network."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is written, and what it is verified with."""

    file: Annotated[
        Path, option("--output", "-o", metavar="FILE", text="The file to write.")
    ]
    format: Annotated[str, one_of(FORMATS, text="what to write. Default: onnx.")] = (
        FORMATS[0]
    )
    network: Annotated[
        str | None,
        option(
            metavar="NETWORK",
            text="The network, where the packed file does not name it.",
        ),
    ] = None
    data: Annotated[
        str | None,
        option(
            metavar="SOURCE",
            text="Inputs to verify with. Default: those of the folder, or noise.",
        ),
    ] = None
    samples: Annotated[
        int,
        option(
            min=1,
            metavar="NUMBER",
            text=f"How many inputs verify. Default: {_SAMPLES}.",
        ),
    ] = _SAMPLES
    opset: Annotated[
        int,
        option(metavar="NUMBER", text="Version of ONNX's operators. Default: 21."),
    ] = 21


def export(source: Source, options: ExportOptions, output: OutputOptions) -> None:
    """Write a quantized network for other programs; ONNX is verified first.

    Examples:
      ompq export out/ -o net.onnx
      ompq export out/ --data images/ --samples 500 -o net.onnx
      ompq export out/network.ompq.safetensors --format packed -o net.safetensors

    The bits of each layer, as JSON for other tools, are in the plan: out/plan.json.
    """
    with opened(output) as screen:
        check_writable(options.file)
        packed = _packed(source)
        if options.format == "onnx":
            _export_onnx(packed, source, options, screen)
        else:
            account = inspect_file(packed)  # a broken file should not be handed on
            with replacing(options.file) as temporary:
                shutil.copyfile(packed, temporary)
            _show({"file": str(options.file), "bytes": account.file_bytes}, screen)


def _packed(source: Path) -> Path:
    path = source / PACKED if source.is_dir() else source
    if not path.exists():
        raise PackedFileError(
            f"there is no packed network {path}; give the folder of ompq quantize, or "
            "a packed file"
        )
    return path


def _export_onnx(
    packed: Path, source: Path, options: ExportOptions, screen: Screen
) -> None:
    name = options.network or str(read_contents(packed).about.get("network") or "")
    if not name:
        raise ModelError(f"{packed} does not name its network; give --network")
    with screen.stage("loading the network"), muted():
        model = load_model(name, "none")  # only the structure is used
        network = load(packed, model.module)
    samples, data = _samples(model, source, options, screen)
    with screen.stage("exporting and verifying"):
        result = export_onnx(
            network, options.file, samples, opset=options.opset, network=name
        )
    about = {"network": name, "data": data, "packed_bytes": packed.stat().st_size}
    if screen.json:
        screen.show_json({**about, **_json(result)})
    elif screen.quiet:
        screen.show(f"{options.file}: {in_bytes(result.bytes)}, {result.simulated}")
    else:
        screen.show(facts(_facts(result, about)))


def _samples(
    model: NamedModel, source: Path, options: ExportOptions, screen: Screen
) -> tuple[Tensor, str]:
    name = options.data
    if name is None and (source / RESULT).is_file():
        name = json.loads((source / RESULT).read_text()).get("data")
    if name is None:
        name = "random"
    with muted():  # noise verifies as well as images do
        data = load_data(name, model, split="train")
    return read_samples(data, min(options.samples, len(data)), screen), data.name


def _json(result: ExportResult) -> dict[str, Any]:
    data = asdict(result)
    return {**data, "path": str(result.path)}


def _facts(result: ExportResult, about: Mapping[str, Any]) -> list[tuple[str, str]]:
    containers: dict[str, int] = {}
    for one in result.weights:
        key = f"{one.bits} bits as {one.container}"
        containers[key] = containers.get(key, 0) + 1
    rows = [
        ("network", str(about["network"])),
        (
            "file",
            f"{result.path}: {in_bytes(result.bytes)}, opset {result.opset}; packed it "
            f"takes {in_bytes(about['packed_bytes'])}",
        ),
        ("layers", ", ".join(f"{n} × {key}" for key, n in sorted(containers.items()))),
        ("verified", f"{result.runtime} on {about['data']}"),
        ("PyTorch", str(result.simulated)),
    ]
    if result.engine is not None:
        return [*rows, ("integers", str(result.engine))]
    return [*rows, ("", "activations are float: smaller, not faster")]


def _show(data: Mapping[str, Any], screen: Screen) -> None:
    if screen.json:
        screen.show_json(dict(data))
    else:
        screen.show(f"{data['file']}: {in_bytes(data['bytes'])}")
