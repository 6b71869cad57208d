"""train, and evaluate of what it wrote, run as the program runs them."""

import json

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from cli_tools import network_file, run, run_json
from ompq import training as looping
from ompq.evaluation import evaluate
from ompq.models import load_model
from ompq.packing import load

FAST = ("--no-reconstruct", "--samples", "16", "--epochs", "2", "--batch-size", "8")


def write_images(folder, count: int, side: int):
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for number in range(count):
            target = folder / split / f"{number % 10:04d}"
            target.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(256, (side, side, 3), generator=generator)
            image = Image.fromarray(pixels.to(torch.uint8).numpy())
            image.save(target / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    images = write_images(tmp_path_factory.mktemp("images"), 40, 8)
    return (network_file(tmp_path_factory.mktemp("net")), "--data", images)


@pytest.fixture(scope="module")
def finished(net, tmp_path_factory):
    """A whole run under the paper's protocol: its folder and its result."""
    folder = tmp_path_factory.mktemp("run") / "out"
    images = net[2]
    words = ("train", *net, *FAST, "--protocol", "paper-qat", "--budget", "5.5bits")
    more = ("--eval-data", images, "--validation", images, "-o", folder)
    return folder, run_json(*words, *more)


def test_train_leaves_everything_in_its_folder(finished):
    folder, result = finished
    names = {path.name for path in folder.iterdir()}
    assert names >= {"plan.json", "result.json", "report.html", "training"}
    kept = {path.name for path in (folder / "training").iterdir()}
    assert kept == {"last.safetensors", "best.safetensors", "history.json"}
    history = json.loads((folder / "training" / "history.json").read_text())
    assert [entry["epoch"] for entry in history] == [1, 2]
    assert result["evaluation"]["count"] == 40
    bits = result["plan"]["allocation"]
    assert bits["stem"] == bits["fc"] == {"weight": 8, "activation": 8}
    # The recipe starts from the float network, so nothing is reconstructed first.
    stages = result["seconds"]
    assert "training" in stages and "reconstructing" not in stages


def test_what_was_trained_can_be_evaluated_by_both_engines(net, finished):
    folder, result = finished
    packed = folder / "network.ompq.safetensors"
    words = ("evaluate", *net, "--packed", packed)
    simulated = run_json(*words)
    assert simulated["top1"] == result["evaluation"]["top1"]
    assert simulated["engine"] == "simulated"
    assert simulated["weights"] == str(packed)
    integer = run_json(*words, "--engine", "integer")
    assert integer["correct"] == simulated["correct"]
    shown = run(*words)
    assert "simulated" in shown.stdout and "mean nothing" not in shown.stdout
    # Another way: the library loads the file and evaluates it.
    model = load_model(net[0])
    from ompq.datasets.sources import load_data

    batches = load_data(net[2], model, split="test").batches()
    found = evaluate(load(packed, model.module), batches)
    assert found.top1 == simulated["top1"]


def test_integers_need_a_packed_network(net):
    result = run("evaluate", *net, "--engine", "integer")
    assert result.exit_code == 2
    assert "--engine integer computes packed networks; give one" in result.output


def test_a_stopped_run_says_how_to_continue_and_does(net, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    words = ("train", *net, *FAST, "--budget", "5bits", "--set", "report_steps=1")
    real = looping.Tracker.after_step

    def stopping(tracker):
        real(tracker)
        if tracker.run.step == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(looping.Tracker, "after_step", stopping)
    stopped = run(*words, "-o", folder)
    assert stopped.exit_code == 130
    assert "--resume" in stopped.output and "training" in stopped.output
    for rank, told in (("0", "the command that started all processes"), ("1", "")):
        monkeypatch.setenv("RANK", rank)  # of many, the first says how to continue
        many = run(*words, "-o", folder, "--resume")
        assert many.exit_code == 130
        assert told in many.output and ("stopped" in many.output) == bool(told)
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(looping.Tracker, "after_step", real)
    refused = run(*words, "-o", folder)
    assert refused.exit_code == 2 and "add --resume to continue it" in refused.output
    resumed = run(*words, "-o", folder, "--resume")
    assert resumed.exit_code == 0, resumed.output
    whole = run(*words, "-o", tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    one, other = (
        (f / "network.ompq.safetensors").read_bytes()
        for f in (folder, tmp_path / "whole")
    )
    assert one == other


def test_training_goes_on_from_a_packed_network(net, finished, tmp_path):
    folder, _ = finished
    packed = folder / "network.ompq.safetensors"
    words = ("train", *net, "--epochs", "1", "--batch-size", "8", "--from", packed)
    result = run_json(*words, "-o", tmp_path / "more")
    assert result["epochs"] == 1
    assert (tmp_path / "more" / "network.ompq.safetensors").exists()
    alone = tmp_path / "alone.ompq.safetensors"
    alone.write_bytes(packed.read_bytes())
    refused = run(*words[:-1], alone, "-o", tmp_path / "no")
    assert refused.exit_code == 2
    assert "give it with --plan FILE" in refused.output
    told = run(*words[:-1], alone, "--plan", folder / "plan.json", "-o", tmp_path / "n")
    assert told.exit_code == 0, told.output


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("epoch=3", "a field of ompq.TrainConfig (did you mean epochs?)"),
        ("keep", "--set keep: write NAME=VALUE with a field of ompq.TrainConfig"),
        ("keep=all", "keep='all' must be one of best, last"),
        ("distill=much", "distill='much' must be a number"),
        ("seed=3", "the seed is --seed"),
    ],
)
def test_settings_that_cannot_be_are_refused(net, tmp_path, setting, words):
    result = run("train", *net, "--budget", "5bits", "--set", setting, "-o", tmp_path)
    assert result.exit_code == 2
    assert words in result.output


def test_settings_reach_the_training(net, tmp_path, monkeypatch):
    seen = []
    real = looping.Run.__init__

    def watching(run_, *args, **more):
        seen.append(args[2])
        real(run_, *args, **more)

    monkeypatch.setattr(looping.Run, "__init__", watching)
    words = (
        "--set",
        "distill=0.5",
        "--set",
        "activations=clip",
        "--learning-rate",
        "0.1",
    )
    done = run("train", *net, *FAST, "--budget", "5bits", *words, "-o", tmp_path / "o")
    assert done.exit_code == 0, done.output
    (config,) = seen
    assert (config.distill, config.activations) == (0.5, "clip")
    assert (config.learning_rate, config.epochs, config.batch_size) == (0.1, 2, 8)


def write_crops(folder):
    """Cut two photographs into 64 x 64 images, a class each of 1,000."""
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images  # a temple and a flower, (427, 640, 3)
    for target, pixels in enumerate(photographs):
        for number in range(6):
            row, column = divmod(number, 3)
            crop = pixels[96 * row :, 96 * column :][:64, :64]
            split = "train" if number < 4 else "val"
            path = folder / split / f"{target:04d}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(crop).save(path)
    return folder


@pytest.mark.parametrize(
    ("network", "budget", "bits"),
    [
        ("resnet18", "6.7MiB", "6"),
        pytest.param("resnet50", "16.0MiB", "5", marks=pytest.mark.slow),
    ],
)
def test_the_recipes_for_imagenet_run_on_photographs(tmp_path, network, budget, bits):
    images = write_crops(tmp_path / "images")
    # As docs/training.md has them, but for random weights and a handful of images.
    words = (f"torchvision:{network}", "--weights", "none", "--data", images)
    words += ("--eval-data", images, "--activation-bits", bits)
    recipe = ("--protocol", "paper-qat", "--budget", budget)
    few = ("--no-reconstruct", "--samples", "4", "--epochs", "1", "--batch-size", "4")
    folder = tmp_path / "out"
    result = run_json("train", *words, *recipe, *few, "-o", folder)
    found = result["plan"]["allocation"]
    assert found["conv1"] == found["fc"] == {"weight": 8, "activation": 8}
    inner = [choice for name, choice in found.items() if name not in ("conv1", "fc")]
    assert {choice["weight"] for choice in inner} <= {4, 5, 6, 7, 8}
    assert {choice["activation"] for choice in inner} == {int(bits)}
    assert result["evaluation"]["count"] == 4
    (epoch,) = json.loads((folder / "training" / "history.json").read_text())
    assert 0 < epoch["loss"] < 100
    limit = float(budget.removesuffix("MiB")) * 2**20
    assert result["plan"]["totals"]["bytes"] <= limit
    with safe_open(folder / "training" / "last.safetensors", "pt") as file:
        assert '"step":"2"' in file.metadata()["ompq"]
