"""Measure allocations: quantize, compare with the float network, save the results.

Two scores measure as well, with one unit quantized at a time.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ompq.allocation.program import Allocation
from ompq.attention import with_layers
from ompq.costs import FLOAT_BITS, can_be_coded
from ompq.errors import CheckpointError, SampleError
from ompq.evaluation import logits_of
from ompq.files import json_object, read_json, write_text
from ompq.graph import normalised_by
from ompq.processes import process_count, share_out
from ompq.quantization import QuantizeConfig, quantize
from ompq.reconstruction import ReconstructConfig, reconstruct
from ompq.reconstruction.blocks import fisher_weights
from ompq.reconstruction.rounding import RoundingConfig
from ompq.recording import tensors_in
from ompq.samples import Batch, Samples, collect, kl_divergence
from ompq.scores import SCORES, Needs, ScoreInputs
from ompq.units import Choice, ScoreTable, Unit

__all__ = [
    "SCORES",
    "BlockLoss",
    "Checkpoint",
    "Meter",
    "ReconstructionScore",
    "split",
]

Floats = NDArray[np.float64]
_BATCH = 64  # samples per forward pass
_Result = TypeVar("_Result")


class Meter:
    """Measures allocations against the outputs of the float network."""

    def __init__(
        self,
        model: nn.Module,
        samples: Samples,
        held_out: Samples,
        *,
        iterations: int = 0,
        seed: int = 0,
        group_size: int = 0,
    ) -> None:
        """Run the float network once on ``held_out``, where divergence is measured.

        Args:
            samples: Samples for calibration and reconstruction.
            iterations: Reconstruction steps per block; 0 only rounds.
            group_size: Inputs of a linear unit that share a scale; 0 for all of them.
        """
        self.model = with_layers(model, samples)
        self.samples, self.held_out = samples, held_out
        self.iterations, self.seed = iterations, seed
        self.config = QuantizeConfig(group_size=group_size or None)
        self._expected = logits_of(model, held_out)

    @cached_property
    def judge(self) -> str:
        """A digest of how it measures; only equal ones give comparable divergences."""
        way = f"reconstruct {self.iterations}" if self.iterations else "feedback"
        if self.config.group_size:
            way += f" groups of {self.config.group_size}"
        content = f"{way} {len(self.samples)}".encode()
        digest = hashlib.sha256(self._expected.numpy().tobytes() + content)
        return digest.hexdigest()[:16]

    def quantized(self, bits: Allocation) -> nn.Module:
        """Return the network with these bits, reconstructed if there are iterations."""
        network = quantize(self.model, bits, self.samples, self.config)
        if self.iterations:
            rounding = RoundingConfig(iterations=self.iterations)
            config = ReconstructConfig(rounding=rounding, tuning=None, seed=self.seed)
            network = reconstruct(network, self.model, self.samples, config)
        return network

    def divergence(self, network: nn.Module) -> float:
        """Return the mean KL divergence from the float network, in nats."""
        return float(self.divergences(network).mean())

    def divergences(self, network: nn.Module) -> Floats:
        """Return the KL divergence from the float network at each sample, in nats."""
        logits = logits_of(network, self.held_out)
        # Outputs for several tokens have a row for each.
        rows = kl_divergence(self._expected, logits).view(len(self.held_out), -1)
        return rows.mean(1).numpy()


class Checkpoint(Generic[_Result]):
    """The measurements of a run so far, by name, in a JSON file."""

    def __init__(
        self,
        path: str | Path | None,
        kind: str,
        identity: str,
        read: Callable[[Any], _Result],
    ) -> None:
        """Read the file, if it exists; without a path nothing is saved.

        Args:
            kind: The kind of run, for example ``audit``.
            identity: Text that must be equal for a run to resume from the file.
            read: Converts an entry of the file to a result, or raises a ValueError.

        Raises:
            CheckpointError: The file is damaged, or belongs to another run.
        """
        self._path = path
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._about = {"format": f"ompq-{kind}-checkpoint/1", "identity": digest}
        self._results: dict[str, _Result] = {}
        if path is None or not Path(path).exists():
            return
        try:
            data = json_object(read_json(path), "a checkpoint")
            if data.get("format") != self._about["format"]:
                raise ValueError(f"its format is not {self._about['format']}")
            entries = json_object(data.get("measured"), "measured")
            self._results = {name: read(entry) for name, entry in entries.items()}
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be resumed: {error}") from error
        if data.get("identity") != digest:
            raise CheckpointError(
                f"{path} belongs to another {kind}: another network, other samples or "
                "settings. Remove it or use another file"
            )

    def get(self, name: str, measure: Callable[[], _Result]) -> _Result:
        """Return the result of this name; measure and save it if there is none yet."""
        if name not in self._results:
            self._save({name: measure()})
        return self._results[name]

    def get_all(
        self, names: Sequence[str], measure: Callable[[str], _Result]
    ) -> Iterator[_Result]:
        """Yield the results of these names; processes share what must be measured."""
        count = process_count()
        for start in range(0, len(names), count):
            part = names[start : start + count]
            new = [name for name in part if name not in self._results]
            if new:
                self._save(dict(zip(new, share_out(new, measure), strict=True)))
            yield from (self._results[name] for name in part)

    def _save(self, results: Mapping[str, _Result]) -> None:
        self._results.update(results)
        if self._path is not None:
            data = {**self._about, "measured": self._results}
            write_text(self._path, json.dumps(data, indent=1, default=asdict))


def split(samples: Samples, fraction: float) -> tuple[Samples, Samples]:
    """Split samples for calibration from the last ones, which are held out.

    Raises:
        SampleError: There are too few to hold any back.
    """
    count = max(round(len(samples) * (1 - fraction)), 1)
    if count >= len(samples):
        raise SampleError(
            f"{len(samples)} samples are too few to hold some back; give 1,000 or more"
        )
    return samples[:count], samples[count:]


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
            return block_loss(network, given.model, unit, samples)

        return self._table(given, (samples, samples), loss)


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
