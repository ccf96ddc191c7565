"""Weight-only quantisation: matrices to int8 (per output channel) or int4 (per group of inputs), and back.

Quantised are the matrices that every token passes through. Norms, biases, the router (its choice is a step function)
and the embedding (a table that is looked up, not multiplied) stay as they are; the output matrix is int8 in both,
because its error goes straight into the logits. What is quantised already is never quantised again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .weights import DecoderWeights, Int4, Int8, LayerWeights, Matrix, Mlp

# Elements computed together, so that temporaries stay in the caches.
_AT_ONCE = 1 << 15  # torch computes them on one thread: a team costs more than it gives for a few operations
_SEARCHED_AT_ONCE = 1 << 18
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's range; outliers beyond are cut where that costs less


def to_int8(w: Tensor) -> Int8:
    """[out, in] -> symmetric int8 with one scale per output channel; the error is at most half a scale."""
    q, scale = torch.empty_like(w, dtype=torch.int8), torch.empty(len(w), dtype=torch.float32, device=w.device)
    step = max(1, _AT_ONCE // w.shape[1])
    for rows, codes, scales in zip(w.split(step), q.split(step), scale.split(step), strict=True):
        wide = rows.float()
        torch.amax(wide.abs(), 1, out=scales).div_(127)
        codes[:] = (wide / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().clamp_(-127, 127)
    return Int8(q, scale)


def to_int4(w: Tensor, group: int = 32) -> Int4:
    """[out, in] -> affine int4; each group's range is the one of a few that has the least squared error."""
    columns = w.shape[1]
    if group % 2 or columns % group:
        raise ValueError(f"int4 needs an even group that divides the input: group {group}, input {columns}")
    step = max(1, _SEARCHED_AT_ONCE // columns)
    parts = []
    for some in w.split(step):
        # A group is a column, so that its sums are taken over whole vectors.
        q, scale, low = _fit(some.float().view(-1, group).T.contiguous())
        parts.append((pack(q.T.reshape(some.shape)), scale.view(len(some), -1), low.view(len(some), -1)))
    return Int4(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _fit(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """w [group, groups] -> q uint8 of the same shape, scale and low [groups]."""
    least, most = w.aminmax(dim=0)
    middle, span = (least + most) / 2, most - least
    mean = w.mean(0)
    best: tuple[Tensor, ...] | None = None
    for shrink in _SHRINKS:
        scale = span * (shrink / 15)
        low = middle - span * (shrink / 2)
        q = _nearest(w, scale, low)
        # The line through (q, w) of least squares is the best scale and low for this q; q is then chosen anew.
        q_mean = q.mean(0)
        centred = q - q_mean
        slope = (centred * w).sum(0) / centred.square_().sum(0).clamp_min_(1e-12)
        # In fp16, as files and the kernels hold them.
        scale = torch.where(span > 0, slope, 0.0).half().float()
        low = (mean - scale * q_mean).half().float()
        q = _nearest(w, scale, low)
        error = (q * scale).add_(low).sub_(w).square_().sum(0)
        if best is None:
            best = (error, q, scale, low)
        else:
            better = error < best[0]
            best = tuple(torch.where(better, new, old) for new, old in zip((error, q, scale, low), best, strict=True))
    assert best is not None, "there is a first range"
    return best[1].to(torch.uint8), best[2], best[3]


def _nearest(w: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    return (w - low).div_(scale.clamp_min(tiny)).round_().clamp_(0, 15)


def pack(q: Tensor) -> Tensor:
    """uint8 [out, in] of 0..15 -> uint8 [out, in / 2], as `Int4` has it."""
    return q[:, ::2] | (q[:, 1::2] << 4)


def unpack(q: Tensor) -> Tensor:
    return torch.stack((q & 15, q >> 4), 2).flatten(1)


def dequantise(m: Matrix) -> Tensor:
    """fp32 of a quantised matrix; a tensor is returned as it is."""
    match m:
        case Int8():
            return m.q.float() * m.scale[:, None]
        case Int4():
            out = torch.empty(*m.q.shape, 2, device=m.q.device)  # filled in place: loading a model passes through here
            step = max(1, _AT_ONCE // (2 * m.q.shape[1]))
            for rows, q, scale, low in zip(*(whole.split(step) for whole in (out, m.q, m.scale, m.low)), strict=True):
                rows[..., 0], rows[..., 1] = q & 15, q >> 4
                rows.view(*scale.shape, -1).mul_(scale[..., None]).add_(low[..., None])
            return out.flatten(1)
        case _:
            return m


def round_activations(x: Tensor, group: int = 32) -> Tensor:
    """x [..., features] as the products of codes see it: 8 bits, symmetric, a scale for each `group` features of a row."""
    features = x.shape[-1]
    wide = torch.nn.functional.pad(x.float(), (0, -features % group)).unflatten(-1, (-1, group))
    most = wide.abs().amax(-1, keepdim=True)
    codes = (wide * (127 / most.clamp_min(torch.finfo(torch.float32).tiny))).round_()
    return (codes * (most / 127)).flatten(-2)[..., :features].to(x.dtype)


def quantise(weights: DecoderWeights, kind: str, group: int = 32) -> DecoderWeights:
    """The same decoder with matrices of `kind`, "int8" or "int4". Inputs that no group divides are int8 in both kinds."""
    if kind not in ("int8", "int4"):
        raise ValueError(f'{kind!r} is no quantisation; there are "int8" and "int4"')

    def matrix(m: Matrix) -> Matrix:
        if not isinstance(m, Tensor):
            return m
        return to_int4(m, group) if kind == "int4" and m.shape[1] % group == 0 else to_int8(m)

    def mlp(m: Mlp) -> Mlp:
        return replace(m, gate=matrix(m.gate), up=matrix(m.up), down=matrix(m.down))

    def quantised(layer: LayerWeights) -> LayerWeights:
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
    return replace(
        weights, head=to_int8(head) if isinstance(head, Tensor) else head, layers=[quantised(layer) for layer in weights.layers]
    )
