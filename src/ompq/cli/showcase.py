"""demo and reproduce: commands with fixed networks and settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.text import Text

from ompq.cli.console import Column, Console, Shown, View, facts, say
from ompq.cli.options import (
    argument,
    check_writable,
    flag,
    number,
    one_of,
    option,
    output_path,
)
from ompq.cli.settings import NetworkOptions, read_samples
from ompq.cli.views import time_line
from ompq.costs import in_bytes, percent
from ompq.datasets import load_data
from ompq.demo import DIGITS, NOISY, Demo, DemoConfig, Measured, agreement, run_demo
from ompq.errors import suggestion
from ompq.experiments import ANY, EXPERIMENTS, Experiment, Row
from ompq.plans import Plan, unit_rows
from ompq.reproduction import Bench, reproduce as run_experiment
from ompq.results import Evaluation
from ompq.stages import PLAN, REPORT
from ompq.workflow import CALIBRATION_SAMPLES

FOLDER, REPRODUCED = Path("ompq-demo"), Path("reproduced")
QUICK_SAMPLES, QUICK_IMAGES = 16, 64  # with --quick


def demo(
    console: Console,
    budget: str = option(
        "BUDGET",
        f"As for ompq plan. Default: {DemoConfig.budget}.",
        default=str(DemoConfig.budget),
    ),
    folder: Path = output_path(
        f"Where the files go. Default: {FOLDER}/.", "DIR", FOLDER
    ),
    iterations: int = number(
        "Reconstruction steps per block.", default=DemoConfig.iterations
    ),
    seed: int = number(
        "Seed for the order of samples and for the noise.",
        default=DemoConfig.seed,
        least=None,
    ),
) -> View:
    """Try everything on a small network that comes with ompq.

    Examples:
      ompq demo
      ompq demo --budget 32KiB -o out/
      ompq demo --budget 3.2bits --iterations 500
      ompq demo --json --quiet

    Plans, quantizes, reconstructs, evaluates, packs and exports a network that reads
    handwritten digits, compares it with networks of uniform bits, and writes a report.
    Takes about a minute and needs neither a GPU nor a download. Budgets from 30.8KiB to
    88.2KiB, or 2bits to 8bits, can be met.
    """
    check_writable(folder, folder=True)
    config = DemoConfig(budget=budget, iterations=iterations, seed=seed)

    def planned(plan: Plan, reference: Measured) -> None:
        if not console.json and not console.quiet:
            console.show(*beginning(plan, budget, reference))

    # The network is too small for several threads: synchronization would take most of
    # the time, and ten times as long on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = run_demo(folder, config, bar=console.stages.bar, planned=planned)
    finally:
        torch.set_num_threads(threads)
    data = {**result.to_json(), "folder": str(folder), "files": list(result.files)}
    line = f"{folder / REPORT}: {result.verdict}"
    noisy = result.reference[NOISY].count
    body: list[Shown] = [
        "Uniform networks have the same bits in every layer. The last two columns show "
        f"how often a network gives the float network's answer to {noisy:,} noisy "
        "digits: rounded to nearest, then reconstructed.",
        "",
        _contest(result),
        "",
        Text(result.verdict, style="bold"),
        "",
        facts(closing(result, folder)),
    ]
    return View(data, line, body)


def beginning(plan: Plan, budget: str, reference: Measured) -> list[Shown]:
    """Return what is printed before the long stages: the task and the plan."""
    weights = sum(unit.weights for unit in plan.graph.units)
    size = in_bytes(plan.problem.costs["bytes"].reference)
    return [
        f"A network that reads handwritten digits: {len(plan.graph)} layers, "
        f"{weights:,} weights, {size} in float. It reads "
        f"{_correct(reference[DIGITS])} held-out digits correctly.",
        f"It has to fit into {budget}. Each bit goes where it prevents the most damage "
        "per byte. Damage is the rounding noise of a layer, weighted by how much of it "
        "is expected to reach the answers:",
        "",
        _bits(plan),
        *ties(plan),
        "",
    ]


def _bits(plan: Plan) -> list[Column]:
    """Return each layer's bits, with the damage and size that decide them."""
    units, bits = plan.graph.units, plan.allocation.values()
    least = f"damage at {plan.choices[0].bits:g} bits"
    return [
        Column("layer", [unit.name for unit in units], "left", shorten=True),
        Column("kind", [unit.kind for unit in units], "left", rank=3),
        Column("weights", [f"{unit.weights:,}" for unit in units], rank=1),
        Column(least, [f"{row[0]:.3f}" for row in plan.scores.damage]),
        Column("bits", [choice.weight_text for choice in bits]),
        Column("bytes", [in_bytes(row["bytes"]) for row in unit_rows(plan)]),
        Column("", ["▬" * round(choice.bits) for choice in bits], "left", rank=2),
    ]


def ties(plan: Plan) -> list[str]:
    """Return a blank line and one for each group of layers that share their bits."""
    names = plan.graph.names
    lines = [
        f"{' and '.join(names[i] for i in group)} share their bits: "
        "their outputs are added."
        for group in plan.graph.groups.values()
        if len(group) > 1
    ]
    return ["", *lines] if lines else []


def _contest(result: Demo) -> list[Column]:
    """Return the networks side by side."""
    rivals = result.contenders
    sizes = [result.float_bytes, *(one.plan.totals["bytes"] for one in rivals)]
    bits = [f"{one.plan.totals['average_bits']:.2f}" for one in rivals]
    digits = [result.reference, *(one.final for one in rivals)]
    rounded = [percent(agreement(one.rounded)) for one in rivals]
    final = [percent(agreement(one.final)) for one in rivals]
    remarks = ["" if one.within else "too large" for one in rivals]
    return [
        Column("network", ["float", *(one.name for one in rivals)], "left"),
        Column("bits", ["32", *bits]),
        Column("size", [in_bytes(size) for size in sizes]),
        Column("correct digits", [_correct(one[DIGITS]) for one in digits], rank=1),
        Column("rounded", ["", *rounded]),
        Column("reconstructed", ["", *final]),
        Column("", ["", *remarks], "left", rank=2),
    ]


def closing(result: Demo, folder: Path) -> list[tuple[str, str]]:
    """Return the files, and what to do next."""
    account, exported, bits = result.account, result.exported, result.plan.allocation
    same = "the same logits" if result.same_logits else "OTHER logits: please report"
    onnx = f"not written: {result.no_export}"
    if exported is not None:
        answers = exported.simulated
        equal = round(answers.top1 * answers.images)
        onnx = (
            f"{exported.path}: {in_bytes(exported.bytes)} with its graph; "
            f"{exported.runtime} gives the quantized network's answer to {equal} "
            f"of {answers.images} digits"
        )
    most = max(bits, key=lambda name: bits[name].bits)
    size, planned = in_bytes(account.file_bytes), in_bytes(account.planned_bytes)
    packed = f"{size}, within the {planned} of the plan; loaded again it gives {same}"
    return [
        ("packed", f"{account.path}: {packed}"),
        ("coded", result.coded_text),
        ("ONNX", onnx),
        ("report", f"{folder / REPORT}: open it in a browser"),
        ("next", f"ompq explain {folder / PLAN} {most}"),
        ("", "ompq demo --budget 32KiB, or your own network: ompq quantize --help"),
        ("time", time_line(result.outcome.seconds)),
    ]


def _correct(result: Evaluation) -> str:
    assert result.top1 is not None  # the digits have labels
    return f"{round(result.top1 * result.count)} of {result.count}"


def reproduce(
    console: Console,
    name: Annotated[
        str | None, argument("NAME", "A table or figure, from --list.")
    ] = None,
    listed: bool = flag("List every table, figure and row.", "--list"),
    data: str | None = option(
        "SOURCE", "Labelled images to train with and to take samples from."
    ),
    eval_data: str | None = option(
        "SOURCE", "Labelled images to measure accuracy on. Default: --data."
    ),
    network: str | None = option(
        "NETWORK", "A network other than the paper's, as for ompq plan."
    ),
    weights: str | None = option("FILE", "As for ompq plan."),
    device: str = one_of(("auto", "cpu", "cuda"), "where to run.", default="auto"),
    rows: str = option("PATTERN", "Rows to run: ompq-*. Default: all.", default="*"),
    folder: Path = output_path(
        f"Where the files go. Default: {REPRODUCED}/.", "DIR", REPRODUCED
    ),
    samples: int | None = number(
        "Images to calibrate with.", shown=f"{CALIBRATION_SAMPLES}, or all", least=8
    ),
    limit: int | None = number("Measure on this many images only.", shown="all"),
    seed: int = number(
        "Seed for the choice of images and the order.", default=0, least=None
    ),
    quick: bool = flag(
        "Scale every row down, to try it in minutes. The numbers mean nothing.",
        "--quick",
    ),
) -> View:
    """Reproduce a table or figure of the OMPQ paper, including the methods it compares.

    Examples:
      ompq reproduce --list
      ompq reproduce table-ptq-mobilenetv2 --data imagenet/ --weights mbv2.pth
        -o out/
      ompq reproduce table-ptq-resnet18 --data imagenet/ --rows 'ompq-*' -o out/
      ompq reproduce figure-beta-mobilenetv2 --network ompq:demo --data digits
        --quick

    Writes NAME.json, NAME.md (a table next to the paper's numbers) and the figure as
    SVG, PDF and PNG. Each row is saved as soon as it is measured; the same command
    continues a stopped run. Rows that train take days on ImageNet; select others with
    --rows.
    """
    if listed:
        return _list_view()
    experiment = _experiment(name)
    if data is None:
        raise ValueError("--data is missing: give a folder of labelled images")
    check_writable(folder, folder=True)
    options = NetworkOptions(
        network=network or experiment.network, weights=weights, device=device
    )
    model = options.load(console)
    inputs = load_data(data, model, split="train", seed=seed)
    held_out = load_data(eval_data or data, model, split="test", seed=seed)
    count = samples or min(CALIBRATION_SAMPLES, len(inputs))
    if quick:
        count = min(count, QUICK_SAMPLES)
        limit = limit or min(QUICK_IMAGES, len(held_out))
    images = read_samples(inputs, count, console)
    bench = Bench(
        experiment,
        model,
        inputs,
        images,
        held_out.batches(limit=limit),
        folder / experiment.name,
        quick=quick,
        seed=seed,
        stages=console.stages,
    )
    results: dict[str, Mapping[str, Any]] = {}
    files = run_experiment(
        bench, folder, rows=rows, told=lambda *one: _report_row(console, results, *one)
    )
    names = [str(path) for path in files]
    line = f"{experiment.name}: {len(results)} rows, {', '.join(names)}"
    return View({"rows": results, "files": names}, line)


def _experiment(name: str | None) -> Experiment:
    if name is None:
        raise ValueError("give a table or figure; ompq reproduce --list shows them")
    if name not in EXPERIMENTS:
        raise ValueError(
            f"there is no {name!r}{suggestion(name, EXPERIMENTS)}; "
            "ompq reproduce --list shows all of them"
        )
    return EXPERIMENTS[name]


def _report_row(
    console: Console, results: dict[str, Mapping[str, Any]], row: Row, result: Any
) -> None:
    results[row.name] = result
    top1 = result.get("top1")
    text = "" if top1 is None else f" top-1 {100 * top1:.2f}"
    text = f" not run: {result['skipped']}" if "skipped" in result else text
    paper = "" if row.published is None else f" (the paper: {row.published:.2f})"
    if not console.quiet:
        say(console.err, f"{row.name}:{text}{paper}, {result['seconds']:.1f} s")


def _list_view() -> View:
    entries = [(one, row) for one in EXPERIMENTS.values() for row in one.rows]
    fields = ("method", "budget", "train", "published")
    data = [
        {
            **{key: getattr(one, key) for key in ("name", "title", "network")},
            "row": row.name,
            **{key: getattr(row, key) for key in fields},
        }
        for one, row in entries
    ]
    budgets = ["" if row.budget == ANY else row.budget for _, row in entries]
    top1 = ["" if r.published is None else f"{r.published:.2f}" for _, r in entries]
    names = ["" if one.rows[0] is not row else one.name for one, row in entries]
    columns = [
        Column("table or figure", names, "left", shorten=True),
        Column("row", [row.name for _, row in entries], "left"),
        Column("method", [row.method for _, row in entries], "left", rank=3),
        Column("budget", budgets, rank=1),
        Column("training", [row.train or "" for _, row in entries], "left", rank=2),
        Column("top-1, paper", top1),
    ]
    line = f"{len(EXPERIMENTS)} tables and figures, {len(entries)} rows"
    return View(data, line, [columns])
