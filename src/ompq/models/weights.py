"""Float weights: read from a file, compared with the network, or downloaded."""

import logging
import pickle
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ompq.errors import ModelError, shortened
from ompq.userfiles import reason

INSTEAD = "Pass --weights FILE or --weights none"

_LOG = logging.getLogger(__name__)
# Batch norm's counter plays no part in the network and is often left out of files.
_COUNTER = "num_batches_tracked"
# Auxiliary classifiers of GoogLeNet and Inception: used in training only.
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
_WRAPPERS = ("state_dict", "model_state_dict", "model")


def load_weights(module: nn.Module, path: Path, name: str) -> None:
    """Load the weights into the network, in the network's own precision.

    Args:
        module: The network; changed in place.
        path: A .safetensors, .pt or .pth file of its state dict.
        name: The network's name, for messages.

    Raises:
        ModelError: The file cannot be read, or its keys or shapes do not fit.
    """
    own = module.state_dict()
    given = _read(path)
    dropped = [k for k in given if k not in own and k.startswith(_AUXILIARY)]
    if dropped:
        _LOG.info("%s: %d auxiliary tensors are not used", path, len(dropped))
    given = {key: value for key, value in given.items() if key not in dropped}
    _compare(own, given, f"{path} does not fit {name}")
    converted = {k: v.to(own[k].dtype) for k, v in given.items() if k in own}
    module.load_state_dict(converted, strict=False)


def check_weights(module: nn.Module, name: str) -> None:
    """Check that every weight is a number.

    Raises:
        ModelError: A parameter holds NaN or infinity, or a buffer holds NaN.
    """
    parameters = dict(module.named_parameters())
    bad = [
        key
        for key, value in module.state_dict().items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        # An infinite buffer is in order: attention masks are.
        and (~torch.isfinite(value) if key in parameters else value.isnan()).any()
    ]
    if bad:
        raise ModelError(
            f"{name} has NaN or infinity in {shortened(bad)}; "
            "the weights are damaged: get or train them again"
        )


@contextmanager
def downloading(library: str, name: str) -> Iterator[None]:
    """Turn whatever a library's download raises into one ``ModelError``."""
    # Every library and network layer has its own errors; to the user they are one.
    try:
        with _hub_offline_if_unreachable():
            yield
    except Exception as error:
        raise ModelError(
            f"{library}'s own weights of {name} cannot be downloaded "
            f"({reason(error)}). {INSTEAD}"
        ) from error


@contextmanager
def _hub_offline_if_unreachable() -> Iterator[None]:
    # Without this the Hugging Face client, which timm uses, retries for 50 seconds
    # before it looks into its cache.
    try:
        from huggingface_hub import constants
    except ImportError:
        yield
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _resolves(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _resolves(url: str) -> bool:
    if urllib.request.getproxies():  # then the proxy resolves names
        return True
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(url).hostname, 443)
    except OSError:
        return False
    return True


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ModelError(
            f"there is no weights file {path}; give a .safetensors, .pt or .pth file, "
            "or none for random weights"
        )
    suffix = path.suffix.lower()
    if suffix not in (".safetensors", ".pt", ".pth"):
        raise ModelError(
            f"weights file {path} ends in {suffix or 'nothing'}; "
            "give a .safetensors, .pt or .pth file"
        )
    try:
        if suffix == ".safetensors":
            return load_file(path)
        data = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path} is no plain state dict: it is damaged, or holds Python objects, "
            "which are not loaded. Save model.state_dict() alone"
        ) from error
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read; it is damaged or cut short"
        ) from error
    return _unwrap(data, path)


def _unwrap(data: Any, path: Path) -> dict[str, Tensor]:
    for key in _WRAPPERS:
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
    if not isinstance(data, Mapping) or not data:
        raise ModelError(
            f"{path} holds {type(data).__name__}, not a state dict of tensors"
        )
    tensors = {str(k): v for k, v in data.items() if isinstance(v, Tensor)}
    if all(key.startswith("module.") for key in tensors):  # from DataParallel
        tensors = {key.removeprefix("module."): v for key, v in tensors.items()}
    return tensors


def _compare(
    own: Mapping[str, Tensor], given: Mapping[str, Tensor], context: str
) -> None:
    missing = [k for k in own if k not in given and not k.endswith(_COUNTER)]
    unexpected = [k for k in given if k not in own and not k.endswith(_COUNTER)]
    both = [(k, given[k], own[k]) for k in given if k in own]
    shapes = [
        f"{key} {tuple(value.shape)} instead of {tuple(expected.shape)}"
        for key, value, expected in both
        if value.shape != expected.shape
    ]
    types = [
        f"{key} {value.dtype} instead of {expected.dtype}"
        for key, value, expected in both
        if value.is_floating_point() != expected.is_floating_point()
    ]
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "other shapes": shapes,
        "other types": types,
    }
    found = [f"{what} {shortened(keys)}" for what, keys in problems.items() if keys]
    if found:
        raise ModelError(f"{context}: {'; '.join(found)}")
