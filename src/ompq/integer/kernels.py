"""Integer arithmetic on images: what the steps of a network accumulate.

Every function takes and returns integer tensors; nothing in this file is a float.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from ompq.integer.steps import Average, Convolution, MaxPool, Pair


def padded(x: Tensor, sides: Sequence[Pair], value: int = 0) -> Tensor:
    """Return a tensor (N, ...) with a constant around it.

    Args:
        x: Integers of any shape.
        sides: How many before and after in each dimension but the first.
        value: What surrounds it.
    """
    if not any(before or after for before, after in sides):
        return x
    # torch's own padding turns the constant into a float.
    sizes = [
        size + before + after
        for size, (before, after) in zip(x.shape[1:], sides, strict=True)
    ]
    whole = x.new_full((x.shape[0], *sizes), value)
    inner = whole
    for axis, (before, _) in enumerate(sides, start=1):
        inner = inner.narrow(axis, before, x.shape[axis])
    inner.copy_(x)
    return whole


def convolve(x: Tensor, operation: Convolution) -> Tensor:
    """Return the sums of products of a convolution, with its bias.

    Args:
        x: Codes less their zero, int32, (N, C, H, W).
        operation: The convolution, its weight (O, C / groups, h, w).

    Returns:
        int32, (N, O, H', W').
    """
    top, left, bottom, right = operation.padding
    x = padded(x, ((0, 0), (top, bottom), (left, right)))
    weight = operation.weight.values.int()
    window = (weight.shape[2], weight.shape[3])
    taps = list(_taps(x, window, operation.stride, operation.dilation))
    groups, count = operation.groups, len(taps)
    if groups == x.shape[1] == weight.shape[0]:
        columns = weight.reshape(-1, count, 1, 1).unbind(1)  # each (C, 1, 1)
        sums = taps[0] * columns[0]
        for tap, column in zip(taps[1:], columns[1:], strict=True):
            sums += tap * column
    else:
        images, channels, height, width = taps[0].shape
        # Images stand side by side, so that each group is one product of matrices.
        stacked = torch.stack(taps, 2).permute(1, 2, 0, 3, 4)  # (C, taps, N, H', W')
        rows = stacked.reshape(groups, channels // groups * count, -1)
        parts = weight.reshape(groups, -1, rows.shape[1])  # (groups, O / groups, ...)
        sums = torch.bmm(parts, rows).reshape(-1, images, height, width)
        sums = sums.transpose(0, 1)
    return sums + operation.weight.bias.view(-1, 1, 1)


def window_sums(x: Tensor, operation: Average) -> Tensor:
    """Return the sum of each window, (N, C, H', W'), of codes less their zero."""
    if operation.whole:
        return x.sum((2, 3), keepdim=True)
    rows, columns = operation.padding
    x = padded(x, ((0, 0), (rows, rows), (columns, columns)))
    taps = _taps(x, operation.window, operation.stride, (1, 1))
    return torch.stack(list(taps)).sum(0)


def largest(codes: Tensor, operation: MaxPool) -> Tensor:
    """Return the largest code of each window, uint8, (N, C, H', W')."""
    ends = [
        _overhang(size, operation, axis) for axis, size in enumerate(codes.shape[2:])
    ]
    rows, columns = operation.padding
    # The lowest code never wins against one of the image.
    codes = padded(codes, ((0, 0), (rows, ends[0]), (columns, ends[1])))
    taps = list(_taps(codes, operation.window, operation.stride, operation.dilation))
    result = taps[0]
    for tap in taps[1:]:
        result = torch.maximum(result, tap)
    return result


def _overhang(size: int, operation: MaxPool, axis: int) -> int:
    """Return the padding after an axis, which ceiling may make longer."""
    before, stride = operation.padding[axis], operation.stride[axis]
    reach = operation.dilation[axis] * (operation.window[axis] - 1) + 1
    after = before
    if operation.ceil:
        rest = (size + 2 * before - reach) % stride
        count = (size + 2 * before - reach) // stride + 1
        # A further window must begin inside the image or the padding before it.
        if rest and count * stride < size + before:
            after += stride - rest
    return after


def _taps(x: Tensor, window: Pair, stride: Pair, dilation: Pair) -> Iterator[Tensor]:
    """Yield what all windows have at each of their places, (N, C, H', W')."""
    counts = [
        (x.shape[axis + 2] - dilation[axis] * (window[axis] - 1) - 1) // stride[axis]
        + 1
        for axis in (0, 1)
    ]
    for place in range(prod(window)):
        starts = (place // window[1] * dilation[0], place % window[1] * dilation[1])
        spans = [
            slice(start, start + stride[axis] * (counts[axis] - 1) + 1, stride[axis])
            for axis, start in enumerate(starts)
        ]
        yield x[:, :, spans[0], spans[1]]
