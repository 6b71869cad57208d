"""What ``ompq audit`` does: runs an audit, writes and shows what it found."""

from collections.abc import Sequence
from dataclasses import replace
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
from ompq.cli.option_groups import CacheOptions, PlanOptions, SourceOptions
from ompq.cli.options import check_writable, snake
from ompq.files import REPORT
from ompq.lab.audit_settings import AuditConfig
from ompq.lab.audits import Audit, Measured, audit as measure_scores
from ompq.lab.research_options import AuditOptions
from ompq.plans import Plan, read_bits
from ompq.report.page import write_report
from ompq.report_sections import AuditedBits, AuditedRanks, Section
from ompq.scores.catalogue import SCORES
from ompq.workflow import Workflow, whole_folder, write_result


def run_audit(
    sources: SourceOptions,
    planning: PlanOptions,
    options: AuditOptions,
    caching: CacheOptions,
    console: Console,
    budget: str,
) -> View:
    """Audit scores and known bits; write and show what was found."""
    check_writable(options.folder, folder=True)
    limits, config = Budget.of(budget), audit_config(options, planning, sources.seed)
    kept, others = options.unfinished(), _known_bits(options)
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


def audit_config(
    options: AuditOptions, planning: PlanOptions, seed: int
) -> AuditConfig:
    """Return the settings of an audit.

    Raises:
        ValueError: A score is unknown.
    """
    names = list(SCORES) if options.scores == "all" else options.scores.split(",")
    names = [*map(snake, names)]
    for name in names:
        if name not in SCORES:
            raise ValueError(f"--scores {options.scores}: {unknown_score(name)}")
    return AuditConfig(
        allocations=options.allocations,
        iterations=options.reconstruct,
        scores=with_orm_options(names, planning, "--scores"),
        plan=replace(planning.config(), orm=None),
        metrics=user_metrics(options.metric),
        seed=seed,
    )


def _known_bits(options: AuditOptions) -> dict[str, Allocation]:
    """Return the bits of the files of ``--plan`` by their paths."""
    read = {str(path): read_bits(path) for path in options.plans or ()}
    return {
        name: one.allocation if isinstance(one, Plan) else one
        for name, one in read.items()
    }


def audit_view(result: Audit, written: Sequence[str]) -> View:
    """Return scores and known bits, the best first, and what random scores reach."""
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
