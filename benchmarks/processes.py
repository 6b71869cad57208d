"""How much faster two processes are than one, and what sharing costs.

    python benchmarks/processes.py [--repeats 3] [--processes 2] [--out FOLDER]

A vision transformer with random weights is planned, scored, reconstructed, evaluated
and audited by one process, and by several that torchrun starts, in turn. Each process
has as many threads as ``OMP_NUM_THREADS`` says, or one. A speed-up is the median over
repeats of one process's seconds over those of several. Needs as many idle cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from common import RESULTS, save, seconds
from torch import distributed
from torchvision.models import VisionTransformer

import ompq
from ompq import lab
from ompq.parallel import is_main, process_count

SHAPE = {"image_size": 64, "patch_size": 8, "num_classes": 100}
SIZE = {"num_layers": 4, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}
SAMPLES, IMAGES, BATCH, STEPS, ALLOCATIONS = 32, 1024, 64, 40, 4


def work(place: Path) -> None:
    """Do every stage, and write down how long each took."""
    torch.manual_seed(0)
    model = VisionTransformer(**SHAPE, **SIZE).eval()
    torch.nn.init.normal_(model.heads.head.weight, std=0.05)
    images = torch.randn(IMAGES, 3, 64, 64)
    samples, inputs = images[:SAMPLES], ompq.Samples.of(list(images.split(BATCH)))
    times: dict[str, float] = {}
    made: dict[str, object] = {}

    def do(name, function):
        if process_count() > 1:
            distributed.barrier()
        times[name] = seconds(lambda: made.update({name: function()}))
        return made[name]

    steps = ompq.RoundingConfig(iterations=STEPS)
    learning = ompq.ReconstructConfig(rounding=steps)
    scored = ompq.PlanConfig(score="output_divergence")
    audited = lab.AuditConfig(allocations=ALLOCATIONS, scores=("weight_noise",))
    with ompq.distributed():
        plan = do("plan", lambda: ompq.plan(model, samples, "4bits"))
        do("score", lambda: ompq.plan(model, samples, "4bits", scored))
        rounded = do("quantize", lambda: ompq.quantize(model, plan, samples))
        learned = do(
            "reconstruct", lambda: ompq.reconstruct(rounded, model, samples, learning)
        )
        do("evaluate", lambda: ompq.evaluate(learned, inputs, reference=model))
        do("audit", lambda: lab.audit(model, samples, "4bits", samples, audited))
        if is_main():
            place.write_text(json.dumps(times))


def started(count: int) -> dict[str, float]:
    """Return the seconds of every stage with so many processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    several = [*launcher, "--nproc-per-node", str(count)] if count > 1 else []
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "times.json"
        command = [sys.executable, *several, __file__, "--work", str(place)]
        subprocess.run(command, check=True, env=environment)
        return json.loads(place.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    found = {1: [], options.processes: []}
    for _ in range(options.repeats):
        for count, times in found.items():  # in turn: a slow moment hits both
            times.append(started(count))
    one, several = found.values()
    rows = [
        {
            "stage": stage,
            "seconds_1": median(times[stage] for times in one),
            f"seconds_{options.processes}": median(times[stage] for times in several),
            "speed_up": median(
                a[stage] / b[stage] for a, b in zip(one, several, strict=True)
            ),
        }
        for stage in one[0]
    ]
    for row in rows:
        print(row)
    about = {
        "repeats": options.repeats,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
    save("processes", rows, options.out, **about)


if __name__ == "__main__":
    main()
