"""Networks of many families, exported: agreement, size and time.

python benchmarks/families.py [--network NAME ...]

Random weights, random inputs of small size: agreement and time do not depend on how
good a network is. Weights get 2 to 8 bits, 4 on average, activations 8. Float and
quantized files are timed in turn, one sample and one thread in ONNX Runtime.
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, alternating, median_ratio, save
from torch import nn
from torchvision import models
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

import ompq
from ompq.runtimes.onnx.traced_graph import float_model
from ompq.runtimes.verification import open_session, run_session
from ompq.samples import Samples

SAMPLES = 16


class Audio(nn.Module):
    """Convolutions over time, on one channel of sound."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 16, 32, 64)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv1d(a, b, 9, 4, 4), nn.BatchNorm1d(b), nn.ReLU())
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify (N, 1, T)."""
        return self.head(self.layers(x).mean(2))


class TwoInputs(nn.Module):
    """An image, and numbers that go with it."""

    def __init__(self) -> None:
        super().__init__()
        self.image = models.resnet18(num_classes=32)
        self.numbers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Classify (N, 3, H, W) with (N, 8)."""
        both = torch.cat([self.image(image), self.numbers(numbers)], 1)
        return self.head(both.relu())


def timm_network(name: str) -> Callable[[], nn.Module]:
    """Return what makes a network of timm."""

    def make() -> nn.Module:
        import timm

        return timm.create_model(name)

    return make


def bert() -> nn.Module:
    """Return a small BERT that classifies."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=512, num_labels=4,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def images(size: int) -> Callable[[], Any]:
    """Return what makes images, (N, 3, size, size)."""
    return lambda: torch.randn(SAMPLES, 3, size, size)


_SEGMENTATION = {"weights": None, "weights_backbone": None, "num_classes": 21}
# Name → what makes the network, and what makes its inputs.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "EfficientNet-B0 (timm)": (timm_network("efficientnet_b0"), images(96)),
    "EfficientNet-B0 (torchvision)": (models.efficientnet_b0, images(96)),
    "EfficientNet-Lite0 (timm tf_)": (
        timm_network("tf_efficientnet_lite0"),
        images(64),
    ),
    "MobileNetV3-large (timm)": (timm_network("mobilenetv3_large_100"), images(96)),
    "MobileNetV3-large (torchvision)": (models.mobilenet_v3_large, images(96)),
    "ConvNeXt-tiny": (models.convnext_tiny, images(64)),
    "DeiT-tiny": (timm_network("deit_tiny_patch16_224"), images(224)),
    "Swin-T": (models.swin_t, images(64)),
    "DeepLabV3 (MobileNetV3)": (
        lambda: models.segmentation.deeplabv3_mobilenet_v3_large(**_SEGMENTATION),
        images(64),
    ),
    "LR-ASPP": (
        lambda: models.segmentation.lraspp_mobilenet_v3_large(**_SEGMENTATION),
        images(64),
    ),
    "ResNet-18 with FPN": (
        lambda: resnet_fpn_backbone(backbone_name="resnet18", weights=None),
        images(64),
    ),
    "audio CNN": (Audio, lambda: torch.randn(SAMPLES, 1, 4000)),
    "two inputs": (
        TwoInputs,
        lambda: (torch.randn(SAMPLES, 3, 64, 64), torch.randn(SAMPLES, 8)),
    ),
    "small BERT": (
        bert,
        lambda: {"input_ids": torch.randint(0, 1000, (SAMPLES, 32))},
    ),
}


def measured(name: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Quantize, export and time a network."""
    make, inputs = NETWORKS[name]
    torch.manual_seed(0)
    model, given = make().eval(), inputs()
    samples = Samples.of([given])
    plan = ompq.plan(model, samples, "4bits")
    quantized = ompq.quantize(model, plan, samples)
    result = ompq.export(quantized, folder / "net.onnx", samples)
    plain = folder / "float.onnx"
    plain.write_bytes(float_model(model, samples).SerializeToString())
    one = samples.first_batch(1)
    sessions = {"float": open_session(plain), "quantized": open_session(result.path)}
    times = alternating(
        {name: lambda s=s: run_session(s, one) for name, s in sessions.items()}, repeats
    )
    return {
        "network": name,
        "units": len(plan.graph),
        "float_bytes": plain.stat().st_size,
        "bytes": result.bytes,
        "integers_only": not result.floats,
        "float_operations": dict(result.floats),
        "top1_equal": result.simulated.top1,
        "difference": result.simulated.logits,
        "limit": result.limit,
        "float_ms": 1e3 * statistics.median(times["float"]),
        "ms": 1e3 * statistics.median(times["quantized"]),
        "speed_up": median_ratio(times, "float", "quantized"),
    }


def main() -> None:
    """Measure the networks that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", nargs="+", default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in given.network:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(name, Path(folder), given.repeats))
        print(rows[-1], flush=True)
        save("families", rows, given.out)


if __name__ == "__main__":
    main()
