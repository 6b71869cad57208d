import argparse
import logging
import pickle
import random
import runpy
import socket
import sys
import urllib.request
import zipfile
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import timm
import torch
import torchvision
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn

from nets import demo_network
from ompq.datasets.named_data import load_data
from ompq.errors import MissingExtraError, ModelError
from ompq.models import named_models
from ompq.models.builtin_networks import (
    DEMO_WEIGHTS,
    CifarResNet,
    DemoNetwork,
    InvertedResidual,
    PadShortcut,
    cifar_resnet18,
    demo_data,
)
from ompq.models.named_models import downloading, load_model, output_count
from ompq.models.weight_files import check_weights, load_weights
from ompq.network.graph import trace

USER_FILE = """
import torch
from torch import nn

def plain():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def grey():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    net.preprocessing = {"input_shape": (1, 8, 8), "resize": 9}
    return net

def described(**preprocessing):
    net = plain()
    net.preprocessing = preprocessing
    return net

def unknown_key():
    return described(crop=3)

def wrong_shape():
    return described(input_shape=(3, 0))

def wrong_mean():
    return described(mean=(0.5,))

def wrong_interpolation():
    return described(interpolation="cubic")

def from_timm():
    import timm
    return timm.create_model("test_resnet")

def number():
    return 3

def broken():
    net = plain()
    net[0].weight.data[0] = float("nan")
    return net
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


def offline(*_, **__):
    raise URLError("no network in tests")


def test_torchvision_network_takes_weights_from_a_file(tmp_path):
    source = torchvision.models.squeezenet1_1()
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    model = load_model("torchvision:squeezenet1_1", tmp_path / "w.safetensors")
    x = torch.ones(1, 3, 64, 64)
    assert torch.equal(model.module(x), source.eval()(x))
    assert not model.module.training
    assert model.input_shape == (3, 224, 224)
    assert (model.resize, model.interpolation) == (256, "bilinear")
    assert model.mean == (0.485, 0.456, 0.406)
    assert model.std == (0.229, 0.224, 0.225)
    assert model.weights.endswith("w.safetensors")


def test_random_weights_are_reproducible_loud_and_leave_the_generator_alone(caplog):
    before = torch.get_rng_state()
    first = load_model("cifar:resnet20", "none")
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    second = load_model("cifar:resnet20", "none")
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "only the sizes are valid" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    assert first.weights == "none (random)"


def test_cifar_network_loads_strictly_and_describes_its_images(tmp_path):
    state = CifarResNet(20).state_dict()
    save_file({k: v for k, v in state.items() if "tracked" not in k},
              tmp_path / "w.safetensors")  # fmt: skip
    model = load_model("cifar:resnet20", tmp_path / "w.safetensors")
    assert model.input_shape == (3, 32, 32)
    assert model.resize == 32
    assert output_count(model) == 10
    with pytest.raises(ModelError, match="does not fit cifar:resnet56: missing"):
        load_model("cifar:resnet56", tmp_path / "w.safetensors")


def test_networks_of_the_package_without_weights_say_so():
    with pytest.raises(
        ModelError,
        match="cifar:resnet20 has no weights of its own. Give a file of weights",
    ):
        load_model("cifar:resnet20")


def test_networks_of_the_package_may_ship_weights(tmp_path, monkeypatch):
    source = CifarResNet(8)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    monkeypatch.setitem(named_models.BUILTIN, "ompq:demo", lambda: CifarResNet(8))
    monkeypatch.setattr(named_models, "DEMO_WEIGHTS", tmp_path / "w.safetensors")
    model = load_model("ompq:demo")
    assert torch.equal(model.module.linear.weight, source.linear.weight)
    assert model.weights == "included in ompq"


def test_failing_download_is_one_line_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with pytest.raises(
        ModelError, match="Give a file of weights, or none for random ones$"
    ) as e:
        load_model("torchvision:squeezenet1_1")
    assert "torchvision's own weights for torchvision:squeezenet1_1" in str(e.value)
    assert "no network in tests" in str(e.value)
    assert "\n" not in str(e.value)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", offline)
    with pytest.raises(ModelError, match="timm's own weights for timm:test_resnet"):
        load_model("timm:test_resnet")


def test_pretrained_weights_bring_their_own_preprocessing(monkeypatch):
    state = torchvision.models.mobilenet_v2().state_dict()
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda *_, **__: state
    )
    model = load_model("torchvision:mobilenet_v2")
    assert model.weights == "torchvision IMAGENET1K_V2"
    assert model.resize == 232  # the second set of weights was made with 232, not 256


def test_networks_are_built_without_network_access(monkeypatch, user_file):
    monkeypatch.setattr("socket.socket", offline)
    monkeypatch.setattr("socket.getaddrinfo", offline)
    builtin = ("torchvision:squeezenet1_1", "timm:test_resnet", "cifar:resnet20")
    for name in (*builtin, f"{user_file}:plain"):
        assert load_model(name, "none").name == name


def test_googlenet_is_built_as_the_published_weights_need_it():
    module = load_model("torchvision:googlenet", "none").module
    assert module.transform_input
    assert not any(key.startswith("aux") for key in module.state_dict())


def test_timm_network_carries_timms_preprocessing():
    model = load_model("timm:test_resnet", "none")
    config = timm.get_pretrained_cfg("test_resnet")
    assert model.input_shape == config.input_size
    assert model.resize == int(config.input_size[1] / config.crop_pct)
    assert model.interpolation == config.interpolation
    assert model.mean == config.mean
    assert output_count(model) == config.num_classes


def test_squashed_images_get_both_sides(monkeypatch):
    config = {
        **timm.data.resolve_data_config({"crop_pct": 0.875}),
        "crop_mode": "squash",
    }
    monkeypatch.setattr("timm.data.resolve_model_data_config", lambda _: config)
    model = load_model("timm:test_resnet", "none")
    assert model.resize == (256, 256)  # 224 / 0.875


def test_timm_that_is_not_installed_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[timm\]'"):
        load_model("timm:resnet18", "none")


def test_timm_network_without_pretrained_weights_says_so():
    without = next(
        n for n in timm.list_models() if not timm.models.is_model_pretrained(n)
    )
    with pytest.raises(ModelError, match="timm has no pretrained weights for timm:"):
        load_model(f"timm:{without}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet18", r"'resnet18' is not .* \(did you mean torchvision:resnet18, "),
        ("torchvison:resnet18", r"did you mean torchvision:resnet18"),
        ("torchvision:resnet81", r"no classification network .* mean resnet18"),
        ("torchvision:fcn_resnet", "torchvision has no classification network"),
        (
            "torchvision:fcn_resnet50",
            "fcn_resnet50 is no classification network: return it from a function .*"
            r"get_model\('fcn_resnet50'\)",
        ),
        ("timm:resnet81", r"timm has no network 'resnet81' \(did you mean resnet18"),
        ("timm:resnet18.no_such_tag", "timm has no network 'resnet18.no_such_tag'"),
        ("timm:hf-hub:somebody/network", "timm has no network 'hf-hub:"),
        ("cifar:resnet21", r"did you mean cifar:resnet20"),
        (
            "ompq:demonstration",
            r"Use torchvision:NAME, timm:NAME, cifar:NAME, transformers:FOLDER or FILE",
        ),
        ("", r"'' is not the name of a network\. Use"),
        ("net.safetensors", "Use .*; ompq.load reads packed files"),
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("net.py", "here net.py:FUNCTION, where FUNCTION returns the network"),
    ],
)
def test_unknown_name_gets_close_matches(name, words):
    with pytest.raises(ModelError, match=words):
        load_model(name, "none")


def test_users_network_gets_defaults_and_its_own_preprocessing(user_file):
    plain = load_model(f"{user_file}:plain")
    assert plain.input_shape == (3, 224, 224)
    assert plain.mean == (0.485, 0.456, 0.406)
    assert plain.weights == "as built"
    assert not plain.module.training
    grey = load_model(f"{user_file}:grey")
    assert grey.input_shape == (1, 8, 8)
    assert (grey.mean, grey.std, grey.resize) == ((0.0,), (1.0,), 9)
    assert output_count(grey) == 10
    assert load_model(f"{user_file}:from_timm").input_shape == (3, 160, 160)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("number", "returned int; it must return an nn.Module"),
        ("unknown_key", r"preprocessing is {'crop': 3}; .* input_shape, mean, std"),
        ("wrong_shape", r"input_shape is \(3, 0\); it must be that of one input"),
        ("wrong_mean", "mean has 1 and std 3 values; there are 3 channels"),
        ("wrong_interpolation", "interpolation is 'cubic'; use 'bilinear' or"),
        ("broken", "has NaN or infinity in 0.weight"),
    ],
)
def test_users_network_that_cannot_be_used(user_file, function, words):
    with pytest.raises(ModelError, match=words):
        load_model(f"{user_file}:{function}")


def test_network_that_does_not_take_its_input_shape(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(8, 2))\n"
    )
    model = load_model(f"{path}:make")
    with pytest.raises(
        ModelError, match=r"does not take an input of shape \(3, 224, 224\): Runtime"
    ):
        output_count(model)


def network(seed=0):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return net


def saved(path, state):
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


def same(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_weights_come_back_from_each_kind_of_file(tmp_path, suffix):
    source, target = network(1), network(2)
    load_weights(target, saved(tmp_path / f"w{suffix}", source.state_dict()), "net")
    assert same(source, target)


def test_half_precision_becomes_the_networks_own(tmp_path):
    source, target = network(1), network(2)
    half = {k: v.half() if v.is_floating_point() else v for k, v in
            source.state_dict().items()}  # fmt: skip
    load_weights(target, saved(tmp_path / "w.safetensors", half), "net")
    assert target[0].weight.dtype == torch.float32
    assert torch.equal(target[0].weight, source[0].weight.half().float())


def test_counters_of_batch_norm_may_be_absent(tmp_path):
    source, target = network(1), network(2)
    state = {k: v for k, v in source.state_dict().items() if "tracked" not in k}
    load_weights(target, saved(tmp_path / "w.safetensors", state), "net")
    assert same(source, target)


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "model_state_dict", "net"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_checkpoints_of_training_scripts_are_unwrapped(tmp_path, wrapper, prefix):
    source, target = network(1), network(2)
    state = {f"{prefix}{key}": value for key, value in source.state_dict().items()}
    options = argparse.Namespace(lr=0.1, arch="resnet18")
    torch.save(
        {wrapper: state, "epoch": 3, "args": options, "best": torch.tensor(0.7)},
        tmp_path / "w.pth.tar",
    )
    load_weights(target, tmp_path / "w.pth.tar", "net")
    assert same(source, target)


# How pytorchcv and BRECQ name the parts of torchvision's networks, part by part in
# torchvision's own order: a second account of the mapping, written as a table.
def pytorchcv_resnet(depths, convolutions):
    names = ["features.init_block.conv.conv", "features.init_block.conv.bn"]
    for stage, depth in enumerate(depths, 1):
        for unit in range(1, depth + 1):
            at = f"features.stage{stage}.unit{unit}"
            for number in range(1, convolutions + 1):
                names += [f"{at}.body.conv{number}.{part}" for part in ("conv", "bn")]
            if unit == 1 and (stage > 1 or convolutions == 3):
                names += [f"{at}.identity_conv.{part}" for part in ("conv", "bn")]
    return [*names, "output"]


def pytorchcv_mobilenet():
    names = ["features.init_block.conv", "features.init_block.bn"]
    for stage, depth in enumerate([1, 2, 3, 7, 4], 1):
        for unit in range(1, depth + 1):
            for number in (2, 3) if stage == 1 else (1, 2, 3):
                at = f"features.stage{stage}.unit{unit}.conv{number}"
                names += [f"{at}.conv", f"{at}.bn"]
    return [*names, "features.final_block.conv", "features.final_block.bn", "output"]


def brecq_mobilenet():
    names = ["features.0.0", "features.0.1"]
    for block in range(1, 18):
        places = (0, 1, 3, 4) if block == 1 else (0, 1, 3, 4, 6, 7)
        names += [f"features.{block}.conv.{place}" for place in places]
    return [*names, "features.18.0", "features.18.1", "classifier.1"]


def renamed(net, names):
    """Return the state under other names, shuffled: the order should not matter."""
    own = [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear)
    ]
    table = dict(zip(own, names, strict=True))
    state = {
        f"{table[key.rpartition('.')[0]]}.{key.rpartition('.')[2]}": value
        for key, value in net.state_dict().items()
    }
    return dict(sorted(state.items(), key=lambda item: item[0][::-1]))


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (torchvision.models.resnet18, pytorchcv_resnet([2, 2, 2, 2], 2)),
        (torchvision.models.resnet50, pytorchcv_resnet([3, 4, 6, 3], 3)),
        (torchvision.models.mobilenet_v2, brecq_mobilenet()),
    ],
)
def test_names_of_other_libraries_are_mapped(tmp_path, build, names, caplog):
    source, target = build(), build()
    path = saved(tmp_path / "w.pth", renamed(source, names))
    load_weights(target, path, "net")
    assert same(source, target)
    assert ("with a b, such as resnet50b" in caplog.text) == (
        build is torchvision.models.resnet50
    )


def test_pytorchcvs_classifier_of_mobilenet_becomes_a_linear_layer(tmp_path):
    source, target = (torchvision.models.mobilenet_v2() for _ in range(2))
    nn.init.zeros_(source.classifier[1].bias)
    state = renamed(source, pytorchcv_mobilenet())
    del state["output.bias"]
    state["output.weight"] = state["output.weight"][:, :, None, None]
    load_weights(target, saved(tmp_path / "w.pth", state), "net")
    assert same(source, target)
    # With an expansion in the first block it is another network.
    state["features.stage1.unit1.conv1.conv.weight"] = torch.zeros(32, 32, 1, 1)
    words = r"does not fit net: .*unexpected features.1.conv1.conv.weight"
    with pytest.raises(ModelError, match=words):
        load_weights(target, saved(tmp_path / "w.pth", state), "net")


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.empty(4, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, on kinds of tensors
def test_tensors_without_dense_values_are_named(tmp_path, odd):
    path = saved(tmp_path / "w.pt", {**network().state_dict(), "0.bias": odd()})
    words = r"w.pt: 0.bias are sparse, quantized or without values; save dense"
    with pytest.raises(ModelError, match=words):
        load_weights(network(), path, "net")


def test_an_archive_larger_than_its_file_is_not_opened(tmp_path):
    path = saved(tmp_path / "w.pt", {"0.weight": torch.zeros(1 << 18)})
    with (
        zipfile.ZipFile(path) as plain,
        zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    with pytest.raises(ModelError, match=r"it is compressed, as torch.save never doe"):
        load_weights(network(), tmp_path / "c.pt", "net")


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_damaged_is_one_clear_error(tmp_path, seed):
    path = saved(tmp_path / "w.pt", network(1).state_dict())
    content, chance = bytearray(path.read_bytes()), random.Random(seed)
    for _ in range(8):
        content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(content)
    target = network(2)
    try:  # what is not noticed are other weights, never another error
        load_weights(target, path, "net")
    except ModelError as error:
        assert "w.pt" in str(error)
        assert same(target, network(2))


def test_auxiliary_classifiers_are_left_out_with_a_word(tmp_path, caplog):
    source, target = network(1), network(2)
    state = {**source.state_dict(), "aux1.conv.weight": torch.ones(1)}
    with caplog.at_level(logging.INFO):
        load_weights(target, saved(tmp_path / "w.safetensors", state), "net")
    assert same(source, target)
    assert "1 auxiliary tensors are not used" in caplog.text


def test_every_difference_is_listed_and_cut_at_five(tmp_path):
    state = {f"extra{i}": torch.ones(1) for i in range(7)}
    state["0.weight"] = torch.ones(4, 3, 5, 5)
    state["2.weight"] = torch.ones(2, 4, 1, 1, dtype=torch.int8)
    path = saved(tmp_path / "w.safetensors", state)
    with pytest.raises(ModelError) as caught:
        load_weights(network(), path, "torchvision:resnet18")
    words = str(caught.value)
    assert "w.safetensors does not fit torchvision:resnet18: missing 0.bias" in words
    assert "1.running_var and 1 more; unexpected" in words
    assert "unexpected extra0, extra1, extra2, extra3, extra4 and 2 more" in words
    assert "other shapes 0.weight (4, 3, 5, 5) instead of (4, 3, 3, 3)" in words
    assert "other types 2.weight torch.int8 instead of torch.float32" in words


def test_nothing_is_loaded_from_weights_that_do_not_fit(tmp_path):
    target = network(2)
    state = network(1).state_dict()
    del state["2.bias"]
    with pytest.raises(ModelError, match="missing 2.bias"):
        load_weights(target, saved(tmp_path / "w.pt", state), "net")
    assert same(target, network(2))


def test_missing_file_and_wrong_suffix_are_named(tmp_path):
    with pytest.raises(ModelError, match="there is no weights file .*w.pt"):
        load_weights(network(), tmp_path / "w.pt", "net")
    (tmp_path / "w.bin").touch()
    with pytest.raises(ModelError, match=r"w.bin ends in .bin; give a .safetensors"):
        load_weights(network(), tmp_path / "w.bin", "net")
    (tmp_path / "w").touch()
    with pytest.raises(ModelError, match="ends in nothing"):
        load_weights(network(), tmp_path / "w", "net")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("kept", [0, 5, 100, 700])
def test_cut_file_is_an_error(tmp_path, suffix, kept):
    path = saved(tmp_path / f"w{suffix}", network().state_dict())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match="damaged"):
        load_weights(network(), path, "net")


class Malicious:
    def __reduce__(self):
        return print, ("executed",)


def test_python_objects_in_a_file_are_not_executed(tmp_path, capsys):
    torch.save({"0.weight": Malicious()}, tmp_path / "w.pt")
    with pytest.raises(ModelError, match="holds Python objects, which are not loaded"):
        load_weights(network(), tmp_path / "w.pt", "net")
    (tmp_path / "w.pth").write_bytes(pickle.dumps(Malicious(), protocol=2))
    with pytest.raises(ModelError, match="is not a plain state dict"):
        load_weights(network(), tmp_path / "w.pth", "net")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [[1, 2], {}])
def test_other_content_is_named(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(ModelError, match="holds (list|dict), not a state dict"):
        load_weights(network(), tmp_path / "w.pt", "net")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_that_is_no_number_is_named(value):
    net = network()
    with torch.no_grad():
        net[2].weight[0, 1] = value
    with pytest.raises(ModelError, match="net has NaN or infinity in 2.weight;"):
        check_weights(net, "net")


def test_infinite_buffer_is_in_order_but_nan_is_not():
    net = network()
    net.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    check_weights(net, "net")
    net[1].running_var[0] = float("nan")
    with pytest.raises(ModelError, match=r"infinity in 1.running_var"):
        check_weights(net, "net")


def fail(*_, **__):
    raise OSError("no such host")


def test_hub_is_offline_only_while_it_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with downloading("timm", "net"):
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "proxy:80"})
    with downloading("timm", "net"):
        assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    with downloading("timm", "net"):
        assert not constants.HF_HUB_OFFLINE


def test_without_the_hub_client_downloads_are_guarded_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with downloading("torchvision", "net"):
        pass
    words = r"torchvision's own weights for net cannot be downloaded \(OSError: x\)"
    with (
        pytest.raises(ModelError, match=f"{words}. Give a file of weights, or"),
        downloading("torchvision", "net"),
    ):
        raise OSError("x")


def published_keys(depth):
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    keys = {"conv1.weight", "linear.weight", "linear.bias"}
    keys |= {f"bn1.{key}" for key in norm}
    for stage in (1, 2, 3):
        for block in range((depth - 2) // 6):
            for i in (1, 2):
                keys.add(f"layer{stage}.{block}.conv{i}.weight")
                keys |= {f"layer{stage}.{block}.bn{i}.{key}" for key in norm}
    return keys


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (56, 853_018)])
def test_keys_and_parameters_are_those_of_the_published_network(depth, parameters):
    network = CifarResNet(depth)
    assert set(network.state_dict()) == published_keys(depth)
    assert sum(p.numel() for p in network.parameters()) == parameters


def test_shortcut_subsamples_and_pads_channels_on_both_sides():
    x = torch.arange(2 * 2 * 4 * 4, dtype=torch.float32).view(2, 2, 4, 4)
    y = PadShortcut(4)(x)
    assert y.shape == (2, 6, 2, 2)
    for n in range(2):
        for row in range(2):
            for column in range(2):
                expected = [0, 0, *x[n, :, 2 * row, 2 * column].tolist(), 0, 0]
                assert y[n, :, row, column].tolist() == expected


def test_resnet18_keeps_the_resolution_in_its_stem():
    network = cifar_resnet18().eval()
    with torch.no_grad():
        stem = network.maxpool(network.conv1(torch.zeros(1, 3, 32, 32)))
        logits = network(torch.zeros(1, 3, 32, 32))
    assert stem.shape == (1, 64, 32, 32)
    assert logits.shape == (1, 10)


@pytest.mark.parametrize("width", [0.375, 2.0])
def test_the_channels_of_resnet18_are_multiplied(width):
    network, usual = cifar_resnet18(width=width).eval(), cifar_resnet18()
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    shapes = {name: [*value.shape] for name, value in network.state_dict().items()}
    assert shapes == {
        name: [int(n * width) if n >= 64 else n for n in value.shape]
        for name, value in usual.state_dict().items()
    }
    strides = [m.stride for m in usual.modules() if isinstance(m, torch.nn.Conv2d)]
    own = [m.stride for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    assert own == strides
    spread = network.layer4[1].conv2.weight.std().item()
    assert spread == pytest.approx((2 / (9 * 512 * width)) ** 0.5, rel=0.05)


def test_depth_that_is_no_6n_plus_2_is_refused():
    with pytest.raises(ValueError, match="depth=21 is not 6n \\+ 2"):
        CifarResNet(21)


SCRIPT = Path(__file__).parents[1] / "scripts" / "train_demo.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_network_reads_nearly_every_held_out_digit():
    data = demo_data()
    network = demo_network()
    assert not network.training
    with torch.no_grad():
        read = network(data.test_images).argmax(1)
    wrong = [n for n, d in zip(read, data.test_targets, strict=True) if n != d]
    assert len(wrong) <= 9  # of 450: 98 %


def test_weights_are_small_float_and_finite():
    assert DEMO_WEIGHTS.stat().st_size < 1_000_000
    weights = load_file(DEMO_WEIGHTS)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert all(np.isfinite(value.numpy()).all() for value in weights.values())
    assert 75_000 < sum(p.numel() for p in DemoNetwork().parameters()) < 250_000


def test_network_is_the_same_every_time_and_draws_nothing():
    before = torch.random.get_rng_state()
    first, second = demo_network().state_dict(), demo_network().state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_digits_are_split_once_and_for_all():
    from sklearn.datasets import load_digits

    data = demo_data()
    assert data.train_images.shape == (1347, 1, 8, 8)
    assert data.test_images.shape == (450, 1, 8, 8)
    train = {image.numpy().tobytes() for image in data.train_images}
    test = {image.numpy().tobytes() for image in data.test_images}
    given = load_digits()
    digit_of = {
        (image / 16).astype(np.float32).tobytes(): digit
        for image, digit in zip(given.images, given.target, strict=True)
    }
    assert not train & test
    assert train | test == set(digit_of)
    for image, digit in zip(data.test_images, data.test_targets, strict=True):
        assert digit_of[image.numpy().tobytes()] == digit
    assert data.test_targets[:8].tolist() == [2, 8, 2, 6, 6, 7, 1, 9]
    assert data.train_targets[:8].tolist() == [2, 8, 9, 7, 2, 1, 4, 9]
    assert data.train_images.min() == 0
    assert data.train_images.max() == 1


def test_missing_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        MissingExtraError,
        match=r"scikit-learn is not installed. Run: pip install 'ompq\[demo\]'",
    ):
        demo_data()


def test_name_gives_the_trained_network_and_digits_fit_it():
    model = load_model("ompq:demo")
    assert model.input_shape == (1, 8, 8)
    assert model.weights == "included in ompq"
    expected = demo_network().state_dict()
    for key, value in model.module.state_dict().items():
        assert torch.equal(value, expected[key])
    data = demo_data()
    for split in ("train", "test"):
        batches = list(load_data("digits", model, split=split).batches())
        images = torch.cat([images for images, _ in batches])
        assert torch.equal(images, getattr(data, f"{split}_images"))
        targets = torch.cat([targets for _, targets in batches])
        assert torch.equal(targets, getattr(data, f"{split}_targets"))


def test_trace_understands_every_part():
    network = demo_network()
    graph = trace(network, torch.zeros(2, 1, 8, 8))
    assert graph.skipped == ()
    assert graph.float_bytes == 0
    layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(graph) == len(layers)
    kinds = {unit.kind for unit in graph.units}
    assert kinds == {"conv", "pointwise", "depthwise", "linear"}
    assert all(unit.norm for unit in graph.units if unit.name != "classifier")
    tied = [names for names in graph.groups.values() if len(names) > 1]
    assert [[graph.names[i] for i in group] for group in tied] == [
        ["blocks.4.conv2", "blocks.4.downsample"]
    ]
    blocks = {name: len(units) for name, units in graph.blocks.items()}
    assert blocks == {
        "stem": 1,
        **{f"blocks.{i}": 3 for i in range(6)},
        "head": 1,
        "classifier": 1,
    }


def test_blocks_have_a_shortcut_only_where_shapes_agree():
    x = torch.ones(1, 4, 4, 4)
    for channels, stride, size in ((4, 1, 4), (4, 2, 2), (6, 1, 4)):
        block = InvertedResidual(4, channels, stride=stride).eval()
        nn.init.zeros_(block.project.weight)  # leaves only what the shortcut brings
        y = block(x)
        assert y.shape == (1, channels, size, size)
        assert torch.equal(y, x) if y.shape == x.shape else not y.any()


def test_training_follows_its_seed_alone(script):
    whole = demo_data()
    data = replace(
        whole,
        train_images=whole.train_images[:256],
        train_targets=whole.train_targets[:256],
    )
    before = torch.random.get_rng_state()
    first, second = (script["train"](data, epochs=1, seed=3) for _ in range(2))
    other = script["train"](data, epochs=1, seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    expected = second.state_dict()
    for key, value in first.state_dict().items():
        assert torch.equal(value, expected[key])
    assert not torch.equal(first.stem.weight, other.stem.weight)
    assert not first.training


def test_shifting_moves_images_by_at_most_one_pixel(script):
    images = demo_data().train_images[:50]
    moved = script["shifted"](images, torch.Generator().manual_seed(0))
    offsets = set()
    for before, after in zip(images[:, 0].numpy(), moved[:, 0].numpy(), strict=True):
        canvas = np.zeros((10, 10), dtype=np.float32)
        canvas[1:9, 1:9] = before
        windows = {
            (y, x): canvas[y : y + 8, x : x + 8] for y in range(3) for x in range(3)
        }
        found = [at for at, window in windows.items() if (window == after).all()]
        assert found
        offsets.update(found)
    assert len(offsets) == 9


def test_script_writes_the_weights(script, tmp_path, monkeypatch):
    arguments = ["--output", str(tmp_path / "w.safetensors"), "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["train_demo.py", *arguments])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    script["main"]()
    written, shipped = load_file(tmp_path / "w.safetensors"), load_file(DEMO_WEIGHTS)
    assert {key: value.shape for key, value in written.items()} == {
        key: value.shape for key, value in shipped.items()
    }
