"""What of a network is not planned: layers, operations and numbers that stay float."""

from collections.abc import Iterator, Sequence, Set

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ompq.graph.observation import Recording
from ompq.graph.units import Skipped, Unit

# Products of two activations: arithmetic that no weight's bits describe.
_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention")


def may_be_unit(module: nn.Module) -> bool:
    """Whether a module's weight is one whose bits may be chosen."""
    return isinstance(module, _ConvNd | nn.Linear | nn.MultiheadAttention)


def float_layers(
    model: nn.Module, planned: Set[int], named: Set[str]
) -> Iterator[Skipped]:
    """Name the modules whose own parameters stay float.

    Args:
        model: The network.
        planned: ids of the units' weights.
        named: Modules that are accounted for already.
    """
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in planned]
        if not own or name in named or may_be_unit(module):
            continue
        count = sum(p.numel() for p in own)
        yield Skipped(
            name or "(network)",
            f"{type(module).__name__} stays float: {count:,} parameters",
        )


def uncounted(recording: Recording) -> Iterator[Skipped]:
    """Name the operations that multiply two activations."""
    found: dict[str, int] = {}
    for call in recording.calls:
        plain = call.function in _PRODUCTS and len(call.inputs) > 1
        if plain or call.function == "multi_head_attention_forward":
            found[call.function] = found.get(call.function, 0) + 1
    for function, count in found.items():
        yield Skipped(
            f"{function}()",
            f"{count} calls multiply activations: they stay float and are not counted",
        )


def float_parameters(model: nn.Module, units: Sequence[Unit]) -> int:
    """Count the numbers that stay float after folding, buffers included."""
    gone = {unit.parameter for unit in units}
    gone |= {f"{unit.parameter.removesuffix('weight')}bias" for unit in units}
    folded = tuple(f"{unit.norm}." for unit in units if unit.norm)
    state = dict((*model.named_parameters(), *_float_buffers(model)))
    return sum(
        tensor.numel()
        for key, tensor in state.items()
        if key not in gone and not key.startswith(folded)
    )


def _float_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = model.state_dict()
    for key, buffer in model.named_buffers():
        if key in kept and buffer.is_floating_point():
            yield key, buffer
