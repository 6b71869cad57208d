import copy
import sys
import types
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ompq
from nets import TinyMobileNet, TinyResNet, scenes, seeded
from ompq.errors import (
    CheckpointError,
    DataError,
    MissingExtraError,
    QuantizationError,
    TrainingError,
)
from ompq.quantization.layers import (
    ActivationQuantizer,
    activation_quantizers,
    quantized_layers,
)
from ompq.quantizers.grids import Grid
from ompq.training import runs
from ompq.training.checkpoints import read_state
from ompq.training.engines import Alone
from ompq.training.norms import fold_norms, keep_norms
from ompq.training.runs import Run
from ompq.training.steps import memory_layout, training_loss
from quantized import quantized
from training_script import made, state, toy

QUICK = ompq.TrainConfig(
    epochs=2, batch_size=8, learning_rate=0.05, step_rate=1.0, report_steps=1
)


@pytest.fixture(scope="module")
def toys():
    return toy()


def equal(one, other):
    first, second = state(one), state(other)
    return all(torch.equal(first[key], second[key]) for key in second)


def test_training_lowers_the_loss(toys):
    _, network, data = toys
    trained = ompq.train(network, data, replace(QUICK, epochs=12))

    def loss(one):
        with torch.no_grad():
            return F.cross_entropy(one(data.inputs), data.targets).item()

    assert loss(trained) < 0.5 * loss(network)


def test_a_step_is_that_of_gradient_descent(toys):
    _, network, data = toys
    config = replace(QUICK, epochs=1, batch_size=32, weight_decay=0.1, step_rate=0.5)
    trained = state(ompq.train(network, data, config))
    # The same by hand: autograd through the network, one update a kind of parameter.
    copied = copy.deepcopy(network)
    for parameter in copied.parameters():
        parameter.requires_grad_(True)
    F.cross_entropy(copied(data.inputs), data.targets).backward()
    for name, parameter in copied.named_parameters():
        rate = 0.05 * (0.5 if "scale" in name else 1.0)
        decay = 0.1 if parameter.dim() > 1 else 0.0
        moved = parameter - rate * (parameter.grad + decay * parameter)
        assert torch.allclose(trained[name], moved, rtol=1e-9), name


def test_the_rate_falls_as_a_cosine_after_a_rise(toys):
    _, network, data = toys
    run = Run(network, data, replace(QUICK, warmup=4), teacher=None)
    rates = []
    for step in range(run.steps + 1):
        run.step = step
        rates.append(run.rate())
    assert rates[:4] == pytest.approx([0.0125, 0.025, 0.0375, 0.05])
    cosine = [0.05 * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(5)]
    assert rates[4:] == pytest.approx(cosine)


def test_what_is_fixed_stays(toys):
    _, network, data = toys
    config = replace(QUICK, weight_steps=False, activations="fixed")
    before, after = state(network), state(ompq.train(network, data, config))
    for key in before:
        fixed = key.endswith(("scale", "zero"))
        assert torch.equal(before[key], after[key]) == fixed, key


def test_zeros_stay_and_scales_stay_positive_whatever_the_rate(toys):
    _, network, data = toys
    config = replace(QUICK, step_rate=1e4)
    before, after = state(network), state(ompq.train(network, data, config))
    for key, value in before.items():
        if key.endswith("zero"):
            assert torch.equal(value, after[key])
        if key.endswith("scale"):
            assert (after[key] >= value / 16).all()
            assert not torch.equal(value, after[key])


def test_clipping_moves_the_limit_by_the_gradient_beyond_it():
    quantizer = ActivationQuantizer(Grid(torch.tensor(0.5), torch.tensor(2.0), 3))
    quantizer.clips = True
    quantizer.scale.requires_grad = True
    x = torch.tensor([[-9.0, -0.3, 0.4, 9.0, 7.0]])
    gradient = torch.tensor([[1.0, 10.0, 100.0, 1000.0, 2000.0]])
    (quantizer(x) * gradient).sum().backward()
    # Codes 0 to 7, zero 2: the range is -2/5 of the limit to the limit, 5 steps up.
    of_limit = 3000.0 - 2 / 5 * 1.0
    before = quantizer.scale.item() * 5
    with torch.no_grad():
        quantizer.scale -= 1e-3 * quantizer.scale.grad
    assert quantizer.scale.item() * 5 == pytest.approx(before - 1e-3 * of_limit)


def test_learned_limits_are_trained(toys):
    _, network, data = toys
    trained = ompq.train(network, data, replace(QUICK, activations="clip"))
    assert not any(q.clips for q in activation_quantizers(trained).values())
    moved = [
        not torch.equal(one.scale, other.scale)
        for one, other in zip(
            activation_quantizers(network).values(),
            activation_quantizers(trained).values(),
            strict=True,
        )
    ]
    assert any(moved)


def test_steps_learn_alike_from_batches_that_are_cut():
    grid = Grid(torch.tensor(0.3), torch.tensor(0.0), 4)
    x = torch.rand(8, 5, generator=torch.Generator().manual_seed(0))

    def gradient(part):
        quantizer = ActivationQuantizer(grid)
        quantizer.scale.requires_grad = True
        quantizer(part).square().sum(1).mean().backward()
        return quantizer.scale.grad

    halves = (gradient(x[:4]) + gradient(x[4:])) / 2
    assert torch.allclose(gradient(x), halves)


@pytest.mark.parametrize("network", [TinyResNet, TinyMobileNet])
def test_kept_norms_compute_what_they_were_folded_to(network):
    inputs = scenes(16).double()
    model = seeded(network()).double()
    made_ = quantized(model.float(), inputs.float(), weight=4).double()
    model.double()
    copied = copy.deepcopy(made_)
    keep_norms(copied, model)
    with torch.no_grad():
        expected = made_(inputs)
        assert torch.allclose(copied(inputs), expected, rtol=1e-9)
        fold_norms(copied)
        assert torch.allclose(copied(inputs), expected, rtol=1e-9)
    assert copied.state_dict().keys() == made_.state_dict().keys()


def test_a_kept_norm_normalises_by_the_batch_until_it_is_frozen(toys):
    model, network, data = toys
    copied = copy.deepcopy(network)
    keep_norms(copied, model)
    layer = quantized_layers(copied)["stem"]
    norm = layer.norm.norm.train()
    x = data.inputs
    out = layer(x)
    # Each channel then has the mean and deviation that the norm says.
    assert torch.allclose(out.mean((0, 2, 3)), norm.bias)
    spread = out.var((0, 2, 3), unbiased=False).sqrt()
    assert torch.allclose(spread, norm.weight.abs(), rtol=1e-3)


@pytest.mark.parametrize("freeze", [0, 1, 5])
def test_fold_and_train_gives_an_ordinary_quantized_network(toys, freeze):
    model, network, data = toys
    config = replace(QUICK, batch_norm="fold-and-train", freeze_norm_epoch=freeze)
    trained = ompq.train(network, data, config, teacher=model)
    assert trained.state_dict().keys() == network.state_dict().keys()
    with torch.no_grad():
        before = F.cross_entropy(network(data.inputs), data.targets)
        after = F.cross_entropy(trained(data.inputs), data.targets)
    assert after < before


def test_norms_without_parameters_get_them():
    inputs = scenes(16)
    model = TinyResNet()
    model.norm = torch.nn.BatchNorm2d(8, affine=False)
    seeded(model.block1), seeded(model.block2)
    network = quantized(model.eval(), inputs, weight=4)
    copied = copy.deepcopy(network)
    keep_norms(copied, model)
    with torch.no_grad():
        assert torch.allclose(copied(inputs), network(inputs), atol=1e-4)
    assert copied.stem.norm.norm.affine and not model.norm.affine


def test_weights_that_are_rounded_where_they_are_stay():
    inputs = scenes(16)
    model = seeded(Tied())
    network = quantized(model, inputs, weight=4)
    batches = [(inputs, torch.arange(16) % 5)]
    trained = ompq.train(network, batches, replace(QUICK, channels_last=False))
    assert torch.equal(trained.second.weight, network.second.weight)
    assert not torch.equal(trained.head.weight, network.head.weight)


class Tied(torch.nn.Module):
    """Two layers with one weight, and a head."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 3, 3, padding=1)
        self.second = torch.nn.Conv2d(3, 3, 3, padding=1)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(3, 5)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(x.mean((2, 3)))


def test_norms_of_another_network_are_refused(toys):
    _, network, data = toys
    config = replace(QUICK, batch_norm="fold-and-train")
    with pytest.raises(TrainingError, match=r"norm is no batch norm of 8 channels in"):
        ompq.train(network, data, config, teacher=TinyMobileNet())


def test_distillation_weighs_labels_and_the_teachers_answers():
    generator = torch.Generator().manual_seed(0)
    logits, taught = torch.randn(2, 6, 4, generator=generator).double()
    targets = torch.tensor([0, 1, 2, 3, 0, 1])
    config = ompq.TrainConfig(distill=0.3, temperature=2.0)
    p, q = (taught / 2).softmax(1), (logits / 2).softmax(1)
    divergence = (p * (p / q).log()).sum(1).mean()
    labels = -logits.softmax(1)[range(6), targets].log().mean()
    loss = training_loss(logits, targets, taught, config)
    assert torch.allclose(loss, 0.7 * labels + 0.3 * 4 * divergence)
    assert torch.allclose(training_loss(logits, targets, None, config), labels)


def test_a_student_comes_nearer_to_its_teacher(toys):
    model, network, data = toys
    network = copy.deepcopy(network)
    network.head.bias.data += torch.linspace(-1, 1, 5)  # it has much to learn
    config = replace(QUICK, distill=1.0, epochs=8)
    trained = ompq.train(network, data, config, teacher=model)
    batches = made(data)
    before = ompq.evaluate(network, batches, reference=model).divergence
    after = ompq.evaluate(trained, batches, reference=model).divergence
    assert after < 0.2 * before


@pytest.mark.parametrize("more", [{"distill": 0.5}, {"batch_norm": "fold-and-train"}])
def test_what_needs_the_float_network_says_so(toys, more):
    _, network, data = toys
    with pytest.raises(ValueError, match=r"need the float network; pass teacher="):
        ompq.train(network, data, replace(QUICK, **more))


def test_accumulated_gradients_are_those_of_the_whole_batch(toys):
    _, network, data = toys
    whole = state(ompq.train(network, data, QUICK))
    parts = state(ompq.train(network, data, replace(QUICK, accumulate=2)))
    assert all(torch.allclose(whole[key], parts[key], rtol=1e-9) for key in whole)


def test_one_process_needs_no_accelerate(toys, monkeypatch):
    _, network, data = toys
    expected = ompq.train(network, data, QUICK)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert equal(ompq.train(network, data, QUICK), expected)
    needed = r"accelerate is not installed. Run: pip install 'ompq\[train\]'"
    with pytest.raises(MissingExtraError, match=needed):
        ompq.train(network, data, replace(QUICK, accumulate=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MissingExtraError, match=needed):
        ompq.train(network, data, QUICK)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own
def test_a_compiled_network_learns_the_same(toys, monkeypatch):
    _, network, data = toys
    expected = state(ompq.train(network, data, replace(QUICK, epochs=1)))
    # Tracing without a break is what can go wrong; generating code takes a minute.
    traced = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", traced)
    config = replace(QUICK, epochs=1, compile=True)
    compiled = state(ompq.train(network, data, config))
    for key, value in expected.items():
        assert torch.allclose(value, compiled[key], rtol=1e-6), key


def test_gradients_are_cut_to_length(toys):
    _, network, data = toys
    config = replace(QUICK, epochs=1, batch_size=32, weight_decay=0.0)
    cut = state(ompq.train(network, data, replace(config, gradient_norm=1e-3)))
    before = state(network)
    moved = sum((cut[key] - before[key]).square().sum() for key in before) ** 0.5
    assert moved.item() == pytest.approx(0.05 * 1e-3, rel=1e-3)


class ScalingEngine(Alone):
    """Multiplies the loss before the backward pass, as Accelerate does for fp16."""

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def prepare(self, model, optimizer):
        self.optimizer = optimizer
        return model, self

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip_grad_norm_(self, parameters, longest):
        self.scaler.unscale_(self.optimizer)
        return super().clip_grad_norm_(parameters, longest)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self):
        self.optimizer.zero_grad()


def test_gradients_of_a_scaled_loss_are_cut_to_the_same_length(toys, monkeypatch):
    _, network, data = toys
    config = replace(QUICK, gradient_norm=0.1)
    expected = state(ompq.train(network, data, config))
    monkeypatch.setattr(runs, "make_engine", lambda *_, **__: ScalingEngine())
    found = state(ompq.train(network, data, config))
    for key, value in expected.items():
        assert torch.allclose(value, found[key], rtol=1e-6), key


def test_a_trained_network_is_saved_loaded_and_exported(tmp_path):
    inputs = scenes(32)
    model = seeded(TinyResNet())
    network = quantized(model, inputs, weight=(3, 4, 8), activation=6)
    targets = model(inputs).argmax(1)
    trained = ompq.train(network, [(inputs, targets)], replace(QUICK, epochs=3))
    ompq.save(trained, tmp_path / "net.ompq.safetensors")
    loaded = ompq.load(tmp_path / "net.ompq.safetensors", TinyResNet)
    with torch.no_grad():
        assert torch.equal(loaded(inputs), trained(inputs))
    result = ompq.export_onnx(trained, tmp_path / "net.onnx", inputs)
    assert result.engine.top1 == result.simulated.top1 == 1.0


def test_a_shuffling_loader_gives_the_same_order_when_resumed(toys, tmp_path):
    _, network, data = toys
    inner = TensorDataset(data.inputs, data.targets)
    loader = DataLoader(inner, batch_size=8, shuffle=True)
    config = replace(QUICK, checkpoint_steps=1)

    def stop(done, _total, _message):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ompq.train(network, loader, config, checkpoint=tmp_path, progress=stop)
    resumed = ompq.train(network, loader, config, checkpoint=tmp_path)
    assert equal(resumed, ompq.train(network, loader, config))


def test_a_finished_run_is_not_run_again(toys, tmp_path):
    _, network, data = toys
    first = ompq.train(network, data, QUICK, checkpoint=tmp_path)
    seen = []
    again = ompq.train(
        network, data, QUICK, checkpoint=tmp_path, progress=lambda *a: seen.append(a)
    )
    assert equal(first, again)
    assert not seen


def test_checkpoints_of_other_runs_and_files_are_refused(toys, tmp_path):
    _, network, data = toys
    ompq.train(network, data, QUICK, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=r"belongs to another run \(other netw"):
        ompq.train(network, data, replace(QUICK, seed=1), checkpoint=tmp_path)
    (tmp_path / "last.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"last.safetensors is no checkpoint: "):
        ompq.train(network, data, QUICK, checkpoint=tmp_path)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "last.safetensors")
    with pytest.raises(CheckpointError, match=r"is no checkpoint of a training"):
        ompq.train(network, data, QUICK, checkpoint=tmp_path)


def test_a_loss_that_is_not_finite_stops_the_run(toys, tmp_path):
    _, network, data = toys
    broken = replace(data, inputs=data.inputs.clone())

    def poison(done, _total, _message):
        if done == 5:
            broken.inputs.fill_(float("nan"))

    words = r"the loss is nan by step 6 of 8; .*last.safetensors holds the network "
    words += r"after step 4. Lower learning_rate=0.05, or set gradient_norm"
    with pytest.raises(TrainingError, match=words):
        ompq.train(network, broken, QUICK, checkpoint=tmp_path, progress=poison)
    assert (tmp_path / "last.safetensors").exists()
    with pytest.raises(TrainingError, match=r"no checkpoint was written"):
        ompq.train(network, broken, QUICK)


def test_broken_weights_are_never_written(toys, tmp_path, monkeypatch):
    _, network, data = toys
    move = Run._move

    def broken(run):
        move(run)
        if run.step == 7:
            run.model.stem.weight.data.fill_(float("inf"))

    monkeypatch.setattr(Run, "_move", broken)
    words = r"stem.weight are not finite after step 8; .*after step 4"
    with pytest.raises(TrainingError, match=words):
        ompq.train(network, data, QUICK, checkpoint=tmp_path)


def test_the_best_epoch_is_returned(toys, tmp_path, caplog):
    _, network, data = toys
    batches = made(data)
    wild = replace(QUICK, learning_rate=1e3, gradient_norm=1.0)
    kept = ompq.train(network, data, wild, validation=batches, checkpoint=tmp_path)
    assert equal(kept, network)  # nothing was better than the start
    top1 = ompq.evaluate(network, batches).top1
    told = f"no epoch does better on the validation data than the start, {top1:.2%}"
    assert told.replace("%", " %") in caplog.text
    caplog.clear()
    last = ompq.train(network, data, replace(wild, keep="last"), validation=batches)
    assert not equal(last, network)
    # Also when the run is resumed.
    again = ompq.train(network, data, wild, validation=batches, checkpoint=tmp_path)
    assert equal(again, network)
    good = ompq.train(network, data, replace(QUICK, epochs=6), validation=batches)
    assert ompq.evaluate(good, batches).top1 > top1
    assert caplog.text.count("no epoch does better") == 1  # when it was resumed


def test_progress_tells_loss_accuracy_and_speed(toys, tmp_path):
    _, network, data = toys
    seen = []
    ompq.train(
        network,
        data,
        replace(QUICK, report_steps=3),
        validation=made(data),
        checkpoint=tmp_path,
        progress=lambda *told: seen.append(told),
    )
    assert [(done, total) for done, total, _ in seen] == [
        (3, 8),
        (4, 8),
        (6, 8),
        (8, 8),
    ]
    assert seen[-1][2].startswith("epoch 2/2: loss ")
    assert "images/s" in seen[-1][2] and "top-1" in seen[-1][2]
    history = (tmp_path / "history.json").read_text()
    assert history.count('"validation"') == 2


def test_scalars_go_to_tensorboard(toys, monkeypatch, tmp_path):
    _, network, data = toys
    config = replace(QUICK, tensorboard=str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    words = r"tensorboard is not installed. Run: pip install 'ompq\[tensorboard\]'"
    with pytest.raises(MissingExtraError, match=words):
        ompq.train(network, data, config)
    written = []

    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path)

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def close(self):
            written.append("closed")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    ompq.train(network, data, config, validation=made(data))
    assert ("loss", 1) in written and ("rate", 8) in written
    assert ("validation top-1", 8) in written and written[-1] == "closed"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epochs": 0}, r"epochs=0 must be at least 1"),
        ({"epochs": 2.5}, r"epochs=2.5 must be a whole number"),
        ({"epochs": True}, r"epochs=True must be a whole number"),
        ({"warmup": -1}, r"warmup=-1 must be at least 0"),
        ({"gradient_norm": float("nan")}, r"gradient_norm=nan must be at least 0"),
        ({"momentum": 2}, r"momentum=2 must be from 0 to 1"),
        ({"weight_decay": "x"}, r"weight_decay='x' must be a number"),
        ({"compile": 1}, r"compile=1 must be true or false"),
        ({"tensorboard": 3}, r"tensorboard=3 must be a folder's name"),
        ({"learning_rate": 0.0}, r"learning_rate=0.0 must be above 0, and finite"),
        ({"distill": 1.5}, r"distill=1.5 must be from 0 to 1"),
        ({"keep": "all"}, r"keep='all' must be one of best, last"),
        ({"activations": "no"}, r"activations='no' must be one of step, clip, fixed"),
    ],
)
def test_wrong_settings_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        ompq.TrainConfig(**wrong)


@pytest.mark.parametrize("targets", [torch.zeros(5), torch.zeros(4).long(), [0] * 5])
def test_targets_that_are_no_classes_are_refused(toys, targets):
    _, network, data = toys
    words = r"targets are .* for 5 inputs; training needs whole numbers of shape \(5,\)"
    with pytest.raises(DataError, match=words):
        ompq.train(network, [(data.inputs[:5], targets)], QUICK)


def test_classes_may_be_whole_numbers_of_any_width(toys):
    _, network, data = toys
    wide, short = made(data), [(inputs, t.int()) for inputs, t in made(data)]
    assert equal(ompq.train(network, short, QUICK), ompq.train(network, wide, QUICK))


@pytest.mark.parametrize("read", [lambda _: [], iter])
def test_validation_that_gives_nothing_is_refused(toys, read):
    _, network, data = toys
    with pytest.raises(
        DataError, match=r"validation gave no images; it is read once b"
    ):
        ompq.train(network, data, QUICK, validation=read(made(data)))


def test_wrong_batches_are_refused(toys):
    model, network, data = toys
    with pytest.raises(TypeError, match=r"batches is generator without a length; tr"):
        ompq.train(network, (one for one in made(data)), QUICK)
    with pytest.raises(DataError, match=r"no step in an epoch: 32 images, fewer than"):
        ompq.train(network, data, replace(QUICK, batch_size=64))
    with pytest.raises(DataError, match=r"no step in an epoch: 0 batches for 1 a step"):
        ompq.train(network, [], QUICK)
    with pytest.raises(DataError, match=r"a batch is Tensor; training needs \(inputs"):
        ompq.train(network, [data.inputs], QUICK)
    with pytest.raises(ValueError, match=r"batch_size=8 cannot be shared evenly by 1 "):
        ompq.train(network, data, replace(QUICK, accumulate=3))
    with pytest.raises(QuantizationError, match=r"TinyResNet is not quantized"):
        ompq.train(model, data, QUICK)


def test_an_epoch_that_ends_early_is_an_error(toys):
    _, network, data = toys

    class Short(list):
        def __iter__(self):
            return iter(self[:2])

    with pytest.raises(DataError, match=r"epoch 1 ended after 2 of 8 batches; batch"):
        ompq.train(network, Short(made(data)), QUICK)


def test_images_lie_channel_by_channel_of_a_pixel_on_gpus_alone():
    for device, wanted, layout in (
        ("cuda", True, torch.channels_last),
        ("cuda", False, torch.contiguous_format),
        ("cpu", True, torch.contiguous_format),
    ):
        config = ompq.TrainConfig(channels_last=wanted)
        assert memory_layout(config, torch.device(device)) is layout


def test_convolutions_of_few_channels_train_on_a_cpu():
    # In channels_last PyTorch crashes in the backward pass of this shortcut.
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 8, 1, 2), torch.nn.Flatten()
    ).eval()
    inputs = torch.rand(8, 3, 72, 72, generator=torch.Generator().manual_seed(0))
    network = quantized(model, inputs, weight=4)
    batch = inputs.contiguous(memory_format=torch.channels_last), torch.arange(8)
    trained = ompq.train(network, [batch], QUICK)
    assert not torch.equal(trained[1].weight, network[1].weight)


def test_a_graph_of_a_step_needs_a_gpu(toys):
    _, network, data = toys
    words = r"cuda_graph needs one process on a GPU without accumulation, not 1 on cpu"
    with pytest.raises(ValueError, match=words):
        ompq.train(network, data, replace(QUICK, cuda_graph=True))


def test_the_protocol_of_the_paper():
    protocol = ompq.TRAIN_PROTOCOLS["paper-qat"]
    assert (protocol.epochs, protocol.batch_size) == (90, 128)
    assert protocol.learning_rate == protocol.weight_decay == 1e-4
    assert ompq.PLAN_PROTOCOLS["paper-qat"].choices == (4, 5, 6, 7, 8)


def test_checkpoints_hold_what_a_run_needs(toys, tmp_path):
    _, network, data = toys
    ompq.train(network, data, QUICK, checkpoint=tmp_path)
    from ompq.training.checkpoints import run_identity

    found = read_state(tmp_path / "last.safetensors", run_identity(network, 4, QUICK))
    assert found.step == 8 and found.best is None and len(found.history) == 2
    assert found.model.keys() == network.state_dict().keys()
    assert found.momentum.keys() == {name for name, _ in network.named_parameters()}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("norms", ["folded", "fold-and-train"])
def test_a_recorded_step_learns_the_same(norms):
    model, network, data = toy()
    model, network = model.cuda(), network.cuda()
    data = replace(data, inputs=data.inputs.cuda(), targets=data.targets.cuda())
    config = replace(QUICK, batch_norm=norms)
    expected = state(ompq.train(network, data, config, teacher=model))
    recorded = replace(config, cuda_graph=True)
    found = state(ompq.train(network, data, recorded, teacher=model))
    for key, value in expected.items():
        assert torch.allclose(value, found[key], rtol=1e-6), key


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_half_precision_learns_as_well():
    _, network, data = toy()
    network = network.float().cuda()
    data = replace(data, inputs=data.inputs.float().cuda(), targets=data.targets.cuda())
    config = replace(QUICK, epochs=12, precision="bfloat16")
    trained = ompq.train(network, data, config)
    with torch.no_grad():
        before = F.cross_entropy(network(data.inputs), data.targets)
        after = F.cross_entropy(trained(data.inputs), data.targets)
    assert after < 0.5 * before
