"""What the paper measured: its tables, figures and rows, and how each is run.

Sizes are MiB in the paper's accounting, accuracies top-1 in per cent. The drawings that
explain the method (overview, deconstruction, linear program) measure nothing and are
not here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from ompq.costs import FLOAT_BITS
from ompq.orthogonality import Decreasing
from ompq.scores import Hessian, Orm, OrmSettings, Random
from ompq.scores.orm import Granularity

ANY = "32bits"  # a budget that one width for all layers always meets
HALFWAY = "halfway"  # between the fewest and the most bits: HAWQ-V3's medium size
Measure = Literal[
    "network", "plan", "orthogonality", "layer", "matrix", "time", "published"
]
Drawing = Literal["", "accuracy", "beta", "bits", "cost", "layer", "matrix", "scatter"]


@dataclass(frozen=True)
class Row:
    """One row of a table, or one point of a figure.

    Attributes:
        method: As the paper names it.
        protocol: Of planning, quantizing and reconstructing.
        plan: Fields of ``PlanConfig`` that differ from the protocol's.
        budget: What ``ompq plan --budget`` takes, or ``halfway``.
        train: The training recipe; without one, the network is reconstructed.
        published: Top-1 in the paper.
        measure: What the row measures.
        at: Where on a figure's axis: beta, bits, number of samples or images.
        quantize: Fields of ``QuantizeConfig`` that differ from the protocol's.
        reconstruct: Whether rounding is learned, where nothing is trained.
        distilled: Whether the samples are distilled from the network.
        search: ``reinforce`` (HAQ) or ``channels`` (OneBitwidth) in place of a plan.
        note: What to know about the row.
    """

    name: str
    method: str
    _: KW_ONLY
    protocol: str = "paper-ptq"
    plan: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    budget: str = ANY
    train: str | None = None
    published: float | None = None
    measure: Measure = "network"
    at: float | str | None = None
    quantize: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    reconstruct: bool = True
    distilled: bool = False
    search: Literal["", "reinforce", "channels"] = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or a figure of the paper."""

    name: str
    title: str
    network: str
    float_mib: float  # the float network's size
    rows: Sequence[Row]
    float_top1: float | None = None  # as published
    drawing: Drawing = ""


_FLOAT_ENDS = MappingProxyType({"@first": FLOAT_BITS, "@last": FLOAT_BITS})
# The authors keep the image float, and the stem's output at 8 bits.
_FOUR = MappingProxyType(
    {
        "activation_choices": (4,),
        "pinned": {"@first": (None, FLOAT_BITS), "layer1.0.conv1": (None, 8)},
    }
)


def _same(weight: int, activation: int, **more: Any) -> dict[str, Any]:
    """Return the settings of one width for all layers."""
    return {"choices": ((weight, activation),), "score": "smallest_first", **more}


def _sized(
    name: str, method: str, size: float, published: float | None = None, **more: Any
) -> Row:
    """Return a row whose name and budget tell its size in MiB."""
    bits = "-a4" if "activation_choices" in more.get("plan", ()) else ""
    more |= {"budget": f"{size}MiB", "published": published}
    return Row(f"{name}-{size:g}{bits}", method, **more)


_PAPER = {"accounting": "paper"}
_ompq = partial(_sized, "ompq", "OMPQ")
_brecq = partial(_sized, "brecq", "BRECQ", protocol="brecq")  # its own search, too
_fracbits = partial(
    _sized,
    "fracbits",
    "FracBits-PACT",
    protocol="ours",
    plan=_PAPER,
    train="fracbits-pact",
)


def _ours(size: float, **plan: Any) -> Row:
    """Return what this library does by default, at the same size."""
    settings = {"choices": (2, 3, 4), **_PAPER, **plan}
    return _sized("ours", "ompq (ours)", size, protocol="ours", plan=settings)


def _trained(
    name: str, method: str, recipe: str, published: float, plan: Mapping[str, Any]
) -> Row:
    settings = {**_PAPER, **plan}
    return Row(
        name, method, protocol="ours", plan=settings, train=recipe, published=published
    )


def _of_protocol(
    method: str,
    protocol: str,
    name: str,
    published: float,
    budget: str = ANY,
    **plan: Any,
) -> Row:
    """Return a row that is planned and trained as one protocol says."""
    return Row(
        name,
        method,
        protocol=protocol,
        plan=plan,
        budget=budget,
        train=protocol,
        published=published,
    )


_qat = partial(_of_protocol, "OMPQ", "paper-qat")
_hawq = partial(_of_protocol, "HAWQ-V3", "hawq-v3")

_QAT_18 = (
    _trained("rvquant", "RVQuant", "rvquant", 70.01, _same(8, 8)),
    _hawq("hawq-v3-8", 71.56, **_same(8, 8)),
    _qat("ompq-a8", 72.30, "6.7MiB"),
    _trained("pact", "PACT", "pact", 69.80, _same(5, 5, pinned=_FLOAT_ENDS)),
    _trained("lq-nets", "LQ-Nets", "lq-nets", 70.00, _same(4, 32, pinned=_FLOAT_ENDS)),
    _hawq("hawq-v3-mixed", 70.22, HALFWAY),
    _qat("ompq-a6", 72.08, "6.7MiB", activation_choices=(6,)),
)
_QAT_50 = (
    _trained("pact", "PACT", "pact", 76.70, _same(5, 5, pinned=_FLOAT_ENDS)),
    _trained("lq-nets", "LQ-Nets", "lq-nets", 76.40, _same(4, 32, pinned=_FLOAT_ENDS)),
    _trained("rvquant", "RVQuant", "rvquant", 75.60, _same(5, 5)),
    Row(
        "haq",
        "HAQ",
        protocol="ours",
        plan={"activation_choices": (32,), "accounting": "paper"},
        budget="9.62MiB",
        train="ours",
        published=75.48,
        search="reinforce",
    ),
    Row(
        "one-bitwidth",
        "OneBitwidth",
        protocol="ours",
        plan={"accounting": "paper"},
        budget="12.3MiB",
        train="one-bitwidth",
        published=76.70,
        search="channels",
        note="runs for cifar:resnetN, whose channels can be multiplied",
    ),
    _hawq("hawq-v3-mixed", 75.39, HALFWAY),
    _qat("ompq-16", 76.20, "16.0MiB", activation_choices=(5,)),
    _qat("ompq-18.7", 76.28, "18.7MiB", activation_choices=(5,)),
)
_PTQ_18 = (
    _fracbits(4.5, 69.10),
    _ompq(4.5, 68.69, plan=_FOUR),
    _ompq(4.5, 69.94),
    _ours(4.5),
    _ours(4.5, **_FOUR),
    Row(
        "zeroq",
        "ZeroQ",
        protocol="ours",
        plan=_same(4, 4),
        quantize={
            "weight_range": "minmax",
            "activation_range": "minmax",
            "equalize": False,
            "restore_moments": False,
        },
        reconstruct=False,
        distilled=True,
        published=21.20,
    ),
    Row(
        "brecq-distilled",
        "BRECQ, distilled",
        protocol="brecq",
        plan=_same(4, 4, method="exact", pinned=_FOUR["pinned"]),
        distilled=True,
        published=69.32,
    ),
    _trained("pact", "PACT", "pact", 69.20, _same(4, 4)),
    _hawq("hawq-v3-4", 68.45, **_same(4, 4)),
    _fracbits(5.81, 69.70),
    _ompq(5.5, 69.38, plan=_FOUR),
    _ours(5.5, **_FOUR),
    _brecq(4.0, 68.82),
    _ompq(4.0, 69.41),
    _ours(4.0),
)
_PTQ_MOBILE = (
    _brecq(1.3, 68.99),
    _ompq(1.3, 69.62),
    _ours(1.3),
    _fracbits(1.84, 69.90),
    _brecq(1.5, 70.28),
    _ompq(1.5, 71.39, note="71.27 in the paper's abstract"),
    _ours(1.5),
)

_FUNCTIONS: dict[Decreasing, tuple[float | None, float | None]] = {
    "exp(-x)": (72.30, 63.51),
    "-log(x)": (72.26, 63.20),
    "-x": (72.36, 63.0),
    "-x^3": (71.71, None),
    "-exp(x)": (None, None),
}
_GRANULARITIES: dict[Granularity, tuple[float, float]] = {
    "layer": (72.51, 69.37),
    "block": (72.52, 69.10),
    "stage": (72.47, 68.86),
    "net": (72.31, 63.99),
}
_ENDS = ("@first", "@last")  # which the paper's training pins


def _ablation(
    name: str,
    settings: Mapping[str, Any],
    published: float | None,
    budget: str,
    **more: Any,
) -> Row:
    """Return a row with other settings of ORM."""
    plan, beta = {"score": Orm(OrmSettings(**settings))}, settings.get("beta")
    more = {"budget": budget, "published": published, "at": beta, **more}
    return Row(name, name, plan=plan, **more)


def _sizes(*sizes: float) -> list[Row]:
    """Return OMPQ, BRECQ and one width for all at several sizes."""
    unified = [
        Row(f"unified-{b}", "unified", protocol="brecq", plan=_same(b, 8))
        for b in (2, 3, 4)
    ]
    mixed = [make(size) for size in sizes for make in (_ompq, _brecq, _ours)]
    return [*mixed, *unified]


_COSTS = (
    Row(
        "fracbits",
        "FracBits",
        measure="published",
        at=1_200_000,
        note="searches while it trains, 120 epochs",
    ),
    Row(
        "hawq",
        "HAWQ",
        measure="plan",
        plan={"score": Hessian()},
        budget="4.0MiB",
        note="50 iterations for each layer in the paper",
    ),
    Row(
        "brecq",
        "BRECQ",
        measure="plan",
        protocol="brecq",
        budget="4.0MiB",
        at=1024,
        note="1,024 images and 100 rounds in the paper",
    ),
    Row("ompq", "OMPQ", measure="plan", budget="4.0MiB", at=64),
    Row(
        "ours",
        "ompq (ours)",
        measure="plan",
        protocol="ours",
        plan={"choices": (2, 3, 4), "accounting": "paper"},
        budget="4.0MiB",
    ),
)
_NETWORKS = {
    "resnet18": ("torchvision:resnet18", "ResNet-18", 44.6),
    "resnet50": ("torchvision:resnet50", "ResNet-50", 97.8),
    "mobilenetv2": ("torchvision:mobilenet_v2", "MobileNetV2", 13.4),
}


def _experiment(
    name: str,
    title: str,
    rows: Sequence[Row],
    top1: float | None = None,
    drawing: Drawing = "",
) -> Experiment:
    network, shown, size = _NETWORKS[name.rpartition("-")[2]]
    return Experiment(
        name=name,
        title=f"{title}, {shown}",
        network=network,
        float_mib=size,
        rows=tuple(rows),
        float_top1=top1,
        drawing=drawing,
    )


def _ablations(
    name: str,
    title: str,
    field: str,
    table: Mapping[Any, Sequence[float | None]],
    budgets: Sequence[str],
) -> list[Experiment]:
    """Return Table 1 or 2: training of ResNet-18, and MobileNetV2 without training."""
    training = {"protocol": "paper-qat", "train": "paper-qat"}
    networks = ("resnet18", 73.09, ", training"), ("mobilenetv2", 72.49, "")
    found = []
    for place, (network, top1, ending) in enumerate(networks):
        ends = {"exclude": _ENDS} if ending else {}
        rows = [
            _ablation(
                one,
                {field: one, **ends},
                published[place],
                budgets[place],
                **(training if ending else {}),
            )
            for one, published in table.items()
        ]
        found.append(
            _experiment(f"table-{name}-{network}", f"{title}{ending}", rows, top1)
        )
    return found


def _figures(network: str, size: float) -> list[Experiment]:
    """Return the figures that the paper has of a network, for bits of a size."""
    random = [
        Row(
            f"random-{seed}",
            "random bits",
            plan={"score": Random(seed), "method": "exact"},
            budget=f"{size * factor:.3g}MiB",
            measure="orthogonality",
            at=seed,
        )
        for seed, factor in enumerate((1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35))
    ]
    layers = [Row(f"{b}-bits", "layers", measure="layer", at=b) for b in range(2, 9)]
    bits = [replace(_ompq(size), measure="plan")]
    drawn: tuple[tuple[str, str, list[Row], Drawing], ...] = (
        ("orm-accuracy", "Orthogonality and accuracy", random, "scatter"),
        ("orthogonality-bits", "Orthogonality and bits of layers", layers, "layer"),
        ("bits", f"Bits at {size:g} MiB", bits, "bits"),
    )
    return [
        _experiment(f"figure-{name}-{network}", title, rows, drawing=drawing)
        for name, title, rows, drawing in drawn
    ]


_MATRICES = [
    Row(f"{count}-samples", "ORM", measure="matrix", at=count)
    for count in (8, 16, 32, 64)
]
_SHAPES = [
    Row(shape, "two random matrices", measure="time", at=shape)
    for shape in ("10000x100", "100x10000")
]
_BETAS = [
    _ablation(f"beta-{beta:g}", {"beta": beta}, None, "0.9MiB")
    for beta in (0.01, 0.1, 1.0, 10.0, 100.0)
]
_TIMES, _PTQ = (
    "ORM by Gram matrices and by features, in seconds",
    "Post-training quantization",
)
_THREE = "OMPQ, BRECQ and one width"
EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        one.name: one
        for one in (
            *_ablations(
                "functions",
                "Decreasing functions",
                "decreasing",
                _FUNCTIONS,
                ("6.7MiB", "0.9MiB"),
            ),
            *_ablations(
                "granularity",
                "Granularity",
                "granularity",
                _GRANULARITIES,
                ("5bits", "3bits"),
            ),
            _experiment("table-qat-resnet18", "Training", _QAT_18, 73.09),
            _experiment("table-qat-resnet50", "Training", _QAT_50, 77.72),
            _experiment("table-ptq-resnet18", _PTQ, _PTQ_18, 71.08, "accuracy"),
            _experiment("table-ptq-mobilenetv2", _PTQ, _PTQ_MOBILE, 72.49, "accuracy"),
            _experiment("table-calculation-time-resnet18", _TIMES, _SHAPES),
            _experiment(
                "figure-search-cost-resnet18",
                "What choosing the bits costs",
                _COSTS,
                drawing="cost",
            ),
            _experiment(
                "figure-ompq-brecq-resnet18",
                _THREE,
                _sizes(3.5, 4.0, 4.5),
                71.08,
                "accuracy",
            ),
            _experiment(
                "figure-ompq-brecq-mobilenetv2",
                _THREE,
                _sizes(0.9, 1.1, 1.3, 1.5),
                72.49,
                "accuracy",
            ),
            _experiment(
                "figure-beta-mobilenetv2", "Beta at 0.9 MiB", _BETAS, 72.49, "beta"
            ),
            *_figures("resnet18", 3.5),
            *_figures("mobilenetv2", 0.9),
            *(
                _experiment(
                    f"figure-orm-matrices-{network}",
                    "ORM by number of samples",
                    _MATRICES,
                    drawing="matrix",
                )
                for network in _NETWORKS
            ),
        )
    }
)
