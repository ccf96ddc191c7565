"""What is asked of every contender, and the account of what came when. Pure Python: peers' interpreters import it.

A trace is a list of `Ask`s. `Feed` plays it: it tells a contender who has arrived and keeps the time of every token. No two
traces have the beginning of a prompt in common, of whatever round, size or rate: nobody finds one in a prefix cache by accident.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_TOKENS = range(1000, 48000)  # of SmolLM2's vocabulary: no special tokens, and one of them is like another


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: greedy, exactly `outputs` tokens, whatever the end token."""

    prompt: tuple[int, ...]
    outputs: int
    at: float = 0.0  # seconds after the start, when it arrives
    after: int | None = None  # it arrives only when this other one has ended


Trace = list[Ask]


def _prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(_TOKENS, k=length))


def batch(seed: int, number: int, length: int, outputs: int) -> Trace:
    """All at once, all of one size."""
    rng = random.Random(f"batch {seed} {number} {length} {outputs}")
    return [Ask(prompt=_prompt(rng, length), outputs=outputs) for _ in range(number)]


def mixed(seed: int, number: int, shortest: int, longest: int, outputs: int) -> Trace:
    """All at once, prompts of evenly spread lengths in random order: the same lengths in every round."""
    rng = random.Random(f"mixed {seed} {number} {shortest} {longest} {outputs}")
    lengths = [shortest + (longest - shortest) * i // max(1, number - 1) for i in range(number)]
    random.Random("lengths").shuffle(lengths)
    return [Ask(prompt=_prompt(rng, length), outputs=outputs) for length in lengths]


def poisson(seed: int, number: int, rate: float, prompt: int = 260, outputs: int = 32, spread: float = 0.3) -> Trace:
    """`rate` arrivals a second on average; lengths are normal with a standard deviation of `spread` of the mean. Requests of
    the same sizes come at every rate, only faster."""
    rng, tokens = random.Random(f"poisson {seed}"), random.Random(f"poisson {seed} {rate}")
    asks, at = [], 0.0
    for _ in range(number):
        at += rng.expovariate(1.0)
        length, wanted = (max(2, round(rng.gauss(mean, spread * mean))) for mean in (prompt, outputs))
        asks.append(Ask(prompt=_prompt(tokens, length), outputs=wanted, at=at / rate))
    return asks


def shared(seed: int, number: int, length: int, outputs: int, share: float = 0.9) -> Trace:
    """Prompts whose first `share` is one and the same. The first comes alone, the others together when it has ended."""
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
        self.arrived = [0.0] * len(trace)  # seconds since the start, as are the times
        self.times: list[list[float]] = [[] for _ in trace]  # when each token came
        self.first: list[int] = [-1] * len(trace)  # the first token of each: which it is

    @property
    def over(self) -> bool:
        return self._left == 0

    def due(self) -> list[int]:
        """Who has arrived since the last call, in order of arrival."""
        now = self._clock() - self._start
        new = {index: at for index in self._coming if (at := self._arrival(index)) <= now}
        self._coming -= new.keys()
        for index, at in new.items():
            self.arrived[index] = at
        return sorted(new, key=lambda index: (new[index], index))

    def pause(self) -> float:
        """Seconds until the next arrival that is known; infinite if nobody comes before somebody else has ended."""
        now = self._clock() - self._start
        return max(0.0, min((self._arrival(index) for index in self._coming), default=math.inf) - now)

    def wait(self) -> None:
        """Sleep until somebody comes. For a contender that has nothing to do."""
        time.sleep(min(self.pause(), 0.05))

    def take(self, index: int, token: int) -> None:
        """The next token of a request has come."""
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
    """What a contender made of a trace. Times are seconds since the start."""

    prompts: list[int]  # tokens
    arrived: list[float]
    times: list[list[float]]
    first: list[int]
    cpu: float  # seconds of user and system time, of all its threads

    @classmethod
    def of(cls, feed: Feed, cpu: float) -> Outcome:
        lengths = [len(ask.prompt) for ask in feed.trace]
        return cls(prompts=lengths, arrived=feed.arrived, times=feed.times, first=feed.first, cpu=cpu)

    @classmethod
    def read(cls, given: dict[str, Any]) -> Outcome:
        return cls(**given)

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
        """Of the first request: tokens per second after the first one, so without its prompt."""
        times = self.times[0]
        return (len(times) - 1) / (times[-1] - times[0])

    @property
    def gaps(self) -> list[float]:
        """Seconds between a request's tokens, of all requests."""
        return [gap for times in self.times for gap in _gaps(times)]


class Latency(NamedTuple):
    """The one target of all contenders."""

    prompt_rate: float  # tok/s at which a prompt has to be answered
    gap: float  # seconds, at most, between two tokens

    def met(self, prompt: int, arrived: float, times: Sequence[float]) -> bool:
        return times[0] - arrived <= prompt / self.prompt_rate and all(gap <= self.gap for gap in _gaps(times))

    def good(self, outcome: Outcome) -> int:
        """How many requests met it."""
        return sum(map(self.met, outcome.prompts, outcome.arrived, outcome.times))

    def rate(self, outcome: Outcome) -> float:
        """Requests per second that met it; those that did not count for nothing."""
        return self.good(outcome) / outcome.seconds


def target(prompt_rates: Sequence[float], stream_rates: Sequence[float]) -> Latency:
    """From everybody's solo speeds: a prompt at 512 tok/s, or a quarter of the best where that is less; each token within
    four times the best one's time."""
    return Latency(min(512.0, max(prompt_rates) / 4), 4 / max(stream_rates))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; NaN of nothing."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]
