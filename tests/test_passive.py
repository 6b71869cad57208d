import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ompq
from ompq.network import passive
from ompq.network.graph import trace
from ompq.network.observation import record
from ompq.network.units import Choice
from ompq.quantization.activation_sites import find_sites

SOURCE = Path(ompq.__file__).parent


def names_listed(path):
    """Return the passive operations that stand in one display of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Set | ast.List | ast.Tuple):
            texts = {e.value for e in node.elts if isinstance(e, ast.Constant)}
            yield texts & (passive.MOVES | passive.MERGES)


def test_no_other_module_lists_passive_operations():
    others = [path for path in SOURCE.rglob("*.py") if path.name != "passive.py"]
    lists = {path.name: found for path in others for found in names_listed(path)}
    assert {name: found for name, found in lists.items() if len(found) > 2} == {}


def test_rows_do_not_overlap():
    rows = [passive.SAME, passive.SHAPES, passive.ORDERS, passive.SHUFFLES]
    rows += [passive.PARTS, passive.POOLS, passive.COPIES, passive.MERGES]
    rows += [passive.CLIPS]
    assert sum(map(len, rows)) == len(frozenset().union(*rows))


MOVES = {
    "roll": lambda x: x.roll(1, 2),
    "flip": lambda x: x.flip(3),
    "unbind": lambda x: torch.stack(x.unbind(2), 2),
    "narrow": lambda x: x.narrow(2, 0, 4),
    "pixel_shuffle": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "interpolate_nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "dropout": F.dropout,
}


class Moved(nn.Module):
    def __init__(self, move):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.move = move

    def forward(self, x):
        return self.second(self.move(self.first(x)))


@pytest.mark.parametrize("name", MOVES)
def test_what_is_moved_is_quantized_where_it_was_computed(name):
    network, x = Moved(MOVES[name]).eval(), torch.randn(2, 3, 6, 6)
    recording = record(network, x)
    assert name in {call.function for call in recording.calls}
    graph = trace(network, x)
    bits = {unit: Choice(8, 8) for unit in graph.names}
    sites, _ = find_sites(network, recording, graph, bits)
    assert [site.after for site in sites] == [(), ("first",)]


def test_blending_pixels_computes_new_values():
    network = Moved(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"))
    recording = record(network.eval(), torch.randn(2, 3, 6, 6))
    graph = trace(network, torch.randn(2, 3, 6, 6))
    bits = {unit: Choice(8, 8) for unit in graph.names}
    sites, _ = find_sites(network, recording, graph, bits)
    assert [site.before for site in sites] == [("",), ("second",)]
