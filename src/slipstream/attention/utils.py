"""Utilities for transformers' BERT and RoBERTa with sparse attention: longer positions, other attention, padding to blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.attention.layouts import FixedSparsityConfig, SparsityConfig
from slipstream.attention.modules import BertSparseSelfAttention, added

_RESERVED = {"bert": 0, "roberta": 2, "xlm-roberta": 2}  # number of first rows of the position table that are no positions


class SparseAttentionUtils:
    """Static functions, like DeepSpeed's."""

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Repeat the learned positions of a BERT or RoBERTa until there are `max_position`. Returns the model."""
        base, reserved = _encoder(model)
        config: Any = model.config
        embeddings = base.embeddings
        weight = embeddings.position_embeddings.weight
        special, learned = weight[:reserved], weight[reserved:]
        if max_position <= len(learned):
            raise ValueError(f"max_position ({max_position}) must be above the {len(learned)} positions that the model has")
        times = -(-max_position // len(learned))
        longer = torch.cat([special, learned.repeat(times, 1)[:max_position]]).detach().clone()
        embeddings.position_embeddings.weight = nn.Parameter(longer, requires_grad=weight.requires_grad)
        embeddings.position_embeddings.num_embeddings = len(longer)
        config.max_position_embeddings = len(longer)
        for name, value in (
            ("position_ids", torch.arange(len(longer))[None]),
            ("token_type_ids", torch.zeros(1, len(longer), dtype=torch.long)),
        ):
            if isinstance(getattr(embeddings, name, None), Tensor):
                setattr(embeddings, name, value.to(weight.device))
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Set the tokenizer's maximum length. Returns the tokenizer."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> nn.Module:
        """Give every layer of a BERT or RoBERTa sparse attention with its own weights. Returns the model; raises ValueError.

        max_position: the longest sequence, a multiple of the block. sparsity_config: None: `FixedSparsityConfig`.
        """
        base, _ = _encoder(model)
        SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
            model.config, base.encoder.layer, sparsity_config, max_position
        )
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Any, sparsity_config: SparsityConfig | None = None, max_position: int | None = None
    ) -> Any:
        """The same for a list of layers with `attention.self`."""
        sparsity_config = FixedSparsityConfig(config.num_attention_heads) if sparsity_config is None else sparsity_config
        for layer in layers:
            dense = layer.attention.self
            sparse = _Returning(config, sparsity_config, max_position)
            sparse.query, sparse.key, sparse.value = dense.query, dense.key, dense.value
            sparse.sparse_self_attention.causal = getattr(dense, "is_causal", False)  # a decoder may get no mask
            layer.attention.self = sparse.train(dense.training)
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        pad_token_id: int = 0,
        model_embeddings: Any = None,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pad a batch [B, L, ...] to whole blocks. Returns (tokens added, then the five inputs in order)."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("pad_to_block_size needs input_ids or inputs_embeds")
        more = -given.shape[1] % block_size
        if not more:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            if model_embeddings is None:
                raise ValueError("pad_to_block_size needs model_embeddings=, the model's embedding of tokens, to pad inputs_embeds")
            ids = given.new_full((len(given), more), pad_token_id, dtype=torch.long)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(ids)], 1)
        if attention_mask is None:
            attention_mask = torch.ones(given.shape[:2], dtype=torch.long, device=given.device)

        def padded(x: Tensor | None, value: int) -> Tensor | None:
            return None if x is None else F.pad(x, (0, more), value=value)

        ids_and_positions = padded(input_ids, pad_token_id), padded(position_ids, pad_token_id)
        return more, ids_and_positions[0], padded(attention_mask, 0), padded(token_type_ids, 0), ids_and_positions[1], inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """The output [B, L + pad_len, h] without its padding."""
        return sequence_output[:, :-pad_len] if pad_len > 0 else sequence_output


class _Returning(BertSparseSelfAttention):
    """Called like a transformers layer: a mask [B, 1, L, L] may be bool or added to scores; returns (context, None)."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [B, L, h] -> ([B, L, h], None). Raises ValueError with a cache, whose keys a pattern does not cover."""
        if any(value is not None for value in (*args[:1], kwargs.get("past_key_values"))):
            raise ValueError(
                "sparse layers of SparseAttentionUtils take whole sequences: pass use_cache=False, or use_sparse_attention(model)"
            )
        if attention_mask is None:
            return super().forward(hidden_states), None
        if attention_mask.dim() == 4 and attention_mask.shape[1] == 1 and bool((attention_mask == attention_mask[:, :, :1]).all()):
            attention_mask = attention_mask[:, 0, 0]  # rows are equal: an encoder's mask depends only on keys
        if attention_mask.dtype == torch.bool:
            attention_mask = added(attention_mask, "mul")
        masks = {"attention_mask" if attention_mask.dim() < 4 else "attn_mask": attention_mask}
        return super().forward(hidden_states, **masks), None


def _encoder(model: nn.Module) -> tuple[Any, int]:
    """The BERT or RoBERTa inside, and the number of reserved rows of its position table."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in _RESERVED:
        raise ValueError(f"{type(model).__name__} is no BERT or RoBERTa of transformers (its model_type is {kind!r})")
    return getattr(model, str(model.base_model_prefix), model), _RESERVED[kind]
