"""Several processes give what one gives."""

import os
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ompq
from cli_tools import network_file
from ompq import processes
from ompq.samples import Samples

HERE = Path(__file__).parent
SCRIPT = HERE / "processes_script.py"


def launched(arguments, *, count=2):
    """Run a command in several processes, or in one without a launcher."""
    prefix = [sys.executable]
    if count > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        prefix += [*launcher, "--standalone"]
    return subprocess.run(
        [*prefix, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The script's results, in one process and in two."""
    found = {}
    for count in (1, 2):
        found[count] = tmp_path_factory.mktemp(f"processes{count}")
        result = launched([SCRIPT, found[count]], count=count)
        assert result.returncode == 0, result.stderr[-2000:]
    return found


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
def test_a_failure_in_one_process_reaches_all():
    result = launched([SCRIPT, "--fail"])
    assert sorted(result.stdout.split("\n"))[1:] == [
        "0: in process 1: DataError: image 1 is broken",
        "1: image 1 is broken",
    ]


@pytest.mark.slow
def test_the_command_line_writes_and_prints_once(tmp_path):
    network, shown = network_file(tmp_path), {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        command = ["-m", "ompq", "quantize", network, "--data", "random", "--samples"]
        options = ["16", "--budget", "4bit", "--iterations", "4", "--quiet"]
        result = launched([*command, *options, "-o", folder], count=count)
        assert result.returncode == 0, result.stderr[-2000:]
        shown[count] = result.stdout.count("\n"), {p.name for p in folder.iterdir()}
    assert shown[1] == shown[2]
    wrong = launched(["-m", "ompq", "plan", network, "--data", "none", "--budget", "4"])
    assert wrong.returncode != 0
    assert wrong.stderr.count("error: ") == 1  # all met it; the first tells
    assert "in process" not in wrong.stderr


def test_one_process_does_all_jobs_in_order():
    done = []
    assert processes.share_out([3, 1, 2], lambda n: n * n, done.append) == [9, 1, 4]
    assert done == [1, 2, 3]
    assert (processes.process_count(), processes.rank()) == (1, 0)
    assert processes.from_main(lambda: "x") == "x"
    with ompq.distributed():
        assert processes.is_main()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shares_of_samples_are_all_samples_once(count):
    batches = [torch.arange(7.0)[:, None], torch.arange(5.0)[:, None, None] + 7]
    samples = Samples.of(batches)
    shares = [samples.share(number, count) for number in range(count)]
    values = [run.flatten().tolist() for share in shares for run in share.runs]
    assert sorted(v for part in values for v in part) == [float(n) for n in range(12)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert len(samples.first(2).share(1, 3)) == 2  # too few: each gets all
