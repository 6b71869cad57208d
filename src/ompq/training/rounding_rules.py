"""How weights and activations are rounded in training.

A :class:`WeightRule` replaces rounding to the stored grids. The core has HAWQ-V3's, by
which the OMPQ paper trains: it follows the largest weights and running ranges of
activations. Both modify a network in place.

HAWQ-V3 also keeps batch norms and trains them with their layers. A layer computes with
the weight that will be deployed: folded with the running statistics and rounded. Until
the norm is frozen, the output is normalized by the statistics of the batch; afterwards
it equals that of the folded layer, bit for bit.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn

from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    quantized_layers,
)
from ompq.network.folding import channel_axis
from ompq.registry import Names
from ompq.training.batch_norms import norm_factor

_SMALLEST = 1e-8  # smallest range, as in HAWQ-V3's released code
# Margin of a grid in units of the last place: a quotient that was rounded up must not
# put the largest weight outside its grid, where it has no gradient.
_MARGIN = 4


class WeightRule:
    """How training rounds weights, in place of rounding to the stored grids.

    A rule is made for a network: a callable that takes the network and returns the rule
    is what ``TrainConfig.weights`` names. A rule that rounds in its own way sets
    :meth:`round` as the ``rounding`` of its layers and overrides :meth:`finalize`. What
    training calls beyond that does nothing unless it is overridden.

    Attributes:
        keeps_plan: Whether the trained network keeps the planned bits on uniform grids,
            so that it can be packed and exported by its plan. A callable that makes
            rules has this attribute, too.
    """

    keeps_plan: bool = True

    def round(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight of a layer, its channels times a factor (C,)."""
        raise NotImplementedError  # a rule that sets it as a rounding overrides it

    def learned(self) -> Sequence[tuple[nn.Parameter, float]]:
        """Return parameters that are learned like scales, each with its least value.

        They belong to modules of the network, so that checkpoints hold them.
        """
        return ()

    def begin_epoch(self, number: int, epochs: int) -> None:
        """Prepare for the epoch with this number, from 0, of ``epochs``."""

    def penalty(self) -> Tensor | None:
        """Return what is added to the loss of a batch, a scalar, or None."""

    def update(self) -> None:
        """Follow the weights after a step of the optimizer."""

    def finalize(self, layer: QuantizedLayer, factor: Tensor | None) -> None:
        """Give a layer its final form; its weight is now the rounded one.

        The layer gets a grid on which its weight lies and no ``rounding``, or
        ``StoredValues`` with the bytes that its weight takes.
        """

    def detach(self) -> None:
        """Remove hooks and buffers from the trained network."""


class WeightRanges(WeightRule):
    """Symmetric grids that follow the largest weight of each channel (HAWQ-V3)."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(quantized_layers(model).values())
        for layer in self.layers:
            layer.weight_zero_point.fill_(_middle(layer))
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Set the scales by the current weights, folded with their norms."""
        for layer in self.layers:
            weight = layer.folded_weight(norm_factor(layer))
            largest = rows_by_channel(layer, weight).abs().amax(1).clamp(min=_SMALLEST)
            levels = layer.grid_like_weight().qmax - _middle(layer)
            margin = 1 + _MARGIN * torch.finfo(weight.dtype).eps
            layer.weight_scale.copy_(largest / levels * margin)


def _middle(layer: QuantizedLayer) -> int:
    """Return the zero point of a symmetric grid."""
    return (layer.grid_like_weight().qmax + 1) // 2


class ActivationRanges:
    """Running ranges of activations (HAWQ-V3).

    Tensors that calibration never found negative have a zero point of 0; others get
    symmetric grids. Gradients pass through unchanged.

    Args:
        ends_of: Returns the negated minimum and the maximum of values, (2,).
    """

    def __init__(
        self,
        model: nn.Module,
        momentum: float,
        ends_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.momentum, self.ends_of = momentum, ends_of or _ends
        self.quantizers = list(activation_quantizers(model).values())
        self.hooks = []
        for quantizer in self.quantizers:
            _make_symmetric(quantizer)
            quantizer.gradient = "straight"
            # The negated minimum, and the maximum; zeros before the first pass.
            quantizer.register_buffer("ends", quantizer.scale.new_zeros(2))
            self.hooks.append(quantizer.register_forward_pre_hook(self._update))

    @torch.no_grad()
    def _update(self, quantizer: nn.Module, args: tuple[Any, ...]) -> None:
        if not quantizer.training:
            return
        assert isinstance(quantizer, ActivationQuantizer)
        new = self.ends_of(args[0]).to(quantizer.scale)
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(new, distributed.ReduceOp.MAX)
        ends = quantizer.get_buffer("ends")
        average = self.momentum * ends + (1 - self.momentum) * new
        ends.copy_(torch.where(ends.any(), average, new))
        largest = torch.where(quantizer.zero_point != 0, ends.abs().amax(), ends[1])
        levels = (1 << quantizer.bits) - 1 - quantizer.zero_point
        quantizer.scale.copy_(largest.clamp(min=_SMALLEST) / levels)

    def detach(self) -> None:
        """Remove hooks and buffers; the quantizers keep their ranges."""
        for hook in self.hooks:
            hook.remove()
        for quantizer in self.quantizers:
            del quantizer.ends


def _ends(x: Tensor) -> Tensor:
    return torch.stack([-x.amin(), x.amax()])


@torch.no_grad()
def _make_symmetric(quantizer: ActivationQuantizer) -> None:
    """Make a grid with negative values symmetric, so that it covers the old range."""
    if quantizer.zero_point == 0:
        return
    levels, middle = (1 << quantizer.bits) - 1, 1 << (quantizer.bits - 1)
    longer = torch.maximum(quantizer.zero_point, levels - quantizer.zero_point)
    quantizer.scale.mul_(longer / (levels - middle))
    quantizer.zero_point.fill_(middle)


def rows_by_channel(layer: QuantizedLayer, weight: Tensor) -> Tensor:
    """Return a layer's weight with one row per output channel, (C, n)."""
    return weight.movedim(channel_axis(layer), 0).flatten(1)


# Makes a rule for a network; ``TrainConfig.weights`` is one, or the name of one.
MakeRule: TypeAlias = Callable[[nn.Module], WeightRule]


def make_rule(model: nn.Module, weights: str | MakeRule) -> WeightRule:
    """Return the rule that rounds a network's weights; it may be given by its name."""
    make = WEIGHT_RULES.find(weights) if isinstance(weights, str) else weights
    return make(model)


def _keep_grids(_model: nn.Module) -> WeightRule:
    """Return the rule that changes nothing: weights are rounded to their own grids."""
    return WeightRule()


WEIGHT_RULES: Names[MakeRule] = Names(
    "weight rule", {"stored": _keep_grids, "minmax": WeightRanges}, field="weights"
)
