"""plan, replan and budget, run as the program runs them."""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import ompq
from cli_tools import network_file, run, run_json
from ompq import measurement
from ompq.cli import option_groups
from ompq.cli.views import totals
from ompq.configs import PLAN_PROTOCOLS, PlanConfig
from ompq.costs import overhead_bytes
from ompq.datasets.named_data import load_data
from ompq.models.named_models import load_model
from ompq.planning import plan as make_plan
from ompq.plans import Plan
from ompq.progress import Stages
from ompq.scores.catalogue import SCORES

NAMES = ["stem", "block.conv1", "block.conv2", "block.shortcut", "fc"]


MACS = {
    "stem": 4 * 3 * 9 * 64,
    "block.conv1": 8 * 4 * 9 * 16,
    "block.conv2": 8 * 8 * 9 * 16,
    "block.shortcut": 8 * 4 * 16,
    "fc": 80,
}


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> tuple[str, ...]:
    name = network_file(tmp_path_factory.mktemp("net"))
    return (name, "--data", "random", "--samples", "8")


@pytest.fixture(scope="module")
def plan_file(net, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    result = run("plan", *net, "--budget", "60%", "-o", path)
    assert result.exit_code == 0, result.output
    return path


def test_the_plan_saved_is_the_librarys(net, plan_file):
    model = load_model(net[0])
    samples = load_data("random", model, split="train").samples(8)
    plan = make_plan(model.module, samples, "60%", PlanConfig(score="sensitivity"))
    assert Plan.load(plan_file).hash == plan.hash


def test_the_table_has_one_line_a_layer_with_its_bits(net, plan_file):
    plan = Plan.load(plan_file)
    result = run("plan", *net, "--budget", "60%")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:5] == ["layer", "kind", "shape", "params", "MACs"]
    assert [words[0] for words in lines[2:7]] == NAMES
    for unit, words in zip(plan.graph.units, lines[2:7], strict=True):
        bits = plan.allocation[unit.name].weight
        assert words[1:3] == [unit.kind, "×".join(map(str, unit.weight_shape))]
        assert words[7] == str(bits)
        assert "▬" * bits in words
    assert lines[5][-3:] == ["tied", "to", "block.conv2"]


def test_a_file_larger_than_the_float_weights_is_not_called_smaller():
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(8, 4, generator=generator)
    plan = ompq.plan(torch.nn.Sequential(torch.nn.Linear(4, 2)), samples, "8bits")
    # 4 × 2 weights and 2 biases of 4 bytes
    assert dict(totals(plan))["packed"].endswith(" KiB, no smaller than float (40 B)")


def test_totals_are_those_of_the_plan(net, plan_file):
    plan = Plan.load(plan_file)
    text = run("plan", *net, "--budget", "60%").stdout
    used = plan.totals["bytes"] / plan.problem.costs["bytes"].reference
    assert f"{100 * used:.5g} of 60 % of float" in text
    weights = sum(u.weights * plan.allocation[u.name].weight for u in plan.graph.units)
    average = weights / sum(u.weights for u in plan.graph.units)
    assert f"{average:.3f} per weight on average" in text
    assert plan.hash in text
    assert "scoring the choices" in text


def test_use_is_told_in_the_budgets_own_unit(plan_file):
    plan = Plan.load(plan_file).with_budget("3KiB, 0.01MB, 1MBOPs, 8bits")
    used, operations = plan.totals["bytes"], plan.totals["bit_ops"]
    words = ("replan", plan_file, "--budget", "3KiB,0.01MB,1MBOPs,8bits")
    first = run(*words).stdout.partition("size ")[0]
    assert f"{used / 1e6:.5g} of 0.01 MB ({used / 1e4:.1%})" in first
    assert f"of 3.00 KiB ({used / 3072:.1%})" in first
    assert f"of 1.00 MBOPs ({operations / 1e6:.1%})" in first
    assert f"{plan.totals['average_bits']:.5g} of 8 bits" in first


def test_paper_accounting_is_named(net):
    words = ("plan", *net, "--budget", "4bits", "--accounting", "paper")
    result = run(*words, "--device", "cpu")
    assert "counted as in the paper, without scales" in result.stdout


def test_json_holds_what_a_program_needs(net, plan_file):
    data = run_json("plan", *net, "--budget", "60%")
    plan = Plan.load(plan_file)
    assert data["hash"] == plan.hash
    assert data["samples"] == 8
    assert data["allocation"] == plan.allocation.to_json()
    assert {unit["name"]: unit["macs"] for unit in data["units"]} == MACS
    units = sum(unit["bytes"] for unit in data["units"])
    assert units + overhead_bytes(plan.graph, plan.choices) == data["totals"]["bytes"]
    assert data["totals"]["bytes"] <= data["limits"]["bytes"]
    assert set(data["seconds"]) == {
        "loading the network",
        "reading samples",
        "observing the network",
        "scoring the choices",
        "solving for the budget",
    }


def test_the_same_command_gives_the_same_bytes(net, plan_file, tmp_path):
    again = tmp_path / "again.json"
    run("plan", *net, "--budget", "60%", "-o", again)
    assert again.read_bytes() == plan_file.read_bytes()


def test_quiet_is_one_line(net, plan_file):
    result = run("plan", *net, "--budget", "60%", "--quiet")
    assert result.stdout.count("\n") == 1
    assert Plan.load(plan_file).hash in result.stdout


def test_at_80_columns_columns_go_before_names_are_cut():
    words = ("plan", "cifar:resnet20", "--weights", "none", "--data", "random")
    words = (*words, "--samples", "2", "--budget", "45%")
    narrow, wide = run(*words, env={"COLUMNS": "80"}), run(*words)
    assert max(map(len, narrow.stdout.splitlines())) <= 80
    assert "64×64×3×3" in wide.stdout
    assert "64×64×3×3" not in narrow.stdout
    for result in (narrow, wide):
        assert "layer3.2.conv2" in result.stdout
        assert "…" not in result.stdout
        assert (
            "none and --data random: only the sizes are valid, not these bits"
            in result.stdout
        )
        assert result.stderr.count("warning: ") == 2


def test_what_stays_float_is_told_once_a_kind(net, tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    preprocessing = {'input_shape': (1, 4, 4)}\n"
        "def make():\n"
        "    layers = [nn.Flatten()]\n"
        "    for _ in range(4):\n"
        "        layers += [nn.Linear(16, 16), nn.LayerNorm(16)]\n"
        "    return Net(*layers)\n"
    )
    words = ("plan", f"{tmp_path / 'net.py'}:make", *net[1:], "--budget", "99%")
    result = run(*words)
    assert "4 LayerNorm stay float: 128 parameters (2, 4 and 2 more)" in result.stdout
    strict = run(*words, "--strict")
    assert strict.exit_code == 2
    assert "error: strict: not everything can be planned" in strict.stderr


def test_pins_ties_and_choices_reach_the_plan(net):
    data = run_json(
        *("plan", *net, "--budget", "60%", "--choices", "4,2"),
        *("--pin", "@first=W8A8", "--pin", "fc=float", "--pin", "block.conv1=A6"),
        *("--tie", "re:conv", "--activation-bits", "4,8"),
    )
    units = {unit["name"]: unit for unit in data["units"]}
    assert units["stem"]["weight_bits"] == units["stem"]["activation_bits"] == 8
    assert units["fc"]["weight_bits"] == 32
    assert units["block.conv1"]["activation_bits"] == 6
    tied = [units[name] for name in ("block.conv2", "block.shortcut")]
    assert units["block.conv1"]["weight_bits"] == tied[0]["weight_bits"]
    assert len({(u["weight_bits"], u["activation_bits"]) for u in tied}) == 1
    assert [unit["pinned"] for unit in data["units"]] == [True, *[False] * 3, True]
    assert {unit["weight_bits"] for unit in tied} <= {2, 4}


def test_groups_reach_the_plan_and_the_network(tmp_path):
    code = (
        "from torch import nn\ndef make():\n    layers = nn.Linear(80, 6), nn.ReLU()\n"
    )
    (tmp_path / "net.py").write_text(code + "    return nn.Sequential(*layers)\n")
    words = (f"{tmp_path / 'net.py'}:make", "--data", "random", "--input-shape", "80")
    file, out = tmp_path / "plan.json", tmp_path / "out"
    more = ("--budget", "4bits", "--group-size", "64", "-o", file)
    assert run_json("plan", *words, *more)["group_size"] == 64
    scales = Plan.load(file).bytes_by_item["scales"]
    assert scales == 4 + 6 * 2  # a number, and a byte for each group
    result = run("quantize", *words, "--plan", file, "-o", out, "--effort", "fast")
    assert result.exit_code == 0, result.output
    account = run_json("inspect", out / "network.ompq.safetensors")
    assert account["items"]["scales"] == scales


def test_coded_rates_reach_the_plan_and_its_table(net, tmp_path):
    path = tmp_path / "plan.json"
    words = (*net, "--budget", "7bits", "--score", "weight_noise", "--coded")
    more = ("--rates", "2,4", "--choices", "8", "--pin", "block.conv1=C2A8")
    data = run_json("plan", *words, *more, "-o", path)
    rows = {unit["name"]: unit for unit in data["units"]}
    assert rows["block.conv1"]["weight_bits"] == 2 and rows["block.conv1"]["coded"]
    assert rows["stem"]["weight_bits"] == 8 and not rows["stem"]["coded"]
    assert [str(c) for c in Plan.load(path).choices] == ["C2A8", "C4A8", "W8A8"]
    assert "2 coded" in run("plan", *words, *more).stdout
    assert "C2A8" in run("explain", path, "block.conv1").stdout


def test_no_tie_frees_the_shortcut(net):
    together = run_json("plan", *net, "--budget", "60%")
    apart = run_json("plan", *net, "--budget", "60%", "--no-tie")
    assert len({unit["group"] for unit in together["units"]}) == 4
    assert len({unit["group"] for unit in apart["units"]}) == 5


def test_a_protocol_brings_its_settings_and_yields_to_options(net):
    words = ("plan", *net, "--budget", "3bits", "--protocol", "paper-ptq")
    paper = run_json(*words)
    config = PLAN_PROTOCOLS["paper-ptq"]
    assert paper["accounting"] == config.accounting
    assert (paper["method"], paper["score"]) == (config.method, "orm")
    assert {unit["weight_bits"] for unit in paper["units"]} <= set(config.choices)
    own = run_json(*words, "--method", "exact", "--score", "weight_noise")
    assert (own["method"], own["score"]) == ("exact", "weight_noise")
    assert own["accounting"] == config.accounting


def test_a_score_of_the_users_own(net, tmp_path):
    (tmp_path / "score.py").write_text(
        "import numpy as np\n"
        "def score(given):\n"
        "    bits = [-choice.weight for choice in given.choices]\n"
        "    return np.array([bits for _ in given.graph.units])\n"
        "def make():\n    return score\n"
        "def wrong():\n    return 3\n"
    )
    words = ("plan", *net, "--budget", "60%", "--score")
    assert run(*words, f"{tmp_path / 'score.py'}:make").exit_code == 0
    wrong = run(*words, f"{tmp_path / 'score.py'}:wrong")
    assert wrong.exit_code == 2
    assert "wrong returned int; it must return a score" in wrong.stderr


@pytest.mark.parametrize(
    ("score", "steps"), [("output_divergence", 5), ("orm_distortion", 4)]
)
def test_scores_show_their_progress_but_not_in_the_plan(net, monkeypatch, score, steps):
    """Divergence goes by units; ORM by functions, of which two units share one."""
    seen: list[tuple[int, int | None, str]] = []

    @contextmanager
    def watched(_self: Stages, _name: str):
        yield lambda *args: seen.append(args)

    monkeypatch.setattr(Stages, "named_by_messages", watched)
    data = run_json("plan", *net, "--budget", "60%", "--score", score)
    scoring = [step[:2] for step in seen if step[2] == "scoring the choices"]
    assert scoring[1:] == [(n + 1, steps) for n in range(steps)]
    assert data["score"] == score


def test_latency_is_a_budget(net, tmp_path):
    row = {f"W{bits}A8": bits / 64 for bits in (2, 4, 8)}
    (tmp_path / "ms.json").write_text(json.dumps(dict.fromkeys(NAMES, row)))
    words = ("plan", *net, "--choices", "2,4,8", "--latency", tmp_path / "ms.json")
    data = run_json(*words, "--budget", "0.26ms")
    spent = sum(unit["weight_bits"] for unit in data["units"]) / 64
    assert data["totals"]["milliseconds"] == spent <= 0.26
    assert "latency  0.25 ms" in run(*words, "--budget", "0.26ms").stdout
    table = run("budget", net[0], *words[6:]).stdout
    assert "all W2A8" in table
    assert table.splitlines()[4].endswith(" 0.1563ms")  # 5 × 2/64, rounded up


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "4 parsecs"], "4 parsecs"),
        (["--budget", "0.1%"], "cannot be met"),
        (["--score", "orn"], "'orn' is not one of orm"),
        (["--choices", "2,x"], "write for example --choices 2,4,8"),
        (["--choices", "1,2"], "must be weight bits from 2 to 8"),
        (["--choices", "W4A4,8"], "write for example W4A4,W8A8"),
        (["--beta", "2"], "--beta: settings of ORM are for scores that measure it"),
        (["--pin", "fc"], "--pin fc: write PATTERN=BITS"),
        (["--rates", "2,x"], "--rates 2,x is not a list of rates; write"),
        (["--group-size", "48"], "must be one of 32, 64, 128, or None"),
        (["--rates", "2,3"], "--rates is for coded weights; add --coded"),
        (["--pin", "nothing=8"], "'nothing' matches no unit; the"),
        (["--pin", "stme=8"], "'stme' matches no unit (did you mean stem?); the"),
        (["--tie", "blok.*"], "matches no unit (did you mean block.*"),
        (["--tie", "re:["], "is not a regular expression"),
        (["--method", "exakt"], "(did you mean exact?)"),
        (["--latency", "no.json"], "no.json is not a latency table"),
        (["--samples", "1"], "--samples"),
        (["--samples", "5000"], "asked for 5000 samples"),
        (["--weights", "no.pth"], "no weights file no.pth"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_wrong_options_are_one_line_that_helps(net, words, message):
    result = run("plan", *net, "--budget", "60%", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_unknown_network_is_one_line_with_suggestions(net):
    result = run("plan", "torchvision:resnet81", *net[1:], "--budget", "20%")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: torchvision has no classification network")
    assert "did you mean resnet18" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "20%", "--choices", "9"), "must be weight bits from 2 to 8"),
        (("--budget", "much"), "much"),
    ],
)
def test_wrong_settings_are_told_before_the_network_is_loaded(words, message):
    result = run("plan", "no:network", "--data", "random", *words)
    assert message in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(net):
    result = run("plan", *net, "--budget", "60%", "--device", "cuda")
    assert result.exit_code == 2
    assert "--device cuda: PyTorch finds no GPU" in result.stderr


def test_an_error_writes_no_file(net, tmp_path):
    path = tmp_path / "deep" / "plan.json"
    run("plan", *net, "--budget", "0.1%", "-o", path)
    assert not path.parent.exists()


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    words = ("plan", "no:network", "--data", "random", "--budget", "60%", "-o")
    below = run(*words, tmp_path / "file" / "plan.json")
    assert below.exit_code == 2
    assert f"{tmp_path / 'file'} is not a writable folder" in below.stderr
    folder = run(*words, tmp_path)
    assert folder.exit_code == 2
    assert f"--output {tmp_path} is a folder; give a file in it" in folder.stderr


def test_replan_solves_for_another_budget_without_the_network(plan_file, tmp_path):
    path = tmp_path / "smaller.json"
    result = run("replan", plan_file, "--budget", "3bits", "-o", path)
    assert result.exit_code == 0
    expected = Plan.load(plan_file).with_budget("3bits")
    assert Plan.load(path).hash == expected.hash
    assert expected.hash in result.stdout
    assert f"saved to {path}" in result.stdout


def test_replan_says_what_is_wrong(plan_file, tmp_path):
    missing = run("replan", tmp_path / "no.json", "--budget", "3bits")
    assert "no.json is not a plan" in missing.stderr
    infeasible = run("replan", plan_file, "--budget", "1bits")
    assert "cannot be met" in infeasible.stderr
    assert missing.exit_code == infeasible.exit_code == 2


def test_budget_tells_the_range_and_the_uniform_widths(net):
    data = run_json("budget", net[0], "--choices", "2,4,8")
    rows = {row["mark"]: row for row in data["rows"]}
    assert list(rows) == ["smallest", "all W2A8", "all W4A8", "all W8A8", "largest"]
    assert rows["all W4A8"]["average_bits"] == 4
    assert rows["all W4A8"]["bit_ops"] == sum(MACS.values()) * 4 * 8
    assert rows["smallest"]["bytes"] == rows["all W2A8"]["bytes"]
    assert rows["largest"]["bytes"] == rows["all W8A8"]["bytes"]


def test_budget_has_the_medium_limits_of_hawq(net):
    words = ("budget", net[0], "--protocol", "hawq-v3")
    rows = {row["mark"]: row for row in run_json(*words)["rows"]}
    # The first and the last layer have 8 bits whatever the others have.
    ends = MACS["stem"] + MACS["fc"]
    least = 16 * (sum(MACS.values()) - ends) + 64 * ends
    assert rows["halfway"]["bit_ops"] == (least + 64 * sum(MACS.values())) / 2
    plan = run_json("plan", *net, "--protocol", "hawq-v3", "--budget", "32bits")
    assert rows["halfway"]["bytes"] < plan["totals"]["bytes"]
    line = next(x for x in run(*words).stdout.splitlines() if "halfway" in x)
    for entry in line.split()[1:5]:
        words = ("plan", *net, "--protocol", "hawq-v3", "--budget", entry)
        assert run(*words).exit_code == 0, entry
    three = run_json("budget", net[0], "--choices", "2,4,8")["rows"]
    assert "halfway" not in {row["mark"] for row in three}


def test_budget_needs_no_data_and_warns_of_nothing():
    result = run("budget", "cifar:resnet20")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.startswith("cifar:resnet20: 20 layers, 1.03 MiB as float; ")


def test_budget_asks_for_data_that_suits_the_network(tmp_path):
    (tmp_path / "two.py").write_text(
        "from torch import nn\n"
        "class Two(nn.Linear):\n"
        "    def forward(self, x, y):\n"
        "        return super().forward(x + y)\n"
        "def make():\n"
        "    return Two(8, 4)\n"
    )
    found = run("budget", f"{tmp_path / 'two.py'}:make", "--input-shape", "8")
    assert found.exit_code == 2
    assert "make does not take an input of shape (8,): TypeError" in found.stderr
    assert "Give another input shape" in found.stderr


def test_budget_shows_ends_that_are_no_uniform_width(net):
    words = ("budget", net[0], "--choices", "2,4", "--pin", "stem=8")
    lines = [line.split() for line in run(*words).stdout.splitlines()]
    marks = [words[:2] for words in lines if words[:1] == ["all"]]
    assert marks == [["all", "W2A8"], ["all", "W4A8"], ["all", "W8A8"]]
    mixed = run(*words, "--tie", "re:conv").stdout
    assert "can be met" in mixed


def test_every_entry_of_the_budget_table_can_be_met(net, plan_file):
    text = run("budget", *net[:3]).stdout
    smallest = next(line for line in text.splitlines() if line.startswith("all W2A8"))
    *limits, memory = smallest.split()[2:]
    assert len(limits) == 4
    for entry in limits:
        data = run_json("replan", plan_file, "--budget", entry)
        assert {unit["weight_bits"] for unit in data["units"]} == {2}, entry
    assert memory.startswith("activations:")
    planned = run("plan", *net, "--budget", f"60%,{memory}")
    assert planned.exit_code == 0, planned.output


def test_budget_shows_what_onnx_files_take(net, tmp_path):
    pytest.importorskip("onnxruntime")
    data = run_json("budget", net[0], "--choices", "2,4", "--onnx")
    rows = {row["mark"]: row["onnx_bytes"] for row in data["rows"]}
    model = load_model(net[0], "none")
    samples = torch.randn(4, *model.input_shape)
    for bits in (2, 4):
        made = ompq.quantize(model.module, {"*": (bits, 8)}, samples)
        path = tmp_path / f"{bits}.onnx"
        ompq.export(ompq.finalize(made, samples), path, samples)
        # What cannot be known before the weights are rounded is counted in full.
        assert 0.9 * rows[f"all W{bits}A8"] < path.stat().st_size
        assert path.stat().st_size <= rows[f"all W{bits}A8"]
    table = run("budget", net[0], "--choices", "2,4", "--onnx").stdout
    entry = next(word for word in table.split() if word.startswith("onnx:"))
    assert float(entry[5:-3]) * 1024 >= rows["all W2A8"]
    assert "ONNX" not in run("budget", net[0]).stdout


def test_budget_quietly_is_one_line(net):
    result = run("budget", net[0], "--quiet")
    assert result.stdout.count("\n") == 1
    assert "can be met" in result.stdout


def test_paper_accounting_counts_as_the_paper(net):
    row = run_json("budget", net[0], "--choices", "8", "--accounting", "paper")["rows"]
    weights = np.array([4 * 27 + 4, 8 * 36 + 16, 8 * 72 + 16, 32 + 8, 80 + 10])
    assert row[0]["bytes"] == weights.sum()


@pytest.mark.parametrize(
    "score", ["sensitivity", "weight_noise", "output_divergence", "orm", "blend"]
)
def test_inputs_may_stay_float_where_that_helps(net, score):
    """32 beside 8 is a choice that damages nothing and costs bit operations."""
    words = ("plan", *net, "--choices", "4", "--activation-bits", "8,32")
    free = run_json(*words, "--score", score, "--budget", "8bits")
    assert {unit["activation_bits"] for unit in free["units"]} <= {8, 32}
    if score != "orm":  # which counts weight bits alone
        assert {unit["activation_bits"] for unit in free["units"]} == {32}
    operations = sum(MACS.values()) * 4
    tight = run_json(*words, "--budget", f"{operations * 8 / 1e6 + 0.001:.4f}MBOPs")
    assert {unit["activation_bits"] for unit in tight["units"]} == {8}


HOSTILE = """
from torch import nn

class Net(nn.Module):
    preprocessing = {"input_shape": (3, 8, 8)}

    def __init__(self):
        super().__init__()
        self.add_module("[/x]", nn.Conv2d(3, 4, 3))
        self.add_module("[red]", nn.Linear(4, 10))

    def forward(self, x):
        x = getattr(self, "[/x]")(x).relu().mean((2, 3))
        return getattr(self, "[red]")(x)

def make():
    return Net()
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A plan whose layers have names that markup would obey."""
    folder = tmp_path_factory.mktemp("hostile[x]")
    (folder / "net.py").write_text(HOSTILE)
    path = folder / "plan.json"
    words = (f"{folder / 'net.py'}:make", "--data", "random", "--samples", "8")
    result = run("plan", *words, "--budget", "4bits", "-o", path)
    assert result.exit_code == 0, result.output
    return path, result


NAMES_AS_TEXT = ("[/x]", "[red]")


def test_names_of_layers_are_printed_as_text(hostile):
    path, result = hostile
    rows = [line.split()[:1] for line in result.stdout.splitlines()]
    assert all([name] in rows for name in NAMES_AS_TEXT)
    assert f"saved to {path}" in result.stdout
    for words in (
        ("explain", path, "*"),
        ("explain", path, "*", "--quiet"),
        ("compare", path, path),
        ("pareto", path, "--points", "3"),
        ("explain", path, "[a]"),
        ("replan", path.parent / "no\x1b[2J.json", "--budget", "3bits"),
    ):
        shown = run(*words)
        assert shown.exit_code in (0, 2), shown.output
        assert "unexpected" not in shown.output
        assert "\x1b" not in shown.output
    assert all(name in run("explain", path, "*").stdout for name in NAMES_AS_TEXT)


def test_every_score_is_listed_with_what_it_needs():
    rows = {row["name"]: row for row in json.loads(run("scores", "--json").stdout)}
    assert list(rows) == list(SCORES)
    assert all(row["passes"] and row["summary"] for row in rows.values())
    shown = run("scores", env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, shown)) <= 80
    for line in shown[2:]:
        name, *rest = line.split()
        needed = [what for what in ("gradients", "labels") if rows[name][what]]
        assert rest[0].rstrip(",") == (needed[0] if needed else "-")
        assert ("labels (optional)" in line) == hasattr(SCORES[name], "batches")
        assert rest[-1] == f"{rows[name]['seconds']:.4g}"
    passes = ("one", "one for each unit and width")
    one, every = (
        [row["seconds"] for row in rows.values() if row["passes"] == text]
        for text in passes
    )
    assert max(one) < min(every)


@pytest.mark.parametrize("limit", ["3", "1h"])
def test_bits_can_be_refined_by_measuring(net, tmp_path, limit, monkeypatch):
    monkeypatch.setattr(option_groups, "_UNLIMITED", 4)
    path = tmp_path / "plan.json"
    words = ("plan", net[0], "--data", "random", "--budget", "4bits", "-o", path)
    result = run(*words, "--samples", "32", "--refine", limit)
    assert result.exit_code == 0, result.output
    refined = Plan.load(path)
    assert 1 <= len(refined.measured) <= 4
    first = refined.measured[0]
    chosen = next(m for m in refined.measured if m.allocation == refined.allocation)
    lower = first.divergence - chosen.divergence
    assert chosen is first or lower > 2 * chosen.error > 0
    assert f"{len(refined.measured)} allocations measured" in result.stdout
    assert refined.totals["average_bits"] <= 4
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


def test_refining_may_reconstruct_what_it_measures(net, tmp_path, monkeypatch):
    seen = []

    def refine(plan, _model, _samples, config, **_):
        seen.append(config)
        return plan

    monkeypatch.setattr("ompq.workflow.refine", refine)
    words = ("plan", net[0], "--data", "random", "--budget", "4bits", "--samples", "32")
    words = (*words, "-o", tmp_path / "plan.json", "--refine", "7")
    assert run(*words, "--refine-by", "reconstruct").exit_code == 0
    assert [(one.by, one.count) for one in seen] == [("reconstruct", 7)]


@pytest.mark.parametrize("limit", ["0", "-3", "soon", "3 days"])
def test_limits_of_a_refinement_that_cannot_be_read_are_told(net, limit):
    result = run("plan", *net, "--budget", "4bits", "--refine", limit)
    assert result.exit_code == 2
    assert f"--refine {limit}: give a number of allocations" in result.stderr


@pytest.fixture
def computed(monkeypatch):
    """The names of the scores that are computed."""
    calls = []
    for name, score in SCORES.items():
        whole = type(score).__call__

        def counted(self, given, name=name, whole=whole):
            calls.append(name)
            return whole(self, given)

        monkeypatch.setattr(type(score), "__call__", counted)
    return calls


@pytest.fixture
def measured(monkeypatch):
    """The calls that quantize a network to measure it; the third one is stopped."""
    whole, calls = measurement.quantize, []

    def counted(*args, **settings):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(*args, **settings)

    monkeypatch.setattr(measurement, "quantize", counted)
    return calls


def test_a_stopped_refinement_continues_where_it_was(net, tmp_path, measured):
    words = ("plan", *net[:3], "--samples", "32", "--budget", "4bits", "--refine", "4")
    stopped = run(*words, "-o", tmp_path / "plan.json")
    assert stopped.exit_code == 130
    assert "measurements are kept in " in stopped.stderr
    assert not (tmp_path / "plan.json").exists()
    assert run(*words, "-o", tmp_path / "plan.json").exit_code == 0
    assert run(*words, "-o", tmp_path / "other.json").exit_code == 0
    resumed, other = ((tmp_path / n).read_bytes() for n in ("plan.json", "other.json"))
    assert resumed == other
    each = len(Plan.load(tmp_path / "plan.json").measured)
    assert len(measured) == each + 1 + each  # none twice but the stopped one
    assert not (tmp_path / "plan.unfinished.json").exists()


def test_tables_of_scores_are_kept_unless_a_flag_says_no(net, tmp_path):
    words = ("plan", *net, "--budget", "4bits")
    folder = tmp_path / "tables"
    plans = []
    for cache in ((), ("--cache", folder), ("--cache", folder)):
        assert run(*words, *cache, "-o", tmp_path / "plan.json").exit_code == 0
        plans.append((tmp_path / "plan.json").read_bytes())
    assert plans[0] == plans[1] == plans[2]
    assert len(list(folder.iterdir())) == 1
    other = {"OMPQ_CACHE": str(tmp_path / "other")}
    assert run(*words, "--no-cache", env=other).exit_code == 0
    assert not (tmp_path / "other").exists()
    assert run(*words, env=other).exit_code == 0
    assert len(list((tmp_path / "other").iterdir())) == 1
    refused = run(*words, "--cache", tmp_path / "plan.json")
    assert refused.exit_code == 2
    assert "is a file; give a folder" in refused.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--budget", "4bits", "--samples", "32"),
        ("plan", "--budget", "4bits", "--refine", "3", "--samples", "32"),
        ("quantize", "--budget", "4bits", "--effort", "fast", "--refine", "3"),
        ("quantize", "--min-agreement", "1%", "--effort", "fast", "--samples", "8"),
        ("train", "--budget", "4bits", "--effort", "fast", "--epochs", "1"),
        (
            *("audit", "--budget", "4bits", "--held-out", "8", "--allocations", "3"),
            *("--samples", "16", "--scores", "orm,weight-noise"),
        ),
    ],
)
def test_every_command_that_scores_keeps_its_tables(net, tmp_path, computed, words):
    folder = tmp_path / "tables"
    by = "option" if "--refine" in words else "variable"
    env = {"OMPQ_CACHE": str(folder)} if by == "variable" else {}
    option = ("--cache", folder) if by == "option" else ()
    name, *more = words
    more += () if name in ("plan", "audit") else ("--overwrite",)
    if name in ("train", "quantize") and "--samples" not in more:
        more += ("--samples", "16")
    out = tmp_path / ("plan.json" if name == "plan" else "out")
    for _ in range(2):
        before = len(computed)
        result = run(name, *net[:3], *more, *option, "-o", out, env=env)
        assert result.exit_code == 0, result.output
        assert before == 0 or len(computed) == before
    assert computed and list(folder.iterdir())
    for config in tmp_path.glob("out/config.toml"):  # another run may have no cache
        assert "cache" not in config.read_text()


@pytest.mark.parametrize("name", ["plan", "quantize", "train", "audit"])
def test_a_cache_that_is_no_folder_is_told_before_the_work(tmp_path, name):
    (tmp_path / "file").write_text("")
    words = (name, "no:network", "--data", "random", "--budget", "60%")
    result = run(*words, "--cache", tmp_path / "file", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert f"--cache {tmp_path / 'file'} is a file; give a folder" in result.stderr
