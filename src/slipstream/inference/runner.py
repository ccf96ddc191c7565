"""Chooses a model's forward and the size of its KV cache, once, when an engine is opened.

On a CPU it is the native forward if that supports the model (`native.why_not`), on CUDA the Triton kernels if they do
(`cuda.why_not`), otherwise plain torch (`decoder`). Models that `TransformerConfig` cannot describe run in transformers
(`generic`).
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from slipstream.inference.config import TransformerConfig
from slipstream.inference.core import Runner
from slipstream.inference.kv_cache import HeadShape, KVCache, bytes_per_block
from slipstream.inference.stats import Use
from slipstream.world.host import available_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.inference.on_disk import WeightMemory
    from slipstream.inference.ranks import ServingRanks
    from slipstream.inference.weights import DecoderWeights

BLOCK_SIZE = 16  # tokens; the native cache supports no other size
_SHARE = {"cpu": 0.4, "cuda": 0.85}  # share of the memory that is free after the weights are loaded
ON_NATIVE = "weights_bytes, weights_folder and expert_cache_bytes"
_MAX_ON_CPU = 1 << 30  # bytes; other processes need host memory too
_GENERIC_CONTEXT = 2048  # sizes the cache when the model's context is not known yet; a single request may be longer


def why_not_native(config: TransformerConfig, device: torch.device) -> str | None:
    """The reason that the native forward cannot run a model on this device; None if it can."""
    from slipstream.inference import native

    return native.why_not(config) if device.type == "cpu" else f"on {device.type}"


class Sizes(NamedTuple):
    """Limits of the cache, and the resources of the forward."""

    kv_cache_bytes: int | None  # None: a share of the free memory
    max_running: int
    max_context: int | None  # None: the model's
    threads: int | None = None  # of the native forward
    expert_nbytes: int | None = None  # memory for experts (`on_disk`); None: all are in memory
    ranks: ServingRanks | None = None  # the processes that compute the model's parts
    num_blocks: int | None = None  # of the cache; None: as many as fit into kv_cache_bytes
    spare_bytes: int | None = None  # memory that the cache leaves free; None: by `_SHARE`
    replicas: int = 1  # engines that take an equal share of the same memory
    memory: WeightMemory | None = None  # for weights that are partly on disk; None: all layers are in memory


class Opened(NamedTuple):
    runner: Runner
    forward: str  # its name, for the log
    expert_use: Callable[[], Use] = Use  # counts of experts read from disk
    close: Callable[[], object] = bool  # frees the file of stored layers; no forward may run afterwards


def open_forward(
    config: TransformerConfig, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, sizes: Sizes
) -> Opened:
    """Open a decoder's forward, or that of a model that embeds texts, whose cache holds one forward (`embedding.ROWS` tokens, or
    one text). `dtype`: of the arithmetic, and of the cache if the forward supports it. Raises ValueError for what needs the native
    forward."""
    from slipstream.inference.decoder import head_shapes
    from slipstream.inference.embedding import ROWS

    config, ranks = replace(config, max_context=_context(config.max_context, sizes)), sizes.ranks
    reason = _why_no_kernels(config, weights, device)
    is_native = device.type == "cpu" and reason is None
    if config.has_head:
        cache_dtype = torch.bfloat16 if is_native and dtype == torch.float16 else dtype
        blocks = _blocks(head_shapes(config), cache_dtype, sizes, config.max_context, device)
        blocks = blocks if ranks is None else min(ranks.gather(blocks))
    else:
        cache_dtype = torch.float32 if is_native else dtype
        blocks = max(-(-config.max_context // BLOCK_SIZE), 2 * ROWS // BLOCK_SIZE)
        if sizes.memory is not None:
            raise ValueError("a model that embeds texts has all layers in memory: leave out weights_bytes and weights_folder")
        if ranks is not None:
            ranks.max_rows = max(ranks.gather(max(ROWS, config.max_context)))
    if is_native:
        return _on_native(config, weights, blocks, cache_dtype, sizes)
    if any((sizes.expert_nbytes, sizes.memory)):
        why = reason or f"it is on {device}"
        raise ValueError(f"{ON_NATIVE} need the native kernels on a CPU, which do not compute this model: {why}")
    cache = KVCache(head_shapes(config), num_blocks=blocks, block_size=BLOCK_SIZE, dtype=cache_dtype, device=device)
    return _on_cache(config, weights, cache, dtype, reason, sizes)


def _on_native(config: TransformerConfig, weights: DecoderWeights, blocks: int, cache_dtype: torch.dtype, sizes: Sizes) -> Opened:
    from slipstream.inference.native import NativeDecoder
    from slipstream.inference.ranks import RanksRunner

    ranks, more = sizes.ranks, {"threads": sizes.threads, "expert_nbytes": sizes.expert_nbytes, "keeps": config.has_head}
    options: dict[str, Any] = more | {"memory": sizes.memory, "ranks": ranks}
    own = NativeDecoder(config, weights, num_blocks=blocks, cache_dtype=cache_dtype, **options)
    experts, layers = own.store, own.layer_store
    forward = f"native kernels, {own.threads} threads" + ("" if ranks is None else f" in each of {ranks.size} processes")
    forward += "" if layers is None else f", {layers.num_layers} of {len(config.layers)} layers on disk"
    if experts is not None:
        forward += f", {experts.num_slots} of {experts.num_experts} experts in memory, the others on disk"
    runner = own if ranks is None else RanksRunner(own, ranks, torch.device("cpu"))
    return Opened(runner, forward, Use if experts is None else experts.use, bool if layers is None else layers.close)


def _on_cache(
    config: TransformerConfig, weights: DecoderWeights, cache: KVCache, dtype: torch.dtype, reason: str | None, sizes: Sizes
) -> Opened:
    """The Triton kernels, or plain torch if there is a reason against them. Collective with ranks."""
    from slipstream.inference.decoder import Decoder

    ranks, max_batch = sizes.ranks, sizes.max_running if config.has_head else 0
    exchange = None if ranks is None else ranks.exchange(cache.device)
    if ranks is not None and len(reasons := set(ranks.gather(reason))) > 1:
        raise ValueError(f"some ranks have the Triton kernels and others compute by torch: {reasons}; give all the same")
    if reason is not None:
        own = Decoder(config, weights, cache, dtype, exchange)
        return _over(own, f"torch ({reason})", cache.device, ranks)
    from slipstream.inference.cuda import CudaDecoder

    captures = ranks is None or ranks.over_nccl  # gloo's operations cannot be captured in a graph
    kernels = CudaDecoder(config, weights, cache, dtype, exchange, max_batch=max_batch if ranks is None else 0)
    if ranks is not None and captures:
        ranks.release = kernels.close
        ranks.gather("ready")  # an operation in a graph waits on the GPU for the other processes
        kernels.capture(max_batch)
    forward = "Triton kernels" if captures else "Triton kernels without CUDA graphs"
    return _over(kernels, forward, cache.device, ranks)


def _over(own: Runner, forward: str, device: torch.device, ranks: ServingRanks | None) -> Opened:
    """Wrap a runner: of the whole model, or of each process's part."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the engine's thread may use another stream
    if ranks is None:
        return Opened(own, forward)
    from slipstream.inference.ranks import RanksRunner, message_nbytes

    threads = torch.get_num_threads() if device.type == "cpu" else 1  # else the work is on the GPU
    ranks.share({}, threads=threads, message_nbytes=message_nbytes(ranks.max_rows, own))
    transport = "" if device.type == "cpu" else " over NCCL" if ranks.over_nccl else " over gloo: they share a GPU"
    return Opened(RanksRunner(own, ranks, device), f"{forward} in {ranks.size} processes{transport}")


def _why_no_kernels(config: TransformerConfig, weights: DecoderWeights, device: torch.device) -> str | None:
    """The reason that the device's kernels (native ones on a CPU, else Triton's) cannot run the model."""
    if device.type == "cpu":
        return why_not_native(config, device)
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from slipstream.inference import cuda

    return cuda.why_not(config, weights, device)


def open_generic(model: Any, sizes: Sizes) -> Opened:
    """`model`: a transformers model on its final device and in its final dtype."""
    from slipstream.inference.generic import GenericDecoder, cache_shapes

    shapes = cache_shapes(model)
    blocks = _blocks(shapes, model.dtype, sizes, sizes.max_context or _GENERIC_CONTEXT, model.device)
    blocks = blocks if sizes.ranks is None else min(sizes.ranks.gather(blocks))
    cache = KVCache(shapes, num_blocks=blocks, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device)
    runner = GenericDecoder(model, cache, over_processes=sizes.ranks is not None)
    runner.max_context = _context(runner.max_context, sizes)
    return _over(runner, "transformers' forward", model.device, sizes.ranks)


def _context(limit: int, sizes: Sizes) -> int:
    if sizes.max_context is not None and sizes.max_context > limit:
        raise ValueError(f"max_context is {sizes.max_context}, but the model has only {limit} positions; lower it")
    return sizes.max_context or limit


def _blocks(shapes: list[HeadShape], dtype: torch.dtype, sizes: Sizes, context: int, device: torch.device) -> int:
    """`sizes.num_blocks`, or as many as `max_running` contexts need within kv_cache_bytes, by default within this process's share
    of free memory. Raises ValueError below 2."""
    limit, block_bytes = sizes.kv_cache_bytes, bytes_per_block(shapes, BLOCK_SIZE, dtype)
    if limit is None:
        sharing = sizes.replicas * (1 if sizes.ranks is None else sizes.ranks.sharing)  # processes that divide the memory
        free = free_memory(device)
        limit = int(free * _SHARE[device.type] if sizes.spare_bytes is None else max(0, free - sizes.spare_bytes)) // sharing
        limit = min(limit, _MAX_ON_CPU) if device.type == "cpu" and sizes.spare_bytes is None else limit
    blocks = sizes.num_blocks or min(limit // block_bytes, sizes.max_running * -(-context // BLOCK_SIZE))
    if blocks < 2:
        raise ValueError(
            f"{limit:,} bytes for keys and values hold {blocks} blocks of {BLOCK_SIZE} tokens, {block_bytes:,} bytes each; "
            f"raise kv_cache_bytes ({block_bytes * -(-context // BLOCK_SIZE):,} hold one context of {context} tokens)"
        )
    return blocks


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device. On a CPU, control-group limits count too."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch caches from earlier models would count as used
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()
