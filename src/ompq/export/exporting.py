"""export_onnx(): a file that is small, runs with 8-bit kernels, and is verified.

Before the file appears, ONNX Runtime runs it on the samples, and what it gives is
compared with the simulated network and with the integer engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ompq.errors import ExportError, MissingExtraError
from ompq.export.containers import StoredWeight
from ompq.export.onnx_graph import INPUT, OnnxGraph
from ompq.files import replacing
from ompq.integer.agreement import Agreement, compare_outputs
from ompq.integer.lowering import lower
from ompq.integer.network import IntegerNetwork
from ompq.integer.settling import settle
from ompq.samples import (
    Samples,
    call,
    evaluating,
    first_samples,
    first_tensor,
    model_device,
    sample_batches,
    to_device,
)

SMALLEST_OPSET = 18  # the first with a mask of bits
SMALLEST_AGREEMENT = 0.995
# From so many images on, a single one that differs cannot be told from a tie.
_ENOUGH_IMAGES = 32
_BATCH = 64


@dataclass(frozen=True)
class ExportResult:
    """A verified file.

    Attributes:
        path: The file.
        bytes: Its size.
        opset: Version of the standard operators in it.
        weights: How each weight is stored.
        simulated: Agreement of ONNX Runtime with the settled network.
        engine: Agreement of ONNX Runtime with the integer engine, codes included.
        given: Agreement of ONNX Runtime with the network as it was given. It equals
            ``simulated`` if that was settled already.
        runtime: What it was verified with, for example ``onnxruntime 1.31.1``.
    """

    path: Path
    bytes: int
    opset: int
    weights: tuple[StoredWeight, ...]
    simulated: Agreement
    engine: Agreement
    given: Agreement
    runtime: str


def export_onnx(
    quantized: nn.Module,
    path: str | Path,
    samples: Samples,
    *,
    opset: int = 21,
    smallest_agreement: float = SMALLEST_AGREEMENT,
    engine_images: int = 8,
) -> ExportResult:
    """Write a quantized network as ONNX and verify that it computes the same.

    Args:
        quantized: From :func:`ompq.quantize`, perhaps reconstructed or trained. What
            is written is its settled form; see :func:`ompq.integer.settling.settle`.
        path: The file to write; nothing is left there when verification fails.
        samples: Inputs to verify with; all are run.
        opset: Version of the standard operators.
        smallest_agreement: Least fraction of samples with the same top-1. One sample
            of 32 or more may always differ.
        engine_images: How many samples the integer engine, which is slower, runs.

    Returns:
        Where the file is, how large, and how nearly it agrees.

    Raises:
        MissingExtraError: onnx or onnxruntime is not installed.
        QuantizationError: An operation has no integer form; it is named.
        ExportError: The file does not compute what the network computes.
        ValueError: The opset is too old.
    """
    onnx, runtime = _libraries()
    if opset < SMALLEST_OPSET:
        raise ValueError(f"opset={opset} is too old: use {SMALLEST_OPSET} or later")
    settled = settle(quantized, samples)
    steps = lower(settled, samples)
    graph = OnnxGraph(steps, opset)
    model = graph.model()
    onnx.checker.check_model(model, full_check=True)
    with replacing(path) as temporary:
        temporary.write_bytes(model.SerializeToString())
        session = _session(temporary)
        simulated = _against_simulated(settled, session, samples)
        given = _against_simulated(quantized, session, samples)
        _require(simulated, smallest_agreement, "simulated network")
        images = first_tensor(first_samples(samples, engine_images)).cpu()
        engine = _against_engine(IntegerNetwork(steps), model, graph.codes, images)
        _require(engine, smallest_agreement, "integer engine")
        size = temporary.stat().st_size
    return ExportResult(
        path=Path(path),
        bytes=size,
        opset=opset,
        weights=tuple(graph.weights),
        simulated=simulated,
        engine=engine,
        given=given,
        runtime=f"onnxruntime {runtime.__version__}",
    )


def _libraries() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(error.name or "onnx", "onnx") from error
    return onnx, onnxruntime


def _session(model: Path | bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Without it processors that lack VNNI saturate sums of 8-bit products.
    options.add_session_config_entry("session.x64quantprecision", "1")
    source = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(
        source, options, providers=["CPUExecutionProvider"]
    )


def _run(session: Any, images: Tensor) -> list[Tensor]:
    outputs = session.run(None, {INPUT: images.float().numpy()})
    return [torch.from_numpy(output) for output in outputs]


def _against_simulated(
    quantized: nn.Module, session: Any, samples: Samples
) -> Agreement:
    ours, theirs = [], []
    device = model_device(quantized)
    for batch in sample_batches(samples, batch_size=_BATCH):
        with evaluating(quantized):
            logits = first_tensor(call(quantized, to_device(batch, device)))
        ours.append(logits.float().cpu())
        theirs.append(_run(session, first_tensor(batch).cpu())[0])
    return compare_outputs(torch.cat(ours), torch.cat(theirs))


def _against_engine(
    engine: IntegerNetwork, model: Any, codes: Mapping[int, str], images: Tensor
) -> Agreement:
    """Compare also all codes, which a copy of the file gives out."""
    from onnx import ModelProto, helper

    watched = ModelProto()
    watched.CopyFrom(model)
    watched.graph.output.extend(
        helper.make_empty_tensor_value_info(name) for name in codes.values()
    )
    logits, *found = _run(_session(watched.SerializeToString()), images)
    expected = engine.codes(images)
    pairs = [(expected[at], c) for at, c in zip(codes, found, strict=True)]
    return compare_outputs(engine.run(images), logits, pairs)


def _require(found: Agreement, smallest: float, against: str) -> None:
    allowed = floor(found.images * (1 - smallest) + 1e-9)
    if found.images >= _ENOUGH_IMAGES:
        allowed = max(1, allowed)
    differing = round(found.images * (1 - found.top1))
    if differing > allowed:
        raise ExportError(
            f"the file disagrees with the {against}: {found}, but at least "
            f"{smallest:.1%} must be equal. Nothing was written; please report this "
            "with the network and the versions of onnxruntime and the processor"
        )
