"""Research: rivals of the paper, audits, published recipes, tables and figures.

Nothing in the core imports this package. What it adds to the core's names (scores,
solvers, weight rules, protocols, commands) is in ``registration``; names are imported
when they are first used.
"""

from typing import TYPE_CHECKING

from ompq.lazy_names import lazy_names

if TYPE_CHECKING:
    from ompq.lab.audit_settings import AuditConfig as AuditConfig
    from ompq.lab.audits import Audit as Audit, audit as audit
    from ompq.lab.brecq import BrecqConfig as BrecqConfig
    from ompq.lab.more_scores.blend import Blend as Blend
    from ompq.lab.more_scores.block_loss import (
        BlockLoss as BlockLoss,
        ReconstructionScore as ReconstructionScore,
    )
    from ompq.lab.more_scores.loss_gradients import (
        Fisher as Fisher,
        Gradient as Gradient,
        Hessian as Hessian,
    )
    from ompq.lab.more_scores.orm_shift import OrmShift as OrmShift
    from ompq.lab.rivals.reinforcement import (
        ReinforceConfig as ReinforceConfig,
        reinforce as reinforce,
    )
    from ompq.lab.rivals.wide_channels import (
        Widened as Widened,
        one_bitwidth as one_bitwidth,
    )
    from ompq.lab.solvers import Genetic as Genetic
    from ompq.lab.weight_rules.dorefa import DoReFaWeights as DoReFaWeights
    from ompq.lab.weight_rules.fracbits import FracBits as FracBits
    from ompq.lab.weight_rules.lq_nets import LearnedLevels as LearnedLevels
    from ompq.lab.weight_rules.outliers import Outliers as Outliers

__getattr__, __dir__, __all__ = lazy_names(__name__)
