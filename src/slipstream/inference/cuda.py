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
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.inference.config import Layer, Rope, RoutedExperts, TransformerConfig
from slipstream.inference.core import Batch
from slipstream.inference.decoder import soft_cap
from slipstream.inference.kv_cache import KVCache
from slipstream.inference.models import shape_of
from slipstream.inference.weights import Codes, DecoderWeights, Int4, LayerWeights, Matrix, Mlp, leaves
from slipstream.ops.triton.attention import Tiles, attend, padded_group
from slipstream.ops.triton.linear import FEW, GROUPS, linear, num_slices
from slipstream.ops.triton.rows import add_norm, gate, place

_LANES = 64  # per tile of attention, if a request has several rows; else _FEW_LANES
_FEW_LANES = 16  # not for fp32: it does not use tensor cores, so the order of its sums depends on the layout, and that on the lanes
_NORMS = ("input_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm")
_ALIGN = 4  # numbers; Triton specializes kernels on 16-byte alignment, so other offsets would compile them again


def why_not(weights: DecoderWeights, device: torch.device) -> str | None:
    """Why these kernels cannot run this model; None if they can. `TransformerConfig.unlike_llama` are other reasons."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the kernels need 8.0"
    if any(layer.q_norm is not None and len(layer.q_norm) == shape_of(layer.q)[0] for layer in weights.layers):
        return "norms over all heads of queries and keys together"
    groups = {shape_of(m)[1] // m.scale.shape[1] for _, m in leaves(weights.layers) if isinstance(m, Int4)}
    if others := groups.difference(GROUPS):
        return f"int4 in groups of {min(others)}; the kernels support groups of {', '.join(map(str, GROUPS))}"
    return None


class _Product:
    """x -> x @ matrix.T for matrices with a common input; their columns are concatenated."""

    def __init__(self, matrices: Sequence[Matrix], biases: Sequence[Tensor | None] = (None,)):
        self.parts: list[tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]] = []  # weight, scale, low, bias
        for matrix, bias in zip(matrices, biases, strict=True):
            weight, *more = _tensors(matrix)
            scale, low = (*more, None, None)[:2]
            self.parts.append((weight, scale, low, None if bias is None else bias.detach().float()))
        self.columns = sum(shape_of(matrix)[0] for matrix in matrices)
        self.slices = num_slices(self.columns, shape_of(matrices[0])[1])

    def __call__(self, x: Tensor, *, summed: bool = False) -> Tensor:
        """fp32 planes [planes, T, columns], which the consumer adds up; a single one if `summed`."""
        out = torch.empty(1 if summed or len(x) > FEW else self.slices, len(x), self.columns, device=x.device)
        begin = 0
        for weight, scale, low, bias in self.parts:
            linear(x, weight, scale, low, bias, out[:, :, begin : begin + len(weight)], self.slices)
            begin += len(weight)
        return out


def _tensors(matrix: Matrix) -> tuple[Tensor, ...]:
    return tuple(matrix) if isinstance(matrix, Codes) else (matrix.detach().contiguous(),)


def _join(owner: LayerWeights | Mlp, *names: str) -> _Product:
    """The product of the owner's matrices. Those of one type become views of one concatenated matrix, so memory is not doubled."""
    matrices, biases = [getattr(owner, name) for name in names], [getattr(owner, f"{name}_bias") for name in names]
    if len({(type(m), *(t.dtype for t in _tensors(m)), *(t.shape[1:] for t in _tensors(m))) for m in matrices}) > 1:
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


def _biases(path: str, product: _Product, owner: LayerWeights | Mlp, *names: str) -> dict[str, tuple[Tensor, ...]]:
    """The memory of a product's biases, by role."""
    parts: Sequence[Tensor | None] = [bias for _, _, _, bias in product.parts]
    if len(parts) < len(names) and parts[0] is not None:
        parts = parts[0].split([shape_of(getattr(owner, name))[0] for name in names])
    pairs = ((f"{name}_bias", part) for name, part in zip(names, parts, strict=False))
    return {path + name: (part,) for name, part in pairs if part is not None and getattr(owner, name) is not None}


def _like(matrix: Matrix, parts: Sequence[Tensor]) -> Matrix:
    return type(matrix)(*parts) if isinstance(matrix, Codes) else parts[0]


class _Gated:
    """An MLP."""

    def __init__(self, mlp: Mlp, activation: str):
        self.gate_up, self.down = _join(mlp, "gate", "up"), _Product([mlp.down], [mlp.down_bias])
        self.activation = activation

    def __call__(self, h: Tensor, *, summed: bool = False) -> Tensor:
        return self.down(gate(self.gate_up(h), self.activation, h.dtype), summed=summed)


class _Routed:
    """A routed MLP, computed expert by expert as in `decoder`."""

    def __init__(self, experts: RoutedExperts, w: LayerWeights, activation: str):
        self.top_k, self.normalize = experts.top_k, experts.normalize
        self.router = _Product([w.routing])
        self.experts = [_Gated(mlp, activation) for mlp in w.experts]
        self.shared = None if w.shared is None else _Gated(w.shared, activation)
        self.shared_gate = None if w.shared_gate is None else _Product([w.shared_gate])

    def __call__(self, h: Tensor) -> Tensor:
        shares, chosen = self.router(h, summed=True)[0].softmax(-1).topk(self.top_k, -1)
        if self.normalize:
            shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros(h.shape, device=h.device)
        for e in chosen.unique().tolist():
            token, place = (chosen == e).nonzero(as_tuple=True)
            out.index_add_(0, token, self.experts[e](h[token], summed=True)[0] * shares[token, place, None])
        if self.shared is not None and self.shared_gate is not None:
            out += self.shared_gate(h, summed=True)[0].sigmoid() * self.shared(h, summed=True)[0]
        return out[None]


class _Layer(NamedTuple):
    kind: Layer
    input_norm: Tensor
    mlp_norm: Tensor
    attn_post_norm: Tensor | None
    mlp_post_norm: Tensor | None
    qk_norms: Tensor | None  # [2, head_dim]
    qkv: _Product
    out: _Product
    mlp: _Gated | _Routed


class _Step(NamedTuple):
    """The indices of a batch on the device: int32 views of one buffer."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T], cache slot of each row's key and value; -1: the row belongs to no request
    rows: Tensor  # [R]
    tiles: Tiles


_UNUSED = (0, 0, -1, 0, 0, 0, 0)  # pads the lists of a step with rows that belong to no request


def _numbers(batch: Batch, block_size: int, rows_per_tile: int) -> list[list[int]]:
    """The numbers of a `_Step`'s tensors, those of its tiles last."""
    tokens, positions, slots, rows, tile_row, tile_length, tile_table, tables = lists = [list[int]() for _ in range(8)]
    for chunk in batch.chunks:
        begin, blocks = len(tokens), chunk.request.blocks
        stop = chunk.start + chunk.num_tokens
        tokens += chunk.request.tokens[chunk.start : chunk.stop]
        tokens += chunk.draft
        assert len(tokens) - begin == chunk.num_tokens, f"{chunk} exceeds its request's {len(chunk.request.tokens)} tokens"
        positions += range(chunk.start, stop)
        slots += (blocks[p // block_size] * block_size + p % block_size for p in range(chunk.start, stop))
        rows += range(len(tokens) - chunk.num_rows, len(tokens))
        for row in range(begin, len(tokens), rows_per_tile):
            tile_row.append(row)
            tile_length.append(min(rows_per_tile, len(tokens) - row))
            tile_table.append(len(tables))
        tables += blocks[: -(-stop // block_size)]
    return lists


class CudaDecoder:
    """Weights and cache are on one device. `max_batch`: rows of the largest graph, one per request (0: no graphs)."""

    generate = None  # several steps at once

    def __init__(
        self, config: TransformerConfig, weights: DecoderWeights, cache: KVCache, compute_dtype: torch.dtype, *, max_batch: int
    ):
        self.config, self.cache, self.dtype = config, cache, compute_dtype
        self.num_blocks, self.block_size = cache.num_blocks, cache.block_size
        self.vocab_size, self.max_context = config.vocab_size, config.max_context
        self.short_context = config.short_context
        self._lanes_of_row = padded_group(config.num_heads, config.num_kv_heads)
        assert isinstance(weights.embed, Tensor), "quantized embeddings are kept on CPUs only"
        self._embed, self._embed_scale = weights.embed, torch.tensor(config.embed_scale, dtype=compute_dtype).item()
        self._rope_tables = {layer.rope: self._rope_table(layer.rope) for layer in config.layers if layer.rope}
        self._layers = [self._layer(layer, w) for layer, w in zip(config.layers, weights.layers, strict=True)]
        self._final_norm = self._norm(weights.final_norm)
        self._head = _Product([weights.embed if weights.head is None else weights.head])
        self._memory = self._weight_memory(weights)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by number of rows: the graph, and its logits
        if max_batch and cache.device.type == "cuda" and not any(layer.experts for layer in config.layers):
            self._capture(max_batch)
        if cache.device.type == "cuda":
            torch.cuda.synchronize(cache.device)  # the engine's thread uses another stream

    # -- the weights in the kernels' form --

    def _norm(self, weight: Tensor | None) -> Any:
        return None if weight is None else (weight.detach().float() + self.config.norm_offset).contiguous()

    def _rope_table(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Cosine and sine, fp32 [max_context, rotary_dim / 2]."""
        positions = torch.arange(self.max_context, dtype=torch.float32, device=self.cache.device)
        angles = positions[:, None] * torch.tensor(rope.inv_freq, device=self.cache.device)
        return angles.cos() * rope.scale, angles.sin() * rope.scale

    def _layer(self, layer: Layer, w: LayerWeights) -> _Layer:
        activation = self.config.activation
        mlp = _Gated(w.dense_mlp, activation) if layer.experts is None else _Routed(layer.experts, w, activation)
        both = w.q_norm is not None and w.k_norm is not None
        return _Layer(
            kind=layer,
            **{name: self._norm(getattr(w, name)) for name in _NORMS},
            qk_norms=torch.stack([self._norm(w.q_norm), self._norm(w.k_norm)]) if both else None,
            qkv=_join(w, "q", "k", "v"),
            out=_Product([w.out], [w.out_bias]),
            mlp=mlp,
        )

    # -- new weights --

    def _weight_memory(self, weights: DecoderWeights) -> dict[str, tuple[Tensor, ...]]:
        """By role, the memory that kernels and graphs read. Views of joined matrices included, see `_join`."""
        memory = {role: _tensors(leaf) for role, leaf in leaves(weights)}
        memory["final_norm"] = (self._final_norm,)
        for i, (layer, w) in enumerate(zip(self._layers, weights.layers, strict=True)):
            at = f"layers.{i}."
            memory |= {at + name: (getattr(layer, name),) for name in _NORMS}
            if layer.qk_norms is not None:
                memory |= {at + "q_norm": (layer.qk_norms[0],), at + "k_norm": (layer.qk_norms[1],)}
            memory |= _biases(at, layer.qkv, w, "q", "k", "v") | _biases(at, layer.out, w, "out")
            mlps: dict[str, tuple[_Gated | _Routed | None, Mlp | None]] = {"mlp.": (layer.mlp, w.mlp)}
            if isinstance(layer.mlp, _Routed):
                mlps = {f"experts.{e}.": pair for e, pair in enumerate(zip(layer.mlp.experts, w.experts, strict=True))}
                mlps["shared."] = (layer.mlp.shared, w.shared)
            for prefix, (product, mlp) in mlps.items():
                if isinstance(product, _Gated) and mlp is not None:
                    path = at + prefix
                    memory |= _biases(path, product.gate_up, mlp, "gate", "up") | _biases(path, product.down, mlp, "down")
        return memory

    @torch.inference_mode()
    def put(self, role: str, weight: Matrix) -> None:
        """As `core.Runner.put`. Writes in place, because graphs have the addresses."""
        if role not in self._memory:
            assert role == "head", f"{role} is none of this decoder's"
            return  # tied: `put` writes the embedding
        new = _tensors(weight)
        if role.endswith("norm"):
            new = (new[0].float() + self.config.norm_offset,)
        for old, part in zip(self._memory[role], new, strict=True):
            old.copy_(part)

    # -- running --

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """As `core.Runner.forward`; the logits are on the cache's device."""
        with self._here():
            self.cache.copy(batch.copies)
            alone = all(chunk.num_tokens == 1 for chunk in batch.chunks)
            lanes = self._lanes(alone)
            lists = _numbers(batch, self.block_size, lanes // self._lanes_of_row)
            if alone and (size := next((size for size in self._graphs if size >= len(batch.chunks)), 0)):
                graph, logits = self._graphs[size]
                numbers, _ = self._pack(lists, size)
                self._static[: len(numbers)].copy_(numbers, non_blocking=True)
                graph.replay()
                return logits[: len(lists[3])].clone()  # the next replay overwrites them
            numbers, cuts = self._pack(lists)
            context = max(lists[1]) + 1
            return self._compute(self._step(numbers.to(self.cache.device, non_blocking=True), cuts, lanes, context))

    def _lanes(self, alone: bool) -> int:
        return max(_FEW_LANES if alone and self.dtype != torch.float32 else _LANES, self._lanes_of_row)

    def _here(self) -> contextlib.AbstractContextManager[Any]:
        """Make the cache's device current: Triton launches there."""
        return torch.cuda.device(self.cache.device) if self.cache.device.type == "cuda" else contextlib.nullcontext()

    def _pack(self, lists: list[list[int]], size: int = 0) -> tuple[Tensor, list[tuple[int, int]]]:
        """Concatenate the lists into one host tensor, all but the last (the tables) padded to `size` rows. Also returns the bounds
        of each list."""
        *fixed, tables = lists
        filled = [numbers + [unused] * (size - len(numbers)) for numbers, unused in zip(fixed, _UNUSED, strict=True)]
        aligned = [numbers + [0] * (-len(numbers) % _ALIGN) for numbers in (*filled, tables)]
        begins = accumulate(map(len, aligned), initial=0)
        cuts = [(begin, begin + len(numbers)) for begin, numbers in zip(begins, (*filled, tables), strict=False)]
        packed = torch.tensor([number for numbers in aligned for number in numbers], dtype=torch.int32)
        return packed.pin_memory() if self.cache.device.type == "cuda" else packed, cuts

    def _step(self, numbers: Tensor, cuts: list[tuple[int, int]], lanes: int, context: int) -> _Step:
        tokens, positions, slots, rows, tile_row, tile_length, tile_table, tables = (numbers[begin:end] for begin, end in cuts)
        tiles = Tiles(tile_row, tile_length, tile_table, tables, lanes, context)
        return _Step(tokens, positions, slots, rows, tiles)

    @torch.inference_mode()
    def _capture(self, max_batch: int) -> None:
        """Capture graphs for 1, 2, 4, ... and `max_batch` rows, the largest first: the others reuse its memory."""
        sizes = sorted({*(1 << i for i in range(max_batch.bit_length()) if 1 << i < max_batch), max_batch})
        lanes = self._lanes(alone=True)
        capacity = 7 * (max_batch + _ALIGN) + max_batch * -(-self.max_context // self.block_size)
        pool = torch.cuda.graph_pool_handle()
        with self._here():
            stream = torch.cuda.Stream()  # torch's default capture stream is shared by all devices
            self._static = torch.zeros(capacity, dtype=torch.int32, device=self.cache.device)
            for size in reversed(sizes):
                numbers, cuts = self._pack([[] for _ in range(8)], size)
                self._static[: len(numbers)].copy_(numbers)
                step = self._step(self._static, [*cuts[:7], (cuts[7][0], capacity)], lanes, self.max_context)
                self._compute(step)  # compiles the kernels
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                # "thread_local": other threads may use CUDA during the capture, another engine's for example.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    logits = self._compute(step)
                self._graphs[size] = graph, logits
        self._graphs = {size: self._graphs[size] for size in sizes}

    def _compute(self, step: _Step) -> Tensor:
        c = self.config
        x = F.embedding(step.tokens, self._embed).to(self.dtype)
        x = (x * self._embed_scale).float()  # the residual stream, which `add_norm` updates
        added: Tensor | None = None  # planes still to be added to x
        post: Tensor | None = None
        for i, layer in enumerate(self._layers):
            h = add_norm(x, added, post, layer.input_norm, c.norm_eps, self.dtype)
            mixed = self._attend(i, layer, h, step)
            h = add_norm(x, layer.out(mixed), layer.attn_post_norm, layer.mlp_norm, c.norm_eps, self.dtype)
            added, post = layer.mlp(h), layer.mlp_post_norm
        h = add_norm(x, added, post, self._final_norm, c.norm_eps, self.dtype)
        if not len(step.rows):
            return torch.empty(0, self.vocab_size, device=h.device)
        return soft_cap(self._head(h.index_select(0, step.rows), summed=True)[0], c.logit_softcap)

    def _attend(self, index: int, layer: _Layer, h: Tensor, step: _Step) -> Tensor:
        c, keys, values = self.config, self.cache.keys[index], self.cache.values[index]
        q = place(
            layer.qkv(h),
            layer.qk_norms,
            self._rope_tables[layer.kind.rope] if layer.kind.rope else None,
            step.positions,
            step.slots,
            keys,
            values,
            num_heads=c.num_heads,
            eps=c.norm_eps,
            dtype=self.dtype,
        )
        scale = c.attn_scale or c.head_dim**-0.5
        return attend(q, keys, values, step.positions, step.tiles, scale=scale, cap=c.attn_softcap, window=layer.kind.window)
