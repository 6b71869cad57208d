"""Ranges that follow minimum and maximum, and HAWQ-V3's recipe made of them."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import ompq
from nets import TinyMobileNet, TinyResNet, scenes, seeded
from ompq.configs import QUANTIZE_PROTOCOLS
from ompq.errors import TrainingError
from ompq.layers import activation_quantizers, quantized_layers
from ompq.quantization.record import quantization_of
from ompq.training.batch_norms import restore_float_weights
from quantized import quantized
from training_script import QUICK, equal, hawq, state


@pytest.fixture(scope="module")
def toys():
    return hawq()


def symmetric(weight, bits):
    """Round as HAWQ-V3 defines it, channel by channel, with Python's own numbers."""
    levels = 2 ** (bits - 1) - 1
    rows = []
    for channel in weight:
        scale = max(abs(value) for value in channel.flatten().tolist()) / levels
        codes = [round(value / scale) for value in channel.flatten().tolist()]
        assert all(abs(code) <= levels for code in codes)
        rows.append(torch.tensor([scale * code for code in codes]).double())
    return torch.stack(rows).reshape(weight.shape)


def test_training_starts_from_the_float_weights(toys):
    model, network, _, _ = toys
    changed = copy.deepcopy(network)
    for layer in quantized_layers(changed).values():
        layer.weight.data.mul_(1.5)
        layer.bias.data.add_(1.0)
    restore_float_weights(changed, model)
    stem = model.norm.weight / (model.norm.running_var + model.norm.eps).sqrt()
    expected = model.stem.weight * stem[:, None, None, None]
    assert torch.allclose(changed.stem.weight, expected)
    shift = model.norm.bias - model.norm.running_mean * stem
    assert torch.allclose(changed.stem.bias, shift)
    assert torch.equal(changed.head.bias, model.head.bias)
    assert not torch.equal(changed.head.weight, network.head.weight * 1.5)


def test_float_weights_survive_channels_brought_to_one_size():
    model, inputs = seeded(TinyMobileNet()), scenes(16)
    with torch.no_grad():  # one channel far larger than the others
        next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d)).weight[
            0
        ] *= 9
    network = quantized(model, inputs, weight=8)
    for layer in quantized_layers(network).values():
        layer.weight.data.zero_()
    restore_float_weights(network, model)
    with torch.no_grad():
        gap = (network(inputs) - model(inputs)).abs().max()
        assert gap < 0.2 * model(inputs).abs().max()


def test_another_float_network_is_refused(toys):
    _, network, data, config = toys
    words = r"stem has no weight of shape .* in the float network; give the network"
    with pytest.raises(TrainingError, match=words):
        ompq.train(network, data, config, teacher=torch.nn.Linear(2, 2))


def test_what_starts_from_float_needs_the_float_network(toys):
    _, network, data, _ = toys
    words = r"start='float' need the float network; pass teacher=model"
    with pytest.raises(ValueError, match=words):
        ompq.train(network, data, replace(QUICK, start="float"))


def test_the_recipe_learns_and_gives_an_ordinary_network(toys, tmp_path):
    model, network, data, config = toys
    trained = ompq.train(network, data, replace(config, epochs=8), teacher=model)
    assert trained.state_dict().keys() == network.state_dict().keys()
    with torch.no_grad():
        before = F.cross_entropy(network(data.inputs), data.targets)
        after = F.cross_entropy(trained(data.inputs), data.targets)
    assert after < before
    for layer in quantized_layers(trained).values():
        expected = symmetric(layer.weight, layer.bits)
        assert torch.allclose(layer.rounded_weight(), expected, rtol=1e-6)
    for one in activation_quantizers(trained).values():
        assert one.zero_point.item() in (0, 2 ** (one.bits - 1))
    network, inputs = trained.float(), data.inputs.float()
    ompq.save(network, tmp_path / "net.ompq.safetensors")
    loaded = ompq.load(tmp_path / "net.ompq.safetensors", TinyResNet)
    with torch.no_grad():
        assert torch.equal(loaded(inputs), network(inputs))
    result = ompq.export(network, tmp_path / "net.onnx", inputs)  # integers only
    assert result.engine.top1 == 1.0


def test_the_protocol_has_a_residual_stream_of_16_bits(toys, tmp_path):
    model, network, data, config = toys
    inputs = data.inputs.float()
    quantizing = QUANTIZE_PROTOCOLS["paper-qat"]
    assert quantizing == QUANTIZE_PROTOCOLS["hawq-v3"]
    bits = quantization_of(network).allocation
    wide = ompq.quantize(model.float(), bits, inputs, quantizing)
    trained = ompq.train(wide, [(inputs, data.targets)], config, teacher=model.float())
    found = {one.bits for one in activation_quantizers(trained).values()}
    assert found == {16, *(choice.activation for choice in bits.values())}
    for one in activation_quantizers(trained).values():
        assert one.zero_point.item() in (0, 2 ** (one.bits - 1))
    ompq.save(trained, tmp_path / "net.ompq.safetensors")
    loaded = ompq.load(tmp_path / "net.ompq.safetensors", TinyResNet)
    final = ompq.finalize(trained, inputs)
    engine = ompq.IntegerNetwork.from_quantized(final, inputs)
    engine.assert_integer_only(inputs)
    with torch.no_grad():
        assert torch.equal(loaded(inputs), trained(inputs))
        torch.testing.assert_close(engine(inputs), final(inputs))


def test_the_recipe_resumes_to_the_same_bits(toys, tmp_path):
    model, network, data, config = toys
    config = replace(config, checkpoint_steps=1)

    def stop(done, _total, _message):
        if done == 6:
            raise KeyboardInterrupt

    whole = ompq.train(network, data, config, teacher=model, checkpoint=tmp_path / "a")
    again = {"teacher": model, "checkpoint": tmp_path / "b"}
    with pytest.raises(KeyboardInterrupt):
        ompq.train(network, data, config, progress=stop, **again)
    assert equal(ompq.train(network, data, config, **again), whole)
    one, other = ((tmp_path / at / "last.safetensors").read_bytes() for at in "ab")
    assert one == other


def test_biases_and_norms_may_decay_as_weights_do(toys):
    _, network, data, _ = toys
    config = replace(QUICK, epochs=1, batch_size=32, weight_decay=0.1)
    plain = state(ompq.train(network, data, config))
    decayed = state(ompq.train(network, data, replace(config, decay_all=True)))
    for key, value in state(network).items():
        moved = plain[key] - decayed[key]
        expected = 0.05 * 0.1 * value if key.endswith("bias") else torch.zeros(())
        assert torch.allclose(moved, expected.to(moved), atol=1e-12), key


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_recorded_step_follows_the_ranges_too():
    model, network, data, config = hawq()
    model, network = model.cuda(), network.cuda()
    data = replace(data, inputs=data.inputs.cuda(), targets=data.targets.cuda())
    expected = state(ompq.train(network, data, config, teacher=model))
    recorded = replace(config, cuda_graph=True)
    found = state(ompq.train(network, data, recorded, teacher=model))
    for key, value in expected.items():
        assert torch.allclose(value, found[key], rtol=1e-6), key
