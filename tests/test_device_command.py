"""ompq-runtime: the wheel for devices, used where nothing else is installed."""

import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import ompq
from nets import Chain, images, seeded
from ompq.device_command import main

ROOT = Path(__file__).parent.parent
RUNTIME = ROOT / "packages" / "runtime"

# Only what the wheel depends on may be imported, and what that imports in turn.
SITE = """
import sys
ALLOWED = {"numpy", "constriction", "msgspec", "safetensors", "onnx", "google",
           "ml_dtypes", "typing_extensions", "ompq"}
class Others:
    def find_spec(self, name, *_):
        root = name.partition(".")[0]
        if root not in ALLOWED and root not in sys.stdlib_module_names:
            if not root.startswith(("_", "sitecustomize", "usercustomize")):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Others())
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A packed file with its graph, and the ONNX file itself."""
    folder = tmp_path_factory.mktemp("files")
    model = seeded(Chain())
    final = ompq.finalize(ompq.quantize(model, {"*": 4}, images()), images())
    packed, onnx, both = (folder / name for name in ("net", "net.onnx", "both"))
    ompq.save(final, packed, network="net.py:make")
    ompq.export(final, onnx, images())
    ompq.packed.add_onnx(packed, onnx, both)
    return both, onnx


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=RUNTIME, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_works_where_there_is_no_torch(wheel, files, tmp_path):
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (site / "sitecustomize.py").write_text(SITE)

    def run(*words):
        command = [python, "-m", "ompq.device_command", *words]
        return subprocess.run(
            command, capture_output=True, text=True, env={}, cwd=tmp_path
        )

    both, onnx = files
    shown = run("inspect", both)
    assert shown.returncode == 0, shown.stderr
    assert "net.py:make" in shown.stdout and "W4A8" in shown.stdout
    done = run("unpack", both, "-o", "again.onnx")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again.onnx").read_bytes() == onnx.read_bytes()
    code = (
        "import ompq, sys; ompq.packed.unpack; assert 'torch' not in sys.modules; "
        "ompq.plan"
    )
    missing = subprocess.run([python, "-c", code], capture_output=True, env={})
    said = missing.stderr.decode()
    assert "ImportError: ompq.planning is not in ompq-runtime, the part of ompq" in said
    assert "is installed here. Run: pip install ompq" in said


def test_the_wheel_holds_modules_of_ompq_of_the_same_version(wheel):
    own = tomllib.loads((RUNTIME / "pyproject.toml").read_text())["project"]
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert own["version"] == whole["version"]
    needed = {one.partition(">")[0] for one in own["dependencies"]}
    assert needed == {"numpy", "constriction", "msgspec", "safetensors", "onnx"}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".dist-info/" not in name:
                assert archive.read(name) == (ROOT / "src" / name).read_bytes()


def test_the_command_inspects_and_unpacks(files, tmp_path, capsys):
    both, onnx = files
    assert main(["inspect", str(both)]) == 0
    assert "ONNX file inside: unpack it" in capsys.readouterr().out
    assert main(["unpack", str(both), "-o", str(tmp_path / "a.onnx")]) == 0
    assert (tmp_path / "a.onnx").read_bytes() == onnx.read_bytes()
    assert main(["inspect", str(onnx)]) == 2
    assert "error: " in capsys.readouterr().err
