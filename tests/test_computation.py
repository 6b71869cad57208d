import copy
import json
import logging
import time
from unittest.mock import ANY

import numpy as np
import pytest
import torch

import ompq
from nets import TinyResNet, images, seeded
from ompq import lab
from ompq.errors import FileError
from ompq.lab.more_scores.block_loss import BlockLoss
from ompq.scores.catalogue import SCORES, score_table
from tables import score_inputs

CHOICES = (ompq.Choice(2, 8), ompq.Choice(4, 8))


@pytest.fixture
def network():
    return seeded(TinyResNet())


@pytest.fixture
def passes(network):
    """Count the calls of the network's first layer."""
    calls = []
    network.stem.register_forward_hook(lambda *_: calls.append(1))
    return calls


def made(network, folder, samples=None, **settings):
    config = ompq.PlanConfig(score=settings.pop("score", "blend"), **settings)
    given = images() if samples is None else samples
    return ompq.plan(network, given, "3bits", config, cache=folder)


@pytest.mark.parametrize("name", ["blend", "orm", "orm_distortion", "fisher"])
def test_the_second_plan_only_observes_the_network(network, passes, tmp_path, name):
    first = made(network, tmp_path, score=name)
    passes.clear()
    ompq.trace(network, images())
    observing = len(passes)
    passes.clear()
    second = made(network, tmp_path, score=name)
    assert len(passes) == observing + 1  # in which its output is recognised
    plain = ompq.plan(network, images(), "3bits", ompq.PlanConfig(score=name))
    assert second.hash == first.hash == plain.hash
    assert second.score_name == name
    assert len(list(tmp_path.iterdir())) == 1


def test_whatever_a_table_depends_on_makes_another_file(network, tmp_path):
    made(network, tmp_path)
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.head.bias[0] += 1e-3
    statistics = copy.deepcopy(network)
    statistics.norm.running_mean[0] += 1e-3
    epsilon = copy.deepcopy(network)
    epsilon.norm.eps = 0.1
    made(other, tmp_path)
    made(statistics, tmp_path)
    made(epsilon, tmp_path)
    made(network, tmp_path, images(seed=2))
    made(network, tmp_path, images(7))
    made(network, tmp_path, {"x": images()})
    made(network, tmp_path, choices=(2, 4))
    made(network, tmp_path, tie=False)
    made(network, tmp_path, score=lab.Blend(samples=4))
    assert len(list(tmp_path.iterdir())) == 10
    # Another budget or pins of known bits do not.
    made(network, tmp_path, pinned={"@first": 8})
    made(network, tmp_path, (images(),)[0].clone())
    assert len(list(tmp_path.iterdir())) == 10


def test_the_file_says_what_it_belongs_to(network, tmp_path):
    made(network, tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("Blend-")
    data = json.loads(path.read_text())
    assert data["format"] == "ompq-score-table/3"
    about = data["kept"]["about"]
    assert about["score"] == "Blend(samples=64)"
    assert about["choices"][0] == [2, 8]
    assert len(about["network"]) == len(about["samples"]) == 64


@pytest.mark.parametrize("harm", ["text", "list", "table", "other", "shape"])
def test_damaged_files_are_computed_again(network, tmp_path, caplog, harm):
    first = made(network, tmp_path)
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    table, rows = data["kept"], data["kept"]["damage"]
    harmed = {
        "text": "{",
        "list": "[]",
        "table": json.dumps({**data, "kept": {**table, "damage": None}}),
        "other": json.dumps({**data, "identity": "0" * 64}),
        "shape": json.dumps({**data, "kept": {**table, "damage": rows[1:]}}),
    }
    path.write_text(harmed[harm])
    with caplog.at_level(logging.WARNING):
        assert made(network, tmp_path).hash == first.hash
    assert "; computing it again" in caplog.text
    again = json.loads(path.read_text())
    assert again == {**data, "kept": {**table, "seconds": ANY}}


def test_scores_of_ones_own_and_labels_are_not_kept(network, tmp_path, caplog):
    def own(given):
        return [[4.0**-choice.weight for choice in given.choices]] * len(given.graph)

    batches = [(images(), torch.arange(8) % 5)]
    for score in (own, lab.Fisher(batches=batches)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            made(network, tmp_path, score=score)
        assert f"the score table is not kept in {tmp_path}: only" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told(network, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        made(network, tmp_path / "file", score="weight_noise")


@pytest.mark.parametrize("name", [name for name in SCORES if name != "reconstruction"])
def test_kept_tables_are_the_computed_ones(network, tmp_path, name):
    score = BlockLoss(iterations=2) if name == "block_loss" else name
    graph = ompq.trace(network, images())
    given = score_inputs(graph, network, images(), CHOICES)
    plain = score_table(score, given).as_saved()
    for _ in range(2):
        found = score_table(score, given, tmp_path)
        assert found.orm_labels == plain.orm_labels
        for part in ("damage", "gamma", "importance", "orm"):
            ours, expected = getattr(found, part), getattr(plain, part)
            assert (ours is None) == (expected is None)
            if ours is not None:
                np.testing.assert_array_equal(ours, expected)


def test_a_kept_table_knows_what_it_took(network, tmp_path):
    graph = ompq.trace(network, images())
    given = score_inputs(graph, network, images(), CHOICES)

    def slow(given):
        time.sleep(0.05)
        return np.zeros((len(given.graph), len(given.choices)))

    start = time.perf_counter()
    assert 0.05 <= score_table(slow, given).seconds <= time.perf_counter() - start
    first = score_table("orm", given, tmp_path)
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    assert data["kept"]["seconds"] == pytest.approx(first.seconds, abs=1e-3)
    path.write_text(json.dumps({**data, "kept": {**data["kept"], "seconds": 77.5}}))
    assert score_table("orm", given, tmp_path).seconds == 77.5
    assert "seconds" not in made(network, tmp_path, score="orm").scores.to_json()
