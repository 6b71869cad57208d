"""Rounded networks, with one setting of quantize() or another.

python benchmarks/rounded.py moments --data FOLDER --network mobilenet_v2
python benchmarks/rounded.py ranges --data FOLDER --network resnet20 --bits 8 6 4

Five studies: ``channel-sizes`` (channels that depthwise layers read: as they are, or
equalized), ``feedback`` (each weight rounded to nearest, or with regard to the others),
``moments`` (what channels get back after rounding: nothing, the moments as read, or
shrunk), ``group-sizes`` (weights of a linear layer that share a scale: all of a
channel, or groups) and ``ranges`` (ways of finding the ranges of activations). All
weights have the same bits, and activations 8; in ``ranges`` it is the other way round,
and in ``group-sizes`` activations are float. FOLDER is as for ptq.py.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

from common import arguments, everywhere, save, synchronise
from ptq import NETWORKS, load, some_of

from ompq.bit_widths import GROUP_SIZES
from ompq.configs import QuantizeConfig
from ompq.evaluation import evaluate
from ompq.network.units import Choice
from ompq.packed.packed_files import save as save_packed
from ompq.quantization import moments
from ompq.quantization.pipeline import quantize


class Study(NamedTuple):
    """What is compared, and the defaults of its options."""

    column: str  # what the settings differ by
    settings: dict[str | bool | int, QuantizeConfig]  # by what that column says
    bits: tuple[int, ...]
    images: int | None = 500  # to judge by; None: all
    samples: tuple[int, ...] = (128,)
    activation: int = 8  # bits, where those of weights differ


STUDIES = {
    "channel-sizes": Study(
        "equalize",
        {value: QuantizeConfig(equalize=value) for value in (False, True)},
        (8, 6, 4),
        1000,
    ),
    "feedback": Study(
        "feedback",
        {value: QuantizeConfig(output_error=value) for value in (False, True)},
        (6, 4, 3, 2),
    ),
    "moments": Study(
        "moments",
        {
            "none": QuantizeConfig(restore_moments=False),
            "as read": QuantizeConfig(),
            "shrunk": QuantizeConfig(),
        },
        (8, 4),
        samples=(64, 256),
    ),
    "group-sizes": Study(
        "group_size",
        {
            size: QuantizeConfig(group_size=size or None)
            for size in (0, *reversed(GROUP_SIZES))
        },
        (4, 3),
        samples=(64,),
        activation=32,
    ),
    "ranges": Study(
        "method",
        {
            method: QuantizeConfig(activation_range=method)
            for method in ("fisher", "mse", "percentile", "minmax")
        },
        (8,),
        None,
        (256,),
    ),
}


def measure(model, samples, judged, choice: Choice, value, config) -> dict:
    """Quantize and evaluate."""
    allocation = everywhere(model, samples, choice)
    trusting = patch.object(moments, "_shrunk_mean", lambda changes: changes.mean(0))
    start = time.perf_counter()
    with trusting if value == "as read" else nullcontext():
        made = quantize(model, allocation, samples, config)
    synchronise()
    seconds = time.perf_counter() - start
    found = evaluate(made, judged, reference=model)
    return {
        "samples": len(samples),
        "images": found.count,
        "top1": found.top1,
        "drop": 100 * found.drop,
        "drop_error": 100 * found.drop_error,
        "divergence": found.divergence,
        "agreement": found.agreement,
        "bytes": packed_bytes(made),
        "quantize_s": seconds,
    }


def packed_bytes(network) -> int:
    """Return what a network takes in a packed file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "network.ompq.safetensors"
        save_packed(network, path)
        return path.stat().st_size


def main() -> None:
    parser = arguments(__doc__, NETWORKS)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--only", nargs="+", help="some of the study's settings")
    parser.add_argument("--bits", type=int, nargs="+")
    parser.add_argument("--samples", type=int, nargs="+")
    parser.add_argument("--images", type=int, help="to judge by")
    options = parser.parse_args()
    study, activations = STUDIES[options.study], options.study == "ranges"
    model, calibration, batches = load(options.network, options.data)
    images = options.images or study.images
    judged = some_of(batches, images) if images else batches
    rows = []
    for bits in options.bits or study.bits:
        choice = Choice(8, bits) if activations else Choice(bits, study.activation)
        for count in options.samples or study.samples:
            for value, config in study.settings.items():
                if options.only and str(value) not in options.only:
                    continue
                about = {"activation_bits" if activations else "bits": bits}
                found = measure(
                    model, calibration[:count], judged, choice, value, config
                )
                rows.append({**about, study.column: value, **found})
                print(rows[-1], flush=True)
                save(f"{options.study}-{options.network}", rows, options.out)


if __name__ == "__main__":
    main()
