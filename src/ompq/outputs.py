"""Outputs: what a network returns, and how far it is from what another one returns.

Each tensor that a network returns is one of four things. Every verb that judges a
network by its output does it in the terms of that kind:

============  =======================================  ==============================
kind          what it is                               divergence
============  =======================================  ==============================
classes       logits: of an image, a token, a pixel    KL of the softmax, in nats
values        numbers: depth, a denoised image, ...    half the squared error over the
                                                       variance of the float output
embedding     vectors whose direction counts           1 − cosine
detections    a list of boxes, labels and scores       what is found only once
============  =======================================  ==============================

To second order, each divergence is half the squared distance of some features, so the
gradients of these features are the Fisher information that errors are weighed by. The
divergence of values is that of two normal distributions. Several outputs add up.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.configs import OutputKind, output_problem
from ompq.errors import SampleError
from ompq.network.observation import tensors_in
from ompq.parallel import add_up
from ompq.samples import (
    Batch,
    Samples,
    batch_length,
    class_rows,
    evaluating,
    kl_divergence,
    model_device,
    run_batch,
)

_PROBED = 3  # inputs that a network is observed with
_COMPARED = 32  # samples at a time on which networks are compared
_SPREAD_SAMPLES = 64  # inputs that the variance of values is measured on
_ROWS = 1024  # rows of logits for which classes are drawn at a time
_COLOURS = (1, 3)  # channels of images, grey or RGB
_OVERLAP = 0.5  # of boxes that show the same object

# Keys of dicts, or parts of them, that say what a tensor is.
_KEYS: dict[str, OutputKind] = {
    "logits": "classes",
    "hidden_state": "embedding",
    "pooler": "embedding",
    "embed": "embedding",
    "depth": "values",
    "box": "values",
    "reconstruction": "values",
    "flow": "values",
}
_ANSWERS = ("logits", "out")  # a dict that has one of these returns the rest besides
_INNER = ("hidden_states", "attentions", "past_key_values", "encoder_last_hidden_state")


class _Tensor(NamedTuple):
    """A floating-point tensor that a network returns."""

    path: tuple[str, ...]  # keys and positions that lead to it
    value: Tensor


@dataclass(frozen=True, eq=False)
class Outputs:
    """How to read and compare what a network returns.

    Attributes:
        kinds: What each floating-point tensor is, in order; of detections, which are
            lists of dicts, there is one entry.
        spreads: The standard deviations of the channels of values, (C,); None for
            other kinds.
    """

    kinds: tuple[OutputKind, ...]
    spreads: tuple[Tensor | None, ...]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        samples: Samples,
        output: str | None = None,
        *,
        batch_size: int = 16,
    ) -> "Outputs":
        """Recognise what a float network returns for the samples.

        Args:
            output: One kind for all its outputs, or a kind for each, joined by commas;
                None recognises them.
            batch_size: Maximum number of samples per forward pass.

        Raises:
            SampleError: It returns no floating-point tensor, or another number of them.
            ValueError: A kind is unknown.
        """
        probe = samples.first_batch(min(_PROBED, batch_size))
        with evaluating(model):
            returned = run_batch(model, probe)
            kinds = output_kinds(returned, probe, output, model=model)
            if "values" not in kinds:
                return cls(kinds, (None,) * len(kinds))
            first = samples.first(_SPREAD_SAMPLES).batches(batch_size)
            several = [cls.read_all(run_batch(model, batch)) for batch in first]
        return cls.measured(kinds, several)

    @classmethod
    def measured(
        cls, kinds: Sequence[OutputKind], several: Sequence[Sequence[Tensor]]
    ) -> "Outputs":
        """Return outputs of these kinds, with the spread of the values given.

        Args:
            several: All float tensors that the float network returned for each batch.
        """
        columns = [*zip(*several, strict=True)]
        spreads = tuple(
            _spread(column) if kind == "values" else None
            for kind, column in zip(kinds, columns or [()] * len(kinds), strict=True)
        )
        return cls(tuple(kinds), spreads)

    def __str__(self) -> str:
        return ",".join(self.kinds)

    @property
    def detections(self) -> bool:
        """Whether the network returns detections, whose gradients say little."""
        return "detections" in self.kinds

    @staticmethod
    def read_all(returned: Any) -> list[Tensor]:
        """Return all float tensors, or all tensors of detections, in order."""
        if _is_detections(returned):
            keys = ("boxes", "labels", "scores")
            return [one[key] for one in returned for key in keys]
        return [one.value for one in _float_tensors(returned)]

    def read(self, returned: Any) -> list[Tensor]:
        """Return the tensors that count; those of a detector image by image."""
        tensors = self.read_all(returned)
        if self.detections:
            return tensors
        if len(tensors) != len(self.kinds):
            raise SampleError(
                f"the network returns {len(tensors)} float tensors, but "
                f"{len(self.kinds)} outputs were expected ({self})"
            )
        pairs = zip(self.kinds, tensors, strict=True)
        return [tensor for kind, tensor in pairs if kind != "ignored"]

    def divergences(
        self, expected: Sequence[Tensor], found: Sequence[Tensor], count: int
    ) -> Tensor:
        """Return how far outputs are from the expected ones at each input, (N,).

        Args:
            expected: What :meth:`read` returned of the float network.
            found: The same of the other network.
            count: The number of inputs, N.
        """
        if self.detections:
            return _detection_distances(expected, found)
        parts = zip(self._counting, expected, found, strict=True)
        return torch.stack(
            [part.divergence(one, other, count) for part, one, other in parts]
        ).sum(0)

    def drawn_loss(
        self, tensors: Sequence[Tensor], generator: torch.Generator, count: int
    ) -> Tensor:
        """Return the sum of −log likelihoods of answers that the network itself gives.

        The answers are drawn at random. Then half the mean of (gradient · error)² over
        the inputs is the divergence that a small error causes (Fisher information).
        """
        if self.detections:
            return _signed_sum([t for t in tensors if t.is_floating_point()], generator)
        parts = zip(self._counting, tensors, strict=True)
        losses = [part.drawn_loss(t, generator, count) for part, t in parts]
        return torch.stack(losses).sum()

    def features(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Return tensors whose squared distance is twice the divergence, about."""
        parts = zip(self._counting, tensors, strict=True)
        return [part.features(tensor, count) for part, tensor in parts]

    @property
    def _counting(self) -> list["_Output"]:
        both = zip(self.kinds, self.spreads, strict=True)
        return [_Output(kind, spread) for kind, spread in both if kind != "ignored"]


@torch.no_grad()
def divergences_of(
    networks: Sequence[nn.Module], model: nn.Module, samples: Samples, output: str
) -> list[float]:
    """Return how far networks are from the float one, summed over samples.

    Several processes add up their samples.
    """
    outputs = Outputs.of(model, samples, output)
    sums = torch.zeros(len(networks), dtype=torch.float64)
    with evaluating(model, *networks):
        for batch in samples.batches(_COMPARED):
            wanted, *found = (
                outputs.read(run_batch(one, batch)) for one in (model, *networks)
            )
            count = batch_length(batch)
            sums += torch.stack(
                [outputs.divergences(wanted, one, count).sum().cpu() for one in found]
            )
    found_sums: list[float] = add_up(sums.to(model_device(model))).tolist()
    return found_sums


CLASSES = Outputs(("classes",), (None,))  # of a classifier


class _Output(NamedTuple):
    """One tensor of several that count."""

    kind: OutputKind
    spread: Tensor | None

    def divergence(self, expected: Tensor, found: Tensor, count: int) -> Tensor:
        """Return the divergence at each input, (N,)."""
        if self.kind == "classes":
            rows = kl_divergence(
                class_rows(expected.float()), class_rows(found.float())
            )
            return per_input(rows, count)
        apart = self.features(expected, count) - self.features(found, count)
        squared = apart.double().square().sum(1) / 2
        # Features are scaled by the number of rows of an input, so these add up.
        return per_input(squared, count) * (len(squared) / count)

    def features(self, tensor: Tensor, count: int) -> Tensor:
        """Return features (rows, C): errors of 1 in one are a divergence of a half."""
        tensor = tensor.float()
        if self.kind == "values":
            rows = value_rows(tensor)
            assert self.spread is not None
            return rows / self.spread.to(rows) * math.sqrt(count / rows.numel())
        rows = class_rows(tensor)
        if self.kind == "embedding":
            features = F.normalize(rows, dim=1)
        else:
            features = 2 * (rows.log_softmax(1) / 2).exp()
        return features * math.sqrt(count / len(rows))

    def drawn_loss(
        self, tensor: Tensor, generator: torch.Generator, count: int
    ) -> Tensor:
        if self.kind != "classes":
            return _signed_sum([self.features(tensor, count)], generator)
        log_p = class_rows(tensor.float()).log_softmax(1)
        classes, weights = drawn_classes(log_p, generator, count)
        likelihoods = log_p.gather(1, classes[:, None])[:, 0]
        # Squared gradients are averaged, so the roots of the weights make them count.
        return -(likelihoods * weights.sqrt().to(log_p)).sum()


def output_kinds(
    returned: Any, batch: Batch, output: str | None, *, model: nn.Module | None = None
) -> tuple[OutputKind, ...]:
    """Return what each float tensor is that a network returned for a batch.

    Args:
        output: One kind for all, or one for each, joined by commas; None recognises.
        model: The network, which may say what it returns.
    """
    check_output(output)
    if _is_detections(returned):
        return ("detections",)
    tensors = [*_float_tensors(returned)]
    if not tensors:
        raise SampleError(
            f"the network returned {type(returned).__name__} without a float tensor"
        )
    given = [] if output is None else output.split(",")
    if len(given) > 1 and len(given) != len(tensors):
        shapes = ", ".join(str(tuple(one.value.shape)) for one in tensors)
        raise ValueError(
            f"output={output!r} has {len(given)} kinds, but the network returns "
            f"{len(tensors)} float tensors: {shapes}. Give one kind for each, or one "
            "for all"
        )
    if len(given) > 1:
        return tuple(given)  # type: ignore[arg-type]  # checked above
    found = _recognise(tensors, batch, model)
    return tuple(
        kind if kind == "ignored" or not given else given[0]  # type: ignore[misc]
        for kind in found
    )


def check_output(output: str | None) -> None:
    """Raise a ValueError unless these are kinds of outputs, joined by commas."""
    requirement = "" if output is None else output_problem(output)
    if requirement:
        raise ValueError(f"output={output!r} must be {requirement}")


def _recognise(
    tensors: Sequence[_Tensor], batch: Batch, model: nn.Module | None
) -> list[OutputKind]:
    """Return the kinds of a network's outputs; at least one is not ignored."""
    count = batch_length(batch)
    answers = [
        one.path for one in tensors if one.path[-1:] and one.path[-1] in _ANSWERS
    ]
    kinds: list[OutputKind] = []
    for one in tensors:
        inner = any(key in _INNER for key in one.path)
        beside = bool(answers) and one.path != answers[0]
        by_input = one.value.dim() > 0 and len(one.value) == count
        left_out = inner or beside or not by_input
        kinds.append("ignored" if left_out else _kind(one, batch, model))
    if {*kinds} == {"ignored"}:
        kinds[0] = _kind(tensors[0], batch, model)
    return kinds


def _kind(one: _Tensor, batch: Batch, model: nn.Module | None) -> OutputKind:
    """Return what a tensor is: classes unless something says otherwise."""
    if _is_single(one.value, batch) or _is_regression(model):
        return "values"
    key = one.path[-1] if one.path else ""
    for part, kind in _KEYS.items():
        if part in key:
            return kind
    if _is_picture(one.value, batch):
        return "values"
    return "embedding" if _is_embedding(one.value, model) else "classes"


def _is_single(value: Tensor, batch: Batch) -> bool:
    """Whether there is one number at each place: never a class."""
    if value.dim() == 3 and value.shape[1] == 1:  # one channel of a sequence, or tokens
        given = next(tensors_in(batch))
        return given.is_floating_point() and given.dim() == 3
    return value.dim() < 2 or value.shape[1 if value.dim() > 3 else -1] == 1


def _is_regression(model: nn.Module | None) -> bool:
    config = getattr(model, "config", None)
    return getattr(config, "problem_type", None) == "regression"


def _is_picture(value: Tensor, batch: Batch) -> bool:
    """Whether a tensor is an image like the input, or a map without channels."""
    given = next(tensors_in(batch))
    if given.dim() != 4 or not given.is_floating_point():
        return False
    if value.dim() == 3:
        return value.shape[1:] == given.shape[2:]
    alike = value.dim() == 4 and value.shape[1] == given.shape[1] in _COLOURS
    return alike and math.prod(value.shape[2:]) >= math.prod(given.shape[2:])


def _is_embedding(value: Tensor, model: nn.Module | None) -> bool:
    """Whether rows have the length 1, or the network says that it has no classes."""
    if value.dim() == 2 and getattr(model, "num_classes", None) == 0:  # as in timm
        return True
    lengths = class_rows(value.float()).norm(dim=1)
    return bool((lengths - 1).abs().max() < 1e-3)


def _is_detections(returned: Any) -> bool:
    """Whether a network returned a list of dicts, one per image, as detectors do."""
    return (
        isinstance(returned, list)
        and bool(returned)
        and all(isinstance(one, dict) and "boxes" in one for one in returned)
    )


def _float_tensors(value: Any, path: tuple[str, ...] = ()) -> Iterator[_Tensor]:
    """Yield the float tensors in nested tuples, lists and dicts, with their paths."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield _Tensor(path, value)
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _float_tensors(child, (*path, str(key)))
    elif isinstance(value, tuple | list):
        for at, child in enumerate(value):
            yield from _float_tensors(child, (*path, str(at)))


def value_rows(tensor: Tensor) -> Tensor:
    """Return values as rows of channels, (rows, C).

    Channels are the second dimension of images and the last of vectors; in a sequence,
    all numbers are alike.
    """
    if tensor.dim() > 3:
        tensor = tensor.movedim(1, -1)
    elif tensor.dim() != 2:
        return tensor.reshape(-1, 1)
    return tensor.reshape(-1, tensor.shape[-1])


def per_input(rows: Tensor, count: int) -> Tensor:
    """Return the mean over the rows of each input, (N,).

    If rows cannot be told apart by input, each gets the mean of all.
    """
    if len(rows) % count:
        return rows.mean().expand(count)
    return rows.view(count, -1).mean(1)


def _spread(several: Sequence[Tensor]) -> Tensor:
    """Return the standard deviation of each channel, (C,).

    A channel that hardly changes gets a hundredth of its usual size, so that nothing is
    divided by 0.
    """
    rows = torch.cat([value_rows(tensor.detach().double()) for tensor in several])
    size = rows.square().mean(0)
    variance = size - rows.mean(0).square() if len(rows) > 1 else size
    least = torch.maximum(1e-4 * size, 1e-18 * size.mean())
    return torch.maximum(variance, least).clamp_min(1e-30).sqrt()


def _signed_sum(tensors: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    """Return the sum of all elements with random signs."""
    total = [(tensor * random_signs(tensor, generator)).sum() for tensor in tensors]
    return torch.stack(total).sum()


def random_signs(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return 1 and −1 at random, of the shape, dtype and device of a tensor."""
    return (2 * torch.randint(2, tensor.shape, generator=generator) - 1).to(tensor)


def drawn_classes(
    log_p: Tensor, generator: torch.Generator, count: int
) -> tuple[Tensor, Tensor]:
    """Draw a class for each row, (rows,), and return the rows' weights, (rows,).

    The weights make squared gradients average over the network's own answers. A class
    is drawn with its probability times the length of its gradient at the logits
    (importance sampling): the mean stays right, and varies less where one answer is
    nearly certain. If an input has several rows, such as tokens, their gradients add up
    before they are squared: then classes are drawn with their probability, and each of
    the rows has the same weight; those of an input add up to 1.

    Args:
        log_p: Log probabilities of ``count`` inputs, (rows, K).
    """
    log_p = log_p.detach()
    if len(log_p) > count:
        # Vocabularies are large, so some rows at a time.
        drawn_rows = [_drawn(rows, generator) for rows in torch.split(log_p, _ROWS)]
        weights = log_p.new_full((len(log_p),), count / len(log_p), dtype=torch.float64)
        return torch.cat(drawn_rows), weights
    p = log_p.double().exp()
    length = (1 - 2 * p + p.square().sum(1, keepdim=True)).clamp_min(1e-12).sqrt()
    drawn = p * length / (p * length).sum(1, keepdim=True)
    classes = _drawn(drawn.log(), generator)
    return classes, (p / drawn).gather(1, classes[:, None])[:, 0]


def _drawn(log_p: Tensor, generator: torch.Generator) -> Tensor:
    """Return a class for each row, drawn with its probability, (rows,)."""
    # The largest of log probability + Gumbel noise is a class drawn with it.
    noise = -torch.empty(log_p.shape).exponential_(generator=generator).log()
    return (log_p + noise.to(log_p.device, non_blocking=True)).argmax(1)


def _detection_distances(expected: Sequence[Tensor], found: Sequence[Tensor]) -> Tensor:
    """Return for each image what share of the detections has no counterpart, (N,).

    Each detection weighs as much as its score. Pairs are of one label and overlap by
    half or more; they count with their overlap and the smaller of both scores.
    """
    images = range(0, len(expected), 3)
    rows = [_unmatched(expected[at : at + 3], found[at : at + 3]) for at in images]
    return torch.tensor(rows, dtype=torch.float64)


def _unmatched(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    (boxes, labels, scores), (others, other_labels, other_scores) = expected, found
    total = float(scores.sum() + other_scores.sum())
    if not len(boxes) or not len(others):
        return float(total > 0)
    overlap = box_overlaps(boxes, others)
    overlap = overlap * (labels[:, None] == other_labels[None])
    matched = 0.0
    for at in scores.argsort(descending=True).tolist():
        best, other = overlap[at].max(0)
        if best >= _OVERLAP:
            matched += float(best * torch.minimum(scores[at], other_scores[other]))
            overlap[:, other] = 0  # each is the counterpart of one
    return 1 - 2 * matched / total


def box_overlaps(boxes: Tensor, others: Tensor) -> Tensor:
    """Return intersection over union of all pairs of boxes (x1, y1, x2, y2), (N, M)."""
    low = torch.maximum(boxes[:, None, :2], others[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = (high - low).clamp_min(0).prod(2)
    areas = [(one[:, 2:] - one[:, :2]).prod(1) for one in (boxes, others)]
    return shared / (areas[0][:, None] + areas[1][None] - shared).clamp_min(1e-12)
