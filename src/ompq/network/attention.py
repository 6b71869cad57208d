"""``nn.MultiheadAttention`` rewritten so that its projections are ordinary layers.

PyTorch's module passes its projections as parameters to one fused function, in which
nothing can be observed or rounded. They are replaced by linear layers before a network
is observed, so that no other module needs to know about them.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.network.observation import copy_network, watch
from ompq.samples import (
    Samples,
    SamplesLike,
    attached,
    check_network,
    model_device,
    to_device,
)

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class LayeredAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with linear layers for its projections.

    There is one layer ``in_proj`` if queries, keys and values are projected from the
    same tensor, else there are ``q_proj``, ``k_proj`` and ``v_proj``.
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
        """Return the output, and the probabilities if ``need_weights``.

        ``is_causal`` is only a hint that the mask, which must be given, is causal.
        """
        batch_second = not self.batch_first and query.dim() == 3
        unbatched = query.dim() == 2
        projected = self._projected(query, key, value)
        if batch_second:
            projected = [each.transpose(0, 1) for each in projected]
        if unbatched:
            projected = [each[None] for each in projected]
        # (N, length, E) → (N, heads, length, E / heads)
        q, k, v = (
            x.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for x in self._extended(projected)
        )
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            logits = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
            weights = (logits if mask is None else logits + mask).softmax(-1)
            weights = F.dropout(weights, dropout, self.training)
            output = weights @ v
            # A sum, because activations are quantized before every mean.
            weights = weights.sum(1) / len(q[0]) if average_attn_weights else weights
        else:
            output = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        output = output.transpose(1, 2).flatten(2)
        if unbatched:
            output, weights = output[0], None if weights is None else weights[0]
        output = output.transpose(0, 1) if batch_second else output
        return self.out_proj(output), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return projected queries, keys and values, in the layout of the inputs."""
        given = (query, key, value)
        if "in_proj" not in self._modules:
            layers = (self.get_submodule(name) for name in _PROJECTIONS)
            return [layer(x) for layer, x in zip(layers, given, strict=True)]
        layer = self.get_submodule("in_proj")
        if query is key and key is value:
            return list(layer(query).chunk(3, -1))
        return [layer(x).chunk(3, -1)[part] for part, x in enumerate(given)]

    def _extended(self, projected: list[Tensor]) -> list[Tensor]:
        """Append ``bias_k``, ``bias_v`` and zeros, if used; tensors (N, length, E)."""
        query, key, value = projected
        if self.bias_k is not None and self.bias_v is not None:
            key = torch.cat([key, self.bias_k.expand(len(key), 1, -1)], 1)
            value = torch.cat([value, self.bias_v.expand(len(value), 1, -1)], 1)
        if self.add_zero_attn:
            key, value = (F.pad(each, (0, 0, 0, 1)) for each in (key, value))
        return [query, key, value]

    def _mask(
        self, mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor
    ) -> Tensor | None:
        """Return the term to add to the logits; it broadcasts to (N, heads, L, S)."""
        masks = []
        if mask is not None:  # (L, S) or (N * heads, L, S)
            by_head = mask.dim() == 3 and len(mask) > 1
            shape = (*query.shape[:2], *mask.shape[1:]) if by_head else mask.shape
            masks.append(mask.reshape(shape))
        if padding is not None:  # (N, S) or (S,)
            masks.append(padding.reshape(-1, 1, 1, padding.shape[-1]))
        total = None
        for each in masks:
            if each.dtype == torch.bool:
                zeros = torch.zeros(each.shape, dtype=query.dtype, device=each.device)
                each = zeros.masked_fill(each, float("-inf"))
            # Keys that the module itself appended are never masked.
            each = F.pad(each, (0, key.shape[2] - each.shape[-1]))
            total = each if total is None else total + each
        return total


def with_layers(model: nn.Module, samples: SamplesLike) -> nn.Module:
    """Return a network in which every ``nn.MultiheadAttention`` has linear layers.

    It shares its weights with the given network, which is not modified. A network
    without such modules is returned itself.

    Args:
        samples: The first one shows which modules project the same tensor three times.
    """
    attentions = _attentions(model)
    if not attentions:
        return model
    separate: set[str] = set()  # those whose query, key and value differ

    def compare(name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [*args, *(kwargs[k] for k in ("query", "key", "value") if k in kwargs)]
        if given[0] is not given[1] or given[1] is not given[2]:
            separate.add(name)

    hooks = (
        module.register_forward_pre_hook(partial(compare, name), with_kwargs=True)
        for name, module in attentions.items()
    )
    try:
        batch = to_device(Samples.of(samples).first_batch(1), model_device(model))
        with attached(hooks):
            watch(model, batch)  # which keeps fused kernels from running
    except Exception:
        return model  # observing it will fail in the same way and explain the error
    return _rewritten(model, attentions.keys() - separate)


def with_named_layers(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Return a network as from :func:`with_layers`, given the names of its layers."""
    attentions = _attentions(model)
    packed = [name for name in attentions if f"{name}.in_proj".lstrip(".") in names]
    return _rewritten(model, packed) if attentions else model


def _attentions(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """Return the attention modules, without subclasses, which may compute more."""
    check_network(model)
    modules = model.named_modules()
    return {n: m for n, m in modules if type(m) is nn.MultiheadAttention}


def _rewritten(model: nn.Module, packed: Collection[str]) -> nn.Module:
    """Return a network with linear layers, one ``in_proj`` in modules of ``packed``."""
    result = copy_network(model, share_weights=True)
    for name, module in _attentions(result).items():
        _add_layers(module, packed=name in packed)
    for part in result.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # only fused attention accepts them
    return result


def _add_layers(module: nn.MultiheadAttention, *, packed: bool) -> None:
    """Move the parameters of an attention module into linear layers, in place."""
    module.__class__ = LayeredAttention
    keys = ("in_proj_weight", "in_proj_bias", *(f"{n}_weight" for n in _PROJECTIONS))
    weight, bias, *weights = (module._parameters.get(key) for key in keys)
    module._parameters |= dict.fromkeys(keys)
    if weight is not None and packed:
        module.add_module("in_proj", _linear(weight, bias).train(module.training))
        return
    parts = weights if weight is None else weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    for name, *given in zip(_PROJECTIONS, parts, biases, strict=True):
        module.add_module(name, _linear(*given).train(module.training))


def _linear(weight: Tensor | None, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with this weight, (out, in), and bias, (out,)."""
    assert weight is not None  # there is one packed weight, or there are three
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = _parameter(weight)
    layer.register_parameter("bias", None if bias is None else _parameter(bias))
    return layer


def _parameter(tensor: Tensor) -> nn.Parameter:
    """Return a tensor, which may be part of a parameter, as a parameter."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
