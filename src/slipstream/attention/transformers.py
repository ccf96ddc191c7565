"""Block-sparse attention in unmodified transformers models: `attn_implementation="slipstream_sparse"`, or through the JSON; and
attention over all scores with the same kernels, also for a model's own forward on CPUs (`causal_attention`).

The pattern is the attribute `slipstream_sparse_attention` of the model's config: a mode and its parameters, as in DeepSpeed's
JSON block. `save_pretrained` keeps it. Sequences of any length are padded to whole blocks. Decoders stay causal inside blocks, too.
Random blocks are drawn with a fixed seed, so every rank, and a later run, has the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.attention.layouts import MODES, layouts_of, sparsity_of
from slipstream.attention.modules import SparseSelfAttention, added
from slipstream.config.huggingface import SPARSE_PATTERN
from slipstream.ops import cpu
from slipstream.ops.block_sparse import MOST_DIM, BlockLayout, block_sparse_attention, takes

NAME = "slipstream_sparse"  # name of the attention function
DENSE = "slipstream_dense"  # name of the function that computes all scores
ALL: Mapping[str, Any] = {"mode": "dense", "block": 16}
_ROWS = 1 << 20  # number of mask elements at a time


def apply_pattern(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Give the model a pattern; only the values that its mode takes are used. Raises ValueError before the model is changed.

    The pattern goes to every `SparseSelfAttention` without its own or, if there is none, to a transformers model. Mode "dense"
    leaves all other models unchanged.
    """
    taken = signature(MODES[values["mode"]]).parameters
    pattern = {"mode": values["mode"]} | {name: value for name, value in values.items() if name in taken}
    modules = [module for module in model.modules() if isinstance(module, SparseSelfAttention)]
    if not modules and pattern["mode"] == "dense":
        return
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
    """Switch a transformers model to block-sparse attention. pattern: as in `sparsity_of`; None: the config's, or mode "fixed".

    Raises ValueError for an unsupported model, before it is changed.
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
        setattr(text, SPARSE_PATTERN, dict(pattern))
    register()
    for module in model.modules():
        own: Any = getattr(module, "config", None)
        if hasattr(own, "_attn_implementation"):
            own._attn_implementation = NAME
    text._attn_implementation = config._attn_implementation = NAME


def register() -> None:
    """Register `attn_implementation="slipstream_sparse"` and `"slipstream_dense"` with transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        for name in (NAME, DENSE):
            ALL_ATTENTION_FUNCTIONS.register(name, _attention)
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask that transformers passes to `_attention`: the keys that each query may see by the model. For a whole sequence:

    None                 all keys, or the previous ones
    bool [B, keys]       False for padding
    int [B, 1, q, 2]     first key and end; also for windows and packed samples
    bool [B, 1, q, k]    other rules
    int8 [B, H, q, k]    for queries with cached keys, whose positions are known only here: includes the pattern
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask_function = causal_mask_function if mask_function is None else mask_function
    is_whole = kv_offset == 0 and (q_length == kv_length or q_length > 1) and int(q_offset) == 0

    def allowed(begin: int, end: int, keys: int) -> Tensor:
        offsets = (q_offset + begin, kv_offset)
        found: Any = sdpa_mask(batch_size, end - begin, keys, *offsets, mask_function, attention_mask, **kwargs | skip)
        return torch.as_tensor(found)  # never None, because skipping is off

    if not is_whole:
        pattern, config = _pattern(kwargs["config"]), kwargs["config"]
        layout = layouts_of(pattern, config.num_attention_heads).of(kv_offset + kv_length, causal=True)
        at = torch.arange(kv_offset + kv_length, device=kwargs.get("device"))
        rows = (q_offset + torch.arange(q_length, device=at.device)) // layout.block
        seen = layout.blocks.to(at.device)[:, rows][:, :, at[kv_offset:] // layout.block]
        return (seen[None] & allowed(0, q_length, kv_length)).to(torch.int8)
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        padding = None if attention_mask is None else attention_mask[:, :q_length].bool()
        return None if padding is None or padding.all() else padding
    return _spans(allowed, q_length)


def _spans(allowed: Callable[[int, int, int], Tensor], length: int) -> Tensor:
    """Where each query's keys begin and end, int [B, 1, L, 2]; if some query's keys have a gap, the mask, bool [B, 1, L, L].

    allowed(begin, end, keys): the mask of these queries, so that only a few rows exist at a time
    """
    parts, step = [], max(1, _ROWS // length)
    for begin in range(0, length, step):
        mask = allowed(begin, min(begin + step, length), length)[:, 0].byte()
        count, first = mask.sum(-1, dtype=torch.int32), mask.argmax(-1)
        last = length - mask.flip(-1).argmax(-1)
        if ((last - first != count) & (count > 0)).any():
            return allowed(0, length, length)
        parts.append(torch.stack([first, first + count], -1).int())
    return torch.cat(parts, 1)[:, None]


def _pattern(config: Any) -> Mapping[str, Any]:
    if config._attn_implementation == DENSE:
        return ALL
    return getattr(config, SPARSE_PATTERN, None) or {}


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
    length, device = query.shape[2], query.device.type
    if torch.is_autocast_enabled(device):  # like torch's attention: rotary positions may have left queries and keys in fp32
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    if attention_mask is not None and attention_mask.dtype == torch.int8:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(query, key, value, attention_mask.bool(), scale=scaling)
        return out.transpose(1, 2), None
    if key.shape[2] != length:
        if length == 1 or (attention_mask is not None and attention_mask.dim() == 4 and attention_mask.dtype != torch.int32):
            raise ValueError(
                f"{type(module).__name__}: {length} queries with {key.shape[2]} keys and a mask of the caller's; where the queries "
                "stand among the keys is not known. Pass a mask [batch, tokens], or the whole sequence without a cache"
            )
        key, value = key[:, :, :length], value[:, :, :length]  # the cache may have room for more
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    layout = layouts_of(_pattern(module.config), query.shape[1]).of(length, causal)
    return attend(query, key, value, layout, attention_mask, scaling, dropout).transpose(1, 2), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: BlockLayout, mask: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    """query [B, H, L, D], key and value [B, KV heads, L, D] -> [B, H, L, D]; L is at most the layout's. mask: from `_mask`, or
    numbers [B, 1, 1 or L, L] that are added to scores."""
    length = query.shape[2]
    keys, spans, bias = _masks(mask)
    more = layout.length - length
    if more:
        query, key, value = (F.pad(x, (0, 0, 0, more)) for x in (query, key, value))
        keys = query.new_zeros(len(query), length, dtype=torch.float32) if keys is None else keys
        keys = F.pad(keys, (0, more), value=float("-inf"))
        bias = None if bias is None else F.pad(bias, (0, more, 0, more if bias.shape[-2] > 1 else 0))
        spans = None if spans is None else F.pad(spans, (0, 0, 0, more))
    options: Any = {"scale": scale, "bias": bias, "key_bias": keys, "spans": spans, "dropout": dropout}
    return block_sparse_attention(query, key, value, layout, **options)[:, :, :length]


def _masks(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(key_bias, spans, bias) from a mask of a whole sequence. Numbers [B, 1, L, L] are added to scores."""
    if mask is None:
        return None, None, None
    if mask.dtype == torch.int32:
        return None, mask[:, 0], None
    numbers = added(mask, "mul" if mask.dtype == torch.bool else "add")
    return (numbers, None, None) if mask.dim() == 2 else (None, None, numbers)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, dropout: float = 0.0) -> Tensor:
    """softmax(scale query key^T) value, where each query sees the keys up to its own. scale: features^-1/2 if None.

    query: [B, heads, L, features], key and value: [B, key heads, L, features]; returns [B, heads, L, features]. In fp32, bf16 and
    fp16 on CPUs, forward and backward take less than half the time of torch's scaled_dot_product_attention. That computes all other
    cases: other devices and dtypes, more than 256 features a head, and compilation by torch. Like torch's, this follows autocast.
    Raises ValueError for shapes that do not fit.
    """
    if query.is_cpu and torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    served = query.is_cpu and query.dtype in cpu.DTYPES and query.shape[-1] <= MOST_DIM
    if not (served and not torch.compiler.is_compiling() and takes(query)):
        return F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=True, scale=scale, enable_gqa=True)
    layout = layouts_of(ALL, 1).of(query.shape[2], causal=True)
    return attend(query, key, value, layout, None, scale, dropout)
