"""A module imports only what stands above it, so there is one order to read them in."""

import ast
from pathlib import Path

import ompq

SOURCE = Path(ompq.__file__).parent

# From the foundations down to what a person sees; a name may be a subpackage.
ORDER = """
    errors files samples userfiles quantizers spans ranges noise calibration
    orthogonality observation graph structure leftovers tracing folding costs scores
    budgets programs search problems feasibility explanations allocation plans
    pipeline placement layers assembly quantization blocks soft_rounding rounding
    reconstruction
    evaluation bitstream packfile contents packing accounts dyadic steps kernels
    integer_weights values forms layer_numbers lowering settling integer agreement
    containers onnx_account onnx_graph export latency cifar weights demo_network models
    images
    inputs datasets report contest demo_results demo cli
""".split()  # noqa: SIM905  (a list of sixty lines reads worse)


def imports() -> dict[str, set[str]]:
    """Module or subpackage → those of ours that it imports, inside functions too."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).with_suffix("").parts[0]
        used = found.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                package, _, rest = node.module.partition(".")
                used |= {rest.split(".")[0]} if package == "ompq" and rest else set()
    del found["__init__"]
    return found


def test_every_module_has_its_place():
    assert sorted(ORDER) == sorted(imports())


def test_modules_import_only_upward():
    place = {name: number for number, name in enumerate(ORDER)}
    wrong = [
        f"{name} imports {used}"
        for name, all_used in imports().items()
        for used in all_used
        if place[used] > place[name]
    ]
    assert wrong == []


def test_modules_stay_short():
    long = {
        path.name: count
        for path in SOURCE.rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 320
    }
    assert long == {}
