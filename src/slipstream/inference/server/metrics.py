"""/metrics in Prometheus' text format: the statistics of the engine and of the HTTP server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

    name: str  # its number, or the address of one on another host
    ready: bool
    starts: int
    stats: Stats | None  # None: it was never there


class Loading(NamedTuple):
    """What became of the loads of one of several models."""

    loaded: bool
    loads: int
    failures: int
    waiting: int  # requests that wait for it
    nbytes: int


class ModelFigures(NamedTuple):
    model: str  # "" if it is the only one: then no label names it
    stats: Stats | None  # of all its engines; None if there never was one
    replicas: Sequence[Replica] = ()  # each engine, if they have processes of their own, under names that no sum counts twice
    loading: Loading | None = None  # if there are several models


Values = Iterable[tuple[str, str, float]]  # a suffix of the name, a label, a value


def _line(name: str, model: str, suffix: str, label: str, value: float) -> str:
    named = "model=" + json.dumps(model, ensure_ascii=False) if model else ""  # escaped as Prometheus asks
    labels = ",".join(filter(None, (named, label)))
    return f"slipstream_{name}{suffix}{f'{{{labels}}}' if labels else ''} {value:.10g}"


def _block(name: str, kind: str, text: str, values: Iterable[tuple[str, str, str, float]]) -> list[str]:
    """`values`: the model, and as in `Values`."""
    head = [f"# HELP slipstream_{name} {text}", f"# TYPE slipstream_{name} {kind}"]
    return head + [_line(name, *value) for value in values]


def _of_processes(models: Sequence[ModelFigures]) -> list[str]:
    lines = list[str]()
    replicas = [(one.model, f'replica="{each.name}"', each) for one in models for each in one.replicas]
    for name, kind, text, part in _OF_REPLICAS if replicas else ():
        lines += _block(f"replica_{name}", kind, text, ((model, "", label, part(one)) for model, label, one in replicas))
    counted = [(model, label, one.stats) for model, label, one in replicas if one.stats is not None]
    for name, kind, text, value in _OF_STATS if replicas else ():
        lines += _block(f"replica_{name}", kind, text, ((model, "", label, value(one)) for model, label, one in counted))
    for name, kind, text, figure in _OF_LOADING if any(one.loading for one in models) else ():
        lines += _block(f"model_{name}", kind, text, ((one.model, "", "", figure(one.loading)) for one in models if one.loading))
    return lines


def render(models: Sequence[ModelFigures], traffic: Traffic) -> str:
    lines: list[str] = []

    def metric(*described: Any) -> None:
        lines.extend(_block(*described))

    def of_engines(name: str, kind: str, text: str, values: Callable[[Stats], Values]) -> None:
        metric(name, kind, text, ((one.model, *value) for one in models if one.stats is not None for value in values(one.stats)))

    def one(name: str, kind: str, text: str, value: Callable[[Stats], float]) -> None:
        of_engines(name, kind, text, lambda stats: [("", "", value(stats))])

    one("healthy", "gauge", "1 while the engine accepts requests.", lambda stats: stats.healthy)
    one("requests_waiting", "gauge", "Queued sequences.", lambda stats: stats.waiting)
    one("requests_running", "gauge", "Running sequences, which hold KV blocks.", lambda stats: stats.running)
    metric("http_requests_active", "gauge", "HTTP requests that generate or are queued.", [("", "", "", traffic.active)])
    one("kv_blocks", "gauge", "Blocks of the KV cache.", lambda stats: stats.blocks)
    one("kv_block_tokens", "gauge", "Tokens per KV block.", lambda stats: stats.block_size)
    one("kv_usage_ratio", "gauge", "Fraction of the KV cache held by running sequences.", lambda stats: stats.kv_usage)
    one("tokens_per_second", "gauge", "Generated, recent average.", lambda stats: stats.tokens_per_second)
    one("prompt_tokens_per_second", "gauge", "Computed, recent average.", lambda stats: stats.prompt_tokens_per_second)
    one("prompt_tokens_total", "counter", "Prompt tokens, computed or cached.", lambda stats: stats.prompt_tokens)
    one("cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.", lambda stats: stats.cached_tokens)
    one("generated_tokens_total", "counter", "Generated tokens.", lambda stats: stats.generated_tokens)
    one("draft_tokens_total", "counter", "Tokens proposed by speculative decoding.", lambda stats: stats.draft_tokens)
    one("accepted_tokens_total", "counter", "Proposed tokens that were accepted.", lambda stats: stats.accepted_tokens)
    one("preemptions_total", "counter", "Sequences preempted and recomputed.", lambda stats: stats.preemptions)
    one("forwards_total", "counter", "Forward passes of the model.", lambda stats: stats.forwards)
    one("expert_hits_total", "counter", "Experts of a layer needed and found in memory.", lambda stats: stats.expert_hits)
    one("expert_misses_total", "counter", "Experts of a layer needed and read from disk.", lambda stats: stats.expert_misses)
    one("targets_met_total", "counter", "Sequences whose latency target was met.", lambda stats: stats.targets_met)
    one("targets_missed_total", "counter", "Sequences whose latency target was missed.", lambda stats: stats.targets_missed)
    of_engines("finished_total", "counter", "Finished sequences by reason.", _ends)
    answers = [("", "", f'path="{path}",status="{status}"', num) for (path, status), num in sorted(traffic.answers.items())]
    metric("http_requests_total", "counter", "HTTP responses by path and status.", answers)
    metric(
        "http_abandoned_total",
        "counter",
        "Responses whose client disconnected before their end.",
        [("", "", "", traffic.abandoned)],
    )
    of_engines("time_to_first_token_seconds", "histogram", "From arrival.", lambda stats: _histogram(stats.time_to_first_token))
    of_engines("time_between_tokens_seconds", "histogram", "Per sequence.", lambda stats: _histogram(stats.between_tokens))
    of_engines(
        "queue_seconds", "histogram", "From arrival to the first forward, per request.", lambda stats: _histogram(stats.queue)
    )
    of_engines(
        "prefill_seconds",
        "histogram",
        "From the first forward to the first token, per request.",
        lambda stats: _histogram(stats.prefill),
    )
    of_engines(
        "decode_seconds", "histogram", "From the first token to the end, per sequence.", lambda stats: _histogram(stats.decode)
    )
    of_engines("request_seconds", "histogram", "From arrival to the end, per sequence.", lambda stats: _histogram(stats.whole))
    of_engines("request_prompt_tokens", "histogram", "Per request.", lambda stats: _histogram(stats.prompt_lengths))
    of_engines("request_output_tokens", "histogram", "Per sequence.", lambda stats: _histogram(stats.output_lengths))
    lines += _of_processes(models)
    return "\n".join(lines) + "\n"


_OF_REPLICAS: tuple[tuple[str, str, str, Callable[[Replica], float]], ...] = (
    ("ready", "gauge", "1 while its process serves.", lambda one: one.ready),
    ("starts_total", "counter", "Starts of its process, or connections to one on another host.", lambda one: one.starts),
)
_OF_STATS: tuple[tuple[str, str, str, Callable[[Stats], float]], ...] = (
    ("requests_waiting", "gauge", "Queued sequences.", lambda stats: stats.waiting),
    ("requests_running", "gauge", "Running sequences.", lambda stats: stats.running),
    ("kv_blocks_used", "gauge", "Blocks of its KV cache held by running sequences.", lambda stats: stats.blocks_used),
    ("prompt_tokens_total", "counter", "Prompt tokens, computed or cached.", lambda stats: stats.prompt_tokens),
    ("cached_tokens_total", "counter", "Prompt tokens found in its prefix cache.", lambda stats: stats.cached_tokens),
    ("generated_tokens_total", "counter", "Generated tokens.", lambda stats: stats.generated_tokens),
)
_OF_LOADING: tuple[tuple[str, str, str, Callable[[Loading], float]], ...] = (
    ("loaded", "gauge", "1 while it is loaded.", lambda one: one.loaded),
    ("loads_total", "counter", "Loads.", lambda one: one.loads),
    ("load_failures_total", "counter", "Loads that failed, and engines that could not be started again.", lambda one: one.failures),
    ("requests_waiting", "gauge", "HTTP requests that wait until it is loaded.", lambda one: one.waiting),
    ("bytes", "gauge", "Memory that it takes.", lambda one: one.nbytes),
)


def _ends(stats: Stats) -> Values:
    return [("", f'reason="{finish.value}"', num) for finish, num in sorted(stats.finished.items(), key=lambda end: end[0].value)]


def _histogram(histogram: Histogram) -> Values:
    """Prometheus' buckets are cumulative."""
    total = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        yield "_bucket", f'le="{bound}"', total
    yield "_sum", "", histogram.sum
    yield "_count", "", total
