"""Exported files as networks with names and preprocessing."""

from pathlib import Path

from ompq.errors import ExportError
from ompq.models.named_models import NamedModel
from ompq.runtimes.runnable_files import open_runnable


def exported_model(path: str | Path) -> NamedModel:
    """Return an exported file as a network that its runtime computes.

    Raises:
        ExportError: The file cannot be loaded, or does not say how inputs are made.
        MissingExtraError: The runtime is not installed.
    """
    network, about = open_runnable(path)
    how = about.preprocessing
    if how is None:
        raise ExportError(
            f"{path} does not say how its inputs are made; export it again with ompq "
            "export, or with ExportConfig(preprocessing=...)"
        )
    return NamedModel(
        module=network,
        name=str(path),
        input_shape=how.input_shape,
        mean=how.mean,
        std=how.std,
        resize=how.resize,
        interpolation=how.interpolation,
        weights=about.network or "unknown",
    )
