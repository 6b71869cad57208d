"""What a recording says about structure: features, foldable norms, blocks, stages.

All of it follows from the observed flow of data; no list of layer names is consulted.
"""

from collections.abc import Mapping, Sequence
from math import prod

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.graph.observation import Call, Recording

_NORMS = {"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}
_ACTIVATIONS = {
    "relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu",
    "selu", "celu", "leaky_relu", "prelu", "mish", "sigmoid", "tanh", "softplus",
    "clamp", "clip", "clamp_min", "clamp_max", "threshold",
}  # fmt: skip
_LAYOUT = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "contiguous",
    "clone", "detach", "to", "type_as", "permute", "transpose", "movedim", "view",
    "reshape", "flatten", "unflatten", "squeeze", "unsqueeze",
}  # fmt: skip
_SCALINGS = {"add", "sub", "mul", "div"}


def find_features(
    recording: Recording, outputs: Mapping[str, int]
) -> dict[str, tuple[int, bool]]:
    """Follow each unit's output to the tensor that represents it.

    The path goes through norms, activations and residual sums for as long as nothing
    else reads the tensor: so an inner convolution is represented by what its
    activation returns and a block's last convolution by what the block returns.

    Args:
        recording: A forward pass.
        outputs: Unit name → position of the call that made its output.

    Returns:
        Unit name → (position of its feature, whether a residual sum was passed).
    """
    consumers = recording.consumers()
    return {name: _follow(recording, consumers, at) for name, at in outputs.items()}


def _follow(
    recording: Recording, consumers: Mapping[int, list[int]], at: int
) -> tuple[int, bool]:
    joined = False
    while len(readers := consumers.get(at, [])) == 1:
        reader = recording.calls[readers[0]]
        if is_sum(reader):
            joined = True
        elif not _passes_on(reader):
            break
        at = reader.position
    return at, joined


def is_sum(call: Call) -> bool:
    """Whether a call adds two activations, as a residual connection does."""
    return call.function == "add" and len(call.inputs) == 2


def _passes_on(call: Call) -> bool:
    if call.function in _SCALINGS:  # by a constant or a parameter
        return len(call.inputs) == 1
    return call.function in _NORMS | _ACTIVATIONS | _LAYOUT


def find_norms(
    model: nn.Module, recording: Recording, outputs: Mapping[str, int]
) -> dict[str, str]:
    """Return, for each unit, the batch norm that alone reads its output.

    Args:
        model: The network.
        recording: A forward pass of it.
        outputs: Unit name → position of its output, for units called once.
    """
    consumers = recording.consumers()
    calls_of: dict[str, int] = {}
    for call in recording.module_calls:
        calls_of[call.name] = calls_of.get(call.name, 0) + 1
    found = {}
    for name, at in outputs.items():
        readers = consumers.get(at, [])
        if len(readers) != 1:
            continue
        reader = recording.calls[readers[0]]
        if reader.function != "batch_norm" or calls_of.get(reader.module) != 1:
            continue
        norm = model.get_submodule(reader.module)
        # A subclass may do more than normalise (timm fuses the activation into it);
        # its batch_norm call is still the plain one, so folding it stays right.
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
            found[name] = reader.module
    return found


def find_activation(recording: Recording, at: int) -> str:
    """Return the activation that alone reads a unit's output, past a norm, or ""."""
    consumers = recording.consumers()
    while len(readers := consumers.get(at, [])) == 1:
        reader = recording.calls[readers[0]]
        if reader.function in _ACTIVATIONS:
            return reader.function
        if reader.function not in _NORMS:
            break
        at = reader.position
    return ""


def find_blocks(
    model: nn.Module, recording: Recording, units: Sequence[str]
) -> dict[str, str]:
    """Return the block of each unit: the module that reconstructs as one piece.

    A class whose ``forward`` itself adds or concatenates activations makes blocks; so
    does every other module of that class (a MobileNetV2 block without a shortcut). A
    unit belongs to its innermost such module, or stands alone.
    """
    classes = {
        type(model.get_submodule(call.module))
        for call in recording.calls
        if call.module and len(call.inputs) > 1 and (is_sum(call) or _joins(call))
    }
    blocks = {name for name, m in model.named_modules() if name and type(m) in classes}
    # A block that holds another is a container; its own units stand alone.
    holders = {
        outer for inner in blocks for outer in _ancestors(inner) if outer in blocks
    }
    found = {}
    for unit in units:
        inside = [name for name in _ancestors(unit) if name in blocks]
        innermost = inside[-1] if inside else unit
        found[unit] = unit if innermost in holders else innermost
    return found


def _joins(call: Call) -> bool:
    return call.function == "cat"


def _ancestors(name: str) -> list[str]:
    """Return the modules that hold ``name``, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def find_stages(
    recording: Recording,
    features: Mapping[str, tuple[int, bool]],
    blocks: Mapping[str, str],
) -> dict[str, int]:
    """Number the stages: a new one begins where a block's resolution changes."""
    resolution = {
        blocks[unit]: _resolution(recording.calls[at].shape)
        for unit, (at, _) in features.items()
    }  # the block's last unit wins: it is the block's output
    stages: dict[str, int] = {}
    numbers: dict[str, int] = {}
    stage, previous = -1, None
    for unit in features:
        block = blocks[unit]
        if block not in numbers:
            stage += resolution[block] != previous
            previous = resolution[block]
            numbers[block] = stage
        stages[unit] = numbers[block]
    return stages


def _resolution(shape: tuple[int, ...]) -> int:
    """Number of positions of an image feature (N, C, H, W); 1 for any other."""
    return prod(shape[2:]) if len(shape) > 3 else 1
