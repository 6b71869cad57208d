"""Tokenizers of transformers, from a folder or a GGUF file."""

from pathlib import Path
from typing import Any

from ompq.optional_libraries import optional_library


def is_gguf_file(path: Path) -> bool:
    """Return whether a path is that of a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def load_tokenizer(source: str, **options: Any) -> Any:
    """Return the tokenizer in a folder, in a GGUF file, or of a name on the hub.

    Code from the hub is not run. Errors are those of transformers.
    """
    library, path = optional_library("transformers", "transformers"), Path(source)
    load = library.AutoTokenizer.from_pretrained
    options["trust_remote_code"] = False
    if not is_gguf_file(path):
        return load(source, **options)
    options["gguf_file"] = path.name
    tokenizer = load(path.parent, **options)
    if _word_rule(path) == "smollm":
        _split_digits(tokenizer)
    return tokenizer


def _word_rule(path: Path) -> str:
    """Return what a GGUF file calls the way that text is split into words."""
    field = (
        optional_library("gguf", "gguf")
        .GGUFReader(path)
        .get_field("tokenizer.ggml.pre")
    )
    return "" if field is None else str(field.contents())


def _split_digits(tokenizer: Any) -> None:
    """Make every digit a token of its own, which transformers forgets for SmolLM."""
    from tokenizers import Tokenizer, pre_tokenizers

    backend: Tokenizer = tokenizer.backend_tokenizer
    steps = [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
