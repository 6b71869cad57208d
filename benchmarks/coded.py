"""What entropy-coded weights save: divergence and top-1 against bytes on disk.

python benchmarks/coded.py --data FOLDER --network resnet18 --sizes 1.5 2 2.5 3 4

FOLDER is as for ptq.py. Sizes are MiB of the packed file. The methods are

- ``fixed``: fixed widths. ``coded_bytes`` is what the file takes if the same codes are
  entropy-coded, without any loss.
- ``coded``: coded rates, and rounding learned without regard to bits; what takes too
  much is lowered in the end.
- ``rate-aware``: coded rates, and rounding learned with the price of bits.
- ``int8``: 8 bits everywhere, whatever the size.

Each row has the network that is only rounded (``nearest``), too, and what general
compressors make of the file; with ``--iterations 0`` nothing is learned. A row is
written when it is there, and not made again by the same commit. The packed files stay
in ``--work``.

With ``--epochs`` a network for CIFAR is then trained to give what the float network
gives, and ``rate-aware`` ones with ``--code-penalty``.
"""

import lzma
import time
from functools import cache
from itertools import product
from pathlib import Path

from common import DEVICE, Rows, arguments, claimed, everywhere, once, synchronise
from ptq import NETWORKS, load, some_of

import ompq
from ompq import Allocation, Choice, Plan
from ompq.datasets.named_data import load_data
from ompq.datasets.training_sets import training_data
from ompq.errors import InfeasibleBudgetError
from ompq.models.named_models import load_model

try:
    import zstandard
except ImportError:
    zstandard = None

METHODS = ("fixed", "coded", "rate-aware", "int8")
KEY = ("method", "size_mib", "iterations", "activation_bits", "epochs", "seed")


def scored(options, model, samples, storage: str) -> Plan:
    """Return a plan without limits, whose score is measured once for all sizes."""
    config = ompq.PlanConfig(
        choices=tuple(options.choices),
        storage=storage,
        activation_choices=(options.activation_bits,),
    )
    words = (options.network, storage, *options.choices, options.activation_bits)
    name = "-".join(map(str, ("plan", *words, options.samples)))

    def make(path: Path) -> None:
        ompq.plan(model, samples[: options.samples], "32bits", config).save(path)

    return Plan.load(once(options.work / f"{name}.json", make))


def chosen(options, model, samples, method: str, size: float) -> Plan | Allocation:
    """Return the bits, or the plan, that a method gives for a size."""
    if method == "int8":
        return everywhere(model, samples, Choice(8, options.activation_bits))
    storage = "fixed" if method == "fixed" else "coded"
    return scored(options, model, samples, storage).with_budget(f"{size}MiB")


def sizes_of(network, path: Path) -> dict:
    """Return what a network takes on disk, and what compressors make of it."""
    ompq.save(network, path)
    data = path.read_bytes()
    found = {"bytes": len(data), "xz_bytes": len(lzma.compress(data, preset=9))}
    if zstandard is not None:
        best = zstandard.ZstdCompressor(level=zstandard.MAX_COMPRESSION_LEVEL)
        found["zstd_bytes"] = len(best.compress(data))
    ompq.save(network, path, coded=True)
    return {**found, "coded_bytes": path.stat().st_size}


@cache
def training_images(network: str, folder: Path):
    """Return CIFAR's images, read once."""
    name, weights, _ = NETWORKS[network]
    named = load_model(name, str(folder / "weights" / f"{weights}.safetensors"))
    data = load_data(str(folder / "cifar10"), named, split="train")
    return training_data(data, device=DEVICE)


def trained(options, model, network, penalty: float, seed: int):
    """Return a network trained to give what the float network gives."""
    config = ompq.TrainConfig(
        epochs=options.epochs,
        distill=1.0,
        code_penalty=penalty,
        cuda_graph=DEVICE.type == "cuda",
        seed=seed,
    )
    images = training_images(options.network, options.data)
    return ompq.train(network, images, config, teacher=model)


def run_one(options, network, method: str, size: float, seed: int) -> dict:
    """Quantize, reconstruct, write and evaluate once."""
    model, samples, batches, reference = network
    plan = chosen(options, model, samples, method, size)
    allocation = plan if isinstance(plan, Allocation) else plan.allocation
    start = time.perf_counter()
    quantized = ompq.quantize(model, allocation, samples)
    synchronise()
    between = time.perf_counter()
    result = quantized
    if options.iterations:
        price = 0.0 if method == "coded" else options.price
        rounding = ompq.RoundingConfig(iterations=options.iterations, price=price)
        config = ompq.ReconstructConfig(
            rounding=rounding, seed=seed, merge=options.merge
        )
        result = ompq.reconstruct(quantized, model, samples, config)
    synchronise()
    end = time.perf_counter()
    if options.epochs:
        penalty = options.code_penalty if method == "rate-aware" else 0.0
        result = trained(options, model, result, penalty, seed)
    path = options.work / f"{options.network}-{method}-{size}-{seed}.ompq.safetensors"
    found = ompq.evaluate(result, batches, reference=model)
    nearest = ompq.evaluate(quantized, batches, reference=model)
    drop, error = found.drop_from(reference)
    ompq.save(quantized, path)
    nearest_bytes = path.stat().st_size
    return {
        "planned_bytes": None if plan is allocation else plan.totals["bytes"],
        **sizes_of(result, path),
        "divergence": found.divergence,
        "top1": found.top1,
        "drop": 100 * drop,
        "drop_error": 100 * error,
        "agreement": found.agreement,
        "float": reference.top1,
        "nearest_divergence": nearest.divergence,
        "nearest_top1": nearest.top1,
        "nearest_bytes": nearest_bytes,
        "quantize_s": between - start,
        "reconstruct_s": end - between,
        "bits": [choice.bits for choice in allocation.values()],
        "coded_units": sum(choice.rate > 0 for choice in allocation.values()),
    }


def show(row: dict) -> None:
    print(
        f"{row['method']:10s} {row['size_mib']} MiB seed {row['seed']}: "
        f"{row['bytes'] / 2**20:.4f} MiB on disk (losslessly coded "
        f"{row['coded_bytes'] / 2**20:.4f}), divergence {row['divergence']:.4f}, "
        f"top1 {row['top1']:.4f}, drop {row['drop']:.2f} +- {row['drop_error']:.2f}, "
        f"nearest {row['nearest_divergence']:.4f}, {row['reconstruct_s']:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = arguments(__doc__, NETWORKS, "out/coded")
    parser.add_argument("--sizes", type=float, nargs="+", required=True, help="MiB")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS[:3])
    default = ompq.PlanConfig().choices
    parser.add_argument("--choices", type=int, nargs="+", default=default)
    parser.add_argument("--activation-bits", type=int, default=8, help="32 for float")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--samples", type=int, default=64, help="for the scores")
    parser.add_argument("--images", type=int, default=1000, help="to calibrate with")
    parser.add_argument("--judged", type=int, default=10**9, help="images to judge by")
    steps = ompq.RoundingConfig().iterations
    parser.add_argument("--iterations", type=int, default=steps)
    price = ompq.RoundingConfig().price
    parser.add_argument("--price", type=float, default=price, help="of a bit")
    parser.add_argument("--merge", type=int, default=1, help="blocks, at most")
    parser.add_argument("--epochs", type=int, default=0, help="of training; CIFAR only")
    parser.add_argument("--code-penalty", type=float, default=1.0, help="in training")
    parser.add_argument("--name", default="coded")
    options = parser.parse_args()
    model, samples, batches = load(options.network, options.data)
    batches = some_of(batches, options.judged)
    reference = ompq.evaluate(model, batches)
    print(f"{options.network} float {reference.top1:.4f}", flush=True)
    network = (model, samples[: options.images], batches, reference)
    name = f"{options.name}-{options.network}"
    rows = Rows(
        name,
        KEY,
        out=options.out,
        work=options.work,
        choices=options.choices,
        images=options.images,
        judged=sum(len(x) for x, _ in batches),
        code_penalty=options.code_penalty,
        merge=options.merge,
        price=options.price,
    )
    # The first seed of everything comes first.
    for seed, size, method in product(options.seeds, options.sizes, options.methods):
        settings = (options.iterations, options.activation_bits, options.epochs)
        key = (method, size, *settings, seed)
        with claimed(options.work / "-".join(map(str, (name, *key)))) as mine:
            if not mine or rows.find(*key):
                continue
            try:
                row = run_one(options, network, method, size, seed)
            except InfeasibleBudgetError as error:
                print(f"{method} {size} MiB: {error}", flush=True)
                continue
            row = {**dict(zip(KEY, key, strict=True)), **row}
            rows.add(row)
            show(row)


if __name__ == "__main__":
    main()
