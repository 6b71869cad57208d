"""Outputs in 8 bits, for runtimes whose layers return nothing wider."""

from typing import Any

import torch
from torch import Tensor, nn

from ompq.grids import Grid
from ompq.layers import ActivationQuantizer
from ompq.network.observation import copy_network, tensors_in, with_tensors
from ompq.quantization.record import quantization_of, with_quantization
from ompq.samples import Samples, call, evaluating, model_device, to_device

_CHILD = "output_codes"  # name of the module that holds the quantizers
_BITS = 8
_BATCH = 64  # samples at a time


class OutputQuantizers(nn.ModuleList):
    """Rounds each output of a network to a grid of its own; a forward hook."""

    def forward(self, output: Any) -> Any:
        """Return the output: a ``Sequential`` calls all its modules, and this one."""
        return output

    def after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Return the output with its tensors rounded."""
        pairs = zip(self, tensors_in(output), strict=True)
        return with_tensors(output, [quantizer(tensor) for quantizer, tensor in pairs])


def with_output_grids(quantized: nn.Module, samples: Samples) -> nn.Module:
    """Return a copy that rounds its outputs to 8 bits, over the range on the samples.

    Range and not error decides, because the largest output is the answer.
    """
    result = copy_network(quantized)
    if hasattr(result, _CHILD):
        return result
    ends = _ranges(result, samples)
    found = [ActivationQuantizer(_covering(low, high)) for low, high in ends]
    quantizers = OutputQuantizers(found).to(model_device(result))
    result.add_module(_CHILD, quantizers)
    result.register_forward_hook(quantizers.after)
    return with_quantization(result, quantization_of(quantized))


def _ranges(network: nn.Module, samples: Samples) -> list[tuple[Tensor, Tensor]]:
    """Return the lowest and highest value of each output, and 0."""
    found: list[tuple[Tensor, Tensor]] = []
    device = model_device(network)
    for batch in samples.batches(_BATCH):
        with evaluating(network):
            outputs = list(tensors_in(call(network, to_device(batch, device))))
        zero = torch.zeros((), device=device)
        found = found or [(zero, zero)] * len(outputs)
        found = [
            (torch.minimum(low, output.min()), torch.maximum(high, output.max()))
            for (low, high), output in zip(found, outputs, strict=True)
        ]
    return found


def _covering(low: Tensor, high: Tensor) -> Grid:
    """Return a grid that covers a range with 0 in it."""
    steps = (1 << _BITS) - 1
    scale = ((high - low) / steps).clamp(min=torch.finfo(torch.float32).tiny)
    return Grid(scale, (-low / scale).round().clamp(0, steps), _BITS)
