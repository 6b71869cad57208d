"""export_onnx(): a file that is small, runs with int8 kernels, and is verified."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ompq.bit_widths import SUM_BITS
from ompq.budgets import Budget
from ompq.errors import ExportError, shorten
from ompq.files import replacing
from ompq.integer.lowering import Steps, lower
from ompq.quantization.record import quantization_of
from ompq.runtimes.export_result import ExportResult
from ompq.runtimes.onnx.onnx_graph import (
    SMALLEST_OPSET,
    OnnxGraph,
    as_integers,
    libraries,
)
from ompq.runtimes.onnx.traced_graph import TracedModel, cut_texts, traced_model
from ompq.runtimes.onnx.weight_containers import StoredWeight
from ompq.runtimes.verification import (
    Agreement,
    Tolerance,
    against_codes,
    against_simulated,
    open_session,
    require_codes,
    steps_tolerance,
    traced_tolerance,
)
from ompq.samples import Samples, SamplesLike, first_tensor

_WEAK = 0.5  # a tolerance, relative to the size of outputs, that shows little

_STREAM_OPSET = 21  # the first whose codes may have 16 bits
_AT_OTHER_LENGTHS = 8  # samples that are compared at other lengths
_logger = logging.getLogger(__name__)


def export_onnx(  # noqa: PLR0913
    quantized: nn.Module,
    path: str | Path,
    samples: SamplesLike,
    *,
    opset: int = 21,
    engine_images: int = 8,
    metadata: Mapping[str, str] | None = None,
    saturation_safe: bool = True,
    budget: Budget | str | None = None,
) -> ExportResult:
    """Write a quantized network as ONNX and verify that it computes the same.

    Args:
        quantized: From :func:`ompq.quantize`, possibly reconstructed or trained. It is
            finalized first (:func:`ompq.finalize`). If some operation has no integer
            kernel, the file computes with floats there.
        path: Nothing is left there if verification fails.
        samples: Inputs to verify outputs and codes with; see :class:`Tolerance`.
        engine_images: How many samples the integer engine, which is slower, runs.
        metadata: Texts by name that the file holds.
        saturation_safe: Whether the file is also right on processors without VNNI,
            whose 8-bit kernels saturate. Weights of 8 bits are then restricted to about
            7 in convolutions (see :func:`ompq.finalize`) and unsigned elsewhere.
        budget: A file that exceeds its limit for ONNX is not written.

    Returns:
        The file's size and agreement. In a file of integers (``floats`` is empty) codes
        and outputs of layers are equal to the last bit; an output computed from codes
        with floats, such as a final average, agrees within ``simulated.logits``. For an
        input with NaN the file returns numbers, but PyTorch returns NaN.

    Raises:
        MissingExtraError: onnx or onnxruntime is not installed.
        ExportError: The file does not compute what the network computes, exceeds the
            budget, or PyTorch cannot write its graph.
    """
    _, runtime = libraries()
    if opset < SMALLEST_OPSET:
        raise ValueError(f"opset={opset} is too old: use {SMALLEST_OPSET} or later")
    samples = Samples.of(samples)
    finalized, reason = as_integers(quantized, samples, saturation_safe=saturation_safe)
    _check_streams(quantized, opset, reason)
    if finalized is None:
        traced = traced_model(quantized, samples, opset)
        if traced.length and not _takes_lengths(traced, samples):
            traced = traced_model(quantized, samples, opset, lengths=False)
        made = _of_traced(traced, samples, reason)
    else:
        steps = lower(finalized, samples)
        graph = OnnxGraph(steps, opset, saturation_safe=saturation_safe)
        made = _of_steps(graph, finalized, saturation_safe=saturation_safe)
    for name, text in (metadata or {}).items():
        made.model.metadata_props.add(key=name, value=text)
    if budget is not None:
        excess = Budget.of(budget).excess("onnx_bytes", made.model.ByteSize())
        if excess:
            raise ExportError(f"{path}: {excess}")
    with replacing(path) as temporary:
        temporary.write_bytes(made.model.SerializeToString())
        session = _checked_session(made.model, temporary)
        simulated, engine = _verify(made, session, samples, engine_images)
        as_given = against_simulated(quantized, session, samples)
    return ExportResult(
        path=Path(path),
        bytes=Path(path).stat().st_size,
        format="onnx",
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


def _checked_session(model: Any, path: Path) -> Any:
    """Return a session of a file that ONNX's rules and ONNX Runtime accept."""
    onnx, _ = libraries()
    try:
        onnx.checker.check_model(model, full_check=True)
        return open_session(path)
    except Exception as error:  # ONNX Runtime's own derive from nothing more particular
        reason = " ".join(str(error).split())[:300]
        raise ExportError(
            f"ONNX Runtime cannot compute this network: {reason}. It computes on CPUs "
            "in float32; convert layers of other types by model.float(), or leave out "
            "the operation"
        ) from error


def _check_streams(quantized: nn.Module, opset: int, reason: str) -> None:
    """Raise an ExportError if 16-bit residual streams have no nodes in the file."""
    if all(site.bits <= SUM_BITS for site in quantization_of(quantized).sites):
        return
    advice = "quantize with sum_bits=8"
    if opset < _STREAM_OPSET:
        raise ExportError(
            f"opset={opset} has no nodes for the 16-bit residual streams; use "
            f"{_STREAM_OPSET} or later, or {advice}"
        )
    if reason:
        raise ExportError(
            f"16-bit residual streams can be exported only with integers throughout "
            f"({reason}); {advice}"
        )


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


def _of_steps(
    graph: "OnnxGraph", finalized: nn.Module, *, saturation_safe: bool
) -> _Made:
    return _Made(
        graph.model(),
        graph.weights,
        finalized,
        steps_tolerance(graph.steps),
        steps=graph.steps,
        codes=graph.codes,
        saturation_safe=saturation_safe or not _warn_of_saturation(graph.steps),
    )


def _verify(
    made: _Made, session: Any, samples: Samples, engine_images: int
) -> tuple[Agreement, Agreement | None]:
    """Return the file's agreement with the network and with the integer engine."""
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


def _takes_lengths(traced: TracedModel, samples: Samples) -> bool:
    """Whether a file computes what the network does for texts of three lengths."""
    first = samples.first(_AT_OTHER_LENGTHS)
    tolerance = traced_tolerance(traced.network, first)
    try:
        session = open_session(traced.model.SerializeToString())
        for quarters in (4, 3, 2):
            length = max(1, traced.length * quarters // 4)
            shorter = Samples(tuple(cut_texts(one, length) for one in first.runs))
            found = against_simulated(traced.network, session, shorter)
            tolerance.require(found, "simulated network")
    except Exception as error:  # ONNX Runtime's own derive from nothing more particular
        _logger.info("texts have a fixed length in the file: %s", error)
        return False
    return True


def _of_traced(traced: TracedModel, samples: Samples, reason: str) -> _Made:
    tolerance = traced_tolerance(traced.network, samples)
    if tolerance.logits > _WEAK:
        _logger.warning(
            "rounding errors of floating point change the outputs so much that the "
            "file could only be verified to within %.2g of their size; check its "
            "accuracy",
            tolerance.logits,
        )
    if traced.float_layers:
        _logger.warning(
            "no faster than float: %s; their weights become floats when the file is "
            "loaded (%s)",
            shorten(traced.float_layers),
            reason,
        )
    return _Made(
        traced.model,
        traced.weights,
        traced.network,
        tolerance,
        floats=traced.floats,
        reason=reason,
    )


def _warn_of_saturation(steps: Steps) -> bool:
    """Warn about layers that saturate on some processors; return whether any does."""
    layers = steps.saturating()
    if layers:
        _logger.warning(
            "%s: 8-bit products saturate on processors without VNNI, and results "
            'differ there unless the session option session.x64quantprecision is "1"',
            shorten(layers),
        )
    return bool(layers)
