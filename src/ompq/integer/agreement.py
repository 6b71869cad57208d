"""Agreement: how nearly two forms of one network compute the same."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """How nearly two forms of a network agree on the same images.

    Attributes:
        images: Number of images.
        top1: Fraction of images with the same largest logit.
        logits: Largest difference of two logits, over the root mean square of all.
        codes: Number of activation codes compared; 0 where none were.
        codes_equal: Fraction of them that are equal.
        codes_furthest: Largest difference of two codes, in steps.
    """

    images: int
    top1: float
    logits: float
    codes: int = 0
    codes_equal: float = 1.0
    codes_furthest: int = 0

    def __str__(self) -> str:
        text = (
            f"top-1 equal on {self.top1:.2%} of {self.images} images, "
            f"logits within {self.logits:.1e}"
        )
        if self.codes:
            text += (
                f", {self.codes_equal:.5%} of codes equal and the rest within "
                f"{self.codes_furthest}"
            )
        return text


def compare_outputs(
    first: Tensor, second: Tensor, codes: Iterable[tuple[Tensor, Tensor]] = ()
) -> Agreement:
    """Compare logits, and codes if there are any.

    Args:
        first: Logits of one form, (N, classes, ...); differences are measured by it.
        second: Logits of the other, of the same shape.
        codes: Pairs of integer tensors of one shape each.

    Raises:
        ValueError: There is no image.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
        >>> print(compare_outputs(logits, logits + 0.001))
        top-1 equal on 100.00% of 2 images, logits within 7.1e-04
    """
    if not len(first):
        raise ValueError("there is no image to compare outputs on")
    first, second = first.double(), second.double()
    size = first.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    count, equal, furthest = 0, 0, 0
    for one, other in codes:
        apart = (one.int() - other.int()).abs()
        count += apart.numel()
        equal += int((apart == 0).sum())
        furthest = max(furthest, int(apart.max()))
    return Agreement(
        images=len(first),
        top1=float((first.argmax(1) == second.argmax(1)).double().mean()),
        logits=float((first - second).abs().max() / size),
        codes=count,
        codes_equal=equal / count if count else 1.0,
        codes_furthest=furthest,
    )
