"""The code in README and guide runs; what pages name exists."""

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

import ompq

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/guide.md"]


def python_blocks(page: str) -> list[str]:
    """Return the code as it stands on a page, but with fewer samples and steps."""
    text = (ROOT / page).read_text()
    text = text.replace(".samples(256)", ".samples(32)")
    text = re.sub(r"samples\[:\d+\]", "samples[:16]", text)
    text = text.replace("samples[128:]", "samples[16:]")
    text = text.replace("limit=512", "limit=128")
    text = re.sub(r"(iterations|steps)=\d+", r"\1=2", text)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(page)
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
    assert (tmp_path / "net.ompq.safetensors").stat().st_size < 50_000
    assert (tmp_path / "net.html").stat().st_size > 10_000
    assert namespace["plan"].totals["bytes"] <= 36 * 1024
    assert "stem" in capsys.readouterr().out


def test_pages_and_examples_import_only_what_is_public():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in [*pages, *(ROOT / "examples").glob("*.py")]:
        deeper = re.search(r"^(from|import) ompq\.\w.*", page.read_text(), re.MULTILINE)
        assert deeper is None, f"{page.name}: {deeper}"


def test_pages_have_no_placeholders():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        assert not re.findall(r"@@|TODO|TBD|XXX", page.read_text()), page.name


@pytest.mark.parametrize("page", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
def test_links_between_pages_lead_somewhere(page):
    text = (ROOT / "docs" / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / target).exists(), target


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


@pytest.mark.parametrize("page", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
def test_anchors_of_links_exist(page):
    text = (ROOT / "docs" / page).read_text()
    for target, name in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
        linked = (ROOT / "docs" / (target or page)).read_text()
        headings = re.findall(r"^#+ (.*)$", linked, re.MULTILINE)
        assert name in map(anchor, headings), (target, name)


def test_every_training_setting_is_told_with_its_default():
    text = (ROOT / "docs/training.md").read_text()
    for field in fields(ompq.TrainConfig):
        row = re.search(rf"^\| `{field.name}` \| (\S+) \|", text, re.MULTILINE)
        assert row is not None, field.name
        words = {"true": True, "false": False, "none": None}
        told = words.get(row[1], row[1])
        if isinstance(field.default, int | float) and not isinstance(told, bool):
            told = float(told)
        assert told == field.default or row[1] == field.default, field.name


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert len(targets) > 5
    for target in targets:
        assert (ROOT / target).exists(), target


ALL_PAGES = [
    "README.md",
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]


def resolved(name: str) -> object:
    """Import the longest part of a dotted name that is a module, then look inside."""
    words = name.split(".")
    found: object = importlib.import_module(words[0])
    for depth, word in enumerate(words[1:], 2):
        if not hasattr(found, word):
            importlib.import_module(".".join(words[:depth]))
        found = getattr(found, word)
    return found


@pytest.mark.parametrize("page", ALL_PAGES)
def test_names_in_the_text_exist(page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"`(ompq(?:\.\w+)+)", text):
        if name not in ("ompq.Weight3",):  # an operator of ONNX files, no Python
            assert resolved(name) is not None, name
    for path in re.findall(r"`((?:benchmarks|scripts|examples|tests)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


def test_every_equation_of_the_paper_has_a_row():
    text = (ROOT / "docs/method.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| Eqs?\. ", line)]
    told = set()
    for row in rows:
        ends = [int(n) for n in re.findall(r"\d+", row.split(",")[0])]
        told |= set(range(ends[0], ends[-1] + 1))
    assert told >= set(range(1, 11))
    assert sum("`ompq." in row for row in rows) >= 8


def test_the_guide_names_everything_that_is_public():
    text = (ROOT / "docs/guide.md").read_text() + (ROOT / "README.md").read_text()
    training = {"TrainConfig", "train"}  # told in docs/training.md
    missing = [n for n in ompq.__all__ if not re.search(rf"\b{n}\b", text)]
    assert set(missing) <= training


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    names = set(re.findall(r"^::: ompq\.([\w.]+)$", text, re.M))
    rooms = ("datasets", "packed", "report", "scores")
    wanted = {*ompq.__all__} - {*rooms, "errors", "lab", "__version__"}
    for room in rooms:
        wanted |= {f"{room}.{name}" for name in getattr(ompq, room).__all__}
    assert wanted <= names
    assert all(name in wanted or name.startswith("errors.") for name in names)
