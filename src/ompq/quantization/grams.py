"""How what a channel's weights are multiplied by varies together, where they are few.

The error that rounding makes in a channel's output is errorᵀ · Gram · error. With a few
weights, as in a depthwise convolution, errors do not average out, and of many grids
with about the same error in the weights some are by chance much better at the output.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ompq.graph.observation import tensors_in
from ompq.graph.units import Unit
from ompq.quantizers.search import FEW_WEIGHTS
from ompq.samples import Report, Samples, attached, run_first

_SAMPLES = 32
_AT_ONCE = 8
_LEAST_VARIANCE = 1e-9  # of the mean square; what is less is rounding


def input_grams(
    model: nn.Module,
    units: Sequence[Unit],
    samples: Samples,
    *,
    centred: bool = True,
    report: Report = lambda _done, _total: None,
) -> dict[str, Tensor]:
    """Return the Gram matrices of the inputs of units with few weights a channel.

    Args:
        model: The float network.
        units: Its units; transposed convolutions and projections inside an attention
            are left out.
        samples: Inputs; the first 32 are used.
        centred: Whether to take inputs as distances from their means, since biases
            make up for the errors of means.
        report: Called after each batch, with the number of batches done and of all.

    Returns:
        Unit name → (C, K, K) or, where all channels have the same inputs, (1, K, K);
        positive definite.
    """
    layers = {unit.name: _layer(model, unit) for unit in units}
    sums = {n: _Sums(layer) for n, layer in layers.items() if layer is not None}
    if not sums:
        return {}
    handles = [
        each.layer.register_forward_hook(each.add, with_kwargs=True)
        for each in sums.values()
    ]
    with attached(handles):
        run_first(model, samples, _SAMPLES, batch_size=_AT_ONCE, report=report)
    return {
        name: each.gram(centred=centred) for name, each in sums.items() if each.count
    }


def _layer(model: nn.Module, unit: Unit) -> nn.Module | None:
    if unit.kind == "attention":  # its projections have no module of their own
        return None
    layer = model.get_submodule(unit.name)
    plain = isinstance(layer, nn.Linear | _ConvNd)
    if not plain or isinstance(layer, _ConvTransposeNd):
        return None
    return layer if unit.weights <= FEW_WEIGHTS * unit.out_channels else None


class _Sums:
    """What a layer's inputs add up to, while the network runs.

    Attributes:
        layer: The layer.
        count: How many positions have been seen.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.count = 0
        self._sum: Tensor | float = 0.0  # (groups, K, 1)
        self._products: Tensor | float = 0.0  # (groups, K, K)

    def add(self, layer: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        """Forward hook: add what the layer gets."""
        # A convolution's patches are its input many times over: a sample at a time.
        for sample in _samples(layer, next(tensors_in((args, kwargs)))):
            # Double: means are taken off in the end, and may be nearly all there is.
            columns = _columns(layer, sample).double()
            self.count += columns.shape[-1]
            self._sum = self._sum + columns.sum(-1, keepdim=True)
            self._products = self._products + columns @ columns.transpose(1, 2)

    def gram(self, *, centred: bool) -> Tensor:
        """Return the Gram matrix of each output channel's inputs, or the only one."""
        gram = torch.as_tensor(self._products) / self.count
        square = usual = _mean_diagonal(gram)
        if centred:
            mean = torch.as_tensor(self._sum) / self.count
            gram = gram - mean @ mean.transpose(1, 2)
            usual = _mean_diagonal(gram)
        # Fewer positions than weights say little of how inputs vary together, and
        # inputs that are always the same say nothing: all errors count there.
        width = gram.shape[-1]
        varying = usual > _LEAST_VARIANCE * square
        ridge = torch.where(varying, usual * width / self.count, 1.0)
        gram = gram + ridge[:, None, None] * torch.eye(width).to(gram)
        if len(gram) > 1:
            channels = len(cast(Tensor, self.layer.weight))
            gram = gram.repeat_interleave(channels // len(gram), dim=0)
        return gram.float()


def _mean_diagonal(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=1, dim2=2).mean(1)


def _samples(layer: nn.Module, x: Tensor) -> Sequence[Tensor]:
    """Return the samples of what a layer gets, each with an axis for samples."""
    if isinstance(layer, _ConvNd) and x.dim() == len(layer.kernel_size) + 1:
        return [x[None]]
    return torch.split(x, 1)


def _columns(layer: nn.Module, x: Tensor) -> Tensor:
    """Return what each weight of a channel is multiplied by, (groups, K, positions)."""
    if not isinstance(layer, _ConvNd):
        return x.reshape(-1, x.shape[-1]).T[None]
    dims = len(layer.kernel_size)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    sizes = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    for axis, (size, stride, gap) in enumerate(sizes, start=2):
        x = x.unfold(axis, gap * (size - 1) + 1, stride)[..., ::gap]
    # (N, C, positions..., kernel...)
    x = x.reshape(len(x), layer.groups, -1, *x.shape[2:])
    x = x.movedim(tuple(range(-dims, 0)), tuple(range(3, 3 + dims)))
    x = x.flatten(2, 2 + dims).flatten(3)  # (N, groups, K, positions)
    return x.permute(1, 2, 0, 3).flatten(2)
