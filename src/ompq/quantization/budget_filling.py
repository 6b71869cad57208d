"""A coded network takes all of its budget: what was promised and not needed is spent.

A plan promises what a file takes at most. Scales and biases are compressed, codes end
below their limits, and rates are a few steps, so that a file ends below its budget.
Bytes that are left raise the rates of all coded layers alike: where a plan is optimal,
a byte is worth the same in each of them, and stays so.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from ompq.allocation.problem import Allocation
from ompq.costs import coded_bytes, overhead_bytes, unit_bytes
from ompq.entropy_coding.compressed_bytes import squeeze
from ompq.entropy_coding.rates import code_bytes, scale_multiples
from ompq.layers import QuantizedLayer, quantized_layers
from ompq.network.graph import bias_key
from ompq.network.units import IN_PLACE, LayerGraph, Unit
from ompq.plans import Plan
from ompq.quantization.record import keep_rates, quantization_of

# Costs that grow with the rates besides the size of the packed file.
_OF_RATES = {"weight_bits", "total_bytes", "graph_bytes"}
_LEFT = 0.002  # part of a budget that may stay unused
# What compression is expected to save of scales and biases before they are known.
_SCALES_SAVED, _BIASES_SAVED = 0.4, 0.08
_TRIES = 4


def size_limit(plan: object) -> int:
    """Return the bytes that a plan's file should fill, 0 if that is not its budget."""
    if not isinstance(plan, Plan) or plan.accounting != "packed":
        return 0
    limits = plan.budget.limits(plan.problem.costs)
    coded = any(choice.rate for choice in plan.allocation.values())
    alone = coded and not _OF_RATES & limits.keys()
    return int(limits.get("bytes", 0)) if alone else 0


def fill_budget(
    make: Callable[[Allocation], nn.Module],
    graph: LayerGraph,
    allocation: Allocation,
    limit: int,
) -> nn.Module:
    """Return a quantized network whose file takes almost all of its limit.

    Args:
        make: Quantizes with the given bits; called once, or twice if more bytes are
            left than expected.
        limit: Bytes; 0 leaves the rates as they are.
    """
    free = [unit for unit in graph.units if _is_free(unit, allocation)]
    if not limit or not free:
        return make(allocation)
    spare = limit - _promised_bytes(graph, allocation)
    for unit in free:
        promised = unit_bytes(unit, allocation[unit.name])
        spare += int(_SCALES_SAVED * promised.scales + _BIASES_SAVED * promised.biases)
    made = make(_raised(allocation, free, spare))
    left = limit - most_bytes(made)
    if left > _LEFT * limit:
        made = make(_raised(allocation, free, spare + left - int(_LEFT * limit / 2)))
    keep_budget(made)
    return made


def keep_budget(quantized: nn.Module) -> None:
    """Make units fit their rates, and the network's file its limit, in place."""
    keep_rates(quantized)
    limit = quantization_of(quantized).limit
    layers = [each for each in quantized_layers(quantized).values() if each.rate]
    for _ in range(_TRIES if limit else 0):
        excess = most_bytes(quantized) - limit
        if excess <= 0:
            return
        sizes = [code_bytes(layer.codes()) for layer in layers]
        for layer, size in zip(layers, sizes, strict=True):
            kept = size - -(-excess * size // sum(sizes)) - 1
            layer.rate = min(layer.rate, _rate(kept, layer.weight.numel()))
        keep_rates(quantized)


def pass_on(done: Iterable[nn.Module], later: Sequence[nn.Module]) -> None:
    """Let later layers have the bytes that those which are done did not need."""
    spare = 0
    for layer in done:
        if isinstance(layer, QuantizedLayer) and layer.rate:
            size, count = code_bytes(layer.codes()), layer.weight.numel()
            spare += coded_bytes(count, layer.rate) - size
            layer.rate = _rate(size, count)
    coded = [one for one in later if isinstance(one, QuantizedLayer) and one.rate]
    weights = sum(layer.weight.numel() for layer in coded)
    for layer in coded:
        layer.rate += 8 * spare / weights


@torch.no_grad()
def most_bytes(quantized: nn.Module) -> int:
    """Return the most that a network's packed file takes.

    What is not known before it is written, its header, counts as promised.
    """
    record, layers = quantization_of(quantized), quantized_layers(quantized)
    state = quantized.state_dict()
    total = _promised_bytes(record.graph, record.allocation)
    multiples, halves = list[Tensor](), list[Tensor]()
    for unit in record.graph.units:
        choice = record.allocation[unit.name]
        if not choice.rate or unit.name not in layers:
            continue
        layer, promised = layers[unit.name], unit_bytes(unit, choice)
        total += code_bytes(layer.codes()) - promised.weights
        multiples.append(scale_multiples(layer.weight_scale.flatten())[1])
        if (bias := state.get(bias_key(unit))) is not None:
            halves.append(bias.half())
    for parts in (multiples, halves):
        if parts:
            values = torch.cat(parts).cpu().numpy()
            if (squeezed := squeeze(values)) is not None:
                total += len(squeezed) - values.nbytes
    return total


def _promised_bytes(graph: LayerGraph, allocation: Allocation) -> int:
    units = sum(unit_bytes(one, allocation[one.name]).total for one in graph.units)
    return units + graph.float_bytes + overhead_bytes(graph, allocation.values())


def _rate(size: int, weights: int) -> float:
    """Return the rate at which weights may take exactly so many bytes."""
    return 8 * max(size - 0.5, 0.0) / weights  # half a byte, for it is rounded up


def _is_free(unit: Unit, allocation: Allocation) -> bool:
    """Return whether a unit's rate can be raised: it has a layer of its own."""
    own = unit.kind not in IN_PLACE and unit.calls > 0 and not unit.shared
    return own and allocation[unit.name].rate > 0


def _raised(allocation: Allocation, free: Sequence[Unit], spare: int) -> Allocation:
    """Return the allocation with rates that take so many bytes more."""
    more = 8 * max(spare, 0) / sum(unit.weights for unit in free)
    own = {unit.name: allocation[unit.name] for unit in free}
    raised = {name: one._replace(rate=one.rate + more) for name, one in own.items()}
    return Allocation({**allocation, **raised})
