import pytest
import torch

from ompq.reconstruction.rounding import (
    RoundingConfig,
    first_decided,
    sample_order,
    schedule,
)


def test_each_step_reads_its_rates_from_the_table():
    config = RoundingConfig(
        iterations=1000,
        travel=2.0,
        activation_learning_rate=1e-4,
        scale_learning_rate=1e-3,
        bias_learning_rate=1e-2,
        warmup=0.2,
        tail=0.1,
        drive=20.0,
        exponent=(8.0, 2.0),
    )
    table = schedule(config)
    assert table.shape == (1000, 6)
    assert first_decided(config) == 900
    for step in (0, 199, 200, 500, 899, 900, 999):
        left = 1 - step / 1000
        phase = min(max((step / 1000 - 0.2) / 0.7, 0), 1)
        rate = 0.002 if step < 900 else 0.0
        wanted = (
            rate,
            1e-4 * left,
            1e-3 * left,
            1e-2 * left,
            8 - 6 * phase,
            20 * phase * rate,
        )
        assert table[step].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-7)


def test_few_iterations_do_not_make_the_rate_large():
    assert schedule(RoundingConfig(iterations=10))[0, 0].item() == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((100, 8, 4, 4), 16),  # 2048 / 128
        ((100, 64, 8, 8), 8),  # half a sample would do: never fewer than eight
        ((100, 10), 64),  # never more than the batch size
        ((20, 10), 20),  # nor than there are
    ],
)
def test_large_outputs_take_fewer_samples_a_step(shape, size):
    config = RoundingConfig(iterations=7, step_elements=2048, batch_size=64)
    order = sample_order(torch.zeros(shape), config)
    assert order.shape == (7, size)
    assert order.min() >= 0 and order.max() < shape[0]
    assert torch.equal(order, sample_order(torch.zeros(shape), config))
    other = sample_order(torch.zeros(shape), RoundingConfig(iterations=7, seed=1))
    assert not torch.equal(order[:, :8], other[:, :8])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"iterations": 0}, "iterations=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"drop": 2.0}, "drop=2.0 must be from 0 to 1"),
        ({"float_inputs": -0.5}, "float_inputs=-0.5 must be from 0 to 1"),
        ({"tail": 1.5}, "tail=1.5 must be from 0 to 1"),
        ({"warmup": -1}, "warmup=-1 must be from 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(setting, words):
    with pytest.raises(ValueError, match=words):
        RoundingConfig(**setting)
