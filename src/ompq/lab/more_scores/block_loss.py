"""Scores that quantize one unit at a time and reconstruct its block."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from ompq.allocation.problem import Allocation
from ompq.bit_widths import FLOAT_BITS
from ompq.configs import QuantizeConfig
from ompq.costs import can_be_coded
from ompq.measurement import Meter, split
from ompq.network.folding import output_module
from ompq.network.observation import tensors_in
from ompq.network.units import Choice, Unit
from ompq.outputs import Outputs
from ompq.parallel import share_out
from ompq.reconstruction.block_fisher import fisher_weights
from ompq.samples import Batch, Samples, collect
from ompq.score_tables import ScoreTable
from ompq.scores.computation import Needs, ScoreInputs

_BATCH = 64  # samples per forward pass


@dataclass(frozen=True)
class _OneUnitScore:
    """One unit is quantized and its block reconstructed; all others stay float."""

    iterations: int = 50  # steps of the reconstruction
    samples: int = 64  # largest number of inputs used
    seed: int = 0  # for the order of samples

    needs: ClassVar[Needs] = Needs(
        "a short reconstruction for each unit and choice", gradients=True, seconds=880.0
    )

    def _table(
        self,
        given: ScoreInputs,
        samples: tuple[Samples, Samples],
        measured: Callable[[nn.Module, Unit, Meter], float],
    ) -> ScoreTable:
        """Return the damage of networks with one quantized unit, (units, choices).

        The first samples are for calibration and reconstruction, the second are held
        out. Processes share the cells of the table.
        """
        graph, choices = given.graph, given.choices
        meter = Meter(
            given.model,
            *samples,
            iterations=self.iterations,
            seed=self.seed,
            config=QuantizeConfig(
                group_size=graph.group_size or None, output=given.output
            ),
        )
        floats = dict.fromkeys(graph.names, Choice(FLOAT_BITS, FLOAT_BITS))
        cells = [(unit, choice) for unit in graph.units for choice in choices]

        def damage(cell: tuple[Unit, Choice]) -> float:
            unit, choice = cell
            unused = not can_be_coded(unit, choice)  # no plan may choose it
            if unused or choice.weight == choice.activation == FLOAT_BITS:
                return 0.0
            alone = Allocation({**floats, unit.name: choice})
            return measured(meter.quantized(alone), unit, meter)

        def report(done: int) -> None:
            name = cells[done - 1][0].name
            given.progress(done, len(cells), f"reconstructing {name}")

        table = np.array(share_out(cells, damage, report))
        return ScoreTable(table.reshape(len(graph), len(choices)))


class ReconstructionScore(_OneUnitScore):
    """Divergence of the outputs after a short reconstruction, one unit at a time.

    One unit is quantized and its block reconstructed with the first half of the
    samples; all others stay float. Divergence is measured on the other half.
    """

    summary: ClassVar[str] = "divergence after one unit's block is reconstructed"

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return the measured damage, (units, choices)."""
        parts = split(given.samples.first(self.samples), 0.5)
        return self._table(given, parts, lambda n, _, m: max(m.divergence(n), 0.0))


class BlockLoss(_OneUnitScore):
    """BRECQ's score: the error of a block's output after reconstruction.

    One unit is quantized and its block reconstructed; all others stay float. The loss
    is half the squared error of the block's output, each element weighted by the
    squared gradient of the network's loss, summed over the output and averaged over the
    samples. The number of reconstruction steps that BRECQ uses here is not published.
    """

    summary: ClassVar[str] = "BRECQ's: Fisher-weighted error of a reconstructed block"
    needs: ClassVar[Needs] = _OneUnitScore.needs._replace(seconds=1900.0)

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return the measured damage, (units, choices)."""
        samples = given.samples.first(self.samples)

        def loss(network: nn.Module, unit: Unit, _meter: Meter) -> float:
            return block_loss(network, given.model, unit, samples, given.outputs)

        return self._table(given, (samples, samples), loss)


def block_loss(
    quantized: nn.Module,
    model: nn.Module,
    unit: Unit,
    samples: Samples,
    outputs: Outputs,
) -> float:
    """Return half the mean Fisher-weighted error of a unit's block over samples."""
    alone = unit.block == unit.name
    end = output_module(model, unit) if alone else unit.block
    total = 0.0
    for batch in samples.batches(_BATCH):
        expected, actual = (_output_of(net, end, batch) for net in (model, quantized))
        (weights,) = fisher_weights(model, end, [batch], outputs=outputs)
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


BLOCK_LOSS, RECONSTRUCTION = BlockLoss(), ReconstructionScore()
