"""Makes the plans that come with ompq (``ompq zoo``), and measures those it can.

python benchmarks/zoo_plans.py --data FOLDER [--images 2500] [--network resnet18]

FOLDER is as for ptq.py. Networks whose trained weights are in it are planned with the
default score, rounded with 1,000 images, and judged on the test images. Of the others
only the shapes are known: with random weights, the score is the noise of the weights.
A plan that is in the file is measured no more by the same settings.
"""

import argparse
import json
from pathlib import Path

import torch

import ompq
from ompq.datasets.named_data import load_data
from ompq.models.named_models import load_model

FILE = Path(ompq.__file__).parent / "lab" / "data" / "zoo.json"
# Network → its weights, if they are at hand, and sizes.
NETWORKS = {
    "torchvision:resnet18": ("imagenet_resnet18", ("3.0MiB", "3.5MiB", "4.0MiB")),
    "torchvision:mobilenet_v2": (
        "imagenet_mobilenet_v2",
        ("1.1MiB", "1.3MiB", "1.5MiB"),
    ),
    "timm:deit_tiny_patch16_224": (
        "imagenet_deit_tiny_patch16_224",
        ("2.5MiB", "3.0MiB"),
    ),
    "torchvision:resnet50": (None, ("8MiB", "10MiB", "12MiB")),
    "torchvision:mobilenet_v3_large": (None, ("2.0MiB", "2.5MiB")),
    "torchvision:efficientnet_b0": (None, ("2.0MiB", "2.5MiB")),
}


def made(network: str, weights: str | None, sizes, options):
    """Yield name and entry of each plan of a network."""
    file = (
        "none" if weights is None else f"{options.data}/weights/{weights}.safetensors"
    )
    named = load_model(network, file)
    model = named.module.eval()
    if weights is None:
        samples = torch.zeros(2, *named.input_shape)
        config = ompq.PlanConfig(score="weight_noise")
    else:
        images = load_data(str(options.data / "imagenet-calib"), named)
        samples = images.samples(options.samples)
        config = ompq.PlanConfig()
    for size in sizes:
        plan = ompq.plan(model, samples[:64], size, config)
        bits = plan.allocation.values()
        entry = {
            "network": network,
            "weights": [one.weight for one in bits],
            "inputs": [one.activation for one in bits],
            "bytes": int(plan.totals["bytes"]),
            "average_bits": round(plan.totals["average_bits"], 3),
            "trained": weights is not None,
        }
        if weights is not None and options.images:
            test = load_data(str(options.data / "imagenet-val"), named)
            found = ompq.evaluate(
                ompq.quantize(model, plan, samples),
                test.batches(batch_size=50, limit=options.images),
                reference=model,
            )
            entry |= {
                "divergence": round(found.divergence, 4),
                "drop": round(100 * found.drop, 2),
                "images": found.count,
            }
        name = network.partition(":")[2].removesuffix("_patch16_224")
        yield plan.graph.names, f"{name}-{size}", entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", help="only networks whose name contains this")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--images", type=int, default=2500)
    options = parser.parse_args()
    data = {"layers": {}, "lists": {}}
    if FILE.exists():
        data = json.loads(FILE.read_text())
    for network, (weights, sizes) in NETWORKS.items():
        if (options.network or "") not in network:
            continue
        for names, name, entry in made(network, weights, sizes, options):
            data["layers"][network] = list(names)
            data["lists"][name] = entry
            FILE.write_text(json.dumps(data) + "\n")
            print(name, entry.get("drop"), entry.get("divergence"), flush=True)


if __name__ == "__main__":
    main()
