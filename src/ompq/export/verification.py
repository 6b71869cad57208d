"""What a file computes in ONNX Runtime, beside what the network computes."""

from collections.abc import Mapping
from math import floor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ompq.errors import ExportError, MissingExtraError
from ompq.export.onnx_graph import INPUT
from ompq.integer.agreement import Agreement, compare_outputs
from ompq.integer.network import IntegerNetwork
from ompq.samples import (
    Samples,
    call,
    evaluating,
    first_tensor,
    model_device,
    sample_batches,
    to_device,
)

# From so many images on, a single one that differs cannot be told from a tie.
_ENOUGH_IMAGES = 32
_BATCH = 64


def libraries() -> tuple[Any, Any]:
    """Return onnx and onnxruntime.

    Raises:
        MissingExtraError: One of them is not installed.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(error.name or "onnx", "onnx") from error
    return onnx, onnxruntime


def open_session(model: Path | bytes) -> Any:
    """Load a file, or its content, for this machine's CPU."""
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


def run_session(session: Any, images: Tensor) -> list[Tensor]:
    """Return the outputs for images (N, ...), the logits first."""
    outputs = session.run(None, {INPUT: images.float().numpy()})
    return [torch.from_numpy(output) for output in outputs]


def against_simulated(
    quantized: nn.Module, session: Any, samples: Samples
) -> Agreement:
    """Compare the logits of a file with those of a network in PyTorch."""
    ours, theirs = [], []
    device = model_device(quantized)
    for batch in sample_batches(samples, batch_size=_BATCH):
        with evaluating(quantized):
            logits = first_tensor(call(quantized, to_device(batch, device)))
        ours.append(logits.float().cpu())
        theirs.append(run_session(session, first_tensor(batch).cpu())[0])
    return compare_outputs(torch.cat(ours), torch.cat(theirs))


def against_engine(
    engine: IntegerNetwork, model: Any, codes: Mapping[int, str], images: Tensor
) -> Agreement:
    """Compare logits and all codes, which a copy of the file gives out.

    Args:
        engine: The network in integers.
        model: Content of the file.
        codes: Position of a step → name of the tensor of its codes.
        images: Inputs, (N, ...).
    """
    from onnx import ModelProto, helper

    watched = ModelProto()
    watched.CopyFrom(model)
    watched.graph.output.extend(
        helper.make_empty_tensor_value_info(name) for name in codes.values()
    )
    logits, *found = run_session(open_session(watched.SerializeToString()), images)
    expected = engine.codes(images)
    pairs = [(expected[at], c) for at, c in zip(codes, found, strict=True)]
    return compare_outputs(engine.run(images), logits, pairs)


def require(found: Agreement, smallest: float, against: str) -> None:
    """Make sure that a file computes what it should.

    Raises:
        ExportError: It does not.
    """
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
