"""/metrics in Prometheus' text format: the engine's statistics and what the server itself counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.inference.stats import Histogram, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Traffic:
    """What the server counts; touched by the event loop alone."""

    draining: bool = False  # what runs is finished, nothing new is taken
    active: int = 0  # that generate or wait to
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    abandoned: int = 0  # clients that left before their answer was complete


def render(stats: Stats, traffic: Traffic) -> str:
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, *values: tuple[str, float]) -> None:
        lines.extend((f"# HELP slipstream_{name} {text}", f"# TYPE slipstream_{name} {kind}"))
        lines.extend(f"slipstream_{name}{suffix} {value:.10g}" for suffix, value in values)

    metric("healthy", "gauge", "1 while the engine takes requests.", ("", stats.healthy))
    metric("requests_waiting", "gauge", "Sequences in the queue.", ("", stats.waiting))
    metric("requests_running", "gauge", "Sequences that hold cache blocks.", ("", stats.running))
    metric("http_requests_active", "gauge", "HTTP requests that generate or wait to.", ("", traffic.active))
    metric("kv_blocks", "gauge", "Blocks of the KV cache.", ("", stats.blocks))
    metric("kv_block_tokens", "gauge", "Tokens of one block.", ("", stats.block_size))
    metric("kv_usage_ratio", "gauge", "Share of the KV cache that running sequences hold.", ("", stats.kv_usage))
    metric("tokens_per_second", "gauge", "Generated, over the last seconds.", ("", stats.tokens_per_second))
    metric("prompt_tokens_per_second", "gauge", "Computed, over the last seconds.", ("", stats.prompt_tokens_per_second))
    metric("prompt_tokens_total", "counter", "Prompt tokens, computed or found in the cache.", ("", stats.prompt_tokens))
    metric("cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.", ("", stats.cached_tokens))
    metric("generated_tokens_total", "counter", "Generated tokens.", ("", stats.generated_tokens))
    metric("draft_tokens_total", "counter", "Tokens guessed ahead.", ("", stats.draft_tokens))
    metric("accepted_tokens_total", "counter", "Of these, right ones.", ("", stats.accepted_tokens))
    metric("preemptions_total", "counter", "Sequences that gave their blocks back and began anew.", ("", stats.preemptions))
    metric("forwards_total", "counter", "Forwards of the model.", ("", stats.forwards))
    ends = ((f'{{reason="{finish.value}"}}', count) for finish, count in sorted(stats.finished.items(), key=lambda e: e[0].value))
    metric("finished_total", "counter", "Sequences, by why they ended.", *ends)
    answers = ((f'{{path="{path}",status="{status}"}}', count) for (path, status), count in sorted(traffic.answers.items()))
    metric("http_requests_total", "counter", "HTTP answers.", *answers)
    metric("http_abandoned_total", "counter", "Answers whose client left before their end.", ("", traffic.abandoned))
    metric("time_to_first_token_seconds", "histogram", "From submission.", *_histogram(stats.time_to_first_token))
    metric("time_between_tokens_seconds", "histogram", "Of one sequence.", *_histogram(stats.between_tokens))
    return "\n".join(lines) + "\n"


def _histogram(histogram: Histogram) -> Iterable[tuple[str, float]]:
    """Prometheus' buckets are cumulative."""
    total = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        yield f'_bucket{{le="{bound}"}}', total
    yield "_sum", histogram.sum
    yield "_count", total
