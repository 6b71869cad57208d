"""Weights of few bits in ONNX files: every runtime gives the same bytes back."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ompq.integer.arithmetic import CodeGrid, IntegerWeight
from ompq.onnx.containers import (
    StoredWeight,
    as_tensor,
    pack_plane,
    plane_parts,
    stored_bytes,
)
from ompq.ranges import search_weight

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


def graph_of(weight, opset, *, unsigned=False):
    from onnx import TensorProto, helper

    constants, nodes = stored_bytes("net", weight, opset, "w0", unsigned=unsigned)
    given = helper.make_tensor_value_info("given", TensorProto.FLOAT, [1])
    same = helper.make_tensor_value_info("same", TensorProto.FLOAT, [1])
    shape = list(weight.codes.shape)
    kind = TensorProto.UINT8 if unsigned else TensorProto.INT8
    found = helper.make_tensor_value_info("net/bytes", kind, shape)
    graph = helper.make_graph(
        [
            *(helper.make_node(k, i, [o], **more) for k, i, o, more in nodes),
            helper.make_node("Identity", ["given"], ["same"]),
        ],
        "graph",
        [given],
        [found, same],
        [as_tensor(name, value) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    ir = helper.find_min_ir_version_for(opsets)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir)
    onnx.checker.check_model(model, full_check=True)
    return model, constants


def in_reference(model, path):
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(model).run(None, {"given": np.zeros(1, np.float32)})[0]


def in_onnxruntime(model, path):
    runtime = pytest.importorskip("onnxruntime", minversion="1.23")
    session = runtime.InferenceSession(model.SerializeToString())
    return session.run(None, {"given": np.zeros(1, np.float32)})[0]


def in_openvino(model, path):
    openvino = pytest.importorskip("openvino")
    path.write_bytes(model.SerializeToString())
    return openvino.Core().compile_model(path, "CPU")([np.zeros(1, np.float32)])[0]


WEIGHTS = {
    **{f"{bits} bits": weight_of(bits) for bits in range(2, 8)},
    **{f"{bits} bits, whole": weight_of(bits, (8, 4, 2, 2)) for bits in range(2, 8)},
    **{f"{bits} bits, linear": weight_of(bits, (8, 16)) for bits in range(2, 8)},
    **{f"{bits} bits, uneven": uneven(bits) for bits in range(2, 7)},
    "overstretched": overstretched(),
}


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("run", [in_reference, in_onnxruntime, in_openvino])
@pytest.mark.parametrize("name", WEIGHTS)
def test_runtimes_give_the_bytes_back(name, run, opset, tmp_path):
    weight = WEIGHTS[name]
    model, constants = graph_of(weight, opset)
    read = {name for node in model.graph.node for name in node.input}
    assert set(constants) <= read
    found = run(model, tmp_path / "net.onnx")
    assert found.dtype == np.int8
    assert np.array_equal(found, weight.values.numpy())
    stored = StoredWeight.of("net", weight, constants)
    parts = plane_parts(weight)
    assert stored.container == f"planes {'+'.join(map(str, parts))}"
    planes = weight.codes.numel() * weight.bits / 8
    channels = 4 * len(weight.codes) + 4  # offsets and stretches, at most 16 bits each
    assert planes <= stored.bytes <= planes + len(parts) + channels


@pytest.mark.parametrize("run", [in_reference, in_onnxruntime, in_openvino])
@pytest.mark.parametrize("name", ["6 bits", "7 bits, linear", "overstretched"])
def test_unsigned_bytes_come_out_of_planes(name, run, tmp_path):
    model, _ = graph_of(WEIGHTS[name], 21, unsigned=True)
    found = run(model, tmp_path / "net.onnx")
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


def test_unpacking_takes_few_bytes_on_its_way():
    """What a runtime holds when it loads a file is all that nodes give, together."""
    most = {2: 4.1, 3: 7.6, 4: 3.0, 5: 6.6, 6: 7.1, 7: 10.6}
    for bits, limit in most.items():
        weight = weight_of(bits, (64, 64, 3, 3))
        model, _ = graph_of(weight, 21)
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        sizes = 0
        for value in [*inferred.graph.value_info, inferred.graph.output[0]]:
            kind = value.type.tensor_type
            count = np.prod([size.dim_value for size in kind.shape.dim])
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
            sizes += count * np.dtype(dtype).itemsize
        assert sizes <= limit * weight.codes.numel(), bits


def test_bytes_need_no_planes():
    weight = weight_of(8)
    assert plane_parts(weight) == ()
    constants, nodes = stored_bytes("net", weight, 21, "w0")
    assert (list(constants), nodes) == (["net/bytes"], [])
    assert StoredWeight.of("net", weight, constants).container == "int8"
