"""The demonstration: the whole path on the small network that comes with the package.

Its digits are so easy that hardly any network errs; how nearly a small network does
what the float one does shows on noisy copies, where the float one itself hesitates.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch import Tensor, nn

from ompq.demo.contest import Contest, Measured, Stage, Tests, contend
from ompq.demo.results import (
    COPIES,
    DIGITS,
    NETWORK,
    NOISE,
    NOISY,
    ONNX,
    PACKED,
    PLAN,
    REPORT,
    RESULT,
    Demo,
    DemoConfig,
    demo_sections,
)
from ompq.errors import OmpqError
from ompq.export.exporting import ExportResult, export_onnx
from ompq.files import write_text
from ompq.models.demo_network import DemoData, DemoNetwork, demo_data, demo_network
from ompq.packing.accounts import inspect_file
from ompq.packing.checkpoint import load, save
from ompq.pipeline import plan
from ompq.plans import Plan
from ompq.reconstruction.reconstructing import ReconstructConfig
from ompq.reconstruction.settings import RoundingConfig
from ompq.report import worst_histograms, write_report
from ompq.samples import Progress, evaluating

_PLAN_SAMPLES = 64
_BATCH = 150

logger = logging.getLogger(__name__)


def run_demo(
    folder: str | Path,
    config: DemoConfig = DemoConfig(),
    *,
    stage: Stage | None = None,
    planned: Callable[[Plan, Measured], None] | None = None,
) -> Demo:
    """Plan, quantize, reconstruct, evaluate, pack, export and report.

    Args:
        folder: Where plan, networks, report and result go; they appear at the end.
        config: Budget, iterations and so on.
        stage: Opened around each stage, for progress bars.
        planned: Called with the plan, and with how the float network does, before the
            long stages begin.

    Raises:
        InfeasibleBudgetError: The budget cannot be met.
        MissingExtraError: scikit-learn, which has the digits, is not installed.
    """
    seconds: dict[str, float] = {}
    timed = partial(_timed, stage or _silent, seconds)
    with _complete_folder(Path(folder)) as work:
        demo = _computed(work, config, timed, planned, seconds)
        with timed("writing the report") as progress:
            demo.plan.save(work / PLAN)
            title = f"Handwritten digits in {demo.budget}"
            sections = demo_sections(demo)
            write_report(
                work / REPORT,
                demo.plan,
                results=sections,
                title=title,
                progress=progress,
            )
        text = json.dumps(demo.to_json(), indent=1, ensure_ascii=False)
        write_text(work / RESULT, f"{text}\n")
    return _moved(demo, Path(folder))


def _computed(
    work: Path,
    config: DemoConfig,
    stage: Stage,
    planned: Callable[[Plan, Measured], None] | None,
    seconds: Mapping[str, float],
) -> Demo:
    model, data = demo_network(), demo_data()
    contest = Contest(
        model,
        data.train_images[: config.samples],
        _tests(data, config.seed),
        ReconstructConfig(
            rounding=RoundingConfig(iterations=config.iterations), seed=config.seed
        ),
    )
    with stage("planning") as progress:
        few = data.train_images[:_PLAN_SAMPLES]
        made = plan(model, few, config.budget, progress=progress)
    reference = contest.measured(model)
    if planned is not None:
        planned(made, reference)
    contenders = contend(contest, made, stage)
    mixed = next(one.network for one in contenders if one.plan is made)
    with stage("packing"):
        save(mixed, work / PACKED, plan=made, network=NETWORK)
        unpacked = load(work / PACKED, DemoNetwork)
        same = torch.equal(*(_logits(n, data.test_images) for n in (mixed, unpacked)))
    with stage("exporting to ONNX"):
        exported, why = _exported(mixed, work / ONNX, data.test_images)
    histograms = worst_histograms(mixed, model, made, contest.samples)
    return Demo(
        config=config,
        plan=made,
        reference=reference,
        contenders=contenders,
        account=inspect_file(work / PACKED),
        same_logits=same,
        exported=exported,
        no_export=why,
        histograms=tuple(histograms),
        seconds=seconds,
    )


def _tests(data: DemoData, seed: int) -> Tests:
    """Return the digits that the network has never seen, and noisy copies of them."""
    generator = torch.Generator().manual_seed(seed)
    images, targets = data.test_images, data.test_targets
    copies = images.repeat(COPIES, 1, 1, 1)
    noise = NOISE * torch.randn(copies.shape, generator=generator)
    noisy = (copies + noise).clamp(0, 1)
    return {
        DIGITS: _batches(images, targets),
        NOISY: _batches(noisy, targets.repeat(COPIES)),
    }


def _batches(images: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    starts = range(0, len(images), _BATCH)
    return [(images[at : at + _BATCH], targets[at : at + _BATCH]) for at in starts]


def _logits(network: nn.Module, images: Tensor) -> Tensor:
    with evaluating(network):
        return network(images)  # type: ignore[no-any-return]


def _exported(
    network: nn.Module, path: Path, images: Tensor
) -> tuple[ExportResult | None, str]:
    try:
        return export_onnx(network, path, images), ""
    except OmpqError as error:  # the rest is worth having without it
        logger.warning("no ONNX file: %s", error)
        return None, str(error)


def _moved(demo: Demo, folder: Path) -> Demo:
    """Return the demonstration with the paths where its files are in the end."""
    exported = demo.exported and replace(demo.exported, path=folder / ONNX)
    account = replace(demo.account, path=folder / PACKED)
    return replace(demo, account=account, exported=exported)


@contextmanager
def _timed(stage: Stage, seconds: dict[str, float], name: str) -> Iterator[Progress]:
    start = perf_counter()
    with stage(name) as progress:
        yield progress
    seconds[name] = perf_counter() - start


@contextmanager
def _silent(_name: str) -> Iterator[Progress]:
    yield lambda _done, _total, _message: None


@contextmanager
def _complete_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder whose files are moved to ``folder`` if the block succeeds."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(dir=folder, prefix=".unfinished.") as work:
            yield Path(work)
            for path in Path(work).iterdir():
                path.replace(folder / path.name)
    finally:
        if new:
            with suppress(OSError):  # it holds something
                folder.rmdir()
