import pytest
import torch
from torch import nn

import ompq
from nets import TinyResNet, images, seeded
from ompq import forecasts, working_memory
from ompq.forecasts import forecast

STAGES = [
    "scoring the choices",
    "calibrating activations",
    "rounding weights",
    "bias correction",
    "reconstructing",
    "finalizing integers",
    "evaluating",
    "writing files",
]


def steady(_run, _device):
    """Stand for a clock: whatever is timed takes a millisecond."""
    _run()
    return 0.001


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(forecasts, "_seconds", steady)
    monkeypatch.setattr(forecasts, "resident_bytes", lambda: 1 << 30)
    model, inputs = seeded(TinyResNet()), images(32)

    def of(count=32, iterations=100, **more):
        rounding = ompq.RoundingConfig(iterations=iterations)
        config = ompq.ReconstructConfig(rounding=rounding)
        return forecast(model, inputs[:count], config, **more)

    return of


def test_the_stages_are_those_of_a_run(found):
    assert [one.name for one in found(evaluated=10).stages] == STAGES
    named = {"reconstructing", "evaluating"}
    rest = forecast(seeded(TinyResNet()), images(4), None).stages
    assert [one.name for one in rest] == [s for s in STAGES if s not in named]


def test_totals_are_those_of_the_stages(found):
    one = found()
    assert one.seconds == sum(one.by_stage.values())
    assert one.peak_bytes == max(stage.peak_bytes for stage in one.stages)
    assert one.needed_bytes == one.peak_bytes - (1 << 30) > 0
    assert one.to_json()["seconds"] == one.seconds
    assert [row["stage"] for row in one.to_dict()] == [s.name for s in one.stages]
    assert "1.00 GiB now" in repr(one)
    assert "<td>bias correction</td>" in one._repr_html_()


def test_more_work_takes_more_time(found):
    base = found().by_stage
    steps, coded = found(iterations=200).by_stage, found(coded=True).by_stage
    fewer, judged = found(count=16).by_stage, found(evaluated=64).by_stage
    gathering = 2 * base["reconstructing"] - steps["reconstructing"]
    assert 0 < gathering < base["reconstructing"] < steps["reconstructing"]
    assert coded["rounding weights"] > base["rounding weights"]
    assert fewer["calibrating activations"] < base["calibrating activations"]
    assert judged["evaluating"] > 0
    assert coded["bias correction"] == base["bias correction"]


def test_a_slow_network_is_timed_with_one_sample(monkeypatch):
    sizes = []

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            sizes.append(len(x))
            return self.layer(x)

    def clock(run, _device):
        run()
        return 5.0

    monkeypatch.setattr(forecasts, "_seconds", clock)
    forecast(Slow(), torch.randn(64, 4))
    assert max(sizes) == 1


def test_a_forecast_leaves_the_network_as_it_was():
    model = seeded(TinyResNet()).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forecast(model, images(4))
    assert model.training
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert not any(one._forward_hooks for one in model.modules())


def test_resident_memory_is_that_of_the_process(monkeypatch, tmp_path):
    before = working_memory.resident_bytes()
    kept = torch.ones(1 << 24)  # 64 MiB, written to
    grown = working_memory.resident_bytes() - before
    assert grown > kept.nbytes // 2
    monkeypatch.setattr(working_memory, "Path", lambda _name: tmp_path / "none")
    assert working_memory.resident_bytes() == 0
