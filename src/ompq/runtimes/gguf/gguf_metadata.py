"""Metadata of GGUF files: architecture, hyper-parameters and tokenizer."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from ompq.errors import ExportError
from ompq.tokenizers import load_tokenizer

# Decoders of transformers that llama.cpp computes, and what it calls them.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # kinds of tokens
# How llama.cpp calls ways to split text into words before BPE: by whether digits stand
# alone, and by a part of the regular expression, if there is one.
_WORD_RULES = {
    (False, ""): "gpt-2",
    (True, ""): "smollm",
    (False, r"\p{N}{1,3}"): "llama-bpe",
    (False, r"|\p{N}|"): "qwen2",
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def architecture(network: nn.Module) -> str:
    """Return what llama.cpp calls a network's architecture.

    Raises:
        ExportError: It is not one that ompq writes.
    """
    kind = getattr(decoder_config(network), "model_type", "")
    if kind not in ARCHITECTURES:
        raise ExportError(
            f"{type(network).__name__} cannot be written as GGUF: only decoders of "
            f"transformers of the types {', '.join(ARCHITECTURES)} can"
        )
    return ARCHITECTURES[kind]


def decoder_config(network: nn.Module) -> Any:
    """Return the config of a network of transformers; None for other networks."""
    return getattr(network, "config", None)


def add_hyperparameters(writer: Any, config: Any) -> None:
    """Add what llama.cpp needs to know about a network, from its config."""
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        raise ExportError(
            f"sliding_window={window} cannot be written as GGUF; set it to None if "
            "inputs are shorter than that"
        )
    heads = config.num_attention_heads
    size = head_size(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope_base(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_quantization_version(2)


def head_size(config: Any) -> int:
    """Return the number of channels of one attention head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def rope_base(config: Any) -> float:
    """Return the base of the rotary embedding's frequencies."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    return float(rope.get("rope_theta") or getattr(config, "rope_theta", 1e4))


def tokenizer_of(network: nn.Module) -> Any:
    """Return the tokenizer in the folder or file that a network was loaded from.

    Raises:
        ExportError: There is none.
    """
    source = str(getattr(network, "name_or_path", ""))
    try:
        if not source or not Path(source).exists():
            raise ValueError(f"{source or 'none'} is no folder")
        return load_tokenizer(source, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ExportError(
            "a GGUF file holds the tokenizer, and none was found in the folder that "
            f"the network was loaded from ({error}). Load the network with "
            "transformers:FOLDER or from_pretrained, from a folder with its tokenizer"
        ) from error


def add_tokenizer(writer: Any, tokenizer: Any, vocabulary: int) -> None:
    """Add a tokenizer.

    Args:
        vocabulary: Number of rows of the embedding; a tokenizer may have fewer tokens.

    Raises:
        ExportError: It is not byte-level BPE, or splits text in an unknown way.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ExportError(
            f"the tokenizer ({type(tokenizer).__name__}, {model['type']}) cannot be "
            "written as GGUF: only byte-level BPE can"
        )
    special = {*tokenizer.all_special_ids}
    tokens = [f"[PAD{at}]" for at in range(vocabulary)]
    kinds = [_UNUSED] * vocabulary
    added = tokenizer.added_tokens_decoder
    for token, at in tokenizer.get_vocab().items():
        tokens[at], kinds[at] = token, _NORMAL
        if at in added or at in special:
            hidden = at in special or added[at].special
            kinds[at] = _CONTROL if hidden else _USER_DEFINED
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_word_rule(described["pre_tokenizer"]))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if merges:
        writer.add_token_merges(merges)
    for ours, theirs in _SPECIAL.items():
        at = getattr(tokenizer, f"{ours}_token_id", None)
        if at is not None:
            writer.add_uint32(f"tokenizer.ggml.{theirs}_token_id", at)
    first = tokenizer("a")["input_ids"][:1]
    writer.add_add_bos_token(
        tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    )
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _word_rule(splitter: Any) -> str:
    """Return what llama.cpp calls the way a tokenizer splits text into words."""
    steps = (splitter or {}).get("pretokenizers", [splitter or {}])
    digits = any(one.get("individual_digits") for one in steps)
    patterns = [one["pattern"].get("Regex", "") for one in steps if "pattern" in one]
    for (alone, part), name in _WORD_RULES.items():
        fits = any(part in one for one in patterns) if part else not patterns
        if alone == digits and fits:
            return name
    raise ExportError(
        "the tokenizer splits text into words in a way that ompq does not know from "
        f"llama.cpp: {json.dumps(splitter)[:200]}"
    )
