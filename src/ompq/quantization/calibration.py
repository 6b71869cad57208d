"""Calibration: activation ranges, the importance of values, Grams of layer inputs."""

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

# Samples that suffice to tell which values matter, and how many of them run at a time
# at most: a backward pass keeps what the forward pass computed.
_FOR_IMPORTANCE, _BACKWARD_BATCH = 64, 16
_FOR_GRAMS = 32  # samples; each has many positions
_LEAST_VARIANCE = 1e-9  # of the mean square; what is less is rounding


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
    sites_at = _sites_by_position(sites)

    def visit(at: int, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        for site in sites_at.get(at, ()):
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
    """Add how much the values at each site matter to the network's output.

    To second order, an error changes the divergence between the network's answers by
    half its square times the squared gradient of the network's own likelihood (its
    Fisher information), here on the first 64 samples. Where the network cannot be
    differentiated, all values count alike, and a warning says so.
    """
    importance = _Importance(sites, seen)
    generator = torch.Generator().manual_seed(0)
    first, device = samples.first(_FOR_IMPORTANCE), model_device(model)
    size = min(batch_size, _BACKWARD_BATCH)
    try:
        for done, batch in enumerate(first.batches(size), 1):
            leaf = map_batch(to_device(batch, device), _leaf)
            ends = [t for t in tensors_in(leaf) if t.requires_grad]
            with _differentiating(model, parameters=not ends) as parameters:
                # The network may work on its input in place, which no leaf allows.
                inputs = map_batch(leaf, torch.clone)
                importance.visit(-1, None, (), {}, inputs)
                output = watch(model, inputs, importance.visit, gradients=True)
                loss = _loss(first_tensor(output), generator)
                torch.autograd.grad(loss, ends or parameters, allow_unused=True)
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
    """Counts the squared gradients of the values at each site, as they come."""

    def __init__(
        self, sites: Sequence[ActivationSite], seen: Sequence[Observed]
    ) -> None:
        self.found = list(seen)
        self._sites, self._sites_at = sites, _sites_by_position(sites)

    def visit(
        self, at: int, function: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Have the gradients of the tensors of a call counted."""
        for site in self._sites_at.get(at, ()):
            operand = self._sites[site].operand
            if operand == "probabilities":
                self._await_probabilities(
                    site, attention_arguments(args, kwargs), output
                )
            elif operand:
                self._await(site, operands(function, args, kwargs)[operand])
            else:
                self._await(site, next(tensors_in(output)))

    def _await(self, site: int, tensor: Tensor) -> None:
        if not tensor.requires_grad:
            return
        bins = value_bins(self.found[site], tensor)  # now: it may be changed in place

        def add(gradient: Tensor) -> None:
            self.found[site] = with_importance(self.found[site], bins, gradient)

        tensor.register_hook(add)  # type: ignore[no-untyped-call]

    def _await_probabilities(self, site: int, given: Any, output: Tensor) -> None:
        """Fused attention has no such tensor: its gradient is the output's times V."""
        if not output.requires_grad:
            return
        with torch.no_grad():
            bins = value_bins(self.found[site], probabilities(given))
        values = for_each_head(given, "value").detach().transpose(-2, -1)

        def add(gradient: Tensor) -> None:
            of_each = gradient @ values
            self.found[site] = with_importance(self.found[site], bins, of_each)

        output.register_hook(add)  # type: ignore[no-untyped-call]


def _sites_by_position(sites: Sequence[ActivationSite]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, site in enumerate(sites):
        for at in site.positions:
            found.setdefault(at, []).append(index)
    return found


@contextmanager
def _differentiating(model: nn.Module, *, parameters: bool) -> Iterator[list[Tensor]]:
    """Yield the network's parameters; gradients are repeatable within the context.

    Where gradients flow to the input, ``parameters`` need none, and layers keep less
    for the backward pass.
    """
    each: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    flags = [p.requires_grad for p in each]
    try:
        for parameter in each:
            parameter.requires_grad_(parameters)
        with torch.enable_grad(), cudnn_kernels(repeatable=True):
            yield each
    finally:
        for parameter, flag in zip(each, flags, strict=True):
            parameter.requires_grad_(flag)


def _leaf(tensor: Tensor) -> Tensor:
    """Return a copy that gradients flow to, if it can be one."""
    tensor = tensor.detach().clone()
    return tensor.requires_grad_(tensor.is_floating_point())


def _loss(output: Tensor, generator: torch.Generator) -> Tensor:
    """Return a loss whose squared gradients are the output's Fisher information.

    For logits, −log p of classes drawn from p itself; else the output's elements with
    signs drawn at random, as for a squared error.
    """
    if output.dim() == 2 and output.shape[1] > 1:
        log_p = output.float().log_softmax(1)
        # The largest of log p + Gumbel noise is a class drawn from p.
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
    """Return Gram matrices of the inputs of units with few weights a channel, by name.

    (C, K, K) or, where all channels have the same inputs, (1, K, K); positive definite;
    of the first 32 samples. Transposed convolutions are left out. ``centred`` takes
    inputs as distances from their means, since biases make up for the errors of means.
    """
    # What is rounded in place has no module of its own.
    sums = {
        unit.name: _InputSums(model.get_submodule(unit.name))
        for unit in units
        if unit.kind not in (*IN_PLACE, "transposed")
        and unit.weights <= FEW_WEIGHTS * unit.out_channels
    }
    if not sums:
        return {}
    collectors = [(each.layer, each.add) for each in sums.values()]
    first = samples.first(_FOR_GRAMS)
    collect(model, first, collectors, batch_size=batch_size, report=report)
    seen = {name: each for name, each in sums.items() if each.count}
    return {name: each.gram(centred=centred) for name, each in seen.items()}


class _InputSums:
    """Sums over the inputs of a layer, while the network runs."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.count = 0
        self._sum: Tensor | float = 0.0  # (groups, K, 1)
        self._products: Tensor | float = 0.0  # (groups, K, K)

    def add(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Add what the layer gets: a collector."""
        x = next(tensors_in((args, kwargs)))
        if isinstance(layer, _ConvNd) and x.dim() == len(layer.kernel_size) + 1:
            x = x[None]  # one sample without an axis for samples
        # A convolution's patches are its input many times over: a sample at a time.
        for sample in torch.split(x, 1):
            # Double: means are taken off in the end, and may be nearly all there is.
            columns = _columns(layer, sample, next(tensors_in(output)).shape).double()
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


def _columns(layer: nn.Module, x: Tensor, output: Sequence[int]) -> Tensor:
    """Return what each weight of a channel is multiplied by, (groups, K, positions).

    A layer may pad in its own forward, as TensorFlow does: ``output`` shows how much.
    """
    if not isinstance(layer, _ConvNd):
        return x.reshape(-1, x.shape[-1]).T[None]
    dims = len(layer.kernel_size)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    sizes = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    for axis, (size, stride, gap) in enumerate(sizes, start=2):
        reach = gap * (size - 1) + 1
        lack = max(stride * (output[axis - 2 - dims] - 1) + reach - x.shape[axis], 0)
        others = (0, 0) * (x.dim() - 1 - axis)
        x = F.pad(x, (*others, lack // 2, lack - lack // 2))
        x = x.unfold(axis, reach, stride)[..., ::gap]
    # (N, C, positions..., kernel...)
    x = x.reshape(len(x), layer.groups, -1, *x.shape[2:])
    x = x.movedim(tuple(range(-dims, 0)), tuple(range(3, 3 + dims)))
    x = x.flatten(2, 2 + dims).flatten(3)  # (N, groups, K, positions)
    return x.permute(1, 2, 0, 3).flatten(2)
