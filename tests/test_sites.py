import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models

from nets import Chain, TinyMobileNet, TinyResNet, images, seeded
from ompq.graph import Choice, trace
from ompq.quantization.sites import find_sites
from ompq.recording import record


def sites_of(network, samples, bits=8, **more):
    graph = trace(network, samples)
    chosen = {name: Choice(4, more.get(name, bits)) for name in graph.names}
    return find_sites(network, record(network, samples[:1]), graph, chosen)


def places(sites):
    return {name: site.bits for site in sites for name in site.after}


def test_sites_of_a_residual_network():
    sites, lost = sites_of(seeded(TinyResNet()), images(), bits=4)
    assert lost == []
    assert places(sites) == {
        "norm": 4,  # the stem's ReLU is a function: a grid from 0 up does its work
        "block1.bn1": 4,
        "block1.bn2": 8,  # only the sum reads it
        "block1": 4,
        "block2.downsample.1": 8,
        "block2.bn1": 4,
        "block2.bn2": 8,
        "block2": 8,  # only the average reads it
    }
    assert [p.before for p in sites if p.before] == [("",), ("head",)]


def test_sites_of_a_mobile_network():
    sites, _ = sites_of(seeded(TinyMobileNet()), images())
    assert set(places(sites)) == {
        "stem.2",
        *(f"blocks.{b}.body.{i}" for b in (0, 1, 2) for i in (2, 5, 7)),
        "blocks.0",
        "blocks.1",
        "pool",
    }


def test_concatenated_tensors_share_a_grid():
    sites, _ = sites_of(models.squeezenet1_1(weights=None), torch.zeros(1, 3, 64, 64))
    shared = [p for p in sites if len(p.positions) > 1]
    assert len(shared) == 8
    assert shared[0].after == (
        "features.3.expand1x1_activation",
        "features.3.expand3x3_activation",
    )


def test_tensor_takes_the_widest_of_its_readers():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = self.stem(x)
            return self.a(x) * self.b(x)

    sites, _ = sites_of(seeded(Fork()), torch.ones(2, 4), bits=4, b=6)
    assert places(sites) == {"stem": 6}


def test_float_activations_get_no_point():
    sites, lost = sites_of(seeded(Chain()), images(), bits=32)
    assert sites == []
    assert lost == []


def test_tensor_between_functions_is_listed():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            y = torch.sigmoid(self.conv(x) * 2) + x  # no module makes the left operand
            return F.relu(y)

    sites, lost = sites_of(seeded(Functional()), images())
    assert [entry.name for entry in lost] == ["(network).sigmoid()"]
    assert lost[0].reason.endswith("it stays float")
    assert [p.before for p in sites] == [("",)]
