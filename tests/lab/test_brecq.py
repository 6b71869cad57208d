"""BRECQ's reconstruction, against its formulas computed another way."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from nets import TinyMobileNet, TinyResNet, scenes, seeded, values
from ompq.activation_ranges import activation_grid, observe_range
from ompq.allocation.problem import Allocation
from ompq.configs import (
    QUANTIZE_PROTOCOLS,
    RECONSTRUCT_PROTOCOLS,
    ReconstructConfig,
)
from ompq.grids import Grid, like_weight
from ompq.lab.brecq import (
    BrecqConfig,
    SigmoidRounding,
    calibrate_steps,
    learn_weights,
    side_loss,
    side_schedule,
    summed_error,
)
from ompq.layers import activation_quantizers, quantized_layer, quantized_layers
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.quantization.pipeline import quantize
from ompq.quantization.record import quantization_of
from ompq.reconstruction.block_loop import reconstruct
from ompq.samples import Samples
from ompq.weight_ranges import shrunk_tensor, shrunk_weight
from ompq.workflow import learning_config

QUICK = BrecqConfig(iterations=60, activation_iterations=20, batch_size=8)


def shrunk_by_a_loop(numbers, bits):
    """Return step and zero of BRECQ's search, in plain Python."""
    low, high, top = min(*numbers, 0.0), max(*numbers, 0.0), 2**bits - 1
    best = math.inf, 0.0, 0.0
    for step in range(80):
        part = 1 - step / 100
        scale = (high - low) * part / top
        zero = float(round(-low * part / scale))
        lost = 0.0
        for x in numbers:
            code = min(max(round(x / scale) + zero, 0), top)
            lost += abs(scale * (code - zero) - x) ** 2.4
        best = min(best, (lost, scale, zero), key=lambda found: found[0])
    return best[1:]


@pytest.mark.parametrize("bits", [2, 4])
def test_ranges_shrink_as_in_the_loop_of_the_definition(bits):
    weight = values(3, 4, 5)
    weight[1] = weight[1].abs()
    grid = shrunk_weight(weight, bits)
    wanted = [shrunk_by_a_loop(row.flatten().tolist(), bits) for row in weight]
    scale, zero = zip(*wanted, strict=True)
    torch.testing.assert_close(grid.scale.flatten(), torch.tensor(scale))
    torch.testing.assert_close(grid.zero_point.flatten(), torch.tensor(zero))
    whole = shrunk_tensor(weight, bits)
    scale, zero = shrunk_by_a_loop(weight.flatten().tolist(), bits)
    assert (whole.scale.item(), whole.zero_point.item()) == pytest.approx((scale, zero))


def test_eight_bits_have_their_zero_in_the_middle_and_zeros_a_step_of_one():
    grid = shrunk_weight(torch.stack([values(9), torch.zeros(9)]), 8)
    assert grid.zero_point.flatten().tolist() == [128, 128]
    assert grid.scale[1].item() == 1


def test_histograms_give_nearly_the_range_of_the_values():
    x = values(20_000).relu()
    found = activation_grid(observe_range(x), 4, "shrink")
    assert found.scale.item() == pytest.approx(
        shrunk_tensor(x, 4).scale.item(), rel=0.02
    )
    assert found.zero_point.item() == 0


def quantized_at(network, bits, samples, activation=4):
    names = trace(network, samples).names
    allocation = Allocation({name: Choice(bits, activation) for name in names})
    return quantize(network, allocation, samples, QUANTIZE_PROTOCOLS["brecq"])


@pytest.fixture(scope="module")
def pair():
    network = seeded(TinyResNet(), seed=4)
    return network, quantized_at(network, 3, scenes(32))


def test_rounding_starts_at_the_float_weight_and_ends_next_to_it(pair):
    layers = list(quantized_layers(pair[1]).values())
    soft = SigmoidRounding(layers)
    for layer, weight in zip(layers, soft._weights(soft.up()), strict=True):
        grid = layer.grid_like_weight()
        low, high = (
            (-grid.zero_point * grid.scale),
            grid.dequantize(torch.full_like(grid.zero_point, grid.qmax)),
        )
        inside = layer.weight.clamp(low, high)
        torch.testing.assert_close(weight, inside, rtol=1e-4, atol=1e-5)
    alpha = torch.tensor([-1.0, 0.0, 2.0])
    soft.alphas = [alpha]
    wanted = [1.2 / (1 + math.exp(-a)) - 0.1 for a in alpha.tolist()]
    assert soft.up()[0].tolist() == pytest.approx([min(max(w, 0), 1) for w in wanted])


def test_losses_follow_their_formulas():
    output, target = values(2, 3, 4, 4), values(2, 3, 4, 4, seed=1)
    total = sum(
        abs(a - b) ** 2.4
        for a, b in zip(
            output.flatten().tolist(), target.flatten().tolist(), strict=True
        )
    )
    assert summed_error(output, target, 2.4).item() == pytest.approx(total / (2 * 16))
    up = torch.tensor([0.0, 0.3, 0.5, 1.0])
    wanted = (1 - abs(2 * 0.3 - 1) ** 3) + 1
    assert side_loss([up], torch.tensor(3.0)).item() == pytest.approx(wanted)


def test_the_side_loss_waits_and_its_exponent_falls_linearly():
    table = side_schedule(BrecqConfig(iterations=100, round_weight=0.1))
    assert table[:20, 1].tolist() == [0] * 20
    assert table[20:, 1].tolist() == pytest.approx([0.1] * 80)
    wanted = [20.0] * 20 + [2 + 18 * (1 - (t - 20) / 80) for t in range(20, 100)]
    assert table[:, 2].tolist() == pytest.approx(wanted)
    assert table[:, 0].tolist() == pytest.approx([1e-3] * 100)


def test_the_paper_and_brecq_share_their_settings():
    config = RECONSTRUCT_PROTOCOLS["paper-ptq"].rounding
    assert config == BrecqConfig() == RECONSTRUCT_PROTOCOLS["brecq"].rounding
    assert (config.iterations, config.activation_iterations) == (20_000, 5_000)
    assert (config.batch_size, config.learning_rate) == (32, 1e-3)
    assert (config.activation_learning_rate, config.round_weight) == (4e-4, 0.01)
    mobile = learning_config("paper-ptq", "torchvision:mobilenet_v2", iterations=8)
    assert mobile.rounding == BrecqConfig(
        iterations=8, activation_iterations=2, round_weight=0.1
    )
    assert learning_config(None, "mobilenet_v2") == ReconstructConfig()
    with pytest.raises(
        ValueError, match="'activation_iterations' .* must be at least 1"
    ):
        BrecqConfig(activation_iterations=0)


def test_weights_are_learned_with_float_activations_then_steps(pair, tmp_path):
    model, quantized = pair
    config = ReconstructConfig(rounding=QUICK)
    told = []
    result = reconstruct(
        quantized,
        model,
        scenes(32),
        config,
        checkpoint=tmp_path / "point",
        progress=lambda *step: told.append(step),
    )
    errors = quantization_of(result).errors
    blocks = [block for block in trace(model, scenes()).blocks if block != "stem"]
    wanted = [f"{b}, {of}" for of in ("weights", "activations") for b in blocks]
    assert [error.block for error in errors] == wanted
    assert any(error.improved for error in errors[: len(blocks)])
    # The stem keeps its weight; all layers are next to where they were.
    for name, layer in quantized_layers(result).items():
        before = quantized.get_submodule(name)
        if name == "stem":
            assert torch.equal(layer.weight, before.weight)
        step = (layer.codes().int() - before.codes().int()).abs()
        assert step.max() <= 1
        assert torch.equal(layer.weight_scale, before.weight_scale)
        assert torch.equal(layer.bias, before.bias)
    assert all(q.enabled for q in activation_quantizers(result).values())
    assert told[-1][0] == told[-1][1]
    again = reconstruct(
        quantized, model, scenes(32), config, checkpoint=tmp_path / "point"
    )
    state = result.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in again.state_dict().items())


def test_learning_lowers_the_error_of_a_block():
    model = seeded(TinyMobileNet(), seed=4)
    quantized = quantized_at(model, 3, scenes(32), activation=32)
    longer = replace(QUICK, iterations=150, learning_rate=2e-2)
    result = reconstruct(
        quantized, model, scenes(32), ReconstructConfig(rounding=longer)
    )
    errors = quantization_of(result).errors
    assert min(error.after / error.before for error in errors) < 0.9


def test_ranges_are_found_anew_from_what_the_rounded_layers_give(pair):
    network, seen = copy.deepcopy(pair[1]), {}

    def keep(module, args):
        seen.setdefault(module, args[0].clone())

    quantizers = activation_quantizers(network).values()
    for quantizer in quantizers:
        with torch.no_grad():
            quantizer.scale.fill_(1e9)
    calibrate_steps(network, Samples.of(scenes(32)))
    hooks = [q.register_forward_pre_hook(keep) for q in quantizers]
    with torch.no_grad():
        network(scenes(32))
    for hook in hooks:
        hook.remove()
    for quantizer, x in seen.items():
        found = shrunk_tensor(x, quantizer.bits)
        torch.testing.assert_close(quantizer.scale, found.scale)


def test_nothing_is_kept_that_makes_a_block_worse(pair):
    class Cache:
        targets, batch_size, inputs = scenes(8), 8, [scenes(8)]
        float_inputs, weights, channels = (), None, None

        def pick(self, index):
            return [self.inputs[0][index]], self.targets[index]

        def batches(self, size):
            yield from torch.split(torch.arange(8), size)

        judging = batches

        def call(self, block, tensors):
            return block(tensors[0])

    block = torch.nn.Sequential(quantized_layers(pair[1])["stem"])
    cache = Cache()
    with torch.no_grad():
        cache.targets = block(cache.inputs[0])  # what rounding to nearest gives
    weight = block[0].weight.clone()
    before, after = learn_weights(block, cache, replace(QUICK, learning_rate=9.0), 0)
    assert before == 0 <= after
    assert torch.equal(block[0].weight, weight)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_captured_steps_do_what_plain_steps_do():
    config = ReconstructConfig(rounding=replace(QUICK, learning_rate=1e-2))
    model = seeded(TinyResNet(), seed=4).cuda()
    quantized = quantized_at(model, 3, scenes(32).cuda())
    host = replace(config, device_bytes=0)
    results = [
        reconstruct(quantized, model, scenes(32).cuda(), each)
        for each in (config, config, host)
    ]
    for name, value in results[0].state_dict().items():
        assert torch.equal(value, results[1].state_dict()[name]), name
    errors = [quantization_of(result).errors for result in results]
    assert any(error.improved for error in errors[0])
    for here, there in zip(errors[0], errors[2], strict=True):
        assert here.after == pytest.approx(there.after, rel=0.05)


def test_groups_start_at_their_weights_and_end_at_the_nearest():
    steps = like_weight(0.05 + torch.arange(6.0) / 100, (3, 40), group_size=32)
    grid = Grid(steps, torch.full((3, 40), 3.5), 3)
    layer = quantized_layer(nn.Linear(40, 3), grid, 32).requires_grad_(False)
    nearest = layer.rounded_weight()
    SigmoidRounding([layer]).finish()
    torch.testing.assert_close(layer.weight.detach(), nearest)
