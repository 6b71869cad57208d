"""The paper's tables and figures, row by row, and how each row is run.

Sizes are MiB in the paper's accounting, accuracies top-1 in per cent. In place of the
drawings that explain the method (overview, deconstruction, linear program) there is
``figure-method``, which shows its steps on a real network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from ompq.bit_widths import FLOAT_BITS
from ompq.configs import ENDS, OrmSettings
from ompq.lab.more_scores.loss_gradients import Hessian
from ompq.scores.baselines import Random
from ompq.workflow import ANYTHING

HALFWAY = "halfway"  # HAWQ-V3's medium limit on bit-operations, as the paper quotes it
Measure = Literal[
    "network",
    "float",
    "plan",
    "method",
    "orthogonality",
    "layer",
    "matrix",
    "time",
    "published",
]
Drawing = Literal[
    "", "accuracy", "beta", "bits", "cost", "layer", "matrix", "method", "scatter"
]


@dataclass(frozen=True)
class Row:
    """One row of a table, or one point of a figure.

    Attributes:
        method: As the paper names it.
        published: Top-1 in the paper.
        paper: What else the paper prints, by the fields of a result.
        budget: What ``ompq plan --budget`` takes, or ``halfway``.
        protocol: For planning, quantizing and reconstructing.
        plan: Fields of ``PlanConfig`` that differ from the protocol's.
        train: The training recipe; without one, the network is reconstructed.
        at: Position on a figure's axis: beta, bits, number of samples or images.
        quantize: Fields of ``QuantizeConfig`` that differ from the protocol's.
        reconstruct: Whether rounding is learned; ignored if the network is trained.
        distilled: Whether the samples are distilled from the network.
        search: ``reinforce`` (HAQ) or ``channels`` (OneBitwidth) instead of a plan.
        bits: Name of a published list of bits that takes the place of a plan.
    """

    name: str
    method: str
    published: float | None = None
    budget: str = ANYTHING
    _: KW_ONLY
    paper: Mapping[str, float] = field(default_factory=dict)
    protocol: str = "paper-ptq"
    plan: Mapping[str, Any] = field(default_factory=dict)
    train: str | None = None
    measure: Measure = "network"
    at: float | str | None = None
    quantize: Mapping[str, Any] = field(default_factory=dict)
    reconstruct: bool = True
    distilled: bool = False
    search: Literal["", "reinforce", "channels"] = ""
    bits: str = ""
    note: str = ""


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper."""

    name: str
    title: str
    network: str
    float_mib: float  # the float network's size
    rows: Sequence[Row]
    float_top1: float | None = None  # as published
    drawing: Drawing = ""

    @property
    def needs_data(self) -> bool:
        """Whether any row reads images."""
        return any(row.measure not in ("time", "published") for row in self.rows)


_PAPER = {"accounting": "paper"}
# The authors keep the image float, and the stem's output at 8 bits. Where one width is
# given for all layers, the sizes in the paper are those with 8 bits at both ends.
_STEM = {"@first": (None, FLOAT_BITS), "layer1.0.conv1": (None, 8)}
_FOUR = {"activation_choices": (4,), "pinned": _STEM}
_MINMAX = {"weight_range": "minmax", "activation_range": "minmax"}


def _same(weight: int, activation: int, **more: Any) -> dict[str, Any]:
    """Return settings that give all layers the same bits."""
    return {"choices": ((weight, activation),), "score": "smallest_first", **more}


def _sized(
    name: str, method: str, size: float, published: float | None = None, **more: Any
) -> Row:
    """Return a row with a size in MiB, which is also in its name."""
    bits = "-a4" if "activation_choices" in more.get("plan", ()) else ""
    if published is not None:
        more["paper"] = {"mib": size}
    return Row(f"{name}-{size:g}{bits}", method, published, f"{size}MiB", **more)


def _costing(row: Row, mib: float, giga_bit_ops: float) -> Row:
    """Return a row with its size and bit-operations in the paper."""
    return replace(row, paper={"mib": mib, "bit_ops": 1e9 * giga_bit_ops})


def _baseline(top1: float, mib: float, giga_bit_ops: float | None = None) -> Row:
    """Return the float network."""
    row = Row("baseline", "Baseline", top1, paper={"mib": mib}, measure="float")
    return row if giga_bit_ops is None else _costing(row, mib, giga_bit_ops)


# What a rival does here in a simpler way than in its publication, beside its row.
SIMPLER: Mapping[str, str] = MappingProxyType(
    {
        "BRECQ": "squared errors without Fisher information, as its code by default; "
        "its search without terms for pairs of 2-bit layers",
        "FracBits-PACT": "widths of weights are learned, those of activations are 8",
        "HAQ": "uniform grids instead of codebooks; rewards low divergence instead of "
        "accuracy after an epoch of training",
        "HAWQ-V3": "requantization is added after training, not simulated in it",
        "LQ-Nets": "levels of weights are learned; activations have uniform grids",
        "OneBitwidth": "PACT's rounding and schedule",
        "PACT": "starts from the float network; its clipping values do not decay",
        "RVQuant": "learning rate and number of epochs are ours",
        "ZeroQ": "one width for all layers; its search for mixed ones is left out",
    }
)
_ompq = partial(_sized, "ompq", "OMPQ")
# With its own search, too.
_brecq = partial(_sized, "brecq", "BRECQ", protocol="brecq", note=SIMPLER["BRECQ"])


def _brecq_exact(size: float) -> Row:
    """Return BRECQ's table of block losses with the exact solver beside its search."""
    return replace(
        _brecq(size),
        name=f"brecq-exact-{size:g}",
        method="BRECQ, exact solver",
        plan={"method": "exact"},
    )


def _fracbits(size: float, top1: float) -> Row:
    """Return FracBits, which searches while it trains."""
    row = _sized("fracbits", "FracBits-PACT", size, top1, protocol="ours", plan=_PAPER)
    return replace(row, train="fracbits-pact", note=SIMPLER["FracBits-PACT"])


def _ours(size: float, **plan: Any) -> Row:
    """Return this library's own method, at the same size."""
    settings = {"choices": (2, 3, 4), **_PAPER, **plan}
    return _sized("ours", "ompq (ours)", size, protocol="ours", plan=settings)


def _trained(method: str, top1: float, budget: str = ANYTHING, **more: Any) -> Row:
    """Return another method, trained by the recipe of its name."""
    name = {"OneBitwidth": "one-bitwidth"}.get(method, method.lower())
    plan = {**_PAPER, **more.pop("plan")}
    note = "; ".join(text for text in (more.pop("note", ""), SIMPLER[method]) if text)
    more = {"protocol": "ours", "train": name, "plan": plan, "note": note, **more}
    return Row(name, method, top1, budget, **more)


def _as_protocol(
    method: str,
    protocol: str,
    name: str,
    top1: float,
    budget: str = ANYTHING,
    **plan: Any,
) -> Row:
    """Return a row that is planned and trained by the same protocol."""
    more: dict[str, Any] = {"protocol": protocol, "plan": plan, "train": protocol}
    return Row(name, method, top1, budget, **more, note=SIMPLER.get(method, ""))


def _published(bits: str, top1: float, **more: Any) -> Row:
    """Return the authors' own bits, beside those that are planned anew."""
    kind, _, rest = bits.partition("-")
    row = Row(f"published-{rest.partition('-')[2]}", "OMPQ, published bits", top1)
    train = None if kind == "ptq" else "paper-qat"
    return replace(row, bits=bits, protocol=f"paper-{kind}", train=train, **more)


_qat = partial(_as_protocol, "OMPQ", "paper-qat")
_hawq = partial(_as_protocol, "HAWQ-V3", "hawq-v3")

_ENDS_NOTE = "8 bits at both ends, which give the paper's size; it calls them float"
_PACT_5: dict[str, Any] = {"plan": _same(5, 5, pinned=ENDS), "note": _ENDS_NOTE}
_LQ_4: dict[str, Any] = {"plan": _same(4, 32, pinned=ENDS), "note": _ENDS_NOTE}
_QAT_18 = (
    _baseline(73.09, 44.6, 1858),
    _costing(_trained("RVQuant", 70.01, plan=_same(8, 8)), 11.1, 116),
    _costing(_hawq("hawq-v3-8", 71.56, **_same(8, 8)), 11.1, 116),
    _costing(_qat("ompq-a8", 72.30, "6.7MiB"), 6.7, 97),
    _costing(_published("qat-resnet18-6.7-a8", 72.30), 6.7, 97),
    _costing(_trained("PACT", 69.80, **_PACT_5), 7.2, 74),
    _costing(_trained("LQ-Nets", 70.00, **_LQ_4), 5.8, 225),
    _costing(_hawq("hawq-v3-mixed", 70.22, HALFWAY), 6.7, 72),
    _costing(_qat("ompq-a6", 72.08, "6.7MiB", activation_choices=(6,)), 6.7, 75),
    _costing(_published("qat-resnet18-6.7-a6", 72.08), 6.7, 75),
)
_REINFORCED: dict[str, Any] = {
    "plan": {"activation_choices": (32,)},
    "train": "ours",
    "search": "reinforce",
}
_MULTIPLIED: dict[str, Any] = {
    "plan": {"choices": (4,)},
    "search": "channels",
}
_QAT_50 = (
    _baseline(77.72, 97.8, 3951),
    _costing(_trained("PACT", 76.70, **_PACT_5), 16.0, 133),
    _costing(_trained("LQ-Nets", 76.40, **_LQ_4), 13.1, 486),
    _costing(_trained("RVQuant", 75.60, plan=_same(5, 5, pinned=ENDS)), 16.0, 101),
    _costing(_trained("HAQ", 75.48, "9.62MiB", **_REINFORCED), 9.62, 520),
    _costing(_trained("OneBitwidth", 76.70, "12.3MiB", **_MULTIPLIED), 12.3, 494),
    _costing(_hawq("hawq-v3-mixed", 75.39, HALFWAY), 18.7, 154),
    _costing(_qat("ompq-16", 76.20, "16.0MiB", activation_choices=(5,)), 16.0, 141),
    _costing(_published("qat-resnet50-16.0-a5", 76.20), 16.0, 141),
    _costing(_qat("ompq-18.7", 76.28, "18.7MiB", activation_choices=(5,)), 18.7, 156),
    _costing(_published("qat-resnet50-18.7-a5", 76.28), 18.7, 156),
)
_UNIFORM = {"mib": 5.81}  # of ResNet-18 with 4 bits, and 8 bits at both ends
_ZEROQ = Row(
    "zeroq",
    "ZeroQ",
    21.20,
    paper=_UNIFORM,
    protocol="ours",
    plan=_same(4, 4, pinned=ENDS, **_PAPER),
    quantize={**_MINMAX, "equalize": False, "restore_moments": False},
    reconstruct=False,
    distilled=True,
    note=SIMPLER["ZeroQ"],
)
_BRECQ_DISTILLED = Row(
    "brecq-distilled",
    "BRECQ, distilled",
    69.32,
    paper=_UNIFORM,
    protocol="brecq",
    plan=_same(4, 4, method="exact", pinned={**ENDS, **_STEM, "@first": (8, 32)}),
    distilled=True,
    note=SIMPLER["BRECQ"],
)
_PTQ_18 = (
    _baseline(71.08, 44.6),
    _fracbits(4.5, 69.10),
    _ompq(4.5, 68.69, plan=_FOUR),
    _ompq(4.5, 69.94),
    _published("ptq-resnet18-4.5", 69.94, paper={"mib": 4.5}),
    _ours(4.5),
    _ours(4.5, **_FOUR),
    _ZEROQ,
    _BRECQ_DISTILLED,
    _trained("PACT", 69.20, plan=_same(4, 4, pinned=ENDS), paper=_UNIFORM),
    replace(_hawq("hawq-v3-4", 68.45, **_same(4, 4)), paper=_UNIFORM),
    _fracbits(5.81, 69.70),
    _ompq(5.5, 69.38, plan=_FOUR),
    _ours(5.5, **_FOUR),
    _brecq(4.0, 68.82),
    _brecq_exact(4.0),
    _ompq(4.0, 69.41),
    _published("ptq-resnet18-4.0", 69.41, paper={"mib": 4.0}),
    _ours(4.0),
)
_PTQ_MOBILE = (
    _baseline(72.49, 13.4),
    _brecq(1.3, 68.99),
    _brecq_exact(1.3),
    _ompq(1.3, 69.62),
    _published("ptq-mobilenet_v2-1.3", 69.62, paper={"mib": 1.3}),
    _ours(1.3),
    _fracbits(1.84, 69.90),
    _brecq(1.5, 70.28),
    _brecq_exact(1.5),
    _ompq(1.5, 71.39, note="71.27 in the paper's abstract"),
    _published("ptq-mobilenet_v2-1.5", 71.39, paper={"mib": 1.5}),
    _ours(1.5),
)

# Tables 1 and 2: ResNet-18 trained, and MobileNetV2 without training.
_FUNCTIONS = {
    "exp(-x)": (72.30, 63.51),
    "-log(x)": (72.26, 63.20),
    "-x": (72.36, 63.0),
    "-x^3": (71.71, None),
    "-exp(x)": (None, None),
}
_GRANULARITIES = {
    "layer": (72.51, 69.37),
    "block": (72.52, 69.10),
    "stage": (72.47, 68.86),
    "net": (72.31, 63.99),
}
_TRAINED = {"protocol": "paper-qat", "train": "paper-qat"}
_ENDS = ("@first", "@last")  # which the paper's training pins


def _ablation(
    name: str, top1: float | None, budget: str, settings: Any, **more: Any
) -> Row:
    """Return a row with other settings of ORM, which replace the protocol's."""
    plan, beta = {"orm": OrmSettings(**settings)}, settings.get("beta")
    return Row(name, name, top1, budget, plan=plan, at=beta, **more)


def _ablated(
    setting: str, table: Mapping[str, Sequence[float | None]], *budgets: str
) -> tuple[list[Row], list[Row]]:
    """Return the rows of one setting, trained and without training."""
    trained = [
        _ablation(one, top1, budgets[0], {setting: one, "exclude": _ENDS}, **_TRAINED)
        for one, (top1, _) in table.items()
    ]
    rest = [
        _ablation(one, top1, budgets[1], {setting: one})
        for one, (_, top1) in table.items()
    ]
    return trained, rest


def _sizes(*sizes: float) -> list[Row]:
    """Return OMPQ, BRECQ and ours at several sizes, and uniform bits."""
    unified = [
        Row(f"unified-{b}", "unified", protocol="brecq", plan=_same(b, 8))
        for b in (2, 3, 4)
    ]
    mixed = [make(size) for size in sizes for make in (_ompq, _brecq, _ours)]
    return [*mixed, *unified]


# HAWQ takes 50 iterations for each layer, as the paper counts them.
_HESSIAN, _ROUNDS = {"score": Hessian(probes=50)}, "100 rounds in the paper"


def _search(name: str, method: str, note: str = "", **more: Any) -> Row:
    """Return a row that measures what choosing the bits costs."""
    return Row(
        name, method, **{"budget": "4.0MiB", "measure": "plan", "note": note, **more}
    )


_RANDOM_LISTS = 16  # of bits, whose orthogonality is compared with their accuracy
_COSTS = (
    _search(
        "fracbits",
        "FracBits",
        "searches while it trains, 120 epochs",
        measure="published",
        budget=ANYTHING,
        paper={"images": 1_200_000},
    ),
    _search("hawq", "HAWQ", "50 probes of the Hessian, as in the paper", plan=_HESSIAN),
    _search("brecq", "BRECQ", _ROUNDS, protocol="brecq", paper={"images": 1024}),
    _search("ompq", "OMPQ", paper={"images": 64}),
    replace(_ours(4.0), name="ours", measure="plan"),
)
_NETWORKS = {
    "resnet18": ("torchvision:resnet18", "ResNet-18", 44.6),
    "resnet50": ("torchvision:resnet50", "ResNet-50", 97.8),
    "mobilenetv2": ("torchvision:mobilenet_v2", "MobileNetV2", 13.4),
}


def _experiment(
    name: str, title: str, rows: Sequence[Row], *top1_and_drawing: Any
) -> Experiment:
    network, shown, size = _NETWORKS[name.rpartition("-")[2]]
    title = f"{title}, {shown}"
    return Experiment(name, title, network, size, tuple(rows), *top1_and_drawing)


def _figures(network: str, size: float) -> list[tuple[Any, ...]]:
    """Return the paper's figures of a network, with bits for a size in MiB."""
    random = [
        Row(
            f"random-{seed}",
            "random bits",
            budget=f"{size}MiB",  # one size: points would rise with it
            plan={
                "score": Random(seed),
                "method": "exact",
                "activation_choices": (FLOAT_BITS,),
            },
            measure="orthogonality",
            at=seed,
        )
        for seed in range(_RANDOM_LISTS)
    ]
    layers = [Row(f"{b}-bits", "layers", measure="layer", at=b) for b in range(2, 9)]
    bits = [replace(_ompq(size), measure="plan")]
    method = [replace(_ompq(size), measure="method")]
    drawn = (
        ("method", "From the network to its bits", method, None, "method"),
        ("orm-accuracy", "Orthogonality and accuracy", random, None, "scatter"),
        (
            "orthogonality-bits",
            "Orthogonality and bits of layers",
            layers,
            None,
            "layer",
        ),
        ("bits", f"Bits at {size:g} MiB", bits, None, "bits"),
    )
    return [(f"figure-{name}-{network}", *rest) for name, *rest in drawn]


_MATRICES = [
    Row(f"{count}-samples", "ORM", measure="matrix", at=count)
    for count in (8, 16, 32, 64)
]
_SHAPES = [
    Row(
        shape,
        "two random matrices",
        measure="time",
        at=shape,
        paper={"inner_product": inner, "norm": norm, "ratio": ratio},
    )
    for shape, inner, norm, ratio in (
        ("10000x100", 18.42, 0.34, 54),
        ("100x10000", 0.12, 8.40, 70),
    )
]
_BETAS = [
    _ablation(f"beta-{beta:g}", None, "0.9MiB", {"beta": beta})
    for beta in (0.01, 0.1, 1.0, 10.0, 100.0)
]
_TRAINED_FUNCTIONS, _OTHER_FUNCTIONS = _ablated(
    "decreasing", _FUNCTIONS, "6.7MiB", "0.9MiB"
)
_TRAINED_LEVELS, _OTHER_LEVELS = _ablated(
    "granularity", _GRANULARITIES, "5bits", "3bits"
)
_PTQ, _THREE = "Post-training quantization", "OMPQ, BRECQ and one width"
_FALLING, _CHOOSING = "Decreasing functions", "What choosing the bits costs"
_BY_SAMPLES = "ORM by number of samples"
_TIMES = "ORM by Gram matrices and by features, in seconds"
_SMALL, _LARGE = _sizes(0.9, 1.1, 1.3, 1.5), _sizes(3.5, 4.0, 4.5)
# Name, title, rows, published top-1 of the float network, drawing.
_ALL: tuple[tuple[Any, ...], ...] = (
    ("table-functions-resnet18", f"{_FALLING}, training", _TRAINED_FUNCTIONS, 73.09),
    ("table-functions-mobilenetv2", _FALLING, _OTHER_FUNCTIONS, 72.49),
    ("table-granularity-resnet18", "Granularity, training", _TRAINED_LEVELS, 73.09),
    ("table-granularity-mobilenetv2", "Granularity", _OTHER_LEVELS, 72.49),
    ("table-qat-resnet18", "Training", _QAT_18, 73.09),
    ("table-qat-resnet50", "Training", _QAT_50, 77.72),
    ("table-ptq-resnet18", _PTQ, _PTQ_18, 71.08, "accuracy"),
    ("table-ptq-mobilenetv2", _PTQ, _PTQ_MOBILE, 72.49, "accuracy"),
    ("table-calculation-time-resnet18", _TIMES, _SHAPES),
    ("figure-search-cost-resnet18", _CHOOSING, _COSTS, None, "cost"),
    ("figure-ompq-brecq-resnet18", _THREE, _LARGE, 71.08, "accuracy"),
    ("figure-ompq-brecq-mobilenetv2", _THREE, _SMALL, 72.49, "accuracy"),
    ("figure-beta-mobilenetv2", "Beta at 0.9 MiB", _BETAS, 72.49, "beta"),
    *_figures("resnet18", 3.5),
    *_figures("mobilenetv2", 0.9),
    *(
        (f"figure-orm-matrices-{name}", _BY_SAMPLES, _MATRICES, None, "matrix")
        for name in _NETWORKS
    ),
)
EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {name: _experiment(name, *more) for name, *more in _ALL}
)
