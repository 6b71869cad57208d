"""Quantization-aware training on CIFAR-10: drop, uniform bits, PTQ, engine, speed.

python benchmarks/qat.py --data FOLDER --network resnet20 --only float a b c speed
python benchmarks/qat.py --data FOLDER --network resnet20 --only engine  # on the CPU

FOLDER holds ``cifar10`` (train and test folders) and ``weights``. Every row is written
when it is there, and not made again; float networks, decoded images, checkpoints and
trained networks are kept in ``--work``. So a call that was cut is just repeated, and
pieces can be run one by one or, after ``float``, side by side with one ``--work``.
"""

import copy
import math
import shutil
import time
import zlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from common import (
    DEVICE,
    Rows,
    alternating,
    arguments,
    median_ratio,
    once,
    save,
    synchronise,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ompq
from ompq.datasets.named_data import load_data
from ompq.datasets.training_sets import HeldSet, training_data
from ompq.integer.engine import IntegerNetwork
from ompq.models.named_models import load_model
from ompq.network.folding import fold_norm
from ompq.training.step import Gradients, Recorded
from ompq.training.training_run import Run

# Choices of weights, activations, uniform bits of the same size.
ROWS = {
    "a": ((4, 5, 6, 7, 8), 8, 5),
    "b": ((4, 5, 6, 7, 8), 6, 5),
    "c": ((2, 3, 4), 4, 3),
}
LIMITS = {"a": 0.2, "b": 0.4, "c": 1.0}
ENDS = {"@first": (8, 8), "@last": (8, 8)}


@dataclass(frozen=True, kw_only=True)
class FloatTraining:
    """How a float network is trained: SGD, a linear rise and fall of the rate.

    Attributes:
        epochs: Passes over the images.
        batch: Images a step.
        rate: The highest learning rate, reached after a fifth of the steps.
        decay: Of weights; norms and biases have none.
        smoothing: Of labels.
        cutout: Side of the square that is blanked in each image; 0 blanks none.
    """

    epochs: int
    batch: int
    rate: float
    decay: float = 5e-4
    smoothing: float = 0.0
    cutout: int = 0


CIFAR_NETWORKS = Path(__file__).with_name("cifar_networks.py")
# Those of the file are trained for ``ptq.py``, where they stand for unseen networks.
UNSEEN = ("mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "vgg11_bn")
NETWORKS = {
    "resnet20": ("cifar:resnet20", "cifar_resnet20"),
    "resnet18": ("cifar:resnet18", None),
    **{name: (f"{CIFAR_NETWORKS}:{name}", None) for name in UNSEEN},
}
# A small network underfits: what makes images or labels harder does not help it.
FLOAT = {
    "resnet20": FloatTraining(epochs=100, batch=256, rate=0.2),
    "resnet18": FloatTraining(epochs=60, batch=512, rate=0.4, smoothing=0.1, cutout=12),
    **dict.fromkeys(UNSEEN, FloatTraining(epochs=40, batch=512, rate=0.2)),
}


class Bench:
    """Network, data and options, on the device."""

    def __init__(self, options) -> None:
        self.options = options
        self.name, weights = NETWORKS[options.network]
        file = "none"
        if weights is not None:
            file = str(options.data / "weights" / f"{weights}.safetensors")
        self.named = load_model(self.name, file)
        options.work.mkdir(parents=True, exist_ok=True)
        self.train = self._train_set()
        test = load_data(options.data / "cifar10", self.named, split="test")
        found = list(test.batches(batch_size=500, limit=options.test_limit))
        self.test = [(x.to(DEVICE), y.to(DEVICE)) for x, y in found]

    def _train_set(self) -> HeldSet:
        def decode(path: Path) -> None:
            start = time.perf_counter()
            data = load_data(self.options.data / "cifar10", self.named, split="train")
            held = training_data(data)
            save_file({"inputs": held.inputs, "targets": held.targets}, path)
            print(f"decoded images in {time.perf_counter() - start:.1f} s", flush=True)

        cache = once(self.options.work / "cifar10-train.safetensors", decode)
        stored = load_file(cache, device=str(DEVICE))
        inputs, targets = stored["inputs"], stored["targets"]
        if self.options.limit:
            generator = torch.Generator().manual_seed(0)
            order = torch.randperm(len(targets), generator=generator)
            picked = order[: self.options.limit].to(DEVICE)
            inputs, targets = inputs[picked], targets[picked]
        mean = 255 * torch.tensor(self.named.mean, device=DEVICE)
        std = 255 * torch.tensor(self.named.std, device=DEVICE)
        return HeldSet(inputs, targets, 4, mean, std)

    def samples(self) -> Tensor:
        """Return calibration images as they are, without augmentation."""
        count = min(self.options.samples, len(self.train))
        held = replace(self.train, inputs=self.train.inputs[:, 4:-4, 4:-4], padding=0)
        found, _ = next(held.epoch(0, batch_size=count, seed=1))
        return found.contiguous()

    def float_network(self) -> nn.Module:
        """Return the float network, trained on these images now or before."""
        path = self.options.work / f"{self.options.network}.safetensors"
        once(path, lambda temporary: train_float(self, temporary))
        self.named.module.load_state_dict(load_file(path))
        # Training left channels last, whose kernels round otherwise.
        model = self.named.module.to(memory_format=torch.contiguous_format)
        return model.to(DEVICE).eval()


def train_float(bench: Bench, path: Path) -> None:
    """Train the float network; a GPU replays one recorded step, in bfloat16."""
    plan = FLOAT[bench.options.network]
    epochs = bench.options.float_epochs or plan.epochs
    batch = min(plan.batch, len(bench.train))
    cuda = DEVICE.type == "cuda"
    model = bench.named.module.to(DEVICE)
    before = ompq.evaluate(model.eval(), bench.test).top1
    if cuda:
        model.to(memory_format=torch.channels_last)
    settings = ompq.TrainConfig(
        label_smoothing=plan.smoothing, precision="bfloat16" if cuda else "float32"
    )
    gradients = Gradients(
        model, None, settings, backward=Tensor.backward, device=DEVICE
    )
    compute = Recorded(gradients, model) if cuda else gradients
    optimizer = sgd(model, plan)
    steps = epochs * (len(bench.train) // batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.rate, total_steps=steps, pct_start=0.2, anneal_strategy="linear"
    )
    generator = torch.Generator(DEVICE).manual_seed(0)
    torch.backends.cudnn.benchmark = True
    start = time.perf_counter()
    model.train()
    for epoch in range(epochs):
        for x, y in bench.train.epoch(epoch, batch_size=batch):
            if not cuda:  # what is recorded overwrites gradients
                optimizer.zero_grad()
            compute(gradients.placed(blanked(x, plan.cutout, generator)), y)
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
        **plan.__dict__,
        "epochs": epochs,
        "seconds": seconds,
    }
    save(f"qat-{bench.options.network}-float", [row], bench.options.out)


def sgd(model: nn.Module, plan: FloatTraining) -> torch.optim.SGD:
    """Return Nesterov's gradient descent, with decay of weights alone."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD(
        groups,
        lr=plan.rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=plan.decay,
        foreach=True,
    )


def blanked(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Set a square of each image (N, C, H, W) to 0, which is the mean, where it falls.

    Args:
        images: Normalised.
        side: Of the square; its centre may be any pixel.
        generator: On the images' device.
    """
    if not side:
        return images
    count, _, *sizes = images.shape
    inside = []
    for size in sizes:
        centre = torch.randint(
            size, (count, 1), generator=generator, device=images.device
        )
        place = torch.arange(size, device=images.device) - centre + side // 2
        inside.append((place >= 0) & (place < side))  # (N, H), then (N, W)
    square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    return images.masked_fill(square, 0.0)


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
    settings = train_config(options, 0).__dict__
    rows = Rows(
        f"qat-{options.network}-{row}",
        ("bits", "method", "seed"),
        out=options.out,
        work=options.work,
        training={k: v for k, v in settings.items() if k != "seed"},
        float=reference.top1,
        iterations=options.iterations,
        samples=len(samples),
    )
    for bits, plan in allocations(model, samples, row).items():
        about = {
            "row": row,
            "bits": bits,
            "average_bits": plan.totals["average_bits"],
            "bytes": plan.totals["bytes"],
            "widths": [choice.weight for choice in plan.allocation.values()],
            "float": reference.top1,
            "limit": LIMITS[row],
        }
        first = start_from(bench, plan, samples, rows, about)
        for seed in options.seeds:
            if rows.find(bits, "qat", seed) is None:
                measured = train_once(bench, first, samples, about, seed)
                rows.add({**about, "method": "qat", "seed": seed, **measured})
            show(rows.find(bits, "qat", seed))


def start_from(bench: Bench, plan, samples, rows: Rows, about: dict) -> nn.Module:
    """Return the reconstructed network, made now or before, and record it."""
    options, model = bench.options, bench.named.module
    # Whatever decides on the result, weights among it, is in the name.
    weights = (options.work / f"{options.network}.safetensors").read_bytes()
    made_from = f"{zlib.crc32(weights):08x}-{len(samples)}-{options.iterations}"
    name = f"ptq-{options.network}-{about['row']}-{about['bits']}-{made_from}"
    start = time.perf_counter()

    def make(path: Path) -> None:
        rounding = ompq.RoundingConfig(iterations=options.iterations)
        config = ompq.ReconstructConfig(rounding=rounding)
        made = ompq.quantize(model, plan, samples)
        ompq.save(ompq.reconstruct(made, model, samples, config), path)

    path = once(options.work / f"{name}.ompq.safetensors", make)
    first = ompq.load(path, model)
    synchronise()
    if rows.find(about["bits"], "ptq", 0) is None:
        measured = measure(bench, first, time.perf_counter() - start)
        rows.add({**about, "method": "ptq", "seed": 0, **measured})
    show(rows.find(about["bits"], "ptq", 0))
    return first


def train_once(bench: Bench, first: nn.Module, samples, about: dict, seed: int) -> dict:
    """Train, settle, keep and measure; a run that was cut goes on where it was."""
    options, model = bench.options, bench.named.module
    name = f"{options.network}-{about['row']}-{about['bits']}-{seed}"
    start, folder = time.perf_counter(), options.work / f"run-{name}"
    config = train_config(options, seed)
    trained = ompq.train(first, bench.train, config, teacher=model, checkpoint=folder)
    synchronise()
    seconds = time.perf_counter() - start
    finalized = ompq.finalize(trained, samples[:2])
    ompq.save(finalized, options.work / f"{name}.ompq.safetensors", network=bench.name)
    unsettled = ompq.evaluate(trained, bench.test).top1
    measured = measure(bench, finalized, seconds)
    shutil.rmtree(folder)
    return {**measured, "unsettled": unsettled}


def train_config(options, seed: int) -> ompq.TrainConfig:
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
        cuda_graph=options.step == "graph" and DEVICE.type == "cuda",
        report_steps=10_000,
        deterministic=False,
        seed=seed,
    )


def measure(bench: Bench, network, seconds: float) -> dict:
    found = ompq.evaluate(network, bench.test)
    drop, error = found.drop_from(ompq.evaluate(bench.named.module, bench.test))
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
    rows = Rows(
        f"qat-{options.network}-engine",
        ("file",),
        out=options.out,
        work=options.work,
        images=len(x),
    )
    for path in sorted(options.work.glob(f"{options.network}-*.ompq.safetensors")):
        name = path.name.removesuffix(".ompq.safetensors")
        if rows.find(name) is not None:
            continue
        finalized = ompq.finalize(ompq.load(path, model), x[:2])
        engine = IntegerNetwork.from_quantized(finalized, x[:2])
        engine.assert_integer_only(x[:2])
        with torch.no_grad():
            simulated, integers = finalized(x), engine(x)
        answers = simulated.argmax(1), integers.argmax(1)
        row = {
            "file": name,
            "images": len(x),
            "simulated": (answers[0] == y).float().mean().item(),
            "integer": (answers[1] == y).float().mean().item(),
            "same": (answers[0] == answers[1]).float().mean().item(),
            "largest": (simulated - integers).abs().max().item(),
        }
        print(row, flush=True)
        rows.add(row)


def run_speed(bench: Bench) -> None:
    """Time steps of training, float and quantized, like with like.

    Both networks have their norms folded and no teacher, and each way to run a step
    (eager, compiled, one CUDA graph) is compared with the same way of the other.
    """
    options, model, samples = bench.options, bench.float_network(), bench.samples()
    plan = allocations(model, samples, "a")["planned"]
    quantized = ompq.quantize(model, plan, samples)
    batch = next(bench.train.epoch(0, batch_size=min(128, len(bench.train))))
    kinds = ["eager"]
    kinds += ["graph"] if DEVICE.type == "cuda" else []
    kinds += [] if options.no_compile else ["compile"]
    size = len(batch[1])
    base = replace(train_config(options, 0), distill=0.0, batch_size=size)
    base = replace(base, batch_norm="fold_norm")
    functions = {}
    for kind in kinds:
        functions[f"float {kind}"] = float_step(
            without_norms(model, samples), batch, kind
        )
        config = replace(base, compile=kind == "compile", cuda_graph=kind == "graph")
        run = Run(quantized, bench.train, config, teacher=None)
        run.begin_epoch(0)
        functions[f"quantized {kind}"] = repeated(partial(advance, run, *batch))
    torch.backends.cudnn.benchmark = True
    times = alternating(functions, repeats=options.repeats)
    row = {
        "milliseconds": {k: 1e3 * min(v) / STEPS for k, v in times.items()},
        "quantized over float": {
            kind: median_ratio(times, f"quantized {kind}", f"float {kind}")
            for kind in kinds
        },
    }
    print(row, flush=True)
    save(f"qat-{options.network}-speed", [row], options.out, batch=len(batch[1]))


def without_norms(model: nn.Module, samples: Tensor) -> nn.Module:
    """Return the float network with its batch norms folded."""
    own = copy.deepcopy(model)
    for unit in ompq.trace(model, samples[:1]).units:
        if unit.norm:
            layer, norm = own.get_submodule(unit.name), own.get_submodule(unit.norm)
            weight, bias = fold_norm(layer, norm)
            layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
            own.set_submodule(unit.norm, nn.Identity())
    return own


def advance(run: Run, inputs: Tensor, targets: Tensor) -> None:
    """Take one step of a training run."""
    run.compute(run.gradients.placed(inputs), targets)
    run.update()


STEPS = 20


def repeated(step):
    def run() -> None:
        for _ in range(STEPS):
            step()

    return run


def float_step(model: nn.Module, batch, kind: str):
    """Return what trains the float network for some steps."""
    own = model.train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-6, momentum=0.9)
    called = torch.compile(own) if kind == "compile" else own
    gradients = Gradients(
        called,
        None,
        ompq.TrainConfig(),
        backward=Tensor.backward,
        device=batch[0].device,
    )
    compute = Recorded(gradients, own) if kind == "graph" else gradients
    x, y = gradients.placed(batch[0]), batch[1]

    def step() -> None:
        if kind != "graph":  # what is recorded overwrites gradients
            optimizer.zero_grad(set_to_none=True)
        compute(x, y)
        optimizer.step()

    return repeated(step)


def main() -> None:
    parser = arguments(__doc__, NETWORKS, "out/qat")
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
