"""Whether what refinement measures holds: gains of rounded and of reconstructed bits.

python benchmarks/gains.py --data FOLDER --network resnet18 --rows which-bits-9

Takes the bits that ptq.py has reconstructed and compares those of each score with the
default's as ``ompq.refine`` does: both rounded, sample by sample, on 500 held-out
calibration images. Beside it stands the gain after reconstruction on the test images.
"""

from statistics import mean

from common import RESULTS, arguments, save
from ptq import NETWORKS, load

import ompq
from ompq.measurement import Meter, split
from ompq.network.units import Choice
from ompq.samples import Samples
from ompq.untrusted_json import read_json


def main() -> None:
    parser = arguments(__doc__, NETWORKS)
    parser.add_argument("--rows", required=True, help="name of results of ptq.py")
    parser.add_argument("--scores", nargs="+", default=["refined", "published"])
    options = parser.parse_args()
    model, samples, _ = load(options.network, options.data)
    meter = Meter(model, *split(Samples.of(samples), ompq.RefineConfig().held_back))
    names = ompq.trace(model, samples[:1]).names
    path = RESULTS / f"{options.rows}-{options.network}.json"
    found: dict[tuple, dict[str, list[dict]]] = {}
    for row in read_json(path)["rows"]:
        column = found.setdefault((row["activation_bits"], row["budget"]), {})
        column.setdefault(row["score"], []).append(row)
    rows = []
    for (activation, budget), column in found.items():
        own, own_values = column["default"], None
        for score in options.scores:
            others = column.get(score, own)
            if others[0]["bits"] == own[0]["bits"]:
                continue

            def measured(bits: list[int], activation: int = activation):
                each = zip(names, bits, strict=True)
                chosen = {name: Choice(b, activation) for name, b in each}
                network = meter.quantized(ompq.Allocation(chosen))
                return meter.divergences(network)

            if own_values is None:
                own_values = measured(own[0]["bits"])
            less = own_values - measured(others[0]["bits"])
            learned, learned_own = (
                mean(row["divergence"] for row in each) for each in (others, own)
            )
            rows.append(
                {
                    "activation_bits": activation,
                    "budget": budget,
                    "score": score,
                    "rounded": float(own_values.mean()),
                    "gain": float(less.mean() / own_values.mean()),
                    "error": float(
                        less.std(ddof=1) / len(less) ** 0.5 / own_values.mean()
                    ),
                    "reconstructed": learned_own,
                    "reconstructed_gain": 1 - learned / learned_own,
                }
            )
            print(rows[-1], flush=True)
            save(f"gains-{options.network}-{options.rows}", rows, options.out)


if __name__ == "__main__":
    main()
