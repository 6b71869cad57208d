"""The zoo: bits of well-known networks, by name."""

import pytest
import torch

from cli_tools import run, run_json
from ompq.costs import cost_tables
from ompq.errors import PlanError
from ompq.lab.zoo import zoo_bits, zoo_plans
from ompq.models.named_models import load_model
from ompq.network.graph import trace
from ompq.plans import read_bits

NETWORKS = list(dict.fromkeys(one.network for one in zoo_plans().values()))


@pytest.mark.parametrize("network", NETWORKS)
def test_plans_fit_their_network_and_the_size_in_their_name(network):
    if network.startswith("timm:"):
        pytest.importorskip("timm")
    named = load_model(network, "none")
    graph = trace(named.module.eval(), torch.zeros(1, *named.input_shape))
    for name, one in zoo_plans().items():
        if one.network != network:
            continue
        assert set(one.allocation) == set(graph.names)
        limit = float(name.rpartition("-")[2].removesuffix("MiB")) * 2**20
        choices = list(dict.fromkeys(one.allocation.values()))
        columns = [choices.index(one.allocation[unit]) for unit in graph.names]
        size = cost_tables(graph, choices)["bytes"].total(columns)
        assert size == one.bytes
        assert 0.995 * limit <= size <= limit
        weights = sum(unit.weights for unit in graph.units)
        bits = sum(unit.weights * one.allocation[unit.name].weight for unit in graph)
        assert one.average_bits == pytest.approx(bits / weights, abs=1e-3)


def test_what_was_not_measured_says_so():
    for one in zoo_plans().values():
        measured = one.images > 0
        assert (one.drop is not None, one.divergence is not None) == (measured,) * 2
        assert one.trained or not measured


def test_plans_go_by_name():
    assert read_bits("zoo:resnet18-4.0MiB") == zoo_bits("resnet18-4.0MiB")
    with pytest.raises(
        PlanError, match=r"no plan 'resnet18-4' in the zoo \(did you mean resnet18-4.0"
    ):
        read_bits("zoo:resnet18-4")


def test_the_list_shows_all_or_one_network():
    names = [one["name"] for one in run_json("zoo")]
    assert names == list(zoo_plans())
    some = run_json("zoo", "mobilenet_v2")
    assert {one["network"] for one in some} == {"torchvision:mobilenet_v2"}
    text = run("zoo", "mobilenet_v2").stdout
    assert "zoo:mobilenet_v2-1.5MiB" in text
    assert "zoo:resnet18" not in text


def test_a_network_that_is_not_there_is_answered_with_those_that_are():
    made = run("zoo", "vgg")
    assert made.exit_code == 2
    assert "the zoo has no 'vgg'; it has torchvision:resnet18" in " ".join(
        made.stderr.split()
    )
