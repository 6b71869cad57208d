"""Tune a reconstructed network as a whole: scales, biases and norms, not the rounding.

Reconstruction makes each block return what the float block returns. What counts is the
output of the network, where errors of blocks add up or cancel. The codes of the weights
stay fixed, so there are few values to learn, and a thousand unlabelled samples suffice.
"""

import copy
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ompq.bit_widths import LARGEST_BITS
from ompq.configs import OutputKind, TuningConfig
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    quantized_layers,
)
from ompq.outputs import Outputs
from ompq.parallel import add_up, process_count, rank
from ompq.progress import Progress
from ompq.quantization.record import quantization_of
from ompq.reconstruction.block_data import BlockCache
from ompq.reconstruction.descent import Descent, Picked, optimising
from ompq.reconstruction.rounding import SoftRounding, SoftWeights, cache_runs
from ompq.samples import evaluating, model_device

_FOR_SPREAD = 256  # samples that tell how much values vary


def tune(
    network: nn.Module,
    cache: BlockCache,
    config: TuningConfig,
    seed: int,
    progress: Progress | None = None,
) -> tuple[float, float]:
    """Tune a network in place; keep the result only if the divergence falls.

    Args:
        cache: The network's inputs, and the outputs of the float network.

    Returns:
        The mean divergence from the float network on the samples that judge, before
        and after.
    """
    cache.float_inputs = []
    outputs = _outputs(network, cache)
    before = _divergence(network, cache, outputs)
    count = int(add_up(torch.tensor(cache.learned_from, device=model_device(network))))
    state = copy.deepcopy(network.state_dict())
    trainable = {name: p.requires_grad for name, p in network.named_parameters()}
    network.requires_grad_(requires_grad=False)  # of all but what is learned
    with evaluating(network):
        layers = quantized_layers(network).values()
        soft = SoftRounding([*layers], cache_runs(network, cache))
        soft.harden()
    steps: list[Tensor] = [quantizer.scale for quantizer in _narrow(network)]
    learned: list[tuple[list[Tensor], int]] = [
        ([soft.stretch, soft.bias, *_norm_parameters(network)], 0),
        *(([step], column) for column, step in enumerate(steps, start=1)),
    ]
    rates = [config.activation_learning_rate * step.item() for step in steps]
    order = _sample_order(cache, config.steps(count), config.batch_size, seed)
    schedule = _schedule(len(order), [config.learning_rate, *rates])

    def loss(picked: Picked, _row: Tensor) -> tuple[Tensor, Tensor]:
        with soft.used(*SoftWeights.apply(*soft.learned)):
            output = cache.call(network, picked.inputs)
        error = _mean_divergence(outputs, output, picked.target)
        return error, error / max(before, torch.finfo(error.dtype).tiny)

    with optimising(network, seed):
        # Networks may do between their blocks what cannot be captured.
        descent = Descent(
            network,
            cache,
            learned,
            schedule,
            order,
            loss,
            capture=False,
            report_every=5,
            start="the reconstructed network",
        )
        descent.run(progress)
        with torch.no_grad():
            soft.finish()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(trainable[name])
    after = _divergence(network, cache, outputs)
    if not after < before:  # also if it is NaN
        network.load_state_dict(state)
    return before, after


def _outputs(network: nn.Module, cache: BlockCache) -> Outputs:
    """Return how to compare the network's single output with the targets."""
    [kind] = [k for k in quantization_of(network).output.split(",") if k != "ignored"]
    some = next(cache.batches(_FOR_SPREAD))
    targets = cache.targets.index_select(0, some)
    return Outputs.measured([cast(OutputKind, kind)], [[targets]])


def _schedule(steps: int, peaks: Sequence[float]) -> Tensor:
    """Return learning rates that follow a cosine to 0, (steps, peaks)."""
    time = torch.arange(steps) / steps
    return torch.outer((1 + (math.pi * time).cos()) / 2, torch.tensor(peaks))


def _mean_divergence(outputs: Outputs, output: Tensor, target: Tensor) -> Tensor:
    return outputs.divergences([target], [output], len(target)).mean()


def _divergence(network: nn.Module, cache: BlockCache, outputs: Outputs) -> float:
    """Return the mean divergence of the samples that judge."""
    device = model_device(network)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with evaluating(network):
        for index in cache.judging(cache.batch_size):
            inputs, target = cache.pick(index)
            output = cache.call(network, [t.to(device) for t in inputs])
            given = [target.to(device)], [output], len(index)
            found = outputs.divergences(*given).double()
            sums += torch.stack([found.sum(), found.new_tensor(len(index))])
    error, samples = add_up(sums).tolist()
    return float(error / samples)


def worth_tuning(network: nn.Module, config: TuningConfig) -> bool:
    """Return whether a quantized network gains enough by tuning."""
    return config.always or bool(_narrow(network))


def _narrow(network: nn.Module) -> list[ActivationQuantizer]:
    """Return the activation quantizers of fewer than 8 bits whose step is learnable."""
    quantizers = activation_quantizers(network).values()
    return [q for q in quantizers if q.bits < LARGEST_BITS and q.learnable]


def _norm_parameters(network: nn.Module) -> list[Tensor]:
    """Return the vectors among the parameters that stay float, such as LayerNorms'."""
    quantized = QuantizedLayer, ActivationQuantizer
    modules = (m for m in network.modules() if not isinstance(m, quantized))
    found = (p for module in modules for p in module.parameters(recurse=False))
    vectors = (p for p in found if p.dim() == 1 and p.is_floating_point())
    return [*dict.fromkeys(vectors)]  # two norms may share one


def _sample_order(cache: BlockCache, steps: int, batch_size: int, seed: int) -> Tensor:
    """Return the indices of each step's samples: shuffled passes, (steps, size)."""
    generator = torch.Generator().manual_seed(seed + rank())
    count = cache.learned_from
    size = min(max(batch_size // process_count(), 1), count)
    passes = range(math.ceil(steps * size / count))
    shuffled = [torch.randperm(count, generator=generator) for _ in passes]
    return torch.cat(shuffled)[: steps * size].view(steps, size)
