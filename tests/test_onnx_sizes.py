"""Budgets for files with an ONNX graph: known before they are written, and kept."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ompq
from nets import Branching, Chain, TinyMobileNet, TinyResNet, images, seeded
from ompq.allocation.infeasibility import reachable
from ompq.errors import (
    BudgetError,
    ExportError,
    InfeasibleBudgetError,
    PackedFileError,
    PlanError,
)
from ompq.files import ONNX, PACKED, RESULT
from ompq.runtimes.onnx import weight_containers
from ompq.workflow import Workflow

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def wide():
    """A network whose weights are most of its file."""
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 50))


EVERY = (2, 3, 4, 5, 6, 7, 8)
# Network, bits of inputs, and what the plan may lie above the file: mostly room for
# the network's name and for grids that tensors share by chance, or for Clips.
CASES = {
    "wide": (wide, (8,), 0.01),
    "wide, in stages": (wide, (8,), 0.02),
    "depthwise": (TinyMobileNet, (8,), 0.1),
    "inputs of 4 or 8 bits": (wide, (4, 8), 0.02),
    "weights alone": (Chain, (32,), 0.3),
}


@pytest.mark.parametrize("case", CASES)
def test_the_file_keeps_to_its_budget_at_any_bits(case, tmp_path, monkeypatch):
    make, inputs, above = CASES[case]
    if "stages" in case:  # as large networks have
        monkeypatch.setattr(weight_containers, "_AT_ONCE", 1)
        monkeypatch.setattr(weight_containers, "_WIDE", 1 << 12)
    network, samples = seeded(make()), images()
    config = ompq.PlanConfig(
        choices=EVERY, activation_choices=inputs, score="weight_noise"
    )
    first = ompq.plan(network, samples, "onnx:1GiB", config)
    low, high = reachable(first.problem, "onnx_bytes")
    for share in (0.2,) if make is Chain else (0.0, 0.4):
        limit = round(low + share * (high - low))
        plan = first.with_budget(f"onnx:{limit}B")
        quantized = ompq.quantize(network, plan, samples)
        path = tmp_path / "net.onnx"
        written = ompq.export(
            quantized, path, samples, ompq.ExportConfig(budget=plan.budget)
        )
        real, planned = path.stat().st_size, plan.totals["onnx_bytes"]
        assert written.bytes == real <= planned <= limit
        # What a file may say of its inputs is reserved, and not used here.
        assert planned <= (1 + above) * real + 480


def test_no_allocation_takes_less_than_the_least():
    config = ompq.PlanConfig(choices=EVERY, score="weight_noise")
    plan = ompq.plan(seeded(TinyResNet()), images(), "onnx:1GiB", config)
    cost, rng = plan.problem.costs["onnx_bytes"], np.random.default_rng(0)
    low, high = reachable(plan.problem, "onnx_bytes")
    for columns in rng.integers(len(EVERY), size=(200, len(plan.graph))):
        assert low <= cost.total(columns) <= high
    # Tables of few bits take more than such small weights: four bits need none.
    with pytest.raises(InfeasibleBudgetError, match=r"allocations take from 9\.\d"):
        plan.with_budget("onnx:9KiB")
    smallest = plan.with_budget(f"onnx:{round(low)}B")
    assert {choice.weight for choice in smallest.allocation.values()} <= {4, 8}


@pytest.fixture(scope="module")
def planned():
    config = ompq.PlanConfig(choices=(2, 4, 8), score="weight_noise", tie=False)
    return ompq.plan(seeded(wide()), images(), "onnx:60KiB, 5bits", config)


def test_plans_know_files_without_the_network(planned, tmp_path):
    assert str(planned.budget) == "5bits, onnx:60KiB"
    planned.save(tmp_path / "plan.json")
    again = ompq.Plan.load(tmp_path / "plan.json")
    assert again.hash == planned.hash
    assert again.totals["onnx_bytes"] <= 60 * 1024
    smaller = again.with_budget("onnx:50KB, 30KiB")
    assert smaller.totals["onnx_bytes"] <= 50_000
    curve = again.pareto("onnx_bytes", 5)
    assert all(point.cost <= point.limit for point in curve)
    text = str(smaller.explain("2"))
    assert "onnx_bytes" in text and "one KiB more would save" in text
    with pytest.raises(BudgetError, match="no cost 'graph_bytes'; plan"):
        again.with_budget("graph:60KiB")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "bytes"}, "files must be of onnx_bytes, graph_bytes"),
        (
            {"table": [[1]]},
            r"a file's bytes\.table must be a list of length at least 3",
        ),
        (
            {"shared": [[5, [99]]]},
            r".*shared\[0\]\[1\]\[0\] must be a whole number of at most 2",
        ),
    ],
)
def test_damaged_files_are_refused(planned, change, words, tmp_path):
    planned.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    data["files"][0] |= change
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=f"is a damaged plan: {words}"):
        ompq.Plan.load(tmp_path / "plan.json")


def test_files_above_their_budget_are_not_kept(planned, tmp_path):
    quantized = ompq.quantize(seeded(wide()), planned, images())
    words = r"net\.onnx: the file takes [\d,]+ bytes, [\d,]+ more than .* onnx:20KiB;"
    with pytest.raises(ExportError, match=words):
        small = ompq.ExportConfig(budget="onnx:20KiB")
        ompq.export(quantized, tmp_path / "net.onnx", images(), small)
    assert not [*tmp_path.iterdir()]


def test_a_network_that_cannot_be_written_is_told_when_it_is_planned():
    words = "the budget limits the ONNX file, which cannot be made: PyTorch cannot"
    with pytest.raises(ExportError, match=words):
        ompq.plan(seeded(Branching()), torch.ones(4, 3), "onnx:1MiB")


@pytest.mark.parametrize("make", [Chain, wide])
def test_a_packed_file_keeps_to_its_budget_with_its_graph(make, tmp_path):
    config = ompq.PlanConfig(choices=(2, 3, 6), score="weight_noise")
    network, samples = seeded(make()), images()
    plan = ompq.plan(network, samples, "graph:1GiB", config)
    low, high = reachable(plan.problem, "graph_bytes")
    packed, onnx, both = (tmp_path / name for name in ("packed", "net.onnx", "both"))
    for share in (0.0, 0.4, 1.0):
        limit = round(low + share * (high - low))
        plan = plan.with_budget(f"graph:{limit}B")
        final = ompq.finalize(ompq.quantize(network, plan, samples), samples)
        ompq.save(final, packed, plan=plan)
        ompq.export(final, onnx, samples)
        added = ompq.packed.add_onnx(packed, onnx, both)
        real, planned = both.stat().st_size, plan.totals["graph_bytes"]
        assert packed.stat().st_size + added < real <= planned <= limit
        # The packed file's own bound has room for 1.5 KiB, and names take some.
        assert planned <= 1.05 * real + 2500


def test_a_run_writes_the_files_that_its_budget_limits(tmp_path):
    config = ompq.PlanConfig(choices=(4, 8), score="weight_noise")
    work = Workflow(seeded(Chain()), images())
    plan = work.plan("onnx:4KiB, graph:8KiB", config)
    made = work.outcome(work.quantize(plan), plan, None, {"network": "net"})
    sizes = made.write(tmp_path)
    for name, cost in ((ONNX, "onnx_bytes"), (PACKED, "graph_bytes")):
        real = (tmp_path / name).stat().st_size
        assert real == sizes[name].bytes <= sizes[name].planned == plan.totals[cost]
    ompq.packed.unpack(tmp_path / PACKED, tmp_path / "again.onnx")
    again = (tmp_path / "again.onnx").read_bytes()
    assert again == (tmp_path / ONNX).read_bytes()
    saved = json.loads((tmp_path / RESULT).read_text())["sizes"]
    assert saved == {k: v._asdict() for k, v in sizes.items() if k != RESULT}
    tight = replace(plan, budget=ompq.Budget.parse("onnx:1KiB"))
    with pytest.raises(ExportError, match="more than the budget of onnx:1KiB"):
        replace(made, plan=tight).write(tmp_path / "more")
    assert (tmp_path / "more" / PACKED).exists()
    assert not (tmp_path / "more" / ONNX).exists()


def test_graphs_above_their_budget_are_not_kept(tmp_path):
    config = ompq.PlanConfig(choices=(4,), score="weight_noise")
    network, samples = seeded(Chain()), images()
    plan = ompq.plan(network, samples, "graph:1MiB", config)
    final = ompq.finalize(ompq.quantize(network, plan, samples), samples)
    # What the plan says of a graph may be exceeded, if a name is very long.
    tight = plan.with_budget(f"graph:{round(plan.totals['graph_bytes'])}B")
    packed, onnx, both = (tmp_path / name for name in ("packed", "net.onnx", "both"))
    ompq.save(final, packed, plan=tight)
    named = ompq.ExportConfig(network="".join(map(chr, range(33, 999))))
    ompq.export(final, onnx, samples, named)
    with pytest.raises(PackedFileError, match=r"both: the file takes .* of graph:"):
        ompq.packed.add_onnx(packed, onnx, both)
    assert not both.exists()
