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
    from ompq.allocation.problem import Allocation
    from ompq.budgets import Budget
    from ompq.datasets.distillation import distilled_samples
    from ompq.datasets.images import image_views
    from ompq.datasets.named_data import load_data
    from ompq.datasets.training_sets import training_data
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
    from ompq.evaluation import Evaluation, Perplexity, evaluate
    from ompq.integer.engine import IntegerNetwork
    from ompq.integer.finalization import finalize
    from ompq.lab.audits import Audit, AuditConfig, audit
    from ompq.lab.rivals import ReinforceConfig, Widened, one_bitwidth, reinforce
    from ompq.measured_scores import BlockLoss, ReconstructionScore
    from ompq.models.named_models import load_model, with_linear_layers
    from ompq.network.graph import trace
    from ompq.network.units import Choice, LayerGraph, Unit
    from ompq.offload import device_memory
    from ompq.packed.account import inspect_file
    from ompq.packed.embedded_graph import unpack
    from ompq.packed.packed_files import add_onnx, load, save
    from ompq.parallel import distributed
    from ompq.planning import PLAN_PROTOCOLS, PlanConfig, plan
    from ompq.plans import Plan
    from ompq.quantization.pipeline import quantize
    from ompq.quantization.quantize_config import QuantizeConfig
    from ompq.quantization.record import quantization_of
    from ompq.reconstruction.block_loop import ReconstructConfig, reconstruct
    from ompq.reconstruction.brecq import BrecqConfig
    from ompq.reconstruction.rounding import RoundingConfig
    from ompq.reconstruction.tuning import TuningConfig
    from ompq.refinement import RefineConfig, refine
    from ompq.report.figures import write_figures
    from ompq.report.histograms import layer_histograms
    from ompq.report.page import write_report
    from ompq.runtimes.onnx.onnx_files import export_onnx
    from ompq.samples import Samples
    from ompq.scores.derivatives import Fisher, Gradient, Hessian
    from ompq.scores.orthogonality import Orm, OrmDistortion, OrmSettings, OrmShift
    from ompq.scores.output_divergence import Blend, OutputDivergence
    from ompq.scores.sensitivity import Sensitivity
    from ompq.scores.table import Random, ScoreInputs, ScoreTable, SmallestFirst
    from ompq.scores.weight_noise import WeightNoise
    from ompq.sections import Accuracy
    from ompq.smallest_network import Goal, Smallest, SmallestConfig, find_smallest
    from ompq.training.train_config import TRAIN_PROTOCOLS, TrainConfig
    from ompq.training.training_loop import train

_HOMES = {
    "ompq.allocation.problem": "Allocation",
    "ompq.budgets": "Budget",
    "ompq.datasets.distillation": "distilled_samples",
    "ompq.datasets.images": "image_views",
    "ompq.errors": "BudgetError CheckpointError DataError DeviceMemoryError "
    "ExportError FileError GoalError InfeasibleBudgetError MissingExtraError "
    "ModelError OmpqError PackedFileError PatternError PlanError ProcessError "
    "QuantizationError SampleError ScoreError TargetError TraceError "
    "TrainingError",
    "ompq.evaluation": "Evaluation Perplexity evaluate",
    "ompq.network.graph": "trace",
    "ompq.integer.engine": "IntegerNetwork",
    "ompq.integer.finalization": "finalize",
    "ompq.runtimes.onnx.onnx_files": "export_onnx",
    "ompq.packed.packed_files": "add_onnx load save",
    "ompq.packed.account": "inspect_file",
    "ompq.planning": "PLAN_PROTOCOLS PlanConfig plan",
    "ompq.plans": "Plan",
    "ompq.parallel": "distributed",
    "ompq.quantization.quantize_config": "QuantizeConfig",
    "ompq.quantization.record": "quantization_of",
    "ompq.quantization.pipeline": "quantize",
    "ompq.reconstruction.block_loop": "ReconstructConfig reconstruct",
    "ompq.reconstruction.brecq": "BrecqConfig",
    "ompq.reconstruction.rounding": "RoundingConfig",
    "ompq.reconstruction.tuning": "TuningConfig",
    "ompq.measured_scores": "BlockLoss ReconstructionScore",
    "ompq.lab.audits": "Audit AuditConfig audit",
    "ompq.smallest_network": "Goal Smallest SmallestConfig find_smallest",
    "ompq.refinement": "RefineConfig refine",
    "ompq.report.page": "write_report",
    "ompq.report.histograms": "layer_histograms",
    "ompq.report.figures": "write_figures",
    "ompq.lab.rivals": "ReinforceConfig Widened one_bitwidth reinforce",
    "ompq.offload": "device_memory",
    "ompq.models.named_models": "load_model with_linear_layers",
    "ompq.datasets.named_data": "load_data",
    "ompq.datasets.training_sets": "training_data",
    "ompq.sections": "Accuracy",
    "ompq.samples": "Samples",
    "ompq.network.units": "Choice LayerGraph Unit",
    "ompq.scores.table": "Random ScoreInputs ScoreTable SmallestFirst",
    "ompq.scores.output_divergence": "Blend OutputDivergence",
    "ompq.scores.derivatives": "Fisher Gradient Hessian",
    "ompq.scores.orthogonality": "Orm OrmDistortion OrmSettings OrmShift",
    "ompq.scores.sensitivity": "Sensitivity",
    "ompq.scores.weight_noise": "WeightNoise",
    "ompq.packed.embedded_graph": "unpack",
    "ompq.training.training_loop": "train",
    "ompq.training.train_config": "TRAIN_PROTOCOLS TrainConfig",
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
    "find_smallest",
    "image_views",
    "inspect_file",
    "layer_histograms",
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
    "trace",
    "train",
    "training_data",
    "unpack",
    "with_linear_layers",
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
