"""The GPU forward: Triton kernels (`ops/triton`), with CUDA graphs for batches of one row per request.

`CudaDecoder` is a `core.Runner` over a `KVCache`. The indices of a batch are packed into one int32 buffer and copied to the device
once. A decode-only batch (one row per request) replays the graph captured for the next larger number of rows. Batches with prompts
or drafts launch the same kernels one by one. A row's logits have the same bits either way ([Note: Batch invariance on CUDA] in
`ops/triton`). Importing this module needs triton.

The residual stream is fp32; inputs of matrix products have the compute dtype. Models with routed experts use no graphs: the CPU
selects the experts to run, from a copy of the router's output.

Suffixes: T rows of the batch, E hidden, R rows whose logits are needed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.inference.config import NORMS, Latent, Layer, RoutedExperts, TransformerConfig
from slipstream.inference.core import BatchNumbers, PartRunner
from slipstream.inference.decoder import add_experts, choose, learnt, soft_cap
from slipstream.inference.joined import JoinedParts
from slipstream.inference.kv_cache import KVCache
from slipstream.inference.models import rope_table, shape_of
from slipstream.inference.weights import DecoderWeights, LayerWeights, Mlp, leaves
from slipstream.ops.matrices import Codes, Int4, Matrix
from slipstream.ops.triton.attention import Tiles, attend, padded_group
from slipstream.ops.triton.linear import FEW, GROUPS, linear, num_slices
from slipstream.ops.triton.rows import HeadNorms, Norm, add_norm, gate, place
from slipstream.parallel.exchange import Exchange

_LANES = 64  # rows per tile of attention if some request has several rows; else _FEW_LANES
_FEW_LANES = 16  # not for fp32: without tensor cores, the layout, and so the number of lanes, decides the order of sums
_ALIGN = 4  # numbers; Triton specializes kernels on 16-byte alignment, so other offsets would compile them again


def why_not(config: TransformerConfig, weights: DecoderWeights, device: torch.device) -> str | None:
    """Return the reason that these kernels cannot run this model, or None if they can."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the kernels need 8.0"
    if config.qk_norm == "whole" and config.part.tp_size > 1:
        return "norms over all heads, which are in several processes"
    groups = {shape_of(m)[1] // m.scale.shape[1] for _, m in leaves(weights) if isinstance(m, Int4)}
    if others := groups.difference(GROUPS):
        return f"int4 in groups of {min(others)}; the kernels support groups of {', '.join(map(str, GROUPS))}"
    return None


class _Product:
    """x -> x @ matrix.T for several matrices with a common input; their outputs are concatenated."""

    def __init__(self, matrices: Sequence[Matrix], biases: Sequence[Tensor | None] = (None,)):
        self.parts: list[tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]] = []  # weight, scale, low, bias
        for matrix, bias in zip(matrices, biases, strict=True):
            weight, *more = _tensors(matrix)
            scale, low = (*more, None, None)[:2]
            self.parts.append((weight, scale, low, None if bias is None else bias.detach().float()))
        self.columns = sum(shape_of(matrix)[0] for matrix in matrices)
        self.slices = num_slices(self.columns, shape_of(matrices[0])[1])

    def __call__(self, x: Tensor, *, summed: bool = False) -> Tensor:
        """Return fp32 planes [planes, T, columns], which the consumer adds up; one plane if `summed`."""
        out = torch.empty(1 if summed or len(x) > FEW else self.slices, len(x), self.columns, device=x.device)
        begin = 0
        for weight, scale, low, bias in self.parts:
            linear(x, weight, scale, low, bias, out[:, :, begin : begin + len(weight)], self.slices)
            begin += len(weight)
        return out

    def by_head(self, x: Tensor, out: Tensor) -> None:
        """Multiply each head of x [T, heads, features] by its rows of the matrix: fp32 [T, heads, rows of a head]."""
        weight, scale, low, _ = self.parts[0]
        linear(x, weight, scale, low, None, out[None], self.slices)


def _tensors(matrix: Matrix) -> tuple[Tensor, ...]:
    return tuple(matrix) if isinstance(matrix, Codes) else (matrix.detach().contiguous(),)


def _join(owner: DecoderWeights | LayerWeights | Mlp, *names: str) -> _Product:
    """The product of the owner's matrices. Those of one type become views of one concatenated matrix, which saves memory."""
    matrices, biases = [getattr(owner, name) for name in names], [getattr(owner, f"{name}_bias", None) for name in names]
    kinds = {(type(m), *(t.dtype for t in _tensors(m)), *(t.shape[1:] for t in _tensors(m))) for m in matrices}
    if len(names) == 1 or len(kinds) > 1:
        matrices = [_like(matrix, _tensors(matrix)) for matrix in matrices]  # contiguous, unlike a transposed view
        for name, matrix in zip(names, matrices, strict=True):
            setattr(owner, name, matrix)
        return _Product(matrices, biases)
    sizes = [shape_of(m)[0] for m in matrices]
    joined = [torch.cat(parts) for parts in zip(*map(_tensors, matrices), strict=True)]
    for name, *parts in zip(names, *(tensor.split(sizes) for tensor in joined), strict=True):
        setattr(owner, name, _like(matrices[0], parts))
    if all(bias is None for bias in biases):
        return _Product([_like(matrices[0], joined)])
    zeros = [torch.zeros(size, device=joined[0].device) for size in sizes]
    filled = [zero if bias is None else bias.float() for bias, zero in zip(biases, zeros, strict=True)]
    return _Product([_like(matrices[0], joined)], [torch.cat(filled)])


def _like(matrix: Matrix, parts: Sequence[Tensor]) -> Matrix:
    return type(matrix)(*parts) if isinstance(matrix, Codes) else parts[0]


class _DenseMlp:
    def __init__(self, gate_up: _Product, down: _Product, activation: str, *, gated: bool):
        self.gate_up, self.down, self.activation, self.gated = gate_up, down, activation, gated

    def __call__(self, h: Tensor, *, summed: bool = False) -> Tensor:
        return self.down(gate(self.gate_up(h), self.activation, h.dtype, gated=self.gated), summed=summed)


class _Routed(NamedTuple):
    """A routed MLP, computed expert by expert as in `decoder`."""

    kind: RoutedExperts
    router: _Product
    router_bias: Tensor | None
    mine: range  # the experts that this process computes
    experts: list[_DenseMlp]
    shared: _DenseMlp | None
    shared_gate: _Product | None

    def __call__(self, h: Tensor) -> Tensor:
        routes = choose(self.kind, self.router(h, summed=True)[0], self.router_bias)
        out = torch.zeros(h.shape, device=h.device)
        add_experts(out, h, *routes, self.mine, lambda i, rows: self.experts[i](rows, summed=True)[0])
        if self.shared is not None:
            weight = 1.0 if self.shared_gate is None else self.shared_gate(h, summed=True)[0].sigmoid()
            out += self.shared(h, summed=True)[0] * weight
        return out[None]


class _Latents(NamedTuple):
    """Latent attention (see `config.Latent`). Each head's query has the size of the shared key."""

    shape: Latent
    latent: _Product
    latent_norm: Norm | None
    q_latent: _Product | None
    q_latent_norm: Norm | None
    q: _Product
    k: _Product  # the key matrix of each head
    v: _Product

    def __call__(self, h: Tensor) -> Tensor:
        """Return one plane [1, T, (H + 2) * D]: queries, the key, and the key again as the value."""
        turned, heads = self.shape.rotary_dim, self.k.columns // self.shape.rank
        key = self.latent(h, summed=True)[0]
        if self.q_latent is not None:
            h = add_norm(self.q_latent(h, summed=True)[0], None, None, self.q_latent_norm, h.dtype)
        q = self.q(h, summed=True)[0].unflatten(1, (heads, -1))
        plane = torch.empty(len(h), heads + 2, key.shape[1], device=h.device)
        plane[:, :heads, :turned] = q[:, :, :turned]
        self.k.by_head(q[:, :, turned:].to(h.dtype), plane[:, :heads, turned:])
        plane[:, heads:, :turned] = key[:, None, :turned]
        plane[:, heads:, turned:] = add_norm(key[:, turned:].contiguous(), None, None, self.latent_norm, key.dtype)[:, None]
        return plane.flatten(1)[None]

    def values(self, mixed: Tensor) -> Tensor:
        """[T, H * D] -> [T, H * value_dim]."""
        heads = self.k.columns // self.shape.rank
        out = torch.empty(len(mixed), heads, self.shape.value_dim, device=mixed.device)
        self.v.by_head(mixed.unflatten(1, (heads, -1))[:, :, self.shape.rotary_dim :], out)
        return out.flatten(1).to(mixed.dtype)


class _Layer(NamedTuple):
    kind: Layer
    norms: dict[str, Norm]  # of NORMS
    head_norms: HeadNorms | None
    qkv: _Product | _Latents
    out: _Product
    mlp: _DenseMlp | _Routed


class _Parts:
    """The parts of the forward, made from a model's weights, and the memory from which kernels and graphs read them."""

    def __init__(self, config: TransformerConfig, weights: DecoderWeights):
        self.config, self.own = config, dict[str, Tensor]()  # weights, by role, that are stored in another form than in `weights`
        assert isinstance(weights.embed, Tensor), "quantized embeddings are kept on CPUs only"
        self.embed, self.positions, self.token_types = weights.embed, weights.positions, weights.token_types
        pairs = zip(config.layers, weights.layers, strict=True)
        self.layers = [self._layer(f"layers.{i}.", layer, w) for i, (layer, w) in enumerate(pairs)]
        self.embed_norm, self.final_norm = self._norm("", weights, "embed_norm"), self._norm("", weights, "final_norm")
        self.embed_in = None if weights.embed_in is None else self._product("", weights, "embed_in")
        self.embed_out = None if weights.embed_out is None else self._product("", weights, "embed_out")
        self.head = self._head(weights) if config.has_head and config.part.has_head else None
        # Including views of joined matrices, see `_join`.
        self.memory = {role: _tensors(leaf) for role, leaf in leaves(weights)}
        self.memory |= {role: (tensor,) for role, tensor in self.own.items()}
        for role, leaf in leaves(weights):
            if role in self.own:
                self.put(role, leaf)

    def put(self, role: str, weight: Matrix) -> None:
        """As `core.Runner.put`. Writes in place, because graphs hold the addresses."""
        if role not in self.memory:
            assert role == "head", f"{role} is none of this decoder's"
            return  # tied: `put` writes the embedding
        new = _tensors(weight)
        if re.search(r"norms?(\.\d+)?$", role):
            new = (new[0].float() + self.config.norm_offset,)
        for old, part in zip(self.memory[role], new, strict=True):
            old.copy_(part)

    def _layer(self, at: str, layer: Layer, w: LayerWeights) -> _Layer:
        return _Layer(
            kind=layer,
            norms={role: norm for role in NORMS if (norm := self._norm(at, w, role)) is not None},
            head_norms=self._head_norms(at, w) if self.config.qk_norm else None,
            qkv=self._product(at, w, "q", "k", "v") if self.config.latent is None else self._latents(at, self.config.latent, w),
            out=self._product(at, w, "out"),
            mlp=self._mlp(f"{at}mlp.", w.dense_mlp) if layer.experts is None else self._routed(at, layer.experts, w),
        )

    def _latents(self, at: str, latent: Latent, w: LayerWeights) -> _Latents:
        norm, q_norm = (self._norm(at, w, role) for role in ("latent_norm", "q_latent_norm"))
        q, k, v = (self._product(at, w, name) for name in ("q", "k", "v"))
        return _Latents(
            shape=latent,
            latent=self._product(at, w, "latent"),
            q_latent=None if w.q_latent is None else self._product(at, w, "q_latent"),
            latent_norm=norm and norm._replace(eps=latent.eps, centered=False),
            q_latent_norm=q_norm and q_norm._replace(eps=latent.eps, centered=False),
            q=q,
            k=k,
            v=v,
        )

    def _norm(self, at: str, owner: DecoderWeights | LayerWeights, role: str) -> Norm | None:
        weight, bias = (self._vector(at, owner, name) for name in (role, f"{role}_bias"))
        return None if weight is None else Norm(weight, bias, self.config.norm_eps, self.config.norm == "layer")

    def _vector(self, at: str, owner: DecoderWeights | LayerWeights, name: str) -> Tensor | None:
        """Allocate memory for the vector, which `put` fills."""
        if (stored := getattr(owner, name, None)) is None:
            return None
        self.own[at + name] = torch.empty(stored.shape, device=stored.device)
        return self.own[at + name]

    def _head_norms(self, at: str, w: LayerWeights) -> HeadNorms:
        """A row per head, whether all heads share one weight, have their own, or have parts of one."""
        c, num = self.config, [shape_of(matrix)[0] // self.config.head_dim for matrix in (w.q, w.k)]
        weight, bias = (torch.empty(sum(num), c.head_dim, device=self.embed.device) for _ in range(2))
        for name, of_weight, of_bias in zip(("q_norm", "k_norm"), weight.split(num), bias.split(num), strict=True):
            memory = {name: of_weight.flatten() if c.qk_norm == "whole" else of_weight, f"{name}_bias": of_bias}
            memory |= {f"{name}s.{i}": row for i, row in enumerate(of_weight)}
            self.own |= {at + role: tensor for role, tensor in memory.items() if role in dict(leaves(w))}
        whole = c.qk_norm == "whole"
        return HeadNorms(weight, bias if c.qk_norm_bias else None, c.norm_eps, c.norm == "layer", whole)

    def _product(self, at: str, owner: DecoderWeights | LayerWeights | Mlp, *names: str) -> _Product:
        product = _join(owner, *names)
        biases: Sequence[Tensor | None] = [bias for _, _, _, bias in product.parts]
        if len(biases) < len(names) and biases[0] is not None:
            biases = biases[0].split([shape_of(getattr(owner, name))[0] for name in names])
        roles = zip((f"{name}_bias" for name in names), biases, strict=False)
        self.own |= {at + role: bias for role, bias in roles if bias is not None and getattr(owner, role) is not None}
        return product

    def _head(self, weights: DecoderWeights) -> _Product:
        head = _Product([weights.embed if weights.head is None else weights.head], [weights.head_bias])
        if (bias := head.parts[0][3]) is not None:
            self.own["head_bias"] = bias
        return head

    def _mlp(self, at: str, mlp: Mlp) -> _DenseMlp:
        gated = mlp.gate is not None
        up = self._product(at, mlp, "gate", "up") if gated else self._product(at, mlp, "up")
        return _DenseMlp(up, self._product(at, mlp, "down"), self.config.activation, gated=gated)

    def _routed(self, at: str, experts: RoutedExperts, w: LayerWeights) -> _Routed:
        return _Routed(
            kind=experts,
            router=_Product([w.routing]),
            router_bias=w.router_bias,
            mine=self.config.part.experts(experts.num),
            experts=[self._mlp(f"{at}experts.{e}.", mlp) for e, mlp in enumerate(w.experts)],
            shared=None if w.shared is None else self._mlp(f"{at}shared.", w.shared),
            shared_gate=None if w.shared_gate is None else _Product([w.shared_gate]),
        )


class _Step(NamedTuple):
    """The indices of a batch on the device: int32 views of one buffer."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    angles: Tensor  # [T], rows of the tables of rotary embeddings
    stops: Tensor  # [T], the position after the last one that a row attends to
    slots: Tensor  # [T], cache slot of each row's key and value; -1: the row belongs to no request
    rows: Tensor  # [R]
    tiles: Tiles
    types: Tensor | None = None  # [T], token types; None: all are 0


_UNUSED = (0, 0, 0, 1, -1, 0, 0, 0, 0)  # pads the lists of a step with rows that belong to no request


class CudaDecoder(PartRunner):
    """Weights and cache are on one device. `max_batch`: rows of the largest graph, one per request (0: no graphs). `exchange`: as
    in `JoinedParts`; with graphs, its operations must be capturable."""

    generate = None  # it does not run several steps per call

    def __init__(
        self,
        config: TransformerConfig,
        weights: DecoderWeights,
        cache: KVCache,
        compute_dtype: torch.dtype,
        exchange: Exchange | None = None,
        *,
        max_batch: int,
    ):
        self.config, self.cache, self.dtype = config, cache, compute_dtype
        self.num_blocks, self.block_size = cache.num_blocks, cache.block_size
        self.vocab_size, self.max_context = config.vocab_size, config.max_context
        self.short_context = config.short_context
        self._num_positions = min(self.max_context, self.num_blocks * self.block_size)  # that both context and cache can hold
        self._joined, (heads, keys) = JoinedParts(config, exchange), config.own_heads
        self._num_heads = heads.stop - heads.start
        self._lanes_of_row = padded_group(self._num_heads, keys.stop - keys.start)
        self._embed_scale = torch.tensor(config.embed_scale, dtype=compute_dtype).item()
        self._attn_scale = config.attn_scale or config.head_dim**-0.5
        self._slopes = torch.tensor(config.alibi[heads], device=cache.device) if config.alibi else None
        has_long, ropes = self.short_context < self.max_context, {layer.rope for layer in config.layers if layer.rope}
        self._rope_tables = {rope: rope_table(rope, self._num_positions, has_long, cache.device) for rope in ropes}
        self._parts = _Parts(config, weights)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # number of rows -> (graph, its logits)
        self.capture(max_batch)

    @torch.inference_mode()
    def put(self, role: str, weight: Matrix) -> None:
        self._parts.put(role, weight)

    # -- running --

    @torch.inference_mode()
    def run(self, numbers: BatchNumbers) -> Tensor:
        with self._here():
            self.cache.copy(numbers.pairs)
            one_row_each = self.config.has_head and len(numbers.ids) == len(numbers.start)
            lanes = self._lanes(one_row_each)
            lists = self._lists(numbers, lanes // self._lanes_of_row)
            if one_row_each and (size := next((size for size in self._graphs if size >= len(numbers.ids)), 0)):
                graph, logits = self._graphs[size]
                packed, _ = self._pack(lists, size)
                self._static[: len(packed)].copy_(packed, non_blocking=True)
                graph.replay()
                return logits[: len(numbers.logit_rows)].clone()  # the next replay overwrites them
            packed, cuts = self._pack(lists)
            step = self._step(packed.to(self.cache.device, non_blocking=True), cuts, lanes, max(lists[3]))
            if self.config.has_head:
                return self._compute(step)
            types = torch.tensor(numbers.types, dtype=torch.int32, device=self.cache.device) if numbers.types else None
            return self._hidden(step._replace(types=types), torch.float32)

    def _lists(self, numbers: BatchNumbers, rows_per_tile: int) -> list[list[int]]:
        """The numbers for a `_Step`'s tensors, the block tables last."""
        config, block_size = self.config, self.block_size
        positions, angles, stops, slots, tile_row, tile_length, tile_table = (list[int]() for _ in range(7))
        for span, table in zip(numbers.spans(), numbers.table_at, strict=True):
            places = range(span.start, span.stop)
            positions += places
            angles += (p + self._num_positions for p in places) if span.length > config.short_context else places
            stops += (p + 1 for p in places) if config.causal else [span.stop] * len(places)
            slots += (span.blocks[p // block_size] * block_size + p % block_size for p in places)
            for row in range(span.begin, span.end, rows_per_tile):
                tile_row.append(row)
                tile_length.append(min(rows_per_tile, span.end - row))
                tile_table.append(table)
        tokens, rows, tables = (list(one) for one in (numbers.ids, numbers.logit_rows, numbers.tables))
        return [tokens, positions, angles, stops, slots, rows, tile_row, tile_length, tile_table, tables]

    def _lanes(self, one_row_each: bool) -> int:
        return max(_FEW_LANES if one_row_each and self.dtype != torch.float32 else _LANES, self._lanes_of_row)

    def _here(self) -> contextlib.AbstractContextManager[Any]:
        """Make the cache's device current, because Triton launches on the current device."""
        return torch.cuda.device(self.cache.device) if self.cache.device.type == "cuda" else contextlib.nullcontext()

    def _pack(self, lists: list[list[int]], size: int = 0) -> tuple[Tensor, list[tuple[int, int]]]:
        """Concatenate the lists into one host tensor. All but the last (the block tables) are padded to `size` rows. Also returns
        each list's bounds."""
        *fixed, tables = lists
        filled = [numbers + [unused] * (size - len(numbers)) for numbers, unused in zip(fixed, _UNUSED, strict=True)]
        aligned = [numbers + [0] * (-len(numbers) % _ALIGN) for numbers in (*filled, tables)]
        begins = accumulate(map(len, aligned), initial=0)
        cuts = [(begin, begin + len(numbers)) for begin, numbers in zip(begins, (*filled, tables), strict=False)]
        packed = torch.tensor([number for numbers in aligned for number in numbers], dtype=torch.int32)
        return packed.pin_memory() if self.cache.device.type == "cuda" else packed, cuts

    def _step(self, numbers: Tensor, cuts: list[tuple[int, int]], lanes: int, context: int) -> _Step:
        lists = [numbers[begin:end] for begin, end in cuts]
        tokens, positions, angles, stops, slots, rows, tile_row, tile_length, tile_table, tables = lists
        tiles = Tiles(tile_row, tile_length, tile_table, tables, lanes, context)
        return _Step(tokens, positions, angles, stops, slots, rows, tiles)

    def capture(self, max_batch: int) -> None:
        """Capture graphs for batches of up to `max_batch` rows, if the model supports graphs."""
        if max_batch and self.cache.device.type == "cuda" and not any(layer.experts for layer in self.config.layers):
            self._capture(max_batch)

    def close(self) -> None:
        """Free the graphs, with everything that they captured of `exchange`. No forward may run."""
        if self._graphs:
            torch.cuda.synchronize(self.cache.device)
        for graph, _ in self._graphs.values():
            graph.reset()  # a traceback's frame may still reference it
        self._graphs = {}

    @torch.inference_mode()
    def _capture(self, max_batch: int) -> None:
        """Capture graphs for 1, 2, 4, ... and `max_batch` rows. The largest comes first: the others reuse its memory."""
        sizes = sorted({*(1 << i for i in range(max_batch.bit_length()) if 1 << i < max_batch), max_batch})
        lanes = self._lanes(one_row_each=True)
        capacity = len(_UNUSED) * (max_batch + _ALIGN) + max_batch * -(-self._num_positions // self.block_size)
        pool = torch.cuda.graph_pool_handle()
        with self._here():
            stream = torch.cuda.Stream()  # torch's default capture stream is shared by all devices
            self._static = torch.zeros(capacity, dtype=torch.int32, device=self.cache.device)
            for size in reversed(sizes):
                numbers, cuts = self._pack([[] for _ in range(len(_UNUSED) + 1)], size)
                self._static[: len(numbers)].copy_(numbers)
                step = self._step(self._static, [*cuts[:-1], (cuts[-1][0], capacity)], lanes, self._num_positions)
                self._compute(step)  # compiles the kernels
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                # "thread_local": other threads may use CUDA during the capture, for example another engine's.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    logits = self._compute(step)
                self._graphs[size] = graph, logits
        self._graphs = {size: self._graphs[size] for size in sizes}

    def _compute(self, step: _Step) -> Tensor:
        h, c, parts = self._hidden(step, self.dtype), self.config, self._parts
        if not len(step.rows) or parts.head is None:
            return torch.empty(0, self.vocab_size, device=h.device)
        h = h.index_select(0, step.rows)
        h = h if parts.embed_out is None else parts.embed_out(h, summed=True)[0].to(self.dtype)
        logits = self._joined.logits(parts.head(h, summed=True)[0])
        return soft_cap(logits if c.logit_scale == 1.0 else logits * c.logit_scale, c.logit_softcap)

    def _hidden(self, step: _Step, dtype: torch.dtype) -> Tensor:
        """[T, E], after the final norm."""
        c, x = self.config, self._embedded(step)  # x: the residual stream, which `add_norm` updates
        add = partial(add_norm, scale=c.residual_scale, after=c.residual == "after")
        added: Tensor | None = None  # planes still to be added to x
        post: Norm | None = None
        for i, layer in enumerate(self._parts.layers):
            norms = layer.norms.get
            h = add(x, added, post, norms("input_norm"), self.dtype)
            out, attn_post, before = self._attend(i, layer, h, step), norms("attn_post_norm"), norms("mlp_norm")
            if c.residual == "parallel":
                h = h if before is None else add(x, None, None, before, self.dtype)
                add(x, out, attn_post, None, None)
            else:
                h = add(x, out, attn_post, before, self.dtype)
            added, post = self._mlp(layer.mlp, h), norms("mlp_post_norm")
        return add(x, added, post, self._parts.final_norm, dtype)

    def _embedded(self, step: _Step) -> Tensor:
        """fp32 [T, E]."""
        c, parts = self.config, self._parts
        x = (self._joined.embedded(parts.embed, step.tokens).to(self.dtype) * self._embed_scale).float()
        if parts.token_types is not None:
            x += parts.token_types[0] if step.types is None else F.embedding(step.types, parts.token_types)
        places = None if parts.positions is None else F.embedding(learnt(c, step.tokens, step.positions), parts.positions)
        x = x if places is None or c.late_positions else x + places
        x = x if parts.embed_norm is None else add_norm(x, None, None, parts.embed_norm, torch.float32)
        x = x if parts.embed_in is None else parts.embed_in(x.to(self.dtype), summed=True)[0]
        return x + places if places is not None and c.late_positions else x

    def _attend(self, index: int, layer: _Layer, h: Tensor, step: _Step) -> Tensor:
        """Planes [planes, T, E]."""
        c, keys, values = self.config, self.cache.keys[index], self.cache.values[index]
        turns = self._rope_tables[layer.kind.rope] if layer.kind.rope else None
        heads: dict[str, Any] = {"num_heads": self._num_heads, "dtype": self.dtype}
        q = place(layer.qkv(h), layer.head_norms, turns, step.angles, step.slots, keys, values, **heads)
        options: dict[str, Any] = {"cap": c.attn_softcap, "window": layer.kind.window, "slopes": self._slopes}
        mixed = attend(q, keys, values, step.positions, step.stops, step.tiles, scale=self._attn_scale, **options)
        mixed = layer.qkv.values(mixed) if isinstance(layer.qkv, _Latents) else mixed
        return self._joined.planes(layer.out(mixed), self._joined.added)

    def _mlp(self, mlp: _DenseMlp | _Routed, h: Tensor) -> Tensor:
        """Planes [planes, T, E]."""
        return self._joined.planes(mlp(h), self._joined.routed if isinstance(mlp, _Routed) else self._joined.added)
