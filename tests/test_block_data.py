"""Inputs and targets of blocks: right for every graph, and gathered in one go."""

import threading
from collections import Counter
from contextlib import closing

import pytest
import torch
from torch import nn

from block_data_cases import quantized_at, runner_for
from nets import Chain, ResidualBlock, TinyMobileNet, TinyResNet, scenes, seeded, values
from ompq import working_memory
from ompq.configs import ReconstructConfig, RoundingConfig
from ompq.errors import QuantizationError, SampleError
from ompq.layers import quantized_layers
from ompq.network.graph import trace
from ompq.quantization.moments import float_moments
from ompq.quantization.record import quantization_of
from ompq.reconstruction.block_data import Arguments, BlockCache, merge_blocks
from ompq.reconstruction.block_layout import Layout, layout_of, output_axis
from ompq.reconstruction.block_loop import reconstruct
from ompq.reconstruction.rounding import learn_rounding
from ompq.samples import Samples
from ompq.scratch_file import StoredRows

QUICK = ReconstructConfig(rounding=RoundingConfig(iterations=30, batch_size=16))


def gather(quantized, model, block, samples, batch_size=4, limit=1 << 30):
    with closing(
        runner_for(quantized, model, samples, batch_size=batch_size, limit=limit)
    ) as runner:
        return runner.gather(block)


class Scale(nn.Module):
    """Changes its input in place, as blocks that begin with an activation do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, other=None, *, gain=1.0):
        out = self.linear(x.relu_())
        return out * gain if other is None else out * gain + other


class Skips(nn.Module):
    """Skip connections across blocks, several inputs, names, functions in between."""

    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two, self.three = (
            nn.Linear(4, 4),
            Scale(),
            Scale(),
            Scale(),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        start = torch.tanh(self.stem(x))
        one = self.one(start.clone())
        two = self.two(one.sin(), start)
        three = self.three(x=two + x, other=one, gain=0.5)
        return self.head(torch.cat([three, start], 1))


class Twice(nn.Module):
    """A block that runs again after the next one."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = Scale(), Scale(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.one(self.two(self.one(x.clone()))))


class Pairs(nn.Module):
    """Two inputs, and a block that returns two tensors."""

    def __init__(self):
        super().__init__()
        self.split, self.join, self.head = Split(), Scale(), nn.Linear(4, 3)

    def forward(self, x, y):
        one, two = self.split(x, y)
        return self.head(self.join(two.clone(), other=one))


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, x, y):
        return self.left(x), self.right(y)


def full_run(model, samples, block, end=None):
    """What a block gets and returns when the whole network runs at once."""
    found = []

    def before(module, args, kwargs):
        every = [*args, *kwargs.values()]
        found.append([t.clone() for t in every if isinstance(t, torch.Tensor)])

    def after(module, args, out):
        found.append((out if isinstance(out, torch.Tensor) else out[0]).clone())

    module = model.get_submodule(block)
    # Before the quantizers of its input: they are a part of the block.
    hooks = [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        model.get_submodule(end or block).register_forward_hook(after, prepend=True),
    ]
    with torch.no_grad():
        model(*samples) if isinstance(samples, tuple) else model(samples)
    for hook in hooks:
        hook.remove()
    return found[:2]


GRAPHS = {
    "residual": (TinyResNet, scenes(10)),
    "mobile": (TinyMobileNet, scenes(10)),
    "skips": (Skips, values(10, 4)),
    "twice": (Twice, values(10, 4)),
    "pairs": (Pairs, (values(10, 4), values(10, 2))),
}


@pytest.mark.parametrize("limit", [0, 3_000, 1 << 30])
@pytest.mark.parametrize("graph", GRAPHS)
def test_each_block_gets_what_a_full_run_gives_it(graph, limit):
    network, samples = GRAPHS[graph]
    model = seeded(network())
    quantized = quantized_at(model, 4, samples)
    graph = trace(model, samples)
    blocks = list(graph.blocks)
    assert len(blocks) > 2
    norms = {u.name: u.norm for u in graph.units}  # stand-alone layers end after them
    runner = runner_for(quantized, model, samples, batch_size=4, limit=limit)
    with closing(runner):
        for block in blocks:
            cache = runner.gather(block)
            given, _ = full_run(quantized, samples, block)
            wanted, target = full_run(model, samples, block, norms.get(block))
            torch.testing.assert_close(cache.inputs, given)
            torch.testing.assert_close(cache.float_inputs, wanted)
            torch.testing.assert_close(cache.targets, target)
            with torch.no_grad():  # as if it had learned
                for layer in quantized_layers(quantized.get_submodule(block)).values():
                    layer.bias.add_(0.1)
            if isinstance(module := quantized.get_submodule(block), nn.Linear):
                module.bias.data.add_(0.1)


@pytest.mark.parametrize("graph", GRAPHS)
def test_blocks_get_nearly_the_same_by_way_of_a_file(graph, monkeypatch):
    monkeypatch.setattr(working_memory, "_limit", 1)
    network, samples = GRAPHS[graph]
    model = seeded(network())
    quantized = quantized_at(model, 4, samples)
    with closing(runner_for(quantized, model, samples, batch_size=4)) as runner:
        for block in trace(model, samples).blocks:
            cache = runner.gather(block)
            given, _ = full_run(quantized, samples, block)
            wanted, _ = full_run(model, samples, block)
            stored = [*cache.inputs, *cache.float_inputs]
            for rows, expected in zip(stored, [*given, *wanted], strict=True):
                assert isinstance(rows, StoredRows)
                found = rows.index_select(0, torch.arange(len(rows)))
                # Where an activation lay between two codes, it may take the other one.
                error = (found - expected).square().mean() / expected.square().mean()
                assert error < 1e-4


def test_a_block_listed_after_one_that_follows_it_starts_from_the_input():
    model = seeded(Skips())
    quantized = quantized_at(model, 4, values(10, 4))
    runner = runner_for(quantized, model, values(10, 4), batch_size=4, limit=1 << 30)
    with closing(runner):
        for block in ("two", "one", "three"):
            given, _ = full_run(quantized, values(10, 4), block)
            torch.testing.assert_close(runner.gather(block).inputs, given)


class Deep(nn.Module):
    """A chain of layers with functions between them."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + 0.1
        return x


def layer_calls(depth):
    model = seeded(Deep(depth))
    quantized = quantized_at(model, 4, values(12, 4))
    calls = Counter()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    config = ReconstructConfig(rounding=RoundingConfig(iterations=1), batch_size=4)
    reconstruct(quantized, model, values(12, 4), config)
    assert len(calls) == depth
    return set(calls.values())


def test_a_layer_runs_as_often_in_a_long_chain_as_in_a_short_one():
    """Each of three batches for moments and for targets; to trace, and for layouts.

    Also a sample, twice, and a batch to see how large outputs are.
    """
    assert layer_calls(4) == layer_calls(12) == {3 + 3 + 1 + 2 + 2 + 1}


def test_no_thread_is_left_behind(monkeypatch):
    model = seeded(Deep(3))
    quantized = quantized_at(model, 4, values(12, 4))
    before = threading.active_count()
    config = ReconstructConfig(rounding=RoundingConfig(iterations=1), batch_size=4)
    reconstruct(quantized, model, values(12, 4), config)
    assert threading.active_count() == before

    def interrupt(*_args, **_more):
        assert threading.active_count() > before
        raise KeyboardInterrupt

    monkeypatch.setattr("ompq.reconstruction.block_loop.learn_rounding", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reconstruct(quantized, model, values(12, 4), config)
    assert threading.active_count() == before


def test_errors_of_the_network_come_through():
    model = seeded(Deep(3))
    quantized = quantized_at(model, 4, values(12, 4))

    def fail(*_):
        raise ZeroDivisionError("within the network")

    model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError, match="within the network"):
        gather(quantized, model, "layers.2", values(12, 4))


def test_a_block_that_some_samples_skip_is_refused():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.one(x)
            return self.two(x) if len(x) < 3 else x

    model = seeded(Sometimes())
    quantized = quantized_at(model, 4, values(2, 4))
    with pytest.raises(QuantizationError, match="two runs for some samples and not"):
        gather(quantized, model, "two", values(12, 4))


class Regions(nn.Module):
    """Returns as many rows as score above 0, as the first stage of a detector does."""

    def __init__(self):
        super().__init__()
        self.stage = nn.Sequential(nn.Linear(4, 6), self.Chosen())
        self.head = nn.Linear(6, 3)

    class Chosen(nn.Module):
        def forward(self, x):
            return x.flatten(0, 1)[x.flatten(0, 1)[:, 0] > 0]

    def forward(self, x):
        return self.head(self.stage(x))


def test_a_block_that_returns_another_number_of_rows_is_told():
    model = seeded(Regions())
    samples = values(8, 50, 4)
    # Layers after it keep what they have: their rows belong to other regions.
    quantized = quantized_at(model, 2, samples)
    with torch.no_grad():
        assert len(model(samples)) != len(quantized(samples))
    args = ((samples,), {})
    cache = BlockCache([samples], values(8, 7, 6), Arguments(args, [Layout()]))
    words = r"returns \(\d+, 6\) for a sample, but \(7, 6\) in the float .* head of a"
    with pytest.raises(QuantizationError, match=words):
        cache.call(nn.Linear(4, 6), [samples])


def test_samples_of_several_sizes_are_refused():
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)))
    quantized = quantized_at(model, 4, scenes(4))
    mixed = [scenes(4), scenes(4, size=12)]
    with pytest.raises(SampleError, match="differ in shape between batches"):
        gather(quantized, model, "2", mixed)


def test_picked_samples_are_those_asked_for():
    model = seeded(TinyMobileNet())
    quantized = quantized_at(model, 4, scenes(10))
    cache = gather(quantized, model, "blocks.1", scenes(10))
    picked, target = cache.pick(torch.tensor([3, 1]))
    assert torch.equal(picked[0], cache.inputs[0][[3, 1]])
    assert torch.equal(target, cache.targets[[3, 1]])


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


class Stages(nn.Module):
    """Three residual blocks in a row; a later layer reads the second one's output."""

    def __init__(self, *, tap):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(8, 8) for _ in range(3))
        self.head, self.tap = nn.Linear(8, 5), tap

    def forward(self, x):
        one = self.blocks[0](torch.relu(self.stem(x)))
        two = self.blocks[1](one)
        three = self.blocks[2](two)
        return self.head((three + two if self.tap else three).mean((2, 3)))


@pytest.mark.parametrize(
    ("tap", "most", "groups"),
    [
        (False, 2, ["stem", "blocks.0+blocks.1", "blocks.2", "head"]),
        (False, 3, ["stem", "blocks.0+blocks.1+blocks.2", "head"]),
        (True, 3, ["stem", "blocks.0+blocks.1", "blocks.2", "head"]),
        (False, 1, ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]),
    ],
)
def test_blocks_merge_where_only_the_next_one_reads_their_output(tap, most, groups):
    model, samples = seeded(Stages(tap=tap)), Samples.of(scenes(4))
    names = list(trace(model, samples).blocks)
    assert [
        "+".join(group) for group in merge_blocks(model, names, samples, most)
    ] == groups


@pytest.mark.parametrize("network", [Skips, Twice, Pairs])
def test_blocks_of_other_graphs_stay_apart(network):
    samples = next(s for net, s in GRAPHS.values() if net is network)
    model, samples = seeded(network()), Samples.of(samples)
    names = list(trace(model, samples).blocks)
    assert merge_blocks(model, names, samples, 3) == [(name,) for name in names]


def test_merged_blocks_learn_to_give_what_the_last_one_gives():
    model = seeded(Stages(tap=False))
    quantized = quantized_at(model, 3, scenes(64))
    with closing(runner_for(quantized, model, scenes(64))) as runner:
        cache = runner.gather("blocks.0", "blocks.1")
    given, _ = full_run(quantized, scenes(64), "blocks.0")
    torch.testing.assert_close(cache.inputs, given)
    torch.testing.assert_close(
        cache.targets, full_run(model, scenes(64), "blocks.1")[1]
    )
    rounding = RoundingConfig(iterations=100, batch_size=16)
    config = ReconstructConfig(rounding=rounding, merge=2)
    result = reconstruct(quantized, model, scenes(64), config)
    errors = {e.block: e for e in quantization_of(result).errors}
    assert errors["blocks.0+blocks.1"].improved
    assert list(errors) == ["stem", "blocks.0+blocks.1", "blocks.2", "head"]
    assert list(result.state_dict()) == list(quantized.state_dict())


def test_merging_no_block_is_refused():
    with pytest.raises(
        ValueError, match="'merge' of ReconstructConfig must be at least 1"
    ):
        ReconstructConfig(merge=0)


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


@pytest.mark.parametrize(
    ("layer", "shape", "axis"),
    [
        (nn.Conv2d(3, 5, 3), (8, 5, 6, 6), -3),
        (nn.Conv2d(3, 5, 3), (8, 5), -1),  # pooled
        (nn.Conv2d(3, 5, 3), (8, 36, 5), -1),  # tokens
        (nn.Conv2d(3, 5, 3), (8, 10, 6, 6), -3),  # concatenated
        (nn.Conv2d(3, 5, 3), (8, 4, 5, 6, 6), -3),  # four rows make up a sample
        (nn.Linear(3, 5), (8, 36, 5), -1),
        (nn.Linear(3, 5), (8, 6, 6, 5), -1),
        (nn.Linear(3, 5), (8, 5, 6, 6), -3),  # ConvNeXt moves them back
        (nn.Linear(3, 5), (8, 5, 5), -1),
    ],
)
def test_where_the_channels_of_an_output_are(layer, shape, axis):
    example = torch.zeros(1, 3) if isinstance(layer, nn.Linear) else scenes(1)
    (unit,) = trace(nn.Sequential(layer), example).units
    assert output_axis(unit, shape) == axis


def test_fisher_weights_are_taken_where_the_target_is():
    """After the norm that is folded, and before an activation that works in place."""
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    model = seeded(nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 36, 5)))
    model[1].running_var.copy_(torch.tensor([0.1, 1.0, 10.0, 100.0]))
    quantized = quantized_at(model, 3, scenes(12))
    runner = runner_for(quantized, model, scenes(12), batch_size=5, limit=1 << 30)
    with closing(runner):
        cache = runner.gather("0", loss="fisher")
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
    found = float_moments(model, members, samples, 64)
    cache = gather(quantized, model, name, samples, batch_size=64)
    cache.moments = {unit: found[f"{name}.{unit}"] for unit in ("conv1", "conv2")}
    block, config = quantized.get_submodule(name), RoundingConfig(iterations=1)
    before, after = learn_rounding(block, cache, config)
    assert after < 2 * before


@pytest.mark.parametrize("two", [(2, 2), (3, 1), (1,)])
def test_a_tensor_without_one_dimension_of_samples_is_refused(two):
    with pytest.raises(QuantizationError, match=r"shape \(1, 1\) with one sample and"):
        layout_of((1, 1), two)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, *, mask, positions, gain):
        return x + self.two(torch.relu(self.one(x + positions)) * mask) * gain


class Sequences(nn.Module):
    """Blocks called by name, with a mask, positions and a number for all samples."""

    def __init__(self, *, first):
        super().__init__()
        self.first = first
        self.stem, self.block, self.head = nn.Linear(8, 8), Masked(), nn.Linear(8, 5)
        self.positions = nn.Parameter(torch.randn(1, 6, 8))
        self.register_buffer("mask", (torch.arange(6) < 4)[:, None])

    def forward(self, x):  # (N, 6, 8)
        x, positions, mask = torch.relu(self.stem(x)), self.positions, self.mask
        if self.first:  # (6, N, 8)
            x, positions = x.transpose(0, 1), positions.transpose(0, 1)
            mask = mask[:, None]
        gain = torch.tensor(0.5)
        x = self.block(x=x, mask=mask, positions=positions, gain=gain)
        return self.head(x.mean(0 if self.first else 1))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("loss", ["squared", "fisher", "low_rank_fisher"])
@pytest.mark.parametrize("count", [6, 20])  # six is the length of a sequence too
def test_blocks_with_shared_arguments_are_reconstructed(first, loss, count):
    model = seeded(Sequences(first=first))
    samples = torch.randn(count, 6, 8, generator=torch.Generator().manual_seed(0))
    quantized = quantized_at(model, 3, samples)
    cache = gather(quantized, model, "block", samples, batch_size=6)
    assert [tuple(t.shape) for t in cache.inputs] == [(count, 6, 8)]
    with torch.no_grad():
        found = cache.call(model.block, [cache.float_inputs[0][2:5]])
    torch.testing.assert_close(found, cache.targets[2:5])
    rounding = RoundingConfig(iterations=30, batch_size=5)
    config = ReconstructConfig(rounding=rounding, loss=loss, batch_size=6)
    result = reconstruct(quantized, model, samples, config)
    errors = {e.block: e for e in quantization_of(result).errors}
    assert errors["block"].improved
