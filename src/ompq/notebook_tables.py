"""Results as tables: HTML for notebooks, pandas for the rest."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ompq.optional_libraries import optional_library

_MAX_ROWS = 100  # of a table in a notebook


class Markup(str):
    """HTML of our own, which is not escaped."""


def html_bar(fraction: float, text: str) -> Markup:
    """Return a bar that fills a fraction of its cell, with a text beside it.

    Example:
        >>> html_bar(0.5, "4").count("width:50%")
        1
    """
    width = f"{100 * min(max(fraction, 0.0), 1.0):.0f}%"
    return Markup(
        '<div style="display:flex;gap:.5em;align-items:center">'
        '<div style="width:8em;background:#8883;text-align:left">'
        f'<div style="width:{width};height:.8em;background:#2f6db3"></div></div>'
        f"{escape(text)}</div>"
    )


def html_table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table with every value escaped.

    Example:
        >>> html_table("bits", [{"layer": "fc", "bits": 4}])
        '<b>bits</b><table><tr><th>layer</th><th>bits</th></tr>\
<tr><td>fc</td><td>4</td></tr></table>'
    """
    heads = "".join(f"<th>{escape(str(key))}</th>" for key in rows[0]) if rows else ""
    body = "".join(
        f"<tr>{''.join(f'<td>{_cell(one)}</td>' for one in row.values())}</tr>"
        for row in rows[:_MAX_ROWS]
    )
    left = len(rows) - _MAX_ROWS
    more = f"<p>and {left} more</p>" if left > 0 else ""
    return f"<b>{escape(title)}</b><table><tr>{heads}</tr>{body}</table>{more}"


def _cell(value: Any) -> str:
    return value if isinstance(value, Markup) else escape(str(value))


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    return optional_library("pandas", "notebook").DataFrame(list(rows))
