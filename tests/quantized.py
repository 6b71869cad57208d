"""Quantized toy networks, and what their quantizers round to."""

import torch
from torch import nn

from ompq.allocation.problem import Allocation
from ompq.layers import activation_quantizers
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.quantization.pipeline import quantize


def quantized(network, samples, weight=(2, 3, 4, 5, 6, 7, 8), activation=8):
    """Quantize with widths that take turns, unit by unit."""
    widths = (weight,) if isinstance(weight, int) else weight
    units = trace(network, samples).units
    bits = {
        unit.name: Choice(widths[number % len(widths)], activation)
        for number, unit in enumerate(units)
    }
    return quantize(network, Allocation(bits), samples)


def simulated_codes(network: nn.Module, images):
    """Return quantizer name → codes of all its calls, and the logits."""
    found = {}

    def remember(name):
        def hook(module, _args, output):
            codes = (output / module.scale).round() + module.zero_point
            found.setdefault(name, []).append(codes.int())

        return hook

    quantizers = activation_quantizers(network)
    handles = [m.register_forward_hook(remember(n)) for n, m in quantizers.items()]
    with torch.no_grad():
        logits = network(images)
    for handle in handles:
        handle.remove()
    return found, logits
