"""A module imports only what stands above it, so there is one order to read them in."""

import ast
import re
from collections import Counter
from pathlib import Path

import ompq

SOURCE = Path(ompq.__file__).parent

# From the foundations down to what a person sees. A package's modules follow its name,
# in their own order.
ORDER = {
    "lazy_names": "",
    "errors": "",
    "optional_libraries": "",
    "tokenizers": "",
    "amounts": "",
    "bit_widths": "",
    "offload": "",
    "working_memory": "",
    "scratch_file": "",
    "parallel": "",
    "untrusted_json": "",
    "files": "",
    "version": "",
    "registry": "",
    "configuration_checks": "",
    "configs": "",
    "content_identity": "",
    "checkpoints": "",
    "progress": "",
    "progress_bar": "",
    "notebook_tables": "",
    "user_functions": "",
    "samples": "",
    "network": "observation attention passive units dataflow blocks folding graph",
    "outputs": "",
    "grids": "",
    "weight_ranges": "",
    "activation_ranges": "",
    "entropy_coding": "codec bit_packing compressed_bytes rates",
    "targets": "",
    "cost_tables": "",
    "budgets": "",
    "costs": "",
    "score_tables": "",
    "scores": "computation baselines weight_noise output_divergence orthogonality "
    "sensitivity catalogue",
    "allocation": "problem relaxation exact_search infeasibility allocator explanation",
    "plans": "",
    "layers": "",
    "quantization": "products activation_sites error_feedback equalization "
    "given_bits gguf_grids weight_grids assembly calibration moments "
    "corrected_targets record budget_filling pipeline",
    "reconstruction": "block_layout block_fisher block_data descent phases rounding "
    "tuning block_loop",
    "forecasts": "",
    "evaluation_result": "",
    "evaluation": "",
    "measurement": "",
    "training": "batch_norms rounding_rules schedule step training_batches "
    "training_run tracking training_loop",
    "integer": "arithmetic operators lowering engine links finalization",
    "packed": "structure embedded_graph summary format account packed_files",
    "device_command": "",
    "runtimes": "file_metadata inspection benchmark onnx.weight_containers "
    "onnx.onnx_graph onnx.traced_graph verification export_result output_grids "
    "xnnpack_kernels integer_files litert.litert_kernels litert.litert_graph "
    "litert.litert_network executorch.executorch_graph executorch.executorch_network "
    "coreml.coreml_files onnx.onnx_network onnx.openvino_network runnable_files "
    "onnx.onnx_files "
    "onnx.onnx_sizes gguf.gguf_blocks gguf.gguf_metadata gguf.gguf_tensors "
    "gguf.llama_runtime gguf.gguf_files gguf.gguf_sizes compressed_checkpoints "
    "exporter latency",
    "planning": "",
    "refinement": "",
    "smallest_network": "",
    "models": "builtin_networks weight_files named_models exported_models",
    "datasets": "distillation images named_data training_sets",
    "report_sections": "",
    "report": "page_charts heat_maps explorer figures histograms page",
    "workflow": "",
    "cli": "console options option_groups command_registry views loading file_commands "
    "bench_command latency_command plan_commands demo freed_memory run_files "
    "network_commands saved_plan_commands commands main",
    "__main__": "",
    "lab": "weight_rules.dorefa weight_rules.fracbits weight_rules.lq_nets "
    "weight_rules.outliers more_scores.blend more_scores.block_loss "
    "more_scores.loss_gradients more_scores.orm_shift rivals.reinforcement "
    "rivals.wide_channels solvers brecq protocols audit_settings "
    "audits published_bits paper_tables paper_figures research_options reproduction "
    "audit_command zoo research_commands registration",
}
PLACES = [
    f"{package}.{module}".rstrip(".")
    for package, modules in ORDER.items()
    for module in modules.split() or [""]
]


def name_of(path):
    """The dotted name of a source file, without the package's own."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


SOURCES = {name_of(path): path for path in SOURCE.rglob("*.py")}
MODULES = {n: p for n, p in SOURCES.items() if p.stem != "__init__"}


def modules_in(text):
    """The modules that a string names, as an import or in full."""
    found = re.findall(r"\bompq\.((?:[a-z_]+\.)*[a-z_]+)", text)
    return {name for name in found if name in MODULES}


def imports(path):
    """Those of our modules that a file imports: in functions and by string, too."""
    tree = ast.parse(path.read_text())
    documents = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            inner = set().union(*map(modules_in, named))
            yield from inner or modules_in(node.module)
        elif isinstance(node, ast.Import):
            yield from set().union(*(modules_in(alias.name) for alias in node.names))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in documents
        ):
            yield from modules_in(node.value)


def test_every_module_has_one_place():
    assert sorted(MODULES) == sorted(PLACES)


def test_modules_import_only_upward():
    wrong = [
        f"{name} imports {used}"
        for name, path in MODULES.items()
        for used in imports(path)
        if PLACES.index(used) > PLACES.index(name)
    ]
    assert wrong == []


def test_the_core_does_not_name_the_laboratory():
    inner = "|".join(n.split(".")[-1] for n in MODULES if n.startswith("lab."))
    named = re.compile(rf"\blab\b[./:]|\b({inner}):\w")
    wrong = [
        f"{name}: {node.value}"
        for name, path in SOURCES.items()
        if not name.startswith("lab.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and named.search(str(node.value))
    ]
    assert wrong == []


def test_no_two_modules_share_a_name():
    names = [path.stem for path in MODULES.values()]
    names += [p.parent.name for p in SOURCE.rglob("__init__.py") if p.parent != SOURCE]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def definitions(path):
    """The public functions and classes of a module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
            yield node.name


def test_no_two_functions_or_classes_share_a_name():
    # The functions of the command line are the commands, and have the verbs' names.
    commands = ("cli.", "lab.research_commands")
    core = [path for name, path in MODULES.items() if not name.startswith(commands)]
    # A set, since a function is defined once for each of its overloads.
    names = Counter(name for path in core for name in {*definitions(path)})
    assert [name for name, count in names.items() if count > 1] == []


def test_packages_hold_no_logic_in_their_init():
    for path in SOURCES.values():
        if path.stem == "__init__" and path.parent != SOURCE:
            assert list(definitions(path)) == [], path


def test_imports_by_string_and_in_functions_are_seen(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(
        "import ompq.errors\n"
        "def work():\n"
        "    from ompq.scores import computation\n"
        "    import_module('ompq.plans')\n"
        "code = '''\nfrom ompq.runtimes.benchmark import runner\n'''\n"
    )
    assert sorted(imports(file)) == [
        "errors",
        "plans",
        "runtimes.benchmark",
        "scores.computation",
    ]
