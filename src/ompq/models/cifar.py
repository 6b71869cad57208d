"""Small residual networks for CIFAR-10: 32 × 32 images, ten classes."""

from typing import Any, ClassVar

import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

# The published weights were trained with ImageNet's mean and standard deviation.
PREPROCESSING: dict[str, Any] = {
    "input_shape": (3, 32, 32),
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "resize": 32,
}


class PadShortcut(nn.Module):
    """He's shortcut "A": every second pixel, zeros for the new channels."""

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
    """He's CIFAR network of 6n + 2 layers: three stages of 16, 32 and 64 channels.

    ``width`` multiplies the channels.
    """

    preprocessing: ClassVar[dict[str, Any]] = PREPROCESSING

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


def cifar_resnet18(classes: int = 10) -> nn.Module:
    """Return ResNet-18 with the 3 × 3 stem that 32 × 32 images need.

    Its keys are torchvision's: ``conv1`` has stride 1 and there is no max pooling.
    """
    network: nn.Module = torchvision.models.resnet18(num_classes=classes)
    network.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out")
    network.maxpool = nn.Identity()
    network.__dict__["preprocessing"] = PREPROCESSING
    return network


def _stage(channels_in: int, channels: int, stride: int, blocks: int) -> nn.Sequential:
    first = CifarBlock(channels_in, channels, stride)
    rest = (CifarBlock(channels, channels, 1) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)
