"""How a row of the paper is measured, on whatever network and data there are."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ompq.allocation import Budget, halfway
from ompq.attention import with_layers
from ompq.datasets.distilled_data import distilled_samples
from ompq.datasets.sources import Data
from ompq.datasets.training_sets import training_data
from ompq.errors import InfeasibleBudgetError, PatternError
from ompq.graph import Unit, select, trace
from ompq.measurement.reconstruction_score import BlockLoss
from ompq.measurement.rivals import ReinforceConfig, one_bitwidth, reinforce
from ompq.models import NamedModel
from ompq.models.networks import CifarResNet
from ompq.orthogonality import gram_matrix
from ompq.planner import PLAN_PROTOCOLS, PlanConfig
from ompq.plans import Plan
from ompq.quantization import QUANTIZE_PROTOCOLS, QuantizeConfig
from ompq.ranges import search_weight
from ompq.recording import copied
from ompq.reproduction.registry import ANY, HALFWAY, Experiment, Row
from ompq.samples import Samples, model_device
from ompq.scores import measure_orm
from ompq.stages import Stages
from ompq.training import train
from ompq.training.config import TRAIN_PROTOCOLS
from ompq.workflow import Workflow, learning_config, paper_samples

LAYERS = 4  # whose orthogonality is shown by their bits


@dataclass(frozen=True, eq=False)
class Bench:
    """What the rows of an experiment share.

    ``quick`` scales everything down, so that each path ends in minutes on two cores;
    its numbers mean nothing.
    """

    experiment: Experiment
    model: NamedModel
    data: Data  # labelled images to train with; also the source of the samples
    samples: Samples  # unlabelled images to plan, calibrate and reconstruct with
    judged: Iterable[Any]  # labelled batches that accuracy is measured on
    folder: Path  # where stopped rows are continued from
    quick: bool = False
    seed: int = 0
    stages: Stages = field(default_factory=Stages)

    @property
    def own_network(self) -> bool:
        """Whether the network is the one that the paper measured."""
        return self.model.name == self.experiment.network

    @property
    def plan_samples(self) -> int:
        """How many samples plans are made from: the paper's number."""
        return 8 if self.quick else paper_samples(self.experiment.network)

    def work(self, samples: Samples | None = None) -> Workflow:
        """Return the stages of the work, with other samples if they are given."""
        given = self.samples if samples is None else samples
        return Workflow(self.model.module, given, self.stages)

    def budget(self, text: str) -> str:
        """Return a budget that means to this network what it means to the paper's."""
        if self.own_network or not text.endswith("MiB"):
            return text
        size = float(text.removesuffix("MiB"))
        return f"{100 * size / self.experiment.float_mib:.4g}%"


def measured(row: Row, bench: Bench) -> dict[str, Any]:
    """Measure a row; returns plain data."""
    start = time.perf_counter()
    found = _MEASURES[row.measure](row, bench)
    return {**found, "seconds": time.perf_counter() - start}


def _network(row: Row, bench: Bench) -> dict[str, Any]:
    """Plan, quantize, then reconstruct or train, and evaluate."""
    if row.search == "channels":
        return _channels(row, bench)
    samples = _samples(row, bench)
    work = bench.work(samples)
    plan = planned(row, bench, samples)
    base = QUANTIZE_PROTOCOLS.get(row.protocol, QuantizeConfig())
    network = work.quantize(plan, replace(base, **row.quantize))
    if row.train is not None:
        network = _trained(row, network, bench, bench.model.module)
    elif row.reconstruct:
        iterations = 4 if bench.quick else None
        name, seed = bench.model.name, bench.seed
        config = learning_config(row.protocol, name, iterations=iterations, seed=seed)
        checkpoint = bench.folder / f"{row.name}.safetensors"
        network = work.reconstruct(network, config, checkpoint=checkpoint)
        checkpoint.unlink(missing_ok=True)
    return {**_accuracy(work, network, bench), **_sizes(plan)}


def _samples(row: Row, bench: Bench) -> Samples:
    if not row.distilled:
        return bench.samples
    module = bench.model.module
    with bench.stages.stage("distilling samples") as progress:
        made = distilled_samples(
            module,
            bench.model.input_shape,
            len(bench.samples),
            steps=4 if bench.quick else 500,
            seed=bench.seed,
            progress=progress,
        )
    return Samples.of(made)


def planned(row: Row, bench: Bench, samples: Samples | None = None) -> Plan:
    """Return the plan of a row.

    Another network than the paper's may not reach the same share of its float size;
    there the budget is halfway between what it can reach.
    """
    work, config = bench.work(samples), _plan_config(row, bench)
    budget = bench.budget(ANY if row.budget == HALFWAY else row.budget)
    try:
        found = work.plan(budget, config, count=bench.plan_samples)
    except InfeasibleBudgetError:
        if bench.own_network:
            raise
        found = work.plan(ANY, config, count=bench.plan_samples)
        found = _halfway(found)
    if row.budget == HALFWAY:
        found = _halfway(found)
    if row.search == "reinforce":
        learning = ReinforceConfig(seed=bench.seed)
        if bench.quick:
            learning = replace(learning, episodes=2, warmup=1)
        with bench.stages.stage("searching") as progress:
            found = reinforce(
                found, bench.model.module, work.samples, learning, progress=progress
            )
    return found


def _halfway(plan: Plan) -> Plan:
    return plan.with_budget(Budget(size_mib=halfway(plan.problem, "bytes") / 2**20))


def _plan_config(row: Row, bench: Bench) -> PlanConfig:
    base = PLAN_PROTOCOLS.get(row.protocol, PlanConfig())
    config = replace(base, **row.plan)
    names = trace(bench.model.module, bench.samples[:1]).names
    # A name of the paper's network may be missing from another one.
    pins = {p: bits for p, bits in config.pinned.items() if _matches(names, p)}
    score = config.score
    if bench.quick and score == "block_loss":
        score = BlockLoss(iterations=1, samples=4)
    return replace(config, pinned=pins, score=score)


def _matches(names: tuple[str, ...], pattern: str) -> bool:
    try:
        return bool(select(names, pattern))
    except PatternError:
        return False


def _trained(
    row: Row, network: nn.Module, bench: Bench, teacher: nn.Module
) -> nn.Module:
    config = replace(TRAIN_PROTOCOLS[str(row.train)], seed=bench.seed)
    batches: Any
    if bench.quick:
        epochs = 2 if config.widths == "learned" else 1
        config = replace(config, epochs=epochs, freeze_norm_epoch=0)
        batches = list(bench.data.batches(batch_size=8, limit=16))
    else:
        batches = training_data(bench.data, device=model_device(teacher))
    kept = bench.folder / f"{row.name}-training"  # where a stopped row continues
    with bench.stages.stage("training") as progress:
        made = train(
            network,
            batches,
            config,
            teacher=teacher,
            checkpoint=kept,
            progress=progress,
        )
    rmtree(kept, ignore_errors=True)
    return made


def _channels(row: Row, bench: Bench) -> dict[str, Any]:
    """Widen a CIFAR ResNet in place of choosing bits, and train it from scratch."""
    family, _, name = bench.model.name.partition(":resnet")
    if family != "cifar" or not name.isdigit() or name == "18":
        return {"skipped": row.note}
    config = replace(_plan_config(row, bench), pinned={})
    made = one_bitwidth(
        lambda width: CifarResNet(int(name), width=width),
        bench.samples[: bench.plan_samples],
        bench.budget(row.budget),
        config=config,
        seed=bench.seed,
    )
    work = replace(bench.work(), model=made.model)
    network = _trained(row, work.quantize(made.plan), bench, made.model)
    return {**_accuracy(bench.work(), network, bench), **_sizes(made.plan)}


def _accuracy(work: Workflow, network: nn.Module, bench: Bench) -> dict[str, Any]:
    final, arithmetic = work.finalize(network)
    return {**_evaluated(work, final, bench), "arithmetic": arithmetic}


def _evaluated(work: Workflow, network: nn.Module, bench: Bench) -> dict[str, Any]:
    found = work.evaluate(network, bench.judged).to_json()
    names = ("top1", "drop", "drop_error", "divergence", "agreement", "count")
    return {name: found[name] for name in names}


def _sizes(plan: Plan) -> dict[str, Any]:
    totals = plan.totals
    return {
        "mib": totals["bytes"] / 2**20,
        "bit_ops": totals["bit_ops"],
        "average_bits": totals["average_bits"],
        "bits": {n: str(choice) for n, choice in plan.allocation.items()},
        "kinds": {unit.name: unit.kind for unit in plan.graph.units},
    }


def _plan(row: Row, bench: Bench) -> dict[str, Any]:
    plan = planned(row, bench)
    return {**_sizes(plan), "images": min(bench.plan_samples, len(bench.samples))}


def _orthogonality(row: Row, bench: Bench) -> dict[str, Any]:
    """Round to random bits, and compare orthogonality with accuracy."""
    plan = planned(row, bench)
    bits = {n: choice.weight for n, choice in plan.allocation.items()}
    rounded = _rounded(bench, bits)
    few = bench.samples[: bench.plan_samples]
    matrix = measure_orm(plan.graph, rounded, few).matrix
    found = _evaluated(bench.work(), rounded, bench)
    # ORM is 1 where functions depend on each other: what is missing is orthogonality.
    return {
        **found,
        **_sizes(plan),
        "orthogonality": float((1 - matrix).sum()),
    }


def _layer(row: Row, bench: Bench) -> dict[str, Any]:
    """Round one layer after another, and tell its orthogonality to all others."""
    few = bench.samples[: bench.plan_samples]
    graph = trace(bench.model.module, few)
    step = max(1, len(graph) // LAYERS)
    found = {}
    for unit in graph.units[step // 2 :: step][:LAYERS]:
        rounded = _rounded(bench, {unit.name: int(row.at or 0)})
        result = measure_orm(graph, rounded, few)
        others = max(len(result.labels) - 1, 1)
        gamma = float(result.gamma[graph.names.index(unit.name)])
        found[unit.name] = 1 - gamma / others
    return {"layers": found}


def _rounded(bench: Bench, bits: Mapping[str, int]) -> nn.Module:
    """Return a copy of the network with some weights rounded, all else as it was."""
    network = with_layers(copied(bench.model.module), bench.samples)
    units: dict[str, Unit] = {
        u.name: u for u in trace(network, bench.samples[:1]).units
    }
    with torch.no_grad():
        for name, width in bits.items():
            weight = network.get_parameter(units[name].parameter)
            if width <= 8:
                weight.copy_(search_weight(weight, width).fake(weight))
    return network


def _matrix(row: Row, bench: Bench) -> dict[str, Any]:
    count = min(int(row.at or 0), len(bench.samples))
    few = bench.samples[:count]
    found = measure_orm(trace(bench.model.module, few), bench.model.module, few)
    matrix, labels = found.matrix.tolist(), list(found.labels)
    return {"samples": count, "matrix": matrix, "labels": labels}


def _time(row: Row, bench: Bench) -> dict[str, Any]:
    """Time both ways of ||Z^T Y||^2 for two random matrices of N × p."""
    count, width = (
        int(n) // (20 if bench.quick else 1) for n in str(row.at).split("x")
    )
    generator = torch.Generator().manual_seed(bench.seed)
    y, z = torch.randn(2, count, width, generator=generator).to(
        model_device(bench.model.module)
    )

    def timed(function: Callable[[], Tensor]) -> tuple[float, float]:
        start = time.perf_counter()
        value = float(function())
        return value, time.perf_counter() - start

    gram, inner = timed(lambda: (gram_matrix(y) * gram_matrix(z)).sum())
    norm, features = timed(lambda: (z.double().T @ y.double()).square().sum())
    assert np.isclose(gram, norm)
    return {"inner_product": inner, "norm": features, "ratio": inner / features}


_MEASURES: Mapping[str, Callable[[Row, Bench], dict[str, Any]]] = MappingProxyType(
    {
        "network": _network,
        "plan": _plan,
        "orthogonality": _orthogonality,
        "layer": _layer,
        "matrix": _matrix,
        "time": _time,
        "published": lambda row, _bench: {"images": row.at},
    }
)
