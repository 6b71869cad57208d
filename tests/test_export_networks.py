"""Networks of the supported families as ONNX: every code equal, random weights."""

import pytest
import torch
from torch import nn
from torchvision import models

from nets import seeded
from ompq.errors import QuantizationError
from ompq.integer.finalization import finalize
from ompq.models import load_model
from ompq.models.demo_network import DemoNetwork
from ompq.onnx.export import export_onnx
from quantized import quantized

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def vgg():
    network = models.VGG(models.vgg.make_layers([8, "M", 8, "M"]), num_classes=5)
    network.classifier = nn.Sequential(nn.Flatten(), nn.Linear(8 * 7 * 7, 5))
    return network


def resnet(block, layers):
    return lambda: models.ResNet(block, layers, num_classes=7)


def lite():
    timm = pytest.importorskip("timm")
    return timm.create_model("efficientnet_lite0", num_classes=7)


NETWORKS = {
    "resnet18": (resnet(models.resnet.BasicBlock, [1, 2, 1, 1]), 32),
    "resnet50": (resnet(models.resnet.Bottleneck, [1, 1, 1, 1]), 32),
    "mobilenet_v2": (lambda: models.mobilenet_v2(num_classes=7), 32),
    "vgg": (vgg, 28),
    "squeezenet": (lambda: models.squeezenet1_1(num_classes=7), 64),
    "efficientnet_lite": (lite, 32),
    "cifar_resnet": (lambda: load_model("cifar:resnet20", "none").module, 16),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_network_computes_the_same_in_all_forms(name, tmp_path):
    make, size = NETWORKS[name]
    samples = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    network = finalize(quantized(seeded(make()), samples), samples)
    result = export_onnx(network, tmp_path / "net.onnx", samples, engine_images=1)
    assert result.given.logits == result.simulated.logits
    assert (result.simulated.top1, result.simulated.logits < 1e-6) == (1, True)
    assert (result.engine.codes_equal, result.engine.codes > 10_000) == (1, True)


def test_demo_network_computes_the_same_in_all_forms(tmp_path):
    samples = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    network = finalize(quantized(seeded(DemoNetwork()), samples), samples)
    result = export_onnx(network, tmp_path / "net.onnx", samples, engine_images=2)
    assert result.engine.codes_equal == 1


@pytest.mark.parametrize(
    ("name", "operation"),
    [("mobilenet_v3_small", "hardswish"), ("efficientnet_b0", "silu")],
)
def test_other_networks_name_their_operation(name, operation, tmp_path):
    samples = torch.randn(2, 3, 32, 32)
    network = quantized(models.get_model(name).eval(), samples, weight=8)
    with pytest.raises(QuantizationError, match=rf"{operation} in features\.0\.2 has"):
        export_onnx(network, tmp_path / "net.onnx", samples)
