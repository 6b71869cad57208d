"""bench: every exported file in every runtime, next to the float network."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from ompq.amounts import in_bytes
from ompq.cli.console import Column, Console, Shown, View, facts, mute_warnings
from ompq.cli.loading import use_threads
from ompq.cli.option_groups import BenchOptions
from ompq.datasets.named_data import load_data
from ompq.errors import ExportError, MissingExtraError, ModelError
from ompq.evaluation import evaluate
from ompq.files import PACKED
from ompq.integer.lowering import input_names
from ompq.models.exported_models import exported_model
from ompq.models.named_models import load_model
from ompq.packed.packed_files import load
from ompq.report_sections import RuntimeSection
from ompq.runtimes.benchmark import (
    RUNTIMES,
    Contestant,
    Timing,
    inputs_of,
    installed_runtimes,
    time_files,
)
from ompq.runtimes.inspection import without_gain
from ompq.runtimes.onnx.traced_graph import float_model
from ompq.runtimes.runnable_files import NETWORKS, RUNNABLE, open_runnable
from ompq.samples import Batch, Samples
from ompq.workflow import add_sections

_BATCHES = (1, 32)  # samples per run
_NOISE = 64  # inputs to compare answers on if there is no data
_FLOAT, _ONNX = "float", ".onnx"


def run_bench(source: Path, options: BenchOptions, console: Console) -> View:
    """Run exported files in every runtime, next to the float network."""
    use_threads(options.threads)
    files = _files(source)
    remarks = [
        text for one in files if one.suffix == _ONNX for text in without_gain(one)
    ]
    with TemporaryDirectory() as work:
        with console.stage("writing the float network"), mute_warnings():
            floats = _float(files[0], options.reference, Path(work))
        judge = _judge(source, files, options)
        rows: list[RuntimeSection] = []
        for runtime in installed_runtimes():
            suffix = RUNTIMES[runtime].suffix
            own = [one for one in files if one.suffix == suffix]
            if not own:
                continue
            own = [floats, *own] if suffix == _ONNX else own
            with console.stage(f"running {runtime}"):
                try:
                    rows += _measure(runtime, floats, own, judge, options)
                except (ExportError, MissingExtraError) as error:
                    remarks.append(f"not run: {error}")  # the other runtimes still are
    if not rows:
        raise ExportError(f"no runtime can run {files[0]}: {'; '.join(remarks)}")
    if source.is_dir():
        add_sections(source, rows)
    return bench_view(rows, judge.about, remarks)


def _files(source: Path) -> list[Path]:
    """Return the files to run; those of a folder in order of their names."""
    if source.is_dir():
        found = [one for one in sorted(source.iterdir()) if one.suffix in RUNNABLE]
        if not found:
            kinds = ", ".join(RUNNABLE)
            raise ExportError(
                f"{source} holds no {kinds} file; run ompq export {source} first"
            )
        return found
    if source.suffix not in RUNNABLE:
        raise ExportError(
            f"{source} is not one of {', '.join(RUNNABLE)}; run ompq export first and "
            "give its output"
        )
    return [source]


def _float(file: Path, reference: str | None, work: Path) -> Path:
    """Return an ONNX file of the float network."""
    name = reference or open_runnable(file)[1].network
    if not name:
        raise ModelError(
            f"{file} does not name its network; give --float NETWORK, or an ONNX file"
        )
    if name.endswith(_ONNX):
        return Path(name)
    model = load_model(name, "none").module  # the time does not depend on the weights
    path = work / "float.onnx"
    path.write_bytes(float_model(model, _inputs(file, 2)).SerializeToString())
    return path


def _inputs(file: Path, count: int) -> Batch:
    """Return inputs as the network takes them: noise, or zeros for integers."""
    named = {one.name: torch.from_numpy(one.made()) for one in inputs_of(file, count)}
    values = tuple(named.values())
    if file.suffix == ".tflite":  # (N, H, W, C)
        values = tuple(v.movedim(-1, 1) if v.dim() == 4 else v for v in values)
    elif file.suffix == _ONNX and list(named) != input_names(
        values
    ):  # the names are the keys of a dict
        return named
    return values if len(values) > 1 else values[0]


@dataclass(frozen=True)
class _Judge:
    """What the answers of files are compared with, on which inputs."""

    batches: Any  # labelled batches, or Samples
    reference: nn.Module
    about: str

    def __call__(self, network: nn.Module) -> dict[str, Any]:
        """Return how a network answers: accuracy if there are labels, and agreement."""
        found = evaluate(network, self.batches, reference=self.reference)
        return {
            "agreement": found.agreement,
            "divergence": found.divergence,
            "top1": found.top1,
            "count": found.count,
        }


def _judge(source: Path, files: Sequence[Path], options: BenchOptions) -> _Judge:
    packed = source / PACKED
    network, about = open_runnable(files[0])
    reference, name = network, f"{files[0].name} in its own runtime"
    if source.is_dir() and packed.exists() and about.network:
        with mute_warnings():
            model = load_model(about.network, "none")
        reference, name = load(packed, model.module), "PyTorch"
    if options.data is None:
        noise, what = Samples.of(_inputs(files[0], _NOISE)), f"{_NOISE} inputs of noise"
        return _Judge(noise, reference, f"{name}, {what}")
    data = load_data(options.data, exported_model(files[0]), split="test")
    batches = data.batches(limit=options.limit)
    return _Judge(batches, reference, f"{name}, {data.name}")


def _measure(
    runtime: str,
    floats: Path,
    files: Sequence[Path],
    judge: Callable[[nn.Module], dict[str, Any]],
    options: BenchOptions,
) -> list[RuntimeSection]:
    """Return a row for each file in one runtime.

    Speed-ups are against the float network in ONNX Runtime, which therefore runs too.
    """
    here = [Contestant(_name(one, floats), one, runtime) for one in files]
    first = Contestant(_FLOAT, floats)
    contestants = here if here[0] == first else [first, *here]
    batches = _BATCHES if options.batch is None else (options.batch,)
    times = [
        time_files(
            contestants,
            batch=batch,
            repeats=max(1, options.repeats * batches[0] // batch),
            threads=options.threads,
        )[-len(here) :]
        for batch in batches
    ]
    return [
        _row(one, [found[place] for found in times], judge)
        for place, one in enumerate(here)
    ]


def _name(file: Path, floats: Path) -> str:
    return _FLOAT if file == floats else file.name


def _row(
    one: Contestant,
    times: Sequence[Timing],
    judge: Callable[[nn.Module], dict[str, Any]],
) -> RuntimeSection:
    known: dict[str, Any] = {}
    if one.name != _FLOAT:  # whose weights may be random
        known = judge(NETWORKS[one.runtime](one.path))
    return RuntimeSection(
        name=one.name,
        runtime=times[0].runtime,
        bytes=one.path.stat().st_size,
        load_seconds=times[0].load_seconds,
        memory_bytes=times[0].memory.peak - times[0].memory.start,
        milliseconds={str(time.batch): time.milliseconds for time in times},
        speed_up={str(time.batch): time.ratio for time in times},
        **known,
    )


def bench_view(
    rows: Sequence[RuntimeSection], compared: str, remarks: Sequence[str]
) -> View:
    """Return the table of where the files run, and the layers that gain no time."""
    columns = [
        Column("file", [one.name for one in rows], "left", shorten=True),
        Column("runtime", [one.runtime for one in rows], "left"),
        Column("size", [in_bytes(one.bytes) for one in rows], rank=3),
        Column("load, s", [f"{one.load_seconds:.3f}" for one in rows], rank=5),
        Column("memory", [in_bytes(one.memory_bytes) for one in rows], rank=4),
    ]
    for batch in rows[0].milliseconds:
        title = "ms" if batch == "1" else f"ms, {batch}"
        times = [f"{one.milliseconds[batch]:.2f}" for one in rows]
        ratios = [f"{one.speed_up[batch]:.2f} ×" for one in rows]
        rank = 0 if batch == next(iter(rows[0].milliseconds)) else 2
        columns += [
            Column(title, times, rank=rank),
            Column("faster", ratios, rank=rank),
        ]
    columns.append(Column("same", [_percent(one.agreement) for one in rows], rank=1))
    if any(one.top1 is not None for one in rows):
        columns.append(Column("top-1", [_percent(one.top1) for one in rows]))
    notes = [
        ("faster", "than float in ONNX Runtime: median ratio of runs in turn"),
        ("same", f"answers as {compared}"),
        *(("remark", text) for text in remarks),
    ]
    line = "\n".join(
        f"{one.runtime}, {one.name}: {ms:.3g} ms, {one.speed_up[batch]:.2f} times as "
        "fast as float"
        for one in rows
        for batch, ms in list(one.milliseconds.items())[:1]
    )
    data = {"rows": [asdict(one) for one in rows], "compared": compared}
    below: list[Shown] = ["", facts(notes)]
    return View({**data, "remarks": list(remarks)}, line, [columns, *below])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"
