"""The native CPU forward: a whole step of a transformer in one C call (ops/csrc/forward.c), weights packed once at load.

`NativeDecoder` is a `core.Runner`. It owns the packed weights and the paged KV cache in the kernel's layout: a block's keys are
transposed, so that 16 positions form one vector, in pairs for bf16 (csrc/decoder.h). A logit has the same bits for every
composition of the batch, for every split of the prompt into chunks, and whether its prefix was computed or cached.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.inference.adapters import ROLES
from slipstream.inference.config import NO_LATENT, NORMS, RoutedExperts, TransformerConfig
from slipstream.inference.core import Batch, BatchNumbers, Generate, PartRunner, numbers_of, numbers_of_texts
from slipstream.inference.decoder import learnt
from slipstream.inference.kv_cache import untouched_zeros
from slipstream.inference.models import rope_table, shape_of
from slipstream.inference.on_disk import LINE, ExpertStore, LayerStore, WeightMemory, allocator, choose
from slipstream.inference.ranks import ServingRanks, message_nbytes
from slipstream.inference.sampler import Draws
from slipstream.inference.weights import DecoderWeights, LayerWeights, Mlp
from slipstream.ops import build
from slipstream.ops.fused import ACTIVATIONS
from slipstream.ops.matrices import (
    CODES,
    PANEL,
    TYPES,
    Codes,
    Matrix,
    MatrixRecord,
    Table,
    bias_table,
    dequantize,
    fill,
    is_centred,
    record_of,
    tables_of,
)
from slipstream.ops.pages import Pool, free_pages
from slipstream.ops.team import MAX_THREADS, Team

# Fields of the C structs whose name and value are those of a field of `TransformerConfig` or `RoutedExperts`.
_OF_CONFIG = (*("hidden_size", "intermediate_size", "head_dim", "value_dim"), *("norm_eps", "attn_softcap", "logit_softcap"))
_OF_EXPERTS = ("num", "top_k", "normalize", "num_groups", "top_groups", "scale", "shared_size")
# As in csrc/decoder.h.
_ROWS = 6  # rows of a tile
_MAX_EXPERTS = 512  # including the shared one
_RESIDUALS = ("before", "after", "parallel")

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _Experts(ctypes.Structure):
    _fields_ = (
        *((name, _int) for name in ("num", "top_k", "normalize", "has_shared", "by_sigmoid", "num_groups", "top_groups")),
        *(("scale", _float), ("is_cut", _int)),
        *((name, _long) for name in ("inner_size", "shared_size", "widest")),
        *((name, ctypes.POINTER(_int)) for name in ("first_inner", "first_out")),
        *((name, ctypes.POINTER(MatrixRecord)) for name in ("gate_up", "down")),
        ("store", _pointer),
        ("stored", ctypes.POINTER(MatrixRecord)),
        ("first_stored", _long),
        *((name, _pointer) for name in ("router", "bias", "shared_gate")),
    )


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _pointer), ("bias", _pointer))


_HEAD_NORMS = ("q_norm", "k_norm")
_LATENTS = ("latent", "q_latent")
_LATENT_NORMS = ("latent_norm", "q_latent_norm")


class _LayerRecord(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in NORMS),
        *((name, _Norm) for name in _HEAD_NORMS),
        *((name, MatrixRecord) for name in _LATENTS),
        *((name, _pointer) for name in _LATENT_NORMS),
        *((f"{name}_heads", ctypes.POINTER(MatrixRecord)) for name in "kv"),
        *((name, MatrixRecord) for name in ("q", "k", "v", "out", "gate_up", "down")),
        ("experts", ctypes.POINTER(_Experts)),
        *((name, _pointer) for name in ("cosine", "sine", "keys", "values")),
        *((name, _int) for name in ("rotary_dim", "window")),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        *((name, _long) for name in ("hidden_size", "intermediate_size", "vocab_size", "embed_size", "attended_size", "keys_size")),
        *((name, _long) for name in ("first_attended", "first_key", "first_hidden", "first_inner", "first_token", "num_tokens")),
        *((name, _int) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim")),
        *((name, _int) for name in ("latent_rank", "q_latent_rank", "plain_dim", "value_dim", "qk_norm_whole")),
        *((name, _int) for name in ("cache_type", "embed_type", "activation", "centered", "residual", "plain")),
        *((name, _int) for name in ("both_ways", "late_positions", "own_codes")),
        *((name, _float) for name in ("latent_eps", "norm_eps", "embed_scale", "attn_scale", "attn_softcap", "logit_softcap")),
        *((name, _float) for name in ("residual_scale", "logit_scale")),
        *(("embed", _pointer), ("embed_codes", ctypes.POINTER(MatrixRecord))),
        *((name, _pointer) for name in ("positions", "token_types", "slopes")),
        *((name, _Norm) for name in ("embed_norm", "final_norm")),
        *((name, MatrixRecord) for name in ("embed_in", "embed_out", "head")),
        ("layers", ctypes.POINTER(_LayerRecord)),
        ("ranks", _pointer),
    )


class _Steps(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("rows", "u", "ends", "first_end", "stop", "ids", "start", "tokens")),
        *((name, _int) for name in ("num_steps", "done")),
    )


_NUMBERS = ("ids", "first_row", "start", "turns", "tables", "table_at", "logit_rows", "types")
_INPUTS = ("codes", "scales", "starts", "halves")


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, _int) for name in ("num_rows", "num_sequences", "num_logits", "first_layer", "until_layer")),
        *((name, _pointer) for name in (*_NUMBERS, "adapters", "low_tiles", "low")),
        *((name, _long) for name in ("low_size", "num_tiles")),
        *((name, _pointer) for name in ("logits", "x", "normed", "qkv", "attended", "act", "low_q", "narrow", "mixed", "added")),
        *((name, _pointer) for name in ("all_q", "all_k", *_INPUTS, *(f"shared_{name}" for name in _INPUTS))),
        # routing
        *((name, _pointer) for name in ("scores", "shares", "chosen", "place", "first", "gathered", "expert_act", "expert_out")),
    )


def why_not(config: TransformerConfig) -> str | None:
    """Return the reason that the native forward cannot run this model, or None if it can."""
    library = build.load()
    if library.kernels is None:
        return library.reason
    if config.head_dim % PANEL:
        return f"heads of {config.head_dim} features; the kernels need a multiple of {PANEL}"
    usual = config.norms == NORMS[:2] and config.residual == "before" and config.residual_scale == 1.0
    if any(layer.experts for layer in config.layers) and not usual:
        return "routed experts whose outputs are normed, scaled or added otherwise than Llama's"
    if config.alibi and not config.causal:
        return "ALiBi in an encoder"
    if any(layer.experts is not None and layer.experts.num >= _MAX_EXPERTS for layer in config.layers):
        return f"more than {_MAX_EXPERTS - 1} experts"
    if config.latent is not None and (config.residual != "before" or config.num_heads > _MAX_EXPERTS):
        return f"latent attention beside the MLP, or with more than {_MAX_EXPERTS} heads"
    if config.num_heads % config.num_kv_heads:
        return f"{config.num_heads} heads do not share {config.num_kv_heads} key-value heads evenly"
    return None


def _scratch_widths(config: TransformerConfig) -> dict[str, tuple[int, torch.dtype]]:
    """Pointers of `_Batch` to scratch memory -> (elements per row of the batch, their dtype)."""
    routed = [layer.experts for layer in config.layers if layer.experts is not None]
    inner = max((max(experts.intermediate_size, experts.shared_size) for experts in routed), default=0)
    places = max((experts.top_k + 1 for experts in routed), default=1)  # entries that a row has in the experts' lists
    hidden, values = config.hidden_size, config.num_heads * config.value_dim
    queries, keys = (own.stop - own.start for own in config.own_heads)
    latent = config.latent or NO_LATENT
    narrow = queries * (latent.plain_dim + latent.rotary_dim)
    # For each head separately, codes are padded to whole groups.
    of_heads = queries * max(size + -size % CODES for size in (latent.plain_dim, latent.rank))
    outer = max(hidden, config.embed_size)
    widest = max(outer, config.intermediate_size, values, inner, latent.q_rank, narrow, of_heads)
    widest += -widest % CODES
    widths = {
        "x": (outer, torch.float32),
        "normed": (outer, torch.float32),
        "low_q": (latent.q_rank, torch.float32),
        "narrow": (narrow, torch.float32),
        "mixed": (queries * config.head_dim if config.latent else 0, torch.float32),
        "qkv": ((queries + 2 * keys) * config.head_dim, torch.float32),
        "attended": (values, torch.float32),
        "act": (config.intermediate_size, torch.float32),
        "codes": (places * widest, torch.int8),
        "scales": (places * 2 * widest // CODES, torch.float32),
        "starts": (places * 2 * widest // CODES, torch.int32),
        "halves": (places * widest, torch.bfloat16),
    }
    if routed:
        num, top_k = max(experts.num for experts in routed), max(experts.top_k for experts in routed)
        widths |= {
            "scores": (num, torch.float32),
            "shares": (top_k, torch.float32),
            "chosen": (top_k, torch.int32),
            "place": (top_k + 1, torch.int32),
            "first": (num + 2, torch.int32),
            "gathered": (places * hidden, torch.float32),
            "expert_act": (places * inner, torch.float32),
            "expert_out": (places * hidden, torch.float32),
        }
    return widths


def _form(m: Matrix) -> tuple[Any, ...]:
    """The properties that matrices packed together must share."""
    record = record_of(m)
    return record.num_columns, record.num_features, record.type, record.group


def _packed_nbytes(parts: Sequence[Matrix]) -> int:
    """The most bytes that `NativeDecoder._packed` writes for matrices packed together, in whole lines."""
    tables = tables_of(parts[0]).values()
    return sum(-(-table.panel_nbytes * table.num_panels(len(parts)) * len(parts) // LINE) * LINE for table in tables)


def _mlp_nbytes(mlp: Mlp) -> int:
    return _packed_nbytes([m for m in (mlp.gate, mlp.up) if m is not None]) + _packed_nbytes([mlp.down])


def _fill_matrix(record: MatrixRecord, part: int, num_parts: int, weight: Matrix) -> None:
    for name, table in tables_of(weight).items():
        fill(getattr(record, name), table, part, num_parts)


def _fill_bias(record: MatrixRecord, part: int, num_parts: int, weight: Matrix) -> None:
    fill(record.bias, bias_table(dequantize(weight)), part, num_parts)


def _heads(matrix: Matrix, num: int) -> list[Matrix]:
    if isinstance(matrix, Tensor):
        return list(matrix.chunk(num))
    return [type(matrix)(*parts) for parts in zip(*(part.chunk(num) for part in matrix), strict=True)]


def _whole(weight: Tensor) -> Tensor:
    return weight


def _put_vector(kept: Tensor, stored: Callable[[Tensor], Tensor], weight: Matrix) -> None:
    kept.copy_(stored(dequantize(weight).detach().float()).flatten())


class NativeDecoder(PartRunner):
    """Runs batches on `threads` cores. Raises ValueError if `why_not` returns a reason."""

    def __init__(
        self,
        config: TransformerConfig,
        weights: DecoderWeights,
        *,
        num_blocks: int,
        cache_dtype: torch.dtype = torch.bfloat16,
        threads: int | None = None,
        expert_nbytes: int | None = None,
        memory: WeightMemory | None = None,
        ranks: ServingRanks | None = None,
        keeps: bool = True,
    ) -> None:
        """`keeps`: whether keys and values outlive their layer; if not, only `hidden` may be called. `expert_nbytes`: memory for
        experts, the others are on disk (`on_disk`); None: all are in memory. `memory`: for weights whose layers are read one
        by one (`weights.read_layer`); those that do not fit are on disk (`on_disk`). `ranks`: the processes that compute the
        model's parts (`config.part`); the constructor is then collective."""
        reason = why_not(config)
        if reason is not None:
            raise ValueError(f"the native forward cannot run this model: {reason}")
        if cache_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"cache_dtype is {cache_dtype}; the native cache holds torch.float32 or torch.bfloat16")
        self.config, self.num_blocks, self.block_size, self.ranks = config, num_blocks, PANEL, ranks
        self.vocab_size, self.max_context = config.vocab_size if config.has_head else 0, config.max_context
        self.short_context = config.short_context
        self.threads = threads or min(torch.get_num_threads(), len(os.sched_getaffinity(0)), MAX_THREADS)
        self._team = Team(self.threads)
        self._num_heads, self._num_kv_heads = (heads.stop - heads.start for heads in config.own_heads)
        shape = (len(config.layers) if keeps else 1, num_blocks, self._num_kv_heads, config.head_dim, PANEL)
        # Zeros: masked positions add 0 * value, so their values must be finite.
        self.keys = untouched_zeros(shape, cache_dtype)
        self.values = untouched_zeros((*shape[:3], PANEL, config.head_dim), cache_dtype)
        self._tensors: list[Tensor] = []  # keeps alive the memory that the C structs point to
        # Role -> function that overwrites a weight. None references the decoder, so that memory is freed at once at its end.
        self._puts: dict[str, Callable[[Matrix], object]] = {}
        self._pool = Pool()  # memory of packed matrices
        self._into: Callable[[int], Tensor] | None = None  # allocates for the layer being packed; None: the pool does
        self.layer_store: LayerStore | None = None
        self._stops = [0, len(config.layers)]  # layer ranges of a forward's calls; each call ends with a stored layer
        self._embed_is_own = False
        self.store: ExpertStore | None = None
        self._first_stored = list(accumulate((len(layer.experts) for layer in weights.layers), initial=0))
        if expert_nbytes is not None:
            self.store = self._open_store(weights, expert_nbytes)
        self._library = build.kernels()
        self._library.slipstream_decoder_forward.argtypes = [_pointer, _pointer, _pointer]
        self._library.slipstream_decoder_steps.argtypes = [_pointer, _pointer, _pointer, _pointer]
        has_long, ropes = self.short_context < self.max_context, {layer.rope for layer in config.layers if layer.rope}
        self._rope_tables = {rope: rope_table(rope, self._num_turns, has_long) for rope in ropes}
        layers, head = self._pack(weights) if memory is None else (self._read_layers(weights, memory), self._head(weights))
        self._layers = (_LayerRecord * len(layers))(*layers)
        self._model = self._decoder(weights, head)
        self._widths = _scratch_widths(config)
        self._logits, self._shared = np.empty((0, self.vocab_size), np.float32), dict[str, int]()
        self._low, self._adapters = torch.empty(0), (array("Q"), array("i"))  # low-rank products, and `_place_adapters`' arrays
        self._scratch, self._rows, self._batch = dict[str, Tensor](), 0, _Batch()  # memory that `_batch` points to
        if ranks is not None:
            self._shared = self._share(ranks)
            self._allocate(ranks.max_rows, ranks.max_rows)  # an error in a forward would be final for all processes
        self.close = self._team.close  # no forward may run after it

    def _share(self, ranks: ServingRanks) -> dict[str, int]:
        """Allocate the scratch memory that all processes fill."""
        config = self.config
        widths = {name: 4 * self._widths.pop(name)[0] for name in [*self._widths] if name.startswith("expert_")}
        if "expert_out" in widths:  # two, used in turn
            ranks.record.turn_size, widths["expert_out"] = ranks.max_rows * widths["expert_out"] // 4, 2 * widths["expert_out"]
        numbers = {"threads": self.threads, "message_nbytes": message_nbytes(ranks.max_rows, self)}
        if config.part.tp_size == 1:
            return ranks.share(widths, **numbers)
        heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        widths |= {name: 4 * self._widths.pop(name)[0] for name in ("attended", "act")}
        widths |= {"added": 4 * max(config.hidden_size, config.embed_size), "logits": 4 * self.vocab_size}
        widths |= {"all_q": 4 * heads, "all_k": 4 * keys} if config.qk_norm == "whole" else {}
        if self._own_codes:
            widths |= {f"shared_{name}": self._widths[name][0] * self._widths[name][1].itemsize for name in _INPUTS}
        shared = ranks.share(widths, **numbers)
        if self.vocab_size:
            logits = ctypes.cast(shared["logits"], ctypes.POINTER(_float))
            self._logits = np.ctypeslib.as_array(logits, (ranks.max_rows, self.vocab_size))
        return shared

    @property
    def _own_codes(self) -> bool:
        """Whether each process quantizes its own columns: they are in shared memory, and no group spans two processes."""
        config, ranks = self.config, self.ranks
        if ranks is None or config.part.tp_size == 1 or not ranks.on_one_host:
            return False
        parts = [replace(config.part, index=index) for index in range(ranks.size)]
        starts = [part.columns(config.intermediate_size).start for part in parts]
        starts += [part.heads(config.num_heads, config.num_kv_heads)[0].start * config.value_dim for part in parts]
        return not any(start % CODES for start in starts)

    # -- the C structs --

    def _keep(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _vector(self, role: str, tensor: Tensor | None, stored: Callable[[Tensor], Tensor] = _whole) -> int | None:
        """The address of a copy in fp32. `stored`: converts the weight to the form that is kept."""
        return None if tensor is None else self._vectors({role: tensor}, stored)

    def _vectors(self, by_role: Mapping[str, Tensor], stored: Callable[[Tensor], Tensor]) -> int:
        """The address of copies in fp32, one after the other."""
        copies = [stored(tensor.detach().float()).flatten() for tensor in by_role.values()]
        kept = torch.cat(copies)
        for role, part in zip(by_role, kept.split([len(one) for one in copies]), strict=True):
            self._puts[role] = partial(_put_vector, part, stored)
        return self._keep(kept)

    def _norm(self, weights: DecoderWeights | LayerWeights, name: str, at: str = "", times: int = 1) -> _Norm:
        """`times`: how many copies lie one after the other."""
        offset, bias = self.config.norm_offset, getattr(weights, f"{name}_bias")
        weight = self._vector(at + name, getattr(weights, name), lambda weight: (weight + offset).repeat(times))
        return _Norm(weight, self._vector(f"{at}{name}_bias", bias, lambda bias: bias.repeat(times)))

    def _head_norm(self, weights: LayerWeights, name: str, at: str) -> _Norm:
        """The weights for every head of this process."""
        times = 1 if self.config.qk_norm == "whole" else self._num_heads if name[0] == "q" else self._num_kv_heads
        norm, offset = self._norm(weights, name, at, times), self.config.norm_offset
        if own := {f"{at}{name}s.{head}": weight for head, weight in enumerate(getattr(weights, f"{name}s"))}:
            norm.weight = self._vectors(own, lambda weight: weight + offset)
        return norm

    def _matrix(self, role: str, matrix: Matrix | None, bias: Tensor | None = None) -> MatrixRecord:
        return MatrixRecord() if matrix is None else self._packed({role: (matrix, bias)})

    def _head(self, weights: DecoderWeights) -> MatrixRecord:
        """An empty record without a head, and in processes that compute no logits."""
        if not (self.config.part.has_head and self.config.has_head):
            return MatrixRecord()
        return self._matrix("head", weights.embed if weights.head is None else weights.head, weights.head_bias)

    def _pack(self, weights: DecoderWeights) -> tuple[list[_LayerRecord], MatrixRecord]:
        with ThreadPoolExecutor(self.threads) as pool:  # a layer per task: packing releases the GIL
            head = pool.submit(self._head, weights)
            return list(pool.map(self._layer, range(len(self.config.layers)), weights.layers)), head.result()

    def _read_layers(self, weights: DecoderWeights, memory: WeightMemory) -> list[_LayerRecord]:
        """Read and pack layers one by one, into memory or the store. Raises ValueError before it reads the first."""
        sizes, read = [self._layer_nbytes(layer) for layer in weights.layers], weights.read_layer or weights.layers.__getitem__
        tables = [table for table in (weights.embed, weights.positions, weights.token_types) if isinstance(table, Tensor)]
        packed = [m for m in (weights.embed_in, weights.embed_out) if m is not None]
        packed.append(weights.embed if weights.head is None else weights.head)
        if weights.head is not None and isinstance(weights.embed, Codes):
            packed.append(weights.embed)
        others = sum(_packed_nbytes([m]) for m in packed) + sum(table.nbytes for table in tables)
        stored = choose(sizes, others, memory.nbytes)
        if not stored:
            return [self._layer(index, read(index)) for index in range(len(sizes))]
        self.layer_store, records = LayerStore([sizes[i] for i in stored], memory.folder), []
        self._stops = [0, *(i + 1 for i in stored)]  # the last layer is always stored
        for index in range(len(sizes)):
            with self.layer_store.packing(stored.index(index)) if index in stored else nullcontext() as memory_of_layer:
                self._into = None if memory_of_layer is None else allocator(memory_of_layer)
                records.append(self._layer(index, read(index)))
        self._into = None
        self.layer_store.start()
        return records

    def _layer_nbytes(self, layer: LayerWeights) -> int:
        """The most bytes that a layer's matrices take when packed."""
        num = 1 if self.config.latent is None else self._num_heads
        parts = (layer.q, layer.out, layer.latent, layer.q_latent, *_heads(layer.k, num), *_heads(layer.v, num))
        mlps = (layer.mlp, layer.shared, *layer.experts)
        return sum(_packed_nbytes([m]) for m in parts if m is not None) + sum(_mlp_nbytes(mlp) for mlp in mlps if mlp is not None)

    def _open_store(self, weights: DecoderWeights, nbytes: int) -> ExpertStore:
        samples = [layer.experts[0] for layer in weights.layers if layer.experts]
        if not samples:
            raise ValueError(f"expert_cache_bytes is {nbytes:,}, but the model has no experts; leave it out")
        return ExpertStore(
            nbytes,
            num_experts=self._first_stored[-1],
            least=max(len(layer.experts) for layer in weights.layers),
            expert_nbytes=max(map(_mlp_nbytes, samples)),
        )

    def _packed(
        self, by_role: Mapping[str, tuple[Matrix, Tensor | None]], allocate: Callable[[int], Tensor] | None = None
    ) -> MatrixRecord:
        """Pack one matrix with its bias, or two of one shape and type with alternating panels (gate and up). `allocate` defaults to
        kept memory, in which `put` writes."""
        parts, biases = zip(*by_role.values(), strict=True)
        assert len(set(map(_form, parts))) == 1, "matrices that are packed together have one shape and type"
        packed, columns = record_of(parts[0], len(parts)), shape_of(parts[0])[0]
        tables = [tables_of(part) for part in parts]
        for name in tables[0]:
            if name == "low" and all(is_centred(part) for part in parts):
                continue
            setattr(packed, name, self._panels([table[name] for table in tables], allocate or self._into))
        if any(bias is not None for bias in biases):
            filled = [torch.zeros(columns) if bias is None else bias for bias in biases]
            packed.bias = self._panels([bias_table(bias) for bias in filled])
        for part, role in enumerate(by_role if allocate is None else ()):
            self._puts[role] = partial(_fill_matrix, packed, part, len(parts))
            self._puts[f"{role}_bias"] = partial(_fill_bias, packed, part, len(parts))
        return packed

    def _panels(self, tables: Sequence[Table], allocate: Callable[[int], Tensor] | None = None) -> int:
        """Pack tables of one shape into alternating panels. Returns their address."""
        size, num_panels = tables[0].panel_nbytes, tables[0].num_panels(len(tables))
        nbytes = num_panels * len(tables) * size
        panels = self._pool.empty(nbytes) if allocate is None else allocate(nbytes)
        for part, table in enumerate(tables):
            fill(panels.data_ptr(), table, part, len(tables))
        return self._keep(panels) if allocate is None else panels.data_ptr()

    def _stored(self, store: ExpertStore, number: int, mlp: Mlp) -> tuple[MatrixRecord, MatrixRecord]:
        """Write an expert to the store's file. Returns gate_up and down; their pointers are offsets in the file."""
        with store.packing(number) as memory:
            allocate = allocator(memory)
            records = self._gate_up("", mlp, allocate), self._packed({"down": (mlp.down, None)}, allocate)
        for record in records:
            for name in ("data", "scale", "low"):
                address = getattr(record, name)
                if address is not None:
                    setattr(record, name, address - memory.data_ptr())
        return records

    def _mlp(self, at: str, mlp: Mlp) -> tuple[MatrixRecord, MatrixRecord]:
        return self._gate_up(at, mlp), self._matrix(f"{at}down", mlp.down, mlp.down_bias)

    def _gate_up(self, at: str, mlp: Mlp, allocate: Callable[[int], Tensor] | None = None) -> MatrixRecord:
        up = {f"{at}up": (mlp.up, mlp.up_bias)}
        if mlp.gate is None:
            return self._packed(up, allocate)
        if _form(mlp.gate) != _form(mlp.up):
            raise ValueError("the native forward needs gate and up matrices of the same type; load them in one dtype")
        return self._packed({f"{at}gate": (mlp.gate, mlp.gate_bias), **up}, allocate)

    def _layer(self, index: int, weights: LayerWeights) -> _LayerRecord:
        layer, at = self.config.layers[index], f"layers.{index}."
        products = ("q", "k", "v", "out") if self.config.latent is None else ("q", "out", *_LATENTS)
        record = _LayerRecord(
            **{name: self._norm(weights, name, at) for name in NORMS},
            **{name: self._head_norm(weights, name, at) for name in _HEAD_NORMS},
            **{name: self._matrix(at + name, getattr(weights, name), getattr(weights, f"{name}_bias")) for name in products},
            **{name: self._vector(at + name, getattr(weights, name)) for name in _LATENT_NORMS},
            keys=self.keys[min(index, len(self.keys) - 1)].data_ptr(),
            values=self.values[min(index, len(self.keys) - 1)].data_ptr(),
            window=layer.window,
        )
        if self.config.latent is not None:
            record.k_heads, record.v_heads = self._of_heads(f"{at}k", weights.k), self._of_heads(f"{at}v", weights.v)
        if layer.experts is not None:
            record.experts = ctypes.pointer(self._experts(index, layer.experts, weights))
        else:
            record.gate_up, record.down = self._mlp(f"{at}mlp.", weights.dense_mlp)
        if layer.rope is not None:
            cosine, sine = self._rope_tables[layer.rope]
            record.cosine, record.sine = cosine.data_ptr(), sine.data_ptr()
            record.rotary_dim = 2 * len(layer.rope.inv_freq)
        return record

    def _of_heads(self, role: str, matrix: Matrix) -> ctypes.Array[MatrixRecord]:
        records = [self._matrix(f"{role}.{head}", rows) for head, rows in enumerate(_heads(matrix, self._num_heads))]

        def put(weight: Matrix) -> None:
            for record, rows in zip(records, _heads(weight, len(records)), strict=True):
                _fill_matrix(record, 0, 1, rows)

        self._puts[role] = put
        return (MatrixRecord * len(records))(*records)

    def _experts(self, index: int, experts: RoutedExperts, weights: LayerWeights) -> _Experts:
        if not 1 <= experts.top_k <= experts.num:
            raise ValueError(f"{experts.top_k} experts per token of {experts.num}; it must be between 1 and all of them")
        part, hidden = self.config.part, self.config.hidden_size
        mine, num = part.experts(experts.num), experts.num + (weights.shared is not None)
        lists: list[Mlp | None] = [None] * num
        lists[mine.start : mine.stop] = weights.experts
        inner, out = ([part.expert_columns(size).start] * num for size in (experts.intermediate_size, hidden))
        if weights.shared is not None:
            lists[-1] = weights.shared
            inner[-1], out[-1] = (part.expert_columns(size, shared=True).start for size in (experts.shared_size, hidden))
        first, store, at = self._first_stored[index] - mine.start, self.store, f"layers.{index}."
        pairs = [
            (MatrixRecord(), MatrixRecord())
            if mlp is None
            else self._mlp(f"{at}shared.", mlp)
            if mlp is weights.shared
            else self._mlp(f"{at}experts.{e - mine.start}.", mlp)
            if store is None
            else self._stored(store, first + e, mlp)
            for e, mlp in enumerate(lists)
        ]
        record = _Experts(
            **{name: getattr(experts, name) for name in _OF_EXPERTS},
            has_shared=weights.shared is not None,
            by_sigmoid=experts.score == "sigmoid",
            bias=self._vector(f"{at}router_bias", weights.router_bias),
            is_cut=part.moe_tp_size > 1 or (weights.shared is not None and part.size > 1),
            inner_size=experts.intermediate_size,
            widest=max(experts.intermediate_size, experts.shared_size),
            first_inner=(_int * num)(*inner),
            first_out=(_int * num)(*out),
            router=self._vector(f"{at}router", weights.routing),
            shared_gate=self._vector(f"{at}shared_gate", weights.shared_gate),
            gate_up=(MatrixRecord * num)(*(gate_up for gate_up, _ in pairs)),
            down=(MatrixRecord * num)(*(down for _, down in pairs)),
            first_stored=first,
        )
        if store is not None:
            record.store = ctypes.addressof(store.record)
            record.stored = (MatrixRecord * (2 * num))(*(matrix for pair in pairs for matrix in pair))
        return record

    @property
    def _num_turns(self) -> int:
        """The number of positions in a table of rotary embeddings: those that both context and cache can hold."""
        return min(self.max_context, self.num_blocks * PANEL)

    def _turn(self, num_tokens: int) -> int:
        """The row of `rope_table`'s tables for the first position of a text of `num_tokens` tokens."""
        return self._num_turns if num_tokens > self.short_context else 0

    def _decoder(self, weights: DecoderWeights, head: MatrixRecord) -> _Decoder:
        config, part, latent = self.config, self.config.part, self.config.latent or NO_LATENT
        embed = weights.embed
        if isinstance(embed, Tensor):
            self._embed = embed = embed.detach().contiguous()
            placed: dict[str, Any] = {"embed": embed.data_ptr(), "embed_type": TYPES[embed.dtype], "num_tokens": len(embed)}
        else:  # a tied head shares the embedding's panels
            own = head if weights.head is None and head.data else self._matrix("embed", embed)
            placed = {"embed_codes": ctypes.pointer(own), "num_tokens": len(embed.q)}
        heads, keys = config.own_heads
        return _Decoder(
            **{name: getattr(config, name) for name in _OF_CONFIG},
            vocab_size=self.vocab_size,
            embed_size=config.embed_size or config.hidden_size,
            attended_size=config.num_heads * config.value_dim,
            keys_size=config.num_kv_heads * config.head_dim,
            first_attended=heads.start * config.value_dim,
            first_key=keys.start * config.head_dim,
            first_hidden=part.columns(config.hidden_size).start,
            first_inner=part.columns(config.intermediate_size).start,
            first_token=part.columns(config.vocab_size).start,
            num_layers=len(config.layers),
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            latent_rank=latent.rank,
            q_latent_rank=latent.q_rank,
            plain_dim=latent.plain_dim,
            latent_eps=latent.eps,
            qk_norm_whole=config.qk_norm == "whole",
            cache_type=TYPES[self.keys.dtype],
            activation=ACTIVATIONS[config.activation],
            centered=config.norm == "layer",
            residual=_RESIDUALS.index(config.residual),
            plain=not config.gated,
            both_ways=not config.causal,
            late_positions=config.late_positions,
            own_codes=self._own_codes,
            residual_scale=0.0 if config.residual_scale == 1.0 else config.residual_scale,
            logit_scale=0.0 if config.logit_scale == 1.0 else config.logit_scale,
            embed_scale=float(torch.tensor(config.embed_scale, dtype=embed.dtype if isinstance(embed, Tensor) else torch.bfloat16)),
            attn_scale=config.attn_scale or config.head_dim**-0.5,
            **placed,
            **self._added(weights),
            slopes=self._keep(torch.tensor(config.alibi[heads], dtype=torch.float32)) if config.alibi else None,
            embed_norm=self._norm(weights, "embed_norm"),
            final_norm=self._norm(weights, "final_norm"),
            embed_in=self._matrix("embed_in", weights.embed_in, weights.embed_in_bias),
            embed_out=self._matrix("embed_out", weights.embed_out),
            head=head,
            layers=self._layers,
            ranks=None if self.ranks is None else ctypes.addressof(self.ranks.record),
        )

    def _added(self, weights: DecoderWeights) -> dict[str, int | None]:
        """The vectors added to embeddings. Positions that are not consecutive are passed as token types."""
        positions, types, offset = weights.positions, weights.token_types, self.config.position_offset
        if positions is not None and types is not None and self.config.pad_token >= 0:
            return {"token_types": self._vector("positions", positions, lambda weight: weight + types[0].float())}
        named = {"positions": self._vector("positions", positions, lambda weight: weight[offset:])}
        return named | {"token_types": self._vector("token_types", types)}

    # -- new weights --

    def put(self, role: str, weight: Matrix) -> None:
        """Overwrite one weight in place, while no forward runs. `role`: its path in `DecoderWeights`."""
        if role == "embed":
            self._put_embedding(dequantize(weight))
        elif self.store is not None and role not in self._puts:
            raise ValueError("experts on disk have no new weights in place; open the engine without expert_cache_bytes")
        else:
            self._puts[role](weight)

    def free_memory(self) -> None:
        """Free the memory of weights and cache. Every weight must be `put` again before the next forward."""
        for tensor in (*self._pool.blocks, *self._tensors, *([self._embed] if self._embed_is_own else []), self.keys, self.values):
            free_pages(tensor)

    def _put_embedding(self, weight: Tensor) -> None:
        """The first call allocates memory, because the old embedding may be mapped from a file or belong to a live model."""
        if not self._embed_is_own:
            self._embed, self._embed_is_own = torch.empty_like(self._embed), True
            self._model.embed = self._embed.data_ptr()
        self._embed.copy_(weight)

    # -- running --

    def _allocate(self, rows: int, num_logits: int) -> None:
        """Grow the scratch memory to `rows` rows, and the logits to `num_logits`."""
        if rows > self._rows:
            assert self._rows == 0 or self.ranks is None, "batches are within the token budget"
            scratch = {name: torch.empty(rows * width, dtype=dtype) for name, (width, dtype) in self._widths.items()}
            addresses = {name: part.data_ptr() for name, part in scratch.items()}
            self._batch = _Batch(**{"logits": self._logits.ctypes.data, **addresses, **self._shared})
            self._scratch, self._rows = scratch, rows
        if num_logits > len(self._logits):
            self._logits = np.empty((num_logits, self.vocab_size), np.float32)
            self._batch.logits = self._logits.ctypes.data

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), one after the other."""
        for source, target in pairs:
            self.keys[:, target] = self.keys[:, source]
            self.values[:, target] = self.values[:, source]

    def rows(self, x: Tensor, length: int) -> Tensor:
        """Run embeddings, fp32 [sequences * length, hidden], through the layers, each sequence from position 0 on.

        Overwrites the cache's first blocks, so use it only with a decoder that serves no requests.
        """
        texts = [range(begin, begin + length) for begin in range(0, len(x), length)]
        self._run_rows(x, numbers_of_texts(texts, PANEL)._replace(logit_rows=array("i")))
        return self._scratch["x"][: x.numel()].view(x.shape).clone()

    def normed(self, x: Tensor) -> Tensor:
        """Apply the final norm to rows [rows, hidden]. For a decoder without layers."""
        self._run_rows(x, numbers_of_texts([range(len(x))], PANEL))
        return self._scratch["normed"][: x.numel()].view(x.shape).clone()

    def projected(self, x: Tensor) -> Tensor:
        """Logits, fp32 [rows, vocab], of normed rows. For a decoder without layers."""
        norm, self._model.final_norm.weight = self._model.final_norm.weight, None
        try:
            self._run_rows(x, numbers_of_texts([range(len(x))], PANEL))
        finally:
            self._model.final_norm.weight = norm
        return torch.from_numpy(self._logits[: len(x)]).clone()

    def _run_rows(self, x: Tensor, numbers: BatchNumbers) -> None:
        """Row i of `x` replaces the embedding of token i."""
        x = x.contiguous()
        model = self._model
        saved = model.embed, model.embed_codes, model.embed_type, model.embed_scale
        model.embed, model.embed_codes, model.embed_type, model.embed_scale = x.data_ptr(), None, TYPES[x.dtype], 1.0
        try:
            self._run(numbers)
        finally:
            model.embed, model.embed_codes, model.embed_type, model.embed_scale = saved

    def run(self, numbers: BatchNumbers) -> Any:
        config, num = self.config, len(numbers.ids)
        assert config.has_head or len(numbers.tables) <= self.num_blocks, "the cache holds all tokens"
        if not config.part.has_head:
            numbers = numbers._replace(logit_rows=array("i"))
        if config.pad_token >= 0:
            positions = torch.tensor([position for span in numbers.spans() for position in range(span.start, span.stop)])
            numbers = numbers._replace(types=array("i", learnt(config, torch.tensor(numbers.ids), positions).tolist()))
        self._run(numbers)
        if config.has_head:
            return self._logits[: len(numbers.logit_rows)]
        return self._scratch["normed"][: num * config.hidden_size].view(num, -1).clone()

    @property
    def generate(self) -> Generate | None:
        """As `core.Runner.generate`; None with weights on disk, which need this process between two steps."""
        return self._generate if self.store is None and self.layer_store is None else None

    def _generate(self, batch: Batch, draws: Draws, stop: ctypes.c_int32) -> list[list[int]]:
        numbers = self._place(numbers_of(batch, PANEL))
        self._batch.first_layer, self._batch.until_layer = 0, len(self.config.layers)
        num, tokens = len(numbers.ids), array("q", bytes(8 * len(numbers.ids) * batch.steps))
        arrays = (draws.uniforms, draws.ends, draws.first_end)
        at = [one.buffer_info()[0] for one in (*arrays, numbers.ids, numbers.start, tokens)]
        steps = _Steps(ctypes.addressof(draws.rows), *at[:3], ctypes.addressof(stop), *at[3:], batch.steps)
        if self._library.slipstream_decoder_steps(
            self._team.handle, ctypes.byref(self._model), ctypes.byref(self._batch), ctypes.byref(steps)
        ):
            raise MemoryError(f"no memory for a forward of {num} tokens")
        return [tokens[step * num : (step + 1) * num].tolist() for step in range(steps.done)]

    def _place(self, numbers: BatchNumbers) -> BatchNumbers:
        """Make them the inputs of the next call, after their copies. The result, which has turns for lengths, must outlive it."""
        self.copy(numbers.pairs)
        self._allocate(len(numbers.ids), len(numbers.logit_rows))
        numbers, record = numbers._replace(lengths=array("i", map(self._turn, numbers.lengths))), self._batch
        record.num_rows, record.num_sequences, record.num_logits = len(numbers.ids), len(numbers.start), len(numbers.logit_rows)
        for name, values in zip(_NUMBERS, numbers.arrays[1:], strict=True):
            setattr(record, name, values.buffer_info()[0] if name != "types" or values else None)
        record.adapters = None
        if numbers.adapters:
            self._place_adapters(numbers)
        return numbers

    def _place_adapters(self, numbers: BatchNumbers) -> None:
        """Pass the adapter's address or 0 of each row, the first rows of tiles of one adapter, and the end."""
        rows, tiles = array("Q"), array("i")
        for adapter, of_one in groupby(zip(numbers.adapters, pairwise(numbers.first_row), strict=True), key=lambda pair: pair[0]):
            first = len(rows)
            rows.extend([0 if adapter is None else adapter.address] * sum(end - begin for _, (begin, end) in of_one))
            tiles.extend(range(first, len(rows), _ROWS))
        tiles.append(len(rows))
        rank = max(adapter.rank for adapter in numbers.adapters if adapter is not None)
        if self._low.numel() < (numel := len(rows) * len(ROLES) * rank):
            self._low = torch.empty(numel, dtype=torch.float32, device="cpu")
        self._adapters, record = (rows, tiles), self._batch  # the arrays must outlive the call
        record.adapters, record.low_tiles, record.low = rows.buffer_info()[0], tiles.buffer_info()[0], self._low.data_ptr()
        record.low_size, record.num_tiles = rank, len(tiles) - 1

    def _run(self, numbers: BatchNumbers) -> None:
        numbers = self._place(numbers)
        record = self._batch
        store = self.layer_store
        for number, (record.first_layer, record.until_layer) in enumerate(pairwise(self._stops)):
            if store is not None:
                store.fetch(number)
            failure = self._library.slipstream_decoder_forward(self._team.handle, ctypes.byref(self._model), ctypes.byref(record))
            if failure == -2 and self.ranks is not None:
                raise self.ranks.error()
            if failure:
                raise MemoryError(f"no memory for a forward of {record.num_rows} tokens")
            if store is not None:
                store.release(number)
        if self.store is not None:
            self.store.check()
