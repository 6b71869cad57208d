import json
from math import ceil

import pytest

from nets import TinyResNet, images, seeded
from ompq.packed.account import inspect_file
from ompq.packed.format import read_contents
from ompq.packed.packed_files import save
from ompq.planning import plan as make_plan
from ompq.plans import Plan
from ompq.quantization.pipeline import quantize


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "net.ompq.safetensors"
    network = seeded(TinyResNet())
    plan = make_plan(network, images(16), "3.5bits")
    save(quantize(network, plan, images(16)), path, plan=plan, network="net.py:make")
    return plan, path


def test_items_are_the_plans_and_sum_up_to_the_file(planned):
    plan, path = planned
    account = inspect_file(path)
    assert isinstance(plan, Plan)
    assert account.file_bytes == path.stat().st_size == sum(account.items.values())
    assert account.planned == plan.bytes_by_item
    assert account.planned_bytes == plan.totals["bytes"]
    for name in ("weights", "scales", "zero_points", "biases"):
        assert account.items[name] == plan.bytes_by_item[name]
    assert account.items["float"] == 0
    assert account.items["activations"] == 8 * len(read_contents(path).record.sites)
    assert 0 < account.items["metadata"] < 1500
    assert account.file_bytes <= account.planned_bytes
    assert account.average_bits == pytest.approx(plan.totals["average_bits"])
    assert account.about["plan"]["hash"] == plan.hash


def test_units_are_counted_from_their_shapes(planned):
    plan, path = planned
    (stem, *_) = units = inspect_file(path).units
    assert [one.unit.name for one in units] == list(plan.graph.names)
    assert stem.bits == plan.allocation["stem"]
    assert stem.bytes.weights == ceil(8 * 3 * 9 * stem.bits.weight / 8)
    assert (stem.bytes.scales, stem.bytes.zero_points, stem.bytes.biases) == (32, 8, 32)
    assert stem.bytes.total == stem.planned.total - 8  # activations are not a unit's


def test_account_is_plain_data(planned):
    account = inspect_file(planned[1])
    data = json.loads(json.dumps(account.to_json()))
    assert data["file_bytes"] == account.file_bytes
    assert data["network"] == "net.py:make"
    assert data["units"][0]["bytes"]["total"] == account.units[0].bytes.total
