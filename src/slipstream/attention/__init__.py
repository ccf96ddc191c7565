"""Block-sparse attention: patterns, modules, and unmodified transformers models."""

from slipstream.attention.layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    draw,
)
from slipstream.attention.modules import BertSparseSelfAttention, MatMul, Softmax, SparseSelfAttention
from slipstream.attention.transformers import causal_attention, register, use_sparse_attention
from slipstream.attention.utils import SparseAttentionUtils

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "MatMul",
    "Softmax",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "causal_attention",
    "draw",
    "register",
    "use_sparse_attention",
]
