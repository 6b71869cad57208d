"""quantize and evaluate, run as the program runs them."""

import errno
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ompq
from cli_tools import NETWORK, TRAINED_NETWORK, network_file, run, run_json
from ompq import workflow
from ompq.allocation.problem import Allocation
from ompq.amounts import in_bytes
from ompq.checkpoints import Store
from ompq.datasets.distillation import distilled_samples
from ompq.datasets.named_data import load_data
from ompq.errors import FileError
from ompq.evaluation import evaluate
from ompq.files import locked_folder, remove_unfinished, shown
from ompq.models.named_models import load_model
from ompq.network.units import Choice
from ompq.packed.packed_files import load
from ompq.plans import Plan
from ompq.quantization.record import quantization_of
from ompq.reconstruction import block_loop
from ompq.workflow import whole_folder

FAST = ("--samples", "16", "--iterations", "3")


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> tuple[str, ...]:
    return (network_file(tmp_path_factory.mktemp("net")), "--data", "random")


@pytest.fixture(scope="module")
def finished(net, tmp_path_factory):
    """A whole run: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("run") / "out"
    words = ("quantize", *net, *FAST, "--budget", "70%", "-o", folder)
    result = run(*words, "--eval-data", "random", "--limit", "64")
    assert result.exit_code == 0, result.output
    return folder, result


def without_times(path: Path) -> dict:
    data = json.loads(path.read_text())
    data["sections"] = [s for s in data["sections"] if s["section"] != "StageTime"]
    data.pop("seconds")
    for name in ("report.html", "config.toml"):  # which tell times and folders
        data["sizes"].pop(name)
    if data["evaluation"]:
        data["evaluation"].pop("images_per_second")
    return data


def test_quantize_leaves_everything_in_its_folder(finished):
    folder, result = finished
    names = {path.name for path in folder.iterdir()}
    assert names >= {"plan.json", "result.json", "report.html"}
    assert "checkpoint.safetensors" not in names
    for name in names:
        assert str(folder / name) in result.stdout
    size = in_bytes((folder / "network.ompq.safetensors").stat().st_size)
    planned = in_bytes(Plan.load(folder / "plan.json").totals["bytes"])
    assert f"network.ompq.safetensors: {size}, planned {planned}" in result.stdout
    assert (folder / "report.html").read_text().lower().startswith("<!doctype html>")


def test_the_result_holds_accuracy_errors_and_times(finished):
    folder, result = finished
    data = json.loads((folder / "result.json").read_text())
    assert data["samples"] == 16
    assert data["plan"]["hash"] == Plan.load(folder / "plan.json").hash
    assert data["evaluation"]["count"] == 64
    kinds = [section["section"] for section in data["sections"]]
    assert kinds.count("Accuracy") == 2
    assert kinds.count("BlockError") == 3  # stem, block, fc
    assert set(data["seconds"]) >= {"scoring the choices", "reconstructing"}
    float_top1 = data["evaluation"]["top1"] + data["evaluation"]["drop"]
    assert f"top-1 {100 * float_top1:.2f} %" in result.stdout
    assert "of 3 improved" in result.stdout
    assert "--data random: only the sizes are valid, not the results" in result.stdout


def test_the_float_accuracy_is_that_of_evaluate(net, finished):
    data = json.loads((finished[0] / "result.json").read_text())
    alone = run_json("evaluate", *net, "--limit", "64")
    assert alone["top1"] == pytest.approx(
        data["evaluation"]["top1"] + data["evaluation"]["drop"]
    )


def test_quantize_without_learning_and_without_labels(net, tmp_path):
    words = ("quantize", *net, "--samples", "8", "--budget", "70%", "--effort", "fast")
    data = run_json(*words, "-o", tmp_path / "out")
    assert data["evaluation"] is None
    assert data["iterations"] == 0
    assert data["files"][-1] == "result.json"
    assert all((tmp_path / "out" / name).exists() for name in data["files"])
    (tmp_path / "out" / "network.onnx").write_text("of the earlier run")
    refused = run(*words, "-o", tmp_path / "out")
    assert refused.exit_code == 2
    assert "holds a finished run; add --overwrite to replace it" in refused.stderr
    both = run(*words, "-o", tmp_path / "out", "--overwrite", "--resume")
    assert "--resume and --overwrite cannot be combined" in both.stderr
    quiet = run(*words, "-o", tmp_path / "out", "--quiet", "--overwrite")
    assert not (tmp_path / "out" / "network.onnx").exists()
    assert quiet.stdout.count("\n") == 1


def test_the_papers_protocol_reconstructs_as_brecq_does(net, tmp_path):
    words = ("quantize", *net, "--samples", "8", "--budget", "3bits", "-o", tmp_path)
    data = run_json(*words, "--protocol", "paper-ptq", "--iterations", "4")
    assert data["iterations"] == 4
    errors = [s["name"] for s in data["sections"] if s["section"] == "BlockError"]
    assert errors == [
        f"{b}, {o}" for o in ("weights", "activations") for b in ("block", "fc")
    ]
    state = load(
        tmp_path / "network.ompq.safetensors", load_model(net[0]).module
    ).state_dict()
    zeros = [t for n, t in state.items() if n.endswith("weight_zero_point")]
    assert zeros and all(torch.equal(zero, zero.round()) for zero in zeros)


def test_quantize_takes_a_plan(net, finished, tmp_path):
    words = ("quantize", *net, "--samples", "8", "--effort", "fast")
    plan = finished[0] / "plan.json"
    words = (*words, "--measure-layers", "1")
    data = run_json(*words, "--plan", plan, "-o", tmp_path / "out")
    (effect,) = [one for one in data["sections"] if one["section"] == "LayerEffect"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Layers that hurt most, measured" in page and effect["alone"] >= 0
    assert data["plan"]["hash"] == Plan.load(plan).hash


def test_quantize_takes_bits_copied_from_a_report(net, finished, tmp_path):
    bits = Plan.load(finished[0] / "plan.json").allocation.to_json()
    (tmp_path / "bits.json").write_text(json.dumps(bits))
    words = ("quantize", *net, "--samples", "8", "--effort", "fast")
    data = run_json(*words, "--plan", tmp_path / "bits.json", "-o", tmp_path / "out")
    assert data["plan"]["allocation"] == bits


def stop_at_block(monkeypatch, number: int) -> None:
    original, calls = block_loop.learn_rounding, []

    def learn(*args, **settings):
        calls.append(args)
        if len(calls) == number:
            raise KeyboardInterrupt
        return original(*args, **settings)

    monkeypatch.setattr(block_loop, "learn_rounding", learn)


def test_ctrl_c_keeps_what_is_done_and_resume_gives_the_same(
    net, finished, tmp_path, monkeypatch
):
    words = ("quantize", *net, *FAST, "--budget", "70%", "-o", tmp_path / "out")
    words = (*words, "--eval-data", "random", "--limit", "64")
    with monkeypatch.context() as patch:
        stop_at_block(patch, 3)
        patch.setattr("sys.argv", ["ompq", *map(str, words)])
        stopped = run(*words)
    assert stopped.exit_code == 130
    assert stopped.stdout == ""
    checkpoint = tmp_path / "out" / "checkpoint.safetensors"
    assert checkpoint.exists()
    assert f"progress is kept in {checkpoint}" in stopped.stderr
    assert "continue with: ompq quantize " in stopped.stderr
    assert stopped.stderr.endswith(" --resume\n")
    assert not (tmp_path / "out" / "result.json").exists()

    refused = run(*words)
    assert refused.exit_code == 2
    assert "add --resume to continue it, or --overwrite" in refused.stderr
    other = run(*words, "--resume", "--budget", "75%")
    assert other.exit_code == 2
    assert "was started with the budget 70%, not 75%" in other.stderr

    assert run(*words, "--resume").exit_code == 0
    assert not checkpoint.exists()
    resumed = without_times(tmp_path / "out" / "result.json")
    assert resumed == without_times(finished[0] / "result.json")


def test_a_finished_run_has_nothing_to_resume(net, finished):
    folder, _ = finished
    words = ("quantize", *net, *FAST, "--budget", "70%", "-o", folder, "--resume")
    words = (*words, "--eval-data", "random", "--limit")
    before = (folder / "result.json").read_bytes()
    again = run(*words, "64")
    assert again.exit_code == 0
    told = f"{folder}: this run is finished; there is nothing to resume\n"
    assert again.stdout == told
    assert run_json(*words, "64") == json.loads(before)
    other = run(*words, "63")
    assert other.exit_code == 2
    told = "holds a finished run with other options; give --overwrite instead of"
    assert told in other.stderr
    assert (folder / "result.json").read_bytes() == before


def test_ctrl_c_before_the_first_block_leaves_nothing_to_resume(
    net, tmp_path, monkeypatch
):
    def stop(*_args, **_settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("ompq.workflow.quantize", stop)
    result = run("quantize", *net, *FAST, "--budget", "70%", "-o", tmp_path / "out")
    assert result.exit_code == 130
    assert result.stderr.endswith("stopped\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no budget: give --budget, for example 4.0MiB, or --plan"),
        (["--budget", "0.1%"], "cannot be met"),
        (["--budget", "70%", "--eval-data", "nowhere"], "nowhere"),
        (["--plan", "no.json"], "no.json cannot be read as a plan or an allocation"),
        (["--budget", "70%", "--iterations", "0"], "--iterations"),
    ],
)
def test_an_error_leaves_nothing_behind(net, tmp_path, words, message):
    result = run("quantize", *net, *FAST, "-o", tmp_path / "out", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_plan_of_another_network_is_refused(finished, tmp_path):
    result = run(
        *("quantize", "ompq:demo", "--data", "random", "--samples", "4"),
        *("--plan", finished[0] / "plan.json", "-o", tmp_path / "out"),
    )
    assert result.exit_code == 2
    assert "the plan was made for another network" in result.stderr
    assert not (tmp_path / "out").exists()


def test_evaluate_tells_top1_with_its_interval(net):
    result = run("evaluate", *net, "--limit", "50", "--batch-size", "20")
    model = load_model(net[0])
    batches = load_data("random", model).batches(batch_size=20, limit=50)
    expected = evaluate(model.module, batches)
    low, high = expected.interval
    text = f"{100 * expected.top1:.2f} % ({100 * low:.2f} to {100 * high:.2f})"
    assert f"top-1    {text} of 50 samples" in result.stdout
    assert "--data random: only the sizes are valid, not the numbers" in result.stdout
    quiet = run("evaluate", *net, "--limit", "50", "--quiet")
    assert quiet.stdout == f"top-1 {text} of 50 samples (95 % interval)\n"


def test_evaluate_json_can_be_read_back(net):
    data = run_json("evaluate", *net, "--limit", "10")
    assert data["count"] == 10
    assert data["network"] == net[0]
    assert 0 <= data["interval"][0] <= data["top1"] <= data["interval"][1] <= 1


def test_evaluate_says_what_is_wrong(net, tmp_path):
    torch.save({"stem.weight": torch.zeros(1)}, tmp_path / "bad.pth")
    wrong = run("evaluate", *net, "--weights", tmp_path / "bad.pth")
    assert wrong.exit_code == 2
    assert "bad.pth does not fit" in wrong.stderr
    (tmp_path / "empty").mkdir()
    empty = run("evaluate", net[0], "--data", tmp_path / "empty")
    assert empty.exit_code == 2
    assert empty.stderr.startswith("error: ")
    assert str(tmp_path / "empty") in empty.stderr


def test_what_is_measured_is_what_is_saved(net, finished):
    folder, result = finished
    assert "arithmetic  integers; the integer engine and ONNX compute" in result.stdout
    data = json.loads((folder / "result.json").read_text())
    saved = load(folder / "network.ompq.safetensors", load_model(net[0]).module)
    assert len(quantization_of(saved).links) == len(data["plan"]["units"])
    batches = load_data("random", load_model(net[0])).batches(limit=64)
    found = evaluate(saved, batches, reference=load_model(net[0]).module)
    for name in ("top1", "agreement", "divergence"):
        assert data["evaluation"][name] == getattr(found, name), name


GELU = """
from torch import nn

def make():
    layers = nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 2, 6), nn.Flatten()
    network = nn.Sequential(*layers)
    network.input_shape = (3, 8, 8)
    return network
"""


def test_what_integers_cannot_do_stays_and_is_named(tmp_path):
    (tmp_path / "gelu.py").write_text(GELU)
    words = (f"{tmp_path / 'gelu.py'}:make", "--data", "random", *FAST[:2])
    out = tmp_path / "out"
    result = run("quantize", *words, "--effort", "fast", "--budget", "99%", "-o", out)
    assert result.exit_code == 0, result.output
    assert "arithmetic  float: gelu in 1 has no integer kernel" in result.stdout


def test_edited_bits_that_exceed_their_budget_are_refused(net, finished, tmp_path):
    plan = Plan.load(finished[0] / "plan.json")
    plan = plan.with_budget(f"{0.8 * plan.totals['bytes']:.0f}B")
    most = Allocation(dict.fromkeys(plan.graph.names, Choice(8, 8)))
    edited = tmp_path / "edited.json"
    replace(plan, allocation=most).save(edited)
    words = ("quantize", *net, *FAST[:2], "--effort", "fast", "--plan", edited)
    refused = run(*words, "-o", tmp_path / "out")
    assert refused.exit_code == 2
    assert f"the bits in {edited} exceed the plan's own budget: " in refused.stderr
    assert "accept them with --ignore-budget" in refused.stderr
    assert not (tmp_path / "out").exists()
    assert run(*words, "--ignore-budget", "-o", tmp_path / "out").exit_code == 0
    alone = run("quantize", *net, "--budget", "70%", "--ignore-budget", "-o", tmp_path)
    assert "--ignore-budget has no effect without --plan; give both" in alone.stderr


def test_a_run_says_which_file_its_budget_limits(finished):
    folder, result = finished
    line = next(r for r in result.stdout.splitlines() if "network.ompq" in r)
    assert line.endswith(", limited to 70%")
    assert f"ompq export {folder} writes the ONNX file, which is larger" in (
        result.stdout.replace("\n", " ")
    )
    assert "--budget onnx:SIZE limits the other" in result.stdout


def test_views_are_what_is_learned_from(net, tmp_path, monkeypatch):
    seen = []
    whole = workflow.quantize

    def rounded(module, plan, samples, *config, **more):
        seen.append(samples)
        return whole(module, plan, samples, *config, **more)

    monkeypatch.setattr(workflow, "quantize", rounded)
    words = ("quantize", *net, "--samples", "8", "--budget", "70%", "--effort", "fast")
    for number, more in enumerate([(), ("--views", "3")]):
        assert run(*words, *more, "-o", tmp_path / str(number)).exit_code == 0
    plain, views = (samples.first_batch(24) for samples in seen)
    assert len(plain) == 8
    assert torch.equal(views, ompq.datasets.image_views(plain, 3))


def test_bits_for_some_layers_only_are_refused(net, tmp_path):
    (tmp_path / "bits.json").write_text('{"fc": {"weight": 4, "activation": 8}}')
    words = ("quantize", *net, "--samples", "8", "--effort", "fast")
    result = run(*words, "--plan", tmp_path / "bits.json", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "no bits for 4 of 5 units: stem, block.conv1" in (result.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--budget", "40%"], "--budget"),
        (["--choices", "2,4"], "--choices"),
        (["--pin", "fc=8", "--no-tie"], "--pin, --no-tie"),
        (["--activation-bits", "4"], "--activation-bits"),
    ],
)
def test_options_that_contradict_a_plan_are_refused(
    net, finished, tmp_path, words, named
):
    given = ("--plan", finished[0] / "plan.json", "-o", tmp_path / "out")
    result = run("quantize", *net, "--samples", "8", *given, *words)
    assert result.exit_code == 2
    assert result.stderr.endswith(f"already decides the bits; omit {named}\n")
    assert not (tmp_path / "out").exists()


def test_learning_steps_need_learning(net, tmp_path):
    words = ("--budget", "40%", "--effort", "fast", "--iterations", "9")
    result = run("quantize", *net, *words, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "--effort fast learns nothing; omit --iterations," in result.stderr
    words = ("--budget", "40%", "--effort", "fast", "--merge-blocks", "2")
    result = run("quantize", *net, *words, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "--effort fast learns nothing; omit --merge-blocks," in result.stderr
    words = ("--budget", "40%", "--effort", "fast", "--tune-epochs", "2")
    result = run("quantize", *net, *words, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "--effort fast learns nothing; omit --tune-epochs," in result.stderr
    words = ("--budget", "40%", "--protocol", "brecq", "--tune-epochs", "2")
    result = run("quantize", *net, *words, "-o", tmp_path / "out")
    assert result.exit_code == 2
    expected = "--protocol brecq does not tune networks; omit --tune-epochs"
    assert expected in result.stderr


@pytest.mark.parametrize(
    ("words", "tuned"),
    [
        ((), False),
        (("--tune-epochs", "1"), True),
        (("--activation-bits", "4"), True),
        (("--activation-bits", "4", "--tune-epochs", "0"), False),
    ],
)
def test_the_whole_network_is_tuned_if_its_activations_are_narrow_or_asked_for(
    net, tmp_path, words, tuned
):
    budget = ("--budget", "4bits", "--samples", "8", "--iterations", "1")
    out = ("-o", tmp_path / "out")
    data = run_json("quantize", *net, *budget, *words, *out)
    remarks = [s["text"] for s in data["sections"] if s["section"] == "Remark"]
    assert any("divergence on the samples" in text for text in remarks) is tuned
    shown = run("quantize", *net, *budget, *words, "--overwrite", *out).stdout
    assert any(line.startswith("tuned ") for line in shown.splitlines()) is tuned


def test_neighbouring_blocks_are_learned_together(tmp_path):
    text = NETWORK.replace(
        "self.block = Block()",
        "self.block = Block()\n"
        "        self.again = Block()\n"
        "        self.again.conv1 = nn.Conv2d(8, 8, 3, 1, 1)\n"
        "        self.again.shortcut = nn.Conv2d(8, 8, 1)",
    )
    text = text.replace(
        "self.fc(self.block(self.stem(x).relu())",
        "self.fc(self.again(self.block(self.stem(x).relu()))",
    )
    file = tmp_path / "deeper.py"
    file.write_text(text)
    words = (f"{file}:make", "--data", "random", "--budget", "4bits", "--samples", "8")
    data = run_json(
        "quantize",
        *words,
        "--iterations",
        "2",
        "--merge-blocks",
        "2",
        "-o",
        tmp_path / "out",
    )
    errors = [s["name"] for s in data["sections"] if s["section"] == "BlockError"]
    assert len(errors) == 3  # of stem, block, again and fc


def test_a_full_disk_is_no_bug_and_leaves_nothing_half_written(
    net, tmp_path, monkeypatch
):
    def full(path, *_args, **_settings):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(workflow, "write_report", full)
    words = (
        "quantize",
        *net,
        "--samples",
        "8",
        "--budget",
        "4bits",
        "--effort",
        "fast",
    )
    result = run(*words, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert result.stderr.endswith("report.html: No space left on device\n")
    assert ".unfinished" not in result.stderr
    assert "a bug in ompq" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_errors_name_the_folder_that_the_user_chose(tmp_path):
    out = tmp_path / "out"
    with (
        pytest.raises(
            FileError, match=f"^{re.escape(str(out))}/plan.json: it is full$"
        ),
        whole_folder(out) as work,
    ):
        raise FileError(f"{work / 'plan.json'}: it is full")
    with pytest.raises(OSError, match="full") as caught, whole_folder(out) as work:
        raise OSError(errno.ENOSPC, "full", str(work / "a"))
    assert caught.value.filename == str(out / "a")
    with pytest.raises(OSError, match="full") as caught, whole_folder(out):
        raise OSError(errno.ENOSPC, "full")
    assert caught.value.filename is None
    assert not out.exists()


def test_a_full_disk_during_learning_leaves_no_lone_plan(net, tmp_path, monkeypatch):
    def full(*_args, **_settings):
        raise OSError(errno.ENOSPC, "No space left on device", "checkpoint")

    monkeypatch.setattr(Store, "write", full)
    words = ("quantize", *net, *FAST, "--budget", "70%", "-o", tmp_path / "out")
    assert run(*words).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_another_process_at_work_in_the_folder_is_named(net, tmp_path):
    words = ("quantize", *net, *FAST, "--budget", "70%", "-o", tmp_path)
    with locked_folder(tmp_path):
        result = run(*words)
    assert result.exit_code == 2
    assert f"another process ({os.getpid()}) is using {tmp_path}" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "folder", ["全角\u3000dir", "a\u00a0b", "new\nline", "esc\x1b[31m", "x" * 240]
)
def test_a_network_in_a_folder_of_any_name_is_read_again(folder, tmp_path, monkeypatch):
    deep = Path(*[folder] * (5 if len(folder) > 200 else 1))  # 1,200 characters
    (tmp_path / deep).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    network = f"{network_file(tmp_path / deep)}"
    words = ("quantize", network, "--data", "random", "--samples", "8")
    result = run(*words, "--effort", "fast", "--budget", "4bits", "-o", "out")
    assert result.exit_code == 0, result.output
    assert run("inspect", "out/network.ompq.safetensors").exit_code == 0
    data = json.loads(Path("out/result.json").read_text())
    assert data["network"] == shown(network) and len(data["network"]) <= 1000
    account = ompq.inspect_file("out/network.ompq.safetensors")
    assert account.about["network"] == data["network"]


def test_what_a_killed_run_left_unfinished_is_removed(net, tmp_path):
    out = tmp_path / "out"
    script = (
        "import sys, time; from pathlib import Path\n"
        "from ompq.files import replacing, unfinished_folder\n"
        "out = Path(sys.argv[1])\n"
        "with unfinished_folder(out) as work, replacing(out / 'plan.json') as file, "
        "replacing(out / 'training' / 'last.safetensors') as state:\n"
        "    (work / 'plan.json').write_text('half')\n"
        "    print('ready', flush=True); time.sleep(600)"
    )
    out.mkdir()
    words = [sys.executable, "-c", script, str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        remove_unfinished(out)  # nothing, as long as it is in use
        left = [*out.glob(".unfinished.*"), *out.glob("training/.unfinished.*")]
        assert len(left) == 3
        process.kill()
    words = ("quantize", *net, "--samples", "8", "--effort", "fast", "--budget", "70%")
    result = run(*words, "-o", out, "--resume")
    assert not [*out.rglob(".unfinished.*")], result.output


TRAINED = (
    *("--budget", "6bits", "--samples", "8", "--effort", "fast"),
    *("--epochs", "1", "--batch-size", "8"),
)

ANY_INPUT = """
import torch
from torch import nn

class Signal(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 5, 2)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.conv(x).relu().mean(2))

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, ids, mask=None):
        return self.fc(self.embed(ids))

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, x, y):
        return self.a(x) + self.b(y)

class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 6, 3, 1, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x):
        return {"out": self.out(self.conv(x).relu())}

def made(kind):
    torch.manual_seed(0)
    return kind()

def signal(): return made(Signal)
def tokens(): return made(Tokens)
def two(): return made(Two)
def dense(): return made(Dense)

def values(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))

def signals():
    for at in range(3):  # pairs with class numbers, a batch at a time
        yield values(8, 1, 40), torch.arange(8) % 3

def ids():
    yield {"ids": torch.arange(40).view(8, 5) % 11, "mask": torch.ones(8, 5)}

def pairs(): return values(16, 4), values(16, 2)

def labelled_pairs():
    for at in range(2):
        yield (values(8, 4), values(8, 2)), torch.arange(8) % 3

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.hidden(x).relu()).squeeze(1)  # one number an input

def regression(): return made(Regression)

def measured():
    for part in values(32, 6).split(8):
        yield part, part.sum(1) / 10  # targets are floats

def squared_error(output, targets): return each(output, targets).mean()
def each(output, targets): return (output - targets).square()
def number(output, targets): return 3.0

def pictures(): return values(16, 3, 8, 8), torch.zeros(16, 8, 8, dtype=torch.long)

def places(output, masks):
    return (output["out"].argmax(1) == masks).double().mean()
"""


@pytest.mark.parametrize(
    ("network", "data"),
    [("signal", "signals"), ("tokens", "ids"), ("two", "pairs"), ("dense", "pictures")],
)
def test_any_input_can_be_quantized(network, data, tmp_path):
    (tmp_path / "any.py").write_text(ANY_INPUT)
    file = tmp_path / "any.py"
    words = ("quantize", f"{file}:{network}", "--data", f"{file}:{data}")
    settings = ("--samples", "8", "--budget", "5bits", "--score", "weight_noise")
    made = run_json(*words, *settings, "--iterations", "1", "-o", tmp_path / "out")
    assert {row["weight_bits"] for row in made["plan"]["units"]} <= {2, 3, 4, 5, 6, 8}
    assert (tmp_path / "out" / "network.ompq.safetensors").exists()


def test_networks_of_several_inputs_can_be_trained(tmp_path):
    (tmp_path / "any.py").write_text(ANY_INPUT)
    file = tmp_path / "any.py"
    words = ("train", f"{file}:two", "--data", f"{file}:labelled_pairs", *TRAINED)
    run_json(*words, "-o", tmp_path / "out")
    history = json.loads((tmp_path / "out" / "training/history.json").read_text())
    assert {*history[0]} == {"epoch", "loss", "top1"}


def test_a_loss_of_one_s_own_trains_what_has_no_classes(tmp_path):
    (tmp_path / "any.py").write_text(ANY_INPUT)
    file = tmp_path / "any.py"
    data = f"{file}:measured"
    words = ("train", f"{file}:regression", "--data", data, *TRAINED, "--epochs", "4")
    own = ("--loss", f"{file}:squared_error", "--learning-rate", "0.02")
    judged = ("--eval-data", data, "--metric", f"{file}:squared_error")
    made = run_json(
        *words, *own, *judged, "--validation", data, "-o", tmp_path / "out"
    )["evaluation"]
    history = json.loads((tmp_path / "out" / "training/history.json").read_text())
    assert {*history[0]} == {"epoch", "loss", "validation"}
    best = max(entry["validation"] for entry in history)
    assert -best == pytest.approx(made["metrics"]["squared_error"], rel=0.05)
    assert -best < made["reference_metrics"]["squared_error"]
    for given, message in (
        ((), "training needs class indices, integers of shape (32,), or a loss of"),
        (("--loss", "mse"), "--loss mse: write FILE.py:FUNCTION"),
        (("--loss", f"{file}:squared"), "has no function squared"),
        (("--loss", f"{file}:number"), "the loss returned float; return the mean"),
        (("--loss", f"{file}:each"), "a tensor of shape (8,); return the mean"),
    ):
        refused = run(*words, *given, "--overwrite", "-o", tmp_path / "no")
        assert refused.exit_code == 2 and message in refused.stderr, refused.output


def test_a_metric_of_one_s_own_judges_what_has_no_top1(tmp_path):
    (tmp_path / "any.py").write_text(ANY_INPUT)
    file = tmp_path / "any.py"
    words = ("quantize", f"{file}:dense", "--data", f"{file}:pictures")
    judged = ("--eval-data", f"{file}:pictures", "--metric", f"{file}:places")
    settings = ("--samples", "8", "--score", "weight_noise", "--effort", "fast")
    found = run_json(
        *words, *judged, *settings, "--budget", "5bits", "-o", tmp_path / "o"
    )
    metrics, floats = (found["evaluation"][k] for k in ("metrics", "reference_metrics"))
    assert found["evaluation"]["top1"] is None
    assert 0 < metrics["places"] <= 1 and 0 < floats["places"] <= 1
    alone = run("evaluate", *words[1:], "--metric", f"{file}:places")
    assert f"places {floats['places']:.5g}, on 16" in " ".join(alone.stdout.split())
    goal = run_json(
        *words, *judged, *settings, "--max-drop", "0.1", "-o", tmp_path / "g"
    )
    kept = goal["evaluation"]
    assert kept["reference_metrics"]["places"] - kept["metrics"]["places"] <= 0.1


def test_a_regression_is_judged_by_a_metric_of_one_s_own(tmp_path):
    (tmp_path / "any.py").write_text(ANY_INPUT)
    file = tmp_path / "any.py"
    network, data = f"{file}:regression", f"{file}:measured"
    judged = ("--metric", f"{file}:squared_error")
    settings = ("--budget", "6bits", "--samples", "16", "--iterations", "2")
    made = run_json(
        "quantize", network, "--data", data, "--eval-data", data, *judged, *settings,
        "-o", tmp_path / "out",
    )  # fmt: skip
    found = made["evaluation"]
    assert found["top1"] is None
    scope = runpy.run_path(str(file))
    given = list(scope["measured"]())
    with torch.no_grad():
        network_itself = scope["regression"]()
        errors = [scope["squared_error"](network_itself(x), y) for x, y in given]
    expected = float(sum(errors) / len(errors))
    floats = found["reference_metrics"]["squared_error"]
    assert floats == pytest.approx(expected, rel=1e-5)
    assert found["metrics"]["squared_error"] == pytest.approx(expected, rel=0.5)
    packed = tmp_path / "out" / "network.ompq.safetensors"
    again = run_json("evaluate", network, "--packed", packed, "--data", data, *judged)
    metrics = again["metrics"]
    assert metrics["squared_error"] == pytest.approx(found["metrics"]["squared_error"])
    silent = run(
        "quantize", network, "--data", data, "--eval-data", data, *settings, "-q",
        "-o", tmp_path / "silent",
    )  # fmt: skip
    assert "squared error" in silent.stdout
    alone = run("evaluate", network, "--data", data)
    assert "give one class index per input, or a metric of your own" in alone.stderr


def test_shapes_can_be_given_and_are_not_guessed_in_errors(tmp_path):
    (tmp_path / "any.py").write_text(ANY_INPUT)
    network = f"{tmp_path / 'any.py'}:signal"
    found = run_json("budget", network, "--input-shape", "1,40")
    assert len(found["rows"]) > 2
    wrong = run("plan", network, "--data", "random", "--budget", "4bits")
    assert "Give another input shape" in wrong.stderr
    other = run(
        "plan",
        network,
        "--data",
        f"{tmp_path / 'any.py'}:pictures",
        "--budget",
        "4bits",
    )
    assert "does not take an input of shape (3, 8, 8)" in other.stderr
    text = run("budget", network, "--input-shape", "wide")
    assert "--input-shape wide is not a shape; write for example" in text.stderr
    metric = run("evaluate", network, "--data", "random", "--metric", "top1")
    assert "--metric top1: write perplexity or FILE.py:FUNCTION" in metric.stderr


def test_a_run_can_be_repeated_from_its_file(net, finished, tmp_path):
    config = finished[0] / "config.toml"
    given = tomllib.loads(config.read_text())
    assert given["command"] == "quantize" and given["network"] == net[0]
    assert (given["budget"], given["limit"]) == ("70%", 64)
    done = run("run", config, "-o", tmp_path / "again", "--quiet")
    assert done.exit_code == 0, done.output
    again = without_times(tmp_path / "again" / "result.json")
    assert again == without_times(finished[0] / "result.json")
    assert given["iterations"] == 3  # which the option below makes void
    words = ("--effort", "fast", "-o", tmp_path / "rounded", "--quiet")
    done = run("run", config, *words)
    assert done.exit_code == 0, done.output
    assert "iterations" not in (tmp_path / "rounded" / "config.toml").read_text()


def test_a_network_is_quantized_without_any_data(tmp_path, monkeypatch):
    def quickly(*args, **more):
        return distilled_samples(*args, **more, steps=20)

    monkeypatch.setattr("ompq.datasets.named_data.distilled_samples", quickly)
    name, out = network_file(tmp_path, TRAINED_NETWORK), tmp_path / "out"
    words = ("quantize", name, "--data", "distilled", *FAST, "--budget", "70%")
    data = run_json(*words, "-o", out)
    assert data["data"] == "distilled" and data["samples"] == 16
    assert data["evaluation"] is None

    model = load_model(name, None)
    samples = load_data("distilled", model).samples(16)
    plan = ompq.plan(model.module, samples, "70%")
    assert Plan.load(out / "plan.json").hash == plan.hash
    noise = torch.randn(samples.shape, generator=torch.Generator().manual_seed(1))
    assert mismatch(model.module, samples) < 0.7 * mismatch(model.module, noise)
    network = load(out / "network.ompq.safetensors", model.module)
    with torch.no_grad():
        expected, found = (net(samples) for net in (model.module, network))
    assert torch.nn.functional.cosine_similarity(expected, found).min() > 0.9


def mismatch(network, images):
    """Return how far a norm's inputs are from the statistics that it remembers."""
    seen = []
    norm = network.block.norm1
    hook = norm.register_forward_hook(lambda _m, args, _o: seen.append(args[0]))
    with hook, torch.no_grad():
        network.eval()(images)
    mean, variance = seen[0].mean((0, 2, 3)), seen[0].var((0, 2, 3))
    off = (mean - norm.running_mean).square() + (variance - norm.running_var).square()
    return float(off.sum())


def test_a_dry_run_says_how_long_and_leaves_nothing(net, tmp_path):
    words = ("quantize", *net, *FAST, "--budget", "70%", "-o", tmp_path / "out")
    shown = run(*words, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert "takes about" in shown.stdout
    assert "reconstructing" in shown.stdout
    assert not (tmp_path / "out").exists()
    data = json.loads(run(*words, "--dry-run", "--json").stdout)
    assert data["seconds"] == pytest.approx(sum(s["seconds"] for s in data["stages"]))
    assert data["peak_bytes"] == max(s["peak_bytes"] for s in data["stages"])


def test_a_run_says_before_it_starts_how_long_it_will_take(net, tmp_path):
    words = ("quantize", *net, *FAST, "--budget", "70%", "-o", tmp_path / "out")
    shown = run(*words)
    assert "takes about" in shown.stderr
    assert "takes about" not in run(*words, "--overwrite", "--quiet").stderr


def test_a_run_that_does_not_fit_stops_before_it_starts(net, tmp_path, monkeypatch):
    monkeypatch.setattr("ompq.working_memory.free_bytes", lambda: 1000)
    words = ("quantize", *net, *FAST, "--budget", "70%", "-o", tmp_path / "out")
    shown = run(*words)
    assert shown.exit_code == 2
    assert "this run needs about" in shown.stderr
    assert "but 1000 B are free" in shown.stderr
    assert not (tmp_path / "out").exists()


def test_a_search_cannot_be_forecast(net, tmp_path):
    words = ("quantize", *net, "--min-agreement", "99%", "-o", tmp_path / "out")
    shown = run(*words, "--dry-run")
    assert shown.exit_code == 2
    assert "--dry-run cannot be combined with a goal" in shown.stderr
