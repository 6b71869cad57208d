"""SoftRounding: weights on their way to one of their two neighbours, as in AdaRound."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from ompq.quantization.layers import QuantizedLayer, Size, linear_map
from ompq.quantization.moments import channel_mean
from ompq.samples import attached


class SoftRounding:
    """The weights of a block, each between two neighbours on its grid.

    All weights lie in one tensor, (W,), and all channels in another, (C,): a step of
    learning is bound by the number of its kernels, not by their work.

    Biases follow the weights: whatever side a weight takes, the mean output of its
    channel stays what it was, and only the rest has to be learned.

    Attributes:
        up: How far above its lower neighbour each weight is, 0 to 1, (W,); learned.
        stretch: Logarithm of what each channel's scale is multiplied by, (C,); learned.
        bias: Bias of each channel, (C,); learned.
    """

    def __init__(
        self, layers: Sequence[QuantizedLayer], run: Callable[[], Any]
    ) -> None:
        """Start from the layers' weights before rounding.

        Args:
            layers: The layers of a block.
            run: Runs the block on some samples.
        """
        self._layers = layers
        parts = [_rows(layer) for layer in layers]
        self._shapes = [part.up.shape for part in parts]
        self._low = _flat([part.low for part in parts])
        self._free = _flat([part.free for part in parts])
        self._scale = _flat([part.scale for part in parts])
        self._own = _flat([part.own for part in parts])
        self._row = _row_numbers(self._shapes, self._low.device)
        self.up = _flat([part.up for part in parts])
        self.stretch = torch.zeros_like(self._scale)
        self.bias = _flat([part.bias for part in parts])
        pairs = zip(layers, mean_inputs(layers, run), strict=True)
        self._inputs = _flat([rows_of(layer, mean) for layer, mean in pairs])
        with torch.no_grad():
            rounded = [rows_of(layer, layer.rounded_weight()) for layer in layers]
            self._means = self._row_sums(_flat(rounded) * self._inputs)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers compute with their soft weights, and biases to match."""
        for layer, weight, bias in self._given():
            layer.learning = (weight, None if layer.bias is None else bias)
        try:
            yield
        finally:
            # What is kept from one step to the next keeps that step's graph alive.
            for layer in self._layers:
                layer.learning = None

    def decide(self, exponent: Tensor, step: Tensor) -> None:
        """Move each weight towards its nearer side, by at most a step.

        Args:
            exponent: The larger, the less those in the middle move, ().
            step: Largest move, ().
        """
        side = (2 * self.up).sub_(1)  # -1 to 1
        self.up.addcmul_(side.abs().pow_(exponent - 1).copysign_(side), step)
        self.up.clamp_(0, 1)

    def harden(self) -> None:
        """Put each weight at its nearer neighbour."""
        self.up.round_()

    def finish(self) -> None:
        """Write weights, scales and biases into the layers, for good."""
        self.harden()
        scales = torch.split(self._stretched(), [rows for rows, _ in self._shapes])
        for (layer, weight, bias), scale in zip(self._given(), scales, strict=True):
            layer.weight.copy_(weight)
            layer.weight_scale.copy_(scale[: len(layer.weight_scale)])
            if layer.bias is not None:
                layer.bias.copy_(bias)

    def _given(self) -> list[tuple[QuantizedLayer, Tensor, Tensor]]:
        weight, bias = _Weights.apply(self.up, self.stretch, self.bias, self)
        weights = torch.split(weight, [rows * width for rows, width in self._shapes])
        biases = torch.split(bias, [rows for rows, _ in self._shapes])
        found = zip(self._layers, weights, biases, strict=True)
        return [(layer, weight_of(layer, w), b) for layer, w, b in found]

    def _stretched(self) -> Tensor:
        return self._scale * self.stretch.exp()

    def _row_sums(self, flat: Tensor) -> Tensor:
        parts = torch.split(flat, [rows * width for rows, width in self._shapes])
        pairs = zip(parts, self._shapes, strict=True)
        return torch.cat([part.view(shape).sum(1) for part, shape in pairs])


class _Weights(torch.autograd.Function):
    """Weights and biases from what is learned, in few kernels both ways."""

    @staticmethod
    def forward(
        ctx: Any, up: Tensor, stretch: Tensor, bias: Tensor, soft: SoftRounding
    ) -> tuple[Tensor, Tensor]:
        levels = torch.addcmul(soft._low, up, soft._free)
        scale = soft._scale * stretch.exp()
        spread = scale.index_select(0, soft._row)
        weight = levels * spread
        moved = soft._row_sums(weight * soft._inputs)
        ctx.save_for_backward(levels, scale, spread)
        ctx.soft = soft
        return weight, bias + (soft._means - moved)

    @staticmethod
    def backward(ctx: Any, of_weight: Tensor, of_bias: Tensor) -> Any:
        levels, scale, spread = ctx.saved_tensors
        soft = ctx.soft
        through_bias = of_bias.index_select(0, soft._row)
        total = torch.addcmul(of_weight, through_bias, soft._inputs, value=-1)
        of_stretch = soft._row_sums(total * levels).mul_(scale * soft._own)
        of_up = (total * spread).mul_(soft._free)
        return of_up, of_stretch, of_bias, None


class _Rows(NamedTuple):
    """A layer's weight as one row for each output channel."""

    low: Tensor  # code of the lower neighbour, less the zero, (C, K)
    free: Tensor  # 0 beyond the ends of the grid, where there is but one, (C, K)
    up: Tensor  # how far above it the weight is, (C, K)
    scale: Tensor  # (C,)
    own: Tensor  # 0 where groups of a transposed convolution share scales, (C,)
    bias: Tensor  # (C,)


def _rows(layer: QuantizedLayer) -> _Rows:
    grid = layer.grid_like_weight()
    weight = layer.weight.detach()
    code = rows_of(layer, (weight / grid.scale + grid.zero).detach())
    zero = rows_of(layer, grid.zero.expand_as(weight))
    scale = rows_of(layer, grid.scale.detach().expand_as(weight))[:, 0]
    floor = code.floor()
    own = float(len(layer.weight_scale) == len(scale))
    return _Rows(
        low=floor.clamp(0, grid.top) - zero,
        free=((floor >= 0) & (floor < grid.top)).to(weight.dtype),
        up=code - floor,
        scale=scale,
        own=torch.full_like(scale, own),
        bias=torch.zeros_like(scale) if layer.bias is None else layer.bias.detach(),
    )


def rows_of(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return a layer's weight as one row for each output channel, (C, K)."""
    if not isinstance(layer, _ConvTransposeNd):
        return weight.flatten(1)
    groups, shape = layer.groups, weight.shape
    parts = weight.reshape(groups, -1, *shape[1:])  # (groups, in/groups, C/groups, ...)
    return parts.movedim(2, 1).reshape(groups * shape[1], -1)


def weight_of(layer: nn.Module, rows: Tensor) -> Tensor:
    """Return the weight, in the layer's shape, whose rows these are, flat or not."""
    shape = cast(Tensor, layer.weight).shape
    if not isinstance(layer, _ConvTransposeNd):
        return rows.reshape(shape)
    inner = (layer.groups, shape[1], shape[0] // layer.groups, *shape[2:])
    return rows.reshape(inner).movedim(1, 2).reshape(shape)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _row_numbers(shapes: Sequence[torch.Size], device: torch.device) -> Tensor:
    """Return the number of each weight's channel among all channels, (W,)."""
    widths = [width for rows, width in shapes for _ in range(rows)]
    numbers = torch.arange(len(widths), device=device)
    return numbers.repeat_interleave(torch.tensor(widths, device=device))


def _mapped(
    layer: QuantizedLayer, weight: Tensor, input: Tensor, output_size: Size = None
) -> Tensor:
    """Return what a layer gives for its arguments with this weight and no bias."""
    return linear_map(layer, input.detach(), weight, None, output_size)


def mean_inputs(
    layers: Sequence[QuantizedLayer], run: Callable[[], Any]
) -> list[Tensor]:
    """Return what each weight is multiplied by on average, shaped as the weights.

    The mean output of a channel, less its bias, is the sum of its weights times these.

    Args:
        layers: Layers that run once each.
        run: Runs them on some samples.
    """
    found: dict[nn.Module, Tensor] = {}

    def hook(module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        layer = cast(QuantizedLayer, module)
        # Each weight belongs to one channel and enters linearly: a gradient will do.
        weight = layer.weight.detach().requires_grad_()
        with torch.enable_grad():
            output = _mapped(layer, weight, *args, **kwargs)
            total = channel_mean(layer, output).sum()
        (found[layer],) = torch.autograd.grad(total, weight)

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    with attached(handles), torch.no_grad():
        run()
    return [found[layer] for layer in layers]
