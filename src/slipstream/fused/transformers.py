"""Fused layers in unmodified transformers models: encoders like BERT, decoders like Llama.

The class of a module is replaced by a subclass that computes the same with `ops.fused`. Parameters, their names, hooks of other
modules, and the results of `isinstance` stay. A linear layer that is not exactly `nn.Linear`, or has hooks (adapters, quantized or
sliced layers), is called normally. Results equal the model's own up to rounding, but dropout draws other numbers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.attention.transformers import DENSE, register
from slipstream.ops import fused
from slipstream.ops.fused import Activation
from slipstream.parallel.around import class_before

# class of an activation in transformers or torch -> kind
_KINDS: dict[str, Activation] = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "ReLU": "relu",
}


def product(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """layer(x) without its bias, and the bias, which a fused pass adds. For anything but a plain `nn.Linear`: layer(x) and None."""
    if is_plain(layer):
        return F.linear(x, layer.weight), layer.bias
    return layer(x), None


def is_plain(layer: Any) -> bool:
    """Whether nothing observes the calls of this linear layer, so that they may be left out."""
    return type(layer) is nn.Linear and not _is_seen(layer)


def feed_forward(x: Tensor, first: Any, last: Any, kind: Activation, up: Any = None) -> tuple[Tensor, Tensor | None]:
    """The MLP without its last bias, and that bias."""
    if is_plain(first) and is_plain(last) and (up is None or (is_plain(up) and up.bias is None)):
        gate = None if up is None else up.weight
        return fused.mlp(x, first.weight, last.weight, kind=kind, bias=first.bias, up=gate), last.bias
    inner, bias = product(first, x)
    return product(last, fused.activation(inner, kind, bias=bias, up=None if up is None else up(x)))


def _is_seen(*modules: nn.Module) -> bool:
    """Whether a module has hooks, which a pass that does not call it would skip."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)


def _unfused(own: Any) -> Any:
    """For pickles: an object of the module's own class, even if its model's config names our attention."""
    register()
    return own.__new__(own)


class Fused:
    """The part of a fused module's class that precedes its own class. `__reduce_ex__`: copies and pickles have the own class."""

    @staticmethod
    def takes(module: Any) -> bool:
        """Whether the module can be fused; otherwise it stays unchanged."""
        return True

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unfused, (_own(type(self)),), vars(self)


# -- encoders: a sublayer's product, bias, dropout, residual and LayerNorm --


def _add_and_norm(module: Any, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    norm = module.LayerNorm
    dropout = module.dropout.p if module.dropout.training else 0.0
    options: dict[str, Any] = {"norm": "layer", "bias": bias, "residual": residual, "eps": norm.eps, "dropout": dropout}
    return fused.add_norm(x, norm.weight, norm.bias, **options)[1]


def _takes_output(module: Any) -> bool:
    return type(module.LayerNorm) is nn.LayerNorm and type(module.dropout) is nn.Dropout and module.LayerNorm.weight is not None


class _SelfOutput(Fused):
    takes = staticmethod(_takes_output)

    def forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Any:
        if _is_seen(self.LayerNorm, self.dropout):
            return super().forward(hidden_states, input_tensor)  # type: ignore[misc]
        return _add_and_norm(self, *product(self.dense, hidden_states), input_tensor)


class _EncoderLayer(Fused):
    @staticmethod
    def takes(module: Any) -> bool:
        has_known_kind = type(module.intermediate.intermediate_act_fn).__name__ in _KINDS
        return has_known_kind and _takes_output(module.output)

    def feed_forward_chunk(self: Any, attention_output: Tensor) -> Any:
        inner, output = self.intermediate, self.output
        if _is_seen(inner, inner.intermediate_act_fn, output, output.LayerNorm, output.dropout):
            return super().feed_forward_chunk(attention_output)  # type: ignore[misc]
        kind = _KINDS[type(self.intermediate.intermediate_act_fn).__name__]
        x, bias = feed_forward(attention_output, self.intermediate.dense, self.output.dense, kind)
        return _add_and_norm(self.output, x, bias, attention_output)


# -- decoders --


class _RmsNorm(Fused):
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return fused.add_norm(hidden_states, self.weight, norm="rms", eps=self.variance_epsilon)[1]


class _GatedMlp(Fused):
    @staticmethod
    def takes(module: Any) -> bool:
        return type(module.act_fn).__name__ in _KINDS

    def forward(self: Any, x: Tensor) -> Tensor:
        out, bias = feed_forward(x, self.gate_proj, self.down_proj, _KINDS[type(self.act_fn).__name__], self.up_proj)
        return out if bias is None else out + bias


class _DecoderLayer(Fused):
    """Pre-norm: one pass computes the sum after attention and its norm."""

    @staticmethod
    def takes(module: Any) -> bool:
        return isinstance(module.post_attention_layernorm, _RmsNorm) or type(module.post_attention_layernorm).__name__ in _CLASSES

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        norm = self.post_attention_layernorm
        if args or _is_seen(norm):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        options: dict[str, Any] = {"norm": "rms", "residual": hidden_states, "eps": norm.variance_epsilon}
        total, x = fused.add_norm(attended, norm.weight, **options)
        return total + self.mlp(x)


class _Attention(Fused):
    """One pass each computes the rotary positions of queries and keys."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (layer(hidden_states).view(shape) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (fused.rotary(x, *position_embeddings).transpose(1, 2) for x in (query, key))
        value = value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        eager = sys.modules[_own(type(self)).__module__].eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        if (window := getattr(self, "sliding_window", None)) is not None:
            kwargs["sliding_window"] = window
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


_ENCODERS = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "Data2VecText", "Ernie")
_DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")
_MIXTURES = ("Mixtral", "Qwen2Moe", "Qwen3Moe")  # their layers and MLPs differ

# class of transformers -> its replacement
_CLASSES: dict[str, type[Fused]] = {
    **{f"{name}{part}": _SelfOutput for name in _ENCODERS for part in ("SelfOutput", "Output")},
    **{f"{name}Layer": _EncoderLayer for name in _ENCODERS},
    **{f"{name}RMSNorm": _RmsNorm for name in (*_DECODERS, *_MIXTURES)},
    **{f"{name}MLP": _GatedMlp for name in (*_DECODERS, "Qwen2Moe", "Qwen3Moe")},
    **{f"{name}Attention": _Attention for name in (*_DECODERS, *_MIXTURES)},
    **{f"{name}DecoderLayer": _DecoderLayer for name in _DECODERS},
}


def _own(kind: type) -> type:
    """The class that a fused one replaced."""
    return kind.__mro__[kind.__mro__.index(Fused) + 1]


def _mixin_of(module: nn.Module) -> type[Fused] | None:
    own = type(module)
    mixin = _CLASSES.get(own.__name__) if own.__module__.startswith("transformers.models.") else None
    return mixin if mixin is not None and not isinstance(module, Fused) and mixin.takes(module) else None


def fuse_layers(model: nn.Module, *, attention: bool = True) -> nn.Module:
    """Replace the layers of a transformers model (BERT and relatives, Llama, Mistral, Qwen 2 and 3) in place; returns it.

    attention: compute attention with dropout and masks in one kernel, if the model uses transformers' "eager" or "sdpa". Raises
    ValueError for a model without such layers, before it is changed.
    """
    layers = [(module, mixin) for module in model.modules() if (mixin := _mixin_of(module)) is not None]
    if not layers and not any(isinstance(module, Fused) for module in model.modules()):
        names = ", ".join(sorted({*_ENCODERS, *_DECODERS, *_MIXTURES}))
        raise ValueError(
            f"fused_layers: {type(model).__name__} has no layers that can be fused; models of transformers of these families have:"
            f" {names}. Drop the option, or build the model of slipstream.ops.fused"
        )
    for module, mixin in layers:
        module.__class__ = class_before(mixin, type(module))
    if attention:
        _use_dense_attention(model)
    if getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss":
        setattr(model, "loss_function", ForCausalLMLoss)  # noqa: B010 (a property of transformers')
    return model


def ForCausalLMLoss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' loss of this name, which identifies it, without fp32 copies of the logits [B, S, V]."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target, kind = shift_labels.reshape(-1).to(logits.device), "mean" if num_items_in_batch is None else "sum"
    loss = fused.cross_entropy(logits.reshape(-1, vocab_size), target, ignore_index=ignore_index, reduction=kind)  # type: ignore[arg-type]
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _use_dense_attention(model: nn.Module) -> None:
    register()
    for module in model.modules():
        own: Any = getattr(module, "config", None)
        crosses = getattr(own, "is_encoder_decoder", False) or getattr(own, "add_cross_attention", False)
        served = getattr(module, "_supports_sdpa", True) and not crosses
        if served and getattr(own, "_attn_implementation", None) in ("eager", "sdpa"):
            own._attn_implementation = DENSE


def replace_transformer_layer(
    orig_layer_impl: type[nn.Module] | None,
    model: nn.Module,
    checkpoint_dict: Any = None,
    config: Any = None,
    model_config: Any = None,
) -> nn.Module:
    """DeepSpeed's name of `fuse_layers`, for training and evaluation. orig_layer_impl: only layers of this class; None: all.

    `config` and `model_config` are not needed. Raises ValueError for a class that cannot be fused, and for `checkpoint_dict`.
    """
    if checkpoint_dict is not None:
        raise ValueError("replace_transformer_layer: load the checkpoint into the model first; checkpoint_dict is not read")
    layers = [m for m in model.modules() if orig_layer_impl is not None and isinstance(m, orig_layer_impl)]
    if orig_layer_impl is not None and not layers:
        raise ValueError(f"replace_transformer_layer: the model has no {orig_layer_impl.__name__}")
    for each in layers or [model]:
        fuse_layers(each)
    return model
