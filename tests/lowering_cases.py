"""Small networks of several families, which become integer networks."""

import torch
from torch import nn

from nets import TinyMobileNet, TinyResNet, images, seeded
from ompq.integer.finalization import finalize
from ompq.models.builtin_networks import CifarResNet
from quantized import quantized


class Fire(nn.Module):
    """SqueezeNet in small: pooling with a ceiling, branches joined, no linear layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU())
        self.pool = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.left = nn.Sequential(nn.Conv2d(6, 4, 1), nn.ReLU())
        self.right = nn.Sequential(nn.Conv2d(6, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Sequential(
            nn.Dropout(0.5), nn.Conv2d(8, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )

    def forward(self, x):
        x = self.pool(self.stem(x))
        x = torch.cat([self.left(x), self.right(x)], 1)
        return torch.flatten(self.head(x), 1)


class Vgg(nn.Sequential):
    """VGG in small: pooling between convolutions, several linear layers."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 16),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(16, 5),
        )


NETWORKS = {
    "resnet": lambda: seeded(TinyResNet()),
    "mobilenet": lambda: seeded(TinyMobileNet()),
    "fire": lambda: seeded(Fire()),
    "vgg": lambda: seeded(Vgg()),
    "cifar": lambda: seeded(CifarResNet(8)),
}

FINALIZED = {"resnet": TinyResNet, "mobilenet": TinyMobileNet}


def finalized(name="resnet", **given):
    network = quantized(seeded(FINALIZED[name]()), images(16), **given)
    return finalize(network, images())


def margin(values, scale, zero_point, qmax):
    """Return the least distance from a half, result by result."""
    distances = [
        abs(value / scale + zero_point - int(value / scale + zero_point) - 0.5)
        for value in values
        if -1 < value / scale + zero_point < qmax + 1
    ]
    return min(distances)
