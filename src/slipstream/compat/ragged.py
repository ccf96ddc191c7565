"""`deepspeed.inference.v2`: an engine without a scheduler. The caller composes each forward from parts of sequences (`put`), asks
in advance what fits (`query`, `can_schedule`), and ends sequences (`flush`).

It drives a `core.Runner` over its paged cache. A sequence is a `core.Request` whose tokens are all computed. Its logits have the
same bits in every batch and for every split of its tokens (docs/ARCHITECTURE.md, "Batch invariance").
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from enum import Enum, StrEnum
from typing import Any

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from slipstream.compat.config import DeepSpeedConfigModel
from slipstream.compat.together import Leader
from slipstream.inference.assembly import open_runner
from slipstream.inference.blocks import BlockPool
from slipstream.inference.config import ModelPart
from slipstream.inference.core import Batch, Chunk, Request, SamplingParams
from slipstream.inference.precision import QUANTIZED
from slipstream.inference.ranks import ServingRanks
from slipstream.inference.runner import Sizes
from slipstream.world.watch import PeerLostError

logger = logging.getLogger(__name__)

_MODEL_CONFIG = "ds_model_config.pkl"  # in folders written by DeepSpeed's `serialize`


class AllocationMode(StrEnum):
    RESERVE = "reserve"
    ALLOCATE = "allocate"


class MemoryConfig(DeepSpeedConfigModel):
    """The size of the cache: whatever leaves `size` bytes of memory free, or `size` blocks of 16 tokens."""

    mode: AllocationMode = AllocationMode.RESERVE
    size: PositiveInt = 1_000_000_000


class DSStateManagerConfig(DeepSpeedConfigModel):
    """Limits of the engine. `max_context` is lowered to the model's."""

    max_tracked_sequences: PositiveInt = 2048
    max_ragged_batch_size: PositiveInt = 768  # tokens per forward
    max_ragged_sequence_count: PositiveInt = 512  # sequences per forward
    max_context: PositiveInt = 8192
    memory_config: MemoryConfig = Field(default_factory=MemoryConfig)
    offload: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> DSStateManagerConfig:
        for limit in ("max_ragged_batch_size", "max_tracked_sequences"):
            if self.max_ragged_sequence_count > getattr(self, limit):
                raise ValueError(
                    f"max_ragged_sequence_count ({self.max_ragged_sequence_count}) is above {limit} ({getattr(self, limit)}); "
                    "a forward cannot have so many sequences"
                )
        if self.offload:
            raise ValueError("offload is True: keys and values are not moved to the host; set it to False and flush() sequences")
        return self


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """The processes of the job, which all make the same calls; `tp_size` of them split the model."""

    tp_size: PositiveInt = 1


class QuantizationConfig(DeepSpeedConfigModel):
    """`quantization_mode`: int8 or int4, of the weights; None: as stored."""

    quantization_mode: str | None = None

    @model_validator(mode="after")
    def _known(self) -> QuantizationConfig:
        if self.quantization_mode not in (None, *QUANTIZED):
            raise ValueError(f"quantization_mode is {self.quantization_mode!r}; it must be None or one of {', '.join(QUANTIZED)}")
        return self


class RaggedInferenceEngineConfig(DeepSpeedConfigModel):
    tensor_parallel: DeepSpeedTPConfig = Field(default_factory=DeepSpeedTPConfig, alias="tp")
    state_manager: DSStateManagerConfig = Field(default_factory=DSStateManagerConfig, alias="manager")
    quantization: QuantizationConfig = Field(default_factory=QuantizationConfig)


class SchedulingResult(Enum):
    Success = 0
    EngineSequenceLimitExceeded = 1  # more than max_tracked_sequences would be unflushed
    BatchSequenceLimitExceeded = 2  # more than max_ragged_sequence_count sequences
    BatchTokenLimitExceeded = 3  # more than max_ragged_batch_size tokens
    KVCacheLimitExceeded = 4  # more blocks than are free
    SequenceTokenLimitExceeded = 5  # a sequence longer than the context


class SchedulingError(RuntimeError):
    def __init__(self, result: SchedulingResult) -> None:
        self.result = result
        super().__init__(f"the forward cannot be scheduled: {result.name}; ask can_schedule() first, and flush() ended sequences")


class InferenceEngineV2:
    """Computes forwards of a decoder over a paged cache. Not thread-safe.

    With several processes, all make the same calls and get the same logits. The end of rank 0's engine ends the others."""

    n_kv_cache_groups = 1

    def __init__(
        self,
        model: Any,
        engine_config: RaggedInferenceEngineConfig | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """`model`, `dtype`, `device`: as in `slipstream.init_inference`. Raises its errors."""
        self.config = self._config = engine_config or RaggedInferenceEngineConfig()
        limits = self.config.state_manager
        memory, mode = limits.memory_config, self.config.quantization.quantization_mode
        if mode is not None and dtype is not None:
            raise ValueError(f"dtype is {dtype} and quantization_mode is {mode!r}; give one of them")
        allocates = memory.mode == AllocationMode.ALLOCATE
        sizes = Sizes(
            kv_cache_bytes=None,
            max_running=limits.max_ragged_sequence_count,
            max_context=None,
            num_blocks=memory.size if allocates else None,
            spare_bytes=None if allocates else memory.size,
        )
        self._leader: Leader | None = None
        opens = open_runner if self.config.tensor_parallel.tp_size == 1 else self._cut
        self._runner = opens(model, sizes, dtype=mode or dtype, device=device)
        self.max_context = min(self._runner.short_context, limits.max_context)  # keys and values are never recomputed
        self._pool = BlockPool(self._runner.num_blocks, self._runner.block_size)
        self._sequences: dict[int, Request] = {}
        tokens = self._pool.num_blocks * self._pool.block_size
        logger.info("%s: cache of %d tokens, context of %d", model, tokens, self.max_context)

    def _cut(self, model: Any, sizes: Sizes, **where: Any) -> Any:
        """`open_runner` over the processes of the job."""
        part, rows = ModelPart(tp_size=self.config.tensor_parallel.tp_size), self.config.state_manager.max_ragged_batch_size
        ranks = ServingRanks(part, max_rows=rows)
        self._leader, closing = Leader(), ExitStack()
        closing.callback(self._leader.close)
        closing.callback(ranks.close)
        try:
            runner: Any = open_runner(model, sizes._replace(ranks=ranks), **where)
            ranks.start(runner.follow, lambda why: logger.error("the engine has ended: %s", why))
        except BaseException as error:
            ranks.fail_opening(error)
            with suppress(PeerLostError):
                closing.close()
            raise
        weakref.finalize(self, closing.close)
        return runner

    @property
    def free_blocks(self) -> Tensor:
        """int64 [1]: blocks that no unflushed sequence holds."""
        return torch.tensor([self._pool.num_free])

    def put(self, batch_uids: Iterable[int], batch_tokens: Iterable[Tensor | Sequence[int]], do_checks: bool = True) -> Tensor:
        """Append tokens to each of the sequences in one forward; an unknown uid begins a sequence. A new sequence reuses keys and
        values of one that begins with the same tokens.

        Returns fp32 [sequences, vocab] on the runner's device: the logits after each sequence's last token. Raises SchedulingError
        if blocks or context do not suffice and, with `do_checks` or several processes, if a limit of the config is exceeded. Raises
        ValueError for a repeated uid, for no tokens, and for tokens beyond the vocabulary. After an error all sequences are
        unchanged.
        """
        uids, parts = list(batch_uids), [self._ids(tokens) for tokens in batch_tokens]
        if len(uids) != len(parts):
            raise ValueError(f"put() of {len(uids)} uids and {len(parts)} lists of tokens; give one list for each uid")
        checks = do_checks or self._leader is not None  # its memory holds max_ragged_batch_size tokens
        result = self._schedulable(uids, [len(part) for part in parts], self.config.state_manager if checks else None)
        if result is not SchedulingResult.Success:
            raise SchedulingError(result)
        chunks, copies = [], list[tuple[int, int]]()
        for uid, part in zip(uids, parts, strict=True):
            request = self._sequences.get(uid) or Request(id=str(uid), tokens=[], params=SamplingParams())
            request.tokens += part
            if uid not in self._sequences:
                request.blocks = self._pool.fork(self._pool.match(request.tokens))
                request.num_computed = len(request.blocks) * self._pool.block_size
                self._sequences[uid] = request
            start, stop = request.num_computed, len(request.tokens)
            copies += self._pool.reserve(request.blocks, start, stop)
            chunks.append(Chunk(request, start, stop))
        try:
            logits = self._forward(Batch(tuple(chunks), tuple(copies)))
        except BaseException:
            for uid, part, chunk in zip(uids, parts, chunks, strict=True):
                del chunk.request.tokens[-len(part) :]
                if not chunk.request.tokens:
                    self.flush(uid)
            raise
        for request, start, stop, _ in chunks:
            request.num_computed = stop
            self._pool.publish(request.blocks, request.tokens, start, stop)
        return logits

    def _forward(self, batch: Batch) -> Tensor:
        def compute() -> Tensor:
            return torch.as_tensor(self._runner.forward(batch)).clone()

        return compute() if self._leader is None else self._leader.answer(compute)

    def _ids(self, tokens: Tensor | Sequence[int]) -> list[int]:
        ids: list[int] = tokens.flatten().tolist() if isinstance(tokens, Tensor) else list(tokens)
        if unknown := [token for token in ids if not 0 <= token < self._runner.vocab_size]:
            raise ValueError(f"token {unknown[0]} is not in the vocabulary; this model's are 0 to {self._runner.vocab_size - 1}")
        return ids

    def query(self, uid: int, max_request_tokens: int, max_request_blocks: int | Tensor) -> tuple[int, int]:
        """How many of `max_request_tokens` more tokens of a sequence fit into `max_request_blocks` more blocks and the context, and
        how many blocks they need. (0, 0) for a new sequence when max_tracked_sequences are unflushed."""
        request = self._sequences.get(uid)
        if request is None and len(self._sequences) == self.config.state_manager.max_tracked_sequences:
            return 0, 0
        seen, held = (0, 0) if request is None else (request.num_computed, len(request.blocks))
        room = (held + int(max_request_blocks)) * self._pool.block_size
        tokens = max(0, min(max_request_tokens, room - seen, self.max_context - seen))
        return tokens, max(0, self._pool.num_needed(seen + tokens) - held)

    def can_schedule(self, uids: Iterable[int], lengths: Iterable[int]) -> SchedulingResult:
        """Whether `put` can append these numbers of tokens to the sequences. Raises ValueError as `put`."""
        return self._schedulable(list(uids), list(lengths), self.config.state_manager)

    def _schedulable(self, uids: list[int], lengths: list[int], limits: DSStateManagerConfig | None) -> SchedulingResult:
        if len(set(uids)) < len(uids) or min(lengths, default=0) < 1:
            raise ValueError(f"uids {uids} with {lengths} tokens: each sequence is given once, with at least one token")
        free, new = self._pool.num_free, 0
        if limits and len(uids) > limits.max_ragged_sequence_count:
            return SchedulingResult.BatchSequenceLimitExceeded
        for uid, length in zip(uids, lengths, strict=True):
            request = self._sequences.get(uid)
            new += request is None
            seen, held = (0, 0) if request is None else (request.num_computed, len(request.blocks))
            if seen + length > self.max_context:
                return SchedulingResult.SequenceTokenLimitExceeded
            free -= max(0, self._pool.num_needed(seen + length) - held)
            if free < 0:
                return SchedulingResult.KVCacheLimitExceeded
        if limits and len(self._sequences) + new > limits.max_tracked_sequences:
            return SchedulingResult.EngineSequenceLimitExceeded
        if limits and sum(lengths) > limits.max_ragged_batch_size:
            return SchedulingResult.BatchTokenLimitExceeded
        return SchedulingResult.Success

    def get_remaining_block_capacity(self, uid: int) -> int:
        """Tokens that a sequence can take without another block."""
        request = self._sequences.get(uid)
        return 0 if request is None else len(request.blocks) * self._pool.block_size - request.num_computed

    def flush(self, uid: int) -> None:
        """End a sequence and free its blocks; an unknown uid is ignored with a warning."""
        request = self._sequences.pop(uid, None)
        if request is None:
            logger.warning("flush(%s): there is no such sequence", uid)
        else:
            self._pool.free(request.blocks)

    def serialize(self, save_path: str) -> None:
        """Raises ValueError: the weights are packed for one machine's kernels."""
        raise ValueError(f"serialize({save_path!r}): weights are packed when they are loaded; keep the model's own folder")


def build_hf_engine(
    path: str | os.PathLike[str], engine_config: RaggedInferenceEngineConfig | None = None, debug_level: int = logging.INFO
) -> InferenceEngineV2:
    """An engine for a Hugging Face folder. `debug_level`: of this module's logger. Raises as `slipstream.init_inference`."""
    logger.setLevel(debug_level)
    if os.path.exists(os.path.join(path, _MODEL_CONFIG)):
        raise ValueError(
            f"{os.fspath(path)} has DeepSpeed's flattened weights and a pickle ({_MODEL_CONFIG}); give the model's own folder"
        )
    return InferenceEngineV2(path, engine_config)
