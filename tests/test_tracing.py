import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models

from nets import Chain, TinyMobileNet, TinyResNet, images, seeded
from ompq.errors import SampleError, TraceError
from ompq.graph import trace

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def architectures():
    return json.loads((FIXTURES / "architectures.json").read_text())["models"]


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2"])
def test_units_of_the_papers_networks_equal_the_reference(architectures, name):
    with torch.device("meta"):
        network = models.get_model(name, weights=None)
    network = network.to_empty(device="cpu")
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data.zero_()
    graph = trace(network, torch.zeros(1, 3, 224, 224))
    wanted = {layer["name"]: layer for layer in architectures[name]}
    assert set(graph.names) == set(wanted)
    for unit in graph.units:
        layer = wanted[unit.name]
        assert unit.macs == layer["macs"]
        assert unit.weights == layer["weight"]
        assert unit.bias_parameters == layer["bias"]
        assert unit.norm_parameters == layer["bn"]
    assert graph.float_parameters == 0
    assert graph.skipped == ()


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
    from ompq.recording import watch

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


def test_activation_is_what_reads_the_output():
    graph = trace(seeded(TinyMobileNet()), images())
    assert graph["stem.0"].activation == "relu6"
    assert graph["blocks.0.body.6"].activation == ""  # a linear bottleneck
    assert trace(seeded(TinyResNet()), images())["block1.conv2"].activation == ""
    assert trace(seeded(Chain()), images())["conv"].activation == "relu"


def test_kinds_and_macs_from_dimensions():
    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, (3, 1), dilation=2, padding=(2, 0))
            self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
            self.grouped = nn.Conv2d(8, 12, 3, groups=4, stride=2)
            self.pointwise = nn.Conv2d(12, 4, 1)
            self.transposed = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2)
            self.line = nn.Conv1d(6, 5, 3)
            self.volume = nn.Conv3d(1, 2, 2)
            self.linear = nn.Linear(7, 3)

        def forward(self, x):
            x = self.grouped(self.depthwise(self.conv(x)))
            x = self.transposed(self.pointwise(x))
            x = self.line(x.flatten(2))
            x = self.volume(x.reshape(x.shape[0], 1, 5, 2, -1))
            return self.linear(x.flatten(1)[:, :7])

    graph = trace(seeded(Kinds()), images(2))
    macs = {u.name: (u.kind, u.macs) for u in graph.units}
    assert macs == {
        "conv": ("conv", 8 * 8 * 8 * 3 * 3),
        "depthwise": ("depthwise", 8 * 6 * 6 * 9),
        "grouped": ("grouped", 12 * 2 * 2 * 2 * 9),
        "pointwise": ("pointwise", 4 * 2 * 2 * 12),
        "transposed": ("transposed", 4 * 2 * 2 * 3 * 4),
        "line": ("conv", 5 * 14 * 6 * 3),
        "volume": ("conv", 2 * 4 * 1 * 6 * 8),
        "linear": ("linear", 21),
    }


def test_odd_layers_are_named_with_reasons():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.twin = nn.Linear(4, 4)
            self.twin.weight = self.first.weight
            self.unused = nn.Linear(4, 4)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.twice = nn.Linear(4, 4, bias=False)
            self.layer_norm = nn.LayerNorm(4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            x = self.normed(self.twin(self.first(x)))
            x = self.layer_norm(self.twice(self.twice(x))) * self.scale
            return x @ x.transpose(0, 1)

    graph = trace(seeded(Odd()), torch.ones(2, 4))
    assert graph.names == ("first", "twice")
    assert graph["twice"].calls == 2
    assert graph["twice"].macs == 2 * 16
    reasons = {entry.name: entry.reason for entry in graph.skipped}
    assert reasons["twin"] == "shares the weight of first and gets its bits"
    assert reasons["unused"] == "never called in the forward pass"
    assert reasons["normed"].startswith("its weight is computed")
    assert reasons["layer_norm"] == "LayerNorm stays float: 8 parameters"
    assert reasons["(network)"] == "Odd stays float: 4 parameters"
    assert reasons["matmul()"].startswith("1 calls multiply activations")


def test_layer_that_transforms_its_weight_is_skipped():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight - self.weight.mean(), self.bias)

    network = nn.Sequential(Standardised(3, 4, 3), nn.Conv2d(4, 2, 1))
    graph = trace(seeded(network), images())
    assert graph.names == ("1",)
    assert graph.skipped[0].reason == (
        "Standardised does not use its weight as it is stored"
    )


def test_norm_is_found_by_data_flow_only():
    class Twice(nn.Module):
        """The norm is read by nothing else, but the convolution is read twice."""

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x):
            x = self.conv(x)
            return self.norm(x) + x

    graph = trace(seeded(Twice()), images())
    assert graph["conv"].norm == ""
    assert graph.float_parameters == 16  # weight, bias, mean, variance of the norm
    assert trace(seeded(TinyResNet()), images())["block1.conv1"].norm == "block1.bn1"


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_several_inputs_and_structured_outputs(form):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(5, 3)

        def forward(self, x, y):
            return {"sum": self.a(x) + self.b(y), "extra": (x,)}

    x, y = torch.ones(6, 4), torch.ones(6, 5)
    samples = (x, y) if form == "tuple" else {"x": x, "y": y}
    graph = trace(seeded(Pair()), samples)
    assert graph.names == ("a", "b")
    assert graph["a"].group == graph["b"].group  # they meet in a sum


def test_attention_projections_are_units():
    network = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    graph = trace(seeded(network), torch.ones(2, 5, 8))
    assert graph.names == (
        "self_attn.in_proj",
        "self_attn.out_proj",
        "linear1",
        "linear2",
    )
    assert graph["self_attn.in_proj"].macs == 5 * 24 * 8
    assert graph["self_attn.in_proj"].bias_parameters == 24
    assert graph["self_attn.out_proj"].parameter == "self_attn.out_proj.weight"
    assert len(graph.groups) == 4


def test_train_mode_network_is_observed_in_eval_mode_and_left_alone():
    network = seeded(TinyResNet()).train()
    network.block1.eval()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    trace(network, images())
    assert network.training
    assert network.block2.training
    assert not network.block1.training
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def test_failing_network_says_what_failed():
    with pytest.raises(TraceError, match="the network failed on the samples: Runtime"):
        trace(seeded(Chain()), torch.ones(2, 7, 8, 8))


def test_network_without_units_is_refused():
    with pytest.raises(TraceError, match="nothing to plan"):
        trace(nn.Sequential(nn.ReLU()), images())
    with pytest.raises(TraceError, match="nothing to plan; skipped: lost"):
        network = nn.Module()
        network.lost = nn.Linear(3, 3)
        network.forward = lambda x: x * 2
        trace(network, images())


def test_broken_weights_are_named():
    network = seeded(Chain())
    network.conv.weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(TraceError, match="NaN or infinity in conv"):
        trace(network, images())


def test_empty_samples_are_refused():
    with pytest.raises(SampleError, match="samples are empty"):
        trace(seeded(Chain()), images()[:0])


@pytest.mark.parametrize(
    "key", ["stem.0.weight", "stem.1.bias", "stem.1.running_var", "head.bias"]
)
def test_whatever_is_not_finite_is_named(key):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
            self.head, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)
            self.register_buffer("mask", torch.tensor(-torch.inf))

        def forward(self, x):
            return self.head(self.stem(x).mean((2, 3)).maximum(self.mask))

    network = seeded(Net())
    with torch.no_grad():
        network.unused.weight.fill_(torch.nan)  # nothing computes with it
    assert trace(network, images()).names == ("stem.0", "head")
    network.state_dict()[key].view(-1)[0] = torch.nan
    with pytest.raises(TraceError, match=f"^weights hold NaN or infinity in {key};"):
        trace(network, images())
