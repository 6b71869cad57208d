"""The paper's ablations of ORM, by the divergence of rounded networks.

python benchmarks/ablations.py --data FOLDER --network mobilenet_v2 --budgets 0.9 1.3
python benchmarks/ablations.py --data FOLDER --network resnet18 --budgets 4.0

Each row changes one setting of the paper's: the decreasing function, beta, the
granularity, centring or the number of samples. Bits of 2 to 4 are planned as
``paper-ptq`` does, and rounded as ``ompq.quantize`` does, so that rows differ by their
bits alone. ``ours`` is the default score. FOLDER is as for ptq.py, whose results show
that divergences of rounded networks rank bits much as reconstruction does.
"""

from dataclasses import replace

from common import arguments, save
from ptq import NETWORKS, load, some_of

import ompq
from ompq.scores.orthogonality import Orm

FUNCTIONS = ("-log(x)", "-x", "-x^3", "-exp(x)")
SETTINGS = {
    "the paper's": {},
    **{name: {"decreasing": name} for name in FUNCTIONS},
    **{f"beta {beta:g}": {"beta": beta} for beta in (0.1, 10.0, 100.0)},
    **{name: {"granularity": name} for name in ("block", "stage", "net")},
    "centred": {"centred": True},
}
SAMPLES = (8, 16)


def plans(model, samples, count: int, budget: str) -> dict[str, ompq.Plan]:
    """Return the plans of all rows."""
    base = ompq.PlanConfig.from_protocol("paper-ptq")
    found = {}
    for name, settings in SETTINGS.items():
        config = replace(base, score=Orm(ompq.scores.OrmSettings(**settings)))
        found[name] = ompq.plan(model, samples[:count], budget, config)
    for few in SAMPLES:
        found[f"{few} samples"] = ompq.plan(model, samples[:few], budget, base)
    ours = ompq.PlanConfig(choices=base.choices, accounting=base.accounting)
    return {**found, "ours": ompq.plan(model, samples[:64], budget, ours)}


def main() -> None:
    parser = arguments(__doc__, NETWORKS)
    parser.add_argument("--budgets", type=float, nargs="+", required=True)
    parser.add_argument("--samples", type=int, default=128, help="to calibrate with")
    parser.add_argument("--images", type=int, default=500, help="to judge by")
    options = parser.parse_args()
    model, samples, batches = load(options.network, options.data)
    judged = some_of(batches, options.images)
    count = 32 if options.network == "mobilenet_v2" else 64  # the paper's
    rows, measured = [], {}
    for size in options.budgets:
        budget = f"{size}{NETWORKS[options.network][2]}"
        made = plans(model, samples, count, budget)
        for name, plan in made.items():
            bits = plan.allocation
            if bits not in measured:
                network = ompq.quantize(model, plan, samples[: options.samples])
                measured[bits] = ompq.evaluate(network, judged, reference=model)
            found, paper = measured[bits], made["the paper's"].allocation
            row = {
                "budget": budget,
                "setting": name,
                "changed": sum(bits[unit] != paper[unit] for unit in bits),
                "average_bits": plan.totals["average_bits"],
                "mib": plan.totals["bytes"] / 2**20,
                "divergence": found.divergence,
                "agreement": found.agreement,
                "top1": found.top1,
                "images": found.count,
                "bits": [choice.weight for choice in bits.values()],
            }
            rows.append(row)
            print({k: v for k, v in row.items() if k != "bits"}, flush=True)
            save(f"ablations-rounded-{options.network}", rows, options.out)


if __name__ == "__main__":
    main()
