"""A trainer's forward with the values of the serving path, bit for bit.

    served = ServedForward(engine.module)
    with served:                                                    # forward and backward
        logits = engine(input_ids=ids).logits
        logprobs = token_logprobs(logits[:, :-1], ids[:, 1:])       # equal to the server's for these tokens and weights
        engine.backward(loss(logprobs))

[Note: Served values] In torch, the order of a product's sums depends on the batch; in the native forward it does not
(ops/csrc/decoder.h). So the native kernels compute the output of each layer, the last norm and the head, from the module's current
weights, and torch computes it as well, from the same input. The value is the kernels', the gradient torch's at the same point. If
no gradient is needed, torch computes nothing. Hooks, sharding and checkpointing see an ordinary forward. It needs fp32 weights on a
CPU, a decoder that the native forward can run, and rows padded on the right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.inference.config import NORMS, Layer, TransformerConfig
from slipstream.inference.models import from_hf, layer_weights
from slipstream.inference.native import NativeDecoder, why_not
from slipstream.inference.sampler import log_total
from slipstream.inference.weights import DecoderWeights, LayerWeights, leaves
from slipstream.ops.derivatives import once_differentiable
from slipstream.ops.matrices import PANEL
from slipstream.parallel.exchange import dual

__all__ = ["ServedForward", "token_logprobs"]


class ServedForward:
    """A context in which `model`, a transformers decoder, returns served values. Reusable, but not reentrant.

    Raises ValueError if the model is not supported.
    """

    def __init__(self, model: nn.Module, threads: int | None = None) -> None:
        decoder: Any = model
        self.config, self.threads = from_hf(decoder.config.to_dict()), threads
        if reason := _unsupported(self.config):
            raise ValueError(f"a {type(model).__name__} cannot run with the serving path's values: {reason}")
        self._layers: dict[Layer, NativeDecoder] = {}  # one per kind of layer, with the weights of the layer that ran last
        self._ends: dict[int, NativeDecoder] = {}  # decoders without layers, by vocabulary size
        self._inner = decoder.model
        self._patched: list[tuple[nn.Module, Callable[..., Any]]] = [
            *((layer, self._layer(i)) for i, layer in enumerate(decoder.model.layers)),
            (decoder.model.norm, self._norm),
            (decoder.lm_head, self._head),
        ]
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> ServedForward:
        if self._undo:
            raise RuntimeError("this ServedForward is already entered: leave it first, or create another")
        for module, serve in self._patched:
            self._undo.append(_patch(module, serve))
        self._undo.append(self._inner.register_forward_pre_hook(_check_rows, with_kwargs=True).remove)
        return self

    def __exit__(self, *error: object) -> None:
        while self._undo:
            self._undo.pop()()

    # -- values --

    def _layer(self, index: int) -> Callable[[nn.Module, Tensor], Tensor]:
        kind = self.config.layers[index]

        def serve(module: nn.Module, x: Tensor) -> Tensor:
            num, length, _ = x.shape
            blocks = num * -(-length // PANEL)
            weights = layer_weights(self.config, index, dict(module.named_parameters()))
            decoder = self._layers.get(kind)
            if decoder is None or decoder.num_blocks < blocks:
                decoder = self._layers[kind] = self._decoder((kind,), [weights], num_blocks=blocks)
            else:
                for role, weight in leaves(weights, "layers.0"):
                    decoder.put(role, weight)
            return decoder.rows(x.flatten(0, 1), length).view(x.shape)

        return serve

    def _norm(self, module: nn.Module, x: Tensor) -> Tensor:
        decoder = self._end(1)
        decoder.put("final_norm", module.get_parameter("weight"))
        return decoder.normed(x.flatten(0, -2)).view(x.shape)

    def _head(self, module: nn.Module, x: Tensor) -> Tensor:
        decoder = self._end(self.config.vocab_size)
        decoder.put("head", module.get_parameter("weight"))
        return decoder.projected(x.flatten(0, -2)).view(*x.shape[:-1], -1)

    def _end(self, vocab_size: int) -> NativeDecoder:
        if vocab_size not in self._ends:
            self._ends[vocab_size] = self._decoder((), [], vocab_size=vocab_size)
        return self._ends[vocab_size]

    def _decoder(
        self, kinds: tuple[Layer, ...], layers: list[LayerWeights], *, num_blocks: int = 1, vocab_size: int = 1
    ) -> NativeDecoder:
        """A decoder with `layers`; all other weights are zeros."""
        hidden = self.config.hidden_size
        head = torch.zeros(()).expand(vocab_size, hidden)
        weights = DecoderWeights(embed=torch.zeros(1, hidden), final_norm=torch.zeros(hidden), head=head, layers=layers)
        config = replace(self.config, layers=kinds, vocab_size=vocab_size)
        return NativeDecoder(config, weights, num_blocks=num_blocks, cache_dtype=torch.float32, threads=self.threads)


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token under its row of logits (fp32 [..., vocab] -> fp32 [...]), computed as the sampler does."""
    result: Tensor = _TokenLogprobs.apply(logits, tokens)
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        rows = logits.detach().flatten(0, -2).contiguous().numpy()
        scratch = np.empty(rows.shape[-1], np.float32)
        values = [float(row[token]) - log_total(row, scratch) for row, token in zip(rows, tokens.flatten().tolist(), strict=True)]
        return torch.tensor(values, dtype=torch.float32).view(tokens.shape)

    @staticmethod
    @once_differentiable("token_logprobs")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, tokens = ctx.saved_tensors
        likely = logits.softmax(-1).neg_()
        likely.scatter_add_(-1, tokens[..., None], torch.ones_like(tokens[..., None], dtype=likely.dtype))
        return likely.mul_(grads[0][..., None]), None


def _patch(module: nn.Module, serve: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], None]:
    """Make the module's forward return served values. Returns a function that undoes it."""
    own, before = vars(module).get("forward"), module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype != torch.float32 or not x.is_cpu:
            raise ValueError(f"served values need fp32 on a CPU, but this forward is in {x.dtype} on {x.device}")
        with torch.no_grad():
            served = serve(module, x.detach())
        if not torch.is_grad_enabled() or not (x.requires_grad or any(param.requires_grad for param in module.parameters())):
            return served
        return dual(before(x, *args, **kwargs), lambda _: served, lambda grad: grad)

    module.forward = forward

    def undo() -> None:
        del module.forward
        if own is not None:
            module.forward = own

    return undo


def _check_rows(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Reject inputs that the kernels cannot compute: kernels count positions from the start of each row, and attend causally."""
    mask, positions, cache = (kwargs.get(name) for name in ("attention_mask", "position_ids", "past_key_values"))
    if mask is not None and (mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any())):
        raise ValueError("served values need rows padded on the right; give an attention mask [rows, tokens] of that kind")
    if positions is not None and not positions.eq(torch.arange(positions.shape[-1])).all():
        raise ValueError("served values need rows whose positions begin at 0, not packed ones; leave position_ids out")
    if cache is not None and cache.get_seq_length():
        raise ValueError("served values need full rows; leave past_key_values out")


def _unsupported(config: TransformerConfig) -> str | None:
    if config.logit_softcap:
        return "its logits are capped after the head (final_logit_softcapping), by torch"
    return _unlike_llama(config) or why_not(config)


_LLAMA = (
    *("norm", "residual", "final_norm", "gated", "causal", "embed_norm", "num_positions", "num_token_types", "alibi"),
    *("residual_scale", "logit_scale", "has_head", "head_bias", "latent", "embed_size", "qk_norm_bias"),
)


def _unlike_llama(config: TransformerConfig) -> str | None:
    """The settings that the modules of `_patched` lack; None: there are none."""
    plain = [one for one in fields(config) if one.name in _LLAMA and getattr(config, one.name) != one.default]
    if any(name not in config.norms for name in NORMS[:2]) or not all(layer.has_input_norm for layer in config.layers):
        return "no norm before attention or MLP"
    if config.short_context < config.max_context:
        return f"other rotary frequencies beyond {config.short_context} tokens"
    return f"{', '.join(f'{one.name} {getattr(config, one.name)}' for one in plain)}" if plain else None
