"""train, and evaluate of what it wrote, run as the program runs them."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from cli_tools import NETWORK, network_file, run, run_json
from ompq.cli.network_commands import TrainOptions
from ompq.evaluation import evaluate
from ompq.models.named_models import load_model
from ompq.packed.packed_files import load
from ompq.training import tracking, training_run

FAST = ("--effort", "fast", "--samples", "16", "--epochs", "2", "--batch-size", "8")


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
    assert "simulated" in shown.stdout and "are valid" not in shown.stdout
    # Another way: the library loads the file and evaluates it.
    model = load_model(net[0])
    from ompq.datasets.named_data import load_data

    batches = load_data(net[2], model, split="test").batches()
    found = evaluate(load(packed, model.module), batches)
    assert found.top1 == simulated["top1"]


def test_integers_need_a_packed_network(net):
    result = run("evaluate", *net, "--engine", "integer")
    assert result.exit_code == 2
    assert "--engine integer runs packed networks; give one" in result.output


def test_a_stopped_run_says_how_to_continue_and_does(net, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    words = ("train", *net, *FAST, "--budget", "5bits", "--set", "report_steps=1")
    real = tracking.Tracker.after_step

    def stopping(tracker):
        real(tracker)
        if tracker.run.step == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(tracking.Tracker, "after_step", stopping)
    stopped = run(*words, "-o", folder)
    assert stopped.exit_code == 130
    assert "--resume" in stopped.output and "training" in stopped.output
    for rank, told in (("0", "the command that started all processes"), ("1", "")):
        monkeypatch.setenv("RANK", rank)  # of many, the first says how to continue
        many = run(*words, "-o", folder, "--resume")
        assert many.exit_code == 130
        assert told in many.output and ("stopped" in many.output) == bool(told)
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(tracking.Tracker, "after_step", real)
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
        ("keep=all", "must be one of 'best', 'last'"),
        ("distill=much", "--set distill=much must be a number"),
        ("seed=3", "the seed is --seed"),
        ("weights=lq-nets", "weights=lq-nets trains a network that no longer fits"),
    ],
)
def test_settings_that_cannot_be_are_refused(net, tmp_path, setting, words):
    result = run("train", *net, "--budget", "5bits", "--set", setting, "-o", tmp_path)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--recipe", "pact"), ("dorefa", "clip", 0.1, 2)),
        (("--recipe", "pact", "--set", "weights=minmax"), ("minmax", "clip", 0.1, 2)),
        (("--recipe", "pact", "--protocol", "paper-qat"), ("dorefa", "clip", 0.1, 2)),
        (("--protocol", "paper-qat"), ("minmax", "ema", 1e-4, 2)),
    ],
)
def test_a_recipe_is_how_to_train(words, expected):
    options = dict(zip(words[::2], words[1::2], strict=True))
    settings = [options["--set"]] if "--set" in options else None
    training = TrainOptions(recipe=options.get("--recipe"), epochs=2, settings=settings)
    config = training.config(options.get("--protocol"), 0, Path("out"))
    found = config.weights, config.activations, config.learning_rate, config.epochs
    assert found == expected


@pytest.mark.parametrize(
    ("logger", "expected"),
    [("tensorboard", ("out/tensorboard", "none")), ("mlflow", (None, "mlflow"))],
)
def test_a_training_can_be_followed(logger, expected):
    config = TrainOptions(logger=logger).config(None, 0, Path("out"))
    assert (config.tensorboard, config.logger) == expected


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("pakt", "did you mean pact?"),
        ("lq-nets", "trains a network that no longer fits its plan"),
    ],
)
def test_an_unknown_recipe_is_refused(net, tmp_path, recipe, words):
    result = run("train", *net, "--budget", "5bits", "--recipe", recipe, "-o", tmp_path)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_settings_reach_the_training(net, tmp_path, monkeypatch):
    seen = []
    real = training_run.Run.__init__

    def watching(run_, *args, **more):
        seen.append(args[2])
        real(run_, *args, **more)

    monkeypatch.setattr(training_run.Run, "__init__", watching)
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


# A ResNet-50 with a block a stage instead of 3 to 6, for small images.
BOTTLENECKS = """
from torchvision.models.resnet import Bottleneck, ResNet

def make():
    network = ResNet(Bottleneck, [1, 1, 1, 1])
    network.preprocessing = {"input_shape": (3, 64, 64)}
    return network
"""


@pytest.fixture(scope="module")
def crops(tmp_path_factory):
    return write_crops(tmp_path_factory.mktemp("crops"))


@pytest.mark.parametrize(
    ("network", "budget", "bits"),
    [("torchvision:resnet18", "6.7MiB", "6"), ("bottlenecks.py:make", "6.4MiB", "5")],
)
def test_the_recipes_for_imagenet_run_on_photographs(
    crops, tmp_path, monkeypatch, network, budget, bits
):
    monkeypatch.chdir(tmp_path)
    Path("bottlenecks.py").write_text(BOTTLENECKS)
    # As docs/training.md has them, but for random weights and a handful of images.
    words = (network, "--data", crops, "--eval-data", crops, "--activation-bits", bits)
    if network.startswith("torchvision:"):
        words += ("--weights", "none")
    recipe = ("--protocol", "paper-qat", "--budget", budget)
    few = ("--effort", "fast", "--samples", "4", "--epochs", "1", "--batch-size", "4")
    result = run_json("train", *words, *recipe, *few, "-o", "out")
    assert_as_the_recipe_has_it(result["plan"], budget, bits)
    assert result["evaluation"]["count"] == 4
    (epoch,) = json.loads(Path("out/training/history.json").read_text())
    assert 0 < epoch["loss"] < 100
    with safe_open("out/training/last.safetensors", "pt") as file:
        assert '"step":2' in file.metadata()["ompq"]


def test_the_recipe_for_resnet50_plans_within_its_budget(crops):
    words = ("torchvision:resnet50", "--weights", "none", "--data", crops)
    recipe = ("--protocol", "paper-qat", "--budget", "16.0MiB")
    few = ("--activation-bits", "5", "--samples", "4")
    assert_as_the_recipe_has_it(run_json("plan", *words, *recipe, *few), "16.0MiB", "5")


def assert_as_the_recipe_has_it(plan, budget, bits):
    found = plan["allocation"]
    assert found["conv1"] == found["fc"] == {"weight": 8, "activation": 8}
    inner = [choice for name, choice in found.items() if name not in ("conv1", "fc")]
    assert {choice["weight"] for choice in inner} <= {4, 5, 6, 7, 8}
    assert {choice["activation"] for choice in inner} == {int(bits)}
    limit = float(budget.removesuffix("MiB")) * 2**20
    assert plan["totals"]["bytes"] <= limit


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
        ("--data PLACE/own.py:beyond", "targets range from 0 to 39, but "),
        ("--data PLACE/own.py:unlabelled", "the inputs have no labels; return"),
        ("--data PLACE/own.py:grey", "net.py:make does not take an input of shape"),
        ("--data PLACE/own.py:none", "has no function none"),
        ("--validation PLACE/none", "there is no folder"),
        ("--validation PLACE/empty", "holds nothing"),
        ("--validation PLACE/two/train", "there are 2 class folders (a, b), but "),
        ("--eval-data PLACE/none", "there is no folder"),
        ("--eval-data PLACE/images --limit 99", "asked for 99 samples, found 40"),
        ("--samples 99", "asked for 99 samples, found 40"),
        ("--batch-size 500", "40 images, but batch_size=500; lower it"),
        ("--batch-size 0", "invalid value for '--batch-size'"),
        ("--epochs -1", "invalid value for '--epochs'"),
        ("--epochs many", "invalid value for '--epochs'"),
        ("--learning-rate 0", "--learning-rate 0.0 must be above 0"),
        ("--learning-rate inf", "--learning-rate inf must be above 0"),
        ("--protocol paper", "did you mean paper-"),
        ("--plan PLACE/run-wider/plan.json", "made for another network: 3 units"),
        ("--plan PLACE/file", "cannot be read as a plan or an allocation"),
        ("--plan PLACE/none", "there is no such file"),
        ("--plan PLACE/run-net/plan.json --pin fc=8", "omit --pin"),
        ("--from PLACE/none --choices 2,3", "already quantized; omit --choices"),
        ("--from PLACE/none --views 3", "already quantized; omit --views"),
        ("--from PLACE/none", "there is no such file. Give a file"),
        ("--from PLACE/run-net", "it is a folder. Give a file that ompq.save wrote"),
        (
            "--from PLACE/run-net/network.ompq.safetensors --budget 6bits",
            "was started with the budget 5bits, not 6bits; use that budget, or start",
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
        ("--resume", "/out has no stopped run to resume; omit --resume"),
        ("--limit 3", "--limit has no effect without --eval-data; give both"),
        ("--metric perplexity", "--metric has no effect without --eval-data"),
        ("--refine-by reconstruct", "--refine-by has no effect without --refine; "),
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
        (
            "--resume --learning-rate 0.5",
            "belongs to another training (another network, ",
        ),
        ("--resume --budget 6bits", "was started with the budget 5bits, not 6bits"),
        ("PLACE/wider.py:make --resume", "was made for another network"),
        (
            "--resume --plan PLACE/run-wider/plan.json",
            "the plan was made for another network: 3 units differ",
        ),
        ("--resume --plan PLACE/bits.json", "differ from those of "),
    ],
)
def test_other_runs_are_not_continued(place, tmp_path, words, told):
    units = ("stem", "block.conv1", "block.conv2", "block.shortcut", "fc")
    bits = {name: {"weight": 2, "activation": 8} for name in units}
    (place / "bits.json").write_text(json.dumps(bits))
    folder = shutil.copytree(place / "run-net", tmp_path / "out")
    (folder / "result.json").unlink()
    assert told in refused(place, folder, words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "holds a finished run; add --overwrite to replace it"),
        ("--resume --learning-rate 0.5", "holds a finished run with other options; "),
    ],
)
def test_finished_runs_are_not_replaced(place, words, told):
    assert told in refused(place, place / "run-net", words)


def test_a_finished_run_has_nothing_to_resume(place, monkeypatch):
    folder = place / "run-net"
    words = (f"{place}/net.py:make", "--data", place / "images", "--budget", "5bits")
    words = ("train", *words, *FAST, "-o", folder, "--resume")
    before = contents(folder)
    done = run(*words)
    assert done.exit_code == 0
    assert done.stdout == (
        f"{folder}: this run is finished; there is nothing to resume\n"
    )
    monkeypatch.setenv("RANK", "1")  # of many processes, the first says so
    other = run(*words)
    assert (other.exit_code, other.stdout) == (0, "")
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("start.ompq.safetensors", "start.ompq.safetensors is not a packed network"),
        ("training/last.safetensors", "last.safetensors cannot be resumed"),
        ("plan.json", "plan.json is not a plan: it is not JSON"),
    ],
)
def test_broken_files_of_a_run_are_named(place, tmp_path, name, told):
    folder = shutil.copytree(place / "run-net", tmp_path / "out")
    (folder / "result.json").unlink()
    (folder / name).write_bytes(b"broken")
    assert told in refused(place, folder, "--resume")


def test_an_output_that_is_no_folder_is_refused(place):
    told = refused(place, place / "file", "")
    assert "is a file; give a folder" in told
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
