"""Error feedback: the weights of a channel make up for each other's rounding errors.

The inputs of a layer are correlated, so the error that rounding one weight causes in
the layer's output can be reduced by how the others are rounded. What is needed for this
are the second moments of the inputs, which come from one pass over some samples.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from ompq.entropy_coding.rates import (
    PRICE,
    ZERO,
    cheapest_codes,
    cheapest_neighbours,
    code_bits,
    pull_to,
)
from ompq.grids import Grid
from ompq.network.observation import tensors_in
from ompq.network.units import IN_PLACE, Unit
from ompq.offload import offloading
from ompq.samples import Report, Samples, collect
from ompq.weight_ranges import FEW_WEIGHTS
from ompq.working_memory import working_bytes

# Positions that are read in total: so many for each of the first 512 weights of a part,
# half as many for each further one, but not fewer than the second number.
_PER_WEIGHT, _FEWEST = 16, 1 << 12
_AT_ONCE = 1 << 22  # values of a few positions at a time, which bounds the memory
# A smaller variance is rounding error: relative to the mean square, and absolute.
_LEAST_VARIANCE, _TINY = 1e-9, 1e-30
# How many weights of a channel make up for each other, at most. Longer is better;
# these are tried until the matrices of all layers fit half of the memory to work in.
_PARTS = (8192, 4096, 2048, 1024, 512)
PLAIN_RIDGE = 0.03  # relative to the mean variance
_SWEEPS = 2
_BLOCK = 64  # columns whose effect on the ones after them is added at once


def input_grams(
    model: nn.Module,
    units: Sequence[Unit],
    samples: Samples,
    *,
    centred: bool = True,
    batch_size: int,
    report: Report = lambda _done, _total: None,
) -> dict[str, Tensor]:
    """Return the input Gram matrices of units, by name.

    The shape is (groups, parts, K, K). Where the matrices of all channels' weights take
    too much memory, there is one for each part of them, zero where the last part has
    fewer weights than the others. All samples are read, and of these a random part of
    the positions, at least 4,096. ``centred`` subtracts the mean input, whose error the
    bias can correct.

    Left out are transposed convolutions, weights that other modules use as well, and
    inputs whose squares overflow.
    """
    uses = parameter_uses(model)
    chosen = [
        unit
        for unit in units
        # Weights that are rounded in place have no module of their own.
        if unit.kind not in (*IN_PLACE, "transposed")
        and uses[id(model.get_parameter(unit.parameter))] == 1
    ]
    if not chosen:
        return {}
    longest = _longest_part([model.get_submodule(unit.name) for unit in chosen])
    sums = {
        unit.name: _InputSums(model.get_submodule(unit.name), len(samples), longest)
        for unit in chosen
    }
    collectors = [(each.layer, each.add) for each in sums.values()]
    collect(model, samples, collectors, batch_size=batch_size, report=report)
    del collectors
    grams = {}
    for name in [*sums]:
        each = sums.pop(name)  # its memory is needed for the next
        if each.count:
            grams[name] = each.gram(centred=centred)
    return {name: gram for name, gram in grams.items() if gram.isfinite().all()}


def channel_grams(gram: Tensor, channels: int) -> Tensor | None:
    """Return the Gram matrix of each channel, (C, K, K), or the shared one, (1, K, K).

    None if a channel has many weights: searching a range by them would take too long.
    """
    groups, parts, width, _ = gram.shape
    if parts > 1 or width > FEW_WEIGHTS:
        return None
    return gram[:, 0].repeat_interleave(channels // groups if groups > 1 else 1, 0)


def parameter_uses(model: nn.Module) -> Counter[int]:
    """Return how many modules hold each parameter, by id."""
    # Ids, since holding on to the parameters of replaced layers would cost memory.
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(map(id, module.parameters(recurse=False)))
    return uses


class _InputSums:
    """Running sums over the inputs of a layer."""

    def __init__(self, layer: nn.Module, samples: int, longest: int) -> None:
        self.layer, self.samples = layer, samples
        self._parts = -(-_weights_of_channel(layer) // longest)
        self.count = 0
        self._generator = torch.Generator().manual_seed(0)
        self._shift: Tensor | float = 0.0  # about the mean, (groups, parts, K, 1)
        self._sum: Tensor | float = 0.0  # of distances from it
        self._products: Tensor | float = 0.0  # (groups, parts, K, K)
        # Where weights are offloaded, the device may not hold the sums of all layers.
        self._on_host = offloading()

    def add(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Add the input of one call of the layer."""
        x = next(tensors_in((args, kwargs)))
        if isinstance(layer, _ConvNd) and x.dim() == len(layer.kernel_size) + 1:
            x = x[None]  # one sample without a batch dimension
        shape = next(tensors_in(output)).shape
        width = -(-_weights_of_channel(layer) // self._parts)
        wanted = max(_FEWEST, _PER_WEIGHT * (width + min(width, _PARTS[-1])) // 2)
        wanted = len(x) * math.ceil(wanted / self.samples)
        for columns, _ in sampled_columns(
            layer, x.float(), shape, wanted, self._generator
        ):
            parts = _in_parts(columns, 1, self._parts)  # (groups, parts, K, positions)
            if not self.count:
                # In single precision, large means would hide small variances.
                self._shift = parts.mean(-1, keepdim=True)
            parts = parts - self._shift
            self.count += parts.shape[-1]
            self._sum = self._sum + parts.sum(-1, keepdim=True)
            products = self._kept(parts @ parts.mT)
            self._products = products.add_(self._products)

    def _kept(self, products: Tensor) -> Tensor:
        return products.cpu() if self._on_host else products

    def gram(self, *, centred: bool) -> Tensor:
        """Return the Gram matrices, with a ridge that makes them positive definite."""
        mean = torch.as_tensor(self._sum) / self.count
        gram = torch.as_tensor(self._products).div_(self.count)
        gram = gram.sub_(self._kept(mean @ mean.mT))
        mean = self._kept(mean + self._shift)
        variance = gram.diagonal(dim1=2, dim2=3).mean(2)
        mean_square = variance + mean.square().mean((2, 3))
        if not centred:
            gram, variance = gram + mean @ mean.mT, mean_square
        # With fewer positions than weights the estimate is poor, and constant inputs
        # give none at all: the ridge then makes all weight errors count alike.
        width = gram.shape[-1]
        varying = variance > (_LEAST_VARIANCE * mean_square).clamp(min=_TINY)
        ridge = torch.where(varying, variance * width / self.count, 1.0)
        gram.diagonal(dim1=2, dim2=3).add_(ridge[..., None])
        return gram


def sampled_columns(
    layer: nn.Module,
    x: Tensor,
    output: Sequence[int],
    wanted: int,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Yield what weights are multiplied by, (groups, K, positions), and the positions.

    There are ``wanted`` random positions, or all if there are fewer: indices of samples
    and places of the ``output``, which has this shape.
    """
    inputs = x if x.dim() > 1 else x[None]
    positions = inputs.shape[:-1]
    groups = getattr(layer, "groups", 1)
    if isinstance(layer, _ConvNd):
        inputs, positions = _patches(layer, x, output)
    total = math.prod(positions)
    picked = torch.arange(total)
    if wanted < total:
        picked = torch.randint(total, (wanted,), generator=generator)
    few = max(_AT_ONCE // (_weights_of_channel(layer) * groups), 64)
    for some in torch.split(picked.to(x.device), few):
        places = torch.unravel_index(some, positions)
        columns = inputs[places]
        yield columns.reshape(len(some), groups, -1).permute(1, 2, 0), places


def _weights_of_channel(layer: nn.Module) -> int:
    return cast(Tensor, layer.weight)[0].numel()


def _longest_part(layers: Sequence[nn.Module]) -> int:
    """Return the longest part for which the matrices of all layers fit the memory."""

    def matrix_bytes(layer: nn.Module, longest: int) -> int:
        width, groups = _weights_of_channel(layer), getattr(layer, "groups", 1)
        parts = -(-width // longest)
        return 4 * int(groups) * parts * (-(-width // parts)) ** 2

    for longest in _PARTS:
        if sum(matrix_bytes(one, longest) for one in layers) <= working_bytes() // 2:
            break
    return longest


def _patches(
    layer: _ConvNd, x: Tensor, output: Sequence[int]
) -> tuple[Tensor, torch.Size]:
    """Return a view (N, positions..., C, kernel...) of an input, and its first sizes.

    A layer may pad its input itself, as TensorFlow does; the shape of its ``output``
    shows by how much.
    """
    dims = len(layer.kernel_size)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    sizes = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    for axis, (size, stride, dilation) in enumerate(sizes, start=2):
        extent = dilation * (size - 1) + 1
        needed = stride * (output[axis - 2 - dims] - 1) + extent
        missing = max(needed - x.shape[axis], 0)
        later_axes = (0, 0) * (x.dim() - 1 - axis)
        x = F.pad(x, (*later_axes, missing // 2, missing - missing // 2))
        x = x.unfold(axis, extent, stride)[..., ::dilation]
    return x.movedim(1, 1 + dims), torch.Size([len(x), *x.shape[2 : 2 + dims]])


def _in_parts(tensor: Tensor, axis: int, count: int, *, fill: float = 0.0) -> Tensor:
    """Divide an axis into parts of equal size, filled up: (..., parts, K, ...)."""
    sizes = [*tensor.shape]
    width = -(-sizes[axis] // count)
    padding = (0, 0) * (tensor.dim() - 1 - axis) + (0, count * width - sizes[axis])
    sizes[axis : axis + 1] = count, width
    return F.pad(tensor, padding, value=fill).reshape(sizes)


@torch.no_grad()
def round_with_feedback(
    weight: Tensor,
    grid: Grid,
    gram: Tensor,
    *,
    refit: bool,
    ridge: float = PLAIN_RIDGE,
) -> tuple[Grid, Tensor]:
    """Round a weight, (C, ...), so that the error of its layer's output is small.

    The error of a channel's output is errorᵀ · gram · error. In a first sweep over the
    weights of a channel, each makes up for the errors of those before it, as in GPTQ
    (Frantar et al., 2022); in a few more, for those of all others.

    Args:
        grid: Its scale and zero point broadcast with the weight.
        gram: Of the inputs of this weight, from :func:`input_grams`.
        refit: Whether to fit a scale to the codes of each channel by least squares.
        ridge: As for :func:`ridged`.

    Returns:
        The grid, and a weight near the given one that rounds to the codes found.
    """
    rows = weight.flatten(1).float()
    scale, zero_point = (
        values.expand_as(weight).reshape(rows.shape)
        for values in (grid.scale, grid.zero_point)
    )
    found = _Rounding(rows, scale, zero_point, grid.qmax, ridged(gram, ridge))
    for matrix, _ in found.sweeps():
        found.sweep(matrix, partial(_nearest, qmax=grid.qmax))
        if refit:
            found.fit_scales()
    codes, scale = found.joined(found.codes), found.joined(found.scale)
    position = pull_to(codes, rows / scale + zero_point)
    stored = ((position - zero_point) * scale).reshape(weight.shape)
    if refit:
        grid = replace(grid, scale=scale[:, :1].reshape(grid.scale.shape))
    return grid, stored.to(weight)


@torch.no_grad()
def coded_with_feedback(
    weight: Tensor, step: float, gram: Tensor, *, ridge: float = PLAIN_RIDGE
) -> Tensor:
    """Return codes, uint8, that take few bits and keep the output's error small.

    As :func:`ompq.entropy_coding.rates.coded_codes`, but the weights of a channel
    make up for each other's errors, and a bit has a price in errors of the channel's
    output.
    """
    rows = weight.flatten(1).float()
    scale, zero_point = torch.full_like(rows, step), torch.full_like(rows, ZERO)
    gram = ridged(gram, ridge)
    found = _Rounding(rows, scale, zero_point, 2 * ZERO - 1, gram)
    found.codes = cheapest_codes(found.position()).float()
    price: Tensor | None = None
    for matrix, cost in found.sweeps():
        if price is None:
            price = PRICE * found.channel_means(cost)
        bits = code_bits(found.joined(found.codes))
        prices = price / cost[:, None]
        found.sweep(matrix, partial(_cheapest, bits=bits, prices=prices))
    return found.joined(found.codes).reshape(weight.shape).to(torch.uint8)


def ridged(gram: Tensor, ridge: float) -> Tensor:
    """Add a part of the mean variance to all variances: errors elsewhere count, too."""
    gram = gram.clone()
    diagonal = gram.diagonal(dim1=2, dim2=3)
    diagonal.add_(ridge * diagonal.mean(-1, keepdim=True))
    return gram


@torch.no_grad()
def feedback_error(error: Tensor, gram: Tensor) -> float:
    """Return the squared error of all outputs, errorᵀ · gram · error, of a weight's."""
    rows = error.flatten(1).float()
    grouped = rows.reshape(len(gram), -1, rows.shape[1])
    divided = _in_parts(grouped, 2, gram.shape[1]).transpose(1, 2)
    return float(((divided @ gram.to(rows)) * divided).sum())


def _nearest(column: Tensor, _at: int, *, qmax: int) -> Tensor:
    return column.round_().clamp_(0, qmax)


def _cheapest(column: Tensor, at: int, *, bits: Tensor, prices: Tensor) -> Tensor:
    return cheapest_neighbours(column, bits, prices[:, :, at])


class _Rounding:
    """The codes and scales of a weight, which sweeps improve.

    All values are divided as the matrices are: (groups · parts, C / groups, K / parts).
    """

    def __init__(
        self, rows: Tensor, scale: Tensor, zero_point: Tensor, qmax: int, gram: Tensor
    ) -> None:
        """Round to nearest; ``rows``, scales and zero points are (C, K)."""
        self.groups, self.parts = gram.shape[:2]
        self.width = rows.shape[1]
        self.gram = gram.flatten(0, 1).to(rows)
        self.weight, self.zero_point = self._divided(rows), self._divided(zero_point)
        self.scale = self._divided(scale, fill=1.0)
        self.codes = self.position().round_().clamp_(0, qmax)

    def position(self) -> Tensor:
        """Return where the weights lie between the codes."""
        return self.weight / self.scale + self.zero_point

    def _divided(self, values: Tensor, *, fill: float = 0.0) -> Tensor:
        grouped = values.reshape(self.groups, -1, self.width)
        parts = _in_parts(grouped, 2, self.parts, fill=fill)
        return parts.transpose(1, 2).flatten(0, 1)

    def joined(self, values: Tensor) -> Tensor:
        """Return values as rows, (C, K)."""
        grouped = values.reshape(self.groups, self.parts, *values.shape[1:])
        rows = grouped.transpose(1, 2).flatten(2).flatten(0, 1)
        return rows[:, : self.width]

    def sweeps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what each weight (column) owes to others, and what an error costs."""
        # With gram = U · D · Uᵀ and U unit upper triangular, the error of the output is
        # the sum of D times the squares of errorᵀ · U: each owes to those before it.
        upper = torch.linalg.cholesky(self.gram.flip(1, 2)).flip(1, 2)
        yield _without_diagonal(upper), _diagonal(upper).square()
        others = _without_diagonal(self.gram)
        for _ in range(_SWEEPS):
            yield others, _diagonal(self.gram)

    def sweep(self, matrix: Tensor, rounded: Callable[[Tensor, int], Tensor]) -> None:
        """Round each column of weights plus error · matrix, one after the other.

        ``rounded`` returns the codes of what is at a column, in steps.
        """
        error = self.weight - (self.codes - self.zero_point) * self.scale
        position = self.position()
        for start in range(0, error.shape[2], _BLOCK):
            block = slice(start, start + _BLOCK)
            # Columns come first here, so that each is contiguous.
            codes, scale, where = (
                values[:, :, block].movedim(2, 0).contiguous()
                for values in (self.codes, self.scale, position)
            )
            owed = (error @ matrix[:, :, block]).movedim(2, 0).contiguous()
            inner = matrix[:, block, block].permute(1, 2, 0)[..., None]
            columns = zip(owed, codes, scale, where, strict=True)
            for at, (column, change, step, old) in enumerate(columns):
                new = rounded(torch.addcdiv(old, column, step, out=column), start + at)
                change.sub_(new).mul_(step)
                column.copy_(new)
                # What is owed to this change by the columns of the block after it.
                owed[at + 1 :].addcmul_(inner[at, at + 1 :], change)
            self.codes[:, :, block] = owed.movedim(0, 2)
            steps = self.codes[:, :, block] - self.zero_point[:, :, block]
            kept = steps * self.scale[:, :, block]
            error[:, :, block] = self.weight[:, :, block] - kept

    def fit_scales(self) -> None:
        """Fit a scale to the codes of each channel by least squares."""
        steps = self.codes - self.zero_point
        outputs = steps @ self.gram
        fitted = self._of_channels(outputs * self.weight)
        fitted = fitted / self._of_channels(outputs * steps)
        # A channel of zeros has none, and a scale is positive.
        self.scale = torch.where(fitted > 0, fitted, self.scale)

    def channel_means(self, values: Tensor) -> Tensor:
        """Return means over the weights of each channel of one value for each column.

        They broadcast with the weights. Columns that fill parts up do not count.
        """
        rows = self.joined(values[:, None].expand_as(self.codes))
        return self._divided(rows.mean(1, keepdim=True).expand_as(rows), fill=1.0)

    def _of_channels(self, values: Tensor) -> Tensor:
        """Return sums over the weights of each channel, which broadcast with them."""
        sums = values.sum(2).reshape(self.groups, self.parts, -1)
        return sums.sum(1, keepdim=True).expand_as(sums).flatten(0, 1)[:, :, None]


def _without_diagonal(matrix: Tensor) -> Tensor:
    """Divide columns by their diagonal elements, which then become zero."""
    result = matrix / _diagonal(matrix)[:, None]
    _diagonal(result).zero_()
    return result


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=1, dim2=2)
