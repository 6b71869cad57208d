"""export_onnx(): a file that is small, runs with int8 kernels, and is verified."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ompq.costs import Budget
from ompq.errors import ExportError, QuantizationError, shortened
from ompq.files import replacing
from ompq.integer.finalization import finalize
from ompq.integer.lowering import Steps, lower
from ompq.onnx.containers import StoredWeight
from ompq.onnx.inspection import NETWORK
from ompq.onnx.model import OnnxGraph
from ompq.onnx.traced import TracedModel, traced_model
from ompq.onnx.verification import (
    Agreement,
    Tolerance,
    against_codes,
    against_simulated,
    libraries,
    open_session,
    require_codes,
    steps_tolerance,
    traced_tolerance,
)
from ompq.quantization import quantization_of
from ompq.samples import Samples, SamplesLike, first_tensor

_WEAK = 0.5  # a limit that tells little, relative to the size of outputs
SMALLEST_OPSET = 18  # the first with a mask of bits
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportResult:
    """A verified file."""

    path: Path
    bytes: int
    opset: int  # version of the standard operators in it
    weights: tuple[StoredWeight, ...]
    simulated: Agreement  # agreement of ONNX Runtime with the finalized network
    # Agreement of ONNX Runtime with the integer engine, codes included; None where
    # integers do not cover the network.
    engine: Agreement | None
    # Agreement of ONNX Runtime with the network as it was given. It equals
    # ``simulated`` if that was finalized already.
    given: Agreement
    runtime: str  # what it was verified with, for example ``onnxruntime 1.31.1``
    # Whether no processor's 8-bit kernels can saturate. False only where
    # ``saturation_safe=False`` was asked for: then processors without VNNI compute
    # something else, unless a session's option ``session.x64quantprecision`` is "1".
    saturation_safe: bool
    # Kinds of nodes that compute with floats, and how many there are of each; and why
    # not everything is in integers. Empty where it is.
    floats: Mapping[str, int]
    reason: str
    # How far outputs were allowed to be from the network's, as ``simulated.logits``.
    limit: float


def export_onnx(  # noqa: PLR0913
    quantized: nn.Module,
    path: str | Path,
    samples: SamplesLike,
    *,
    opset: int = 21,
    engine_images: int = 8,
    network: str = "",
    saturation_safe: bool = True,
    budget: Budget | str | None = None,
) -> ExportResult:
    """Write a quantized network as ONNX and verify that it computes the same.

    Args:
        quantized: From :func:`ompq.quantize`, perhaps reconstructed or trained. What
            is written is its finalized form; see :func:`ompq.finalize`. Where integers
            do not cover it, the file computes with floats between them.
        path: The file to write; nothing is left there when verification fails.
        samples: Inputs to verify with; all are run. The file must agree with the
            network in its outputs and its codes; see :class:`Tolerance`.
        opset: Version of the standard operators.
        engine_images: How many samples the integer engine, which is slower, runs.
        network: The network's name, for example ``torchvision:resnet18``.
        saturation_safe: Whether the file is right on processors without VNNI too, whose
            8-bit kernels saturate. Weights of 8 bits are then restricted to about 7 in
            convolutions (see :func:`ompq.finalize`) and unsigned in the other layers.
        budget: The plan's; a file above what it allows for ONNX is not written.

    Returns:
        Where the file is, how large, and how nearly it agrees. In a file of integers
        (``floats`` is empty) codes are equal to the last bit, and so are outputs of
        layers; an output that is computed from codes with floats, such as a final
        average, agrees within ``simulated.logits``. An input that holds NaN gives
        numbers in the file, since no integer stands for it, and NaN in PyTorch.

    Raises:
        MissingExtraError: onnx or onnxruntime is not installed.
        ExportError: The file does not compute what the network computes, exceeds the
            budget, or PyTorch cannot write its graph.
    """
    onnx, runtime = libraries()
    if opset < SMALLEST_OPSET:
        raise ValueError(f"opset={opset} is too old: use {SMALLEST_OPSET} or later")
    samples = Samples.of(samples)
    finalized, reason = as_integers(quantized, samples, saturation_safe=saturation_safe)
    if finalized is None:
        made = _of_traced(traced_model(quantized, samples, opset), samples, reason)
    else:
        steps = lower(finalized, samples)
        graph = OnnxGraph(steps, opset, saturation_safe=saturation_safe)
        made = _of_steps(graph, finalized, saturation_safe=saturation_safe)
    if network:
        made.model.metadata_props.add(key=NETWORK, value=network)
    _check_size(path, made.model.ByteSize(), budget)
    onnx.checker.check_model(made.model, full_check=True)
    with replacing(path) as temporary:
        temporary.write_bytes(made.model.SerializeToString())
        session = open_session(temporary)
        simulated, engine = _verify(made, session, samples, engine_images)
        as_given = against_simulated(quantized, session, samples)
    return ExportResult(
        path=Path(path),
        bytes=Path(path).stat().st_size,
        opset=opset,
        weights=tuple(made.weights),
        simulated=simulated,
        engine=engine,
        given=as_given,
        runtime=f"onnxruntime {runtime.__version__}",
        saturation_safe=made.saturation_safe,
        floats=made.floats,
        reason=made.reason,
        limit=made.tolerance.limit(simulated),
    )


def _check_size(path: str | Path, size: int, budget: Budget | str | None) -> None:
    excess = "" if budget is None else Budget.of(budget).excess("onnx_bytes", size)
    if excess:
        raise ExportError(f"{path}: {excess}")


@dataclass(frozen=True)
class _Made:
    """A file's content, and what it is compared with."""

    model: Any
    weights: Sequence[StoredWeight]
    network: nn.Module
    tolerance: Tolerance
    steps: Steps | None = None
    codes: Mapping[int, str] = field(default_factory=dict)
    saturation_safe: bool = True
    floats: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""


def as_integers(
    quantized: nn.Module, samples: Samples, *, saturation_safe: bool
) -> tuple[nn.Module | None, str]:
    """Return a network that integers compute; or None, and why they cannot."""
    if not quantization_of(quantized).sites:
        return None, "activations are float"
    try:
        return finalize(quantized, samples, saturation_safe=saturation_safe), ""
    except QuantizationError as error:
        return None, str(error)


def _of_steps(
    graph: OnnxGraph, finalized: nn.Module, *, saturation_safe: bool
) -> _Made:
    return _Made(
        graph.model(),
        graph.weights,
        finalized,
        steps_tolerance(graph.steps),
        steps=graph.steps,
        codes=graph.codes,
        saturation_safe=saturation_safe or not _warned(graph.steps),
    )


def _verify(
    made: _Made, session: Any, samples: Samples, engine_images: int
) -> tuple[Agreement, Agreement | None]:
    """Return how a file agrees with the network and with the integer engine."""
    simulated = against_simulated(made.network, session, samples)
    made.tolerance.require(simulated, "simulated network")
    if made.steps is None:
        require_codes(made.model, made.network, samples)
        return simulated, None
    images = first_tensor(samples.first_batch(engine_images))
    given = (made.model, made.codes, made.network, made.steps, images)
    found, engine = against_codes(*given)
    made.tolerance.require(found, "simulated network")
    made.tolerance.require(engine, "integer engine")
    return simulated.with_codes(found), engine


def _of_traced(traced: TracedModel, samples: Samples, reason: str) -> _Made:
    tolerance = traced_tolerance(traced.network, samples)
    if tolerance.logits > _WEAK:
        _logger.warning(
            "the last digits of floats change the network's outputs so much that the "
            "file is only compared within %.2g of their size; check its accuracy",
            tolerance.logits,
        )
    return _Made(
        traced.model,
        traced.weights,
        traced.network,
        tolerance,
        floats=traced.floats,
        reason=reason,
    )


def _warned(steps: Steps) -> bool:
    """Warn of layers that saturate on some processors; return whether any does."""
    layers = steps.saturating()
    if layers:
        _logger.warning(
            "%s: 8-bit products saturate on processors without VNNI, and results "
            'differ there unless the session option session.x64quantprecision is "1"',
            shortened(layers),
        )
    return bool(layers)
