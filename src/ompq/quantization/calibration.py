"""Calibration: activation histograms, importance of values, Grams of layer inputs."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from ompq.quantization.sites import (
    ActivationSite,
    attention_arguments,
    for_each_head,
    operands,
    probabilities,
)
from ompq.ranges import (
    FEW_WEIGHTS,
    Observed,
    observe_range,
    value_bins,
    with_importance,
)
from ompq.recording import tensors_in, watch
from ompq.samples import (
    Report,
    Samples,
    collect,
    cudnn_kernels,
    first_tensor,
    map_batch,
    model_device,
    to_device,
)
from ompq.stages import Progress
from ompq.units import IN_PLACE, Unit

logger = logging.getLogger(__name__)
READING = "calibrating activations"

# Number of samples that importance is estimated from, and the largest batch, small
# because a backward pass needs all activations in memory.
_IMPORTANCE_SAMPLES, _BACKWARD_BATCH = 64, 16
_GRAM_SAMPLES = 32  # each has many positions
_LEAST_VARIANCE = 1e-9  # relative to the mean square; anything below is rounding error


def read_ranges(
    model: nn.Module,
    samples: Samples,
    sites: Sequence[ActivationSite],
    *,
    batch_size: int,
    report: Progress,
) -> list[Observed]:
    """Run the float network and return a histogram of the values at each site."""
    found: dict[int, Observed] = {}
    by_position = _sites_by_position(sites)

    def visit(at: int, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        for site in by_position.get(at, ()):
            operand = sites[site].operand
            if operand == "probabilities":
                tensor = probabilities(attention_arguments(args, kwargs))
            elif operand:
                tensor = operands(function, args, kwargs)[operand]
            else:
                tensor = next(tensors_in(output))
            found[site] = observe_range(tensor, found.get(site))

    total, device = samples.batch_count(batch_size), model_device(model)
    for done, batch in enumerate(samples.batches(batch_size), 1):
        moved = to_device(batch, device)
        visit(-1, None, (), {}, moved)
        watch(model, moved, visit)
        report(done, total, READING)
    return [found[site] for site in sorted(found)]


def weigh_ranges(
    model: nn.Module,
    samples: Samples,
    sites: Sequence[ActivationSite],
    seen: Sequence[Observed],
    *,
    batch_size: int,
    report: Progress,
) -> list[Observed]:
    """Add the importance of the values at each site for the network's output.

    To second order, an error changes the network's output distribution by a divergence
    of half its square times the Fisher information: the squared gradient of the
    network's own log-likelihood, here on the first 64 samples. If the network cannot be
    differentiated, all values get the same weight and a warning is logged.
    """
    importance = _Importance(sites, seen)
    generator = torch.Generator().manual_seed(0)
    first, device = samples.first(_IMPORTANCE_SAMPLES), model_device(model)
    size = min(batch_size, _BACKWARD_BATCH)
    try:
        for done, batch in enumerate(first.batches(size), 1):
            leaf = map_batch(to_device(batch, device), _leaf)
            leaves = [t for t in tensors_in(leaf) if t.requires_grad]
            with _differentiating(model, parameters=not leaves) as parameters:
                # The network may modify its input in place, which a leaf forbids.
                inputs = map_batch(leaf, torch.clone)
                importance.visit(-1, None, (), {}, inputs)
                output = watch(model, inputs, importance.visit, gradients=True)
                loss = _loss(first_tensor(output), generator)
                torch.autograd.grad(loss, leaves or parameters, allow_unused=True)
            report(done, first.batch_count(size), READING)
    except RuntimeError as error:
        logger.warning(
            "all values of an activation get the same weight: the network cannot be "
            "differentiated (%s)",
            str(error).splitlines()[0],
        )
        return list(seen)
    return importance.found


class _Importance:
    """Adds squared gradients to the histograms of sites during backward passes."""

    def __init__(
        self, sites: Sequence[ActivationSite], seen: Sequence[Observed]
    ) -> None:
        self.found = list(seen)
        self._sites, self._by_position = sites, _sites_by_position(sites)

    def visit(
        self, at: int, function: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Hook the tensors of a call that belong to sites."""
        for site in self._by_position.get(at, ()):
            operand = self._sites[site].operand
            if operand == "probabilities":
                arguments = attention_arguments(args, kwargs)
                self._hook_probabilities(site, arguments, output)
            elif operand:
                self._hook(site, operands(function, args, kwargs)[operand])
            else:
                self._hook(site, next(tensors_in(output)))

    def _hook(self, site: int, tensor: Tensor) -> None:
        if not tensor.requires_grad:
            return
        # Computed now, because the tensor may be modified in place later.
        bins = value_bins(self.found[site], tensor)

        def add(gradient: Tensor) -> None:
            self.found[site] = with_importance(self.found[site], bins, gradient)

        tensor.register_hook(add)  # type: ignore[no-untyped-call]

    def _hook_probabilities(self, site: int, given: Any, output: Tensor) -> None:
        """Hook the output instead: fused attention never returns its probabilities.

        Their gradient is the output's gradient times the transposed values.
        """
        if not output.requires_grad:
            return
        with torch.no_grad():
            bins = value_bins(self.found[site], probabilities(given))
        values = for_each_head(given, "value").detach().transpose(-2, -1)

        def add(gradient: Tensor) -> None:
            gradient = gradient @ values
            self.found[site] = with_importance(self.found[site], bins, gradient)

        output.register_hook(add)  # type: ignore[no-untyped-call]


def _sites_by_position(sites: Sequence[ActivationSite]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, site in enumerate(sites):
        for at in site.positions:
            found.setdefault(at, []).append(index)
    return found


@contextmanager
def _differentiating(model: nn.Module, *, parameters: bool) -> Iterator[list[Tensor]]:
    """Enable deterministic gradients; yield the network's floating-point parameters.

    They require gradients only if ``parameters`` is true. Otherwise gradients flow to
    the input alone, and layers save less for the backward pass.
    """
    found: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    flags = [p.requires_grad for p in found]
    try:
        for parameter in found:
            parameter.requires_grad_(parameters)
        with torch.enable_grad(), cudnn_kernels(repeatable=True):
            yield found
    finally:
        for parameter, flag in zip(found, flags, strict=True):
            parameter.requires_grad_(flag)


def _leaf(tensor: Tensor) -> Tensor:
    """Return a copy that requires gradients if it is floating-point."""
    tensor = tensor.detach().clone()
    return tensor.requires_grad_(tensor.is_floating_point())


def _loss(output: Tensor, generator: torch.Generator) -> Tensor:
    """Return a loss whose squared gradients estimate the Fisher information.

    For logits, it is −log p of classes drawn from p; otherwise the sum of the elements
    with random signs, which corresponds to a squared error.
    """
    if output.dim() == 2 and output.shape[1] > 1:
        log_p = output.float().log_softmax(1)
        # The argmax of log p + Gumbel noise is a class drawn from p.
        noise = -torch.empty(log_p.shape).exponential_(generator=generator).log()
        drawn = (log_p.detach() + noise.to(log_p.device)).argmax(1, keepdim=True)
        return -log_p.gather(1, drawn).sum()
    signs = torch.randint(2, output.shape, generator=generator) * 2 - 1
    return (output * signs.to(output.device)).sum()


def input_grams(
    model: nn.Module,
    units: Sequence[Unit],
    samples: Samples,
    *,
    centred: bool = True,
    batch_size: int,
    report: Report = lambda _done, _total: None,
) -> dict[str, Tensor]:
    """Return input Gram matrices, by name, of units with few weights per channel.

    They are positive definite, (C, K, K) or, where all channels have the same inputs,
    (1, K, K), and come from the first 32 samples. Transposed convolutions are left out.
    ``centred`` subtracts the mean input, whose error the bias can correct.
    """
    # Weights that are rounded in place have no module of their own.
    sums = {
        unit.name: _InputSums(model.get_submodule(unit.name))
        for unit in units
        if unit.kind not in (*IN_PLACE, "transposed")
        and unit.weights <= FEW_WEIGHTS * unit.out_channels
    }
    if not sums:
        return {}
    collectors = [(each.layer, each.add) for each in sums.values()]
    first = samples.first(_GRAM_SAMPLES)
    collect(model, first, collectors, batch_size=batch_size, report=report)
    return {n: each.gram(centred=centred) for n, each in sums.items() if each.count}


class _InputSums:
    """Running sums over the inputs of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.count = 0
        self._sum: Tensor | float = 0.0  # (groups, K, 1)
        self._products: Tensor | float = 0.0  # (groups, K, K)

    def add(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Add the input of one call of the layer."""
        x = next(tensors_in((args, kwargs)))
        if isinstance(layer, _ConvNd) and x.dim() == len(layer.kernel_size) + 1:
            x = x[None]  # one sample without a batch dimension
        # One sample at a time, as the patches of a convolution repeat its input.
        for sample in torch.split(x, 1):
            # In double precision, since the means that are subtracted may be large.
            columns = _columns(layer, sample, next(tensors_in(output)).shape).double()
            self.count += columns.shape[-1]
            self._sum = self._sum + columns.sum(-1, keepdim=True)
            self._products = self._products + columns @ columns.transpose(1, 2)

    def gram(self, *, centred: bool) -> Tensor:
        """Return the Gram matrix of each output channel's inputs, or the shared one."""
        gram = torch.as_tensor(self._products) / self.count
        mean_square = variance = _mean_diagonal(gram)
        if centred:
            mean = torch.as_tensor(self._sum) / self.count
            gram = gram - mean @ mean.transpose(1, 2)
            variance = _mean_diagonal(gram)
        # With fewer positions than weights the estimate is poor, and constant inputs
        # give none at all: the ridge then makes all weight errors count alike.
        width = gram.shape[-1]
        varying = variance > _LEAST_VARIANCE * mean_square
        ridge = torch.where(varying, variance * width / self.count, 1.0)
        gram = gram + ridge[:, None, None] * torch.eye(width).to(gram)
        if len(gram) > 1:
            channels = len(cast(Tensor, self.layer.weight))
            gram = gram.repeat_interleave(channels // len(gram), dim=0)
        return gram.float()


def _mean_diagonal(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=1, dim2=2).mean(1)


def _columns(layer: nn.Module, x: Tensor, output: Sequence[int]) -> Tensor:
    """Return the inputs that each weight is multiplied by, (groups, K, positions).

    A layer may pad its input itself, as TensorFlow does; the shape of its ``output``
    shows by how much.
    """
    if not isinstance(layer, _ConvNd):
        return x.reshape(-1, x.shape[-1]).T[None]
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
    # (N, C, positions..., kernel...)
    x = x.reshape(len(x), layer.groups, -1, *x.shape[2:])
    x = x.movedim(tuple(range(-dims, 0)), tuple(range(3, 3 + dims)))
    x = x.flatten(2, 2 + dims).flatten(3)  # (N, groups, K, positions)
    return x.permute(1, 2, 0, 3).flatten(2)
