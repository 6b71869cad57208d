"""The groups of options that commands share, and the settings that they stand for.

Nothing here imports PyTorch, so that help is quick.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from math import nan
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any, ClassVar

from ompq.bit_widths import CODED_BITS, FLOAT_BITS, GROUP_SIZES
from ompq.cli.options import (
    REQUIRED,
    apply_options,
    argument,
    check_needed,
    check_resumed,
    check_writable,
    config_option,
    flag,
    given_for,
    kebab,
    naming_options,
    number,
    number_list,
    one_of,
    option,
    output_path,
    snake,
    typed_toml,
)
from ompq.configs import (
    EFFORTS,
    PLAN_PROTOCOLS,
    SCORE_NAMES,
    TARGET_NAMES,
    TRAIN_PROTOCOLS,
    DemoConfig,
    Goal,
    OrmSettings,
    Pin,
    PlanConfig,
    ReconstructConfig,
    RefineConfig,
    RoundingConfig,
    TrainConfig,
    TuningConfig,
)
from ompq.errors import suggestion
from ompq.files import CONFIG, GGUF, ONNX, PACKED, PLAN, REPORT, RESULT
from ompq.user_functions import is_user_function

ENGINES = ("simulated", "integer")
FORMATS = ("onnx", "tflite", "pte", "mlpackage", "gguf", "compressed-tensors", "packed")
PLAN_SAMPLES, CALIBRATION_SAMPLES = 64, 1024  # as in the paper and in BRECQ
REFINE_SAMPLES = 1024  # as recommended for refine()
DEMO_FOLDER = Path("ompq-demo")
COSTS = (
    *("bytes", "weight_bits", "bit_ops", "milliseconds"),
    *("onnx_bytes", "graph_bytes"),
)
DEVICES = ("auto", "cpu", "cuda")
LIMIT_HELP = "Use only this many samples, spread over the classes. Default: all."
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_LIMIT = re.compile(r"(?P<number>[1-9]\d*)(?P<unit>s|min|h)?")
_UNLIMITED = 100_000  # more allocations than any time limit allows
_PAIR = re.compile(r"W(\d+)A(\d+)", re.IGNORECASE)
_PIN = re.compile(
    r"(?P<pattern>.+)=(?:(?:W?(?P<weight>\d+)|C(?P<rate>\d+(?:\.\d+)?))?"
    r"(?:A(?P<activation>\d+))?|(?P<float>float))",
    re.IGNORECASE,
)
# What a stopped run resumes from; training and search are folders.
TRAINING, START = "training", "start.ompq.safetensors"
CHECKPOINT, SEARCH = "checkpoint.safetensors", "search"
_STARTED = (TRAINING, START, CHECKPOINT, SEARCH)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Options for the network."""

    PANEL: ClassVar[str] = "Network and data"

    network: Annotated[
        str,
        argument(
            "NETWORK",
            "torchvision:NAME, timm:NAME, cifar:resnet20, ompq:demo, "
            "transformers:FOLDER (a decoder's config.json and weights, or a .gguf "
            "file), or FILE.py:FUNCTION, your own function that returns the network.",
        ),
    ]
    weights: str | None = option(
        "FILE",
        "A .safetensors, .pt, .pth or .pth.tar file, or none for random weights. "
        "Default: the library's pretrained weights, downloaded if needed.",
    )
    device: str = one_of(
        DEVICES,
        "where to run. Default: auto, a GPU if there is one.",
        default=DEVICES[0],
    )
    device_memory: str | None = option(
        "SIZE",
        "For networks larger than the GPU's memory: keep the weights in host memory, "
        "and at most this much of them on the GPU at a time, for example 8GiB.",
    )
    memory: str | None = option(
        "SIZE",
        "Memory to work in on a CPU, besides the network and the samples, for example "
        "1GiB. Default: 2GiB, or less if less is free.",
    )
    threads: int | None = number(
        "Number of CPU threads for PyTorch.", shown="one per core"
    )
    input_shape: str | None = option(
        "SHAPE",
        "Shape of one input, for example 3,160,160 or 1,16000: for images of another "
        "size, random data and ompq budget. Default: from the network or the data.",
    )


def shape_of(text: str | None) -> tuple[int, ...] | None:
    """Return the shape that ``--input-shape`` gives, or None without it."""
    if text is None:
        return None
    parts = re.split(r"[,x×]", text)
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"--input-shape {text} is not a shape; write for example 3,224,224"
        )
    return tuple(map(int, parts))


@dataclass(frozen=True, kw_only=True)
class SourceOptions(NetworkOptions):
    """Options for the network and the data."""

    data: str = option(
        "SOURCE",
        "A folder of images; a text file, for a decoder; FILE.py:FUNCTION, which "
        "returns or yields inputs of any kind; digits (scikit-learn's); distilled "
        "(images synthesized from the network's batch norms); or random (noise, to try "
        "things out).",
        default=REQUIRED,
    )
    seed: int = number("Seed for the choice of samples.", default=0, least=None)
    skip_unreadable: bool = flag("Skip broken images instead of stopping.")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options for the demonstration."""

    budget: str | None = config_option(DemoConfig, "budget")
    folder: Path = output_path(
        f"Folder for the results. Default: {DEMO_FOLDER}/.", "DIR", DEMO_FOLDER
    )
    iterations: int | None = config_option(DemoConfig, "iterations")
    seed: int | None = config_option(DemoConfig, "seed")


def metric_option(where: str = "", more: str = "") -> Any:
    """Return the option that names a metric besides top-1."""
    return option(
        "FUNCTION",
        "perplexity, for a decoder; or FILE.py:FUNCTION, called with the network's "
        f"outputs and the targets of a batch{where}. It returns a number{more}.",
    )


def _choices(text: str) -> tuple[Any, ...]:
    if not text.upper().startswith("W"):
        return number_list("--choices", text)
    pairs = [_PAIR.fullmatch(part.strip()) for part in text.split(",")]
    if not all(pairs):
        raise ValueError(
            f"--choices {text} is not a list of pairs; write for example W4A4,W8A8"
        )
    return tuple((int(pair[1]), int(pair[2])) for pair in pairs if pair)


def _pin(text: str) -> tuple[str, Pin]:
    match = _PIN.fullmatch(text)
    if match is None or text.endswith("="):
        raise ValueError(
            f"--pin {text}: write PATTERN=BITS, for example fc=8, fc=W8A8, fc=A8 or "
            "fc=float"
        )
    if match["float"]:
        return match["pattern"], FLOAT_BITS
    weight, activation = (
        int(match[one]) if match[one] else None for one in ("weight", "activation")
    )
    if match["rate"]:
        coded = (CODED_BITS, activation or CODED_BITS, float(match["rate"]))
        return match["pattern"], coded
    if activation is None:
        assert weight is not None  # the pattern requires one of the two
        return match["pattern"], weight
    return match["pattern"], (weight, activation)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options for the choice of bits."""

    PANEL: ClassVar[str] = "How bits are chosen"

    choices: str | None = config_option(
        PlanConfig,
        "choices",
        parse=_choices,
        text="Bit widths to choose from for weights; W4A4,W8A8 for weights and inputs.",
    )
    activation_bits: str | None = config_option(PlanConfig, "activation_choices")
    coded: bool = flag(
        "Also offer entropy-coded weights: a smaller file at the same accuracy. In "
        "memory each of them takes a byte."
    )
    rates: str | None = config_option(PlanConfig, "rates")
    group_size: int | None = config_option(
        PlanConfig,
        "group_size",
        text=f"{', '.join(map(str, GROUP_SIZES))}: group-wise scales for linear "
        "layers, one for this many weights of an output channel. Default: per-channel "
        "scales.",
    )
    pin: list[str] | None = option(
        "PIN",
        "PATTERN=BITS fixes the bits of layers: fc=8, 'layer4.*=4', @first=W8A8, "
        "fc=float, fc=C2.5A8 (coded), or of their inputs alone: fc=A8, @first=A32. "
        "A pattern is a name, a glob, re:REGEX, @first or @last. Repeatable.",
    )
    tie: list[str] | None = config_option(
        PlanConfig,
        "tied",
        text="All layers that match get the same bits. Repeatable.",
    )
    no_tie: bool = config_option(
        PlanConfig,
        "tie",
        text="Let layers whose outputs are added have different bits.",
    )
    accounting: str | None = config_option(PlanConfig, "accounting")
    method: str | None = config_option(PlanConfig, "method")
    latency: Path | None = option(
        "FILE", 'Latency table for a budget in ms: JSON {"conv1": {"W4A8": 0.4}}.'
    )
    target: str | None = option(
        "NAME",
        f"Where the network will run: {', '.join(TARGET_NAMES)}, or a JSON file. "
        "Layers get only bits that run there; those that gain no speed are listed.",
        autocompletion=lambda: list(TARGET_NAMES),
    )
    protocol: str | None = one_of(
        PLAN_PROTOCOLS,
        "our settings, or those of published work; other options override them. "
        "Default: ours.",
    )
    beta: float | None = config_option(OrmSettings, "beta")
    decreasing: str | None = config_option(
        OrmSettings,
        "decreasing",
        text="Importance as a function of ORM, for the same scores (write "
        "--decreasing='-x').",
    )
    granularity: str | None = config_option(OrmSettings, "granularity")
    centred: bool = config_option(OrmSettings, "centred")
    strict: bool = config_option(PlanConfig, "strict")
    output_kind: str | None = config_option(PlanConfig, "output")

    def config(self) -> PlanConfig:
        """Return the protocol's settings with the changes that the options make."""
        base = PLAN_PROTOCOLS[self.protocol] if self.protocol else PlanConfig()
        config = apply_options(base, self)
        if self.rates is not None and not self.coded:
            raise ValueError("--rates is for coded weights; add --coded")
        pins = dict(_pin(text) for text in self.pin or ())
        changes: dict[str, Any] = {
            "storage": "coded" if self.coded else None,
            "pinned": {**base.pinned, **pins} if pins else None,
            "target": self.target,
            "latency": _latency(self.latency) if self.latency else None,
            "orm": apply_options(base.orm or OrmSettings(), self)
            if self.of_orm
            else None,
        }
        typed = {"pinned": f"--pin {' '.join(self.pin or ())}"}
        given = {k: v for k, v in changes.items() if v is not None}
        with naming_options(typed):
            return replace(config, **given)

    @property
    def of_orm(self) -> list[str]:
        """The given options that are for scores that measure ORM, as typed."""
        names = ("beta", "decreasing", "granularity", "centred")
        return [f"--{name}" for name in names if getattr(self, name)]

    def typed(self) -> list[str]:
        """Return the given options that affect the choice of bits, as typed."""
        other = ("protocol", "strict", "refine_by")
        names = [k for k, value in vars(self).items() if value and k not in other]
        return [f"--{kebab(name)}" for name in names]


def _latency(path: Path) -> Any:
    from ompq.costs import load_latency

    return load_latency(path)


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(PlanOptions):
    """Options for the choice of bits by one score."""

    score: str | None = one_of(
        SCORE_NAMES,
        "how damage is estimated; or FILE.py:FUNCTION that returns a score. "
        f"Default: {PlanConfig.score}.",
        others=is_user_function,
    )

    def config(self) -> PlanConfig:
        """Return the protocol's settings with the changes that the options make.

        A score of the user is called here.
        """
        config = super().config()
        if self.score is None:
            return config
        score = _user_score(self.score) if is_user_function(self.score) else self.score
        return replace(config, score=score)


def _user_score(text: str) -> Callable[..., Any]:
    from ompq.errors import ScoreError
    from ompq.user_functions import call_user_function

    score = call_user_function(text, ScoreError)
    if not callable(score):
        raise ScoreError(
            f"{text} returned {type(score).__name__}; it must return a score: "
            "a function of an ompq.scores.ScoreInputs"
        )
    return score  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options for the cache of score tables."""

    PANEL: ClassVar[str] = "How bits are chosen"

    cache: Path | None = option(
        "DIR",
        "Keep score tables there, and reuse them for the same network, samples and "
        "score. Default: the folder named by OMPQ_CACHE, if set.",
        envvar="OMPQ_CACHE",
        show_envvar=False,
    )
    no_cache: bool = flag(
        "Neither read nor write score tables, even if OMPQ_CACHE is set."
    )

    def folder(self, default: Path | None = None) -> Path | None:
        """Return the folder of score tables; None if they are not kept.

        Raises:
            ValueError: Nothing can be written there.
        """
        if self.no_cache:
            return None
        check_writable(self.cache, "--cache", folder=True)
        return self.cache or default


@dataclass(frozen=True, kw_only=True)
class RefineOptions(ScoreOptions):
    """Options for the choice of bits and its refinement."""

    refine: str | None = option(
        "LIMIT",
        "Improve the bits by measuring whole allocations, up to a number (20) or for a "
        "time (90s, 3min, 1h).",
    )
    refine_by: str | None = config_option(RefineConfig, "by")

    def refinement(self, seed: int) -> RefineConfig | None:
        """Return the settings of the refinement, or None without ``--refine``."""
        check_needed("--refine", self.refine, refine_by=self.refine_by)
        if self.refine is None:
            return None
        match = _LIMIT.fullmatch(self.refine)
        if match is None:
            raise ValueError(
                f"--refine {self.refine}: give a number of allocations, for example "
                "20, or a time, for example 90s, 3min or 1h"
            )
        config = apply_options(RefineConfig(seed=seed), self)
        number, unit = int(match["number"]), match["unit"]
        if not unit:
            return replace(config, count=number)
        seconds = float(number * _SECONDS[unit])
        return replace(config, count=_UNLIMITED, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options for what is done and where the files go."""

    folder: Path = output_path(
        "Folder for the plan, network, result and report.", "DIR", REQUIRED
    )
    budget: str | None = option("BUDGET", "As for ompq plan, unless --plan is given.")
    plan: Path | None = option(
        "FILE", "Use this plan, or bits copied from a report, instead of a new plan."
    )
    ignore_budget: bool = flag(
        "Accept a --plan whose bits were edited and exceed its budget."
    )
    samples: int | None = number(
        "Inputs for calibration.", shown=f"{CALIBRATION_SAMPLES}, or all", least=2
    )
    views: int = number(
        "Augment: learn from this many versions of each image, mirrored and shifted. "
        "8 to 16 help with fewer than 200 images.",
        default=1,
    )
    effort: str = one_of(
        EFFORTS,
        "how much is learned after rounding: nothing, what pays, or all that helps. "
        "Default: default.",
        default="default",
    )
    iterations: int | None = config_option(RoundingConfig, "iterations")
    merge_blocks: int | None = config_option(ReconstructConfig, "merge")
    tune_epochs: int | None = number(
        "Epochs of whole-network tuning after reconstruction; 0 turns it off.",
        shown=f"{TuningConfig.epochs} with activations below 8 bits, else 0",
        least=0,
    )
    eval_data: str | None = option(
        "SOURCE", "Labelled data to measure accuracy on, as for ompq evaluate."
    )
    limit: int | None = number(LIMIT_HELP)
    metric: str | None = metric_option(" of --eval-data", "; higher is better")
    measure_layers: int = option(
        "NUMBER",
        "For the report: measure this many of the layers with the most expected "
        "damage, each as the only quantized and as the only float layer. Default: 0.",
        default=0,
        min=0,
    )
    resume: bool = flag("Continue a run that was stopped.")
    overwrite: bool = flag("Replace what an earlier run left in the folder.")

    @property
    def started(self) -> Path | None:
        """The checkpoint of a stopped run, if there is one."""
        paths = (self.folder / name for name in _STARTED)
        return next((path for path in paths if path.exists()), None)

    def learning(self) -> list[str]:
        """Return the given options of reconstruction, as typed."""
        names = ("iterations", "merge_blocks", "tune_epochs")
        return [f"--{kebab(n)}" for n in names if getattr(self, n) is not None]

    def check(self, planning: RefineOptions) -> None:
        """Raise a ValueError for options that contradict each other."""
        deciding = [*(["--budget"] if self.budget else []), *planning.typed()]
        if self.plan is not None and deciding:
            raise ValueError(
                f"--plan already decides the bits; omit {', '.join(deciding)}"
            )
        check_needed("--plan", self.plan, ignore_budget=self.ignore_budget)
        if self.resume and self.overwrite:
            raise ValueError("--resume and --overwrite cannot be combined; use one")
        if EFFORTS[self.effort] is None and self.learning():
            raise ValueError(
                f"--effort {self.effort} learns nothing; omit "
                f"{' and '.join(self.learning())}, or choose another effort"
            )
        check_needed(
            "--eval-data", self.eval_data, limit=self.limit, metric=self.metric
        )

    def is_finished(self) -> bool:
        """Return whether the run to resume is finished.

        Raises:
            ValueError: The finished run had other options.
        """
        config = self.folder / CONFIG
        if not self.resume or not (self.folder / RESULT).exists():
            return False
        if not config.exists() or config.read_text(encoding="utf-8") != typed_toml():
            raise ValueError(
                f"{self.folder} holds a finished run with other options; give "
                "--overwrite instead of --resume to replace it, or use another folder"
            )
        return True

    def check_unfinished(self) -> None:
        """Raise an error unless the options say what to do with an earlier run."""
        if self.overwrite:
            return
        if not self.resume and (self.folder / RESULT).exists():
            raise ValueError(
                f"{self.folder} holds a finished run; add --overwrite to replace it, "
                "or use another folder"
            )
        check_resumed(self.folder, self.started, "run", resume=self.resume)

    def clear(self, *kept: Path | None) -> None:
        """With ``--overwrite``, remove the files of an earlier run, except ``kept``."""
        needed = {path.resolve() for path in kept if path is not None}
        files = (PLAN, PACKED, ONNX, GGUF, REPORT, RESULT, CONFIG, *_STARTED)
        for path in map(self.folder.joinpath, files if self.overwrite else ()):
            if path.is_dir():
                rmtree(path, ignore_errors=True)
            elif path.resolve() not in needed:
                path.unlink(missing_ok=True)


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = nan
    value = value / 100 if text.endswith("%") else value
    if not 0 < value <= 1:
        raise ValueError(
            f"--min-agreement {text} is not a fraction; write for example 99% or 0.99"
        )
    return value


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """Options for a goal instead of a budget."""

    PANEL: ClassVar[str] = "A goal instead of a budget: the smallest network that has"

    max_drop: float | None = config_option(Goal, "max_drop")
    min_agreement: str | None = config_option(Goal, "min_agreement", parse=_share)
    max_divergence: float | None = config_option(Goal, "max_divergence")

    def goal(self, metrics: Iterable[Callable[..., Any]] = ()) -> Goal | None:
        """Return the goal, or None if none was given."""
        given, typed = given_for(Goal, self)
        if not given:
            return None
        with naming_options(typed):
            return Goal(metric=next(iter(metrics), None), **given)

    def check(self, run: RunOptions, *, dry_run: bool = False) -> None:
        """Raise a ValueError for a goal that contradicts or lacks other options."""
        decided = [o for o, v in (("--budget", run.budget), ("--plan", run.plan)) if v]
        goal = self.goal()
        if goal is None:
            return
        if decided:
            raise ValueError(
                f"{decided[0]} and a goal ({goal}) both decide the size; give one"
            )
        if dry_run:
            raise ValueError(
                f"--dry-run cannot be combined with a goal ({goal}): how many networks "
                "will be tried is not known before; give a --budget"
            )
        if self.max_drop is not None and run.eval_data is None:
            raise ValueError("--max-drop needs labelled data: give --eval-data")
        if run.views > 1:
            raise ValueError(
                f"--views cannot be combined with a goal ({goal}); find the plan "
                "first, then quantize again with --plan and --views"
            )


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options for training."""

    PANEL: ClassVar[str] = "How it is trained"

    start: Path | None = option(
        "FILE", "Start from this packed network instead of quantizing one.", "--from"
    )
    validation: str | None = option(
        "SOURCE",
        "Labelled data that selects the epoch to keep. Default: keep the last.",
    )
    recipe: str | None = one_of(
        TRAIN_PROTOCOLS,
        "how to train. Default: the protocol's way, or ours.",
    )
    epochs: int | None = config_option(TrainConfig, "epochs")
    batch_size: int | None = config_option(TrainConfig, "batch_size")
    learning_rate: float | None = config_option(TrainConfig, "learning_rate")
    loss: str | None = option(
        "FUNCTION",
        "FILE.py:FUNCTION, called with the network's outputs and the targets of a "
        "batch. It returns the mean loss, a tensor. Default: cross entropy of classes.",
    )
    logger: str | None = one_of(
        ("tensorboard", "wandb", "mlflow"),
        "log the training there, if it is installed.",
    )
    settings: list[str] | None = option(
        "NAME=VALUE",
        "Any other field of ompq.TrainConfig: distill=0.5, compile=true, "
        "activations=clip. Repeatable.",
        "--set",
    )

    def check(self, run: RunOptions, planning: RefineOptions) -> None:
        """Raise a ValueError for options that contradict each other or ``--from``."""
        run.check(planning)
        made = [*planning.typed(), *run.learning(), *(["--views"] * (run.views > 1))]
        if self.start is not None and made:
            raise ValueError(
                f"--from FILE is already quantized; omit {', '.join(made)}"
            )

    def config(self, protocol: str | None, seed: int, folder: Path) -> TrainConfig:
        """Return the settings of recipe or protocol with the changes from options."""
        base = TRAIN_PROTOCOLS.get(self.recipe or protocol or "", TrainConfig())
        config = replace(apply_options(base, self), seed=seed)
        if self.logger == "tensorboard":
            config = replace(config, tensorboard=str(folder / "tensorboard"))
        elif self.logger is not None:
            config = replace(config, logger=self.logger)  # type: ignore[arg-type]
        given = dict(_setting(text) for text in self.settings or ())
        typed = {
            text.partition("=")[0]: f"--set {text}" for text in self.settings or ()
        }
        with naming_options({snake(name): text for name, text in typed.items()}):
            config = replace(config, **given)
        if not config.keeps_plan:
            raise ValueError(
                f"weights={config.weights} trains a network that no longer fits its "
                "plan; use ompq.train from Python"
            )
        return config


def _setting(text: str) -> tuple[str, Any]:
    """Return the field and the value of ``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    known = [one.name for one in fields(TrainConfig) if one.name != "seed"]
    field = snake(name)
    if not equals or field not in known:
        similar = "" if field in known else suggestion(name, known)
        raise ValueError(
            f"--set {text}: write NAME=VALUE with a field of ompq.TrainConfig"
            f"{similar}; the seed is --seed"
        )
    try:
        return field, json.loads(value)
    except ValueError:  # a plain word
        return field, value


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options for what is measured, and how."""

    packed: Path | None = option(
        "FILE", "Evaluate this packed network of ompq quantize or ompq train."
    )
    engine: str = one_of(
        ENGINES,
        "run a packed network in PyTorch, or with integer arithmetic alone on the CPU, "
        "which is slow. Default: simulated.",
        default=ENGINES[0],
    )
    limit: int | None = number(LIMIT_HELP)
    batch_size: int = number("Samples per batch.", default=64)
    metric: str | None = metric_option()


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options for the file to write and the data to verify it with."""

    file: Path | None = output_path(
        f"The file to write. Default: {ONNX} in the folder."
    )
    format: str | None = one_of(
        FORMATS, "what to write. Default: by the suffix of --output, else onnx."
    )
    with_graph: bool = flag(
        "With --format packed: include the ONNX graph, for ompq unpack."
    )
    network: str | None = option(
        "NETWORK", "The network, if the packed file does not name it."
    )
    data: str | None = option(
        "SOURCE", "Data to verify with. Default: that of the run, or noise."
    )
    input_shape: str | None = option(
        "SHAPE", "Shape of one input. Default: that of the run."
    )
    samples: int = number("Number of inputs to verify with.", default=64)
    opset: int = number("Version of the ONNX operator set.", default=21, least=None)

    @property
    def kind(self) -> str:
        """The format, from the suffix of the file if it is not given."""
        suffix = self.file.suffix.removeprefix(".") if self.file else ""
        return self.format or (suffix if suffix in FORMATS else FORMATS[0])

    def target(self, packed: Path) -> Path:
        """Return the file to write."""
        if self.with_graph and self.kind != "packed":
            raise ValueError("--with-graph writes a packed file: give --format packed")
        if self.file is not None:
            return self.file
        if self.kind == "packed":
            raise ValueError("--format packed copies a file: give -o FILE")
        return packed.with_name(f"{packed.name.partition('.')[0]}.{self.kind}")


# Targets whose runtimes can be measured, for ompq latency.
MEASURABLE = (
    "onnxruntime-cpu", "litert", "litert-size", "executorch", "executorch-size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options for what is timed, and how often."""

    reference: str | None = option(
        "NETWORK",
        "The float network, by name or as an ONNX file. Default: the network named in "
        "the file.",
        "--float",
    )
    threads: int = number("Threads per run.", default=1)
    repeats: int = number("Timed runs of each network, in turn.", default=50)
    batch: int | None = number("Samples per run. Default: 1, then 32.")
    data: str | None = option(
        "SOURCE", "Labelled data to measure accuracy on. Default: noise, unlabelled."
    )
    limit: int | None = number(LIMIT_HELP)
