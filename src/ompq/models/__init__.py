"""Networks by name: their module, weights and preprocessing."""

import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from ompq.errors import MissingExtraError, ModelError, suggestion
from ompq.files import call_user_function, is_user_function, reason
from ompq.layers import replace_module
from ompq.models.networks import (
    DEMO_WEIGHTS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    CifarResNet,
    DemoNetwork,
    cifar_resnet18,
)
from ompq.models.weights import INSTEAD, check_weights, downloading, load_weights
from ompq.recording import copied
from ompq.samples import evaluating, first_tensor, model_device

_LOG = logging.getLogger(__name__)
_PREPROCESSING = ("input_shape", "mean", "std", "resize", "interpolation")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_TOKENS = 128  # of one input of a decoder, if nothing else is said
# What torchvision's pretrained builders of two networks set, for a file's weights too.
_TRANSFORMED = ("googlenet", "inception_v3")
_TRANSFORMING = {"aux_logits": False, "init_weights": False, "transform_input": True}


@dataclass(frozen=True)
class NamedModel:
    """A network, and how its images are prepared."""

    module: nn.Module  # the network, in eval mode
    name: str  # the name it was loaded by
    input_shape: tuple[int, ...]  # of one input: channels, height, width of an image
    mean: tuple[float, ...]  # subtracted from each channel of an image in [0, 1]
    std: tuple[float, ...]  # each channel is then divided by it
    # Length of an image's shorter side before the centre crop, or the height and width
    # when the image is squashed instead.
    resize: int | tuple[int, int]
    interpolation: str = "bilinear"  # ``bilinear`` or ``bicubic``
    weights: str = "as built"  # where the weights came from, for people
    vocabulary: int = 0  # number of token ids, if these are its inputs
    tokenizer: str = ""  # where transformers finds its tokenizer, if it has one

    def at(self, shape: tuple[int, ...]) -> "NamedModel":
        """Return the network for inputs of another shape."""
        if len(shape) != 3 or len(self.input_shape) != 3:
            return replace(self, input_shape=shape)
        resize = self.resize
        if isinstance(resize, int):
            resize = round(resize * min(shape[1:]) / min(self.input_shape[1:]))
        else:
            resize = (shape[1], shape[2])
        same = len(self.mean) == shape[0]
        mean, std = (self.mean, self.std) if same else _plain_statistics(shape[0])
        return replace(self, input_shape=shape, resize=resize, mean=mean, std=std)


_BUILTIN: dict[str, Callable[[], nn.Module]] = {
    "cifar:resnet18": cifar_resnet18,
    "cifar:resnet20": partial(CifarResNet, 20),
    "cifar:resnet56": partial(CifarResNet, 56),
    "ompq:demo": DemoNetwork,
}
_SHIPPED = {"ompq:demo": DEMO_WEIGHTS}


def load_model(name: str, weights: str | os.PathLike[str] | None = None) -> NamedModel:
    """Load a network by name.

    Args:
        name: ``torchvision:...``, ``timm:...``, ``cifar:...``, ``transformers:...`` or
            ``file.py:function``, a function of the user's own file (which is executed)
            that takes no argument and returns the network. After ``transformers:``
            stands a folder with a decoder's ``config.json`` and weights, the file
            alone, or the name of one to download.
        weights: A file, as :func:`load_weights` reads it; ``"none"`` for random
            weights from a fixed seed; None for the library's own pretrained weights,
            which may be downloaded. A user's function brings its own weights.

    Raises:
        ModelError: The network is not known, or its weights cannot be loaded.
        MissingExtraError: timm or transformers is not installed.
    """
    with torch.random.fork_rng(devices=[]):
        # manual_seed of the generator, not of torch: that one would seed CUDA as well.
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
    """Return one input of zeros: tokens, where the network has a vocabulary."""
    kind = torch.long if model.vocabulary else None
    device = model_device(model.module)
    return torch.zeros(1, *model.input_shape, device=device, dtype=kind)


def output_count(model: NamedModel) -> int:
    """Return the number of outputs (logits), found by one pass of zeros."""
    try:
        with evaluating(model.module):
            return first_tensor(model.module(blank_input(model))).shape[-1]
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
    if name not in _SHIPPED:
        raise ModelError(f"{name} has no weights of its own. {INSTEAD}")
    load_weights(model.module, _SHIPPED[name], name)
    return replace(model, weights="of the package")


def _from_torchvision(name: str, short: str, *, pretrained: bool) -> NamedModel:
    names = _torchvision_names()
    if short not in names:
        raise ModelError(
            f"torchvision has no classification network {short!r}"
            f"{suggestion(short, names)}; it has resnet18, mobilenet_v2 and "
            f"{len(names) - 2} more: torchvision.models.list_models()"
        )
    entries = torchvision.models.get_model_weights(short)
    # A file most often holds the first weights that were published.
    entry = entries.DEFAULT if pretrained else next(iter(entries))
    if pretrained:
        with downloading("torchvision", name):
            module = torchvision.models.get_model(short, weights=entry)
    else:
        options = _TRANSFORMING if short in _TRANSFORMED else {}
        module = torchvision.models.get_model(short, weights=None, **options)
    preset = entry.transforms()
    # vit_h_14 was published at 518 pixels only, but is built for 224 without weights.
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
        raise ModelError(f"timm has no pretrained weights of {name}. {INSTEAD}")
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
            f"{name}: there is no folder {source}; name one that holds config.json"
        )
    if local and pretrained and not any(path.glob("*.safetensors")):
        raise ModelError(f"{source} holds no weights (*.safetensors). {INSTEAD}")
    kind, given = library.AutoModelForCausalLM, path if local else source
    try:
        with nullcontext() if local else downloading("transformers", name):
            if pretrained:
                # Half a precision does not hold the values of a grid.
                kept = {"dtype": torch.float32, "trust_remote_code": False}
                made = kind.from_pretrained(given, **kept)
            else:
                made = kind.from_config(library.AutoConfig.from_pretrained(given))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{name} cannot be built: {reason(error)}") from error
    origin = source if local else f"transformers {source}"
    described = _described(_linearized(made), name)
    return replace(described, weights=origin, tokenizer=source)


def transformers_library() -> Any:
    """Return transformers, or say which extra brings it."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "transformers") from error
    return transformers


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


def _described(module: nn.Module, name: str) -> NamedModel:
    if isinstance(getattr(module, "pretrained_cfg", None), dict):
        return NamedModel(module=module, name=name, **_timm_preprocessing(module))
    if vocabulary := getattr(getattr(module, "config", None), "vocab_size", 0):
        config: Any = module.config
        longest = getattr(config, "max_position_embeddings", None) or _TOKENS
        tokens = (min(_TOKENS, longest),)
        return NamedModel(module, name, tokens, (), (), 0, vocabulary=vocabulary)
    given = getattr(module, "preprocessing", {})
    if not isinstance(given, Mapping) or not set(given) <= set(_PREPROCESSING):
        raise ModelError(
            f"{name}: preprocessing is {given!r}; it must be a dict with keys among "
            f"{', '.join(_PREPROCESSING)}"
        )
    shape = tuple(given.get("input_shape", (3, 224, 224)))
    if not shape or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ModelError(
            f"{name}: input_shape is {shape}; it must be that of one input, for images "
            "(channels, height, width)"
        )
    usual_mean, usual_std = _plain_statistics(shape[0] if len(shape) == 3 else 0)
    mean, std = given.get("mean", usual_mean), given.get("std", usual_std)
    if len(shape) == 3 and not len(mean) == len(std) == shape[0]:
        raise ModelError(
            f"{name}: mean has {len(mean)} and std {len(std)} values; "
            f"there are {shape[0]} channels"
        )
    interpolation = given.get("interpolation", "bilinear")
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
        resize=given.get("resize", min(shape[1:], default=0)),
        interpolation=interpolation,
    )


def _plain_statistics(
    channels: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return ImageNet's mean and deviation for colour, none for other images."""
    if channels == 3:
        return IMAGENET_MEAN, IMAGENET_STD
    return (0.0,) * channels, (1.0,) * channels


def _torchvision_names() -> list[str]:
    return list(torchvision.models.list_models(module=torchvision.models))
