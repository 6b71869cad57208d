import argparse
import logging

import pytest
import torch
import torchvision
from torch import nn

from named_models_cases import network, same, saved
from ompq.errors import ModelError
from ompq.models.weight_files import check_weights, load_weights


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


def test_auxiliary_classifiers_are_left_out_with_a_word(tmp_path, caplog):
    source, target = network(1), network(2)
    state = {**source.state_dict(), "aux1.conv.weight": torch.ones(1)}
    with caplog.at_level(logging.INFO):
        load_weights(target, saved(tmp_path / "w.safetensors", state), "net")
    assert same(source, target)
    assert "1 auxiliary tensors are not used" in caplog.text


def test_infinite_buffer_is_in_order_but_nan_is_not():
    net = network()
    net.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    check_weights(net, "net")
    net[1].running_var[0] = float("nan")
    with pytest.raises(ModelError, match=r"infinity in 1.running_var"):
        check_weights(net, "net")
