"""Reports how many of our own calls lie between a public verb and its arithmetic.

Run it after a room was rebuilt: ``python scripts/distances.py``. A number to think
about in review, not a limit: a limit of five once made three copies of one check.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch

import ompq
from ompq.network.units import Choice

PACKAGE = str(Path(ompq.__file__).parent)
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}

# Verb → the functions that do what it is for, as module and qualified name.
ARITHMETIC = [
    ("plan", "scores/orthogonality", "gram_matrix"),
    ("plan", "allocation/exact_search", "_search"),
    ("quantize", "weight_ranges", "_search"),
    ("reconstruct", "reconstruction/rounding", "SoftWeights.forward"),
    ("export", "runtimes/onnx/onnx_graph", "OnnxGraph._node"),
    ("train", "grids", "rounded_to"),
]


def distances(
    verb: Callable[..., Any], module: str, name: str, run: Callable[[], Any]
) -> list[int]:
    """Return the numbers of our own calls from a verb to a function within it."""
    start = inspect.unwrap(verb).__code__
    file = f"{PACKAGE}/{module}.py"
    found = []

    def see(frame: FrameType | None, event: str, _argument: Any) -> None:
        code = frame.f_code if frame else None
        if code is None or event != "call":
            return
        if (code.co_filename, code.co_qualname) != (file, name):
            return
        calls = 0
        while frame is not None and frame.f_code is not start:
            code = frame.f_code
            # A comprehension is a part of its function, as it is from Python 3.12 on.
            part = code.co_name in COMPREHENSIONS
            calls += code.co_filename.startswith(PACKAGE) and not part
            frame = frame.f_back
        if frame is not None:
            found.append(calls)

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def runs(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return, for each verb, a function that calls it on the demo network."""
    demo = ompq.load_model("ompq:demo")
    model, data = demo.module, ompq.load_data("digits", demo, split="train")
    samples = data.samples(16)
    bits = ompq.Allocation(
        {name: Choice(4, 8) for name in ompq.trace(model, samples).names}
    )
    quantized = ompq.quantize(model, bits, samples)
    batches = [(samples[:16], torch.zeros(16, dtype=torch.long))]
    learn = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=2))
    return {
        "plan": lambda: ompq.plan(model, samples, "3bits"),
        "quantize": lambda: ompq.quantize(model, bits, samples),
        "reconstruct": lambda: ompq.reconstruct(quantized, model, samples, learn),
        "export": lambda: ompq.export(quantized, folder / "network.onnx", samples),
        "train": lambda: ompq.train(
            quantized, batches, ompq.TrainConfig(epochs=1), teacher=model
        ),
    }


def main() -> None:
    """Print a line for each verb and function: the least, median and largest number."""
    with TemporaryDirectory() as folder:
        verbs = runs(Path(folder))
        for verb, module, name in ARITHMETIC:
            found = distances(getattr(ompq, verb), module, name, verbs[verb])
            least, most = (min(found), max(found)) if found else ("never", "called")
            middle = median(found) if found else "-"
            sys.stdout.write(f"{verb:12} {module}:{name}  {least} {middle} {most}\n")


if __name__ == "__main__":
    main()
