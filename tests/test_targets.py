import copy
import json

import pytest
from torch import nn

import ompq
from cli_tools import network_file, run, run_json
from files_cases import WRONG, changed_anywhere
from nets import TinyMobileNet, images, seeded, tokens
from ompq.configs import PlanConfig
from ompq.errors import PlanError, TargetError
from ompq.network.units import Choice
from ompq.targets import KINDS, Target, included_targets, load_target

OPERATOR = {
    "weight_bits": [4, 8],
    "activation_bits": [8],
    "per_channel": True,
    "accelerated": ["W4A8", "W8A8"],
    "otherwise": "no kernel",
}
PROFILE = {
    "format": "ompq-target/1",
    "name": "chip",
    "operators": {
        "default": OPERATOR,
        "depthwise": {**OPERATOR, "weight_bits": [8], "accelerated": []},
    },
}


@pytest.fixture(scope="module")
def planned():
    network = seeded(TinyMobileNet())
    config = PlanConfig(target=Target.from_json(PROFILE))
    return network, ompq.plan(network, images(8), "6bits", config)


def test_units_get_only_what_the_target_takes(planned):
    network, plan = planned
    for unit in plan.graph.units:
        wanted = {8} if unit.kind == "depthwise" else {4, 8}
        allowed = plan.allowed[plan.graph.names.index(unit.name)]
        widths = {c.weight for c, one in zip(plan.choices, allowed, strict=True) if one}
        assert widths == wanted
        assert plan.allocation[unit.name].weight in wanted
    freely = ompq.plan(network, images(8), "5bits").allocation
    assert {choice.weight for choice in freely.values()} - {4, 8}


def test_what_is_no_faster_is_listed(planned):
    _, plan = planned
    slow = {entry.name: entry.reason for entry in plan.no_speed_up}
    kinds = {unit.name: unit.kind for unit in plan.graph.units}
    assert slow == {n: "no kernel" for n, k in kinds.items() if k == "depthwise"}
    assert len(slow) == 3


def test_report_lists_what_is_no_faster(planned, tmp_path):
    _, plan = planned
    ompq.write_report(tmp_path / "report.html", plan)
    text = (tmp_path / "report.html").read_text()
    for entry in plan.no_speed_up:
        row = f'<th scope="row">{entry.name}</th><td>no kernel</td>'
        assert row in text


def test_plan_keeps_its_target(planned, tmp_path):
    _, plan = planned
    plan.save(tmp_path / "plan.json")
    again = ompq.Plan.load(tmp_path / "plan.json")
    assert again.target == plan.target
    assert again.hash == plan.hash
    assert again.with_budget("6.5bits").no_speed_up == plan.no_speed_up
    data = json.loads((tmp_path / "plan.json").read_text())
    data["target"]["operators"].pop("default")
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="is a damaged plan: .*default"):
        ompq.Plan.load(tmp_path / "plan.json")


def test_plans_without_a_target_do_not_mention_one(tmp_path):
    plan = ompq.plan(seeded(TinyMobileNet()), images(8), "5bits")
    plan.save(tmp_path / "plan.json")
    assert "target" not in json.loads((tmp_path / "plan.json").read_text())
    assert plan.no_speed_up == ()


@pytest.mark.parametrize("name", ["onnxruntime-cpu", "openvino-cpu"])
def test_included_targets_take_what_ompq_exports(name):
    assert name in included_targets()
    target = load_target(name)
    assert target.name == name
    assert Target.from_json(target.to_json()) == target
    network = seeded(TinyMobileNet())
    config = PlanConfig(target=name, pinned={"@first": 8, "@last": 8})
    plan = ompq.plan(network, images(8), "4bits", config)
    narrow = [n for n, choice in plan.allocation.items() if choice.weight < 8]
    assert [entry.name for entry in plan.no_speed_up] == narrow
    assert "no faster than 8 bits" in plan.no_speed_up[0].reason


def test_a_target_may_refuse_coded_weights():
    unable = Target.from_json({**PROFILE, "coded": False})
    able = Target.from_json(PROFILE)
    assert Target.from_json(unable.to_json()) == unable
    assert "coded" not in able.to_json()
    network, coded = seeded(TinyMobileNet()), Choice(8, 8, rate=2.5)
    unit = ompq.trace(network, images(1)).units[0]
    assert able.takes(unit, coded) and not unable.takes(unit, coded)
    assert able.no_speed_up(unit, coded) == able.no_speed_up(unit, Choice(8, 8))
    config = PlanConfig(target=unable, pinned={unit.name: coded})
    with pytest.raises(
        TargetError, match="choices C2.5A8: .*, and none that are coded"
    ):
        ompq.plan(network, images(1), "4bits", config)


def test_a_unit_without_a_choice_is_named():
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 4, 2)

        def forward(self, x):
            return self.up(x)

    with pytest.raises(
        TargetError,
        match="openvino-cpu supports none of up's choices W2A8, .*: for transposed "
        "it supports weights of 2, .* bits and inputs of 32 .32 is float.",
    ):
        config = PlanConfig(target="openvino-cpu")
        ompq.plan(seeded(Up()), images(4), "4bits", config)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("format",), "other/1", "not a target profile of format ompq-target/1"),
        (("operators",), {}, '"operators" must have an entry "default"'),
        (("operators", "winograd"), OPERATOR, 'operator "winograd" is unknown; '),
        (("operators", "linaer"), OPERATOR, r"unknown \(did you mean linear\?\)"),
        (("name",), 3, '"name" must be a non-empty string'),
        (("row_multiples",), {"3": 0}, "row_multiples: '3': 0 must be a width"),
        (("row_multiples",), {"9": 32}, "row_multiples: '9': 32 must be a width"),
        (("coded",), "no", "coded must be true or false, not 'no'"),
        (
            ("operators", "default"),
            {},
            "default lacks weight_bits",
        ),
        (("operators", "default", "more"), 1, "default has no field more"),
        (
            ("operators", "default", "weight_bits"),
            [1],
            "weight_bits must be a list of wid",
        ),
        (
            ("operators", "default", "activation_bits"),
            8,
            "activation_bits must be a list",
        ),
        (("operators", "default", "weight_bits"), [[8]], r"weight_bits\[0\] must be"),
        (("operators", "default", "weight_bits"), [True], r"weight_bits\[0\] must be"),
        (("operators", "default", "otherwise"), 3, "otherwise must be text, not 3"),
        (
            ("operators", "default", "per_channel"),
            False,
            "per_channel must be true, because ompq",
        ),
        (
            ("operators", "default", "accelerated"),
            ["4"],
            "accelerated must be a list such as",
        ),
    ],
)
def test_broken_profiles_say_where(place, value, message, tmp_path):
    data = copy.deepcopy(PROFILE)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path = tmp_path / "chip.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TargetError, match=f"chip.json is not a valid.*{message}"):
        load_target(path)


def test_missing_profiles_and_other_files_are_told(tmp_path):
    with pytest.raises(TargetError, match="no target tpu; use compressed-tensors, c"):
        load_target("tpu")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(TargetError, match="not a valid .* it is nested too deeply"):
        load_target(tmp_path / "deep.json")
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(TargetError, match="text.json is not a valid target profile"):
        load_target(tmp_path / "text.json")


def test_kinds_are_those_of_units():
    units = ompq.trace(seeded(TinyMobileNet()), images(2)).units
    assert {unit.kind for unit in units} <= set(KINDS)
    target = Target.from_json(PROFILE)
    depthwise = next(unit for unit in units if unit.kind == "depthwise")
    assert not target.takes(depthwise, Choice(4, 8))
    assert target.takes(units[0], Choice(4, 8))


def test_command_line_takes_targets(tmp_path):
    (tmp_path / "chip.json").write_text(json.dumps(PROFILE))
    words = ("plan", network_file(tmp_path), "--data", "random", "--budget", "5bits")
    result = run(*words, "--target", "onnxruntime-cpu", env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "target onnxruntime-cpu" in text and "no faster than 8 bits" in text
    data = run_json(*words, "--target", tmp_path / "chip.json")
    assert data["target"] == "chip"
    assert {unit["weight_bits"] for unit in data["units"]} <= {4, 8}
    result = run(*words, "--target", "tpu")
    assert result.exit_code == 2
    assert "error: there is no target tpu; use" in result.stderr
    result = run(*words, "--target", "openvino")
    assert "there is no target openvino (did you mean openvino-cpu?)" in result.stderr


def test_groups_are_no_faster_in_integers():
    config = PlanConfig(
        target=Target.from_json({**PROFILE, "operators": {"default": OPERATOR}}),
        group_size=32,
    )
    plan = ompq.plan(tokens(), images(8), "6bits", config)
    slow = {entry.name: entry.reason for entry in plan.no_speed_up}
    assert [*slow] == [unit.name for unit in plan.graph.units if unit.group_size]
    assert set(slow.values()) == {
        "weights with a scale per group are multiplied as floats"
    }


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_value_at_any_place_of_a_profile_is_one_clear_error(value, tmp_path):
    path, refused = tmp_path / "chip.json", 0
    for data in changed_anywhere(PROFILE, value):
        path.write_text(json.dumps(data))
        try:
            load_target(path)
        except TargetError as error:
            refused += 1
            assert "chip.json is not a valid target profile" in str(error)
    assert refused
