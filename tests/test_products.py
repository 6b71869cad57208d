import pytest
import torch
from torch.nn import functional as F

from ompq.quantization.products import rounded_product


def attention_cases():
    mask = torch.randn(6, 6).tril() > 0.1
    mask.fill_diagonal_(True)
    return [
        {},
        {"attn_mask": mask},
        {"attn_mask": torch.linspace(-3, 3, 36).reshape(6, 6)},
        {"is_causal": True},
        {"scale": 0.3},
        {"enable_gqa": True},
    ]


@pytest.mark.parametrize("settings", attention_cases(), ids=lambda s: "".join(s))
def test_without_rounding_attention_is_pytorchs(settings):
    heads = 2 if "enable_gqa" in settings else 4
    q, k, v = torch.randn(3, 4, 6, 5), *torch.randn(2, 3, heads, 6, 5)
    function = F.scaled_dot_product_attention
    found = rounded_product(function, (q, k), {"value": v, **settings}, lambda _, t: t)
    torch.testing.assert_close(found, function(q, k, v, **settings))
