"""Block-sparse attention in unmodified models of transformers: `attn_implementation="slipstream_sparse"`, or by the JSON.

The pattern is the attribute `slipstream_sparse_attention` of the model's config: a mode and its parameters, as in DeepSpeed's
JSON block; `save_pretrained` keeps it. Sequences of any length are padded to whole blocks. Decoders stay causal inside blocks, too.
Random blocks are drawn from a fixed seed, so that every rank, and a later run, has the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.attention.layouts import MODES, layouts_of, sparsity_of
from slipstream.attention.modules import SparseSelfAttention
from slipstream.ops.block_sparse import BlockLayout, block_sparse_attention

NAME = "slipstream_sparse"  # of the attention function
PATTERN = "slipstream_sparse_attention"  # attribute of a model's config


def apply_pattern(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Give the model a pattern, of which only the values that its mode takes count. Raises ValueError before it is changed.

    It goes to every `SparseSelfAttention` without one of its own and, if there is none, to a model of transformers.
    """
    taken = signature(MODES[values["mode"]]).parameters
    pattern = {"mode": values["mode"]} | {name: value for name, value in values.items() if name in taken}
    modules = [module for module in model.modules() if isinstance(module, SparseSelfAttention)]
    if not modules and not hasattr(getattr(model, "config", None), "_attn_implementation"):
        raise ValueError(
            f"sparse_attention: {type(model).__name__} has no slipstream.attention.SparseSelfAttention and is no model of"
            " transformers; use that module in its attention, or drop the block"
        )
    if not modules:
        use_sparse_attention(model, pattern)
    sparsity_of(pattern, 1)
    for module in modules:
        if module.sparsity_config is None:
            module.pattern = pattern


def use_sparse_attention(model: nn.Module, pattern: Mapping[str, Any] | None = None) -> None:
    """Point a model of transformers to block-sparse attention. pattern: as in `sparsity_of`; None: the config's, or mode "fixed".

    Raises ValueError for a model that cannot be served, before it is changed.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{type(model).__name__} has cross-attention, which block-sparse attention does not serve: use an encoder or a decoder"
        )
    if not getattr(model, "_supports_sdpa", False):
        raise ValueError(f"{type(model).__name__} does not compute attention through transformers' attention functions")
    text = config.get_text_config()
    if pattern is not None:
        sparsity_of(pattern, text.num_attention_heads)
        setattr(text, PATTERN, dict(pattern))
    register()
    for module in model.modules():
        own: Any = getattr(module, "config", None)
        if hasattr(own, "_attn_implementation"):
            own._attn_implementation = NAME
    text._attn_implementation = config._attn_implementation = NAME


def register() -> None:
    """Tell transformers of `attn_implementation="slipstream_sparse"`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """What padding allows, bool [B, keys]; what windows and packed samples allow beside, bool [B, 1, queries, keys]; None: all."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    if mask_function not in (None, causal_mask_function, bidirectional_mask_function):
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(batch_size, q_length, kv_length, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:].bool()
    return None if attention_mask.all() else attention_mask


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query [b, h, s, d], key and value [b, key heads, s, d]; returns [b, s, h, d]."""
    if softcap is not None or kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} caps its scores or has sinks, which block-sparse attention does not serve")
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    pattern = getattr(module.config, PATTERN, None) or {}
    heads = query.shape[1]
    length = key.shape[2]
    layout = layouts_of(pattern, heads).of(length, causal)
    if query.shape[2] != length:
        return _last(query, key, value, layout, attention_mask, scaling), None
    keys = bias = None
    if attention_mask is not None:
        allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        forbidden = torch.zeros_like(allowed, dtype=torch.float32).masked_fill_(~allowed, float("-inf"))
        keys, bias = (forbidden, None) if forbidden.dim() == 2 else (None, forbidden)
    more = layout.length - length
    if more:
        query, key, value = (F.pad(x, (0, 0, 0, more)) for x in (query, key, value))
        keys = query.new_zeros(len(query), length, dtype=torch.float32) if keys is None else keys
        keys = F.pad(keys, (0, more), value=float("-inf"))
        bias = None if bias is None else F.pad(bias, (0, more, 0, more))
    out = block_sparse_attention(query, key, value, layout, scale=scaling, bias=bias, key_bias=keys, dropout=dropout)
    return out[:, :, :length].transpose(1, 2), None


def _last(query: Tensor, key: Tensor, value: Tensor, layout: BlockLayout, mask: Tensor | None, scaling: float | None) -> Tensor:
    """The last queries of a sequence whose earlier keys are cached: the same pattern, computed densely."""
    count, length = query.shape[2], key.shape[2]
    at = torch.arange(length, device=query.device)
    rows = layout.blocks.to(query.device)[:, at[-count:] // layout.block][:, :, at // layout.block]  # [1 or heads, queries, keys]
    if layout.causal:
        rows = rows & (at[None, :] <= at[-count:, None])
    allowed = rows[None]
    if mask is not None:
        allowed = allowed & (mask[:, None, None, :] if mask.dim() == 2 else mask.bool())
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(query, key, value, allowed, scale=scaling).transpose(1, 2)
