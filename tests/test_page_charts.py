import base64
import builtins
import io
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ompq
from nets import TinyMobileNet, images, seeded
from ompq.errors import MissingExtraError
from ompq.report.figures import write_figures
from ompq.report.heat_maps import heat_map
from ompq.report.page_charts import (
    accuracy_chart,
    bar_column,
    error_chart,
    histogram_chart,
    scatter_chart,
)
from ompq.report_sections import (
    Accuracy,
    AuditedRanks,
    BlockErrorSection,
    Histogram,
    StageTime,
    Versions,
)
from ompq.score_tables import ScoreTable
from reports import every_section, toy_plan


@pytest.fixture(scope="module")
def plan():
    return toy_plan()


def test_positions_on_the_accuracy_axis_are_linear():
    rows = [Accuracy(n, t, t - 0.05, t + 0.05, 10) for n, t in (("a", 0.5), ("b", 0.7))]
    chart = accuracy_chart(rows)
    (x0, t0), (x1, t1) = chart["ticks"][0], chart["ticks"][-1]
    slope = (x1 - x0) / (float(t1) - float(t0))
    for row, top1 in zip(chart["rows"], (50, 70), strict=True):
        assert row["x"] == pytest.approx(x0 + slope * (top1 - float(t0)))
        assert 0 <= row["low"] < row["x"] < row["high"] <= 100
        assert row["size"] == ""


def test_errors_stand_on_a_logarithmic_axis():
    chart = error_chart(
        [BlockErrorSection("a", 0.1, 0.01), BlockErrorSection("b", 0.001, 0.0)]
    )
    first, second = chart["rows"]
    assert first["x1"] - first["x2"] == pytest.approx(first["x2"] - second["x1"])
    assert second["x2"] == 0
    assert first["ratio"] == "0.10×"
    assert error_chart([BlockErrorSection("a", 0.0, 0.0)])["rows"][0]["ratio"] == ""


def test_a_histogram_is_drawn_to_its_counts():
    chart = histogram_chart(Histogram("w", (0.0, 1.0, 4.0), (1, 4), (("at", 2.0),)))
    assert chart["path"] == "M0 100V50.00H25.00V0.00H100.00V100Z"
    assert chart["lines"] == [(50.0, "at", "2")]


def test_the_heat_map_holds_the_matrix():
    rng = np.random.default_rng(0)
    half = rng.uniform(0.4, 1, (7, 7))
    matrix = np.maximum(half, half.T)
    heat = heat_map(matrix, [f"f{i}" for i in range(7)])
    codes = base64.b64decode(heat.values)
    values = np.array(struct.unpack(f">{len(codes) // 2}H", codes)) / 65535
    np.testing.assert_allclose(values, matrix[np.triu_indices(7)], atol=1e-5)
    picture = Image.open(io.BytesIO(base64.b64decode(heat.image.partition(",")[2])))
    assert picture.size == (7, 7)
    assert heat.low == pytest.approx(math.floor(10 * matrix.min()) / 10)
    darkness = 255 - np.asarray(picture.convert("L"), dtype=float)
    order = np.argsort(matrix.ravel())
    assert (np.diff(darkness.ravel()[order]) >= -1).all()


def test_a_large_matrix_is_averaged():
    matrix = np.arange(1201.0**2).reshape(1201, 1201) / 1201**2
    heat = heat_map(matrix, [str(i) for i in range(1201)])
    assert heat.pooled == 4
    assert len(heat.labels) == 301
    assert heat.labels[0] == "0 … 3"
    codes = base64.b64decode(heat.values)
    assert struct.unpack(">H", codes[:2])[0] / 65535 == pytest.approx(
        matrix[:4, :4].mean(), abs=1e-5
    )


def test_bars_of_any_sign_have_widths():
    assert bar_column(np.array([1.0, 2.0, 4.0])) == [25.0, 50.0, 100.0]
    assert bar_column(np.array([-1.0, 0.0, 1.0])) == [0.0, 50.0, 100.0]
    assert bar_column(np.zeros(2)) == [0.0, 0.0]


# ---- figures
def test_figures_are_written_as_png_and_svg(plan, tmp_path):
    written = write_figures(tmp_path / "figures", plan, every_section())
    names = [path.name for path in written]
    assert names == [
        f"{name}.{kind}"
        for name in ("orm", "bits", "accuracy")
        for kind in ("png", "svg")
    ]
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == sorted(names)
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as picture:
                assert min(picture.size) > 300
        else:
            assert "<svg" in path.read_text()
    again = write_figures(tmp_path / "again", plan, every_section())
    assert [p.read_bytes() for p in written] == [p.read_bytes() for p in again]


def test_figures_without_orm_or_sizes_are_left_out(plan, tmp_path):
    unmeasured = replace(plan, scores=ScoreTable(plan.scores.damage))
    written = write_figures(tmp_path, unmeasured, [StageTime("plan", 1.0), Versions()])
    assert [path.name for path in written] == ["bits.png", "bits.svg"]


def test_missing_matplotlib_names_the_extra(plan, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[figures\]'"):
        write_figures(tmp_path, plan)
    assert list(Path(tmp_path).iterdir()) == []


@pytest.fixture(scope="module")
def found():
    model = seeded(TinyMobileNet())
    made = ompq.plan(model, images(), "3.2bits")
    quantized = ompq.quantize(model, made, images())
    return (
        model,
        made,
        quantized,
        ompq.report.layer_histograms(quantized, model, made, images()),
    )


def test_the_worst_layers_have_weights_and_inputs_each(found):
    _, made, _, histograms = found
    damage = {
        name: made.scores.damage[row, made.columns[row]]
        for row, name in enumerate(made.graph.names)
    }
    worst = sorted(damage, key=lambda name: -damage[name])[:3]
    assert [h.name.split(",")[0] for h in histograms] == [
        n for n in worst for _ in "wi"
    ]
    assert [h.name.endswith("inputs") for h in histograms] == [False, True] * 3


def test_every_weight_is_counted_as_a_code_of_its_channel(found):
    model, made, quantized, histograms = found
    unit = made.graph[histograms[0].name.split(",")[0]]
    layer, norm = quantized.get_submodule(unit.name), model.get_submodule(unit.norm)
    factor = norm.weight / (norm.running_var + norm.eps).sqrt()
    weight = model.get_submodule(unit.name).weight * factor.reshape(-1, 1, 1, 1)
    weight = weight.detach()
    codes = [
        value.item() / scale.item() + zero.item()
        for row, scale, zero in zip(
            weight, layer.weight_scale, layer.weight_zero_point, strict=True
        )
        for value in row.flatten()
    ]
    edges, counts = np.array(histograms[0].edges), histograms[0].counts
    assert sum(counts) == len(codes)
    assert edges[0] == pytest.approx(min(0, *codes), abs=1e-5)
    below = sum(code < edges[32] for code in codes)
    assert sum(counts[:32]) == pytest.approx(below, abs=1)
    bits = made.allocation[unit.name].weight
    assert histograms[0].lines == (("lowest code", 0.0), ("highest code", 2**bits - 1))


def test_inputs_are_the_float_networks_and_the_lines_what_is_read(found):
    model, _, quantized, histograms = found
    name = histograms[1].name.split(",")[0]
    seen = {}
    for key, network in (("float", model), ("quantized", quantized)):
        module = network.get_submodule(name)
        handle = module.register_forward_pre_hook(
            lambda _m, args, key=key: seen.update({key: args[0]})
        )
        with torch.no_grad():
            network(images())
        handle.remove()
    assert sum(histograms[1].counts) == seen["float"].numel()
    read = seen["quantized"]
    assert dict(histograms[1].lines) == {
        "lowest value": float(read.min()),
        "highest value": float(read.max()),
    }


def test_networks_are_left_as_they_were(found):
    model, _, quantized, _ = found
    for network in (model, quantized):
        hooked = [m for m in network.modules() if m._forward_pre_hooks]
        assert all("QuantizedC" not in type(m).__name__ for m in hooked)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_float_layers_are_passed_over_and_constants_have_a_bar():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    nn.init.zeros_(model[0].weight)
    samples = torch.ones(6, 4)
    config = ompq.PlanConfig(pinned={"2": 32}, score="smallest_first")
    made = ompq.plan(model, samples, "32bits", config)
    quantized = ompq.quantize(model, made, samples)
    weights, inputs = ompq.report.layer_histograms(quantized, model, made, samples)
    assert weights.name.startswith("0, weights")
    assert sum(weights.counts) == 16
    assert max(inputs.counts) == 24  # every input is 1


def test_codes_of_coded_layers_are_counted_one_by_one():
    model, samples = (
        seeded(nn.Sequential(nn.Linear(64, 32), nn.ReLU())),
        torch.ones(4, 64),
    )
    config = ompq.PlanConfig(pinned={"0": (8, 8, 2.5)}, score="weight_noise")
    made = ompq.plan(model, samples, "8bits", config)
    quantized = ompq.quantize(model, made, samples)
    inputs, last = ompq.report.layer_histograms(quantized, model, made, samples)
    assert inputs.name == "0, inputs"
    assert last.name == "0, codes: 2.5 bits coded"
    levels = (quantized[0].codes().int() - 128).flatten().tolist()
    middles = [round(edge + 0.5) for edge in last.edges[:-1]]
    assert last.counts == tuple(levels.count(level) for level in middles)
    assert sum(last.counts) == 64 * 32


def test_equal_values_of_an_audit_share_a_rank():
    points = ((1.0, 5.0), (2.0, 5.0), (3.0, 7.0), (3.0, 5.0))
    chart = scatter_chart(AuditedRanks("orm", "", points))
    # Ranks from 0 to 3: 0, 1, 2.5, 2.5 across; 1, 1, 3, 1 from the bottom.
    across, down = zip(*chart["points"], strict=True)
    assert across == pytest.approx([0, 100 / 3, 250 / 3, 250 / 3])
    assert down == pytest.approx([200 / 3, 200 / 3, 0, 200 / 3])
    assert scatter_chart(AuditedRanks("chance", "0.4"))["points"] == []
