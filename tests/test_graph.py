import json

import pytest

from nets import TinyResNet, images, seeded
from ompq.errors import PatternError
from ompq.graph import Choice, LayerGraph, select, trace

NAMES = ("stem", "layer1.conv1", "layer1.conv2", "layer2.conv1", "head")


@pytest.fixture(scope="module")
def graph():
    return trace(seeded(TinyResNet()), images())


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("stem", ["stem"]),
        ("layer1.*", ["layer1.conv1", "layer1.conv2"]),
        ("*conv1", ["layer1.conv1", "layer2.conv1"]),
        ("re:conv[2]$", ["layer1.conv2"]),
        ("@first", ["stem"]),
        ("@last", ["head"]),
    ],
)
def test_patterns(pattern, wanted):
    assert select(NAMES, pattern) == wanted


def test_exact_name_wins_over_a_glob():
    assert select(["a[1]", "a1"], "a[1]") == ["a[1]"]


def test_pattern_without_match_lists_units():
    with pytest.raises(
        PatternError, match="'conv' matches no unit; the 5 units are stem, layer1.conv1"
    ):
        select(NAMES, "conv")
    with pytest.raises(PatternError, match="and 2 more"):
        select([*NAMES, "x", "y"], "nothing")
    with pytest.raises(PatternError, match="'re:' is no reg.*|'re:\\[' is no regular"):
        select(NAMES, "re:[")


def test_unknown_unit(graph):
    with pytest.raises(PatternError, match="'nope' matches no unit"):
        graph["nope"]


def test_tie_joins_groups_and_untie_frees_them(graph):
    tied = graph.tie(["block1.*", ["stem", "head"]])
    groups = {frozenset(graph.names[i] for i in g) for g in tied.groups.values()}
    assert groups == {
        frozenset({"block1.conv1", "block1.conv2"}),
        frozenset({"stem", "head"}),
        frozenset({"block2.conv2", "block2.downsample.0"}),
        frozenset({"block2.conv1"}),
    }
    # A pattern that touches one member of a group takes the whole group along.
    joined = graph.tie([["stem", "block2.conv2"]])
    assert joined["block2.downsample.0"].group == joined["stem"].group
    assert len(tied.untie().groups) == len(graph)


def test_json_round_trip(graph):
    assert LayerGraph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


def test_choice_reads_as_people_write_it():
    assert str(Choice(4, 8)) == "W4A8"
