"""What quantization takes on a CPU, and what it gives: time, peak memory, divergence.

python benchmarks/effort.py --data FOLDER --network resnet18 --sizes 3.5 4.0
python benchmarks/effort.py --data FOLDER --network mobilenet_v2 --sizes 1.3 --coded
python benchmarks/effort.py --data FOLDER --network resnet20 --sizes 2.5 --effort best

FOLDER is as for ptq.py. Each row is one run in a process of its own: plan, quantize
and reconstruct as ``--effort`` or ``--iterations`` ask, as from the command line. Peaks
are those of resident memory, in MiB. ``--images`` of the test images judge the result.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import arguments, save
from ptq import NETWORKS

import ompq
from ompq.cli.freed_memory import keep_freed_memory
from ompq.datasets.named_data import load_data
from ompq.models.named_models import load_model
from ompq.progress import Stages


def peak_mib(*, reset: bool = False) -> float:
    """Return the process's peak of resident memory; perhaps measure anew from here."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return peak / 1024


# Unit of a network's budgets → folders and splits for calibration and for judging.
FOLDERS = {
    "MiB": (("imagenet-calib", "train"), ("imagenet-val", "test")),
    "bits": (("cifar10", "train"), ("cifar10", "test")),
}


class Peaks:
    """The stages of a run, with the peak of each."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}
        self.name, self.start = "", 0.0

    def progress(self, done: int, total: int | None, message: str) -> None:
        """Take the message of a verb for a stage."""
        self.begin(message.split(" error ")[0] if total and done < total else "")

    def begin(self, name: str) -> None:
        """End a stage and begin the next."""
        if name == self.name:
            return
        now, peak = time.perf_counter(), peak_mib(reset=True)
        if self.name:
            row = self.rows.setdefault(self.name, {"seconds": 0.0, "peak_mib": 0.0})
            row["seconds"] += now - self.start
            row["peak_mib"] = max(row["peak_mib"], peak)
        self.name, self.start = name, now


def run(options, size: float, seed: int) -> dict:
    """Quantize once; return what it took and gave."""
    keep_freed_memory()  # as the command line does
    torch.set_num_threads(options.threads)
    network, weights, unit = NETWORKS[options.network]
    named = load_model(
        network, str(options.data / "weights" / f"{weights}.safetensors")
    )
    model = named.module.eval()
    calibration, test = (
        load_data(str(options.data / folder), named, split=split)
        for folder, split in FOLDERS[unit]
    )
    samples = calibration.samples(options.samples)
    judged = list(test.batches(batch_size=50, limit=options.images))
    peaks, stages = Peaks(), Stages()
    config = ompq.PlanConfig(
        storage="coded" if options.coded else "fixed",
        activation_choices=(8,),
        **({} if options.coded else {"choices": (2, 3, 4)}),
    )
    start = time.perf_counter()
    peaks.begin("planning")  # from here on, reading the images is not counted
    accounting = {} if options.coded else {"accounting": "paper"}
    config = ompq.PlanConfig(**{**vars(config), **accounting})
    cache = options.work / "scores"
    plan = ompq.plan(model, samples[:64], f"{size}{unit}", config, cache=cache)
    with stages.stage("quantizing"):
        rounding = ompq.QuantizeConfig(corrected_targets=options.corrected)
        made = ompq.quantize(model, plan, samples, rounding, progress=peaks.progress)
    row = {"size": size, "seed": seed, "quantized": judge(made, model, judged, peaks)}
    learning = ompq.EFFORTS[options.effort]
    if learning is not None:
        rounding = learning.rounding
        if options.iterations:
            rounding = replace(rounding, iterations=options.iterations)
        learning = replace(learning, rounding=rounding, seed=seed)
        made = ompq.reconstruct(made, model, samples, learning, progress=peaks.progress)
        row["reconstructed"] = judge(made, model, judged, peaks)
    peaks.begin("writing")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "network.ompq.safetensors"
        ompq.save(made, path, plan=plan)
        row["bytes"] = path.stat().st_size
    peaks.begin("")
    stages_of = peaks.rows
    row["seconds"] = time.perf_counter() - start
    row["peak_mib"] = max(stage["peak_mib"] for stage in stages_of.values())
    return {**row, "stages": stages_of}


def judge(network, model, judged, peaks: Peaks) -> dict:
    """Return divergence and accuracy."""
    peaks.begin("judging")
    found = ompq.evaluate(network, judged, reference=model)
    peaks.begin("")
    return {
        "images": found.count,
        "divergence": found.divergence,
        "drop": 100 * found.drop,
    }


def main() -> None:
    parser = arguments(__doc__, NETWORKS, "/tmp/effort-work")
    parser.add_argument("--sizes", type=float, nargs="+", required=True)
    parser.add_argument("--coded", action="store_true")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--effort", choices=ompq.EFFORTS, default="fast")
    parser.add_argument("--corrected", action="store_true", help="targets of layers")
    parser.add_argument("--iterations", type=int, help="instead of the effort's")
    parser.add_argument("--images", type=int, default=2500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", action="store_true", help="run in this process")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.one:
        print(json.dumps(run(options, options.sizes[0], options.seeds[0])))
        return
    kind = "coded" if options.coded else "fixed"
    rows = []
    for size in options.sizes:
        for seed in options.seeds:
            words = [*sys.argv, "--one", "--sizes", str(size), "--seeds", str(seed)]
            made = subprocess.run(
                [sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True
            )
            rows.append(json.loads(made.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1], indent=1), flush=True)
            effort = f"{options.effort}{options.iterations or ''}"
            effort += "-corrected" * options.corrected
            name = f"effort-{kind}-{effort}-{options.network}"
            save(name, rows, options.out)


if __name__ == "__main__":
    main()
