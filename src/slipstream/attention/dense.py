"""Attention over all scores with the kernels of block-sparse attention, for a model's own forward on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.attention.layouts import layouts_of
from slipstream.attention.transformers import ALL, attend
from slipstream.ops import cpu
from slipstream.ops.block_sparse import MOST_DIM, takes


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
