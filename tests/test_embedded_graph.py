"""The ONNX file that travels in a packed file: the same bytes, without PyTorch."""

import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch

from nets import Chain, TinyMobileNet, TinyResNet, images, seeded
from ompq.configs import QuantizeConfig
from ompq.errors import MissingExtraError, PackedFileError
from ompq.files import read_arrays, read_tensors, write_tensors
from ompq.integer.finalization import finalize
from ompq.packed.account import inspect_file
from ompq.packed.embedded_graph import unpack
from ompq.packed.packed_files import add_onnx, load, save
from ompq.packed.structure import GRAPH, PACKED_FORMAT
from ompq.quantization.pipeline import quantize
from ompq.runtimes.onnx.onnx_files import export_onnx
from packing_tools import coded, quantized

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def files(network, folder, **options):
    """Write a finalized network packed, as ONNX, and packed with its ONNX file."""
    packed, onnx, both = (folder / name for name in ("net", "net.onnx", "both"))
    final = finalize(network, images(4))
    save(final, packed, **options)
    export_onnx(final, onnx, images(4))
    return packed, onnx, both, add_onnx(packed, onnx, both)


MADE = {
    "coded": (TinyResNet, lambda net: coded(net, 8.0), {}),
    "coded mobile": (TinyMobileNet, lambda net: coded(net, 8.0, 1.5), {}),
    "every width": (TinyResNet, quantized, {}),
    "every width, coded": (TinyMobileNet, quantized, {"coded": True}),
    "affine": (Chain, lambda net: quantized(net, (8, 3), weight_grid="affine"), {}),
}


@pytest.mark.parametrize("case", MADE)
def test_the_very_file_comes_out(case, tmp_path):
    make, quantize, options = MADE[case]
    packed, onnx, both, added = files(quantize(seeded(make())), tmp_path, **options)
    again = tmp_path / "again.onnx"
    assert unpack(both, again) == onnx.stat().st_size
    assert again.read_bytes() == onnx.read_bytes()
    account = inspect_file(both)
    assert account.items[GRAPH] == added and account.planned[GRAPH] == 0
    assert sum(account.items.values()) == both.stat().st_size
    grown = both.stat().st_size - packed.stat().st_size
    assert added < grown < added + 100
    one, other = (load(file, make) for file in (packed, both))
    assert torch.equal(one(images(4)), other(images(4)))


def test_damaged_scales_are_refused(tmp_path):
    *_, both, _ = files(coded(seeded(TinyMobileNet()), 8.0), tmp_path)
    _, tensors = read_tensors(both, PACKED_FORMAT)
    tensors["multiples.lzma"] = tensors["multiples.lzma"][:-1].clone()
    write_tensors(both, {"format": PACKED_FORMAT}, tensors)
    with pytest.raises(PackedFileError, match="broken .*multiples are damaged: they"):
        unpack(both, tmp_path / "again.onnx")
    with pytest.raises(PackedFileError, match="broken .*multiples are damaged: they"):
        load(both, TinyMobileNet)


def test_groups_travel_once(tmp_path):
    packed, onnx, both, again = (tmp_path / name for name in ("a", "b", "c", "d"))
    layers = (torch.nn.Linear(192, 80), torch.nn.GELU(), torch.nn.Linear(80, 70))
    network = seeded(torch.nn.Sequential(torch.nn.Flatten(), *layers))
    config = QuantizeConfig(group_size=64)
    bits = {"1": (3, 32), "3": (8, 32)}
    made = quantize(network, bits, images(4), config)
    save(made, packed)
    export_onnx(made, onnx, images(4))
    assert add_onnx(packed, onnx, both) < 2500  # 13 KB of weights are not in it
    assert unpack(both, again) == onnx.stat().st_size
    assert again.read_bytes() == onnx.read_bytes()


def test_weights_travel_once(tmp_path):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 500))
    *_, added = files(coded(network, 8.0), tmp_path)
    assert added < 1500  # of 96,000 weights, 500 scales and 500 biases


WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "torchvision", "scipy"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
from ompq.cli.main import app
app(["unpack", *sys.argv[1:]])
"""


def test_unpacking_needs_no_torch(tmp_path):
    _, onnx, both, _ = files(coded(seeded(TinyMobileNet()), 8.0), tmp_path)
    again = tmp_path / "again.onnx"
    command = [sys.executable, "-c", WITHOUT_TORCH, str(both), "-o", str(again)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert f"{onnx.stat().st_size:,} bytes, from {both.stat().st_size:,}" in shown
    assert again.read_bytes() == onnx.read_bytes()


def test_files_without_onnx_and_other_files_are_refused(tmp_path):
    packed, onnx, *_ = files(coded(seeded(Chain()), 8.0), tmp_path)
    target = tmp_path / "again.onnx"
    with pytest.raises(PackedFileError, match="carries no ONNX file; .*--with-graph"):
        unpack(packed, target)
    with pytest.raises(PackedFileError, match="not a packed network: there is no"):
        unpack(tmp_path / "missing", target)
    with pytest.raises(PackedFileError, match="is not of .*: it is not an ONNX file"):
        add_onnx(packed, packed, target)
    save(finalize(coded(seeded(TinyResNet()), 8.0), images(4)), packed)
    with pytest.raises(PackedFileError, match="has none of the packed weights"):
        add_onnx(packed, onnx, target)
    assert not target.exists()


def test_a_missing_onnx_is_named(tmp_path, monkeypatch):
    *_, both, _ = files(coded(seeded(Chain()), 8.0), tmp_path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[onnx\]'"):
        unpack(both, tmp_path / "again.onnx")


def with_graph(path, change):
    """Change the text of the graph of a file that stays whole otherwise."""
    _, tensors = read_tensors(path, PACKED_FORMAT)
    text, _, rest = zlib.decompress(tensors[GRAPH].numpy().tobytes()).partition(b"\n")
    deflated = bytearray(zlib.compress(change(text.decode()).encode() + b"\n" + rest))
    tensors[GRAPH] = torch.frombuffer(deflated, dtype=torch.uint8)
    write_tensors(path, {"format": PACKED_FORMAT}, tensors)


BROKEN = {
    "no JSON": (lambda text: text[:-1], "ValueError"),
    "recipe": (lambda text: text.replace('"bytes"', '"byte"'), "KeyError"),
    "shape": (lambda text: text.replace("[6,3,3,3]", "[6,3,3,99999999]"), "not hold"),
    "vector": (lambda text: text.replace('"codes"', '"code"'), "KeyError"),
    "short": (lambda text: text.replace('"codes",0', '"codes",999'), "is too short"),
    "stretch": (lambda text: text.replace('"scale",1', '"scale",0'), "stretched by 0"),
    "input": (lambda text: text.replace('"bias",1,', '"bias",1,-'), "input of scale -"),
    "bits": (lambda text: text.replace("],0,8,1,", "],0,9,1,"), "of at most 8, not 9"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_graphs_made_wrong_are_refused(case, tmp_path):
    *_, both, _ = files(coded(seeded(Chain()), 8.0), tmp_path)
    change, message = BROKEN[case]
    with_graph(both, change)
    with pytest.raises(PackedFileError, match=f"ONNX file in .* is broken .*{message}"):
        unpack(both, tmp_path / "again.onnx")
    assert not (tmp_path / "again.onnx").exists()


def test_dense_streams_must_have_their_length(tmp_path):
    *_, both, _ = files(quantized(seeded(Chain()), (4,)), tmp_path)
    with_graph(both, lambda text: text.replace('"codes",0,81', '"codes",0,80'))
    with pytest.raises(
        PackedFileError,
        match="80 bytes does not hold 162 codes",
    ):
        unpack(both, tmp_path / "again.onnx")


def test_a_deflated_graph_cannot_fill_the_memory(tmp_path):
    *_, both, _ = files(coded(seeded(Chain()), 8.0), tmp_path)
    _, tensors = read_tensors(both, PACKED_FORMAT)
    bomb = bytearray(zlib.compress(b"[" * (1 << 26)))
    tensors[GRAPH] = torch.frombuffer(bomb, dtype=torch.uint8)
    write_tensors(both, {"format": PACKED_FORMAT}, tensors)
    with pytest.raises(PackedFileError, match="67108864 bytes describe its units"):
        unpack(both, tmp_path / "again.onnx")


def test_arrays_have_the_digest_of_tensors(tmp_path):
    path = tmp_path / "file"
    tensors = {"a": torch.arange(5.0), "b": torch.arange(3).half(), "c": torch.zeros(0)}
    write_tensors(path, {"format": "ompq-test/1"}, tensors)
    header, arrays = read_arrays(path, "ompq-test/1")
    assert header == {"format": "ompq-test/1"}
    assert all(np.array_equal(arrays[name], tensors[name].numpy()) for name in tensors)


def test_files_of_more_than_two_gigabytes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ompq.packed.embedded_graph._LARGEST_FILE", 100)
    _, _, both, _ = files(quantized(seeded(Chain())), tmp_path)
    with pytest.raises(PackedFileError, match="it would exceed 2 GiB"):
        unpack(both, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
