"""Post-training quantization on real images: which bits, how many iterations.

python benchmarks/ptq.py --data FOLDER --network mobilenet_v2 --budgets 1.5 1.3

FOLDER holds ``imagenet-calib``, ``imagenet-val`` (ImageFolders), ``cifar10`` and
``weights``. Sizes are MiB in the paper's accounting, or average bits for CIFAR.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from common import RESULTS, machine, synchronise

from ompq.allocation.solving import Allocation
from ompq.datasets.naming import load_data
from ompq.evaluation import evaluate
from ompq.graph.tracing import trace
from ompq.graph.units import Choice
from ompq.models.naming import load_model
from ompq.pipeline import PlanConfig, plan
from ompq.quantization.quantizing import QuantizeConfig, quantization_of, quantize
from ompq.reconstruction.reconstructing import ReconstructConfig, reconstruct
from ompq.reconstruction.settings import RoundingConfig

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


def allocations(options, model, samples, budget: float) -> Mapping[str, Allocation]:
    """Return the bits that each way of choosing gives for one budget."""
    paper = options.network != "resnet20"
    text = f"{budget}MiB" if paper else f"{budget}bits"
    config = PlanConfig(
        choices=tuple(options.choices),
        activation_choices=(options.activation_bits,),
        accounting="paper" if paper else "packed",
    )
    names = trace(model, samples[:1]).names
    found = {}
    for score in options.scores:
        if score == "published":
            bits = published(options.network, budget, names, options.activation_bits)
        elif score == "uniform":
            bits = uniform(config, model, samples, text)
        else:
            chosen = PlanConfig(**{**vars(config), "score": score})
            bits = plan(model, samples[: options.samples], text, chosen).allocation
        if bits is not None:
            found[score] = bits
    return found


def uniform(config, model, samples, budget: str) -> Allocation | None:
    """Return the largest width that fits everywhere."""
    for width in sorted(config.choices, reverse=True):
        alone = PlanConfig(**{**vars(config), "choices": (width,), "score": "random"})
        try:
            return plan(model, samples[:1], budget, alone).allocation
        except Exception as error:  # the next width may fit
            if "Infeasible" not in type(error).__name__:
                raise
    return None


def run_one(options, model, samples, batches, bits, seed):
    """Quantize, reconstruct and evaluate once."""
    start = time.perf_counter()
    quantized = quantize(model, bits, samples, QuantizeConfig())
    synchronise()
    between = time.perf_counter()
    rounding = RoundingConfig(
        iterations=options.iterations, **json.loads(options.rounding)
    )
    config = ReconstructConfig(rounding=rounding, seed=seed, loss=options.loss)
    result = reconstruct(quantized, model, samples, config)
    synchronise()
    end = time.perf_counter()
    errors = [vars(error) for error in quantization_of(result).errors]
    return {
        "nearest": evaluate(quantized, batches).top1 if seed == 0 else None,
        "quantize_s": between - start,
        "reconstruct_s": end - between,
        "errors": errors,
    }, evaluate(result, batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--budgets", type=float, nargs="+", required=True)
    parser.add_argument("--choices", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--activation-bits", type=int, default=8)
    parser.add_argument("--scores", nargs="+", default=["orm_distortion"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--samples", type=int, default=64, help="for the scores")
    parser.add_argument("--iterations", type=int, default=RoundingConfig().iterations)
    parser.add_argument("--rounding", default="{}", help="JSON of other settings")
    parser.add_argument("--loss", default="squared")
    parser.add_argument("--name", default="ptq")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, samples, batches = load(options.network, options.data, device)
    reference = evaluate(model, batches)
    print(f"{options.network} float {reference.top1:.4f}", flush=True)
    rows = []
    finished: dict[tuple, tuple] = {}  # equal bits are run once
    chosen = [
        (budget, score, bits)
        for budget in options.budgets
        for score, bits in allocations(options, model, samples, budget).items()
    ]
    for seed in options.seeds:
        for budget, score, bits in chosen:
            key = (tuple(bits.items()), seed)
            if key not in finished:
                finished[key] = run_one(options, model, samples, batches, bits, seed)
            row, evaluation = finished[key]
            drop, error = evaluation.drop_from(reference)
            widths = [choice.weight for choice in bits.values()]
            rows.append(
                {
                    "budget": budget,
                    "score": score,
                    "seed": seed,
                    "float": reference.top1,
                    "top1": evaluation.top1,
                    "drop": drop,
                    "drop_error": error,
                    "bits": widths,
                    **row,
                }
            )
            print(
                f"{budget} {score:18s} seed {seed} nearest {row['nearest']} "
                f"top1 {evaluation.top1:.4f} drop {100 * drop:.2f} +- "
                f"{100 * error:.2f} in {row['reconstruct_s']:.1f} s",
                flush=True,
            )
            settings = {
                k: str(v) for k, v in vars(options).items() if k not in ("data", "out")
            }
            options.out.mkdir(parents=True, exist_ok=True)
            target = options.out / f"{options.name}-{options.network}.json"
            data = {"settings": settings, "machine": machine(), "rows": rows}
            target.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
