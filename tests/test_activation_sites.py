"""Where activations are quantized, and what calibration sees there."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models

import ompq
from nets import Chain, TinyMobileNet, TinyResNet, images, seeded, values
from ompq.activation_ranges import (
    activation_grid,
    log_grid,
    observe_range,
    value_bins,
    with_importance,
)
from ompq.allocation.problem import Allocation
from ompq.grids import Grid, on_log_grid
from ompq.layers import ActivationQuantizer, LogQuantizer, activation_quantizers
from ompq.network.graph import trace
from ompq.network.observation import record
from ompq.network.units import Choice
from ompq.outputs import CLASSES, Outputs
from ompq.quantization.activation_sites import find_sites
from ompq.quantization.calibration import read_ranges, weigh_ranges
from ompq.quantization.record import quantization_of
from ompq.samples import Samples


def sites_of(network, samples, bits=8, sum_bits=8, **more):
    graph = trace(network, samples)
    chosen = {name: Choice(4, more.get(name, bits)) for name in graph.names}
    return find_sites(network, record(network, samples[:1]), graph, chosen, sum_bits)


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


def test_layers_round_a_wide_residual_stream_once_more():
    sites, lost = sites_of(seeded(TinyResNet()), images(), bits=4, sum_bits=16)
    assert lost == []
    assert places(sites) == {
        "norm": 16,
        "block1.bn1": 4,
        "block1.bn2": 16,
        "block1": 16,
        "block2.downsample.1": 16,
        "block2.bn1": 4,
        "block2.bn2": 16,
        "block2": 16,
    }
    assert {name: site.bits for site in sites for name in site.before} == {
        "": 4,
        "block1.conv1": 4,
        "block2.conv1": 4,  # which shares its grid with the other reader of block1
        "block2.downsample.0": 4,
        "head": 4,
    }
    few = sites_of(seeded(TinyResNet()), images(), bits=8)[0]
    assert len(sites) == len(few) + 2


def test_only_residual_streams_are_wide():
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)
    )
    sites, _ = sites_of(seeded(plain), images(), bits=4, sum_bits=16)
    assert {site.bits for site in sites} == {4, 8}


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


class Attention(nn.Module):
    """Self-attention of two heads, fused or step by step."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (0.5 * q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(8), Attention(fused)
        self.norm2 = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, fused=True):
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.blocks = nn.Sequential(Block(fused), Block(fused))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embed(x))).mean(1))


def tokens(count=16):
    return torch.randn(count, 6, 5, generator=torch.Generator().manual_seed(1))


def quantized(network, bits):
    graph = ompq.trace(network, tokens())
    choice = ompq.Choice(8, bits)
    allocation = ompq.Allocation(dict.fromkeys(graph.names, choice))
    return ompq.quantize(network, allocation, tokens())


def sites(network):
    record = quantization_of(network)
    return [(s.before[0], s.product, s.operand) for s in record.sites if s.operand]


def test_operands_of_fused_attention_are_sites():
    names = ("query", "key", "value", "probabilities")
    assert sites(quantized(seeded(Transformer()), 4)) == [
        (f"blocks.{block}.attn", 0, name) for block in (0, 1) for name in names
    ]


def test_operands_of_matrix_products_are_sites():
    assert sites(quantized(seeded(Transformer(fused=False)), 4)) == [
        (f"blocks.{block}.attn", number, name)
        for block in (0, 1)
        for number in (0, 1)
        for name in ("left", "right")
    ]


def test_float_activations_have_no_sites():
    assert sites(quantized(seeded(Transformer()), 32)) == []


def test_the_residual_stream_stays_float():
    found = quantization_of(quantized(seeded(Transformer()), 8)).sites
    after = {name for site in found for name in site.after}
    norms = {f"blocks.{n}.norm{m}" for n in (0, 1) for m in (1, 2)}
    assert after == {*norms, "blocks.0.mlp.1", "blocks.1.mlp.1", "norm"}


def test_the_network_computes_with_rounded_operands():
    network = quantized(seeded(Transformer()), 3)
    attention, x = network.blocks[0].attn, torch.randn(2, 6, 8)
    held = dict(attention.products.named_children())
    for quantizer in held.values():
        assert quantizer.bits == 3
    before = network.blocks[0].attn.proj.input_quantizer
    parts = attention.qkv(x).reshape(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    q, k, v = (
        held[f"0_{name}"](part)
        for name, part in zip(("query", "key", "value"), parts, strict=True)
    )
    p = held["0_probabilities"]((q @ k.transpose(-2, -1) / 2).softmax(-1))
    with torch.no_grad():
        mixed = before((p @ v).transpose(1, 2).flatten(2))
        weight = attention.proj.rounded_weight()
        expected = mixed @ weight.T + attention.proj.bias
        torch.testing.assert_close(attention(x), expected)


def test_importance_of_probabilities_is_their_squared_gradient():
    """The same grids come out where the probabilities are a tensor of their own."""
    fused, plain = seeded(Transformer()), seeded(Transformer(fused=False))
    grids = []
    for network, name in ((fused, "0_probabilities"), (plain, "1_left")):
        # Both networks equalized differ in their last digits.
        config = ompq.QuantizeConfig(equalize=False)
        found = ompq.quantize(network, {"*": (8, 3)}, tokens(), config)
        attention = found.blocks[1].attn
        grids.append(attention.products.get_submodule(name))
    assert {type(grid) for grid in grids} == {LogQuantizer}
    torch.testing.assert_close(grids[0].scale, grids[1].scale)
    assert grids[0].zero_point == grids[1].zero_point


def test_a_failing_module_leaves_no_rounding_behind():
    network = quantized(seeded(Transformer()), 2)
    with pytest.raises(RuntimeError):
        network.blocks[0].attn(torch.zeros(2, 6, 7))
    a, b = torch.randn(2, 3, 4, 4)
    assert torch.equal(a @ b, torch.matmul(a, b))
    assert not network.blocks[0].attn.products._modes


def test_files_and_reconstruction_keep_the_operands(tmp_path):
    network = seeded(Transformer())
    config = ompq.PlanConfig(choices=(3, 4), activation_choices=(4,))
    plan = ompq.plan(network, tokens(), "4bit", config)
    made = ompq.quantize(network, plan, tokens())
    rounding = ompq.RoundingConfig(iterations=20)
    settings = ompq.ReconstructConfig(rounding=rounding)
    learned = ompq.reconstruct(made, network, tokens(), settings)
    assert sites(learned) == sites(made)
    before, after = (
        activation_quantizers(n)["blocks.0.attn.products.0_query"].scale
        for n in (made, learned)
    )
    assert before != after  # steps below 8 bits are learned
    ompq.save(learned, tmp_path / "net.ompq.safetensors", plan=plan)
    again = ompq.load(tmp_path / "net.ompq.safetensors", seeded(Transformer()))
    assert torch.equal(again(tokens()), learned(tokens()))
    assert (tmp_path / "net.ompq.safetensors").stat().st_size <= plan.totals["bytes"]


def test_a_module_that_is_called_twice_keeps_its_products_float():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention(fused=True)

        def forward(self, x):
            return self.attn(self.attn(x))

    network = seeded(Twice())
    x = torch.randn(4, 6, 8)
    assert [c.function for c in record(network, x).calls].count(
        "scaled_dot_product_attention"
    ) == 2
    graph = ompq.trace(network, x)
    bits = ompq.Allocation(dict.fromkeys(graph.names, ompq.Choice(8, 8)))
    assert sites(ompq.quantize(network, bits, x)) == []


def test_powers_hold_small_probabilities():
    levels = torch.tensor([1, 2**-0.5, 0.5, 2**-1.5, 0.25, 2**-2.5, 0.125, 0]) * 0.8
    x = torch.rand(1000, generator=torch.Generator().manual_seed(0)) ** 3
    grid = Grid(torch.tensor(0.8), torch.tensor(2.0), bits=3)
    # The nearest in logarithms, zero beyond half a step below the least.
    distance = (x.log()[:, None] - levels[:-1].log()).abs()
    expected = levels[distance.argmin(1)]
    expected[x < 0.8 * 2**-3.25] = 0
    torch.testing.assert_close(on_log_grid(grid, x), expected)


def test_a_log_grid_is_the_best_of_those_tried():
    x = torch.rand(4000, generator=torch.Generator().manual_seed(0)) ** 6
    seen = observe_range(x)
    found, shift = log_grid(seen, 3)
    assert shift == 0

    def error(grid):
        return float((on_log_grid(grid, x) - x).square().mean())

    others = [
        Grid(x.max() * 2.0 ** (-part / 4), torch.tensor(float(octave)), 3)
        for octave in (1, 2, 3, 4)
        for part in range(9)
    ]
    assert error(found) < 1.02 * min(map(error, others))


def test_a_network_that_computes_something_else_the_next_time_is_refused():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.last = nn.Linear(4, 4), None

        def forward(self, x):
            key = self.key(x)
            if self.last is not None and len(self.last) == len(key):
                key = torch.cat([self.last, key], 1)
            self.last = key[:, :2]
            return x @ key.transpose(1, 2)

    model, inputs = seeded(Caching()), values(8, 3, 4)
    plan = ompq.plan(model, inputs, "8bits")
    model.last = None
    message = "calls .* where it multiplied activations before.* clear its caches"
    with pytest.raises(ompq.errors.QuantizationError, match=message):
        ompq.quantize(model, plan, inputs)


def gelu_values(count=4000):
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    return nn.functional.gelu(2 * x - 1)


@pytest.mark.parametrize("bits", [4, 6])
def test_powers_hold_the_output_of_gelu_better_than_even_steps(bits):
    x = gelu_values()
    grid, shift = log_grid(observe_range(x), bits)
    assert shift >= 0.16  # the least that GELU returns is -0.17
    powers = on_log_grid(grid, x + shift) - shift
    even = activation_grid(observe_range(x), bits, "mse").fake(x)
    assert (powers - x).square().mean() < 0.8 * (even - x).square().mean()


def test_even_steps_are_taken_where_they_are_better():
    x = torch.linspace(-0.17, 3, 4000)
    grid, shift = log_grid(observe_range(x), 4, "mse")
    assert shift is None
    expected = activation_grid(observe_range(x), 4, "mse")
    assert (grid.scale, grid.zero_point) == (expected.scale, expected.zero_point)


def test_few_bits_of_gelu_are_powers_and_eight_are_not(tmp_path):
    network = seeded(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 3)))
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    for width, kind in ((8, ActivationQuantizer), (4, LogQuantizer)):
        small = ompq.quantize(network, {"*": (8, width)}, x)
        quantizer = small[1].output_quantizer
        assert type(quantizer) is kind
    y = nn.functional.gelu(small[0](small[0].input_quantizer(x)).detach())
    grid = Grid(quantizer.scale, quantizer.zero_point, 4)
    expected = on_log_grid(grid, y + quantizer.shift) - quantizer.shift
    torch.testing.assert_close(quantizer(y), expected)
    ompq.save(small, tmp_path / "n.ompq.safetensors")
    loaded = ompq.load(tmp_path / "n.ompq.safetensors", network)
    assert loaded[1].output_quantizer.shift == quantizer.shift > 0
    with torch.no_grad():
        assert torch.equal(loaded(x), small(x))


def test_a_dropped_value_passes_a_log_grid_unchanged():
    quantizer = LogQuantizer(Grid(torch.tensor(1.0), torch.tensor(1.0), 2), 0.2)
    x = gelu_values()
    rounded = quantizer(x)
    quantizer.keep = 0.5
    torch.manual_seed(0)
    mixed = quantizer(x)
    kept = mixed == rounded
    assert torch.equal(mixed[~kept], x[~kept]) and 0.4 < kept.float().mean() < 0.6


def silent(*_):
    """Report nothing."""


def weighed(model, samples):
    """Return the sites of a network and what is known of each."""
    graph = trace(model, samples)
    bits = {name: Choice(8, 8) for name in graph.names}
    sites, _ = find_sites(model, record(model, samples[:1]), graph, bits)
    samples = Samples.of(samples)
    seen = read_ranges(model, samples, sites, batch_size=64, report=silent)
    return (
        sites,
        seen,
        weigh_ranges(
            model,
            samples,
            sites,
            seen,
            Outputs.of(model, Samples.of(samples)),
            batch_size=16,
            report=silent,
        ),
    )


def quantize(model, samples, bits=8, **more):
    names = trace(model, samples).names
    allocation = Allocation({name: Choice(8, bits) for name in names})
    return ompq.quantize(model, allocation, samples, ompq.QuantizeConfig(**more))


def scales(quantized):
    found = activation_quantizers(quantized).items()
    return {name: quantizer.scale.item() for name, quantizer in found}


class Deaf(nn.Module):
    """Passes on two values, the second of which nobody listens to."""

    def __init__(self, loud):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.first.weight.data = torch.diag(torch.tensor([1.0, loud]))
        self.last.weight.data = torch.tensor([[1.0, 0.0]])

    def forward(self, x):
        return self.last(self.first(x))


def test_importance_is_the_sum_of_squared_gradients_in_each_bin():
    x = torch.tensor([0.1, -0.3, 0.1, 0.9, 2.0])
    gradient = torch.tensor([1.0, 2.0, 3.0, 0.5, 0.0])
    seen = observe_range(x)
    found = with_importance(seen, value_bins(seen, x), gradient)
    for value, expected in [(0.1, 10), (-0.3, 4), (0.9, 0.25), (2.0, 0)]:
        nearest = (seen.values - value).abs().argmin()
        assert found.importance[nearest] == expected
    assert found.importance.sum() == 14.25
    twice = with_importance(found, value_bins(seen, x), gradient)
    assert torch.equal(twice.importance, 2 * found.importance)


def test_importance_of_a_network_is_that_of_autograd():
    model, samples = seeded(TinyMobileNet()), images(8)
    sites, seen, found = weighed(model, samples)
    (at,) = (i for i, p in enumerate(sites) if p.after == ("blocks.1",))
    kept = {}

    def keep(_module, _args, output):
        output.retain_grad()
        kept["output"] = output

    handle = model.blocks[1].register_forward_hook(keep)
    generator = torch.Generator().manual_seed(0)
    loss = CLASSES.drawn_loss([model(samples)], generator, len(samples))
    handle.remove()
    loss.backward()
    expected = kept["output"].grad.double().square().sum()
    torch.testing.assert_close(found[at].importance.sum(), expected)
    assert all(
        torch.equal(a.counts, b.counts) for a, b in zip(seen, found, strict=True)
    )


def test_values_that_do_not_matter_are_cut_off():
    samples = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    model = Deaf(loud=4.0)
    heard, unheard = model.first(samples).detach().unbind(1)

    def cost(scale, zero_point):
        values = torch.stack([heard, unheard])
        codes = ((values / scale).round() + zero_point).clamp(0, 15)
        errors = ((codes - zero_point) * scale - values).square().mean(1)
        return (0.9 * errors[0] + 0.1 * errors.mean()).item()

    found, plain = (
        activation_quantizers(quantize(model, samples, 4, activation_range=method))[
            "first.output_quantizer"
        ]
        for method in ("fisher", "mse")
    )
    best = min(
        cost(0.02 * k, zero_point) for k in range(1, 100) for zero_point in range(16)
    )
    assert cost(found.scale, found.zero_point) < 1.05 * best
    assert found.scale < 0.8 * plain.scale


@pytest.mark.parametrize("frozen", [True, False])
def test_network_and_its_flags_stay_as_they_were(frozen):
    model = seeded(TinyResNet()).requires_grad_(not frozen)
    before = {name: p.clone() for name, p in model.named_parameters()}
    weighed(model, images(4))
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and parameter.requires_grad is not frozen
        assert torch.equal(parameter, before[name])


def test_ranges_are_the_same_every_time_and_without_gradients():
    model, samples = seeded(TinyMobileNet()), images(32)
    first = scales(quantize(model, samples))
    with torch.no_grad():
        assert scales(quantize(model, samples)) == first
    assert scales(quantize(model, samples, activation_range="mse")) != first


def test_tokens_reach_gradients_through_parameters():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

        def forward(self, words):
            return self.head(self.embedding(words))

    words = torch.randint(10, (8, 5), generator=torch.Generator().manual_seed(0))
    model = seeded(Words())
    _, _, found = weighed(model, words)
    # The output has no classes: signs are drawn.
    assert [each.importance.sum() > 0 for each in found] == [True]


def test_network_without_gradients_weighs_all_values_alike(caplog):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))

        @torch.no_grad()
        def forward(self, x):
            return self.body(x)

    samples = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    model = seeded(Frozen())
    with caplog.at_level(logging.WARNING):
        found = scales(quantize(model, samples))
    assert "all values of an activation get the same weight: the network cannot be" in (
        caplog.text
    )
    assert found == scales(quantize(model, samples, activation_range="mse"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp] can't allocate memory: you tried"
        ),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"
        ),
    ],
)
def test_too_little_memory_is_an_error_and_not_a_worse_calibration(monkeypatch, error):
    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr(torch.autograd, "grad", fail)
    with pytest.raises(RuntimeError) as raised:
        quantize(seeded(TinyResNet()), images(8))
    assert raised.value is error


def test_sites_that_no_gradient_reaches_weigh_all_values_alike():
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    seen = observe_range(x)
    nothing = with_importance(seen, value_bins(seen, x), torch.zeros(100))
    broken = with_importance(seen, value_bins(seen, x), torch.full((100,), torch.nan))
    plain = activation_grid(seen, 4, "mse")
    for known in (seen, nothing, broken):
        assert torch.equal(activation_grid(known, 4, "fisher").scale, plain.scale)


def test_average_of_single_values_passes_them_on():
    def network(size):
        pool = nn.AdaptiveAvgPool2d(1)
        layers = nn.Conv2d(3, 4, size), nn.ReLU(), pool, nn.Flatten(), nn.Linear(4, 2)
        return seeded(nn.Sequential(*layers))

    assert "2.output_quantizer" in scales(quantize(network(3), images(8)))
    assert "2.output_quantizer" not in scales(quantize(network(8), images(8)))
