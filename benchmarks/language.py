"""GGUF files of one decoder, all run by llama.cpp: divergence and perplexity by bytes.

    python benchmarks/language.py float NETWORK OUT.gguf
    python benchmarks/language.py nearest NETWORK Q4_0 OUT.gguf
    python benchmarks/language.py rounded NETWORK CALIBRATION.txt 4 OUT.gguf
    python benchmarks/language.py rounded NETWORK CALIBRATION.txt 73MiB OUT.gguf
    python benchmarks/language.py judge NETWORK TEXT.txt FLOAT.gguf FILE.gguf... \
        -o results/language-NAME.json

NETWORK is a folder or a .gguf file, as ``transformers:NETWORK`` reads it. ``nearest``
rounds every matrix as the package gguf does, which is what llama.cpp calls Q4_0 and the
like. ``rounded`` has error feedback: a width is that of all matrices, a size that of
planned bits. ``judge`` compares the probabilities of the token after each of many
stretches of a text with those of the float file, in the same runtime.
"""

import argparse
import json
import math
from pathlib import Path

import gguf
import torch

import ompq
from ompq.runtimes.gguf.gguf_files import open_writer
from ompq.runtimes.gguf.gguf_metadata import tokenizer_of
from ompq.runtimes.gguf.gguf_tensors import named_tensors
from ompq.runtimes.gguf.llama_runtime import llama_version, next_tokens
from ompq.tokenizers import load_tokenizer

CALIBRATION, LENGTH = 24, 128  # texts, and tokens of each
STRETCHES, CONTEXT = 160, 96  # judged


def read_tokens(network, text, count, length):
    ids = load_tokenizer(str(network))(text.read_text(), verbose=False)["input_ids"]
    return torch.tensor(ids[: count * length]).reshape(-1, length)


def write_nearest(network, kind, path):
    number = gguf.GGMLQuantizationType[kind]
    with open_writer(network, path, tokenizer_of(network), 32) as writer:
        for one in named_tensors(network):
            if len(one.shape) == 2:
                content = gguf.quantize(one.values.numpy(), number)
                writer.add_tensor(one.name, content, raw_dtype=number)
            else:
                writer.add_tensor(one.name, one.content)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def write_rounded(network, calibration, wanted, path):
    """Round to one width, or to planned bits within a size."""
    config = ompq.PlanConfig(target="gguf")
    if wanted.isdecimal():
        pinned = {"*": int(wanted)}
        config = ompq.PlanConfig(target="gguf", pinned=pinned, score="weight_noise")
        wanted = "100GiB"
    plan = ompq.plan(network, calibration, wanted, config)
    quantized = ompq.quantize(network, plan, calibration)
    ompq.export(quantized, path, calibration)


def judge(network, text, reference, files):
    """Return a row for each file."""
    stretches = read_tokens(network, text, STRETCHES, CONTEXT + 1)
    prompts, following = stretches[:, :-1].tolist(), stretches[:, -1:]
    vocabulary = ompq.load_model(f"transformers:{network}").vocabulary

    def log_probabilities(path):
        return next_tokens(path, prompts, vocabulary).log_softmax(1)

    expected, rows = log_probabilities(reference), []
    for path in (reference, *files):
        found = expected if path == reference else log_probabilities(path)
        apart = expected.exp() * (expected - found)
        divergence = apart.nan_to_num(0.0).sum(1)
        own = -found.gather(1, following).mean().item()
        row = {
            "file": path.name,
            "bytes": path.stat().st_size,
            "divergence": divergence.mean().item(),
            "standard_error": (divergence.std() / math.sqrt(len(divergence))).item(),
            "perplexity": math.exp(own),
            "same_token": (found.argmax(1) == expected.argmax(1)).float().mean().item(),
        }
        rows.append({n: round(v, 5) if v != path.name else v for n, v in row.items()})
        print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("float", "nearest", "rounded", "judge"))
    parser.add_argument("network", type=Path)
    parser.add_argument("rest", nargs="+")
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    if given.action == "judge":
        text, reference, *files = map(Path, given.rest)
        rows = judge(given.network, text, reference, files)
        about = {"network": given.network.name, "runtime": llama_version()}
        about |= {"stretches": STRETCHES, "tokens_before": CONTEXT}
        if given.out:
            given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        return
    network = ompq.load_model(f"transformers:{given.network}").module
    path = Path(given.rest[-1])
    if given.action == "float":
        ompq.export(network, path, torch.zeros(2, 16, dtype=torch.long))
    elif given.action == "nearest":
        write_nearest(network, given.rest[0], path)
    else:
        source, wanted = given.rest[:2]
        seen = read_tokens(given.network, Path(source), CALIBRATION, LENGTH)
        write_rounded(network, seen, wanted, path)


if __name__ == "__main__":
    main()
