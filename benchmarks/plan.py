"""How long a plan takes: against one forward pass, and against pairwise ORM.

python benchmarks/plan.py [--out FOLDER] [--quick]
python benchmarks/plan.py --parts times --networks mobilenet_v2 resnet18

The second prints and saves how many seconds a plan takes after the first, on the GPU
if there is one: with samples on the device, and with samples in host memory.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import RESULTS, alternating, median_ratio, save, seconds
from torch import Tensor, nn
from torchvision import models

import ompq
from ompq.configs import OrmSettings
from ompq.network.graph import trace
from ompq.network.observation import watch
from ompq.scores.orthogonality import measure_orm

NETWORKS = {"resnet18": 64, "resnet50": 64, "mobilenet_v2": 64}
BUDGET = "4bits"
ONE_PASS = ompq.PlanConfig(score="orm_distortion")  # a score that needs one pass


def pairwise_orm(model: nn.Module, samples: Tensor, graph: ompq.LayerGraph) -> Tensor:
    """ORM as a plain script computes it: keep all features, two Grams for each pair."""
    wanted = sorted({unit.feature for unit in graph.units})
    kept = {}

    def visit(position, _function, _args, _kwargs, output):
        if position in wanted:
            kept[position] = output.flatten(1).clone()

    watch(model, samples, visit)
    orm = torch.ones(len(wanted), len(wanted))
    for i, first in enumerate(wanted):
        for j, second in enumerate(wanted[:i]):
            a, b = kept[first] @ kept[first].T, kept[second] @ kept[second].T
            orm[i, j] = orm[j, i] = (a * b).sum() / (a.norm() * b.norm())
    return orm


def load(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = models.get_model(name, weights=None).eval().to(device)
    return model, torch.randn(NETWORKS[name], 3, 224, 224, device=device)


@torch.no_grad()
def time_network(name: str, device: torch.device, repeats: int) -> dict:
    model, samples = load(name, device)
    graph = trace(model, samples)
    functions = {
        "forward": lambda: model(samples),
        "trace": lambda: trace(model, samples),
        "orm": lambda: measure_orm(graph, model, samples, OrmSettings()),
        "plan": lambda: ompq.plan(model, samples, BUDGET),
        "one_pass_plan": lambda: ompq.plan(model, samples, BUDGET, ONE_PASS),
    }
    if device.type == "cuda":
        host = samples.cpu()
        functions["plan_from_host"] = lambda: ompq.plan(model, host, BUDGET)
    times = alternating(functions, repeats)
    pairwise = seconds(lambda: pairwise_orm(model, samples, graph))
    ratios = {key: median_ratio(times, key, "forward") for key in times}
    forward = sorted(times["forward"])[repeats // 2]
    row = {
        "network": name,
        "samples": NETWORKS[name],
        "units": len(graph),
        "forward_s": forward,
        **{
            f"{key}_s": sorted(times[key])[repeats // 2]
            for key in times
            if key.startswith("plan")
        },
        **{f"{key}_over_forward": value for key, value in ratios.items()},
        "pairwise_over_forward": pairwise / forward,
        "pairwise_over_orm": pairwise / (ratios["orm"] * forward),
    }
    print(json.dumps(row, indent=1))
    return row


def memory(name: str, device: torch.device) -> dict:
    """Peak memory of a forward pass and of a plan, each in a process of its own."""
    peaks = {}
    for job in ("forward", "plan"):
        command = [sys.executable, __file__, "--memory", job, name, str(device)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[job] = int(done.stdout.split()[-1])
    ratio = peaks["plan"] / peaks["forward"]
    return {"network": name, **peaks, "plan_over_forward": ratio}


@torch.no_grad()
def print_peak(job: str, name: str, device: torch.device) -> None:
    model, samples = load(name, device)
    if job == "forward":
        model(samples)
    else:
        ompq.plan(model, samples, BUDGET)
    if device.type == "cuda":
        print(torch.cuda.max_memory_allocated())
    else:
        # Not getrusage: its maximum is inherited from the process that started us.
        status = Path("/proc/self/status").read_text()
        print(int(status.split("VmHWM:")[1].split()[0]) * 1024)


class Deep(nn.Module):
    """A plain chain of convolutions, as deep as wanted."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        layers = [nn.Conv2d(16, 16, 3, padding=1) for _ in range(units - 1)]
        self.body = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for layer in self.body:
            x = torch.relu(layer(x))
        return x


def once(functions) -> dict[str, list[float]]:
    """Time each once, without warming up: what takes a minute needs no repeats."""
    return {name: [seconds(function)] for name, function in functions.items()}


@torch.no_grad()
def growth(device: torch.device, *, quick: bool) -> list[dict]:
    rows = []
    for units in (50, 200, 1000):
        for count in (32, 256, 2048):
            large = units * count > 1000 * 128
            if quick and large:
                continue  # the forward pass alone takes most of a minute on two cores
            torch.manual_seed(0)
            model = Deep(units).to(device)
            samples = torch.randn(count, 3, 16, 16, device=device)
            functions = {
                "forward": lambda: model(samples),  # noqa: B023
                "plan": lambda: ompq.plan(model, samples, BUDGET),  # noqa: B023
            }
            times = once(functions) if large else alternating(functions, 3)
            rows.append(
                {
                    "units": units,
                    "samples": count,
                    "forward_s": min(times["forward"]),
                    "plan_s": min(times["plan"]),
                    "plan_over_forward": median_ratio(times, "plan", "forward"),
                    "repeats": len(times["plan"]),
                }
            )
            print(rows[-1], flush=True)
    return rows


@torch.no_grad()
def scale(device: torch.device, *, units: int = 3000, points: int = 100) -> dict:
    """Time a chain of thousands of small units, through which the signal survives."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(units)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    model = nn.Sequential(*layers).eval().to(device)
    samples = torch.randn(64, 8, device=device)
    load = os.getloadavg()[0]
    row = {"units": units, "forward_s": seconds(lambda: model(samples))}
    row["plan_s"] = seconds(lambda: ompq.plan(model, samples, BUDGET))
    plan = ompq.plan(model, samples, BUDGET)
    row[f"pareto_{points}_s"] = seconds(lambda: plan.pareto(points=points))
    with TemporaryDirectory() as folder:
        saved, page = Path(folder) / "plan.json", Path(folder) / "report.html"
        row["save_s"] = seconds(lambda: plan.save(saved))
        row["report_s"] = seconds(lambda: ompq.write_report(page, plan))
        row["plan_bytes"], row["report_bytes"] = (
            path.stat().st_size for path in (saved, page)
        )
    row["load"] = [load, os.getloadavg()[0]]
    print(json.dumps(row, indent=1))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parts = ["times", "memory", "growth", "scale"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--memory", nargs=3, metavar=("JOB", "NETWORK", "DEVICE"))
    options = parser.parse_args()
    if options.memory:
        job, name, device = options.memory
        print_peak(job, name, torch.device(device))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    repeats = 3 if options.quick else 7
    jobs = {
        "times": lambda: [time_network(n, device, repeats) for n in options.networks],
        "memory": lambda: [memory(name, device) for name in options.networks],
        "growth": lambda: growth(device, quick=options.quick),
        "scale": lambda: scale(device),
    }
    for part in options.parts:
        save(f"plan-{part}-{device.type}", jobs[part](), options.out)


if __name__ == "__main__":
    main()
