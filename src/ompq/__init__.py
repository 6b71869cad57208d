"""Decide how many bits each layer needs, then make the small network.

>>> import ompq
>>> plan = ompq.plan(model, samples, "1.5MiB")
>>> quantized = ompq.quantize(model, plan, samples)
>>> quantized = ompq.reconstruct(quantized, model, samples)

Names are imported when they are first used, so that ``ompq --help`` does not wait for
torch.
"""

from typing import TYPE_CHECKING

from ompq.lazy_names import lazy_names

if TYPE_CHECKING:
    from ompq import (
        datasets as datasets,
        errors as errors,
        lab as lab,
        packed as packed,
        report as report,
        scores as scores,
    )
    from ompq.allocation.problem import Allocation as Allocation
    from ompq.budgets import Budget as Budget
    from ompq.configs import (
        EFFORTS as EFFORTS,
        ExportConfig as ExportConfig,
        Goal as Goal,
        PlanConfig as PlanConfig,
        QuantizeConfig as QuantizeConfig,
        ReconstructConfig as ReconstructConfig,
        RefineConfig as RefineConfig,
        RoundingConfig as RoundingConfig,
        SmallestConfig as SmallestConfig,
        TrainConfig as TrainConfig,
        TuningConfig as TuningConfig,
    )
    from ompq.datasets.named_data import load_data as load_data
    from ompq.errors import OmpqError as OmpqError
    from ompq.evaluation import Perplexity as Perplexity, evaluate as evaluate
    from ompq.evaluation_result import Evaluation as Evaluation
    from ompq.forecasts import Forecast as Forecast, forecast as forecast
    from ompq.integer.engine import IntegerNetwork as IntegerNetwork
    from ompq.integer.finalization import finalize as finalize
    from ompq.models.named_models import (
        load_model as load_model,
        with_linear_layers as with_linear_layers,
    )
    from ompq.network.graph import trace as trace
    from ompq.network.units import (
        Choice as Choice,
        LayerGraph as LayerGraph,
        Unit as Unit,
    )
    from ompq.offload import device_memory as device_memory
    from ompq.packed.account import inspect_file as inspect_file
    from ompq.packed.packed_files import load as load, save as save
    from ompq.parallel import distributed as distributed
    from ompq.planning import plan as plan
    from ompq.plans import Plan as Plan
    from ompq.quantization.pipeline import quantize as quantize
    from ompq.quantization.record import quantization_of as quantization_of
    from ompq.reconstruction.block_loop import reconstruct as reconstruct
    from ompq.refinement import refine as refine
    from ompq.report.page import write_report as write_report
    from ompq.runtimes.exporter import export as export
    from ompq.samples import Samples as Samples
    from ompq.smallest_network import (
        Smallest as Smallest,
        find_smallest as find_smallest,
    )
    from ompq.training.training_loop import train as train
    from ompq.version import __version__ as __version__
    from ompq.working_memory import host_memory as host_memory

__getattr__, __dir__, __all__ = lazy_names(__name__)
