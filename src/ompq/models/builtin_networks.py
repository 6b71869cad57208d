"""The networks that come with ompq, and the digits that the demo network reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.optional_libraries import optional_library, torchvision_library

# Per channel, for images in [0, 1], as in torchvision.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The published CIFAR-10 weights were trained with ImageNet's statistics.
_CIFAR: dict[str, Any] = {
    "input_shape": (3, 32, 32),
    "mean": IMAGENET_MEAN,
    "std": IMAGENET_STD,
    "resize": 32,
}
DEMO_WEIGHTS = Path(__file__).parent / "data" / "demo.safetensors"
_TEST_LENGTH = 450  # a quarter of the digits


class PadShortcut(nn.Module):
    """Shortcut "A" of He et al.: every second pixel, zeros for the new channels."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C + new_channels, H / 2, W / 2)."""
        half = self.new_channels // 2
        ends = half, self.new_channels - half
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, *ends))


class CifarBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut without parameters."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.shortcut = (
            nn.Identity() if stride == 1 else PadShortcut(channels - channels_in)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, channels, H / stride, W / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.shortcut(x))  # type: ignore[no-any-return]


class CifarResNet(nn.Module):
    """The CIFAR ResNet of He et al.: 6n + 2 layers, stages of 16, 32 and 64 channels.

    ``width`` multiplies the channels.
    """

    preprocessing: ClassVar[dict[str, Any]] = _CIFAR

    def __init__(
        self, depth: int = 20, classes: int = 10, *, width: float = 1.0
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth={depth} is not 6n + 2; use 20, 32, 44 or 56")
        blocks = (depth - 2) // 6
        few, more, most = (max(1, round(n * width)) for n in (16, 32, 64))
        self.conv1 = nn.Conv2d(3, few, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(few)
        self.relu = nn.ReLU()
        self.layer1 = _stage(few, few, 1, blocks)
        self.layer2 = _stage(few, more, 2, blocks)
        self.layer3 = _stage(more, most, 2, blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(most, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(self.pool(x).flatten(1))  # type: ignore[no-any-return]


def cifar_resnet18(classes: int = 10, *, width: float = 1.0) -> nn.Module:
    """Return torchvision's ResNet-18 with a stem for 32 × 32 images.

    ``conv1`` is 3 × 3 with stride 1, and there is no max pooling. ``width`` multiplies
    the channels.
    """
    resnet = torchvision_library("torchvision.models.resnet")
    network: Any = resnet.resnet18(num_classes=classes)
    if width != 1:
        multiply_channels(network, width)
    few = network.bn1.num_features
    network.conv1 = nn.Conv2d(3, few, 3, 1, 1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out")
    network.maxpool = nn.Identity()
    network.__dict__["preprocessing"] = _CIFAR
    return network  # type: ignore[no-any-return]


def multiply_channels(network: nn.Module, width: float) -> None:
    """Replace the layers of a convolutional network by wider ones with random weights.

    What it reads and what it returns keep their channels. Groups are not supported.
    """

    def wider(channels: int) -> int:
        return max(1, round(channels * width))

    layers = [
        (name, layer)
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.Linear)
    ]
    first, last = layers[0][1], layers[-1][1]
    for name, layer in layers:
        made: nn.Module
        if isinstance(layer, nn.BatchNorm2d):
            made = nn.BatchNorm2d(wider(layer.num_features))
        elif isinstance(layer, nn.Linear):
            outputs = layer.out_features
            outputs = outputs if layer is last else wider(outputs)
            made = nn.Linear(wider(layer.in_features), outputs)
        else:
            made = nn.Conv2d(
                layer.in_channels if layer is first else wider(layer.in_channels),
                wider(layer.out_channels),
                layer.kernel_size,  # type: ignore[arg-type]
                layer.stride,  # type: ignore[arg-type]
                layer.padding,  # type: ignore[arg-type]
                bias=layer.bias is not None,
            )
            nn.init.kaiming_normal_(made.weight, mode="fan_out")
        network.set_submodule(name, made)


def _stage(channels_in: int, channels: int, stride: int, blocks: int) -> nn.Sequential:
    first = CifarBlock(channels_in, channels, stride)
    rest = (CifarBlock(channels, channels, 1) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expansion, depthwise convolution, projection.

    It has a shortcut if the stride is 1 and the number of channels stays the same.
    """

    def __init__(
        self, channels_in: int, channels: int, *, stride: int = 1, expansion: int = 3
    ) -> None:
        super().__init__()
        inner = channels_in * expansion
        self.expand = nn.Conv2d(channels_in, inner, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(inner)
        self.project = nn.Conv2d(inner, channels, 1, bias=False)
        self.project_norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU6()
        self.shortcut = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, channels, H / stride, W / stride)."""
        y = self.activation(self.expand_norm(self.expand(x)))
        y = self.activation(self.depthwise_norm(self.depthwise(y)))
        y = self.project_norm(self.project(y))
        return x + y if self.shortcut else y  # type: ignore[no-any-return]


class Residual(nn.Module):
    """The ResNet block that halves the resolution; its shortcut is a convolution."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, 2, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.downsample = nn.Conv2d(channels_in, channels, 1, 2, bias=False)
        self.downsample_norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, channels, H / 2, W / 2)."""
        y = self.activation(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y = y + self.downsample_norm(self.downsample(x))
        return self.activation(y)  # type: ignore[no-any-return]


class DemoNetwork(nn.Module):
    """A small classifier of scikit-learn's digits: 8 × 8 grey images, ten classes.

    It has one of each structure common in practice: ordinary, depthwise and pointwise
    convolutions, blocks with and without a shortcut, and a downsample convolution. Its
    weights are trained by ``scripts/train_demo.py``.
    """

    preprocessing: ClassVar[dict[str, Any]] = {
        "input_shape": (1, 8, 8),
        "mean": (0.0,),
        "std": (1.0,),
        "resize": 8,
    }

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, 1, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(16)
        self.activation = nn.ReLU6()
        self.blocks = nn.Sequential(
            InvertedResidual(16, 16),
            InvertedResidual(16, 24, stride=2),  # 8 × 8 to 4 × 4
            InvertedResidual(24, 24),
            InvertedResidual(24, 24),
            Residual(24, 64),  # 4 × 4 to 2 × 2
            InvertedResidual(64, 64, expansion=1),
        )
        self.head = nn.Conv2d(64, 64, 1, bias=False)
        self.head_norm = nn.BatchNorm2d(64)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 1, 8, 8) with values in [0, 1] to logits (N, 10)."""
        x = self.activation(self.stem_norm(self.stem(x)))
        x = self.activation(self.head_norm(self.head(self.blocks(x))))
        return self.classifier(self.pool(x).flatten(1))  # type: ignore[no-any-return]


# Each takes a ``width``, which multiplies its channels.
CIFAR_NETWORKS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "cifar:resnet18": cifar_resnet18,
        "cifar:resnet20": partial(CifarResNet, 20),
        "cifar:resnet56": partial(CifarResNet, 56),
    }
)
BUILTIN = {**CIFAR_NETWORKS, "ompq:demo": DemoNetwork}


@dataclass(frozen=True)
class DemoData:
    """A fixed split of the digits; the demo network was trained on the first part."""

    train_images: Tensor  # (1347, 1, 8, 8), in [0, 1]
    train_targets: Tensor  # (1347,)
    test_images: Tensor  # (450, 1, 8, 8)
    test_targets: Tensor  # (450,)


def demo_data() -> DemoData:
    """Return scikit-learn's digits as tensors, always with the same split."""
    load_digits = optional_library("sklearn.datasets", "demo").load_digits
    values, labels = load_digits(return_X_y=True)
    # NumPy guarantees the random stream of RandomState, so the split is fixed.
    shuffled = np.random.RandomState(0).permutation(len(labels))
    images = torch.from_numpy(values[shuffled] / 16).float().view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels[shuffled]).long()
    return DemoData(
        train_images=images[_TEST_LENGTH:],
        train_targets=targets[_TEST_LENGTH:],
        test_images=images[:_TEST_LENGTH],
        test_targets=targets[:_TEST_LENGTH],
    )
