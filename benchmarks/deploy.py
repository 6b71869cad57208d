"""Exported networks: size, agreement, load time, latency and memory.

python benchmarks/deploy.py agreement --data FOLDER --work WORK --network resnet18
python benchmarks/deploy.py latency --work WORK --network resnet18
python benchmarks/deploy.py loading --data FOLDER --work WORK --network resnet18

FOLDER holds ``imagenet-calib``, ``imagenet-val`` (ImageFolders) and ``weights``. The
first part writes the files into WORK and compares what they compute with PyTorch, on
all images; the second part, for a quiet machine, times them; the third writes files of
one width each, unless they are there, and measures only what loading takes. Weights are
rounded to nearest: agreement and time do not depend on how good a network is.
"""

import argparse
import copy
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from common import RESULTS, alternating, everywhere, median_ratio, save
from torch import nn

import ompq
from ompq.allocation.problem import Allocation
from ompq.datasets.named_data import load_data
from ompq.models.named_models import load_model
from ompq.network.units import Choice
from ompq.runtimes.benchmark import Input, load_seconds, peak_memory, runner
from ompq.runtimes.onnx.onnx_files import export_onnx
from ompq.runtimes.onnx.traced_graph import float_model
from ompq.runtimes.verification import against_simulated, open_session
from ompq.samples import Samples

NETWORKS = {
    "resnet18": ("torchvision:resnet18", "imagenet_resnet18"),
    "mobilenet_v2": ("torchvision:mobilenet_v2", "imagenet_mobilenet_v2"),
}
# Name → budget and choices; None is 8 bits everywhere.
SCHEMES = {
    "8": None,
    "mixed 2-8": ("5bits", (2, 3, 4, 5, 6, 8)),
    "mixed 2-4": ("3.2bits", (2, 3, 4)),
}
SHAPE = (1, 3, 224, 224)
INPUTS = [Input(SHAPE)]
# Name → bits of the layers, in turn.
WIDTHS = {
    "8 bits": (8,),
    **{f"{bits} bits": (bits,) for bits in (2, 3, 4, 5, 6)},
    "2-8 bits in turn": (2, 3, 4, 5, 6, 8),
}
# Run in a process of its own: time to load, memory before, after, and once it has run.
# It imports nothing else, which would count as memory of every file.
LOAD = """
import sys
from time import perf_counter, process_time
import numpy
from onnxruntime import InferenceSession, SessionOptions
def most_memory():
    with open("/proc/self/status") as status:
        (held,) = (line.split()[1] for line in status if line.startswith("VmHWM"))
    return 1024 * int(held)
path, threads, *shape = sys.argv[1:]
options = SessionOptions()
options.intra_op_num_threads, options.log_severity_level = int(threads), 3
start, wall, cpu = most_memory(), perf_counter(), process_time()
session = InferenceSession(path, options, providers=["CPUExecutionProvider"])
taken = perf_counter() - wall, process_time() - cpu
loaded = most_memory()
image = numpy.zeros([int(size) for size in shape], numpy.float32)
session.run(None, {"input": image})
print(*taken, start, loaded, most_memory())
"""


def file_of(work: Path, network: str, scheme: str, kind: str) -> Path:
    """Return where a network is written."""
    return work / f"{network}-{scheme.replace(' ', '-')}.{kind}"


def planned(model: nn.Module, samples, scheme: str):
    """Return the plan of a scheme, or the bits without one."""
    if SCHEMES[scheme] is None:
        return None, everywhere(model, samples, Choice(8, 8))
    budget, choices = SCHEMES[scheme]
    plan = ompq.plan(model, samples, budget, ompq.PlanConfig(choices=choices))
    return plan, plan.allocation


def agreement(given) -> None:
    """Export every scheme and compare it with PyTorch on real images."""
    network, weights = NETWORKS[given.network]
    model = load_model(network, given.data / "weights" / f"{weights}.safetensors")
    train = load_data(given.data / "imagenet-calib", model, split="train")
    samples = train.samples(64)
    given.work.mkdir(parents=True, exist_ok=True)
    content = float_model(model.module, samples).SerializeToString()
    file_of(given.work, given.network, "float", "onnx").write_bytes(content)
    for scheme in given.schemes:
        plan, bits = planned(model.module, samples, scheme)
        quantized = ompq.quantize(model.module, bits, samples)
        start = time.perf_counter()
        finalized = ompq.finalize(quantized, samples)
        finalizing = time.perf_counter() - start
        packed = file_of(given.work, given.network, scheme, "ompq.safetensors")
        ompq.save(finalized, packed, plan=plan, network=network)
        onnx = file_of(given.work, given.network, scheme, "onnx")
        verified = export_onnx(finalized, onnx, samples, engine_images=given.engine)
        account = ompq.inspect_file(packed)
        images, found = compared(finalized, onnx, given, model)
        row = {
            "scheme": scheme,
            "average_bits": account.average_bits,
            "float_bytes": len(content),
            "planned_bytes": account.planned_bytes,
            "packed_bytes": account.file_bytes,
            "onnx_bytes": verified.bytes,
            "finalize_seconds": round(finalizing, 2),
            "images": images,
            "runtime_and_simulated": found,
            "engine_images": verified.engine.images,
            "engine_codes": verified.engine.codes,
            "engine_codes_equal": verified.engine.codes_equal,
            "engine_top1": verified.engine.top1,
            "runtime": verified.runtime,
        }
        print(row, flush=True)
        name = f"deploy-agreement-{given.network}-{scheme.replace(' ', '-')}"
        save(name, [row], given.out)


def compared(finalized: nn.Module, onnx: Path, given, model):
    """Return how nearly ONNX Runtime and PyTorch agree, batch by batch."""
    session = open_session(onnx)
    data = load_data(given.data / "imagenet-val", model)
    count, equal, right, furthest = 0, 0.0, 0, 0.0
    for images, targets in data.batches(batch_size=25, limit=given.images):
        found = against_simulated(finalized, session, Samples.of(images))
        logits = session.run(None, {"input": images.numpy()})[0]
        count += len(images)
        equal += found.top1 * len(images)
        right += int((torch.from_numpy(logits).argmax(1) == targets).sum())
        furthest = max(furthest, found.logits)
        print(f"{count} images", flush=True)
    result = {
        "top1_equal": equal / count,
        "logits": furthest,
        "top1": right / count,
    }
    return count, result


def latency(given) -> None:
    """Time every file, the float one and PyTorch in turn; load each; weigh each.

    PyTorch runs eagerly, eagerly in channels-last, and compiled: users choose.
    """
    torch.set_num_threads(given.threads)
    model = load_model(NETWORKS[given.network][0], "none").module.eval()
    image = torch.randn(SHAPE)
    files = {
        scheme: file_of(given.work, given.network, scheme, "onnx")
        for scheme in ("float", *given.schemes)
    }
    runs = {name: runner(path, INPUTS, given.threads) for name, path in files.items()}
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    image_last = image.to(memory_format=torch.channels_last)
    compiled = torch.compile(copy.deepcopy(model))
    pytorch = {
        "PyTorch eager": lambda: model(image),
        "PyTorch channels-last": lambda: last(image_last),
        "PyTorch compiled": lambda: compiled(image),
    }
    with torch.inference_mode():
        times = alternating({**runs, **pytorch}, given.repeats)
    rows = []
    for name, path in files.items():
        memory = peak_memory(path, INPUTS, given.threads)
        row = {
            "scheme": name,
            "ms": round(1000 * sorted(times[name])[given.repeats // 2], 3),
            "times_faster_than_float": round(median_ratio(times, "float", name), 2),
            "times_faster_than": {
                kind: round(median_ratio(times, kind, name), 2) for kind in pytorch
            },
            "load_seconds": round(load_seconds(path, INPUTS, given.threads), 3),
            "peak_mib": round(memory.peak / 2**20, 1),
            "runtime_mib": round(memory.start / 2**20, 1),
            "onnx_bytes": path.stat().st_size,
        }
        print(row, flush=True)
        rows.append(row)
    medians = {
        kind: round(1000 * sorted(times[kind])[given.repeats // 2], 3)
        for kind in pytorch
    }
    save(f"deploy-latency-{given.network}", rows, given.out, pytorch_ms=medians)


def write_widths(given) -> dict[str, Path]:
    """Write the files of all widths that are not there; return where they are."""
    network, weights = NETWORKS[given.network]
    files = {name: file_of(given.work, given.network, name, "onnx") for name in WIDTHS}
    if all(path.exists() for path in files.values()):
        return files
    given.work.mkdir(parents=True, exist_ok=True)
    file = given.data / "weights" / f"{weights}.safetensors"
    model = load_model(network, file).module.eval()
    samples = torch.randn((4, *SHAPE[1:]), generator=torch.Generator().manual_seed(0))
    names = everywhere(model, samples, Choice(8, 8))
    for scheme, bits in WIDTHS.items():
        choices = {name: Choice(bits[i % len(bits)], 8) for i, name in enumerate(names)}
        quantized = ompq.quantize(model, Allocation(choices), samples)
        written = export_onnx(quantized, files[scheme], samples, engine_images=1)
        print(scheme, written.bytes, written.engine, flush=True)
    return files


def loading(given) -> None:
    """Load every file in processes of their own, in turn.

    Memory depends on how the heap happens to be filled, even on the length of the path:
    so that varies.
    """
    files = write_widths(given)
    taken: dict[str, list[list[float]]] = {name: [] for name in files}
    for turn in range(given.repeats):
        for name, path in files.items():
            longer = f"{path.parent}/{'./' * turn}{path.name}"
            words = [longer, str(given.threads), *map(str, SHAPE)]
            done = subprocess.run(
                [sys.executable, "-c", LOAD, *words],
                capture_output=True,
                text=True,
                check=True,
            )
            taken[name].append([float(word) for word in done.stdout.split()])
    rows = []
    keys = ("seconds", "cpu_seconds", "runtime_mib", "load_mib", "peak_mib")
    for name, runs in taken.items():
        columns = zip(*runs, strict=True)
        middle = dict(zip(keys, map(statistics.median, columns), strict=True))
        for key in keys[2:]:
            middle[key] /= 2**20
        first = rows[0] if rows else middle
        ratios = {f"{k}_ratio": middle[k] / first[k] for k in keys if k != keys[2]}
        row = {"scheme": name, "onnx_bytes": files[name].stat().st_size}
        rows.append(row | middle | ratios)
        print(rows[-1], flush=True)
    save(f"deploy-loading-{given.network}", rows, given.out, repeats=given.repeats)


def main() -> None:
    """Measure one part for one network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["agreement", "latency", "loading"])
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, default="resnet18")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--images", type=int, default=2500)
    parser.add_argument("--engine", type=int, default=16, help="images for the engine")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    parts = {"agreement": agreement, "latency": latency, "loading": loading}
    parts[given.part](given)


if __name__ == "__main__":
    main()
