"""Network, data and plan: from what the user typed to what the library takes.

Defaults are those of the library's own settings; the help reads them from there.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

import torch
import typer
from torch import Tensor

from ompq.allocation.solver import Method
from ompq.cli.console import Console
from ompq.cli.options import REQUIRED, argument, flag, number, one_of, option
from ompq.costs import FLOAT_BITS, Accounting, load_latency
from ompq.datasets.sources import Batches, Data, Split, load_data
from ompq.errors import ScoreError
from ompq.models import NamedModel, load_model
from ompq.plans import PLAN_PROTOCOLS, Pin, PlanConfig
from ompq.reconstruction_score import SCORES
from ompq.refinement import RefineConfig
from ompq.samples import model_device
from ompq.scores import Score, score_name
from ompq.targets import included_targets
from ompq.userfiles import call_user_function, is_user_function, suggestion
from ompq.workflow import PLAN_SAMPLES

# The paper's numbers of samples: 64, but 32 for MobileNetV2.
FEWER_SAMPLES = {"mobilenet_v2": 32, "mobilenetv2": 32}
_DEVICES = ("auto", "cpu", "cuda")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_LIMIT = re.compile(r"(?P<number>[1-9]\d*)(?P<unit>s|min|h)?")
_ENDLESS = 100_000  # allocations: the time ends it before
REFINE_SAMPLES = 512  # as refine() recommends
_PIN = re.compile(
    r"(?P<pattern>.+)=(?:W?(?P<weight>\d+)(?:A(?P<activation>\d+))?|(?P<float>float))",
    re.IGNORECASE,
)


def _known_score(value: str | None) -> str | None:
    if value is None or value in SCORES or is_user_function(value):
        return value
    raise typer.BadParameter(
        f"there is no score {value!r}{suggestion(value, SCORES)}; "
        f"use {', '.join(SCORES)} or FILE.py:FUNCTION"
    )


def _joined(values: tuple[int, ...]) -> str:
    return ",".join(str(value) for value in values)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Which network."""

    PANEL: ClassVar[str] = "Network and data"

    network: Annotated[
        str,
        argument(
            "NETWORK",
            "torchvision:NAME, timm:NAME, cifar:resnet20, ompq:demo, or "
            "FILE.py:FUNCTION, a function of your own that returns the network.",
        ),
    ]
    weights: str | None = option(
        None,
        "FILE",
        "A .safetensors, .pt, .pth or .pth.tar file; none: random weights, to try "
        "things out. Default: the library's pretrained weights, downloaded if needed.",
    )
    device: str = one_of(
        _DEVICES[0], _DEVICES, "where to run. Default: auto, a GPU if there is one."
    )

    def load(self, console: Console) -> NamedModel:
        """Load the network onto its device."""
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise ValueError("--device cuda: PyTorch finds no GPU; use --device cpu")
        gpu = available and self.device != "cpu"
        with console.stage("loading the network"):
            model = load_model(self.network, self.weights)
            model.module.to("cuda" if gpu else "cpu")
        return model


@dataclass(frozen=True, kw_only=True)
class SourceOptions(NetworkOptions):
    """Which network, and which data."""

    data: str = option(
        REQUIRED,
        "SOURCE",
        "A folder of images, digits (scikit-learn's), FILE.py:FUNCTION, or "
        "random: noise, to try things out.",
    )
    seed: int = number(0, "Seed for the choice of images.", least=None)
    skip_unreadable: bool = flag(
        "Skip broken images instead of stopping.", "--skip-unreadable"
    )

    def inputs(self, model: NamedModel, split: Split = "train") -> Data:
        """Find the data."""
        seed, skip = self.seed, self.skip_unreadable
        return load_data(self.data, model, split=split, seed=seed, skip_unreadable=skip)

    def labelled(
        self, source: str | None, model: NamedModel, limit: int | None = None
    ) -> Batches | None:
        """Return labelled batches of another source, if one is given."""
        if source is None:
            return None
        return replace(self, data=source).inputs(model, "test").batches(limit=limit)


def provenance(inputs: Data, **more: Any) -> dict[str, Any]:
    """Return what a result says about how it came about."""
    model = inputs.model
    origin = {"network": model.name, "weights": model.weights, "data": inputs.name}
    device = str(model_device(model.module))
    return {**origin, **more, "seed": inputs.seed, "device": device}


def read_samples(data: Data, count: int, console: Console) -> Tensor:
    """Read unlabelled inputs, (count, C, H, W)."""
    with console.stage("reading samples") as progress:
        return data.samples(count, progress=progress)


def sample_count(network: str, asked: int | None, protocol: str | None) -> int:
    """Return how many samples a plan is made from."""
    if asked is not None:
        return asked
    fewer = [count for name, count in FEWER_SAMPLES.items() if name in network]
    return fewer[0] if protocol is not None and fewer else PLAN_SAMPLES


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How bits are chosen."""

    PANEL: ClassVar[str] = "How bits are chosen"

    choices: str | None = option(
        None,
        "BITS",
        "Widths that a layer's weights may get. "
        f"Default: {_joined(PlanConfig.choices)}.",
    )
    activation_bits: str | None = option(
        None,
        "BITS",
        "Widths that a layer's input may get; 32 leaves it float. "
        f"Default: {_joined(PlanConfig.activation_choices)}.",
    )
    score: str | None = option(
        None,
        "NAME",
        f"How damage is estimated: {', '.join(SCORES)}, or FILE.py:FUNCTION that "
        f"returns a score. Default: {score_name(PlanConfig.score)}.",
        callback=_known_score,
        autocompletion=lambda: list(SCORES),
    )
    pin: list[str] | None = option(
        None,
        "PIN",
        "PATTERN=BITS fixes bits: fc=8, 'layer4.*=4', @first=W8A8, fc=float. "
        "Patterns: a name, a glob, re:REGEX, @first, @last. Repeatable.",
    )
    tie: list[str] | None = option(
        None, "PATTERN", "Layers that match share their bits. Repeatable."
    )
    no_tie: bool = flag(
        "Let layers whose outputs are added differ in bits.", "--no-tie"
    )
    accounting: str | None = one_of(
        None,
        get_args(Accounting),
        "count bytes as in our files, or as in the paper. "
        f"Default: {PlanConfig.accounting}.",
    )
    method: str | None = one_of(
        None,
        get_args(Method),
        f"the optimum, or the paper's approximations. Default: {PlanConfig.method}.",
    )
    latency: Path | None = option(
        None, "FILE", 'Milliseconds for a budget in ms: JSON {"conv1": {"W4A8": 0.4}}.'
    )
    target: str | None = option(
        None,
        "NAME",
        "Where the network will run: layers get only what works there, and what "
        f"is no faster is listed. {', '.join(included_targets())}, or a JSON file.",
        autocompletion=included_targets,
    )
    protocol: str | None = one_of(
        None, PLAN_PROTOCOLS, "settings of published work; other options override them."
    )
    strict: bool = flag("Make it an error if anything stays float.", "--strict")

    def config(self) -> PlanConfig:
        """Return the settings of a plan: the protocol's, and what was typed besides."""
        base = PLAN_PROTOCOLS[self.protocol] if self.protocol else PlanConfig()
        pins = dict(_pin(text) for text in self.pin or ())
        given: dict[str, Any] = {
            "score": None if self.score is None else _score(self.score),
            "choices": _bits("--choices", self.choices),
            "activation_choices": _bits("--activation-bits", self.activation_bits),
            "pinned": {**base.pinned, **pins} if pins else None,
            "tie": False if self.no_tie else None,
            "tied": tuple(self.tie) if self.tie else None,
            "accounting": self.accounting,
            "method": self.method,
            "latency": load_latency(self.latency) if self.latency else None,
            "target": self.target,
            "strict": self.strict or None,
        }
        return replace(base, **{k: v for k, v in given.items() if v is not None})

    def typed(self) -> list[str]:
        """Return the options that decide on bits and were given, as typed."""
        other = ("protocol", "strict", "refine_by")
        names = [k for k, value in vars(self).items() if value and k not in other]
        return [f"--{name.replace('_', '-')}" for name in names]


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Whether score tables are kept."""

    PANEL: ClassVar[str] = "How bits are chosen"

    cache: Path | None = option(
        None,
        "DIR",
        "Keep the score's table there, and read it again when network, samples and "
        "score are the same. Default: the folder that OMPQ_CACHE names, if any.",
        envvar="OMPQ_CACHE",
        show_envvar=False,
    )
    no_cache: bool = flag(
        "Keep and read no table, whatever OMPQ_CACHE says.", "--no-cache"
    )

    @property
    def folder(self) -> Path | None:
        """Where tables are kept."""
        return None if self.no_cache else self.cache


@dataclass(frozen=True, kw_only=True)
class RefineOptions(PlanOptions):
    """How bits are chosen, and whether they are refined by measuring."""

    refine: str | None = option(
        None,
        "LIMIT",
        "Improve the bits by measuring whole allocations: at most so many (20), or for "
        "so long (90s, 3min, 1h).",
    )
    refine_by: str = one_of(
        RefineConfig.by,
        ("round", "reconstruct"),
        "how each is measured: rounded to nearest, or after a short reconstruction, "
        f"which is slower. Default: {RefineConfig.by}.",
    )

    def refinement(self, seed: int) -> RefineConfig | None:
        """Return the settings of a refinement, if one is asked for."""
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
        return replace(config, count=_ENDLESS, seconds=float(number * _SECONDS[unit]))


def _score(text: str) -> Score | str:
    if not is_user_function(text):
        return text
    score = call_user_function(text, ScoreError)
    if not callable(score):
        raise ScoreError(
            f"{text} returned {type(score).__name__}; it must return a score: "
            "a function of graph, model, samples and choices"
        )
    return score  # type: ignore[no-any-return]


def _bits(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(
            f"{option} {text} is not a list of bits; write for example {option} 2,4,8"
        ) from None


def _pin(text: str) -> tuple[str, Pin]:
    match = _PIN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"--pin {text}: write PATTERN=BITS, for example fc=8, fc=W8A8 or fc=float"
        )
    if match["float"]:
        return match["pattern"], FLOAT_BITS
    weight, activation = int(match["weight"]), match["activation"]
    return match["pattern"], (weight, int(activation)) if activation else weight
