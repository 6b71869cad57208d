"""Libraries that ompq can do without: imported where they are needed."""

from importlib import import_module
from importlib.metadata import version
from typing import Any

from ompq.errors import MissingExtraError

_WHEELS = "https://download.pytorch.org/whl/"
_PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "PyYAML"}


def optional_library(module: str, extra: str) -> Any:
    """Import a module.

    Raises:
        MissingExtraError: It is not installed; the message says which extra has it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        name = str(error.name or module).partition(".")[0]
        raise MissingExtraError(_PACKAGES.get(name, name), extra) from error


def torchvision_library(module: str = "torchvision") -> Any:
    """Import torchvision, or one of its modules.

    Raises:
        MissingExtraError: It is not installed. pip would replace PyTorch by one that
            suits the newest torchvision, so the command names the version to keep.
    """
    try:
        return import_module(module)
    except ImportError as error:
        torch = version("torch")
        _, local, build = torch.partition("+")  # ``2.11.0+cpu``
        index = f" --index-url {_WHEELS}{build}" if local else ""
        raise MissingExtraError(
            "torchvision", "images", f"torchvision torch=={torch}{index}"
        ) from error
