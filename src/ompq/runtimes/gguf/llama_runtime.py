"""llama.cpp, as it runs a GGUF file on this machine."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ompq.errors import ExportError

_QUIET = -1


def has_llama() -> bool:
    """Return whether llama.cpp is installed, as the package xllamacpp."""
    return find_spec("xllamacpp") is not None


def llama_version() -> str:
    """Return the name and version of the installed runtime."""
    import xllamacpp

    return f"xllamacpp {xllamacpp.__version__}"


def next_tokens(
    path: Path, prompts: Sequence[Sequence[int] | str], vocabulary: int
) -> Tensor:
    """Return the logarithms of the probabilities of each prompt's next token, (N, V).

    Args:
        prompts: Tokens, or texts, which llama.cpp makes tokens of.

    Raises:
        ExportError: llama.cpp cannot load or run the file.
    """
    try:
        server = _server(path, max(map(len, prompts)))
        return torch.stack([_next_token(server, one, vocabulary) for one in prompts])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ExportError(f"llama.cpp cannot run the file: {error}") from error


def _server(path: Path, length: int) -> Any:
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.n_ctx = max(256, -(-(length + 8) // 256) * 256)
    options.n_gpu_layers = 0
    options.n_parallel = 1
    options.warmup = options.fit_params = options.cache_prompt = False
    options.verbosity = _QUIET
    threads = torch.get_num_threads()
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(options)


def _next_token(server: Any, prompt: Sequence[int] | str, vocabulary: int) -> Tensor:
    answer = server.handle_completions(
        {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "n_predict": 1,
            "n_probs": vocabulary,
            "temperature": 0,
            # Nothing is answered to tokens that end the text or are no text. The bias
            # decides what is drawn, not what is returned.
            "logit_bias": [["a", 1000]],
            "cache_prompt": False,
        }
    )
    if "choices" not in answer:
        raise ValueError(answer.get("error", answer))
    (first,) = answer["choices"][0]["logprobs"]["content"]
    found = torch.full((vocabulary,), float("-inf"))
    for one in first["top_logprobs"]:
        found[one["id"]] = one["logprob"]
    return found
