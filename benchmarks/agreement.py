"""One arithmetic: simulated network, integer engine and ONNX Runtime on real images.

python benchmarks/agreement.py --data FOLDER --network mobilenet_v2 --images 100

FOLDER holds ``imagenet-calib``, ``imagenet-val`` (ImageFolders), ``cifar10`` and
``weights``; the demonstration network needs none of it. Weights are rounded to nearest.
"""

import argparse
import copy
import tempfile
import time
from pathlib import Path

import torch
from common import RESULTS, save

from ompq.allocation.problem import Allocation
from ompq.datasets.named_data import load_data
from ompq.integer.finalization import finalize
from ompq.models.named_models import load_model
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.quantization.pipeline import quantize
from ompq.runtimes.onnx.onnx_files import export_onnx
from ompq.runtimes.verification import Agreement, compare_outputs

NETWORKS = {
    "mobilenet_v2": ("torchvision:mobilenet_v2", "imagenet_mobilenet_v2", "imagenet"),
    "resnet18": ("torchvision:resnet18", "imagenet_resnet18", "imagenet"),
    "squeezenet1_1": (
        "torchvision:squeezenet1_1",
        "imagenet_squeezenet1_1",
        "imagenet",
    ),
    "resnet20": ("cifar:resnet20", "cifar_resnet20", "cifar10"),
    "demo": ("ompq:demo", "", "digits"),
}
SCHEMES = {"W8A8": ((8,), 8), "W2-8A8": ((2, 3, 4, 5, 6, 8), 8), "W4A4": ((4,), 4)}


def load(name: str, folder: Path, images: int):
    """Return the network, calibration samples, test images and their targets."""
    network, weights, kind = NETWORKS[name]
    file = folder / "weights" / f"{weights}.safetensors" if weights else None
    model = load_model(network, file)
    where = {"digits": "digits", "cifar10": folder / "cifar10"}
    train = load_data(where.get(kind, folder / "imagenet-calib"), model, split="train")
    test = load_data(where.get(kind, folder / "imagenet-val"), model)
    batches = list(test.batches(batch_size=images, limit=images))
    return model.module, train.samples(64), batches[0]


def outputs(network, images):
    """Return the logits, 25 images at a time."""
    with torch.no_grad():
        return torch.cat([network(part) for part in torch.split(images, 25)])


def row(network, samples, images, targets, scheme: str, engine_images: int):
    """Quantize by a scheme, export, and tell how nearly all forms agree."""
    widths, activation = SCHEMES[scheme]
    units = trace(network, samples).units
    bits = {
        unit.name: Choice(widths[number % len(widths)], activation)
        for number, unit in enumerate(units)
    }
    given = quantize(network, Allocation(bits), samples)
    start = time.perf_counter()
    finalized = finalize(given, samples)
    finalizing = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        result = export_onnx(given, path, images, engine_images=engine_images)
    before, after = outputs(given, images), outputs(finalized, images)
    double = outputs(copy.deepcopy(given).double(), images.double()).float()
    return {
        "scheme": scheme,
        "bytes": result.bytes,
        "settle_seconds": round(finalizing, 2),
        "top1_given": accuracy(before, targets),
        "top1_settled": accuracy(after, targets),
        "runtime_and_settled": told(result.simulated),
        "runtime_and_engine": told(result.engine),
        "runtime_and_given": told(result.given),
        "float32_and_float64": told(compare_outputs([double], [before])),
        "runtime": result.runtime,
    }


def accuracy(logits, targets) -> float:
    """Return the fraction of right answers."""
    return round(float((logits.argmax(1) == targets).double().mean()), 4)


def told(found: Agreement) -> dict[str, float]:
    """Return what a table needs."""
    return {
        "images": found.images,
        "top1": found.top1,
        "logits": found.logits,
        "codes": found.codes,
        "codes_equal": found.codes_equal,
        "codes_furthest": found.codes_furthest,
    }


def main() -> None:
    """Measure one network with every scheme."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--network", choices=NETWORKS, default="demo")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--engine-images", type=int, default=8)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    network, samples, (images, targets) = load(given.network, given.data, given.images)
    rows = [
        row(network, samples, images, targets, scheme, given.engine_images)
        for scheme in given.schemes
    ]
    for found in rows:
        print(found)
    save(f"agreement-{given.network}", rows, given.out)


if __name__ == "__main__":
    main()
