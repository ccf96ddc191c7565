"""The data types of serving: requests, sampling parameters, and the batch of one forward. No torch.

A request's tokens are its prompt and the generated tokens, in one list. The first `num_computed` of them have their keys and values
in the cache, in `blocks` (block b holds the positions from b * block_size on). A forward computes a `Chunk` of each scheduled
request: many positions of a prompt, or the one token that was sampled last.
"""

from __future__ import annotations

import json
import math
import operator
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, chain, pairwise
from numbers import Real
from typing import Any, NamedTuple, Protocol

MAX_STOP = 1024  # characters of a stop string; the text that may begin one is held back


def _number(value: Any) -> Any:
    if not isinstance(value, Real):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(map(_text, value))


def _tokens(value: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, value if isinstance(value, Iterable) else (value,)))


# Sampling settings -> (function that converts a given value, or raises TypeError or ValueError; what the value must be). Integers
# become Python's own, because the arithmetic of seeds overflows numpy's.
_FORMS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    **dict.fromkeys(
        ("max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "seed", "thinking_token_budget"),
        (operator.index, "a whole number"),
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), (_number, "a number")
    ),
    "logit_bias": (lambda given: {operator.index(one): _number(bias) for one, bias in dict(given).items()}, "numbers by token id"),
    **dict.fromkeys(("stop", "bad_words"), (_texts, "a text, or several")),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), (_tokens, "token ids")),
    "json_schema": (lambda given: json.dumps(given) if isinstance(given, Mapping) else _text(given), "a JSON schema"),
    "grammar": (_text, "a text"),
}
_OPTIONAL = ("logprobs", "prompt_logprobs", "seed", "json_schema", "grammar", "allowed_token_ids", "thinking_token_budget")
_BETWEEN: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2, 2)),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), (0, 20)),
    "thinking_token_budget": (0, math.inf),
}


class Finish(Enum):
    """Why a request ended. The values are OpenAI's names where these exist."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    CANCELLED = "cancelled"
    ERROR = "error"


class RequestPhase(Enum):
    WAITING = "waiting"  # in the queue; holds no blocks
    RUNNING = "running"  # holds blocks: its prompt is being computed, or it generates
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled. The defaults disable all filters. Raises ValueError for invalid values.

    A single `stop` or `stop_token_ids` may be given as it is, and `json_schema` as a dictionary."""

    max_tokens: int = 256
    min_tokens: int = 0  # below this, no end token is sampled and stop strings are ignored
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None  # no other token is sampled
    bad_words: tuple[str, ...] = ()  # texts of which, in the tokens of each alone or after a space, the last token is never sampled
    thinking_token_budget: int | None = None  # after so many tokens of reasoning its closing mark is sampled
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False  # the text ends with the stop string or stop token that ended it
    skip_special_tokens: bool = True  # the text is without special tokens
    logprobs: int | None = None  # alternatives to report next to the sampled token's own; None: report none
    seed: int | None = None  # None: random, for each request
    prompt_logprobs: int | None = None  # like `logprobs`, for the prompt's tokens; the prefix cache is then not read
    json_schema: str | None = None  # the output is JSON that this schema accepts
    grammar: str | None = None  # the output is a text of this grammar: llguidance's Lark, or GBNF

    def __post_init__(self) -> None:
        """The only place that rejects values which an fp32 sampler cannot handle. NaN is in no interval."""
        for name, (convert, expected) in _FORMS.items():
            value = getattr(self, name)
            try:
                if not (value is None and name in _OPTIONAL):
                    object.__setattr__(self, name, convert(value))
            except (TypeError, ValueError):
                raise ValueError(f"{name} is {value!r:.200}; it must be {expected}") from None
        between = [(name, getattr(self, name), *interval) for name, interval in _BETWEEN.items()]
        between += (("logit_bias", bias, -100, 100) for bias in self.logit_bias.values())
        limits = [
            *((name, value, f"between {a} and {b}", value is None or a <= value <= b) for name, value, a, b in between),
            ("max_tokens", self.max_tokens, "at least 1", self.max_tokens >= 1),
            ("min_tokens", self.min_tokens, "between 0 and max_tokens", 0 <= self.min_tokens <= self.max_tokens),
            ("top_k", self.top_k, "0 (all) or more", self.top_k >= 0),
            ("top_p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1),
            ("grammar", self.grammar, "left out beside json_schema", None in (self.grammar, self.json_schema)),
            ("stop", self.stop, "no empty string", all(self.stop)),
            ("bad_words", self.bad_words, "no empty string", all(self.bad_words)),
            ("allowed_token_ids", self.allowed_token_ids, "at least one token, or None", self.allowed_token_ids != ()),
        ]
        for name, value, expected, valid in limits:
            if not valid:
                raise ValueError(f"{name} is {value!r}; it must be {expected}")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP:
            raise ValueError(f"stop has a string of {longest:,} characters; it may have {MAX_STOP:,} at most")

    @property
    def constrained(self) -> bool:
        return self.json_schema is not None or self.grammar is not None

    def edits(self, number: int) -> bool:
        """Whether settings beside the filters and the budget of reasoning change the logits of generated token `number`."""
        penalized = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        forbids = bool(self.bad_words) or self.allowed_token_ids is not None
        return penalized or forbids or bool(self.logit_bias) or number < self.min_tokens


LONGEST = 1e9  # seconds; the largest target


class Target(NamedTuple):
    """The latency that a request asks for; None: any."""

    first_within: float | None = None  # seconds from arrival to the first token
    wait_within: float | None = None  # seconds between two tokens


NO_TARGET = Target()


def target_of(first_within: float | None, wait_within: float | None) -> Target:
    """Raises ValueError, naming the value, unless each given target is a positive number."""
    values: dict[str, Any] = {"first_within": first_within, "wait_within": wait_within}
    for name, value in values.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value <= LONGEST):
            raise ValueError(f"{name} is {value!r:.100}; it must be a number of seconds, above 0 and at most {LONGEST:g}")
    return Target(**{name: None if value is None else float(value) for name, value in values.items()})


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence to generate. Only the scheduler changes `phase`, `num_computed` and `blocks`."""

    id: str
    tokens: list[int]  # the prompt, then the generated tokens
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()  # the model's end tokens (unless ignore_eos), and stop_token_ids
    priority: int = 0  # the lowest is served first
    salt: str = ""  # requests share cached prefixes only with requests of the same salt
    tenant: str = ""  # an API key: the client whose share of the engine the request uses
    target: Target = NO_TARGET
    missed: bool = False  # whether it has missed its target, by the clock; only the scheduler changes `missed` and `token_at`
    token_at: float = 0.0  # when it got its last token
    elsewhere: int = 0  # tokens that the tenant got from other engines while another tenant had requests at this engine
    bad_words: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)  # last token but one, or -1 -> tokens of words
    thought_marks: tuple[int, ...] = (-1, -1)  # the token that opens reasoning, and those that close it, for its budget
    opened: int = -1  # the number of tokens before the reasoning that is not closed; -1: there is none
    adapter: Any = None  # the adapter that the runner applies (`adapters.Packed`)
    arrival: float = 0.0  # seconds, of one clock for all requests
    seed: int = 0  # params.seed, or a random one
    siblings: list[Request] = field(default_factory=list)  # the other n - 1 requests of this prompt; they start once it is computed
    phase: RequestPhase = RequestPhase.WAITING
    finish: Finish | None = None
    num_prompt: int = field(init=False)
    num_computed: int = 0
    num_cached: int = 0  # tokens of the prompt that the prefix cache had at first admission
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.opened = self.opened_after([token])
        self.tokens.append(token)

    def opened_after(self, more: Sequence[int]) -> int:
        """`opened` once `more` tokens are generated."""
        opened, (opening, *closing) = self.opened, self.thought_marks
        for place, token in enumerate(more, len(self.tokens) + 1):
            opened = place if token == opening and opened < 0 else -1 if token in closing else opened
        return opened

    @property
    def deadline(self) -> float:
        """When its next token is due by the target; infinite without a target."""
        has_token = self.num_generated > 0
        within = self.target.wait_within if has_token else self.target.first_within
        return math.inf if within is None else (self.token_at if has_token else self.arrival) + within

    @property
    def is_plain(self) -> bool:
        """Whether logits, settings and seed alone determine its next tokens, and only tokens are requested."""
        return not (self.edits() or self.params.constrained) and self.params.logprobs is None

    def edits(self, draft: Sequence[int] = ()) -> bool:
        """Whether settings beside the filters change the logits after `draft`."""
        reasons = self.params.thinking_token_budget is not None and (self.opened >= 0 or self.thought_marks[0] in draft)
        return reasons or self.params.edits(self.num_generated + len(draft))


class Chunk(NamedTuple):
    """A request's part of one forward: positions [start, stop) of its tokens, then the `draft`."""

    request: Request
    start: int
    stop: int
    draft: tuple[int, ...] = ()  # guessed tokens, computed at the positions from `stop` on

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last known token, so that the next one is sampled."""
        return self.stop == len(self.request.tokens)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start + len(self.draft)

    @property
    def num_sampled(self) -> int:
        """Rows of logits to sample from: one for the next token and one after each draft token."""
        return 1 + len(self.draft) if self.samples else 0

    @property
    def num_rows(self) -> int:
        """Rows of logits: those of the last position and the draft, or all if the prompt's log-probabilities are requested."""
        request = self.request
        scored = request.params.prompt_logprobs is not None and self.start < request.num_prompt
        return self.num_tokens if scored else self.num_sampled


class ForwardSize(NamedTuple):
    """The work of one forward."""

    tokens: int
    rows: int = 0  # of logits
    positions: int = 0  # positions that its tokens attend to, summed over the tokens


def attended(start: int, stop: int) -> int:
    """Sum, over a request's tokens [start, stop), of the positions that each attends to."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


class Batch(NamedTuple):
    """The input of one forward, or of several `steps` of one token per request: each step's tokens are the input of the next."""

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...]  # blocks (from, to) to copy before the forward: copy-on-write
    steps: int = 1  # the most steps to run; `Request.blocks` has room for all

    @property
    def num_tokens(self) -> int:
        """Of one step."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def size(self) -> ForwardSize:
        """The work of the first step."""
        spans = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in self.chunks]
        return ForwardSize(self.num_tokens, sum(chunk.num_rows for chunk in self.chunks), sum(attended(*span) for span in spans))


class ChunkSpan(NamedTuple):
    """One chunk's part of `BatchNumbers`."""

    begin: int  # index of its first token
    end: int
    start: int  # position of its first token
    length: int  # known tokens of its text
    blocks: Sequence[int]  # its text's

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + self.end - self.begin


class BatchNumbers(NamedTuple):
    """What a forward reads of a batch, or of whole texts. Other processes compute their parts from the same int32 arrays."""

    copies: array[int]  # blocks (from, to) to copy before, one pair after the other
    ids: array[int]  # tokens
    first_row: array[int]  # [chunks + 1], offsets of the chunks in `ids`
    start: array[int]  # [chunks], positions of their first tokens
    lengths: array[int]  # [chunks], known tokens of their texts
    tables: array[int]  # blocks, of all steps
    table_at: array[int]  # [chunks], offsets of the chunks in `tables`
    logit_rows: array[int]  # indices in `ids` of the tokens after which logits are needed
    types: array[int]  # token types; empty: all are 0
    adapters: Sequence[Any] = ()  # of the chunks (`Request.adapter`); empty: none has one

    @property
    def arrays(self) -> tuple[array[int], ...]:
        return self[:-1]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """`copies` as pairs."""
        return [*zip(self.copies[::2], self.copies[1::2], strict=True)]

    def spans(self) -> list[ChunkSpan]:
        tables = (self.tables[begin:end] for begin, end in pairwise([*self.table_at, len(self.tables)]))
        of_chunks = zip(pairwise(self.first_row), self.start, self.lengths, tables, strict=True)
        return [ChunkSpan(begin, end, start, length, blocks) for (begin, end), start, length, blocks in of_chunks]


NUM_ARRAYS = len(BatchNumbers._fields) - 1


def numbers_of(batch: Batch, block_size: int) -> BatchNumbers:
    """The numbers of a batch's first step."""
    numbers, adapters = BatchNumbers(*(array("i") for _ in range(NUM_ARRAYS))), [chunk.request.adapter for chunk in batch.chunks]
    numbers.copies.extend(chain.from_iterable(batch.copies))
    for chunk in batch.chunks:
        numbers.first_row.append(len(numbers.ids))
        numbers.ids.extend(chunk.request.tokens[chunk.start : chunk.stop])
        numbers.ids.extend(chunk.draft)
        numbers.start.append(chunk.start)
        numbers.lengths.append(len(chunk.request.tokens))
        numbers.table_at.append(len(numbers.tables))
        numbers.tables.extend(chunk.request.blocks[: -(-(chunk.stop + len(chunk.draft) + batch.steps - 1) // block_size)])
        numbers.logit_rows.extend(range(len(numbers.ids) - chunk.num_rows, len(numbers.ids)))
    numbers.first_row.append(len(numbers.ids))
    return numbers._replace(adapters=adapters) if any(adapters) else numbers


def numbers_of_texts(texts: Sequence[Sequence[int]], block_size: int, types: Sequence[Sequence[int]] | None = None) -> BatchNumbers:
    """The numbers of whole texts, in the first blocks of the cache."""
    lengths = array("i", map(len, texts))
    first_row = array("i", accumulate(lengths, initial=0))
    table_at = array("i", accumulate((-(-length // block_size) for length in lengths), initial=0))
    return BatchNumbers(
        copies=array("i"),
        ids=array("i", chain.from_iterable(texts)),
        first_row=first_row,
        start=array("i", bytes(4 * len(texts))),
        lengths=lengths,
        tables=array("i", range(table_at[-1])),
        table_at=table_at[:-1],
        logit_rows=array("i", range(first_row[-1])),
        types=array("i", chain.from_iterable(types or ())),
    )


class QueueFullError(RuntimeError):
    """The waiting queue is at its limit; try again later."""


class Runner(Protocol):
    """Runs the model on one batch. Owns weights and cache, and makes no scheduling decisions."""

    num_blocks: int
    block_size: int
    vocab_size: int
    max_context: int  # positions that the model supports
    short_context: int  # requests of more tokens use other rotary frequencies, from their first position on (`config.Rope`)

    def put(self, role: str, weight: Any) -> None:
        """Overwrite one weight while no forward runs. `role`: its path in `DecoderWeights`, or a module's parameter name. `weight`
        has the type of the old one and stays the caller's."""
        ...

    def forward(self, batch: Batch) -> object:
        """Write the batch's keys and values to the cache and return logits: fp32 [rows, vocab], torch or numpy, with `num_rows`
        rows per chunk in order. They are valid until the next forward."""
        ...

    @property
    def generate(self) -> Generate | None:
        """Runs a batch of several steps; None: this runner only makes one step at a time, by `forward`."""
        ...


# (the batch, how to draw (`sampler.Draws`), an int32 that another thread makes nonzero to prevent further steps) -> the tokens of
# each completed step, one per request, or -1 if none can be drawn. The last step is `batch.steps`, or the first that draws an end
# token or -1.
Generate = Callable[[Batch, Any, Any], list[list[int]]]


class PartRunner(ABC):
    """A `Runner` that computes from numbers, and so its part of a forward that several processes compute together."""

    block_size: int

    @abstractmethod
    def run(self, numbers: BatchNumbers) -> Any:
        """Make the copies and return what `forward` does or, if the model has no head, what `hidden` does."""

    def forward(self, batch: Batch) -> Any:
        """As `Runner.forward`; torch's logits are on the cache's device."""
        return self.run(numbers_of(batch, self.block_size))

    def hidden(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Any:
        """The last layer's outputs after the final norm, fp32 [tokens of all texts, hidden], from position 0 on, of a model without
        a head. `types`: of the tokens. The cache must have room for all tokens; its blocks are overwritten."""
        return self.run(numbers_of_texts(texts, self.block_size, types))
