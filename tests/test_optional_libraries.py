"""What ompq does without the libraries that it does not require."""

import subprocess
import sys

import pytest

from ompq import optional_libraries
from ompq.errors import MissingExtraError
from ompq.optional_libraries import optional_library, torchvision_library

# Runs code where neither torchvision nor pillow can be imported.
WITHOUT_IMAGES = """
import sys
class NoImages:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torchvision", "PIL"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoImages())
"""
EVERY_MODULE = """
import pkgutil, importlib, ompq
for found in pkgutil.walk_packages(ompq.__path__, "ompq."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
print("all")
"""


def without_images(code, *words, cwd):
    command = [sys.executable, "-c", WITHOUT_IMAGES + code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def ompq_without_images(*words, cwd):
    return without_images("from ompq.cli.main import app; app()", *words, cwd=cwd)


def test_every_module_can_be_imported_without_torchvision(tmp_path):
    done = without_images(EVERY_MODULE, cwd=tmp_path)
    assert done.stdout == "all\n", done.stderr


def test_a_network_is_quantized_without_torchvision(tmp_path):
    words = "quantize ompq:demo --data digits --samples 32 --budget 40KiB -o out"
    done = ompq_without_images(*words.split(), "--effort", "fast", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "network.ompq.safetensors").exists()


@pytest.mark.parametrize(
    "words",
    [
        "budget torchvision:resnet18 --weights none",
        "budget cifar:resnet18 --weights none",
        "evaluate ompq:demo --data images",
    ],
)
def test_what_needs_torchvision_says_how_to_install_it(words, tmp_path):
    (tmp_path / "images" / "0").mkdir(parents=True)
    (tmp_path / "images" / "0" / "a.png").write_bytes(b"an image")
    done = ompq_without_images(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "torchvision is not installed. Run: pip install torchvision torch==" in said


def test_an_unknown_network_is_told_without_torchvision(tmp_path):
    done = ompq_without_images("budget", "restnet", cwd=tmp_path)
    assert "'restnet' is not the name of a network" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("build", "command"),
    [
        (
            "2.9.0+cpu",
            "torchvision torch==2.9.0+cpu --index-url "
            "https://download.pytorch.org/whl/cpu",
        ),
        ("2.9.0", "torchvision torch==2.9.0"),
    ],
)
def test_the_pytorch_that_works_is_kept(build, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setattr(optional_libraries, "version", lambda _: build)
    with pytest.raises(MissingExtraError) as raised:
        torchvision_library()
    assert str(raised.value).endswith(f"is not installed. Run: pip install {command}")


def test_the_extra_of_a_library_is_named(monkeypatch):
    assert optional_library("sys", "none") is sys
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        MissingExtraError, match=r"PyYAML .* pip install 'ompq\[yaml\]'"
    ):
        optional_library("yaml", "yaml")
