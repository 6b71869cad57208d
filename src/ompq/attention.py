"""Attention of PyTorch, taken apart: projections are layers, products are calls.

``nn.MultiheadAttention`` keeps its projections as parameters and hands them to one
function, in which nothing can be seen or rounded. A network is given layers in their
place before it is observed; everything else then treats it like any other.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.recording import copied, watch
from ompq.samples import Samples, SamplesLike, attached, model_device, to_device

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class LayeredAttention(nn.MultiheadAttention):
    """Computes what ``nn.MultiheadAttention`` does, with layers for its projections.

    It has one layer ``in_proj`` for queries, keys and values that are projected from
    one tensor, else ``q_proj``, ``k_proj`` and ``v_proj``.
    """

    def forward(  # noqa: PLR0913, as in nn.MultiheadAttention
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: FBT001, FBT002
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: FBT001, FBT002
        is_causal: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the probabilities if they are wanted.

        ``is_causal`` only says of the mask, which must be given, that it is causal.
        """
        swapped, single = not self.batch_first and query.dim() == 3, query.dim() == 2
        projected = self._projected(query, key, value)
        if swapped:
            projected = [each.transpose(0, 1) for each in projected]
        if single:
            projected = [each[None] for each in projected]
        q, k, v = (self._heads(each) for each in self._extended(projected))
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            logits = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
            weights = (logits if mask is None else logits + mask).softmax(-1)
            weights = F.dropout(weights, dropout, self.training)
            output = weights @ v
            # A sum: a mean would be taken for a layer that reads quantized values.
            weights = weights.sum(1) / len(q[0]) if average_attn_weights else weights
        else:
            output = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        output = output.transpose(1, 2).flatten(2)
        if single:
            output, weights = output[0], None if weights is None else weights[0]
        output = output.transpose(0, 1) if swapped else output
        return self.out_proj(output), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return queries, keys and values, laid out as they are given."""
        given = (query, key, value)
        if "in_proj" not in self._modules:
            layers = (self.get_submodule(name) for name in _PROJECTIONS)
            return [layer(x) for layer, x in zip(layers, given, strict=True)]
        layer = self.get_submodule("in_proj")
        if query is key and key is value:
            return list(layer(query).chunk(3, -1))
        return [layer(x).chunk(3, -1)[part] for part, x in enumerate(given)]

    def _extended(self, projected: list[Tensor]) -> list[Tensor]:
        """Add what the module adds to keys and values, (N, length, E)."""
        query, key, value = projected
        if self.bias_k is not None and self.bias_v is not None:
            key = torch.cat([key, self.bias_k.expand(len(key), 1, -1)], 1)
            value = torch.cat([value, self.bias_v.expand(len(value), 1, -1)], 1)
        if self.add_zero_attn:
            key, value = (F.pad(each, (0, 0, 0, 1)) for each in (key, value))
        return [query, key, value]

    def _heads(self, x: Tensor) -> Tensor:
        """Split (N, length, E) into (N, heads, length, E / heads)."""
        return x.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)

    def _mask(
        self, mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor
    ) -> Tensor | None:
        """Return what is added to the logits, (N, heads, L, S) or broadcast to it."""
        masks = []
        if mask is not None:  # (L, S) or (N * heads, L, S)
            several = mask.dim() == 3 and len(mask) > 1
            each = mask.reshape(*query.shape[:2], *mask.shape[1:]) if several else mask
            masks.append(each)
        if padding is not None:  # (N, S) or (S,)
            masks.append(padding.reshape(-1, 1, 1, padding.shape[-1]))
        found = None
        for one in masks:
            if one.dtype == torch.bool:
                zeros = torch.zeros(one.shape, dtype=query.dtype, device=one.device)
                one = zeros.masked_fill(one, float("-inf"))
            # Nothing hides what the module itself added to the keys.
            one = F.pad(one, (0, key.shape[2] - one.shape[-1]))
            found = one if found is None else found + one
        return found


def with_layers(model: nn.Module, samples: SamplesLike) -> nn.Module:
    """Return a network in which every ``nn.MultiheadAttention`` has layers.

    Its weights are the very weights of the network, which is left as it is. A network
    without such modules is returned itself.

    Args:
        samples: The first one shows which modules project one tensor three times.
    """
    whole = _whole(model)
    if not whole:
        return model
    several: set[str] = set()

    def see(name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [*args, *(kwargs[k] for k in ("query", "key", "value") if k in kwargs)]
        if given[0] is not given[1] or given[1] is not given[2]:
            several.add(name)

    hooks = (
        module.register_forward_pre_hook(partial(see, name), with_kwargs=True)
        for name, module in whole.items()
    )
    try:
        batch = to_device(Samples.of(samples).first_batch(1), model_device(model))
        with attached(hooks):
            watch(model, batch)  # which keeps fused kernels from running
    except Exception:
        return model  # it fails again, and with a message, when it is observed
    return _taken_apart(model, whole.keys() - several)


def with_named_layers(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Return such a network whose layers have these names, as far as it has them."""
    whole = _whole(model)
    together = [name for name in whole if f"{name}.in_proj".lstrip(".") in names]
    return _taken_apart(model, together) if whole else model


def _whole(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """Return the attentions that can be taken apart: subclasses may compute more."""
    modules = model.named_modules()
    return {n: m for n, m in modules if type(m) is nn.MultiheadAttention}


def _taken_apart(model: nn.Module, together: Collection[str]) -> nn.Module:
    made = copied(model, share_weights=True)
    for name, module in _whole(made).items():
        _take_apart(module, together=name in together)
    for part in made.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # only fused attention takes them
    return made


def _take_apart(module: nn.MultiheadAttention, *, together: bool) -> None:
    """Give an attention layers that hold its parameters, in place."""
    module.__class__ = LayeredAttention
    keys = ("in_proj_weight", "in_proj_bias", *(f"{n}_weight" for n in _PROJECTIONS))
    packed, bias, *weights = (module._parameters.get(key) for key in keys)
    module._parameters |= dict.fromkeys(keys)
    if packed is not None and together:
        module.add_module("in_proj", _linear(packed, bias).train(module.training))
        return
    parts = weights if packed is None else packed.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    for name, *given in zip(_PROJECTIONS, parts, biases, strict=True):
        module.add_module(name, _linear(*given).train(module.training))


def _linear(weight: Tensor | None, bias: Tensor | None) -> nn.Linear:
    """Return a layer with a weight, (out, in), and a bias that are given."""
    assert weight is not None  # an attention has one packed weight, or all three
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = _parameter(weight)
    layer.register_parameter("bias", None if bias is None else _parameter(bias))
    return layer


def _parameter(tensor: Tensor) -> nn.Parameter:
    """Return a parameter itself; a part of one as a parameter of its own."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
