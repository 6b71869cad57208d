"""export, inspect and bench: commands for the files of a quantized network."""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ompq.amounts import in_bytes
from ompq.cli.console import Column, Console, Shown, View, facts, mute_warnings
from ompq.cli.loading import read_samples
from ompq.cli.option_groups import BenchOptions, ExportOptions, shape_of
from ompq.cli.options import check_threads, check_writable
from ompq.configs import ExportConfig
from ompq.datasets.named_data import load_data
from ompq.errors import DataError, ExportError, ModelError, PackedFileError
from ompq.files import ONNX, PACKED, RESULT, replacing
from ompq.integer.lowering import input_names
from ompq.models.named_models import NamedModel, load_model
from ompq.packed.account import Account, inspect_file
from ompq.packed.format import read_contents
from ompq.packed.packed_files import add_onnx, load
from ompq.report_sections import AgreementSection
from ompq.runtimes.benchmark import Timing, inputs_of, installed_runtimes, time_files
from ompq.runtimes.export_result import ExportResult
from ompq.runtimes.exporter import export as write_for_runtime
from ompq.runtimes.inspection import inspect_onnx, network_name, without_gain
from ompq.runtimes.onnx.traced_graph import float_model
from ompq.samples import Batch, Samples
from ompq.untrusted_json import convert_json, read_json
from ompq.workflow import add_agreement


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
            budget=None if options.with_graph else about["budget"],
            opset=options.opset,
        )
        kind = "onnx" if options.with_graph else options.kind
        result = write_for_runtime(network, onnx, samples, config, format=kind)
        if options.with_graph:
            about["graph_bytes"] = add_onnx(packed, onnx, file)
            about["packed_bytes"] = file.stat().st_size
    if source.is_dir():
        about["reported"] = add_agreement(source, _agreement(file, result))
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


def run_bench(source: Path, options: BenchOptions, console: Console) -> View:
    """Time an exported network against the float one, on this machine's CPU."""
    check_threads(options.threads)
    file = source / ONNX if source.is_dir() else source
    if file != source and not file.exists():
        raise ExportError(f"{source} has no {ONNX}; run ompq export {source} first")
    if file.suffix != ".onnx":
        raise ExportError(
            f"{file} is not an ONNX file; run ompq export first and give its output"
        )
    with TemporaryDirectory() as work:
        remarks = without_gain(file)
        inputs = inputs_of(file, options.batch)
        with console.stage("writing the float network"), mute_warnings():
            floats = _float(file, options.reference, Path(work))
        timings: list[Timing] = []
        failed: list[str] = []
        for runtime in installed_runtimes():
            try:
                with console.stage(f"timing {runtime}"):
                    timings += time_files(
                        {"float": floats, "quantized": file},
                        inputs,
                        repeats=options.repeats,
                        threads=options.threads,
                        runtime=runtime,
                    )
            except ExportError as error:  # the other runtimes are still timed
                failed.append(str(error))
        if not timings:
            raise ExportError("; ".join(failed))
        remarks += [f"not timed: {reason}" for reason in failed]
        sizes = {"float": floats.stat().st_size, "quantized": file.stat().st_size}
        return bench_view(timings, sizes, remarks)


def _float(file: Path, reference: str | None, work: Path) -> Path:
    name = reference or network_name(file)
    if not name:
        raise ModelError(
            f"{file} does not name its network; give --float NETWORK, or an ONNX file"
        )
    if name.endswith(".onnx"):
        return Path(name)
    model = load_model(name, "none").module  # the time does not depend on the weights
    named = {one.name: torch.from_numpy(one.made()) for one in inputs_of(file, 2)}
    values = tuple(named.values())
    batch: Batch = values if len(values) > 1 else values[0]
    if list(named) != input_names(values):  # the names are the keys of a dict
        batch = named
    path = work / "float.onnx"
    path.write_bytes(float_model(model, batch).SerializeToString())
    return path


def bench_view(
    timings: Sequence[Timing], sizes: Mapping[str, int], remarks: Sequence[str]
) -> View:
    """Return the speed of the files, and the layers that gain little or no time."""
    memory = [in_bytes(one.memory.peak - one.memory.start) for one in timings]
    columns = [
        Column("runtime", [one.runtime for one in timings], "left"),
        Column("network", [one.name for one in timings], "left"),
        Column("ms", [f"{one.milliseconds:.2f}" for one in timings]),
        Column("speed-up", [f"{one.ratio:.2f} ×" for one in timings]),
        Column("load, s", [f"{one.load_seconds:.3f}" for one in timings], rank=2),
        Column("file", [in_bytes(sizes[one.name]) for one in timings], rank=3),
        Column("memory", memory, rank=1),
    ]
    slow = facts([("no faster", remarks)])
    below: list[Shown] = ["", slow] if remarks else []
    if _differ(timings):
        below = [
            "",
            "ms are medians of all runs; speed-ups are medians of the ratios of paired "
            "runs. They differ here, so the machine was busy: trust the speed-ups.",
            *below,
        ]
    rows = [{**one.to_json(), "file_bytes": sizes[one.name]} for one in timings]
    line = "\n".join(
        f"{one.runtime}, {one.name}: {one.milliseconds:.3g} ms, "
        f"{one.ratio:.2f} times as fast as float"
        for one in timings
    )
    data = {"rows": rows, "without_gain": remarks}
    return View(data, line, [columns, *below])


def _differ(timings: Sequence[Timing]) -> bool:
    """Return whether a ratio of medians is far from the median of ratios."""
    floats = {one.runtime: one.milliseconds for one in timings if one.name == "float"}
    ratios = [
        floats.get(one.runtime, one.milliseconds) / one.milliseconds / one.ratio
        for one in timings
    ]
    return any(not 1 / _SAME < ratio < _SAME for ratio in ratios)


_SAME = 1.05  # largest factor between two speed-ups that look the same


def _budget_rows(budget: str | None) -> list[tuple[str, str]]:
    """Return what the budget limits: the packed file, unless it says otherwise."""
    if not budget:
        return []
    if "onnx:" in budget:
        return [("budget", budget)]
    return [("budget", f"{budget}, of the packed file; onnx:SIZE limits this file")]
