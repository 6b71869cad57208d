"""Networks rounded to nearest with one setting or another, side by side."""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from common import RESULTS, everywhere, save, synchronise
from ptq import NETWORKS, load

from ompq.evaluation import evaluate
from ompq.graph import Choice
from ompq.quantization import QuantizeConfig, quantize


def some_of(batches, images: int) -> list[tuple]:
    """Return about so many images, of all classes: these come in order."""
    every = max(1, sum(len(x) for x, _ in batches) // images)
    return [(x[::every], y[::every]) for x, y in batches]


def compare(
    name: str,
    column: str,
    settings: Mapping[str | bool, QuantizeConfig],
    *,
    bits: Sequence[int],
    images: int,
    description: str | None,
) -> None:
    """Quantize with each setting, evaluate, and save a row of each.

    Args:
        name: Of what is saved.
        column: What the settings differ by.
        settings: What is written in that column → the setting.
        bits: Of all weights, unless the command line says others; activations have 8.
        images: To judge by, unless the command line says otherwise.
        description: For the command line.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=bits)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--images", type=int, default=images, help="to judge by")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, calibration, batches = load(options.network, options.data, device)
    samples, judged = calibration[: options.samples], some_of(batches, options.images)
    rows = []
    for width in options.bits:
        for value, config in settings.items():
            allocation = everywhere(model, samples, Choice(width, 8))
            start = time.perf_counter()
            made = quantize(model, allocation, samples, config)
            synchronise()
            seconds = time.perf_counter() - start
            found = evaluate(made, judged, reference=model)
            row = {
                "bits": width,
                column: value,
                "samples": options.samples,
                "images": sum(len(x) for x, _ in judged),
                "divergence": found.divergence,
                "agreement": found.agreement,
                "quantize_s": seconds,
            }
            rows.append(row)
            print(row, flush=True)
            save(f"{name}-{options.network}", rows, options.out)
