"""/metrics in Prometheus' text format: the statistics of the engine and of the HTTP server."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slipstream.inference.core import Finish
from slipstream.inference.stats import Histogram, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Traffic:
    """The HTTP server's counters. Only the event loop accesses them."""

    draining: bool = False  # running requests finish, new ones are rejected
    active: int = 0  # requests that generate or are queued
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # (path, status) -> responses
    abandoned: int = 0  # clients that disconnected before their response was complete


class Replica(NamedTuple):
    """The process of one of several engines."""

    name: str  # its number, or the address of an engine on another host
    ready: bool
    starts: int
    stats: Stats | None  # None: it never reported any


class Loading(NamedTuple):
    """The results of the loads of one of several models."""

    loaded: bool
    loads: int
    failures: int
    waiting: int  # requests that wait for it
    nbytes: int


class ModelFigures(NamedTuple):
    model: str  # "" if it is the only one, which no label names
    stats: Stats | None  # of all its engines; None if none reported any
    replicas: Sequence[Replica] = ()  # each engine with its own process, under metric names that no sum counts twice
    loading: Loading | None = None  # if there are several models


# (name, type, attribute, help text).
_OF_ENGINES = (
    ("healthy", "gauge", "healthy", "1 while the engine accepts requests."),
    ("requests_waiting", "gauge", "waiting", "Queued sequences."),
    ("requests_running", "gauge", "running", "Running sequences, which hold KV blocks."),
    ("kv_blocks", "gauge", "blocks", "Blocks of the KV cache."),
    ("kv_block_tokens", "gauge", "block_size", "Tokens per KV block."),
    ("kv_usage_ratio", "gauge", "kv_usage", "Fraction of the KV cache held by running sequences."),
    ("tokens_per_second", "gauge", "tokens_per_second", "Generated, recent average."),
    ("prompt_tokens_per_second", "gauge", "prompt_tokens_per_second", "Computed, recent average."),
    ("prompt_tokens_total", "counter", "prompt_tokens", "Prompt tokens, computed or cached."),
    ("cached_tokens_total", "counter", "cached_tokens", "Prompt tokens found in the prefix cache."),
    ("generated_tokens_total", "counter", "generated_tokens", "Generated tokens."),
    ("draft_tokens_total", "counter", "draft_tokens", "Tokens proposed by speculative decoding."),
    ("accepted_tokens_total", "counter", "accepted_tokens", "Proposed tokens that were accepted."),
    ("preemptions_total", "counter", "preemptions", "Sequences preempted and recomputed."),
    ("forwards_total", "counter", "forwards", "Forward passes of the model."),
    ("expert_hits_total", "counter", "expert_hits", "Experts of a layer needed and found in memory."),
    ("expert_misses_total", "counter", "expert_misses", "Experts of a layer needed and read from disk."),
    ("targets_met_total", "counter", "targets_met", "Sequences whose latency target was met."),
    ("targets_missed_total", "counter", "targets_missed", "Sequences whose latency target was missed."),
    ("finished_total", "counter", "finished", "Finished sequences by reason."),
    ("time_to_first_token_seconds", "histogram", "time_to_first_token", "From arrival."),
    ("time_between_tokens_seconds", "histogram", "between_tokens", "Per sequence."),
    ("queue_seconds", "histogram", "queue", "From arrival to the first forward, per request."),
    ("prefill_seconds", "histogram", "prefill", "From the first forward to the first token, per request."),
    ("decode_seconds", "histogram", "decode", "From the first token to the end, per sequence."),
    ("request_seconds", "histogram", "whole", "From arrival to the end, per sequence."),
    ("request_prompt_tokens", "histogram", "prompt_lengths", "Per request."),
    ("request_output_tokens", "histogram", "output_lengths", "Per sequence."),
)
_OF_REPLICAS = (
    ("ready", "gauge", "ready", "1 while its process serves."),
    ("starts_total", "counter", "starts", "Starts of its process, or connections to one on another host."),
)
_OF_THEIR_ENGINES = (
    ("requests_waiting", "gauge", "waiting", "Queued sequences."),
    ("requests_running", "gauge", "running", "Running sequences."),
    ("kv_blocks_used", "gauge", "blocks_used", "Blocks of its KV cache held by running sequences."),
    ("prompt_tokens_total", "counter", "prompt_tokens", "Prompt tokens, computed or cached."),
    ("cached_tokens_total", "counter", "cached_tokens", "Prompt tokens found in its prefix cache."),
    ("generated_tokens_total", "counter", "generated_tokens", "Generated tokens."),
)
_OF_LOADING = (
    ("loaded", "gauge", "loaded", "1 while it is loaded."),
    ("loads_total", "counter", "loads", "Loads."),
    ("load_failures_total", "counter", "failures", "Loads that failed, and engines that could not be started again."),
    ("requests_waiting", "gauge", "waiting", "HTTP requests that wait until it is loaded."),
    ("bytes", "gauge", "nbytes", "Memory that it takes."),
)
_OF_TRAFFIC = (
    ("requests_active", "gauge", "active", "HTTP requests that generate or are queued."),
    ("requests_total", "counter", "answers", "HTTP responses by path and status."),
    ("abandoned_total", "counter", "abandoned", "Responses whose client disconnected before their end."),
)


def render(models: Sequence[ModelFigures], traffic: Traffic) -> str:
    engines = [(_of(one.model), one.stats) for one in models if one.stats is not None]
    replicas = [([*_of(one.model), f'replica="{each.name}"'], each) for one in models for each in one.replicas]
    replica_stats = [(labels, one.stats) for labels, one in replicas if one.stats is not None]
    loading = [(_of(one.model), one.loading) for one in models if one.loading is not None]
    parts: tuple[tuple[str, Any, Sequence[tuple[list[str], Any]]], ...] = (
        ("", _OF_ENGINES, engines),
        ("http_", _OF_TRAFFIC, [([], traffic)]),
        ("replica_", _OF_REPLICAS, replicas),
        ("replica_", _OF_THEIR_ENGINES, replica_stats),
        ("model_", _OF_LOADING, loading),
    )
    lines = list[str]()
    for prefix, rows, sources in parts:
        for name, kind, attribute, text in rows if sources else ():
            name = f"slipstream_{prefix}{name}"
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            for labels, one in sources:
                for suffix, own, value in _values(getattr(one, attribute)):
                    among = ",".join([*labels, *own])
                    lines.append(f"{name}{suffix}{f'{{{among}}}' if among else ''} {value:.10g}")
    return "\n".join(lines) + "\n"


def _of(model: str) -> list[str]:
    return ["model=" + json.dumps(model, ensure_ascii=False)] if model else []  # escaped as Prometheus requires


def _values(figure: Any) -> Iterator[tuple[str, list[str], float]]:
    """Yield (suffix, labels, value) for a number, a histogram or a mapping of numbers."""
    match figure:
        case Histogram(bounds=bounds, counts=counts):
            totals = itertools.accumulate(counts)  # Prometheus' buckets are cumulative
            yield from (("_bucket", [f'le="{bound}"'], num) for bound, num in zip((*bounds, "+Inf"), totals, strict=True))
            yield from (("_sum", [], figure.sum), ("_count", [], sum(counts)))
        case Mapping():
            yield from sorted(("", _named(key), num) for key, num in figure.items())
        case _:
            yield "", [], figure


def _named(key: Finish | tuple[str, int]) -> list[str]:
    return [f'reason="{key.value}"'] if isinstance(key, Finish) else [f'path="{key[0]}"', f'status="{key[1]}"']
