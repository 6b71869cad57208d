"""The report: one HTML page about a plan and what came of it."""

from typing import TYPE_CHECKING

from ompq.lazy_names import lazy_names

if TYPE_CHECKING:
    from ompq.report.figures import write_figures as write_figures
    from ompq.report.histograms import layer_histograms as layer_histograms
    from ompq.report_sections import Accuracy as Accuracy

__getattr__, __dir__, __all__ = lazy_names(__name__)
