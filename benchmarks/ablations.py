"""The paper's ablations: decreasing functions, beta, granularity, number of samples.

python benchmarks/ablations.py --data FOLDER --network mobilenet_v2 --budget 1.3

Each row changes one setting of the paper's plan (its Tables 1 and 2, and the text
around them), solves again, and tells how many layers get other bits than the paper's
settings give. ``--judge 64`` also rounds the network to these bits and compares it, on
images that no plan has seen, with the float network: the divergence of the logits, and
the share of equal answers. FOLDER is as for ``ptq.py``. ``--score orm_distortion`` does
the same with our default score.
"""

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from common import RESULTS, save
from ptq import NETWORKS
from torch import Tensor, nn

from ompq.datasets.sources import load_data
from ompq.evaluation import evaluate
from ompq.models import load_model
from ompq.plans import PLAN_PROTOCOLS, Plan, PlanConfig, plan
from ompq.quantization import quantize
from ompq.scores import Orm, OrmDistortion, OrmSettings, ScoreTable

FUNCTIONS = ("exp(-x)", "-log(x)", "-x", "-x^3", "-exp(x)")
BETAS = (0.1, 1.0, 10.0, 100.0)
GRANULARITIES = ("layer", "block", "stage", "net")
SAMPLES = (8, 16, 32, 64)
MOST = max(SAMPLES)


def variants(
    base: OrmSettings, samples: int, *, paper: bool
) -> list[tuple[str, OrmSettings, int]]:
    """Return what is tried: its name, the settings, the number of samples."""
    # A distortion cannot be weighted by less than nothing.
    functions = FUNCTIONS[1:] if paper else ()
    return [
        ("the paper's settings" if paper else "our settings", base, samples),
        *(
            (f"function {name}", replace(base, decreasing=name), samples)
            for name in functions
        ),
        *((f"beta {beta:g}", replace(base, beta=beta), samples) for beta in BETAS),
        *(
            (f"granularity {name}", replace(base, granularity=name), samples)
            for name in GRANULARITIES[1:]
        ),
        ("centred, as in the released code", replace(base, centred=True), samples),
        *((f"{count} samples", base, count) for count in SAMPLES),
    ]


@dataclass(frozen=True)
class Filling:
    """A score whose budget is worth using up, whatever the function.

    All but exp(-x) are negative: as the paper writes its program, the fewest bits
    everywhere would be best. So the least coefficient is moved up to zero.
    """

    score: Orm

    def __call__(self, graph, model, samples, choices) -> ScoreTable:
        """Return −bits × coefficient, (units, choices)."""
        table = self.score(graph, model, samples, choices)
        bits = np.array([choice.weight for choice in choices])
        worth = -table.damage[:, 0] / bits[0]
        return replace(table, damage=-np.outer(worth - min(worth.min(), 0), bits))


def planned(options, model: nn.Module, images: Tensor, variant) -> tuple[Plan, float]:
    """Return a plan and the seconds that it took."""
    _, settings, count = variant
    paper = options.score == "orm"
    score = Filling(Orm(settings)) if paper else OrmDistortion(settings)
    protocol = PLAN_PROTOCOLS["paper-ptq"]
    config: PlanConfig = replace(protocol, score=score, method="exact")
    start = time.perf_counter()
    made = plan(model, images[:count], f"{options.budget}MiB", config)
    return made, time.perf_counter() - start


def judged(model: nn.Module, made: Plan, images: Tensor, unseen: Tensor) -> dict:
    """Round to the plan's bits, and compare with the float network on other images."""
    rounded = quantize(model, made, images)
    targets = torch.zeros(len(unseen), dtype=torch.long)  # labels play no part
    found = evaluate(rounded, [(unseen, targets)], reference=model)
    return {"divergence": found.divergence, "agreement": found.agreement}


def ablate(options, model: nn.Module, images: Tensor) -> list[dict]:
    """Return a row for each variant."""
    base = OrmSettings(per_function=options.score != "orm")
    rows: list[dict] = []
    known: dict = {}  # bits → how they do; several variants give the same bits
    first: Plan | None = None
    for variant in variants(base, options.samples, paper=options.score == "orm"):
        made, seconds = planned(options, model, images, variant)
        first = first or made
        bits = [choice.weight for choice in made.allocation.values()]
        own = [choice.weight for choice in first.allocation.values()]
        row = {
            "variant": variant[0],
            "changed": sum(a != b for a, b in zip(bits, own, strict=True)),
            "size_mib": made.totals["bytes"] / 2**20,
            "average_bits": made.totals["average_bits"],
            "seconds": round(seconds, 2),
            "bits": "".join(map(str, bits)),  # 2 to 4: one digit a layer
        }
        if options.judge:
            key = tuple(bits)
            known[key] = known.get(key) or judged(
                model, made, images[:MOST], images[MOST:]
            )
            row |= known[key]
        rows.append(row)
        print(shown(row, len(bits)), flush=True)
    return rows


def shown(row: dict, units: int) -> str:
    """Return a row as a line."""
    text = (
        f"{row['variant']:34s} {row['changed']:3d} of {units} layers changed, "
        f"{row['average_bits']:.3f} bits, {row['seconds']:5.2f} s"
    )
    if "divergence" in row:
        text += f", divergence {row['divergence']:.3f}, same {row['agreement']:.1%}"
    return text


def main() -> None:
    """Run and record one network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=list(NETWORKS)[:2], default="mobilenet_v2")
    parser.add_argument("--budget", type=float, default=1.3, help="MiB, as the paper")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--score", choices=("orm", "orm_distortion"), default="orm")
    parser.add_argument("--judge", type=int, default=0, metavar="IMAGES")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    network, weights, _ = NETWORKS[options.network]
    path = options.data / "weights" / f"{weights}.safetensors"
    model = load_model(network, str(path))
    data = load_data(str(options.data / "imagenet-calib"), model)
    images = data.samples(MOST + options.judge)
    start = time.perf_counter()
    rows = ablate(options, model.module.eval(), images)
    seconds = round(time.perf_counter() - start, 1)
    save(
        f"ablations-{options.network}-{options.score}",
        rows,
        options.out,
        network=options.network,
        budget_mib=options.budget,
        seconds=seconds,
    )


if __name__ == "__main__":
    main()
