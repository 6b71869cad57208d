"""export and inspect, run as the program runs them."""

import shutil

import pytest

import ompq
from cli_tools import network_file, run, run_json
from nets import TinyMobileNet, images, seeded
from ompq.amounts import in_bytes
from ompq.errors import ModelError
from ompq.packed.account import inspect_file
from ompq.packed.packed_files import load, save
from ompq.planning import plan as make_plan
from ompq.quantization.pipeline import quantize
from ompq.runtimes.onnx.onnx_files import export_onnx
from ompq.user_functions import call_user_function
from packing_tools import coded

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a run of ompq quantize."""
    folder = tmp_path_factory.mktemp("run")
    words = (network_file(folder), "--data", "random", "--samples", "16")
    made = folder / "out"
    result = run(
        "quantize", *words, "--effort", "fast", "--budget", "3bits", "-o", made
    )
    assert result.exit_code == 0, result.output
    return made


@pytest.fixture(scope="module")
def onnx_file(out):
    path = out.parent / "net.onnx"
    result = run("export", out, "-o", path)
    assert result.exit_code == 0, result.output
    return path, result.stdout


def test_onnx_is_verified_and_told(onnx_file):
    path, shown = onnx_file
    assert path.exists()
    text = " ".join(shown.split())
    assert "PyTorch top-1 equal on 100.00% of 64 images, " in text
    assert "integers top-1 equal on 100.00% of 8 images" in text
    assert "all codes equal" in text


def test_a_packed_file_will_do_and_json_has_it_all(out, onnx_file, tmp_path):
    packed = out / "network.ompq.safetensors"
    words = ("--data", "random", "--samples", "8", "-o", tmp_path / "net.onnx")
    data = run_json("export", packed, *words)
    assert data["simulated"]["images"] == 8
    assert data["packed_bytes"] == packed.stat().st_size
    # Which inputs verify does not change what is written.
    assert (tmp_path / "net.onnx").read_bytes() == onnx_file[0].read_bytes()
    quiet = run("export", packed, *words, "--quiet").stdout
    assert quiet.startswith(f"{tmp_path / 'net.onnx'}: ") and quiet.count("\n") == 1


def test_packed_network_is_copied_when_it_is_whole(out, tmp_path):
    copy = tmp_path / "copy.safetensors"
    result = run("export", out, "--format", "packed", "-o", copy)
    assert copy.read_bytes() == (out / "network.ompq.safetensors").read_bytes()
    assert result.stdout.startswith(f"{copy}: ")
    data = run_json("export", out, "--format", "packed", "-o", copy)
    assert data["bytes"] == inspect_file(copy).file_bytes
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(copy.read_bytes()[:-9])
    result = run("export", broken, "--format", "packed", "-o", tmp_path / "x")
    assert result.exit_code == 2
    assert not (tmp_path / "x").exists()


def test_what_cannot_be_exported_is_told(out, tmp_path):
    result = run("export", tmp_path, "-o", tmp_path / "net.onnx")
    assert result.exit_code == 2
    assert "error: there is no packed network" in result.stderr
    result = run("export", out, "--format", "keras", "-o", tmp_path / "net")
    assert "'keras' is not one of onnx, tflite, pte, mlpackage" in result.stderr


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_result_is_named(out, tmp_path, text):
    folder = tmp_path / "out"
    shutil.copytree(out, folder)
    (folder / "result.json").write_text(text)
    found = run("export", folder, "-o", tmp_path / "net.onnx")
    assert found.exit_code == 2
    assert "result.json is damaged: " in found.stderr.replace("\n", " ")


def test_a_packed_file_without_a_network_s_name_asks_for_it(out, tmp_path):
    nameless = tmp_path / "net.ompq.safetensors"
    made = call_user_function(network_file(tmp_path), ModelError)
    save(load(out / "network.ompq.safetensors", made), nameless)
    result = run("export", nameless, "-o", tmp_path / "net.onnx")
    assert result.exit_code == 2
    assert "does not name its network; give --network" in " ".join(
        result.stderr.split()
    )
    assert not (tmp_path / "net.onnx").exists()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "net.ompq.safetensors"
    network = seeded(TinyMobileNet())
    plan = make_plan(network, images(16), "3.5bits")
    save(quantize(network, plan, images(16)), path, plan=plan, network="net.py:make")
    return path


def test_every_item_stands_next_to_the_plans_figure(packed):
    account = inspect_file(packed)
    result = run("inspect", packed, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for name, found in account.items.items():
        start = f"{name.replace('_', ' ')} {found:,} {account.planned[name]:,}"
        assert any(row == start or row.startswith(f"{start} ") for row in rows), start
    total = f"file {account.file_bytes:,} {account.planned_bytes:,} "
    assert any(row.startswith(total) for row in rows)
    for one in account.units:
        start = f"{one.unit.name} {one.unit.kind} {one.bits} "
        assert any(row.startswith(start) for row in rows), start
    assert "net.py:make" in result.stdout
    assert "plan 3.5bits by sensitivity" in " ".join(result.stdout.split())
    assert "KiB, within the plan's " in result.stdout


def test_narrow_terminals_and_quiet_keep_to_their_width(packed):
    result = run("inspect", packed, env={"COLUMNS": "50"})
    assert max(map(len, result.stdout.splitlines())) <= 50
    quiet = run("inspect", packed, "--quiet")
    assert quiet.stdout.count("\n") == 1
    assert "within the plan's" in quiet.stdout


def test_json_is_the_account(packed):
    assert run_json("inspect", packed) == inspect_file(packed).to_json()


def test_network_without_name_and_plan_is_shown(packed, tmp_path):
    network = seeded(TinyMobileNet())
    plan = make_plan(network, images(16), "3.5bits")
    save(quantize(network, plan.allocation, images(16)), tmp_path / "net")
    result = run("inspect", tmp_path / "net")
    assert "not named" in result.stdout
    assert "3.5bits" not in result.stdout


def test_foreign_files_are_one_line(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    result = run("inspect", tmp_path / "plan.json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_the_graph_travels_where_asked(out, onnx_file, tmp_path):
    both, again = tmp_path / "both.ompq.safetensors", tmp_path / "again.onnx"
    words = ("--format", "packed", "--with-graph", "-o", both)
    data = run_json("export", out, *words)
    assert data["packed_bytes"] == both.stat().st_size
    assert data["bytes"] == onnx_file[0].stat().st_size
    shown = " ".join(run("export", out, *words).stdout.split())
    assert "of it the graph; unpacked" in shown
    told = run("export", out, *words, "-q").stdout
    assert in_bytes(both.stat().st_size) in told
    assert run_json("inspect", both)["items"]["graph"] == data["graph_bytes"]
    assert "within the plan's" in (told := run("inspect", both, "-q").stdout)
    assert told.rstrip().endswith("of an ONNX graph")
    assert run_json("unpack", both, "-o", again)["bytes"] == data["bytes"]
    assert again.read_bytes() == onnx_file[0].read_bytes()
    assert run("unpack", both).exit_code == 0
    assert (tmp_path / "both.onnx").read_bytes() == again.read_bytes()
    result = run("export", out, "--with-graph")
    assert result.exit_code == 2
    assert "--with-graph writes a packed file: give --format packed" in result.output


def test_inspect_shows_what_coded_weights_take(tmp_path):
    file = tmp_path / "net.ompq.safetensors"
    save(coded(seeded(TinyMobileNet()), 8.0), file)
    shown = run("inspect", str(file)).stdout
    assert "coded" in shown and "C8A8" in shown
    units = run_json("inspect", str(file))["units"]
    taken = units[0]["bytes"]["weights"]
    assert all(one["coded"] for one in units)
    weights = inspect_file(file).units[0].unit.weights
    assert f"{8 * taken / weights:.2f}" in shown


def test_onnx_files_are_inspected_too(tmp_path):
    pytest.importorskip("onnxruntime")
    network = seeded(TinyMobileNet())
    made = quantize(network, make_plan(network, images(16), "3.5bits"), images(16))
    path = tmp_path / "net.onnx"
    result = export_onnx(made, path, images(4), engine_images=1)
    data = run_json("inspect", path)
    assert data["file_bytes"] == result.bytes == sum(data["items"].values())
    shown = run("inspect", path, env={"COLUMNS": "100"}).stdout
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert f"file {result.bytes:,}" in rows
    for unit in data["units"]:
        assert any(r.startswith(f"{unit['name']} {unit['weight_bits']} ") for r in rows)
    quiet = run("inspect", path, "--quiet").stdout
    assert quiet.startswith(f"{path}: ") and quiet.count("\n") == 1


def test_a_folder_is_told_from_a_file(tmp_path):
    result = run("inspect", tmp_path)
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {tmp_path} is a folder; give the file in it, for example "
        f"{tmp_path / 'network.ompq.safetensors'}\n"
    )


def test_files_that_are_not_there_are_named_once(tmp_path):
    missing = run("inspect", tmp_path / "net.onnx")
    assert missing.exit_code == 2
    assert missing.stderr == f"error: {tmp_path / 'net.onnx'}: there is no such file\n"


def test_without_a_name_the_file_goes_into_the_run_s_folder(out, onnx_file, tmp_path):
    folder = shutil.copytree(out, tmp_path / "run")
    data = run_json("export", folder, "--samples", "8")
    assert data["path"] == str(folder / "network.onnx")
    assert (folder / "network.onnx").read_bytes() == onnx_file[0].read_bytes()
    beside = tmp_path / "my.ompq.safetensors"
    shutil.copyfile(out / "network.ompq.safetensors", beside)
    assert run("export", beside, "--samples", "8").exit_code == 0
    assert (tmp_path / "my.onnx").exists()
    copied = run("export", out, "--format", "packed")
    assert copied.exit_code == 2
    assert "copies a file: give -o FILE" in copied.stderr


def test_runs_and_exports_keep_to_a_budget_for_the_onnx_file(tmp_path):
    words = (network_file(tmp_path), "--data", "random", "--samples", "16")
    words += ("--choices", "4")
    planned = run_json("plan", *words, "--budget", "onnx:1MiB")["totals"]["onnx_bytes"]
    budget, folder = f"onnx:{planned:.0f}B", tmp_path / "out"
    data = run_json(
        "quantize", *words, "--effort", "fast", "--budget", budget, "-o", folder
    )
    sizes = data["sizes"]
    assert list(sizes) == data["files"]
    assert all((folder / n).stat().st_size == one["bytes"] for n, one in sizes.items())
    assert sizes["network.onnx"]["bytes"] <= sizes["network.onnx"]["planned"] == planned
    # Older operators have no type of 4 bits, so that weights take more.
    late = run("export", folder, "--opset", "18", "-o", tmp_path / "net.onnx")
    assert late.exit_code == 2
    assert f"more than the budget of {ompq.Budget.of(budget)}" in late.stderr
    assert not (tmp_path / "net.onnx").exists()
