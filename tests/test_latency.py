import builtins
import json

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cli_tools import network_file, run, run_json
from nets import Chain, TinyResNet, images, seeded
from ompq import latency
from ompq.costs import load_latency
from ompq.errors import MissingExtraError, QuantizationError
from ompq.graph.units import Choice
from ompq.latency import measure_latency
from ompq.pipeline import PlanConfig, plan

CHOICES = [Choice(2, 8), Choice(4, 4), Choice(8, 8), Choice(8, 32), Choice(32, 32)]
INTEGER = Choice(8, 8)


class Everything(nn.Module):
    """Strided, dilated, grouped and padded convolutions, and a token-wise linear."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Conv2d(3, 8, (3, 5), (2, 1), (1, 2))
        self.dilated = nn.Conv2d(8, 8, 3, padding=3, dilation=2, groups=8)
        self.same = nn.Conv2d(8, 8, 5, padding="same", groups=4, bias=False)
        self.mirrored = nn.Conv2d(8, 6, 3, 2, 1, padding_mode="reflect")
        self.tokens = nn.Linear(6, 4, bias=False)

    def forward(self, x):
        with_borders = F.relu(self.dilated(self.strided(x)))
        return self.tokens(self.mirrored(self.same(with_borders)).flatten(2).mT)


class Twice(nn.Module):
    """One layer called twice, on different sizes, and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.twin = nn.Conv2d(3, 3, 3, padding=1)
        self.twin.weight = self.conv.weight

    def forward(self, x):
        return self.twin(self.conv(F.avg_pool2d(self.conv(x), 2)))


@pytest.fixture
def counted(monkeypatch):
    """Make each piece of work take 1 ms, and return the work that was timed."""
    timed = []

    def one_millisecond(work, repeats, threads):
        timed.append(work)
        return 1.0

    monkeypatch.setattr(latency, "_time", one_millisecond)
    return timed


@pytest.fixture
def timed_models(counted):
    def models(network, samples, choice):
        measure_latency(network, samples, [choice])
        return [latency.layer_model(work) for work in counted]

    return models


def test_every_unit_has_every_choice_and_integers_are_measured_once():
    network = seeded(TinyResNet())
    table = measure_latency(network, images(), CHOICES, repeats=3)
    assert tuple(table) == plan(network, images(), "4bits").graph.names
    for row in table.values():
        assert list(row) == ["W2A8", "W4A4", "W8A8", "W8A32", "W32A32"]
        assert all(0 < value < 1000 for value in row.values())
        assert row["W2A8"] == row["W4A4"] == row["W8A8"]
        assert row["W8A32"] == row["W32A32"] != row["W8A8"]


def test_more_work_takes_longer():
    network = nn.Sequential(nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 5, padding=2))
    table = measure_latency(network, images(size=32), CHOICES, repeats=5)
    for choice in ("W8A8", "W32A32"):
        assert table["1"][choice] > 3 * table["0"][choice]


@pytest.mark.parametrize("choice", [INTEGER, Choice(32, 32)], ids=str)
def test_models_are_valid_and_have_the_layers_shapes(timed_models, choice):
    network = Everything()
    models = [
        onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        for model in timed_models(network, images(2, 16), choice)
    ]
    shapes = []
    for layer in network.children():
        layer.register_forward_hook(lambda _m, _a, out: shapes.append(out.shape))
    network(images(1, 16))
    *convolutions, (_, tokens, features) = map(tuple, shapes)
    expected = [*convolutions, (tokens, features)]  # rows, as Gemm has them
    assert [tuple(model.get_outputs()[0].shape) for model in models] == expected


@pytest.mark.parametrize(
    ("choice", "kernels"),
    [(INTEGER, ["QLinearConv", "QGemm"]), (Choice(32, 32), ["Conv", "Gemm"])],
    ids=["integer", "float"],
)
def test_the_runtime_takes_the_kernels_that_are_meant(
    timed_models, choice, kernels, tmp_path
):
    found = []
    for model in timed_models(Chain(), images(), choice):
        onnx.checker.check_model(model, full_check=True)
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.log_severity_level = 3  # a saved model is of this machine: known
        onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
        nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
        found.append({node.op_type for node in nodes})
    assert all(k in ops for k, ops in zip(kernels, found, strict=True))
    assert not any({"DequantizeLinear", "QuantizeLinear"} & ops for ops in found)


def test_equal_work_is_measured_once_and_every_call_counts(counted):
    table = measure_latency(Twice(), images(), CHOICES)
    assert table == {"conv": dict.fromkeys(map(str, CHOICES), 3.0)}
    assert len(counted) == 4  # two sizes, each in integers and in float


def test_progress_and_network_are_as_promised(counted):
    told = []
    network = TinyResNet().train()
    state = torch.get_rng_state()
    measure_latency(
        network, images(), [INTEGER], progress=lambda *given: told.append(given[:2])
    )
    assert told == [(i, len(counted)) for i in range(len(counted) + 1)]
    assert all(module.training for module in network.modules())
    assert not any(module._forward_hooks for module in network.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_budget_in_milliseconds_is_kept():
    network = seeded(TinyResNet())
    choices = [Choice(4, 8), Choice(8, 8), Choice(32, 8)]
    table = measure_latency(network, images(), choices, repeats=3)
    most = sum(row["W8A8"] for row in table.values())
    config = PlanConfig(choices=(4, 8), latency=table)
    made = plan(network, images(), f"{most * 1.001}ms", config)
    assert made.totals["milliseconds"] == pytest.approx(most)
    pinned = PlanConfig(choices=(8,), pinned={"head": 32}, latency=table)
    expected = most - table["head"]["W8A8"] + table["head"]["W32A8"]
    made = plan(network, images(), f"{expected * 1.001}ms", pinned)
    assert made.totals["milliseconds"] == pytest.approx(expected)


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ImportError(f"No module named {package!r}", name=package)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    words = rf"^{package} is not installed\. Run: pip install 'ompq\[onnx\]'"
    with pytest.raises(MissingExtraError, match=words):
        measure_latency(Chain(), images(), [INTEGER])


def test_layers_that_cannot_be_measured_are_named():
    network = nn.ModuleDict(
        {
            "mix": nn.MultiheadAttention(4, 2, batch_first=True),
            "up": nn.ConvTranspose2d(3, 4, 2),
            "line": nn.Conv1d(4, 4, 3),
            "head": nn.Linear(4, 2),
        }
    )

    def forward(x):
        tokens = network["line"](network["up"](x).flatten(2)).mT
        return network["head"](network["mix"](tokens, tokens, tokens)[0])

    network.forward = forward
    words = (
        r"^up \(transposed\), line \(conv\), mix\.in_proj \(attention\), "
        r"mix\.out_proj \(attention\) cannot be measured: only Linear and Conv2d"
    )
    with pytest.raises(QuantizationError, match=words):
        measure_latency(network, images(), [INTEGER])


@pytest.mark.parametrize(
    ("choices", "settings", "words"),
    [
        ([INTEGER], {"repeats": 0}, "repeats=0 is too small; use 1 or more"),
        ([INTEGER], {"threads": 0}, "threads=0 is too small; use 1 or more"),
        ([Choice(16, 8)], {}, "choices W16A8: give bits from 2 to 8, or 32 for float"),
        ([], {}, "choices are empty: give bits from 2 to 8"),
    ],
)
def test_wrong_arguments(choices, settings, words):
    with pytest.raises(ValueError, match=words):
        measure_latency(Chain(), images(), choices, **settings)


def test_command_writes_a_table_that_plan_reads(tmp_path):
    network, file = network_file(tmp_path), tmp_path / "latency.json"
    words = (network, "--weights", "none", "--repeats", 2, "-o", file)
    result = run("latency", *words)
    assert result.exit_code == 0, result.output
    table = load_latency(file)
    whole = sum(row["W8A8"] for row in table.values())
    assert f"5 layers, {whole:.3g} ms in 8 bits or fewer" in result.stdout
    assert f"{table['block.conv1']['W32A32']:.4f}" in result.stdout
    budget = f"{2 * whole}ms"
    given = ("--data", "random", "--latency", file, "--pin", "stem=8")
    made = run_json("plan", network, *given, "--budget", budget, "--samples", 4)
    assert made["totals"]["milliseconds"] == pytest.approx(whole)


def test_command_tells_in_json_or_in_one_line(tmp_path, counted):
    network, file = network_file(tmp_path), tmp_path / "latency.json"
    told = run_json("latency", network, "-o", file, "--threads", "2")
    assert told["milliseconds"] == json.loads(file.read_text())
    assert (told["threads"], told["file"]) == (2, str(file))
    quiet = run("latency", network, "-o", file, "-q")
    assert quiet.stdout.count("\n") == 1
    assert "5 ms in 8 bits or fewer, 5 ms as float" in quiet.stdout
