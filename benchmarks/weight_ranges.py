"""Ranges of few weights: by the error of the weights, or of their outputs (default).

python benchmarks/weight_ranges.py --data FOLDER --network mobilenet_v2

Weights of the same bits everywhere, rounded to nearest; activations of 8 bits. FOLDER
is as for ptq.py.
"""

import argparse
import time
from pathlib import Path

import torch
from common import RESULTS, everywhere, save, synchronise
from moments import some_of
from ptq import NETWORKS, load

from ompq.evaluation import evaluate
from ompq.graph.units import Choice
from ompq.quantization.quantizing import QuantizeConfig, quantize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[6, 4, 3])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--images", type=int, default=500, help="to judge by")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, calibration, batches = load(options.network, options.data, device)
    samples, judged = calibration[: options.samples], some_of(batches, options.images)
    rows = []
    for bits in options.bits:
        for by in ("weights", "outputs"):
            config = QuantizeConfig(output_error=by == "outputs")
            allocation = everywhere(model, samples, Choice(bits, 8))
            start = time.perf_counter()
            made = quantize(model, allocation, samples, config)
            synchronise()
            seconds = time.perf_counter() - start
            found = evaluate(made, judged, reference=model)
            row = {
                "bits": bits,
                "error_of": by,
                "samples": options.samples,
                "images": sum(len(x) for x, _ in judged),
                "divergence": found.divergence,
                "agreement": found.agreement,
                "quantize_s": seconds,
            }
            rows.append(row)
            print(row, flush=True)
            save(f"weight-ranges-{options.network}", rows, options.out)


if __name__ == "__main__":
    main()
