"""Which forward runs a model, and how many blocks its cache has. Decided once, when an engine is opened.

On a CPU the native forward runs what it can (`native.why_not`), on CUDA Triton's kernels do where triton is (`cuda.why_not`), else
plain torch does (`decoder`); models that `DecoderConfig` cannot say run through transformers (`generic`).
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from slipstream.inference.config import DecoderConfig
from slipstream.inference.core import Runner
from slipstream.inference.kv_cache import HeadShape, KVCache, bytes_per_block

if TYPE_CHECKING:
    from slipstream.inference.weights import DecoderWeights

BLOCK_SIZE = 16  # tokens; the native cache's only one
_SHARE = {"cpu": 0.4, "cuda": 0.85}  # of the memory that is free once the weights are there
_MODEST = 1 << 30  # bytes on a CPU, whose memory others need too
_GENERIC_CONTEXT = 2048  # by which the cache is sized where the model's is known only later; one request may have more


class Sizes(NamedTuple):
    """What bounds the cache."""

    kv_cache_bytes: int | None  # None: a share of what is free
    max_running: int
    max_context: int | None  # None: the model's


class Opened(NamedTuple):
    runner: Runner
    forward: str  # which one, for people


def num_blocks(shapes: list[HeadShape], dtype: torch.dtype, sizes: Sizes, context: int, room: int) -> int:
    """As many as `max_running` full contexts need, within kv_cache_bytes or else `room`. ValueError if that holds nothing."""
    each = bytes_per_block(shapes, BLOCK_SIZE, dtype)
    room = room if sizes.kv_cache_bytes is None else sizes.kv_cache_bytes
    found = min(room // each, sizes.max_running * -(-context // BLOCK_SIZE))
    if found < 2:
        raise ValueError(
            f"{room:,} bytes for keys and values hold {found} blocks of {BLOCK_SIZE} tokens, {each:,} bytes each; "
            f"raise kv_cache_bytes ({each * -(-context // BLOCK_SIZE):,} hold one context of {context} tokens)"
        )
    return found


def open_decoder(
    config: DecoderConfig,
    weights: DecoderWeights,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sizes,
    threads: int | None = None,
) -> Opened:
    """`dtype`: of arithmetic, and of the cache as far as the forward has it. `threads`: of the native forward."""
    from slipstream.inference import native
    from slipstream.inference.decoder import Decoder, head_shapes

    config = replace(config, max_context=_context(config.max_context, sizes))
    on_cpu = device.type == "cpu"
    reason = native.why_not(config) if on_cpu else _why_no_kernels(weights, device)
    cache_dtype = torch.bfloat16 if on_cpu and reason is None and dtype == torch.float16 else dtype
    blocks = _blocks(head_shapes(config), cache_dtype, sizes, config.max_context, device)
    if on_cpu and reason is None:
        runner = native.NativeDecoder(config, weights, num_blocks=blocks, cache_dtype=cache_dtype, threads=threads)
        return Opened(runner, f"native kernels, {runner.threads} threads")
    cache = KVCache(head_shapes(config), num_blocks=blocks, block_size=BLOCK_SIZE, dtype=cache_dtype, device=device)
    if reason is None:
        from slipstream.inference.cuda import CudaDecoder

        return Opened(CudaDecoder(config, weights, cache, dtype, max_batch=sizes.max_running), "Triton kernels")
    return Opened(Decoder(config, weights, cache, dtype), f"torch ({reason})")


def _why_no_kernels(weights: DecoderWeights, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from slipstream.inference import cuda

    return cuda.why_not(weights, device)


def open_generic(model: Any, sizes: Sizes) -> Opened:
    """`model`: a transformers model, on its device, in its dtype."""
    from slipstream.inference.generic import GenericDecoder, cache_shapes

    shapes = cache_shapes(model)
    blocks = _blocks(shapes, model.dtype, sizes, sizes.max_context or _GENERIC_CONTEXT, model.device)
    cache = KVCache(shapes, num_blocks=blocks, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device)
    runner = GenericDecoder(model, cache)
    runner.max_context = _context(runner.max_context, sizes)
    return Opened(runner, "transformers' forward")


def _context(limit: int, sizes: Sizes) -> int:
    if sizes.max_context is not None and sizes.max_context > limit:
        raise ValueError(f"max_context is {sizes.max_context}, but the model tells {limit} positions apart")
    return sizes.max_context or limit


def _blocks(shapes: list[HeadShape], dtype: torch.dtype, sizes: Sizes, context: int, device: torch.device) -> int:
    if device.type == "cuda":
        room = int(free_memory(device) * _SHARE["cuda"])
    else:
        room = min(int(free_memory(device) * _SHARE["cpu"]), _MODEST)
    return num_blocks(shapes, dtype, sizes, context, room)


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on a device; on a CPU within the control group's limit too."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of earlier models counts as taken
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    limit = (group / "memory.max").read_text().strip() if (group / "memory.max").is_file() else "max"
    if limit == "max":
        return free
    counted = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.current").read_text()) - int(counted.get("inactive_file", 0))  # cached files can go
    return min(free, int(limit) - used)
