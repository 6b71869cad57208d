import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models

import ompq
from nets import (
    Chain,
    Recurrent,
    TinyMobileNet,
    TinyResNet,
    images,
    scenes,
    seeded,
    tokens,
)
from ompq.costs import unit_bytes
from ompq.errors import PatternError, QuantizationError, SampleError, TraceError
from ompq.network.graph import find_units, stored_dtype, trace
from ompq.network.observation import record
from ompq.network.units import LayerGraph, select

NAMES = ("stem", "layer1.conv1", "layer1.conv2", "layer2.conv1", "head")


@pytest.fixture(scope="module")
def graph():
    return trace(seeded(TinyResNet()), images())


def test_pattern_without_match_lists_units():
    with pytest.raises(
        PatternError, match="'conv' matches no unit; the 5 units are stem, layer1.conv1"
    ):
        select(NAMES, "conv")
    with pytest.raises(PatternError, match="and 2 more"):
        select([*NAMES, "x", "y"], "nothing")
    with pytest.raises(PatternError, match=r"'re:\[' is not a regular expression: "):
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
    assert [unit.name for unit in graph] == list(graph.names)


def test_json_round_trip(graph):
    assert LayerGraph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


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
    assert graph.float_bytes == 0
    assert graph.skipped == ()


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
    counts = {entry.name: (entry.kind, entry.parameters) for entry in graph.skipped}
    assert counts["layer_norm"] == ("LayerNorm", 8)
    assert counts["twin"] == ("", 0)
    (act,) = trace(nn.Sequential(nn.Linear(4, 4), nn.PReLU()), torch.ones(2, 4)).skipped
    assert act.reason == "PReLU stays float: 1 parameter"
    assert reasons["matmul()"].startswith("multiplies activations (1 ×): no")


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
    assert graph.float_bytes == 4 * 16  # weight, bias, mean, variance of the norm
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
    with pytest.raises(TraceError, match=r"a single layer: wrap it in nn.Sequential"):
        trace(nn.Linear(4, 2), torch.zeros(3, 4))


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


def chain(count):
    layers = []
    for _ in range(count):
        layers += [nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2), nn.ReLU()]
    return seeded(nn.Sequential(*layers))


def work(network):
    """Count the function calls that find a network's units."""
    import sys

    recording, count = record(network, torch.ones(1, 2, 1, 1)), 0

    def profiler(_frame, event, _arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profiler)
    find_units(network, recording)
    sys.setprofile(None)
    return count


def test_work_grows_in_proportion_to_the_units():
    few, many = (work(chain(n)) for n in (20, 80))
    assert many < 4.4 * few


def test_threads_that_plan_one_network_wait_for_each_other():
    network, samples = seeded(TinyMobileNet()).train(), scenes(8)
    modes = [module.training for module in network.modules()]
    expected = ompq.plan(network, samples, "4bits")
    with ThreadPoolExecutor(6) as pool:
        plans = [pool.submit(ompq.plan, network, samples, "4bits") for _ in range(24)]
        found = [plan.result() for plan in plans]
    assert {plan.hash for plan in found} == {expected.hash}
    assert [module.training for module in network.modules()] == modes
    assert not any(module._forward_hooks for module in network.modules())


def test_calls_that_other_threads_make_are_not_recorded():
    class Meanwhile(nn.Sequential):
        def forward(self, x):
            if self.meanwhile:
                self.meanwhile = False
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(self, x).result()
            return super().forward(x)

    network = seeded(Meanwhile(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    network.meanwhile = False
    expected = record(network, torch.ones(1, 2))
    network.meanwhile = True
    assert record(network, torch.ones(1, 2)) == expected
    assert not network.meanwhile


class Buffers(nn.Module):
    """Holds tensors of many types beside its layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("wide", torch.ones(7, dtype=torch.float64))
        self.register_buffer("narrow", torch.ones(5, dtype=torch.float16))
        self.register_buffer("flags", torch.ones(11, dtype=torch.bool))
        self.register_buffer("large", torch.tensor([0, 2**40]))
        self.register_buffer("middle", torch.tensor([-(2**20), 7, 8]))
        self.register_buffer("small", torch.arange(13))
        self.register_buffer("signed", torch.arange(-3, 0, dtype=torch.int8))
        self.register_buffer("same", self.wide)
        self.register_buffer("transient", torch.ones(100), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.wide[:4].float()


def test_float_bytes_are_those_of_each_tensors_type():
    graph = trace(seeded(Buffers()), torch.ones(2, 4))
    by_hand = 7 * 8 + 5 * 2 + 11 + 2 * 8 + 3 * 4 + 13 + 3
    assert graph.float_bytes == by_hand
    assert stored_dtype(torch.zeros(0, dtype=torch.int64)) == torch.uint8
    assert stored_dtype(torch.tensor([256])) == torch.int16


def test_the_bytes_that_stay_float_are_those_of_the_file(tmp_path):
    network, samples = seeded(Buffers()), torch.randn(8, 4)
    plan = ompq.plan(network, samples, "4bits")
    ompq.save(ompq.quantize(network, plan, samples), tmp_path / "net.safetensors")
    account = ompq.inspect_file(tmp_path / "net.safetensors")
    assert account.items["float"] == account.planned["float"] == plan.graph.float_bytes


class Language(nn.Module):
    """Its head reads the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(F.relu(self.body(self.embedding(tokens))))


def test_tied_weights_are_counted_once(tmp_path):
    network, samples = seeded(Language()), torch.arange(48).reshape(8, 6)
    plan = ompq.plan(network, samples, "4bits")
    assert plan.graph.names == ("body", "head")
    assert plan.graph.float_bytes == 0
    quantized = ompq.quantize(network, plan, samples)
    ompq.save(quantized, tmp_path / "net.safetensors", plan=plan)
    account = ompq.inspect_file(tmp_path / "net.safetensors")
    assert account.items["float"] == 0
    assert account.items["biases"] == account.planned["biases"] == 4 * 8  # the body's
    assert account.file_bytes <= account.planned_bytes
    loaded = ompq.load(tmp_path / "net.safetensors", Language)
    assert torch.equal(loaded(samples), quantized.eval()(samples))


def test_float64_weights_take_eight_bytes():
    network = seeded(Chain()).double()
    graph = trace(network, images().double())
    config = ompq.PlanConfig(pinned={"*": 32})
    plan = ompq.plan(network, images().double(), "200%", config)
    parameters = sum(p.numel() for p in network.parameters())
    assert {unit.element_size for unit in graph.units} == {8}
    units = sum(unit_bytes(u, plan.allocation[u.name]).total for u in graph.units)
    assert units == 8 * parameters + 2 * 8  # and two activations


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"weight_shape": ["a" * 999, 6_000_000]},
            r"weight_shape\[0\] must be a whole n",
        ),
        ({"weight_shape": [10**9, 10**9]}, "unit stem has 1,000,000,.* weights"),
        ({"weight_shape": [0, 2]}, r"weight_shape=\[0, 2\] is not a shape"),
        ({"weight_shape": []}, r"weight_shape=\[\] is not a shape"),
        ({"weight_shape": [1] * 10**5}, r"weight_shape=\[1, .{0,40}\] is not a shape"),
        ({"weight_shape": 7}, "weight_shape must be a list, not 7"),
        ({"macs": 10**400}, "macs must be a whole number of at most .*, not 1000"),
        ({"macs": -2}, "macs must be a whole number of at least 0, not -2"),
        ({"macs": True}, "macs must be a whole number, not True"),
        ({"macs": 1.5}, "macs must be a whole number, not 1.5"),
        ({"name": ["x"]}, "name must be text, not a list of 1 entries"),
        ({"name": "block1.conv1"}, "two units have the same name"),
        ({"colour": 1}, r"units\[0\] has no field colour"),
    ],
)
def test_hostile_graphs_are_refused(graph, change, words):
    data = json.loads(json.dumps(graph.to_json()))
    data["units"][0].update(change)
    with pytest.raises(ValueError, match=words):
        LayerGraph.from_json(data)


@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_embeddings_and_recurrent_layers_hold_units(layer, gates):
    tokens = torch.arange(28).reshape(4, 7) % 20
    graph = trace(seeded(Recurrent(layer)), tokens)
    assert [(unit.name, unit.kind) for unit in graph.units] == [
        ("embedding", "embedding"),
        ("recurrent.weight_ih_l0", "recurrent"),
        ("recurrent.weight_hh_l0", "recurrent"),
        ("head", "linear"),
    ]
    shapes = [unit.weight_shape for unit in graph.units]
    assert shapes == [(20, 6), (gates * 5, 6), (gates * 5, 5), (3, 5)]
    # Seven steps; a lookup multiplies nothing.
    assert [unit.macs for unit in graph.units] == [
        0,
        7 * gates * 5 * 6,
        7 * gates * 5 * 5,
        3 * 5,
    ]
    assert graph.float_bytes == 4 * 2 * gates * 5  # the two biases
    assert [unit.replaced for unit in graph.units] == [False, False, False, True]


def test_tables_that_are_added_up_choose_their_bits_alone():
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.kinds = nn.Embedding(9, 6), nn.Embedding(2, 6)
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, ids):
            x = self.words(ids) + self.kinds(ids * 0)
            return self.first(x) + self.second(x)

    graph = trace(seeded(Summed()), torch.arange(6).reshape(2, 3))
    groups = [[graph.names[at] for at in each] for each in graph.groups.values()]
    assert sorted(groups) == [["first", "second"], ["kinds"], ["words"]]


def test_networks_that_hide_what_they_compute_are_refused():
    network, inputs = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(3, 4)
    compiled = torch.compile(network, backend="eager")
    with pytest.raises(TraceError, match=r"torch\.compile.*_orig_mod, a Sequential"):
        ompq.plan(compiled, inputs, "4bits")
    network.forward = torch.inference_mode()(network.forward)
    with pytest.raises(TraceError, match=r"inference_mode\(\).*use torch\.no_grad"):
        ompq.plan(network, inputs, "4bits")


def test_samples_with_padding_show_what_masks_do():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

        def forward(self, input_ids, attention_mask):
            x = self.words(input_ids)
            if not attention_mask.all():  # as encoders of transformers do
                x = x * attention_mask[..., None]
            return self.head(x.mean(1))

    ids, mask = torch.arange(20).reshape(4, 5) % 9, torch.ones(4, 5, dtype=torch.long)
    mask[2, 3:] = 0
    samples = {"input_ids": ids, "attention_mask": mask}
    assert ompq.plan(seeded(Masked()), samples, "4bits").scores.orm is not None


def test_layers_without_weights_are_skipped():
    with pytest.warns(UserWarning, match="zero-element"):
        empty = nn.Linear(4, 0), nn.Linear(0, 4)
    network = nn.Sequential(*empty, nn.Linear(4, 2)).eval()
    graph = trace(network, torch.ones(3, 4))
    assert graph.names == ("2",)
    reasons = {each.name: each.reason for each in graph.skipped}
    assert reasons == dict.fromkeys(("0", "1"), "its weight is empty")


def test_linear_units_of_many_inputs_have_groups(tmp_path):
    graph = trace(tokens(), images(2))
    assert graph.group_size == 0 and "group_size" not in str(graph.to_json())
    grouped = graph.grouped(32)
    sizes = {unit.name: unit.group_size for unit in grouped.units}
    assert sizes == {
        "embed": 0,  # a convolution
        "attention.in_proj": 32,
        "attention.out_proj": 32,
        "up": 32,
        "down": 32,
        "head": 0,  # 24 inputs
    }
    assert LayerGraph.from_json(json.loads(json.dumps(grouped.to_json()))) == grouped
    assert grouped.grouped(None) == graph
    recurrent = trace(seeded(Recurrent()), torch.zeros(1, 3, dtype=torch.long))
    assert recurrent.grouped(32) == recurrent


@pytest.mark.parametrize(("name", "size"), [("up", 33), ("embed", 32)])
def test_groups_that_cannot_be_are_refused(name, size):
    grouped = trace(tokens(), images(2)).grouped(32)
    data = json.loads(json.dumps(grouped.to_json()))
    unit = next(one for one in data["units"] if one["name"] == name)
    unit["group_size"] = size
    with pytest.raises(
        ValueError, match=f"unit {name} .* cannot have groups of {size}"
    ):
        LayerGraph.from_json(data)


def test_super_blocks_need_whole_rows():
    grouped = trace(tokens(), images(2)).grouped(32)
    assert grouped.with_super_blocks() == grouped  # no row of 256
    data = json.loads(json.dumps(grouped.to_json()))
    for unit in data["units"]:
        unit["super_blocks"] = unit["name"] == "up"
    with pytest.raises(
        ValueError,
        match=f"unit up with rows of {grouped['up'].row_length} and groups of 32 "
        "cannot have super-blocks of 256",
    ):
        LayerGraph.from_json(data)


@pytest.mark.parametrize(
    "name", ["a\nb", "esc\x1b[31m", "half \ud800", "\u202egnp", "x" * 1001]
)
def test_names_that_no_file_may_hold_are_refused_at_once(name):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    model.add_module(name, nn.Conv2d(4, 4, 1))
    for verb in (
        lambda: ompq.plan(model, images(), "4bits"),
        lambda: ompq.quantize(model, {"*": 4}, images()),
        lambda: trace(model, images()),
    ):
        with pytest.raises(
            QuantizationError, match="has a module or tensor '.*'; names must have at"
        ):
            verb()


def test_wide_spaces_in_names_are_kept(tmp_path):
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    model.add_module("全角\u3000and\u00a0", nn.Conv2d(4, 4, 1))
    quantized = ompq.quantize(model, {"*": 4}, images())
    ompq.save(quantized, tmp_path / "a", network="line\nbreak")
    loaded = ompq.load(tmp_path / "a", model)
    assert torch.equal(loaded(images()), quantized(images()))
    assert ompq.inspect_file(tmp_path / "a").about["network"] == "line\\nbreak"


def test_networks_without_weights_are_told_so():
    lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4))
    with pytest.raises(TraceError, match="0.weight is not initialized: run the netwo"):
        ompq.plan(lazy, torch.zeros(4, 12), "4bits")
    with torch.device("meta"):
        empty = TinyResNet()
    with pytest.raises(TraceError, match="stem.weight is on the meta device: load"):
        ompq.plan(empty, images(), "4bits")


def test_samples_of_a_shape_that_the_network_does_not_take_are_told_at_once():
    model = seeded(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    words = r"takes samples of shape \(8,\), but not of \(9,\) \(.*cannot be multiplied"
    for verb in (
        lambda given: ompq.plan(model, given, "4bits"),
        lambda given: ompq.quantize(model, {"*": 4}, given),
    ):
        with pytest.raises(SampleError, match=words):
            verb([torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4, 9)])


def test_samples_with_masks_are_told_from_inputs():
    model = seeded(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    words = "takes 2 positional .* samples are tuples of 2, one for each argument"
    with pytest.raises(TraceError, match=words):
        ompq.plan(model, [(torch.zeros(4, 8), torch.ones(4, 8))], "4bits")
