"""Runs a table or a figure of the paper, row by row, and writes down the results."""

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ompq.bit_widths import FLOAT_BITS
from ompq.cli.console import Column, Console, View, say
from ompq.cli.loading import load_network, read_samples
from ompq.cli.option_groups import NetworkOptions
from ompq.cli.options import check_writable
from ompq.configs import (
    PLAN_PROTOCOLS,
    QUANTIZE_PROTOCOLS,
    TRAIN_PROTOCOLS,
    PlanConfig,
    QuantizeConfig,
)
from ompq.content_identity import identity
from ompq.costs import cost_tables
from ompq.datasets.distillation import distilled_samples
from ompq.datasets.named_data import Batches, Data, load_data
from ompq.datasets.training_sets import training_data
from ompq.errors import (
    CheckpointError,
    DataError,
    InfeasibleBudgetError,
    ModelError,
    OmpqError,
    PatternError,
    shorten,
    suggestion,
)
from ompq.evaluation import is_class_indices
from ompq.files import library_version, write_text
from ompq.lab.more_scores.loss_gradients import HESSIAN, Hessian
from ompq.lab.paper_figures import draw, markdown
from ompq.lab.paper_tables import EXPERIMENTS, HALFWAY, Experiment, Row
from ompq.lab.published_bits import published_bits
from ompq.lab.research_options import ReproduceOptions
from ompq.lab.rivals.reinforcement import ReinforceConfig, reinforce
from ompq.lab.rivals.wide_channels import one_bitwidth
from ompq.layers import plain_class, quantized_layers
from ompq.models.builtin_networks import CIFAR_NETWORKS, multiply_channels
from ompq.models.named_models import NamedModel
from ompq.network.attention import with_layers
from ompq.network.graph import RECORD, trace
from ompq.network.observation import copy_network
from ompq.network.units import Choice, select
from ompq.planning import free_choices
from ompq.plans import Plan
from ompq.progress import Stages
from ompq.quantization.record import network_totals, quantization_of
from ompq.samples import Samples, model_device
from ompq.scores.computation import Score
from ompq.scores.orthogonality import measure_orm
from ompq.training.training_loop import train
from ompq.untrusted_json import convert_json, read_json
from ompq.weight_ranges import search_weight
from ompq.workflow import (
    ANYTHING,
    CALIBRATION_SAMPLES,
    Workflow,
    learning_config,
    paper_samples,
)

_TILE = 1000  # rows of a product at a time: 40 MB for 10,000 columns
_TABLES = "scores"  # folder of the score tables, for all experiments
QUICK_SAMPLES, QUICK_IMAGES = 16, 64  # with --quick


@dataclass(frozen=True, eq=False)
class Bench:
    """What the rows of an experiment share."""

    experiment: Experiment
    model: NamedModel
    data: Data  # labelled images to train with; also the source of the samples
    samples: Samples  # unlabelled images to plan, calibrate and reconstruct with
    judged: Batches  # labelled images that accuracy is measured on
    folder: Path  # where stopped rows are continued from
    quick: bool = False  # whether to scale everything down, just to try it
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

    @property
    def about(self) -> dict[str, Any]:
        """What the results depend on, besides the settings of each row."""
        return {
            "experiment": self.experiment.name,
            "network": self.model.name,
            "weights": self.model.weights,
            "data": self.data.name,
            "samples": len(self.samples),
            "eval_data": self.judged.data.name,
            "limit": len(self.judged.order),
            "seed": self.seed,
            "quick": self.quick,
            "device": model_device(self.model.module).type,
            "ompq": library_version(),
        }

    def work(self, samples: Samples | None = None) -> Workflow:
        """Return the workflow, with other samples if they are given."""
        return Workflow(self.model.module, samples or self.samples, self.stages)

    def budget(self, text: str) -> str:
        """Return a budget that means to this network what it means to the paper's."""
        if self.own_network or not text.endswith("MiB"):
            return text
        size = float(text.removesuffix("MiB"))
        return f"{100 * size / self.experiment.float_mib:.4g}%"


def _results(bench: Bench, rows: str, console: Console) -> dict[str, Any]:
    """Measure the rows that match a pattern, and read those measured before.

    Each row is saved as soon as it is measured, so that a stopped run continues with
    the next. A row that this network or data does not allow, such as samples distilled
    from a network whose batch norms were folded, keeps the reason, and is tried again
    when it is asked for.

    Raises:
        CheckpointError: The folder holds rows of another network, data or settings.
        ValueError: No row matches.
    """
    experiment = bench.experiment
    wanted = [row for row in experiment.rows if fnmatchcase(row.name, rows)]
    if not wanted:
        names = shorten([row.name for row in experiment.rows])
        raise ValueError(
            f"no row of {experiment.name} matches {rows!r}; it has {names}"
        )
    bench.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for row in experiment.rows:
        name = re.sub(r"[^\w.()-]", "_", row.name)
        path = bench.folder / f"{name}.json"
        # A row whose settings have changed is measured again.
        own = identity(row)
        found = _read_result(path, own, bench.about)
        if row in wanted and (found is None or "skipped" in found):
            start = time.perf_counter()
            try:
                found = _MEASURES[row.measure](row, bench)
                found["seconds"] = time.perf_counter() - start
            except OmpqError as error:
                found = {"skipped": str(error), "seconds": 0.0}
            _write(path, {**bench.about, "row": own, "result": found})
        if found is not None:
            results[row.name] = found
            _report_row(console, row, found)
    return results


def _write(path: Path, data: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(data, indent=1) + "\n")


def _read_result(path: Path, own: str, about: Mapping[str, Any]) -> Any:
    """Return the saved result of a row; None if there is none for its settings."""
    if not path.exists():
        return None
    data = convert_json(read_json(path), dict[str, Any], str(path))
    differing = [name for name, value in about.items() if data.get(name) != value]
    if differing:
        raise CheckpointError(
            f"{path} was measured with a different {', '.join(differing)}; use another "
            "folder, or remove it"
        )
    return data["result"] if data.get("row") == own else None


def _report_row(console: Console, row: Row, result: Mapping[str, Any]) -> None:
    top1 = result.get("top1")
    text = "" if top1 is None else f" top-1 {100 * top1:.2f}"
    text = f" not run: {result['skipped']}" if "skipped" in result else text
    paper = "" if row.published is None else f" (the paper: {row.published:.2f})"
    if not console.quiet:
        say(console.err, f"{row.name}:{text}{paper}, {result['seconds']:.1f} s")


def _network(row: Row, bench: Bench) -> dict[str, Any]:
    """Plan, quantize, then reconstruct or train, and evaluate."""
    if row.search == "channels":
        return _channels(row, bench)
    samples = _samples(row, bench)
    work = bench.work(samples)
    plan = plan_row(row, bench, samples)
    base = QUANTIZE_PROTOCOLS.get(row.protocol, QuantizeConfig())
    network = work.quantize(plan, replace(base, **row.quantize))
    if row.train is not None:
        network = _train(row, network, bench, bench.model.module)
    elif row.reconstruct:
        iterations = 4 if bench.quick else None
        name, seed = bench.model.name, bench.seed
        config = learning_config(row.protocol, name, iterations=iterations, seed=seed)
        checkpoint = bench.folder / f"{row.name}.safetensors"
        network = work.reconstruct(network, config, checkpoint=checkpoint)
        checkpoint.unlink(missing_ok=True)
    return {**_finalize(work, network, bench), **_sizes(plan, network)}


def _float(_row: Row, bench: Bench) -> dict[str, Any]:
    """Evaluate the float network, which the others are compared with."""
    graph = trace(bench.model.module, bench.samples[:1])
    costs = cost_tables(graph, [Choice(FLOAT_BITS, FLOAT_BITS)])
    return {
        **_evaluate(bench.work(), bench.model.module, bench),
        "mib": costs["bytes"].reference / 2**20,
        "bit_ops": costs["bit_ops"].total(np.zeros(len(graph), np.intp)),
    }


def _samples(row: Row, bench: Bench) -> Samples:
    if not row.distilled:
        return bench.samples
    with bench.stages.stage("distilling samples") as progress:
        made = distilled_samples(
            bench.model.module,
            bench.model.input_shape,
            len(bench.samples),
            steps=4 if bench.quick else 500,
            seed=bench.seed,
            progress=progress,
        )
    return Samples.of(made)


def plan_row(row: Row, bench: Bench, samples: Samples | None = None) -> Plan:
    """Return the plan of a row.

    A network other than the paper's may not reach the same fraction of its float size;
    then the budget is halfway between the smallest and the largest size.
    """
    config, count = _plan_config(row, bench), bench.plan_samples
    work = replace(bench.work(samples), cache=_cache(row, config, bench))
    if row.bits:
        return work.plan(published_bits(row.bits), config, count=count)
    budget = bench.budget(ANYTHING if row.budget == HALFWAY else row.budget)
    try:
        found = work.plan(budget, config, count=count)
    except InfeasibleBudgetError:
        if bench.own_network:
            raise
        found = work.plan(ANYTHING, config, count=count).halfway()
    if row.budget == HALFWAY:
        found = found.halfway("bit_ops")
    if row.search == "reinforce":
        learning = ReinforceConfig(seed=bench.seed)
        if bench.quick:
            learning = replace(learning, episodes=2, warmup=1)
        with bench.stages.stage("searching") as progress:
            found = reinforce(
                found, bench.model.module, work.samples, learning, progress=progress
            )
    return found


def _plan_config(row: Row, bench: Bench) -> PlanConfig:
    config = replace(PLAN_PROTOCOLS.get(row.protocol, PlanConfig()), **row.plan)
    names = trace(bench.model.module, bench.samples[:1]).names
    pins = {}
    for pattern, bits in config.pinned.items():
        with suppress(PatternError):  # only the paper's network has such a layer
            select(names, pattern)
            pins[pattern] = bits
    score: Score | str = config.score
    if bench.quick and score == "block_loss":  # a reconstruction for each choice
        score = "weight_noise"
    score = HESSIAN if score == "hessian" else score
    if isinstance(score, Hessian):
        few = replace(score, samples=2, probes=1) if bench.quick else score
        score = _labelled(few, bench)
    return replace(config, pinned=pins, score=score)


def _labelled(score: Hessian, bench: Bench) -> Hessian:
    """Give HAWQ's score the labels that it is published with, if the data has any."""
    if bench.data.label_problem is not None:
        return score
    count = min(score.samples, len(bench.data))
    batches = list(bench.data.batches(batch_size=count, limit=count))
    known = all(is_class_indices(labels, len(labels)) for _, labels in batches)
    return replace(score, batches=batches) if known else score


def _cache(row: Row, config: PlanConfig, bench: Bench) -> Path | None:
    """Return the folder of score tables, which rows of one score share.

    Rows that time the choice of bits compute their own. Scores with labels are never
    kept, and asking for it is warned of.
    """
    if row.measure == "plan" or getattr(config.score, "batches", None) is not None:
        return None
    return bench.folder.parent / _TABLES


def _train(row: Row, network: nn.Module, bench: Bench, teacher: nn.Module) -> nn.Module:
    config = replace(TRAIN_PROTOCOLS[str(row.train)], seed=bench.seed)
    batches: Any
    if bench.quick:
        epochs = 2 if config.weights == "fracbits" else 1
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
    """Widen a network instead of choosing bits, and train it from scratch."""
    config = replace(_plan_config(row, bench), pinned={})
    [choice] = free_choices(config)
    made = one_bitwidth(
        partial(_wider, bench.model),
        bench.samples[: bench.plan_samples],
        bench.budget(row.budget),
        choice.weight,
        config,
        seed=bench.seed,
    )
    work = replace(bench.work(), model=made.model)
    network = _train(row, work.quantize(made.plan), bench, made.model)
    return {**_finalize(bench.work(), network, bench), **_sizes(made.plan, network)}


def _wider(model: NamedModel, width: float) -> nn.Module:
    """Return a network with more channels, or fewer, and random weights."""
    device = model_device(model.module)
    if model.name in CIFAR_NETWORKS:
        return CIFAR_NETWORKS[model.name](width=width).to(device)
    if not model.name.startswith("torchvision:resnet"):
        raise ModelError(
            f"{model.name} is not a ResNet of torchvision or CIFAR, whose channels can "
            "be multiplied"
        )
    network = copy_network(model.module)
    multiply_channels(network, width)
    return network.to(device)


def _finalize(work: Workflow, network: nn.Module, bench: Bench) -> dict[str, Any]:
    final, arithmetic = work.finalize(network)
    return {**_evaluate(work, final, bench), "arithmetic": arithmetic}


def _evaluate(work: Workflow, network: nn.Module, bench: Bench) -> dict[str, Any]:
    found = work.evaluate(network, bench.judged).to_json()
    names = ("top1", "drop", "drop_error", "divergence", "agreement", "count")
    return {name: found[name] for name in names}


def _sizes(plan: Plan, network: nn.Module | None = None) -> dict[str, Any]:
    """Return what a plan takes, or the network that training made of it."""
    totals, bits = plan.totals, plan.allocation
    if network is not None:
        totals = network_totals(network, plan)
        bits = quantization_of(network).allocation
    return {
        "mib": totals["bytes"] / 2**20,
        "bit_ops": totals["bit_ops"],
        "average_bits": totals["average_bits"],
        "bits": {name: str(choice) for name, choice in bits.items()},
        "kinds": {unit.name: unit.kind for unit in plan.graph.units},
    }


def _plan(row: Row, bench: Bench) -> dict[str, Any]:
    images = min(bench.plan_samples, len(bench.samples))
    return {**_sizes(plan_row(row, bench)), "images": images}


def _orthogonality(row: Row, bench: Bench) -> dict[str, Any]:
    """Quantize weights to random bits, and compare orthogonality with accuracy."""
    plan, work = plan_row(row, bench), bench.work()
    network = work.quantize(plan)
    found = _evaluate(work, network, bench)
    with torch.no_grad():
        for layer in quantized_layers(network).values():
            layer.weight.copy_(layer.rounded_weight())
            layer.__class__ = plain_class(layer)
    delattr(network, RECORD)  # it is a float network now, with the same outputs
    few = bench.samples[: bench.plan_samples]
    matrix = measure_orm(trace(network, few), network, few).matrix
    # ORM is 1 where functions depend on each other: what is missing is orthogonality.
    return {**found, **_sizes(plan), "orthogonality": float((1 - matrix).sum())}


def _layer(row: Row, bench: Bench) -> dict[str, Any]:
    """Round one layer after another; return its orthogonality to all others."""
    few = bench.samples[: bench.plan_samples]
    network = with_layers(copy_network(bench.model.module), few)
    graph, found = trace(network, few), {}
    for place, unit in enumerate(graph.units):
        weight = network.get_parameter(unit.parameter)
        kept = weight.detach().clone()
        grid = search_weight(kept, int(row.at or 0))
        with torch.no_grad():
            weight.copy_(grid.fake(kept))
            result = measure_orm(graph, network, few)
            weight.copy_(kept)
        others = max(len(result.labels) - 1, 1)
        found[unit.name] = 1 - float(result.gamma[place]) / others
    return {"layers": found}


def _method(row: Row, bench: Bench) -> dict[str, Any]:
    """Return each step of the paper's method: ORM, importance, bits."""
    plan = plan_row(row, bench)
    few = bench.samples[: bench.plan_samples]
    found = measure_orm(plan.graph, bench.model.module, few)
    return {
        **_sizes(plan),
        "images": len(few),
        "matrix": found.matrix.tolist(),
        "labels": list(found.labels),
        "importance": dict(
            zip(plan.graph.names, found.importance.tolist(), strict=True)
        ),
    }


def _matrix(row: Row, bench: Bench) -> dict[str, Any]:
    wanted = int(row.at or 0) // (4 if bench.quick else 1)
    few = bench.samples[: min(wanted, len(bench.samples))]
    found = measure_orm(trace(bench.model.module, few), bench.model.module, few)
    matrix, labels = found.matrix.tolist(), list(found.labels)
    return {"samples": len(few), "matrix": matrix, "labels": labels}


def _time(row: Row, bench: Bench) -> dict[str, Any]:
    """Time both ways to compute ||Z^T Y||^2 for two random matrices of N × p.

    Both take float32 products, in tiles, and add in float64.
    """
    shrink = 20 if bench.quick else 1
    count, width = (int(number) // shrink for number in str(row.at).split("x"))
    generator = torch.Generator().manual_seed(bench.seed)
    y, z = torch.randn(2, count, width, generator=generator).to(
        model_device(bench.model.module)
    )

    def timed(function: Callable[[], Tensor]) -> tuple[float, float]:
        start = time.perf_counter()
        value = float(function())  # waits for a GPU
        return value, time.perf_counter() - start

    gram, inner = timed(lambda: inner_product(y, z))
    norm, features = timed(lambda: squared_norm(y, z))
    assert np.isclose(gram, norm, rtol=1e-4)
    ratio = max(inner, features) / min(inner, features)
    return {"inner_product": inner, "norm": features, "ratio": ratio}


def inner_product(y: Tensor, z: Tensor) -> Tensor:
    """Return <vec(YY^T), vec(ZZ^T)> for matrices (N, p), a scalar in float64."""
    tiles = zip(torch.split(y, _TILE), torch.split(z, _TILE), strict=True)
    parts = [((a @ y.T) * (b @ z.T)).sum(dtype=torch.float64) for a, b in tiles]
    return torch.stack(parts).sum()


def squared_norm(y: Tensor, z: Tensor) -> Tensor:
    """Return ||Z^T Y||^2 for matrices (N, p), a scalar in float64."""
    tiles = torch.split(z, _TILE, dim=1)
    parts = [(one.T @ y).square().sum(dtype=torch.float64) for one in tiles]
    return torch.stack(parts).sum()


_MEASURES: dict[str, Callable[[Row, Bench], dict[str, Any]]] = {
    "network": _network,
    "float": _float,
    "plan": _plan,
    "method": _method,
    "orthogonality": _orthogonality,
    "layer": _layer,
    "matrix": _matrix,
    "time": _time,
    "published": lambda _row, _bench: {},
}


def run_reproduce(options: ReproduceOptions, console: Console) -> View:
    """Run the rows of a table or figure; write and show the results."""
    if options.listed:
        return _list_view()
    experiment = _chosen(options.name)
    check_writable(options.folder, folder=True)
    bench = _bench(options, experiment, console)
    results = _results(bench, options.rows, console)
    start = options.folder / experiment.name
    target, table = (Path(f"{start}.{end}") for end in ("json", "md"))
    _write(target, {**bench.about, "rows": results})
    write_text(table, markdown(experiment, results, bench.about))
    drawn = draw(experiment, results, options.folder, published=bench.own_network)
    names = [str(f) for f in (target, table, *drawn)]
    skipped = [row for row, found in results.items() if "skipped" in found]
    if skipped and options.strict:
        raise DataError(
            f"{len(skipped)} of {len(results)} rows were not run, and {table} says "
            f"why: {shorten(skipped)}. Omit --strict to accept that"
        )
    left = f", {len(skipped)} of them not run: {shorten(skipped)}" if skipped else ""
    line = f"{experiment.name}: {len(results)} rows{left}, {', '.join(names)}"
    return View({"rows": results, "files": names, "skipped": skipped}, line)


def _bench(
    options: ReproduceOptions, experiment: Experiment, console: Console
) -> Bench:
    """Load the network and the data.

    Raises:
        ValueError: No data is given, and the experiment needs some.
    """
    data, weights, seed = options.data, options.weights, options.seed
    if data is None and not experiment.needs_data:
        data, weights = "random", weights or "none"
    if data is None:
        raise ValueError("--data is missing: give a folder of labelled images")
    network = options.network or experiment.network
    sources = NetworkOptions(network=network, weights=weights, device=options.device)
    model = load_network(sources, console)
    inputs = load_data(data, model, split="train", seed=seed)
    held_out = load_data(options.eval_data or data, model, split="test", seed=seed)
    count = options.samples or min(CALIBRATION_SAMPLES, len(inputs))
    limit = options.limit
    if options.quick:
        count = min(count, QUICK_SAMPLES)
        limit = limit or min(QUICK_IMAGES, len(held_out))
    return Bench(
        experiment,
        model,
        inputs,
        read_samples(inputs, count, console),
        held_out.batches(limit=limit),
        options.folder / experiment.name,
        quick=options.quick,
        seed=seed,
        stages=console.stages,
    )


def _chosen(name: str | None) -> Experiment:
    if name is None:
        raise ValueError("give a table or figure; ompq reproduce --list shows them")
    if name not in EXPERIMENTS:
        raise ValueError(
            f"there is no {name!r}{suggestion(name, EXPERIMENTS)}; "
            "ompq reproduce --list shows all of them"
        )
    return EXPERIMENTS[name]


def _list_view() -> View:
    entries = [(one, row) for one in EXPERIMENTS.values() for row in one.rows]
    fields = ("method", "budget", "train", "published")
    data = [
        {
            **{key: getattr(one, key) for key in ("name", "title", "network")},
            "row": row.name,
            **{key: getattr(row, key) for key in fields},
        }
        for one, row in entries
    ]
    budgets = ["" if row.budget == ANYTHING else row.budget for _, row in entries]
    top1 = ["" if r.published is None else f"{r.published:.2f}" for _, r in entries]
    names = ["" if one.rows[0] is not row else one.name for one, row in entries]
    columns = [
        Column("table or figure", names, "left", shorten=True),
        Column("row", [row.name for _, row in entries], "left"),
        Column("method", [row.method for _, row in entries], "left", rank=3),
        Column("budget", budgets, rank=1),
        Column("training", [row.train or "" for _, row in entries], "left", rank=2),
        Column("top-1, paper", top1),
    ]
    line = f"{len(EXPERIMENTS)} tables and figures, {len(entries)} rows"
    return View(data, line, [columns])
