"""Accuracy of exported files themselves."""

import pytest

from cli_tools import network_file, run, run_json

pytest.importorskip("onnxruntime")
pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The demo network with few bits, so that some answers are wrong."""
    folder = tmp_path_factory.mktemp("run") / "out"
    words = ("--data", "digits", "--samples", "64", "--effort", "fast", "-o", folder)
    result = run("quantize", "ompq:demo", "--budget", "2.5bits", *words)
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("format", ["onnx", "tflite"])
def test_the_accuracy_of_a_file_is_that_of_the_network(format, out):
    pytest.importorskip("onnxruntime" if format == "onnx" else "ai_edge_litert")
    result = run("export", out, "--format", format)
    assert result.exit_code == 0, result.output
    file = out / f"network.{format}"
    found = run_json("evaluate", file, "--data", "digits")
    packed = ("--packed", out / "network.ompq.safetensors", "--data", "digits")
    network = run_json("evaluate", "ompq:demo", *packed)
    assert found["count"] == network["count"] == 450
    assert found["fingerprint"] == network["fingerprint"]
    assert network["top1"] < 1
    if format == "onnx":
        assert found["correct"] == network["correct"]
    else:  # outputs have 8 bits, where two classes may tie
        assert found["top1"] == pytest.approx(network["top1"], abs=0.005)
    assert found["network"] == str(file) and found["weights"] == "ompq:demo"


def test_a_file_takes_no_options_of_networks(out, tmp_path):
    words = ("--weights", "none", "--packed", "net", "--data", "digits")
    result = run("evaluate", tmp_path / "net.onnx", *words)
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "--weights, --packed: " in said
    assert "has its weights and its input shape; give either the file or" in said


def test_class_names_are_those_of_the_folders(tmp_path):
    from PIL import Image

    from ompq.runtimes.runnable_files import open_runnable

    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(4):
            picture = Image.new("RGB", (9, 9), (60 * number, 10, 10))
            picture.save(tmp_path / "pictures" / name / f"{number}.png")
    words = ("--data", tmp_path / "pictures", "--samples", "4", "--effort", "fast")
    name, out = network_file(tmp_path), tmp_path / "out"
    result = run("quantize", name, "--budget", "3bits", *words, "-o", out)
    assert result.exit_code == 0, result.output
    result = run("export", out)
    assert result.exit_code == 0, result.output
    _, about = open_runnable(out / "network.onnx")
    assert about.classes == ("cat", "dog") and about.network == name
    assert (out / "run.py").exists()
