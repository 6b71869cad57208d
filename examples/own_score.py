"""A score of your own: a function that estimates the damage of low bit widths.

Takes a second. A score is any callable that returns a table, units × choices; lower is
better. There is nothing to subclass or register.
"""

import numpy as np

import ompq


def largest_step(given: ompq.scores.ScoreInputs) -> np.ndarray:
    """Score by the step of the grid, relative to the spread of the weights."""
    rows = []
    for unit in given.graph.units:
        weight = given.model.get_parameter(unit.parameter).detach()
        span = float(weight.max() - weight.min())
        steps = np.array([span / (2**choice.weight - 1) for choice in given.choices])
        rows.append(steps**2 / 12 / float(weight.var()))
    return np.array(rows)


def main() -> None:
    """Plan with two scores; show where they differ and what difference it makes."""
    demo = ompq.load_model("ompq:demo")
    model = demo.module
    samples = ompq.load_data("digits", demo, split="train").samples(64)
    batches = list(ompq.load_data("digits", demo).batches(batch_size=150))
    scores = {"the default": ompq.scores.Sensitivity(), "our own": largest_step}
    plans = {}
    for name, score in scores.items():
        config = ompq.PlanConfig(score=score, choices=(2, 3, 4, 6, 8))
        plans[name] = plan = ompq.plan(model, samples, "37KiB", config)
        quantized = ompq.quantize(model, plan, samples)
        found = ompq.evaluate(quantized, batches, reference=model)
        print(f"{name:12} top-1 {found.top1:.2%}, divergence {found.divergence:.3f}")

    default, own = (plan.allocation for plan in plans.values())
    for name in default:
        if default[name] != own[name]:
            print(f"{name:20} {default[name].weight} → {own[name].weight} bits")


if __name__ == "__main__":
    main()
