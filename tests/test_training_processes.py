"""Training in several processes, and in one that is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ompq
from training_script import CONFIG, kept, made, state, toy

HERE = Path(__file__).parent
SCRIPT = HERE / "training_script.py"


def run(*words, **more):
    paths = [str(Path(ompq.__file__).parent.parent), str(HERE)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        **more,
    )


def close(one, other):
    return all(torch.allclose(one[key], other[key], rtol=1e-9) for key in other)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run(*start, SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    _, network, data = toy()
    # Training data shares the images of each step out: the very same steps.
    shared = load_file(tmp_path / "shared.safetensors")
    assert close(shared, state(ompq.train(network, data, CONFIG)))
    assert not close(shared, state(network))
    # Batches are dealt out in turn: one process with the double batch does the same.
    batches = made(data)
    doubled = [
        tuple(torch.cat(parts) for parts in zip(*batches[i : i + 2], strict=True))
        for i in range(0, 8, 2)
    ]
    found = load_file(tmp_path / "made.safetensors")
    assert close(found, state(ompq.train(network, doubled, CONFIG)))
    # Norms that stand in for biases, and a parameter that nothing reaches.
    model, network, data, config = kept()
    expected = state(ompq.train(network, data, config, teacher=model))
    assert close(load_file(tmp_path / "kept.safetensors"), expected)
    assert not close(expected, state(network))


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_bits(tmp_path):
    killed = run(SCRIPT, tmp_path, "--kill-at", 7)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "shared.safetensors").exists()
    _, network, data = toy()
    seen = []
    resumed = ompq.train(
        network,
        data,
        CONFIG,
        checkpoint=tmp_path / "shared",
        progress=lambda done, *_: seen.append(done),
    )
    assert seen == [7, 8]  # the last checkpoint before the kill was that of step 6
    whole = state(ompq.train(network, data, CONFIG))
    assert all(torch.equal(state(resumed)[key], whole[key]) for key in whole)
