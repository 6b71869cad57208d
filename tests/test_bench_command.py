"""bench: every file of a run, in every runtime."""

import json
import subprocess
import sys

import pytest
import torch

import ompq
from cli_tools import network_file, run, run_json
from ompq.cli.bench_command import bench_view
from ompq.datasets.named_data import load_data
from ompq.errors import ExportError
from ompq.evaluation import evaluate
from ompq.quantization.pipeline import quantize
from ompq.report_sections import RuntimeSection
from ompq.runtimes.benchmark import installed_runtimes, time_files

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytest.importorskip("sklearn")


@pytest.fixture
def one_runtime(monkeypatch):
    """Only ONNX Runtime: OpenVINO beside all that tests load may end the process."""
    names = ("onnxruntime",)
    monkeypatch.setattr("ompq.cli.bench_command.installed_runtimes", lambda: names)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A run of the demo network with its files."""
    folder = tmp_path_factory.mktemp("run") / "out"
    words = ("--data", "digits", "--samples", "64", "--effort", "fast", "-o", folder)
    result = run("quantize", "ompq:demo", "--budget", "2.5bits", *words)
    assert result.exit_code == 0, result.output
    needed = {"onnx": "onnxruntime", "tflite": "litert", "pte": "executorch"}
    for kind, runtime in needed.items():
        if runtime in installed_runtimes():
            done = run("export", folder, "--format", kind)
            assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def benched(out):
    """What bench says of the run, in a process of its own because of OpenVINO."""
    command = [sys.executable, "-m", "ompq", "bench", str(out), "--data", "digits"]
    options = ["--repeats", "32", "--json", "--quiet"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_place(data):
    return {(row["runtime"].split()[0], row["name"]): row for row in data["rows"]}


def test_all_files_of_a_run_are_measured_in_all_runtimes(benched, out):
    assert benched["compared"] == "PyTorch, digits"
    found = by_place(benched)
    wanted = [("onnxruntime", "float"), ("onnxruntime", "network.onnx")]
    if "openvino" in installed_runtimes():
        wanted += [("openvino", "float"), ("openvino", "network.onnx")]
    if "litert" in installed_runtimes():
        wanted.append(("litert", "network.tflite"))
    if "executorch" in installed_runtimes():
        wanted.append(("executorch", "network.pte"))
    assert list(found) == wanted
    for row in found.values():
        assert set(row["milliseconds"]) == set(row["speed_up"]) == {"1", "32"}
        assert all(value > 0 for value in row["milliseconds"].values())
        assert row["load_seconds"] > 0 and row["memory_bytes"] > 0
    assert found["onnxruntime", "float"]["speed_up"] == {"1": 1.0, "32": 1.0}
    page = (out / "report.html").read_text()
    assert "Where it runs" in page and "ms, batch 32" in page
    sections = json.loads((out / "result.json").read_text())["sections"]
    assert sum(one["section"] == "Runtime" for one in sections) == len(found)


def test_files_answer_as_pytorch_does(benched, out):
    model = ompq.load_model("ompq:demo")
    network = ompq.load(out / "network.ompq.safetensors", model.module)
    digits = load_data("digits", model, split="test").batches()
    top1 = evaluate(network, digits).top1
    for (runtime, name), row in by_place(benched).items():
        if name == "float":  # its weights may be random
            assert row["agreement"] is None and row["top1"] is None
            continue
        assert row["bytes"] == (out / name).stat().st_size
        assert row["count"] == 450
        exact = runtime == "onnxruntime"
        assert row["agreement"] >= (1 if exact else 0.99)
        assert row["top1"] == pytest.approx(top1, abs=0 if exact else 0.01)


@pytest.mark.usefixtures("one_runtime")
def test_a_file_alone_is_compared_on_noise(out, tmp_path):
    path = out / "network.onnx"
    result = run("bench", path, "--repeats", "2", env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(row.startswith("float onnxruntime ") for row in rows)
    (own,) = [row for row in rows if row.startswith("network.onnx onnxruntime ")]
    assert own.endswith(" 100.00 %") and own.count("×") == 2
    told = " ".join(result.stdout.split())
    assert "answers as network.onnx in its own runtime, 64 inputs of noise" in told
    assert "they save size, not time" in told
    assert "than float in ONNX Runtime: median ratio of runs in turn" in told
    narrow = run("bench", path, "--repeats", "1", env={"COLUMNS": "60"}).stdout
    assert max(map(len, narrow.partition("\n\n")[0].splitlines())) <= 60
    quiet = run("bench", path, "--float", path, "--repeats", "1", "--quiet").stdout
    assert quiet.count("times as fast as float") == quiet.count("\n") == 2


TOKENS_AND_FACTS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(12, 5)

    def forward(self, ids, facts):
        return self.head(torch.cat([self.words(ids).mean(1), facts], 1))
"""


@pytest.mark.usefixtures("one_runtime")
@pytest.mark.parametrize("keys", [("ids", "facts"), None])
def test_a_network_gets_the_inputs_that_its_file_takes(keys, tmp_path):
    (tmp_path / "net.py").write_text(TOKENS_AND_FACTS)
    name = f"{tmp_path / 'net.py'}:Net"
    inputs = (torch.arange(64).reshape(8, 8) % 9, torch.randn(8, 4))
    samples = dict(zip(keys, inputs, strict=True)) if keys else inputs
    network = quantize(ompq.load_model(name, "none").module, {"*": 8}, samples)
    config = ompq.ExportConfig(network=name)
    ompq.export(network, tmp_path / "net.onnx", samples, config)
    data = run_json("bench", tmp_path / "net.onnx", "--repeats", "1", "--batch", "3")
    assert [row["name"] for row in data["rows"]] == ["float", "net.onnx"]
    assert [list(row["milliseconds"]) for row in data["rows"]] == [["3"], ["3"]]
    assert data["rows"][1]["agreement"] == 1


def test_a_runtime_that_fails_does_not_lose_the_others(out, monkeypatch):
    def failing(contestants, **settings):
        if contestants[-1].runtime == "openvino":
            raise ExportError("openvino cannot load net.onnx: no such operator")
        return time_files(contestants, **settings)

    monkeypatch.setattr("ompq.cli.bench_command.time_files", failing)
    both = ("openvino", "onnxruntime")
    monkeypatch.setattr("ompq.cli.bench_command.installed_runtimes", lambda: both)
    path = out / "network.onnx"
    words = ("bench", path, "--float", path, "--repeats", "1", "--batch", "1")
    data = run_json(*words)
    assert {row["runtime"].split()[0] for row in data["rows"]} == {"onnxruntime"}
    assert "not run: openvino cannot load net.onnx: no such operator" in data["remarks"]
    monkeypatch.setattr("ompq.cli.bench_command.installed_runtimes", lambda: both[:1])
    alone = run(*words)
    assert alone.exit_code == 2
    assert "no runtime can run" in alone.stderr and "no such operator" in alone.stderr


def test_what_cannot_be_benched_says_what_to_do(out, tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    other = run("bench", tmp_path / "plan.json")
    assert other.exit_code == 2
    said = " ".join(other.stderr.split())
    assert "plan.json is not one of .onnx, .tflite, .pte; run ompq export first" in said
    empty = run("bench", tmp_path)
    assert empty.exit_code == 2
    assert "holds no .onnx, .tflite, .pte file; run ompq export" in " ".join(
        empty.stderr.split()
    )
    name = network_file(tmp_path)
    network = quantize(
        ompq.load_model(name, "none").module, {"*": 8}, torch.randn(8, 3, 8, 8)
    )
    path = tmp_path / "net.onnx"
    ompq.export(network, path, torch.randn(8, 3, 8, 8))
    nameless = run("bench", path)
    assert nameless.exit_code == 2
    assert "does not name its network; give --float NETWORK" in nameless.stderr


def test_the_table_shows_accuracy_only_if_it_was_measured():
    row = RuntimeSection(
        name="net.onnx",
        runtime="onnxruntime 1.0",
        bytes=2048,
        load_seconds=0.25,
        memory_bytes=4096,
        milliseconds={"1": 2.0},
        speed_up={"1": 1.5},
        agreement=0.5,
        count=4,
    )
    titles = [one.title for one in bench_view([row], "PyTorch", []).body[0]]
    assert titles[-1] == "same"
    labelled = RuntimeSection(**{**vars(row), "top1": 0.75})
    columns = bench_view([row, labelled], "PyTorch", []).body[0]
    assert columns[-1].title == "top-1"
    assert list(columns[-1].cells) == ["", "75.00 %"]
    assert list(columns[6].cells) == ["1.50 ×", "1.50 ×"]
