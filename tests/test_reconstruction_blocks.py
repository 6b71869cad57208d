"""What a block gets and should return, and what it makes of both."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from nets import Chain, TinyMobileNet, TinyResNet, scenes, seeded
from ompq.allocation.solver import Allocation
from ompq.graph import Choice, trace
from ompq.quantization import QuantizeConfig, float_moments, quantization_of, quantize
from ompq.reconstruction import ReconstructConfig, _cache, reconstruct
from ompq.reconstruction.blocks import (
    Arguments,
    BlockCache,
    Layout,
    fisher_weights,
    gather,
    gather_next,
)
from ompq.reconstruction.rounding import RoundingConfig, learn_rounding
from ompq.samples import Samples, first_tensor

QUICK = ReconstructConfig(rounding=RoundingConfig(iterations=200, batch_size=16))


def quantized_at(network, bits, samples):
    names = trace(network, samples).names
    allocation = Allocation({name: Choice(bits, 8) for name in names})
    return quantize(network, allocation, samples, QuantizeConfig())


def test_gathered_inputs_and_targets_equal_those_of_hooks():
    model = seeded(TinyMobileNet())
    quantized = quantized_at(model, 4, scenes(10))
    cache = gather(
        quantized,
        model,
        ("blocks.1",) * 2,
        Samples.of(scenes(10)),
        batch_size=4,
        limit=1 << 30,
    )
    seen = {}
    handles = [
        quantized.blocks[1].register_forward_pre_hook(
            lambda m, args: seen.update(given=args[0])
        ),
        model.blocks[1].register_forward_hook(
            lambda m, args, out: seen.update(plain=args[0], wanted=out)
        ),
    ]
    with torch.no_grad():
        quantized(scenes(10)), model(scenes(10))
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(cache.inputs[0], seen["given"])
    torch.testing.assert_close(cache.float_inputs[0], seen["plain"])
    torch.testing.assert_close(cache.targets, seen["wanted"])
    picked, target, _ = cache.pick(torch.tensor([3, 1]))
    torch.testing.assert_close(picked[0], seen["given"][[3, 1]])
    torch.testing.assert_close(target, seen["wanted"][[3, 1]])


@pytest.mark.parametrize("net", [TinyResNet, TinyMobileNet])
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_the_next_block_gathers_the_same_from_the_one_before(net, limit):
    model = seeded(net())
    given = Samples.of(scenes(10))
    quantized = quantized_at(model, 4, given)
    graph = trace(model, scenes())
    blocks = [name for name in graph.blocks if name not in graph.names]
    assert len(blocks) > 1
    for names in pairwise(blocks):
        last, wanted = (
            gather(quantized, model, (n, n), given, batch_size=4, limit=limit)
            for n in names
        )
        cache = gather_next(last, names, quantized, model, given, limit=limit)
        assert cache is not None
        assert cache.sizes == wanted.sizes == [4, 4, 2]
        assert cache.arguments.layouts == wanted.arguments.layouts
        for one in ("inputs", "float_inputs"):
            assert torch.equal(getattr(cache, one)[0], getattr(wanted, one)[0])
        assert torch.equal(cache.targets, wanted.targets)


def test_a_block_that_gets_something_else_is_not_gathered_from_the_one_before():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.pair = nn.Linear(4, 4), nn.Linear(4, 4), Both()

        def forward(self, x):
            return self.pair(self.two(self.one(x).relu()), x)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, y):
            return self.linear(x) + y

    model = seeded(Apart())
    samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    quantized, given = quantized_at(model, 4, samples), Samples.of(samples)
    for names in (("one", "two"), ("two", "pair"), ("pair", "one")):
        start = (names[0], names[0])
        last = gather(quantized, model, start, given, batch_size=4, limit=1 << 30)
        found = gather_next(last, names, quantized, model, given, limit=1 << 30)
        assert found is None


def test_a_block_is_never_run_on_what_does_not_fit_it():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.block, self.head = (
                nn.Conv2d(3, 8, 4, stride=4),
                Tokens(),
                nn.Linear(8, 5),
            )

        def forward(self, x):
            tokens = self.proj(x).flatten(2).transpose(1, 2)
            return self.head(self.block(tokens).mean(1))

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.linear(self.norm(x))

    model = seeded(Patches())
    result = reconstruct(quantized_at(model, 3, scenes(16)), model, scenes(16), QUICK)
    blocks = [e.block for e in quantization_of(result).errors]
    assert blocks == ["proj", "block", "head"]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_block_learns_from_inputs_of_both_networks(share):
    model = seeded(Chain())
    block = quantized_at(model, 4, scenes(32)).conv
    kinds = torch.zeros(32, 3, 8, 8), torch.ones(32, 3, 8, 8)
    with torch.no_grad():
        target = block(kinds[1])
    arguments = Arguments(((kinds[0],), {}), [Layout()])
    cache = BlockCache([kinds[0]], target, arguments, [kinds[1]])
    seen = []
    block.register_forward_pre_hook(
        lambda m, args: seen.append(args[0]) if torch.is_grad_enabled() else None
    )
    config = RoundingConfig(iterations=20, batch_size=16, float_inputs=share)
    learn_rounding(block, cache, config)
    values = torch.cat(seen)
    assert len(values) == 20 * 16
    assert values.unique().tolist() == ([0.0, 1.0] if 0 < share < 1 else [share])
    spread = (share * (1 - share) / values.numel()) ** 0.5
    assert values.mean().item() == pytest.approx(share, abs=5 * spread + 1e-9)


def test_inputs_that_are_no_floats_are_never_mixed():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, rows):
            assert rows.dtype == torch.long
            return self.linear(x) + x[torch.arange(len(x)), rows][:, None]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Looks()

        def forward(self, x):
            return self.block(x, (x.argmax(1)))

    model = seeded(Net())
    samples = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    result = reconstruct(quantized_at(model, 3, samples), model, samples, QUICK)
    assert [e.block for e in quantization_of(result).errors] == ["block"]


def test_blocks_with_structured_arguments():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair, *, scale, flag):
            return self.linear(pair[0]) * scale + pair[1] if flag else pair[0]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Adds()

        def forward(self, x):
            return self.block([x, 2 * x], scale=0.5, flag=True)

    model = seeded(Net())
    samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    quantized = quantized_at(model, 3, samples)
    result = reconstruct(quantized, model, samples, QUICK)
    (error,) = quantization_of(result).errors
    assert error.block == "block"
    assert error.after <= error.before


def test_fisher_weights_are_squared_gradients():
    model = seeded(Chain())
    weights = torch.cat(
        list(
            fisher_weights(
                model,
                "conv",
                Samples.of(scenes(6)),
                lambda out: first_tensor(out).square().sum(),
                batch_size=4,
            )
        )
    )
    hidden = model.conv(scenes(6)).detach().requires_grad_()
    model.head(torch.relu(hidden).mean((2, 3))).square().sum().backward()
    torch.testing.assert_close(weights, hidden.grad.square(), rtol=1e-4, atol=1e-8)
    assert all(p.grad is None for p in model.conv.parameters())


def test_fisher_weights_are_taken_where_the_target_is():
    """After the norm that is folded, and before an activation that works in place."""
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    model = seeded(nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 36, 5)))
    model[1].running_var.copy_(torch.tensor([0.1, 1.0, 10.0, 100.0]))
    quantized = quantized_at(model, 3, scenes(12))
    config = ReconstructConfig(loss="fisher", batch_size=5)
    cache = _cache(quantized, model, "0", Samples.of(scenes(12)), config)
    hidden = model[1](model[0](scenes(12))).detach().requires_grad_()
    logits = model[4](torch.relu(hidden).flatten(1)).log_softmax(1)
    (-logits.amax(1)).sum().backward()
    wanted = hidden.grad.square()
    torch.testing.assert_close(
        cache.weights, wanted / wanted.mean(), rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(cache.targets, hidden.detach())


def test_moments_are_compared_on_the_same_samples():
    model = seeded(TinyResNet())
    # Had one network read them from all and the other from the first half, what differs
    # between the halves would be taken for what rounding did.
    samples = Samples.of(torch.cat([3 * scenes(128), scenes(128, seed=1)]))
    quantized = quantized_at(model, 8, samples)
    graph = trace(model, samples)
    name = next(block for block in graph.blocks if block not in graph.names)
    members = [graph.units[i] for i in graph.blocks[name]]
    found = float_moments(model, members, samples)
    cache = gather(
        quantized, model, (name, name), samples, batch_size=64, limit=1 << 30
    )
    before, after = learn_rounding(
        quantized.get_submodule(name),
        cache,
        RoundingConfig(iterations=1),
        moments={unit: found[f"{name}.{unit}"] for unit in ("conv1", "conv2")},
    )
    assert after < 2 * before
