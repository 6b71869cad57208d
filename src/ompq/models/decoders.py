"""Decoders of transformers: built from a folder, and their text as token ids."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ompq.errors import DataError, MissingExtraError, ModelError
from ompq.files import reason
from ompq.layers import replace_module
from ompq.models.weights import INSTEAD, downloading
from ompq.recording import copied

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def load_decoder(name: str, source: str, *, pretrained: bool) -> tuple[nn.Module, str]:
    """Build a decoder; return it and where its weights come from.

    Args:
        name: What the user calls it.
        source: A folder that holds ``config.json``, the file itself, or the name of a
            decoder to download. Code that comes with it is never run.
        pretrained: Whether to read its weights, or have random ones.

    Raises:
        ModelError: There is no such decoder, or it cannot be read.
        MissingExtraError: transformers is not installed.
    """
    library = _transformers()
    path = Path(source)
    local = path.exists()
    if not local and _HUB_NAME.fullmatch(source) is None:
        raise ModelError(
            f"{name}: there is no folder {source}; name one that holds config.json"
        )
    if local and pretrained and not any(path.glob("*.safetensors")):
        raise ModelError(f"{source} holds no weights (*.safetensors). {INSTEAD}")
    kind = library.AutoModelForCausalLM
    try:
        if local:
            return _built(library, kind, path, pretrained=pretrained), source
        with downloading("transformers", name):
            made = _built(library, kind, source, pretrained=pretrained)
        return made, f"transformers {source}"
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{name} cannot be built: {reason(error)}") from error


def _built(library: Any, kind: Any, source: Any, *, pretrained: bool) -> nn.Module:
    if pretrained:
        # Half a precision does not hold the values of a grid.
        kept = {"dtype": torch.float32, "trust_remote_code": False}
        made = kind.from_pretrained(source, **kept)
    else:
        made = kind.from_config(library.AutoConfig.from_pretrained(source))
    return _linearized(made)


def with_linear_layers(model: nn.Module) -> nn.Module:
    """Return a copy of a network whose layers of the kind of GPT-2 are ``nn.Linear``.

    GPT-2 and its relatives store weights (inputs, outputs) in layers called ``Conv1D``,
    which compute what linear layers compute. As linear layers they get bits.
    """
    return _linearized(copied(model))


def _linearized(model: nn.Module) -> nn.Module:
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            weight: Any = module.weight
            inputs, outputs = weight.shape
            layer = nn.Linear(inputs, outputs, device="meta")
            layer.weight = nn.Parameter(weight.detach().T.contiguous())
            layer.bias = module.bias
            replace_module(model, name, layer.train(module.training))
    return model


def tokenized(path: Path, name: str, tokenizer: str) -> Tensor:
    """Return the token ids of a text file, (tokens,).

    Raises:
        DataError: The network has no tokenizer, or the text cannot be read.
        MissingExtraError: transformers is not installed.
    """
    if not tokenizer:
        raise DataError(
            f"{path}: {name} has no tokenizer; give token ids: FILE.py:FUNCTION"
        )
    kind = _transformers().AutoTokenizer
    try:
        found = kind.from_pretrained(tokenizer, trust_remote_code=False)
        ids = found(path.read_text(), verbose=False)["input_ids"]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be tokenized with the tokenizer of {name}: "
            f"{reason(error)}; give token ids: FILE.py:FUNCTION"
        ) from error
    return torch.tensor(ids)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "transformers") from error
    return transformers
