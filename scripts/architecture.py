"""Writes the table of rooms in docs/architecture.md from the modules' own first lines.

Run it from anywhere after a module was added, renamed or given another subject:
``python scripts/architecture.py``. A test fails when the page and the tree differ.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, PAGE = ROOT / "src" / "ompq", ROOT / "docs" / "architecture.md"
BEGIN, END = (
    "<!-- rooms: made by scripts/architecture.py -->\n",
    "<!-- end of rooms -->",
)


def subject(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def rooms(places: list[str]) -> str:
    """Return the table: a row for each module, in the order of imports."""
    rows = ["| room | what is in it |", "|---|---|"]
    package = ""
    for place in places:
        above = place.rpartition(".")[0]
        if above and above != package:
            init = SOURCE / above.replace(".", "/") / "__init__.py"
            rows.append(f"| **`{above}/`** | **{subject(init)}** |")
        package = above
        path = SOURCE / f"{place.replace('.', '/')}.py"
        rows.append(f"| `{place}` | {subject(path)} |")
    return "\n".join(rows) + "\n"


def page(places: list[str]) -> str:
    """Return the page with a new table."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return before + BEGIN + rooms(places) + END + rest.split(END)[1]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    from test_layering import PLACES

    PAGE.write_text(page(PLACES), encoding="utf-8")
