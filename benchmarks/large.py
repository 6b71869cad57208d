"""A decoder of a billion random weights: time and peak memory of quantizing it.

    python large.py [--layers 22] [--width 2048] [--limit 600MiB] [--out FOLDER]
    python large.py --layers 12 --width 768 --limit 100MiB --reconstruct 20

``--reconstruct N`` learns the rounding of each block in N steps, too. Each stage's peak
is that of the whole process (resident set), weights included; with ``--device cuda``
that of what PyTorch took on the GPU stands beside it.
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from common import RESULTS, save
from transformers import LlamaConfig, LlamaForCausalLM

import ompq

MIB = 1 << 20
VOCABULARY, LENGTH, SAMPLES = 32_000, 16, 2


def decoder(layers: int, width: int) -> torch.nn.Module:
    """Return a decoder of TinyLlama's shape, or narrower."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).requires_grad_(requires_grad=False).eval()


def memory(key: str) -> float:
    """Return MiB of this process: ``VmRSS`` now, ``VmHWM`` at most since reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) / 1024 for one in lines if one.startswith(key))


def stage(name: str, limit: str, device: str, work) -> tuple[dict, object]:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before, start, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    context = ompq.device_memory(limit, device) if limit else nullcontext()
    with context as visits:
        made = work()
    if on_gpu:
        torch.cuda.synchronize()
    row = {
        "stage": name,
        "device_memory": limit or None,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "before_mib": round(before),
        "peak_mib": round(memory("VmHWM")),
        "copies_mib": round(visits.peak_bytes / MIB) if visits else None,
    }
    if on_gpu:
        row["gpu_peak_mib"] = round(torch.cuda.max_memory_allocated() / MIB)
    print(row, flush=True)
    return row, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--limit", default="600MiB")
    parser.add_argument("--reconstruct", type=int, default=0, metavar="N")
    parser.add_argument("--device", default="cpu", help="that the weights visit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    model = decoder(options.layers, options.width)
    weights = sum(p.numel() for p in model.parameters())
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
    config = ompq.PlanConfig(activation_choices=(32,))
    file_name = "large-decoder-learned" if options.reconstruct else "large-decoder"
    file_name += "" if options.device == "cpu" else f"-{options.device}"
    about = {"weights": weights, "weights_mib": round(4 * weights / MIB)}
    print(about, flush=True)
    rows = []

    def do(name: str, limit: str, work):
        row, made = stage(name, limit, options.device, work)
        rows.append(row)
        save(file_name, rows, options.out, **about)
        return made

    with torch.no_grad():
        do("forward", "", lambda: model(ids, use_cache=False))
    limit = options.limit
    do("observe", limit, lambda: ompq.trace(model, ids))
    plan = do("plan", limit, lambda: ompq.plan(model, ids, "4bits", config))
    quantized = do("quantize", limit, lambda: ompq.quantize(model, plan, ids))
    if options.reconstruct:
        steps = ompq.RoundingConfig(iterations=options.reconstruct)
        settings = ompq.ReconstructConfig(rounding=steps)
        about["steps"] = options.reconstruct
        quantized = do(
            "reconstruct",
            limit,
            lambda: ompq.reconstruct(quantized, model, ids, settings),
        )
        errors = ompq.quantization_of(quantized).errors
        about["blocks"] = len(errors)
        about["improved"] = sum(error.improved for error in errors)
    file = options.out / "large.tmp"
    do("save", "", lambda: ompq.save(quantized, file, plan=plan))
    about["file_mib"] = round(file.stat().st_size / MIB, 1)
    about["planned_mib"] = round(plan.totals["bytes"] / MIB, 1)
    file.unlink()
    save(file_name, rows, options.out, **about)


if __name__ == "__main__":
    main()
