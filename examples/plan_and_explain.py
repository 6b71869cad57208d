"""Which bits does each layer get, why, and what would another budget give?

Takes a second. Planning needs a few unlabelled inputs; another budget needs none.
"""

import ompq


def main() -> None:
    """Plan the network that comes with the package."""
    demo = ompq.load_model("ompq:demo")
    model = demo.module
    samples = ompq.load_data("digits", demo, split="train").samples(64)
    plan = ompq.plan(model, samples, "37KiB")

    for name, choice in plan.allocation.items():
        print(f"{name:20} {choice.weight} bits")
    print(f"{plan.totals['bytes']:,.0f} bytes, {plan.totals['average_bits']:.2f} bits")

    print()
    print(plan.explain("blocks.4.conv2"))

    print("\nThe same plan for other budgets, without the network:")
    for budget in ("32KiB", "37KiB", "48KiB", "3.2bits", "20%"):
        other = plan.with_budget(budget)
        print(
            f"{budget:>8}: {other.totals['average_bits']:.2f} bits on average, "
            f"expected damage {other.damage:.3f}"
        )

    plan.save("plan.json")  # plain JSON: read it, edit it, compare it
    assert ompq.Plan.load("plan.json").hash == plan.hash


if __name__ == "__main__":
    main()
