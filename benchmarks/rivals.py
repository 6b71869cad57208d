"""The paper's rivals and ours at equal size, post-training and trained.

python benchmarks/rivals.py --data FOLDER --network resnet20 --minutes 6
python benchmarks/rivals.py --data FOLDER --network mobilenet_v2 --only ptq
python benchmarks/rivals.py --data FOLDER --network cifar-resnet18 --epochs 2

FOLDER is as for ``ptq.py`` and ``qat.py``. ``ptq`` rows have weights of ``--bits`` bits
on average, by the paper's accounting, and activations of 8 bits. ``qat`` rows (CIFAR)
start from one float network, have the bytes of uniform ``--bits`` bits with 8 in the
first and last layer, and inputs of ``--activation-bits``; OneBitwidth's start from
random weights and take ``--scratch-epochs``. Methods that cannot take just
these bytes (LQ-Nets' levels, RVQuant's outliers) say their own. All bits of ``ptq``
rows but BRECQ's and ZeroQ's are rounded our way, so that they compare the bits alone.

``ptq`` rows are written to ``rivals-NETWORK.json``, ``qat`` rows to
``rivals-qat-NETWORK.json``, each when it is there. A row is not made again by the same
commit, settings and float network: a run that was cut is just repeated. Rows of others
are dropped from the file, so name another ``--out`` to keep them. No row is begun after
``--minutes``. The same command may run several times at once with one ``--work``.
"""

import time
import traceback
import zlib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from common import DEVICE, Rows, arguments, claimed, commit, once, synchronise
from ptq import load
from qat import Bench
from safetensors.torch import load_file, save_file
from torch import nn

import ompq
from ompq import lab
from ompq.configs import QUANTIZE_PROTOCOLS
from ompq.errors import InfeasibleBudgetError
from ompq.layers import quantized_layers
from ompq.models.builtin_networks import CIFAR_NETWORKS
from ompq.quantization.record import network_totals
from ompq.workflow import learning_config

NETWORKS = ("resnet20", "cifar-resnet18", "resnet18", "mobilenet_v2")
# Those trained on CIFAR-10, and what ``qat.py`` calls them.
CIFAR = {"resnet20": "resnet20", "cifar-resnet18": "resnet18"}
ENDS = {"@first": (8, 8), "@last": (8, 8)}
MINMAX = ompq.QuantizeConfig(
    weight_range="minmax",
    activation_range="minmax",
    restore_moments=False,
    equalize=False,
)
# The published rates are for a hundred epochs and more; these suit few.
RATES = {"hawq-v3": 1e-3, "rvquant": 1e-3, "one-bitwidth": 0.1}
RATE = 0.02
# The options that rows of each kind depend on.
SHARED = ("bits", "iterations", "float_epochs", "limit", "test_limit")
SETTINGS = {
    "ptq": (*SHARED, "brecq_iterations", "episodes", "distilled", "distill_steps"),
    "qat": (
        *SHARED,
        "activation_bits",
        "channel_bits",
        "epochs",
        "scratch_epochs",
        "batch_size",
    ),
}


class Networks:
    """A float network with its data, and what is shared by the rows."""

    def __init__(self, options) -> None:
        self.options = options
        # What training the float network writes is no result of this benchmark.
        cifar = CIFAR.get(options.network)
        own = {**vars(options), "out": options.work, "network": cifar}
        self.bench = Bench(Namespace(**own)) if cifar else None
        if self.bench is not None:
            self.model, self.samples = self.bench.float_network(), self.bench.samples()
            self.test = self.bench.test
        else:
            found = load(options.network, options.data)
            self.model, self.samples, self.test = found
            self.samples = self.samples[: options.samples]
        limit = options.test_limit
        self.test = (
            self.test
            if not limit
            else [(x[:limit], y[:limit]) for x, y in self.test][:1]
        )

    def plan(
        self,
        config: ompq.PlanConfig,
        budget: str | None = None,
        samples: torch.Tensor | None = None,
    ) -> ompq.Plan:
        few = (self.samples if samples is None else samples)[:64]
        return ompq.plan(self.model, few, budget or f"{self.options.bits}bits", config)

    def shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.samples.shape
        return channels, height, width


# Post-training.
def ptq_plan(nets: Networks, method: str, seed: int) -> ompq.Plan:
    """Return the plan of a method, made now or before; only HAQ's follows the seed."""
    options, seed = nets.options, seed if method == "haq" else 0
    name = f"plan-{options.network}-{method}-{options.bits}-{options.episodes}-{seed}"
    path = options.work / f"{name}-{commit()}.json"
    return ompq.Plan.load(
        once(path, lambda new: new_plan(nets, method, seed).save(new))
    )


def new_plan(nets: Networks, method: str, seed: int) -> ompq.Plan:
    """Plan as a method does."""
    base = ompq.PlanConfig(choices=(2, 3, 4), accounting="paper")
    if method in ("uniform", "zeroq", "brecq, distilled"):
        return nets.plan(replace(base, choices=(nets.options.bits,), score="random"))
    if method == "hawq-v3":
        return nets.plan(replace(base, score="hessian"))
    if method == "brecq":
        return nets.plan(ompq.PlanConfig.from_protocol("brecq"))
    if method == "ours, distilled":
        return nets.plan(base, samples=distilled(nets, 0))
    if method == "paper":
        return nets.plan(ompq.PlanConfig.from_protocol("paper-ptq"))
    plan = nets.plan(base)
    if method == "haq":
        config = lab.ReinforceConfig(episodes=nets.options.episodes, seed=seed)
        return lab.reinforce(plan, nets.model, nets.samples[:256], config)
    return plan


def run_ptq(nets: Networks, method: str, seed: int) -> dict:
    """Quantize by a method and measure: rounded to nearest, and reconstructed."""
    options, samples = nets.options, nets.samples
    start = time.perf_counter()
    own = method.startswith("brecq")  # its quantizer and its reconstruction, too
    if method == "zeroq" or method.endswith("distilled"):
        samples = distilled(nets, seed)
    plan = ptq_plan(nets, method, seed)
    synchronise()
    searched = time.perf_counter() - start
    config = QUANTIZE_PROTOCOLS["brecq"] if own else ompq.QuantizeConfig()
    config = MINMAX if method == "zeroq" else config
    network = ompq.quantize(nets.model, plan, samples, config)
    nearest = ompq.evaluate(network, nets.test, reference=nets.model)
    if method != "zeroq":  # which rounds to nearest
        steps = options.brecq_iterations if own else options.iterations
        settings = learning_config(
            "brecq" if own else "ours", options.network, iterations=steps, seed=seed
        )
        network = ompq.reconstruct(network, nets.model, samples, settings)
    synchronise()
    return {
        **measured(nets, network),
        "bytes": plan.totals["bytes"],
        "average_bits": plan.totals["average_bits"],
        "widths": [choice.weight for choice in plan.allocation.values()],
        "nearest_divergence": nearest.divergence,
        "search_s": searched,
        "seconds": time.perf_counter() - start,
    }


def distilled(nets: Networks, seed: int) -> torch.Tensor:
    """Return images made from the network alone, now or before."""
    options = nets.options
    count, steps = options.distilled, options.distill_steps

    def make(path: Path) -> None:
        made = ompq.datasets.distilled_samples(
            nets.model, nets.shape(), count, steps=steps, batch_size=count, seed=seed
        )
        save_file({"images": made}, path)

    name = f"distilled-{options.network}-{count}-{steps}-{seed}-{commit()}"
    path = once(options.work / f"{name}.safetensors", make)
    return load_file(path)["images"].to(DEVICE)


PTQ = (
    "ours",
    "uniform",
    "paper",
    "hawq-v3",
    "zeroq",
    "ours, distilled",
    "brecq, distilled",
    "haq",
    "brecq",
)


def ptq_methods(nets: Networks) -> tuple[str, ...]:
    # The ImageNet weights at hand have their batch norms folded: nothing to distil.
    data_free = nets.options.network == "resnet20"
    return (
        PTQ
        if data_free
        else tuple(m for m in PTQ if "distilled" not in m and m != "zeroq")
    )


# Trained.
QAT = ("ours", "hawq-v3", "pact", "fracbits-pact", "lq-nets", "rvquant", "one-bitwidth")


def qat_plan(nets: Networks, method: str, seed: int) -> tuple[ompq.Plan, nn.Module]:
    """Return bits of the size that all have, and the float network they are for."""
    options, activations = nets.options, (nets.options.activation_bits,)
    base = ompq.PlanConfig(activation_choices=activations, pinned=ENDS)
    one = replace(base, choices=(options.bits,), score="random")
    uniform = nets.plan(one, "32bits")
    budget = f"{int(uniform.totals['bytes'])}B"
    if method == "ours":
        return nets.plan(replace(base, choices=(2, 3, 4, 5, 6, 8)), budget), nets.model
    if method == "hawq-v3":
        config = replace(ompq.PlanConfig.from_protocol("hawq-v3"), accounting="packed")
        try:
            return nets.plan(config, budget), nets.model
        except InfeasibleBudgetError:  # of its choices, 4 bits and 8, none is so small
            return uniform, nets.model
    if method == "one-bitwidth":

        def build(width: float) -> nn.Module:
            return CIFAR_NETWORKS[f"cifar:{CIFAR[options.network]}"](width=width).to(
                DEVICE
            )

        few, bits = nets.samples[:256], options.channel_bits
        found = lab.one_bitwidth(build, few, budget, bits, base, seed=seed)
        return found.plan, found.model
    return uniform, nets.model


def train_config(nets: Networks, method: str, seed: int) -> ompq.TrainConfig:
    """Return a method's recipe for few epochs; ours is that of ``qat.py``."""
    options = nets.options
    if method == "ours":
        base = ompq.TrainConfig(
            batch_norm="fold-and-train",
            distill=0.5,
            freeze_norm_epoch=options.epochs // 2,
        )
    else:
        base = ompq.TrainConfig.from_protocol(method)
    scratch = method == "one-bitwidth"
    return replace(
        base,
        epochs=options.scratch_epochs if scratch else options.epochs,
        batch_size=min(options.batch_size, len(nets.bench.train)),
        learning_rate=RATES.get(method, RATE),
        cuda_graph=DEVICE.type == "cuda" and not options.eager,
        report_steps=10_000,
        deterministic=False,
        seed=seed,
    )


def run_qat(nets: Networks, method: str, seed: int) -> dict:
    """Train by a method and measure; what has an integer form is measured in it."""
    start = time.perf_counter()
    plan, model = qat_plan(nets, method, seed)
    quantizing = QUANTIZE_PROTOCOLS.get(method, ompq.QuantizeConfig())
    network = ompq.quantize(model, plan, nets.samples, quantizing)
    if method == "ours":
        rounding = ompq.RoundingConfig(iterations=nets.options.iterations)
        settings = ompq.ReconstructConfig(rounding=rounding, seed=seed)
        network = ompq.reconstruct(network, model, nets.samples, settings)
    config = train_config(nets, method, seed)
    network = ompq.train(network, nets.bench.train, config, teacher=model)
    size = network_totals(network, plan)["bytes"]
    on_grids = not any(x.rounding for x in quantized_layers(network).values())
    if on_grids:
        network = ompq.finalize(network, nets.samples[:2])
    synchronise()
    bits = ompq.quantization_of(network).allocation
    return {
        **measured(nets, network),
        "bytes": size,
        "widths": [choice.weight for choice in bits.values()],
        "integers": on_grids,
        "seconds": time.perf_counter() - start,
    }


def measured(nets: Networks, network: nn.Module) -> dict:
    found = ompq.evaluate(network, nets.test, reference=nets.model)
    return {
        "top1": found.top1,
        "drop": 100 * found.drop,
        "drop_error": 100 * found.drop_error,
        "divergence": found.divergence,
    }


def run(nets: Networks, kind: str, rows: Rows, until: float) -> None:
    """Make the rows that are missing; the first seed of all methods comes first."""
    options = nets.options
    make: Callable[..., dict] = {"ptq": run_ptq, "qat": run_qat}[kind]
    methods = ptq_methods(nets) if kind == "ptq" else QAT
    for seed in options.seeds:
        for method in options.methods or methods:
            if method not in methods or rows.find(kind, method, seed) is not None:
                continue
            if time.monotonic() > until:
                print("time is up; run again for the rest", flush=True)
                return
            name = f"{rows.name}-{zlib.crc32(repr((kind, method, seed)).encode()):08x}"
            with claimed(options.work / name) as mine:
                if not mine or rows.find(kind, method, seed) is not None:
                    continue
                try:
                    row = make(nets, method, seed)
                except Exception:  # the others shall run whatever one of them does
                    print(f"{kind} {method} seed {seed} failed", flush=True)
                    traceback.print_exc()
                    continue
                rows.add({"kind": kind, "method": method, "seed": seed, **row})
                print(
                    f"{kind} {method:16s} seed {seed} {row['bytes'] / 1024:8.1f} KiB "
                    f"divergence {row['divergence']:.4f} top1 {row['top1']:.4f} drop "
                    f"{row['drop']:.2f} +- {row['drop_error']:.2f} "
                    f"in {row['seconds']:.1f} s",
                    flush=True,
                )


def main() -> None:
    parser = arguments(__doc__, NETWORKS, "out/rivals")
    parser.add_argument("--only", nargs="+", choices=["ptq", "qat"])
    parser.add_argument("--methods", nargs="+", choices=sorted({*PTQ, *QAT}))
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--activation-bits", type=int, default=4, help="of qat rows")
    parser.add_argument("--channel-bits", type=int, default=2, help="of one-bitwidth")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=500, help="a block")
    parser.add_argument("--brecq-iterations", type=int, default=1000, help="a block")
    parser.add_argument("--episodes", type=int, default=600, help="of HAQ")
    parser.add_argument("--distilled", type=int, default=128, help="images")
    parser.add_argument("--distill-steps", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--scratch-epochs", type=int, default=60, help="of one-bitwidth"
    )
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--float-epochs", type=int, default=25)
    parser.add_argument("--limit", type=int, help="training images, for a dry run")
    parser.add_argument("--test-limit", type=int)
    parser.add_argument("--minutes", type=float, default=1e6)
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    options.work.mkdir(parents=True, exist_ok=True)
    nets = Networks(options)
    kinds = ["ptq"] if nets.bench is None else ["ptq", "qat"]
    if options.network == "cifar-resnet18":
        kinds = ["qat"]  # as ``resnet18``, it is quantized with ImageNet's images
    reference = ompq.evaluate(nets.model, nets.test).top1
    print(f"{options.network} float {reference:.4f}", flush=True)
    for kind in options.only or kinds:
        if kind not in kinds:
            continue
        rows = Rows(
            f"rivals{'-qat' * (kind == 'qat')}-{options.network}",
            ("kind", "method", "seed"),
            out=options.out,
            work=options.work,
            float=reference,
            samples=len(nets.samples),
            **{name: getattr(options, name) for name in SETTINGS[kind]},
        )
        run(nets, kind, rows, until)


if __name__ == "__main__":
    main()
