"""nn.MultiheadAttention with layers for its projections and visible products."""

import copy

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

import ompq
from nets import images, seeded, values
from ompq.layers import activation_quantizers, quantized_layers
from ompq.network.attention import LayeredAttention, with_layers, with_named_layers
from ompq.quantization.assembly import quantizer_names
from ompq.quantization.record import quantization_of

TINY = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
QUICK = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=20))
OPERANDS = ("query", "key", "value", "probabilities")


class Attending(nn.Module):
    """Calls an attention with some of its inputs."""

    def __init__(self, attention, order, **settings):
        super().__init__()
        self.attention, self.order, self.settings = attention, order, settings

    def forward(self, *given):
        chosen = [given[i] for i in self.order]
        return self.attention(*chosen, **self.settings)


def vision_transformer():
    return seeded(
        VisionTransformer(image_size=32, patch_size=8, num_classes=10, **TINY)
    )


def outputs(network, *given):
    with torch.no_grad():
        return network(*given)


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


ODD = {"kdim": 6, "vdim": 10, "add_bias_kv": True, "add_zero_attn": True}


@pytest.mark.parametrize("weights", ["none", "averaged", "all"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("settings", "order", "layers"),
    [
        ({}, (0, 0, 0), ["in_proj"]),
        ({"bias": False}, (0, 0, 0), ["in_proj"]),
        ({}, (0, 1, 1), ["q_proj", "k_proj", "v_proj"]),
        (ODD, (0, 1, 2), ["q_proj", "k_proj", "v_proj"]),
    ],
)
def test_layers_compute_what_the_module_does(
    settings, order, layers, batch_first, weights
):
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **settings)
    wanted = {
        "need_weights": weights != "none",
        "average_attn_weights": weights == "averaged",
    }
    network = seeded(Attending(attention, order, **wanted))
    widths = (8, settings.get("kdim", 8), settings.get("vdim", 8))
    given = tuple(
        values(3, 5 if i == 0 else 7, width, seed=i)
        for i, width in enumerate(widths[: max(order) + 1])
    )
    if not batch_first:
        given = tuple(each.transpose(0, 1).contiguous() for each in given)
    made = with_layers(network, given)
    names = [name for name, _ in made.attention.named_children()]
    assert names == ["out_proj", *layers]
    assert_close(outputs(made, *given), outputs(network, *given))
    assert with_layers(made, given) is made


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("floating", [False, True])
def test_masks_hide_what_they_hide_in_the_module(floating, several):
    attention = seeded(nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True))
    x = values(3, 5, 8)
    mask = torch.ones(5, 5).triu(1).bool()
    padding = torch.arange(5) >= torch.tensor([[5], [4], [3]])
    if several:
        mask = mask.expand(6, 5, 5)
    if floating:
        mask, padding = (
            torch.zeros(each.shape).masked_fill(each, -3.0) for each in (mask, padding)
        )
    made = with_layers(attention, (x, x, x))
    for wanted in (False, True):
        given = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": wanted}
        found, expected = (
            outputs(lambda x, net=net, given=given: net(x, x, x, **given), x)
            for net in (made, attention)
        )
        assert_close(found, expected)
    single = x[0], x[0], x[0]
    found, expected = (
        outputs(lambda *x, net=net: net(*x, key_padding_mask=padding[2]), *single)
        for net in (made, attention)
    )
    assert_close(found, expected)


def test_the_network_shares_its_weights_and_stays_as_it_is():
    network = vision_transformer()
    before = copy.deepcopy(network.state_dict())
    made = with_layers(network, images(2, size=32))
    layer, own = (net.encoder.layers[0].self_attention for net in (made, network))
    assert layer.in_proj.weight is own.in_proj_weight
    assert layer.in_proj_weight is None
    assert type(own) is nn.MultiheadAttention
    assert network.state_dict().keys() == before.keys()
    assert made.conv_proj.weight is network.conv_proj.weight
    assert made.conv_proj is not network.conv_proj
    plain = seeded(nn.Sequential(nn.Linear(3, 2)))
    assert with_layers(plain, values(2, 3)) is plain


def test_a_module_that_may_compute_more_is_left_alone_and_listed():
    class Doubled(nn.MultiheadAttention):
        def forward(self, *given, **settings):
            output, weights = super().forward(*given, **settings)
            return 2 * output, weights

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = Doubled(8, 2), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.attention(x, x, x)[0])

    graph = ompq.trace(seeded(Net()), values(4, 5, 8))
    assert graph.names == ("head",)
    reasons = {entry.name: entry.reason for entry in graph.skipped}
    assert reasons["attention"] == "Doubled stays float: 216 parameters"
    assert reasons["attention.out_proj"] == "never called in the forward pass"


def in_timm(network):
    """Return timm's network with the weights of torchvision's."""
    module = pytest.importorskip("timm.models.vision_transformer")
    made = module.VisionTransformer(
        img_size=32,
        patch_size=8,
        num_classes=10,
        embed_dim=32,
        depth=2,
        num_heads=2,
        mlp_ratio=2,
    )
    words = {
        "class_token": "cls_token",
        "encoder.pos_embedding": "pos_embed",
        "conv_proj.": "patch_embed.proj.",
        "encoder.layers.encoder_layer_": "blocks.",
        "self_attention.in_proj_": "attn.qkv.",
        "self_attention.out_proj": "attn.proj",
        "ln_": "norm",
        "encoder.ln": "norm",
        "mlp.0": "mlp.fc1",
        "mlp.3": "mlp.fc2",
        "heads.head": "head",
    }
    state = {}
    for key, tensor in network.state_dict().items():
        for ours, theirs in words.items():
            key = key.replace(ours, theirs)
        state[key] = tensor
    made.load_state_dict(state)
    return made.eval()


@pytest.mark.parametrize("bits", [(8, 8), (4, 8), (4, 4)])
def test_torchvision_and_timm_are_quantized_alike(bits):
    ours, samples = vision_transformer(), images(16, size=32)
    theirs = in_timm(ours)
    assert_close(outputs(ours, samples), outputs(theirs, samples))
    quantized = [ompq.quantize(net, {"*": bits}, samples) for net in (ours, theirs)]
    records = [quantization_of(net) for net in quantized]
    shapes, sites = zip(
        *(
            (
                [(u.kind, u.weight_shape, u.macs) for u in record.graph.units],
                [(s.bits, s.operand, s.product, s.powers) for s in record.sites],
            )
            for record in records
        ),
        strict=True,
    )
    assert shapes[0] == shapes[1]
    assert sites[0] == sites[1]
    assert [s[1] for s in sites[0] if s[1]] == [*OPERANDS, *OPERANDS]
    scales, zero_points = (
        [[getattr(q, part).item() for q in ranges(net)] for net in quantized]
        for part in ("scale", "zero_point")
    )
    assert scales[0] == pytest.approx(scales[1], rel=1e-4)
    assert zero_points[0] == zero_points[1]
    found, expected = (outputs(net, samples) for net in quantized)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def ranges(network):
    found = activation_quantizers(network)
    sites = quantization_of(network).sites
    return [found[name] for name in quantizer_names(network, sites)]


@pytest.mark.parametrize("bits", [(8, 8), (4, 8)])
def test_a_vision_transformer_goes_all_the_way(bits, tmp_path):
    network, samples = vision_transformer(), images(16, size=32)
    plan = ompq.plan(network, samples, "4bits")
    quantized = ompq.quantize(network, {"*": bits}, samples)
    assert quantization_of(quantized).graph.names == plan.graph.names
    better = ompq.reconstruct(quantized, network, samples, QUICK)
    record = quantization_of(better)
    blocks = [f"encoder.layers.encoder_layer_{i}" for i in (0, 1)]
    assert [e.block for e in record.errors] == ["conv_proj", *blocks, "heads.head"]
    layers = quantized_layers(better)
    assert set(layers) == set(record.graph.names)
    learned = [
        name
        for name, layer in layers.items()
        if not layer.codes().equal(quantized_layers(quantized)[name].codes())
    ]
    assert any(name.endswith("in_proj") for name in learned) or bits[0] == 8
    ompq.save(better, tmp_path / "net.ompq.safetensors")
    loaded = ompq.load(tmp_path / "net.ompq.safetensors", vision_transformer)
    assert torch.equal(outputs(loaded, samples), outputs(better, samples))
    pytest.importorskip("onnxruntime")
    result = ompq.export(better, tmp_path / "net.onnx", samples)
    assert [one.name for one in result.weights] == list(record.graph.names)
    assert result.simulated.top1 == 1.0


def test_a_decoder_reads_two_tensors_and_comes_back_from_a_file(tmp_path):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            settings = {"dropout": 0.0, "batch_first": True}
            self.layer = nn.TransformerDecoderLayer(8, 2, 16, **settings)
            self.head = nn.Linear(8, 3)

        def forward(self, x, memory):
            return self.head(self.layer(x, memory).mean(1))

    given = values(8, 4, 8), values(8, 6, 8, seed=1)
    network = seeded(Decoder())
    nearest = ompq.QuantizeConfig(output_error=False)  # keeps weights as they are
    quantized = ompq.quantize(network, {"*": (4, 8)}, given, nearest)
    assert isinstance(quantized.layer.self_attn, LayeredAttention)
    names = ["self_attn.in_proj", *(f"multihead_attn.{x}_proj" for x in "qkv")]
    assert {f"layer.{name}" for name in names} <= set(quantized_layers(quantized))
    rows = network.layer.multihead_attn.in_proj_weight[8:16]
    layer = quantized.layer.multihead_attn.k_proj
    # Restoring moments scales channels a little.
    torch.testing.assert_close(layer.weight, rows, rtol=0, atol=1e-3)
    graph = quantization_of(quantized).graph
    macs = [graph[f"layer.multihead_attn.{x}_proj"].macs for x in "qkv"]
    assert macs == [4 * 8 * 8, 6 * 8 * 8, 6 * 8 * 8]
    better = ompq.reconstruct(quantized, network, given, QUICK)
    ompq.save(better, tmp_path / "net.ompq.safetensors")
    loaded = ompq.load(tmp_path / "net.ompq.safetensors", Decoder)
    assert torch.equal(outputs(loaded, *given), outputs(better, *given))


def test_padded_tokens_do_not_need_the_fused_kernels():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.head = nn.Linear(8, 3)

        def forward(self, x, padding):
            x = self.encoder(x, src_key_padding_mask=padding > 0)
            return self.head(x[:, 0])

    samples = values(8, 5, 8), (torch.arange(5) >= 3).float().expand(8, 5)
    network = seeded(Encoder())
    quantized = ompq.quantize(network, {"*": (8, 8)}, samples)
    expected = network(*samples).detach()  # with gradients nothing is fused
    found = outputs(quantized, *samples)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


def test_scores_and_histograms_take_the_network_itself():
    network, samples = vision_transformer(), images(8, size=32)
    plan = ompq.plan(network, samples, "4bits")
    given = ompq.scores.ScoreInputs(
        plan.graph, network, ompq.Samples.of(samples), plan.choices
    )
    assert (ompq.scores.WeightNoise()(given).damage > 0).all()
    quantized = ompq.quantize(network, plan, samples)
    shown = ompq.report.layer_histograms(quantized, network, plan, samples, count=10)
    assert any("in_proj, inputs" in one.name for one in shown)


def test_older_files_have_one_layer_for_several_tensors():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    network = seeded(Attending(attention, (0, 1, 1)))
    given = values(3, 5, 8), values(3, 7, 8, seed=1)
    made = with_named_layers(network, ["attention.in_proj", "attention.out_proj"])
    assert [name for name, _ in made.attention.named_children()][1:] == ["in_proj"]
    assert_close(outputs(made, *given), outputs(network, *given))
