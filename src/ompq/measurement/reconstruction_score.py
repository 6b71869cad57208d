"""Reconstruction as a score: the damage that learned rounding cannot undo."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from ompq.allocation.program import Allocation
from ompq.costs import FLOAT_BITS, can_be_coded
from ompq.graph import normalised_by
from ompq.measurement.meter import Meter, split
from ompq.processes import share_out
from ompq.reconstruction.blocks import fisher_weights
from ompq.recording import tensors_in
from ompq.samples import Batch, Samples, collect
from ompq.scores import SCORES, Needs, ScoreInputs
from ompq.units import Choice, ScoreTable, Unit

__all__ = ["SCORES", "BlockLoss", "ReconstructionScore"]

_BATCH = 64  # samples per forward pass


@dataclass(frozen=True)
class _OneUnitScore(ABC):
    """One unit is quantized and its block reconstructed; all others stay float."""

    iterations: int = 50  # steps of the reconstruction
    samples: int = 64  # largest number of inputs used
    seed: int = 0  # for the order of samples

    needs: ClassVar[Needs] = Needs(
        "a short reconstruction for each unit and choice", gradients=True
    )

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return the measured damage, (units, choices); processes share the cells."""
        graph, choices = given.graph, given.choices
        meter = Meter(
            given.model,
            *self._parts(given.samples.first(self.samples)),
            iterations=self.iterations,
            seed=self.seed,
            group_size=graph.group_size,
        )
        floats = dict.fromkeys(graph.names, Choice(FLOAT_BITS, FLOAT_BITS))
        cells = [(unit, choice) for unit in graph.units for choice in choices]

        def damage(cell: tuple[Unit, Choice]) -> float:
            unit, choice = cell
            unused = not can_be_coded(unit, choice)  # no plan may choose it
            if unused or choice.weight == choice.activation == FLOAT_BITS:
                return 0.0
            alone = Allocation({**floats, unit.name: choice})
            return self._measured(meter.quantized(alone), unit, given, meter)

        def report(done: int) -> None:
            name = cells[done - 1][0].name
            given.progress(done, len(cells), f"reconstructing {name}")

        table = np.array(share_out(cells, damage, report))
        return ScoreTable(table.reshape(len(graph), len(choices)))

    @abstractmethod
    def _parts(self, samples: Samples) -> tuple[Samples, Samples]:
        """Return the samples for calibration and reconstruction, and for measuring."""

    @abstractmethod
    def _measured(
        self, network: nn.Module, unit: Unit, given: ScoreInputs, meter: Meter
    ) -> float:
        """Return the damage of a network in which only this unit is quantized."""


class ReconstructionScore(_OneUnitScore):
    """Divergence of the outputs after a short reconstruction, one unit at a time.

    One unit is quantized and its block reconstructed; all others stay float. The first
    half of the samples is used for that, and divergence is measured on the other half.
    """

    summary: ClassVar[str] = "divergence after one unit's block is reconstructed"

    def _parts(self, samples: Samples) -> tuple[Samples, Samples]:
        return split(samples, 0.5)

    def _measured(
        self, network: nn.Module, _unit: Unit, _given: ScoreInputs, meter: Meter
    ) -> float:
        return max(meter.divergence(network), 0.0)


class BlockLoss(_OneUnitScore):
    """BRECQ's score: the error of a block's output after reconstruction.

    One unit is quantized and its block reconstructed; all others stay float. The loss
    is half the squared error of the block's output, each element weighted by the
    squared gradient of the network's loss, summed over the output and averaged over the
    samples. The number of reconstruction steps that BRECQ uses here is not published.
    """

    summary: ClassVar[str] = "BRECQ's: Fisher-weighted error of a reconstructed block"

    def _parts(self, samples: Samples) -> tuple[Samples, Samples]:
        return samples, samples

    def _measured(
        self, network: nn.Module, unit: Unit, given: ScoreInputs, meter: Meter
    ) -> float:
        return block_loss(network, given.model, unit, meter.samples)


def block_loss(
    quantized: nn.Module, model: nn.Module, unit: Unit, samples: Samples
) -> float:
    """Return half the mean Fisher-weighted error of a unit's block over samples."""
    alone = unit.block == unit.name
    end = normalised_by(model, unit) if alone else unit.block
    total = 0.0
    for batch in samples.batches(_BATCH):
        expected, actual = (_output_of(net, end, batch) for net in (model, quantized))
        (weights,) = fisher_weights(model, end, [batch])
        error = (actual - expected).double().square() * weights
        total += float(error.sum())
    return total / 2 / len(samples)


def _output_of(model: nn.Module, name: str, batch: Batch) -> Tensor:
    """Return a module's output for a batch."""
    outputs: list[Tensor] = []

    def hook(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        outputs.append(next(tensors_in(output)).detach().clone())

    collect(model, Samples((batch,)), [(model.get_submodule(name), hook)])
    return outputs[0]


# ompq.scores registers the others, which do not quantize networks.
SCORES["reconstruction"] = ReconstructionScore()
SCORES["block_loss"] = BlockLoss()
