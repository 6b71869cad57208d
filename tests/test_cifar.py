import pytest
import torch

from ompq.models.cifar import CifarResNet, PadShortcut, cifar_resnet18


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


def test_depth_that_is_no_6n_plus_2_is_refused():
    with pytest.raises(ValueError, match="depth=21 is not 6n \\+ 2"):
        CifarResNet(21)
