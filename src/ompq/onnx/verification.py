"""Agreement between an exported file and the network it came from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ompq.errors import ExportError, MissingExtraError
from ompq.integer.engine import IntegerNetwork
from ompq.onnx.model import INPUT
from ompq.samples import (
    Samples,
    call,
    evaluating,
    first_tensor,
    model_device,
    to_device,
)


@dataclass(frozen=True)
class Agreement:
    """How nearly two forms of a network agree on the same images.

    Attributes:
        images: Number of images.
        top1: Fraction of images with the same largest logit.
        logits: Largest difference of two logits, over the root mean square of all.
        codes: Number of activation codes compared; 0 where none were.
        codes_equal: Fraction of them that are equal.
        codes_furthest: Largest difference of two codes, in steps.
    """

    images: int
    top1: float
    logits: float
    codes: int = 0
    codes_equal: float = 1.0
    codes_furthest: int = 0

    def __str__(self) -> str:
        text = (
            f"top-1 equal on {self.top1:.2%} of {self.images} images, "
            f"logits within {self.logits:.1e}"
        )
        if self.codes:
            text += (
                f", {self.codes_equal:.5%} of codes equal and the rest within "
                f"{self.codes_furthest}"
            )
        return text


def compare_outputs(
    first: Tensor, second: Tensor, codes: Iterable[tuple[Tensor, Tensor]] = ()
) -> Agreement:
    """Compare logits, and codes if there are any.

    Args:
        first: Logits of one form, (N, classes, ...); differences are measured by it.
        second: Logits of the other, of the same shape.
        codes: Pairs of integer tensors of one shape each.

    Raises:
        ValueError: There is no image.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
        >>> print(compare_outputs(logits, logits + 0.001))
        top-1 equal on 100.00% of 2 images, logits within 7.1e-04
    """
    if not len(first):
        raise ValueError("there is no image to compare outputs on")
    first, second = first.double(), second.double()
    size = first.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    count, equal, furthest = 0, 0, 0
    for one, other in codes:
        apart = (one.int() - other.int()).abs()
        count += apart.numel()
        equal += int((apart == 0).sum())
        furthest = max(furthest, int(apart.max()))
    return Agreement(
        images=len(first),
        top1=float((first.argmax(1) == second.argmax(1)).double().mean()),
        logits=float((first - second).abs().max() / size),
        codes=count,
        codes_equal=equal / count if count else 1.0,
        codes_furthest=furthest,
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
    for batch in samples.batches(_BATCH):
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
