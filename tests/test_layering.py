"""A module imports only what stands above it, so there is one order to read them in."""

import ast
from pathlib import Path

import ompq

SOURCE = Path(ompq.__file__).parent

# From the foundations down to what a person sees; a subpackage's modules in its own
# order, or `...` where they are siblings in no order.
ORDER = {
    "errors": "",
    "amounts": "",
    "processes": "",
    "files": "",
    "units": "",
    "streams": "",
    "skeleton": "",
    "results": "",
    "offload": "",
    "samples": "",
    "quantizers": "",
    "ranges": "",
    "rates": "",
    "orthogonality": "",
    "recording": "",
    "attention": "",
    "graph": "",
    "costs": "",
    "targets": "",
    "scores": "...",
    "allocation": "program search",
    "plans": "",
    "planner": "",
    "layers": "",
    "quantization": "sites channels feedback",
    "reconstruction": "blocks descent rounding brecq tuning",
    "evaluation": "",
    "training": "step methods",
    "integer": "arithmetic operators",
    "packing": "format",
    "measurement": "__init__ audits refinement rivals",
    "onnx": "__init__ containers traced export sizes",
    "models": "builtin weights",
    "datasets": "images",
    "report": "...",
    "workflow": "",
    "cli": "...",
    "__main__": "",
}


def place(module: str) -> tuple[int, int]:
    """The line of a module's package, and its word in that line.

    A package's own ``__init__`` stands below its modules, unless its line has it.
    """
    package, _, inner = module.partition(".")
    words = ORDER[package].split()
    line, inner = list(ORDER).index(package), inner or "__init__"
    last = len(words) if inner == "__init__" else -1
    return line, words.index(inner) if inner in words else last


def imports() -> dict[str, set[str]]:
    """Module → those of ours that it imports, inside functions too."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        used = found.setdefault(name.removesuffix(".__init__"), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                package, _, rest = node.module.partition(".")
                used |= {rest} if package == "ompq" and rest else set()
    del found["__init__"]
    return found


def test_every_module_has_its_place():
    ordered = {
        f"{package}.{word}"
        for package, words in ORDER.items()
        if words != "..."
        for word in words.split()
        if word != "__init__"
    }
    found = {
        name
        for name in imports()
        if "." in name and ORDER[name.partition(".")[0]] != "..."
    }
    assert found == ordered
    assert {name.partition(".")[0] for name in imports()} == set(ORDER)


def test_modules_import_only_upward():
    wrong = [
        f"{name} imports {used}"
        for name, all_used in imports().items()
        for used in all_used
        if place(used) > place(name)
    ]
    assert wrong == []


def test_no_two_modules_share_a_name():
    names = [p.stem for p in SOURCE.rglob("*.py") if p.stem != "__init__"]
    names += [p.parent.name for p in SOURCE.rglob("__init__.py") if p.parent != SOURCE]
    assert sorted(names) == sorted(set(names))
