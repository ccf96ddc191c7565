"""One of the answers to a prompt while it is generated: a scheduler's `Request`, the state of its text and its constraint, and the
`Output`s that tell of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slipstream.inference.constrain import Constraint
from slipstream.inference.core import NO_TARGET, Finish, Request
from slipstream.inference.sampler import Sampled
from slipstream.inference.stats import Stats
from slipstream.inference.text import StopStrings, Stream


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    completion_tokens: int  # including the end token


class Logprob(NamedTuple):
    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]  # (token id, logprob) of the params.logprobs most likely tokens, descending
    rank: int = 0  # 1: the most likely token


@dataclass(frozen=True, slots=True)
class Output:
    """An increment of one sequence. `text` can lag behind `token_ids`: incomplete UTF-8 and possible stop strings are held back."""

    index: int  # 0 to n - 1
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()  # one per token, if requested
    finish: Finish | None = None  # only in the last Output, like usage and error
    usage: Usage | None = None
    error: str | None = None  # the reason, if finish is ERROR
    prompt_logprobs: tuple[Logprob | None, ...] | None = None  # one per token of the prompt, if requested; only in the first Output
    stopped_by: str | int | None = None  # the stop string, or of stop_token_ids, that ended it; None: an end token, or no end yet


Sink = Callable[[Output], object]


def nbytes_of(output: Output) -> int:
    """Approximate memory of an output in bytes, from measurements."""
    scored = (one for one in (*output.logprobs, *(output.prompt_logprobs or ())) if one is not None)
    return 400 + len(output.text) + sum(200 + 130 * len(one.top) for one in scored)


@dataclass(slots=True, eq=False)
class Handle:
    """A submitted prompt, for `cancel`."""

    id: str
    sink: Sink
    sequences: list[AnswerSequence] = field(default_factory=list)
    scored: list[Logprob | None] = field(default_factory=list)  # the prompt's tokens so far; None for the first

    @property
    def num_prompt(self) -> int:
        return self.sequences[0].request.num_prompt


@dataclass(slots=True, eq=False)
class AnswerSequence:
    """One of the n sequences of a prompt. After `submit`, only the engine's thread accesses it."""

    index: int
    handle: Handle
    request: Request
    stream: Stream | None  # None without a tokenizer: no text
    stops: StopStrings
    constraint: Constraint | None
    started: float = 0.0  # perf_counter at its first forward; 0: none yet, or it is a sibling
    first_token: float = 0.0  # perf_counter at its first token; 0: none yet
    last_token: float = 0.0  # perf_counter at its last token; 0: none yet
    num_reported: int = 0  # tokens in the outputs so far

    def take(self, tokens: Sequence[Sampled], finish: Finish | None) -> Output:
        """Return the Output for the next tokens. `finish`: why the last one ends the sequence; a stop string can end it earlier."""
        is_first, text = not self.num_reported, ""
        for num, sampled in enumerate(tokens, 1):
            self.num_reported += 1
            if self.constraint is not None:
                self.constraint.accept(sampled.token)
            if finish is Finish.STOP and num == len(tokens) and not self.request.params.include_stop_str_in_output:
                break  # the end token is not part of the text
            text += self._pass("" if self.stream is None else self.stream.push([sampled.token]))
            if self.stops.matched is not None:
                tokens, finish = tokens[:num], Finish.STOP
                break
        output = self._output(text, tokens, finish)
        is_scored = is_first and self.request.params.prompt_logprobs is not None
        return replace(output, prompt_logprobs=tuple(self.handle.scored or [None])) if is_scored else output

    def end(self, finish: Finish, error: str | None = None) -> Output:
        """Return the Output that ends the sequence without another token."""
        return replace(self._output("", (), finish), error=error)

    def _pass(self, text: str) -> str:
        """Filter `text` through the stop strings, which are inactive below min_tokens."""
        return text if self.num_reported < self.request.params.min_tokens else self.stops.push(text)

    def _output(self, text: str, tokens: Sequence[Sampled], finish: Finish | None) -> Output:
        usage = None
        if finish is not None:
            if self.stream is not None:
                text += self._pass(self.stream.finish())
            text += self.stops.finish()
            usage = Usage(self.request.num_prompt, self.request.num_cached, self.num_reported)
        logprobs = tuple(Logprob(one.token, one.logprob, one.top, one.rank) for one in tokens if one.logprob is not None)
        ids = tuple(sampled.token for sampled in tokens)
        stopped: str | int | None = self.stops.matched
        if stopped is None and finish is Finish.STOP and ids[-1] in self.request.params.stop_token_ids:
            stopped = ids[-1]
        return Output(self.index, text, ids, logprobs, finish, usage, stopped_by=stopped)

    def measure(self, totals: Stats, num: int, now: float) -> None:
        """Record the latency of `num` tokens that it got at `now`."""
        request = self.request
        if num and self.last_token:
            totals.between_tokens.add((now - self.last_token) / num, num)
        elif num:
            self.first_token = now
            totals.time_to_first_token.add(now - request.arrival)
            if self.started:
                totals.prefill.add(now - self.started)
            if self.index == 0:
                totals.prompt_tokens += request.num_prompt
                totals.prompt_lengths.add(request.num_prompt)
                totals.cached_tokens += request.num_cached
        self.last_token = now

    def measure_end(self, totals: Stats, finish: Finish, now: float) -> None:
        request = self.request
        totals.finished[finish] += 1
        if request.target != NO_TARGET:
            missed = request.missed or now > request.deadline  # missed at a token, or because the next one is overdue
            totals.targets_missed += missed
            totals.targets_met += not missed and finish in (Finish.STOP, Finish.LENGTH)
        totals.whole.add(now - request.arrival)
        if self.first_token:
            totals.decode.add(now - self.first_token)
        totals.output_lengths.add(self.num_reported)
