"""Verification: an exported file computes what the network computes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ompq.errors import ExportError
from ompq.integer.engine import IntegerNetwork
from ompq.integer.lowering import Steps, input_names
from ompq.layers import LogQuantizer, activation_quantizers
from ompq.network.graph import RECORD
from ompq.network.observation import tensors_in
from ompq.runtimes.benchmark import session_of
from ompq.samples import (
    Batch,
    Samples,
    attached,
    batch_length,
    call,
    class_rows,
    evaluating,
    model_device,
    to_device,
)
from ompq.user_functions import reason

_TINY = torch.finfo(torch.float32).tiny
# From this many images on, a single one that differs may be a tie.
_ENOUGH_IMAGES = 32
_BATCH = 64  # samples at a time
_NOISES = 4  # runs with noise; a single one may change no code by chance
_WATCHED = 8  # samples whose codes are compared everywhere
_CODES_APART = 0.02  # mean difference of codes that ties of rounding explain
_LAST_DIGITS = 1e-6  # of floats, relative to a tensor's usual size


@dataclass(frozen=True)
class Agreement:
    """How closely two versions of a network agree on the same inputs."""

    images: int
    top1: float  # fraction of rows of logits whose largest is the same; 1 if not ranked
    # Largest difference of two logits, over the root mean square of all of that output;
    # the largest of all outputs.
    logits: float
    codes: int = 0  # number of activation codes compared
    codes_equal: float = 1.0  # fraction of them that are equal
    codes_furthest: int = 0  # largest difference of two codes, in steps
    # Whether the largest number of a row is compared: not if there are several outputs,
    # or one number a row.
    ranked: bool = True
    what: str = "images"  # what is compared, in words

    def with_codes(self, other: "Agreement") -> "Agreement":
        """Return the same with the codes of a comparison on fewer images."""
        names = ("codes", "codes_equal", "codes_furthest")
        return replace(self, **{name: getattr(other, name) for name in names})

    def __str__(self) -> str:
        what = "logits" if self.ranked else "outputs"
        text = f"{what} within {self.logits:.1e}" if self.logits else f"equal {what}"
        if self.ranked:
            text = (
                f"top-1 equal on {self.top1:.2%} of {self.images} {self.what}, {text}"
            )
        else:
            text = f"{text} on {self.images} samples"
        if not self.codes:
            return text
        if self.codes_equal == 1:
            return f"{text}, all codes equal"
        return (
            f"{text}, {self.codes_equal:.5%} of codes equal and the rest within "
            f"{self.codes_furthest}"
        )


def compare_outputs(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    codes: Iterable[tuple[Tensor, Tensor]] = (),
    *,
    classes: bool = True,
) -> Agreement:
    """Compare outputs (N, ...), and codes if there are any.

    Only of ``classes``, the largest number of each row is compared.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
        >>> print(compare_outputs([logits], [logits + 0.001]))
        top-1 equal on 100.00% of 2 images, logits within 7.1e-04
    """
    shapes = [[tuple(output.shape) for output in each] for each in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"outputs of shapes {shapes[0]} and {shapes[1]} do not match")
    if not first[0].numel():
        raise ValueError("there is no image to compare outputs on")
    count, equal, furthest = 0, 0, 0
    for one, other in codes:
        apart = (one.int() - other.int()).abs()
        count += apart.numel()
        equal += int((apart == 0).sum())
        furthest = max(furthest, int(apart.max()))
    one, other = class_rows(first[0]), class_rows(second[0])
    ranked = classes and len(first) == 1 and one.shape[1] > 1
    same = (one.argmax(1) == other.argmax(1)).double().mean()
    return Agreement(
        images=len(_rows(first[0])),
        top1=float(same) if ranked else 1.0,
        logits=max(map(_furthest, first, second)),
        codes=count,
        codes_equal=equal / count if count else 1.0,
        codes_furthest=furthest,
        ranked=ranked,
    )


def _rows(output: Tensor) -> Tensor:
    """Return an output with a first dimension, which a loss does not have."""
    return output if output.dim() else output[None]


def _furthest(first: Tensor, second: Tensor) -> float:
    """Return the largest difference over the root mean square; infinity for NaN."""
    size = first.double().square().mean().sqrt().clamp(min=_TINY)
    apart = (first.double() - second.double()).abs().max()
    return float((apart / size).nan_to_num(inf))


@dataclass(frozen=True)
class Tolerance:
    """How much an exported file may differ from the network."""

    # Largest difference of two logits, over their root mean square.
    logits: float = 1e-3
    exact_logits: float = 1e-4  # the same where all codes are equal: float rounding
    # Smallest fraction of images with the same top-1. One of 32 or more may differ.
    top1: float = 0.995
    codes_equal: float = 0.999  # smallest fraction of codes that are equal
    codes_furthest: int = 1  # largest difference of two codes, in steps

    def limit(self, found: Agreement) -> float:
        """Return how much logits may differ: less if all codes are equal."""
        exact = found.codes and found.codes_equal == 1
        return self.exact_logits if exact else self.logits

    def require(self, found: Agreement, against: str) -> None:
        """Raise an ExportError if a file does not compute what it should."""
        allowed = floor(found.images * (1 - self.top1) + 1e-9)
        if found.images >= _ENOUGH_IMAGES:
            allowed = max(1, allowed)
        logits = self.limit(found)
        if (
            round(found.images * (1 - found.top1)) > allowed
            or found.logits > logits
            or found.codes_equal < self.codes_equal
            or found.codes_furthest > self.codes_furthest
        ):
            raise ExportError(
                f"the file disagrees with the {against}: {found}. At least "
                f"{self.top1:.1%} of top-1 and {self.codes_equal:.1%} of codes must be "
                f"equal, codes within {self.codes_furthest} and logits within "
                f"{logits:.1e}. Nothing was written; please report this with the "
                "network and the versions of onnxruntime and the processor"
            )


def steps_tolerance(steps: Steps) -> Tolerance:
    """Return the tolerance of an integer network: logits within about one step."""
    return Tolerance(logits=2 / min(step.grid.qmax for step in steps.steps))


def traced_tolerance(network: nn.Module, samples: Samples) -> Tolerance:
    """Return the tolerance of a network with floats between its integers.

    Floats differ in their last digits between runtimes, which changes some codes, and
    these change others. How much depends on the network. So it is run with noise of
    that size before its quantizers; outputs may differ by four times as much as they
    do then, or by one step of a grid. A few samples are run several times, because a
    single run may change no code by chance.
    """
    quantizers = activation_quantizers(network).values()
    if not quantizers:
        return Tolerance()
    batch = samples.first_batch(_BATCH)
    plain, _ = _observe(network, batch)
    step = 2 / min((1 << quantizer.bits) - 1 for quantizer in quantizers)
    found = max(
        compare_outputs(plain, _observe(network, batch, noise=seed)[0]).logits
        for seed in range(-(-_BATCH // batch_length(batch)))
    )
    # If outputs are that close, top-1 differs only in a tie.
    return Tolerance(logits=max(step, 4 * found), top1=0.0)


def require_codes(model: Any, network: nn.Module, samples: Samples) -> None:
    """Raise an ExportError unless a traced file rounds activations to the right codes.

    A wrong scale in one node shows in its codes even if the outputs hide it. Codes may
    differ from the network's, on average, by four times what noise in the last digits
    of floats does to them, plus a fiftieth of a step.
    """
    clipped = {n.input[0]: n.output[0] for n in model.graph.node if n.op_type == "Clip"}
    names = [n.output[0] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    batch = to_device(samples.first_batch(_WATCHED), torch.device("cpu"))
    _, found = _with_codes(model, [clipped.get(name, name) for name in names], batch)
    _, plain = _observe(network, batch)
    noisy = [_observe(network, batch, noise=seed)[1] for seed in range(_NOISES)]
    for name, codes in zip(names, found, strict=True):
        # The exporter merges and moves nodes, so compare with the codes of every place.
        alike = (
            (_distance(like, codes), max(_distance(ours, other) for other in moved))
            for ours, *moved in zip(plain, *noisy, strict=True)
            if (like := _repeat(ours, codes.shape)) is not None
        )
        apart, noise = min(alike, default=(inf, 0.0))
        if apart > 4 * noise + _CODES_APART:
            raise ExportError(
                f"the file rounds {name} to codes that differ from the network's by "
                f"{apart:.3g} on average; rounding errors of floating point explain "
                f"{noise:.3g}. Nothing was written; please report this with the "
                "network and the version of onnxruntime"
            )


def _with_codes(
    model: Any, names: Sequence[str], batch: Batch
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a file; return its outputs, and the tensors of these names."""
    from onnx import ModelProto, helper

    watched = ModelProto()
    watched.CopyFrom(model)
    count = len(watched.graph.output)
    watched.graph.output.extend(map(helper.make_empty_tensor_value_info, names))
    results = run_session(open_session(watched.SerializeToString()), batch)
    return results[:count], results[count:]


def _repeat(codes: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return codes in this shape; None if they are of another.

    While a decoder is exported, it may repeat keys and values, one after the other,
    where several queries share them.
    """
    if codes.dim() != len(shape):
        return None
    for axis, size in enumerate(shape):
        times = size // max(1, codes.shape[axis])
        codes = codes.repeat_interleave(max(1, times), axis)
    return codes if codes.shape == shape else None


def _distance(first: Tensor, second: Tensor) -> float:
    return float((first - second.int()).abs().double().mean())


def _observe(
    network: nn.Module, batch: Batch, *, noise: int | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a network; return its outputs, and the codes of uniform grids in order.

    With ``noise``, a seed, noise is added to the last digits before each quantizer.
    """
    quantizers = activation_quantizers(network).values()
    generator = torch.Generator().manual_seed(noise or 0)
    codes: list[Tensor] = []

    def disturb(_quantizer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = args
        drawn = torch.randn(x.shape, generator=generator).to(x)
        return (x + drawn * x.square().mean().sqrt() * _LAST_DIGITS,)

    def note(quantizer: Any, _args: Any, output: Tensor) -> None:
        if quantizer.enabled and not isinstance(quantizer, LogQuantizer):
            levels = (output / quantizer.scale).round() + quantizer.zero_point
            codes.append(levels.int().cpu())

    hooks = [one.register_forward_hook(note) for one in quantizers]
    if noise is not None:
        hooks += [one.register_forward_pre_hook(disturb) for one in quantizers]
    with evaluating(network), attached(hooks):
        output = call(network, to_device(batch, model_device(network)))
    return [tensor.float().cpu() for tensor in tensors_in(output)], codes


def open_session(model: Path | bytes) -> Any:
    """Load a file, or its content, for this machine's CPU, as users do."""
    source = model if isinstance(model, bytes) else str(model)
    return session_of(source, torch.get_num_threads())


def run_session(session: Any, batch: Batch) -> list[Tensor]:
    """Return the outputs for a batch, tensors of (N, ...), the logits first."""
    read = {each.name for each in session.get_inputs()}
    given = {
        name: (one.float() if one.is_floating_point() else one).numpy()
        for name, one in zip(input_names(batch), tensors_in(batch), strict=True)
        if name in read
    }
    try:
        outputs = session.run(None, given)
    except Exception as error:
        sizes = ", ".join(str(tuple(one.shape)) for one in given.values())
        raise ExportError(
            f"the file does not run on inputs of shape {sizes}: {reason(error)}. If "
            "the network reads a size with len(x) or int(), PyTorch writes that number "
            "into the file: use x.shape[0] instead"
        ) from error
    return [torch.from_numpy(output) for output in outputs]


def against_simulated(
    quantized: nn.Module, session: Any, samples: Samples
) -> Agreement:
    """Compare the outputs of a file with those of a network in PyTorch."""
    ours: list[list[Tensor]] = []
    theirs: list[list[Tensor]] = []
    device = model_device(quantized)
    for batch in samples.batches(_BATCH):
        with evaluating(quantized):
            outputs = tensors_in(call(quantized, to_device(batch, device)))
        ours.append([output.float().cpu() for output in outputs])
        theirs.append(run_session(session, to_device(batch, torch.device("cpu"))))
    first, second = (
        [torch.cat([*map(_rows, parts)]) for parts in zip(*found, strict=True)]
        for found in (ours, theirs)
    )
    return compare_outputs(first, second, classes=_classifies(quantized))


def _classifies(quantized: nn.Module) -> bool:
    record = getattr(quantized, RECORD, None)
    return getattr(record, "output", "classes") == "classes"


def against_codes(
    model: Any,
    names: Mapping[int, str],
    network: nn.Module,
    steps: Steps,
    images: Tensor,
) -> tuple[Agreement, Agreement]:
    """Compare a file and its codes with the finalized network and with the engine.

    ``names`` holds the name of the tensor of each step's codes.
    """
    outputs, results = _with_codes(model, list(names.values()), images)
    found = dict(zip(names, results, strict=True))
    expected, codes = _observe(network, images)
    places = zip(steps.sites, codes, strict=True)
    pairs = [(one, found[at]) for at, one in places if at is not None]
    classes = _classifies(network)
    simulated = compare_outputs(expected, outputs, pairs, classes=classes)
    engine = IntegerNetwork(steps)
    own = engine.codes(images)
    pairs = [(own[at], one) for at, one in found.items()]
    computed = [*engine.run(images).values()]
    return simulated, compare_outputs(computed, outputs, pairs, classes=classes)
