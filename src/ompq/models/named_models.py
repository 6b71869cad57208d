"""Networks by name, with weights and preprocessing."""

import logging
import os
import re
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ompq.errors import (
    DeviceMemoryError,
    MissingExtraError,
    ModelError,
    check_type,
    suggestion,
)
from ompq.layers import replace_module
from ompq.models.builtin_networks import (
    BUILTIN,
    DEMO_WEIGHTS,
    IMAGENET_MEAN,
    IMAGENET_STD,
)
from ompq.models.weight_files import check_weights, load_weights
from ompq.network.observation import copy_network
from ompq.optional_libraries import optional_library, torchvision_library
from ompq.samples import evaluating, first_tensor, model_device
from ompq.tokenizers import is_gguf_file
from ompq.user_functions import call_user_function, is_user_function, reason

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
INSTEAD = "Give a file of weights, or none for random ones"


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

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How its inputs are made, for :class:`ompq.ExportConfig`."""
        return {name: getattr(self, name) for name in _PREPROCESSING}

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
            decoder's ``config.json`` and weights, that file alone, a ``.gguf`` file,
            or a name on the Hugging Face hub. The user's file is executed; its
            function takes no argument and returns the network.
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
        _LOG.warning("%s has random weights: only the sizes are valid", name)
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
            f"{reason(error)}. Give another input shape, set "
            "preprocessing['input_shape'] on the network, or give data of its own"
        ) from error


def _build(name: str, *, pretrained: bool) -> NamedModel:
    check_type("name", name, str)
    source, _, short = name.partition(":")
    if is_user_function(name):
        module = call_user_function(name, ModelError)
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"{name} returned {type(module).__name__}; it must return an nn.Module"
            )
        return _describe(module, name)
    if name in BUILTIN:
        return _from_package(name, pretrained=pretrained)
    if source == "torchvision":
        return _from_torchvision(name, short, pretrained=pretrained)
    if source == "timm":
        return _from_timm(name, short, pretrained=pretrained)
    if source == "transformers":
        return _from_transformers(name, short, pretrained=pretrained)
    known = list(BUILTIN)
    if source not in ("cifar", "ompq"):
        known = [f"torchvision:{one}" for one in _known_to_torchvision()]
    raise ModelError(
        f"{name!r} is not the name of a network{suggestion(name, known)}. "
        "Use torchvision:NAME, timm:NAME, cifar:NAME, transformers:FOLDER or "
        f"FILE.py:FUNCTION{_hint(name)}"
    )


def _hint(name: str) -> str:
    if name.endswith(".py"):
        return f", here {name}:FUNCTION, where FUNCTION returns the network"
    packed = name.endswith((".safetensors", ".onnx")) or (name and Path(name).is_dir())
    return "; ompq.load reads packed files, and so does ompq evaluate" if packed else ""


def _from_package(name: str, *, pretrained: bool) -> NamedModel:
    model = _describe(BUILTIN[name](), name)
    if not pretrained:
        return model
    if name != "ompq:demo":
        raise ModelError(f"{name} has no weights of its own. {INSTEAD}")
    load_weights(model.module, DEMO_WEIGHTS, name)
    return replace(model, weights="included in ompq")


def _from_torchvision(name: str, short: str, *, pretrained: bool) -> NamedModel:
    torchvision = torchvision_library()
    names = torchvision.models.list_models(module=torchvision.models)
    if short not in names and short in torchvision.models.list_models():
        raise ModelError(
            f"{name} is not a classification network: return it from a function of "
            "your own, FILE.py:FUNCTION, made with "
            f"torchvision.models.get_model({short!r})"
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
    timm = optional_library("timm", "timm")
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
    library = optional_library("transformers", "transformers")
    path = Path(source)
    local = path.exists()
    if not local and _HUB_NAME.fullmatch(source) is None:
        raise ModelError(
            f"{name}: there is no folder {source}; give one that holds config.json"
        )
    gguf = local and is_gguf_file(path)
    if local and pretrained and not gguf and not any(path.glob("*.safetensors")):
        raise ModelError(f"{source} holds no weights (*.safetensors). {INSTEAD}")
    decoder, place, options = library.AutoModelForCausalLM, source, dict[str, Any]()
    if gguf:
        optional_library("gguf", "gguf")
        place, options = os.fspath(path.parent), {"gguf_file": path.name}
    try:
        with nullcontext() if local else downloading("transformers", name):
            if pretrained:
                # Half precision cannot represent the values of a quantization grid.
                options |= {"dtype": torch.float32, "trust_remote_code": False}
                module = decoder.from_pretrained(place, **options)
            else:
                config = library.AutoConfig.from_pretrained(place, **options)
                module = decoder.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{name} cannot be built: {reason(error)}") from error
    if gguf:
        _forget_types(module, source)
    origin = source if local else f"transformers {source}"
    described = _describe(_linearize(module), name)
    return replace(described, weights=origin, tokenizer=source)


def _forget_types(module: Any, source: str) -> None:
    """Turn the weights of a network read from a GGUF file into plain floats."""
    module.config.__dict__.pop("quantization_config", None)
    module.hf_quantizer = None
    module.name_or_path = module.config._name_or_path = source


def with_linear_layers(model: nn.Module) -> nn.Module:
    """Return a copy of a network with its ``Conv1D`` layers replaced by ``nn.Linear``.

    GPT-2 and its relatives keep weights of shape (inputs, outputs) in layers called
    ``Conv1D``, which compute what linear layers do. Only linear layers are quantized.
    """
    return _linearize(copy_network(model))


def _linearize(model: nn.Module) -> nn.Module:
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            weight: Any = module.weight
            inputs, outputs = weight.shape
            layer = nn.Linear(inputs, outputs, device="meta")
            layer.weight = nn.Parameter(weight.detach().T.contiguous())
            layer.bias = module.bias
            replace_module(model, name, layer.train(module.training))
    return model


def _describe(module: nn.Module, name: str) -> NamedModel:
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


def _known_to_torchvision() -> list[str]:
    try:
        models = torchvision_library("torchvision.models")
    except MissingExtraError:
        return []
    return list(models.list_models(module=models))


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
