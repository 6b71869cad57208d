"""The options that commands share.

What an option leaves open is decided where the library decides it, in the fields of
``PlanConfig``; the help reads its defaults from there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer

from ompq.allocation.solver import Method
from ompq.costs import Accounting
from ompq.plans import PLAN_PROTOCOLS, PlanConfig
from ompq.scores import SCORES, score_name
from ompq.targets import included_targets
from ompq.userfiles import is_user_function, suggestion

SAMPLES = 64
# The paper's numbers of samples: 64, but 32 for MobileNetV2.
FEWER_SAMPLES = {"mobilenet_v2": 32, "mobilenetv2": 32}
_DEVICES = ("auto", "cpu", "cuda")
_NETWORK, _PLAN, _OUTPUT = "Network and data", "How bits are chosen", "Output"


def option(*names: str, text: str, **settings: Any) -> Any:
    """Return an option; its default is told in its text, where it has one."""
    return typer.Option(*names, help=text, show_default=False, **settings)


def one_of(known: Iterable[str], *, text: str, **settings: Any) -> Any:
    """Return an option that takes one of several names, completed by the shell."""
    names = list(known)

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise typer.BadParameter(
                f"{value!r} is none of {', '.join(names)}{suggestion(value, names)}"
            )
        return value

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    settings |= {"callback": check, "autocompletion": complete, "metavar": "NAME"}
    return option(text=f"{', '.join(names)}: {text}", **settings)


def _score(value: str | None) -> str | None:
    if value is None or value in SCORES or is_user_function(value):
        return value
    raise typer.BadParameter(
        f"{value!r} is no score{suggestion(value, SCORES)}; "
        f"use {', '.join(SCORES)} or FILE.py:FUNCTION"
    )


def _joined(values: Iterable[int]) -> str:
    return ",".join(str(value) for value in values)


BudgetOption = Annotated[
    str,
    option(
        metavar="BUDGET",
        text="What it may take: 4.0MiB, 4.2MB, 12.5%, 3.2bits, 75GBOPs, 8ms; "
        "several joined by commas.",
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]


def _flag(*names: str, text: str, panel: str) -> Any:
    return option(*names, text=text, rich_help_panel=panel)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How results are printed."""

    json: Annotated[
        bool, _flag("--json", text="Print JSON on stdout.", panel=_OUTPUT)
    ] = False
    quiet: Annotated[
        bool,
        _flag(
            "--quiet",
            "-q",
            text="No progress; one line instead of tables.",
            panel=_OUTPUT,
        ),
    ] = False
    debug: Annotated[
        bool,
        _flag(
            "--debug",
            text="Show the library's log, and an error's traceback.",
            panel=_OUTPUT,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Which network."""

    network: Annotated[
        str,
        typer.Argument(
            metavar="NETWORK",
            help="torchvision:NAME, timm:NAME, cifar:resnet20, ompq:demo, or "
            "FILE.py:FUNCTION, a function of your own that returns the network.",
            show_default=False,
        ),
    ]
    weights: Annotated[
        str | None,
        option(
            metavar="FILE",
            text="A .safetensors, .pt or .pth file; none: random weights, to try "
            "things out. Without it the library's own, which may be downloaded.",
            rich_help_panel=_NETWORK,
        ),
    ] = None
    device: Annotated[
        str,
        one_of(
            _DEVICES,
            text="where to run; auto takes a GPU if there is one.",
            rich_help_panel=_NETWORK,
        ),
    ] = _DEVICES[0]

    def torch_device(self) -> torch.device:
        """Return the device to run on.

        Raises:
            ValueError: A GPU is asked for and there is none.
        """
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise ValueError("--device cuda: PyTorch finds no GPU; use --device cpu")
        if self.device == "auto":
            return torch.device("cuda" if available else "cpu")
        return torch.device(self.device)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which data."""

    data: Annotated[
        str,
        option(
            metavar="SOURCE",
            text="A folder of images, digits (scikit-learn's), FILE.py:FUNCTION, or "
            "random: noise, to try things out.",
            rich_help_panel=_NETWORK,
        ),
    ]
    seed: Annotated[
        int,
        option(
            metavar="NUMBER",
            text="Decides which images are taken. Default: 0.",
            rich_help_panel=_NETWORK,
        ),
    ] = 0
    skip_unreadable: Annotated[
        bool,
        _flag(
            "--skip-unreadable",
            text="Leave broken images out instead of stopping.",
            panel=_NETWORK,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How bits are chosen."""

    choices: Annotated[
        str | None,
        option(
            metavar="BITS",
            text="What a layer's weights may get. "
            f"Default: {_joined(PlanConfig.choices)}.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    activation_bits: Annotated[
        str | None,
        option(
            metavar="BITS",
            text="What a layer's input may get; one width is fixed for all. "
            f"Default: {_joined(PlanConfig.activation_choices)}.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    score: Annotated[
        str | None,
        option(
            metavar="NAME",
            callback=_score,
            autocompletion=lambda: list(SCORES),
            text=f"What few bits damage: {', '.join(SCORES)}, or FILE.py:FUNCTION "
            f"that returns a score. Default: {score_name(PlanConfig.score)}.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    pin: Annotated[
        list[str] | None,
        option(
            metavar="PIN",
            text="PATTERN=BITS fixes bits: fc=8, 'layer4.*=4', @first=W8A8, fc=float. "
            "Patterns: a name, a glob, re:REGEX, @first, @last. Repeatable.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    tie: Annotated[
        list[str] | None,
        option(
            metavar="PATTERN",
            text="Layers that match share their bits. Repeatable.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    no_tie: Annotated[
        bool,
        _flag(
            "--no-tie",
            text="Let layers whose outputs are added up differ in bits.",
            panel=_PLAN,
        ),
    ] = False
    accounting: Annotated[
        str | None,
        one_of(
            get_args(Accounting),
            text="bytes as our files take them, or as the paper counts. "
            f"Default: {PlanConfig.accounting}.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    method: Annotated[
        str | None,
        one_of(
            get_args(Method),
            text="the optimum, or the paper's ways to come near it. "
            f"Default: {PlanConfig.method}.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    latency: Annotated[
        Path | None,
        option(
            metavar="FILE",
            text='Milliseconds for a budget in ms: JSON {"conv1": {"W4A8": 0.4}}.',
            rich_help_panel=_PLAN,
        ),
    ] = None
    target: Annotated[
        str | None,
        option(
            metavar="NAME",
            autocompletion=included_targets,
            text="Where the network will run, so that layers get only what works there "
            f"and what is no faster is told: {', '.join(included_targets())}, or a "
            "JSON file.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    protocol: Annotated[
        str | None,
        one_of(
            PLAN_PROTOCOLS,
            text="settings of published work; other options override them.",
            rich_help_panel=_PLAN,
        ),
    ] = None
    strict: Annotated[
        bool,
        _flag("--strict", text="Make anything that stays float an error.", panel=_PLAN),
    ] = False
