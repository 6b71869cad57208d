"""Blocks end at residual sums, stages where the resolution falls."""

import torch
from torch import nn
from torch.nn import functional as F

from nets import (
    TinyMobileNet,
    TinyResNet,
    images,
    seeded,
)
from ompq.network.graph import trace
from ompq.network.observation import watch


def test_features_follow_norm_activation_and_residual_sum():
    network = seeded(TinyResNet())
    seen = {}
    handles = [
        network.block1.register_forward_hook(lambda m, a, out: seen.update(block1=out)),
        network.block2.register_forward_hook(lambda m, a, out: seen.update(block2=out)),
    ]
    outputs = features_of(network, images())
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(outputs["block1.conv2"], seen["block1"])
    torch.testing.assert_close(outputs["block2.conv2"], seen["block2"])
    torch.testing.assert_close(outputs["block2.downsample.0"], seen["block2"])
    with torch.no_grad():
        stem = F.relu(network.norm(network.stem(images())))
    torch.testing.assert_close(outputs["stem"], stem)


def features_of(network, batch):
    """The tensors that represent the units, by name."""
    graph = trace(network, batch)
    found = {}

    def visit(position, function, args, kwargs, output):
        for unit in graph.units:
            if unit.feature == position:
                found[unit.name] = output.clone()

    watch(network, batch, visit)
    return found


def test_mobile_blocks_end_before_any_activation():
    network = seeded(TinyMobileNet())
    outputs = features_of(network, images())
    with torch.no_grad():
        x = network.stem(images())
        first = network.blocks[0](x)
        hidden = network.blocks[2].body[:3](network.blocks[1](first))
    torch.testing.assert_close(outputs["blocks.0.body.6"], first)
    torch.testing.assert_close(outputs["blocks.2.body.0"], hidden)


def test_downsample_is_tied_to_the_blocks_last_convolution():
    graph = trace(seeded(TinyResNet()), images())
    assert graph["block2.downsample.0"].group == graph["block2.conv2"].group
    tied = [members for members in graph.groups.values() if len(members) > 1]
    assert len(tied) == 1
    free = trace(seeded(TinyResNet()), images(), tie=False)
    assert len(free.groups) == len(free.units)


def test_blocks_and_stages():
    graph = trace(seeded(TinyMobileNet()), images())
    assert list(graph.blocks) == ["stem.0", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [graph[name].stage for name in ("stem.0", "blocks.0.body.0")] == [0, 0]
    assert [graph[n].stage for n in ("blocks.2.body.0", "head")] == [1, 2]


class Rotary(nn.Module):
    """Attention whose queries are turned: parts of one tensor are added and joined."""

    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):  # (N, T, 8)
        q = self.query(x)
        angles = torch.arange(x.shape[1])[:, None] * torch.ones(8)
        first, second = q.chunk(2, dim=-1)
        q = q * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
        scores = q @ q.transpose(1, 2) + torch.zeros(x.shape[1], x.shape[1]).tril()
        return self.out(scores.softmax(-1) @ q)


class RotaryLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.wide = Rotary(), nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.narrow(self.wide(x).relu())


def test_parts_of_one_tensor_are_no_branches_of_a_block():
    network = seeded(nn.Sequential(RotaryLayer(), RotaryLayer()))
    graph = trace(network, torch.arange(48.0).reshape(2, 3, 8).sin())
    assert [unit.block for unit in graph.units] == ["0"] * 4 + ["1"] * 4
