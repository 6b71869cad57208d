"""Settings of a training: which are refused, and the protocols."""

import pytest

import ompq


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epochs": 0}, r"epochs=0 must be at least 1"),
        ({"epochs": 2.5}, r"epochs=2.5 must be a whole number"),
        ({"epochs": True}, r"epochs=True must be a whole number"),
        ({"warmup": -1}, r"warmup=-1 must be at least 0"),
        ({"gradient_norm": float("nan")}, r"gradient_norm=nan must be at least 0"),
        ({"momentum": 1}, r"momentum=1 must be from 0 to below 1"),
        ({"range_momentum": 1.0}, r"range_momentum=1.0 must be from 0 to below 1"),
        ({"distill": 2}, r"distill=2 must be from 0 to 1"),
        ({"weight_decay": "x"}, r"weight_decay='x' must be a number"),
        ({"compile": 1}, r"compile=1 must be true or false"),
        ({"tensorboard": 3}, r"tensorboard=3 must be a folder's name"),
        ({"learning_rate": 0.0}, r"learning_rate=0.0 must be above 0 and finite"),
        ({"distill": 1.5}, r"distill=1.5 must be from 0 to 1"),
        (
            {"activations": "outliers"},
            r"activations='outliers' needs weights='outliers', not 'stored'",
        ),
        ({"keep": "lats"}, r"must be one of best, last \(did you mean last\?\)"),
        ({"keep": "all"}, r"keep='all' must be one of best, last"),
        (
            {"activations": "no"},
            r"activations='no' must be one of step, clip, ema, fixed, outliers",
        ),
        (
            {"code_penalty": 1.0, "weights": "minmax"},
            r"code_penalty=1 needs weights='stored' and batch_norm='folded', not 'min",
        ),
    ],
)
def test_wrong_settings_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        ompq.TrainConfig(**wrong)


def test_the_protocol_of_the_paper():
    protocol = ompq.TRAIN_PROTOCOLS["paper-qat"]
    assert protocol == ompq.TRAIN_PROTOCOLS["hawq-v3"]
    assert (protocol.weights, protocol.activations) == ("minmax", "ema")
    assert (protocol.start, protocol.distill) == ("float", 0.0)
    assert (protocol.batch_norm, protocol.freeze_norm_epoch) == ("fold-and-train", 0)
    assert ompq.TRAIN_PROTOCOLS["ours"] == ompq.TrainConfig()
    assert (protocol.epochs, protocol.batch_size) == (90, 128)
    assert protocol.learning_rate == protocol.weight_decay == 1e-4
    assert ompq.PLAN_PROTOCOLS["paper-qat"].choices == (4, 5, 6, 7, 8)
