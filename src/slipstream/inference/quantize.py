"""Weight-only quantization: matrices to int8 (per output channel) or int4 (per group of inputs), and back.

The matrices of attention and MLPs (experts included) are quantized. Norms, biases, the router (its top-k is discontinuous) and the
embedding (a lookup, not a product) are not. The output matrix is int8 for both kinds, because its error goes directly into the
logits. Matrices that are quantized already are left as they are.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from slipstream.inference.weights import DecoderWeights, Matrix, mapped
from slipstream.ops.matrices import dequantize, round_activations, to_int4, to_int8, to_kind, unpack

__all__ = ["dequantize", "quantize", "round_activations", "to_int4", "to_int8", "to_kind", "unpack"]

_QUANTIZED = ("q", "k", "v", "out", "latent", "q_latent", "gate", "up", "down", "embed_in", "embed_out")


def quantize(weights: DecoderWeights, kind: str, group: int = 32, *, has_head: bool = True) -> DecoderWeights:
    """The same decoder with matrices of `kind`, "int8" or "int4"; int8 for both if the group size does not divide the inputs."""
    if kind not in ("int8", "int4"):
        raise ValueError(f'kind is {kind!r}; it must be "int8" or "int4"')

    def quantized(role: str, m: Matrix) -> Matrix:
        return to_kind(m, kind, group) if role.rpartition(".")[2] in _QUANTIZED and isinstance(m, Tensor) else m

    head = weights.embed if weights.head is None else weights.head
    weights = mapped(weights, quantized)
    return replace(weights, head=to_int8(head) if isinstance(head, Tensor) else head) if has_head else weights
