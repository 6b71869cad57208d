"""Moments that channels get back after rounding: none, as read, or shrunk (default).

python benchmarks/moments.py --data FOLDER --network mobilenet_v2

Weights of the same bits everywhere, rounded to nearest; activations of 8 bits. FOLDER
is as for ptq.py.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from common import RESULTS, everywhere, save
from ptq import NETWORKS, load
from rounded import some_of

from ompq.evaluation import evaluate
from ompq.graph import Choice
from ompq.quantization import QuantizeConfig, moments, quantize

WAYS = ("none", "as read", "shrunk")


def quantized(model, samples, bits: int, way: str):
    """Round to nearest and restore moments in one of the ways."""
    allocation = everywhere(model, samples, Choice(bits, 8))
    config = QuantizeConfig(restore_moments=way != "none")
    trusting = patch.object(moments, "_certain", lambda changes: changes.mean(0))
    with trusting if way == "as read" else nullcontext():
        return quantize(model, allocation, samples, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--images", type=int, default=500, help="to judge by")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, calibration, batches = load(options.network, options.data, device)
    judged = some_of(batches, options.images)
    rows = []
    for bits in options.bits:
        for count in options.samples:
            for way in WAYS:
                made = quantized(model, calibration[:count], bits, way)
                found = evaluate(made, judged, reference=model)
                row = {
                    "bits": bits,
                    "samples": count,
                    "moments": way,
                    "images": sum(len(x) for x, _ in judged),
                    "divergence": found.divergence,
                    "agreement": found.agreement,
                }
                rows.append(row)
                print(row, flush=True)
                save(f"moments-{options.network}", rows, options.out)


if __name__ == "__main__":
    main()
