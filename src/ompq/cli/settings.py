"""From what the user typed to what the library takes."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ompq.cli.options import (
    FEWER_SAMPLES,
    SAMPLES,
    DataOptions,
    NetworkOptions,
    PlanOptions,
)
from ompq.cli.screen import Screen
from ompq.costs import FLOAT_BITS, load_latency
from ompq.datasets.sources import Data, Split, load_data
from ompq.errors import ScoreError
from ompq.models import NamedModel, load_model
from ompq.plans import PLAN_PROTOCOLS, Pin, PlanConfig
from ompq.samples import Progress
from ompq.scores import SCORES, Score
from ompq.userfiles import call_user_function, is_user_function

_PIN = re.compile(
    r"(?P<pattern>.+)=(?:W?(?P<weight>\d+)(?:A(?P<activation>\d+))?|(?P<float>float))",
    re.IGNORECASE,
)


def check_writable(path: Path | None) -> None:
    """Make sure, before the work, that a file can be written.

    Raises:
        ValueError: It cannot.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"--output {path} is a folder; name a file in it")
    above = next(one for one in path.absolute().parents if one.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"--output {path}: {above} is no folder one may write to")


def check_folder(path: Path | None, option: str = "--output") -> None:
    """Make sure, before the work, that files can be written into a folder.

    Raises:
        ValueError: They cannot.
    """
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} {path} is a file; name a folder")
    absolute = path.absolute()
    there = next(one for one in (absolute, *absolute.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{option} {path}: {there} is no folder one may write to")


def load_network(options: NetworkOptions, screen: Screen) -> NamedModel:
    """Load the network and put it where it is to run."""
    device = options.torch_device()
    with screen.stage("loading the network"):
        model = load_model(options.network, options.weights)
        model.module.to(device)
    return model


def load_inputs(options: DataOptions, model: NamedModel, split: Split) -> Data:
    """Find the data."""
    return load_data(
        options.data,
        model,
        split=split,
        seed=options.seed,
        skip_unreadable=options.skip_unreadable,
    )


def read_samples(data: Data, count: int, screen: Screen) -> Tensor:
    """Read unlabelled inputs, (count, C, H, W)."""
    with screen.stage("reading samples") as progress:
        return data.samples(count, progress=progress)


def sample_count(network: str, asked: int | None, protocol: str | None) -> int:
    """Return how many samples a plan is made from."""
    if asked is not None:
        return asked
    if protocol is not None:
        for name, count in FEWER_SAMPLES.items():
            if name in network:
                return count
    return SAMPLES


def plan_config(options: PlanOptions) -> PlanConfig:
    """Return the settings of a plan: the protocol's, and what was typed besides.

    Raises:
        ValueError: An option cannot be read.
        BudgetError: The latency table cannot be read.
        ScoreError: The user's own score cannot be made.
    """
    base = PLAN_PROTOCOLS[options.protocol] if options.protocol else PlanConfig()
    given: dict[str, Any] = {
        "score": None if options.score is None else _score(options.score),
        "choices": _bits("--choices", options.choices),
        "activation_choices": _bits("--activation-bits", options.activation_bits),
        "pinned": _pins(options.pin, base.pinned) if options.pin else None,
        "tie": False if options.no_tie else None,
        "tied": tuple(options.tie) if options.tie else None,
        "accounting": options.accounting,
        "method": options.method,
        "latency": load_latency(options.latency) if options.latency else None,
        "target": options.target,
        "strict": options.strict or None,
    }
    return replace(base, **{k: v for k, v in given.items() if v is not None})


def reporting(config: PlanConfig, progress: Progress) -> PlanConfig:
    """Return settings whose score tells its progress, if it is one that can."""
    score: Any = config.score
    score = SCORES[score] if isinstance(score, str) else score
    if not is_dataclass(score) or "progress" not in {f.name for f in fields(score)}:
        return config
    told: Any = replace(score, progress=progress)  # type: ignore[type-var]
    return replace(config, score=told)


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
            f"{option} {text}: these are no bits; write for example {option} 2,4,8"
        ) from None


def _pins(texts: Sequence[str], base: Mapping[str, Pin]) -> dict[str, Pin]:
    return {**base, **dict(_pin(text) for text in texts)}


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
