"""Measures everything that README and docs/results.md claim of this version.

python benchmarks/run.py --data FOLDER [--suite cpu|gpu|all] [--only TEXT] [--list]

FOLDER holds ``imagenet-calib``, ``imagenet-val``, ``cifar10`` (with ``train`` and
``test``) and ``weights``. The experiments below are data. Each is one run of the
command line in a process of its own, as a user would start it; its row in
``results/accuracy.json`` says what came of it: divergence and loss of top-1 on all
test images, bytes on disk, seconds, and the peak of resident memory. A row that the
same commit has measured is not measured again, so a run that was stopped goes on. Then
``python benchmarks/pages.py`` writes the pages.

The suite ``gpu`` also runs the scripts that need one. Times are those of this machine:
leave it alone while they are taken.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import RESULTS, commit, machine

TOPIC = RESULTS / "accuracy.json"
# Network → its name on the command line, weights, calibration and test images.
NETWORKS = {
    "resnet18": ("torchvision:resnet18", "imagenet_resnet18", "imagenet"),
    "mobilenet_v2": ("torchvision:mobilenet_v2", "imagenet_mobilenet_v2", "imagenet"),
    "squeezenet": ("torchvision:squeezenet1_1", "imagenet_squeezenet1_1", "imagenet"),
    "deit_tiny": (
        "timm:deit_tiny_patch16_224",
        "imagenet_deit_tiny_patch16_224",
        "imagenet",
    ),
    "resnet20": ("cifar:resnet20", "cifar_resnet20", "cifar10"),
    "resnet56": ("cifar:resnet56", "cifar_resnet56", "cifar10"),
}
IMAGES = {
    "imagenet": ("imagenet-calib", "imagenet-val"),
    "cifar10": ("cifar10/train", "cifar10/test"),
}


@dataclass(frozen=True)
class Experiment:
    """One run of ``ompq quantize``."""

    network: str
    budget: str
    effort: str = "fast"
    coded: bool = False
    seed: int = 0
    gpu: bool = False

    @property
    def key(self) -> dict[str, Any]:
        """What tells its row from others."""
        return {
            "network": self.network,
            "budget": self.budget,
            "storage": "coded" if self.coded else "fixed",
            "effort": self.effort,
            "seed": self.seed,
        }

    def words(self, data: Path, folder: Path) -> list[str]:
        """Return the command."""
        name, weights, images = NETWORKS[self.network]
        calibration, test = (str(data / part) for part in IMAGES[images])
        words = [sys.executable, "-m", "ompq", "quantize", name]
        words += ["--weights", str(data / "weights" / f"{weights}.safetensors")]
        words += ["--data", calibration, "--eval-data", test, "--samples", "1000"]
        words += ["--budget", self.budget, "--effort", self.effort]
        words += ["--seed", str(self.seed), "-o", str(folder), "--quiet"]
        return [*words, "--coded"] if self.coded else words


FIXED = {
    "resnet18": ("3.0MiB", "3.5MiB", "4.0MiB"),
    "mobilenet_v2": ("0.9MiB", "1.1MiB", "1.3MiB", "1.5MiB"),
    "squeezenet": ("0.4MiB", "0.5MiB"),
    "deit_tiny": ("2.5MiB", "3.0MiB"),
    "resnet20": ("2.5bits", "3bits"),
    "resnet56": ("2.5bits", "3bits"),
}
CODED = {
    "resnet18": ("2.1MiB", "2.6MiB", "3.0MiB"),
    "mobilenet_v2": ("1.1MiB", "1.3MiB", "1.5MiB"),
    "squeezenet": ("0.4MiB", "0.5MiB"),
    "resnet20": ("75KiB", "100KiB"),
}
SIZES = [
    *((name, size, False) for name, sizes in FIXED.items() for size in sizes),
    *((name, size, True) for name, sizes in CODED.items() for size in sizes),
]
EXPERIMENTS = [
    *(Experiment(name, size, "fast", coded) for name, size, coded in SIZES),
    *(
        Experiment(name, size, "default", coded)
        for name, size, coded in SIZES
        if name == "resnet20"
    ),
    *(
        Experiment(name, size, effort, coded, seed, gpu=True)
        for effort in ("default", "best")
        for name, size, coded in SIZES
        for seed in (0, 1)
    ),
]
# What else the pages show; each script writes a topic of its own and resumes.
SCRIPTS = [
    ("cpu", "mlperf_tiny.py --data {data} --network dscnn"),
    ("cpu", "plan.py --parts times"),
    ("gpu", "ptq.py --data {data} --network resnet18 --budgets 3.0 3.5 4.0"),
    ("gpu", "ptq.py --data {data} --network mobilenet_v2 --budgets 0.9 1.1 1.3"),
    ("gpu", "rivals.py --data {data} --network resnet20"),
    ("gpu", "rivals.py --data {data} --network cifar-resnet18 --epochs 2"),
    ("gpu", "qat.py --data {data} --network resnet20"),
]


def measure(experiment: Experiment, data: Path) -> dict[str, Any]:
    """Run an experiment; return its row."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        start = time.perf_counter()
        process = subprocess.Popen(
            experiment.words(data, out), stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            raise SystemExit(f"failed: {shlex.join(experiment.words(data, out))}")
        result = json.loads((out / "result.json").read_text())
        size = (out / "network.ompq.safetensors").stat().st_size
    found = result["evaluation"]
    about = machine()
    return {
        **experiment.key,
        "bytes": size,
        "divergence": round(found["divergence"], 6),
        "drop": round(100 * found["drop"], 4),
        "drop_error": round(100 * found["drop_error"], 4),
        "images": found["count"],
        "seconds": round(seconds, 1),
        "evaluating_seconds": round(result["seconds"].get("evaluating", 0.0), 1),
        "peak_mib": round(usage.ru_maxrss / 1024),
        "commit": commit(),
        "device": about["device"],
        "torch": about["torch"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--suite", choices=("cpu", "gpu", "all"), default="cpu")
    parser.add_argument(
        "--only", default="", help="experiments whose key has this text"
    )
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    rows = json.loads(TOPIC.read_text())["rows"] if TOPIC.exists() else []
    for experiment in EXPERIMENTS:
        if options.suite not in ("all", "gpu" if experiment.gpu else "cpu"):
            continue
        name = " ".join(map(str, experiment.key.values()))
        if options.only not in name:
            continue
        same = [row for row in rows if experiment.key.items() <= row.items()]
        if options.list or any(row["commit"] == commit() for row in same):
            print(name, *(f"{row['divergence']:.4f}" for row in same))
            continue
        row = measure(experiment, options.data.resolve())
        rows = [one for one in rows if one not in same] + [row]
        lines = ",\n".join(f" {json.dumps(one)}" for one in rows)
        TOPIC.write_text(f'{{"rows": [\n{lines}\n]}}\n')
        print(json.dumps(row), flush=True)
    for suite, script in SCRIPTS:
        if options.suite in (suite, "all") and not options.only and not options.list:
            words = shlex.split(script.format(data=shlex.quote(str(options.data))))
            path = Path(__file__).with_name(words[0])
            subprocess.run([sys.executable, str(path), *words[1:]], check=True)


if __name__ == "__main__":
    main()
