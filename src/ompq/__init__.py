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
    from ompq.allocation import Allocation
    from ompq.costs import Budget
    from ompq.datasets import load_data, training_data
    from ompq.datasets.images import distilled_samples, image_views
    from ompq.errors import (
        BudgetError,
        CheckpointError,
        DataError,
        DeviceMemoryError,
        ExportError,
        FileError,
        GoalError,
        InfeasibleBudgetError,
        MissingExtraError,
        ModelError,
        OmpqError,
        PackedFileError,
        PatternError,
        PlanError,
        ProcessError,
        QuantizationError,
        SampleError,
        ScoreError,
        TargetError,
        TraceError,
        TrainingError,
    )
    from ompq.evaluation import Perplexity, evaluate
    from ompq.graph import trace
    from ompq.integer import IntegerNetwork, finalize
    from ompq.measurement import BlockLoss, ReconstructionScore
    from ompq.measurement.audits import Audit, AuditConfig, audit
    from ompq.measurement.refinement import (
        Goal,
        RefineConfig,
        Smallest,
        SmallestConfig,
        refine,
        smallest,
    )
    from ompq.measurement.rivals import (
        ReinforceConfig,
        Widened,
        one_bitwidth,
        reinforce,
    )
    from ompq.models import load_model, with_linear_layers
    from ompq.offload import device_memory
    from ompq.onnx.export import export_onnx
    from ompq.packing import add_onnx, inspect_file, load, save
    from ompq.planner import PLAN_PROTOCOLS, PlanConfig, plan
    from ompq.plans import Plan
    from ompq.processes import distributed
    from ompq.quantization import QuantizeConfig, quantization_of, quantize
    from ompq.reconstruction import ReconstructConfig, reconstruct
    from ompq.reconstruction.brecq import BrecqConfig
    from ompq.reconstruction.rounding import RoundingConfig
    from ompq.reconstruction.tuning import TuningConfig
    from ompq.report import write_report
    from ompq.report.charts import worst_histograms, write_figures
    from ompq.results import Accuracy, Evaluation
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
        ScoreInputs,
        Sensitivity,
        SmallestFirst,
        WeightNoise,
    )
    from ompq.skeleton import unpack
    from ompq.training import train
    from ompq.training.step import TRAIN_PROTOCOLS, TrainConfig
    from ompq.units import Choice, LayerGraph, ScoreTable, Unit

_HOMES = {
    "ompq.allocation": "Allocation",
    "ompq.costs": "Budget",
    "ompq.datasets.images": "distilled_samples image_views",
    "ompq.errors": "BudgetError CheckpointError DataError DeviceMemoryError "
    "ExportError FileError GoalError InfeasibleBudgetError MissingExtraError "
    "ModelError OmpqError PackedFileError PatternError PlanError ProcessError "
    "QuantizationError SampleError ScoreError TargetError TraceError TrainingError",
    "ompq.evaluation": "Perplexity evaluate",
    "ompq.graph": "trace",
    "ompq.integer": "IntegerNetwork finalize",
    "ompq.onnx.export": "export_onnx",
    "ompq.packing": "add_onnx inspect_file load save",
    "ompq.planner": "PLAN_PROTOCOLS PlanConfig plan",
    "ompq.plans": "Plan",
    "ompq.processes": "distributed",
    "ompq.quantization": "QuantizeConfig quantization_of quantize",
    "ompq.reconstruction": "ReconstructConfig reconstruct",
    "ompq.reconstruction.brecq": "BrecqConfig",
    "ompq.reconstruction.rounding": "RoundingConfig",
    "ompq.reconstruction.tuning": "TuningConfig",
    "ompq.measurement": "BlockLoss ReconstructionScore",
    "ompq.measurement.audits": "Audit AuditConfig audit",
    "ompq.measurement.refinement": "Goal RefineConfig Smallest SmallestConfig refine "
    "smallest",
    "ompq.report": "write_report",
    "ompq.report.charts": "worst_histograms write_figures",
    "ompq.measurement.rivals": "ReinforceConfig Widened one_bitwidth reinforce",
    "ompq.offload": "device_memory",
    "ompq.models": "load_model with_linear_layers",
    "ompq.datasets": "load_data training_data",
    "ompq.results": "Accuracy Evaluation",
    "ompq.samples": "Samples",
    "ompq.units": "Choice LayerGraph ScoreTable Unit",
    "ompq.scores": "Blend Fisher Gradient Hessian Orm OrmDistortion OrmSettings "
    "OrmShift OutputDivergence Random ScoreInputs Sensitivity "
    "SmallestFirst WeightNoise",
    "ompq.skeleton": "unpack",
    "ompq.training": "train",
    "ompq.training.step": "TRAIN_PROTOCOLS TrainConfig",
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
    "BlockLoss",
    "BrecqConfig",
    "Budget",
    "BudgetError",
    "CheckpointError",
    "Choice",
    "DataError",
    "DeviceMemoryError",
    "Evaluation",
    "ExportError",
    "FileError",
    "Fisher",
    "Goal",
    "GoalError",
    "Gradient",
    "Hessian",
    "InfeasibleBudgetError",
    "IntegerNetwork",
    "LayerGraph",
    "MissingExtraError",
    "ModelError",
    "OmpqError",
    "Orm",
    "OrmDistortion",
    "OrmSettings",
    "OrmShift",
    "OutputDivergence",
    "PackedFileError",
    "PatternError",
    "Perplexity",
    "Plan",
    "PlanConfig",
    "PlanError",
    "ProcessError",
    "QuantizationError",
    "QuantizeConfig",
    "Random",
    "ReconstructConfig",
    "ReconstructionScore",
    "RefineConfig",
    "ReinforceConfig",
    "RoundingConfig",
    "SampleError",
    "Samples",
    "ScoreError",
    "ScoreInputs",
    "ScoreTable",
    "Sensitivity",
    "Smallest",
    "SmallestConfig",
    "SmallestFirst",
    "TargetError",
    "TraceError",
    "TrainConfig",
    "TrainingError",
    "TuningConfig",
    "Unit",
    "WeightNoise",
    "Widened",
    "add_onnx",
    "audit",
    "device_memory",
    "distilled_samples",
    "distributed",
    "evaluate",
    "export_onnx",
    "finalize",
    "image_views",
    "inspect_file",
    "load",
    "load_data",
    "load_model",
    "one_bitwidth",
    "plan",
    "quantization_of",
    "quantize",
    "reconstruct",
    "refine",
    "reinforce",
    "save",
    "smallest",
    "trace",
    "train",
    "training_data",
    "unpack",
    "with_linear_layers",
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
