import gc

from torch import nn

import ompq
from nets import seeded, values
from ompq.network.units import Choice
from ompq.quantization.assembly import assemble
from ompq.weight_ranges import search_weight


def test_layers_that_were_replaced_are_freed_at_once():
    network = seeded(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    graph, alive = ompq.trace(network, values(8, 4)), []

    def grid(_unit, weight, axis):
        kept = sum(type(each) is nn.Linear for each in gc.get_objects())
        alive.append(kept)
        return search_weight(weight, 4, channel_dim=axis), weight

    bits = dict.fromkeys(graph.names, Choice(4, 32))
    assemble(network, graph, bits, [], weight_grid=grid, activation_grids=[])
    assert [alive[0] - kept for kept in alive] == [0, 1, 2, 3]
