"""Tensors of GGUF files: their names, types, order of rows and bytes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ompq.bit_widths import FLOAT_BITS
from ompq.errors import ExportError, shorten
from ompq.grids import Grid, like_weight
from ompq.layers import activation_quantizers
from ompq.network.graph import RECORD
from ompq.network.units import Unit
from ompq.optional_libraries import optional_library
from ompq.quantization.record import Quantization, quantization_of
from ompq.runtimes.gguf.gguf_blocks import type_of
from ompq.runtimes.gguf.gguf_metadata import (
    architecture,
    decoder_config,
    head_size,
    rope_base,
)

_FLOAT = "F32"
_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """A tensor as the file holds it."""

    name: str
    type: str  # F32, Q4_0, ...
    shape: tuple[int, ...]  # as PyTorch counts: rows first
    bits: int
    content: NDArray[Any]  # float32, or the bytes of each row, uint8
    values: Tensor  # what it stands for, float32, in the same order of rows


def named_tensors(network: nn.Module) -> Iterator[NamedTensor]:
    """Yield the tensors of a decoder, quantized or float, one by one.

    Raises:
        ExportError: llama.cpp has no place for a tensor, or no type for a weight.
    """
    layout = _Layout(network)
    units = rounded_units(network)
    for key, parameter in network.named_parameters():
        if key.endswith(".weight_scale"):
            continue
        unit = units.get(id(parameter))
        yield layout.tensor(key, parameter.detach(), unit)
    factors = layout.frequency_factors()
    if factors is not None:
        content = factors.numpy()
        yield NamedTensor(
            _FACTORS, _FLOAT, tuple(factors.shape), FLOAT_BITS, content, factors
        )


def rounded_units(network: nn.Module) -> dict[int, Unit]:
    """Return the units with rounded weights, by the identity of their parameter."""
    record = getattr(network, RECORD, None)
    if not isinstance(record, Quantization):
        return {}
    rounded = [name for name, site in activation_quantizers(network).items() if site]
    if rounded:
        raise ExportError(
            f"inputs of layers are rounded ({shorten(rounded)}), but llama.cpp "
            "rounds only weights: plan with target='gguf', or activation_choices=(32,)"
        )
    bits = record.allocation
    return {
        id(network.get_parameter(unit.parameter)): unit
        for unit in record.graph.units
        if bits[unit.name].weight < FLOAT_BITS
    }


class _Layout:
    """Where llama.cpp expects the tensors of a network."""

    def __init__(self, network: nn.Module) -> None:
        self.network: Any = network
        self.config = decoder_config(network)
        gguf, name = optional_library("gguf", "gguf"), architecture(network)
        kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
        self.swaps_rows = name == "llama"
        self._state = network.state_dict()
        self._names = gguf.get_tensor_name_map(
            kinds[name], self.config.num_hidden_layers
        )

    def tensor(self, key: str, parameter: Tensor, unit: Unit | None) -> NamedTensor:
        """Return a parameter as the file holds it."""
        name = self._names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None or self._is_new(key):
            raise ExportError(
                f"llama.cpp has no place for {key}"
                + "; plan with target='gguf', which adds no biases" * (name is not None)
            )
        shape = tuple(parameter.shape)
        if unit is None:
            values = self._rows(key, parameter.float().cpu())
            return NamedTensor(name, _FLOAT, shape, FLOAT_BITS, values.numpy(), values)
        grid = self._grid(unit)
        kind = type_of(grid.bits, unit.name, super_blocks=unit.super_blocks)
        content = self._rows(
            key, torch.from_numpy(kind.rows(parameter, grid, unit.name))
        )
        values = self._rows(key, grid.fake(parameter).float().cpu())
        return NamedTensor(name, kind.name, shape, kind.bits, content.numpy(), values)

    def _is_new(self, key: str) -> bool:
        """Return whether a bias was added by quantization."""
        if not key.endswith(".bias"):
            return False
        place, kind = key.split(".")[-2], self.config.model_type
        attention = kind == "qwen2" and place != "o_proj"
        attention = attention or bool(getattr(self.config, "attention_bias", False))
        own = {
            **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), attention),
            **dict.fromkeys(
                ("gate_proj", "up_proj", "down_proj"),
                bool(getattr(self.config, "mlp_bias", False)),
            ),
        }
        return not own.get(place, False)

    def _grid(self, unit: Unit) -> Grid:
        choice = quantization_of(self.network).allocation[unit.name]
        layout = unit.weight_shape, 0, unit.shared_by(choice)
        scale, zero_point = (
            like_weight(self._state[f"{unit.parameter}_{part}"], *layout)
            for part in ("scale", "zero_point")
        )
        return Grid(scale, zero_point, choice.weight)

    def _rows(self, key: str, values: Tensor) -> Tensor:
        """Return rows in llama.cpp's order.

        Its llama turns neighbouring channels of a head together, where transformers
        turns those of the first half with those of the second.
        """
        owner = key.split(".")[-2]
        if not self.swaps_rows or owner not in ("q_proj", "k_proj"):
            return values
        halves = values.reshape(-1, 2, head_size(self.config) // 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape).contiguous()

    def frequency_factors(self) -> Tensor | None:
        """Return what divides the rotary frequencies, (head / 2,); None without."""
        own = getattr(self.network.model, "rotary_emb", None)
        if own is None:
            return None
        if getattr(own, "attention_scaling", 1.0) != 1.0:
            raise ExportError(
                "a rotary embedding that scales attention cannot be written as GGUF"
            )
        size = head_size(self.config)
        plain = rope_base(self.config) ** (-torch.arange(0, size, 2) / size)
        factors = plain / own.inv_freq.detach().float().cpu()
        close = torch.allclose(factors, torch.ones_like(factors), rtol=1e-5)
        return None if close else factors


def most_common_bits(widths: Counter[int]) -> int:
    """Return the width of most weights."""
    return max(widths, key=lambda bits: (widths[bits], -bits), default=FLOAT_BITS)
