"""Decide how many bits each layer needs, then make the small network.

>>> import ompq
>>> plan = ompq.plan(model, samples, "1.5MiB")
>>> quantized = ompq.quantize(model, plan, samples)
>>> quantized = ompq.reconstruct(quantized, model, samples)

Names are imported when they are first used, so that ``ompq --help`` does not wait for
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ompq.allocation.solving import Allocation, Budget
    from ompq.datasets.views import image_views
    from ompq.errors import OmpqError
    from ompq.evaluation import Evaluation, evaluate
    from ompq.export.exporting import export_onnx
    from ompq.graph.tracing import trace
    from ompq.graph.units import Choice, LayerGraph, Unit
    from ompq.integer.settling import settle
    from ompq.latency import measure_latency
    from ompq.packing.accounts import inspect_file
    from ompq.packing.checkpoint import load, save
    from ompq.pipeline import PLAN_PROTOCOLS, PlanConfig, plan
    from ompq.plans import Plan
    from ompq.quantization.quantizing import QuantizeConfig, quantization_of, quantize
    from ompq.reconstruction.reconstructing import ReconstructConfig, reconstruct
    from ompq.reconstruction.settings import RoundingConfig
    from ompq.report import write_figures, write_report
    from ompq.scores import (
        Orm,
        OrmDistortion,
        OrmSettings,
        OutputDivergence,
        Random,
        ScoreTable,
        SmallestFirst,
        WeightNoise,
    )
    from ompq.training.looping import train
    from ompq.training.settings import TRAIN_PROTOCOLS, TrainConfig

_HOMES = {
    "ompq.packing.accounts": ("inspect_file",),
    "ompq.allocation.solving": ("Allocation", "Budget"),
    "ompq.errors": ("OmpqError",),
    "ompq.datasets.views": ("image_views",),
    "ompq.evaluation": ("Evaluation", "evaluate"),
    "ompq.export.exporting": ("export_onnx",),
    "ompq.graph.units": ("Choice", "LayerGraph", "Unit"),
    "ompq.integer.settling": ("settle",),
    "ompq.latency": ("measure_latency",),
    "ompq.packing.checkpoint": ("load", "save"),
    "ompq.pipeline": ("PLAN_PROTOCOLS", "PlanConfig", "plan"),
    "ompq.plans": ("Plan",),
    "ompq.quantization.quantizing": ("QuantizeConfig", "quantization_of", "quantize"),
    "ompq.reconstruction.reconstructing": ("ReconstructConfig", "reconstruct"),
    "ompq.report": ("write_figures", "write_report"),
    "ompq.reconstruction.settings": ("RoundingConfig",),
    "ompq.scores": (
        "Orm",
        "OrmDistortion",
        "OrmSettings",
        "OutputDivergence",
        "Random",
        "ScoreTable",
        "SmallestFirst",
        "WeightNoise",
    ),
    "ompq.graph.tracing": ("trace",),
    "ompq.training.looping": ("train",),
    "ompq.training.settings": ("TRAIN_PROTOCOLS", "TrainConfig"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "PLAN_PROTOCOLS",
    "TRAIN_PROTOCOLS",
    "Allocation",
    "Budget",
    "Choice",
    "Evaluation",
    "LayerGraph",
    "OmpqError",
    "Orm",
    "OrmDistortion",
    "OrmSettings",
    "OutputDivergence",
    "Plan",
    "PlanConfig",
    "QuantizeConfig",
    "Random",
    "ReconstructConfig",
    "RoundingConfig",
    "ScoreTable",
    "SmallestFirst",
    "TrainConfig",
    "Unit",
    "WeightNoise",
    "evaluate",
    "export_onnx",
    "image_views",
    "inspect_file",
    "load",
    "measure_latency",
    "plan",
    "quantization_of",
    "quantize",
    "reconstruct",
    "save",
    "settle",
    "trace",
    "train",
    "write_figures",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ompq' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
