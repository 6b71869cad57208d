"""Ranges of activations: what each way of finding them costs, weights aside.

python benchmarks/ranges.py --data FOLDER --network mobilenet_v2 --activation-bits 8 4

Weights have 8 bits and are rounded to nearest, so that nearly all of the loss is that
of the activations. FOLDER is as for ptq.py.
"""

import argparse
from pathlib import Path

import torch
from common import RESULTS, everywhere, save
from ptq import NETWORKS, load

from ompq.evaluation import evaluate
from ompq.graph import Choice
from ompq.quantization import QuantizeConfig, quantize

METHODS = ("fisher", "mse", "percentile", "minmax")


def measure(model, samples, batches, *, bits: int, method: str) -> dict:
    """Quantize to nearest and evaluate."""
    allocation = everywhere(model, samples, Choice(8, bits))
    config = QuantizeConfig(activation_range=method)
    quantized = quantize(model, allocation, samples, config)
    found = evaluate(quantized, batches, reference=model)
    return {
        "activation_bits": bits,
        "method": method,
        "top1": found.top1,
        "drop": 100 * found.drop,
        "drop_error": 100 * found.drop_error,
        "divergence": found.divergence,
        "agreement": found.agreement,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--activation-bits", type=int, nargs="+", default=[8])
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=METHODS)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, samples, batches = load(options.network, options.data, device)
    samples = samples[: options.samples]
    rows = []
    for bits in options.activation_bits:
        for method in options.methods:
            row = measure(model, samples, batches, bits=bits, method=method)
            rows.append(row)
            print(
                f"A{bits} {method:10s} drop {row['drop']:.2f} +- "
                f"{row['drop_error']:.2f} divergence {row['divergence']:.4f} "
                f"agreement {row['agreement']:.3f}",
                flush=True,
            )
    save(f"ranges-{options.network}", rows, options.out, samples=options.samples)


if __name__ == "__main__":
    main()
