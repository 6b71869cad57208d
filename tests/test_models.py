import logging
import sys
from urllib.error import URLError

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from ompq import models
from ompq.errors import MissingExtraError, ModelError
from ompq.models import load_model, output_count
from ompq.models.networks import CifarResNet

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
    assert "the results mean nothing" in caplog.text
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
        match="cifar:resnet20 has no weights of its own. Pass --weights FILE",
    ):
        load_model("cifar:resnet20")


def test_networks_of_the_package_may_ship_weights(tmp_path, monkeypatch):
    source = CifarResNet(8)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    monkeypatch.setitem(models._BUILTIN, "ompq:demo", lambda: CifarResNet(8))
    monkeypatch.setitem(models._SHIPPED, "ompq:demo", tmp_path / "w.safetensors")
    model = load_model("ompq:demo")
    assert torch.equal(model.module.linear.weight, source.linear.weight)
    assert model.weights == "included in ompq"


def test_failing_download_is_one_line_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with pytest.raises(ModelError, match="Pass --weights FILE or --weights none$") as e:
        load_model("torchvision:squeezenet1_1")
    assert "torchvision's own weights for torchvision:squeezenet1_1" in str(e.value)
    assert "no network in tests" in str(e.value)
    assert "\n" not in str(e.value)
    monkeypatch.setattr("ompq.models.weights._resolves", lambda _: True)
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
        ("net.safetensors", "Use .*; ompq evaluate NETWORK --packed FILE reads packed"),
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
