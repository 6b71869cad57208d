"""The report: a plan and its results as one HTML page that works offline."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from ompq.amounts import digits, in_bytes, percent, seconds, short, short_count
from ompq.bit_widths import FLOAT_BITS
from ompq.files import library_version, write_text
from ompq.network.units import Skipped
from ompq.plans import Plan, check_plan
from ompq.progress import Progress, ProgressLike, callback
from ompq.progress_bar import shows_progress
from ompq.report.explorer import STEPS, explorer_data, limits, solution
from ompq.report.heat_maps import heat_map
from ompq.report.page_charts import (
    accuracy_chart,
    bar_column,
    error_chart,
    histogram_chart,
    refinement_chart,
    scatter_chart,
)
from ompq.report_sections import (
    Accuracy,
    AgreementSection,
    AuditedBits,
    AuditedRanks,
    BlockErrorSection,
    Histogram,
    LayerEffect,
    Remark,
    RuntimeSection,
    Section,
    StageTime,
    Versions,
)

_FOLDER = Path(__file__).parent

_LARGE = 200
# The folders of an absolute path, of any system, up to its last part.
_FOLDERS = re.compile(
    r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?(?:[/\\][^/\\:,;\s]+)*[/\\](?=[^/\\\s])"
)
_COST_NAMES = {
    "bytes": "Size",
    "bit_ops": "Bit operations",
    "weight_bits": "Average bits",
    "milliseconds": "Latency",
}

_Kind = TypeVar("_Kind")


@shows_progress("writing the report")
def write_report(
    path: str | Path,
    plan: Plan,
    *,
    results: Sequence[Section] = (),
    title: str | None = None,
    others: Mapping[str, Plan] | None = None,
    progress: ProgressLike = None,
) -> Path:
    """Write a plan and its results as one HTML page that works offline.

    The same arguments give the same bytes.

    Args:
        results: Accuracies, errors, histograms and so on, in display order.
        title: The heading, for example the network's name.
        others: Plans of the same network and choices, by name, for comparison.
        progress: Called while the explorer's budgets are solved; True shows a bar.

    Raises:
        TypeError: A result is not one of the sections.
    """
    write_text(path, render_report(plan, results, title, others, callback(progress)))
    return Path(path)


def render_report(
    plan: Plan,
    results: Sequence[Section] = (),
    title: str | None = None,
    others: Mapping[str, Plan] | None = None,
    progress: Progress | None = None,
) -> str:
    """Return the page's HTML; see :func:`write_report`."""
    check_plan(plan)
    for result in results:
        if not isinstance(result, get_args(Section)):
            kinds = ", ".join(kind.__name__ for kind in get_args(Section))
            raise TypeError(
                f"results hold a {type(result).__name__}; a report shows {kinds}"
            )
    script = "\n".join(map(_source, ("explorer.js", "layers.js", "page.js")))
    digest = hashlib.sha256(script.encode()).digest()
    context = {
        "title": without_folders(title or "Mixed-precision plan"),
        "tile": _quality_tile(results),
        "plan": plan,
        "totals": plan.totals,
        "costs": plan.problem.costs,
        "bytes_by_item": plan.bytes_by_item if plan.accounting == "packed" else {},
        "style": Markup(_source("style.css")),
        "script": Markup(script),
        # For the content security policy, which allows this script and nothing else.
        "script_hash": base64.b64encode(digest).decode("ascii"),
        "uses": _uses(plan),
        "kinds": list(dict.fromkeys(unit.kind for unit in plan.graph.units)),
        "layers": _layers(plan),
        "left_float": _left_float(plan),
        **_labels(plan),
        **_orm(plan),
        **_results(results),
        "refinement": refinement_chart(plan) if plan.measured else None,
        "ompq_version": library_version(),
    }
    steps = min(STEPS, max(24, STEPS * _LARGE // len(plan.graph)))
    data = {
        **explorer_data(plan, steps, progress),
        "others": {name: solution(one) for name, one in (others or {}).items()},
        "orm": context["orm_data"],
    }
    embedded = htmlsafe_json_dumps(data, separators=(",", ":"), allow_nan=False)
    return _template().render(**context, data=embedded).lstrip()


@cache
def _template() -> Template:
    """Return the page's template, which takes a tenth of a second to compile."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for text in (short_count, digits, in_bytes, percent, seconds, short):
        environment.filters[text.__name__] = text
    return environment.get_template("template.html.jinja")


def _source(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8").strip()


def without_folders(text: str) -> str:
    """Return a text in which the folders of absolute paths are left out.

    People share the page, and what their folders are called is nobody's business.

    Example:
        >>> without_folders("/home/ada/work/net.py:make and data/val")
        'net.py:make and data/val'
    """
    return _FOLDERS.sub("", text)


def _quality_tile(results: Sequence[Section]) -> tuple[str, str, str] | None:
    """Return the name, value and note of what a reader asks for first, if measured."""
    measured = _of(results, Accuracy)
    correct = [one for one in measured if not one.answers]
    if len(correct) > 1:
        first, last = correct[0], correct[-1]
        drop = f"{100 * (first.top1 - last.top1):.2f} points"
        return (
            "Accuracy lost",
            drop,
            f"{last.top1:.2%} top-1, {first.top1:.2%} as float",
        )
    if correct:
        return (
            "Accuracy",
            f"{correct[0].top1:.2%}",
            f"top-1 of {correct[0].count:,} images",
        )
    if measured:
        name = "Same answers as float"
        return name, f"{measured[-1].top1:.2%}", f"of {measured[-1].count:,} inputs"
    return None


def _uses(plan: Plan) -> list[dict[str, Any]]:
    """Return how much of each limit the plan uses."""
    return [
        {
            "name": _COST_NAMES.get(cost, cost),
            "used": _cost_text(plan, cost, plan.totals[cost]),
            "limit": _cost_text(plan, cost, limit),
            "left": _cost_text(plan, cost, limit - plan.totals[cost]),
            "share": plan.totals[cost] / limit,
        }
        for cost, limit in limits(plan).items()
    ]


def _cost_text(plan: Plan, cost: str, value: float) -> str:
    if cost == "bytes":
        return in_bytes(value)
    if cost == "bit_ops":
        return short_count(value)
    if cost == "weight_bits":
        return f"{value / plan.problem.costs[cost].reference:.3g} bits"
    return f"{short(value)} ms"


def _labels(plan: Plan) -> dict[str, Any]:
    """Label choices by weight bits alone if all activations have the same width."""
    choices = [*plan.choices, *plan.allocation.values()]
    widths = {choice.activation for choice in choices}
    if len(widths) > 1:
        return {"choice_label": str, "inputs_note": ""}
    return {
        "choice_label": lambda choice: choice.weight_text,
        "inputs_note": f"; inputs have {widths.pop()} everywhere",
    }


def _layers(plan: Plan) -> list[dict[str, Any]]:
    costs = plan.problem.costs
    rows = np.arange(len(plan.graph))
    size = costs["bytes"].table[rows, plan.columns]
    ops = costs["bit_ops"].table[rows, plan.columns]
    gamma = plan.scores.gamma
    return [
        {
            "unit": unit,
            "gamma": None if gamma is None else float(gamma[row]),
            "column": int(plan.columns[row]),
            "bits": plan.allocation[unit.name],
            "bytes": float(size[row]),
            "size_share": 100 * float(size[row]) / plan.totals["bytes"],
            "ops_share": 100 * float(ops[row]) / max(plan.totals["bit_ops"], 1),
            "pinned": int(plan.allowed[row].sum()) == 1,
            "scores": [
                digits(score, 2) if allowed else ""
                for score, allowed in zip(
                    plan.scores.damage[row], plan.allowed[row], strict=True
                )
            ],
        }
        for row, unit in enumerate(plan.graph.units)
    ]


def _left_float(plan: Plan) -> list[Skipped]:
    """Return what the plan leaves in float, with reasons."""
    bits = plan.allocation
    kept = [
        Skipped(name, "its weights stay float: it has 32 bits in the plan")
        for name in plan.graph.names
        if bits[name].weight >= FLOAT_BITS
    ]
    return [*plan.graph.skipped, *kept, *plan.no_speed_up]


def _orm(plan: Plan) -> dict[str, Any]:
    scores = plan.scores
    if scores.orm is None or not scores.orm_labels:
        return {"heat": None, "strips": [], "orm_data": None, "orm_used": False}
    heat = heat_map(scores.orm, scores.orm_labels)
    known = {name: row for row, name in enumerate(plan.graph.names)}
    rows = [known.get(label) for label in scores.orm_labels[:: heat.pooled]]
    data: dict[str, Any] = {"labels": heat.labels, "values": heat.values, "strips": []}
    strips = []
    for title, values in (("gamma", scores.gamma), ("importance", scores.importance)):
        if values is None or any(row is None for row in rows):
            continue
        shown = values[np.array(rows)]
        kinds = [plan.graph.units[row].kind for row in rows if row is not None]
        strip = {
            "title": title,
            "values": [float(digits(float(value), 4)) for value in shown],
        }
        bars = list(zip(bar_column(shown), kinds, strict=True))
        data["strips"].append(strip)
        strips.append({**strip, "largest": digits(float(shown.max())), "bars": bars})
    used = "orm" in plan.score_name.lower()
    return {"heat": heat, "strips": strips, "orm_data": data, "orm_used": used}


def _results(results: Sequence[Section]) -> dict[str, Any]:
    correct = [one for one in _of(results, Accuracy) if not one.answers]
    answers = [one for one in _of(results, Accuracy) if one.answers]
    errors = _of(results, BlockErrorSection)
    times = _of(results, StageTime)
    return {
        "accuracy": accuracy_chart(correct) if correct else None,
        "answers": accuracy_chart(answers) if answers else None,
        "errors": error_chart(errors) if errors else None,
        "effects": sorted(_of(results, LayerEffect), key=lambda one: -one.alone),
        "histograms": [histogram_chart(one) for one in _of(results, Histogram)],
        "audited": _of(results, AuditedBits),
        "ranked": [scatter_chart(one) for one in _of(results, AuditedRanks)],
        "times": times,
        "total_time": sum(stage.seconds for stage in times),
        "agreements": _of(results, AgreementSection),
        "runs": _of(results, RuntimeSection),
        "remarks": [
            Remark(one.name, without_folders(one.text)) for one in _of(results, Remark)
        ],
        "versions": [
            (name, without_folders(text))
            for one in _of(results, Versions)
            for name, text in one.items.items()
        ],
    }


def _of(results: Sequence[Section], kind: type[_Kind]) -> list[_Kind]:
    return [result for result in results if isinstance(result, kind)]
