"""DeepSpeed's transformer layer for training, with its parameters and options, built from the passes of `ops.fused`.

    pre-LN   a = x + drop(O attention(LN(x; norm)));  y = a + drop(W2 gelu(W1 LN(a; attn_n)))
    post-LN  a = LN(x + drop(O attention(x)); attn_n);  y = LN(a + drop(W2 gelu(W1 a)); norm)

gelu is its tanh form; each product has a bias. Attention keeps no probabilities and dropout no masks: both are recomputed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.attention.layouts import layouts_of
from slipstream.attention.transformers import ALL, attend
from slipstream.ops import fused

logger = logging.getLogger(__name__)


@dataclass
class DeepSpeedTransformerConfig:
    """The options of a layer, by DeepSpeed's names. Sizes must be set (-1: not set).

    intermediate_size    width of the MLP; 4 * hidden_size if it is not positive
    initializer_range    standard deviation of the initial weights
    adjust_init_range    divide that of output projections by sqrt(2 * num_hidden_layers)
    pre_layer_norm       norms before attention and MLP, else after their sums
    normalize_invertible the backward of norms reads their outputs, so the sums are not kept
    gelu_checkpoint      recompute the activation in the backward instead of keeping it
    fp16                 the weights are half
    training             False: compute as in evaluation
    return_tuple         return (output,)

    `batch_size`, `max_seq_length`, `local_rank`, `seed`, `attn_dropout_checkpoint` and `stochastic_mode` have no effect: any batch
    is accepted, dropout draws from torch's generator, probabilities are never kept, and results are reproducible.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    return_tuple: bool = False
    training: bool = True
    max_seq_length: int = -1
    layer_id: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        if self.intermediate_size <= 0:
            self.intermediate_size = 4 * self.hidden_size

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> DeepSpeedTransformerConfig:
        config = cls()
        vars(config).update(json_object)
        config.__post_init__()
        return config

    @classmethod
    def from_json_file(cls, json_file: str) -> DeepSpeedTransformerConfig:
        """Read a file of UTF-16 text, like DeepSpeed's, or of UTF-8."""
        data = Path(json_file).read_bytes()
        return cls.from_dict(json.loads(data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8")))

    def check(self) -> None:
        """Raise ValueError for sizes that are not set or do not fit."""
        hidden, heads = self.hidden_size, self.heads
        if hidden <= 0 or heads <= 0 or hidden % heads or self.num_hidden_layers <= 0:
            raise ValueError(
                f"DeepSpeedTransformerConfig: hidden_size ({hidden}), heads ({heads}) and num_hidden_layers "
                f"({self.num_hidden_layers}) must be positive, and heads must divide hidden_size"
            )
        ratios = {name: getattr(self, name) for name in ("attn_dropout_ratio", "hidden_dropout_ratio")}
        if any(not 0 <= ratio < 1 for ratio in ratios.values()) or self.initializer_range < 0:
            raise ValueError(
                f"DeepSpeedTransformerConfig: {ratios} must be at least 0 and less than 1, and initializer_range "
                f"({self.initializer_range}) at least 0"
            )


class DeepSpeedTransformerLayer(nn.Module):
    """One encoder layer (see the module). initial_weights, initial_biases: eight each, for query, key, value, the output
    projection, its norm, the MLP's two products, and the other norm; or the number of the layer and its config, as old scripts pass
    them. Raises ValueError for a config that lacks a size."""

    layer_id = 0  # of the next layer

    def __init__(
        self,
        config: DeepSpeedTransformerConfig | int,
        initial_weights: Sequence[Tensor] | DeepSpeedTransformerConfig | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(initial_weights, DeepSpeedTransformerConfig):
            config, initial_weights = initial_weights, None
        if isinstance(config, int):
            raise ValueError(f"DeepSpeedTransformerLayer({config}): pass a DeepSpeedTransformerConfig")
        config.check()
        if config.stochastic_mode:
            _say("stochastic_mode")
        self.config = config
        config.layer_id = DeepSpeedTransformerLayer.layer_id
        DeepSpeedTransformerLayer.layer_id += 1
        hidden, inner = config.hidden_size, config.intermediate_size
        dtype = torch.float16 if config.fp16 else None

        def param(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype))

        self.attn_qkvw, self.attn_qkvb = param(3 * hidden, hidden), param(3 * hidden)
        self.attn_ow, self.attn_ob = param(hidden, hidden), param(hidden)
        self.attn_nw, self.attn_nb = param(hidden), param(hidden)
        self.inter_w, self.inter_b = param(inner, hidden), param(inner)
        self.output_w, self.output_b = param(hidden, inner), param(hidden)
        self.norm_w, self.norm_b = param(hidden), param(hidden)
        if initial_weights is None and initial_biases is None:
            self.init_transformer_weights(config.adjust_init_range)
        else:
            self._take(initial_weights, initial_biases)

    @torch.no_grad()
    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        spread = self.config.initializer_range
        output = spread / math.sqrt(2.0 * self.config.num_hidden_layers) if adjust_init_range else spread
        for weight, deviation in (
            (self.attn_qkvw, spread),
            (self.attn_ow, output),
            (self.inter_w, spread),
            (self.output_w, output),
        ):
            weight.normal_(0.0, deviation)
        for bias in (self.attn_qkvb, self.attn_ob, self.attn_nb, self.inter_b, self.output_b, self.norm_b):
            bias.zero_()
        self.attn_nw.fill_(1)
        self.norm_w.fill_(1)

    @torch.no_grad()
    def _take(self, weights: Any, biases: Any) -> None:
        if weights is None or biases is None or len(weights) != 8 or len(biases) != 8:
            raise ValueError("DeepSpeedTransformerLayer: initial_weights and initial_biases have eight tensors each, or are None")
        for values, own in ((weights, "w"), (biases, "b")):
            joined = [torch.cat([each.data for each in values[:3]]), *values[3:]]
            for name, value in zip(("attn_qkv", "attn_o", "attn_n", "inter_", "output_", "norm_"), joined, strict=True):
                getattr(self, name + own).copy_(value)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Any = None,
        layer_head_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        grads: Any = None,
    ) -> Any:
        """hidden_states [B, S, H]; attention_mask [B, 1, 1 or S, S], numbers added to scores, or bool, True for keys that may be
        attended to. Returns [B, S, H], in a tuple if the config says so. Raises ValueError for inputs that the layer does not read.
        """
        given = {"head_mask": head_mask, "layer_head_mask": layer_head_mask, "encoder_hidden_states": encoder_hidden_states}
        given |= {"encoder_attention_mask": encoder_attention_mask, "past_key_value": past_key_value, "grads": grads}
        given |= {"output_attentions": output_attentions or None}
        if named := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"DeepSpeedTransformerLayer computes without {', '.join(named)}: leave out what is not None")
        config = self.config
        trains = self.training and config.training
        dropout = config.hidden_dropout_ratio if trains else 0.0
        x = hidden_states.to(self.attn_qkvw.dtype)
        norm: dict[str, Any] = {"norm": "layer", "eps": config.layer_norm_eps, "invertible": config.normalize_invertible}
        first, second = (self.norm_w, self.norm_b), (self.attn_nw, self.attn_nb)
        if config.pre_layer_norm:
            attended = self._attention(fused.add_norm(x, *first, **norm)[1], attention_mask, trains)
            total, normal = fused.add_norm(attended, *second, bias=self.attn_ob, residual=x, dropout=dropout, **norm)
            output = fused.add_norm(self._mlp(normal), bias=self.output_b, residual=total, dropout=dropout)[0]
        else:
            attended = self._attention(x, attention_mask, trains)
            normal = fused.add_norm(attended, *second, bias=self.attn_ob, residual=x, dropout=dropout, **norm)[1]
            output = fused.add_norm(self._mlp(normal), *first, bias=self.output_b, residual=normal, dropout=dropout, **norm)[1]
        return (output,) if config.return_tuple else output

    def _attention(self, x: Tensor, mask: Tensor | None, trains: bool) -> Tensor:
        """Attention with the output projection, without its bias."""
        batch, length, hidden = x.shape
        if mask is not None:
            if not (mask.is_floating_point() or mask.dtype == torch.bool):
                raise ValueError(f"attention_mask is {mask.dtype}; it must be numbers that are added to scores, or bool")
            if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[-1] != length or mask.shape[-2] not in (1, length):
                raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; it must be [{batch}, 1, 1 or {length}, {length}]")
            mask = mask[:, 0, 0].expand(batch, -1) if mask.shape[1:3] == (1, 1) else mask
        parts = F.linear(x, self.attn_qkvw, self.attn_qkvb).view(batch, length, 3, self.config.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        layout = layouts_of(ALL, self.config.heads).of(length, causal=False)
        out = attend(query, key, value, layout, mask, None, self.config.attn_dropout_ratio if trains else 0.0)
        return F.linear(out.transpose(1, 2).reshape(batch, length, hidden), self.attn_ow)

    def _mlp(self, x: Tensor) -> Tensor:
        keep = not self.config.gelu_checkpoint
        return fused.mlp(x, self.inter_w, self.output_w, kind="gelu_tanh", bias=self.inter_b, keep_activation=keep)


@cache
def _say(option: str) -> None:
    logger.warning("DeepSpeedTransformerConfig.%s has no effect: results are reproducible", option)
