"""Quantized toy networks, and runners of their blocks."""

from ompq.allocation.problem import Allocation
from ompq.configs import QuantizeConfig
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.quantization.pipeline import quantize
from ompq.reconstruction.block_data import BlockRunner
from ompq.samples import Samples


def quantized_at(network, bits, samples):
    names = trace(network, samples).names
    allocation = Allocation({name: Choice(bits, 8) for name in names})
    config = QuantizeConfig(output_error=False)  # which leaves more to learn
    return quantize(network, allocation, samples, config)


def runner_for(quantized, model, samples, batch_size=4, limit=1 << 30):
    given = Samples.of(samples)
    return BlockRunner(quantized, model, given, batch_size=batch_size, limit=limit)
