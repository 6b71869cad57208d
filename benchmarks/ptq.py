"""Post-training quantization on real images: which bits, how many iterations.

python benchmarks/ptq.py --data FOLDER --network mobilenet_v2 --budgets 1.5 1.3

FOLDER holds ``imagenet-calib``, ``imagenet-val`` (ImageFolders), ``cifar10`` and
``weights``. Sizes are MiB in the paper's accounting, or average bits for CIFAR.

A row is written when it is there, and not made again. The same command may run several
times at once with one ``--work``: each process takes what none has taken.
"""

import argparse
import json
import time
import zlib
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from common import RESULTS, synchronise
from sharing import Rows, claimed, once

from ompq.allocation.solver import Allocation
from ompq.datasets.images import image_views
from ompq.datasets.sources import load_data
from ompq.evaluation import evaluate
from ompq.graph import Choice, trace
from ompq.models import load_model
from ompq.plans import Plan, PlanConfig, plan
from ompq.quantization import QuantizeConfig, quantization_of, quantize
from ompq.reconstruction import ReconstructConfig, reconstruct
from ompq.reconstruction.rounding import RoundingConfig

PUBLISHED = Path(__file__).parent.parent / "tests/fixtures/published_bit_configs.json"
NETWORKS = {
    "mobilenet_v2": ("torchvision:mobilenet_v2", "imagenet_mobilenet_v2", "imagenet"),
    "resnet18": ("torchvision:resnet18", "imagenet_resnet18", "imagenet"),
    "resnet20": ("cifar:resnet20", "cifar_resnet20", "cifar10"),
}


def load(name: str, folder: Path, device: torch.device):
    """Return the network, calibration samples and test batches, all on the device."""
    network, weights, kind = NETWORKS[name]
    model = load_model(network, str(folder / "weights" / f"{weights}.safetensors"))
    if kind == "imagenet":
        calibration = load_data(str(folder / "imagenet-calib"), model)
        test = load_data(str(folder / "imagenet-val"), model)
    else:
        calibration = load_data(str(folder / "cifar10"), model, split="train")
        test = load_data(str(folder / "cifar10"), model, split="test")
    samples = calibration.samples(1000).to(device)
    batches = [(x.to(device), y.to(device)) for x, y in test.batches(batch_size=250)]
    return model.module.to(device).eval(), samples, batches


def published(network: str, size: float, names, activation: int) -> Allocation | None:
    """Return the published bits for the size, or None."""
    for scheme in json.loads(PUBLISHED.read_text()):
        same = scheme["model"] == network.replace("_", "")
        ours = scheme["source"] == "ompq" and scheme["method"] == "PTQ"
        if same and ours and abs(scheme["published_size"] - size) < 0.051:
            bits = dict(zip(scheme["layers"], scheme["weight_bits"], strict=True))
            return Allocation({n: Choice(bits[n], activation) for n in names})
    return None


def allocations(options, model, samples, activation: int) -> list[tuple]:
    """Return budget, score and the bits that this score gives for it."""
    found = []
    for score in options.scores:
        known = score != "published"
        made = scored(options, model, samples, score) if known else None
        for budget in options.budgets:
            if made is None:
                names = trace(model, samples[:1]).names
                bits = published(options.network, budget, names, activation)
            elif score == "uniform":
                bits = uniform(options, made, budget)
            else:
                bits = made.with_budget(budget_text(options, budget)).allocation
            if bits is not None:
                each = {n: Choice(c.weight, activation) for n, c in bits.items()}
                found.append((budget, score, Allocation(each)))
    return found


def scored(options, model, samples, score: str) -> Plan:
    """Return a plan without limits, whose score is measured once for all budgets."""
    config = PlanConfig(
        choices=tuple(options.choices),
        accounting="packed" if options.network == "resnet20" else "paper",
        score="random" if score == "uniform" else score,
    )
    count = options.samples
    of = "-".join([options.network, score, *map(str, options.choices), str(count)])

    def make(path: Path) -> None:
        plan(model, samples[:count], "32bits", config).save(path)

    return Plan.load(once(options.work / f"plan-{of}.json", make))


def budget_text(options, budget: float) -> str:
    return f"{budget}{'bits' if options.network == 'resnet20' else 'MiB'}"


def uniform(options, plan: Plan, budget: float) -> Allocation | None:
    """Return the largest width that fits everywhere."""
    for choice in sorted(plan.choices, key=lambda c: -c.weight):
        everywhere = Allocation(dict.fromkeys(plan.graph.names, choice))
        totals = replace(plan, allocation=everywhere).totals
        sizes = {"bits": totals["average_bits"], "MiB": totals["bytes"] / 2**20}
        if sizes["bits" if options.network == "resnet20" else "MiB"] <= budget:
            return everywhere
    return None


def run_one(options, network, bits, seed: int, iterations: int) -> dict:
    """Quantize, reconstruct and evaluate once."""
    model, samples, batches, reference = network
    start = time.perf_counter()
    quantized = quantize(model, bits, samples, QuantizeConfig())
    synchronise()
    between = time.perf_counter()
    rounding = RoundingConfig(iterations=iterations, **json.loads(options.rounding))
    config = ReconstructConfig(rounding=rounding, seed=seed, loss=options.loss)
    result = reconstruct(quantized, model, samples, config)
    synchronise()
    end = time.perf_counter()
    found = evaluate(result, batches, reference=model)
    drop, error = found.drop_from(reference)
    kept = [e.block for e in quantization_of(result).errors if not e.improved]
    return {
        "seed": seed,
        "iterations": iterations,
        "activation_bits": next(iter(bits.values())).activation,
        "float": reference.top1,
        "nearest": evaluate(quantized, batches).top1 if seed == 0 else None,
        "top1": found.top1,
        "drop": 100 * drop,
        "drop_error": 100 * error,
        "divergence": found.divergence,
        "agreement": found.agreement,
        "not_improved": kept,
        "quantize_s": between - start,
        "reconstruct_s": end - between,
    }


KEY = ("activation_bits", "budget", "score", "iterations", "seed")


def show(row: dict) -> None:
    nearest = "" if row["nearest"] is None else f"nearest {row['nearest']:.4f} "
    print(
        f"A{row['activation_bits']} {row['budget']} {row['score']:18s} "
        f"{row['iterations']} iterations seed {row['seed']} {nearest}"
        f"top1 {row['top1']:.4f} drop {row['drop']:.2f} +- {row['drop_error']:.2f} "
        f"in {row['reconstruct_s']:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--budgets", type=float, nargs="+", required=True)
    parser.add_argument("--choices", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--activation-bits", type=int, nargs="+", default=[8])
    parser.add_argument("--scores", nargs="+", default=["orm_distortion"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--samples", type=int, default=64, help="for the scores")
    default = RoundingConfig().iterations
    parser.add_argument("--iterations", type=int, nargs="+", default=[default])
    parser.add_argument("--images", type=int, default=1000, help="to calibrate with")
    parser.add_argument("--views", type=int, default=1, help="of each image")
    parser.add_argument("--rounding", default="{}", help="JSON of other settings")
    parser.add_argument("--loss", default="squared")
    parser.add_argument("--name", default="ptq")
    parser.add_argument("--work", type=Path, default=Path("out/ptq"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, samples, batches = load(options.network, options.data, device)
    seen = image_views(samples[: options.images], options.views)
    reference = evaluate(model, batches)
    print(f"{options.network} float {reference.top1:.4f}", flush=True)
    name = f"{options.name}-{options.network}"
    rows = Rows(
        name,
        KEY,
        out=options.out,
        work=options.work,
        choices=options.choices,
        rounding=options.rounding,
        loss=options.loss,
        images=options.images,
        views=options.views,
    )
    chosen = {
        activation: allocations(options, model, samples, activation)
        for activation in options.activation_bits
    }
    network = (model, seen, batches, reference)
    # The first seed of everything comes first.
    for iterations, seed in product(options.iterations, options.seeds):
        for activation, found in chosen.items():
            for bits in dict.fromkeys(tuple(bits.items()) for *_, bits in found):
                same = [(b, s) for b, s, other in found if tuple(other.items()) == bits]
                keys = [(activation, b, s, iterations, seed) for b, s in same]
                digest = zlib.crc32(repr((bits, iterations, seed)).encode())
                with claimed(options.work / f"{name}-{digest:08x}") as mine:
                    written = [rows.find(*key) for key in keys]
                    if not mine or all(written):
                        continue
                    # Another score may have found the same bits in an earlier run.
                    row = next(filter(None, written), None) or run_one(
                        options, network, Allocation(dict(bits)), seed, iterations
                    )
                    row = {**row, "bits": [choice.weight for _, choice in bits]}
                    new = [
                        {**row, "budget": budget, "score": score}
                        for (budget, score), known in zip(same, written, strict=True)
                        if not known
                    ]
                    rows.add(*new)
                    for one in new:
                        show(one)


if __name__ == "__main__":
    main()
