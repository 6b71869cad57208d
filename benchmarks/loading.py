"""How long packed files with coded weights take to load, and codes to be coded.

python benchmarks/loading.py --data FOLDER --network mobilenet_v2 --size 1.5

FOLDER is as for ptq.py. A network is planned for so many MiB with coded rates, rounded
to nearest and saved in ``--work``, unless it is there. Fresh processes then load it
several times each, with one thread and with as many as libraries start of themselves;
the first time, ``ompq.load`` is also imported. Besides, the codes of a ResNet-50 at 4
bits are encoded and decoded; its weights are random, and rows and columns differ in
size as those of a trained network do. Processor time is that of all threads.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torchvision
from common import arguments, once, save
from ptq import NETWORKS

import ompq
from ompq.datasets.named_data import load_data
from ompq.entropy_coding.codec import decode, encode
from ompq.entropy_coding.rates import coded_codes, rate_curve
from ompq.models.named_models import load_model

# Prints the seconds of each call and those of the processor.
LOAD = """
import sys, time
import torchvision
import ompq

model = torchvision.models.get_model(sys.argv[2])
for _ in range(int(sys.argv[3])):
    start, used = time.perf_counter(), time.process_time()
    ompq.load(sys.argv[1], model)
    print(time.perf_counter() - start, time.process_time() - used)
"""


def write(options, path: Path) -> None:
    """Save a network that was rounded to nearest."""
    name, weights, _ = NETWORKS[options.network]
    named = load_model(name, str(options.data / "weights" / f"{weights}.safetensors"))
    samples = load_data(str(options.data / "imagenet-calib"), named).samples(64)
    config = ompq.PlanConfig(storage="coded")
    plan = ompq.plan(named.module, samples[:32], f"{options.size}MiB", config)
    quantized = ompq.quantize(named.module, plan, samples)
    ompq.save(quantized, path, plan=plan, network=name)


def loaded(options, path: Path, threads: str) -> dict:
    """Return what loading takes in fresh processes, the first time and again."""
    environment = dict(os.environ)
    environment.pop("OMP_NUM_THREADS", None)
    if threads == "1":
        environment["OMP_NUM_THREADS"] = threads
    words = [path, NETWORKS[options.network][0].partition(":")[2], options.repeats]
    first, again = [], []
    for _ in range(options.processes):
        done = subprocess.run(
            [sys.executable, "-c", LOAD, *map(str, words)],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        rows = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
        first.append(rows[0])
        again += rows[1:]
    found: dict = {"threads": threads, "bytes": path.stat().st_size}
    for name, runs in (("first", first), ("again", again)):
        for kind, times in zip(("", "cpu_"), zip(*runs, strict=True), strict=True):
            found[f"{name}_{kind}seconds"] = statistics.median(times)
            found[f"{name}_{kind}seconds_best"] = min(times)
    return found


def coded() -> dict:
    """Return the processor's seconds to encode and decode the codes of a ResNet-50."""
    torch.manual_seed(0)
    codes = []
    for weight in torchvision.models.resnet50().parameters():
        if weight.dim() > 1:
            rows, columns = torch.randn(len(weight), 1), torch.randn(weight.shape[1])
            size = (0.5 * (rows + columns)).exp()
            weight = weight.detach() * size.view(
                *size.shape, *(1,) * (weight.dim() - 2)
            )
            codes.append(coded_codes(weight, rate_curve(weight).step(4.0)).numpy())
    start = time.process_time()
    streams = [encode(one) for one in codes]
    between = time.process_time()
    for stream, one in zip(streams, codes, strict=True):
        decode(stream, one.shape)
    end = time.process_time()
    return {
        "network": "resnet50",
        "codes": sum(one.size for one in codes),
        "bytes": sum(map(len, streams)),
        "encode_cpu_seconds": between - start,
        "decode_cpu_seconds": end - between,
    }


def main() -> None:
    parser = arguments(__doc__, NETWORKS, "out/loading")
    parser.add_argument("--size", type=float, required=True, help="MiB")
    parser.add_argument("--processes", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=6, help="calls in each process")
    options = parser.parse_args()
    name = f"{options.network}-{options.size}.ompq.safetensors"
    path = once(options.work / name, lambda path: write(options, path))
    rows = [loaded(options, path, threads) for threads in ("1", "default")]
    rows.append(coded())
    print(*rows, sep="\n")
    save(f"loading-{options.network}", rows, options.out)


if __name__ == "__main__":
    main()
