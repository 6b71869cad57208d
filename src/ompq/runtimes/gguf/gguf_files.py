"""write_gguf(): a decoder as a file for llama.cpp, run and compared."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ompq.bit_widths import FLOAT_BITS
from ompq.budgets import Budget
from ompq.errors import ExportError
from ompq.files import replacing
from ompq.network.observation import tensors_in
from ompq.optional_libraries import optional_library
from ompq.runtimes.export_result import ExportResult
from ompq.runtimes.gguf.gguf_blocks import BLOCK
from ompq.runtimes.gguf.gguf_metadata import (
    add_hyperparameters,
    add_tokenizer,
    architecture,
    decoder_config,
    tokenizer_of,
)
from ompq.runtimes.gguf.gguf_tensors import (
    most_common_bits,
    named_tensors,
    rounded_units,
)
from ompq.runtimes.gguf.llama_runtime import has_llama, llama_version, next_tokens
from ompq.runtimes.onnx.weight_containers import StoredWeight
from ompq.runtimes.verification import Agreement, compare_outputs
from ompq.samples import (
    Samples,
    attached,
    call,
    evaluating,
    model_device,
)

_PROMPTS, _TOKENS = 8, 64  # compared: so many samples, and so many tokens of each
_COMPARED = "prompts"
# How much logits may differ: by what 16-bit keys and values change at most, and twice
# what rounding the inputs of layers changes in PyTorch, as llama.cpp rounds them.
_FLOATS, _ROUNDINGS = 0.05, 2
# A text in which tokenizers differ: digits, contractions, spaces, scripts.
_TEXT = "It's 1234567 o'clock; DON'T  panic!\n\n\tFüße, 東京 x2=3.14"
_TINY = 1e-30  # so that nothing is divided by 0
# What most weights are, as llama.cpp counts kinds of files.
_FILE_TYPES = {FLOAT_BITS: 0, 2: 10, 3: 11, 4: 2, 5: 8, 6: 18, 8: 7}
_MINIMA = 1e-6  # how much rounding a minimum may change a weight, of the largest


def write_gguf(
    network: nn.Module, path: Path, samples: Samples, *, budget: Budget | None = None
) -> ExportResult:
    """Write a decoder of transformers for llama.cpp, with its tokenizer.

    The weights in the file are compared with the network's, and the file is
    run by llama.cpp, if it is installed, before it appears. Nothing is left at ``path``
    if they differ.

    Args:
        network: A float network, or one planned with ``target="gguf"`` and quantized.
        samples: Tokens, (N, length); the first few are prompts to compare logits on.
        budget: A file that exceeds its ``gguf`` limit is not written.

    Raises:
        ExportError: The network is no decoder that llama.cpp computes, a weight fits no
            type, the file exceeds the budget, or its logits differ.
        MissingExtraError: gguf is not installed.
    """
    tokenizer = tokenizer_of(network)
    with replacing(path) as temporary:
        weights = _write(network, temporary, tokenizer)
        size = temporary.stat().st_size
        excess = budget.excess("gguf_bytes", size) if budget is not None else ""
        if excess:
            raise ExportError(excess)
        _compare_weights(network, temporary)
        if has_llama():
            _compare_tokens(network, temporary, tokenizer)
        agreement, limit = _compare_logits(network, temporary, samples)
    only = f"gguf {version('gguf')} (weights only: llama.cpp is not installed)"
    return ExportResult(
        path=path,
        bytes=size,
        format="gguf",
        weights=weights,
        simulated=agreement,
        engine=None,
        given=agreement,
        runtime=llama_version() if has_llama() else only,
        reason="llama.cpp computes with floats and 8-bit blocks",
        limit=limit,
    )


@contextmanager
def open_writer(
    network: nn.Module, path: Path, tokenizer: Any, bits: int
) -> Iterator[Any]:
    """Yield a writer that has all metadata; it is closed at the end.

    ``bits`` is the width of most weights.
    """
    library, config = optional_library("gguf", "gguf"), decoder_config(network)
    writer = library.GGUFWriter(path, architecture(network))
    try:
        writer.add_name(Path(str(network.name_or_path)).name.removesuffix(".gguf"))
        writer.add_file_type(_FILE_TYPES[bits])
        add_hyperparameters(writer, config)
        add_tokenizer(writer, tokenizer, config.vocab_size)
        yield writer
    finally:
        writer.close()


def _write(network: nn.Module, path: Path, tokenizer: Any) -> tuple[StoredWeight, ...]:
    library, widths = optional_library("gguf", "gguf"), Counter[int]()
    found, stored = [], []
    for one in named_tensors(network):
        widths[one.bits] += one.values.numel()
        found.append((one.name, one.type, one.content))
        size = one.content.nbytes
        stored.append(StoredWeight(one.name, one.bits, one.type, size))
    bits = most_common_bits(widths)
    with open_writer(network, path, tokenizer, bits) as writer:
        for tensor, kind, content in found:
            raw = library.GGMLQuantizationType[kind]
            writer.add_tensor(tensor, content, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return tuple(stored)


def _compare_weights(network: nn.Module, path: Path) -> None:
    """Raise an ExportError unless the file holds the network's weights.

    They are equal but for the last digit of weights in blocks with minima.
    """
    library = optional_library("gguf", "gguf")
    stored = {one.name: one for one in library.GGUFReader(path).tensors}
    for ours in named_tensors(network):
        theirs = stored[ours.name]
        values = library.dequantize(theirs.data, theirs.tensor_type)
        read = torch.from_numpy(values.copy()).view(ours.shape)
        if (read - ours.values).abs().max() > _MINIMA * ours.values.abs().max():
            raise ExportError(
                f"the file's values of {ours.name} differ from the network's. Nothing "
                "was written; please report this with the version of gguf"
            )


def _compare_tokens(network: nn.Module, path: Path, tokenizer: Any) -> None:
    """Raise an ExportError unless llama.cpp makes the same tokens of a text."""
    config, text = decoder_config(network), _TEXT
    while len(tokenizer(text)["input_ids"]) >= config.max_position_embeddings:
        text = text[:-1]
    prompts = [text, tokenizer(text)["input_ids"]]
    theirs, ours = next_tokens(path, prompts, config.vocab_size)
    if not torch.allclose(theirs, ours, atol=1e-3):
        raise ExportError(
            "llama.cpp splits text into different tokens from the tokenizer "
            f"{type(tokenizer).__name__} of the network. Nothing was written; please "
            f"report this with the network and {llama_version()}"
        )


def _compare_logits(
    network: nn.Module, path: Path, samples: Samples
) -> tuple[Agreement, float]:
    """Compare logits of the file, run by llama.cpp, with those of the network.

    Without llama.cpp the logits are the network's own: the weights are the same.

    Returns:
        How closely they agree, and how much they may differ.
    """
    length = min(_TOKENS, decoder_config(network).max_position_embeddings - 1)
    batch = next(tensors_in(samples.first_batch(_PROMPTS)))[:, :length]
    logits = _last_logits(network, batch)
    if not has_llama():
        return replace(compare_outputs([logits], [logits]), what=_COMPARED), inf
    units = rounded_units(network).values()
    layers = [network.get_submodule(u.name) for u in units if u.kind == "linear"]
    with attached(one.register_forward_pre_hook(_round_inputs) for one in layers):
        rounded = _last_logits(network, batch)
    limit = _FLOATS + _ROUNDINGS * compare_outputs([logits], [rounded]).logits
    theirs = next_tokens(path, batch.tolist(), logits.shape[1])
    found = replace(compare_outputs([logits], [_centred(theirs)]), what=_COMPARED)
    if not found.logits <= limit:
        raise ExportError(
            f"llama.cpp's logits differ from PyTorch's: {found}; they may differ "
            f"by {limit:.2g}. Nothing was written; please report this with the network "
            f"and {llama_version()}"
        )
    return found, limit


def _last_logits(network: nn.Module, batch: Tensor) -> Tensor:
    with evaluating(network):
        output = call(network, batch.to(model_device(network)))
    return _centred(next(tensors_in(output))[:, -1].float().cpu())


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(1, keepdim=True)


def _round_inputs(_layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Round the inputs of a layer to 8 bits, in blocks with a 16-bit scale."""
    (x,) = args
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    steps = (blocks / scale.clamp(min=_TINY)).round()
    return ((steps * scale.half().to(x)).reshape(x.shape),)
