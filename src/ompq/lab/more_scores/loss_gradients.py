"""Scores from derivatives of the loss: Fisher, Hessian and gradient.

The loss compares with labels or, without them, with the network's own answers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ompq.bit_widths import FLOAT_BITS
from ompq.errors import SampleError
from ompq.network.units import Unit, by_bits
from ompq.samples import (
    Batch,
    Samples,
    batch_length,
    class_rows,
    first_tensor,
    model_device,
    to_device,
)
from ompq.score_tables import ScoreTable
from ompq.scores.computation import Needs, ScoreInputs
from ompq.scores.sensitivity import differentiating
from ompq.scores.weight_noise import (
    check_weights_only,
    output_with,
    rounded_weights,
    weight_table,
)

# Inputs and their class numbers, (N,).
LabelledBatches: TypeAlias = Iterable[tuple[Batch, Tensor]]


@dataclass(frozen=True)
class Fisher:
    """Sum over a unit's weights of mean squared gradient × squared error.

    Gradients are those of −log p(label) of one sample at a time. Without labelled
    batches, labels are drawn from the network's own answers, which makes the squares
    the diagonal of the Fisher information.

    Attributes:
        samples: How many inputs are used, at most.
        seed: Seed of the labels that are drawn.
        batches: Inputs and class numbers, read once.
    """

    samples: int = 32
    seed: int = 0
    batches: LabelledBatches | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "squared gradients × squared error of the weights"
    needs: ClassVar[Needs] = Needs(
        "one, forward and backward, sample by sample",
        gradients=True,
        labels=True,
        seconds=3.4,
    )

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return sums of squared gradients × squared errors, (units, choices)."""
        check_weights_only(given.choices, "fisher")
        batch, labels = _first_labelled(given, self.batches, self.samples)
        weights = _copied_weights(given)
        squares = {name: torch.zeros_like(w) for name, w in weights.items()}
        count = batch_length(batch)
        generator = torch.Generator().manual_seed(self.seed)
        with differentiating(given.model):
            # Not Samples.of: the batch stays on the network's device.
            for i, sample in enumerate(Samples((batch,)).batches(1)):
                output = output_with(given.model, sample, weights)
                if labels is not None:
                    loss = _cross_entropy(output, labels[i : i + 1])
                else:
                    read = given.outputs.read(output)
                    loss = given.outputs.drawn_loss(read, generator, 1)
                for name, gradient in _gradients(loss, weights).items():
                    squares[name] += gradient.square()
                given.progress(i + 1, count, "squaring gradients")

        def damage(unit: Unit, rounded: Tensor) -> float:
            weight = given.model.get_parameter(unit.parameter).detach()
            error = (weight - rounded).square()
            lost = (squares[unit.parameter] * error).sum(dtype=torch.float64)
            return float(lost) / count

        return ScoreTable(weight_table(given, damage))


@dataclass(frozen=True)
class Hessian:
    """Mean of the Hessian's trace over a unit's weights × ||W − Q(W)||² (HAWQ-V2).

    The trace is Hutchinson's estimate: the mean of vᵀHv over random signs v, of all
    units at once. The loss is the cross entropy with the labels if batches are given,
    else the divergence from the network's own output.

    Attributes:
        samples: How many inputs are used, at most.
        probes: How many random vectors; the error falls with their square root.
        seed: Seed of the vectors.
        batches: Inputs and class numbers, read once.
    """

    samples: int = 32
    probes: int = 16
    seed: int = 0
    batches: LabelledBatches | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "mean Hessian trace × squared error of the weights"
    needs: ClassVar[Needs] = Needs(
        "one, and a double backward pass a probe (16)",
        gradients=True,
        labels=True,
        seconds=53.0,
    )

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return mean traces × squared errors, (units, choices)."""
        check_weights_only(given.choices, "hessian")
        batch, labels = _first_labelled(given, self.batches, self.samples)
        weights = _copied_weights(given)
        leaves = list(weights.values())
        generator = torch.Generator().manual_seed(self.seed)
        traces = dict.fromkeys(weights, 0.0)  # sums over the probes
        with differentiating(given.model):
            output = output_with(given.model, batch, weights)
            if labels is not None:
                loss = _cross_entropy(output, labels)
            else:
                loss = _divergence(given, output, output, batch)
            gradients = torch.autograd.grad(loss, leaves, create_graph=True)
            for probe in range(self.probes):
                signs = [
                    (torch.randint(2, w.shape, generator=generator) * 2 - 1).to(w)
                    for w in leaves
                ]
                products = torch.autograd.grad(
                    gradients, leaves, signs, retain_graph=True, materialize_grads=True
                )
                for name, sign, product in zip(weights, signs, products, strict=True):
                    traces[name] += float((sign * product).sum(dtype=torch.float64))
                given.progress(probe + 1, self.probes, "estimating curvature")

        def damage(unit: Unit, rounded: Tensor) -> float:
            weight = given.model.get_parameter(unit.parameter).detach()
            error = (weight - rounded).double().square().sum()
            trace = traces[unit.parameter] / self.probes
            # An estimate may be below 0, which would make fewer bits the better ones.
            return max(trace, 0.0) / weight.numel() * float(error)

        return ScoreTable(weight_table(given, damage))


@dataclass(frozen=True)
class Gradient:
    """First-order change of the loss when a unit gets more than the fewest bits.

    With every unit rounded to the fewest bits, one backward pass gives the gradient g
    of the loss, and the score is g · (Q_b(W) − Q_fewest(W)). The loss is the divergence
    from the float network, or the cross entropy with labels if batches are given. More
    bits may score worse than fewer, as the score is only of first order.

    Attributes:
        samples: How many inputs are used, at most.
        batches: Inputs and class numbers, read once.
    """

    samples: int = 32
    batches: LabelledBatches | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "first-order gain of more bits at the low-bit network"
    needs: ClassVar[Needs] = Needs(
        "two forward and one backward", gradients=True, labels=True, seconds=4.2
    )

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return first-order changes of the loss, (units, choices)."""
        check_weights_only(given.choices, "gradient")
        batch, labels = _first_labelled(given, self.batches, self.samples)
        graph, model = given.graph, given.model
        low = {}
        for unit in graph.units:
            [rounded] = rounded_weights(model, unit, by_bits(given.choices)[:1])
            low[unit.parameter] = rounded.clone().requires_grad_()
        with differentiating(model):
            output = output_with(model, batch, low)
            if labels is not None:
                loss = _cross_entropy(output, labels)
            else:
                with torch.no_grad():
                    reference = output_with(model, batch, {})
                loss = _divergence(given, reference, output, batch)
            gradients = _gradients(loss, low)

        def change(unit: Unit, rounded: Tensor) -> float:
            moved = rounded - low[unit.parameter].detach()
            product = gradients[unit.parameter] * moved
            return float(product.sum(dtype=torch.float64))

        table = weight_table(given, change)
        weights = (model.get_parameter(u.parameter).detach() for u in graph.units)
        floats = [change(u, w) for u, w in zip(graph.units, weights, strict=True)]
        for column, choice in enumerate(given.choices):
            if choice.weight >= FLOAT_BITS:
                table[:, column] = floats
        return ScoreTable(table)


def _first_labelled(
    given: ScoreInputs, batches: LabelledBatches | None, count: int
) -> tuple[Batch, Tensor | None]:
    """Return the first labelled inputs and their labels, or the first samples alone.

    Raises:
        SampleError: Inputs and labels differ in number.
    """
    device = model_device(given.model)
    if batches is None:
        return to_device(given.samples.first_batch(count), device), None
    inputs: list[Batch] = []
    labels: list[Tensor] = []
    for batch, targets in batches:
        if batch_length(batch) != len(targets):
            raise SampleError(
                f"a labelled batch has {batch_length(batch)} inputs and "
                f"{len(targets)} labels: give one class number for each input"
            )
        inputs.append(batch)
        labels.append(targets)
        if sum(map(len, labels)) >= count:
            break
    batch = Samples.of(inputs).first_batch(count)
    return to_device(batch, device), torch.cat(labels)[: batch_length(batch)].to(device)


def _copied_weights(given: ScoreInputs) -> dict[str, Tensor]:
    """Return copies of the units' weights to differentiate by, once where shared."""
    names = dict.fromkeys(unit.parameter for unit in given.graph.units)
    weights = ((name, given.model.get_parameter(name).detach()) for name in names)
    return {name: weight.clone().requires_grad_() for name, weight in weights}


def _gradients(loss: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the loss's gradient by each weight; 0 where it does not depend on it."""
    found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def _divergence(given: ScoreInputs, expected: Any, output: Any, batch: Batch) -> Tensor:
    """Return the mean divergence of an output from the expected one.

    That of an output from itself has no gradient; its Hessian is the Fisher
    information.
    """
    outputs = given.outputs
    fixed = [tensor.detach() for tensor in outputs.read(expected)]
    count = batch_length(batch)
    return outputs.divergences(fixed, outputs.read(output), count).mean()


def _cross_entropy(output: Any, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of logits with class numbers, (N,)."""
    rows = class_rows(first_tensor(output).float())
    return F.cross_entropy(rows, labels.flatten())


FISHER, GRADIENT, HESSIAN = Fisher(), Gradient(), Hessian()
