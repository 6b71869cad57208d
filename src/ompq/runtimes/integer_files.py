"""Files for runtimes that compute with integers throughout: LiteRT, ExecuTorch.

Written, run, and compared code by code before they appear.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ompq.configs import ExportConfig
from ompq.errors import ExportError
from ompq.files import replacing
from ompq.integer.engine import IntegerNetwork
from ompq.integer.finalization import finalize
from ompq.integer.lowering import Steps, lower
from ompq.runtimes.export_result import ExportResult
from ompq.runtimes.onnx.weight_containers import StoredWeight
from ompq.runtimes.output_grids import with_output_grids
from ompq.runtimes.verification import Agreement, compare_outputs
from ompq.samples import (
    Samples,
    call,
    evaluating,
    first_tensor,
    model_device,
    to_device,
)

SIGN = 128  # codes are unsigned; those of these runtimes are signed bytes
_FEW_TIES = 1e-3  # fraction of input codes that rounding a float may put one step off
_BATCH = 64  # samples at a time


class IntegerGraph(Protocol):
    """A network in a runtime's format, made of steps."""

    weights: list[StoredWeight]

    def __init__(
        self, steps: Steps, *, float_ends: bool = True, watched: Sequence[int] = ()
    ) -> None:
        """Convert steps; codes of ``watched`` ones become outputs after the others."""

    def content(self, metadata: Mapping[str, str] | None = None) -> bytes:
        """Return the bytes of the file, with texts by name."""


@dataclass(frozen=True)
class IntegerRuntime:
    """What a runtime of integers is made of."""

    name: str
    format: str
    package: str  # on PyPI; the result names its version
    arithmetic: Callable[[Steps], Steps]  # where it differs from the engine's
    graph: type[IntegerGraph]
    # Runs a file: an nn.Module whose ``run`` returns all outputs as arrays.
    network: Callable[[Path | bytes], Any]

    def write(
        self,
        quantized: nn.Module,
        path: Path,
        samples: Samples,
        config: ExportConfig,
        metadata: Mapping[str, str],
    ) -> ExportResult:
        """Write a quantized network and verify that the file computes the same.

        Raises:
            ExportError: The runtime has no operator for a step, or its codes differ.
            MissingExtraError: The runtime is not installed.
            QuantizationError: An operation has no integer kernel.
        """
        ended = with_output_grids(quantized, samples)
        network = finalize(ended, samples, saturation_safe=False, stretched=False)
        steps = self.arithmetic(lower(network, samples))
        self._require_bytes(steps)
        graph = self.graph(steps, float_ends=config.float_ends)
        with replacing(path) as temporary:
            temporary.write_bytes(graph.content(metadata))
            images = first_tensor(samples.first_batch(config.engine_images))
            engine = self._compare_codes(steps, images, float_ends=config.float_ends)
            file = self.network(temporary)
            simulated, given = (
                compare_networks(one, file, samples) for one in (network, quantized)
            )
        return ExportResult(
            path=path,
            format=self.format,
            bytes=path.stat().st_size,
            runtime=f"{self.package} {version(self.package)}",
            weights=tuple(graph.weights),
            engine=engine,
            simulated=simulated,
            given=given,
            limit=inf,
        )

    def _require_bytes(self, steps: Steps) -> None:
        for step in steps.steps:
            if step.grid.bits != 8:
                raise ExportError(
                    f"{step.name}: {self.name} computes activations in 8 bits, not in "
                    f"{step.grid.bits}; plan with --target {self.name.lower()}"
                )

    def _compare_codes(
        self, steps: Steps, images: Tensor, *, float_ends: bool
    ) -> Agreement:
        """Compare every code with the integer network's; both must be equal.

        A copy of the file is run whose every code is an output.
        """
        watched = self.graph(
            steps, float_ends=float_ends, watched=range(len(steps.steps))
        )
        own = IntegerNetwork(steps)
        expected_input = own.input_codes(images)
        given: Any = images.float().numpy()
        if not float_ends:
            given = (expected_input.short() - SIGN).to(torch.int8).numpy()
        found = self.network(watched.content()).run(given)
        codes = [
            torch.from_numpy(one.astype(np.int16)) + SIGN
            for one in found[len(steps.outputs) :]
        ]
        ties = compare_outputs([codes[0]], [codes[0]], [(expected_input, codes[0])])
        if ties.codes_equal < 1 - _FEW_TIES or ties.codes_furthest > 1:
            raise ExportError(f"{self.name} quantizes the input differently: {ties}")
        expected = own.all_codes(codes[0].to(torch.uint8))
        for step, one, other in zip(steps.steps, expected, codes, strict=True):
            if not torch.equal(one.short(), other.to(torch.int16)):
                apart = (one.short() - other).abs()
                raise ExportError(
                    f"{step.name}: {self.name}'s codes differ from the integer "
                    f"network's: {int((apart > 0).sum()):,} of {apart.numel():,}, "
                    f"up to {int(apart.max())} steps away"
                )
        ours, theirs = (
            [one[at].flatten(1).float() for at in steps.outputs.values()]
            for one in (expected, codes)
        )
        return compare_outputs(ours, theirs, zip(expected, codes, strict=True))


def compare_networks(
    first: nn.Module, second: nn.Module, samples: Samples
) -> Agreement:
    """Compare the outputs of two networks on all samples."""
    found: list[list[Tensor]] = [[], []]
    for batch in samples.batches(_BATCH):
        for network, outputs in zip((first, second), found, strict=True):
            with evaluating(network):
                output = call(network, to_device(batch, model_device(network)))
            outputs.append(_first(output).float().cpu())
    ours, theirs = ([torch.cat(outputs)] for outputs in found)
    return compare_outputs(ours, theirs)


def _first(output: Any) -> Tensor:
    return first_tensor(
        output if isinstance(output, Tensor) else tuple(output.values())
    )
