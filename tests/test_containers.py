import numpy as np
import pytest
import torch

from ompq.integer.arithmetic import CodeGrid, IntegerWeight
from ompq.onnx.containers import pack_plane, plane_parts, planes, unpack_function
from ompq.ranges import search_weight

onnx = pytest.importorskip("onnx")


def weight_of(bits, shape=(5, 3, 3, 3)):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
    grid = search_weight(weight, bits)
    source = CodeGrid(0.02, 0, 8)
    return IntegerWeight.of(grid.quantize(weight), grid, None, source)


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


@pytest.mark.parametrize("bits", range(2, 8))
def test_function_in_the_file_gives_the_bytes_back(bits):
    from onnx import TensorProto, helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    weight = weight_of(bits)
    assert sum(plane_parts(weight)) == bits
    tensors = {f"p{i}": plane for i, plane in enumerate(planes(weight))}
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert size <= weight.codes.numel() * bits / 8 + len(tensors)
    tensors["offset"] = weight.offset.numpy().astype(np.uint8).reshape(-1, 1, 1, 1)
    tensors["stretch"] = weight.stretch.numpy().astype(np.uint8).reshape(-1, 1, 1, 1)
    node = helper.make_node(
        f"Weight{bits}",
        list(tensors),
        ["weight"],
        domain="ompq",
        count=[weight.codes.numel()],
        shape=list(weight.codes.shape),
    )
    output = helper.make_tensor_value_info("weight", TensorProto.INT8, [5, 3, 3, 3])
    inits = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph([node], "g", [], [output], inits)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ompq", 1)]
    functions = [unpack_function(bits, 21)]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions)
    (found,) = ReferenceEvaluator(model).run(None, {})
    assert np.array_equal(found, weight.values.numpy())


def test_bytes_need_no_planes():
    assert plane_parts(weight_of(8)) == ()
    assert planes(weight_of(8)) == []
