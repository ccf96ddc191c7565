"""/metrics in Prometheus' text format: the statistics of the engine and of the HTTP server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.inference.stats import Histogram, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Traffic:
    """The HTTP server's counters. Only the event loop accesses them."""

    draining: bool = False  # running requests finish, new ones are rejected
    active: int = 0  # requests that generate or are queued
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    abandoned: int = 0  # clients that disconnected before their response was complete


class Replica(NamedTuple):
    """One of several engines' processes."""

    ready: bool
    starts: int
    stats: Stats


def render(stats: Stats, traffic: Traffic, replicas: Sequence[Replica] = ()) -> str:
    """`stats`: of all engines. `replicas`: of each, if they have processes of their own, under names that no sum counts twice."""
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, *values: tuple[str, float]) -> None:
        lines.extend((f"# HELP slipstream_{name} {text}", f"# TYPE slipstream_{name} {kind}"))
        lines.extend(f"slipstream_{name}{suffix} {value:.10g}" for suffix, value in values)

    metric("healthy", "gauge", "1 while the engine accepts requests.", ("", stats.healthy))
    metric("requests_waiting", "gauge", "Queued sequences.", ("", stats.waiting))
    metric("requests_running", "gauge", "Running sequences, which hold KV blocks.", ("", stats.running))
    metric("http_requests_active", "gauge", "HTTP requests that generate or are queued.", ("", traffic.active))
    metric("kv_blocks", "gauge", "Blocks of the KV cache.", ("", stats.blocks))
    metric("kv_block_tokens", "gauge", "Tokens per KV block.", ("", stats.block_size))
    metric("kv_usage_ratio", "gauge", "Fraction of the KV cache held by running sequences.", ("", stats.kv_usage))
    metric("tokens_per_second", "gauge", "Generated, recent average.", ("", stats.tokens_per_second))
    metric("prompt_tokens_per_second", "gauge", "Computed, recent average.", ("", stats.prompt_tokens_per_second))
    metric("prompt_tokens_total", "counter", "Prompt tokens, computed or cached.", ("", stats.prompt_tokens))
    metric("cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.", ("", stats.cached_tokens))
    metric("generated_tokens_total", "counter", "Generated tokens.", ("", stats.generated_tokens))
    metric("draft_tokens_total", "counter", "Tokens proposed by speculative decoding.", ("", stats.draft_tokens))
    metric("accepted_tokens_total", "counter", "Proposed tokens that were accepted.", ("", stats.accepted_tokens))
    metric("preemptions_total", "counter", "Sequences preempted and recomputed.", ("", stats.preemptions))
    metric("forwards_total", "counter", "Forward passes of the model.", ("", stats.forwards))
    metric("expert_hits_total", "counter", "Experts of a layer needed and found in memory.", ("", stats.expert_hits))
    metric("expert_misses_total", "counter", "Experts of a layer needed and read from disk.", ("", stats.expert_misses))
    ends = ((f'{{reason="{finish.value}"}}', count) for finish, count in sorted(stats.finished.items(), key=lambda e: e[0].value))
    metric("finished_total", "counter", "Finished sequences by reason.", *ends)
    answers = ((f'{{path="{path}",status="{status}"}}', count) for (path, status), count in sorted(traffic.answers.items()))
    metric("http_requests_total", "counter", "HTTP responses by path and status.", *answers)
    metric("http_abandoned_total", "counter", "Responses whose client disconnected before their end.", ("", traffic.abandoned))
    metric("time_to_first_token_seconds", "histogram", "From submission.", *_histogram(stats.time_to_first_token))
    metric("time_between_tokens_seconds", "histogram", "Per sequence.", *_histogram(stats.between_tokens))
    metric("queue_seconds", "histogram", "From submission to the first forward, per request.", *_histogram(stats.queue))
    metric("prefill_seconds", "histogram", "From the first forward to the first token, per request.", *_histogram(stats.prefill))
    metric("decode_seconds", "histogram", "From the first token to the end, per sequence.", *_histogram(stats.decode))
    metric("request_seconds", "histogram", "From submission to the end, per sequence.", *_histogram(stats.whole))
    metric("request_prompt_tokens", "histogram", "Per request.", *_histogram(stats.prompt_lengths))
    metric("request_output_tokens", "histogram", "Per sequence.", *_histogram(stats.output_lengths))
    for name, kind, text, value in _OF_REPLICAS if replicas else ():
        each = ((f'{{replica="{index}"}}', value(one)) for index, one in enumerate(replicas))
        metric(f"replica_{name}", kind, text, *each)
    return "\n".join(lines) + "\n"


_OF_REPLICAS: tuple[tuple[str, str, str, Callable[[Replica], float]], ...] = (
    ("ready", "gauge", "1 while its process serves.", lambda one: one.ready),
    ("starts_total", "counter", "Starts of its process.", lambda one: one.starts),
    ("requests_waiting", "gauge", "Queued sequences.", lambda one: one.stats.waiting),
    ("requests_running", "gauge", "Running sequences.", lambda one: one.stats.running),
    ("kv_blocks_used", "gauge", "Blocks of its KV cache held by running sequences.", lambda one: one.stats.blocks_used),
    ("prompt_tokens_total", "counter", "Prompt tokens, computed or cached.", lambda one: one.stats.prompt_tokens),
    ("cached_tokens_total", "counter", "Prompt tokens found in its prefix cache.", lambda one: one.stats.cached_tokens),
    ("generated_tokens_total", "counter", "Generated tokens.", lambda one: one.stats.generated_tokens),
)


def _histogram(histogram: Histogram) -> Iterable[tuple[str, float]]:
    """Prometheus' buckets are cumulative."""
    total = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        yield f'_bucket{{le="{bound}"}}', total
    yield "_sum", histogram.sum
    yield "_count", total
