"""The whole path, as the library offers it in one place."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import ompq
from nets import TinyMobileNet, scenes, seeded
from ompq import progress
from ompq.errors import PlanError
from ompq.integer.finalization import INTEGERS
from ompq.plans import read_bits, unit_rows
from ompq.progress import Stages
from ompq.report_sections import sections_from_json
from ompq.workflow import Workflow, whole_folder

MODEL, SAMPLES = seeded(TinyMobileNet()), scenes(32)
TARGETS = torch.zeros(len(SAMPLES), dtype=torch.long)
QUICK = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=2))


@pytest.fixture(scope="module")
def work():
    return Workflow(MODEL, SAMPLES)


@pytest.fixture(scope="module")
def outcome(work):
    plan = work.plan("4bits")
    made = work.reconstruct(work.quantize(plan), QUICK)
    return work.outcome(made, plan, [(SAMPLES, TARGETS)], {"network": "net"})


def test_each_step_is_the_library_s_verb(work, outcome):
    plan = ompq.plan(MODEL, SAMPLES, "4bits")
    assert outcome.plan.hash == plan.hash
    quantized = ompq.quantize(MODEL, plan, SAMPLES)
    learned = ompq.reconstruct(quantized, MODEL, SAMPLES, QUICK)
    final = ompq.finalize(learned, SAMPLES)
    assert torch.equal(outcome.network(SAMPLES), final(SAMPLES))
    found = ompq.evaluate(final, [(SAMPLES, TARGETS)], reference=MODEL)
    assert outcome.evaluation.divergence == found.divergence
    assert outcome.about["arithmetic"] == INTEGERS
    assert set(work.stages.seconds) >= {"scoring the choices", "reconstructing"}


def test_files_are_written_together_and_can_be_read_back(outcome, tmp_path):
    folder = tmp_path / "out"
    names = outcome.write(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert ompq.Plan.load(folder / "plan.json").hash == outcome.plan.hash
    loaded = ompq.load(folder / "network.ompq.safetensors", seeded(TinyMobileNet()))
    assert torch.equal(loaded(SAMPLES), outcome.network(SAMPLES))
    data = json.loads((folder / "result.json").read_text())
    assert data["plan"]["totals"] == outcome.plan.totals
    kinds = [type(one).__name__ for one in sections_from_json(data["sections"])]
    assert kinds.count("Accuracy") == 2 and kinds.count("Versions") == 1


def test_the_report_names_only_what_is_known(outcome):
    about = {"eval_data": None, "merge_blocks": 2, "stages": {}}
    versions = replace(outcome, about=about).sections[-1].items
    assert {*versions} == {"ompq", "torch", "python", "merge blocks"}
    assert versions["merge blocks"] == "2"


def test_given_bits_become_a_plan(work, outcome, tmp_path):
    bits = outcome.plan.allocation
    (tmp_path / "bits.json").write_text(json.dumps(bits.to_json()))
    assert work.plan(read_bits(tmp_path / "bits.json")).allocation == bits
    assert work.plan(outcome.plan) is outcome.plan


def test_bits_must_name_every_unit(work, outcome):
    name, choice = next(iter(outcome.plan.allocation.items()))
    with pytest.raises(
        PlanError, match=r"no bits for \d+ of \d+ units: .* Give bits for every unit"
    ):
        work.plan(ompq.Allocation({name: choice}))


def test_files_that_hold_no_bits_are_named(tmp_path):
    (tmp_path / "bits.json").write_text('{"fc": "four"}')
    with pytest.raises(PlanError, match="cannot be read as a plan or an allocation"):
        read_bits(tmp_path / "bits.json")


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(OSError, match="full"), whole_folder(folder) as work:
        (work / "plan.json").write_text("half")
        raise OSError("full")
    assert not folder.exists()
    folder.mkdir()
    (folder / "plan.json").write_text("old")
    with pytest.raises(OSError, match="full"), whole_folder(folder) as work:
        (work / "plan.json").write_text("half")
        raise OSError("full")
    assert [path.name for path in folder.iterdir()] == ["plan.json"]
    assert (folder / "plan.json").read_text() == "old"
    with whole_folder(folder) as work:
        (work / "plan.json").write_text("new")
    assert (folder / "plan.json").read_text() == "new"


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when told to."""
    now = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])
    return now


def test_times_of_one_name_add_up(clock):
    job = Stages()
    for seconds in (2, 3):
        with job.stage("reading") as progress:
            progress(1, 2, "half")
            clock[0] += seconds
    assert job.seconds == {"reading": 5}


def test_messages_can_name_the_stages(clock):
    shown = []

    @contextmanager
    def bar(name):
        yield lambda *told: shown.append((name, *told))

    job = Stages(bar)
    with job.named_by_messages("planning") as progress:
        clock[0] += 7  # before the first message: nobody's time
        progress(0, 2, "tracing")
        clock[0] += 1
        progress(1, 10, "tracing")
        progress(1, 2, "scoring")
        clock[0] += 4
        progress(2, 2, "done")
        clock[0] += 9
    assert job.seconds == {"tracing": 1, "scoring": 4}
    assert shown == [
        ("planning", 0, None, "tracing"),
        ("planning", 1, 10, "tracing"),
        ("planning", 0, None, "scoring"),
    ]


def test_a_stage_that_fails_has_no_time():
    job = Stages()
    with pytest.raises(ValueError, match="broken"), job.stage("reading"):
        raise ValueError("broken")
    assert job.seconds == {}


def test_layers_are_measured_alone_and_left_out(work, outcome):
    plan, samples = outcome.plan, ompq.Samples.of(SAMPLES)
    first, second = work.layer_effects(plan, 2)
    order = sorted(unit_rows(plan), key=lambda row: -row["damage"])
    assert [first.name, second.name] == [row["name"] for row in order[:2]]
    bits = plan.allocation[first.name]
    alone = ompq.quantize(MODEL, {"*": (32, 32), first.name: tuple(bits[:2])}, SAMPLES)
    found = ompq.evaluate(alone, samples, reference=MODEL)
    assert first.alone == pytest.approx(found.divergence)
    but = {**plan.allocation, first.name: ompq.Choice(32, bits.activation)}
    left = ompq.quantize(MODEL, ompq.Allocation(but), SAMPLES)
    found = ompq.evaluate(left, samples, reference=MODEL)
    assert first.without == pytest.approx(found.divergence)
