"""Plans, reconstructs and trains a toy network: alone, or started by torchrun.

python processes_script.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import ompq
import training_script
from cli_tools import network_file
from nets import TinyResNet, scenes, seeded
from ompq import lab, parallel
from ompq.cli.main import app
from ompq.errors import DataError

LEARNING = ompq.ReconstructConfig(
    rounding=ompq.RoundingConfig(iterations=30, batch_size=8),
    tuning=ompq.TuningConfig(epochs=2, batch_size=8, always=True),
)


def main(folder: Path) -> None:
    model, inputs = seeded(TinyResNet()), scenes(32)
    targets = torch.arange(32) % 5
    batches = [(inputs[i : i + 5], targets[i : i + 5]) for i in range(0, 32, 5)]
    for score in ("output_divergence", "fisher", "sensitivity"):
        config = ompq.PlanConfig(score=score)
        plan = ompq.plan(model, inputs, "3bit", config)
        plan.save(folder / f"{score}.json")
    rounded = ompq.quantize(model, plan, inputs)
    learned = ompq.reconstruct(
        rounded,
        model,
        inputs,
        LEARNING,
        checkpoint=folder / "blocks.safetensors",
    )
    for name, network in {"rounded": rounded, "learned": learned}.items():
        found = ompq.evaluate(network, batches, reference=model)
        numbers = [found.top1, found.agreement, found.divergence, found.count]
        place = folder / f"{name}-{parallel.rank()}.txt"
        place.write_text(f"{numbers} {found.correct.hex()}")
    save_file(learned.state_dict(), folder / f"{parallel.rank()}.safetensors")
    settings = lab.AuditConfig(
        allocations=3, null_scores=1, resamples=5, scores=("weight_noise",)
    )
    audit = lab.audit(
        model, inputs[:16], "3bit", inputs[16:], settings, batches=batches
    )
    rows = [(one.name, one.bits, one.divergence) for one in audit.measured]
    (folder / f"audit-{parallel.rank()}.txt").write_text(repr(rows))


def fail() -> None:
    """Fail in the second process alone."""

    def work(job: int) -> int:
        if job == 1:
            raise DataError("image 1 is broken")
        return job

    try:
        parallel.share_out(range(4), work)
    except ompq.OmpqError as error:
        # One write a line: that of the other process must not fall between.
        sys.stdout.write(f"{parallel.rank()}: {error}\n")


def fail_everywhere() -> None:
    """Run a command that every process refuses."""
    try:
        app(["plan", "ompq:demo", "--data", "none", "--budget", "4"])
    except SystemExit as stop:
        assert stop.code == 2


def quantize_words(folder: Path) -> list[str]:
    """Return a command that quantizes a network of its own."""
    words = ["quantize", network_file(folder), "--data", "random", "--samples", "16"]
    words += ["--budget", "4bit", "--iterations", "4", "--quiet"]
    return [*words, "-o", str(folder / "quantized")]


def wait_for_the_first(folder: Path) -> None:
    """Let the first process be late; the other must wait for what it does."""
    done = folder / "done"
    if os.environ["RANK"] == "0":
        time.sleep(1)
        done.touch()
    parallel.main_has("come")
    (folder / f"waited-{os.environ['RANK']}.txt").write_text(str(done.exists()))


def run_command(folder: Path) -> None:
    """Run a command, which joins the processes by itself."""
    try:
        app(quantize_words(folder))
    except SystemExit as stop:
        assert not stop.code


if __name__ == "__main__":
    # Starting processes takes longer than their work, so they are started once.
    place = Path(sys.argv[1])
    with ompq.distributed():
        main(place)
        fail()
        fail_everywhere()
    wait_for_the_first(place)
    run_command(place)
    training_script.train(place)
