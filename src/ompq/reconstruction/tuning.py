"""Tune a reconstructed network as a whole: scales, biases and norms, not the rounding.

Reconstruction makes each block return what the float block returns. What counts is the
output of the network, where errors of blocks add up or cancel. The codes of the weights
stay fixed, so there are few values to learn, and a thousand unlabelled samples suffice.
"""

import copy
import math

import torch
from torch import Tensor, nn

from ompq.bit_widths import LARGEST_BITS
from ompq.configs import TuningConfig
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    quantized_layers,
)
from ompq.parallel import add_up, process_count, rank
from ompq.progress import Progress
from ompq.reconstruction.block_data import BlockCache
from ompq.reconstruction.descent import Descent, Picked, optimising
from ompq.reconstruction.rounding import SoftRounding, SoftWeights, cache_runs
from ompq.samples import class_rows, evaluating, kl_divergence, model_device


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
        The mean divergence from the float network on the samples, before and after.
    """
    cache.float_inputs = []
    before, count = _divergence(network, cache)
    state = copy.deepcopy(network.state_dict())
    trainable = {name: p.requires_grad for name, p in network.named_parameters()}
    network.requires_grad_(requires_grad=False)  # of all but what is learned
    with evaluating(network):
        layers = list(quantized_layers(network).values())
        soft = SoftRounding(layers, cache_runs(network, cache))
        soft.harden()
    steps: list[Tensor] = [quantizer.scale for quantizer in _narrow(network)]
    learned: list[tuple[list[Tensor], int]] = [
        ([soft.stretch, soft.bias, *_norm_parameters(network)], 0),
        *(([step], column) for column, step in enumerate(steps, start=1)),
    ]
    rates = [config.activation_learning_rate * step.item() for step in steps]
    order = _sample_order(cache, config.steps(count), config.batch_size, seed)
    time = torch.arange(len(order)) / len(order)
    peaks = torch.tensor([config.learning_rate, *rates])
    schedule = torch.outer((1 + (math.pi * time).cos()) / 2, peaks)

    def loss(picked: Picked, _row: Tensor) -> tuple[Tensor, Tensor]:
        with soft.used(*SoftWeights.apply(*soft.learned)):
            output = cache.call(network, picked.inputs)
        error = network_output_error(output, picked.target).mean()
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
    after, _ = _divergence(network, cache)
    if not after < before:  # also if it is NaN
        network.load_state_dict(state)
    return before, after


def network_output_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the KL divergence of each row of logits from the target's, (rows,).

    If rows have one number, which has no distribution, it is the squared error.
    """
    rows, expected = class_rows(output), class_rows(target)
    if rows.shape[1] < 2:
        return (rows - expected).square().sum(1)
    return kl_divergence(expected, rows)


def _divergence(network: nn.Module, cache: BlockCache) -> tuple[float, int]:
    """Return the mean error of all rows, and the number of samples."""
    device = model_device(network)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with evaluating(network):
        for index in cache.batches(cache.batch_size):
            inputs, target = cache.pick(index)
            output = cache.call(network, [t.to(device) for t in inputs])
            found = network_output_error(output, target.to(device)).double()
            sums += torch.stack(
                [found.sum(), *found.new_tensor([len(found), len(index)])]
            )
    error, rows, samples = add_up(sums).tolist()
    return error / rows, int(samples)


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
    count = len(cache.targets)
    size = min(max(batch_size // process_count(), 1), count)
    passes = range(math.ceil(steps * size / count))
    shuffled = [torch.randperm(count, generator=generator) for _ in passes]
    return torch.cat(shuffled)[: steps * size].view(steps, size)
