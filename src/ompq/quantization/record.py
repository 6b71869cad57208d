"""The record: how a network was quantized, kept with it."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ompq.allocation.problem import Allocation
from ompq.configs import Accounting
from ompq.costs import coded_bytes, paper_bytes, unit_bytes
from ompq.entropy_coding.rates import (
    LARGEST_HALF,
    code_bytes,
    lowered_codes,
    pull_to,
    to_multiples,
)
from ompq.errors import QuantizationError
from ompq.layers import QuantizedLayer, StoredValues, quantized_layers
from ompq.network.graph import RECORD, bias_key
from ompq.network.units import Choice, LayerGraph, Skipped, Unit, by_bits
from ompq.notebook_tables import data_frame, html_table
from ompq.plans import Plan
from ompq.quantization.activation_sites import ActivationSite, Link
from ompq.quantization.equalization import Equalized
from ompq.score_tables import ScoreTable


@dataclass(frozen=True)
class BlockError:
    """How far reconstruction improved one block."""

    block: str
    before: float  # ||output − target||² / ||target||² before reconstruction
    after: float  # the same afterwards; equal to ``before`` if it did not improve
    improved: bool  # whether the error fell; if not, the block kept its rounding


@dataclass(frozen=True, repr=False)
class Quantization:
    """How a network was quantized."""

    graph: LayerGraph
    allocation: Allocation
    sites: tuple[ActivationSite, ...]  # where activations are quantized
    skipped: tuple[Skipped, ...]  # what stays float, with reasons
    errors: tuple[BlockError, ...] = ()  # how far reconstruction improved each block
    # Mean divergence from the float network on the samples, before and after it was
    # tuned as a whole. Packed files do not keep it.
    tuned: BlockError | None = None
    # Layers that compute with integers; empty before :func:`ompq.finalize`.
    links: tuple[Link, ...] = ()
    equalized: tuple[Equalized, ...] = ()  # channels that were rescaled
    output: str = "classes"  # what the network returns, see ompq.outputs
    # Bytes that its packed file should fill, or 0. Packed files do not keep it.
    limit: int = 0

    def __repr__(self) -> str:
        return f"Quantization({self.allocation!r}, {len(self.skipped)} left float)"

    def to_dict(self) -> list[dict[str, Any]]:
        """Return one row per unit: its bits and its size in a packed file."""
        bits = self.allocation
        return [
            {
                "name": unit.name,
                "kind": unit.kind,
                "bits": str(bits[unit.name]),
                "bytes": unit_bytes(unit, bits[unit.name]).total,
            }
            for unit in self.graph.units
        ]

    def to_dataframe(self) -> Any:
        """Return one row per unit as a pandas DataFrame."""
        return data_frame(self.to_dict())

    def _repr_html_(self) -> str:
        return html_table(repr(self), self.to_dict())


def quantization_of(model: nn.Module) -> Quantization:
    """Return how a network was quantized.

    Raises:
        QuantizationError: The network is not quantized.
    """
    record = getattr(model, RECORD, None)
    if not isinstance(record, Quantization):
        raise QuantizationError(
            f"{type(model).__name__} is not quantized; call ompq.quantize first"
        )
    return record


def with_quantization(model: nn.Module, record: Quantization) -> nn.Module:
    """Store how a network was quantized on the network, and return it."""
    setattr(model, RECORD, record)
    for module in model.modules():  # an inner one may be what users save
        if hasattr(module, "save_pretrained"):
            setattr(module, "save_pretrained", _refuse_to_save)  # noqa: B010
    return model


def _refuse_to_save(*_args: Any, **_settings: Any) -> None:
    """Stand in for a method of transformers that would leave the scales out."""
    raise QuantizationError(
        "save_pretrained would write the rounded weights without their scales; save a "
        "quantized network with ompq.save(quantized, 'net.ompq.safetensors') and load "
        "it with ompq.load('net.ompq.safetensors', model)"
    )


def network_totals(network: nn.Module, plan: Plan) -> dict[str, float]:
    """Return the plan's totals as they are for a network after training.

    Training may change what was planned: FracBits learns the bits, and the weights of
    LQ-Nets and RVQuant take levels or outliers besides their codes. These count as
    stored, scales and biases included, whatever the plan's accounting; the plan's other
    units keep it.
    """
    bits = quantization_of(network).allocation
    if dict(bits) != dict(plan.allocation):  # perhaps with bits that were no choice
        choices = tuple(by_bits({*bits.values()}))
        shape = len(plan.graph), len(choices)
        plan = replace(
            plan,
            choices=choices,
            scores=ScoreTable(np.zeros(shape)),
            allowed=np.ones(shape, dtype=bool),
            allocation=bits,
            files=(),
        )
    totals, layers, more = dict(plan.totals), quantized_layers(network), 0.0
    for unit in plan.graph.units:
        rule = layers[unit.name].rounding if unit.name in layers else None
        if isinstance(rule, StoredValues):
            more += rule.bytes - _replaced_bytes(unit, bits[unit.name], plan.accounting)
    totals["bits_per_parameter"] *= 1 + more / totals["bytes"]
    for name in {"bytes", "total_bytes"} & totals.keys():
        totals[name] += more
    return totals


def _replaced_bytes(unit: Unit, bits: Choice, accounting: Accounting) -> float:
    """Return what a plan counts for what ``StoredValues.bytes`` counts as well."""
    if accounting == "paper":
        return paper_bytes(unit, bits)
    planned = unit_bytes(unit, bits)
    return planned.total - planned.activations - planned.metadata


@torch.no_grad()
def keep_rates(quantized: nn.Module) -> None:
    """Make units fit their planned sizes in a packed file, in place.

    Scales of groups, unless all are 16-bit floats, and of coded units become multiples
    of one number, and biases of coded units 16-bit floats. While codes exceed their
    limit, those that matter least for the bits they save move towards zero. A network
    that already fits stays as it is.
    """
    record, layers = quantization_of(quantized), quantized_layers(quantized)
    state = quantized.state_dict(keep_vars=True)
    for layer in layers.values():
        if layer.group_size and not are_halves(layer.weight_scale):
            layer.weight_scale.copy_(to_multiples(layer.weight_scale))
    for unit in record.graph.units:
        rate = record.allocation[unit.name].rate
        bias = state.get(bias_key(unit))
        if rate and bias is not None:
            bias.copy_(bias.clamp(-LARGEST_HALF, LARGEST_HALF).half())
        if rate and unit.name in layers:
            own = layers[unit.name]
            _keep_rate(own, coded_bytes(unit.weights, own.rate))


def are_halves(scale: Tensor) -> bool:
    """Return whether scales are 16-bit floats."""
    return bool((scale.half().to(scale) == scale).all())


def _keep_rate(layer: QuantizedLayer, limit: int) -> None:
    grid, codes = layer.grid_like_weight(), layer.codes()
    scale = to_multiples(layer.weight_scale)
    if scale.equal(layer.weight_scale) and code_bytes(codes) <= limit:
        return
    position = layer.weight / grid.scale + grid.zero_point
    codes = lowered_codes(codes, position, 1.0, size=code_bytes, limit=limit)
    layer.weight_scale.copy_(scale)
    steps = pull_to(codes, position) - grid.zero_point
    layer.weight.copy_(layer.grid_like_weight().scale * steps)
