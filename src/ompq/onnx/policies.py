"""The bits of each layer for other tools."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ompq.allocation.solver import Allocation
from ompq.costs import FLOAT_BITS
from ompq.errors import shortened
from ompq.graph import LayerGraph

FORMAT = "ompq-policy/1"


@dataclass(frozen=True)
class Policy:
    """A config of another tool.

    Attributes:
        config: Plain data for JSON.
        lost: What the tool's format cannot say, a sentence each.
    """

    config: Mapping[str, Any]
    lost: tuple[str, ...]


def plain_policy(allocation: Allocation, network: str = "") -> Policy:
    """Return unit → bits, which says it all.

    Example:
        ``{"format": "ompq-policy/1", "network": "torchvision:resnet18",
        "bits": {"conv1": {"weight": 8, "activation": 8}, ...}}``
    """
    bits = {
        name: {"weight": choice.weight, "activation": choice.activation}
        for name, choice in allocation.items()
    }
    return Policy({"format": FORMAT, "network": network, "bits": bits}, ())


def torchao_policy(graph: LayerGraph, allocation: Allocation) -> Policy:
    """Return what ``torchao.core.config.config_from_dict`` reads: a FqnToConfig.

    torchao quantizes linear layers only, a scale a channel, and activations on the fly
    to 8 bits or not at all.
    """
    layers: dict[str, Any] = {}
    others, narrow = [], []
    for unit in graph.units:
        choice = allocation[unit.name]
        if choice.weight >= FLOAT_BITS:
            continue
        if unit.kind != "linear":
            others.append(f"{unit.name} ({unit.kind})")
            continue
        if choice.activation < 8:
            narrow.append(unit.name)
        layers[unit.name] = _torchao_layer(choice.weight, choice.activation)
    lost = ["scales and zero points: torchao finds its own"]
    if any("Dynamic" in one["_type"] for one in layers.values()):
        lost.append("fixed ranges of activations: torchao finds them for every input")
    if others:
        lost.append(f"{len(others)} layers that are not linear: {shortened(others, 3)}")
    if narrow:
        lost.append(f"activations below 8 bits: {shortened(narrow, 3)}")
    return Policy(_typed("FqnToConfig", fqn_to_config=layers), tuple(lost))


def _torchao_layer(weight: int, activation: int) -> dict[str, Any]:
    width = {"_type": "torch.dtype", "_data": f"int{weight}"}
    channels = _typed("PerAxis", axis=0)
    if activation >= FLOAT_BITS:
        return _typed("IntxWeightOnlyConfig", weight_dtype=width, granularity=channels)
    return _typed(
        "Int8DynamicActivationIntxWeightConfig",
        weight_dtype=width,
        weight_granularity=channels,
    )


def _typed(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 1, "_data": data}


def modelopt_policy(graph: LayerGraph, allocation: Allocation) -> Policy:
    """Return what ``modelopt.torch.quantization.quantize`` takes as its config.

    Quantizers that no entry names are off. Later entries override earlier ones.
    """
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    others = []
    for unit in graph.units:
        choice = allocation[unit.name]
        if unit.kind == "attention":
            others.append(unit.name)
            continue
        axis = 1 if unit.kind == "transposed" else 0
        for quantizer, bits, where in (
            ("weight_quantizer", choice.weight, axis),
            ("input_quantizer", choice.activation, None),
        ):
            if bits < FLOAT_BITS:
                name = f"{unit.name}.{quantizer}"
                cfg = {"num_bits": bits, "axis": where}
                entries.append({"quantizer_name": name, "cfg": cfg, "enable": True})
    lost = [
        "scales and zero points: ModelOpt finds its own, symmetric ones",
        "grids shared by the operands of sums and concatenations",
        "widths other than 8 (and 4 of linear layers) are simulated, not deployed",
    ]
    if others:
        lost.append(f"projections without a module: {shortened(others, 3)}")
    return Policy({"quant_cfg": entries, "algorithm": "max"}, tuple(lost))
