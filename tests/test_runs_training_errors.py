"""train: what cannot be done is said in one line, and leaves nothing half-written."""

import json
import shutil
import sys

import pytest
from PIL import Image

from cli_tools import NETWORK, network_file, run
from test_runs_training import FAST, write_images

WIDER = (
    ("nn.Conv2d(8, 8", "nn.Conv2d(8, 12"),
    ("norm2 = nn.BatchNorm2d(8)", "norm2 = nn.BatchNorm2d(12)"),
    ("shortcut = nn.Conv2d(4, 8", "shortcut = nn.Conv2d(4, 12"),
    ("nn.Linear(8, 10)", "nn.Linear(12, 10)"),
)
OWN_DATA = """
import torch
def nan():
    return torch.full((40, 3, 8, 8), float("nan")), torch.arange(40) % 10
def beyond():
    return torch.zeros(40, 3, 8, 8), torch.arange(40)
def unlabelled():
    return torch.zeros(40, 3, 8, 8)
def grey():
    return torch.zeros(40, 1, 8, 8), torch.arange(40) % 10
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two networks, all kinds of data, and a run of each network."""
    place = tmp_path_factory.mktemp("place")
    network_file(place)
    text = NETWORK
    for old, new in WIDER:
        text = text.replace(old, new)
    (place / "wider.py").write_text(text)
    (place / "own.py").write_text(OWN_DATA)
    (place / "file").write_text("text")
    images = write_images(place / "images", 40, 8)
    broken = shutil.copytree(images, place / "broken")
    (broken / "train" / "0003" / "003.png").write_bytes(b"no image")
    beyond = shutil.copytree(images, place / "beyond")
    shutil.copytree(beyond / "train" / "0000", beyond / "train" / "0011")
    (place / "empty").mkdir()
    for name in ("two/train/a", "two/train/b", "flat"):
        (place / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(place / name / "image.png")
    for network in ("net", "wider"):
        words = (f"{place}/{network}.py:make", "--data", images, "--budget", "5bits")
        done = run("train", *words, *FAST, "-o", place / f"run-{network}")
        assert done.exit_code == 0, done.output
    return place


def refused(place, folder, words, *, budget="--budget 5bits"):
    """Run train; return its error, which must be one line and change no file."""
    before = contents(folder)
    network, data = f"{place}/net.py:make", ("--data", place / "images")
    given = [word.replace("PLACE", str(place)) for word in words.split()]
    if given and given[0].endswith(":make"):
        network, *given = given
    if "--data" in given:
        data = ()
    if "--plan" in given:  # which decides the bits itself
        budget = ""
    settings = (*FAST, *budget.split(), *given)
    result = run("train", network, *data, *settings, "-o", folder)
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    assert result.exit_code == 2, result.output
    assert len(errors) == 1 and errors[0].startswith("error: "), result.stderr
    assert "Traceback" not in result.output
    assert contents(folder) == before
    return errors[0]


def contents(folder):
    if not folder.is_dir():
        return folder.exists()
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--data PLACE/none", "there is no folder"),
        ("--data PLACE/empty", "holds nothing; give a folder with images"),
        ("--data PLACE/file", "is a file; unpack it and give the folder"),
        ("--data PLACE/flat", "the images have no labels; sort them into one folder"),
        ("--data PLACE/two", "there are 2 class folders (a, b), but "),
        ("--data PLACE/beyond", "class folder 11 is beyond "),
        ("--data PLACE/broken", "0003/003.png cannot be read as an image"),
        ("--data PLACE/own.py:nan", "samples hold NaN or infinity"),
        ("--data PLACE/own.py:beyond", "targets go from 0 to 39, but "),
        ("--data PLACE/own.py:unlabelled", "the inputs have no labels; return"),
        ("--data PLACE/own.py:grey", "item 0 has shape (1, 8, 8); "),
        ("--data PLACE/own.py:none", "has no function none"),
        ("--validation PLACE/none", "there is no folder"),
        ("--validation PLACE/empty", "holds nothing"),
        ("--validation PLACE/two/train", "there are 2 class folders (a, b), but "),
        ("--eval-data PLACE/none", "there is no folder"),
        ("--eval-data PLACE/images --limit 99", "asked for 99 samples, found 40"),
        ("--samples 99", "asked for 99 samples, found 40"),
        ("--batch-size 500", "40 images, fewer than batch_size=500"),
        ("--batch-size 0", "invalid value for '--batch-size'"),
        ("--epochs -1", "invalid value for '--epochs'"),
        ("--epochs many", "invalid value for '--epochs'"),
        ("--learning-rate 0", "learning_rate=0.0 must be above 0, and finite"),
        ("--learning-rate inf", "learning_rate=inf must be above 0, and finite"),
        ("--protocol paper", "did you mean paper-"),
        ("--plan PLACE/run-wider/plan.json", "made for another network: 3 units"),
        ("--plan PLACE/file", "is neither a plan nor an allocation"),
        ("--plan PLACE/none", "there is no such file"),
        ("--plan PLACE/run-net/plan.json --pin fc=8", "leave out --pin"),
        ("--from PLACE/none", "there is no such file. Give a file"),
        ("--from PLACE/run-net", "it is a folder. Give a file that ompq.save wrote"),
        (
            "--from PLACE/run-net/network.ompq.safetensors --budget 6bits",
            "was begun with the budget 5bits, not 6bits; give that one, or begin again",
        ),
        ("--from PLACE/file", "is damaged, cut short, or not a safetensors file"),
        ("--from PLACE/run-wider/network.ompq.safetensors", "for another network"),
        (
            "--from PLACE/run-net/network.ompq.safetensors "
            "--plan PLACE/run-wider/plan.json",
            "the plan was made for another network: 3 units differ",
        ),
        ("--set cuda_graph=true", "cuda_graph needs one process on a GPU"),
        ("--set accumulate=3", "batch_size=8 cannot be split evenly over 1 processes"),
        ("--set seed=3", "the seed is --seed"),
        ("--set distill", "a field of ompq.TrainConfig; the seed"),
        ("--resume", "has no stopped run; omit --resume"),
        ("PLACE/none.py:make", "there is no file"),
    ],
)
def test_what_cannot_be_trained_is_refused(place, tmp_path, words, told):
    folder = tmp_path / "out"
    assert told in refused(place, folder, words)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ("", "no budget: give --budget"),
        ("--budget lots", "is not a budget; write for example"),
        ("--budget 1bits", "a budget of 1.00 bits cannot be met"),
    ],
)
def test_budgets_that_cannot_be_are_refused(place, tmp_path, budget, told):
    assert told in refused(place, tmp_path / "out", "", budget=budget)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "training is left from an earlier run; add --resume"),
        ("--resume --learning-rate 0.5", "belongs to another run (other network, dat"),
        ("--resume --budget 6bits", "was begun with the budget 5bits, not 6bits"),
        ("PLACE/wider.py:make --resume", "was made for another network"),
        (
            "--resume --plan PLACE/run-wider/plan.json",
            "the plan was made for another network: 3 units differ",
        ),
        ("--resume --plan PLACE/bits.json", "gives other bits than "),
    ],
)
def test_other_runs_are_not_continued(place, tmp_path, words, told):
    units = ("stem", "block.conv1", "block.conv2", "block.shortcut", "fc")
    bits = {name: {"weight": 2, "activation": 8} for name in units}
    (place / "bits.json").write_text(json.dumps(bits))
    folder = shutil.copytree(place / "run-net", tmp_path / "out")
    assert told in refused(place, folder, words)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("start.ompq.safetensors", "start.ompq.safetensors is not a packed network"),
        ("training/last.safetensors", "last.safetensors is not a checkpoint"),
        ("plan.json", "plan.json is not a plan: it is not JSON"),
    ],
)
def test_broken_files_of_a_run_are_named(place, tmp_path, name, told):
    folder = shutil.copytree(place / "run-net", tmp_path / "out")
    (folder / name).write_bytes(b"broken")
    assert told in refused(place, folder, "--resume")


def test_an_output_that_is_no_folder_is_refused(place):
    told = refused(place, place / "file", "")
    assert "is a file; name a folder" in told
    told = refused(place, place / "file" / "below", "")
    assert "is not a writable folder" in told


@pytest.mark.parametrize(
    ("module", "setting", "extra"),
    [
        ("torch.utils.tensorboard", "tensorboard=scalars", "tensorboard"),
        ("accelerate", "accumulate=2", "train"),
    ],
)
def test_what_is_not_installed_is_told_before_the_work(
    place, tmp_path, monkeypatch, module, setting, extra
):
    monkeypatch.setitem(sys.modules, module, None)
    told = refused(place, tmp_path / "out", f"--set {setting}")
    assert f"is not installed. Run: pip install 'ompq[{extra}]'" in told
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_can_be_continued_with_a_lower_rate(place, tmp_path):
    words = (f"{place}/net.py:make", "--data", place / "images", "--budget", "5bits")
    folder = tmp_path / "out"
    failed = run("train", *words, *FAST, "--learning-rate", "1e30", "-o", folder)
    assert failed.exit_code == 2
    assert "Lower learning_rate=1e+30, or set gradient_norm" in failed.stderr
    assert {path.name for path in folder.iterdir()} == {
        "plan.json",
        "start.ompq.safetensors",
    }
    done = run("train", *words, *FAST, "--resume", "-o", folder)
    assert done.exit_code == 0, done.output


def test_an_unreadable_large_image_is_named_when_it_is_met(place, tmp_path):
    (tmp_path / "large.py").write_text(NETWORK.replace("(3, 8, 8)", "(3, 72, 72)"))
    images = write_images(tmp_path / "images", 40, 72)
    broken = images / "train" / "0003" / "033.png"
    broken.write_bytes(b"no image")
    words = (f"{tmp_path}/large.py:make", "--data", images, "--budget", "5bits", *FAST)
    failed = run("train", *words, "--samples", "2", "-o", tmp_path / "out")
    errors = [line for line in failed.stderr.splitlines() if "error" in line]
    assert failed.exit_code == 2
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {broken} cannot be read as an image")
    assert len(errors[0]) < 300
    again = ("--samples", "2", "--resume", "--skip-unreadable", "-o", tmp_path / "out")
    assert run("train", *words, *again).exit_code == 0
