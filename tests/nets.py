"""Toy networks: each shows one thing that real ones do."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.models.named_models import load_model


def demo_network() -> nn.Module:
    """Return the demo network with its trained weights."""
    return load_model("ompq:demo").module


def seeded(network: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and statistic a reproducible, non-trivial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            fan_in = max(1, parameter[0].numel()) if parameter.dim() > 1 else 4
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / fan_in**0.5)
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                shape = module.running_mean.shape
                module.running_mean.copy_(0.1 * torch.randn(shape, generator=generator))
                module.running_var.copy_(0.5 + torch.rand(shape, generator=generator))
                module.weight.copy_(0.5 + torch.rand(shape, generator=generator))
    return network.eval()


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(count: int = 8, size: int = 8, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, size, size, generator=generator)


def scenes(count: int = 64, size: int = 8, seed: int = 1) -> Tensor:
    """Smooth images: neighbours are alike, as in photographs.

    Learned rounding has something to win only where inputs are correlated; for white
    noise, rounding to nearest is the best there is.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 2, size // 4, size // 4, generator=generator)
    smooth = F.interpolate(coarse, size=size, mode="bilinear")
    mixing = torch.randn(3, 2, generator=torch.Generator().manual_seed(99))
    noise = 0.1 * torch.randn(count, 3, size, size, generator=generator)
    return torch.einsum("oc,nchw->nohw", mixing, smooth) + noise + 0.5


class ResidualBlock(nn.Module):
    """A ResNet block whose one ReLU module is called twice."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class TinyResNet(nn.Module):
    """Stem, two residual blocks (the second with a downsample), classifier."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.block1 = ResidualBlock(width, width)
        self.block2 = ResidualBlock(width, 2 * width, stride=2)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.block2(self.block1(x))
        return self.head(x.mean((2, 3)))


class InvertedBlock(nn.Module):
    """A MobileNetV2 block: pointwise, depthwise, linear pointwise, shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        hidden = 2 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.shortcut else self.body(x)


class TinyMobileNet(nn.Module):
    """Stem, three inverted blocks of which two have shortcuts, classifier."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU6(inplace=True),
        )
        self.blocks = nn.Sequential(
            InvertedBlock(width, width),
            InvertedBlock(width, width),
            InvertedBlock(width, 2 * width, stride=2),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


class TwoInputs(nn.Module):
    """(N, 3) and (N, 2) in, (N, 2) out."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, y):
        return self.layer(x) + y


class Chain(nn.Module):
    """Convolution, ReLU, linear: the smallest network with two units."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


class Recurrent(nn.Module):
    """Tokens (N, T) through an embedding and a recurrent layer of two kinds."""

    def __init__(self, layer=nn.LSTM):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.recurrent = layer(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(self.recurrent(self.embedding(tokens))[0][:, -1])


class Tokens(nn.Module):
    """Layers of more inputs than a group of 32 has; a few inputs have large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 40, 4, 4)
        self.norm = nn.LayerNorm(40)
        self.attention = nn.MultiheadAttention(40, 2, batch_first=True)
        self.up, self.down = nn.Linear(40, 72), nn.Linear(72, 40, bias=False)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(x.mean(1)[:, :24])


def tokens() -> nn.Module:
    network = seeded(Tokens())
    with torch.no_grad():
        for layer in (network.up, network.down):
            layer.weight[:, -3:] *= 12
    return network


class Branching(nn.Module):
    """Control flow that depends on values, which PyTorch cannot write as ONNX."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        x = self.layer(x)
        return x if x.sum() > 0 else -x
