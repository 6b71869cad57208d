"""Channels are equalized before rounding, and their moments restored after it."""

import copy
from itertools import product

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import ompq
from nets import TinyMobileNet, TinyResNet, scenes, seeded
from ompq.allocation.problem import Allocation
from ompq.layers import activation_quantizers, quantized_layers
from ompq.network.observation import record
from ompq.network.units import Choice
from ompq.quantization.equalization import (
    Equalized,
    equalize_channels,
    find_factors,
    find_pairs,
)
from ompq.quantization.record import quantization_of
from ompq.samples import Samples, attached
from ompq.training.batch_norms import fold_norms, keep_norms


def rows(seed=0):
    return torch.randn(32, 5, 8, generator=torch.Generator().manual_seed(seed))


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def factors(model, samples, *, bits=(8, 8), **options):
    graph = ompq.trace(model, samples)
    recording = record(model, samples[:1])
    given = dict.fromkeys(graph.names, Choice(*bits))
    pairs = find_pairs(model, recording, graph.units, given, 6, samples[:1])
    return find_factors(model, pairs, Samples.of(samples), batch_size=16, **options)


def uneven(seed=0):
    """Return a network some of whose hidden channels are far smaller than others."""
    model = seeded(TinyMobileNet(width=16), seed)
    with torch.no_grad():
        for block in model.blocks:
            norm = block.body[1]
            sizes = torch.linspace(0, -7, norm.num_features).exp2()
            norm.weight.mul_(sizes)
            norm.bias.mul_(sizes)
            depthwise = block.body[3]
            depthwise.weight.div_(sizes.reshape(-1, 1, 1, 1))
    return model


def uniform(model, samples, weight=8, activation=8):
    names = ompq.trace(model, samples).names
    return Allocation(dict.fromkeys(names, Choice(weight, activation)))


def made(model, samples, *, weight=8, activation=8, **config):
    bits = uniform(model, samples, weight, activation)
    return ompq.quantize(model, bits, samples, ompq.QuantizeConfig(**config))


def error(network, model, samples):
    with torch.no_grad():
        wanted = model(samples)
        return (
            (network(samples) - wanted).square().sum() / wanted.square().sum()
        ).item()


class Two(nn.Module):
    """A layer, and a depthwise one that reads what it gives, by way of something."""

    def __init__(self, way=None, *, channels=6, multiplier=1, norm=None, bias=True):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 1, bias=bias)
        self.norm = norm
        self.way = way or nn.Identity()
        self.second = nn.Conv2d(
            channels, multiplier * channels, 3, padding=1, groups=channels
        )

    def forward(self, x):
        x = self.first(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.second(self.way(x))


class Elsewhere(Two):
    """What the first layer gives is read by something else as well."""

    def forward(self, x):
        x = F.relu(self.first(x))
        return self.second(x) + x


class Returned(Two):
    """What the first layer gives is returned as well."""

    def forward(self, x):
        x = F.relu(self.first(x))
        return self.second(x), x


class Again(Two):
    """The first layer runs twice."""

    def forward(self, x):
        return self.second(F.relu(self.first(x))) + self.first(x)


class Late(Two):
    """The norm stands after the activation."""

    def forward(self, x):
        return self.second(self.norm(F.relu(self.first(x))))


class Alone(nn.Sequential):
    """A depthwise layer reads what the network gets."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 3, 3, groups=3))


def of_many_sizes(model):
    """Give the channels of a first layer, which has no norm, different sizes."""
    seeded(model)
    first = getattr(model, "first", None)
    if first is not None:
        with torch.no_grad():
            first.weight.mul_(
                torch.linspace(0, -9, len(first.weight)).exp2()[:, None, None, None]
            )
            if first.bias is not None:
                first.bias.zero_()
    return model.eval()


WAYS = {
    "nothing": Two(),
    "relu": Two(nn.ReLU(inplace=True)),
    "relu6": Two(nn.ReLU6()),
    "leaky": Two(nn.LeakyReLU(0.1)),
    "several": Two(nn.ReLU(), multiplier=3),
    "unbiased": Two(nn.ReLU(), bias=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_network_computes_the_same_to_the_last_bit(way):
    model, samples = of_many_sizes(copy.deepcopy(WAYS[way])), scenes(16)
    (found,) = factors(model, samples)
    assert found[:2] == ("first", "second") and max(found.exponents) > 3
    other = equalize_channels(model, [found])
    with torch.no_grad():
        assert torch.equal(other(samples), model(samples))
        channels = other.first(samples) / model.first(samples)
    for channel, exponent in enumerate(found.exponents):
        assert torch.all(channels[:, channel] == 2.0**exponent)


def test_norms_take_the_factors_of_the_layers_before_them():
    model, samples = uneven(), scenes(32)
    found = factors(model, samples)
    names = [f"blocks.{number}.body" for number in range(3)]
    assert [(f"{name}.1", f"{name}.3") for name in names] == [one[:2] for one in found]
    other = equalize_channels(model, found)
    with torch.no_grad():
        assert torch.equal(other(samples), model(samples))
    assert torch.equal(other.blocks[0].body[0].weight, model.blocks[0].body[0].weight)


def test_channels_go_three_quarters_of_the_way_to_one_size():
    model, samples = of_many_sizes(Two(nn.ReLU())), scenes(16)
    with torch.no_grad():
        model.first.weight[2] = 0  # a channel that is always 0
        model.first.weight[5] *= 2**-20  # and one of next to nothing
        sizes = F.relu(model.first(samples)).amax((0, 2, 3))
    (found,) = factors(model, samples)
    for size, exponent in zip(sizes, found.exponents, strict=True):
        ratio = (sizes.max() / size).item() if size else 1.0
        fitting = [power for power in range(7) if 2.0**power <= ratio**0.75]
        assert exponent == max(fitting)


REFUSED = {
    "read elsewhere": Elsewhere(),
    "returned": Returned(),
    "run again": Again(),
    "curved": Two(nn.SiLU()),
    "clipped otherwise": Two(nn.Hardtanh(-1, 1)),
    "norm after the activation": Late(norm=nn.BatchNorm2d(6)),
    "norm without sizes": Two(nn.ReLU(), norm=nn.BatchNorm2d(6, affine=False)),
    "the network's input": Alone(),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_would_change_the_network_is_left(why):
    model, samples = copy.deepcopy(REFUSED[why]), scenes(8)
    if "without" not in why:
        of_many_sizes(model)
    assert factors(model.eval(), samples) == ()


def test_two_layers_with_one_weight_are_left():
    model, samples = of_many_sizes(Two(nn.ReLU())), scenes(8)
    both = nn.Sequential(model, nn.Conv2d(6, 3, 1), copy.deepcopy(model))
    both[2].first.weight = both[0].first.weight
    assert [one.reader for one in factors(both, samples)] == []


def test_a_network_without_depthwise_layers_is_returned_as_it_is():
    model, samples = seeded(TinyResNet()), scenes(8)
    assert factors(model, samples) == () and equalize_channels(model, ()) is model


def test_samples_without_a_batch_axis_and_other_dimensions():
    model = seeded(
        nn.Sequential(
            nn.Conv1d(2, 4, 1, bias=False), nn.ReLU(), nn.Conv1d(4, 4, 3, groups=4)
        )
    )
    with torch.no_grad():
        model[0].weight[0] *= 64
    x = torch.randn(16, 2, 9, generator=torch.Generator().manual_seed(3))
    (found,) = factors(model, x)
    assert found.exponents[0] == 0 and min(found.exponents[1:]) >= 3
    with torch.no_grad():
        assert torch.equal(equalize_channels(model, [found])(x), model(x))


@pytest.mark.parametrize(
    ("name", "count"), [("mobilenet_v2", 17), ("shufflenet_v2_x0_5", 16)]
)
def test_real_networks_compute_the_same_to_the_last_bit(name, count):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.01, 2)
                module.bias.uniform_(-0.3, 0.3)
    samples, seen = scenes(4, size=64), []
    found = factors(model, samples, report=lambda *done: seen.append(done))
    assert len(found) == count and seen == [(1, 1)]
    with torch.no_grad():
        assert torch.equal(equalize_channels(model, found)(samples), model(samples))


def test_one_step_fits_all_channels_better_and_weights_are_rounded_alike():
    model, samples = uneven(), scenes(64)
    plain = {"restore_moments": False, "output_error": False}
    without, given = (
        made(model, samples, equalize=equalize, **plain) for equalize in (False, True)
    )
    assert quantization_of(without).equalized == ()
    assert len(quantization_of(given).equalized) == 3
    pairs = zip(
        quantized_layers(without).values(),
        quantized_layers(given).values(),
        strict=True,
    )
    assert all(torch.equal(one.codes(), other.codes()) for one, other in pairs)
    assert error(given, model, samples) < 0.5 * error(without, model, samples)


@pytest.mark.parametrize(
    ("stem", "depthwise", "start", "count"),
    [
        (6, 6, 6, 1),
        (6, 5, 6, 0),
        (5, 6, 6, 0),
        (8, 7, 6, 1),
        (5, 5, 5, 1),
        (6, 6, 7, 0),
    ],
)
def test_pairs_of_few_bits_are_left_alone(stem, depthwise, start, count):
    model, samples = of_many_sizes(Two(nn.ReLU())), scenes(16)
    first, second = ompq.trace(model, samples).names
    bits = {first: Choice(stem, 8), second: Choice(depthwise, 8)}
    config = ompq.QuantizeConfig(equalize_from=start)
    network = ompq.quantize(model, ompq.Allocation(bits), samples, config)
    assert len(quantization_of(network).equalized) == count


def test_float_activations_need_no_factors():
    network = made(uneven(), scenes(16), activation=32)
    assert quantization_of(network).equalized == ()


def test_blocks_are_reconstructed_to_channels_of_the_new_sizes():
    model, samples = uneven(), scenes(64)
    network = made(model, samples, weight=4, equalize_from=4, output_error=False)
    config = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=20))
    better = ompq.reconstruct(network, model, samples, config)
    # The channels of the stem are not compared with those of another size.
    assert all(one.before < 0.5 for one in quantization_of(better).errors)
    assert error(better, model, samples) < error(network, model, samples)


def test_a_depthwise_layer_that_stands_alone_is_reconstructed():
    model, samples = of_many_sizes(Two(nn.ReLU())), scenes(64)
    network = made(model, samples, weight=4, equalize_from=4)
    config = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=20))
    first, second = quantization_of(
        ompq.reconstruct(network, model, samples, config)
    ).errors
    assert first.block == "first" and first.before < 0.1 and second.before < 0.1


def test_kept_norms_have_the_new_sizes():
    model, samples = uneven(), scenes(64)
    network = made(model, samples)
    kept = copy.deepcopy(network)
    keep_norms(kept, model)
    with torch.no_grad():
        assert torch.allclose(kept(samples), network(samples), atol=1e-4)
    # With the statistics of the batch too they give what the float network's give.
    for quantizer in activation_quantizers(kept).values():
        quantizer.enabled = False
    for layer in quantized_layers(kept).values():
        if layer.norm is not None:
            layer.norm.norm.train()
    assert error(kept, copy.deepcopy(model).train(), samples) < 0.01
    fold_norms(kept)
    assert all(layer.norm is None for layer in quantized_layers(kept).values())


def test_a_file_remembers_the_factors(tmp_path):
    model, samples = uneven(), scenes(16)
    network = made(model, samples, weight=4, equalize_from=4)
    ompq.save(network, tmp_path / "n.ompq.safetensors")
    loaded = ompq.load(tmp_path / "n.ompq.safetensors", model)
    assert quantization_of(loaded).equalized == quantization_of(network).equalized
    assert all(isinstance(one, Equalized) for one in quantization_of(loaded).equalized)
    with torch.no_grad():
        assert torch.equal(loaded(samples), network(samples))


@pytest.mark.cuda
@cuda
def test_factors_are_the_same_on_cuda():
    model, samples = uneven(), scenes(32)
    there = copy.deepcopy(model).cuda()
    found = factors(there, samples.cuda())
    assert found == factors(model, samples)
    with torch.no_grad():
        x = samples.cuda()
        assert torch.allclose(equalize_channels(there, found)(x), there(x), atol=1e-5)


class NormNet(nn.Module):
    def __init__(self, *, bias=True):
        super().__init__()
        self.norm, self.first = nn.LayerNorm(8), nn.Linear(8, 6, bias=bias)
        self.act, self.second = nn.GELU(), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.act(self.first(self.norm(x))))


def norm_net(sizes=(1.0,) * 8, means=(0.0,) * 8, **options):
    """Return a network with a LayerNorm whose channels differ in size and mean."""
    network = seeded(NormNet(**options))
    with torch.no_grad():
        network.norm.weight.copy_(torch.as_tensor(sizes))
        network.norm.bias.copy_(torch.as_tensor(means))
    return network


def test_channels_of_a_layer_norm_are_brought_nearer_to_one_size():
    network, x = norm_net(2.0 ** torch.arange(-4, 4)), rows()
    (found,) = factors(network, x)
    assert (found.producer, found.consumer) == ("norm", "first")
    changed = equalize_channels(network, [found])
    torch.testing.assert_close(changed(x), network(x))
    before, after = (n.norm(x).abs().amax((0, 1)) for n in (network, changed))
    assert after.max() / after.min() < 0.2 * before.max() / before.min()


def test_channels_of_a_layer_norm_are_centred_in_steps_of_a_sixteenth():
    network, x = norm_net(means=10.0 * torch.arange(-4, 4)), rows()
    (found,) = factors(network, x, bits=(4, 4))
    means = network.norm(x).detach().mean((0, 1))
    assert found.shifts == tuple((means * 16).round().int().tolist())
    changed = equalize_channels(network, [found])
    torch.testing.assert_close(changed(x), network(x), atol=1e-4, rtol=1e-4)
    centred = changed.norm(x).detach().mean((0, 1))
    assert centred.abs().max() <= 1 / 32 * 2.0 ** max(found.exponents) + 1e-5


@pytest.mark.parametrize("bits", [(3, 3), (4, 4), (4, 8), (8, 4), (8, 8)])
def test_a_layer_after_a_norm_keeps_its_output_at_least_as_well(bits):
    network = norm_net([1, 1, 1, 1, 4, 4, 0.2, 0.2], torch.linspace(-6, 6, 8))
    plain = {"restore_moments": False, "output_error": False, "activation_range": "mse"}
    x, errors = rows(), []
    for equalize in (False, True):
        small = made(
            network, x, weight=bits[0], activation=bits[1], equalize=equalize, **plain
        )
        with torch.no_grad():
            wanted = network.first(network.norm(x))
            found = small.first(small.norm(x))
        errors.append((found - wanted).square().sum().item())
    assert errors[1] < errors[0]


def test_a_layer_without_bias_is_not_shifted():
    network, x = norm_net(means=10.0 * torch.arange(-4, 4), bias=False), rows()
    assert not any(any(one.shifts) for one in factors(network, x, bits=(4, 4)))


def test_coded_weights_after_a_norm_are_shifted_and_not_scaled():
    network, x = (
        norm_net(2.0 ** torch.arange(-4, 4), 10.0 * torch.arange(-4, 4)),
        rows(),
    )
    (found,) = factors(network, x, bits=(8, 4, 3.0))
    assert any(found.shifts) and not any(found.exponents)


def test_a_file_remembers_shifts(tmp_path):
    network, x = norm_net(means=10.0 * torch.arange(-4, 4)), rows()
    small = made(network, x, weight=4, activation=4)
    ompq.save(small, tmp_path / "n.ompq.safetensors")
    loaded = ompq.load(tmp_path / "n.ompq.safetensors", network)
    (found,) = quantization_of(loaded).equalized
    assert any(found.shifts) and (found,) == quantization_of(small).equalized
    with torch.no_grad():
        assert torch.equal(loaded(x), small(x))


class Attention(nn.Module):
    """One attention between two sums, its values made or read in several ways."""

    def __init__(self, kind="fused", width=8, heads=2):
        super().__init__()
        self.kind, self.heads = kind, heads
        self.norm = nn.LayerNorm(width)
        count = {"separate": 1, "shared": 2}.get(kind, 3)
        self.qkv = nn.Linear(width, count * width, bias=kind != "unbiased")
        if kind == "separate":
            self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.proj, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x):
        y = self.norm(x)
        if self.kind == "separate":
            parts = self.qkv(y), self.key(y), self.value(y)
        else:
            parts = self.qkv(y).chunk(self.qkv.out_features // y.shape[-1], -1)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.three(parts)
        )
        if self.kind == "steps":
            found = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v)
        if self.kind == "local":
            found = found + v
        found = found.transpose(1, 2).flatten(2)
        if self.kind == "clipped":
            found = found.relu()
        return self.head(x + self.proj(found)).mean(1)

    def three(self, parts):
        return (parts[0], parts[1], parts[1]) if self.kind == "shared" else parts


def attention(kind="fused", seed=0):
    """Return an attention whose values differ in size and mean, and its inputs."""
    network = seeded(Attention(kind), seed)
    layer = network.value if kind == "separate" else network.qkv
    with torch.no_grad():
        layer.weight[-8:] *= (2.0 ** -torch.arange(8))[:, None]
        if layer.bias is not None:
            layer.bias[-8:] = torch.linspace(-4, 4, 8)
    return network.eval(), rows(seed)


def of_values(network, x, **options):
    found = factors(network, x, **options)
    return next((one for one in found if one.consumer == "proj"), None)


@pytest.mark.parametrize(
    ("kind", "producer", "first"),
    [("fused", "qkv", 16), ("steps", "qkv", 16), ("separate", "value", 0)],
)
def test_values_of_an_attention_are_centred_and_brought_nearer_to_one_size(
    kind, producer, first
):
    network, x = attention(kind)
    found = of_values(network, x, bits=(8, 4))
    assert (found.producer, found.first) == (producer, first)
    changed = equalize_channels(network, [found])
    torch.testing.assert_close(changed(x), network(x), atol=1e-5, rtol=1e-4)
    read = []
    for each in (network, changed):
        with attached(
            [each.proj.register_forward_pre_hook(lambda _, a: read.append(a[0]))]
        ):
            each(x)
    before, after = (t.detach().flatten(0, 1) for t in read)
    ratio = [t.abs().amax(0).max() / t.abs().amax(0).min() for t in (before, after)]
    assert ratio[1] < 0.5 * ratio[0]
    means = before.mean(0)
    assert found.shifts == tuple((means * 16).round().int().tolist())


@pytest.mark.parametrize("kind", ["shared", "local", "clipped"])
def test_values_that_are_used_otherwise_stay_as_they_are(kind):
    assert of_values(*attention(kind), bits=(8, 4)) is None


class Asked(Attention):
    """Its queries come from a parameter, which no call made."""

    def __init__(self):
        super().__init__("separate")
        self.question = nn.Parameter(torch.ones(1, 1, 8))

    def forward(self, x):
        given = self.qkv(self.question.view(1, 1, 8)).expand(len(x), 1, 8)
        parts = (given, self.key(x), self.value(x))
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in parts)
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(self.proj(input=found)).mean(1)


def test_values_are_found_where_queries_are_parameters_and_arguments_have_names():
    network = seeded(Asked()).eval()
    with torch.no_grad():
        network.value.bias[:] = torch.linspace(-4, 4, 8)
    found = of_values(network, rows(), bits=(8, 4))
    assert (found.producer, found.first) == ("value", 0) and any(found.shifts)


def test_values_without_a_bias_are_scaled_only():
    found = of_values(*attention("unbiased"), bits=(8, 4))
    assert any(found.exponents) and not any(found.shifts)


def test_values_of_pytorchs_attention_are_equalized():
    network = seeded(TransformerNet()).eval()
    with torch.no_grad():
        network.attention.in_proj_bias[-8:] = torch.linspace(-4, 4, 8)
    x = rows()
    small = made(network, x, weight=8, activation=4)
    found = {one.consumer: one for one in quantization_of(small).equalized}
    assert found["attention.out_proj"].first == 16


class TransformerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x + self.attention(x, x, x, need_weights=False)[0]).mean(1)


@pytest.mark.parametrize("bits", [(3, 3), (8, 4)])
def test_an_attention_keeps_its_output_better_with_equalized_values(bits):
    plain = {"restore_moments": False, "output_error": False, "activation_range": "mse"}
    errors = {False: 0.0, True: 0.0}
    for seed, on in product(range(4), errors):
        (network, x), others = attention(seed=seed), rows(seed + 100)
        small = made(
            network, x, weight=bits[0], activation=bits[1], equalize=on, **plain
        )
        with torch.no_grad():
            errors[on] += (small(others) - network(others)).square().sum().item()
    assert errors[True] < 0.9 * errors[False]


def test_a_file_remembers_which_values_were_moved(tmp_path):
    network, x = attention()
    small = made(network, x, weight=4, activation=4)
    ompq.save(small, tmp_path / "n.ompq.safetensors")
    loaded = ompq.load(tmp_path / "n.ompq.safetensors", network)
    found = quantization_of(loaded).equalized
    assert found == quantization_of(small).equalized
    assert {one.first for one in found if one.consumer == "proj"} == {16}
    # What continues from the file needs the float network as it was equalized.
    config = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=2))
    with torch.no_grad():
        assert torch.equal(loaded(x), small(x))
    ompq.reconstruct(loaded, network, x, config)
