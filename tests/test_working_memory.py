"""Memory that verbs work in: a limit, a scratch file, and tensors that are parked."""

import subprocess
import sys
import textwrap

import pytest
import torch

import ompq
from cli_tools import run
from nets import TinyMobileNet, TinyResNet, scenes, seeded
from ompq import working_memory
from ompq.errors import HostMemoryError
from ompq.reconstruction import block_loop

QUICK = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=20))


@pytest.fixture
def little(monkeypatch):
    """So little memory to work in that everything goes to the file."""
    monkeypatch.setattr(working_memory, "_limit", 1 << 10)


@pytest.mark.parametrize("network", [TinyResNet, TinyMobileNet])
def test_a_network_learns_in_little_memory_as_in_much(network, monkeypatch):
    model, samples = seeded(network()), scenes(48)
    quantized = ompq.quantize(model, {"*": 3}, samples)
    expected = ompq.reconstruct(quantized, model, samples, QUICK)
    # Batches as before: only where inputs and targets are kept differs.
    monkeypatch.setattr(block_loop, "fitting_batch", lambda *given: given[2])
    monkeypatch.setattr(working_memory, "_limit", 1 << 10)
    found = ompq.reconstruct(quantized, model, samples, QUICK)
    errors = [
        [error.after for error in ompq.quantization_of(each).errors]
        for each in (expected, found)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.2)


def test_runs_in_little_memory_give_the_same_each_time(little):
    model, samples = seeded(TinyResNet()), scenes(32)
    runs = []
    for _ in range(2):
        quantized = ompq.quantize(model, {"*": 3}, samples)
        made = ompq.reconstruct(quantized, model, samples, QUICK)
        runs.append(made.state_dict())
    for name, tensor in runs[0].items():
        assert torch.equal(tensor, runs[1][name]), name


def test_a_limit_holds_inside_its_context():
    outside = working_memory.working_bytes()
    with ompq.host_memory("512MiB") as size:
        assert working_memory.working_bytes() == size == 512 << 20
    assert working_memory.working_bytes() == outside == 2 << 30


def test_the_default_is_halved_where_little_is_free(monkeypatch):
    sizes = []
    for free in (8 << 30, 2 << 30, 1 << 30, 0):
        monkeypatch.setattr(working_memory, "free_bytes", lambda free=free: free)
        with ompq.host_memory(None) as size:
            sizes.append(size >> 20)
    assert sizes == [2048, 1024, 512, 512]


def test_too_small_a_limit_is_refused():
    with (
        pytest.raises(
            HostMemoryError, match=r"memory=100 MiB is too little .* 256 MiB"
        ),
        ompq.host_memory("100MiB"),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"memory=much is not an amount .* 8GiB"),
        ompq.host_memory("much"),
    ):
        pass


def test_a_run_that_does_not_fit_says_so(monkeypatch):
    monkeypatch.setattr(working_memory, "free_bytes", lambda: 1 << 30)
    working_memory.check_free(1 << 20)
    with pytest.raises(HostMemoryError, match=r"needs about 4.00 GiB .* 1.00 GiB are"):
        working_memory.check_free(4 << 30)


def test_a_container_limits_what_is_free(tmp_path, monkeypatch):
    (tmp_path / "limit").write_text("1000\n")
    (tmp_path / "used").write_text("400\n")
    monkeypatch.setattr(working_memory, "_CONTAINERS", [(tmp_path, "limit", "used")])
    assert working_memory.free_bytes() == 600
    (tmp_path / "limit").write_text("max\n")
    assert working_memory.free_bytes() > 600


STEM = """
    import resource, torch
    from torch import nn
    import ompq

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.ReLU(), nn.AvgPool2d(16),
        nn.Conv2d(32, 8, 1), nn.Flatten(), nn.Linear(8 * 16, 10),
    ).eval()
    samples = torch.randn(256, 3, 64, 64)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ompq.host_memory("256MiB"):
        plan = ompq.plan(model, samples[:64], "60%")
        quantized = ompq.quantize(model, plan, samples)
        learning = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=2))
        ompq.reconstruct(quantized, model, samples, learning)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) >> 10)
"""


def test_a_heavy_stem_stays_within_the_limit():
    """Its outputs take 134 MB, several times: side by side and as targets 1.1 GB."""
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STEM)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(made.stdout.split()[-1]) < 768


def test_the_command_line_limits_memory():
    words = ("evaluate", "ompq:demo", "--data", "digits", "--limit", "20")
    refused = run(*words, "--memory", "100MiB")
    assert refused.exit_code == 2
    assert "memory=100 MiB is too little to work in" in refused.stderr
    assert run(*words, "--memory", "512MiB").exit_code == 0
    assert working_memory.working_bytes() == working_memory.DEFAULT_BYTES
