"""Groups of options become configurations."""

from ompq.cli.option_groups import PlanOptions, ScoreOptions
from ompq.configs import OrmSettings
from ompq.network.units import Choice
from ompq.planning import chosen_score, free_choices
from ompq.scores.orthogonality import Orm


def test_options_of_orm_reach_the_score():
    options = ScoreOptions(
        protocol="paper-ptq", beta=3.0, decreasing="-x", centred=True
    )
    wanted = OrmSettings(beta=3.0, decreasing="-x", centred=True)
    assert chosen_score(options.config()) == Orm(wanted)
    blocks = ScoreOptions(score="orm_distortion", granularity="block")
    distortion = chosen_score(blocks.config())
    assert distortion.settings == OrmSettings(per_function=True, granularity="block")
    pairs = free_choices(PlanOptions(choices="W4A4, w8a8").config())
    assert pairs == [Choice(4, 4), Choice(8, 8)]
