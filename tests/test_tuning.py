from dataclasses import replace

import pytest
import torch
from scipy.special import rel_entr, softmax
from torch import nn

import ompq
from nets import TinyResNet, images, scenes, seeded, tokens, values
from ompq.lab.brecq import BrecqConfig
from ompq.layers import activation_quantizers, quantized_layers
from ompq.reconstruction.block_loop import ReconstructConfig, reconstruct
from ompq.reconstruction.rounding import RoundingConfig
from ompq.reconstruction.tuning import TuningConfig

ROUNDING = RoundingConfig(iterations=20, batch_size=16)
UNTUNED = ReconstructConfig(rounding=ROUNDING, tuning=None)
TUNING = TuningConfig(batch_size=16, learning_rate=1e-3)
TUNED = ReconstructConfig(rounding=ROUNDING, tuning=TUNING)
WHOLE = "whole network"
CUDA = (
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
)


def quantized_at(network, samples, weight, activation):
    config = ompq.QuantizeConfig(output_error=False)  # which leaves more to tune
    return ompq.quantize(network, {"*": (weight, activation)}, samples, config)


def was_tuned(network):
    return ompq.quantization_of(network).tuned is not None


@pytest.fixture(scope="module")
def narrow():
    network = seeded(TinyResNet(), seed=4)
    return network, quantized_at(network, scenes(128), 3, 3)


@pytest.fixture(scope="module")
def untuned(narrow):
    network, quantized = narrow
    return reconstruct(quantized, network, scenes(128), UNTUNED)


@pytest.fixture(scope="module")
def tuned(narrow):
    network, quantized = narrow
    return reconstruct(quantized, network, scenes(128), TUNED)


def divergence(network, model, samples):
    """Return the mean KL divergence by SciPy."""
    with torch.no_grad():
        p, q = (softmax(net(samples).numpy(), axis=1) for net in (model, network))
    return rel_entr(p, q).sum(1).mean()


def test_a_tuned_network_is_closer_to_the_float_one(narrow, untuned, tuned):
    model, _ = narrow
    for samples in (scenes(128), scenes(128, seed=9)):
        before = divergence(untuned, model, samples)
        assert divergence(tuned, model, samples) < 0.9 * before
    found, others = map(ompq.quantization_of, (tuned, untuned))
    assert found.errors == others.errors
    assert others.tuned is None
    whole = found.tuned
    assert whole.before == pytest.approx(divergence(untuned, model, scenes(128)), 1e-4)
    assert whole.after == pytest.approx(divergence(tuned, model, scenes(128)), 1e-4)
    assert whole.improved


def test_tuning_keeps_the_codes_of_all_weights(untuned, tuned):
    others = quantized_layers(untuned)
    for name, layer in quantized_layers(tuned).items():
        assert torch.equal(layer.codes(), others[name].codes())
        torch.testing.assert_close(layer.rounded_weight(), layer.weight)
        assert not torch.equal(layer.weight_scale, others[name].weight_scale)
        assert layer.learning is None


def test_tuning_leaves_no_gradients_behind(untuned, tuned):
    flags = [p.requires_grad for p in untuned.parameters()]
    assert [p.requires_grad for p in tuned.parameters()] == flags
    assert all(p.grad is None for p in tuned.parameters())


def test_norms_and_activation_steps_are_tuned():
    network, samples = tokens(), scenes(64)
    quantized = quantized_at(network, samples, 3, 4)
    untuned = reconstruct(quantized, network, samples, UNTUNED)
    tuned = reconstruct(quantized, network, samples, TUNED)
    old = dict(untuned.named_modules())
    norms = [n for n, m in tuned.named_modules() if isinstance(m, nn.LayerNorm)]
    assert norms
    for name in norms:
        weight = tuned.get_submodule(name).weight
        assert not torch.equal(weight, old[name].weight)
    steps = activation_quantizers(untuned)
    found = activation_quantizers(tuned).items()
    changed = [n for n, q in found if not torch.equal(q.scale, steps[n].scale)]
    assert changed == [n for n, q in found if q.learnable and q.bits < 8]


class Offset(nn.Module):
    """Has a float parameter that is no vector, as position embeddings are."""

    def __init__(self):
        super().__init__()
        self.offset, self.body = nn.Parameter(0.1 * images(1)), TinyResNet()

    def forward(self, x):
        return self.body(x + self.offset)


def test_float_parameters_that_are_not_tuned_stay_without_gradients():
    model = seeded(Offset())
    quantized = quantized_at(model, scenes(16), 3, 3)
    result = reconstruct(quantized, model, scenes(16), TUNED)
    assert was_tuned(result)
    assert torch.equal(result.offset, quantized.offset)
    assert result.offset.requires_grad
    assert all(p.grad is None for p in (*result.parameters(), *model.parameters()))


def test_a_network_that_does_not_improve_is_left_as_it_was(narrow, untuned):
    model, quantized = narrow
    wild = TuningConfig(epochs=1, learning_rate=1e3)
    result = reconstruct(quantized, model, scenes(128), replace(TUNED, tuning=wild))
    whole = ompq.quantization_of(result).tuned
    assert not whole.improved
    assert whole.after == whole.before
    for name, value in untuned.state_dict().items():
        assert torch.equal(result.state_dict()[name], value)


def test_networks_with_activations_of_8_bits_are_tuned_only_if_asked():
    model, samples = seeded(TinyResNet()), scenes(32)
    quantized = quantized_at(model, samples, 3, 8)
    assert not was_tuned(reconstruct(quantized, model, samples, TUNED))
    asked = replace(TUNED, tuning=TuningConfig(always=True))
    assert was_tuned(reconstruct(quantized, model, samples, asked))


def test_brecq_networks_of_several_outputs_and_offloaded_ones_are_not_tuned(narrow):
    model, quantized = narrow
    brecq = BrecqConfig(iterations=2, activation_iterations=2)
    config = replace(TUNED, rounding=brecq)
    assert not was_tuned(reconstruct(quantized, model, scenes(16), config))
    with ompq.device_memory("1MiB", "cpu"):
        assert not was_tuned(reconstruct(quantized, model, scenes(16), TUNED))

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = TinyResNet(), nn.Linear(5, 2)

        def forward(self, x):
            x = self.body(x)
            return x, self.head(x)

    model = seeded(TwoHeads())
    quantized = quantized_at(model, scenes(16), 3, 3)
    assert not was_tuned(reconstruct(quantized, model, scenes(16), TUNED))


def test_tuning_resumes_with_the_same_result(narrow, tuned, tmp_path):
    model, quantized = narrow
    path = tmp_path / "run.safetensors"

    def stop(_done, _total, message):
        if message.startswith(WHOLE):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reconstruct(
            quantized, model, scenes(128), TUNED, checkpoint=path, progress=stop
        )
    result = reconstruct(quantized, model, scenes(128), TUNED, checkpoint=path)
    for name, value in tuned.state_dict().items():
        assert torch.equal(result.state_dict()[name], value)


class Sentences(nn.Module):
    """A float table of word vectors, and two norms that share their parameters."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.again = nn.LayerNorm(16), nn.LayerNorm(16)
        self.again.weight, self.again.bias = self.norm.weight, self.norm.bias
        self.head = nn.Linear(16, 6)

    def forward(self, input_ids):
        x = self.norm(self.first(self.words(input_ids)))
        return {"logits": self.head(self.again(self.second(x.relu())))}


def test_shared_norms_are_tuned_once_and_what_stays_float_gets_no_gradient():
    model = seeded(Sentences())
    words = torch.randint(20, (32, 5), generator=torch.Generator().manual_seed(0))
    samples, bits = {"input_ids": words}, {"*": (3, 4), "words": 32}
    quantized = ompq.quantize(model, bits, samples)
    flags = [p.requires_grad for p in quantized.parameters()]
    # Adam warns of a parameter that it is given twice, and would step twice.
    result = reconstruct(quantized, model, samples, TUNED)
    assert was_tuned(result)
    assert result.norm.weight is result.again.weight
    assert all(p.grad is None for p in result.parameters())
    assert [p.requires_grad for p in result.parameters()] == flags


def test_the_progress_of_tuning_is_relative_to_its_own_start(narrow):
    model, quantized = narrow
    said = []
    reconstruct(
        quantized, model, scenes(128), TUNED, progress=lambda *each: said.append(each)
    )
    messages = [message for _, _, message in said if message.startswith(WHOLE)]
    assert messages
    assert all("% of the reconstructed network" in message for message in messages)


def test_a_network_of_one_number_per_input_is_tuned():
    model = seeded(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
    samples = values(64, 6)
    quantized = quantized_at(model, samples, 3, 3)
    before = reconstruct(quantized, model, samples, UNTUNED)
    after = reconstruct(quantized, model, samples, TUNED)
    with torch.no_grad():
        errors = [
            (net(samples) - model(samples)).square().mean() for net in (before, after)
        ]
    assert errors[1] < errors[0]


def test_tuning_needs_an_epoch():
    with pytest.raises(ValueError, match="'epochs' of TuningConfig must be at least 1"):
        TuningConfig(epochs=0)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=CUDA)])
def test_tuning_on_a_gpu(device, untuned, narrow):
    model, quantized = narrow
    samples = scenes(128).to(device)
    model, quantized = model.to(device), quantized.to(device)
    try:
        first, second = (
            reconstruct(quantized, model, samples, TUNED) for _ in range(2)
        )
    finally:
        model.cpu(), quantized.cpu()
    whole = ompq.quantization_of(first).tuned
    assert whole.after < 0.9 * whole.before
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)
