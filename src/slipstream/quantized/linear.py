"""Linear layers and embeddings with frozen quantized weights (ops/rows.py), for inference and for adapters on top (QLoRA).

A quantized weight is an ordinary parameter of dtype uint8: the engine shards, offloads, gathers and saves its bytes. Forward and
backward each dequantize it, and do not keep the result.

Of a sharded weight, each rank dequantizes the rows that begin in its range of the bytes (`Numbers`, when it is read). A range may
begin and end inside a row. The rank with a row's first byte dequantizes it; the other ranks' bytes of the row (their `Head`) are
exchanged between all ranks: less than a row per tensor and rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from slipstream.checkpoint.flat_slice import Ranged
from slipstream.ops.rows import RowForm, dequantize_rows, quantize_rows
from slipstream.quantized.packed import BLOCKS, kind_of, named_layers, pack
from slipstream.zero import access


class QuantizedLinear(nn.Linear):
    """`nn.Linear` with a frozen quantized weight, uint8 [out_features, form.row_nbytes]. Only input and bias get gradients."""

    def __init__(self, linear: nn.Linear, form: RowForm, weight: nn.Parameter | None = None) -> None:
        """`weight`: the packed weight; None: pack `linear`'s."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.form = linear.in_features, linear.out_features, form
        self.weight = packed_rows(linear.weight, form) if weight is None else weight
        self.bias = linear.bias
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        product: Tensor = _QuantizedProduct.apply(x, self.weight, self.form)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def dequantized(self) -> Tensor:
        """The dequantized weight, fp32 [out_features, in_features]."""
        return dequantize_rows(self.weight, self.form, torch.float32)

    def reset_parameters(self) -> None:
        raise ValueError(_NO_INITIALIZER)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.form.bits}, block={self.form.block}"


class QuantizedEmbedding(nn.Embedding):
    """`nn.Embedding` with a frozen quantized weight, uint8 [num_embeddings, form.row_nbytes]. Only the rows of a batch's tokens are
    dequantized, to a dtype that follows casts of the module."""

    def __init__(self, embedding: nn.Embedding, form: RowForm, weight: nn.Parameter, dtype: torch.dtype | None = None) -> None:
        """`weight`: the packed weight. `dtype`: of the result; None: `embedding`'s."""
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, self.form = embedding.num_embeddings, embedding.embedding_dim, form
        self.padding_idx, self.max_norm, self.norm_type = embedding.padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.weight = weight
        self.dtype = dtype or embedding.weight.dtype
        self.train(embedding.training)

    def forward(self, input: Tensor) -> Tensor:
        rows = F.embedding(input.reshape(-1), self.weight)
        return dequantize_rows(rows, self.form, self.dtype).view(*input.shape, self.embedding_dim)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedEmbedding:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)
        return self

    def reset_parameters(self) -> None:
        raise ValueError(_NO_INITIALIZER)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.form.bits}, block={self.form.block}"


_NO_INITIALIZER = (
    "a quantized weight has no initializer: load it from files (slipstream.zero.load), or quantize a model with weights"
)


def packed_rows(weight: Tensor, form: RowForm) -> nn.Parameter:
    """Pack [rows, columns] into a frozen uint8 [rows, row_nbytes]; on meta if `weight` is."""
    weight = weight.detach()
    if weight.is_meta:
        packed = torch.empty(len(weight), form.row_nbytes, dtype=torch.uint8, device="meta")
    else:
        packed = quantize_rows(weight, form)
    return nn.Parameter(packed, requires_grad=False)


class _QuantizedProduct(torch.autograd.Function):
    """x @ W.T, which saves only the quantized W for the backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, form: RowForm) -> Tensor:
        return F.linear(x, dequantize_rows(weight, form, x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, RowForm], output: Tensor) -> None:
        _, weight, ctx.form = inputs
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ dequantize_rows(weight, ctx.form, grad.dtype), None, None


def quantize(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    *,
    bits: int | None = None,
    block: int | None = None,
    include: Sequence[str] = ("*",),
    skip: Sequence[str] = (),
) -> nn.Module:
    """Quantize the linear layers of a model in place; returns the model. With `dtype` for inference, without it to train adapters.

    dtype    for inference: "int8", "int4" or "bf16" (or torch.int8, torch.bfloat16). Every `nn.Linear` and every transformers
             Conv1D becomes a layer whose product the native engine's kernels compute, including the output head (int8 with
             "int4"). Layers that share their weight still share it afterwards. All parameters are frozen. A model that is itself
             an `nn.Linear` is not changed: a new layer is returned
    bits     to train adapters: 4 (NF4, a quarter of bf16's bytes) or 8 (integers). The weight of every `nn.Linear` is quantized and
             frozen, except for the output head and layers that share their weight. Call it before adding adapters
    block    columns that share a scale: 64; with dtype "int4" 32, 64 or 128 (32)
    include  name patterns of the layers to quantize
    skip     name patterns of layers to leave as they are: `("*.gate",)`

    To train adapters, a model on meta (`zero.Init`) is quantized while `slipstream.zero.load` reads it: each rank quantizes only
    its own shard. Inside `engine.surgery()`, the layers of an engine are quantized too, and their optimizer states are freed.

    Raises ValueError, with nothing changed, for a layer that belongs to an engine outside a surgery, that has non-finite weights or
    that is trained while others are frozen (an adapter), for a lazy parameter, and for a pattern that matches no layer's name. With
    `dtype`, also for a model on meta or of an engine.
    """
    if dtype is not None:
        if bits is not None:
            raise ValueError(f"dtype={dtype!r} is for inference and bits={bits} to train adapters; give one of them")
        return pack(model, kind_of(dtype, block), block=block or BLOCKS[0], include=include, skip=skip)
    bits, block = bits or 4, block or 64
    chosen = _layers(model, include, skip)
    refuse(model, chosen)
    for layer, names in chosen.items():
        quantized = QuantizedLinear(layer, RowForm(bits=bits, columns=layer.in_features, block=block))
        for name in names:
            model.set_submodule(name, quantized)
    return model


def _layers(model: nn.Module, include: Sequence[str], skip: Sequence[str]) -> dict[nn.Linear, list[str]]:
    """The layers to quantize, and their names: several if a layer is shared."""
    head = getattr(model, "get_output_embeddings", lambda: None)()  # of transformers
    uses = Counter(id(param) for module in model.modules() for param in module._parameters.values() if param is not None)
    chosen = {
        layer: of_layer
        for layer, of_layer in named_layers(model, nn.Linear, include, skip).items()
        if type(layer) is nn.Linear and layer is not model and layer is not head and uses[id(layer.weight)] == 1
    }
    if not chosen:
        raise ValueError(f"no nn.Linear of {type(model).__name__} is left to quantize: skip={list(skip)}")
    return chosen


def nothing(name: str) -> bool:
    return False


def refuse(model: nn.Module, chosen: Mapping[Any, Sequence[str]], is_unread: Callable[[str], bool] = nothing) -> None:
    """Raise ValueError for layers that cannot be quantized now. `is_unread`: whether the named parameter has no values yet."""
    for unit in access.units_of(model.parameters()):
        if unit.shown.show_copy is None:
            raise ValueError(
                f"parameter {unit.names[0]!r} belongs to an engine: quantize the model before slipstream.initialize(), or inside "
                f"`with engine.surgery():`"
            )
    frozen = any(param.is_floating_point() and not param.requires_grad for param in model.parameters())
    for layer, (name, *_) in chosen.items():
        if frozen and layer.weight.requires_grad:
            raise ValueError(
                f"layer {name!r} is trained, because its weight requires a gradient and others do not: quantizing would freeze an "
                f"adapter. Quantize before adapters are added, leave the layer out (skip={[name]}, or no rule of the config), or "
                f"freeze it with requires_grad_(False)"
            )
    for layer, (name, *_) in chosen.items():
        if not layer.weight.is_meta and not is_unread(f"{name}.weight") and not bool(layer.weight.isfinite().all()):
            raise ValueError(f"layer {name!r} has non-finite weights; leave it out (skip={[name]}, or no rule of the config)")


def row_forms(model: nn.Module) -> dict[str, RowForm]:
    """Parameter name -> byte format, for each quantized weight."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear | QuantizedEmbedding)]
    return {f"{name}.weight": module.form for name, module in layers}


class Head(NamedTuple):
    """The first bytes of a range, if they belong to a row that begins before the range."""

    start: int
    codes: Tensor


def head_of(data: Tensor | Ranged, start: int, form: RowForm) -> Head:
    """The head of `data`, the bytes [start, start + numel) of a packed matrix."""
    return Head(start, _get(data, 0, min(-start % form.row_nbytes, data.numel())).cpu().clone())


class Numbers:
    """The dequantized rows of one rank's bytes, with all ranks' heads: fp32 elements from `start` on, read-only."""

    dtype = torch.float32

    def __init__(self, data: Tensor | Ranged, start: int, heads: Sequence[Head], form: RowForm) -> None:
        self.data, self.form = data, form
        stop = start + data.numel()
        self._skip = min(-start % form.row_nbytes, data.numel())
        self._tail = _bytes_from(stop, -stop % form.row_nbytes if self._skip < data.numel() else 0, heads)
        self.start = (start + self._skip) // form.row_nbytes * form.columns if self.numel() else 0

    def numel(self) -> int:
        return (self.data.numel() - self._skip + len(self._tail)) // self.form.row_nbytes * self.form.columns

    def get(self, start: int, stop: int) -> Tensor:
        form, own_nbytes = self.form, self.data.numel()
        first, last = start // form.columns, -(-stop // form.columns)
        a, b = (self._skip + row * form.row_nbytes for row in (first, last))
        own = _get(self.data, min(a, own_nbytes), min(b, own_nbytes))
        packed = torch.cat([own, self._tail[max(a - own_nbytes, 0) : max(b - own_nbytes, 0)].to(own.device)])
        rows = dequantize_rows(packed.view(-1, form.row_nbytes), form, torch.float32)
        return rows.view(-1)[start - first * form.columns : stop - first * form.columns]

    def put(self, start: int, values: Tensor) -> None:
        raise AssertionError("dequantized weights are read-only")


def _get(data: Tensor | Ranged, start: int, stop: int) -> Tensor:
    return data[start:stop] if isinstance(data, Tensor) else data.get(start, stop)


def _bytes_from(start: int, nbytes: int, heads: Sequence[Head]) -> Tensor:
    """Bytes [start, start + nbytes), from consecutive heads."""
    at, end, parts = start, start + nbytes, [torch.empty(0, dtype=torch.uint8)]
    codes = {head.start: head.codes for head in heads if len(head.codes)}
    while at < end:
        parts.append(codes[at][: end - at])
        at += len(parts[-1])
    return torch.cat(parts)
