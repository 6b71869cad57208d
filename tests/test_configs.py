"""Configurations: what they refuse, and that they need neither torch nor numpy."""

import subprocess
import sys
from dataclasses import fields, is_dataclass
from math import nan

import pytest

from ompq import configs
from ompq.configs import (
    PLAN_PROTOCOLS,
    QUANTIZE_PROTOCOLS,
    RECONSTRUCT_PROTOCOLS,
    TRAIN_PROTOCOLS,
    Goal,
    PlanConfig,
    QuantizeConfig,
    ReconstructConfig,
    RefineConfig,
    SmallestConfig,
    TrainConfig,
)
from ompq.configuration_checks import Config, settings

ALL = [
    one
    for one in vars(configs).values()
    if isinstance(one, type) and issubclass(one, Config) and one is not Config
]


def test_configurations_need_neither_torch_nor_numpy():
    code = "import sys, ompq.configs; print({'torch', 'numpy'} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout == "set()\n"


@pytest.mark.parametrize("config", ALL, ids=lambda one: one.__name__)
def test_every_field_has_a_help_text_that_is_a_sentence(config):
    assert is_dataclass(config) and config.__dataclass_params__.frozen
    for name, one in settings(config).items():
        assert one.help[:1].isupper(), name
        assert one.help.endswith((".", ")")) and "``" not in one.help, name
    assert all(field.kw_only for field in fields(config))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"choices": ((4, 9),)},
            "'choices' of PlanConfig must be weight bits from 2 t",
        ),
        ({"choices": ((4, 4, 2),)}, "'choices' of PlanConfig must be values that are"),
        ({"choices": ()}, "'choices' of PlanConfig must be weight bits from 2 to 8"),
        ({"choices": (1,)}, "'choices' of PlanConfig must be weight bits from 2 to 8"),
        ({"activation_choices": (9,)}, "'activation_choices' of PlanConfig must be bi"),
        ({"activation_choices": ()}, "'activation_choices' of PlanConfig must be bits"),
        ({"method": "exakt"}, "'method' of PlanConfig must be one of 'exact', 'relax'"),
        ({"score": "orn"}, "'score' of PlanConfig must be one of .*'orm'.* or a func"),
        ({"storage": "zip"}, "'storage' of PlanConfig must be one of 'fixed', 'coded'"),
        ({"rates": (0,)}, "'rates' of PlanConfig must be values that are each above 0"),
        ({"rates": ()}, "'rates' of PlanConfig must be one or more numbers"),
        ({"group_size": 33}, "'group_size' of PlanConfig must be one of 32, 64, 128, "),
        ({"pinned": {"fc": 9}}, "'pinned' of PlanConfig must be patterns with their"),
        ({"pinned": {"fc": (8, 8, 9)}}, "'pinned' of PlanConfig must be patterns wi"),
        ({"pinned": {"fc": ()}}, "'pinned' of PlanConfig must be patterns with their"),
        ({"pinned": {"fc": "8"}}, "'pinned' of PlanConfig must be patterns with the"),
    ],
)
def test_a_plan_cannot_be_asked_for_what_there_is_not(wrong, message):
    with pytest.raises(ValueError, match=f"^The {message}"):
        PlanConfig(**wrong)


@pytest.mark.parametrize(
    "pin", [4, 32, (4, 8), (None, 8), (None, 32), (8, 8, 2.5), (8, 8, 0)]
)
def test_pins_may_be_of_weights_inputs_or_both(pin):
    assert PlanConfig(pinned={"fc": pin}).pinned["fc"] == pin


@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [
        (
            QuantizeConfig,
            {"weight_range": "minmx"},
            "The 'weight_range' of QuantizeConfig must be one of 'search', 'minmax', "
            r"'shrink'\. Got 'minmx'\.$",
        ),
        (QuantizeConfig, {"sum_bits": 12}, "'sum_bits' .* must be one of 8, 16"),
        (QuantizeConfig, {"group_size": 7}, "'group_size' .* must be one of 32, 64"),
        (ReconstructConfig, {"loss": "square"}, "'loss' .* must be one of 'squared'"),
        (RefineConfig, {"by": "guess"}, "must be one of 'round', 'reconstruct'"),
        (RefineConfig, {"held_back": 1.0}, "must be above 0 and below 1"),
        (SmallestConfig, {"tolerance": -1.0}, "must be at least 0"),
        (TrainConfig, {"momentum": 1.0}, "must be at least 0 and below 1"),
        (Goal, {"max_drop": nan}, "'max_drop' of Goal must be a number or None"),
        (Goal, {"max_divergence": -1.0}, "'max_divergence' .* must be above 0"),
        (Goal, {"min_agreement": 99}, "must be above 0 and at most 1 or None"),
        (Goal, {}, "the goal is empty: give max_drop, min_agreement or max_div"),
    ],
)
def test_values_that_would_do_something_else_are_refused(config, wrong, message):
    with pytest.raises(ValueError, match=message):
        config(**wrong)


def test_protocols_of_one_name_belong_together():
    names = {"ours", "paper-ptq", "paper-qat"}
    assert names <= {*PLAN_PROTOCOLS} and names <= {*QUANTIZE_PROTOCOLS}
    assert {"ours", "paper-ptq"} <= {*RECONSTRUCT_PROTOCOLS}
    assert {"ours", "paper-qat"} <= {*TRAIN_PROTOCOLS}
    for named in (PLAN_PROTOCOLS, QUANTIZE_PROTOCOLS, RECONSTRUCT_PROTOCOLS):
        own = named["ours"]
        assert own == type(own)()
