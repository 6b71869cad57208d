"""Samples distilled from batch norms."""

import pytest
import torch
from torch import nn

import ompq
from nets import Chain, TinyResNet, seeded
from ompq.datasets.named_data import load_data
from ompq.errors import DataError, SampleError
from ompq.models.named_models import NamedModel

SHAPE = (3, 8, 8)


@pytest.fixture(scope="module")
def model():
    return seeded(TinyResNet())


def loss(model, images):
    """Compute ZeroQ's loss as its paper writes it, in float64, image by image."""
    inputs = {}
    hooks = [
        module.register_forward_pre_hook(lambda m, args: inputs.update({m: args[0]}))
        for module in model.modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    total = 0.0
    for norm, x in inputs.items():
        for image in x.double():
            for channel in range(len(image)):
                values = image[channel].flatten()
                deviation = (values.var() + 1e-6).sqrt()
                expected = (norm.running_var[channel].double() + 1e-6).sqrt()
                total += float((values.mean() - norm.running_mean[channel]) ** 2)
                total += float((deviation - expected) ** 2)
    for channel in images.double().flatten(0, 1):
        total += float(channel.mean() ** 2)
        total += float(((channel.var() + 1e-6).sqrt() - 1) ** 2)
    return total / len(images)


def test_the_loss_is_the_published_one_and_falls(model):
    told = []
    made = ompq.datasets.distilled_samples(
        model, SHAPE, 4, steps=60, progress=lambda *call: told.append(call)
    )
    noise = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    first, last = (float(text.split()[-1]) for _, _, text in (told[0], told[-1]))
    assert first == pytest.approx(loss(model, noise), rel=6e-3)  # three digits are told
    assert last == pytest.approx(loss(model, made), rel=0.2)  # one step later
    assert loss(model, made) < 0.5 * loss(model, noise)
    assert [done for done, _, _ in told] == list(range(1, 61))
    assert {total for _, total, _ in told} == {60}


def test_the_seed_decides_and_nothing_is_changed(model):
    before, state = (
        torch.get_rng_state(),
        [p.clone() for p in model.state_dict().values()],
    )
    one, again = (
        ompq.datasets.distilled_samples(model, SHAPE, 3, steps=3) for _ in range(2)
    )
    other = ompq.datasets.distilled_samples(model, SHAPE, 3, steps=3, seed=1)
    assert one.shape == (3, *SHAPE)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)
    for old, new in zip(state, model.state_dict().values(), strict=True):
        assert torch.equal(old, new)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_images_are_made_in_batches(model):
    told = []
    made = ompq.datasets.distilled_samples(
        model, SHAPE, 5, steps=2, batch_size=2, progress=lambda *call: told.append(call)
    )
    assert made.shape == (5, *SHAPE)
    assert len(told) == told[-1][1] == 6


def test_inputs_that_are_not_normalised_are_free(model):
    free = ompq.datasets.distilled_samples(model, SHAPE, 2, steps=40, normalised=False)
    tied = ompq.datasets.distilled_samples(model, SHAPE, 2, steps=40)
    assert not torch.equal(free, tied)


def test_networks_without_statistics_are_refused():
    with pytest.raises(SampleError, match="Chain has no batch norms"):
        ompq.datasets.distilled_samples(Chain(), SHAPE)
    with pytest.raises(SampleError, match="TinyResNet hold only initial values"):
        ompq.datasets.distilled_samples(TinyResNet(), SHAPE)
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        ompq.datasets.distilled_samples(seeded(TinyResNet()), SHAPE, steps=0)


def test_data_by_name(model, monkeypatch):
    asked = []

    def quickly(*args, **more):
        asked.append(more)
        return ompq.datasets.distilled_samples(*args, **more, steps=2)

    monkeypatch.setattr("ompq.datasets.named_data.distilled_samples", quickly)
    named = NamedModel(model, "net", SHAPE, (0.5,) * 3, (0.5,) * 3, 8)
    data = load_data("distilled", named, seed=3)
    assert data.name == "distilled" and len(data) == 128
    assert data.samples(4).shape == (4, *SHAPE)
    assert asked[0]["seed"] == 3 and asked[0]["normalised"]
    image, target = data.read(1)
    assert image.shape == SHAPE and target == -1
    with pytest.raises(DataError, match="distilled images have no labels"):
        data.batches()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_distilling_on_a_gpu(model):
    made = ompq.datasets.distilled_samples(model.cuda(), SHAPE, 4, steps=5)
    assert made.device.type == "cpu"
    model.cpu()
