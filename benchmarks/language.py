"""A decoder as GGUF: uniform types against planned bits of the same bytes, perplexity.

    python benchmarks/language.py FOLDER VALIDATION.txt TEST.txt

The folder holds a decoder of transformers and its tokenizer; the first text calibrates,
the second judges. Rows are written to results/language.json as they are measured. The
smallest type is Q4_0, so a mix of its bytes is Q4_0 itself: mixes are compared at the
bytes of Q5_0.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import ompq

RESULTS = Path(__file__).parent / "results" / "language.json"
LENGTH, CALIBRATION, JUDGED, SCORED = 256, 16, 16, 4
FEEDBACK, NEAREST = (ompq.QuantizeConfig(output_error=on) for on in (True, False))


def perplexity(module, ids):
    found = ompq.evaluate(module, [(ids, ids)], metrics={"p": ompq.Perplexity()})
    return found.metrics["p"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("folder", "calibration", "judge"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    named = ompq.load_model(f"transformers:{given.folder}")
    network = named.module
    from transformers import AutoTokenizer

    tokenize = AutoTokenizer.from_pretrained(given.folder)

    def read(path, count):
        text = path.read_text()[: 8 * count * LENGTH]
        ids = torch.tensor(tokenize(text)["input_ids"])
        return ids[: count * LENGTH].reshape(count, LENGTH)

    seen, judged = read(given.calibration, CALIBRATION), read(given.judge, JUDGED)
    rows = []

    def note(name, started, **row):
        row = {"name": name, **row, "seconds": round(time.perf_counter() - started, 1)}
        rows.append(row)
        about = {"network": given.folder.name, "judged_tokens": judged.numel()}
        about |= {"calibration_tokens": seen.numel(), "scored_texts": SCORED}
        RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        print(row, flush=True)

    def measure(name, plan, config=FEEDBACK):
        started = time.perf_counter()
        quantized = ompq.quantize(network, plan, seen, config)
        with torch.no_grad():
            value = perplexity(quantized, judged)
        note(name, started, perplexity=value, bytes=int(plan.totals["gguf_bytes"]))

    def uniform(bits):
        config = ompq.PlanConfig(
            target="gguf", pinned={"*": bits}, score="weight_noise"
        )
        return ompq.plan(network, seen[:1], "10GiB", config)

    started = time.perf_counter()
    note("float", started, perplexity=perplexity(network, judged))
    measure("Q4_0 to nearest", uniform(4), NEAREST)
    measure("Q4_0", uniform(4))
    five = uniform(5)
    measure("Q5_0", five)
    started = time.perf_counter()
    budget = f"{five.totals['gguf_bytes']:.0f}B"
    config = ompq.PlanConfig(target="gguf")
    mixed = ompq.plan(network, seen[:SCORED], budget, config)
    print(f"planned in {time.perf_counter() - started:.0f} s", flush=True)
    measure("planned, bytes of Q5_0", mixed)


if __name__ == "__main__":
    main()
