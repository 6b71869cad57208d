"""Networks for CIFAR-10 that had no part in the choice of the default score.

``qat.py --only float`` trains them, and ``ptq.py`` quantizes them. They are
torchvision's, with strides and heads for images of 32 × 32 pixels.
"""

from torch import nn
from torchvision import models

_PREPROCESSING = {"input_shape": (3, 32, 32), "resize": 32}


def _for_cifar(network: nn.Module, *strided: nn.Module) -> nn.Module:
    """Take the stride from some convolutions, and name the size of the images."""
    for layer in strided:
        layer.stride = (1, 1)
    network.__dict__["preprocessing"] = _PREPROCESSING
    return network


def mobilenet_v2() -> nn.Module:
    """Depthwise convolutions, ReLU6, linear bottlenecks."""
    network = models.mobilenet_v2(num_classes=10, dropout=0.0)
    return _for_cifar(network, network.features[0][0], network.features[2].conv[1][0])


def mobilenet_v3_small() -> nn.Module:
    """Hard swish and squeeze-and-excitation, kernels of 5 × 5."""
    network = models.mobilenet_v3_small(num_classes=10, dropout=0.0)
    return _for_cifar(network, network.features[0][0], network.features[1].block[0][0])


def regnet_y_400mf() -> nn.Module:
    """Grouped convolutions and squeeze-and-excitation."""
    network = models.regnet_y_400mf(num_classes=10)
    return _for_cifar(network, network.stem[0])


def vgg11_bn() -> nn.Module:
    """A plain chain without residual additions."""
    network = models.vgg11_bn(num_classes=10, dropout=0.0)
    network.avgpool = nn.Identity()  # one position is left
    network.classifier = nn.Linear(512, 10)
    return _for_cifar(network)
