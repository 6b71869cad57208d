import copy
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

from nets import Chain, TinyMobileNet, TinyResNet, scenes, seeded, tokens, values
from ompq.allocation.problem import Allocation
from ompq.configs import QuantizeConfig, ReconstructConfig, RoundingConfig
from ompq.costs import can_be_coded, coded_bytes
from ompq.entropy_coding.rates import code_bytes, to_multiples
from ompq.errors import CheckpointError, QuantizationError, SampleError, TraceError
from ompq.layers import activation_quantizers, quantized_layers
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.quantization.pipeline import quantize
from ompq.quantization.record import quantization_of
from ompq.reconstruction import block_loop
from ompq.reconstruction.block_data import Arguments, BlockCache
from ompq.reconstruction.block_layout import Layout
from ompq.reconstruction.block_loop import reconstruct
from ompq.reconstruction.descent import kept_if_better

CUDA = (
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
)
QUICK = ReconstructConfig(rounding=RoundingConfig(iterations=120, batch_size=16))
SHORT = ReconstructConfig(rounding=RoundingConfig(iterations=10, batch_size=16))


def quantized_at(network, bits, samples, activation=8):
    names = trace(network, samples).names
    allocation = Allocation({name: Choice(bits, activation) for name in names})
    config = QuantizeConfig(output_error=False)  # which leaves more to learn
    return quantize(network, allocation, samples, config)


def logit_error(model, quantized, batch):
    with torch.no_grad():
        wanted = model(batch)
        return (
            (quantized(batch) - wanted).square().sum() / wanted.square().sum()
        ).item()


@pytest.fixture(scope="module", params=[TinyResNet, TinyMobileNet])
def pair(request):
    network = seeded(request.param(), seed=4)
    return network, quantized_at(network, 3, scenes(64))


@pytest.fixture(scope="module")
def learned(pair):
    model, quantized = pair
    return reconstruct(quantized, model, scenes(64), QUICK)


def test_reconstruction_brings_the_outputs_closer(pair, learned):
    model, quantized = pair
    unseen = scenes(64, seed=9)
    assert logit_error(model, learned, unseen) < logit_error(model, quantized, unseen)
    errors = quantization_of(learned).errors
    assert [e.block for e in errors] == list(trace(model, scenes()).blocks)
    assert all(e.after <= e.before for e in errors)
    assert any(e.after < e.before for e in errors)


def test_weights_end_on_their_grids(learned):
    kept = tuple(e.block for e in quantization_of(learned).errors if not e.improved)
    for name, layer in quantized_layers(learned).items():
        if not name.startswith(kept):
            torch.testing.assert_close(layer.rounded_weight(), layer.weight)
        assert layer.learning is None
        assert not layer.weight_scale.requires_grad
    assert all(q.keep == 1.0 for q in activation_quantizers(learned).values())


def test_arguments_and_generators_are_left_as_they_were(pair):
    model, quantized = pair
    states = [copy.deepcopy(m.state_dict()) for m in (model, quantized)]
    before = torch.get_rng_state()
    reconstruct(quantized, model, scenes(64), SHORT)
    assert torch.equal(torch.get_rng_state(), before)
    for module, state in zip((model, quantized), states, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
        assert not any(p.grad is not None for p in module.parameters())
    assert quantization_of(quantized).errors == ()


def test_same_seed_same_bits(pair):
    model, quantized = pair
    first, second = (reconstruct(quantized, model, scenes(64), SHORT) for _ in "ab")
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key])


def test_interrupted_run_continues_to_the_same_result(pair, learned, tmp_path):
    model, quantized = pair
    path = tmp_path / "checkpoint.safetensors"

    class Stop(KeyboardInterrupt):
        pass

    def at_third(done, total, message):
        if done >= 3 * QUICK.rounding.iterations:
            raise Stop

    with pytest.raises(KeyboardInterrupt):
        reconstruct(
            quantized, model, scenes(64), QUICK, checkpoint=path, progress=at_third
        )
    assert path.exists()
    resumed = reconstruct(quantized, model, scenes(64), QUICK, checkpoint=path)
    for key, value in learned.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key])
    assert quantization_of(resumed).errors == quantization_of(learned).errors


def test_progress_tells_the_error_of_each_block_relative_to_its_start(pair):
    model, quantized = pair
    told = []
    # Decided from the start and nothing learned: each block stays rounded to nearest.
    frozen = RoundingConfig(
        iterations=60,
        tail=1.0,
        scale_learning_rate=0,
        bias_learning_rate=0,
        activation_learning_rate=0,
        float_inputs=0,
    )
    reconstruct(
        quantized,
        model,
        scenes(64),
        ReconstructConfig(rounding=frozen),
        progress=lambda _done, _total, message: told.append(message),
    )
    *blocks, last = told
    # Restored means help the first block, to which only the image comes.
    assert last == "reconstructed" and len(blocks) > 2
    for message in blocks[1:]:
        share = re.fullmatch(r".* error (\d+)% of rounding alone", message)[1]
        assert 90 <= int(share) <= 110, message


def test_checkpoint_of_another_run_is_refused(pair, tmp_path):
    model, quantized = pair
    path = tmp_path / "checkpoint.safetensors"
    reconstruct(quantized, model, scenes(32), SHORT, checkpoint=path)
    other = ReconstructConfig(rounding=RoundingConfig(iterations=61))
    with pytest.raises(CheckpointError, match="belongs to another reconstruction"):
        reconstruct(quantized, model, scenes(32), other, checkpoint=path)
    changed = scenes(32)
    changed[-1] += 1  # the first is the same
    with pytest.raises(CheckpointError, match="belongs to another reconstruction"):
        reconstruct(quantized, model, changed, SHORT, checkpoint=path)
    path.write_bytes(b"nonsense")
    with pytest.raises(
        CheckpointError, match="checkpoint.safetensors cannot be resumed: it is not"
    ):
        reconstruct(quantized, model, scenes(32), SHORT, checkpoint=path)
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(
        CheckpointError,
        match="cannot be resumed: it is a safetensors file, but not of the kind",
    ):
        reconstruct(quantized, model, scenes(32), SHORT, checkpoint=path)


def test_block_that_cannot_be_improved_keeps_its_rounding():
    """A rounding that starts exact has an error of zero: nothing can lower it."""
    model = seeded(Chain())
    quantized = quantized_at(model, 8, scenes(32), activation=32)
    layer = quantized.head
    with torch.no_grad():
        layer.weight.copy_(layer.rounded_weight())
        model.head.weight.copy_(layer.weight)
        model.head.bias.copy_(layer.bias)
        quantized.conv.weight.copy_(quantized.conv.rounded_weight())
        model.conv.weight.copy_(quantized.conv.weight)
        model.conv.bias.copy_(quantized.conv.bias)
    result = reconstruct(quantized, model, scenes(32), QUICK)
    errors = quantization_of(result).errors
    assert all(not e.improved and e.after == e.before for e in errors)
    for key, value in quantized.state_dict().items():
        assert torch.equal(result.state_dict()[key], value)


def test_what_learning_broke_is_put_back():
    model = seeded(Chain())
    quantized = quantized_at(model, 3, scenes(16))
    rounding = RoundingConfig(iterations=30, batch_size=8, scale_learning_rate=1e9)
    config = ReconstructConfig(rounding=rounding)
    result = reconstruct(quantized, model, scenes(16), config)
    assert not any(e.improved for e in quantization_of(result).errors)
    for key, value in quantized.state_dict().items():
        assert torch.equal(result.state_dict()[key], value)


def test_what_helps_no_held_out_sample_is_not_kept(monkeypatch):
    """A method that claims to improve blocks but breaks the network changes nothing."""
    model = seeded(Chain())
    quantized = quantized_at(model, 4, scenes(256))
    seen = []

    def learn(block, cache, *_):
        seen.append((cache.learned_from, cache.held_out))
        with torch.no_grad():
            for layer in quantized_layers(block).values():
                layer.bias += 1.0
        return 1.0, 0.5

    monkeypatch.setattr(block_loop, "learn_rounding", learn)
    result = reconstruct(quantized, model, scenes(256))
    assert seen and set(seen) == {(224, 32)}
    for error in quantization_of(result).errors:
        assert (error.before, error.after, error.improved) == (1.0, 1.0, False)
    for key, value in quantized.state_dict().items():
        assert torch.equal(result.state_dict()[key], value)
    # With few samples there is nothing to judge by.
    seen.clear()
    result = reconstruct(quantized, model, scenes(64))
    assert set(seen) == {(64, 0)}
    assert all(error.improved for error in quantization_of(result).errors)


def test_a_block_that_improves_for_seen_samples_only_is_put_back():
    layer = quantized_layers(quantized_at(Chain(), 4, scenes(8)))["conv"]
    x = scenes(16)
    with torch.no_grad():
        targets = layer(x)
        targets[:12] += 1.0  # the last four are right as they are
    arguments = Arguments(((x,), {}), [Layout(0)])
    cache = BlockCache([x], targets, arguments, held_out=4)
    assert torch.cat([*cache.judging(3)]).tolist() == [12, 13, 14, 15]
    before = layer.bias.clone()
    with kept_if_better(layer, cache, 8) as errors, torch.no_grad():
        layer.bias += 1.0
    assert errors[0] == 0 and errors[1] > 0
    assert torch.equal(layer.bias, before)
    cache.held_out = 0  # now all of them judge, and most improve
    with kept_if_better(layer, cache, 8) as errors, torch.no_grad():
        layer.bias += 1.0
    assert errors[1] < errors[0]
    assert torch.equal(layer.bias, before + 1.0)


def test_float_network_is_refused():
    model = seeded(Chain())
    with pytest.raises(QuantizationError, match="Chain is not quantized; call ompq"):
        reconstruct(model, model, scenes(), QUICK)


@pytest.mark.parametrize(
    "config",
    [
        ReconstructConfig(rounding=RoundingConfig(iterations=40, drop=0.5)),
        ReconstructConfig(rounding=RoundingConfig(iterations=40), loss="fisher"),
        ReconstructConfig(
            rounding=RoundingConfig(iterations=40), loss="low_rank_fisher"
        ),
        ReconstructConfig(rounding=RoundingConfig(iterations=40), device_bytes=0),
    ],
    ids=["qdrop", "fisher", "low rank", "host"],
)
def test_options_give_a_working_network(config):
    model = seeded(TinyResNet())
    quantized = quantized_at(model, 4, scenes(32), activation=4)
    result = reconstruct(quantized, model, scenes(32), config)
    assert logit_error(model, result, scenes(32)) < 0.5
    scales = [q.scale.item() for q in activation_quantizers(result).values()]
    before = [q.scale.item() for q in activation_quantizers(quantized).values()]
    assert scales != before  # 4-bit steps are learned


def test_host_memory_changes_nothing():
    model = seeded(TinyResNet())
    quantized = quantized_at(model, 4, scenes(32))
    results = [
        reconstruct(
            quantized,
            model,
            scenes(32),
            ReconstructConfig(
                rounding=RoundingConfig(iterations=20), device_bytes=limit
            ),
        )
        for limit in (0, 1 << 30)
    ]
    for key, value in results[0].state_dict().items():
        assert torch.equal(value, results[1].state_dict()[key])


def test_unknown_loss_is_refused():
    with pytest.raises(
        ValueError,
        match="'loss' of ReconstructConfig must be one of 'squared', 'fisher'",
    ):
        ReconstructConfig(loss="odd")


def test_what_does_not_belong_together_is_refused_before_the_work():
    model = seeded(Chain())
    quantized = quantized_at(model, 4, scenes())
    with pytest.raises(
        QuantizationError, match=r"from another one: \d+ units differ \("
    ):
        reconstruct(quantized, seeded(TinyResNet()), scenes())
    with pytest.raises(TraceError, match="network failed on the samples: RuntimeError"):
        reconstruct(quantized, model, torch.zeros(4, 2, 8, 8))
    with torch.no_grad():
        model.head.bias[0] = torch.inf
    with pytest.raises(TraceError, match=r"NaN or infinity in head\.bias; repair them"):
        reconstruct(quantized, model, scenes())


def test_samples_of_several_sizes_are_refused():
    model = seeded(Chain())
    quantized = quantized_at(model, 4, scenes())
    samples = [torch.rand(4, 3, 8, 8), torch.rand(4, 3, 9, 9)]
    with pytest.raises(SampleError, match=r"\(3, 8, 8\) and \(3, 9, 9\); give samples"):
        reconstruct(quantized, model, samples)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_captured_steps_do_what_plain_steps_do():
    model = seeded(TinyResNet())
    on_cpu = quantized_at(model, 3, scenes(64))
    config = ReconstructConfig(rounding=RoundingConfig(iterations=200, batch_size=16))
    plain = reconstruct(on_cpu, model, scenes(64), config)
    there = copy.deepcopy(model).cuda()
    on_cuda = quantized_at(there, 3, scenes(64).cuda())
    results = [reconstruct(on_cuda, there, scenes(64).cuda(), config) for _ in "ab"]
    for key, value in results[0].state_dict().items():
        assert torch.equal(value, results[1].state_dict()[key])
    host = ReconstructConfig(rounding=config.rounding, device_bytes=0)
    hosted = reconstruct(on_cuda, there, scenes(64).cuda(), host)
    unseen = scenes(64, seed=5)
    for other in (results[0], hosted):
        ours = logit_error(there, other, unseen.cuda())
        assert ours == pytest.approx(logit_error(model, plain, unseen), rel=0.5)


def test_a_block_gets_its_moments_back_before_it_learns():
    model = seeded(TinyResNet())
    quantized = quantized_at(model, 3, scenes(64))
    first, *_ = trace(model, scenes()).blocks
    with torch.no_grad():  # what the blocks before a block do to it, only more so
        for layer in quantized_layers(quantized).values():
            layer.bias += 0.5
    plain = replace(QUICK, rounding=replace(QUICK.rounding, iterations=1))
    result = reconstruct(quantized, model, scenes(64), plain)
    found = {e.block: e for e in quantization_of(result).errors}[first]
    # One step learns next to nothing: it is the moments that lower the error.
    assert found.after < 0.2 * found.before


@pytest.mark.parametrize("price", [0.0, 0.1])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_coded_units_keep_their_rates(device, price):
    model, samples = seeded(TinyResNet(), seed=4).to(device), scenes(64).to(device)
    wanted = Choice(8, 8, 2.5)
    bits = {
        unit.name: wanted if can_be_coded(unit, wanted) else Choice(8, 8)
        for unit in trace(model, samples).units
    }
    config = QuantizeConfig(output_error=False)  # which leaves more to learn
    quantized = quantize(model, Allocation(bits), samples, config)
    rounding = replace(QUICK.rounding, iterations=60, price=price)
    config = ReconstructConfig(rounding=rounding)
    result = reconstruct(quantized, model, samples, config)
    layers = quantized_layers(result)
    coded = [layers[name] for name, choice in bits.items() if choice.rate]
    assert len(coded) > 2
    for layer in coded:
        assert code_bytes(layer.codes()) <= coded_bytes(layer.weight.numel(), 2.5)
        assert torch.equal(to_multiples(layer.weight_scale), layer.weight_scale)
        assert torch.equal(layer.bias.half().float(), layer.bias)
    unseen = scenes(64, seed=9).to(device)
    assert logit_error(model, result, unseen) < logit_error(model, quantized, unseen)


def test_network_that_keeps_keys_and_values_is_reconstructed():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.keys, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
            self.cache = None

        def forward(self, x):
            keys = self.keys(x)
            same = self.cache is not None and self.cache.shape == keys.shape
            self.cache = keys + 0 * self.cache if same else keys
            return x + self.out(self.cache.tanh())

    model = seeded(nn.Sequential(Block(), nn.Linear(8, 3)))
    samples = values(8, 8)
    bits = dict.fromkeys(trace(model, samples).names, Choice(3, 32))
    made = quantize(model, Allocation(bits), samples)
    config = ReconstructConfig(rounding=RoundingConfig(iterations=3))
    assert reconstruct(made, model, samples, config)(samples).shape == (8, 3)


def test_groups_are_reconstructed():
    model, samples = tokens(), scenes(24)
    bits = dict.fromkeys(trace(model, samples).names, Choice(3, 32))
    nearest = QuantizeConfig(group_size=32, output_error=False)
    made = quantize(model, Allocation(bits), samples, nearest)
    config = ReconstructConfig(rounding=RoundingConfig(iterations=60))
    better = reconstruct(made, model, samples, config)
    errors = {one.block: one.improved for one in quantization_of(better).errors}
    assert any(errors[name] for name in ("up", "down"))
    for name in ("up", "down"):
        layer, before = (quantized_layers(net)[name] for net in (better, made))
        assert layer.weight_scale.shape == before.weight_scale.shape
        assert torch.equal(to_multiples(layer.weight_scale), layer.weight_scale)
        # Learned weights lie on the grid, but for the last rounding of its scales.
        apart = (layer.rounded_weight() - layer.weight).abs()
        assert not errors[name] or (apart < 0.02 * layer.weight.abs() + 1e-6).all()


def test_threads_do_not_disturb_each_other():
    model, samples = seeded(TinyResNet()), scenes(32)
    quantized = quantize(model, {"*": (3, 8)}, samples)
    config = ReconstructConfig(rounding=RoundingConfig(iterations=12, drop=0.5))

    def learn(_number=0):
        # A network has one pass at a time; each thread has its own.
        return reconstruct(quantized, copy.deepcopy(model), samples, config)

    expected, before = learn().state_dict(), torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        found = [made.state_dict() for made in pool.map(learn, range(4))]
    assert torch.get_rng_state().equal(before)
    for state in found:
        assert all(torch.equal(state[name], expected[name]) for name in expected)
