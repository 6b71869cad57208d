"""What exported files say of themselves, and the program beside them."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ompq
from nets import images, seeded
from ompq.datasets.images import decode_image, normalise
from ompq.errors import ExportError
from ompq.models.exported_models import exported_model
from ompq.models.named_models import NamedModel
from ompq.runtimes.file_metadata import FileMetadata
from ompq.runtimes.runnable_files import open_runnable

SHAPE = (3, 16, 16)
CLASSES = ("a cat", "a dog", "ein Küken")
MODEL = NamedModel(
    nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "net.py:make",
    SHAPE,
    (0.4, 0.5, 0.6),
    (0.2, 0.25, 0.3),
    20,
    "bicubic",
)
CONFIG = ompq.ExportConfig(
    network=MODEL.name,
    preprocessing=MODEL.preprocessing,
    classes=CLASSES,
    budget="3MiB",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The network as files; the last takes signed bytes."""
    folder = tmp_path_factory.mktemp("files")
    samples = images(16, 16)
    network = ompq.quantize(seeded(MODEL.module).eval(), {"*": 8}, samples)
    made = {}
    for name, float_ends in (("a.onnx", True), ("a.tflite", True), ("b.tflite", False)):
        pytest.importorskip("ai_edge_litert" if "tflite" in name else "onnxruntime")
        made[name] = folder / name
        config = replace(CONFIG, float_ends=float_ends)
        ompq.export(network, made[name], samples, config)
    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Pictures of several sizes: upright, wide, and of the network's own size."""
    folder, found = tmp_path_factory.mktemp("pictures"), []
    for number, size in enumerate([(31, 50), (50, 30), (16, 16)]):
        pixels = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3))
        found.append(folder / f"{number}.png")
        Image.fromarray(pixels.astype(np.uint8)).save(found[-1])
    return found


@pytest.mark.parametrize("name", ["a.onnx", "a.tflite", "b.tflite"])
def test_files_say_how_their_inputs_are_made(name, files):
    model = exported_model(files[name])
    assert model.preprocessing == MODEL.preprocessing
    _, about = open_runnable(files[name])
    assert (about.network, about.classes) == (MODEL.name, CLASSES)
    assert about.budget == "3MiB"
    assert about.preprocessing.layout == ("NCHW" if "onnx" in name else "NHWC")
    assert torch.__version__.startswith(about.versions["torch"])
    assert {"ompq", "torch"} < set(about.versions)


@pytest.mark.parametrize("name", ["a.onnx", "a.tflite", "b.tflite"])
def test_the_program_beside_a_file_answers_as_the_network(name, files, pictures):
    model = exported_model(files[name])
    pixels = torch.stack([decode_image(path, MODEL) for path in pictures])
    answers = model.module(normalise(pixels, MODEL)).argmax(1).tolist()
    program = files[name].parent / "run.py"
    words = [sys.executable, "-W", "error::SyntaxWarning", program, files[name]]
    done = subprocess.run(
        [*map(str, words), *map(str, pictures)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{path} {CLASSES[answer]}"
        for path, answer in zip(pictures, answers, strict=True)
    ]


def test_the_program_reads_images_as_ompq_does(files, pictures):
    """Its inputs are those of ompq to the last digits of floats."""
    source = (files["a.onnx"].parent / "run.py").read_text()
    place: dict = {}
    exec(source.partition("\nabout, run")[0], place)
    how = {**MODEL.preprocessing, "layout": "NCHW"}
    for path in pictures:
        wanted = normalise(decode_image(path, MODEL)[None], MODEL).numpy()
        np.testing.assert_allclose(place["read"](path, how), wanted, atol=1e-5)
        turned = place["read"](path, how | {"layout": "NHWC"})
        np.testing.assert_array_equal(
            turned.transpose(0, 3, 1, 2), place["read"](path, how)
        )
    wide = {**how, "resize": [16, 16]}
    wanted = decode_image(pictures[1], replace(MODEL, resize=(16, 16)))[None]
    np.testing.assert_allclose(
        place["read"](pictures[1], wide), normalise(wanted, MODEL).numpy(), atol=1e-5
    )


def test_a_program_of_ones_own_stays(files, tmp_path):
    network = ompq.quantize(MODEL.module, {"*": 8}, images(8, 16))
    (tmp_path / "run.py").write_text("print('mine')\n")
    ompq.export(network, tmp_path / "net.onnx", images(8, 16), CONFIG)
    assert (tmp_path / "run.py").read_text() == "print('mine')\n"
    ompq.export(network, tmp_path / "no" / "net.onnx", images(8, 16))
    assert not (tmp_path / "no" / "run.py").exists()


def test_a_file_that_does_not_say_it_cannot_be_evaluated(files, tmp_path):
    network = ompq.quantize(MODEL.module, {"*": 8}, images(8, 16))
    ompq.export(network, tmp_path / "net.onnx", images(8, 16))
    with pytest.raises(ExportError, match="net.onnx does not say how its inputs are"):
        exported_model(tmp_path / "net.onnx")
    with pytest.raises(ExportError, match="there is no file .*none.onnx; ompq export"):
        exported_model(tmp_path / "none.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"nothing")
    with pytest.raises(ExportError, match="ONNX Runtime cannot load .*broken.onnx: "):
        exported_model(tmp_path / "broken.onnx")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"classes": [1]}',
        '{"preprocessing": {}}',
        '{"preprocessing": {"input_shape": [0, 1, 1]}}',
        '{"preprocessing": {"input_shape": []}}',
        '{"preprocessing": {"input_shape": [1], "resize": -1}}',
        '{"preprocessing": {"input_shape": [1], "interpolation": "box"}}',
        "[" * 100_000,
        '"' + "a" * (1 << 24) + '"',
    ],
)
def test_damaged_metadata_is_told(text, tmp_path):
    with pytest.raises(ExportError, match="net: its metadata is damaged: "):
        FileMetadata.read({"ompq": text}, tmp_path / "net")


def test_metadata_survives_the_file(tmp_path):
    whole = FileMetadata.of(CONFIG, "NCHW", ["onnx"])
    assert FileMetadata.read(whole.texts(), tmp_path) == whole
    assert json.loads(whole.texts()["ompq"])["preprocessing"]["mean"] == [0.4, 0.5, 0.6]
    assert FileMetadata.read({}, tmp_path) == FileMetadata()
    assert "none" not in FileMetadata.of(CONFIG, "NCHW", ["none"]).versions


def test_wrong_preprocessing_is_told():
    config = ompq.ExportConfig(preprocessing={"input_shape": (3, "wide", 16)})
    with pytest.raises(ValueError, match=r"preprocessing=.*Expected `int`, got `str`"):
        FileMetadata.of(config, "NCHW", [])
