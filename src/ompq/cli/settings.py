"""Options for network, data and plan, and their translation for the library.

Defaults, also those in the help, come from the library's own settings.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

import torch
import typer

from ompq.allocation.problem import Allocation
from ompq.bit_widths import CODED_BITS, FLOAT_BITS, GROUP_SIZES
from ompq.budgets import Budget
from ompq.cli.console import Console
from ompq.cli.options import (
    REQUIRED,
    argument,
    check_needed,
    check_threads,
    check_writable,
    flag,
    number,
    one_of,
    option,
)
from ompq.configs import (
    PLAN_PROTOCOLS,
    SOLVER_NAMES,
    Accounting,
    Decreasing,
    Granularity,
    OrmSettings,
    Pin,
    PlanConfig,
    RefineConfig,
)
from ompq.costs import load_latency
from ompq.datasets.named_data import Batches, Data, Split, load_data
from ompq.errors import DataError, ScoreError, suggestion
from ompq.evaluation import METRICS, Metric
from ompq.files import shown
from ompq.models.named_models import NamedModel, load_model
from ompq.network.units import Choice
from ompq.offload import device_memory
from ompq.plans import Plan
from ompq.samples import Samples, model_device
from ompq.scores.catalogue import SCORES, named_score, score_name
from ompq.scores.table import Score
from ompq.targets import included_targets
from ompq.user_functions import call_user_function, is_user_function, user_function
from ompq.workflow import PLAN_SAMPLES, Workflow, paper_samples
from ompq.working_memory import host_memory

_DEVICES = ("auto", "cpu", "cuda")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_LIMIT = re.compile(r"(?P<number>[1-9]\d*)(?P<unit>s|min|h)?")
_UNLIMITED = 100_000  # more allocations than any time limit allows
REFINE_SAMPLES = 1024  # as recommended for refine()
_PAIR = re.compile(r"W(\d+)A(\d+)", re.IGNORECASE)
_PIN = re.compile(
    r"(?P<pattern>.+)=(?:(?:W?(?P<weight>\d+)|C(?P<rate>\d+(?:\.\d+)?))?"
    r"(?:A(?P<activation>\d+))?|(?P<float>float))",
    re.IGNORECASE,
)


def _known_score(value: str | None) -> str | None:
    if value is None or value in SCORES or is_user_function(value):
        return value
    raise typer.BadParameter(f"{unknown_score(value)} or FILE.py:FUNCTION")


def unknown_score(name: str) -> str:
    """Return the message for a score that does not exist."""
    similar = suggestion(name, SCORES)
    return f"there is no score {name!r}{similar}; use {', '.join(SCORES)}"


def _joined(values: tuple[Any, ...], comma: str = ",") -> str:
    return comma.join(map(str, values))


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Options for the network."""

    PANEL: ClassVar[str] = "Network and data"

    network: Annotated[
        str,
        argument(
            "NETWORK",
            "torchvision:NAME, timm:NAME, cifar:resnet20, ompq:demo, "
            "transformers:FOLDER (a decoder's config.json and weights), or "
            "FILE.py:FUNCTION, your own function that returns the network.",
        ),
    ]
    weights: str | None = option(
        "FILE",
        "A .safetensors, .pt, .pth or .pth.tar file, or none for random weights. "
        "Default: the library's pretrained weights, downloaded if needed.",
    )
    device: str = one_of(
        _DEVICES,
        "where to run. Default: auto, a GPU if there is one.",
        default=_DEVICES[0],
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

    def load(self, console: Console) -> NamedModel:
        """Load the network onto its device."""
        shape = _shape(self.input_shape)
        if self.threads is not None:
            check_threads(self.threads)
            torch.set_num_threads(self.threads)
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise ValueError("--device cuda: PyTorch finds no GPU; use --device cpu")
        device = "cuda" if available and self.device != "cpu" else "cpu"
        console.until_done.enter_context(host_memory(self.memory))
        with console.stage("loading the network"):
            model = load_model(self.network, self.weights)
            model = model if shape is None else model.at(shape)
            if self.device_memory is None:
                model.module.to(device)
            else:
                limited = device_memory(self.device_memory, device)
                console.until_done.enter_context(limited)
        return model


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
    seed: int = number("Seed for the choice of images.", default=0, least=None)
    skip_unreadable: bool = flag("Skip broken images instead of stopping.")

    def inputs(self, model: NamedModel, split: Split = "train") -> Data:
        """Find the data."""
        seed, skip = self.seed, self.skip_unreadable
        return load_data(self.data, model, split=split, seed=seed, skip_unreadable=skip)

    def labelled(
        self, source: str | None, model: NamedModel, limit: int | None = None
    ) -> Batches | None:
        """Return labelled batches from another source, or None if there is none."""
        if source is None:
            return None
        return replace(self, data=source).inputs(model, "test").batches(limit=limit)


def metric_option(where: str = "", more: str = "") -> Any:
    """Return the option that names a metric besides top-1."""
    return option(
        "FUNCTION",
        "perplexity, for a decoder; or FILE.py:FUNCTION, called with the network's "
        f"outputs and the targets of a batch{where}. It returns a number{more}.",
    )


def user_metrics(name: str | None) -> dict[str, Metric]:
    """Return the metric that ``--metric`` names, by its short name."""
    if name is None or name in METRICS:
        return {} if name is None else {name: METRICS[name]}
    if not is_user_function(name):
        known = ", ".join(METRICS)
        raise ValueError(f"--metric {name}: write {known} or FILE.py:FUNCTION")
    return {name.rpartition(":")[2]: user_function(name, DataError)}


def decoder_metrics(model: NamedModel) -> dict[str, Metric]:
    """Return the metric of a network that continues texts; none for other networks."""
    return {name: METRICS[name] for name in ("perplexity",) if model.tokenizer}


def provenance(inputs: Data, **more: Any) -> dict[str, Any]:
    """Return what a result was made from: network, weights, data, seed, device."""
    model = inputs.model
    origin = {"network": model.name, "weights": model.weights, "data": inputs.name}
    device = str(model_device(model.module))
    about = {**origin, **more, "seed": inputs.seed, "device": device}
    # Names of files may hold anything; what they end up in must be readable.
    return {k: shown(v) if isinstance(v, str) else v for k, v in about.items()}


def read_samples(data: Data, count: int, console: Console) -> Samples:
    """Read unlabelled inputs."""
    with console.stage("reading samples") as progress:
        return Samples.of(data.samples(count, progress=progress))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options for the choice of bits."""

    PANEL: ClassVar[str] = "How bits are chosen"

    choices: str | None = option(
        "BITS",
        "Bit widths to choose from for weights; W4A4,W8A8 for weights and inputs. "
        f"Default: {_joined(PlanConfig.choices)}.",
    )
    activation_bits: str | None = option(
        "BITS",
        "Bit widths to choose from for inputs of layers; 32 keeps them float. "
        f"Default: {_joined(PlanConfig.activation_choices)}.",
    )
    coded: bool = flag(
        "Also offer entropy-coded weights: a smaller file at the same accuracy. In "
        "memory each of them takes a byte."
    )
    rates: str | None = option(
        "BITS",
        "With --coded: bits per weight to choose from for coded weights. "
        f"Default: {_joined(PlanConfig.rates, ', ')}.",
    )
    group_size: int | None = option(
        "NUMBER",
        f"{_joined(GROUP_SIZES, ', ')}: group-wise scales for linear layers, one "
        "for this many weights of an output channel. Default: per-channel scales.",
    )
    pin: list[str] | None = option(
        "PIN",
        "PATTERN=BITS fixes the bits of layers: fc=8, 'layer4.*=4', @first=W8A8, "
        "fc=float, fc=C2.5A8 (coded), or of their inputs alone: fc=A8, @first=A32. "
        "A pattern is a name, a glob, re:REGEX, @first or @last. Repeatable.",
    )
    tie: list[str] | None = option(
        "PATTERN", "All layers that match get the same bits. Repeatable."
    )
    no_tie: bool = flag("Let layers whose outputs are added have different bits.")
    accounting: str | None = one_of(
        get_args(Accounting),
        "count bytes as in our files, or as in the paper. "
        f"Default: {PlanConfig.accounting}.",
    )
    method: str | None = one_of(
        SOLVER_NAMES,
        f"the optimum, or published approximations. Default: {PlanConfig.method}.",
    )
    latency: Path | None = option(
        "FILE", 'Latency table for a budget in ms: JSON {"conv1": {"W4A8": 0.4}}.'
    )
    target: str | None = option(
        "NAME",
        f"Where the network will run: {', '.join(included_targets())}, or a JSON file. "
        "Layers get only bits that run there; those that gain no speed are listed.",
        autocompletion=included_targets,
    )
    protocol: str | None = one_of(
        PLAN_PROTOCOLS,
        "our settings, or those of published work; other options override them. "
        "Default: ours.",
    )
    beta: float | None = number(
        "How strongly layers differ in importance, for orm and orm_distortion.",
        shown=OrmSettings.beta,
        least=None,
    )
    decreasing: str | None = one_of(
        get_args(Decreasing),
        "importance as a function of ORM, for the same scores (write "
        f"--decreasing='-x'). Default: {OrmSettings.decreasing}.",
    )
    granularity: str | None = one_of(
        get_args(Granularity),
        "what ORM compares, for the same scores. All layers of a block, stage or net "
        f"get the same bits. Default: {OrmSettings.granularity}.",
    )
    centred: bool = flag(
        "Centre ORM, as the paper's released code does, for the same scores."
    )
    strict: bool = flag("Fail if anything stays float.")

    def with_settings(
        self, scores: Iterable[Score | str], option: str
    ) -> tuple[Score | str, ...]:
        """Return scores with the settings of ORM, where they have any.

        Raises:
            ValueError: Settings are given, but no score has them.
        """
        names = ("beta", "decreasing", "granularity", "centred")
        changes = {name: getattr(self, name) for name in names}
        changes = {k: v for k, v in changes.items() if v not in (None, False)}
        if not changes:
            return tuple(scores)
        given = [named_score(s) if isinstance(s, str) else s for s in scores]
        own = [getattr(score, "settings", None) for score in given]
        if not any(isinstance(one, OrmSettings) for one in own):
            raise ValueError(
                f"--{next(iter(changes))} is for the scores orm and orm_distortion, "
                f"not {', '.join(map(score_name, given))}; add {option} orm"
            )
        pairs: Any = zip(given, own, strict=True)
        return tuple(
            replace(score, settings=replace(settings, **changes))
            if isinstance(settings, OrmSettings)
            else score
            for score, settings in pairs
        )

    def config(self) -> PlanConfig:
        """Return the protocol's settings with the changes that the options make."""
        base = PLAN_PROTOCOLS[self.protocol] if self.protocol else PlanConfig()
        pins = dict(_pin(text) for text in self.pin or ())
        changes: dict[str, Any] = {
            "choices": _choices(self.choices),
            "activation_choices": _numbers("--activation-bits", self.activation_bits),
            "storage": "coded" if self.coded else None,
            "rates": _numbers("--rates", self.rates, float),
            "group_size": self.group_size,
            "pinned": {**base.pinned, **pins} if pins else None,
            "tie": False if self.no_tie else None,
            "tied": tuple(self.tie) if self.tie else None,
            "accounting": self.accounting,
            "method": self.method,
            "latency": load_latency(self.latency) if self.latency else None,
            "target": self.target,
            "strict": self.strict or None,
        }
        if self.rates is not None and not self.coded:
            raise ValueError("--rates is for coded weights; add --coded")
        return replace(base, **{k: v for k, v in changes.items() if v is not None})

    def samples(self, network: str) -> int:
        """Return how many samples to plan with; published work has its own number."""
        ours = self.protocol in (None, "ours")
        return PLAN_SAMPLES if ours else paper_samples(network)

    def typed(self) -> list[str]:
        """Return the given options that affect the choice of bits, as typed."""
        other = ("protocol", "strict", "refine_by")
        names = [k for k, value in vars(self).items() if value and k not in other]
        return [f"--{name.replace('_', '-')}" for name in names]


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(PlanOptions):
    """Options for the choice of bits by one score."""

    score: str | None = option(
        "NAME",
        f"How damage is estimated: {', '.join(SCORES)}, or FILE.py:FUNCTION that "
        f"returns a score. Default: {score_name(PlanConfig.score)}.",
        callback=_known_score,
        autocompletion=lambda: list(SCORES),
    )

    def config(self) -> PlanConfig:
        """Return the protocol's settings with the changes that the options make."""
        config = super().config()
        score = config.score if self.score is None else _score(self.score)
        [score] = self.with_settings([score], "--score")
        return replace(config, score=score)


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
    refine_by: str = one_of(
        ("round", "reconstruct"),
        "how each is measured: rounded, or after a short reconstruction, "
        f"which is slower. Default: {RefineConfig.by}.",
        default=RefineConfig.by,
    )

    def refinement(self, seed: int) -> RefineConfig | None:
        """Return the settings of the refinement, or None without ``--refine``."""
        by = self.refine_by if self.refine_by != RefineConfig.by else None
        check_needed("--refine", self.refine, refine_by=by)
        if self.refine is None:
            return None
        match = _LIMIT.fullmatch(self.refine)
        if match is None:
            raise ValueError(
                f"--refine {self.refine}: give a number of allocations, for example "
                "20, or a time, for example 90s, 3min or 1h"
            )
        config = RefineConfig(by=self.refine_by, seed=seed)  # type: ignore[arg-type]
        number, unit = int(match["number"]), match["unit"]
        if not unit:
            return replace(config, count=number)
        seconds = float(number * _SECONDS[unit])
        return replace(config, count=_UNLIMITED, seconds=seconds)

    def plan(
        self, work: Workflow, source: Plan | Allocation | Budget, inputs: Data
    ) -> Plan:
        """Plan as the options ask; a plan is returned unchanged."""
        count = self.samples(inputs.model.name)
        refinement = self.refinement(inputs.seed)
        return work.plan(source, self.config(), count=count, refinement=refinement)


def _score(text: str) -> Score | str:
    if not is_user_function(text):
        return text
    score = call_user_function(text, ScoreError)
    if not callable(score):
        raise ScoreError(
            f"{text} returned {type(score).__name__}; it must return a score: "
            "a function of an ompq.ScoreInputs"
        )
    return score  # type: ignore[no-any-return]


def _numbers(
    option: str, text: str | None, kind: type[int] | type[float] = int
) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(sorted({kind(part) for part in text.split(",")}))
    except ValueError:
        what, example = ("bits", "2,4,8") if kind is int else ("rates", "1.5,2,4")
        raise ValueError(
            f"{option} {text} is not a list of {what}; write for example {option} "
            f"{example}"
        ) from None


def _choices(text: str | None) -> tuple[int | tuple[int, int], ...] | None:
    if text is None or not text.upper().startswith("W"):
        return _numbers("--choices", text)
    pairs = [_PAIR.fullmatch(part.strip()) for part in text.split(",")]
    if not all(pairs):
        raise ValueError(
            f"--choices {text} is not a list of pairs; write for example W4A4,W8A8"
        )
    return tuple((int(pair[1]), int(pair[2])) for pair in pairs if pair)


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = re.split(r"[,x×]", text)
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"--input-shape {text} is not a shape; write for example 3,224,224"
        )
    return tuple(map(int, parts))


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
        coded = Choice(CODED_BITS, activation or CODED_BITS, float(match["rate"]))
        return match["pattern"], coded
    if activation is None:
        assert weight is not None  # the pattern requires one of the two
        return match["pattern"], weight
    return match["pattern"], (weight, activation)
