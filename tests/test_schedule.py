"""The learning rate, step by step."""

from dataclasses import replace

import numpy as np
import pytest

from ompq.training.training_run import Run
from training_script import QUICK, toy


@pytest.fixture(scope="module")
def toys():
    return toy()


def test_the_rate_falls_as_a_cosine_after_a_rise(toys):
    _, network, data = toys
    run = Run(network, data, replace(QUICK, warmup=4), teacher=None)
    rates = []
    for step in range(run.steps + 1):
        run.step = step
        rates.append(run.rate())
    assert rates[:4] == pytest.approx([0.0125, 0.025, 0.0375, 0.05])
    cosine = [0.05 * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(5)]
    assert rates[4:] == pytest.approx(cosine)
