import logging
import pickle
import random
import socket
import sys
import urllib.request
import zipfile
from urllib.error import URLError

import pytest
import timm
import torch
import torchvision
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import nn

from named_models_cases import network, same, saved
from nets import demo_network
from ompq.datasets.named_data import load_data
from ompq.errors import MissingExtraError, ModelError
from ompq.models import named_models
from ompq.models.builtin_networks import CifarResNet, demo_data
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
            "fcn_resnet50 is not a classification network: return it from a function .*"
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


def test_network_is_the_same_every_time_and_draws_nothing():
    before = torch.random.get_rng_state()
    first, second = demo_network().state_dict(), demo_network().state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(value, second[key]) for key, value in first.items())


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
