"""export(): a quantized network as a file for a runtime, run and compared."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from ompq.budgets import Budget
from ompq.configs import ExportConfig
from ompq.errors import check_known, check_type
from ompq.runtimes.compressed_checkpoints import write_compressed
from ompq.runtimes.coreml.coreml_files import write_coreml
from ompq.runtimes.executorch.executorch_graph import ExecutorchGraph, executorch_steps
from ompq.runtimes.executorch.executorch_network import ExecutorchNetwork
from ompq.runtimes.export_result import ExportResult
from ompq.runtimes.file_metadata import FileMetadata, write_program
from ompq.runtimes.gguf.gguf_files import write_gguf
from ompq.runtimes.integer_files import IntegerRuntime
from ompq.runtimes.litert.litert_graph import LitertGraph
from ompq.runtimes.litert.litert_kernels import litert_steps
from ompq.runtimes.litert.litert_network import LitertNetwork
from ompq.runtimes.onnx.onnx_files import export_onnx
from ompq.samples import Samples, SamplesLike, usual_settings

FORMATS = {
    ".onnx": "onnx",
    ".tflite": "tflite",
    ".pte": "pte",
    ".mlpackage": "mlpackage",
    ".gguf": "gguf",
    ".compressed-tensors": "compressed-tensors",
}
_INTEGER_RUNTIMES = {
    "tflite": IntegerRuntime(
        name="LiteRT",
        format="tflite",
        package="ai-edge-litert",
        arithmetic=litert_steps,
        graph=LitertGraph,
        network=LitertNetwork,
    ),
    "pte": IntegerRuntime(
        name="ExecuTorch",
        format="pte",
        package="executorch",
        arithmetic=executorch_steps,
        graph=ExecutorchGraph,
        network=ExecutorchNetwork,
    ),
}
# Order of an image's dimensions, and packages whose versions a file tells.
_ABOUT = {
    "onnx": ("NCHW", ("onnx", "onnxruntime")),
    "tflite": ("NHWC", ("ai-edge-litert",)),
    "pte": ("NCHW", ("executorch",)),
    "mlpackage": ("NCHW", ("coremltools",)),
}
_RUN_BY_PROGRAM = ("onnx", "tflite")  # what run.py can run


@usual_settings()
def export(
    quantized: nn.Module,
    path: str | Path,
    samples: SamplesLike,
    config: ExportConfig = ExportConfig(),
    *,
    format: str | None = None,
) -> ExportResult:
    """Write a quantized network for a runtime, which must compute the same.

    The file is run in its runtime and compared with the integer network, code by code,
    before it appears. Nothing is left at ``path`` if they differ. If the configuration
    says how images are made into inputs, ``run.py`` appears beside the file: a program
    that classifies images with it and needs neither ompq nor PyTorch.

    Args:
        quantized: From :func:`ompq.quantize`, possibly reconstructed or trained. A copy
            of it is finalized (:func:`ompq.finalize`).
        path: The file. Its suffix tells the format: ``.onnx``, ``.tflite``, ``.pte``,
            ``.mlpackage``, ``.gguf``; or a folder that transformers and vLLM load, with
            the suffix ``.compressed-tensors``.
        samples: Inputs to verify outputs and codes with.
        format: ``onnx``, ``tflite``, ``pte``, ``mlpackage``, ``gguf`` or
            ``compressed-tensors``, if the suffix is another.

    Returns:
        The file's size, how each weight is stored, and agreement. An ONNX file may have
        floats where an operation has no integer kernel; LiteRT and ExecuTorch need
        integers throughout; llama.cpp has floats between its weights, so its logits are
        compared within a limit. For an input with NaN a file returns numbers, but
        PyTorch NaN. A Core ML package is not run: its weights are read back.

    Raises:
        MissingExtraError: The runtime is not installed.
        ExportError: The runtime does not compute what the network computes, or has no
            operator for it; or the file exceeds the budget.
        QuantizationError: The network has no integers that a runtime could compute.
        ValueError: The format is unknown.
    """
    check_type("config", config, ExportConfig)
    path, samples = Path(path), Samples.of(samples)
    kind = format or FORMATS.get(path.suffix, path.suffix or "no suffix")
    check_known("format", kind, FORMATS.values())
    if kind == "gguf":
        return write_gguf(quantized, path, samples, budget=config.budget)
    if kind == "compressed-tensors":
        return write_compressed(quantized, path, samples)
    about = FileMetadata.of(config, *_ABOUT[kind])
    if config.budget is not None and Budget.of(config.budget).onnx_mib:
        about = replace(about, classes=())
    if kind in _INTEGER_RUNTIMES:
        runtime = _INTEGER_RUNTIMES[kind]
        result = runtime.write(quantized, path, samples, config, about.texts())
    elif kind == "mlpackage":
        result = write_coreml(quantized, path, samples, about.texts())
    else:
        result = export_onnx(
            quantized,
            path,
            samples,
            opset=config.opset,
            engine_images=config.engine_images,
            metadata=about.texts(),
            saturation_safe=config.saturation_safe,
            budget=config.budget,
        )
    if about.of_images and kind in _RUN_BY_PROGRAM:
        write_program(path)
    return result
