"""How an audit samples allocations and measures them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from ompq.configs import PlanConfig

if TYPE_CHECKING:
    from ompq.evaluation import Metric
    from ompq.scores.computation import Score


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """How allocations are sampled and measured.

    Attributes:
        allocations: Number of random allocations that meet the budget.
        null_scores: Number of random scores, which show the correlation by chance.
        resamples: Bootstrap resamples for each 95 % interval.
        iterations: Reconstruction steps per block for each allocation; 0 rounds to
            nearest, which is quick.
        orm_samples: Samples for the orthogonality of quantized networks; 0 skips it.
        scores: The scores to audit, or their names. By default those that are quick
            and can also choose the bits of activations.
        plan: Choices, pins and so on; its own score is not used.
        metrics: What to measure on labelled batches besides top-1, as for ``evaluate``.
        seed: Seed for allocations, null scores and resamples.
    """

    allocations: int = 60
    null_scores: int = 20
    resamples: int = 1000
    iterations: int = 0
    orm_samples: int = 64
    scores: "tuple[Score | str, ...]" = (
        *("sensitivity", "blend", "output_divergence", "weight_noise"),
        *("orm", "smallest_first"),
    )
    plan: PlanConfig = PlanConfig()
    metrics: "Mapping[str, Metric]" = field(
        default_factory=lambda: MappingProxyType({})
    )
    seed: int = 0
