import pytest

from cli_tools import run, run_json
from nets import TinyMobileNet, images, seeded
from ompq.onnx.export import export_onnx
from ompq.packing import inspect_file, save
from ompq.plans import plan as make_plan
from ompq.quantization import quantize


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "net.ompq.safetensors"
    network = seeded(TinyMobileNet())
    plan = make_plan(network, images(16), "3.5bits")
    save(quantize(network, plan, images(16)), path, plan=plan, network="net.py:make")
    return path


def test_every_item_stands_next_to_the_plans_figure(file):
    account = inspect_file(file)
    result = run("inspect", file, env={"COLUMNS": "100"})
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
    assert "plan 3.5bits by orm_distortion" in " ".join(result.stdout.split())
    assert "within the 1% + 16.0 KiB that are promised" in result.stdout


def test_narrow_terminals_and_quiet_keep_to_their_width(file):
    result = run("inspect", file, env={"COLUMNS": "50"})
    assert max(map(len, result.stdout.splitlines())) <= 50
    quiet = run("inspect", file, "--quiet")
    assert quiet.stdout.count("\n") == 1
    assert "of the plan's" in quiet.stdout


def test_json_is_the_account(file):
    assert run_json("inspect", file) == inspect_file(file).to_json()


def test_network_without_name_and_plan_is_shown(file, tmp_path):
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
    assert result.stderr == f"error: {tmp_path} is a folder; name the file in it\n"
