"""Uniform quantization: the grid, its formula, and straight-through gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ompq.bit_widths import LARGEST_HALF_BITS, check_bits

STREAM_BITS = 16  # bits of a residual stream in HAWQ-V3; all else has at most 8


@dataclass(frozen=True, eq=False)
class Grid:
    """The values that a quantized tensor can take: ``scale * (code - zero_point)``.

    Example:
        >>> grid = Grid(torch.tensor(0.5), torch.tensor(1.5), bits=2)
        >>> grid.fake(torch.tensor([-9.0, -0.1, 0.1, 9.0]))
        tensor([-0.7500, -0.2500,  0.2500,  0.7500])
    """

    scale: Tensor  # positive step, of a shape that broadcasts with the tensor
    zero_point: Tensor  # the code of 0, not necessarily an integer; same shape
    bits: int  # width of a code, 2 to 8; 16 in residual streams
    narrow: bool = False  # whether the highest code is unused: -1, 0, 1 in two bits

    def __post_init__(self) -> None:
        check_bits(self.bits, more=(STREAM_BITS,))

    @property
    def qmax(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1 - self.narrow

    def quantize(self, x: Tensor) -> Tensor:
        """Return the codes of ``x`` as uint8, shaped as ``x``."""
        return _codes(x, self).to(torch.uint8)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the values of the codes as float32, shaped as the codes."""
        return self.scale * (codes - self.zero_point)

    def fake(self, x: Tensor) -> Tensor:
        """Return ``x`` quantized and dequantized: the nearest values on the grid."""
        return self.scale * (_codes(x, self) - self.zero_point)


def of_groups(values: Tensor, group_size: int) -> Tensor:
    """Return one value per group, (C, K / size), from one per weight, (C, K).

    Without groups, values that broadcast with a weight become one per channel, (C,).
    """
    return values[:, ::group_size] if group_size else values.flatten()


def like_weight(
    values: Tensor, shape: Sequence[int], axis: int = 0, group_size: int = 0
) -> Tensor:
    """Shape values of channels (C,) or groups (C, G) to broadcast with a weight.

    A group is ``group_size`` consecutive weights of a channel; the last one may be
    smaller. 0 means one value per channel.

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
    """Return a weight as signed bytes with zero point 0, and the factor on its scale.

    The weight is ``scale * factor * bytes``. The factor is 0.5 up to 6 bits, to allow
    half-integer zero points, and 1 above. If a zero point is not a multiple of the
    factor, or a value does not fit a byte, a ValueError is raised.

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
    """Round to nearest, with a straight-through gradient."""
    # The bracket is exactly zero, so the sum is exactly the rounded value.
    return x.round().detach() + (x - x.detach())


def half_through(x: Tensor) -> Tensor:
    """Round to 16-bit floats, with a straight-through gradient."""
    largest = torch.finfo(torch.float16).max
    return x.detach().clamp(-largest, largest).half().to(x) + (x - x.detach())


def straight_through(x: Tensor, grid: Grid) -> Tensor:
    """Fake-quantize; the gradient of ``x`` is 1 inside the range and 0 outside.

    A scale that requires a gradient gets that of LSQ (equation 3 of the paper):
    round(x/s) - x/s inside the range, and the end of the range outside.
    """
    position = x / grid.scale + grid.zero_point
    # Not clamp, whose gradient exactly at its ends, where the zeros of a ReLU lie,
    # differs between versions of PyTorch.
    inside = (position >= 0) & (position <= grid.qmax)
    ends = position.detach().clamp(0, grid.qmax)
    codes = round_through(torch.where(inside, position, ends))
    return grid.scale * (codes - grid.zero_point)


def learned_step(x: Tensor, grid: Grid, shared: float | None = None) -> Tensor:
    """Fake-quantize and learn the grid's scale (LSQ).

    As in the paper, the scale's gradient is multiplied by 1 / sqrt(n * q), where n
    elements share one scale and q is the highest level. ``shared`` is n, by default
    counted in ``x``; for activations, the paper counts one sample, not the batch.
    """
    shared = shared or x.numel() / grid.scale.numel()
    factor = ((grid.qmax - grid.zero_point).clamp(min=1) * shared).rsqrt()
    weighted = grid.scale * factor
    scale = grid.scale.detach() + (weighted - weighted.detach())
    return straight_through(x, Grid(scale, grid.zero_point, grid.bits, grid.narrow))


def learned_clip(x: Tensor, limit: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Clip to a learned positive limit and fake-quantize (PACT).

    The limit's gradient is 1 where ``x`` exceeds it and 0 inside the range. With a zero
    point above 0 (the paper has 0), the range also has a lower end, which moves with
    the limit.
    """
    qmax = (1 << check_bits(bits)) - 1
    clipped = torch.clamp(x, -zero_point / (qmax - zero_point) * limit, limit)
    scale = (limit / (qmax - zero_point)).detach()
    return Grid(scale, zero_point, bits).fake(x.detach()) + (clipped - clipped.detach())


def _codes(x: Tensor, grid: Grid) -> Tensor:
    return (x / grid.scale + grid.zero_point).round().clamp(0, grid.qmax)


def rounded_to(grid: Grid, x: Tensor, shared: float | None = None) -> Tensor:
    """Fake-quantize, with the gradients of :func:`learned_step` if they are enabled."""
    if not torch.is_grad_enabled():
        return grid.fake(x)
    shared = shared or x.numel() / grid.scale.numel()
    if torch.compiler.is_compiling():  # its fusion beats the hand-written function
        return learned_step(x, grid, shared)
    if grid.scale.dim() == 0 and not grid.scale.requires_grad:
        # One kernel instead of ten. It multiplies by 1/scale, so a value halfway
        # between two codes may get the other one, which does not matter for learning.
        zero_point = grid.zero_point.to(torch.int32)
        return torch.fake_quantize_per_tensor_affine(
            x, grid.scale, zero_point, 0, grid.qmax
        )
    rounded = _LearnedStep.apply(x, grid.scale, grid.zero_point, grid.qmax, shared)
    return cast(Tensor, rounded)


class _LearnedStep(torch.autograd.Function):
    """``learned_step`` with a third of the memory traffic, which limits training."""

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
        grad_x = gradient * inside if ctx.needs_input_grad[0] else None
        if slope is None:
            return grad_x, None, None, None, None
        factor = ((ctx.qmax - zero_point).clamp(min=1) * ctx.shared).rsqrt()
        grad_scale = (gradient * slope).sum_to_size(scale.shape) * factor
        return grad_x, grad_scale, None, None, None


def quantize_as_deployed(grid: Grid, x: Tensor) -> Tensor:
    """Fake-quantize as ONNX defines it: the zero point is added after rounding."""
    return grid.scale * (x / grid.scale).round().clamp(
        -grid.zero_point, grid.qmax - grid.zero_point
    )


def on_log_grid(grid: Grid, x: Tensor) -> Tensor:
    """Round non-negative values to a logarithmic grid.

    The grid's scale is the largest level, and its zero point the number of codes per
    halving. The last code means 0.

    Example:
        >>> grid = Grid(torch.tensor(1.0), torch.tensor(1.0), bits=2)
        >>> on_log_grid(grid, torch.tensor([0.9, 0.6, 0.3, 0.1, 0.0]))
        tensor([1.0000, 0.5000, 0.2500, 0.0000, 0.0000])
    """
    code = (grid.zero_point * (grid.scale / x).log2()).round().clamp_min(0)
    level = grid.scale * (-code / grid.zero_point).exp2()
    return torch.where(code < grid.qmax, level, torch.zeros_like(level))
