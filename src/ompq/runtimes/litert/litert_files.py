"""LiteRT files: written, run, and compared code by code before they appear."""

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ompq.errors import ExportError
from ompq.files import replacing
from ompq.integer.engine import IntegerNetwork
from ompq.integer.finalization import finalize
from ompq.integer.lowering import Steps, lower
from ompq.runtimes.export_result import ExportResult
from ompq.runtimes.litert.litert_graph import LitertGraph
from ompq.runtimes.litert.litert_kernels import litert_steps
from ompq.runtimes.litert.litert_network import LitertNetwork
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

_SIGN = 128
_FEW_TIES = 1e-3  # fraction of input codes that rounding a float may put one step off
_BATCH = 64  # samples at a time


def write_litert(
    quantized: nn.Module,
    path: Path,
    samples: Samples,
    *,
    metadata: Mapping[str, str],
    engine_images: int = 8,
    float_ends: bool = True,
) -> ExportResult:
    """Write a quantized network for LiteRT and verify that it computes the same.

    Args:
        metadata: Texts by name that the file holds.
        engine_images: How many samples every code is compared on.
        float_ends: Whether inputs and outputs are floats; if not, signed bytes, as
            microcontrollers want them.

    Raises:
        ExportError: LiteRT has no operator for a step, or its codes differ.
        MissingExtraError: LiteRT is not installed.
        QuantizationError: An operation has no integer kernel.
    """
    ended = with_output_grids(quantized, samples)
    network = finalize(ended, samples, saturation_safe=False, stretched=False)
    steps = litert_steps(lower(network, samples))
    graph = LitertGraph(steps, float_ends=float_ends)
    with replacing(path) as temporary:
        temporary.write_bytes(graph.content(metadata))
        images = first_tensor(samples.first_batch(engine_images))
        engine = _compare_codes(steps, images, float_ends=float_ends)
        file = LitertNetwork(temporary)
        simulated, given = (
            compare_networks(one, file, samples) for one in (network, quantized)
        )
    return ExportResult(
        path=path,
        format="tflite",
        bytes=path.stat().st_size,
        runtime=f"ai-edge-litert {_version()}",
        weights=tuple(graph.weights),
        engine=engine,
        simulated=simulated,
        given=given,
        limit=inf,
    )


def _version() -> str:
    from importlib.metadata import version

    return version("ai-edge-litert")


def _compare_codes(steps: Steps, images: Tensor, *, float_ends: bool) -> Agreement:
    """Compare every code of the runtime with the integer network; both must be equal.

    A copy of the file is run whose every tensor is an output.
    """
    watched = LitertGraph(steps, float_ends=float_ends, watched=range(len(steps.steps)))
    own = IntegerNetwork(steps)
    expected_input = own.input_codes(images)
    given: Any = images.float().numpy()
    if not float_ends:
        given = (expected_input.short() - _SIGN).to(torch.int8).numpy()
    found = LitertNetwork(watched.content()).run(given)
    codes = [
        torch.from_numpy(one.astype(np.int16)) + _SIGN
        for one in found[len(steps.outputs) :]
    ]
    ties = compare_outputs([codes[0]], [codes[0]], [(expected_input, codes[0])])
    if ties.codes_equal < 1 - _FEW_TIES or ties.codes_furthest > 1:
        raise ExportError(f"LiteRT quantizes the input differently: {ties}")
    expected = own.all_codes(codes[0].to(torch.uint8))
    for step, one, other in zip(steps.steps, expected, codes, strict=True):
        if not torch.equal(one.short(), other.to(torch.int16)):
            apart = (one.short() - other).abs()
            raise ExportError(
                f"{step.name}: LiteRT's codes differ from the integer network's: "
                f"{int((apart > 0).sum()):,} of {apart.numel():,}, up to "
                f"{int(apart.max())} steps away"
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
