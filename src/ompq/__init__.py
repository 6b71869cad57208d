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
    from ompq.allocation.solver import Allocation, Budget
    from ompq.audits import Audit, AuditConfig, audit
    from ompq.datasets.images import image_views
    from ompq.datasets.sources import load_data
    from ompq.errors import OmpqError
    from ompq.evaluation import Evaluation, evaluate
    from ompq.graph import Choice, LayerGraph, Unit, trace
    from ompq.integer.finalization import finalize
    from ompq.models import load_model
    from ompq.onnx.export import export_onnx
    from ompq.packing import inspect_file, load, save
    from ompq.plans import PLAN_PROTOCOLS, Plan, PlanConfig, plan
    from ompq.quantization import QuantizeConfig, quantization_of, quantize
    from ompq.reconstruction import ReconstructConfig, reconstruct
    from ompq.reconstruction.rounding import RoundingConfig
    from ompq.reconstruction_score import ReconstructionScore
    from ompq.refinement import RefineConfig, refine
    from ompq.report import Accuracy, worst_histograms, write_figures, write_report
    from ompq.samples import Samples
    from ompq.scores import (
        Blend,
        Fisher,
        Gradient,
        Hessian,
        Orm,
        OrmDistortion,
        OrmSettings,
        OrmShift,
        OutputDivergence,
        Random,
        ScoreTable,
        Sensitivity,
        SmallestFirst,
        WeightNoise,
    )
    from ompq.training import train
    from ompq.training.config import TRAIN_PROTOCOLS, TrainConfig

_HOMES = {
    "ompq.audits": "Audit AuditConfig audit",
    "ompq.allocation.solver": "Allocation Budget",
    "ompq.datasets.images": "image_views",
    "ompq.errors": "OmpqError",
    "ompq.evaluation": "Evaluation evaluate",
    "ompq.graph": "Choice LayerGraph Unit trace",
    "ompq.integer.finalization": "finalize",
    "ompq.onnx.export": "export_onnx",
    "ompq.packing": "inspect_file load save",
    "ompq.plans": "PLAN_PROTOCOLS Plan PlanConfig plan",
    "ompq.quantization": "QuantizeConfig quantization_of quantize",
    "ompq.reconstruction": "ReconstructConfig reconstruct",
    "ompq.reconstruction.rounding": "RoundingConfig",
    "ompq.reconstruction_score": "ReconstructionScore",
    "ompq.refinement": "RefineConfig refine",
    "ompq.report": "Accuracy worst_histograms write_figures write_report",
    "ompq.models": "load_model",
    "ompq.datasets.sources": "load_data",
    "ompq.samples": "Samples",
    "ompq.scores": "Blend Fisher Gradient Hessian Orm OrmDistortion OrmSettings "
    "OrmShift OutputDivergence Random ScoreTable Sensitivity SmallestFirst "
    "WeightNoise",
    "ompq.training": "train",
    "ompq.training.config": "TRAIN_PROTOCOLS TrainConfig",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "PLAN_PROTOCOLS",
    "TRAIN_PROTOCOLS",
    "Accuracy",
    "Allocation",
    "Audit",
    "AuditConfig",
    "Blend",
    "Budget",
    "Choice",
    "Evaluation",
    "Fisher",
    "Gradient",
    "Hessian",
    "LayerGraph",
    "OmpqError",
    "Orm",
    "OrmDistortion",
    "OrmSettings",
    "OrmShift",
    "OutputDivergence",
    "Plan",
    "PlanConfig",
    "QuantizeConfig",
    "Random",
    "ReconstructConfig",
    "ReconstructionScore",
    "RefineConfig",
    "RoundingConfig",
    "Samples",
    "ScoreTable",
    "Sensitivity",
    "SmallestFirst",
    "TrainConfig",
    "Unit",
    "WeightNoise",
    "audit",
    "evaluate",
    "export_onnx",
    "finalize",
    "image_views",
    "inspect_file",
    "load",
    "load_data",
    "load_model",
    "plan",
    "quantization_of",
    "quantize",
    "reconstruct",
    "refine",
    "save",
    "trace",
    "train",
    "worst_histograms",
    "write_figures",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("ompq.files").library_version()
    if name not in _HOME:
        raise AttributeError(f"module 'ompq' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
