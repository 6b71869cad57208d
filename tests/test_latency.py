"""What layers take in a runtime, measured in the network."""

import pytest

import ompq
from cli_tools import run_json
from nets import TinyMobileNet, images, seeded
from ompq.cli.latency_command import latency_view
from ompq.cli.option_groups import MEASURABLE
from ompq.costs import load_latency
from ompq.errors import TargetError
from ompq.network.graph import trace
from ompq.runtimes import latency
from ompq.runtimes.latency import RUNTIMES, measure_latency
from ompq.targets import load_target

TARGET = "litert-size"


@pytest.fixture
def clock(monkeypatch):
    """Runs that take what a formula says: 4 bits take 1 ms more, linear layers less."""
    now = [0.0]

    def loaded(self, changed):
        kinds = {unit.name: unit.kind for unit in self.graph.units}
        more = [-0.25 if kinds[name] == "linear" else 1.0 for name in changed]

        def step():
            now[0] += (8 + sum(more)) / 1000

        return step

    monkeypatch.setattr(latency._Race, "_loaded", loaded)
    monkeypatch.setattr(latency, "perf_counter", lambda: now[0])
    monkeypatch.setattr(latency, "runtime_version", lambda name: f"{name} 1.0")


@pytest.mark.usefixtures("clock")
def test_the_table_tells_the_time_of_any_network(tmp_path):
    network = seeded(TinyMobileNet())
    target = load_target(TARGET)
    found = measure_latency(network, images(8), target, repeats=2)
    units = trace(network, images(8)).units
    assert (found.base, found.runtime) == (pytest.approx(8), "litert 1.0")
    assert set(found.table) == {unit.name for unit in units}
    whole = sum(row["W8A8"] for row in found.table.values())
    assert whole == pytest.approx(8)
    for unit in units:
        row = found.table[unit.name]
        more = -0.25 if unit.kind == "linear" else 1.0
        assert row["W4A8"] - row["W8A8"] == pytest.approx(more)
        assert row["W5A8"] == row["W8A8"]  # which plans for the target do not offer
        assert min(row.values()) >= 0
    assert len(found.checks) == 3 and found.error < 1e-9
    found.save(tmp_path / "ms.json")
    assert load_latency(tmp_path / "ms.json") == found.table


@pytest.mark.usefixtures("clock")
def test_two_budgets_hold_at_once():
    network, samples = seeded(TinyMobileNet()), images(8)
    found = measure_latency(network, samples, load_target(TARGET), repeats=2)
    config = ompq.PlanConfig(target=TARGET, latency=found.table)
    small = ompq.plan(network, samples, "4.2bits", config)
    assert small.totals["milliseconds"] > 10
    size = small.totals["bytes"]
    both = ompq.plan(network, samples, f"{1.3 * size:.0f}B, 11ms", config)
    assert both.totals["milliseconds"] <= 11 and both.totals["bytes"] <= 1.3 * size


@pytest.mark.usefixtures("clock")
def test_widths_that_are_computed_alike_take_the_same_time():
    target = load_target("onnxruntime-cpu")
    found = measure_latency(seeded(TinyMobileNet()), images(8), target, repeats=2)
    assert found.checks == () and found.error == 0
    for row in found.table.values():
        assert len(set(row.values())) == 1
        assert {"W2A8", "W5A4", "W8A8"} <= set(row)


def test_targets_without_a_runtime_here_are_told():
    assert set(MEASURABLE) == set(RUNTIMES)
    with pytest.raises(TargetError, match="times of gguf cannot be measured here;"):
        measure_latency(seeded(TinyMobileNet()), images(8), load_target("gguf"))
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        measure_latency(
            seeded(TinyMobileNet()), images(8), load_target("litert"), repeats=0
        )


def test_a_real_runtime_is_measured(tmp_path):
    pytest.importorskip("ai_edge_litert")
    path = tmp_path / "ms.json"
    words = ("ompq:demo", "--target", "litert", "--repeats", "3", "-o", path)
    data = run_json("latency", *words)
    assert data["runtime"].startswith("litert ") and data["base"] > 0
    assert load_latency(path) == data["table"]
    assert data["table"]["classifier"]["W4A8"] != data["table"]["classifier"]["W8A8"]
    assert data["table"]["stem"]["W4A8"] == data["table"]["stem"]["W8A8"]
    assert len(data["checks"]) == 3


def test_the_table_is_shown():
    table = {"a": {"W8A8": 1.0}, "b": {"W4A8": 0.5}}
    found = latency.Latency(table, "x 1", 1.5, ((2, 4),))
    view = latency_view(found, None)
    assert [one.title for one in view.body[0]] == ["layer", "W8A8, ms", "W4A8, ms"]
    assert list(view.body[0][2].cells) == ["", "0.5000"]
    assert found.error == 0.5
