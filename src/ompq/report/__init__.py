"""The report: one HTML page that needs no network, and the paper's figures."""

from ompq.report.charts import worst_histograms
from ompq.report.figures import write_figures
from ompq.report.page import render_report, write_report
from ompq.report.sections import (
    Accuracy,
    Agreement,
    AuditedScore,
    BlockError,
    Histogram,
    LayerEffect,
    Remark,
    Section,
    StageTime,
    Versions,
    audit_sections,
    sections_from_json,
    sections_to_json,
)

__all__ = [
    "Accuracy",
    "Agreement",
    "AuditedScore",
    "BlockError",
    "Histogram",
    "LayerEffect",
    "Remark",
    "Section",
    "StageTime",
    "Versions",
    "audit_sections",
    "render_report",
    "sections_from_json",
    "sections_to_json",
    "worst_histograms",
    "write_figures",
    "write_report",
]
