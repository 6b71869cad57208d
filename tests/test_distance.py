"""From a public verb to its arithmetic: at most five of our own calls."""

import inspect
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

import ompq
from nets import TinyResNet, scenes, seeded
from ompq.network.units import Choice

PACKAGE = str(Path(ompq.__file__).parent)
LIMIT = 5
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}

# Verb → the functions that do what it is for, as module and qualified name.
ARITHMETIC = [
    ("plan", "orthogonality", "gram_matrix"),
    ("plan", "allocation/search", "_search"),
    ("quantize", "ranges", "_search"),
    ("reconstruct", "reconstruction/rounding", "SoftWeights.forward"),
    ("export_onnx", "onnx/export", "OnnxGraph._node"),
    ("train", "quantizers", "rounded_to"),
]


def distance(verb, module, name, run):
    """Return the median number of our own calls from a verb to a function within it."""
    start = inspect.unwrap(verb).__code__
    file = f"{PACKAGE}/{module}.py"
    found = []

    def see(frame, event, _argument):
        code = frame.f_code
        if event != "call" or (code.co_filename, code.co_qualname) != (file, name):
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
    assert found, f"{verb.__name__} never calls {name} of {module}"
    return median(found)


def runs(folder):
    """Return, for each verb, a function that calls it on a toy network."""
    model, samples = seeded(TinyResNet()), scenes(16)
    names = ompq.trace(model, samples).names
    bits = ompq.Allocation({name: Choice(4, 8) for name in names})
    quantized = ompq.quantize(model, bits, samples)
    batches = [(samples, torch.zeros(16, dtype=torch.long))]
    learn = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=2))
    return {
        "plan": lambda: ompq.plan(model, samples, "3bits"),
        "quantize": lambda: ompq.quantize(model, bits, samples),
        "reconstruct": lambda: ompq.reconstruct(quantized, model, samples, learn),
        "export_onnx": lambda: ompq.export_onnx(
            quantized, folder / "network.onnx", samples
        ),
        "train": lambda: ompq.train(
            quantized, batches, ompq.TrainConfig(epochs=1), teacher=model
        ),
    }


@pytest.mark.parametrize(("verb", "module", "name"), ARITHMETIC)
def test_a_verb_is_at_most_five_calls_from_its_arithmetic(verb, module, name, tmp_path):
    if verb == "export_onnx":
        pytest.importorskip("onnxruntime")
    run = runs(tmp_path)[verb]
    assert distance(getattr(ompq, verb), module, name, run) <= LIMIT
