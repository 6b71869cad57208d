"""ompq audit on the command line."""

import json
from pathlib import Path

import pytest

import ompq
from cli_tools import network_file, run
from ompq import measurement
from ompq.datasets.named_data import load_data
from ompq.models.named_models import load_model
from ompq.network.units import Choice
from ompq.plans import Plan
from ompq.scores.catalogue import SCORES

NAMES = ["stem", "block.conv1", "block.conv2", "block.shortcut", "fc"]


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


def audited(net, *words, **settings):
    few = ("--held-out", "8", "--allocations", "3", "--scores", "orm,weight_noise")
    return run("audit", *net, *few, "--budget", "4bits", *words, **settings)


def test_an_audit_ranks_the_scores_and_leaves_its_files(net, tmp_path):
    result = audited(net, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "audit.json",
        "report.html",
    ]
    ranked = [one["name"] for one in data["scores"]]
    assert set(ranked) == {"orm", "weight_noise"}
    shown = [line.split("  ")[0] for line in result.stdout.splitlines()[2:5]]
    assert [name for name in shown if not name.startswith("uniform ")] == ranked
    damage = {one["name"]: one["divergence"] for one in data["measured"]}
    assert shown == sorted(shown, key=damage.get)
    assert "by random scores" in result.stdout


def test_an_audit_is_continued_only_on_demand(net, tmp_path):
    nothing = audited(net, "--resume", "-o", tmp_path / "out")
    assert nothing.exit_code == 2
    assert (
        f"{tmp_path / 'out'} has no stopped audit to resume; omit --resume"
        in nothing.stderr
    )
    nowhere = audited(net, "--resume")
    assert "--resume needs the folder of the stopped audit: -o DIR" in nowhere.stderr
    (tmp_path / "unfinished").mkdir()
    left = audited(net, "-o", tmp_path)
    assert left.exit_code == 2
    assert "is left from a stopped audit; add --resume" in left.stderr
    assert f"or remove {tmp_path / 'unfinished'} to start over" in left.stderr


def test_an_audit_s_limit_needs_labelled_images(net):
    result = audited(net, "--limit", "3")
    assert result.exit_code == 2
    assert "--limit has no effect without --eval-data; give both" in result.stderr


def test_an_audit_with_other_settings_of_orm_says_so(net):
    data = json.loads(audited(net, "--granularity", "net", "--json").stdout)
    names = {one["name"] for one in data["scores"]}
    assert names == {"orm(granularity='net')", "weight_noise"}
    whole = next(one for one in data["measured"] if one["name"].startswith("orm("))
    assert len({tuple(bits) for bits in whole["bits"]}) == 1


def test_an_audit_takes_no_single_score(net):
    result = audited(net, "--score", "orm")
    assert result.exit_code == 2
    assert "no such option: --score" in result.stderr
    assert "--scores" in result.stderr


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


@pytest.mark.usefixtures("measured")
def test_a_stopped_audit_continues_where_it_was(net, tmp_path, computed):
    out = tmp_path / "out"
    scores = ("--scores", "weight_noise,orm,blend")
    assert audited(net, *scores, "-o", out).exit_code == 130
    assert (out / "unfinished").is_dir()
    scored = computed.copy()
    assert set(scored) >= {"weight_noise", "orm", "blend"}
    refused = audited(net, *scores, "-o", out)
    assert f"{out / 'unfinished'} is left from a stopped audit" in refused.stderr
    del computed[:]
    resumed = audited(net, *scores, "-o", out, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert computed == ["sensitivity"]  # for the plan that the report shows
    assert sorted(path.name for path in out.iterdir()) == ["audit.json", "report.html"]
    data = json.loads((out / "audit.json").read_text())
    plain = json.loads(audited(net, *scores, "--json").stdout)
    assert data["measured"] == plain["measured"]


WIDE = Choice(8, 8)._asdict()


METRIC = """
def spread(output, targets):
    return output.std()
"""


@pytest.fixture(scope="module")
def labelled_audit(net, plan_file, tmp_path_factory):
    """An audit of labelled images and known bits: what it printed, and its folder."""
    folder = tmp_path_factory.mktemp("labelled")
    (folder / "metric.py").write_text(METRIC)
    bits = dict.fromkeys(NAMES, WIDE)
    (folder / "known.json").write_text(json.dumps(bits))
    known = ("--plan", folder / "known.json", "--plan", plan_file)
    metric = ("--metric", f"{folder / 'metric.py'}:spread")
    labelled = ("--eval-data", "random", "--limit", "20", *metric)
    result = audited(net, *known, *labelled, "-o", folder / "out")
    assert result.exit_code == 0, result.output
    return folder, result


def test_an_audit_measures_labelled_images_and_known_bits(
    net, plan_file, labelled_audit
):
    folder, _ = labelled_audit
    data = json.loads((folder / "out" / "audit.json").read_text())
    rows = {one["name"]: one for one in data["measured"]}
    wide = rows[str(folder / "known.json")]
    assert wide["bits"] == [[8, 8]] * len(NAMES) and not wide["fits"]
    planned = Plan.load(plan_file).allocation
    assert rows[str(plan_file)]["bits"] == [planned[n].to_json() for n in NAMES]
    assert set(data["orthogonality"]) >= {"divergence", "spread"}

    model = load_model(net[0])
    # As many at a time as the command takes on a CPU, since the metric is of batches.
    data = load_data("random", model, split="test")
    batches = data.batches(batch_size=16, limit=20)
    inputs = load_data("random", model, split="train").samples(16)
    bits = ompq.Allocation(dict.fromkeys(NAMES, Choice(8, 8)))
    quantized = ompq.quantize(model.module, bits, inputs[:8])
    own = ompq.evaluate(quantized, batches, metrics={"spread": lambda o, _: o.std()})
    assert wide["top1"] == own.top1
    assert wide["metrics"] == pytest.approx(own.metrics)


def test_an_audit_shows_what_it_measured(labelled_audit):
    folder, result = labelled_audit
    data = json.loads((folder / "out" / "audit.json").read_text())
    lines = result.stdout.splitlines()
    titles = ["bits", "by", "Spearman", "Kendall", "divergence", "regret", "top-1"]
    assert lines[0].split() == [*titles, "spread", "size", "seconds"]
    name = str(folder / "known.json")
    wide = next(one for one in data["measured"] if one["name"] == name)
    line = next(line for line in lines if name in line)
    assert line.endswith("over the budget")
    assert f" {100 * wide['top1']:.2f} % " in line
    least = min(one["divergence"] for one in data["measured"] if one["fits"])
    assert f" {wide['divergence'] / least - 1:.1%} " in line
    kendall = data["orthogonality"]["spread"]["kendall"]
    told = "Kendall {:.2f} ({:.2f} to {:.2f})".format(*kendall)
    (line,) = (line for line in lines if line.startswith("spread by orthogonality"))
    assert "mean ORM of the quantized network: Spearman " in line
    assert line.endswith(told)


def test_the_table_of_an_audit_fits_a_terminal(net):
    labelled = ("--eval-data", "random", "--limit", "20")
    shown = audited(net, *labelled, env={"COLUMNS": "80"})
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "top-1" in shown.stdout and "Kendall" not in shown.stdout.splitlines()[0]


def test_a_metric_of_an_audit_needs_labelled_images(net):
    result = audited(net, "--metric", "perplexity")
    assert result.exit_code == 2
    assert "--metric has no effect without --eval-data; give both" in result.stderr


def test_bits_that_cannot_be_audited_are_told(net, tmp_path):
    path = tmp_path / "bits.json"
    path.write_text(json.dumps(dict.fromkeys(NAMES[1:], WIDE)))
    result = audited(net, "--plan", path)
    assert result.exit_code == 2
    assert f"{path}: no bits for 1 of 5 units: stem" in result.stderr
    path.write_text("{")
    assert f"{path} cannot be read as a plan" in audited(net, "--plan", path).stderr


def test_scores_that_do_not_exist_cannot_be_audited(net):
    result = audited(net, "--scores", "orm,orn")
    assert result.exit_code == 2
    assert "there is no score 'orn' (did you mean orm?)" in result.stderr
