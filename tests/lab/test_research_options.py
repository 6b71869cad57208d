"""Options of an audit become its configuration."""

import pytest

from ompq.cli.option_groups import PlanOptions
from ompq.lab.audit_command import audit_config
from ompq.lab.audit_settings import AuditConfig
from ompq.lab.research_options import AuditOptions
from ompq.scores.catalogue import SCORES
from ompq.scores.orthogonality import Orm, OrmSettings
from ompq.scores.weight_noise import WeightNoise


def test_an_audit_takes_quick_scores_or_all_of_them():
    planning = PlanOptions(activation_bits="4,8")
    assert audit_config(AuditOptions(), planning, 0).scores == AuditConfig.scores
    assert "reconstruction" not in AuditConfig.scores
    assert audit_config(AuditOptions(scores="all"), planning, 0).scores == tuple(SCORES)


def test_options_of_orm_reach_the_audited_scores():
    names = AuditOptions(scores="orm,weight_noise,orm_distortion")
    orm, noise, distortion = audit_config(
        names, PlanOptions(beta=3.0, centred=True), 0
    ).scores
    assert orm == Orm(OrmSettings(beta=3.0, centred=True))
    assert noise == WeightNoise()
    wanted = OrmSettings(beta=3.0, centred=True, per_function=True)
    assert distortion.settings == wanted
    with pytest.raises(
        ValueError, match="--beta: .* not weight-noise; add --scores orm"
    ):
        audit_config(AuditOptions(scores="weight_noise"), PlanOptions(beta=3.0), 0)
