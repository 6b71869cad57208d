"""A forecast: how long a run takes on this machine, and how much memory."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ompq.amounts import in_bytes, seconds as duration
from ompq.configs import QuantizeConfig, ReconstructConfig, RoundingConfig
from ompq.network.attention import with_layers
from ompq.network.graph import trace
from ompq.network.units import LayerGraph
from ompq.notebook_tables import html_table
from ompq.quantization.calibration import READING
from ompq.quantization.moments import FOR_MOMENTS
from ompq.quantization.pipeline import BIASES
from ompq.quantization.weight_grids import ROUNDING
from ompq.samples import (
    Samples,
    SamplesLike,
    attached,
    evaluating,
    fitting_batch,
    model_device,
    run_batch,
    usual_settings,
)
from ompq.working_memory import free_bytes, resident_bytes, working_bytes

SCORING, RECONSTRUCTING = "scoring the choices", "reconstructing"
FINALIZING, EVALUATING, WRITING = (
    "finalizing integers",
    "evaluating",
    "writing files",
)
_PLAN_SAMPLES = 64
_TIMED_SAMPLES, _LONGEST = 16, 1.0  # run for timing; seconds for one, to time fewer
_BATCH = 16  # samples in a forward pass of evaluation


@dataclass(frozen=True)
class StageForecast:
    """What is expected of one stage of a run."""

    name: str
    seconds: float
    peak_bytes: int  # of resident memory of the whole process


@dataclass(frozen=True, repr=False)
class Forecast:
    """How long the stages of a run are expected to take, and how much memory.

    Attributes:
        stages: In the order in which they run.
        free_bytes: Memory that was free when the forecast was made, for what the run
            takes in addition to what it has.
        resident_bytes: Memory that the process had then.
    """

    stages: tuple[StageForecast, ...]
    free_bytes: int
    resident_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds that the run takes."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def peak_bytes(self) -> int:
        """The most resident memory at any time."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def needed_bytes(self) -> int:
        """How much of the free memory the run takes."""
        return self.peak_bytes - self.resident_bytes

    @property
    def by_stage(self) -> dict[str, float]:
        """Name → seconds of each stage."""
        return {stage.name: stage.seconds for stage in self.stages}

    @property
    def in_words(self) -> str:
        """Time and memory as a sentence."""
        return (
            f"takes about {duration(self.seconds)} and {in_bytes(self.peak_bytes)} of "
            f"memory ({in_bytes(self.resident_bytes)} now, {in_bytes(self.free_bytes)} "
            "free)"
        )

    def __repr__(self) -> str:
        return f"Forecast({self.in_words})"

    def to_dict(self) -> list[dict[str, str]]:
        """Return one row per stage, as text."""
        return [
            {
                "stage": stage.name,
                "time": duration(stage.seconds),
                "memory": in_bytes(stage.peak_bytes),
            }
            for stage in self.stages
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "free_bytes": self.free_bytes,
            "stages": [asdict(stage) for stage in self.stages],
        }

    def _repr_html_(self) -> str:
        return html_table(repr(self), self.to_dict())


@usual_settings()
def forecast(
    model: nn.Module,
    samples: SamplesLike,
    config: ReconstructConfig | None = ReconstructConfig(),
    *,
    coded: bool = False,
    evaluated: int = 0,
) -> Forecast:
    """Return how long it takes to plan, quantize and reconstruct a network here.

    It is measured on one batch, which takes a few seconds at most. Work that the
    machine does besides makes a run longer than its forecast.

    Args:
        samples: Those that the network will be calibrated on.
        config: How blocks will be reconstructed, or None if they will not.
        coded: Whether weights will be entropy-coded.
        evaluated: How many samples the networks will be evaluated on.
    """
    samples = Samples.of(samples)
    model = with_layers(model, samples)
    graph = trace(model, samples)
    run = _Run(_timed(model, samples, graph), len(samples), coded=coded)
    stages = [
        (SCORING, *run.scoring()),
        (READING, *run.calibrating()),
        (ROUNDING, *run.rounding()),
        (BIASES, *run.correcting()),
        *([(RECONSTRUCTING, *run.reconstructing(config))] if config else []),
        (FINALIZING, *run.finalizing()),
        *([(EVALUATING, *run.evaluating(evaluated))] if evaluated else []),
        (WRITING, *run.writing()),
    ]
    base = resident_bytes()
    return Forecast(
        tuple(
            StageForecast(name, time, int(base + more)) for name, time, more in stages
        ),
        free_bytes(),
        base,
    )


class _Timed(NamedTuple):
    """What one batch tells about a network and the machine."""

    graph: LayerGraph
    forward: float  # seconds for a sample, in a batch
    shares: Mapping[str, float]  # of each unit in that, about 1 in all
    outputs: Mapping[str, int]  # values of each unit's output for a sample
    kept: int  # values of all outputs for a sample, which a backward pass needs
    product: float  # seconds for a multiply-accumulate of a large matrix product
    element: float  # seconds to read and write an element
    call: float  # seconds that a call takes besides
    batch: int  # samples in a forward pass

    @property
    def weights(self) -> int:
        """The number of weights."""
        return sum(unit.weights for unit in self.graph.units)


def _timed(model: nn.Module, samples: Samples, graph: LayerGraph) -> _Timed:
    """Run one batch with clocks at the units."""
    begun: dict[str, float] = {}
    spent: dict[str, float] = dict.fromkeys(graph.names, 0.0)
    outputs: dict[str, int] = {}
    kept = 0

    def start(name: str) -> Any:
        return lambda _module, _args: begun.update({name: time.perf_counter()})

    def stop(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            spent[name] += time.perf_counter() - begun[name]
            if isinstance(output, Tensor):
                outputs[name] = output.numel()

        return hook

    def count(_module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal kept
        kept += output.numel() if isinstance(output, Tensor) else 0

    modules = dict(model.named_modules())
    units = [(name, modules[name]) for name in graph.names if name in modules]
    leaves = [m for m in modules.values() if not any(m.children())]
    device = model_device(model)
    with evaluating(model):
        first = _seconds(lambda: run_batch(model, samples.first_batch(1)), device)
        few = 1 if first > _LONGEST else _TIMED_SAMPLES
        batch = samples.first_batch(few)
        few = min(few, len(samples))
        hooks = [
            *(module.register_forward_pre_hook(start(name)) for name, module in units),
            *(module.register_forward_hook(stop(name)) for name, module in units),
            *(module.register_forward_hook(count) for module in leaves),
        ]
        with attached(hooks):
            whole = _seconds(lambda: run_batch(model, batch), device)
        whole = min(whole, _seconds(lambda: run_batch(model, batch), device))
    total = sum(spent.values()) or 1.0
    matrix, row = (
        torch.rand(768, 768, device=device),
        torch.rand(1 << 20, device=device),
    )
    one = torch.rand(4, device=device)
    return _Timed(
        graph,
        forward=whole / few,
        shares={name: each / total for name, each in spent.items()},
        outputs={name: size // few for name, size in outputs.items()},
        kept=kept // few,
        product=_best(lambda: matrix @ matrix, device) / 768**3,
        element=_best(lambda: row.mul(1.5), device) / row.numel(),
        call=_best(lambda: [one.mul(1.5) for _ in range(50)], device) / 50,
        batch=fitting_batch(model, samples, QuantizeConfig.batch_size),
    )


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _best(run: Callable[[], Any], device: torch.device) -> float:
    return min(_seconds(run, device) for _ in range(4))


class _Run(NamedTuple):
    """The stages of a run: each returns its seconds and its bytes.

    The factors were fitted to ResNet-20, ResNet-18, MobileNetV2 and the network of
    ``ompq demo``; docs/limits.md shows how near they are.
    """

    timed: _Timed
    samples: int
    coded: bool

    def _pass(self, samples: int, times: float = 1.0) -> float:
        return samples * times * self.timed.forward

    def scoring(self) -> tuple[float, float]:
        """One pass with gradients, and a search of grids for all widths."""
        timed, count = self.timed, min(_PLAN_SAMPLES, self.samples)
        units = len(timed.graph) * (35_000 if self.coded else 4_000) * timed.call
        search = 200 * timed.weights * timed.element
        read = 8 * count * timed.kept * timed.element
        memory = 4 * (min(timed.batch, 8) * timed.kept + 4 * timed.weights)
        return self._pass(count, 3.7) + read + search + units, memory

    def calibrating(self) -> tuple[float, float]:
        """A pass that fills histograms, and one with gradients on few samples."""
        timed, values = self.timed, sum(self.timed.outputs.values())
        read = self.samples * 45 * values * timed.element
        passes = self._pass(self.samples) + self._pass(min(64, self.samples), 2.2)
        memory = 4 * max(8 * timed.kept, 3 * timed.batch * self._largest)
        return passes + read, memory

    def rounding(self) -> tuple[float, float]:
        """A pass that multiplies inputs, and sweeps over the weights of each layer."""
        timed, work, grams = self.timed, 0.0, 0
        for unit in timed.graph.units:
            width = unit.weights // unit.out_channels
            groups = unit.out_channels if unit.kind == "depthwise" else 1
            grams += 4 * groups * width**2
            values = timed.outputs.get(unit.name, unit.out_channels)
            positions = max(1 << 12, 8 * (width + min(width, 512)))
            positions = min(positions, self.samples * values // unit.out_channels)
            sweeps = (24 if self.coded else 6) * unit.out_channels + width
            work += (positions * groups + sweeps) * width**2
        units = len(timed.graph) * (80_000 if self.coded else 60_000) * timed.call
        tries = (1_000 if self.coded else 60) * timed.weights * timed.element
        seconds = self._pass(self.samples) + work * timed.product + tries + units
        grams = min(grams, working_bytes() // 2)
        return seconds, 1.5 * grams + 4 * 3 * timed.batch * self._largest

    def correcting(self) -> tuple[float, float]:
        """Two networks on some samples, which wait for each other at every layer."""
        count = min(FOR_MOMENTS, self.samples)
        waits = len(self.timed.graph) * count / self.timed.batch * 2_000
        read = 130 * count * sum(self.timed.outputs.values()) * self.timed.element
        seconds = self._pass(count, 3) + read + waits * self.timed.call
        held = 4 * 3 * count * self._largest
        return seconds, min(held, working_bytes() / 2) + 4 * 2 * self.timed.weights

    def reconstructing(self, config: ReconstructConfig) -> tuple[float, float]:
        """Inputs of blocks from both networks, and steps that learn the rounding."""
        timed, rounding, seconds, most = self.timed, config.rounding, 0.0, 0.0
        count = getattr(rounding, "iterations", RoundingConfig.iterations)
        for places in timed.graph.blocks.values():
            units = [timed.graph.units[at] for at in places]
            share = sum(timed.shares.get(unit.name, 0.0) for unit in units)
            outputs = timed.outputs.get(units[-1].name, 1)
            weights = sum(unit.weights for unit in units)
            size = max(getattr(rounding, "step_elements", 1 << 19) // outputs, 8)
            size = min(size, getattr(rounding, "batch_size", 64), self.samples)
            step = 7 * size * share * timed.forward + 60 * weights * timed.element
            seconds += count * (step + (100 + 100 * len(units)) * timed.call)
            most = max(most, 4 * 3 * self.samples * outputs)
        seconds += self._pass(self.samples, 35)
        return seconds, min(most, working_bytes() * 0.75) + 4 * 4 * timed.weights

    def finalizing(self) -> tuple[float, float]:
        """A few passes over one sample, and a search of scales."""
        return len(
            self.timed.graph
        ) * 4_000 * self.timed.call, 4 * 3 * self.timed.weights

    def evaluating(self, count: int) -> tuple[float, float]:
        """Two networks on the samples, one of which rounds."""
        batch = min(count, _BATCH)
        return self._pass(count, 4.3), 4 * (
            3 * batch * self._largest + 3 * self.timed.weights
        )

    def writing(self) -> tuple[float, float]:
        """The files, most of all the report."""
        timed = self.timed
        return (
            1e6 * timed.call + 50 * timed.weights * timed.element,
            4 * 4 * timed.weights,
        )

    @property
    def _largest(self) -> int:
        """Values of the largest output for a sample."""
        return max(self.timed.outputs.values(), default=1)
