"""Sparse self-attention as modules, and the products and softmax of block-sparse matrices, by DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slipstream.attention.layouts import SparsityConfig, layouts_of
from slipstream.ops.block_sparse import BlockLayout, block_sparse_attention

MaskMode = Literal["add", "mul"]


class SparseSelfAttention(nn.Module):
    """Attention over the blocks of a layout: softmax(q k^T / sqrt(d) + masks) v.

    sparsity_config: None: the engine's (`sparse_attention` in its JSON). A mask of mode 'mul' forbids where it is 0; one of mode
    'add' is added to scores. max_seq_length: sequences use the upper left part of the layout for this length, the buffer
    `master_layout`, which an engine copies from the first rank.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        _check_modes(key_padding_mask_mode=key_padding_mask_mode, attn_mask_mode=attn_mask_mode)
        self.key_padding_mask_mode, self.attn_mask_mode, self.max_seq_length = key_padding_mask_mode, attn_mask_mode, max_seq_length
        self.sparsity_config: SparsityConfig | None = None
        self.pattern: Mapping[str, Any] | None = None  # the engine's, for a module without a config
        self.dropout = 0.0  # of probabilities, in training
        self.causal = False  # no query sees a later key, also in blocks on the diagonal
        self._layouts: dict[tuple[int, int, bool], BlockLayout] = {}
        if sparsity_config is not None:
            self.configure(sparsity_config)

    def configure(self, sparsity_config: SparsityConfig) -> None:
        """Set the pattern. Raises ValueError if its blocks do not divide `max_seq_length`."""
        layout = sparsity_config.make_layout(self.max_seq_length)
        self.sparsity_config = sparsity_config
        self.register_buffer("master_layout", layout)
        self.forget_layouts()

    def forget_layouts(self) -> None:
        """Read `master_layout` again, after its values were changed in a way that version counters do not show."""
        self._layouts.clear()

    def get_layout(self, length: int, num_heads: int = 1) -> BlockLayout:
        """The layout for sequences of this length. Raises ValueError if it is too long, or the block size does not divide it."""
        config = self.sparsity_config
        if config is None and self.pattern is not None:
            layouts = layouts_of(self.pattern, num_heads)
            layouts.config.setup_layout(length)
            return layouts.of(length, self.causal)
        if config is None:
            raise ValueError("SparseSelfAttention has no pattern: pass sparsity_config=, or set sparse_attention in the JSON")
        if length > self.max_seq_length or length % config.block:
            raise ValueError(
                f"a sequence of {length} tokens: SparseSelfAttention takes multiples of the block ({config.block}), at most "
                f"max_seq_length ({self.max_seq_length}); SparseAttentionUtils.pad_to_block_size pads"
            )
        key = (length, self.master_layout._version, self.causal)
        if key not in self._layouts:
            blocks = length // config.block
            self._layouts = {key: BlockLayout(self.master_layout[:, :blocks, :blocks], config.block, causal=self.causal)}
        return self._layouts[key]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """query, value: [B, H, L, d]; key: the same, or [B, H, d, L]. Returns [B, H, L, d]. Raises ValueError.

        rpe: relative positions, added to scores, broadcastable to [B, H, L, L]; it may require a gradient. key_padding_mask: [B,
        L], or with dimensions of 1 between. attn_mask: [L, L], or broadcastable to [B, H, L, L].
        """
        if key.shape != value.shape and key.transpose(-1, -2).shape == value.shape:
            key = key.transpose(-1, -2)
        if query.dim() != 4:
            raise ValueError(f"query has shape {tuple(query.shape)}; it must be [batch, heads, tokens, features]")
        batch, heads, length, _ = query.shape
        layout, config = self.get_layout(length, heads), self.sparsity_config
        # Slices have some of the heads; a layout shared by all heads fits them
        if config is not None and (config.different_layout_per_head or len(layout.blocks) > 1):
            check_heads(heads, config, "query")
        check_of_keys("key_padding_mask", key_padding_mask, batch, length)
        for name, given in (("rpe", rpe), ("attn_mask", attn_mask)):
            check_added(name, given, (batch, heads, length, length))
        keys = None
        if key_padding_mask is not None:
            keys = added(key_padding_mask.reshape(batch, length), self.key_padding_mask_mode)
        bias = rpe
        if attn_mask is not None:
            mask = added(attn_mask, self.attn_mask_mode)
            bias = mask if rpe is None else rpe + mask
        dropout = self.dropout if self.training else 0.0
        return block_sparse_attention(query, key, value, layout, bias=bias, key_bias=keys, dropout=dropout)


def check_heads(heads: int, config: SparsityConfig, whose: str) -> None:
    """Raise ValueError if the number of heads of `whose` is not the pattern's."""
    if heads != config.num_heads:
        raise ValueError(
            f"{whose} has {heads} heads, and {type(config).__name__} has num_heads={config.num_heads}: make it for {heads} heads"
        )


def check_added(name: str, value: Tensor | None, scores: Sequence[int]) -> None:
    """Raise ValueError for a value that does not broadcast to scores of shape [B, H, L, keys]."""
    if value is None:
        return
    own = (1,) * (4 - value.dim()) + tuple(value.shape)
    if len(own) > 4 or any(size not in (1, whole) for size, whole in zip(own, scores, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; it must broadcast to [batch, heads, tokens, tokens], {tuple(scores)}"
        )


def check_of_keys(name: str, mask: Tensor | None, batch: int, keys: int) -> None:
    """Raise ValueError for a key mask that is not [B, keys], or that with dimensions of 1 between."""
    if mask is not None and (mask.shape[:1] != (batch,) or mask.shape[-1:] != (keys,) or mask.numel() != batch * keys):
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}; it must be [batch, tokens], {(batch, keys)}, or so with dimensions of 1 between"
        )


def _check_modes(**modes: str) -> None:
    for name, mode in modes.items():
        if mode not in ("add", "mul"):
            raise ValueError(f"{name} ({mode!r}) must be 'add' or 'mul'")


def added(mask: Tensor, mode: MaskMode) -> Tensor:
    """The mask as fp32 values that are added to scores."""
    return mask.float() if mode == "add" else torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask == 0, float("-inf"))


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention (`query`, `key`, `value` of the model's config) over the blocks of a layout."""

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None, max_seq_length: int | None = None) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size ({config.hidden_size}) is no multiple of num_attention_heads ({config.num_attention_heads})"
            )
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        if sparsity_config is not None:
            check_heads(config.num_attention_heads, sparsity_config, type(config).__name__)
        length = getattr(config, "max_position_embeddings", 2048) if max_seq_length is None else max_seq_length
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, max_seq_length=length)
        self.sparse_self_attention.dropout = getattr(config, "attention_probs_dropout_prob", 0.0)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
        """hidden_states: [B, L, h]. attention_mask: additive, [B, 1, 1, L] or [B, L]; attn_mask: additive, [B, 1, L, L].

        Returns [B, L, h].
        """
        heads = (*hidden_states.shape[:2], self.num_attention_heads, self.attention_head_size)
        query, key, value = (each(hidden_states).view(heads).transpose(1, 2) for each in (self.query, self.key, self.value))
        batch, length = hidden_states.shape[:2]
        check_of_keys("attention_mask", attention_mask, batch, length)
        check_added("attn_mask", attn_mask, (batch, self.num_attention_heads, length, length))
        masks = {"key_padding_mask": attention_mask, "rpe": attn_mask}  # both are added
        context = self.sparse_self_attention(query, key, value, **masks)
        return context.transpose(1, 2).reshape(hidden_states.shape)


class _Blocks:
    """The positions of the blocks of a block-sparse matrix [B, blocks, block, block], in the order of the layout's nonzeros."""

    def __init__(self, layout: Tensor, block: int) -> None:
        if layout.dim() != 3:
            raise ValueError(f"a layout has shape {tuple(layout.shape)}; it must be [heads, rows, columns]")
        self.layout, self.block = layout, block
        self.head, self.row, self.column = layout.nonzero().cpu().unbind(1)
        self.heads, self.rows, self.columns = layout.shape

    def check(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1:] != (len(self.head), self.block, self.block):
            raise ValueError(
                f"a block-sparse matrix has shape {tuple(x.shape)}; the layout has {len(self.head)} blocks of {self.block}"
            )
        return x


class MatMul:
    """Products with one block-sparse matrix: 'sdd' computes the layout's blocks of dense @ dense, 'dsd' is sparse @ dense, 'dds' is
    dense @ sparse. Dense: [B, H, M, N]; sparse: [B, blocks, block, block]. trans_a, trans_b: transpose a or b first.
    """

    def __init__(
        self,
        layout: Tensor,
        block: int,
        mode: Literal["sdd", "dsd", "dds"],
        trans_a: bool = False,
        trans_b: bool = False,
        bench: bool = False,
    ) -> None:
        if mode not in ("sdd", "dsd", "dds"):
            raise ValueError(f"mode ({mode!r}) must be 'sdd', 'dsd' or 'dds'")
        self.at, self.block, self.mode, self.trans_a, self.trans_b = _Blocks(layout, block), block, mode, trans_a, trans_b

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        at, block = self.at, self.block
        self._check(a, b)
        if self.mode == "dds":  # a b is the transpose of b^T a^T
            return self._times(b, not self.trans_b, a if self.trans_a else a.mT).mT.contiguous()
        b = b.mT if self.trans_b else b
        if self.mode == "dsd":
            return self._times(a, self.trans_a, b)
        rows = (a.mT if self.trans_a else a).unflatten(2, (-1, block))[:, at.head, at.row]  # [B, blocks, block, K]
        return rows @ b.unflatten(3, (-1, block)).transpose(2, 3)[:, at.head, at.column]

    def _times(self, sparse: Tensor, turned: bool, dense: Tensor) -> Tensor:
        """The block-sparse matrix, or its transpose if `turned`, times [B, H, M, N]."""
        at = self.at
        row, column, count = (at.column, at.row, at.columns) if turned else (at.row, at.column, at.rows)
        parts = (sparse.mT if turned else sparse) @ dense.unflatten(2, (-1, self.block))[:, at.head, column]
        sums = parts.new_zeros(len(parts), at.heads * count, *parts.shape[2:])
        sums = sums.index_add(1, (at.head * count + row).to(parts.device), parts)
        return sums.unflatten(1, (at.heads, count)).flatten(2, 3)

    def _check(self, a: Tensor, b: Tensor) -> None:
        """Raise ValueError for operands whose heads or sizes do not fit the layout or each other."""
        at, sizes = self.at, []
        for name, x, turned in (("a", a, self.trans_a), ("b", b, self.trans_b)):
            if self.mode == {"a": "dsd", "b": "dds"}.get(name):
                at.check(x)
                size = (at.rows * self.block, at.columns * self.block)
            elif x.dim() != 4 or x.shape[1] != at.heads:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be [batch, heads, rows, columns] of {at.heads} heads")
            else:
                size = (x.shape[2], x.shape[3])
            sizes.append(size[::-1] if turned else size)
        (rows, inner), (other, columns) = sizes
        whole = (at.rows * self.block, at.columns * self.block)
        if len(a) != len(b) or inner != other or (self.mode == "sdd" and (rows, columns) != whole):
            needed = f", and their product {whole}, as the layout" if self.mode == "sdd" else ""
            raise ValueError(
                f"a of {len(a)} times {(rows, inner)} and b of {len(b)} times {(other, columns)}: batches and inner sizes must be "
                f"alike{needed}"
            )


class Softmax:
    """The softmax of a block-sparse matrix over the columns of its layout."""

    def __init__(self, layout: Tensor, block: int, bench: bool = False) -> None:
        self.at, self.block = _Blocks(layout, block), block

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "add",
    ) -> Tensor:
        """x: [B, blocks, block, block]. rpe: broadcastable to [B, H, L, L]. key_padding_mask: [B, L]. attn_mask: [L, L].

        Raises ValueError for other shapes.
        """
        at, block = self.at, self.block
        _check_modes(key_padding_mask_mode=key_padding_mask_mode, attn_mask_mode=attn_mask_mode)
        scores = (len(x), at.heads, at.rows * block, at.columns * block)
        check_added("rpe", rpe, scores)
        check_of_keys("key_padding_mask", key_padding_mask, len(x), scores[3])
        if attn_mask is not None and attn_mask.shape != scores[2:]:
            raise ValueError(f"attn_mask has shape {tuple(attn_mask.shape)}; it must be [tokens, tokens], {scores[2:]}")
        score = at.check(x).float() * scale
        if rpe is not None:
            whole = rpe.expand(scores)
            score = score + whole.unflatten(3, (-1, block)).unflatten(2, (-1, block)).transpose(3, 4)[:, at.head, at.row, at.column]
        if key_padding_mask is not None:
            keys = added(key_padding_mask, key_padding_mask_mode).reshape(len(x), -1, block)
            score = score + keys[:, at.column, None]
        if attn_mask is not None:
            mask = added(attn_mask, attn_mask_mode).unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2)
            score = score + mask[at.row, at.column]
        place, shape = (at.head * at.rows + at.row).to(x.device), (len(x), at.heads * at.rows, block)
        largest = torch.full(shape, -1e30, device=x.device)
        index = place[None, :, None].expand(len(x), -1, block)
        largest = largest.scatter_reduce(1, index, score.detach().amax(-1), "amax")
        share = torch.exp(score - largest[:, place, :, None])
        total = share.new_zeros(shape).index_add(1, place, share.sum(-1))
        return (share / total.clamp_min(1e-30)[:, place, :, None]).to(x.dtype)
