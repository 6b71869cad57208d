"""Weights from files: read without running code, their names and shapes checked."""

import argparse
import logging
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ompq.errors import ModelError, shorten
from ompq.network.graph import COUNTER
from ompq.user_functions import reason

_LOG = logging.getLogger(__name__)
_SUFFIXES = (".safetensors", ".pt", ".pth", ".tar")  # .tar as in checkpoint.pth.tar
# Auxiliary classifiers of GoogLeNet and Inception, used in training only.
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
_PREFIXES = ("module.", "_orig_mod.")  # added by DataParallel and torch.compile
_PYTORCHCV = re.compile(r"features\.(init_block|stage\d+\.unit\d+|final_block)\.")


def load_weights(module: nn.Module, path: Path, name: str) -> None:
    """Load a .safetensors, .pt, .pth or .pth.tar file into a network, in place.

    Code in the file is never run, and the network keeps its precision. A checkpoint of
    a training script may hold the weights under ``state_dict``, ``model``,
    ``model_state_dict`` or ``net``, and with the prefix ``module.``. Names used by
    pytorchcv and BRECQ are mapped to torchvision's (:func:`torchvision_names`).
    """
    own = module.state_dict()
    given = torchvision_names(_read(path), own)
    dropped = [k for k in given if k not in own and k.startswith(_AUXILIARY)]
    if dropped:
        _LOG.info("%s: %d auxiliary tensors are not used", path, len(dropped))
    given = {key: value for key, value in given.items() if key not in dropped}
    _compare(own, given, f"{path} does not fit {name}")
    converted = {k: v.to(own[k].dtype) for k, v in given.items() if k in own}
    module.load_state_dict(converted, strict=False)


def torchvision_names(
    given: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return weights under torchvision's names if the file uses other known names.

    These are pytorchcv's ResNets and MobileNetV2, and BRECQ's MobileNetV2, whose blocks
    are flat sequences. pytorchcv has two variants of each. torchvision's networks are
    its ``resnet50b`` (stride in the 3 × 3 convolution; ``resnet18`` has only one
    variant) and ``mobilenetv2b_w1`` (no expansion in the first block). pytorchcv's
    classifier of MobileNetV2 is a convolution without bias: it is flattened, and the
    bias is set to 0.
    """
    named = dict(given)
    parts = {match[1] for match in map(_PYTORCHCV.match, given) if match is not None}
    if any(".body." in key for key in given):
        named = {_resnet_name(key): value for key, value in given.items()}
        if any(".body.conv3." in key for key in given):
            _LOG.warning(
                "make sure that these weights are of a pytorchcv variant with a b, "
                "such as resnet50b: the others differ from torchvision's networks"
            )
    elif parts:

        def position(part: str) -> tuple[int, list[int]]:
            numbers = [int(number) for number in re.findall(r"\d+", part)]
            return {"init_block": 0, "final_block": 2}.get(part, 1), numbers

        order = sorted(parts, key=position)
        index = {part: number for number, part in enumerate(order)}
        named = {_mobilenet_name(key, index): value for key, value in given.items()}
    if "features.1.conv.4.weight" in named and "features.1.conv.4.weight" not in own:
        named = {_block_name(key): value for key, value in named.items()}
    weight, bias = named.get("classifier.1.weight"), own.get("classifier.1.bias")
    if parts and weight is not None and bias is not None:
        named["classifier.1.weight"] = weight.flatten(1)
        named.setdefault("classifier.1.bias", torch.zeros_like(bias))
    return named


def _resnet_name(key: str) -> str:
    """``features.stage1.unit2.body.conv1.bn.bias`` → ``layer1.1.bn1.bias``."""
    key = re.sub(r"^features\.init_block\.conv\.(conv|bn)\.", r"\g<1>1.", key)
    key = re.sub(
        r"^features\.stage(\d+)\.unit(\d+)\.",
        lambda match: f"layer{match[1]}.{int(match[2]) - 1}.",
        key,
    )
    key = re.sub(r"\.body\.conv(\d)\.(conv|bn)\.", r".\2\1.", key)
    key = key.replace(".identity_conv.conv.", ".downsample.0.")
    key = key.replace(".identity_conv.bn.", ".downsample.1.")
    return re.sub(r"^output\.", "fc.", key)


def _mobilenet_name(key: str, index: Mapping[str, int]) -> str:
    """``features.stage2.unit1.conv2.bn.bias`` → BRECQ's ``features.2.conv.4.bias``."""
    key = _PYTORCHCV.sub(lambda match: f"features.{index[match[1]]}.", key)
    # The first block has no expansion: its convolutions are numbered from 2.
    match = re.fullmatch(
        r"features\.(?!1\.conv1)(\d+)\.conv(\d)\.(conv|bn)\.(\w+)", key
    )
    if match is not None:
        before = int(match[2]) - (2 if match[1] == "1" else 1)
        place = 3 * before + (match[3] == "bn")
        return f"features.{match[1]}.conv.{place}.{match[4]}"
    key = re.sub(r"^(features\.\d+)\.conv\.", r"\1.0.", key)
    key = re.sub(r"^(features\.\d+)\.bn\.", r"\1.1.", key)
    return re.sub(r"^output\.", "classifier.1.", key)


def _block_name(key: str) -> str:
    """BRECQ's ``features.2.conv.4.bias`` → ``features.2.conv.1.1.bias``."""
    match = re.fullmatch(r"features\.(\d+)\.conv\.(\d)\.(\w+)", key)
    if match is None:
        return key
    block, (number, part) = int(match[1]), divmod(int(match[2]), 3)
    last = number == (1 if block == 1 else 2)  # it has no activation and is not nested
    place = str(number + part) if last else f"{number}.{part}"
    return f"features.{block}.conv.{place}.{match[3]}"


def check_weights(module: nn.Module, name: str) -> None:
    """Raise a ModelError if a weight is NaN or infinite."""
    parameters = dict(module.named_parameters())
    bad = [
        key
        for key, value in module.state_dict().items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        # Buffers may be infinite, as attention masks are.
        and (~torch.isfinite(value) if key in parameters else value.isnan()).any()
    ]
    if bad:
        raise ModelError(
            f"{name} has NaN or infinity in {shorten(bad)}; "
            "the weights are damaged: download or train them again"
        )


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ModelError(
            f"there is no weights file {path}; give a .safetensors, .pt, .pth or "
            ".pth.tar file, or none for random weights"
        )
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ModelError(
            f"weights file {path} ends in {suffix or 'nothing'}; "
            "give a .safetensors, .pt, .pth or .pth.tar file"
        )
    try:
        if suffix == ".safetensors":
            return load_file(path)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            if size > path.stat().st_size:
                raise ValueError("it is compressed, as torch.save never does")
        # Many checkpoints hold the training script's options as a plain Namespace.
        with torch.serialization.safe_globals([argparse.Namespace]):
            data = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path} is not a plain state dict: it is damaged, or holds Python "
            "objects, which are not loaded. Save model.state_dict() alone"
        ) from error
    except Exception as error:  # a damaged file may raise anything
        raise ModelError(
            f"{path} cannot be read; it is damaged or cut short ({reason(error)})"
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
    unusable = [
        key
        for key, value in tensors.items()
        if value.layout != torch.strided
        or value.device.type != "cpu"
        or value.is_quantized
        or value.is_nested
    ]
    if unusable:
        raise ModelError(
            f"{path}: {shorten(unusable)} are sparse, quantized or without values; "
            "save dense float tensors"
        )
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): v for key, v in tensors.items()}
    return tensors


def _compare(
    own: Mapping[str, Tensor], given: Mapping[str, Tensor], context: str
) -> None:
    both = [(k, given[k], own[k]) for k in given if k in own]
    problems = {
        "missing": [k for k in own if k not in given and not k.endswith(COUNTER)],
        "unexpected": [k for k in given if k not in own and not k.endswith(COUNTER)],
        "other shapes": [
            f"{key} {tuple(value.shape)} instead of {tuple(expected.shape)}"
            for key, value, expected in both
            if value.shape != expected.shape
        ],
        "other types": [
            f"{key} {value.dtype} instead of {expected.dtype}"
            for key, value, expected in both
            if value.is_floating_point() != expected.is_floating_point()
        ],
    }
    texts = [f"{what} {shorten(keys)}" for what, keys in problems.items() if keys]
    if texts:
        raise ModelError(f"{context}: {'; '.join(texts)}")
