"""What benchmarks/qat.py starts from: images on the device, trained float networks.

What takes long is made once and kept in ``--work``; a lock lets several processes share
that folder, so that rows can run side by side, and a run that was cut goes on.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import once, save, synchronise
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ompq
from ompq.datasets.sources import load_data
from ompq.datasets.training_sets import HeldSet, training_data
from ompq.models import load_model
from ompq.training.step import Gradients, Recorded


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


NETWORKS = {
    "resnet20": ("cifar:resnet20", "cifar_resnet20"),
    "resnet18": ("cifar:resnet18", None),
}
# A small network underfits: what makes images or labels harder does not help it.
FLOAT = {
    "resnet20": FloatTraining(epochs=100, batch=256, rate=0.2),
    "resnet18": FloatTraining(epochs=60, batch=512, rate=0.4, smoothing=0.1, cutout=12),
}


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
        def decode(path: Path) -> None:
            start = time.perf_counter()
            data = load_data(self.options.data / "cifar10", self.named, split="train")
            held = training_data(data)
            save_file({"inputs": held.inputs, "targets": held.targets}, path)
            print(f"decoded images in {time.perf_counter() - start:.1f} s", flush=True)

        cache = once(self.options.work / "cifar10-train.safetensors", decode)
        stored = load_file(cache, device=str(self.device))
        inputs, targets = stored["inputs"], stored["targets"]
        if self.options.limit:
            generator = torch.Generator().manual_seed(0)
            order = torch.randperm(len(targets), generator=generator)
            picked = order[: self.options.limit].to(self.device)
            inputs, targets = inputs[picked], targets[picked]
        mean = 255 * torch.tensor(self.named.mean, device=self.device)
        std = 255 * torch.tensor(self.named.std, device=self.device)
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
        return self.named.module.to(self.device).eval()


def train_float(bench: Bench, path: Path) -> None:
    """Train the float network; a GPU replays one recorded step, in bfloat16."""
    plan = FLOAT[bench.options.network]
    epochs = bench.options.float_epochs or plan.epochs
    batch = min(plan.batch, len(bench.train))
    cuda = bench.device.type == "cuda"
    model = bench.named.module.to(bench.device)
    before = ompq.evaluate(model.eval(), bench.test).top1
    if cuda:
        model.to(memory_format=torch.channels_last)
    settings = ompq.TrainConfig(
        label_smoothing=plan.smoothing, precision="bfloat16" if cuda else "float32"
    )
    gradients = Gradients(
        model, None, settings, backward=Tensor.backward, device=bench.device
    )
    compute = Recorded(gradients, model) if cuda else gradients
    optimizer = sgd(model, plan)
    steps = epochs * (len(bench.train) // batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.rate, total_steps=steps, pct_start=0.2, anneal_strategy="linear"
    )
    generator = torch.Generator(bench.device).manual_seed(0)
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
