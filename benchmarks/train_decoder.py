"""Train a small decoder of Llama's shape on Python sources, with true float weights.

    python benchmarks/train_decoder.py OUT

Public decoders that fit a small machine come in rounded weights, which flatter whoever
rounds them to the same grid again. This one is trained from nothing, on the sources of
the packages that are installed here; every eighth package is held out. OUT gets the
network with its tokenizer, as ``transformers:OUT`` reads it, and two texts of the
packages held out: ``calibration.txt`` and ``judge.txt``. The defaults take ten minutes
of two CPU cores. On a GPU, 57 million weights take about as long:

    python benchmarks/train_decoder.py OUT --hidden 768 --layers 8 --feed-forward 2048 \
        --vocabulary 8192 --steps 12000 --batch 64 --length 512
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HELD_OUT = 8  # one package in so many
TRAINED_BYTES, TOKENIZER_BYTES, JUDGED_BYTES = 60_000_000, 3_000_000, 200_000
LARGEST_FILE, HEAD = 100_000, 64  # bytes; channels of an attention head


def sources(folder):
    """Return the text of the packages to train on, and of those held out."""
    packages = sorted(path for path in folder.iterdir() if path.is_dir())
    packages = [one for one in packages if any(one.glob("*.py"))]
    texts = []
    for own in (
        [one for at, one in enumerate(packages) if at % HELD_OUT],
        packages[::HELD_OUT],
    ):
        files = [path for one in own for path in sorted(one.rglob("*.py"))]
        # Files of all packages by turns: a large package is not the whole text.
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))
        found, size = [], 0
        for at in order.tolist():
            text = files[at].read_text(errors="ignore")
            if len(text) <= LARGEST_FILE and size < TRAINED_BYTES:
                found.append(text)
                size += len(text)
        texts.append("\n".join(found))
    return texts


def trained_tokenizer(text, size):
    """Return a byte-level BPE tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text[:TOKENIZER_BYTES]], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>"
    )


def built(given, device):
    """Return a network with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=given.feed_forward,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // HEAD,
        num_key_value_heads=max(1, given.hidden // HEAD // 2),
        max_position_embeddings=max(512, given.length),
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).to(device)


def loss_of(network, rows):
    logits = network(rows[:, :-1]).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(network, ids, given):
    """Train on random rows of a text, (tokens,); return the last mean loss."""
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=given.rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    generator, total, started = torch.Generator().manual_seed(0), 0.0, time.time()
    device = next(network.parameters()).device
    for step in range(given.steps):
        warm = min(1.0, (step + 1) / (0.05 * given.steps))
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / given.steps)
        for group in optimizer.param_groups:
            group["lr"] = given.rate * warm * cosine
        starts = torch.randint(
            len(ids) - given.length - 1, (given.batch,), generator=generator
        )
        rows = torch.stack([ids[at : at + given.length + 1] for at in starts.tolist()])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(network, rows.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        total = loss.item() if not step else 0.98 * total + 0.02 * loss.item()
        if step % 50 == 0:
            seconds = time.time() - started
            print(f"step {step}: loss {total:.3f}, {seconds:.0f} s", flush=True)
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    packages = Path(sysconfig.get_paths()["purelib"])
    parser.add_argument("--sources", type=Path, default=packages)
    for name, default in (
        ("hidden", 256), ("layers", 4), ("feed-forward", 768), ("vocabulary", 2048),
        ("steps", 700), ("batch", 8), ("length", 192),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=2e-3)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text, held_out = sources(given.sources)
    tokenizer = trained_tokenizer(text, given.vocabulary)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    network, started = built(given, device), time.time()
    count = sum(one.numel() for one in network.parameters())
    print(f"{count:,} weights, {len(ids):,} tokens to draw from", flush=True)
    last = train(network, ids, given)
    network.cpu().eval().save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    judged = held_out[:JUDGED_BYTES]
    calibration = held_out[JUDGED_BYTES : 2 * JUDGED_BYTES]
    (given.out / "judge.txt").write_text(judged)
    (given.out / "calibration.txt").write_text(calibration)
    rows = torch.tensor(tokenizer(judged, verbose=False)["input_ids"])
    rows = rows[: len(rows) // given.length * given.length]
    rows = rows.reshape(-1, given.length)[:64]
    with torch.no_grad():
        held = loss_of(network, rows).item()
    about = {
        "weights": count,
        "tokens_seen": given.steps * given.batch * given.length,
        "training_loss": last,
        "held_out_perplexity": math.exp(held),
        "seconds": round(time.time() - started),
    }
    (given.out / "training.json").write_text(json.dumps(about, indent=1) + "\n")
    print(about)


if __name__ == "__main__":
    main()
