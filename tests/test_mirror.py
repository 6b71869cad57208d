"""The tests of a module are in a file of its name."""

from pathlib import Path

from conftest import LONGEST
from test_layering import MODULES

TESTS = Path(__file__).parent

# Modules without a file of their own, and what tests them.
ELSEWHERE = {
    "__main__": "parallel",  # torchrun starts it
    "cli.latency_command": "latency",
    "quantization.gguf_grids": "gguf",
    "runtimes.export_result": "onnx_files",  # fields only
    "runtimes.integer_files": "litert",
    "runtimes.xnnpack_kernels": "litert",
    "runtimes.onnx.onnx_network": "exported_models",
    "runtimes.onnx.openvino_network": "exported_models",
    "runtimes.output_grids": "litert",  # only LiteRT needs them
    "runtimes.runnable_files": "file_metadata",
    "tokenizers": "gguf",
    "lab.audit_settings": "lab/audits",  # fields only
    "lab.protocols": "lab/reproduction",  # each is run by a row of a table
    "lab.registration": "registry",
    "lab.research_commands": "commands",  # as all commands
}

# Files about no single module.
ACROSS = {
    *("architecture", "arguments_untouched", "docs", "examples", "layering", "mirror"),
    *("named_arguments", "notebooks", "package", "pages"),
    *("public_api", "report_browser", "wrong_types"),
    *(
        "decoders",
        "minmax",
        "known_networks",
    ),  # kinds of networks and recipes, through all verbs
    "network_commands_training",  # ompq train
}


def home(name):
    """Return the test file of a module, without ``test_`` and the suffix."""
    *packages, module = name.split(".")
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if packages[:1] == ["runtimes"] and len(packages) == 2 and packages[1] != "onnx":
        return packages[1]  # the modules of a runtime are tested together
    return f"lab/{module}" if packages[:1] == ["lab"] else module


def files():
    for path in TESTS.rglob("test_*.py"):
        yield path.relative_to(TESTS).with_name(path.stem[5:]).as_posix()


def test_every_module_has_its_file_of_tests():
    assert {home(name) for name in MODULES} - {*files()} == set()


def test_every_file_of_tests_has_its_module():
    assert {*files()} - {home(name) for name in MODULES} == ACROSS


def test_exceptions_are_needed():
    assert set(ELSEWHERE) <= set(MODULES)
    own = {name.rpartition(".")[2] for name in ELSEWHERE}
    assert not own & {name.rpartition("/")[2] for name in files()}


def test_the_longest_files_are_files():
    assert {*LONGEST} <= {path.stem[5:] for path in TESTS.rglob("test_*.py")}


def test_no_two_files_of_tests_share_a_name():
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))  # pytest imports them by their names
