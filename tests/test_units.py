import pytest

from ompq.network.units import Choice, LayerGraph, select

NAMES = ("stem", "layer1.conv1", "layer1.conv2", "layer2.conv1", "head")


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


def test_choice_reads_as_people_write_it():
    assert str(Choice(4, 8)) == "W4A8"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "graph must be an object, not a list of 0 entries"),
        ({}, "graph lacks units"),
        ({"units": {}}, r"graph\.units must be a list, not an object of 0 entr"),
        ({"units": [3]}, r"graph\.units\[0\] must be an object, not 3"),
        ({"units": [{}]}, r"graph\.units\[0\] lacks name"),
        ({"units": [], "skipped": None}, "graph.skipped must be a list, not None"),
        ({"units": [], "float_bytes": "9"}, "float_bytes must be a whole number"),
        ({"units": [], "float_bytes": []}, "float_bytes must be a whole number"),
    ],
)
def test_things_that_are_no_graph_are_refused(data, words):
    with pytest.raises(ValueError, match=words):
        LayerGraph.from_json(data)
