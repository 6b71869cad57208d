"""Networks by name, with weights and preprocessing; and those that come with ompq."""

import argparse
import logging
import os
import pickle
import re
import socket
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

from ompq.errors import (
    DeviceMemoryError,
    MissingExtraError,
    ModelError,
    shortened,
    suggestion,
)
from ompq.files import call_user_function, is_user_function, reason
from ompq.graph import COUNTER
from ompq.layers import replace_module
from ompq.recording import copied
from ompq.samples import evaluating, first_tensor, model_device

_LOG = logging.getLogger(__name__)
_PREPROCESSING = ("input_shape", "mean", "std", "resize", "interpolation")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_TOKENS = 128  # default sequence length of a decoder
# Options that torchvision sets when it builds these two networks with pretrained
# weights. Weights from a file need them too.
_TRANSFORMED = ("googlenet", "inception_v3")
_TRANSFORM_OPTIONS = {
    "aux_logits": False,
    "init_weights": False,
    "transform_input": True,
}
INSTEAD = "Pass --weights FILE or --weights none"
_SUFFIXES = (".safetensors", ".pt", ".pth", ".tar")  # .tar as in checkpoint.pth.tar
# Auxiliary classifiers of GoogLeNet and Inception, used in training only.
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
_PREFIXES = ("module.", "_orig_mod.")  # added by DataParallel and torch.compile
_PYTORCHCV = re.compile(r"features\.(init_block|stage\d+\.unit\d+|final_block)\.")
# Per channel, for images in [0, 1], as in torchvision.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The published CIFAR-10 weights were trained with ImageNet's statistics.
_CIFAR: dict[str, Any] = {
    "input_shape": (3, 32, 32),
    "mean": IMAGENET_MEAN,
    "std": IMAGENET_STD,
    "resize": 32,
}
DEMO_WEIGHTS = Path(__file__).parent / "data" / "demo.safetensors"
_TEST_LENGTH = 450  # a quarter of the digits


@dataclass(frozen=True)
class NamedModel:
    """A network and the preprocessing of its inputs."""

    module: nn.Module  # in eval mode
    name: str  # the name it was loaded by
    input_shape: tuple[int, ...]  # of one input; (channels, height, width) for images
    mean: tuple[float, ...]  # subtracted from each channel of an image in [0, 1]
    std: tuple[float, ...]  # each channel is then divided by it
    # Length of the shorter side before the centre crop, or (height, width) to resize
    # to without a crop.
    resize: int | tuple[int, int]
    interpolation: str = "bilinear"  # ``bilinear`` or ``bicubic``
    weights: str = "as built"  # where the weights came from, for display
    vocabulary: int = 0  # number of token ids; 0 if the inputs are not tokens
    tokenizer: str = ""  # name or folder of its transformers tokenizer, if any

    def at(self, shape: tuple[int, ...]) -> "NamedModel":
        """Return the network with its preprocessing adapted to another input shape."""
        if len(shape) != 3 or len(self.input_shape) != 3:
            return replace(self, input_shape=shape)
        resize = self.resize
        if isinstance(resize, int):
            resize = round(resize * min(shape[1:]) / min(self.input_shape[1:]))
        else:
            resize = (shape[1], shape[2])
        same = len(self.mean) == shape[0]
        mean, std = (self.mean, self.std) if same else _default_statistics(shape[0])
        return replace(self, input_shape=shape, resize=resize, mean=mean, std=std)


def load_model(name: str, weights: str | os.PathLike[str] | None = None) -> NamedModel:
    """Load a network by name.

    Args:
        name: ``torchvision:NAME``, ``timm:NAME``, ``cifar:NAME``,
            ``transformers:SOURCE`` or ``file.py:function``. SOURCE is a folder with a
            decoder's ``config.json`` and weights, that file alone, or a name on the
            Hugging Face hub. The user's file is executed; its function takes no
            argument and returns the network.
        weights: A file that :func:`load_weights` can read; ``"none"`` for random
            weights from a fixed seed; None for the library's own pretrained weights,
            which may be downloaded, or those that the user's function sets.

    Raises:
        ModelError: The network is unknown, or its weights cannot be loaded.
        MissingExtraError: timm or transformers is not installed.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed CUDA as well.
        torch.default_generator.manual_seed(0)
        model = _build(name, pretrained=weights is None)
    if weights == "none":
        _LOG.warning(
            "%s has random weights (--weights none): the results mean nothing", name
        )
        model = replace(model, weights="none (random)")
    elif weights is not None:
        load_weights(model.module, Path(weights), name)
        model = replace(model, weights=os.fspath(weights))
    check_weights(model.module, name)
    model.module.eval()
    return model


def blank_input(model: NamedModel) -> Tensor:
    """Return a batch of one input of zeros; token ids if there is a vocabulary."""
    dtype = torch.long if model.vocabulary else None
    device = model_device(model.module)
    return torch.zeros(1, *model.input_shape, device=device, dtype=dtype)


def output_count(model: NamedModel) -> int:
    """Return the number of outputs (logits), found by a forward pass of zeros."""
    try:
        with evaluating(model.module):
            return first_tensor(model.module(blank_input(model))).shape[-1]
    except DeviceMemoryError:
        raise
    except Exception as error:
        raise ModelError(
            f"{model.name} does not take an input of shape {model.input_shape}: "
            f"{reason(error)}. Give --input-shape, set preprocessing['input_shape'] on "
            "the network, or give its own data: --data FILE.py:FUNCTION"
        ) from error


def _build(name: str, *, pretrained: bool) -> NamedModel:
    source, _, short = name.partition(":")
    if is_user_function(name):
        module = call_user_function(name, ModelError)
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"{name} returned {type(module).__name__}; it must return an nn.Module"
            )
        return _described(module, name)
    if name in _BUILTIN:
        return _from_package(name, pretrained=pretrained)
    if source == "torchvision":
        return _from_torchvision(name, short, pretrained=pretrained)
    if source == "timm":
        return _from_timm(name, short, pretrained=pretrained)
    if source == "transformers":
        return _from_transformers(name, short, pretrained=pretrained)
    known = list(_BUILTIN)
    if source not in ("cifar", "ompq"):
        known = [f"torchvision:{one}" for one in _torchvision_names()]
    raise ModelError(
        f"{name!r} is not the name of a network{suggestion(name, known)}. "
        "Use torchvision:NAME, timm:NAME, cifar:NAME, transformers:FOLDER or "
        f"FILE.py:FUNCTION{_hint(name)}"
    )


def _hint(name: str) -> str:
    if name.endswith(".py"):
        return f", here {name}:FUNCTION, where FUNCTION returns the network"
    packed = name.endswith((".safetensors", ".onnx")) or (name and Path(name).is_dir())
    return "; ompq evaluate NETWORK --packed FILE reads packed files" if packed else ""


def _from_package(name: str, *, pretrained: bool) -> NamedModel:
    model = _described(_BUILTIN[name](), name)
    if not pretrained:
        return model
    if name != "ompq:demo":
        raise ModelError(f"{name} has no weights of its own. {INSTEAD}")
    load_weights(model.module, DEMO_WEIGHTS, name)
    return replace(model, weights="included in ompq")


def _from_torchvision(name: str, short: str, *, pretrained: bool) -> NamedModel:
    names = _torchvision_names()
    if short not in names and short in torchvision.models.list_models():
        raise ModelError(
            f"{name} is no classification network: return it from a function of your "
            f"own, FILE.py:FUNCTION, made with torchvision.models.get_model({short!r})"
        )
    if short not in names:
        raise ModelError(
            f"torchvision has no classification network {short!r}"
            f"{suggestion(short, names)}; it has resnet18, mobilenet_v2 and "
            f"{len(names) - 2} more: torchvision.models.list_models()"
        )
    entries = torchvision.models.get_model_weights(short)
    # The weights in a file are most often the first ones published.
    entry = entries.DEFAULT if pretrained else next(iter(entries))
    if pretrained:
        with downloading("torchvision", name):
            module = torchvision.models.get_model(short, weights=entry)
    else:
        options = _TRANSFORM_OPTIONS if short in _TRANSFORMED else {}
        module = torchvision.models.get_model(short, weights=None, **options)
    preset = entry.transforms()
    # vit_h_14 was published only at 518 pixels, but without weights is built for 224.
    side = getattr(module, "image_size", preset.crop_size[0])
    return NamedModel(
        module=module,
        name=name,
        input_shape=(3, side, side),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        resize=max(side, preset.resize_size[0] * side // preset.crop_size[0]),
        interpolation=preset.interpolation.value,
        weights=f"torchvision {entry.name}",
    )


def _from_timm(name: str, short: str, *, pretrained: bool) -> NamedModel:
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError("timm", "timm") from error
    names = [*timm.list_models(), *timm.list_pretrained()]
    if short not in names:
        raise ModelError(f"timm has no network {short!r}{suggestion(short, names)}")
    if pretrained and not timm.models.is_model_pretrained(short):
        raise ModelError(f"timm has no pretrained weights for {name}. {INSTEAD}")
    with downloading("timm", name) if pretrained else nullcontext():
        module = timm.create_model(short, pretrained=pretrained)
    tag = module.pretrained_cfg.get("tag") or "pretrained"
    return NamedModel(
        module=module, name=name, weights=f"timm {tag}", **_timm_preprocessing(module)
    )


def _timm_preprocessing(module: nn.Module) -> dict[str, Any]:
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(module)
    _, height, width = config["input_size"]
    scaled = [int(side / config["crop_pct"]) for side in (height, width)]
    return {
        "input_shape": tuple(config["input_size"]),
        "mean": tuple(config["mean"]),
        "std": tuple(config["std"]),
        "resize": tuple(scaled) if config["crop_mode"] == "squash" else min(scaled),
        "interpolation": config["interpolation"],
    }


def _from_transformers(name: str, source: str, *, pretrained: bool) -> NamedModel:
    library, path = transformers_library(), Path(source)
    local = path.exists()
    if not local and _HUB_NAME.fullmatch(source) is None:
        raise ModelError(
            f"{name}: there is no folder {source}; give one that holds config.json"
        )
    if local and pretrained and not any(path.glob("*.safetensors")):
        raise ModelError(f"{source} holds no weights (*.safetensors). {INSTEAD}")
    decoder, place = library.AutoModelForCausalLM, path if local else source
    try:
        with nullcontext() if local else downloading("transformers", name):
            if pretrained:
                # Half precision cannot represent the values of a quantization grid.
                options = {"dtype": torch.float32, "trust_remote_code": False}
                module = decoder.from_pretrained(place, **options)
            else:
                module = decoder.from_config(library.AutoConfig.from_pretrained(place))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{name} cannot be built: {reason(error)}") from error
    origin = source if local else f"transformers {source}"
    described = _described(_linearized(module), name)
    return replace(described, weights=origin, tokenizer=source)


def transformers_library() -> Any:
    """Import and return transformers."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "transformers") from error
    return transformers


def with_linear_layers(model: nn.Module) -> nn.Module:
    """Return a copy of a network with its ``Conv1D`` layers replaced by ``nn.Linear``.

    GPT-2 and its relatives keep weights of shape (inputs, outputs) in layers called
    ``Conv1D``, which compute what linear layers do. Only linear layers are quantized.
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


def _described(module: nn.Module, name: str) -> NamedModel:
    if isinstance(getattr(module, "pretrained_cfg", None), dict):
        return NamedModel(module=module, name=name, **_timm_preprocessing(module))
    if vocabulary := getattr(getattr(module, "config", None), "vocab_size", 0):
        config: Any = module.config
        longest = getattr(config, "max_position_embeddings", None) or _TOKENS
        tokens = (min(_TOKENS, longest),)
        return NamedModel(module, name, tokens, (), (), 0, vocabulary=vocabulary)
    settings = getattr(module, "preprocessing", {})
    if not isinstance(settings, Mapping) or not set(settings) <= set(_PREPROCESSING):
        raise ModelError(
            f"{name}: preprocessing is {settings!r}; it must be a dict with keys among "
            f"{', '.join(_PREPROCESSING)}"
        )
    shape = tuple(settings.get("input_shape", (3, 224, 224)))
    if not shape or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ModelError(
            f"{name}: input_shape is {shape}; it must be that of one input, for images "
            "(channels, height, width)"
        )
    default_mean, default_std = _default_statistics(shape[0] if len(shape) == 3 else 0)
    mean, std = settings.get("mean", default_mean), settings.get("std", default_std)
    if len(shape) == 3 and not len(mean) == len(std) == shape[0]:
        raise ModelError(
            f"{name}: mean has {len(mean)} and std {len(std)} values; "
            f"there are {shape[0]} channels"
        )
    interpolation = settings.get("interpolation", "bilinear")
    if interpolation not in ("bilinear", "bicubic"):
        raise ModelError(
            f"{name}: interpolation is {interpolation!r}; use 'bilinear' or 'bicubic'"
        )
    return NamedModel(
        module=module,
        name=name,
        input_shape=shape,
        mean=tuple(mean),
        std=tuple(std),
        resize=settings.get("resize", min(shape[1:], default=0)),
        interpolation=interpolation,
    )


def _default_statistics(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return ImageNet's mean and deviation for three channels, otherwise 0 and 1."""
    if channels == 3:
        return IMAGENET_MEAN, IMAGENET_STD
    return (0.0,) * channels, (1.0,) * channels


def _torchvision_names() -> list[str]:
    return list(torchvision.models.list_models(module=torchvision.models))


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
            f"{name} has NaN or infinity in {shortened(bad)}; "
            "the weights are damaged: download or train them again"
        )


@contextmanager
def downloading(library: str, name: str) -> Iterator[None]:
    """Turn any error of a library's download into a ``ModelError``."""
    try:
        with _offline_if_unreachable():
            yield
    except Exception as error:
        raise ModelError(
            f"{library}'s own weights for {name} cannot be downloaded "
            f"({reason(error)}). {INSTEAD}"
        ) from error


@contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    # Without a network, the Hugging Face client, which timm uses, would retry for 50
    # seconds before it looks into its cache.
    try:
        from huggingface_hub import constants
    except ImportError:
        yield
        return
    before = constants.HF_HUB_OFFLINE
    if not urllib.request.getproxies():  # otherwise the proxy resolves names
        try:
            host = urllib.parse.urlsplit(constants.ENDPOINT).hostname
            socket.getaddrinfo(host, 443)
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


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
    return _unwrapped(data, path)


def _unwrapped(data: Any, path: Path) -> dict[str, Tensor]:
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
            f"{path}: {shortened(unusable)} are sparse, quantized or without values; "
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
    texts = [f"{what} {shortened(keys)}" for what, keys in problems.items() if keys]
    if texts:
        raise ModelError(f"{context}: {'; '.join(texts)}")


class PadShortcut(nn.Module):
    """Shortcut "A" of He et al.: every second pixel, zeros for the new channels."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C + new_channels, H / 2, W / 2)."""
        half = self.new_channels // 2
        ends = half, self.new_channels - half
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, *ends))


class CifarBlock(nn.Module):
    """Two 3 × 3 convolutions and a shortcut without parameters."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.shortcut = (
            nn.Identity() if stride == 1 else PadShortcut(channels - channels_in)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, channels, H / stride, W / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.shortcut(x))  # type: ignore[no-any-return]


class CifarResNet(nn.Module):
    """The CIFAR ResNet of He et al.: 6n + 2 layers, stages of 16, 32 and 64 channels.

    ``width`` multiplies the channels.
    """

    preprocessing: ClassVar[dict[str, Any]] = _CIFAR

    def __init__(
        self, depth: int = 20, classes: int = 10, *, width: float = 1.0
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth={depth} is not 6n + 2; use 20, 32, 44 or 56")
        blocks = (depth - 2) // 6
        few, more, most = (max(1, round(n * width)) for n in (16, 32, 64))
        self.conv1 = nn.Conv2d(3, few, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(few)
        self.relu = nn.ReLU()
        self.layer1 = _stage(few, few, 1, blocks)
        self.layer2 = _stage(few, more, 2, blocks)
        self.layer3 = _stage(more, most, 2, blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(most, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(self.pool(x).flatten(1))  # type: ignore[no-any-return]


def cifar_resnet18(classes: int = 10, *, width: float = 1.0) -> nn.Module:
    """Return torchvision's ResNet-18 with a stem for 32 × 32 images.

    ``conv1`` is 3 × 3 with stride 1, and there is no max pooling. ``width`` multiplies
    the channels.
    """
    network: Any = torchvision.models.resnet18(num_classes=classes)
    if width != 1:
        _multiply_channels(network, width)
    few = network.bn1.num_features
    network.conv1 = nn.Conv2d(3, few, 3, 1, 1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out")
    network.maxpool = nn.Identity()
    network.__dict__["preprocessing"] = _CIFAR
    return network  # type: ignore[no-any-return]


def _multiply_channels(network: Any, width: float) -> None:
    """Replace all that follows the first convolution of torchvision's ResNet-18."""
    few, *more = (max(1, round(n * width)) for n in (64, 64, 128, 256, 512))
    network.bn1, channels = nn.BatchNorm2d(few), few
    for stage, wider in enumerate(more):
        stride, shortcut = min(stage + 1, 2), None
        if stage:
            convolution = nn.Conv2d(channels, wider, 1, stride, bias=False)
            shortcut = nn.Sequential(convolution, nn.BatchNorm2d(wider))
        first = BasicBlock(channels, wider, stride, shortcut)
        blocks = nn.Sequential(first, BasicBlock(wider, wider))
        setattr(network, f"layer{stage + 1}", blocks)
        channels = wider
    network.fc = nn.Linear(channels, network.fc.out_features)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")


def _stage(channels_in: int, channels: int, stride: int, blocks: int) -> nn.Sequential:
    first = CifarBlock(channels_in, channels, stride)
    rest = (CifarBlock(channels, channels, 1) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expansion, depthwise convolution, projection.

    It has a shortcut if the stride is 1 and the number of channels stays the same.
    """

    def __init__(
        self, channels_in: int, channels: int, *, stride: int = 1, expansion: int = 3
    ) -> None:
        super().__init__()
        inner = channels_in * expansion
        self.expand = nn.Conv2d(channels_in, inner, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(inner)
        self.project = nn.Conv2d(inner, channels, 1, bias=False)
        self.project_norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU6()
        self.shortcut = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, channels, H / stride, W / stride)."""
        y = self.activation(self.expand_norm(self.expand(x)))
        y = self.activation(self.depthwise_norm(self.depthwise(y)))
        y = self.project_norm(self.project(y))
        return x + y if self.shortcut else y  # type: ignore[no-any-return]


class Residual(nn.Module):
    """The ResNet block that halves the resolution; its shortcut is a convolution."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, 2, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.downsample = nn.Conv2d(channels_in, channels, 1, 2, bias=False)
        self.downsample_norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels_in, H, W) to (N, channels, H / 2, W / 2)."""
        y = self.activation(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y = y + self.downsample_norm(self.downsample(x))
        return self.activation(y)  # type: ignore[no-any-return]


class DemoNetwork(nn.Module):
    """A small classifier of scikit-learn's digits: 8 × 8 grey images, ten classes.

    It has one of each structure common in practice: ordinary, depthwise and pointwise
    convolutions, blocks with and without a shortcut, and a downsample convolution. Its
    weights are trained by ``scripts/train_demo.py``.
    """

    preprocessing: ClassVar[dict[str, Any]] = {
        "input_shape": (1, 8, 8),
        "mean": (0.0,),
        "std": (1.0,),
        "resize": 8,
    }

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, 1, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(16)
        self.activation = nn.ReLU6()
        self.blocks = nn.Sequential(
            InvertedResidual(16, 16),
            InvertedResidual(16, 24, stride=2),  # 8 × 8 to 4 × 4
            InvertedResidual(24, 24),
            InvertedResidual(24, 24),
            Residual(24, 64),  # 4 × 4 to 2 × 2
            InvertedResidual(64, 64, expansion=1),
        )
        self.head = nn.Conv2d(64, 64, 1, bias=False)
        self.head_norm = nn.BatchNorm2d(64)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 1, 8, 8) with values in [0, 1] to logits (N, 10)."""
        x = self.activation(self.stem_norm(self.stem(x)))
        x = self.activation(self.head_norm(self.head(self.blocks(x))))
        return self.classifier(self.pool(x).flatten(1))  # type: ignore[no-any-return]


# Each takes a ``width``, which multiplies its channels.
CIFAR_NETWORKS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "cifar:resnet18": cifar_resnet18,
        "cifar:resnet20": partial(CifarResNet, 20),
        "cifar:resnet56": partial(CifarResNet, 56),
    }
)
_BUILTIN = {**CIFAR_NETWORKS, "ompq:demo": DemoNetwork}


@dataclass(frozen=True)
class DemoData:
    """A fixed split of the digits; the demo network was trained on the first part."""

    train_images: Tensor  # (1347, 1, 8, 8), in [0, 1]
    train_targets: Tensor  # (1347,)
    test_images: Tensor  # (450, 1, 8, 8)
    test_targets: Tensor  # (450,)


def demo_data() -> DemoData:
    """Return scikit-learn's digits as tensors, always with the same split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "demo") from error
    values, labels = load_digits(return_X_y=True)
    # NumPy guarantees the random stream of RandomState, so the split is fixed.
    shuffled = np.random.RandomState(0).permutation(len(labels))
    images = torch.from_numpy(values[shuffled] / 16).float().view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels[shuffled]).long()
    return DemoData(
        train_images=images[_TEST_LENGTH:],
        train_targets=targets[_TEST_LENGTH:],
        test_images=images[:_TEST_LENGTH],
        test_targets=targets[:_TEST_LENGTH],
    )
