from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ompq
import ompq.samples as samples_module
from nets import Chain, TinyMobileNet, images, scenes, seeded, values
from ompq.errors import SampleError
from ompq.samples import (
    Samples,
    attached,
    batch_length,
    call,
    collect,
    evaluating,
    first_tensor,
    model_device,
)
from tables import score_inputs


def batches(given, size=256):
    return list(Samples.of(given).batches(size))


def shuffled(inputs, batch_size=5):
    """Return a loader that gives another order whenever it is read."""
    generator = torch.Generator().manual_seed(5)
    return DataLoader(inputs, batch_size, shuffle=True, generator=generator)


def test_one_tensor_is_cut_into_batches():
    parts = batches(torch.arange(10.0), 4)
    assert [len(part) for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat(parts), torch.arange(10.0))


@pytest.mark.parametrize("size", [1, 3, 4, 10, 11])
def test_batches_are_counted_beforehand(size):
    x = torch.ones(10, 2)
    for given in (x, {"x": x}, [x, x[:3], torch.ones(2, 5)], iter([x])):
        samples = Samples.of(given)
        assert samples.batch_count(size) == len(list(samples.batches(size)))


def test_dict_and_tuple_are_one_batch_each():
    x, mask = torch.ones(6, 2), torch.ones(3, 3)
    (first, second) = batches({"x": x, "mask": mask}, 3)
    assert first["x"].shape == (3, 2)
    assert torch.equal(second["mask"], mask)  # no batch dimension: passed whole
    (only,) = batches((x, x))
    assert isinstance(only, tuple)
    assert batch_length(only) == 6


@pytest.mark.parametrize("form", ["list", "generator", "loader", "labelled", "tuples"])
def test_batches_of_one_shape_are_joined_with_all_their_inputs(form):
    x, y = torch.randn(11, 3), torch.arange(11)
    given = {
        "list": [x[:4], x[4:4], x[4:6], x[6:]],
        "generator": (part for part in x.split(2)),
        "loader": DataLoader(x, 4),
        "labelled": DataLoader(TensorDataset(x, y), 4),
        "tuples": [(a, b) for a, b in zip(x.split(3), y.split(3), strict=True)],
    }[form]
    samples = Samples.of(given)
    assert len(samples) == 11
    (only,) = samples.batches(20)
    if form == "tuples":
        assert torch.equal(only[1], y)
        only = only[0]
    assert torch.equal(only, x)
    assert [len(b) for b in map(first_tensor, samples.batches(8))] == [8, 3]


def test_batches_of_other_shapes_stay_apart_and_in_order():
    short, long = torch.ones(2, 3), torch.zeros(3, 7)
    samples = Samples.of([short, short, long, short])
    shapes = [tuple(batch.shape) for batch in samples.batches(3)]
    assert shapes == [(3, 3), (1, 3), (3, 7), (2, 3)]
    assert [tuple(b.shape) for b in samples.first(6).batches(9)] == [(4, 3), (2, 7)]
    assert samples.first_batch(6).shape == (4, 3)
    assert len(samples.first(100)) == len(samples) == 9


def test_a_tensor_that_inputs_share_is_kept_once():
    x, mask = torch.randn(5, 2), torch.ones(3, 3)
    given = [{"x": x[:2], "mask": mask}, {"x": x[2:4], "mask": mask}]
    (only,) = batches(given)
    assert torch.equal(only["x"], x[:4])
    assert torch.equal(only["mask"], mask)
    assert len(batches([*given, {"x": x[4:], "mask": 0 * mask}])) == 2
    assert len(batches([{"x": x}, {"y": x}])) == 2
    assert len(batches([x, (x,)])) == 2


def test_samples_are_read_once():
    reads = []

    class Counting(list):
        def __iter__(self):
            reads.append(1)
            return super().__iter__()

    samples = Samples.of(Counting([torch.ones(2, 3)]))
    assert Samples.of(samples) is samples
    list(samples.batches(1)), samples.first(1), samples.first_batch(1)
    assert reads == [1]


def test_a_generator_may_reuse_its_memory():
    def reading():
        buffer = torch.empty(2, 1)
        for value in range(3):
            yield buffer.fill_(value)

    (only,) = batches(reading())
    assert only.flatten().tolist() == [0, 0, 1, 1, 2, 2]


def test_one_labelled_batch_is_no_list_of_two():
    x = images(4)
    (only,) = batches(next(iter(DataLoader(TensorDataset(x, torch.arange(4)), 4))))
    assert torch.equal(only, x)


@pytest.mark.parametrize("given", [[], torch.ones(0, 3), [torch.ones(0, 3)]])
def test_empty_samples_are_refused(given):
    with pytest.raises(SampleError, match="samples are empty: give at least one input"):
        Samples.of(given)


def test_an_iterator_that_was_read_before_is_refused():
    given = iter([torch.ones(2)])
    Samples.of(given)
    with pytest.raises(SampleError, match="empty.*an iterator can be read only once"):
        Samples.of(given)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_broken_values_are_refused(value):
    with pytest.raises(SampleError, match="samples hold NaN or infinity"):
        Samples.of(torch.tensor([[1.0, value]]))


def test_lists_that_are_not_inputs_and_classes_are_refused():
    x = torch.ones(2, 3)
    for others in ([x], [torch.ones(2)], [torch.arange(3)], [torch.arange(2)] * 2):
        with pytest.raises(
            SampleError, match=r"lists of \d; pass .* \[x for x, _ in loader\]"
        ):
            Samples.of([[x, *others]])


def test_other_things_are_refused():
    with pytest.raises(SampleError, match="a batch must be a tensor, .* not str"):
        Samples.of(["text"])
    with pytest.raises(SampleError, match="not tuple"):
        Samples.of((1, 2))


def test_what_cannot_be_read_is_refused():
    for given in (7, None):
        with pytest.raises(SampleError, match="iterable of batches, not "):
            Samples.of(given)


def test_samples_without_end_are_refused(monkeypatch):
    monkeypatch.setattr("ompq.samples._MOST_BYTES", 1 << 12)
    with pytest.raises(SampleError, match="samples take more than 0 GiB; give fewer"):
        Samples.of(torch.ones(8) for _ in count())


def test_call_passes_each_form():
    class Pair(nn.Module):
        def forward(self, x, y):
            return x - y

    x, y = torch.tensor([3.0]), torch.tensor([1.0])
    assert call(Pair(), (x, y)) == 2
    assert call(Pair(), {"y": y, "x": x}) == 2
    assert call(nn.Identity(), x) == 3


def test_first_tensor_looks_into_structures():
    logits = torch.ones(2)
    assert first_tensor({"ids": torch.tensor([1]), "out": (logits,)}) is logits
    with pytest.raises(SampleError, match="returned list without a float tensor"):
        first_tensor([torch.tensor([1])])


def test_evaluating_restores_every_flag_even_after_an_error():
    network = seeded(Chain()).train()
    network.head.eval()
    with pytest.raises(ZeroDivisionError), evaluating(network):
        assert not network.training
        assert not torch.is_grad_enabled()
        raise ZeroDivisionError
    assert network.training
    assert not network.head.training
    assert torch.is_grad_enabled()


def test_model_device():
    assert model_device(seeded(Chain())) == torch.device("cpu")
    assert model_device(nn.Identity()) == torch.device("cpu")
    assert model_device(nn.BatchNorm1d(2, affine=False)).type == "cpu"
    assert images().shape == (8, 3, 8, 8)


def test_hooks_are_removed_whatever_happens():
    layer, seen = nn.Linear(2, 2), []
    hooks = [layer.register_forward_hook(lambda *_: seen.append(1)) for _ in range(2)]
    with pytest.raises(ZeroDivisionError), attached(hooks):
        layer(torch.ones(1, 2))
        raise ZeroDivisionError
    layer(torch.ones(1, 2))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(256, [12]), (5, [5, 5, 2]), (16, [12])]
)
def test_collect_shows_what_modules_get_and_give(batch_size, sizes):
    model, inputs = nn.Sequential(nn.Dropout(), nn.Flatten()).train(), images(12)
    seen, reported = [], []

    def collector(_module, args, _kwargs, output):
        seen.append((args[0], output))

    collect(
        model,
        Samples.of(inputs),
        [(model[1], collector)],
        batch_size=batch_size,
        report=lambda *n: reported.append(n),
    )
    assert [len(given) for given, _ in seen] == sizes
    assert torch.equal(torch.cat([given for given, _ in seen]), inputs)
    assert torch.equal(torch.cat([out for _, out in seen]), inputs.flatten(1))
    assert reported == [(n + 1, len(sizes)) for n in range(len(sizes))]
    assert model.training
    assert not model[1]._forward_hooks


def same(one, other):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.fixture(scope="module")
def network():
    return seeded(TinyMobileNet())


def test_quantize_takes_float_and_quantized_moments_from_the_same_images(network):
    loader, inputs = shuffled(scenes(24)), scenes(24)
    plan = ompq.plan(network, inputs, "4bits")
    read = torch.cat(list(shuffled(inputs)))  # the order that the loader gives first
    assert not torch.equal(read, inputs)
    expected = ompq.quantize(network, plan, read)
    assert same(ompq.quantize(network, plan, loader), expected)


def test_quantize_uses_all_batches_of_a_list(network):
    inputs = scenes(24)
    plan = ompq.plan(network, inputs, "4bits")
    whole = ompq.quantize(network, plan, inputs)
    assert same(ompq.quantize(network, plan, list(inputs.split(7))), whole)
    assert not same(ompq.quantize(network, plan, inputs[:7]), whole)


def test_verbs_take_generators(network):
    inputs = scenes(16)

    def parts():
        yield from inputs.split(5)

    def made(samples):
        plan = ompq.plan(network, samples(), "4bits")
        quantized = ompq.quantize(network, plan, samples())
        quick = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=3))
        better = ompq.reconstruct(quantized, network, samples(), quick)
        return plan, ompq.finalize(better, samples())

    (plan, network_made), (expected_plan, expected) = made(parts), made(lambda: inputs)
    assert plan.allocation == expected_plan.allocation
    assert same(network_made, expected)


class Tokens(nn.Module):
    """Embeds, mixes and averages sequences of any length."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(F.relu(self.mix(self.embedding(ids))).mean(1))


def test_sequences_of_different_lengths_can_be_samples():
    network = seeded(Tokens())
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randint(10, (6, length), generator=generator) for length in (5, 9, 5)
    ]
    plan = ompq.plan(network, given, "5bits")
    quantized = ompq.quantize(network, plan, given)
    assert quantized(given[1]).shape == (6, 3)
    # The second batch, of another length, has its part in the ranges.
    louder = [given[0], given[1].clone(), given[2]]
    with torch.no_grad():
        network.embedding.weight[9] *= 100
    louder[0], louder[2] = louder[0].clamp(max=8), louder[2].clamp(max=8)
    with_nines = ompq.quantize(network, plan, louder)
    without = ompq.quantize(network, plan, [louder[0], louder[2]])
    assert not same(with_nines, without)


def test_scores_of_inputs_use_batches_of_every_shape():
    network = seeded(Tokens())
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randint(10, (4, n), generator=generator) for n in (5, 9))
    graph = ompq.trace(network, one)
    choices = [ompq.Choice(4, bits) for bits in (4, 8)]

    def damage(given):
        return ompq.scores.WeightNoise()(
            score_inputs(graph, network, given, choices)
        ).damage

    # The part of the weights is the same in all three.
    both, apart = damage([one, two]), (damage(one) + damage(two)) / 2
    torch.testing.assert_close(both, apart, rtol=1e-5, atol=0)
    assert not torch.equal(torch.tensor(damage(one)), torch.tensor(damage(two)))


def test_threads_that_run_two_networks_do_not_wait_for_ever():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1).eval()
    inside = []

    def run(*networks):
        for _ in range(300):
            with evaluating(*networks):
                inside.append(1)
                assert len(inside) == 1
                assert not (one.training or other.training)
                inside.pop()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, one, other), pool.submit(run, other, one)]:
            done.result(timeout=60)
    assert one.training
    assert not other.training


def test_samples_are_cut_like_tensors():
    runs = [values(3, 2), values(4, 2, seed=1), values(2, 5)]
    samples, whole = Samples.of(runs), [*runs[0], *runs[1], *runs[2]]
    for start, stop in ((0, 3), (2, 6), (5, 9), (-3, None)):
        found = [one for run in samples[start:stop].runs for one in run]
        assert len(found) == len(whole[start:stop])
        assert all(
            torch.equal(a, b) for a, b in zip(found, whole[start:stop], strict=True)
        )
    with pytest.raises(ValueError, match="step 2 must be 1"):
        _ = samples[::2]
    with pytest.raises(SampleError, match=r"samples\[7:7\] of 9 samples is empty"):
        _ = samples[7:7]


def test_samples_are_a_sequence_of_batches_of_one():
    runs = [values(3, 2), values(2, 5)]
    samples = Samples.of(runs)
    for at in (0, 2, 4, -1, -5):
        assert torch.equal(samples[at][0], [*runs[0], *runs[1]][at])
    for at in (5, -6):
        with pytest.raises(IndexError, match=f"there are 5 samples, so none is {at}"):
            _ = samples[at]
    assert len(list(samples)) == 5
    again = Samples.of(list(samples))
    assert all(map(torch.equal, again.runs, samples.runs))


def test_arrays_of_numpy_are_samples():
    array = np.linspace(0, 1, 12).reshape(4, 3)
    wanted = torch.from_numpy(array).float()
    for given in (array, [array[:3], array[3:]], array[:, ::-1][:, ::-1]):
        (run,) = Samples.of(given).runs
        assert torch.equal(run, wanted)
    found = Samples.of({"ids": np.arange(4), "mask": np.ones((4, 2), bool)}).runs[0]
    assert (found["ids"].dtype, found["mask"].dtype) == (torch.int64, torch.bool)
    (pair,) = Samples.of((array, array)).runs
    assert torch.equal(pair[1], wanted)


def test_datasets_are_samples_and_targets_are_mentioned_once(caplog):
    inputs, targets = values(70, 3), torch.arange(70)
    samples_module._say_once.cache_clear()
    for given in (TensorDataset(inputs), TensorDataset(inputs, targets)):
        (run,) = Samples.of(given).runs
        assert torch.equal(run, inputs)
    Samples.of(DataLoader(TensorDataset(inputs, targets), batch_size=8))
    told = [one.message for one in caplog.records]
    assert told == ["ignoring the targets that come with the samples"]


def test_samples_without_values_of_their_own_are_refused():
    dense = torch.eye(4)
    nested = torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    )
    for given in (dense.to_sparse(), nested):
        with pytest.raises(SampleError, match="sparse or nested; give dense ones: to_"):
            Samples.of(given)
    with pytest.raises(SampleError, match="on the meta device, so they have no values"):
        Samples.of(dense.to("meta"))
