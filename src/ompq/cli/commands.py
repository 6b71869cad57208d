"""Every command: its options, help and examples.

The work is done by the function that is named beside the panel of the help. Its module
is imported when the command is called, so that help needs neither PyTorch nor NumPy.
"""

from pathlib import Path
from typing import Annotated

from ompq.cli.command_registry import COMMANDS as COMMANDS, command
from ompq.cli.console import Console, View
from ompq.cli.option_groups import (
    COSTS,
    MEASURABLE,
    PLAN_SAMPLES,
    REFINE_SAMPLES,
    BenchOptions,
    CacheOptions,
    DemoOptions,
    EvaluateOptions,
    ExportOptions,
    GoalOptions,
    NetworkOptions,
    RefineOptions,
    RunOptions,
    ScoreOptions,
    SourceOptions,
    TrainOptions,
)
from ompq.cli.options import (
    BudgetOption,
    PlanFile,
    argument,
    flag,
    number,
    one_of,
    option,
    output_path,
)


@command("Get started", "ompq.cli.demo:show_demo")
def demo(options: DemoOptions, console: Console) -> View:
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


@command("Plan", "ompq.cli.plan_commands:run_budget")
def budget(
    network: NetworkOptions,
    planning: ScoreOptions,
    console: Console,
    data: str | None = option(
        "SOURCE", "Take the input's shape from this data. Rarely needed."
    ),
    onnx: bool = flag("Show the largest possible ONNX file, too. Takes a few seconds."),
) -> View:
    """Show which budgets a network can meet.

    Examples:
      ompq budget torchvision:resnet18
      ompq budget torchvision:mobilenet_v2 --choices 2,3,4 --accounting paper
      ompq budget net.py:make --pin @first=8 --pin @last=8 --activation-bits 4,8
      ompq budget torchvision:resnet18 --onnx

    Every entry of the table is a valid --budget for ompq plan. Sizes depend on the
    layers' shapes alone, so no weights and no data are needed.
    """


@command("Plan", "ompq.cli.latency_command:run_latency")
def latency(
    network: NetworkOptions,
    console: Console,
    target: str = one_of(
        MEASURABLE, f"what to measure: {', '.join(MEASURABLE)}.", default=MEASURABLE[0]
    ),
    file: Path | None = output_path("Save the table for ompq plan --latency."),
    repeats: int = number("Runs of each pair of networks.", default=50),
) -> View:
    """Measure what each layer takes at each width, for budgets in milliseconds.

    Examples:
      ompq latency torchvision:mobilenet_v2 --target litert-size -o ms.json
      ompq latency net.py:make --target executorch --threads 2 --repeats 200

    Layers are measured in the network, not alone: it runs with all layers in 8 bits,
    and in turn with one layer in another width. Networks with random widths then show
    the table's error. ompq plan takes the table as --latency ms.json, for budgets such
    as 2MiB,3ms. Weights do not matter. Times are reliable only on an idle machine.
    """


@command("Plan", "ompq.cli.plan_commands:run_plan")
def plan(
    sources: SourceOptions,
    planning: RefineOptions,
    caching: CacheOptions,
    console: Console,
    budget: BudgetOption,
    file: Path | None = output_path("Save the plan."),
    samples: int | None = number(
        f"Inputs to plan with. Default: {PLAN_SAMPLES}, the paper's number with "
        f"--protocol, or {REFINE_SAMPLES} with --refine.",
        least=2,
    ),
) -> View:
    """Choose a bit width for every layer within a budget.

    Examples:
      ompq plan torchvision:resnet18 --data images/ --budget 4.0MiB -o plan.json
      ompq plan net.py:make --data digits --budget 3.2bits --pin fc=8
      ompq plan timm:resnet50 --data images/ --budget 16MiB,140GBOPs --choices 4,8
      ompq plan cifar:resnet20 --weights none --data random --budget 12.5%
      ompq plan timm:resnet18 --data images/ --budget 4MiB --protocol paper-ptq
      ompq plan timm:resnet18 --data images/ --budget 4MiB --refine 3min

    Run ompq budget first to see what can be met.
    """


@command("Plan", "ompq.cli.plan_commands:run_scores")
def scores() -> View:
    """List the scores that estimate the damage of low bit widths.

    Examples:
      ompq scores
      ompq scores --json

    Pass one to --score. ompq audit measures how well each of them chooses bits. Seconds
    are for ResNet-18, 64 images and six widths, as measured on two cores. Labels are
    used from Python: a score's argument batches=[(images, labels)].
    """


@command("Plan", "ompq.cli.saved_plan_commands:run_replan")
def replan(
    file: PlanFile,
    console: Console,
    budget: BudgetOption,
    target: Path | None = output_path("Save the plan."),
) -> View:
    """Solve a saved plan for another budget, without the network.

    Examples:
      ompq replan plan.json --budget 3.5MiB
      ompq replan plan.json --budget 3.2bits,75GBOPs -o smaller.json

    Choices, pins and score stay as they were when the plan was made.
    """


@command("Quantize", "ompq.cli.network_commands:run_quantize")
def quantize(
    sources: SourceOptions,
    run: RunOptions,
    goals: GoalOptions,
    planning: RefineOptions,
    caching: CacheOptions,
    console: Console,
    dry_run: bool = flag("Only say how long it would take and how much memory."),
) -> View:
    r"""Plan, quantize, reconstruct, evaluate and save, in one command.

    Examples:
      ompq quantize torchvision:resnet18 --data train/ --budget 4.0MiB -o out/
      ompq quantize timm:resnet18 --data train/ --eval-data val/ \
        --budget 3.2bits --effort best -o out/
      ompq quantize transformers:FOLDER --data text.txt --eval-data other.txt \
        --budget 80MiB --target gguf --effort fast -o out/
      ompq quantize net.py:make --data digits --plan plan.json -o out/
      ompq quantize ompq:demo --data digits --budget 36KiB -o out/
      ompq quantize timm:resnet18 --data train/ --eval-data val/ --max-drop 1 \
        -o out/
      ompq quantize net.py:make --data images/ --min-agreement 99% -o out/
      ompq quantize torchvision:resnet18 --data train/ --budget 4.0MiB --dry-run \
        -o out/

    Instead of a budget, --max-drop, --min-agreement or --max-divergence set a goal.
    ompq then finds the smallest network that meets it on --eval-data or, without that,
    on half of the samples.

    After Ctrl-C, add --resume to the same command to continue.
    """


@command("Quantize", "ompq.cli.network_commands:run_train")
def train(
    sources: SourceOptions,
    run: RunOptions,
    training: TrainOptions,
    planning: RefineOptions,
    caching: CacheOptions,
    console: Console,
) -> View | None:
    r"""Plan, quantize, reconstruct, train, evaluate and save, in one command.

    Examples:
      ompq train torchvision:resnet18 --data imagenet/ --eval-data imagenet/ \
        --protocol paper-qat --budget 6.7MiB -o out/
      ompq train cifar:resnet20 --weights r20.safetensors --data cifar10/ \
        --budget 3bits --epochs 20 --set batch_norm=fold-and-train -o out/
      ompq train ompq:demo --data digits --from out/network.ompq.safetensors \
        -o more/
      ompq train net.py:make --data data.py:make --loss net.py:loss \
        --budget 4bits -o out/

    After Ctrl-C, add --resume to the same command to continue. Start it with torchrun
    or accelerate launch to use several GPUs or machines.
    """


@command("Quantize", "ompq.cli.network_commands:run_evaluate")
def evaluate(
    sources: SourceOptions,
    options: EvaluateOptions,
    console: Console,
) -> View:
    r"""Measure a network's accuracy, with a 95 % confidence interval.

    Examples:
      ompq evaluate torchvision:resnet18 --data imagenet/val
      ompq evaluate torchvision:resnet18 --weights r18.pth --data imagenet/val
      ompq evaluate cifar:resnet20 --weights r20.safetensors --data cifar \
        --limit 1000
      ompq evaluate ompq:demo --data digits --json
      ompq evaluate net.onnx --data imagenet/val
      ompq evaluate ompq:demo --packed out/network.ompq.safetensors \
        --data digits --engine integer --limit 100

    The data has one folder per class; a folder with train and test (or val) inside is
    evaluated on test. A file of ompq export (.onnx, .tflite, .pte) is run in its
    runtime, on inputs that are made as the file says.
    """


@command("Quantize", "ompq.cli.run_files:run_file")
def run(
    file: Annotated[Path, argument("CONFIG", "A TOML or YAML file.")],
    more: Annotated[
        list[str] | None,
        argument("OPTIONS", "Options that override the file's: -o again/."),
    ] = None,
) -> None:
    """Run a command with the options in a TOML or YAML file.

    Examples:
      ompq run out/config.toml --overwrite
      ompq run config.yaml --budget 3.5MiB -o smaller/

    ompq quantize and ompq train write such a file, config.toml, next to their results.
    It holds the command and its options by name. Paths are relative to the current
    directory.
    """


@command("Quantize", "ompq.cli.file_commands:run_export")
def export(
    source: Annotated[
        Path, argument("SOURCE", "A folder of ompq quantize, or a packed network.")
    ],
    options: ExportOptions,
    console: Console,
) -> View:
    """Export a quantized network for a runtime and verify the file.

    Examples:
      ompq export out/
      ompq export out/ --format tflite
      ompq export out/ --data images/ --samples 500 -o net.onnx
      ompq export out/network.ompq.safetensors --format packed -o net.safetensors
      ompq export out/ --format packed --with-graph -o net.ompq.safetensors

    A packed file with its graph is all that ompq unpack needs to write the ONNX file.
    Other tools find the bits of each layer in plan.json, under "allocation".
    """


@command("Quantize", "ompq.cli.saved_plan_commands:run_unpack")
def unpack(
    file: Annotated[Path, argument("FILE", "A packed network that carries its graph.")],
    target: Path | None = output_path("The ONNX file. Default: FILE as .onnx."),
) -> View:
    """Write the ONNX file inside a packed network, without PyTorch.

    Examples:
      ompq unpack net.ompq.safetensors
      ompq unpack net.ompq.safetensors -o net.onnx

    ompq export OUT --format packed --with-graph -o FILE writes such a packed file. The
    result equals the ONNX file that ompq export verified, byte for byte. Only the
    packed file is small: in the ONNX file and in memory, a coded weight takes a byte.
    """


@command("Inspect", "ompq.cli.saved_plan_commands:run_explain")
def explain(
    file: PlanFile,
    unit: Annotated[
        str, argument("UNIT", "A layer's name, a glob, re:REGEX, @first or @last.")
    ],
) -> View:
    """Explain why a layer got its bits.

    Examples:
      ompq explain plan.json layer1.0.conv1
      ompq explain plan.json @last
      ompq explain plan.json 'layer4.*' --json

    Shows the damage and cost of every choice, what one more byte would gain, and the
    swap with another layer that came closest to being better.
    """


@command("Inspect", "ompq.cli.saved_plan_commands:run_pareto")
def pareto(
    file: PlanFile,
    console: Console,
    points: int = number("Number of sizes.", default=20, least=2),
    cost: str = one_of(COSTS, "the cost to limit. Default: bytes.", default="bytes"),
) -> View:
    """Show the trade-off between size and damage.

    Examples:
      ompq pareto plan.json
      ompq pareto plan.json --points 100 --json
      ompq pareto plan.json --cost bit-ops

    Every row is solved from the saved plan, and its size can be used as a budget.
    """


@command("Inspect", "ompq.cli.saved_plan_commands:run_compare")
def compare(
    sources: Annotated[
        list[Path], argument("PLAN", "Two or more plans, or folders of ompq quantize.")
    ],
    console: Console,
    page: Path | None = output_path(
        "Write a report of the first plan, compared with the others."
    ),
) -> View:
    """Compare plans or results: size, damage, accuracy, bits that differ.

    Examples:
      ompq compare plan.json smaller.json
      ompq compare out-4MiB/ out-3MiB/ -o both.html
      ompq compare a.json b.json c.json --json

    A folder of ompq quantize adds the accuracy measured there. The damage of each plan
    is shown by every plan's score, since scores may disagree on which plan is better.
    """


@command("Inspect", "ompq.cli.saved_plan_commands:run_report")
def report(
    file: PlanFile,
    console: Console,
    page: Path | None = output_path("The HTML file to write."),
    figures: Path | None = option(
        "DIR", "Also draw bits, ORM and accuracies, as SVG and PNG."
    ),
    results: Path | None = option(
        "FILE", "A result.json of ompq quantize, for accuracy, errors and times."
    ),
    title: str | None = option("TEXT", "Heading of the page."),
) -> View:
    """Write a plan as one HTML page that works offline.

    Examples:
      ompq report plan.json -o net.html
      ompq report out/plan.json --results out/result.json -o net.html
      ompq report plan.json --figures figures/

    A slider on the page shows what other budgets would give.
    """


@command("Inspect", "ompq.cli.file_commands:run_inspect")
def inspect(
    file: Annotated[
        Path, argument("FILE", "A packed network, or an ONNX file of ompq export.")
    ],
) -> View:
    """Show what takes space in a packed network or an ONNX file.

    Examples:
      ompq inspect out/network.ompq.safetensors
      ompq inspect out/network.ompq.safetensors --json
      ompq inspect net.onnx

    For a packed network, the planned sizes are shown as well. A damaged file is an
    error.
    """


@command("Inspect", "ompq.cli.bench_command:run_bench")
def bench(
    source: Annotated[
        Path,
        argument("FILE", "A file of ompq export, or the folder of a run."),
    ],
    options: BenchOptions,
    console: Console,
) -> View:
    """Run exported files in every runtime of this machine, next to the float network.

    Examples:
      ompq bench out/ --data imagenet/val
      ompq bench net.onnx
      ompq bench net.onnx --float torchvision:resnet18 --threads 4
      ompq bench net.onnx --float float.onnx --repeats 200 --json

    Shows the bytes of each file, what it takes to load, memory (of a process of its
    own), and time for 1 and 32 samples. Networks run in turn; "faster" is the median
    ratio to the float network in ONNX Runtime, which other work on the machine
    disturbs less than milliseconds. "same" compares answers with PyTorch in the folder
    of a run, otherwise with the file in its own runtime; --data measures accuracy too.
    The report of a run gets the table. OpenVINO, LiteRT and ExecuTorch are used if
    they are installed.
    """
