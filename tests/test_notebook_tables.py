import sys
from types import SimpleNamespace

import pytest

import ompq
from nets import Chain, images, seeded
from ompq.errors import MissingExtraError
from ompq.notebook_tables import data_frame, html_bar, html_table


def test_values_are_escaped_and_long_tables_are_cut():
    rows = [{"layer": f"<b>{n}</b>", "bits": n} for n in range(120)]
    text = html_table("a & b", rows)
    assert text.startswith("<b>a &amp; b</b>")
    assert "&lt;b&gt;7&lt;/b&gt;" in text and "<b>7" not in text
    assert text.count("<tr>") == 101 and "and 20 more" in text
    assert html_table("none", []) == "<b>none</b><table><tr></tr></table>"


MODEL = seeded(Chain())


PLAN = ompq.plan(MODEL, images(), "4bits", ompq.PlanConfig(score="weight_noise"))


def test_plans_evaluations_and_networks_show_themselves():
    network = ompq.quantize(MODEL, PLAN, images())
    found = ompq.evaluate(network, ompq.Samples.of(images()), reference=MODEL)
    record = ompq.quantization_of(network)
    for one in (PLAN, found, record):
        assert one._repr_html_().startswith("<b>")
        assert "<td>" in one._repr_html_()
        assert len(repr(one)) < 200 and "\n" not in repr(one)
    assert "conv" in PLAN._repr_html_() and "conv" in record._repr_html_()
    assert repr(found).endswith("8 samples)") and "agreement" in repr(found)
    assert PLAN.to_dict()["totals"] == PLAN.totals
    assert found.to_dict()["agreement"] == found.agreement
    sizes = [row["bytes"] for row in record.to_dict()]
    assert sizes == [row["bytes"] for row in PLAN.to_dict()["units"]]


def test_bars_are_as_long_as_their_share_and_their_text_is_escaped():
    text = html_table("bits", [{"bits": html_bar(0.5, "<4>")}])
    assert "width:50%" in text and "&lt;4&gt;" in text
    assert "width:100%" in html_bar(3.0, "24") and "width:0%" in html_bar(-1.0, "")
    four = ompq.plan(MODEL, images(), "4bits", ompq.PlanConfig(choices=(4,)))
    assert four._repr_html_().count("width:50%") == len(four.graph)


def test_evaluations_show_intervals_and_metrics_of_both_networks():
    network = ompq.quantize(MODEL, PLAN, images())
    targets = MODEL(images()).argmax(1)
    mean = {"mean": lambda outputs, _targets: float(outputs.mean())}
    found = ompq.evaluate(network, [(images(), targets)], reference=MODEL, metrics=mean)
    text = found._repr_html_()
    low, high = found.interval
    assert f"{100 * found.top1:.2f} % ({100 * low:.2f} to {100 * high:.2f})" in text
    assert f"{100 * found.drop:.2f} points (" in text
    assert f"(float: {found.reference_metrics['mean']:.4g})" in text
    assert found.likeness in text


def test_an_export_is_one_line(tmp_path):
    pytest.importorskip("onnxruntime")
    made = ompq.export(
        ompq.quantize(MODEL, PLAN, images()), tmp_path / "net.onnx", images()
    )
    text = repr(made)
    assert text.startswith("ExportResult(net.onnx, ") and "\n" not in text
    assert made.runtime in text and str(made.simulated) in text and len(text) < 250


def test_reprs_are_one_line_that_says_how_much_there_is(tmp_path):
    path = tmp_path / "chain.ompq.safetensors"
    ompq.save(ompq.quantize(MODEL, PLAN, images()), path)
    units, weights = len(PLAN.graph), sum(unit.weights for unit in PLAN.graph.units)
    blocks = len({unit.block for unit in PLAN.graph.units})
    expected = f"LayerGraph({units} units in {blocks} blocks, {weights:,} weights, 0 "
    assert repr(PLAN.graph).startswith(expected)
    choices = len(PLAN.choices)
    assert repr(PLAN.scores) == f"ScoreTable({units} units × {choices} choices)"
    bits = sum(
        c.weight * u.weights
        for c, u in zip(PLAN.allocation.values(), PLAN.graph.units, strict=True)
    )
    assert repr(ompq.inspect_file(path)) == (
        f"Account({path.name}: {path.stat().st_size:,} bytes, {units} units, "
        f"{bits / weights:.2f} bits a weight)"
    )
    both = ompq.Samples.of([images(), images()[:2, :, :4]])
    shapes = [str(tuple(x.shape[1:])) for x in (images(), images()[:2, :, :4])]
    assert repr(both) == f"Samples({len(images()) + 2} of {', '.join(sorted(shapes))})"


def test_data_frames_need_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[notebook\]'"):
        PLAN.to_dataframe()
    # Stands for pandas, which is not needed to test what it is given.
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert [row["name"] for row in PLAN.to_dataframe()] == ["conv", "head"]
    network = ompq.quantize(MODEL, PLAN, images())
    assert len(ompq.quantization_of(network).to_dataframe()) == 2
    found = ompq.evaluate(network, ompq.Samples.of(images()), reference=MODEL)
    assert found.to_dataframe()[0]["count"] == 8
    assert data_frame([{"a": 1}]) == [{"a": 1}]
