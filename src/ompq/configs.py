"""Every configuration, with its defaults, help and limits; settings of published work.

Nothing here imports PyTorch: the command line reads its options from these fields.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from ompq.bit_widths import CODED_BITS, FLOAT_BITS, GROUP_SIZES, WIDTHS
from ompq.configuration_checks import (
    BELOW_ONE,
    COUNT,
    FRACTION,
    INNER,
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    Config,
    setting,
)
from ompq.registry import Names

Accounting = Literal["packed", "paper"]
Storage = Literal["fixed", "coded"]
Decreasing = Literal["exp(-x)", "-log(x)", "-x", "-x^3", "-exp(x)"]
Granularity = Literal["layer", "block", "stage", "net"]
WeightKind = Literal["affine", "midrise", "midtread", "symmetric", "gguf"]
RangeMethod = Literal["minmax", "percentile", "mse", "fisher", "shrink"]
BlockLossKind = Literal["squared", "fisher", "low_rank_fisher"]
LatencyTable: TypeAlias = Mapping[str, Mapping[str, float]]  # unit → "W4A8" → ms
# Weight bits; weight and activation bits; or a Choice.
Pin: TypeAlias = int | tuple[int | None, int] | tuple[int, int, float]
# What a tensor that a network returns is; see ompq.outputs.
OutputKind: TypeAlias = Literal[
    "classes", "values", "embedding", "detections", "ignored"
]
OUTPUT_KINDS: tuple[str, ...] = get_args(OutputKind)
ScoreLike: TypeAlias = str | Callable[[Any], Any]  # a name, or a score

# Profiles of runtimes that are included in ompq.
TARGET_NAMES = tuple(
    sorted(one.stem for one in Path(__file__).with_name("target_profiles").iterdir())
)

# Rates that coded units may get; most are low, because these decide the size of a file.
RATES = (1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7)
_WIDTH_TEXT = f"{WIDTHS[0]} to {WIDTHS[-1]}"
# Names of ours that extensions may add to; what they stand for is loaded when used.
SCORE_NAMES = Names(
    "score",
    dict.fromkeys(
        (
            *("orm", "orm_distortion", "output_divergence", "random", "sensitivity"),
            *("smallest_first", "weight_noise"),
        )
    ),
)
SOLVER_NAMES = Names(
    "solver",
    dict.fromkeys(("exact", "relax", "relax-round", "relax-dfs")),
)
WEIGHT_RULE_NAMES = Names("weight rule", dict.fromkeys(("stored", "minmax")))


@dataclass(frozen=True, kw_only=True)
class OrmSettings(Config):
    """How ORM is measured and turned into importance."""

    beta: float = setting(
        1.0, "How strongly layers differ in importance: theta = exp(−beta · gamma)."
    )
    centred: bool = setting(
        False,
        "Centre the features, as the paper's released code does; the paper does not.",
    )
    decreasing: Decreasing = setting(
        "exp(-x)", "Importance theta as a function of gamma, the sum of a layer's ORM."
    )
    granularity: Granularity = setting(
        "layer",
        "What ORM compares. All layers of a block, stage or net get the same bits, as "
        "in the authors' code.",
    )
    exclude: tuple[str, ...] = setting(
        (), "Patterns of units to leave out, such as pinned ones."
    )
    per_function: bool = setting(
        False,
        "Divide gamma by the number of other functions, so that beta means the same at "
        "any depth.",
    )


def output_problem(output: str) -> str:
    """Return the requirement that these output kinds break, or ""."""
    known = isinstance(output, str)  # users of Python may give anything
    if known and all(kind in OUTPUT_KINDS for kind in output.split(",")):
        return ""
    return (
        f"{', '.join(OUTPUT_KINDS[:-2])} or {OUTPUT_KINDS[-2]}; with several outputs, "
        "one of these or ignored for each, joined by commas"
    )


def parse_output(text: object) -> str:
    """Return the output kinds that a file names, if they are valid."""
    requirement = output_problem(text) if isinstance(text, str) else "text"
    if requirement:
        raise ValueError(f"output must be {requirement}, not {text!r:.40}")
    return str(text)


def _choices_problem(choices: Sequence[Any]) -> str:
    """Return the requirement that these choices break, or ""."""
    activations = (*WIDTHS, FLOAT_BITS)
    for one in choices:
        weight, activation = one if isinstance(one, tuple) else (one, WIDTHS[-1])
        if weight not in WIDTHS or activation not in activations:
            break
    else:
        if choices:
            return ""
    return (
        f"weight bits from {_WIDTH_TEXT}, or pairs of weight bits and activation bits, "
        f"which may also be {FLOAT_BITS}, for example (2, 4, 8) or ((4, 4), (8, 8))"
    )


def _activations_problem(bits: Sequence[int]) -> str:
    if bits and all(one in (*WIDTHS, FLOAT_BITS) for one in bits):
        return ""
    return f"bits from {_WIDTH_TEXT}, or {FLOAT_BITS} for float, for example (4, 8)"


def _group_problem(size: int) -> str:
    known = ", ".join(map(str, GROUP_SIZES))
    return "" if size in GROUP_SIZES else f"one of {known}, or None"


def _rates_problem(rates: Sequence[float]) -> str:
    return "" if rates else "one or more numbers of bits per weight"


def _pins_problem(pins: Mapping[str, Any]) -> str:
    if all(isinstance(name, str) and _is_pin(bits) for name, bits in pins.items()):
        return ""
    return (
        "patterns with their bits: 4, (4, 8), (None, 8) for the input alone, "
        f"(8, 8, 2.5) for coded weights, or {FLOAT_BITS} for float; widths are from "
        f"{_WIDTH_TEXT}"
    )


def _is_pin(bits: Any) -> bool:
    """Return whether a value fixes the bits of a unit's weights, input or both."""
    widths = (*WIDTHS, FLOAT_BITS)
    if not isinstance(bits, tuple | list):
        return bits in widths
    if len(bits) == 3:
        weight, activation, rate = bits
        coded = weight == CODED_BITS and 0 < rate <= CODED_BITS
        return activation in widths and (coded or (rate == 0 and weight in widths))
    return len(bits) == 2 and bits[0] in (None, *widths) and bits[1] in widths


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """How a plan is made."""

    score: ScoreLike = setting(
        "sensitivity",
        "How the damage of choices is estimated: the name of a score, or a function.",
        names=SCORE_NAMES,
    )
    orm: OrmSettings | None = setting(
        None,
        "How a score that uses ORM measures it. Default: the score's own settings.",
    )
    choices: tuple[int | tuple[int, int], ...] = setting(
        (2, 3, 4, 5, 6, 8),
        "Bit widths to choose from for weights. Pairs are widths of weights and inputs "
        "that go together, whatever the widths for inputs.",
        metavar="BITS",
        check=_choices_problem,
    )
    storage: Storage = setting(
        "fixed",
        "Whether to also offer entropy-coded weights: the same accuracy in a smaller "
        "file. In memory each of them takes a byte.",
    )
    rates: tuple[float, ...] = setting(
        RATES,
        "Bits per weight, in the file, to choose from for coded weights.",
        Bounds(0, CODED_BITS, low_open=True, high_open=False),
        metavar="BITS",
        check=_rates_problem,
    )
    group_size: int | None = setting(
        None,
        "Number of inputs of a linear layer that share a scale in each output channel; "
        "by default each channel has one scale. More scales take more bytes and reduce "
        "the damage by outliers. Convolutions and coded weights have no groups.",
        metavar="NUMBER",
        check=_group_problem,
    )
    activation_choices: tuple[int, ...] = setting(
        (8,),
        "Bit widths to choose from for inputs of layers; 32 keeps them float.",
        metavar="BITS",
        check=_activations_problem,
    )
    pinned: Mapping[str, Pin] = setting(
        MappingProxyType({}),
        "Pattern → bits of units that are not chosen; later patterns override earlier "
        "ones. 32 keeps a unit float; (None, 8) fixes only the bits of a unit's input.",
        check=_pins_problem,
    )
    tie: bool = setting(
        True, "Whether layers whose outputs are added have the same bits."
    )
    tied: tuple[str, ...] = setting(
        (), "Patterns; all layers that match one get the same bits.", metavar="PATTERN"
    )
    accounting: Accounting = setting(
        "packed", "Count bytes as in packed files, exactly, or as in the paper."
    )
    method: str | Callable[[Any], Any] = setting(
        "exact",
        "How bits are chosen: the optimum, or a published approximation.",
        names=SOLVER_NAMES,
    )
    latency: LatencyTable | None = setting(
        None, "Milliseconds of each unit at each choice, for a budget in ms."
    )
    target: object = setting(
        None,
        "Where the network will run: a profile, its file, or the name of one that "
        "comes with ompq. Layers get only bits that run there.",
        metavar="NAME",
    )
    strict: bool = setting(False, "Fail if anything stays float.")
    output: str | None = setting(
        None,
        "What the network returns: classes (logits), values (such as a depth or an "
        "image), embedding or detections; with several outputs, one of these or "
        "ignored for each, joined by commas. By default it is recognised.",
        metavar="KIND",
        check=output_problem,
    )

    @classmethod
    def from_protocol(cls, name: str) -> "PlanConfig":
        """Return the settings of published work, by its name: ``"paper-qat"``.

        Raises:
            ValueError: The name is unknown.
        """
        return PLAN_PROTOCOLS.find(name)


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(Config):
    """How a network is quantized before any reconstruction."""

    weight_grid: WeightKind = setting(
        "affine", "Kind of grid for the weights; gguf means those of GGUF's types."
    )
    weight_range: Literal["search", "minmax", "shrink"] = setting(
        "search",
        "How clipping ranges of weights are found: by the least error, by all weights "
        "of a channel, or by BRECQ's search, which scales both ends by one factor.",
    )
    weight_power: float = setting(
        2.0, "The search minimises the sum of |error| to this power.", POSITIVE
    )
    output_error: bool = setting(
        True,
        "Whether weights are rounded with error feedback, for a small error of each "
        "layer's output, instead of each to nearest. This applies up to 6 bits, above "
        "which nothing is gained, and to fixed widths only after a search with a power "
        "of 2.",
    )
    corrected_targets: bool = setting(
        False,
        "Whether each layer makes up for the errors of the layers before it, as far as "
        "the layer's output for held-out samples gains from it. The result is kept if "
        "the whole network is then nearer to the float one, on samples that take no "
        "part in this: at least 32, so 256 samples in all. This needs error feedback "
        "and restored moments, and takes about twice the time.",
    )
    equalize: bool = setting(
        True,
        "Whether to equalize the ranges of channels that only a depthwise convolution "
        "reads, or a linear layer after a LayerNorm, so that one step suits them all "
        "better.",
    )
    equalize_from: int = setting(
        6,
        "Minimum weight bits of both layers for equalization before a depthwise "
        "convolution; with fewer it costs accuracy. After a LayerNorm, the error of "
        "the linear layer's output decides instead.",
        NOT_NEGATIVE,
    )
    activation_range: RangeMethod = setting(
        "fisher",
        "How clipping ranges of activations are found: fisher minimises the effect on "
        "the network's output, mse the error of the tensor itself; minmax and "
        "percentile cover all or nearly all of its values; shrink is BRECQ's search.",
    )
    restore_moments: bool = setting(
        True,
        "Whether scales and biases are corrected so that each channel keeps its mean "
        "and spread in spite of rounding.",
    )
    sum_bits: Literal[8, 16] = setting(
        8,
        "Bits of what residual sums read and return. With 8, a tensor that layers "
        "read as well has the bits of these layers. With 16, they round it once more "
        "(HAWQ-V3). Plans assume 8: budgets for activations, and bytes of packed "
        "files, do not include what 16 takes on top.",
    )
    group_size: int | None = setting(
        None,
        "Number of inputs of a linear layer that share a scale in each output channel; "
        "None means one scale per channel. A plan has its own (PlanConfig).",
        check=_group_problem,
    )
    batch_size: int = setting(64, "Maximum number of samples per forward pass.", COUNT)
    output: str | None = setting(
        None,
        "What the network returns, as for a plan. By default it is as planned, or else "
        "recognised.",
        metavar="KIND",
        check=output_problem,
    )

    @classmethod
    def from_protocol(cls, name: str) -> "QuantizeConfig":
        """Return the settings of published work, by its name: ``"paper-qat"``.

        Raises:
            ValueError: The name is unknown.
        """
        return QUANTIZE_PROTOCOLS.find(name)


@dataclass(frozen=True, kw_only=True)
class RoundingConfig(Config):
    """How the rounding of one block is learned."""

    iterations: int = setting(1_000, "Reconstruction steps per block (Adam).", COUNT)
    batch_size: int = setting(64, "Maximum number of samples per step.", COUNT)
    step_elements: int = setting(
        1 << 19,
        "Approximate number of output elements per step. Blocks with large outputs use "
        "fewer samples, but at least eight.",
        COUNT,
    )
    travel: float = setting(
        5.0,
        "How far a weight can move in total, in grid steps. The learning rate of the "
        "rounding is this over the iterations, so that short runs converge too.",
        NOT_NEGATIVE,
    )
    activation_learning_rate: float = setting(
        4e-5,
        "For activation steps below 8 bits; 0 freezes them. Above 1,000 iterations, "
        "this rate and the next two are lowered.",
        NOT_NEGATIVE,
    )
    scale_learning_rate: float = setting(
        2e-3, "For the logarithm of weight scales; 0 freezes them.", NOT_NEGATIVE
    )
    bias_learning_rate: float = setting(
        3e-3, "For biases; 0 freezes them.", NOT_NEGATIVE
    )
    warmup: float = setting(
        0.2,
        "Fraction of the iterations before weights are driven to grid points.",
        FRACTION,
    )
    tail: float = setting(
        0.1,
        "Fraction of the iterations, at the end, in which the rounding is fixed and "
        "only scales, activation steps and biases are learned.",
        FRACTION,
    )
    drive: float = setting(
        20.0,
        "Final strength of the drive to the nearer grid point, relative to the "
        "learning rate. It grows from 0 and bypasses Adam, like weight decay in "
        "AdamW, so that important and unimportant weights settle at the same pace.",
        NOT_NEGATIVE,
    )
    exponent: tuple[float, float] = setting(
        (8.0, 2.0),
        "Shape of the drive, after the warm-up and at the end; the higher it is, the "
        "less the drive moves weights halfway between two grid points.",
        POSITIVE,
    )
    price: float = setting(
        0.1,
        "Price of a bit in entropy-coded layers while they learn, relative to its "
        "marginal value before learning. It rises while codes exceed their limit. With "
        "0, codes are lowered to the limit only at the end.",
        NOT_NEGATIVE,
    )
    drop: float = setting(
        0.0,
        "Probability that an activation stays unrounded while learning (QDrop).",
        FRACTION,
    )
    float_inputs: float = setting(
        0.5,
        "Probability that an input element of the block is taken from the float "
        "network while learning. This keeps the block from overfitting to the errors "
        "that earlier blocks make on these few samples.",
        FRACTION,
    )


@dataclass(frozen=True, kw_only=True)
class TuningConfig(Config):
    """How a reconstructed network is tuned as a whole."""

    epochs: int = setting(10, "Passes over the samples.", COUNT)
    batch_size: int = setting(32, "Number of samples per Adam step.", COUNT)
    # The default was the best for held-out calibration images of DeiT-tiny with 3 and
    # with 4 bits.
    learning_rate: float = setting(
        3e-4,
        "For biases, the logarithm of weight scales, and the weights and biases of "
        "norms; it follows a cosine to 0.",
        NOT_NEGATIVE,
    )
    activation_learning_rate: float = setting(
        5e-3,
        "For activation steps below 8 bits, relative to each step; likewise.",
        NOT_NEGATIVE,
    )
    always: bool = setting(
        False,
        "Whether to tune networks whose activations all have 8 bits or more, too. They "
        "gain little.",
    )

    def steps(self, samples: int) -> int:
        """Return the number of Adam steps."""
        return self.epochs * max(samples // self.batch_size, 1)


def _method_problem(method: Any) -> str:
    own = isinstance(method, RoundingConfig)
    return "" if own or hasattr(method, "phases") else "a RoundingConfig or a method"


@dataclass(frozen=True, kw_only=True)
class ReconstructConfig(Config):
    """How blocks are reconstructed."""

    rounding: RoundingConfig | Any = setting(
        RoundingConfig(),
        "How one block is optimised, or another method of reconstruction: an object "
        "with phases of its own.",
        check=_method_problem,
    )
    tuning: TuningConfig | None = setting(
        TuningConfig(),
        "How the whole network is tuned afterwards, by default if an activation has "
        "fewer than 8 bits; None turns it off. Other methods, networks with several "
        "outputs and networks in little device memory are not tuned.",
    )
    loss: BlockLossKind = setting(
        "squared",
        "The squared error of the block's output; fisher weights each element by the "
        "squared gradient of the network's loss; low_rank_fisher is the mean of the "
        "squared error and of that weighed by the Fisher matrix over channels, which "
        "all samples and positions share.",
    )
    fisher_rank: int = setting(16, "Number of eigenvectors of that matrix.", COUNT)
    merge: int = setting(
        1,
        "Reconstruct up to this many neighbouring blocks together, where each is the "
        "sole consumer of the previous one's output. 2 helps transformers with low-bit "
        "activations.",
        COUNT,
    )
    batch_size: int = setting(
        64, "Number of samples per forward pass while inputs are gathered.", COUNT
    )
    device_bytes: int = setting(
        16 << 30,
        "Maximum size of a block's inputs and targets on the device; larger ones stay "
        "in host memory. Above half of it, each block is gathered by a new pass from "
        "the network's input, which is slower in deep networks.",
        NOT_NEGATIVE,
    )
    seed: int = setting(0, "Seed of the sample order.")


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """What is written into a file for a runtime, and how the file is verified."""

    network: str = setting("", "The network's name: torchvision:resnet18.")
    preprocessing: Mapping[str, Any] | None = setting(
        None,
        "How inputs are made, as NamedModel.preprocessing says it; it is written into "
        "the file. For images, the program run.py is written beside the file.",
    )
    classes: tuple[str, ...] = setting(
        (),
        "Names of the classes, which are written into the file, unless a budget limits "
        "the ONNX file: plans do not know them.",
    )
    budget: Any = setting(
        None, "A file that exceeds the limit that a budget sets for it is not written."
    )
    engine_images: int = setting(
        8, "How many samples the integer engine, which is slow, runs.", COUNT
    )
    opset: int = setting(21, "Version of the operator set of an ONNX file.")
    saturation_safe: bool = setting(
        True,
        "Whether an ONNX file is also right on processors without VNNI, whose 8-bit "
        "kernels saturate. Weights of 8 bits are then restricted to about 7 in "
        "convolutions and unsigned elsewhere.",
    )
    float_ends: bool = setting(
        True,
        "Whether inputs and outputs of a .tflite or .pte file are floats; if not they "
        "are signed bytes, as microcontrollers want them.",
    )


@dataclass(frozen=True, kw_only=True)
class RefineConfig(Config):
    """How allocations are chosen and measured."""

    count: int = setting(20, "Largest number of allocations to measure.", COUNT)
    seconds: float | None = setting(
        None,
        "Time limit for starting another measurement; None for no limit.",
        POSITIVE,
    )
    patience: int = setting(
        12, "Number of measurements without improvement before it stops.", COUNT
    )
    by: Literal["round", "reconstruct"] = setting(
        "round",
        "How each allocation is measured: as it is rounded, or after a short "
        "reconstruction, which is slower and closer to the final network.",
    )
    iterations: int = setting(250, "Steps per block of that reconstruction.", COUNT)
    trusted: float = setting(
        1.0,
        "Divergence, in nats, up to which rounding is taken to predict the "
        "reconstructed network. If every start diverges more, the plan keeps its bits. "
        "Use infinity if the network will not be reconstructed.",
        Bounds(0, inf, low_open=True, high_open=False),
    )
    scores: tuple[ScoreLike, ...] = setting(
        ("weight_noise", "output_divergence", "blend"),
        "Scores whose optima are measured first, besides the plan's own.",
        names=SCORE_NAMES,
    )
    held_back: float = setting(
        0.5,
        "Fraction of the samples, taken from the end, that are only measured on.",
        INNER,
    )
    margin: float = setting(
        3.0,
        "How many standard errors better other bits must be to replace the plan's. "
        "The error is that of the difference, sample by sample. Among 20 equally "
        "good candidates, one appears 2 errors better in a third of runs, and 3 errors "
        "better in one run of 40. With 0, the best measured allocation is chosen, "
        "which is often best by chance alone.",
        NOT_NEGATIVE,
    )
    noise: float = setting(
        0.03,
        "Smallest expected relative error of a measurement. Together with the spread "
        "it decides how closely the factors follow the measurements.",
        POSITIVE,
    )
    spread: float = setting(0.7, "Expected deviation of a factor from 1.", POSITIVE)
    seed: int = setting(
        0,
        "Seed for the random perturbations used when the optimum was already measured.",
    )


@dataclass(frozen=True, kw_only=True)
class Goal(Config):
    """How close a quantized network must stay to the float one, in every respect."""

    max_drop: float | None = setting(
        None,
        "Points of top-1 that it may lose on labelled images, or the loss of the "
        "metric, in its own unit.",
        metavar="POINTS",
    )
    min_agreement: float | None = setting(
        None,
        "Fraction of the images on which it must give the float network's answer.",
        Bounds(0, 1, low_open=True, high_open=False),
        metavar="SHARE",
    )
    max_divergence: float | None = setting(
        None,
        "Largest mean KL divergence from the float network, in nats.",
        POSITIVE,
        metavar="NATS",
    )
    metric: Callable[..., Any] | None = setting(
        None,
        "A function of the network's output and the targets of a batch that returns "
        "one number; higher is better.",
    )

    def __post_init__(self) -> None:
        """Check that something is asked for that can be measured."""
        super().__post_init__()
        if not self.limits:
            raise ValueError(
                "the goal is empty: give max_drop, min_agreement or max_divergence"
            )
        if self.max_drop is not None and hasattr(self.metric, "of_mean"):
            raise ValueError(
                f"max_drop={self.max_drop:g} needs a metric where higher is better. "
                "For perplexity lower is better: use max_divergence"
            )

    @property
    def limits(self) -> dict[str, float]:
        """The limits that were given, by name."""
        return {n: v for n in _GOALS if (v := getattr(self, n)) is not None}

    def __str__(self) -> str:
        return ", ".join(_GOALS[name].format(v) for name, v in self.limits.items())


_GOALS = {
    "max_drop": "drop at most {:g}",
    "min_agreement": "agreement at least {:.2%}",
    "max_divergence": "divergence at most {:g}",
}


@dataclass(frozen=True, kw_only=True)
class SmallestConfig(Config):
    """How the smallest network that meets a goal is searched for."""

    reconstruct: ReconstructConfig | None = setting(
        ReconstructConfig(), "How networks are reconstructed; None only rounds."
    )
    rounded: int = setting(8, "Largest number of sizes to try rounded.", COUNT)
    reconstructed: int = setting(
        4, "Largest number of sizes to try reconstructed.", NOT_NEGATIVE
    )
    tolerance: float = setting(
        0.01,
        "The search ends when the remaining range of sizes is smaller than this "
        "fraction of its upper end.",
        NOT_NEGATIVE,
    )
    held_back: float = setting(
        0.5,
        "Fraction of the samples, taken from the end, that networks are measured on if "
        "there are no batches.",
        INNER,
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """How a quantized network is trained."""

    epochs: int = setting(10, "Passes over the training data.", COUNT)
    batch_size: int = setting(
        128,
        "Images per step, over all processes. Ready-made batches keep their own size.",
        COUNT,
    )
    learning_rate: float = setting(
        1e-3,
        "Initial learning rate of weights and biases, with cosine decay to 0.",
        POSITIVE,
    )
    warmup: int = setting(0, "Steps of linear warm-up.", NOT_NEGATIVE)
    momentum: float = setting(0.9, "Momentum of SGD.", BELOW_ONE)
    weight_decay: float = setting(
        1e-4, "Weight decay; scales never decay.", NOT_NEGATIVE
    )
    decay_all: bool = setting(False, "Whether biases and norms decay as well.")
    start: Literal["quantized", "float"] = setting(
        "quantized",
        "Whether to start from the weights of the quantized network or those of the "
        "float network, which is then needed.",
    )
    learn_weight_scales: bool = setting(
        True, "Whether the scales of weights are learned (LSQ) or fixed."
    )
    weights: str | Callable[[Any], Any] = setting(
        "stored",
        "How weights are rounded. stored starts from the network's scales and zero "
        "points; the other rules do not learn scales. minmax (HAWQ-V3) uses symmetric "
        "grids that follow the largest weight of each channel. A rule of your own is "
        "a function of the network that returns a WeightRule.",
        names=WEIGHT_RULE_NAMES,
    )
    code_penalty: float = setting(
        0.0,
        "Loss for each bit that a coded weight takes on average. It makes the packed "
        "file smaller than planned; 0 trains on accuracy alone.",
        NOT_NEGATIVE,
    )
    activations: Literal["step", "clip", "ema", "fixed"] = setting(
        "step",
        "How the ranges of activations change: step learns their step (LSQ), clip "
        "their upper end (PACT), ema follows a running minimum and maximum (HAWQ-V3), "
        "and fixed keeps them.",
    )
    range_momentum: float = setting(
        0.99, "Momentum of the running minimum and maximum.", BELOW_ONE
    )
    step_rate: float = setting(
        0.1,
        "Learning rate of scales, as a multiple of that of weights.",
        NOT_NEGATIVE,
    )
    batch_norm: Literal["folded", "fold-and-train"] = setting(
        "folded",
        "How batch norms are trained. folded trains the weight and bias that the norm "
        "was folded into; fold-and-train (HAWQ-V3) keeps the norm, folds it again at "
        "each step, and needs the float network.",
    )
    freeze_norm_epoch: int = setting(
        1,
        "From this epoch on, norms use their running statistics and no longer update "
        "them; before, they use batch statistics.",
        NOT_NEGATIVE,
    )
    distill: float = setting(
        0.0,
        "Weight of the distillation loss against that of the labels; above 0 it needs "
        "the float network.",
        FRACTION,
    )
    temperature: float = setting(
        1.0, "Temperature of the softmax in the distillation loss.", POSITIVE
    )
    label_smoothing: float = setting(
        0.0, "Probability mass that is spread over all classes.", FRACTION
    )
    gradient_norm: float = setting(
        0.0, "Maximum norm of the gradients; 0 does not clip.", NOT_NEGATIVE
    )
    accumulate: int = setting(
        1, "Batches whose gradients are accumulated into one step.", COUNT
    )
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "Precision of training; bfloat16 uses autocast."
    )
    channels_last: bool = setting(
        True, "Whether images and weights are stored channels-last on a GPU."
    )
    compile: bool = setting(False, "Whether to compile the network with torch.compile.")
    cuda_graph: bool = setting(
        False,
        "Whether to record a step as a CUDA graph and replay it. It needs a single "
        "process on a GPU and pays off for small networks.",
    )
    checkpoint_steps: int = setting(
        0, "Steps between checkpoints; 0 writes one per epoch.", NOT_NEGATIVE
    )
    keep: Literal["best", "last"] = setting(
        "best",
        "With validation data, whether to return the best epoch (or the start, if no "
        "epoch is better) or the last.",
    )
    report_steps: int = setting(
        50, "Steps between progress reports, which also check the loss.", COUNT
    )
    tensorboard: str | None = setting(
        None, "Folder for TensorBoard scalars; None for none."
    )
    logger: Literal["none", "wandb", "mlflow"] = setting(
        "none",
        "Experiment tracker that also gets the scalars, through Accelerate.",
    )
    deterministic: bool = setting(
        True,
        "Whether a GPU gives identical results in every run; otherwise it uses the "
        "fastest algorithms.",
    )
    seed: int = setting(0, "Seed of the order of images, augmentation and dropout.")

    def __post_init__(self) -> None:
        """Check what fields require of each other."""
        super().__post_init__()
        stored = self.weights == "stored" and self.batch_norm == "folded"
        if self.code_penalty and not stored:
            raise ValueError(
                f"code_penalty={self.code_penalty:g} needs weights='stored' and "
                f"batch_norm='folded', not {self.weights!r} and {self.batch_norm!r}"
            )

    @classmethod
    def from_protocol(cls, name: str) -> "TrainConfig":
        """Return the settings of published work, by its name: ``"paper-qat"``.

        Raises:
            ValueError: The name is unknown.
        """
        return TRAIN_PROTOCOLS.find(name)

    @property
    def needs_float(self) -> bool:
        """Whether training needs the float network."""
        folds = self.batch_norm == "fold-and-train"
        return self.distill > 0 or folds or self.start == "float"

    @property
    def keeps_plan(self) -> bool:
        """Whether the trained network keeps the planned bits on uniform grids."""
        rule: Any = self.weights
        if isinstance(rule, str):
            rule = WEIGHT_RULE_NAMES[rule]
        return bool(getattr(rule, "keeps_plan", True))


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Config):
    """Settings of the demonstration."""

    budget: str = setting(
        "37KiB",  # about two and a half bits per weight
        "The limit, as for ompq plan.",
        metavar="BUDGET",
    )
    samples: int = setting(512, "Unlabelled digits for calibration.", COUNT)
    iterations: int = setting(100, "Reconstruction steps per block.", COUNT)
    seed: int = setting(0, "Seed for the order of samples and for the noise.")


# Settings by name; "ours" are the defaults. Those of the paper follow its text, in
# which ORM is not centred; the released code centres it. Extensions add other work.
ENDS: Mapping[str, Pin] = MappingProxyType({"@first": (8, 8), "@last": (8, 8)})
PLAN_PROTOCOLS: Names[PlanConfig] = Names(
    "plan protocol",
    {
        "ours": PlanConfig(),
        "paper-ptq": PlanConfig(
            score="orm", choices=(2, 3, 4), accounting="paper", method="relax"
        ),
        "paper-qat": PlanConfig(
            score="orm",
            orm=OrmSettings(exclude=tuple(ENDS)),
            choices=(4, 5, 6, 7, 8),
            pinned=ENDS,
            accounting="paper",
            method="relax",
        ),
    },
    field="protocol",
)
# The paper quantizes as BRECQ does, and trains as HAWQ-V3: training rounds to nearest,
# so it starts from weights that error feedback left alone.
QUANTIZE_PROTOCOLS: Names[QuantizeConfig] = Names(
    "quantize protocol",
    {
        "ours": QuantizeConfig(),
        "paper-ptq": QuantizeConfig(
            weight_range="shrink",
            equalize=False,
            activation_range="shrink",
            restore_moments=False,
        ),
        "paper-qat": QuantizeConfig(sum_bits=16, output_error=False),
    },
    field="protocol",
)
# Published methods of reconstruction come with their settings.
RECONSTRUCT_PROTOCOLS: Names[ReconstructConfig] = Names(
    "reconstruct protocol", {"ours": ReconstructConfig()}, field="protocol"
)
# How much is learned after rounding: nothing, what pays, or all that helps.
EFFORTS: Mapping[str, ReconstructConfig | None] = MappingProxyType(
    {
        "fast": None,
        "default": ReconstructConfig(),
        "best": ReconstructConfig(rounding=RoundingConfig(iterations=2_000)),
    }
)
# The paper trains by HAWQ-V3's recipe, from its released command (--lr 1e-4 --wd 1e-4
# --fold-BN 1 --fix-BN 1 --act-range-momentum 0.99), with a cosine schedule of its own.
# One thing differs: requantization by multipliers and shifts is not simulated in
# training; ompq.finalize applies it. The 16 bits of residual streams are a setting of
# quantize.
TRAIN_PROTOCOLS: Names[TrainConfig] = Names(
    "train protocol",
    {
        "ours": TrainConfig(),
        "paper-qat": TrainConfig(
            epochs=90,
            batch_size=128,
            learning_rate=1e-4,
            weight_decay=1e-4,
            decay_all=True,
            start="float",
            learn_weight_scales=False,
            weights="minmax",
            activations="ema",
            batch_norm="fold-and-train",
            freeze_norm_epoch=0,
        ),
    },
    field="protocol",
)
