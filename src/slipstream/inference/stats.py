"""Metrics of an engine: totals, throughput over a window, histograms of latencies and lengths. For /metrics and the web page."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from slipstream.inference.core import Finish

_WINDOW = 10.0  # seconds over which throughput is measured
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds, upper bounds
_BETWEEN_TOKENS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_WHOLE = (*_FIRST_TOKEN, 120.0, 300.0, 600.0)
_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


@dataclass(slots=True)
class Histogram:
    """Like a Prometheus histogram, but counts are per bucket, not cumulative; the last bucket is above all bounds."""

    bounds: tuple[float, ...]  # upper, inclusive
    counts: list[int] = field(default_factory=list)  # len(bounds) + 1; empty: zeros
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


class Use(NamedTuple):
    """Experts on disk (`on_disk`) that layers needed since the start: found in memory, or read."""

    hits: int = 0
    misses: int = 0


@dataclass(slots=True, kw_only=True)
class Stats:
    """The figures of an engine, which counts in one of its own and returns snapshots. Token and request counts are totals since the
    start; times are in seconds."""

    healthy: bool = True
    waiting: int = 0  # sequences in the queue, and held ones
    running: int = 0  # sequences that hold blocks
    blocks: int = 0  # of the KV cache
    blocks_used: int = 0  # by running sequences; blocks that only the prefix cache holds count as free
    block_size: int = 0  # tokens
    prompt_tokens: int = 0  # computed or found in the cache
    cached_tokens: int = 0  # those of them found in the prefix cache
    generated_tokens: int = 0
    draft_tokens: int = 0  # proposed by speculative decoding
    accepted_tokens: int = 0  # those of them accepted
    preemptions: int = 0
    forwards: int = 0
    expert_hits: int = 0  # both are 0 unless experts are on disk; see `Use`
    expert_misses: int = 0
    targets_met: int = 0  # sequences with a target that ended (stop or length) and met it
    targets_missed: int = 0
    finished: dict[Finish, int] = field(default_factory=lambda: Counter[Finish]())  # sequences by finish reason
    tokens_per_second: float = 0.0  # generated, over the last 10 seconds
    prompt_tokens_per_second: float = 0.0  # computed
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN))  # seconds, from submit
    between_tokens: Histogram = field(default_factory=lambda: Histogram(_BETWEEN_TOKENS))  # seconds
    queue: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN))  # seconds, from submit to the first forward
    prefill: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN))  # from the first forward to the first token
    decode: Histogram = field(default_factory=lambda: Histogram(_WHOLE))  # seconds, from the first token to the end
    whole: Histogram = field(default_factory=lambda: Histogram(_WHOLE))  # seconds, from submit to the end
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(_TOKENS))  # tokens
    output_lengths: Histogram = field(default_factory=lambda: Histogram(_TOKENS))  # tokens

    @property
    def kv_usage(self) -> float:
        """The used fraction of the KV cache, 0 to 1."""
        return self.blocks_used / self.blocks if self.blocks else 0.0  # 0 blocks: no engine is left


def total(parts: Sequence[Stats]) -> Stats:
    """Sum over several engines, at least one; healthy if one is. The block size is not summed."""

    def added(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if isinstance(first := values[0], Histogram):
            counts = [*map(sum, zip(*(one.counts for one in values), strict=True))]
            return Histogram(first.bounds, counts, sum(one.sum for one in values))
        return sum(map(Counter, values), Counter()) if name == "finished" else sum(values)

    healthy, block_size = any(part.healthy for part in parts), parts[0].block_size
    return Stats(**{one.name: added(one.name) for one in fields(Stats)} | {"healthy": healthy, "block_size": block_size})


def settled(stats: Stats) -> Stats:
    """The statistics of an ended engine: only totals remain."""
    return replace(
        stats, healthy=False, waiting=0, running=0, blocks=0, blocks_used=0, tokens_per_second=0.0, prompt_tokens_per_second=0.0
    )


class Throughput:
    """The tokens of the forwards of the last seconds."""

    def __init__(self) -> None:
        self._recent = deque[tuple[float, int, int]]()  # (time, generated tokens, computed prompt tokens)

    def add(self, now: float, generated: int, computed: int) -> None:
        """Record a forward: the tokens it generated and the prompt tokens it computed."""
        self._recent.append((now, generated, computed))
        while self._recent[0][0] < now - _WINDOW:
            self._recent.popleft()

    def rates(self, now: float) -> tuple[float, float]:
        """Tokens generated, and prompt tokens computed, per second of the window (or since its first forward, if that is less)."""
        recent = [entry for entry in self._recent if entry[0] >= now - _WINDOW]
        if not recent:
            return 0.0, 0.0
        seconds = max(now - recent[0][0], 1.0)
        return sum(entry[1] for entry in recent) / seconds, sum(entry[2] for entry in recent) / seconds
