"""export and bench, run as the program runs them."""

import pytest

from cli_tools import network_file, run, run_json
from ompq.errors import ModelError
from ompq.packing import inspect_file, load, save
from ompq.userfiles import call_user_function

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a run of ompq quantize."""
    folder = tmp_path_factory.mktemp("run")
    words = (network_file(folder), "--data", "random", "--samples", "16")
    made = folder / "out"
    result = run(
        "quantize", *words, "--no-reconstruct", "--budget", "3bits", "-o", made
    )
    assert result.exit_code == 0, result.output
    return made


@pytest.fixture(scope="module")
def onnx_file(out):
    path = out.parent / "net.onnx"
    result = run("export", out, "-o", path)
    assert result.exit_code == 0, result.output
    return path, result.stdout


def test_onnx_is_verified_and_told(onnx_file):
    path, shown = onnx_file
    assert path.exists()
    text = " ".join(shown.split())
    assert "PyTorch top-1 equal on 100.00% of 64 images, logits within" in text
    assert "integers top-1 equal on 100.00% of 8 images" in text
    assert "100.00000% of codes equal" in text


def test_a_packed_file_will_do_and_json_has_it_all(out, onnx_file, tmp_path):
    packed = out / "network.ompq.safetensors"
    words = ("--data", "random", "--samples", "8", "-o", tmp_path / "net.onnx")
    data = run_json("export", packed, *words)
    assert data["simulated"]["images"] == 8
    assert data["packed_bytes"] == packed.stat().st_size
    # Which inputs verify does not change what is written.
    assert (tmp_path / "net.onnx").read_bytes() == onnx_file[0].read_bytes()
    quiet = run("export", packed, *words, "--quiet").stdout
    assert quiet.startswith(f"{tmp_path / 'net.onnx'}: ") and quiet.count("\n") == 1


def test_packed_network_is_copied_when_it_is_whole(out, tmp_path):
    copy = tmp_path / "copy.safetensors"
    result = run("export", out, "--format", "packed", "-o", copy)
    assert copy.read_bytes() == (out / "network.ompq.safetensors").read_bytes()
    assert result.stdout.startswith(f"{copy}: ")
    data = run_json("export", out, "--format", "packed", "-o", copy)
    assert data["bytes"] == inspect_file(copy).file_bytes
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(copy.read_bytes()[:-9])
    result = run("export", broken, "--format", "packed", "-o", tmp_path / "x")
    assert result.exit_code == 2
    assert not (tmp_path / "x").exists()


def test_what_cannot_be_exported_is_told(out, tmp_path):
    result = run("export", tmp_path, "-o", tmp_path / "net.onnx")
    assert result.exit_code == 2
    assert "error: there is no packed network" in result.stderr
    result = run("export", out, "--format", "tflite", "-o", tmp_path / "net")
    assert "'tflite' is not one of onnx, packed" in result.stderr


def test_bench_shows_both_networks_and_what_gains_nothing(onnx_file):
    path = onnx_file[0]
    result = run("bench", path, "--repeats", "2", env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    named = [row[2] for row in rows if row[:1] == ["onnxruntime"]]
    assert named == ["float", "quantized"]
    assert "gains no time" in result.stdout
    assert "they save size, not time" in result.stdout


def test_bench_takes_a_float_file_and_gives_json(onnx_file):
    path = onnx_file[0]
    data = run_json("bench", path, "--float", path, "--repeats", "2")
    first, second = data["rows"][:2]
    assert (first["name"], second["name"]) == ("float", "quantized")
    assert first["file_bytes"] == second["file_bytes"] == path.stat().st_size
    quiet = run("bench", path, "--float", path, "--repeats", "1", "--quiet").stdout
    assert "times as fast as float" in quiet


def test_files_without_a_name_need_one(out, tmp_path, monkeypatch):
    monkeypatch.setattr("ompq.cli.artifacts.network_name", lambda _path: "")
    path = tmp_path / "net.onnx"
    assert run("export", out, "-o", path).exit_code == 0
    result = run("bench", path)
    assert result.exit_code == 2
    assert "does not name its network; give --float NETWORK" in result.stderr


def test_a_packed_file_without_a_network_s_name_asks_for_it(out, tmp_path):
    nameless = tmp_path / "net.ompq.safetensors"
    made = call_user_function(network_file(tmp_path), ModelError)
    save(load(out / "network.ompq.safetensors", made), nameless)
    result = run("export", nameless, "-o", tmp_path / "net.onnx")
    assert result.exit_code == 2
    assert "does not name its network; give --network" in " ".join(
        result.stderr.split()
    )
    assert not (tmp_path / "net.onnx").exists()
