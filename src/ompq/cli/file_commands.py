"""export and inspect: commands for the files of a quantized network."""

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ompq.amounts import in_bytes
from ompq.cli.console import Column, Console, Shown, View, facts, mute_warnings
from ompq.cli.loading import read_samples
from ompq.cli.option_groups import ExportOptions, shape_of
from ompq.cli.options import check_writable
from ompq.configs import ExportConfig
from ompq.datasets.named_data import load_data
from ompq.errors import DataError, ModelError, PackedFileError
from ompq.files import ONNX, PACKED, RESULT, replacing
from ompq.models.named_models import NamedModel, load_model
from ompq.packed.account import Account, inspect_file
from ompq.packed.format import read_contents
from ompq.packed.packed_files import add_onnx, load
from ompq.report_sections import AgreementSection
from ompq.runtimes.export_result import ExportResult
from ompq.runtimes.exporter import export as write_for_runtime
from ompq.runtimes.inspection import inspect_onnx
from ompq.samples import Samples
from ompq.untrusted_json import convert_json, read_json
from ompq.workflow import add_sections


def run_export(source: Path, options: ExportOptions, console: Console) -> View:
    """Export a quantized network to ONNX and verify the file."""
    packed = source / PACKED if source.is_dir() else source
    if not packed.exists():
        raise PackedFileError(
            f"there is no packed network {packed}; give a folder of ompq quantize, "
            "or a packed file"
        )
    file = options.target(packed)
    check_writable(file)
    if options.kind == "packed" and not options.with_graph:
        size = inspect_file(packed).file_bytes  # raises an error for a damaged file
        with replacing(file) as temporary:
            shutil.copyfile(packed, temporary)
        copied = {"file": str(file), "bytes": size}
        return View(copied, f"{file}: {in_bytes(size)}")
    written = read_contents(packed).about
    name = options.network or str(written.get("network") or "")
    if not name:
        raise ModelError(f"{packed} does not name its network; give --network")
    with console.stage("loading the network"), mute_warnings():
        model = _structure(name, source, options)
        network = load(packed, model.module)
    samples, data, classes = _inputs(model, source, options, console)
    about: dict[str, Any] = {
        "network": name,
        "data": data,
        "budget": (written.get("plan") or {}).get("budget"),
        "packed_bytes": packed.stat().st_size,
    }
    with console.stage("exporting and verifying"), TemporaryDirectory() as work:
        onnx = Path(work, ONNX) if options.with_graph else file
        config = ExportConfig(
            network=name,
            preprocessing=model.preprocessing,
            classes=classes,
            budget=about["budget"],
            opset=options.opset,
        )
        kind = "onnx" if options.with_graph else options.kind
        result = write_for_runtime(network, onnx, samples, config, format=kind)
        if options.with_graph:
            about["graph_bytes"] = add_onnx(packed, onnx, file)
            about["packed_bytes"] = file.stat().st_size
    if source.is_dir():
        about["reported"] = add_sections(source, [_agreement(file, result)])
    return export_view(replace(result, path=file), about)


def _agreement(file: Path, result: ExportResult) -> AgreementSection:
    """Return what the report of a run says of an exported file."""
    found = result.engine or result.simulated
    compared = found.codes > 0
    return AgreementSection(
        file.name,
        found.top1,
        found.images,
        found.codes_equal if compared else None,
        found.codes_furthest if compared else None,
        f"{in_bytes(result.bytes)}, {result.runtime}",
    )


def _inputs(
    model: NamedModel, source: Path, options: ExportOptions, console: Console
) -> tuple[Samples, str, tuple[str, ...]]:
    """Return inputs to verify with, the name of their source, and known classes."""
    name = options.data or _of_run(source, "data")
    with mute_warnings():  # noise is as good as images for verification
        data = load_data(name or "random", model, split="train")
    samples = read_samples(data, min(options.samples, len(data)), console)
    classes = () if data.images is None or data.images.numbered else data.images.classes
    return samples, data.name, classes


def _structure(name: str, source: Path, options: ExportOptions) -> NamedModel:
    """Return the network at the run's shape; only its structure is used."""
    model = load_model(name, "none")
    shape = shape_of(options.input_shape or _of_run(source, "input_shape"))
    return model if shape is None else model.at(shape)


def _of_run(source: Path, what: str) -> str | None:
    """Return a setting of the run whose folder is exported, or None."""
    result = source / RESULT
    if not result.is_file():
        return None
    try:
        found = convert_json(read_json(result), dict[str, Any], "a result").get(what)
    except ValueError as error:
        raise DataError(f"{result} is damaged: {error}. Give --data") from error
    return None if found is None else str(found)


def export_view(result: ExportResult, about: Mapping[str, Any]) -> View:
    """Return an exported file and the result of its verification."""
    containers = Counter(f"{w.bits} bits as {w.container}" for w in result.weights)
    size, packed = in_bytes(result.bytes), in_bytes(about["packed_bytes"])
    opset = f", opset {result.opset}" if result.opset else ""
    file = f"{result.path}: {size}{opset}; packed it takes {packed}"
    if "graph_bytes" in about:
        graph = in_bytes(about["graph_bytes"])
        file = f"{result.path}: {packed}, {graph} of it the graph; unpacked {size}"
    limit = f"; the limit is {result.limit:.1e}" if isfinite(result.limit) else ""
    rows = [
        ("network", str(about["network"])),
        ("file", file),
        *_budget_rows(about.get("budget")),
        ("layers", ", ".join(f"{n} × {key}" for key, n in sorted(containers.items()))),
        ("verified", f"{result.runtime} on {about['data']}"),
        ("PyTorch", f"{result.simulated}{limit}"),
        ("integers", str(result.engine or f"only in part: {result.reason}")),
    ]
    if result.floats:
        counts = (f"{n} × {kind}" for kind, n in result.floats.items())
        rows.append(("float", ", ".join(counts)))
    finite = result.limit if isfinite(result.limit) else None
    data = {**about, **asdict(result), "path": str(result.path), "limit": finite}
    written = packed if "graph_bytes" in about else size
    line = f"{result.path}: {written}, {result.simulated}"
    return View(data, line, [facts(rows)])


def run_inspect(file: Path) -> View:
    """Show what takes space in a packed network or an ONNX file."""
    if file.is_dir():
        raise ValueError(
            f"{file} is a folder; give the file in it, for example {file / PACKED}"
        )
    if not file.exists():
        raise ValueError(f"{file}: there is no such file")
    if file.suffix != ".onnx":
        return packed_view(file, inspect_file(file))
    account = inspect_onnx(file)
    layers = account.layers
    columns = [
        Column("layer", list(layers), "left", shorten=True),
        Column("bits", [str(account.bits[name]) for name in layers]),
        Column("bytes", [in_bytes(count) for count in layers.values()]),
    ]
    items = {**account.items, "file": account.bytes}
    sums = [
        Column("item", list(items), "left"),
        Column("bytes", [f"{count:,}" for count in items.values()]),
    ]
    line = f"{account.path}: {in_bytes(account.bytes)}"
    return View(account.to_json(), line, [columns, "", sums, "", line])


def packed_view(file: Path, account: Account) -> View:
    """Return the bytes of a packed file, next to those of its plan."""
    about, planned = account.about, account.planned_bytes
    graph = account.items.get("graph", 0)
    network = account.file_bytes - graph
    compared = "within" if network <= planned else "more than"
    size = f"{in_bytes(network)}, {compared} the plan's {in_bytes(planned)}"
    size += f"; besides, {in_bytes(graph)} of an ONNX graph" if graph else ""
    versions = [f"{name} {number}" for name, number in about["versions"].items()]
    rows = [("network", about["network"] or "not named"), ("by", ", ".join(versions))]
    if (plan := about["plan"]) is not None:
        rows.append(("plan", f"{plan['budget']} by {plan['score']}, {plan['hash']}"))
    rows.append(("bits", f"{account.average_bits:.3f} per weight on average"))
    rows.append(("size", size))
    actual = {**account.items, "file": account.file_bytes}
    plans = [{**account.planned, "file": account.planned_bytes}[one] for one in actual]
    more = [size - plan for size, plan in zip(actual.values(), plans, strict=True)]
    items = [
        Column("item", [name.replace("_", " ") for name in actual], "left"),
        Column("bytes", [f"{size:,}" for size in actual.values()]),
        Column("plan", [f"{size:,}" for size in plans]),
        Column("more", [f"{n:+,}" if n else "" for n in more], rank=1),
    ]
    body: list[Shown] = [_unit_columns(account), "", items, "", facts(rows)]
    return View(account.to_json(), f"{file}: {size}", body)


def _unit_columns(account: Account) -> list[Column]:
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
    if any(one.coded for one in units):
        rates = [
            f"{8 * one.bytes.weights / one.unit.weights:.2f}" if one.coded else ""
            for one in units
        ]
        columns.insert(3, Column("coded", rates, rank=2))
    return columns


def _budget_rows(budget: str | None) -> list[tuple[str, str]]:
    """Return what the budget limits: the packed file, unless it says otherwise."""
    if not budget:
        return []
    if "onnx:" in budget:
        return [("budget", budget)]
    return [("budget", f"{budget}, of the packed file; onnx:SIZE limits this file")]
