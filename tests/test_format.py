"""The packed file itself: digests, versions, and files made wrong on purpose."""

import json
import pickle
import random
import tracemalloc
import zlib

import pytest
import torch
from safetensors.torch import save_file

from files_cases import WRONG, changed_anywhere
from nets import Chain, images, seeded
from ompq.allocation.problem import Allocation
from ompq.errors import OmpqError, PackedFileError
from ompq.files import read_tensors, write_tensors
from ompq.integer.finalization import finalize
from ompq.network.units import Choice
from ompq.packed.account import inspect_file
from ompq.packed.format import (
    FORMAT,
    quantized_units,
    read_contents,
    write_contents,
    zero_step,
)
from ompq.packed.packed_files import load, save
from ompq.packed.summary import summarize
from ompq.quantization.pipeline import quantize
from ompq.quantization.record import quantization_of
from packing_tools import coded


def read_file(path):
    return read_tensors(path, FORMAT)


def write_file(path, tensors):
    write_tensors(path, {"format": FORMAT}, tensors)


@pytest.fixture(scope="module")
def saved():
    bits = Allocation({"conv": Choice(3, 8), "head": Choice(8, 8)})
    made = quantize(seeded(Chain()), bits, images(16)).eval()
    return finalize(made, images(4))


@pytest.fixture
def coded_file(tmp_path):
    path = tmp_path / "coded.ompq.safetensors"
    save(coded(seeded(Chain()), 8.0), path)
    return path


@pytest.fixture
def file(saved, tmp_path):
    path = tmp_path / "net.ompq.safetensors"
    save(saved, path, network="net.py:make")
    return path


def test_contents_come_back(saved, file, tmp_path):
    contents = read_contents(file)
    assert contents.record == quantization_of(saved)
    assert contents.about["network"] == "net.py:make"
    assert [one.grid.bits for one in contents.units] == [3, 8]
    for one in contents.units:
        layer = saved.get_submodule(one.unit.name)
        assert torch.equal(one.grid.scale, layer.weight_scale)
        assert torch.equal(one.grid.zero_point, layer.weight_zero_point)
        assert torch.equal(one.bias, layer.bias)
    again = tmp_path / "again"
    write_contents(again, contents)
    assert again.read_bytes() == file.read_bytes()


def test_file_is_lean_plain_safetensors(file):
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    assert set(header) == {"__metadata__", "codes", "numbers", "structure"}
    assert set(json.loads(header["__metadata__"]["ompq"])) == {"format", "sha256"}
    assert size < 400


def test_any_damage_is_noticed(file):
    whole = file.read_bytes()
    for at in range(0, len(whole), 3):
        broken = bytearray(whole)
        broken[at] ^= 1 << (at % 8)
        file.write_bytes(broken)
        with pytest.raises(PackedFileError, match=r"net\.ompq\.safetensors"):
            read_contents(file)
        file.write_bytes(whole[:at])
        with pytest.raises(PackedFileError, match="damaged, cut short, or not"):
            read_contents(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is a safetensors file, but not of the kind ompq-packed/3. Give a"),
        ('{"format": "ompq-packed/4"}', "its format is ompq-packed/4; ompq .* reads"),
    ],
)
def test_foreign_and_newer_files_are_refused(text, words, tmp_path):
    path = tmp_path / "foreign.safetensors"
    save_file({"a": torch.zeros(1)}, path, {"ompq": text} if text else None)
    with pytest.raises(PackedFileError, match=words):
        read_contents(path)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("the file was executed",)


def test_pickles_missing_files_and_folders_are_refused(tmp_path):
    path = tmp_path / "pickle.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(PackedFileError, match="not a safetensors file"):
        read_contents(path)
    with pytest.raises(PackedFileError, match="there is no such file"):
        read_contents(tmp_path / "nothing")
    words = r"it is a folder. Give a .*network\.ompq\.safetensors"
    with pytest.raises(PackedFileError, match=words):
        read_contents(tmp_path)


def test_zero_points_fit_into_a_byte():
    for bits in range(2, 9):
        largest = (1 << bits) - 1 if bits <= 6 else 1 << (bits - 1)
        assert largest / zero_step(bits) <= 255


def test_float_units_are_no_quantized_units(saved):
    record = quantization_of(saved)
    bits = Allocation({"conv": Choice(32, 32), "head": Choice(8, 8)})
    changed = type(record)(record.graph, bits, record.sites, record.skipped)
    assert [unit.name for unit in quantized_units(changed)] == ["head"]


def structure_of(tensors):
    return json.loads(zlib.decompress(tensors["structure"].numpy().tobytes()))


def with_structure(tensors, **entries):
    text = json.dumps({**structure_of(tensors), **entries}).encode()
    packed = bytearray(zlib.compress(text))
    return {**tensors, "structure": torch.frombuffer(packed, dtype=torch.uint8)}


def unit_changed(tensors, **entries):
    graph = structure_of(tensors)["graph"]
    for key, value in entries.items():
        graph["units"].setdefault(key, [0, 0])[0] = value
    return with_structure(tensors, graph=graph)


def with_sites(tensors, **entries):
    site = {"positions": [0], "bits": 8, "after": ["conv"], "before": [], **entries}
    return with_structure(tensors, sites={key: [one] for key, one in site.items()})


def without(entries, name):
    return {key: value for key, value in entries.items() if key != name}


BROKEN = {
    "missing": (lambda t: without(t, "numbers"), "numbers must be a vector"),
    "type": (
        lambda t: {**t, "numbers": t["numbers"].double()},
        "numbers must be a vector of torch.float32",
    ),
    "shape": (lambda t: {**t, "numbers": t["numbers"][None]}, "must be a vector"),
    "length": (
        lambda t: {**t, "codes": t["codes"][1:].clone()},
        "codes is too short: 94 entries",
    ),
    "structure": (
        lambda t: {**t, "structure": torch.zeros(9, dtype=torch.uint8)},
        "while decompressing",
    ),
    "list": (lambda t: with_structure(t, graph=[]), "TypeError"),
    "no list": (lambda t: with_structure(t, sites="x"), "sites must be an object"),
    "sites": (lambda t: with_structure(t, sites={}), "numbers is too long"),
    "negative": (
        lambda t: unit_changed(t, weight_shape=[-6, 3, 3, 3]),
        r"weight_shape\[0\] must be a whole number",
    ),
    "huge": (lambda t: unit_changed(t, weight_shape=[6000000] * 3), "weights"),
    "text": (lambda t: unit_changed(t, weight_shape=["a" * 9, 6]), "whole number"),
    "long": (lambda t: unit_changed(t, macs=10**400), "macs must be a whole number"),
    "escape": (lambda t: unit_changed(t, name="\x1b[31mconv"), "not printable"),
    "unit": (lambda t: unit_changed(t, surprise=1), "has no field surprise"),
    "no place": (
        lambda t: with_structure(
            t, sites={"positions": [[0]], "bits": [8], "after": [[]], "before": [[]]}
        ),
        "an activation of 8 bits at ",
    ),
    "no operand": (lambda t: with_sites(t, operand="query"), "an operand query of "),
    "strange operand": (
        lambda t: with_sites(t, operand="middle", before=["conv"]),
        "an operand middle of ",
    ),
    "no bits": (lambda t: with_structure(t, bits=[]), "ValueError"),
    "1 bit": (
        lambda t: with_structure(t, bits=[[1, 8], [8, 8]]),
        "bits=1 is not supported",
    ),
    "kind": (lambda t: with_structure(t, state=[["a", "nn", [1]]]), "type of numbers"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_made_wrong_are_refused(case, file):
    change, message = BROKEN[case]
    write_file(file, change(read_file(file)[1]))
    words = f"broken packed file .*{message}.*; save the network again"
    with pytest.raises(PackedFileError, match=words) as error:
        load(file, Chain)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_value_at_any_place_of_a_structure_is_one_clear_error(value, file):
    tensors, refused = read_file(file)[1], 0
    for data in changed_anywhere(structure_of(tensors), value):
        write_file(file, with_structure(tensors, **data))
        for read in (inspect_file, summarize):
            try:
                read(file)
            except PackedFileError as error:
                refused += 1
                assert str(error).isprintable()
    assert refused > 50


CODED = {
    "form": (lambda t: with_structure(t, forms=[64, 0]), r"forms\[0\] must be"),
    "forms": (lambda t: with_structure(t, forms=[7]), "ValueError"),
    "streams": (lambda t: with_structure(t, streams=[]), "length of a stream must"),
    "long": (lambda t: with_structure(t, streams=[10**9, 1]), "length of a stream"),
    "short": (
        lambda t: {**t, "halves": t["halves"][1:].clone()},
        "halves is too short: 9 entries",
    ),
    "no halves": (lambda t: without(t, "halves"), "halves is too short: 0 entries"),
    "type": (
        lambda t: {**t, "halves": t["halves"].float()},
        "halves must be a vector of torch.float16",
    ),
}


@pytest.mark.parametrize("case", CODED)
def test_coded_files_made_wrong_are_refused(case, coded_file):
    change, message = CODED[case]
    write_file(coded_file, change(read_file(coded_file)[1]))
    with pytest.raises(PackedFileError, match=f"broken packed file .*{message}"):
        load(coded_file, Chain)


def test_damaged_streams_of_a_file_with_a_right_digest_are_refused(coded_file):
    _, tensors = read_file(coded_file)
    whole = [one.codes for one in read_contents(coded_file).units]
    refused = 0
    for place in range(len(tensors["codes"])):
        codes = tensors["codes"].clone()
        codes[place] ^= 1 << place % 8
        write_file(coded_file, {**tensors, "codes": codes})
        assert inspect_file(coded_file).file_bytes  # which decodes nothing
        try:
            load(coded_file, Chain)
        except PackedFileError as error:
            assert "cannot be read: a stream of codes is damaged" in str(error)
            refused += 1
        else:  # the very last bits of a stream may be any
            found = read_contents(coded_file).units
            assert all(map(torch.equal, [one.codes for one in found], whole))
    assert refused > 0.85 * len(tensors["codes"])


def test_deflated_structure_cannot_fill_the_memory(file):
    bomb = bytearray(zlib.compress(b"[" * (1 << 28), 9))
    structure = torch.frombuffer(bomb, dtype=torch.uint8)
    write_file(file, {**read_file(file)[1], "structure": structure})
    tracemalloc.start()
    with pytest.raises(PackedFileError, match="broken packed file"):
        read_contents(file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 28
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (b"[],", "it holds more than 1,048,576 values"),
        (b'"",', "it holds more than 1,048,576 values"),
        (b" " * 64, "a structure of more than 16,777,216 bytes"),
    ],
)
def test_structures_are_limited_before_they_are_parsed(file, inner, words):
    bomb = b'{"narrow":[' + inner * (1 << 22) + b"0]}"
    deflated = bytearray(zlib.compress(bomb, 9))
    structure = torch.frombuffer(deflated, dtype=torch.uint8)
    write_file(file, {**read_file(file)[1], "structure": structure})
    tracemalloc.start()
    with pytest.raises(PackedFileError, match=f"broken packed file .*{words}"):
        read_contents(file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 26
    tracemalloc.stop()


STRANGE = [
    None, True, -1, 0, 1, 3, 10**6, 10**30, 0.5, float("nan"), "", "x", "\x1b[2J",
    "conv.weight", [], [1], [-1, 2], {}, {"a": 1}, ["conv"] * 3, [[[[]]]], "a" * 10_000,
]  # fmt: skip


def places(data, path=()):
    """Every place in plain data, the whole of it included."""
    yield path
    items = data.items() if isinstance(data, dict) else ()
    for key, value in enumerate(data) if isinstance(data, list) else items:
        yield from places(value, (*path, key))


def changed(data, path, value):
    if not path:
        return value
    result = dict(data) if isinstance(data, dict) else list(data)
    result[path[0]] = changed(data[path[0]], path[1:], value)
    return result


def test_no_strange_value_gives_more_than_one_clear_error(file):
    _, whole = read_file(file)
    data = structure_of(whole)
    order = random.Random(0)
    everywhere = [(path, value) for path in places(data) for value in STRANGE]
    refused = 0
    for path, value in order.sample(everywhere, 500):
        text = bytearray(zlib.compress(json.dumps(changed(data, path, value)).encode()))
        structure = torch.frombuffer(text, dtype=torch.uint8)
        write_file(file, {**whole, "structure": structure})
        try:
            inspect_file(file)
            load(file, Chain)
        except OmpqError as error:
            assert str(error).isprintable(), (path, value)
            assert len(str(error)) < 4000, (path, value)
            refused += 1
        except Exception as error:
            pytest.fail(f"{path} = {value!r:.40}: {error!r:.200}")
    assert refused > 250
