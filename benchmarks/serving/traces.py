"""The requests to every contender, and the times of their tokens. Standard library only: peers' interpreters import it.

A trace is a list of `Ask`s. `Feed` plays it: it hands a contender the requests that have arrived and records the time of every
token. No two traces, of any round, size or rate, share the beginning of a prompt, so that no prefix cache has it by accident.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_TOKENS = range(1000, 48000)  # of SmolLM2's vocabulary: no special tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: greedy, exactly `outputs` tokens; the end token does not end it."""

    prompt: tuple[int, ...]
    outputs: int
    at: float = 0.0  # arrival, in seconds after the start
    after: int | None = None  # arrives when this other request has ended


Trace = list[Ask]


def _prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(_TOKENS, k=length))


def batch(seed: int, number: int, length: int, outputs: int) -> Trace:
    """All arrive at once; all have one size."""
    rng = random.Random(f"batch {seed} {number} {length} {outputs}")
    return [Ask(prompt=_prompt(rng, length), outputs=outputs) for _ in range(number)]


def mixed(seed: int, number: int, shortest: int, longest: int, outputs: int) -> Trace:
    """All arrive at once; prompts have evenly spread lengths, the same in every round, in random order."""
    rng = random.Random(f"mixed {seed} {number} {shortest} {longest} {outputs}")
    lengths = [shortest + (longest - shortest) * i // max(1, number - 1) for i in range(number)]
    random.Random("lengths").shuffle(lengths)
    return [Ask(prompt=_prompt(rng, length), outputs=outputs) for length in lengths]


def poisson(seed: int, number: int, rate: float, prompt: int = 260, outputs: int = 32, spread: float = 0.3) -> Trace:
    """`rate` arrivals a second on average; lengths are normal with a standard deviation of `spread` of the mean. Every
    rate has requests of the same sizes."""
    rng, tokens = random.Random(f"poisson {seed}"), random.Random(f"poisson {seed} {rate}")
    asks, at = [], 0.0
    for _ in range(number):
        at += rng.expovariate(1.0)
        length, wanted = (max(2, round(rng.gauss(mean, spread * mean))) for mean in (prompt, outputs))
        asks.append(Ask(prompt=_prompt(tokens, length), outputs=wanted, at=at / rate))
    return asks


def shared(seed: int, number: int, length: int, outputs: int, share: float = 0.9) -> Trace:
    """Prompts with the same first `share`. The first one arrives alone, the others together when it has ended."""
    rng = random.Random(f"shared {seed} {number} {length} {outputs}")
    common = _prompt(rng, round(share * length))
    return [
        Ask(prompt=common + _prompt(rng, length - len(common)), outputs=outputs, after=0 if index else None)
        for index in range(number)
    ]


class Feed:
    """Plays a trace to one contender, whose loop calls `due` and `take`; `take` may be called from another thread."""

    def __init__(self, trace: Sequence[Ask], clock: Callable[[], float] = time.perf_counter) -> None:
        self.trace = trace
        self._clock = clock
        self._start = clock()
        self._coming = set(range(len(trace)))
        self._left = len(trace)
        self.arrived = [0.0] * len(trace)  # seconds since the start, like the times
        self.times: list[list[float]] = [[] for _ in trace]  # of each token
        self.first: list[int] = [-1] * len(trace)  # the first token's id

    @property
    def over(self) -> bool:
        return self._left == 0

    def due(self) -> list[int]:
        """The requests that have arrived since the last call, in order of arrival."""
        now = self._clock() - self._start
        new = {index: at for index in self._coming if (at := self._arrival(index)) <= now}
        self._coming -= new.keys()
        for index, at in new.items():
            self.arrived[index] = at
        return sorted(new, key=lambda index: (new[index], index))

    def pause(self) -> float:
        """Seconds until the next arrival that is known; infinite if all others wait for a request to end."""
        now = self._clock() - self._start
        return max(0.0, min((self._arrival(index) for index in self._coming), default=math.inf) - now)

    def wait(self) -> None:
        """Sleep until the next arrival. For a contender that has nothing to do."""
        time.sleep(min(self.pause(), 0.05))

    def take(self, index: int, token: int) -> None:
        """Record the next token of a request."""
        times, ask = self.times[index], self.trace[index]
        if len(times) == ask.outputs:
            raise RuntimeError(f"request {index} got more than its {ask.outputs} tokens")
        if not times:
            self.first[index] = token
        times.append(self._clock() - self._start)
        self._left -= len(times) == ask.outputs

    def _arrival(self, index: int) -> float:
        ask = self.trace[index]
        if ask.after is None:
            return ask.at
        before = self.times[ask.after]
        return before[-1] + ask.at if len(before) == self.trace[ask.after].outputs else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A contender's run of a trace. Times are seconds since the start."""

    prompts: list[int]  # tokens
    arrived: list[float]
    times: list[list[float]]
    first: list[int]
    cpu: float  # seconds of user and system time, of all its threads

    @classmethod
    def of(cls, feed: Feed, cpu: float) -> Outcome:
        lengths = [len(ask.prompt) for ask in feed.trace]
        return cls(prompts=lengths, arrived=feed.arrived, times=feed.times, first=feed.first, cpu=cpu)

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self.times)

    @property
    def output_rate(self) -> float:
        """Tokens out per second, from the start to the last one."""
        return sum(map(len, self.times)) / self.seconds

    @property
    def prompt_rate(self) -> float:
        """Of the first request: its prompt's tokens over the time to its first token."""
        return self.prompts[0] / (self.times[0][0] - self.arrived[0])

    @property
    def stream_rate(self) -> float:
        """Of the first request: tokens per second after the first token, so without its prompt."""
        times = self.times[0]
        return (len(times) - 1) / (times[-1] - times[0])

    @property
    def gaps(self) -> list[float]:
        """Seconds between a request's tokens, of all requests."""
        return [gap for gaps in self.gaps_of_requests for gap in gaps]

    @property
    def gaps_of_requests(self) -> list[list[float]]:
        return [_gaps(times) for times in self.times]


class Latency(NamedTuple):
    """The one target of all contenders."""

    prompt_rate: float  # tok/s at which a prompt must be answered
    gap: float  # seconds, at most, between two tokens

    def met(self, prompt: int, arrived: float, times: Sequence[float]) -> bool:
        return times[0] - arrived <= prompt / self.prompt_rate and all(gap <= self.gap for gap in _gaps(times))

    def good(self, outcome: Outcome) -> int:
        """The number of requests that met it."""
        return sum(map(self.met, outcome.prompts, outcome.arrived, outcome.times))

    def rate(self, outcome: Outcome) -> float:
        """Requests per second that met it; the others count for nothing."""
        return self.good(outcome) / outcome.seconds


def target(prompt_rates: Sequence[float], stream_rates: Sequence[float]) -> Latency:
    """From all contenders' solo speeds: a prompt at 512 tok/s, or at a quarter of the best speed if that is less; each token within
    four times the best one's time."""
    return Latency(min(512.0, max(prompt_rates) / 4), 4 / max(stream_rates))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; NaN of nothing."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]
