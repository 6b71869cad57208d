"""demo: the whole path at once, on a network that comes with the package."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import RenderableType
from rich.text import Text

from ompq.cli.console import View, opened, render
from ompq.cli.options import OutputOptions, check_folder, number, option, output_path
from ompq.cli.views import Column, facts, fitted, time_line
from ompq.costs import in_bytes, percent
from ompq.demo import (
    DIGITS,
    NOISY,
    Demo,
    DemoConfig,
    Measured,
    advantage,
    agreement,
    run_demo,
)
from ompq.evaluation import Evaluation
from ompq.plans import Plan
from ompq.workflow import PLAN, REPORT

FOLDER = Path("ompq-demo")


def demo(
    output: OutputOptions,
    budget: str = option(
        str(DemoConfig.budget),
        "BUDGET",
        f"As for ompq plan. Default: {DemoConfig.budget}.",
    ),
    folder: Path = output_path(
        f"Where the files go. Default: {FOLDER}/.", "DIR", FOLDER
    ),
    iterations: int = number(DemoConfig.iterations, "Learning steps per block."),
    seed: int = number(
        DemoConfig.seed, "Seed for the order of samples and for the noise.", least=None
    ),
) -> None:
    """Run the whole path on a small network that comes with ompq.

    Examples:
      ompq demo
      ompq demo --budget 32KiB -o out/
      ompq demo --budget 3.2bits --iterations 500
      ompq demo --json --quiet

    It plans, quantizes, reconstructs, evaluates, packs and exports a network that
    reads handwritten digits, compares it with networks that have the same bits
    everywhere, and writes a report. It downloads nothing, needs no GPU, and takes
    about a minute. Budgets from 30.8KiB to 88.2KiB, or 2bits to 8bits, can be met.
    """
    check_folder(folder)
    config = DemoConfig(budget=budget, iterations=iterations, seed=seed)
    with opened(output) as console:

        def planned(plan: Plan, reference: Measured) -> None:
            if not console.json and not console.quiet:
                console.show(*beginning(plan, budget, reference, console.out.width))

        # The network is too small to share: threads that wait for each other would take
        # most of the time, and on a busy machine ten times as long.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            found = run_demo(folder, config, bar=console.stages.bar, planned=planned)
        finally:
            torch.set_num_threads(threads)
        view = DemoView(found, folder)
        data = {**found.to_json(), "folder": str(folder), "files": list(found.files)}
        line = f"{folder / REPORT}: {view.verdict()}"
        render(View(data, line, view.tables), console)


def beginning(
    plan: Plan, budget: str, reference: Measured, width: int
) -> list[RenderableType]:
    """Return what is shown before the long stages: the task, and the decision."""
    weights = sum(unit.weights for unit in plan.graph.units)
    size = in_bytes(plan.problem.costs["bytes"].reference)
    return [
        f"A network that reads handwritten digits: {len(plan.graph)} layers, "
        f"{weights:,} weights, {size} in float. It reads "
        f"{_right(reference[DIGITS])} unseen digits correctly.",
        f"It has to fit into {budget}. Each bit goes where it prevents the most damage "
        "per byte. Damage is the rounding noise of a layer, weighted by how much of it "
        "is expected to reach the answers:",
        "",
        _bits_table(plan, width),
        *ties(plan),
        "",
    ]


def _bits_table(plan: Plan, width: int) -> RenderableType:
    """Return what each layer gets, and the two things that decide it."""
    units, damage = plan.graph.units, plan.scores.damage
    bits = [plan.allocation[unit.name] for unit in units]
    table = plan.problem.costs["bytes"].table
    sizes = [in_bytes(table[row, column]) for row, column in enumerate(plan.columns)]
    least = plan.choices[0].bits
    columns = [
        Column("layer", [unit.name for unit in units], "left", shorten=True),
        Column("kind", [unit.kind for unit in units], "left", rank=1),
        Column("weights", [f"{unit.weights:,}" for unit in units]),
        Column(f"damage at {least:g} bits", [f"{row[0]:.3f}" for row in damage]),
        Column(
            "bits", ["▬" * round(b.bits) + f" {b.weight_text}" for b in bits], "left"
        ),
        Column("bytes", sizes),
    ]
    return fitted(columns, width)


def ties(plan: Plan) -> list[RenderableType]:
    """Return a line for each group of layers that share their bits, after a gap."""
    names = plan.graph.names
    lines: list[RenderableType] = [
        f"{' and '.join(names[i] for i in group)} share their bits: "
        "their outputs are added."
        for group in plan.graph.groups.values()
        if len(group) > 1
    ]
    return ["", *lines] if lines else []


@dataclass(frozen=True)
class DemoView:
    """What came of the demonstration: the contest, and the files."""

    found: Demo
    folder: Path

    def tables(self, width: int) -> list[RenderableType]:
        """Return the networks side by side, the verdict, and the files."""
        noisy = self.found.reference[NOISY].count
        return [
            "Uniform networks have the same bits everywhere. The last two columns show "
            f"how often a network gives the float network's answer to {noisy:,} noisy "
            "digits: rounded to nearest, then reconstructed.",
            "",
            self._contest(width),
            "",
            Text(self.verdict(), style="bold"),
            "",
            facts(self.rows()),
        ]

    def _contest(self, width: int) -> RenderableType:
        found, rivals = self.found, self.found.contenders
        sizes = [found.float_bytes, *(one.plan.totals["bytes"] for one in rivals)]
        bits = [f"{one.plan.totals['average_bits']:.2f}" for one in rivals]
        digits = [found.reference, *(one.final for one in rivals)]
        rounded = [percent(agreement(one.rounded)) for one in rivals]
        final = [percent(agreement(one.final)) for one in rivals]
        remarks = ["" if one.within else "too large" for one in rivals]
        columns = [
            Column("network", ["float", *(one.name for one in rivals)], "left"),
            Column("bits", ["32", *bits]),
            Column("size", [in_bytes(size) for size in sizes]),
            Column("correct digits", [_right(one[DIGITS]) for one in digits]),
            Column("rounded", ["", *rounded]),
            Column("reconstructed", ["", *final]),
            Column("", ["", *remarks], "left", rank=1),
        ]
        return fitted(columns, width)

    def verdict(self) -> str:
        """Return in a sentence what the contest says, whatever that is."""
        found, mixed, uniform = self.found, self.found.mixed, self.found.uniform
        if mixed.plan.allocation == uniform.plan.allocation:
            return f"At {found.budget} every layer gets the same: {uniform.name}."
        kept = agreement(mixed.final)
        text = (
            f"Within {found.budget}, mixed bits keep {percent(kept)} of the float "
            f"network's answers to noisy digits; {uniform.name} keep "
            f"{percent(agreement(uniform.final))}."
        )
        low, high = advantage(mixed.final, uniform.final)
        if low <= 0:
            digits = found.reference[DIGITS].count
            return f"{text} That is no difference that {digits} digits can show."
        text = f"{text[:-1]}: {percent(low)} to {percent(high)} more (95 % interval)."
        for larger in found.contenders:
            if not larger.within and advantage(mixed.final, larger.final)[0] > 0:
                size = in_bytes(larger.plan.totals["bytes"])
                share = percent(agreement(larger.final))
                return f"{text} Even {larger.name} ({size}) keep only {share}."
        return text

    def rows(self) -> list[tuple[str, str]]:
        """Return the files, and what to do next."""
        found, account, exported = self.found, self.found.account, self.found.exported
        same = "the same logits" if found.same_logits else "OTHER logits: please report"
        onnx = f"not written: {found.no_export}"
        if exported is not None:
            answers = exported.simulated
            equal = round(answers.top1 * answers.images)
            onnx = (
                f"{exported.path}: {in_bytes(exported.bytes)} with its graph; "
                f"{exported.runtime} gives the quantized network's answer to {equal} "
                f"of {answers.images} digits"
            )
        bits = found.plan.allocation
        most = max(found.plan.graph.names, key=lambda name: bits[name].bits)
        sizes = in_bytes(account.file_bytes), in_bytes(account.planned_bytes)
        packed = "{}, within the {} of the plan; read back it gives".format(*sizes)
        return [
            ("packed", f"{account.path}: {packed} {same}"),
            ("coded", found.coded_text),
            ("ONNX", onnx),
            ("report", f"{self.folder / REPORT}: open it in a browser"),
            ("next", f"ompq explain {self.folder / PLAN} {most}"),
            ("", "ompq demo --budget 32KiB, or your own network: ompq quantize --help"),
            ("time", time_line(found.outcome.seconds)),
        ]


def _right(found: Evaluation) -> str:
    assert found.top1 is not None  # the digits have labels
    return f"{round(found.top1 * found.count)} of {found.count}"
