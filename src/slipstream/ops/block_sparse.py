"""Attention over the blocks of scores that a layout selects, forward and backward: kernels for CPUs and, with Triton, for GPUs
(`ops/triton/sparse.py`), and a torch twin.

Time and memory are linear in the number of blocks. The kernels keep one log-sum-exp per query and recompute scores for the
gradients (Dao et al., arXiv 2205.14135). Their arithmetic is fp32. Queries without any key get zeros.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from slipstream.ops import build, cpu, gpu
from slipstream.ops.derivatives import once_differentiable

PANEL = 16  # number of queries or keys: the kernels' unit, and the smallest block
_MOST = 4  # maximum panels of queries in a tile
MOST_DIM = 256
_LEAST = -1e30  # a score below it is masked: LOW in csrc/sparse.c


class _Heads(ctypes.Structure):
    """`struct heads` of csrc/sparse.h."""

    _fields_ = (("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row")))


class _Sparse(ctypes.Structure):
    """`struct sparse`."""

    _fields_ = (
        *((name, _Heads) for name in ("q", "k", "v", "o", "grad", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("lse", "key_bias", "bias", "bias_grad", "spans", "tiles", "panels", "layouts")),
        *((name, ctypes.c_int64) for name in ("batch", "num_heads", "num_kv_heads", "num_layouts", "length", "dim")),
        *((name, ctypes.c_int64) for name in ("bias_batch", "bias_head", "grad_batch")),
        *((name, ctypes.c_float) for name in ("scale", "dropout")),
        ("seed", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("dtype", "causal")),
        ("failed", ctypes.c_void_p),
    )


class _Tiles(NamedTuple):
    """A layout in the form that kernels read. A tile: up to 64 neighboring queries that attend to the same panels of 16 keys."""

    tiles: Tensor  # int32 [tiles, 4]: first panel of queries, their number, begin and end in `panels`
    panels: Tensor  # int32
    layouts: Tensor  # int64 [layouts + 1]: where the tiles of each begin; [2, layouts + 1] for a GPU (`BlockLayout.on`)


class BlockLayout:
    """The blocks of scores that are computed.

    blocks: [H, L / block, L / block], nonzero where a block of queries attends to a block of keys; H is 1 or the number of query
    heads. block: a multiple of 16. causal: no query sees a later key, also in blocks on the diagonal. Raises ValueError.
    """

    def __init__(self, blocks: Tensor, block: int, *, causal: bool = False) -> None:
        if blocks.dim() != 3 or blocks.shape[1] != blocks.shape[2]:
            raise ValueError(
                f"a layout of blocks has shape {tuple(blocks.shape)}; it must be [heads, rows, columns], columns like rows"
            )
        if block < PANEL or block % PANEL:
            raise ValueError(f"block ({block}) must be a positive multiple of {PANEL}")
        with torch.inference_mode(False):  # an evaluation may make the layout that a backward of training saves later
            blocks = blocks.detach().cpu() != 0
            if causal:
                blocks = blocks.tril()
            if len(blocks) > 1 and bool((blocks == blocks[:1]).all()):
                blocks = blocks[:1]
            self.blocks, self.block, self.causal, self.length = blocks, block, causal, blocks.shape[1] * block
            self.tiles = self._cut(blocks, _runs)  # now, not on first use, because a compiled model reads it
        self._on: dict[torch.device, _Tiles] = {}

    def __deepcopy__(self, memo: object) -> BlockLayout:
        return self  # it never changes

    def __repr__(self) -> str:
        return f"BlockLayout({len(self.blocks)} of {self.length} tokens, block {self.block}, density {self.density:.3f})"

    @functools.cached_property
    def density(self) -> float:
        """The fraction of blocks that are computed."""
        return float(self.blocks.float().mean())

    def on(self, device: torch.device) -> _Tiles:
        """`tiles`, or the form of the layout for GPUs: tiles of equally many queries, then tiles of keys with the panels of queries
        that see them."""
        if device.type == "cpu":
            return self.tiles
        if device not in self._on:
            with _disable_current_modes(), torch.inference_mode(False):
                self._on[device] = _Tiles(*(x.to(device) for x in self._both_sides()))
        return self._on[device]

    def _both_sides(self) -> _Tiles:
        queries, keys = self._cut(self.blocks, _even), self._cut(self.blocks.mT, _even, of_keys=True)
        keys.tiles[:, 2:] += len(queries.panels)
        layouts = torch.stack((queries.layouts, keys.layouts + len(queries.tiles)))
        return _Tiles(torch.cat((queries.tiles, keys.tiles)), torch.cat((queries.panels, keys.panels)), layouts)

    def _cut(self, blocks: Tensor, runs: _Runs, *, of_keys: bool = False) -> _Tiles:
        per, starts, tiles, panels, at = self.block // PANEL, [0], [], [], 0
        for rows in blocks:
            for first, count, columns in runs(rows, per):
                listed = (columns[:, None] * per + torch.arange(per, device=rows.device)).view(-1)
                if self.causal:
                    listed = listed[listed >= first if of_keys else listed < first + count]
                tiles.append((first, count, at, at + len(listed)))
                panels.append(listed)
                at += len(listed)
            starts.append(len(tiles))
        listed = torch.cat(panels or [blocks.new_empty(0)]).to(torch.int32)
        return _Tiles(torch.tensor(tiles, dtype=torch.int32, device="cpu"), listed, torch.tensor(starts, device="cpu"))


_Runs = Callable[[Tensor, int], Iterator[tuple[int, int, Tensor]]]


def _runs(rows: Tensor, per: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first panel, number of panels, columns of blocks) of one head's tiles; equal rows share a tile."""
    same = [False, *(rows[1:] == rows[:-1]).all(1).tolist()]
    at = 0
    while at < len(rows):
        end = at + 1
        while end < len(rows) and same[end]:
            end += 1
        columns = rows[at].nonzero().view(-1)
        for first in range(at * per, end * per, _MOST):
            yield first, min(_MOST, end * per - first), columns
        at = end


def _even(rows: Tensor, per: int) -> Iterator[tuple[int, int, Tensor]]:
    """`_runs` with tiles of equal size: a power of two that divides a block."""
    size = min(_MOST, per & -per)
    for at, row in enumerate(rows):
        columns = row.nonzero().view(-1)
        for first in range(at * per, (at + 1) * per, size):
            yield first, size, columns


# The kernels as torch operators, so that `torch.compile` accepts them. A layout is passed as the three arrays of `_Tiles`.


@torch.library.custom_op("slipstream::block_sparse_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_bias: Tensor | None,
    spans: Tensor | None,
    seed: Tensor | None,
    tiles: Tensor,
    panels: Tensor,
    layouts: Tensor,
    scale: float,
    dropout: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    table, settings = _Tiles(tiles, panels, layouts), (scale, dropout, causal)
    if layouts.dim() == 2:
        kernels: Any = gpu.module("sparse")
        by_triton: tuple[Tensor, Tensor] = kernels.forward(q, k, v, _scores(_Added(bias, key_bias, spans), table, settings, seed))
        return by_triton
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    heads = {"q": q, "k": k, "v": v, "o": out}
    _run(0, heads, table, settings, seed, lse=lse, bias=bias, key_bias=key_bias, spans=spans)
    return out, lse


@_forward.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("slipstream::block_sparse_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    key_bias: Tensor | None,
    spans: Tensor | None,
    seed: Tensor | None,
    tiles: Tensor,
    panels: Tensor,
    layouts: Tensor,
    scale: float,
    dropout: float,
    causal: bool,
    bias_wants: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table, settings = _Tiles(tiles, panels, layouts), (scale, dropout, causal)
    bias_grad = _bias_grad(q, bias, bias_wants)
    if layouts.dim() == 2:
        kernels: Any = gpu.module("sparse")
        scores = _scores(_Added(bias, key_bias, spans), table, settings, seed)
        return *kernels.backward(_rows(grad), q, k, v, out, lse, scores, bias_grad if bias_wants else None), bias_grad
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    heads = {"q": q, "k": k, "v": v, "o": out, "grad": _rows(grad), "dq": dq, "dk": dk, "dv": dv}
    arrays = {"lse": lse, "bias": bias, "key_bias": key_bias, "spans": spans, "bias_grad": bias_grad if bias_wants else None}
    _run(1, heads, table, settings, seed, **arrays)
    return dq, dk, dv, bias_grad


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), _bias_grad(q, rest[2], rest[-1])


def _bias_grad(q: Tensor, bias: Tensor | None, wants: bool) -> Tensor:
    """Zeros for a bias's gradient, to which sequences that share the bias add in turn."""
    return q.new_zeros(bias.shape if bias is not None and wants else 0, dtype=torch.float32)


def _scores(added: _Added, table: _Tiles, settings: tuple[float, float, bool], seed: Tensor | None) -> Any:
    """The `Scores` of Triton's kernels."""
    kernels: Any = gpu.module("sparse")
    scale, dropout, causal = settings
    bits = 0 if seed is None else int(seed)
    signed = bits - (1 << 32 if bits >> 31 else 0)  # one type for all seeds
    return kernels.Scores(*added, *table[:2], table.layouts.shape[1] - 1, scale, min(round(dropout * 65536), 65535), signed, causal)


def _batch_stride(x: Tensor) -> int:
    return x.stride(0) if len(x) > 1 else 0


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *arrays, scale, dropout, causal = inputs
    ctx.settings = scale, dropout, causal
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*arrays[:3], *output, *arrays[3:])


@once_differentiable("block-sparse attention")
def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    arrays, wants = ctx.saved_tensors, bool(ctx.needs_input_grad[3])
    *grads, bias_grad = _backward(grad, *arrays, *ctx.settings, wants)
    return (*grads, bias_grad if wants else None, *[None] * 9)


_forward.register_autograd(_gradients, setup_context=_keep)


def _run(
    backward: int,
    heads: dict[str, Tensor],
    tiles: _Tiles,
    settings: tuple[float, float, bool],
    seed: Tensor | None,
    **arrays: Tensor | None,
) -> None:
    q, k, bias, bias_grad = heads["q"], heads["k"], arrays["bias"], arrays.get("bias_grad")
    s = _Sparse(**{name: _Heads(x.data_ptr(), *x.stride()[:3]) for name, x in heads.items()})
    for name, x in (*arrays.items(), *tiles._asdict().items()):
        setattr(s, name, None if x is None else x.data_ptr())
    s.batch, s.num_heads, s.length, s.dim = q.shape
    s.num_kv_heads, s.num_layouts = k.shape[1], len(tiles.layouts) - 1
    if bias is not None:
        s.bias_batch, s.bias_head = _batch_stride(bias), bias.stride(1)
    if bias_grad is not None:
        s.grad_batch = _batch_stride(bias_grad)
    s.scale, s.dropout, s.causal = settings[0], round(settings[1] * 65536), settings[2]
    s.seed, s.dtype = 0 if seed is None else int(seed), cpu.DTYPES[q.dtype]
    kernels, failed = cpu._kernels(), ctypes.c_int32()
    if kernels is None:
        raise RuntimeError(f"compiled models need the native kernels of block-sparse attention: {build.load().reason}")
    s.failed = ctypes.addressof(failed)
    num = k.shape[1] * (1 if bias_grad is not None and not s.grad_batch else len(q))
    for first in range(0, len(q) * k.shape[1], num):
        cpu.run(kernels.sparse, backward, s, num, least=1, first=first)
    if failed.value:
        raise MemoryError(
            f"no memory for block-sparse attention of {s.length} tokens with {s.dim} features: a few copies of a head in fp32"
        )


def product_flops(q: Tensor, tiles: Tensor, panels: Tensor, layouts: Tensor) -> int:
    """FLOP of one product of all heads [B, heads, S, D] with the keys of their tiles."""
    num_layouts = layouts.shape[-1] - 1
    with _disable_current_modes():  # a layout has values, even among fake tensors
        of_queries = tiles[: layouts.view(-1)[num_layouts]]
        scores = PANEL * PANEL * sum(rows * (stop - start) for _, rows, start, stop in of_queries.tolist())
    return 2 * scores * q.shape[3] * len(q) * q.shape[1] // num_layouts


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    spans: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale q k^T + bias + key_bias) v, over the layout's blocks only.

    q: [B, H, L, D], k and v: [B, KV heads, L, D], with D of at most 256, fp32, bf16 or fp16, on one device. scale: D^-1/2 if None.
    bias: added to scores, broadcastable to [B, H, L, L], with a gradient if it requires one. key_bias: [B, L], -inf for a key that
    no query sees, without a gradient. spans: [B, L, 2], the first key and the end of the keys that each query sees: windows and
    packed sequences without a matrix. dropout: of probabilities, drawn from torch's generator (the same when recomputed with its
    state). Returns [B, H, L, D]; zeros for a query that sees no key. Raises ValueError.
    """
    _check(q, k, v, layout, dropout)
    batch, _, length, dim = q.shape
    for name, x, shape in (("key_bias", key_bias, (batch, length)), ("spans", spans, (batch, length, 2))):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}, of [batch, tokens]")
    key_bias = None if key_bias is None else key_bias.detach().float().contiguous()
    spans = None if spans is None else spans.to(torch.int32).contiguous()
    bias = None if bias is None else _expanded(bias, q)
    scale = dim**-0.5 if scale is None else scale
    if not takes(q):
        return _twin(q, k, v, layout, scale, _Added(bias, key_bias, spans), dropout)
    seed = torch.randint(1 << 32, ()) if dropout else None
    arrays = (bias, key_bias, spans, seed, *layout.on(q.device))
    out: Tensor = _forward(_rows(q), _rows(k), _rows(v), *arrays, scale, dropout, layout.causal)[0]
    return out


def takes(q: Tensor) -> bool:
    """Whether kernels compute. Without flash attention (`sdpa_kernel(SDPBackend.MATH)`) callers differentiate twice."""
    compiles = torch.compiler.is_compiling()
    if q.is_cuda:  # there the twin is compiled, because a layout's tables are made on first use
        return not compiles and torch.backends.cuda.flash_sdp_enabled() and _by_triton(q.device)
    return q.is_cpu and (compiles or (cpu._kernels() is not None and torch.backends.cuda.flash_sdp_enabled()))


@functools.cache
def _by_triton(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0) and gpu.module("sparse") is not None


def _check(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, dropout: float) -> None:
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 4 or (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"{shapes}: they must be [batch, heads, tokens, features], alike but for heads, and k and v alike")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide into groups of {k.shape[1]} key heads")
    if q.shape[2] != layout.length:
        raise ValueError(f"{q.shape[2]} tokens, and the layout has {layout.length}: pad the sequence to it, or make another layout")
    if len(layout.blocks) not in (1, q.shape[1]):
        raise ValueError(
            f"the layout has {len(layout.blocks)} heads, and q has {q.shape[1]}: it must have one, or one for each of them"
        )
    if not 1 <= q.shape[3] <= MOST_DIM:
        raise ValueError(f"{q.shape[3]} features a head; the kernels take 1 to {MOST_DIM}")
    if q.dtype not in cpu.DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: they must all be one of torch.float32, torch.bfloat16 and torch.float16"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout ({dropout}) must be at least 0 and less than 1")


def _expanded(bias: Tensor, q: Tensor) -> Tensor:
    """The bias in the kernels' form: fp32 [B or 1, H, L, L], the last two dimensions contiguous."""
    batch, heads, length, _ = q.shape
    try:
        whole = torch.broadcast_shapes(bias.shape, (batch, heads, length, length))
    except RuntimeError:
        whole = None
    if whole != (batch, heads, length, length):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must broadcast to {(batch, heads, length, length)}")
    bias = bias.float().expand(*bias.shape[:-2], length, length).contiguous()
    return bias.expand(len(bias) if bias.dim() == 4 else 1, *whole[1:])


class _Added(NamedTuple):
    """The terms added to scores."""

    bias: Tensor | None
    key_bias: Tensor | None
    spans: Tensor | None

    def of_head(self, head: slice) -> _Added:
        return self if self.bias is None else self._replace(bias=self.bias[:, head])

    def to(self, score: Tensor, queries: Tensor, seen: Tensor) -> Tensor:
        """score [batch, heads, rows, block, keys]; queries [rows, block, 1] and seen [rows, 1, keys] are positions of tokens."""
        if self.bias is not None:
            score = score + self.bias[:, :, queries, seen]
        if self.key_bias is not None:
            score = score + self.key_bias[:, None, seen]
        if self.spans is not None:
            first, last = self.spans[:, None, queries].unbind(-1)
            score = score.masked_fill((seen < first) | (seen >= last), float("-inf"))
        return score


def _twin(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, added: _Added, dropout: float) -> Tensor:
    """The same in torch: keys of a row's blocks are gathered; rows with equally many blocks are computed together."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if len(layout.blocks) == 1:
        return _twin_heads(q, k, v, layout.blocks[0], layout, scale, added, dropout)
    heads = [slice(head, head + 1) for head in range(q.shape[1])]
    parts = [
        _twin_heads(q[:, h], k[:, h], v[:, h], rows, layout, scale, added.of_head(h), dropout)
        for h, rows in zip(heads, layout.blocks, strict=True)
    ]
    return torch.cat(parts, 1)


def _twin_heads(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, layout: BlockLayout, scale: float, added: _Added, dropout: float
) -> Tensor:
    """Heads that share one layout `rows` [blocks, blocks]."""
    batch, heads, length, dim = q.shape
    blocks = (batch, heads, -1, layout.block, dim)
    q, k, v = q.reshape(blocks), k.reshape(blocks), v.reshape(blocks)
    tokens = torch.arange(length, device=q.device).view(-1, layout.block)
    out = torch.zeros_like(q)
    counts = rows.sum(1)
    for count in counts.unique().tolist():
        at = (counts == count).nonzero().view(-1).to(q.device)
        if not count:
            continue
        columns = rows.to(q.device)[at].nonzero()[:, 1].view(-1, count)
        keys, values = (x[:, :, columns].flatten(3, 4).float() for x in (k, v))
        score = q[:, :, at].float() * scale @ keys.transpose(-1, -2)  # [batch, heads, rows, block, count * block]
        queries, seen = tokens[at][:, :, None], tokens[columns].flatten(1)[:, None, :]
        score = added.to(score, queries, seen)
        if layout.causal:
            score = score.masked_fill(seen > queries, float("-inf"))
        blind = (score < _LEAST).all(-1, keepdim=True)  # the gradient of a softmax over -inf alone is NaN
        shares = torch.softmax(score.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
        out[:, :, at] = (torch.dropout(shares, dropout, train=dropout > 0) @ values).to(out.dtype)
    return out.reshape(batch, heads, length, dim)
