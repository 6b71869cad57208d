"""Odd networks and quick plans that tests of packed files share."""

from itertools import cycle

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from nets import images
from ompq.allocation.problem import Allocation
from ompq.budgets import Budget
from ompq.configs import QuantizeConfig
from ompq.entropy_coding.rates import to_multiples
from ompq.grids import Grid
from ompq.layers import quantized_layers
from ompq.network.graph import trace
from ompq.network.observation import record
from ompq.network.units import Choice
from ompq.plans import Plan
from ompq.quantization.activation_sites import find_sites
from ompq.quantization.assembly import assemble
from ompq.quantization.pipeline import quantize
from ompq.quantization.record import Quantization, with_quantization
from ompq.score_tables import ScoreTable


class Attention(nn.Module):
    """Attention, whose projections have no module of their own, and a norm."""

    def __init__(self, **settings):
        super().__init__()
        self.embed = nn.Linear(3, 12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True, **settings)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 4, bias=False)

    def forward(self, x):
        x = self.embed(x.flatten(2).transpose(1, 2))
        return self.head(self.norm(x + self.attention(x, x, x)[0]).mean(1))


class Odd(nn.Module):
    """Transposed and shared layers, a weight handed to a function, odd buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.up = nn.ConvTranspose2d(3, 5, 3, 2, bias=False)
        self.mix = nn.Conv2d(5, 5, 1)
        self.functional = nn.Linear(5, 7)
        self.again = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.again.weight
        self.register_buffer("order", torch.tensor([2, 0, 1, 4, 3, 6, 5]))
        self.register_buffer("wide", torch.tensor([3.5], dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("huge", torch.tensor(1 << 40))

    def forward(self, x):
        x = F.relu(self.mix(F.relu(self.up(self.norm(x))))).mean((2, 3))
        x = F.relu(F.linear(x, self.functional.weight, self.functional.bias))
        return self.tied(F.relu(self.again(x[:, self.order]))) * self.wide.float()


def mixed(names, widths=(2, 3, 4, 5, 6, 7, 8)):
    pairs = zip(names, cycle(widths), strict=False)
    return Allocation({name: Choice(bits, 8) for name, bits in pairs})


def quantized(network, widths=(2, 3, 4, 5, 6, 7, 8), **config):
    samples = images(16)
    bits = mixed(trace(network, samples).names, widths)
    return quantize(network, bits, samples, QuantizeConfig(**config)).eval()


def assembled(network, graph, bits, sites, weight_grid):
    """As assemble() does, with one grid for all activations."""
    grids = [Grid(torch.tensor(0.05), torch.tensor(3.0), site.bits) for site in sites]
    return assemble(
        network, graph, bits, sites, weight_grid=weight_grid, activation_grids=grids
    )


def coded(network, rate=6.0, step=0.5):
    """A network of coded units: scales and biases as a file holds them."""
    samples = images(16)
    graph = trace(network, samples)
    bits = Allocation({name: Choice(8, 8, rate) for name in graph.names})
    sites, _ = find_sites(network, record(network, samples), graph, bits)

    def weight_grid(_unit, weight, axis):
        shape = [1] * weight.dim()
        shape[axis] = weight.shape[axis]
        channels = torch.linspace(0.9, 1.1, weight.shape[axis]).reshape(shape)
        scale = to_multiples(step * weight.std() * channels)
        return Grid(scale, torch.full(shape, 128.0), 8), weight

    made = assembled(network, graph, bits, sites, weight_grid)
    with torch.no_grad():
        for layer in quantized_layers(made).values():
            if layer.bias is not None:
                layer.bias.copy_(layer.bias.half())
    return with_quantization(made, Quantization(graph, bits, tuple(sites), ())).eval()


def fake_plan(graph, allocation):
    choices = tuple(sorted(set(allocation.values())))
    shape = (len(graph), len(choices))
    return Plan(
        graph=graph,
        choices=choices,
        scores=ScoreTable(damage=np.zeros(shape)),
        allowed=np.ones(shape, dtype=bool),
        budget=Budget.of("32bits"),
        allocation=allocation,
        score_name="nothing",
    )
