"""Phases of reconstruction, and what a method of reconstruction is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

from torch import nn

from ompq.layers import activation_quantizers
from ompq.parallel import copy_main
from ompq.progress import Progress
from ompq.quantization.moments import Moments
from ompq.reconstruction.block_data import BlockCache
from ompq.samples import Samples

# Called with a block, its inputs and targets, the settings, a seed and a progress
# callback; returns the error before and after.
Learn: TypeAlias = Callable[
    [nn.Module, BlockCache, Any, int, Progress | None], tuple[float, float]
]


@dataclass(frozen=True, eq=False)
class Phase:
    """One pass over the network, in groups of blocks that are learned jointly."""

    groups: Sequence[tuple[str, ...]]
    iterations: int
    learn: Learn
    config: Any
    suffix: str = ""  # appended to the blocks' names
    # Of the float outputs of each group's units, if learning restores them.
    moments: Mapping[tuple[str, ...], Mapping[str, Moments]] = field(
        default_factory=dict
    )
    begin: Callable[[nn.Module], None] = lambda _network: None
    float_activations: bool = False  # whether activations stay float during this phase

    @property
    def named(self) -> dict[str, tuple[str, ...]]:
        """The groups, by the names under which errors are reported."""
        return {"+".join(group) + self.suffix: group for group in self.groups}

    def prepare(self, network: nn.Module, done: Mapping[str, Any]) -> None:
        """Prepare the network, unless a stopped run has done so."""
        if not done.keys() & self.named.keys():
            self.begin(network)
            copy_main(network.state_dict().values())


class ReconstructionMethod(Protocol):
    """A way to reconstruct a network, as ``ReconstructConfig.rounding``.

    It is a frozen dataclass: its fields are its settings, and they identify a run that
    may be resumed.

    Attributes:
        skips_stem: Whether a first layer that is a block of its own keeps its rounding.
    """

    skips_stem: ClassVar[bool]

    @property
    def iterations(self) -> int:
        """Steps for each block."""

    def phases(
        self, groups: Sequence[tuple[str, ...]], samples: Samples
    ) -> Sequence[Phase]:
        """Return the passes over the network, in order, for groups of its blocks."""

    def adapted(self, network: str, iterations: int | None) -> "ReconstructionMethod":
        """Return the settings for a network, by its name, with this number of steps."""


@contextmanager
def float_activations(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """If ``wanted``, leave activations unrounded within the context."""
    quantizers = list(activation_quantizers(model).values())
    flags = [quantizer.enabled for quantizer in quantizers]
    try:
        for quantizer, flag in zip(quantizers, flags, strict=True):
            quantizer.enabled = flag and not wanted
        yield
    finally:
        for quantizer, flag in zip(quantizers, flags, strict=True):
            quantizer.enabled = flag
