"""Passive operations: they move, select, clip or merge values and compute no new ones.

This is the only list of them. Add an operation to the row that says what it does, and
the graph, the calibration of activations, equalization, the integer engine and export
know it. Names in lower case are torch's, as
:func:`ompq.network.observation.function_name` gives them; names with capitals are
ONNX's.
"""

from typing import TypeAlias

Names: TypeAlias = frozenset[str]


def _names(*rows: str) -> Names:
    return frozenset(name for row in rows for name in row.split())


# Nothing changes: in eval mode, dropout returns its input.
SAME = _names(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout",
    "contiguous clone detach to type_as",
    "Identity",
)
# The same values in the same order.
SHAPES = _names(
    "flatten ravel unflatten view view_as reshape reshape_as squeeze unsqueeze",
    "Flatten Reshape Squeeze Unsqueeze",
)
# The same values in another order, without a copy.
ORDERS = _names("permute transpose t swapaxes swapdims movedim moveaxis", "Transpose")
# The same in memory of its own.
SHUFFLES = _names(
    "flip roll channel_shuffle pixel_shuffle pixel_unshuffle",
    "DepthToSpace SpaceToDepth",
)
# Some of the values.
PARTS = _names(
    "getitem chunk split tensor_split unbind narrow select", "Gather Slice Split"
)
# The largest values of windows; torch calls ``boolean_dispatch`` if pooling may return
# their places, too.
POOLS = _names(
    "max_pool1d max_pool2d max_pool3d",
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d boolean_dispatch",
    "MaxPool",
)
# The values, some of them several times, and zeros at the edges.
COPIES = _names(
    "pad interpolate_nearest repeat tile expand expand_as repeat_interleave",
    "Pad Expand Tile",
)
# The values of several tensors.
MERGES = _names("cat stack", "Concat")
# The values between two limits; a grid with these ends does the same.
CLIPS = _names("relu relu6 clamp_min", "Relu Clip")

LAYOUTS = SAME | SHAPES | ORDERS  # all values of one tensor, without a copy
VIEWS = LAYOUTS | PARTS
MOVES = VIEWS | SHUFFLES | POOLS | COPIES  # values of one tensor, on its grid
