"""Plans and results for the tests of the report."""

from collections import OrderedDict

import numpy as np
from torch import nn

from nets import TinyMobileNet, images, seeded
from ompq.allocation.problem import Allocation
from ompq.budgets import Budget
from ompq.configs import PlanConfig
from ompq.lab.audits import (
    RANDOM,
    Audit,
    Correlation,
    Correlations,
    Measured,
    ScoreAudit,
)
from ompq.network.units import Choice, LayerGraph, Unit
from ompq.planning import plan
from ompq.plans import Plan
from ompq.report_sections import (
    Accuracy,
    AgreementSection,
    AuditedBits,
    AuditedRanks,
    BlockErrorSection,
    Histogram,
    Remark,
    Section,
    StageTime,
    Versions,
)
from ompq.score_tables import ScoreTable

HOSTILE = "<img src=x onerror=alert(1)>"
CLOSING = "</script><script>alert(2)</script>"


def toy_plan(budget: str = "3.9KiB", **config) -> Plan:
    return plan(seeded(TinyMobileNet()), images(), budget, PlanConfig(**config))


def hostile_plan() -> Plan:
    layers = {
        HOSTILE: nn.Conv2d(3, 6, 3),
        "relu": nn.ReLU(),
        CLOSING: nn.Conv2d(6, 4, 1),
        "pool": nn.AdaptiveAvgPool2d(1),
    }
    return plan(nn.Sequential(OrderedDict(layers)), images(), "1.35KiB")


def big_plan(count: int) -> Plan:
    rng = np.random.default_rng(0)
    units = tuple(
        Unit(
            name=f"stages.{i // 50}.blocks.{i // 5 % 10}.projection.{i}",
            kind="conv",
            parameter=f"{i}.weight",
            weight_shape=(64, 64, 3, 3),
            out_channels=64,
            bias_parameters=0,
            norm="",
            norm_parameters=0,
            macs=10**7 + i,
            calls=1,
            block=f"b{i // 5}",
            stage=i // 50,
            group=f"g{i}",
            feature=i,
            activation="",
        )
        for i in range(count)
    )
    choices = tuple(Choice(bits, 8) for bits in (2, 3, 4, 5, 6, 7, 8))
    damage = rng.random((count, 1)) * 4.0 ** -np.arange(7)
    orm = 0.5 + 0.5 * np.corrcoef(rng.normal(size=(count, 40)))
    gamma = orm.sum(1) - 1
    names = tuple(unit.name for unit in units)
    return Plan(
        graph=LayerGraph(units),
        choices=choices,
        scores=ScoreTable(damage, orm, names, gamma, np.exp(-gamma / count)),
        allowed=np.ones(damage.shape, bool),
        budget=Budget(average_bits=4),
        allocation=Allocation(dict.fromkeys(names, Choice(4, 8))),
    )


def every_section(name: str = "conv1") -> list[Section]:
    counts, edges = np.histogram(np.random.default_rng(0).normal(size=500), 20)
    return [
        Accuracy(f"float {name}", 0.8, 0.75, 0.84, 400, 40_000.0, f"note {name}"),
        Accuracy(f"mixed {name}", 0.78, 0.73, 0.82, 400, 2_200.0),
        BlockErrorSection(f"block {name}", 0.02, 0.005),
        BlockErrorSection(f"worse {name}", 0.01, 0.03, kept=False),
        Histogram(
            f"weight {name}",
            tuple(edges.tolist()),
            tuple(counts.tolist()),
            (("clipped", 1.5), (f"far {name}", 99.0)),
        ),
        AuditedBits(f"bits {name}", 0.1, 0.5, 9.0, metrics=((f"metric {name}", 2.0),)),
        AuditedRanks(f"ranks {name}", f"alike {name}", ((1.0, 2.0), (3.0, 4.0))),
        AuditedRanks(f"chance {name}", f"little {name}"),
        StageTime(f"stage {name}", 61.2),
        AgreementSection(f"file {name}", 0.9975, 400, 0.9999, 1, f"fine {name}"),
        Remark(f"layer {name}", f"runs as int8 {name}"),
        Versions({f"torch {name}": "2.15", "seed": "0"}),
    ]


def toy_audit() -> Audit:
    """Two random allocations, and a score that has them the wrong way round."""
    rho, one = Correlation(-1.0, -1.0, -1.0), Correlation(1.0, 1.0, 1.0)
    bits = ((2, 8), (4, 8))
    more = {"top1": 0.5, "metrics": {"points": 7.5}}
    return Audit(
        budget="3bits",
        units=("a", "b"),
        measured=(
            Measured("wrong", bits, 10.0, 0.3, **more),
            Measured(f"{RANDOM}0", bits, 10.0, 0.3, orthogonality=0.5, **more),
            Measured(f"{RANDOM}1", bits[::-1], 10.0, 0.1, orthogonality=0.4, **more),
            Measured("published", bits, 20.0, 0.05, fits=False, **more),
        ),
        scores=(ScoreAudit("wrong", rho, rho, 0.3, 2.0, 0.5, (1.0, 2.0)),),
        null_spearman=(0.3, 0.5),
        orthogonality={"divergence": Correlations(one, one)},
    )
