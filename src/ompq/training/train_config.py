"""The settings of training, and those of published work."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args, get_type_hints

from ompq.errors import suggestion


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of quantization-aware training.

    Attributes:
        epochs: Passes over the training data.
        batch_size: Images per step, over all processes. Ready-made batches keep
            their own size.
        learning_rate: Initial rate of weights and biases, with cosine decay to 0.
        warmup: Steps of linear warm-up.
        momentum: Momentum of SGD.
        weight_decay: Weight decay; scales never decay.
        decay_all: Whether biases and norms decay as well.
        start: Whether to start from the weights of the ``quantized`` network or those
            of the ``float`` network, which is then needed.
        learn_weight_scales: Whether the scales of weights are learned (LSQ) or fixed.
        weights: How weights are rounded. ``stored`` starts from the network's scales
            and zero points; the other methods do not learn scales. ``minmax`` (HAWQ-V3)
            uses symmetric grids that follow the largest weight of each channel.
            ``dorefa`` (PACT) normalizes tanh w by the layer's maximum and rounds it in
            [0, 1]. The last two have no uniform grid, so their networks run only in
            float: ``lq-nets`` fits the levels of each channel to its weights;
            ``outliers`` (RVQuant) keeps the largest weights of each layer in 16 bits.
        outlier_fraction: Fraction of weights and activations that are outliers.
        widths: ``planned``, or ``learned`` (FracBits; needs ``weights="dorefa"``).
            Learned widths start as planned, become whole after 80 % of the epochs, and
            take no more bits in total than planned.
        width_penalty: Loss for each bit per weight above or below the planned average
            while widths are learned.
        code_penalty: Loss for each bit that a coded weight takes on average. It makes
            the packed file smaller than planned; 0 trains on accuracy alone.
        activations: How the ranges of activations change: ``step`` learns their step
            (LSQ), ``clip`` their upper end (PACT), ``ema`` follows a running minimum
            and maximum (HAWQ-V3), and ``fixed`` keeps them. ``outliers`` (RVQuant) is
            ``ema`` without the largest values, which are kept in 16 bits.
        range_momentum: Momentum of the running minimum and maximum.
        step_rate: Learning rate of scales, as a multiple of that of weights.
        batch_norm: ``folded`` trains the weight and bias that the norm was folded
            into; ``fold-and-train`` (HAWQ-V3) keeps the norm, folds it again at each
            step, and needs the float network.
        freeze_norm_epoch: From this epoch on, norms use their running statistics and no
            longer update them; before, they use batch statistics.
        distill: Weight of the distillation loss against that of the labels, 0 to 1;
            above 0 it needs the float network.
        temperature: Temperature of the softmax in the distillation loss.
        label_smoothing: Probability mass that is spread over all classes.
        gradient_norm: Maximum norm of the gradients; 0 does not clip.
        accumulate: Batches whose gradients are accumulated into one step.
        precision: ``float32``, or ``bfloat16`` for autocast.
        channels_last: Whether images and weights are stored channels-last on a GPU.
        compile: Whether to compile the network with ``torch.compile``.
        cuda_graph: Whether to record a step as a CUDA graph and replay it. It needs a
            single process on a GPU and pays off for small networks.
        checkpoint_steps: Steps between checkpoints; 0 writes one per epoch.
        keep: With validation data, whether to return the ``best`` epoch (or the start,
            if no epoch is better) or the ``last``.
        report_steps: Steps between progress reports, which also check the loss.
        tensorboard: Folder for TensorBoard scalars; None for none.
        logger: Experiment tracker that also gets the scalars, through Accelerate.
        deterministic: Whether a GPU gives identical results in every run; otherwise it
            uses the fastest algorithms.
        seed: Seed of the order of images, augmentation and dropout.
    """

    epochs: int = 10
    batch_size: int = 128
    learning_rate: float = 1e-3
    warmup: int = 0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_all: bool = False
    start: Literal["quantized", "float"] = "quantized"
    learn_weight_scales: bool = True
    weights: Literal["stored", "minmax", "dorefa", "lq-nets", "outliers"] = "stored"
    outlier_fraction: float = 0.01
    widths: Literal["planned", "learned"] = "planned"
    width_penalty: float = 1.0
    code_penalty: float = 0.0
    activations: Literal["step", "clip", "ema", "fixed", "outliers"] = "step"
    range_momentum: float = 0.99
    step_rate: float = 0.1
    batch_norm: Literal["folded", "fold-and-train"] = "folded"
    freeze_norm_epoch: int = 1
    distill: float = 0.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    gradient_norm: float = 0.0
    accumulate: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = True
    compile: bool = False
    cuda_graph: bool = False
    checkpoint_steps: int = 0
    keep: Literal["best", "last"] = "best"
    report_steps: int = 50
    tensorboard: str | None = None
    logger: Literal["none", "wandb", "mlflow"] = "none"
    deterministic: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            problem = _problem(name, value, hints[name])
            if problem:
                raise ValueError(f"{name}={value!r} must be {problem}")
        if self.activations == "outliers" != self.weights:
            raise ValueError(
                f"activations='outliers' needs weights='outliers', not {self.weights!r}"
            )
        if self.widths == "learned" and self.weights != "dorefa":
            raise ValueError(
                f"widths='learned' needs weights='dorefa', not {self.weights!r}"
            )
        stored = self.weights == "stored" and self.batch_norm == "folded"
        if self.code_penalty and not stored:
            raise ValueError(
                f"code_penalty={self.code_penalty:g} needs weights='stored' and "
                f"batch_norm='folded', not {self.weights!r} and {self.batch_norm!r}"
            )

    @property
    def needs_float(self) -> bool:
        """Whether training needs the float network."""
        folds = self.batch_norm == "fold-and-train"
        return self.distill > 0 or folds or self.start == "float"

    @property
    def keeps_plan(self) -> bool:
        """Whether the trained network keeps the planned bits on uniform grids."""
        return self.widths == "planned" and self.weights not in ("lq-nets", "outliers")

    @property
    def whole_epoch(self) -> int:
        """The epoch, after 80 % of them, that begins with learned widths rounded."""
        return int(0.8 * self.epochs)


_POSITIVE = ("learning_rate", "temperature")
_BELOW_ONE = ("momentum", "range_momentum")  # with 1 they would never forget, or learn
_FRACTIONS = ("distill", "label_smoothing", "outlier_fraction")
_AT_LEAST_ONE = ("epochs", "batch_size", "accumulate", "report_steps")


def _problem(name: str, value: Any, kind: Any) -> str:
    """Return what a field must be, or "" if it is; values may come from a file."""
    if kind is bool:
        return "" if isinstance(value, bool) else "true or false"
    if kind is int or kind is float:
        return _number_problem(name, value, kind)
    if kind == str | None:
        return "" if value is None or isinstance(value, str) else "a folder's name"
    words = get_args(kind)
    hint = suggestion(str(value), words)
    return "" if value in words else f"one of {', '.join(words)}{hint}"


def _number_problem(name: str, value: Any, kind: type) -> str:
    number = isinstance(value, int if kind is int else int | float)
    if not number or isinstance(value, bool):
        return "a whole number" if kind is int else "a number"
    if name in _BELOW_ONE:
        return "" if 0 <= value < 1 else "from 0 to below 1"
    if name in _FRACTIONS:
        return "" if 0 <= value <= 1 else "from 0 to 1"
    if name in _POSITIVE:
        return "" if 0 < value < math.inf else "above 0 and finite"
    least = 1 if name in _AT_LEAST_ONE else 0
    return "" if least <= value < math.inf else f"at least {least}"


# HAWQ-V3's recipe from its released command (--lr 1e-4 --wd 1e-4 --fold-BN 1 --fix-BN 1
# --act-range-momentum 0.99), with the cosine schedule of the OMPQ paper. One thing
# differs: requantization by multipliers and shifts is not simulated in training;
# ompq.finalize applies it. The 16 bits of residual streams are a setting of quantize.
_HAWQ_V3 = TrainConfig(
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
)

# PACT on ImageNet: SGD from 0.1, 110 epochs, batch 256. The original trains from
# scratch with a step schedule and weight decay on the clipping values; here training
# starts from the float network, with cosine decay and no decay of clipping values.
_PACT = TrainConfig(
    epochs=110,
    batch_size=256,
    learning_rate=0.1,
    start="float",
    weights="dorefa",
    activations="clip",
    step_rate=1.0,
    batch_norm="fold-and-train",
    freeze_norm_epoch=110,
)
# FracBits' ResNets: like PACT with 120 epochs. The learning rate of the widths is not
# published.
_FRACBITS = replace(_PACT, epochs=120, widths="learned", freeze_norm_epoch=120)
# OneBitwidth trains from scratch: ompq.one_bitwidth returns random weights. Not all of
# its settings are published; these are PACT's. Norms are never frozen: at the learning
# rate that random weights need, a network whose norms stop normalising unlearns.
_ONE_BITWIDTH = replace(_PACT, epochs=200, batch_size=128, freeze_norm_epoch=200)
# LQ-Nets on ImageNet: SGD from 0.1, 120 epochs, batch 256; differs as for PACT.
_LQ_NETS = replace(
    _PACT, epochs=120, weights="lq-nets", activations="step", freeze_norm_epoch=120
)
# RVQuant fine-tunes a float network; its learning rate and epochs are not published.
_RVQUANT = replace(
    _HAWQ_V3,
    epochs=10,
    learning_rate=1e-3,
    weights="outliers",
    activations="outliers",
)

# Settings of published work by name; "ours" are the defaults.
TRAIN_PROTOCOLS: Mapping[str, TrainConfig] = MappingProxyType(
    {
        "ours": TrainConfig(),
        "hawq-v3": _HAWQ_V3,
        "paper-qat": _HAWQ_V3,
        "pact": _PACT,
        "fracbits-pact": _FRACBITS,
        "one-bitwidth": _ONE_BITWIDTH,
        "lq-nets": _LQ_NETS,
        "rvquant": _RVQUANT,
    }
)
