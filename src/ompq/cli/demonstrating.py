"""demo: the whole path at once, on a network that comes with the package."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
from rich.console import RenderableType
from rich.text import Text

from ompq.cli.options import OutputOptions, option
from ompq.cli.screen import Screen, opened
from ompq.cli.settings import check_folder
from ompq.cli.shown import time_line
from ompq.cli.tables import Column, facts, fitted
from ompq.costs import in_bytes, percent
from ompq.demo import (
    DIGITS,
    NOISY,
    REPORT,
    Contender,
    Demo,
    DemoConfig,
    Measured,
    run_demo,
)
from ompq.evaluation import Evaluation
from ompq.plans import Plan

FOLDER = Path("ompq-demo")


def demo(
    output: OutputOptions,
    budget: Annotated[
        str,
        option(
            metavar="BUDGET",
            text="What the network may take, as for ompq plan. "
            f"Default: {DemoConfig.budget}.",
        ),
    ] = str(DemoConfig.budget),
    folder: Annotated[
        Path,
        option(
            "--output",
            "-o",
            metavar="DIR",
            text=f"Where everything goes. Default: {FOLDER}/.",
        ),
    ] = FOLDER,
    iterations: Annotated[
        int,
        option(
            min=1,
            metavar="NUMBER",
            text=f"Steps a block learns. Default: {DemoConfig.iterations}.",
        ),
    ] = DemoConfig.iterations,
    seed: Annotated[
        int,
        option(
            metavar="NUMBER",
            text="Decides the order of samples, and the noise. "
            f"Default: {DemoConfig.seed}.",
        ),
    ] = DemoConfig.seed,
) -> None:
    """Show the whole path at once, on a network that comes with ompq.

    Examples:
      ompq demo
      ompq demo --budget 30KiB -o out/
      ompq demo --budget 3.2bits --iterations 500
      ompq demo --json --quiet

    It plans, quantizes, reconstructs, evaluates, packs and exports a network that
    reads handwritten digits, beside networks with the same bits everywhere, and
    writes a report. It needs no download and no GPU, and takes about a minute. What
    can be met is 28.5KiB to 85.9KiB, 2bits to 8bits.
    """
    check_folder(folder)
    config = DemoConfig(budget=budget, iterations=iterations, seed=seed)
    with opened(output) as screen:

        def planned(plan: Plan, reference: Measured) -> None:
            if not screen.json and not screen.quiet:
                screen.show(*_beginning(plan, budget, reference))
                screen.show(bits_table(plan, screen.out.width), *ties(plan), "")

        with _one_thread():
            found = run_demo(folder, config, stage=screen.stage, planned=planned)
        _show(found, folder, screen)


@contextmanager
def _one_thread() -> Iterator[None]:
    # The network is too small to share: threads that wait for each other would take
    # most of the time, and on a busy machine ten times as long.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _show(found: Demo, folder: Path, screen: Screen) -> None:
    if screen.json:
        files = list(found.files)
        screen.show_json({**found.to_json(), "folder": str(folder), "files": files})
    elif screen.quiet:
        screen.show(f"{folder / REPORT}: {_verdict(found)}")
    else:
        screen.show(*_ending(found, folder, screen.out.width))


def _beginning(plan: Plan, budget: str, reference: Measured) -> list[RenderableType]:
    """Return what is told before the long stages: the task, and the decision."""
    weights = sum(unit.weights for unit in plan.graph.units)
    size = in_bytes(plan.problem.costs["bytes"].reference)
    return [
        Text(
            f"A network that reads handwritten digits: {len(plan.graph)} layers, "
            f"{weights:,} weights, {size} in float. It knows "
            f"{_right(reference[DIGITS])} digits that it has never seen.",
        ),
        Text(
            f"It shall fit into {budget}. Each bit goes where it spares most damage "
            "for the bytes that it takes. Damage is the noise of rounding, weighted by "
            "how little a layer repeats what the others do:"
        ),
        "",
    ]


def bits_table(plan: Plan, width: int) -> RenderableType:
    """Return what each layer gets, and the two things that decide it."""
    units, damage = plan.graph.units, plan.scores.damage
    bits = [plan.allocation[unit.name].weight for unit in units]
    size = plan.problem.costs["bytes"].table
    columns = [
        Column("layer", [unit.name for unit in units], "left", shorten=True),
        Column("kind", [unit.kind for unit in units], "left", rank=1),
        Column("weights", [f"{unit.weights:,}" for unit in units]),
        Column(
            f"damage at {plan.choices[0].weight} bits",
            [f"{row[0]:.3f}" for row in damage],
        ),
        Column("bits", ["▬" * count + f" {count}" for count in bits], "left"),
        Column(
            "bytes",
            [in_bytes(size[row, column]) for row, column in enumerate(plan.columns)],
        ),
    ]
    return fitted(columns, width)


def ties(plan: Plan) -> list[RenderableType]:
    """Return a line for each group of layers that share their bits, and a gap."""
    names = plan.graph.names
    groups = [[names[i] for i in group] for group in plan.graph.groups.values()]
    lines = [
        Text(f"{' and '.join(group)} share their bits: their outputs are added up.")
        for group in groups
        if len(group) > 1
    ]
    return ["", *lines] if lines else []


def _ending(found: Demo, folder: Path, width: int) -> list[RenderableType]:
    """Return what is told at the end: the contest, and the files."""
    noisy = found.reference[NOISY].count
    return [
        Text(
            "Uniform networks have the same bits everywhere. The last two columns tell "
            f"on how many of {noisy:,} noisy digits a network answers as the float one "
            "does: rounded to nearest, then reconstructed."
        ),
        "",
        contest_table(found, width),
        "",
        Text(_verdict(found), style="bold"),
        "",
        facts(_facts(found, folder)),
    ]


def contest_table(found: Demo, width: int) -> RenderableType:
    """Return the networks side by side."""
    contenders = found.contenders
    columns = [
        Column("network", ["float", *(one.name for one in contenders)], "left"),
        Column(
            "bits",
            ["32", *(f"{one.plan.totals['average_bits']:.2f}" for one in contenders)],
        ),
        Column(
            "size",
            [
                in_bytes(found.float_bytes),
                *(in_bytes(one.plan.totals["bytes"]) for one in contenders),
            ],
        ),
        Column(
            "digits right",
            [
                _right(found.reference[DIGITS]),
                *(_right(one.final[DIGITS]) for one in contenders),
            ],
        ),
        Column("rounded", ["", *(_as_float(one.rounded) for one in contenders)]),
        Column("reconstructed", ["", *(_as_float(one.final) for one in contenders)]),
        Column("", ["", *(_remark(one) for one in contenders)], "left", rank=1),
    ]
    return fitted(columns, width)


def _verdict(found: Demo) -> str:
    """Return in a sentence what the contest says, whatever that is."""
    mixed, uniform = found.mixed, found.uniform
    if mixed.plan.allocation == uniform.plan.allocation:
        return f"At {found.budget} every layer gets the same: {uniform.name}."
    text = (
        f"Within {found.budget}, mixed bits keep {_as_float(mixed.final)} of the "
        f"float network's answers to noisy digits; {_bits(uniform)} everywhere keep "
        f"{_as_float(uniform.final)}."
    )
    if _agreement(mixed.final) <= _agreement(uniform.final):
        return f"{text} Here mixing does not pay."
    for larger in found.contenders:
        if not larger.within and _agreement(mixed.final) > _agreement(larger.final):
            size = in_bytes(larger.plan.totals["bytes"])
            kept = _as_float(larger.final)
            return f"{text} Even {_bits(larger)} everywhere, {size}, keep but {kept}."
    return text


def _facts(found: Demo, folder: Path) -> list[tuple[str, str]]:
    account, exported = found.account, found.exported
    more = account.file_bytes - account.planned_bytes
    same = "the same logits" if found.same_logits else "OTHER logits: please report it"
    rows = [
        (
            "packed",
            f"{account.path}: {in_bytes(account.file_bytes)}, that is "
            f"{in_bytes(account.planned_bytes)} as planned and {in_bytes(more)} of "
            f"names; read back it gives {same}",
        )
    ]
    if exported is None:
        rows.append(("ONNX", f"not written: {found.no_export}"))
    else:
        same_answers = exported.simulated
        equal = round(same_answers.top1 * same_answers.images)
        rows.append(
            (
                "ONNX",
                f"{exported.path}: {in_bytes(exported.bytes)} with its graph; "
                f"{exported.runtime} gives the same answer to {equal} of "
                f"{same_answers.images} digits as the quantized network",
            )
        )
    return [
        *rows,
        ("report", f"{folder / REPORT}: open it in a browser"),
        ("next", f"ompq explain {folder / 'plan.json'} {_most_bits(found.plan)}"),
        ("", "ompq demo --budget 30KiB, or your own network: ompq quantize --help"),
        ("time", time_line(found.seconds)),
    ]


def _most_bits(plan: Plan) -> str:
    return max(plan.graph.names, key=lambda name: plan.allocation[name].weight)


def _right(found: Evaluation) -> str:
    return f"{round(found.top1 * found.count)} of {found.count}"


def _agreement(found: Measured) -> float:
    agreement = found[NOISY].agreement
    assert agreement is not None  # it was measured beside the float network
    return agreement


def _as_float(found: Measured) -> str:
    return percent(_agreement(found))


def _bits(one: Contender) -> str:
    return one.name.removeprefix("uniform ")


def _remark(one: Contender) -> str:
    return "" if one.within else "too large"
