"""Your own network, two budgets at once, and bits for activations as well.

Takes a second. The network is any ``nn.Module``; nothing about it has to be declared.
"""

import torch
from torch import nn

import ompq


class TwoBranches(nn.Module):
    """A toy network that adds an ordinary and a depthwise branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU())
        self.wide = nn.Conv2d(32, 32, 3, 1, 1)
        self.deep = nn.Conv2d(32, 32, 5, 1, 2, groups=32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (N, 3, H, W) to logits (N, 10)."""
        x = self.stem(x)
        return self.head((self.wide(x) + self.deep(x)).relu().mean((2, 3)))


def main() -> None:
    """Limit bytes and bit operations; see which limit is binding."""
    torch.manual_seed(0)
    model, samples = TwoBranches().eval(), torch.randn(32, 3, 32, 32)
    config = ompq.PlanConfig(
        choices=(2, 4, 8),
        activation_choices=(4, 8),
        pinned={"head": (8, 8)},  # the last layer keeps eight bits
        tie=False,  # the branches may differ, though their outputs are added
    )
    for budget in ("7KiB", "7KiB, 60MBOPs", ompq.Budget(size_mib=0.01, bit_ops=60e6)):
        plan = ompq.plan(model, samples, budget, config)
        bits = ", ".join(f"{name} {choice}" for name, choice in plan.allocation.items())
        totals = plan.totals
        print(
            f"{budget}: {totals['bytes']:,.0f} bytes, "
            f"{totals['bit_ops'] / 1e6:.1f} MBOPs\n  {bits}"
        )

    try:
        ompq.plan(model, samples, "7KiB, 1MBOPs", config)
    except ompq.OmpqError as error:
        print(f"7KiB, 1MBOPs: {error}")


if __name__ == "__main__":
    main()
