"""Weight-only quantization: matrices to int8 (per output channel) or int4 (per group of inputs), and back.

The matrices of attention and MLPs (experts included) are quantized. Norms, biases, the router (its top-k is discontinuous) and the
embedding (a lookup, not a product) are not. The output matrix is int8 for both kinds, because its error goes directly into the
logits. Matrices that are quantized already are left as they are.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from slipstream.inference.weights import DecoderWeights, LayerWeights, Matrix, Mlp
from slipstream.ops.matrices import dequantize, round_activations, to_int4, to_int8, to_kind, unpack

__all__ = ["dequantize", "quantize", "round_activations", "to_int4", "to_int8", "to_kind", "unpack"]


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
            latent=None if layer.latent is None else matrix(layer.latent),
            q_latent=None if layer.q_latent is None else matrix(layer.q_latent),
            mlp=layer.mlp and mlp(layer.mlp),
            experts=[mlp(expert) for expert in layer.experts],
            shared=layer.shared and mlp(layer.shared),
        )

    head = weights.embed if weights.head is None else weights.head
    weights = replace(
        weights,
        embed_in=None if weights.embed_in is None else matrix(weights.embed_in),
        embed_out=None if weights.embed_out is None else matrix(weights.embed_out),
        layers=[quantized(layer) for layer in weights.layers],
    )
    return replace(weights, head=to_int8(head) if isinstance(head, Tensor) else head) if has_head else weights
