"""Several processes give what one gives."""

import os
import re
import subprocess
import sys
from ast import literal_eval

import pytest
import torch
from safetensors.torch import load_file

import ompq
import processes_script
from cli_tools import run
from ompq import parallel
from ompq.samples import Samples
from training_script import CONFIG, hawq, kept, made, state, toy

FAILED = re.compile(r"\d: .*image 1 is broken").fullmatch


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where the script's results go, by the number of processes."""
    return {count: tmp_path_factory.mktemp(f"processes{count}") for count in (1, 2)}


@pytest.fixture(scope="module")
def printed(folders):
    """What the script prints in two processes."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    result = subprocess.run(
        [sys.executable, *launcher, processes_script.__file__, folders[2]],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result


@pytest.fixture(scope="module")
def runs(folders, printed):
    """The script's results, in one process and in two."""
    processes_script.main(folders[1])
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("score", ["output_divergence", "fisher", "sensitivity"])
def test_plans_are_the_same_byte_for_byte(runs, score):
    one, two = ((runs[count] / f"{score}.json").read_bytes() for count in (1, 2))
    assert one == two


@pytest.mark.slow
def test_evaluation_and_audit_are_the_same_in_every_process(runs):
    for name in ("rounded", "audit"):
        alone = (runs[1] / f"{name}-0.txt").read_text()
        assert (runs[2] / f"{name}-0.txt").read_text() == alone
        assert (runs[2] / f"{name}-1.txt").read_text() == alone


@pytest.mark.slow
def test_processes_wait_for_what_the_first_one_does_outside_a_group(folders, printed):
    assert [(folders[2] / f"waited-{n}.txt").read_text() for n in (0, 1)] == [
        "True"
    ] * 2


@pytest.mark.slow
def test_reconstruction_ends_with_one_network_as_good_as_that_of_one_process(runs):
    first, second = (load_file(runs[2] / f"{n}.safetensors") for n in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    divergence = {
        name: literal_eval(
            (folder / f"{name}-0.txt").read_text().partition("]")[0] + "]"
        )[2]
        for folder, name in ((runs[2], "rounded"), (runs[2], "learned"))
    }
    assert divergence["learned"] < divergence["rounded"]
    assert (runs[2] / "blocks.safetensors").exists()


@pytest.mark.slow
def test_a_failure_in_one_process_reaches_all(printed):
    assert sorted(line for line in printed.stdout.split("\n") if FAILED(line)) == [
        "0: in process 1: DataError: image 1 is broken",
        "1: image 1 is broken",
    ]


@pytest.mark.slow
def test_the_first_process_tells_what_all_refuse(printed):
    assert printed.stderr.count("error: ") == 1
    assert "in process" not in printed.stderr


@pytest.mark.slow
def test_the_command_line_writes_and_prints_once(folders, printed):
    alone = run(*processes_script.quantize_words(folders[1]))
    assert alone.exit_code == 0, alone.output
    shared = [line for line in printed.stdout.splitlines() if not FAILED(line)]
    assert len(shared) == alone.stdout.count("\n")
    first, second = (
        {path.name for path in (folder / "quantized").iterdir()}
        for folder in folders.values()
    )
    assert first == second


def close(one, other):
    return all(torch.allclose(one[key], other[key], rtol=1e-9) for key in other)


@pytest.mark.slow
def test_training_in_two_processes_is_that_in_one(folders, printed):
    folder = folders[2]
    _, network, data = toy()
    # Training data shares the images of each step out: the very same steps.
    shared = load_file(folder / "shared.safetensors")
    assert close(shared, state(ompq.train(network, data, CONFIG)))
    assert not close(shared, state(network))
    # Batches are dealt out in turn: one process with the double batch does the same.
    batches = made(data)
    doubled = [
        tuple(torch.cat(parts) for parts in zip(*batches[i : i + 2], strict=True))
        for i in range(0, 8, 2)
    ]
    found = load_file(folder / "made.safetensors")
    assert close(found, state(ompq.train(network, doubled, CONFIG)))
    # Norms that stand in for biases, and a parameter that nothing reaches; then ranges
    # that all processes must agree on.
    for name, (model, network, data, config) in (("kept", kept()), ("hawq", hawq())):
        expected = state(ompq.train(network, data, config, teacher=model))
        assert close(load_file(folder / f"{name}.safetensors"), expected)
        assert not close(expected, state(network))


def test_one_process_does_all_jobs_in_order():
    done = []
    assert parallel.share_out([3, 1, 2], lambda n: n * n, done.append) == [9, 1, 4]
    assert done == [1, 2, 3]
    assert (parallel.process_count(), parallel.rank()) == (1, 0)
    assert parallel.from_main(lambda: "x") == "x"
    with ompq.distributed():
        assert parallel.is_main()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shares_of_samples_are_all_samples_once(count):
    batches = [torch.arange(7.0)[:, None], torch.arange(5.0)[:, None, None] + 7]
    samples = Samples.of(batches)
    shares = [samples.share(number, count) for number in range(count)]
    values = [run.flatten().tolist() for share in shares for run in share.runs]
    assert sorted(v for part in values for v in part) == [float(n) for n in range(12)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert len(samples.first(2).share(1, 3)) == 2  # too few: each gets all
