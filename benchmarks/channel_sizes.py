"""Channels that depthwise layers read: sizes as they are, or nearer to one (default).

python benchmarks/channel_sizes.py --data FOLDER --network mobilenet_v2

Weights of the same bits everywhere, rounded to nearest; activations of 8 bits. FOLDER
is as for ptq.py.
"""

import argparse
from pathlib import Path

import torch
from common import RESULTS, everywhere, save
from moments import some_of
from ptq import NETWORKS, load

from ompq.evaluation import evaluate
from ompq.graph.units import Choice
from ompq.quantization.quantizing import QuantizeConfig, quantize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 6, 4])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--images", type=int, default=1000, help="to judge by")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, calibration, batches = load(options.network, options.data, device)
    samples, judged = calibration[: options.samples], some_of(batches, options.images)
    rows = []
    for bits in options.bits:
        for equalize in (False, True):
            config = QuantizeConfig(equalize=equalize)
            allocation = everywhere(model, samples, Choice(bits, 8))
            made = quantize(model, allocation, samples, config)
            found = evaluate(made, judged, reference=model)
            row = {
                "bits": bits,
                "equalize": equalize,
                "samples": options.samples,
                "images": sum(len(x) for x, _ in judged),
                "divergence": found.divergence,
                "agreement": found.agreement,
            }
            rows.append(row)
            print(row, flush=True)
            save(f"channel-sizes-{options.network}", rows, options.out)


if __name__ == "__main__":
    main()
