"""Identities: equal for equal content, different for different content."""

import functools
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ompq
from ompq.checkpoints import Store
from ompq.content_identity import identity
from ompq.errors import CheckpointError


class Shade(Enum):
    RED = "a"
    BLUE = "b"


@dataclass
class Setting:
    width: int = 3


class Penalty:
    scale = 2.0

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, output, targets):
        return self.scale * self.weight * F.cross_entropy(output, targets)


class OtherPenalty(Penalty):
    scale = 3.0


class MethodPenalty(Penalty):
    def __call__(self, output, targets):
        return self.weight


WEIGHT = 2.0


def scaled(weight):
    return lambda output, targets: weight * F.cross_entropy(output, targets)


def read_global(output, targets):
    return WEIGHT * F.cross_entropy(output, targets)


def calls_another(output, targets):
    return read_global(output, targets)


def by_default(output, targets, weight=1.0):
    return weight


DIFFERENT = [
    None, 0, False, 0.0, "", b"", "0", (), (0,), ((0,), ()), {}, {"a": 1}, {"b": 1},
    {1}, {2}, Shade.RED, Shade.BLUE, Path("a"), Setting(), Setting(4),
    torch.zeros(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.int32),
    torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]),
    torch.zeros(2, dtype=torch.bfloat16), np.zeros(3), torch.float32, torch.float16,
    torch.device("cpu"), F.cross_entropy, F.mse_loss, torch.relu, len,
    lambda output: 1, lambda output: 2, lambda output: output.x,
    lambda output: output.y,
    lambda output: [one + 1 for one in output],
    lambda output: [one + 2 for one in output],
    scaled(1.0), scaled(2.0), by_default, read_global, calls_another,
    functools.partial(by_default, weight=2.0),
    functools.partial(by_default, weight=3.0),
    Penalty(1.0), Penalty(2.0), OtherPenalty(1.0), MethodPenalty(1.0), Penalty,
    Penalty(3.0).__call__, ompq.Perplexity(), nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(label_smoothing=0.1), nn.Linear(2, 2), nn.Conv2d(1, 1, 1),
]  # fmt: skip


def test_different_content_has_different_identities():
    found = [identity(one) for one in DIFFERENT]
    assert len(set(found)) == len(found)
    assert found == [identity(one) for one in DIFFERENT]
    assert identity(1, 2) != identity((1, 2)) != identity(2, 1)


def test_equal_content_has_the_same_identity():
    pairs = [
        (scaled(1.5), scaled(1.5)),
        (Penalty(1.0), Penalty(1.0)),
        (torch.zeros(3), torch.zeros(6)[::2]),
        (torch.ones(2), nn.Parameter(torch.ones(2))),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss()),
        ({3, 1, 2}, {2, 3, 1}),
    ]
    for one, other in pairs:
        assert identity(one) == identity(other)


def test_variables_that_a_function_reads_belong_to_it(monkeypatch):
    before = identity(read_global), identity(calls_another)
    monkeypatch.setitem(globals(), "WEIGHT", 3.0)
    after = identity(read_global), identity(calls_another)
    assert before[0] != after[0] and before[1] != after[1]


def recursive(depth):
    return recursive(depth - 1) if depth else 0


def test_what_refers_to_itself_has_an_identity():
    loop = Penalty(1.0)
    loop.weight = loop
    assert len({identity(loop), identity(recursive), identity(Penalty(1.0))}) == 3


def test_what_has_no_content_is_refused(tmp_path):
    with (
        (tmp_path / "a").open("w") as file,
        pytest.raises(
            CheckpointError,
            match="an object of type TextIOWrapper cannot be identified, so what de",
        ),
    ):
        identity(lambda output: file.write(output))
    with pytest.raises(CheckpointError, match="of type Generator cannot be identified"):
        identity({"a": torch.Generator()})
    assert Store.of(None, "walk", torch.Generator()).read() is None  # nothing is kept
    store = Store.of(str(tmp_path / "b"), "walk", 1)
    store.write(json.loads("[1]"))
    assert Store.of(tmp_path / "b", "walk", 1).read().data == [1]


KINDS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool)


@pytest.mark.parametrize("kind", KINDS)
def test_identities_read_tensors_of_any_type(kind):
    one, other = (torch.tensor([0.0, 1.0, end]).to(kind) for end in (0.0, 1.0))
    assert identity(one) == identity(one.clone()) != identity(other)
    assert identity(torch.tensor(1.5)) != identity(torch.tensor([1.5]))
