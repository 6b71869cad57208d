"""export_onnx(): a file that is small, runs with int8 kernels, and is verified."""

import logging
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ompq.errors import shortened
from ompq.files import replacing
from ompq.integer.finalization import finalize
from ompq.integer.lowering import Steps, lower
from ompq.onnx.containers import StoredWeight
from ompq.onnx.inspection import NETWORK
from ompq.onnx.model import OnnxGraph, weights_only_model
from ompq.onnx.verification import (
    Agreement,
    Tolerance,
    against_codes,
    against_simulated,
    libraries,
    open_session,
    steps_tolerance,
)
from ompq.quantization import quantization_of
from ompq.samples import Samples, SamplesLike, first_tensor

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
    # activations are float, which integers do not cover.
    engine: Agreement | None
    # Agreement of ONNX Runtime with the network as it was given. It equals
    # ``simulated`` if that was finalized already.
    given: Agreement
    runtime: str  # what it was verified with, for example ``onnxruntime 1.31.1``
    # Whether no processor's 8-bit kernels can saturate. False only where
    # ``saturation_safe=False`` was asked for: then processors without VNNI compute
    # something else, unless a session's option ``session.x64quantprecision`` is "1".
    saturation_safe: bool


def export_onnx(  # noqa: PLR0913
    quantized: nn.Module,
    path: str | Path,
    samples: SamplesLike,
    *,
    opset: int = 21,
    engine_images: int = 8,
    network: str = "",
    saturation_safe: bool = True,
) -> ExportResult:
    """Write a quantized network as ONNX and verify that it computes the same.

    Args:
        quantized: From :func:`ompq.quantize`, perhaps reconstructed or trained. What
            is written is its finalized form; see :func:`ompq.finalize`. Where all
            activations are float, only weights are stored in fewer bits.
        path: The file to write; nothing is left there when verification fails.
        samples: Inputs to verify with; all are run. The file must agree with the
            network in its outputs and its codes; see :class:`Tolerance`.
        opset: Version of the standard operators.
        engine_images: How many samples the integer engine, which is slower, runs.
        network: The network's name, for example ``torchvision:resnet18``.
        saturation_safe: Whether the file is right on processors without VNNI too, whose
            8-bit kernels saturate. Weights of 8 bits are then restricted to about 7 in
            convolutions (see :func:`ompq.finalize`) and unsigned in the other layers.

    Returns:
        Where the file is, how large, and how nearly it agrees. Codes are equal to the
        last bit, and so are outputs of layers; an output that is computed from codes
        with floats, such as a final average, agrees within ``simulated.logits``. An
        input that holds NaN gives numbers in the file, since no integer stands for it,
        and NaN in PyTorch.

    Raises:
        MissingExtraError: onnx or onnxruntime is not installed.
        QuantizationError: An operation has no integer form; it is named.
        ExportError: The file does not compute what the network computes, or PyTorch
            cannot write its graph.
    """
    onnx, runtime = libraries()
    if opset < SMALLEST_OPSET:
        raise ValueError(f"opset={opset} is too old: use {SMALLEST_OPSET} or later")
    samples, steps, safe = Samples.of(samples), None, True
    finalized, codes, tolerance = quantized, {}, Tolerance()
    if quantization_of(quantized).sites:
        finalized = finalize(quantized, samples, saturation_safe=saturation_safe)
        steps = lower(finalized, samples)
        graph = OnnxGraph(steps, opset, saturation_safe=saturation_safe)
        model, weights, codes = graph.model(), graph.weights, graph.codes
        tolerance, safe = steps_tolerance(steps), saturation_safe or not _warned(steps)
    else:  # all activations are float
        model, weights = weights_only_model(quantized, samples, opset)
    if network:
        model.metadata_props.add(key=NETWORK, value=network)
    onnx.checker.check_model(model, full_check=True)
    with replacing(path) as temporary:
        temporary.write_bytes(model.SerializeToString())
        session = open_session(temporary)
        simulated = against_simulated(finalized, session, samples)
        tolerance.require(simulated, "simulated network")
        engine = None
        if steps is not None:
            images = first_tensor(samples.first_batch(engine_images))
            found = against_codes(model, codes, finalized, steps, images)
            tolerance.require(found[0], "simulated network")
            tolerance.require(found[1], "integer engine")
            simulated, engine = simulated.with_codes(found[0]), found[1]
        given = against_simulated(quantized, session, samples)
    return ExportResult(
        path=Path(path),
        bytes=Path(path).stat().st_size,
        opset=opset,
        weights=tuple(weights),
        simulated=simulated,
        engine=engine,
        given=given,
        runtime=f"onnxruntime {runtime.__version__}",
        saturation_safe=safe,
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
