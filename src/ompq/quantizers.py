"""Uniform quantization: the grid, its one formula, and straight-through gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ompq.streams import LARGEST_HALF_BITS, check_bits


@dataclass(frozen=True, eq=False)
class Grid:
    """The values that a tensor may take: ``scale * (code - zero)``.

    Example:
        >>> grid = Grid(torch.tensor(0.5), torch.tensor(1.5), bits=2)
        >>> grid.fake(torch.tensor([-9.0, -0.1, 0.1, 9.0]))
        tensor([-0.7500, -0.2500,  0.2500,  0.7500])
    """

    scale: Tensor  # positive step, of a shape that broadcasts against the tensor
    # The code, perhaps between two codes, that stands for 0. Same shape.
    zero_point: Tensor
    bits: int  # width of a code, 2 to 8
    # Whether the highest code is left out, as for -1, 0, 1 in two bits.
    narrow: bool = False

    def __post_init__(self) -> None:
        check_bits(self.bits)

    @property
    def qmax(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1 - self.narrow

    def quantize(self, x: Tensor) -> Tensor:
        """Return the codes of ``x`` as uint8, of its shape."""
        return _codes(x, self).to(torch.uint8)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the values of the codes as float32, of their shape."""
        return self.scale * (codes - self.zero_point)

    def fake(self, x: Tensor) -> Tensor:
        """Return ``x`` quantized and dequantized: the nearest values of the grid."""
        return self.scale * (_codes(x, self) - self.zero_point)


def of_groups(values: Tensor, group_size: int) -> Tensor:
    """Return what each group of weights has, (C, K / size), from (C, K).

    Without groups, values that broadcast with a weight become one a channel, (C,).
    """
    return values[:, ::group_size] if group_size else values.flatten()


def like_weight(
    values: Tensor, shape: Sequence[int], axis: int = 0, group_size: int = 0
) -> Tensor:
    """Return what channels (C,) or groups (C, G) have so that it goes with a weight.

    A group is so many weights of a channel next to each other; 0 takes all of them.
    The last group may have fewer.

    Example:
        >>> like_weight(torch.tensor([[1, 2]]), (1, 5), group_size=3)
        tensor([[1, 1, 1, 2, 2]])
    """
    if group_size:
        rows = values.reshape(shape[0], -1)
        return rows.repeat_interleave(group_size, 1)[:, : shape[1]]
    like = [1] * len(shape)
    like[axis] = -1
    return values.reshape(like)


def integer_weight(
    codes: Tensor, zero_point: Tensor, bits: int
) -> tuple[Tensor, float]:
    """Return a weight as signed bytes with zero point 0, and the factor of their step.

    Half-integer zeros are made whole by doubling: the weight's value is ``scale *
    factor * bytes``, where the factor is 0.5 up to 6 bits and 1 above. A ValueError
    says that a zero is not a multiple of the factor, or that a value does not fit.

    Example:
        >>> integer_weight(torch.tensor([0, 1, 2, 3]), torch.tensor(1.5), bits=2)
        (tensor([-3, -1,  1,  3], dtype=torch.int8), 0.5)
    """
    factor = 0.5 if check_bits(bits) <= LARGEST_HALF_BITS else 1.0
    values = (codes.float() - zero_point) / factor
    whole = (values == values.round()) & (values >= -128) & (values <= 127)
    if not whole.all():
        raise ValueError(
            f"zero_point={zero_point.flatten().tolist()[:5]} does not fit signed bytes "
            f"at {bits} bits: zero points must be multiples of {factor:g} that keep "
            f"(code - zero_point) / {factor:g} within -128 and 127"
        )
    return values.to(torch.int8), factor


def round_through(x: Tensor) -> Tensor:
    """Round to nearest; the gradient passes as if nothing had been rounded."""
    # The bracket is exactly zero, so the sum is exactly the rounded value.
    return x.round().detach() + (x - x.detach())


def half_through(x: Tensor) -> Tensor:
    """Round to 16-bit floats; the gradient passes as if nothing had been rounded."""
    most = torch.finfo(torch.float16).max
    return x.detach().clamp(-most, most).half().to(x) + (x - x.detach())


def straight_through(x: Tensor, grid: Grid) -> Tensor:
    """Fake-quantize; the gradient of ``x`` passes inside the range and stops outside.

    A scale that requires a gradient gets the derivative of the learned-step paper
    (LSQ, equation 3): round(x/s) - x/s inside the range, its end outside.
    """
    position = x / grid.scale + grid.zero_point
    # The gradient of clamp at its very ends differs between versions of PyTorch, and
    # zeros that come from a ReLU lie there.
    inside = (position >= 0) & (position <= grid.qmax)
    ends = position.detach().clamp(0, grid.qmax)
    codes = round_through(torch.where(inside, position, ends))
    return grid.scale * (codes - grid.zero_point)


def learned_step(x: Tensor, grid: Grid, shared: float | None = None) -> Tensor:
    """Fake-quantize with a learned scale, the grid's (LSQ).

    The scale's gradient is multiplied by 1 / sqrt(n * q): n elements share one scale
    and q is the highest level, as the paper does to make steps of a size. ``shared`` is
    n; None counts ``x``. The paper leaves the batch out of it for activations.
    """
    shared = shared or x.numel() / grid.scale.numel()
    factor = ((grid.qmax - grid.zero_point).clamp(min=1) * shared).rsqrt()
    weighted = grid.scale * factor
    scale = grid.scale.detach() + (weighted - weighted.detach())
    return straight_through(x, Grid(scale, grid.zero_point, grid.bits, grid.narrow))


def learned_clip(x: Tensor, limit: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Clip to a learned limit and fake-quantize what remains (PACT).

    The limit, positive, gets a gradient of 1 where ``x`` exceeds it and 0 inside the
    range. With a zero point above 0 (the paper has 0) the range has a lower end too,
    which moves with the limit.
    """
    qmax = (1 << check_bits(bits)) - 1
    clipped = torch.clamp(x, -zero_point / (qmax - zero_point) * limit, limit)
    scale = (limit / (qmax - zero_point)).detach()
    return Grid(scale, zero_point, bits).fake(x.detach()) + (clipped - clipped.detach())


def _codes(x: Tensor, grid: Grid) -> Tensor:
    return (x / grid.scale + grid.zero_point).round().clamp(0, grid.qmax)


def rounded_to(grid: Grid, x: Tensor, shared: float | None = None) -> Tensor:
    """Round to a grid, with the gradients of :func:`learned_step` where asked for."""
    if not torch.is_grad_enabled():
        return grid.fake(x)
    shared = shared or x.numel() / grid.scale.numel()
    if torch.compiler.is_compiling():  # which fuses better than what is written by hand
        return learned_step(x, grid, shared)
    if grid.scale.dim() == 0 and not grid.scale.requires_grad:
        # One kernel instead of ten. It multiplies by 1/scale, so a value that lies
        # between two codes may fall to the other one: learning does not notice.
        zero_point = grid.zero_point.to(torch.int32)
        return torch.fake_quantize_per_tensor_affine(
            x, grid.scale, zero_point, 0, grid.qmax
        )
    rounded = _Rounded.apply(x, grid.scale, grid.zero_point, grid.qmax, shared)
    return cast(Tensor, rounded)


class _Rounded(torch.autograd.Function):
    """``learned_step`` with a third of its passes over memory, which bind training."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmax: int, shared: float
    ) -> Tensor:
        position = (x / scale).add_(zero_point)
        inside = (position >= 0) & (position <= qmax)
        levels = position.round().clamp_(0, qmax).sub_(zero_point)
        slope = None
        if ctx.needs_input_grad[1]:
            slope = levels - position.sub_(zero_point).mul_(inside)
        ctx.save_for_backward(inside, slope, scale, zero_point)
        ctx.qmax, ctx.shared = qmax, shared
        return levels.mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inside, slope, scale, zero_point = ctx.saved_tensors
        of_x = gradient * inside if ctx.needs_input_grad[0] else None
        if slope is None:
            return of_x, None, None, None, None
        factor = ((ctx.qmax - zero_point).clamp(min=1) * ctx.shared).rsqrt()
        of_scale = (gradient * slope).sum_to_size(scale.shape) * factor
        return of_x, of_scale, None, None, None


def deployed(grid: Grid, x: Tensor) -> Tensor:
    """Round an activation as ONNX defines it: the zero is added after rounding."""
    return grid.scale * (x / grid.scale).round().clamp(
        -grid.zero_point, grid.qmax - grid.zero_point
    )


def on_log_grid(grid: Grid, x: Tensor) -> Tensor:
    """Round values from 0 on to levels that halve after every few codes.

    The grid's scale is the largest level, and its zero point says how many codes make
    up a halving. The last code is 0.

    Example:
        >>> grid = Grid(torch.tensor(1.0), torch.tensor(1.0), bits=2)
        >>> on_log_grid(grid, torch.tensor([0.9, 0.6, 0.3, 0.1, 0.0]))
        tensor([1.0000, 0.5000, 0.2500, 0.0000, 0.0000])
    """
    code = (grid.zero_point * (grid.scale / x).log2()).round().clamp_min(0)
    level = grid.scale * (-code / grid.zero_point).exp2()
    return torch.where(code < grid.qmax, level, torch.zeros_like(level))
