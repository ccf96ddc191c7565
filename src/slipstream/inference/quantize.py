"""Weight-only quantization: matrices to int8 (per output channel) or int4 (per group of inputs), and back.

The matrices of attention and MLPs (experts included) are quantized. Norms, biases, the router (its top-k is discontinuous) and the
embedding (a lookup, not a product) are not. The output matrix is int8 for both kinds, because its error goes directly into the
logits. Matrices that are quantized already are left as they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from slipstream import ops
from slipstream.inference.weights import DecoderWeights, Int4, Int8, LayerWeights, Matrix, Mlp


def to_int8(w: Tensor) -> Int8:
    """[out, in] -> symmetric int8 with one scale per output channel; the error is at most half a scale."""
    return Int8(*ops.quantize_int8(w))


def to_int4(w: Tensor, group: int = 32) -> Int4:
    """[out, in] -> affine int4; each group uses the range with the least squared error among a few candidates."""
    return Int4(*ops.quantize_int4(w, group))


def to_kind(w: Tensor, kind: str, group: int = 32) -> Int8 | Int4:
    """Quantize to int8, or to int4 if the group size divides the inputs."""
    return to_int4(w, group) if kind == "int4" and w.shape[1] % group == 0 else to_int8(w)


def unpack(q: Tensor) -> Tensor:
    """Packed nibbles of `Int4`, uint8 [out, in / 2] -> uint8 [out, in] in 0..15."""
    return torch.stack((q & 15, q >> 4), 2).flatten(1)


def dequantize(m: Matrix) -> Tensor:
    """A quantized matrix in fp32; a tensor is returned unchanged."""
    match m:
        case Int8():
            if m.scale.dim() == 2:
                return (m.q.unflatten(1, (m.scale.shape[1], -1)) * m.scale[..., None]).flatten(1)
            return ops.dequantize_int8(*m)
        case Int4():
            return ops.dequantize_int4(*m)
        case _:
            return m


def round_activations(x: Tensor, group: int = 32) -> Tensor:
    """Round x [..., features] like the native int8 and int4 products: symmetric, 8 bits, a scale per `group` features of a row."""
    features = x.shape[-1]
    wide = torch.nn.functional.pad(x.float(), (0, -features % group)).unflatten(-1, (-1, group))
    most = wide.abs().amax(-1, keepdim=True)
    codes = (wide * (127 / most.clamp_min(1e-30))).round_()
    return (codes * (most / 127)).flatten(-2)[..., :features].to(x.dtype)


def quantize(weights: DecoderWeights, kind: str, group: int = 32, *, has_head: bool = True) -> DecoderWeights:
    """The same decoder with matrices of `kind`, "int8" or "int4"; int8 for both if the group size does not divide the inputs."""
    if kind not in ("int8", "int4"):
        raise ValueError(f'kind is {kind!r}; it must be "int8" or "int4"')

    def matrix(m: Matrix) -> Matrix:
        return to_kind(m, kind, group) if isinstance(m, Tensor) else m

    def mlp(m: Mlp) -> Mlp:
        return replace(m, gate=None if m.gate is None else matrix(m.gate), up=matrix(m.up), down=matrix(m.down))

    def quantized(layer: LayerWeights) -> LayerWeights:
        return replace(
            layer,
            q=matrix(layer.q),
            k=matrix(layer.k),
            v=matrix(layer.v),
            out=matrix(layer.out),
            mlp=layer.mlp and mlp(layer.mlp),
            experts=[mlp(expert) for expert in layer.experts],
            shared=layer.shared and mlp(layer.shared),
        )

    head = weights.embed if weights.head is None else weights.head
    if not has_head:
        return replace(weights, layers=[quantized(layer) for layer in weights.layers])
    return replace(
        weights, head=to_int8(head) if isinstance(head, Tensor) else head, layers=[quantized(layer) for layer in weights.layers]
    )
