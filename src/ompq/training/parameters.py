"""What is trained: which parameters, at which rate, within which limits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.quantization.layers import (
    QuantizedLayer,
    activation_quantizers,
    quantized_layers,
)
from ompq.quantization.quantizing import quantization_of
from ompq.training.settings import TrainConfig

# A scale may shrink to this share of where it began: it must stay positive, and one
# that falls further has lost its tensor anyway.
_SMALLEST = 1 / 16


@dataclass(frozen=True, eq=False)
class Trainable:
    """The parameters of a network that are trained, by name.

    Attributes:
        weights: Those with weight decay.
        others: Biases, norms.
        scales: Steps of weights and activations.
        floors: The smallest value of each scale.
    """

    weights: dict[str, nn.Parameter]
    others: dict[str, nn.Parameter]
    scales: dict[str, nn.Parameter]
    floors: list[Tensor]

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """All of them."""
        return {**self.weights, **self.others, **self.scales}

    def optimizer(self, config: TrainConfig) -> torch.optim.SGD:
        """Return the optimizer; each group says its multiple of the learning rate."""
        groups: list[dict[str, Any]] = [
            {"params": [*self.weights.values()], "ratio": 1.0},
            {"params": [*self.others.values()], "ratio": 1.0, "weight_decay": 0.0},
            {
                "params": [*self.scales.values()],
                "ratio": config.step_rate,
                "weight_decay": 0.0,
            },
        ]
        return torch.optim.SGD(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )

    @torch.no_grad()
    def keep_positive(self) -> None:
        """Raise the scales that a step took too low."""
        if self.scales:
            torch._foreach_maximum_([*self.scales.values()], self.floors)


def make_trainable(model: nn.Module, config: TrainConfig) -> Trainable:
    """Let gradients reach what the settings say is trained, and nothing else.

    Args:
        model: A quantized network; flags of its parameters are changed.
        config: Says which scales are learned.
    """
    scales = _scales(model, config)
    known = {id(p) for p in scales.values()} | _untouched(model)
    rest = {n: p for n, p in model.named_parameters() if id(p) not in known}
    for parameter in model.parameters():
        parameter.requires_grad = False
    for parameter in (*scales.values(), *rest.values()):
        parameter.requires_grad_()
    return Trainable(
        weights={name: p for name, p in rest.items() if p.dim() > 1},
        others={name: p for name, p in rest.items() if p.dim() <= 1},
        scales=scales,
        floors=[_SMALLEST * scale.detach().clone() for scale in scales.values()],
    )


def _scales(model: nn.Module, config: TrainConfig) -> dict[str, nn.Parameter]:
    found: dict[str, nn.Parameter] = {}
    if config.weight_steps:
        for name, layer in quantized_layers(model).items():
            found[f"{name}.weight_scale".removeprefix(".")] = layer.weight_scale
    for name, quantizer in activation_quantizers(model).items():
        quantizer.clips = config.activations == "clip"
        if config.activations != "fixed":
            found[f"{name}.scale"] = quantizer.scale
    return found


def may_leave_unused(model: nn.Module) -> bool:
    """Return whether a pass may not reach all parameters of a quantized network.

    Quantized layers were seen to run; of what stayed float nobody knows.
    """
    parts = (*quantized_layers(model).values(), *activation_quantizers(model).values())
    reached = {id(parameter) for part in parts for parameter in part.parameters()}
    return any(id(parameter) not in reached for parameter in model.parameters())


def _untouched(model: nn.Module) -> set[int]:
    """Return the ids of scales, and of weights that were rounded where they are.

    And of biases of layers that keep their norm, whose shift stands in for them.
    """
    layers = quantized_layers(model).values()
    found = {id(layer.weight_scale) for layer in layers}
    found |= {id(layer.bias) for layer in layers if layer.norm is not None}
    found |= {
        id(quantizer.scale) for quantizer in activation_quantizers(model).values()
    }
    record = quantization_of(model)
    for unit in record.graph.units:
        owner = model.get_submodule(unit.parameter.rpartition(".")[0])
        rounded = record.allocation[unit.name].weight < FLOAT_BITS
        if rounded and not isinstance(owner, QuantizedLayer):
            found.add(id(model.get_parameter(unit.parameter)))
    return found
