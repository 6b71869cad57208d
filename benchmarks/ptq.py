"""Which bits decide well: post-training quantization on real images.

python benchmarks/ptq.py --data FOLDER --network mobilenet_v2 --budgets 1.5 1.3

FOLDER holds ``imagenet-calib``, ``imagenet-val`` (ImageFolders), ``cifar10`` and
``weights``. Sizes are MiB in the paper's accounting, or average bits for CIFAR.

Beside the product's scores stand ``published`` (the OMPQ authors' bit lists),
``uniform`` (the largest width that fits everywhere, often far below the budget) and
``filled`` (the list nearest to uniform that fills the budget). Every row says how many
bits and bytes it has. Networks are judged by divergence from float, with top-1 beside.
``--iterations 0`` only rounds. ``--plans`` measures plans that ``ompq plan -o`` wrote
instead. ``cifar-*`` are networks that ``qat.py --only float --work WORK`` has trained:
copy WORK/NAME.safetensors to FOLDER/weights/cifar_NAME.safetensors.

A row is written when it is there, and not made again by the same commit. The same
command may run several times at once with one ``--work``: each process takes what none
has taken.
"""

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from common import DEVICE, Rows, arguments, claimed, once, synchronise
from qat import NETWORKS as TRAINED

import ompq
from ompq import Allocation, Choice, Plan
from ompq.datasets.named_data import load_data
from ompq.models.named_models import load_model

PUBLISHED = Path(__file__).parent.parent / "tests/fixtures/published_bit_configs.json"
# Name → the network, its weights, its images, and the unit of its budgets.
NETWORKS = {
    "mobilenet_v2": ("torchvision:mobilenet_v2", "imagenet_mobilenet_v2", "MiB"),
    "resnet18": ("torchvision:resnet18", "imagenet_resnet18", "MiB"),
    "squeezenet": ("torchvision:squeezenet1_1", "imagenet_squeezenet1_1", "MiB"),
    "deit_tiny": (
        "timm:deit_tiny_patch16_224",
        "imagenet_deit_tiny_patch16_224",
        "MiB",
    ),
    "resnet20": ("cifar:resnet20", "cifar_resnet20", "bits"),
    "resnet56": ("cifar:resnet56", "cifar_resnet56", "bits"),
    **{
        f"cifar-{name}": (network, f"cifar_{name}", "bits")
        for name, (network, weights) in TRAINED.items()
        if weights is None
    },
}


def load(name: str, folder: Path):
    """Return the network, calibration samples and test batches, all on the device."""
    network, weights, unit = NETWORKS[name]
    model = load_model(network, str(folder / "weights" / f"{weights}.safetensors"))
    if unit == "MiB":
        calibration = load_data(str(folder / "imagenet-calib"), model)
        test = load_data(str(folder / "imagenet-val"), model)
    else:
        calibration = load_data(str(folder / "cifar10"), model, split="train")
        test = load_data(str(folder / "cifar10"), model, split="test")
    samples = calibration.samples(1000).to(DEVICE)
    batches = [(x.to(DEVICE), y.to(DEVICE)) for x, y in test.batches(batch_size=250)]
    return model.module.to(DEVICE).eval(), samples, batches


def some_of(batches, images: int) -> list[tuple]:
    """Return about so many images, of all classes: these come in order."""
    every = max(1, sum(len(x) for x, _ in batches) // images)
    return [(x[::every], y[::every]) for x, y in batches]


def published(network: str, size: float, names, activation: int) -> Allocation | None:
    """Return the published bits for the size, or None."""
    for scheme in json.loads(PUBLISHED.read_text()):
        same = scheme["model"] == network.replace("_", "")
        ours = scheme["source"] == "ompq" and scheme["method"] == "PTQ"
        if same and ours and abs(scheme["published_size"] - size) < 0.051:
            bits = dict(zip(scheme["layers"], scheme["weight_bits"], strict=True))
            return Allocation({n: Choice(bits[n], activation) for n in names})
    return None


def filled(given) -> np.ndarray:
    """Score that keeps all widths alike: the least sum of squared missing bits."""
    widest = max(choice.weight for choice in given.choices)
    missing = [float(widest - choice.weight) ** 2 for choice in given.choices]
    return np.outer([unit.weights for unit in given.graph.units], missing)


def allocations(options, model, samples, activation: int) -> list[tuple]:
    """Return budget, score, bits and size of what each score gives for each budget."""
    found = []
    for score in options.scores:
        plan = scored(options, model, samples, score)
        for budget in options.budgets:
            if score in REFINED:
                plan = refined(options, model, samples, score, budget)
            bits = chosen_bits(options, plan, score, budget)
            if bits is None:
                continue
            totals = replace(plan, allocation=bits).totals
            size = {
                "mib": totals["bytes"] / 2**20,
                "average_bits": totals["average_bits"],
            }
            if score in REFINED:
                size["measured"] = [
                    (one.name, one.divergence, one.error) for one in plan.measured
                ]
            each = {n: Choice(c.weight, activation) for n, c in bits.items()}
            if options.image_bits:
                first = next(iter(each))
                each[first] = Choice(each[first].weight, options.image_bits)
            found.append((budget, score, Allocation(each), size))
    return found


def planned(paths: Sequence[Path]) -> list[tuple]:
    """Return budget, name, bits and size of plans."""
    found = []
    for path in paths:
        plan = Plan.load(path)
        totals = plan.totals
        size = {
            "mib": totals["bytes"] / 2**20,
            "average_bits": totals["average_bits"],
            "bit_ops": totals["bit_ops"],
        }
        found.append((str(plan.budget), path.stem, plan.allocation, size))
    return found


def chosen_bits(options, plan: Plan, score: str, budget: float) -> Allocation | None:
    """Return what a score, or a list without one, gives for a budget."""
    unit = NETWORKS[options.network][2]
    if score == "published":
        activation = plan.choices[0].activation
        return published(options.network, budget, plan.graph.names, activation)
    if score in REFINED:
        return plan.allocation
    if score != "uniform":
        return plan.with_budget(f"{budget}{unit}").allocation
    for choice in sorted(plan.choices, key=lambda c: -c.weight):
        everywhere = Allocation(dict.fromkeys(plan.graph.names, choice))
        totals = replace(plan, allocation=everywhere).totals
        sizes = {"bits": totals["average_bits"], "MiB": totals["bytes"] / 2**20}
        if sizes[unit] <= budget:
            return everywhere
    return None


# Name → how it measures. Its candidates come from the default score's plan.
REFINED = {"refined": "round", "refined-reconstruct": "reconstruct"}


def refined(options, model, samples, score: str, budget: float) -> Plan:
    """Return the plan for a budget, refined by measuring whole allocations."""
    start = scored(options, model, samples, "default")
    unit = NETWORKS[options.network][2]
    config = ompq.RefineConfig(by=REFINED[score], count=options.measurements)
    settings = (*options.choices, budget, f"a{options.activation_bits[0]}")
    of = "-".join([options.network, score, *map(str, settings)])

    def make(path: Path) -> None:
        plan = start.with_budget(f"{budget}{unit}")
        ompq.refine(plan, model, samples, config).save(path)

    return Plan.load(once(options.work / f"refined-{of}.json", make))


def scored(options, model, samples, score: str) -> Plan:
    """Return a plan without limits, whose score is measured once for all budgets."""
    own = {"filled": filled, "uniform": "random", "published": "random"}
    default = ompq.PlanConfig().score
    own |= dict.fromkeys(("default", *REFINED), default)
    config = ompq.PlanConfig(
        choices=tuple(options.choices),
        activation_choices=(options.activation_bits[0],),
        accounting="packed" if NETWORKS[options.network][2] == "bits" else "paper",
        score=own.get(score, score),
    )
    count = options.samples
    settings = (*options.choices, count, f"a{options.activation_bits[0]}")
    of = "-".join([options.network, score, *map(str, settings)])

    def make(path: Path) -> None:
        ompq.plan(model, samples[:count], "32bits", config).save(path)

    return Plan.load(once(options.work / f"plan-{of}.json", make))


def run_one(options, network, bits, seed: int, iterations: int) -> dict:
    """Quantize, reconstruct and evaluate once."""
    model, samples, batches, reference, held_out = network
    start = time.perf_counter()
    quantizing = ompq.QuantizeConfig(**json.loads(options.quantizing))
    quantized = ompq.quantize(model, bits, samples, quantizing)
    synchronise()
    between = time.perf_counter()
    result = quantized
    if iterations:
        rounding = ompq.RoundingConfig(
            iterations=iterations, **json.loads(options.rounding)
        )
        config = ompq.ReconstructConfig(
            rounding=rounding,
            tuning=ompq.TuningConfig(**json.loads(options.tuning)),
            seed=seed,
            loss=options.loss,
            merge=options.merge,
        )
        result = ompq.reconstruct(quantized, model, samples, config)
    synchronise()
    end = time.perf_counter()
    found = ompq.evaluate(result, batches, reference=model)
    nearest = ompq.evaluate(quantized, batches, reference=model)
    drop, error = found.drop_from(reference)
    kept = [e.block for e in ompq.quantization_of(result).errors if not e.improved]
    return {
        "seed": seed,
        "iterations": iterations,
        "activation_bits": list(bits.values())[-1].activation,
        "float": reference.top1,
        "nearest": nearest.top1,
        "nearest_divergence": nearest.divergence,
        "top1": found.top1,
        "drop": 100 * drop,
        "drop_error": 100 * error,
        "divergence": found.divergence,
        "agreement": found.agreement,
        "not_improved": kept,
        "held_out_divergence": held_out_divergence(result, model, held_out),
        "quantize_s": between - start,
        "reconstruct_s": end - between,
    }


def held_out_divergence(quantized, model, held_out) -> float | None:
    """Return the divergence on calibration images that the network has not seen.

    Settings can be chosen by it without a look at the test images.
    """
    if not len(held_out):
        return None
    nothing = torch.zeros(len(held_out), dtype=torch.long, device=held_out.device)
    return ompq.evaluate(quantized, [(held_out, nothing)], reference=model).divergence


KEY = ("activation_bits", "budget", "score", "iterations", "seed")


def show(row: dict) -> None:
    print(
        f"A{row['activation_bits']} {row['budget']} {row['score']:18s} "
        f"{row['iterations']} iterations seed {row['seed']} "
        f"divergence {row['divergence']:.4f} (nearest {row['nearest_divergence']:.4f}) "
        f"top1 {row['top1']:.4f} drop {row['drop']:.2f} +- {row['drop_error']:.2f} "
        f"in {row['reconstruct_s']:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = arguments(__doc__, NETWORKS, "out/ptq")
    deciding = parser.add_mutually_exclusive_group(required=True)
    deciding.add_argument("--budgets", type=float, nargs="+")
    deciding.add_argument("--plans", type=Path, nargs="+", help="instead of scores")
    parser.add_argument("--choices", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--activation-bits", type=int, nargs="+", default=[8])
    parser.add_argument("--scores", nargs="+", default=["default"])
    parser.add_argument("--measurements", type=int, default=20, help="of refinement")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--samples", type=int, default=64, help="for the scores")
    default = ompq.RoundingConfig().iterations
    parser.add_argument("--iterations", type=int, nargs="+", default=[default])
    parser.add_argument(
        "--images",
        type=int,
        default=1000,
        help="to calibrate with; the rest of 1,000 is held out",
    )
    parser.add_argument("--views", type=int, default=1, help="of each image")
    parser.add_argument("--quantizing", default="{}", help="JSON of other settings")
    parser.add_argument("--rounding", default="{}", help="JSON of other settings")
    parser.add_argument("--tuning", default="{}", help="JSON of settings of tuning")
    parser.add_argument("--loss", default="squared")
    parser.add_argument("--merge", type=int, default=1, help="blocks, at most")
    parser.add_argument("--image-bits", type=int, help="of the first layer's input")
    parser.add_argument("--name", default="ptq")
    options = parser.parse_args()
    model, samples, batches = load(options.network, options.data)
    seen = ompq.datasets.image_views(samples[: options.images], options.views)
    held_out = samples[options.images :]
    reference = ompq.evaluate(model, batches)
    print(f"{options.network} float {reference.top1:.4f}", flush=True)
    name = f"{options.name}-{options.network}"
    rows = Rows(
        name,
        KEY,
        out=options.out,
        work=options.work,
        choices=options.choices,
        quantizing=options.quantizing,
        rounding=options.rounding,
        tuning=options.tuning,
        loss=options.loss,
        merge=options.merge,
        image_bits=options.image_bits,
        images=options.images,
        views=options.views,
    )
    chosen = {
        activation: planned(options.plans)
        if options.plans
        else allocations(options, model, samples, activation)
        for activation in options.activation_bits
    }
    network = (model, seen, batches, reference, held_out)
    # The first seed of everything comes first.
    for iterations, seed in product(options.iterations, options.seeds):
        for activation, found in chosen.items():
            for bits in dict.fromkeys(tuple(bits.items()) for _, _, bits, _ in found):
                same = [
                    (b, s, size)
                    for b, s, other, size in found
                    if tuple(other.items()) == bits
                ]
                keys = [(activation, b, s, iterations, seed) for b, s, _ in same]
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
                    if options.plans:
                        row["activation_bits"] = activation
                        row["input_bits"] = [choice.activation for _, choice in bits]
                    new = [
                        {**row, "budget": budget, "score": score, **size}
                        for (budget, score, size), known in zip(
                            same, written, strict=True
                        )
                        if not known
                    ]
                    rows.add(*new)
                    for one in new:
                        show(one)


if __name__ == "__main__":
    main()
