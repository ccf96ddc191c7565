"""A `core.Runner` for a model split over processes: it runs this process's part, and the other processes follow rank 0's calls."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from slipstream.inference.core import Batch, batch_of, numbers_of
from slipstream.inference.ranks import ServingRanks


class RanksRunner:
    """Wraps the runner of this process's part; rank 0's calls are followed by the other processes.

    The constructor is collective. The sums of a forward are exchanges, so all processes are in it before rank 0 leaves it."""

    generate = None  # it does not run several steps per call

    def __init__(self, own: Any, ranks: ServingRanks, device: torch.device, *, embeds: bool = False) -> None:
        """own: `decoder.Decoder`, or a runner that joins its parts in the same way. embeds: it computes `hidden`, no logits."""
        self.own, self.ranks, self._device, self._embeds = own, ranks, device, embeds
        self.num_blocks, self.block_size, self.vocab_size = own.num_blocks, own.block_size, own.vocab_size
        self.max_context, self.short_context, self.config = own.max_context, own.short_context, getattr(own, "config", None)
        blocks = -(-self.max_context // self.block_size) + 1  # blocks of a sequence
        nbytes = 4 * (ranks.max_rows * (7 + min(blocks, self.num_blocks)) + 2 * self.num_blocks + 16)
        threads = torch.get_num_threads() if device.type == "cpu" else 1  # else the work is on the GPU
        ranks.share({}, threads=threads, message_nbytes=nbytes)

    def put(self, role: str, weight: Any) -> None:
        raise AssertionError(f"{role}: a model over processes is opened again for new weights")

    def forward(self, batch: Batch) -> Tensor:
        with self.ranks.forward(batch.copies, (*numbers_of(batch, int, self.block_size), array("i"))):
            return self._computed(lambda: self.own.forward(batch))

    def hidden(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Tensor:
        ids, first_row = array("i", chain(*texts)), array("i", accumulate(map(len, texts), initial=0))
        others = [array("i")] * 5
        with self.ranks.forward((), (ids, first_row, *others, array("i", chain(*types or ())))):
            return self._computed(lambda: self.own.hidden(texts, types))

    def follow(self, copies: Sequence[tuple[int, int]], numbers: Sequence[array[int]]) -> None:
        """Compute this process's part of a forward that rank 0 has posted."""
        *of_batch, types = numbers
        if not self._embeds:
            batch = batch_of(copies, of_batch)
            self._computed(lambda: self.own.forward(batch))
            return
        ids, first_row, *_ = of_batch
        texts, kinds = ([row[start:stop] for start, stop in pairwise(first_row)] for row in (ids, types))
        self._computed(lambda: self.own.hidden(texts, kinds if types else None))

    def _computed(self, compute: Callable[[], Tensor]) -> Tensor:
        self.ranks.watch.step += 1  # operations of a forward are compared with those of earlier forwards
        result = compute()
        if self._device.type == "cuda":  # the next forward overwrites this one's numbers, which others may not have read yet
            torch.cuda.synchronize(self._device)
        if self.ranks.why:
            raise self.ranks.error()
        return result
