"""What an exported file takes, and how fast it runs."""

import subprocess
import sys
from statistics import median
from types import SimpleNamespace

import pytest

from nets import TinyMobileNet, TinyResNet, images, seeded
from ompq.errors import ExportError, MissingExtraError
from ompq.runtimes import benchmark as timing
from ompq.runtimes.benchmark import (
    Contestant,
    Input,
    inputs_of,
    installed_runtimes,
    library_of,
    peak_memory,
    runner,
    time_files,
)
from ompq.runtimes.file_metadata import FileMetadata
from ompq.runtimes.inspection import (
    load_exported,
    without_gain,
)
from ompq.runtimes.onnx.onnx_files import export_onnx
from ompq.runtimes.onnx.traced_graph import float_model
from ompq.runtimes.runnable_files import open_runnable
from quantized import quantized

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


IMAGE = [Input((1, 3, 8, 8))]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    model = seeded(TinyMobileNet())
    (folder / "float.onnx").write_bytes(
        float_model(model, images(2)).SerializeToString()
    )
    network = quantized(model, images(8), weight=(3, 8), activation=8)
    path = folder / "net.onnx"
    named = FileMetadata(network="net.py:make")
    export_onnx(network, path, images(4), engine_images=1, metadata=named.texts())
    return {"float": folder / "float.onnx", "quantized": path}


def contestants(files):
    return [Contestant(name, path) for name, path in files.items()]


def test_runs_take_turns_and_medians_are_taken(files, monkeypatch):
    order, clock = [], iter(range(1000))

    def fake(path, _inputs, _threads, _runtime):
        return lambda: order.append(path.name)

    monkeypatch.setattr(timing, "runner", fake)
    monkeypatch.setattr(timing, "perf_counter", lambda: next(clock) ** 2)
    monkeypatch.setattr(timing, "load_seconds", lambda *_: 0.5)
    memory = timing.MemoryUse(1, 2)
    monkeypatch.setattr(timing, "peak_memory", lambda *_: memory)
    first, second = time_files(contestants(files), repeats=5)
    assert order == ["float.onnx", "net.onnx"] * 8
    # Warming up takes ticks 0 to 5; ticks 2n and 2n + 1 are 4n + 1 seconds apart.
    spans = [4 * n + 1 for n in range(3, 13)]
    assert first.milliseconds == 1000 * median(spans[::2])
    assert second.milliseconds == 1000 * median(spans[1::2])
    assert first.ratio == 1
    assert second.ratio == median(
        a / b for a, b in zip(spans[::2], spans[1::2], strict=True)
    )
    assert (second.load_seconds, second.memory) == (0.5, memory)
    assert second.to_json()["memory"] == {"start": 1, "peak": 2}


def test_files_are_measured(files):
    found = time_files(contestants(files), batch=2, repeats=3)
    assert [one.name for one in found] == ["float", "quantized"]
    for one in found:
        assert one.runtime.startswith("onnxruntime ")
        assert one.milliseconds > 0 and one.load_seconds > 0
        assert one.memory.peak >= one.memory.start > 10 << 20


def test_memory_is_that_of_the_file_alone(files):
    ballast = bytearray(300 << 20)
    memory = peak_memory(files["float"], IMAGE)
    assert memory.peak < len(ballast)


def test_what_cannot_be_measured_is_told(files, tmp_path, monkeypatch):
    assert "onnxruntime" in installed_runtimes()
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        time_files(contestants(files), repeats=0)
    (tmp_path / "broken.onnx").write_bytes(b"\xff nothing")
    with pytest.raises(ExportError, match="onnxruntime cannot load .*broken.onnx: "):
        runner(tmp_path / "broken.onnx", IMAGE)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingExtraError, match="openvino is not installed"):
        library_of("openvino")


def test_what_gains_nothing_is_told(files, tmp_path):
    narrow, depthwise, thin = without_gain(files["quantized"])
    assert "layers below 8 bits (stem" in narrow
    assert depthwise.startswith("depthwise or grouped convolutions (blocks.")
    assert thin.startswith("convolutions of fewer than 4 channels (stem.0)")
    seven = quantized(seeded(TinyMobileNet()), images(8), weight=8, activation=7)
    export_onnx(seven, tmp_path / "seven.onnx", images(4), engine_images=1)
    assert "Clip" in " ".join(without_gain(tmp_path / "seven.onnx"))
    assert open_runnable(files["quantized"])[1].network == "net.py:make"
    assert inputs_of(files["quantized"], 5) == [Input((5, 3, 8, 8))]
    network = quantized(seeded(TinyResNet()), images(8), weight=8, activation=32)
    export_onnx(network, tmp_path / "net.onnx", images(4))
    assert "smaller and not faster" in without_gain(tmp_path / "net.onnx")[0]


def test_an_input_of_no_known_type_is_told(files, tmp_path):
    model = load_exported(files["quantized"])
    model.graph.input[0].type.tensor_type.elem_type = 0
    path = tmp_path / "net.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match="net.onnx: the input 'input' has an unknown"):
        inputs_of(path)


def test_what_openvino_refuses_is_told_in_one_line(monkeypatch, tmp_path):
    class Core:
        def compile_model(self, path, device, settings):
            assert settings["INFERENCE_NUM_THREADS"] == 2 and device == "CPU"
            raise RuntimeError(f"no such operator in {path}\nand a long trace")

    library = SimpleNamespace(Core=Core)
    monkeypatch.setattr(timing, "library_of", lambda _: library)
    path = tmp_path / "net.onnx"
    with pytest.raises(ExportError, match="openvino cannot load .* no such operator"):
        timing.runner(path, IMAGE, 2, "openvino")


SIGNALLED = """
import signal, sys
from ompq.runtimes.benchmark import Input, runner

image = [Input((1, 3, 8, 8))]
runs = [runner(sys.argv[1], image, 1, "openvino") for _ in range(2)]
while runs:
    del runs[0]
signal.signal(signal.SIGINT, lambda *_: print("handled"))
signal.raise_signal(signal.SIGINT)
"""


def test_a_process_that_ran_two_files_in_openvino_survives_signals(files):
    pytest.importorskip("openvino")
    command = [sys.executable, "-c", SIGNALLED, files["quantized"]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_openvino_runs_what_it_has_compiled(monkeypatch):
    class Core:
        def compile_model(self, path, _device, _settings):
            return lambda images: [image.shape for image in images]

    library = SimpleNamespace(Core=Core)
    monkeypatch.setattr(timing, "library_of", lambda _: library)
    assert timing.runner("net.onnx", IMAGE, 1, "openvino")() == [(1, 3, 8, 8)]


def test_a_file_that_a_runtime_cannot_run_is_told(tmp_path):
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"nothing")
    with pytest.raises(ExportError, match="onnxruntime fails on .*broken.onnx: "):
        peak_memory(path, IMAGE)
