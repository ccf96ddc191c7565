"""The nouns of serving: what is asked, how it is sampled, and what one forward computes. No torch.

A request's tokens are its prompt and what was generated, in one list. `num_computed` of them have their keys and
values in the cache, in `blocks` (block b holds positions b * block_size onward). A forward computes a `Chunk` of each
scheduled request: many positions of a prompt, or the one token that was sampled last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

MAX_STOP = 1024  # characters of a stop string: its automaton takes memory and time by its length, for each request


class Finish(Enum):
    """Why a request ended, in OpenAI's words where they have one."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    CANCELLED = "cancelled"
    ERROR = "error"


class Phase(Enum):
    WAITING = "waiting"  # in the queue; holds no blocks
    RUNNING = "running"  # holds blocks: its prompt is being computed, or it generates
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. A value that switches its filter off is the default; checked where it is made."""

    max_tokens: int = 256
    min_tokens: int = 0  # before these, no end token is chosen and no stop string ends
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives beside the chosen token's own; None: none at all
    seed: int | None = None  # None: one is drawn for each request
    json_schema: str | None = None  # the output is JSON text of this schema

    def __post_init__(self) -> None:
        """What a sampler in fp32 could not compute with is refused here, and nowhere else: NaN is in no interval."""
        for names, kind, word in ((_INTEGERS, Integral, "a whole number"), (_NUMBERS, Real, "a number")):
            for name in names:
                if not isinstance(value := getattr(self, name), kind) and not (value is None and name in _OPTIONAL):
                    raise ValueError(f"{name} is {value!r}; it has to be {word}")
        wrong = [
            ("max_tokens", self.max_tokens, "at least 1", self.max_tokens >= 1),
            ("min_tokens", self.min_tokens, "between 0 and max_tokens", 0 <= self.min_tokens <= self.max_tokens),
            ("temperature", self.temperature, "between 0 and 100", 0 <= self.temperature <= 100),
            ("top_k", self.top_k, "0 (all) or more", self.top_k >= 0),
            ("top_p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1),
            ("min_p", self.min_p, "between 0 and 1", 0 <= self.min_p <= 1),
            ("repetition_penalty", self.repetition_penalty, "between 0.01 and 100", 0.01 <= self.repetition_penalty <= 100),
            ("presence_penalty", self.presence_penalty, "between -2 and 2", -2 <= self.presence_penalty <= 2),
            ("frequency_penalty", self.frequency_penalty, "between -2 and 2", -2 <= self.frequency_penalty <= 2),
            *(("logit_bias", bias, "between -100 and 100", -100 <= bias <= 100) for bias in self.logit_bias.values()),
            ("logprobs", self.logprobs, "between 0 and 20", self.logprobs is None or 0 <= self.logprobs <= 20),
            ("stop", self.stop, "no empty string", all(self.stop)),
        ]
        for name, value, wanted, right in wrong:
            if not right:
                raise ValueError(f"{name} is {value!r}; it has to be {wanted}")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP:
            raise ValueError(f"stop has a string of {longest:,} characters; it may have {MAX_STOP:,} at most")


_INTEGERS = ("max_tokens", "min_tokens", "top_k", "logprobs", "seed")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_OPTIONAL = ("logprobs", "seed")


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence to be generated. The scheduler alone changes `phase`, `num_computed` and `blocks`."""

    id: str
    tokens: list[int]  # the prompt, then what was generated
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()  # tokens that end it: the model's (unless ignore_eos) and stop_token_ids
    priority: int = 0  # lower goes first
    salt: str = ""  # shares cached prefixes with requests of the same salt only
    arrival: float = 0.0  # seconds, of one clock
    seed: int = 0  # params.seed, or the one that was drawn
    siblings: list[Request] = field(default_factory=list)  # the other n - 1 of this prompt, admitted when it is computed
    phase: Phase = Phase.WAITING
    finish: Finish | None = None
    num_prompt: int = field(init=False)
    num_computed: int = 0
    num_cached: int = 0  # of the prompt, found in the prefix cache when first admitted
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt


class Chunk(NamedTuple):
    """What one forward computes of one request: positions [start, stop) of its tokens, then the guessed `draft`."""

    request: Request
    start: int
    stop: int
    draft: tuple[int, ...] = ()  # tokens guessed to follow; computed at positions stop onward

    @property
    def samples(self) -> bool:
        """Whether the last known token is in it, so that the next can be sampled: rows for it and for each guess."""
        return self.stop == len(self.request.tokens)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start + len(self.draft)

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft) if self.samples else 0


class Batch(NamedTuple):
    """One forward."""

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...]  # (from, to) blocks, to be copied before: copy-on-write

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class QueueFullError(RuntimeError):
    """The waiting queue is at its limit; try again later."""


class Runner(Protocol):
    """Runs the model over one batch. Owns weights and cache; knows no policy."""

    num_blocks: int
    block_size: int
    vocab_size: int
    max_context: int  # positions that the model can tell apart

    def put(self, role: str, weight: Any) -> None:
        """New values for one weight, while nothing runs. `role`: what `update` calls it; `weight` has the form of what is there,
        and is the caller's."""
        ...

    def forward(self, batch: Batch) -> object:
        """Logits, fp32 [rows, vocab], torch's or numpy's, of `num_rows` rows per chunk in order, until the next forward; keys and
        values are in the cache after."""
        ...
