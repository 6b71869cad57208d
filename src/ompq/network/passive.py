"""Operations that only move, clip or merge values."""

NORMS = {"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}
ACTIVATIONS = {
    "relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu",
    "selu", "celu", "leaky_relu", "prelu", "mish", "sigmoid", "tanh", "softplus",
    "clamp", "clip", "clamp_min", "clamp_max", "threshold",
}  # fmt: skip
LAYOUT = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "contiguous",
    "clone", "detach", "to", "type_as", "permute", "transpose", "movedim", "view",
    "reshape", "flatten", "unflatten", "squeeze", "unsqueeze",
}  # fmt: skip
SCALINGS = {"add", "sub", "mul", "div"}  # by a constant or a parameter
PARTS = {*LAYOUT, "getitem", "chunk", "split", "unbind"}
REARRANGING = {*PARTS, *SCALINGS, "neg", "cat", "stack"}
PASSED = NORMS | ACTIVATIONS | LAYOUT
# Products of two activations: arithmetic that no weight's bits describe.
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"}
MOST_OPERANDS = 4  # of a product: attention's queries, keys, values, probabilities
