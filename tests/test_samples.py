import pytest
import torch
from torch import nn

from nets import Chain, images, seeded
from ompq.errors import SampleError
from ompq.samples import (
    attached,
    batch_count,
    batch_length,
    call,
    evaluating,
    first_samples,
    first_tensor,
    model_device,
    run_first,
    sample_batches,
)


def test_one_tensor_is_cut_into_batches():
    parts = list(sample_batches(torch.arange(10.0), batch_size=4))
    assert [len(part) for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat(parts), torch.arange(10.0))


@pytest.mark.parametrize("size", [1, 3, 4, 10, 11])
def test_batches_are_counted_beforehand_where_they_can_be(size):
    for samples in (torch.ones(10, 2), {"x": torch.ones(10, 2)}):
        made = len(list(sample_batches(samples, batch_size=size)))
        assert batch_count(samples, size) == made
    assert batch_count(iter([torch.ones(10, 2)]), size) is None


def test_dict_and_tuple_are_one_batch_each():
    x, mask = torch.ones(6, 2), torch.ones(3, 3)
    (first, second) = sample_batches({"x": x, "mask": mask}, batch_size=3)
    assert first["x"].shape == (3, 2)
    assert torch.equal(second["mask"], mask)  # no batch dimension: passed whole
    (only,) = sample_batches((x, x))
    assert isinstance(only, tuple)
    assert batch_length(only) == 6


def test_iterables_yield_their_batches():
    batches = [torch.ones(2, 3), torch.ones(1, 3)]
    assert [len(b) for b in sample_batches(batches)] == [2, 1]
    assert len(first_samples(batches, 1)) == 1


@pytest.mark.parametrize("samples", [[], torch.ones(0, 3), [torch.ones(0, 3)]])
def test_empty_samples_are_refused(samples):
    with pytest.raises(SampleError, match="samples are empty: give at least one input"):
        list(sample_batches(samples))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_values_are_refused(value):
    with pytest.raises(SampleError, match="samples hold NaN or infinity"):
        list(sample_batches(torch.tensor([[1.0, value]])))


def test_labelled_batches_are_refused():
    with pytest.raises(
        SampleError, match=r"labelled DataLoader.*\[x for x, _ in loader"
    ):
        list(sample_batches([[torch.ones(2), torch.ones(2)]]))


def test_other_things_are_refused():
    with pytest.raises(SampleError, match="a batch must be a tensor, .* not str"):
        list(sample_batches(["text"]))
    with pytest.raises(SampleError, match="not tuple"):
        list(sample_batches((1, 2)))


def test_iterator_is_refused_because_it_is_read_more_than_once():
    with pytest.raises(TypeError, match="can be read only once; pass a list"):
        first_samples(iter([torch.ones(2)]), 1)


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
    ("batch_size", "sizes"), [(None, [10]), (4, [4, 4, 2]), (16, [10])]
)
def test_the_first_samples_run_a_few_at_a_time(batch_size, sizes):
    model, inputs = nn.Sequential(nn.Dropout(), nn.Flatten()).train(), images(12)
    seen, reported = [], []
    with attached([model.register_forward_hook(lambda _m, _a, out: seen.append(out))]):
        run_first(
            model,
            inputs,
            10,
            batch_size=batch_size,
            report=lambda *n: reported.append(n),
        )
    assert [len(out) for out in seen] == sizes
    assert torch.equal(torch.cat(seen), inputs[:10].flatten(1))  # nothing was dropped
    assert reported == [(n + 1, len(sizes)) for n in range(len(sizes))]
    assert model.training
