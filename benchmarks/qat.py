"""Quantization-aware training on CIFAR-10: drop, uniform bits, PTQ, engine, speed.

python benchmarks/qat.py --data FOLDER --network resnet20 --only float a b c speed
python benchmarks/qat.py --data FOLDER --network resnet20 --only engine  # on the CPU

FOLDER holds ``cifar10`` (train and test folders) and ``weights``. Every piece writes
its own JSON as it goes; float networks, decoded images and trained networks are kept
in ``--work``, so that pieces can be run one by one, in any number of calls.
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from common import RESULTS, alternating, median_ratio, save, synchronise
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import ompq
from ompq.datasets.naming import load_data
from ompq.datasets.training_sets import HeldSet, training_data
from ompq.integer.network import IntegerNetwork
from ompq.models.naming import load_model
from ompq.training.runs import Run

NETWORKS = {
    "resnet20": ("cifar:resnet20", "cifar_resnet20"),
    "resnet18": ("cifar:resnet18", None),
}
# Float training: epochs, batch size, highest rate.
FLOAT = {"resnet20": (40, 256, 0.1), "resnet18": (30, 512, 0.4)}
# Choices of weights, activations, uniform bits of the same size.
ROWS = {
    "a": ((4, 5, 6, 7, 8), 8, 5),
    "b": ((4, 5, 6, 7, 8), 6, 5),
    "c": ((2, 3, 4), 4, 3),
}
LIMITS = {"a": 0.2, "b": 0.4, "c": 1.0}
ENDS = {"@first": (8, 8), "@last": (8, 8)}


class Bench:
    """Network, data and options, on the device."""

    def __init__(self, options) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.name, weights = NETWORKS[options.network]
        file = "none"
        if weights is not None:
            file = str(options.data / "weights" / f"{weights}.safetensors")
        self.named = load_model(self.name, file)
        options.work.mkdir(parents=True, exist_ok=True)
        self.train = self._train_set()
        test = load_data(options.data / "cifar10", self.named, split="test")
        found = list(test.batches(batch_size=500, limit=options.test_limit))
        self.test = [(x.to(self.device), y.to(self.device)) for x, y in found]

    def _train_set(self) -> HeldSet:
        cache = self.options.work / "cifar10-train.safetensors"
        if not cache.exists():
            start = time.perf_counter()
            data = load_data(self.options.data / "cifar10", self.named, split="train")
            held = training_data(data)
            save_file({"inputs": held.inputs, "targets": held.targets}, cache)
            print(f"decoded images in {time.perf_counter() - start:.1f} s", flush=True)
        stored = load_file(cache, device=str(self.device))
        inputs, targets = stored["inputs"], stored["targets"]
        if self.options.limit:
            order = torch.randperm(
                len(targets), generator=torch.Generator().manual_seed(0)
            )
            picked = order[: self.options.limit].to(self.device)
            inputs, targets = inputs[picked], targets[picked]
        mean = 255 * torch.tensor(self.named.mean, device=self.device)
        std = 255 * torch.tensor(self.named.std, device=self.device)
        return HeldSet(inputs, targets, 4, mean, std)

    def samples(self) -> torch.Tensor:
        """Return calibration images as they are, without augmentation."""
        count = min(self.options.samples, len(self.train))
        held = replace(self.train, inputs=self.train.inputs[:, 4:-4, 4:-4], padding=0)
        found, _ = next(held.epoch(0, batch_size=count, seed=1))
        return found.contiguous()

    def float_network(self) -> nn.Module:
        """Return the float network, trained on these images now or before."""
        path = self.options.work / f"{self.options.network}.safetensors"
        if not path.exists():
            train_float(self, path)
        self.named.module.load_state_dict(load_file(path))
        return self.named.module.to(self.device).eval()


def train_float(bench: Bench, path: Path) -> None:
    """Train the float network: SGD, a rise and a linear fall, bfloat16."""
    epochs, batch, highest = FLOAT[bench.options.network]
    epochs = bench.options.float_epochs or epochs
    batch = min(batch, len(bench.train))
    model = bench.named.module.to(bench.device, memory_format=torch.channels_last)
    before = ompq.evaluate(model.eval(), bench.test).top1
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    cuda = bench.device.type == "cuda"
    optimizer = torch.optim.SGD(
        groups, lr=highest, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    steps = epochs * (len(bench.train) // batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, highest, total_steps=steps, pct_start=0.2, anneal_strategy="linear"
    )
    torch.backends.cudnn.benchmark = True
    start = time.perf_counter()
    for epoch in range(epochs):
        model.train()
        for x, y in bench.train.epoch(epoch, batch_size=batch):
            with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
                loss = F.cross_entropy(model(x).float(), y, label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            rate.step()
    synchronise()
    seconds = time.perf_counter() - start
    torch.backends.cudnn.benchmark = False
    after = ompq.evaluate(model.eval(), bench.test)
    print(f"float {before:.4f} -> {after.top1:.4f} in {seconds:.1f} s", flush=True)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, path)
    row = {
        "network": bench.options.network,
        "before": before,
        "top1": after.top1,
        "interval": after.interval,
        "images": after.count,
        "epochs": epochs,
        "seconds": seconds,
    }
    save(f"qat-{bench.options.network}-float", [row], bench.options.out)


def allocations(model, samples, row: str):
    """Return the planned bits and uniform ones of the same size."""
    choices, activation, width = ROWS[row]
    config = ompq.PlanConfig(
        choices=choices, activation_choices=(activation,), pinned=ENDS
    )
    few = samples[:64]
    alone = replace(config, choices=(width,), score="random")
    uniform = ompq.plan(model, few, "32bits", alone)
    budget = f"{math.ceil(uniform.totals['average_bits'] * 1e4) / 1e4}bits"
    return {"planned": ompq.plan(model, few, budget, config), "uniform": uniform}


def run_row(bench: Bench, row: str) -> None:
    """PTQ, then QAT for every seed, of planned and of uniform bits."""
    options, model, samples = bench.options, bench.float_network(), bench.samples()
    reference = ompq.evaluate(model, bench.test)
    print(f"float {reference.top1:.4f}", flush=True)
    rows = []
    for bits, plan in allocations(model, samples, row).items():
        start = time.perf_counter()
        rounding = ompq.RoundingConfig(iterations=options.iterations)
        config = ompq.ReconstructConfig(rounding=rounding)
        first = ompq.quantize(model, plan, samples)
        first = ompq.reconstruct(first, model, samples, config)
        synchronise()
        about = {
            "row": row,
            "bits": bits,
            "average_bits": plan.totals["average_bits"],
            "bytes": plan.totals["bytes"],
            "widths": [choice.weight for choice in plan.allocation.values()],
            "float": reference.top1,
            "limit": LIMITS[row],
        }
        measured = measure(bench, first, reference, start)
        rows.append({**about, "method": "ptq", "seed": 0, **measured})
        show(rows[-1])
        for seed in options.seeds:
            start = time.perf_counter()
            trained = ompq.train(first, bench.train, train_config(options, seed, bench),
                                 teacher=model)  # fmt: skip
            synchronise()
            seconds = time.perf_counter() - start
            settled = ompq.settle(trained, samples[:2])
            measured = measure(bench, settled, reference, time.perf_counter())
            unsettled = ompq.evaluate(trained, bench.test).top1
            more = {"seconds": seconds, "unsettled": unsettled}
            rows.append({**about, "method": "qat", "seed": seed, **measured, **more})
            show(rows[-1])
            file = f"{options.network}-{row}-{bits}-{seed}.ompq.safetensors"
            ompq.save(settled, options.work / file, network=bench.name)
            settings = {"training": train_config(options, seed, bench).__dict__}
            save(f"qat-{options.network}-{row}", rows, options.out, **settings)


def train_config(options, seed: int, bench: Bench) -> ompq.TrainConfig:
    return ompq.TrainConfig(
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        step_rate=options.step_rate,
        batch_norm=options.batch_norm,
        freeze_norm_epoch=options.epochs // 2,
        distill=options.distill,
        temperature=options.temperature,
        precision=options.precision,
        compile=options.step == "compile",
        cuda_graph=options.step == "graph" and bench.device.type == "cuda",
        report_steps=10_000,
        deterministic=False,
        seed=seed,
    )


def measure(bench: Bench, network, reference, start: float) -> dict:
    seconds = time.perf_counter() - start
    found = ompq.evaluate(network, bench.test)
    drop, error = found.drop_from(reference)
    return {
        "top1": found.top1,
        "drop": 100 * drop,
        "drop_error": 100 * error,
        "seconds": seconds,
    }


def show(row: dict) -> None:
    print(
        f"{row['row']} {row['bits']:8s} {row['average_bits']:.3f} bits {row['method']} "
        f"seed {row['seed']} top1 {row['top1']:.4f} drop {row['drop']:.2f} "
        f"+- {row['drop_error']:.2f} in {row['seconds']:.1f} s",
        flush=True,
    )


def run_engine(bench: Bench) -> None:
    """Compare the integer engine with the settled simulation, image by image."""
    options, model = bench.options, bench.float_network().cpu()
    x = torch.cat([x for x, _ in bench.test])[: options.engine_images].cpu()
    y = torch.cat([y for _, y in bench.test])[: options.engine_images].cpu()
    rows = []
    for path in sorted(options.work.glob(f"{options.network}-*.ompq.safetensors")):
        settled = ompq.settle(ompq.load(path, model), x[:2])
        engine = IntegerNetwork.from_quantized(settled, x[:2])
        engine.assert_integer_only(x[:2])
        with torch.no_grad():
            simulated, integers = settled(x), engine(x)
        rows.append(
            {
                "file": path.name.removesuffix(".ompq.safetensors"),
                "images": len(x),
                "simulated": (simulated.argmax(1) == y).float().mean().item(),
                "integer": (integers.argmax(1) == y).float().mean().item(),
                "same": (simulated.argmax(1) == integers.argmax(1))
                .float()
                .mean()
                .item(),
                "largest": (simulated - integers).abs().max().item(),
            }
        )
        print(rows[-1], flush=True)
        save(f"qat-{options.network}-engine", rows, options.out)


def run_speed(bench: Bench) -> None:
    """Time steps of training: float and quantized, eager, compiled, recorded."""
    options, model, samples = bench.options, bench.float_network(), bench.samples()
    plan = allocations(model, samples, "a")["planned"]
    quantized = ompq.quantize(model, plan, samples)
    batch = next(bench.train.epoch(0, batch_size=min(128, len(bench.train))))
    functions = {"float": float_step(model, batch, compiled=False)}
    kinds = ["eager", *(["graph"] if bench.device.type == "cuda" else [])]
    if not options.no_compile:
        functions["float compiled"] = float_step(model, batch, compiled=True)
        kinds.append("compile")
    size = len(batch[1])
    base = replace(train_config(options, 0, bench), distill=0.0, batch_size=size)
    base = replace(base, batch_norm="folded")
    for kind in kinds:
        config = replace(base, compile=kind == "compile", cuda_graph=kind == "graph")
        run = Run(quantized, bench.train, config, teacher=None)
        run.begin_epoch(0)
        functions[f"quantized {kind}"] = repeated(lambda run=run: run.advance(*batch))
    torch.backends.cudnn.benchmark = True
    times = alternating(functions, repeats=options.repeats)
    row = {"milliseconds": {k: 1e3 * min(v) / STEPS for k, v in times.items()}}
    row["over float"] = {
        name: median_ratio(times, name, "float")
        for name in functions
        if name != "float"
    }
    if not options.no_compile:
        ratio = median_ratio(times, "quantized compile", "float compiled")
        row["compiled over compiled"] = ratio
    print(row, flush=True)
    save(f"qat-{options.network}-speed", [row], options.out, batch=len(batch[1]))


STEPS = 20


def repeated(step):
    def run() -> None:
        for _ in range(STEPS):
            step()

    return run


def float_step(model: nn.Module, batch, *, compiled: bool):
    """Return what trains the float network for some steps."""
    import copy

    own = copy.deepcopy(model).train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-6, momentum=0.9)
    called = torch.compile(own) if compiled else own
    x, y = batch

    def step() -> None:
        loss = F.cross_entropy(called(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return repeated(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, required=True)
    pieces = ["float", *ROWS, "speed", "engine"]
    parser.add_argument("--only", nargs="+", choices=pieces, default=pieces[:-1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--step-rate", type=float, default=0.1)
    parser.add_argument("--batch-norm", default="fold-and-train")
    parser.add_argument("--distill", type=float, default=0.5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--precision", default="float32")
    parser.add_argument(
        "--step", choices=["eager", "graph", "compile"], default="graph"
    )
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--float-epochs", type=int)
    parser.add_argument("--engine-images", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--limit", type=int, help="training images, for a dry run")
    parser.add_argument("--test-limit", type=int)
    parser.add_argument("--work", type=Path, default=Path("out/qat"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    bench = Bench(options)
    for piece in options.only:
        start = time.perf_counter()
        if piece == "float":
            bench.float_network()
        elif piece == "speed":
            run_speed(bench)
        elif piece == "engine":
            run_engine(bench)
        else:
            run_row(bench, piece)
        print(f"{piece} took {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
