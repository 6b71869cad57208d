"""The grid of each weight follows the settings."""

import pytest
import torch

import ompq
from nets import Chain, images, seeded
from ompq.allocation.problem import Allocation
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.quantization.weight_grids import find_weight_grids, weight_grams
from ompq.samples import Samples

MODEL = seeded(Chain()).eval()
GRAPH = trace(MODEL, images())
WEIGHT = MODEL.conv.weight.detach()


def grid_of(bits=4, **settings):
    """Return the grid of the convolution, its weight, and the reported progress."""
    told = []
    allocation = Allocation(dict.fromkeys(GRAPH.names, Choice(bits, 8)))
    config = ompq.QuantizeConfig(**settings)
    find = find_weight_grids(
        allocation, {}, (), config, lambda *state: told.append(state)
    )
    return *find(GRAPH["conv"], WEIGHT, 0), told


def test_minmax_grids_end_at_the_largest_and_smallest_weight():
    grid, weight, told = grid_of(weight_range="minmax", weight_grid="affine")
    rows = WEIGHT.flatten(1)
    wanted = (rows.amax(1).clamp_min(0) - rows.amin(1).clamp_max(0)) / 15
    torch.testing.assert_close(grid.scale.flatten(), wanted)
    assert torch.equal(weight, WEIGHT)
    assert told == [(1, 2, "rounding weights")]


def test_searched_grids_lose_less_than_those_of_all_weights():
    errors = {
        way: float((grid.fake(WEIGHT) - WEIGHT).square().sum())
        for way in ("search", "minmax", "shrink")
        for grid, *_ in [grid_of(3, weight_range=way)]
    }
    assert errors["search"] <= min(errors["minmax"], errors["shrink"])


@pytest.mark.parametrize(
    ("bits", "settings", "fed_back"),
    [(6, {}, True), (7, {}, False), (6, {"output_error": False}, False)],
)
def test_few_bits_are_rounded_with_error_feedback(bits, settings, fed_back):
    allocation = Allocation(dict.fromkeys(GRAPH.names, Choice(bits, 8)))
    config = ompq.QuantizeConfig(**settings)
    samples = Samples.of(images())
    found = weight_grams(
        MODEL, GRAPH, allocation, samples, config, lambda *_state: None
    )
    assert set(found) == (set(GRAPH.names) if fed_back else set())
