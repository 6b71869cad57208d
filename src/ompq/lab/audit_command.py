"""ompq audit: how well each score chooses bits, on the command line."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree

from ompq.allocation.problem import Allocation
from ompq.amounts import digits, in_bytes
from ompq.budgets import Budget
from ompq.cli.console import Column, Console, View, facts
from ompq.cli.loading import (
    find_data,
    labelled_batches,
    load_network,
    read_samples,
    unknown_score,
    user_metrics,
    with_orm_options,
)
from ompq.cli.option_groups import (
    CacheOptions,
    PlanOptions,
    SourceOptions,
    metric_option,
)
from ompq.cli.options import (
    BudgetOption,
    check_needed,
    check_resumed,
    check_writable,
    flag,
    number,
    option,
    output_path,
    snake,
)
from ompq.files import REPORT
from ompq.lab.audits import Audit, AuditConfig, Measured, audit as measure_scores
from ompq.plans import Plan, read_bits
from ompq.report.page import write_report
from ompq.scores.catalogue import SCORES, score_name
from ompq.sections import AuditedBits, AuditedRanks, Section
from ompq.workflow import Workflow, whole_folder, write_result

_QUICK = ",".join(map(score_name, AuditConfig.scores))


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options for what is measured and where the files go."""

    samples: int = number("Inputs for scoring and calibration.", default=256, least=2)
    held_out: int = number(
        "Held-out inputs, to measure divergence on.", default=256, least=2
    )
    eval_data: str | None = option(
        "SOURCE", "Labelled images, to measure top-1 as well."
    )
    limit: int | None = number("Use only this many labelled images.", shown="all")
    metric: str | None = metric_option(" of --eval-data")
    allocations: int = number(
        "Random allocations to measure.", default=AuditConfig.allocations, least=3
    )
    scores: str = option(
        "NAMES",
        "Scores to audit, joined by commas, or all. Default: "
        f"{_QUICK.replace(',', ', ')}.",
        default=_QUICK,
    )
    plans: list[Path] | None = option(
        "FILE",
        "Measure these bits, too: a plan, or bits copied from a report, or published "
        'ones: {"conv1": {"weight": 8, "activation": 8}, ...}. Repeatable.',
        "--plan",
    )
    reconstruct: int = option(
        "STEPS",
        "Reconstruct each allocation with this many steps per block. Default: 0.",
        default=0,
        min=0,
    )
    folder: Path | None = output_path("Write audit.json and report.html there.", "DIR")
    resume: bool = flag("Continue an audit that was stopped; needs -o.")

    def config(self, planning: PlanOptions, seed: int) -> AuditConfig:
        """Return the settings of an audit."""
        names = list(SCORES) if self.scores == "all" else self.scores.split(",")
        names = [*map(snake, names)]
        for name in names:
            if name not in SCORES:
                raise ValueError(f"--scores {self.scores}: {unknown_score(name)}")
        return AuditConfig(
            allocations=self.allocations,
            iterations=self.reconstruct,
            scores=with_orm_options(names, planning, "--scores"),
            plan=replace(planning.config(), orm=None),
            metrics=user_metrics(self.metric),
            seed=seed,
        )

    def others(self) -> dict[str, Allocation]:
        """Return the bits of the given files by their paths."""
        read = {str(path): read_bits(path) for path in self.plans or ()}
        return {
            name: one.allocation if isinstance(one, Plan) else one
            for name, one in read.items()
        }

    def unfinished(self) -> Path | None:
        """Return the folder that keeps tables and measurements until the audit ends."""
        given = {"limit": self.limit, "metric": self.metric}
        check_needed("--eval-data", self.eval_data, **given)
        path = None if self.folder is None else self.folder / "unfinished"
        left = path if path is not None and path.exists() else None
        check_resumed(self.folder, left, "audit", resume=self.resume)
        return path


def audit(
    sources: SourceOptions,
    planning: PlanOptions,
    options: AuditOptions,
    caching: CacheOptions,
    console: Console,
    budget: BudgetOption,
) -> View:
    r"""Measure how well each score chooses bits for a network.

    Examples:
      ompq audit cifar:resnet20 --weights r20.safetensors --data cifar10/ \
        --budget 15% -o audit/
      ompq audit ompq:demo --data digits --budget 3bits --scores orm,weight-noise
      ompq audit torchvision:resnet18 --data train/ --eval-data val/ \
        --limit 1000 --budget 4.0MiB --reconstruct 100 -o audit/
      ompq audit timm:resnet18 --data train/ --budget 4.0MiB --plan published.json

    Three kinds of allocations are quantized and compared with the float network on
    held-out inputs: random ones within the budget, the choice of each score, and known
    ones, which are uniform bits and those of --plan. The correlation that random scores
    reach is shown for comparison.
    """
    check_writable(options.folder, folder=True)
    limits, config = Budget.of(budget), options.config(planning, sources.seed)
    kept, others = options.unfinished(), options.others()
    cache = caching.folder(kept)
    model = load_network(sources, console)
    inputs = find_data(sources, model)
    batches = labelled_batches(sources, options.eval_data, model, options.limit)
    count = options.samples + options.held_out
    read = read_samples(inputs, count, console)
    samples, held_out = read[: options.samples], read[options.samples :]
    with console.stage("auditing") as progress:
        result = measure_scores(
            model.module,
            samples,
            limits,
            held_out,
            config,
            others=others,
            batches=() if batches is None else list(batches),
            checkpoint=kept and kept / "measured.json",
            cache=cache,
            progress=progress,
        )
    written: list[str] = []
    if options.folder is not None and kept is not None:
        work = Workflow(model.module, samples, console.stages, cache)
        plan = work.plan(limits, config.plan)
        with whole_folder(options.folder) as unfinished:
            write_result(unfinished / "audit.json", result.to_json())
            page, sections = unfinished / REPORT, audit_sections(result)
            write_report(page, plan, results=sections, title=model.name)
        rmtree(kept, ignore_errors=True)
        written = [str(options.folder / name) for name in ("audit.json", REPORT)]
    return audit_view(result, written)


def audit_view(result: Audit, written: Sequence[str]) -> View:
    """Return scores and known bits, the best first, and what chance reaches."""
    bits = [one for one, _ in result.named]
    scores = [score for _, score in result.named]
    over = ["" if one.fits else "over the budget" for one in bits]
    columns = [
        Column("bits by", [one.name for one in bits], "left", shorten=True),
        Column("Spearman", [str((one and one.spearman) or "-") for one in scores]),
        Column(
            "Kendall", [str((one and one.kendall) or "-") for one in scores], rank=4
        ),
        Column("divergence", [digits(one.divergence) for one in bits]),
        Column("regret", [f"{result.regret(one):.1%}" for one in bits]),
        *_quality_columns(bits),
        Column("size", [in_bytes(one.size_bytes) for one in bits], rank=3),
        Column(
            "seconds", [f"{one.seconds:.1f}" if one else "-" for one in scores], rank=2
        ),
        *([Column("", over, "left", rank=1)] if any(over) else []),
    ]
    best, chosen = result.best, result.scores[0]
    rows_below = [
        *((one.name, one.text) for one in result.comparisons),
        ("best seen", f"{best.name}, divergence {digits(best.divergence)}"),
        ("written", written),
    ]
    line = f"{chosen.name} chooses best: divergence {digits(chosen.divergence)}"
    data = {**result.to_json(), "written": list(written)}
    return View(data, line, [columns, "", facts(rows_below)])


def _quality_columns(bits: Sequence[Measured]) -> list[Column]:
    """Return the columns of what was measured on labelled images."""
    columns = []
    if all(one.top1 is not None for one in bits):
        cells = [f"{100 * (one.top1 or 0.0):.2f} %" for one in bits]
        columns.append(Column("top-1", cells))
    for name in bits[0].metrics:
        columns.append(Column(name, [digits(one.metrics[name], 4) for one in bits]))
    return columns


def audit_sections(audit: Audit) -> list[Section]:
    """Return the sections for an audit: bits, predictions, chance and orthogonality."""
    sections: list[Section] = []
    for one, score in audit.named:
        sections.append(
            AuditedBits(
                name=one.name,
                divergence=one.divergence,
                regret=audit.regret(one),
                bytes=one.size_bytes,
                fits=one.fits,
                top1=one.top1,
                metrics=tuple(one.metrics.items()),
                seconds=score.seconds if score else None,
                spearman=score.spearman if score else None,
                kendall=score.kendall if score else None,
            )
        )
    measured = [one.divergence for one in audit.random]
    for found in audit.scores:
        points = tuple(zip(found.predicted, measured, strict=True))
        text = f"Spearman {found.spearman}" if found.spearman else ""
        sections.append(AuditedRanks(found.name, text, points))
    return [*sections, *audit.comparisons]
