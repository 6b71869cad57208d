"""write_gguf(): a decoder as a file for llama.cpp, run and compared."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ompq.bit_widths import FLOAT_BITS
from ompq.budgets import Budget
from ompq.errors import BudgetError, ExportError
from ompq.files import replacing
from ompq.runtimes.gguf.gguf_metadata import (
    add_hyperparameters,
    add_tokenizer,
    architecture,
    gguf_library,
    tokenizer_of,
)
from ompq.runtimes.gguf.gguf_tensors import most_common_bits, named_tensors
from ompq.runtimes.gguf.llama_runtime import has_llama, llama_version, next_tokens
from ompq.runtimes.verification import Agreement, compare_outputs
from ompq.samples import Samples, SamplesLike, call, evaluating, model_device
from ompq.network.observation import tensors_in

_PROMPTS, _TOKENS = 8, 64  # compared: so many samples, and so many tokens of each
# llama.cpp rounds inputs of layers to 8 bits in blocks of 32. The logits of random
# networks then differ by up to 0.05, and by 1 or more if anything is in a wrong place.
_LIMIT = 0.3
_FILE_TYPES = {FLOAT_BITS: 0, 4: 2, 5: 8, 8: 7}  # what most weights are


@dataclass(frozen=True, kw_only=True)
class GgufResult:
    """A verified GGUF file."""

    path: Path
    bytes: int
    types: Mapping[str, int]  # number of tensors of each type
    # Agreement of llama.cpp with PyTorch; None if llama.cpp is not installed, and only
    # the values of the weights were compared.
    simulated: Agreement | None
    runtime: str  # what it was verified with, for example ``xllamacpp 0.2.0``
    limit: float = _LIMIT  # how much logits were allowed to differ


def write_gguf(
    network: nn.Module,
    path: str | Path,
    samples: SamplesLike,
    *,
    name: str = "",
    budget: Budget | None = None,
) -> GgufResult:
    """Write a decoder of transformers for llama.cpp, with its tokenizer.

    The weights in the file are compared with the network's, bit by bit, and the file is
    run by llama.cpp, if it is installed, before it appears. Nothing is left at ``path``
    if they differ.

    Args:
        network: A float network, or one planned with ``target="gguf"`` and quantized.
        samples: Tokens, (N, length); the first few are prompts to compare logits on.
        name: The network's name, which the file holds.
        budget: A file that exceeds its ``gguf`` limit is not written.

    Raises:
        ExportError: The network is no decoder that llama.cpp computes, a weight fits no
            type, the file exceeds the budget, or its logits differ.
        MissingExtraError: gguf is not installed.
    """
    tokenizer = tokenizer_of(network)
    with replacing(path) as temporary:
        counts = _write(network, temporary, tokenizer, name)
        size = temporary.stat().st_size
        excess = budget.excess("gguf_bytes", size) if budget is not None else ""
        if excess:
            raise ExportError(excess)
        _compare_weights(network, temporary)
        agreement, runtime = None, f"gguf {_version()}"
        if has_llama():
            agreement, runtime = _run(network, temporary, samples), llama_version()
    return GgufResult(
        path=Path(path), bytes=size, types=counts, simulated=agreement, runtime=runtime
    )


def _version() -> str:
    from importlib.metadata import version

    return version("gguf")


@contextmanager
def open_writer(
    network: nn.Module, path: Path, tokenizer: Any, name: str, bits: int
) -> Iterator[Any]:
    """Yield a writer that has all metadata; it is closed at the end."""
    library, config = gguf_library(), network.config
    writer = library.GGUFWriter(path, architecture(network))
    try:
        writer.add_name(name or type(network).__name__)
        writer.add_file_type(_FILE_TYPES[bits])
        add_hyperparameters(writer, config)
        add_tokenizer(writer, tokenizer, config.vocab_size, "gpt-2")
        yield writer
    finally:
        writer.close()


def _write(network: nn.Module, path: Path, tokenizer: Any, name: str) -> Counter[str]:
    library, counts, widths = gguf_library(), Counter[str](), Counter[int]()
    found = [(one.name, one.type, one.content) for one in named_tensors(network)]
    for one in named_tensors(network):
        counts[one.type] += 1
        widths[one.bits] += one.values.numel()
    bits = most_common_bits(widths)
    with open_writer(network, path, tokenizer, name, bits) as writer:
        for tensor, kind, content in found:
            raw = library.GGMLQuantizationType[kind]
            writer.add_tensor(tensor, content, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return counts


def _compare_weights(network: nn.Module, path: Path) -> None:
    """Raise an ExportError unless the file holds the network's weights, bit by bit."""
    library = gguf_library()
    stored = {one.name: one for one in library.GGUFReader(path).tensors}
    for ours in named_tensors(network):
        theirs = stored[ours.name]
        values = library.dequantize(theirs.data, theirs.tensor_type)
        if not torch.equal(torch.from_numpy(values.copy()).view(ours.shape), ours.values):
            raise ExportError(
                f"the file holds other values of {ours.name} than the network. Nothing "
                "was written; please report this with the version of gguf"
            )


def _run(network: nn.Module, path: Path, samples: SamplesLike) -> Agreement:
    """Compare logits of the file, run by llama.cpp, with those of the network."""
    batch = next(tensors_in(Samples.of(samples).first_batch(_PROMPTS)))[:, :_TOKENS]
    with evaluating(network):
        output = call(network, batch.to(model_device(network)))
    logits = next(tensors_in(output))[:, -1].float().cpu()
    theirs = next_tokens(path, batch.tolist(), logits.shape[1])
    ours = logits.log_softmax(1)
    found = compare_outputs([_centred(ours)], [_centred(theirs)])
    if not found.logits <= _LIMIT:
        raise ExportError(
            f"llama.cpp computes other logits than PyTorch: {found}; they may differ "
            f"by {_LIMIT:g}. Nothing was written; please report this with the network "
            f"and {llama_version()}"
        )
    return found


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(1, keepdim=True)
