"""Weights of few bits in ONNX files: every runtime gives the same bytes back."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ompq.integer.arithmetic import CodeGrid, IntegerWeight
from ompq.runtimes.benchmark import only_core
from ompq.runtimes.onnx import weight_containers
from ompq.runtimes.onnx.weight_containers import (
    StoredWeight,
    Unpacking,
    as_tensor,
    pack_plane,
    plane_parts,
)
from ompq.weight_ranges import search_weight

onnx = pytest.importorskip("onnx")


def weight_of(bits, shape=(5, 3, 3, 3)):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
    grid = search_weight(weight, bits)
    source = CodeGrid(0.02, 0, 8)
    return IntegerWeight.of(grid.quantize(weight), grid, None, source)


def uneven(bits):
    """A weight with a dead channel, so that channels are stretched unlike."""
    weight = weight_of(bits)
    stretch = weight.stretch.clone()
    stretch[1], stretch[2] = 0, 1
    halves = weight.codes.int() * weight.unit - weight.per_channel(weight.offset)
    values = (halves * weight.per_channel(stretch)).to(torch.int8)
    return replace(weight, stretch=stretch, values=values)


def overstretched():
    """A weight whose codes lie at one end, so that bytes do not hold the products."""
    codes = torch.tensor([[14, 15], [15, 15]], dtype=torch.uint8)
    offset = torch.tensor([29, 29], dtype=torch.int32)
    stretch = torch.tensor([40, 40], dtype=torch.int32)
    values = ((codes.int() * 2 - 29) * 40).to(torch.int8)
    known = weight_of(4, (2, 2))
    return replace(known, codes=codes, offset=offset, stretch=stretch, values=values)


def graph_of(weights, opset, *, unsigned=False):
    """Return a graph that gives weights, name → weight, as bytes; and its constants."""
    from onnx import TensorProto, helper

    unpacking = Unpacking(opset, [one.codes.numel() for one in weights.values()])
    constants, nodes = {}, []
    for name, weight in weights.items():
        arrays, written = unpacking.store(name, weight, unsigned=unsigned)
        constants |= arrays
        nodes += written
    given = helper.make_tensor_value_info("given", TensorProto.FLOAT, [1])
    same = helper.make_tensor_value_info("same", TensorProto.FLOAT, [1])
    kind = TensorProto.UINT8 if unsigned else TensorProto.INT8
    found = [
        helper.make_tensor_value_info(f"{name}/bytes", kind, list(weight.codes.shape))
        for name, weight in weights.items()
    ]
    graph = helper.make_graph(
        [*nodes, helper.make_node("Identity", ["given"], ["same"])],
        "graph",
        [given],
        [*found, same],
        [as_tensor(name, value) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    ir = helper.find_min_ir_version_for(opsets)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir)
    onnx.checker.check_model(model, full_check=True)
    return model, constants


def in_reference(model, path):
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(model).run(None, {"given": np.zeros(1, np.float32)})


def in_onnxruntime(model, path):
    runtime = pytest.importorskip("onnxruntime", minversion="1.23")
    session = runtime.InferenceSession(model.SerializeToString())
    return session.run(None, {"given": np.zeros(1, np.float32)})


def in_openvino(model, path):
    openvino = pytest.importorskip("openvino")
    path.write_bytes(model.SerializeToString())
    core = only_core(openvino.Core)
    found = core.compile_model(path, "CPU")([np.zeros(1, np.float32)])
    return list(found.values())


WEIGHTS = {
    **{f"{bits} bits": weight_of(bits) for bits in range(2, 8)},
    **{f"{bits} bits, whole": weight_of(bits, (8, 4, 2, 2)) for bits in range(2, 8)},
    **{f"{bits} bits, linear": weight_of(bits, (8, 16)) for bits in range(2, 8)},
    **{f"{bits} bits, uneven": uneven(bits) for bits in range(2, 7)},
    "overstretched": overstretched(),
}


@pytest.fixture(params=[1 << 16, 1], ids=["of a byte", "of two"])
def tables(request, monkeypatch):
    """Tables of the codes in a byte, as for small weights; or in two."""
    monkeypatch.setattr(weight_containers, "_WIDE", request.param)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("run", [in_reference, in_onnxruntime, in_openvino])
@pytest.mark.parametrize("name", WEIGHTS)
def test_runtimes_give_the_bytes_back(name, run, opset, tmp_path):
    weight = WEIGHTS[name]
    model, constants = graph_of({"net": weight}, opset)
    read = {name for node in model.graph.node for name in node.input}
    assert set(constants) <= read
    found, _ = run(model, tmp_path / "net.onnx")
    assert found.dtype == np.int8
    assert np.array_equal(found, weight.values.numpy())
    stored = StoredWeight.of("net", weight, constants)
    parts = plane_parts(weight)
    assert stored.container == f"planes {'+'.join(map(str, parts))}"
    rows = -(-weight.codes.numel() // 8) * 8  # tables give eight codes at once
    planes = rows * weight.bits / 8
    channels = 4 * len(weight.codes) + 4  # offsets and stretches, at most 16 bits each
    assert weight.codes.numel() * weight.bits / 8 <= stored.bytes <= planes + channels


@pytest.mark.parametrize("run", [in_reference, in_onnxruntime, in_openvino])
@pytest.mark.parametrize("name", ["6 bits", "7 bits, linear", "overstretched"])
def test_unsigned_bytes_come_out_of_planes(name, run, tmp_path):
    model, _ = graph_of({"net": WEIGHTS[name]}, 21, unsigned=True)
    found, _ = run(model, tmp_path / "net.onnx")
    assert found.dtype == np.uint8
    assert np.array_equal(found, WEIGHTS[name].values.numpy().astype(int) + 128)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 7, 8, 33])
def test_planes_hold_codes_from_the_lowest_bit_up(bits, count):
    codes = np.random.default_rng(0).integers(0, 1 << bits, count).astype(np.uint8)
    packed = pack_plane(codes, bits)
    assert packed.size == -(-count * bits // 8)
    stream = int.from_bytes(packed.tobytes(), "little")
    assert [(stream >> (bits * i)) & ((1 << bits) - 1) for i in range(count)] == list(
        codes
    )


def sizes(model):
    """Return the bytes of everything that nodes give."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    found = {}
    for value in [*inferred.graph.value_info, *inferred.graph.output]:
        kind = value.type.tensor_type
        count = np.prod([size.dim_value for size in kind.shape.dim])
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        found[value.name] = int(count) * np.dtype(dtype).itemsize
    return found


def test_unpacking_takes_few_nodes_and_few_bytes_on_its_way():
    """A runtime holds all that a stage's nodes give, and each node takes time."""
    most = {2: (4, 3.5), 3: (7, 6.0), 4: (3, 3.0), 5: (7, 6.5), 6: (7, 6.5), 7: (10, 9)}
    for bits, (nodes, limit) in most.items():
        weight = weight_of(bits, (128, 64, 3, 3))
        first, _ = graph_of({"one": weight}, 21)
        both, _ = graph_of({"one": weight, "net": weight}, 21)
        added = len(both.graph.node) - len(first.graph.node)  # tables are shared
        own = [n for n in sizes(both) if n.startswith(("/2/", "net/"))]
        assert added == nodes, bits
        assert sum(sizes(both)[name] for name in own) <= limit * weight.codes.numel()


def test_large_weights_are_looked_up_in_larger_tables():
    found = {}
    for channels in (7, 8):  # just below 65,536 codes, and as many
        model, _ = graph_of({"net": weight_of(6, (channels, 8192))}, 21)
        (gather,) = (node for node in model.graph.node if node.op_type == "Gather")
        count = sizes(model)[gather.output[0]]
        found[channels] = sizes(model)[gather.input[1]] / count  # bytes for a code
    assert found == {7: 4 / 4, 8: 4 / 8}  # int32 for four codes, or for eight


def staged(count, monkeypatch):
    """Weights of all bits, and stages for networks however small."""
    monkeypatch.setattr(weight_containers, "_AT_ONCE", 1)
    return {f"net{n}": weight_of(2 + n % 6, (8, 8, 3, 3)) for n in range(count)}


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("run", [in_reference, in_onnxruntime, in_openvino])
def test_large_networks_are_unpacked_in_stages(run, tmp_path, monkeypatch):
    weights = staged(12, monkeypatch)
    model, _ = graph_of(weights, 21)
    *found, _ = run(model, tmp_path / "net.onnx")
    for one, weight in zip(found, weights.values(), strict=True):
        assert np.array_equal(one, weight.values.numpy())


def stages_of(model):
    """Return, for each output of a node, the latest stage that it waits for."""
    stages = {}
    for node in model.graph.node:
        before = [stages.get(name, 0) for name in node.input]
        for name in node.output:
            stages[name] = max(before, default=0) + (node.op_type == "Dropout")
    return stages


def test_a_stage_holds_its_share_of_the_codes(monkeypatch):
    weights = staged(16, monkeypatch)
    stages = stages_of(graph_of(weights, 21)[0])
    # Two weights of sixteen in each of eight stages.
    found = [stages[f"{name}/bytes"] for name in weights]
    assert sorted(found) == [stage for stage in range(8) for _ in range(2)]
    # What is unpacked before its stage is small, and shared; but INT4 can only be cast.
    late = {f"/{n}/" for n, stage in enumerate(found, start=1) if stage}
    model, _ = graph_of(weights, 21)
    early = [
        node.op_type
        for node in model.graph.node
        if not stages[node.output[0]] and node.output[0].startswith(tuple(late))
    ]
    assert set(early) == {"Cast"}
    of_4_bits = [n for n, one in enumerate(weights.values()) if one.bits == 4]
    assert len(early) == sum(found[n] > 0 for n in of_4_bits)


def test_large_weights_come_first_and_the_smallest_with_them(monkeypatch):
    monkeypatch.setattr(weight_containers, "_AT_ONCE", 600)
    channels = (8, 64, 8, 32, 16, 48)
    weights = {f"net{n}": weight_of(3, (c, 8)) for n, c in enumerate(channels)}
    found = stages_of(graph_of(weights, 21)[0])
    # 512 + 64 + 64 codes are as many as fit; then 384 + 128 + 256.
    assert [found[f"{name}/bytes"] for name in weights] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("count", [1, 9, 15, 23, 100])
def test_stages_are_as_many_as_onnx_runtime_has_passes_for(count):
    """However sizes fall: of so many equal ones, or of ones that grow."""
    million = 1 << 20
    for sizes in ([4 * million] * count, [million * n for n in range(count)]):
        stages = Unpacking(21, sizes).stages
        assert set(stages) == set(range(max(stages) + 1)) <= set(range(8))
        assert stages[int(np.argmax(sizes))] == 0
        for stage in set(stages):
            held = [one for one, own in zip(sizes, stages, strict=True) if own == stage]
            assert sum(held) <= max(sizes) + max(2 * million, sum(sizes) / 8)


def test_small_networks_wait_for_nothing():
    assert Unpacking(21, [1 << 19] * 4).stages == [0] * 4
    assert sorted(Unpacking(21, [1 << 19] * 5).stages) == [0, 0, 0, 0, 1]
    assert Unpacking(21, []).stages == []


def test_nothing_is_left_to_unpack_once_a_file_is_loaded(tmp_path, monkeypatch):
    runtime = pytest.importorskip("onnxruntime", minversion="1.23")
    weights = staged(16, monkeypatch)
    options = runtime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    options.log_severity_level = 3
    model, _ = graph_of(weights, 21)
    runtime.InferenceSession(model.SerializeToString(), options)
    left = onnx.load(tmp_path / "loaded.onnx").graph.node
    assert {node.op_type for node in left} <= {"Identity"}


def test_bytes_need_no_planes():
    weight = weight_of(8)
    assert plane_parts(weight) == ()
    constants, nodes = Unpacking(21, [weight.codes.numel()]).store("net", weight)
    assert (list(constants), nodes) == (["net/bytes"], [])
    assert StoredWeight.of("net", weight, constants).container == "int8"
