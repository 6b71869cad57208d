import copy

import pytest
import torch
from torch import nn
from torchvision import ops

from ompq.network.folding import fold_norm, norm_affine, norm_scales


def test_scales_of_norms_are_what_they_multiply_by():
    norms = [
        nn.BatchNorm2d(3, eps=0.1),
        nn.BatchNorm2d(5, affine=False),
        ops.FrozenBatchNorm2d(4),
    ]
    for norm in norms:
        nn.init.uniform_(norm.running_var, 0.5, 2)
        nn.init.normal_(norm.running_mean)
        if norm.weight is not None:
            nn.init.uniform_(norm.weight, -1, 1)
    for norm, scale in zip(norms, norm_scales(norms), strict=True):
        low = torch.zeros(1, len(scale), 1, 1)
        step = norm.eval()(low + 1) - norm(low)
        torch.testing.assert_close(scale, step.flatten(), atol=1e-6, rtol=1e-5)
    assert norm_scales([]) == []


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False),
        nn.Linear(4, 6),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_folding_equals_layer_then_norm(layer, affine):
    kind = nn.BatchNorm1d if isinstance(layer, nn.Linear) else nn.BatchNorm2d
    norm = kind(6, affine=affine).eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    x = torch.randn(
        3, 4, *((5, 5) if kind is nn.BatchNorm2d else ()), generator=generator
    )
    alone = copy.deepcopy(layer)
    weight, bias = fold_norm(layer, norm)
    alone.weight, alone.bias = nn.Parameter(weight), nn.Parameter(bias)
    with torch.no_grad():
        torch.testing.assert_close(alone(x), norm(layer(x)), atol=1e-5, rtol=1e-5)
    scale, shift = norm_affine(norm)
    assert scale.shape == shift.shape == (6,)
