"""One step of reconstruction: ours, the same without a CUDA graph, and a plain one.

python benchmarks/ptq_speed.py --data FOLDER

The plain step is what a script would do: soft rounding by a rectified sigmoid and a
penalty, layer by layer, an index and a temperature from the host, Adam as it comes.
"""

import argparse
import copy
import statistics
from pathlib import Path

import torch
from common import RESULTS, save, seconds
from ptq import load
from torch.nn import functional as F

import ompq
from ompq.layers import quantized_layers
from ompq.reconstruction import rounding
from ompq.reconstruction.block_data import BlockRunner
from ompq.reconstruction.block_loop import _learnable
from ompq.reconstruction.descent import Descent, optimising

BATCH = 32


class PlainStep:
    """AdaRound of one block as BRECQ describes it."""

    def __init__(self, block, cache) -> None:
        self.block, self.cache = block, cache
        self.layers = list(quantized_layers(block).values())
        self.logits, self.bases = [], []
        for layer in self.layers:
            with torch.no_grad():
                grid = layer.grid_like_weight()
                position = layer.weight / grid.scale + grid.zero_point
                share = position - position.floor()
                logits = -torch.log(1.2 / (share + 0.1) - 1)
            self.bases.append((grid, position.floor()))
            self.logits.append(logits.requires_grad_())
        self.optimizer = torch.optim.Adam(self.logits, lr=1e-3)
        self.done = 0

    def _share(self, number: int):
        return (torch.sigmoid(self.logits[number]) * 1.2 - 0.1).clamp(0, 1)

    def _soft(self, number: int):
        grid, base = self.bases[number]
        codes = (base + self._share(number)).clamp(0, grid.qmax)
        return grid.scale * (codes - grid.zero_point)

    def advance(self) -> None:
        index = torch.randperm(len(self.cache.targets))[:BATCH]
        inputs, target = self.cache.pick(index.to(self.cache.targets.device))
        for number, layer in enumerate(self.layers):
            layer.learning = (self._soft(number), layer.bias)
        output = self.cache.call(self.block, inputs)
        loss = F.mse_loss(output, target)
        beta = 20 - 18 * self.done / 20_000
        for number in range(len(self.logits)):
            indecision = 1 - (2 * self._share(number) - 1).abs().pow(beta)
            loss = loss + 0.01 * indecision.sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1


def milliseconds(advance, count: int) -> float:
    def steps() -> None:
        for _ in range(count):
            advance()

    steps()
    return 1e3 * statistics.median(seconds(steps) for _ in range(3)) / count


def time_block(block, cache, steps: int) -> dict[str, float]:
    """Return milliseconds a step."""
    config = ompq.RoundingConfig(
        iterations=100 * steps, batch_size=BATCH, step_elements=1 << 40
    )
    found = {}

    def descent() -> Descent:
        own = copy.deepcopy(block)
        layers = list(quantized_layers(own).values())
        soft = rounding.SoftRounding(layers, rounding._runs(own, cache))
        return rounding.rounding_descent(
            own,
            cache,
            soft,
            config,
            rounding.sample_order(cache.targets, config, 0),
            0.03,
        )

    with optimising(block, 0):
        found["eager"] = milliseconds(descent()._advance, steps)
        if torch.cuda.is_available():
            found["captured"] = milliseconds(descent()._captured(), steps)
        found["plain"] = milliseconds(
            PlainStep(copy.deepcopy(block), cache).advance, steps
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", default="mobilenet_v2")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100, help="timed at a time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    model, samples, _ = load(options.network, options.data)
    samples = samples[: options.samples]
    config = ompq.PlanConfig(choices=(4,), score="random")
    plan = ompq.plan(model, samples[:32], "32bits", config)
    quantized = ompq.quantize(model, plan, samples)
    rows = []
    size, limit = ompq.ReconstructConfig().batch_size, 16 << 30
    runner = BlockRunner(
        quantized, model, ompq.Samples.of(samples), batch_size=size, limit=limit
    )
    record, defaults = ompq.quantization_of(quantized), ompq.ReconstructConfig()
    for name in _learnable(quantized, record, defaults):
        cache = runner.gather(name)
        block = quantized.get_submodule(name)
        times = time_block(block, cache, options.steps)
        rows.append({"block": name, **times})
        print(rows[-1], flush=True)
    runner.close()
    total = {key: sum(row[key] for row in rows) for key in times}
    ours = total.get("captured", total["eager"])
    over = {f"{key} / ours": value / ours for key, value in total.items()}
    print(total, over)
    save(f"ptq-speed-{options.network}", rows, options.out, total=total, over=over)


if __name__ == "__main__":
    main()
