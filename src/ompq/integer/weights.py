"""A weight as signed bytes and its bias as 32-bit integers. Pure tensors."""

import torch
from torch import Tensor

from ompq.errors import QuantizationError
from ompq.integer.steps import CodeGrid, IntegerWeight
from ompq.quantizers.grids import LARGEST_HALF_BITS, integer_weight

# Bytes are stretched up to this magnitude. Two products with codes of at most 255 then
# fit into 16 bits, as the 8-bit kernels of processors without VNNI need.
STRETCHED = 64
# Limit of the sum of all products and the bias, whatever the input.
LARGEST_SUM = (1 << 31) - 1


def whole_numbers(
    codes: Tensor,
    zero: Tensor,
    scale: Tensor,
    bits: int,
    bias: Tensor | None,
    grid: CodeGrid,
) -> IntegerWeight:
    """Return a layer's weight and bias in whole numbers.

    Args:
        codes: The weight's codes, uint8, (O, ...).
        zero: Their zeros, (O,).
        scale: Their steps, (O,).
        bits: Width of the codes.
        bias: Float, (O,), or None.
        grid: Grid of the layer's input.

    Raises:
        QuantizationError: The sum of products may exceed 32 bits.
    """
    like = (-1, *[1] * (codes.dim() - 1))
    halves, part = integer_weight(codes, zero.view(like), bits)
    stretch = 1
    if bits <= LARGEST_HALF_BITS:
        stretch = max(1, STRETCHED // max(1, int(halves.int().abs().max())))
    rows = halves.int() * stretch
    step = scale.double() * part / stretch
    steps = torch.zeros_like(step)
    if bias is not None:
        steps = bias.double() / (grid.scale * step)
    coarser = torch.pow(2.0, _coarsening(rows, steps, grid)).double()
    rows = (rows / coarser.view(like)).round()
    dead = rows.flatten(1).abs().amax(1) == 0
    unit = round(1 / part)
    return IntegerWeight(
        codes=codes,
        bits=bits,
        unit=unit,
        offset=(zero * unit).round().int(),
        stretch=torch.full_like(zero, stretch).int().masked_fill(dead, 0),
        values=rows.to(torch.int8),
        scale=step * coarser,
        bias=(steps / coarser).round().int(),
    )


def largest_sum(weight: IntegerWeight, grid: CodeGrid) -> Tensor:
    """Return the largest magnitude that each channel's accumulator can have, (O,)."""
    products = weight.values.flatten(1).long().abs().sum(1) * grid.reach
    return products + weight.bias.long().abs()


def _coarsening(rows: Tensor, bias: Tensor, grid: CodeGrid) -> Tensor:
    """Return by which powers of two channels must be made coarser to fit, (O,).

    A channel that is nearly dead has tiny weights beside an ordinary bias, which in
    steps of the accumulator then exceeds 32 bits. Its weights lose bits until the bias
    fits: an error of about a millionth of the bias.
    """
    products = rows.flatten(1).abs().sum(1).double() * grid.reach
    if products.max() > LARGEST_SUM:
        raise QuantizationError(
            f"sums of {rows[0].numel()} products reach {products.max():.3g}, but "
            f"32 bits hold {LARGEST_SUM}: give the layer fewer bits"
        )
    excess = (products + bias.abs() + 1) / LARGEST_SUM
    return excess.log2().ceil().clamp(min=0)
