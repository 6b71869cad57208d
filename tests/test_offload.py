"""Networks whose weights only visit the device: the same results in little memory."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import VisionTransformer

import ompq
from nets import TinyMobileNet, images, scenes, seeded
from ompq import lab
from ompq.offload import device_memory
from ompq.quantization.record import quantization_of
from ompq.reconstruction.descent import Descent
from ompq.samples import call, evaluating

LOOSE = {"rtol": 1e-4, "atol": 1e-6}
QUICK = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=2))


class Attending(nn.Module):
    """Fused attention, tied weights, weights given to functions and used in views."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.wide = nn.Linear(16, 64)
        self.narrow = nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("shift", torch.full((16,), 0.1))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):  # (N, T)
        x = self.words(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        y = F.linear(x, self.wide.weight, self.wide.bias).relu()
        x = x + F.dropout(y @ self.narrow.weight.T, training=self.training)
        return self.head(x * self.scale + self.shift)


def weight_bytes(network):
    return sum(p.nbytes for p in network.parameters())


def tokens():
    return torch.arange(48).reshape(8, 6) % 11


def path(network, samples):
    plan = ompq.plan(network, samples, "4bits")
    quantized = ompq.quantize(network, plan, samples)
    better = ompq.reconstruct(quantized, network, samples, QUICK)
    found = ompq.evaluate(better, ompq.Samples.of(samples), reference=network)
    return plan, quantized, better, found


@pytest.mark.parametrize("kind", ["attention", "convolution"])
def test_results_are_the_same_in_part_of_the_memory(kind):
    network, samples = seeded(Attending()), tokens()
    if kind == "convolution":
        network, samples = seeded(TinyMobileNet()), scenes(4)
    plan, rounded, better, found = path(network, samples)
    largest = max(m.weight.nbytes for m in network.modules() if hasattr(m, "weight"))
    limit = max(weight_bytes(network) // 2, 2 * largest)
    with device_memory(f"{limit / 1024}KiB", "cpu") as memory:
        again = path(network, samples)
    assert 0 < memory.peak_bytes <= limit < weight_bytes(network)
    # Without fused attention, which has no function of its own to watch.
    close = (
        {"rtol": 1e-4, "atol": 1e-6} if kind == "attention" else {"rtol": 0, "atol": 0}
    )
    np.testing.assert_allclose(again[0].scores.damage, plan.scores.damage, **close)
    for one, other in zip((rounded, better), again[1:3], strict=True):
        state = other.state_dict()
        for key, value in one.state_dict().items():
            torch.testing.assert_close(state[key], value, **close)
    assert again[3].divergence == pytest.approx(found.divergence, rel=1e-4)


def blocks_of(kind):
    """Return a network of many equal blocks, and samples."""
    if kind == "vision transformer":
        shape = {"image_size": 16, "patch_size": 8, "num_classes": 5}
        size = {"num_layers": 4, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
        return seeded(VisionTransformer(**shape, **size)), images(8, size=16)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    ids = torch.arange(48).reshape(8, 6) * 7 % 50
    return seeded(transformers.LlamaForCausalLM(config)), ids


@pytest.mark.parametrize("kind", ["vision transformer", "decoder"])
def test_blocks_are_learned_in_the_memory_of_one(kind):
    network, samples = blocks_of(kind)
    rounding = ompq.RoundingConfig(iterations=10)
    bits = {"*": (3, 8)}
    nearest = ompq.QuantizeConfig(output_error=False)  # which leaves more to learn
    quantized = ompq.quantize(network, bits, samples, nearest)
    blocks = quantization_of(quantized).graph.blocks
    largest = max(
        sum(t.nbytes for t in quantized.get_submodule(name).state_dict().values())
        for name in blocks
        if not name.endswith("embed_tokens")
    )
    limit = 1.2 * largest
    with device_memory(f"{limit / 1024}KiB", "cpu") as memory:
        again = ompq.quantize(network, bits, samples, nearest)
    assert 0 < memory.peak_bytes <= limit
    for loss in ("squared", "fisher"):
        config = ompq.ReconstructConfig(rounding=rounding, loss=loss)
        expected = ompq.reconstruct(quantized, network, samples, config)
        with device_memory(f"{limit / 1024}KiB", "cpu") as memory:
            found = ompq.reconstruct(again, network, samples, config)
        assert largest <= memory.peak_bytes <= limit < weight_bytes(network) / 3
        errors = [quantization_of(each).errors for each in (found, expected)]
        assert errors[0] == errors[1]
        assert sum(error.improved for error in errors[0]) > 2
        for key, value in expected.state_dict().items():
            assert torch.equal(found.state_dict()[key], value)


@pytest.mark.parametrize("protocol", ["ours", "brecq"])
def test_what_a_block_learned_with_is_gone_before_the_next(protocol, monkeypatch):
    steps = {"iterations": 2}
    rounding = ompq.RoundingConfig(**steps)
    if protocol == "brecq":
        rounding = lab.BrecqConfig(**steps, activation_iterations=2)
    network, samples = seeded(TinyMobileNet()), scenes(4)
    quantized = ompq.quantize(network, {"*": (3, 4)}, samples)
    made, alive = [], []

    def remembered(self):
        alive.append(sum(one() is not None for one in made))
        made.append(weakref.ref(self))
        prepared(self)

    prepared = Descent.__post_init__
    monkeypatch.setattr(Descent, "__post_init__", remembered)
    gc.disable()  # nothing may wait for it
    try:
        config = ompq.ReconstructConfig(rounding=rounding)
        ompq.reconstruct(quantized, network, samples, config)
    finally:
        gc.enable()
    assert len(alive) > 3
    assert not any(alive)


def test_a_backward_pass_keeps_no_copies():
    network = seeded(nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))))
    x = torch.ones(2, 32, requires_grad=True)
    expected = torch.autograd.grad(network(x).sum(), x)[0]
    layer, made = network[0].weight.nbytes, []
    with device_memory(f"{3 * layer / 1024}KiB", "cpu") as memory:
        fetch = memory.fetch

        def watched(tensors):
            found = fetch(tensors)
            made.extend(map(weakref.ref, found.values()))
            return found

        memory.fetch = watched
        with evaluating(network), torch.enable_grad():
            output = network(x)
            assert sum(copy().nbytes for copy in made if copy() is not None) < 4 * layer
            found = torch.autograd.grad(output.sum(), x)[0]
    assert torch.equal(found, expected) and memory.peak_bytes <= 3 * layer


def test_what_a_call_changes_is_changed_on_the_host():
    network = seeded(nn.Linear(4, 4))
    before = network.weight.detach().clone()
    with device_memory("1MiB", "cpu"), evaluating(network):
        first = call(network, torch.eye(4))
        network.weight.mul_(2.0)
        assert torch.equal(network.weight.T.contiguous().T, 2 * before)
        second = call(network, torch.eye(4))
    assert torch.equal(network.weight, 2 * before)
    torch.testing.assert_close(second - network.bias, 2 * (first - network.bias))


def write_inputs(folder):
    file = folder / "inputs.py"
    file.write_text("import torch\ndef ones():\n    return torch.ones(2, 1, 8, 8)\n")
    return f"{file}:ones"


def test_too_little_memory_says_how_much_is_needed(tmp_path):
    network = seeded(TinyMobileNet())
    with device_memory("0.1KiB", "cpu"):
        words = r"device_memory=102 B does not hold the \d+ B of weights"
        with pytest.raises(ompq.errors.DeviceMemoryError, match=words):
            ompq.trace(network, images())
        demo = ompq.load_model("ompq:demo")
        for data in ("digits", write_inputs(tmp_path)):
            with pytest.raises(
                ompq.errors.DeviceMemoryError, match="^device_memory=102 B"
            ):
                ompq.load_data(data, demo)
    with device_memory("2.5GiB", "cpu") as memory:
        words = "device_memory=2.50 GiB does not hold the 3.25 GiB of weights"
        with pytest.raises(ompq.errors.DeviceMemoryError, match=words):
            memory.check(13 << 28)
    for text in ("8", "0GiB", "much"):
        words = f"device_memory={text} is not an amount"
        with pytest.raises(ValueError, match=words), device_memory(text):
            pass


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_weights_visit_a_gpu():
    network, samples = seeded(Attending()), tokens()
    plan, _, _, found = path(network, samples)
    limit = weight_bytes(network) // 2
    with device_memory(f"{limit / 1024}KiB", "cuda") as memory:
        again = path(network, samples)
    assert 0 < memory.peak_bytes <= limit
    assert {p.device.type for p in network.parameters()} == {"cpu"}
    assert {p.device.type for p in again[2].parameters()} == {"cpu"}
    np.testing.assert_allclose(
        again[0].scores.damage, plan.scores.damage, rtol=0.05, atol=1e-4
    )
    assert again[3].divergence == pytest.approx(found.divergence, rel=0.5)
