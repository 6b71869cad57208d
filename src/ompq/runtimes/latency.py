"""Milliseconds of every layer at every width that a runtime computes with.

A layer is measured in the network, not alone: the whole network runs with all layers in
8 bits, and in turn with one layer in another width. The difference is the layer's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from torch import nn

from ompq.bit_widths import WIDTHS
from ompq.configs import ExportConfig, LatencyTable, QuantizeConfig
from ompq.errors import TargetError, check_counts
from ompq.files import write_text
from ompq.network.graph import float_network, trace
from ompq.network.units import Choice, LayerGraph
from ompq.progress import Progress
from ompq.quantization.pipeline import quantize
from ompq.runtimes.benchmark import inputs_of, runner, runtime_version
from ompq.runtimes.exporter import export
from ompq.samples import Samples, SamplesLike
from ompq.targets import Target

# Target → the runtime that is measured, and the suffix of its files.
RUNTIMES = {
    "onnxruntime-cpu": ("onnxruntime", ".onnx"),
    "litert": ("litert", ".tflite"),
    "litert-size": ("litert", ".tflite"),
    "executorch": ("executorch", ".pte"),
    "executorch-size": ("executorch", ".pte"),
}
_ALIKE = ("onnxruntime-cpu",)  # whose runtime computes all widths up to 8 bits in 8
_CHECKS = 3  # networks with random widths
_BASE = Choice(8, 8)
_WARM_UP = 3
_SAMPLES = 4  # only the shapes of values matter
_QUICKLY = {"equalize": False, "weight_range": "minmax", "activation_range": "minmax"}


@dataclass(frozen=True)
class Latency:
    """Milliseconds of layers, and how well they add up to those of whole networks."""

    table: LatencyTable  # unit → choice → milliseconds
    runtime: str  # for example ``litert 2.3.0``
    base: float  # milliseconds of the network with all layers in 8 bits
    # Of networks with random widths: milliseconds as the table says, and as measured.
    checks: tuple[tuple[float, float], ...]

    @property
    def error(self) -> float:
        """The largest relative error of the table for these networks."""
        return max((abs(told / real - 1) for told, real in self.checks), default=0.0)

    def save(self, path: str | Path) -> None:
        """Write the table for ``ompq plan --latency``."""
        write_text(path, f"{json.dumps(self.table, indent=1)}\n")


def measure_latency(
    model: nn.Module,
    samples: SamplesLike,
    target: Target,
    *,
    repeats: int = 50,
    threads: int = 1,
    progress: Progress | None = None,
) -> Latency:
    """Measure every layer of a network at every width that a target computes with.

    What cannot be told apart is shared among the layers by their MACs, so that the sum
    of the table is the whole network's time.

    Raises:
        TargetError: The target's runtime cannot be measured here.
        ExportError: The runtime cannot run the network.
    """
    check_counts(repeats=repeats, threads=threads)
    if target.name not in RUNTIMES:
        raise TargetError(
            f"times of {target.name} cannot be measured here; there are "
            f"{', '.join(RUNTIMES)}"
        )
    first = Samples.of(samples).first(_SAMPLES)
    graph = trace(float_network(model), first)
    with TemporaryDirectory() as work:
        race = _Race(model, first, graph, target, Path(work), repeats, threads)
        race.difference({})  # the time of 8 bits, even if there are no other widths
        more: dict[str, dict[str, float]] = {}
        widths = {one.name: _widths(target, one) for one in graph.units}
        count, done = sum(map(len, widths.values())) + _CHECKS, 0
        for unit, choices in widths.items():
            more[unit] = {str(_BASE): 0.0}
            for choice in choices:
                done += 1
                if progress is not None:
                    progress(done, count, f"measuring {unit} in {choice}")
                more[unit][str(choice)] = race.difference({unit: choice})
        random = np.random.default_rng(0)
        found = []
        for number in range(_CHECKS if any(widths.values()) else 0):
            if progress is not None:
                progress(done + number + 1, count, "measuring whole networks")
            drawn = {
                unit: choices[random.integers(len(choices))]
                for unit, choices in widths.items()
                if choices and random.integers(2)
            }
            told = sum(more[unit][str(choice)] for unit, choice in drawn.items())
            found.append((told, race.difference(drawn)))
        base = median(race.seconds) * 1000
    return Latency(
        table=_shared(graph, more, base),
        runtime=runtime_version(race.runtime),
        base=base,
        checks=tuple((base + told, base + real) for told, real in found),
    )


def _widths(target: Target, unit: Any) -> list[Choice]:
    """Return the choices other than 8 bits that take another time than it.

    Those that a runtime computes in 8 bits take the time of 8 bits.
    """
    operator = target.operator(unit)
    found = [Choice(bits, 8) for bits in operator.weight_bits if bits < _BASE.weight]
    return [one for one in found if target.name not in _ALIKE]


def _shared(
    graph: LayerGraph, more: Mapping[str, Mapping[str, float]], base: float
) -> LatencyTable:
    """Return the table: a share of the base, and what a width takes beyond it.

    Widths that were not measured have the time of 8 bits: the runtime computes them in
    8 bits, or plans for the target do not offer them.
    """
    macs = sum(unit.macs for unit in graph.units)
    # No layer takes less than what its fastest width saves.
    least = {name: max(0.0, -min(row.values())) for name, row in more.items()}
    rest = max(0.0, base - sum(least.values()))
    table: dict[str, dict[str, float]] = {}
    for unit in graph.units:
        share = least[unit.name] + rest * unit.macs / macs
        table[unit.name] = {
            str(Choice(weight, inputs)): share
            + more[unit.name].get(str(Choice(weight, _BASE.activation)), 0.0)
            for weight in WIDTHS
            for inputs in WIDTHS
        }
    return table


@dataclass(eq=False)
class _Race:
    """Runs networks in turn with the one in 8 bits."""

    model: nn.Module
    samples: Samples
    graph: LayerGraph
    target: Target
    work: Path
    repeats: int
    threads: int

    def __post_init__(self) -> None:
        """Load the network in 8 bits."""
        self.runtime, self.suffix = RUNTIMES[self.target.name]
        self.seconds: list[float] = []  # of the network in 8 bits
        self.base = self._loaded({})

    def _loaded(self, changed: Mapping[str, Choice]) -> Any:
        bits = {unit.name: changed.get(unit.name, _BASE) for unit in self.graph.units}
        config = QuantizeConfig(**{**_QUICKLY, **self.target.settings})
        network = quantize(self.model, bits, self.samples, config)
        path = self.work / f"net{self.suffix}"
        export(network, path, self.samples, ExportConfig(engine_images=1))
        return runner(path, inputs_of(path), self.threads, self.runtime)

    def difference(self, changed: Mapping[str, Choice]) -> float:
        """Return the milliseconds that other bits take more; the median of pairs."""
        other, found = self._loaded(changed), []
        for number in range(_WARM_UP + self.repeats):
            start = perf_counter()
            self.base()
            middle = perf_counter()
            other()
            end = perf_counter()
            if number >= _WARM_UP:
                self.seconds.append(middle - start)
                found.append((end - middle) - (middle - start))
        return 1000 * median(found)
