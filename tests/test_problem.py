import copy
import json
import pickle

import numpy as np
import pytest

from ompq.allocation.problem import Allocation, Problem
from ompq.cost_tables import Cost
from ompq.errors import PlanError, ScoreError
from ompq.network.units import Choice
from problem_cases import parts
from tables import problem

BITS = {"stem": Choice(8, 8), "a.conv1": Choice(4, 8), "fc": Choice(4, 6)}


def test_allocation_is_a_mapping_that_keeps_its_order():
    allocation = Allocation(BITS)
    assert dict(allocation) == BITS
    assert list(allocation) == ["stem", "a.conv1", "fc"]
    assert len(allocation) == 3
    assert allocation["fc"].activation == 6
    assert "layer9" not in allocation


def test_allocation_does_not_follow_the_mapping_it_was_made_from():
    source = dict(BITS)
    allocation = Allocation(source)
    source["stem"] = Choice(2, 2)
    assert allocation["stem"] == Choice(8, 8)


def test_equal_allocations_have_equal_hashes():
    turned = dict(reversed(BITS.items()))
    assert Allocation(BITS) == Allocation(turned)
    assert hash(Allocation(BITS)) == hash(Allocation(turned))
    assert Allocation(BITS) != Allocation({**BITS, "fc": Choice(8, 8)})
    assert copy.deepcopy(Allocation(BITS)) == Allocation(BITS)
    assert pickle.loads(pickle.dumps(Allocation(BITS))) == Allocation(BITS)


def test_allocation_reads_well():
    text = repr(Allocation({**BITS, "b": Choice(4, 8)}))
    assert text == "Allocation(4 units: 1 × W4A6, 2 × W4A8, 1 × W8A8)"


def test_allocation_takes_numpy_integers_as_integers():
    allocation = Allocation({"fc": Choice(np.int64(4), np.int64(8))})
    assert json.dumps(allocation.to_json()) == '{"fc": {"weight": 4, "activation": 8}}'


def test_allocation_survives_json_and_files(tmp_path):
    allocation = Allocation(BITS)
    assert Allocation.from_json(json.loads(json.dumps(allocation.to_json()))) == (
        allocation
    )
    path = tmp_path / "deep" / "bits.json"
    allocation.save(path)
    assert Allocation.load(path) == allocation
    assert json.loads(path.read_text())["fc"] == {"weight": 4, "activation": 6}
    assert [p.name for p in path.parent.iterdir()] == ["bits.json"]


def test_bits_must_be_positive():
    with pytest.raises(ValueError, match="fc: bits must be positive, not W0A8"):
        Allocation({"fc": Choice(0, 8)})


def test_rates_survive_json_and_are_checked():
    bits = Allocation({"fc": Choice(8, 8, rate=2.5), "stem": Choice(8, 8)})
    assert repr(bits) == "Allocation(2 units: 1 × C2.5A8, 1 × W8A8)"
    saved = bits.to_json()
    assert saved["fc"] == {"weight": 8, "activation": 8, "rate": 2.5}
    assert saved["stem"] == {"weight": 8, "activation": 8}
    assert Allocation.from_json(json.loads(json.dumps(saved))) == bits
    for wrong in (Choice(4, 8, 2.5), Choice(8, 8, -1.0), Choice(8, 8, float("nan"))):
        with pytest.raises(ValueError, match="fc: rate=.* a rate must be above 0"):
            Allocation({"fc": wrong})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not an allocation"),
        ("[1, 2]", "an allocation must be an object, not a list of 2 entries"),
        ("{}", "must map unit names to bits"),
        ('{"fc": 4}', "not valid: the bits of fc must be an object, not 4.*Write"),
        ('{"fc": {"weight": true, "activation": 8}}', r"of fc\[0\] .*, not True"),
        ('{"fc": {"weight": 4, "activation": %s}}' % ("9" * 400), "at most 32, not 99"),
        ("[" * 100_000, "is not an allocation: it is nested too deeply"),
        ('{"fc": {"weight": 4}}', "must be exactly weight and activation"),
        ('{"fc": {"weight": 4.5, "activation": 8}}', "the allocation is not valid"),
        (
            '{"fc": {"weight": -4, "activation": 8}}',
            "a whole number of at least 1, not -4",
        ),
    ],
)
def test_bad_files_are_refused(tmp_path, text, words):
    path = tmp_path / "bits.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=words) as error:
        Allocation.load(path)
    assert str(path) in str(error.value)


def test_bits_must_be_for_the_units_of_the_network():
    allocation = Allocation(BITS)
    allocation.check_units(["fc", "stem", "a.conv1"])
    names = ["stem", "a.conv1", *(f"b{number}" for number in range(9)), "fc"]
    with pytest.raises(
        PlanError,
        match=r"no bits for 9 of 12 units: b0, b1, b2, b3, b4 and 4 more\. "
        "Give bits for every unit, or plan with these pinned",
    ):
        allocation.check_units(names)
    with pytest.raises(PlanError, match="bits for fc, which the network does not have"):
        allocation.check_units(["stem", "a.conv1"])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"nothing\.json is not an allocation"):
        Allocation.load(tmp_path / "nothing.json")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e301])
def test_damage_must_be_finite(value):
    damage = np.zeros((2, 3))
    damage[1, 2] = value
    with pytest.raises(ScoreError, match="the score is not finite for b; check"):
        Problem(**parts(damage=damage))


def test_contradictory_pins_name_the_units():
    allowed = np.array([[True, False, False], [False, True, True]])
    with pytest.raises(
        PlanError,
        match="contradictory pins: no choice is allowed for "
        "a, b together; untie them or pin them alike",
    ):
        Problem(**parts(allowed=allowed, groups=np.zeros(2, dtype=int)))
    allowed = np.array([[True, True, True], [False, False, False]])
    with pytest.raises(PlanError, match="contradictory pins: no choice .* for b$"):
        Problem(**parts(allowed=allowed))


def test_program_sums_groups_in_order_of_their_first_unit():
    it = problem(np.arange(9.0).reshape(3, 3), weights=[8, 16, 32], groups=[7, 2, 7])
    program = it.program({"bytes": 100.0})
    assert it.members == ((0, 2), (1,))
    assert program.damage.tolist() == [[6.0, 8.0, 10.0], [3.0, 4.0, 5.0]]
    assert program.rows.tolist() == [[[10.0, 15.0, 20.0], [4.0, 6.0, 8.0]]]
    allocation = it.allocation(np.array([2, 0]))
    assert [choice.weight for choice in allocation.values()] == [4, 2, 4]


def test_program_counts_what_no_choice_changes():
    size = Cost("bytes", np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), 100.0)
    it = Problem(**parts(costs={"bytes": size}))
    program = it.program({"bytes": 105.0})
    assert program.used(np.array([0, 0])) == [105.0]
    assert it.total("bytes", it.allocation(np.array([0, 0]))) == 105.0
    assert size.table[0, 0] == 1.0


def test_ties_are_broken_by_bytes_or_by_the_first_cost():
    ops = Cost("bit_ops", np.arange(6.0).reshape(2, 3))
    size = Cost("bytes", np.arange(6.0).reshape(2, 3) ** 2)
    both = Problem(**parts(costs={"bit_ops": ops, "bytes": size}))
    assert (both.program({"bit_ops": 9.0}).ties == size.table).all()
    alone = Problem(**parts(costs={"bit_ops": ops}))
    assert (alone.program({"bit_ops": 9.0}).ties == ops.table).all()


def test_totals_are_sums_over_units():
    it = problem([[4, 2, 1], [40, 20, 10]], weights=[8, 80])
    allocation = {"unit0": Choice(4, 8), "unit1": Choice(2, 8)}
    assert it.total("bytes", allocation) == 8 * 4 / 8 + 80 * 2 / 8
    assert it.damage_of(allocation) == 41


@pytest.mark.parametrize(
    "allocation",
    [{"unit0": Choice(4, 8)}, {"unit0": Choice(4, 8), "unit1": Choice(7, 8)}],
)
def test_an_allocation_of_another_problem_is_refused(allocation):
    it = problem([[4, 2, 1], [40, 20, 10]], weights=[8, 80])
    with pytest.raises(PlanError, match="bits for unit1 are not among the 3 choices"):
        it.columns(allocation)
