"""From logits to tokens. A row's result depends only on the row and its request.

[Note: Seeded sampling] Each generated token has one uniform number, a hash of (request.seed, index of the token). So a seed gives
the same text alone and in any batch, after a preemption, and with or without drafts. All arithmetic is per row, on one thread: a
reduction over a batch would sum in an order that depends on the batch. A compiled kernel (ops/csrc/sample_body.h) samples all rows
of a forward in one call, several at a time on a team of threads. It returns the same tokens as the numpy version here, except where
rounding decides. numpy is the fallback without a compiler.

[Note: Guessed tokens] Every row of a draft is sampled with its own number, as if its draft tokens had been generated.
`drafts.accept` keeps samples up to the first that differs from the draft. So a kept sample was drawn from the model's distribution
after exactly the tokens before it. The text is not only equally distributed as without a draft: it is the same text.

Order, as in transformers: repetition, presence and frequency penalties, logit_bias, forbidden tokens (bad_words,
allowed_token_ids, thinking_token_budget, min_tokens, mask); then temperature, top-k, top-p, min-p. Log-probabilities are of the raw
logits, before all of these, as in OpenAI's API.

[Note: Edits] Penalties, bias and forbidden tokens change the logits by index arrays that are kept per request until `forget`. They
are derived from the request's tokens, which only grow. Each new token is counted once, a preemption changes nothing, and draft
tokens are counted for their row only.
"""

from __future__ import annotations

import ctypes
import math
import os
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.inference.core import Request, SamplingParams
from slipstream.ops import build
from slipstream.ops.team import MAX_THREADS, Team

Floats = NDArray[np.float32]  # [vocab] unless noted
Ids = NDArray[np.int64]

HASH = (1 << 64) - 1


class LogitsRow(NamedTuple):
    """One row of logits, for the token after `request.tokens` and `draft`."""

    request: Request
    draft: tuple[int, ...] = ()  # draft tokens that this row treats as generated
    mask: Tensor | None = None  # int32 [>= vocab / 32] on the CPU; bit t % 32 of word t // 32: token t is allowed


class Sampled(NamedTuple):
    token: int  # -1: no token can be drawn, because logits are not finite or every token is forbidden
    logprob: float | None = None  # None if not requested
    top: Sequence[tuple[int, float]] = ()  # (token, logprob) of the params.logprobs most likely tokens, descending
    rank: int = 0  # 1: the most likely; of equal ones the last rank, as in vLLM. 0 without a logprob


class _Sampling(ctypes.Structure):
    """As in csrc/decoder.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "allowed")),
        *((name, ctypes.c_double) for name in ("top_p", "u")),
        ("top_k", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("temperature", "min_p")),
    )


class Draws(NamedTuple):
    """How native code draws the tokens of several steps: struct steps of csrc/decoder.h."""

    rows: ctypes.Array[_Sampling]  # of the first step
    uniforms: array[float]  # [steps][rows]
    ends: array[int]  # the tokens of all rows after which there is no further step, one row after the other
    first_end: array[int]  # [rows + 1]


class _Kernel:
    """The C version of `_twin`, for all rows of a call, on torch's number of threads."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._team = Team(min(torch.get_num_threads(), len(os.sched_getaffinity(0)), MAX_THREADS))
        pointer, long = ctypes.c_void_p, ctypes.c_int64
        self._choose = build.function("slipstream_choose", ctypes.c_int, pointer, pointer, long, long, pointer)

    def __call__(self, logits: Floats, rows: Sequence[LogitsRow]) -> list[int]:
        """The token of each row, or -1 if none can be drawn. `logits`: [rows, vocab], contiguous, with the rows' edits applied."""
        records, tokens = (_Sampling * len(rows))(), (ctypes.c_int64 * len(rows))()
        at, step = logits.ctypes.data, logits.strides[0]
        for record, row in zip(records, rows, strict=True):
            _fill(record, row, self._vocab_size)
            record.logits = at
            at += step
        if self._choose(self._team.handle, records, len(rows), self._vocab_size, tokens):
            raise MemoryError(f"no memory to sample {len(rows)} rows")
        return list(tokens)


def _fill(record: _Sampling, row: LogitsRow, vocab_size: int) -> None:
    params = row.request.params
    record.allowed = None if row.mask is None else row.mask.data_ptr()
    record.temperature = params.temperature and max(params.temperature, 1e-30)
    if params.temperature > 0:
        record.top_p, record.u, record.min_p = params.top_p, uniform(row.request.seed, _number(row)), params.min_p
        record.top_k = min(params.top_k, vocab_size)  # the parameter is unbounded, the field has 64 bits


class _Edits:
    """A request's changes to its logits, apart from its mask ([Note: Edits])."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.params
        self._ends: Ids = np.array([token for token in request.end_ids if token < vocab_size], np.int64)
        self._biased: Ids = np.array([*params.logit_bias], np.int64)
        self._biases: Floats = np.array([*params.logit_bias.values()], np.float32)
        self._penalty = np.float32(params.repetition_penalty)
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._counted = request.num_prompt  # tokens before this position are already counted
        # Seen tokens in order of first occurrence; with a repetition penalty the prompt's too.
        distinct = dict.fromkeys(request.tokens[: request.num_prompt] if self._penalty != 1 else ())
        self._places = {token: place for place, token in enumerate(distinct)}
        self._penalized = bool(self._penalty != 1 or self._presence or self._frequency)
        self._tokens: Ids = np.empty(vocab_size if self._penalized else 0, np.int64)  # memory pages are allocated as it fills
        self._tokens[: len(distinct)] = [*distinct]
        self._counts: Ids = np.zeros(len(self._tokens), np.int64)  # how often each was generated
        allowed = params.allowed_token_ids
        others: Ids = np.delete(np.arange(vocab_size if allowed else 0), list(allowed or ()))
        words = np.array([token for [token] in request.bad_words.get(-1, ())], np.int64)
        self._never = np.concatenate([others, words])

    def apply(self, logits: Floats, row: LogitsRow) -> list[tuple[Ids, Floats]]:
        """Change the logits in place. Returns the changed tokens and their previous logits, in order."""
        before: list[tuple[Ids, Floats]] = []
        if self._penalized:
            tokens = row.request.tokens
            self._count(tokens[self._counted :])
            self._counted = len(tokens)
            num_places = len(self._places)
            self._count(row.draft)
            before.append(self._penalize(logits))
            for token in row.draft:
                self._counts[self._places[token]] -= 1
            while len(self._places) > num_places:
                self._places.popitem()  # those that the draft added
        if len(self._biased):
            before.append((self._biased, logits[self._biased]))
            logits[self._biased] += self._biases
        forbidden = [self._last_tokens(row), self._never]
        if _number(row) < row.request.params.min_tokens and not self._must_end(row.mask, len(logits)):
            forbidden.append(self._ends)
        if self._must_close(row):
            forbidden.append(np.delete(np.arange(len(logits)), row.request.thought_marks[1]))
        for ids in forbidden:
            before.append((ids, logits[ids]))
            logits[ids] = -np.inf
        return before

    def _last_tokens(self, row: LogitsRow) -> Ids:
        """The last tokens of bad words whose other tokens have just been generated."""
        request = row.request
        words = request.bad_words.get((row.draft or request.tokens)[-1], ())
        begin = len(request.tokens) - max(map(len, words), default=0)
        past = [*request.tokens[max(request.num_prompt, begin) :], *row.draft]
        last = [word[-1] for word in words if past[max(0, len(past) - len(word) + 1) :] == word[:-1]]
        return np.array(last, np.int64)

    def _must_close(self, row: LogitsRow) -> bool:
        """Whether the reasoning has used its budget. Inside a character, a grammar does not allow the closing mark yet."""
        request, budget = row.request, row.request.params.thinking_token_budget
        if budget is None or (opened := request.opened_after(row.draft)) < 0:
            return False
        closing = request.thought_marks[1]
        spent = len(request.tokens) + len(row.draft) - opened >= budget
        return spent and (row.mask is None or bool(int(row.mask[closing // 32]) >> closing % 32 & 1))

    def _must_end(self, mask: Tensor | None, vocab_size: int) -> bool:
        """Whether the mask allows only end tokens, as after complete JSON; this overrides min_tokens."""
        if mask is None:
            return False
        allowed = np.unpackbits(mask.numpy().view(np.uint8), count=vocab_size, bitorder="little")
        allowed[self._ends] = 0
        return not allowed.any()

    def _count(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            self._tokens[place] = token
            self._counts[place] += 1

    def _penalize(self, logits: Floats) -> tuple[Ids, Floats]:
        num = len(self._places)
        tokens, counts = self._tokens[:num].copy(), self._counts[:num]
        values = before = logits[tokens]
        if self._penalty != 1:
            values = np.where(values < 0, values * self._penalty, values / self._penalty)
        logits[tokens] = values - (self._presence * (counts > 0) + self._frequency * counts).astype(np.float32)
        return tokens, before


class Sampler:
    """Samples rows. Not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # Reused: page faults of fresh memory of this size would cost more than the arithmetic.
        self._weights = np.empty(vocab_size, dtype=np.float32)
        self._kernel = None if build.load().kernels is None else _Kernel(vocab_size)
        self._edits: dict[Request, _Edits] = {}

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError for token ids that the model does not have. Called when a request is submitted."""
        given = {name: getattr(params, name) or () for name in ("logit_bias", "stop_token_ids", "allowed_token_ids")}
        for name, ids in given.items():
            if unknown := [token for token in ids if not 0 <= token < self.vocab_size]:
                raise ValueError(f"{name} has token {unknown[0]}; this model's tokens are 0 to {self.vocab_size - 1}")

    def forget(self, request: Request) -> None:
        """Free the state of a finished request."""
        self._edits.pop(request, None)

    def sample(self, logits: Tensor | Floats, rows: Sequence[LogitsRow]) -> list[Sampled]:
        """Sample one token per row. `logits`: fp32 [rows, vocab], unchanged afterwards; numpy where forwards are short and a torch
        call counts."""
        assert logits.shape == (len(rows), self.vocab_size), f"{len(rows)} rows of {self.vocab_size}: {tuple(logits.shape)}"
        if isinstance(logits, Tensor) and logits.is_cuda and all(_is_plain(row) for row in rows):
            best = logits.argmax(dim=-1, keepdim=True)  # on the CPU, numpy's argmax is ten times faster than torch's
            best = best.masked_fill(~logits.gather(1, best).isfinite(), -1)  # argmax selects NaN
            arrays, tokens = np.empty((0, 0), np.float32), best.flatten().tolist()
        else:
            arrays = np.ascontiguousarray(logits.cpu().numpy() if isinstance(logits, Tensor) else logits)
            tokens = self.tokens(arrays, rows)
        return [
            Sampled(token)
            if token < 0 or row.request.params.logprobs is None
            else _with_logprobs(arrays[index], token, row.request.params.logprobs, self._weights)
            for index, (row, token) in enumerate(zip(rows, tokens, strict=True))
        ]

    @property
    def is_native(self) -> bool:
        """Whether native code can draw by `draws`."""
        return self._kernel is not None

    def draws(self, requests: Sequence[Request], steps: int) -> Draws:
        """How native code draws the next tokens of requests that are plain (`Request.is_plain`)."""
        assert all(request.is_plain for request in requests), "steps need plain rows"
        rows, uniforms = (_Sampling * len(requests))(), array("d", bytes(8 * steps * len(requests)))
        for index, request in enumerate(requests):
            _fill(rows[index], LogitsRow(request), self.vocab_size)
            for step in range(steps if request.params.temperature > 0 else 0):
                uniforms[step * len(requests) + index] = uniform(request.seed, request.num_generated + step)
        ends = [sorted({*request.end_ids, request.thought_marks[0]}) for request in requests]  # reasoning needs the budget's edits
        return Draws(rows, uniforms, array("i", chain(*ends)), array("i", accumulate(map(len, ends), initial=0)))

    def score(self, logits: Tensor | Floats, tokens: Sequence[int], num: int) -> list[Sampled]:
        """The log-probability of each token in its row of logits [rows, vocab], and the `num` likeliest tokens of the row."""
        arrays = logits.cpu().numpy() if isinstance(logits, Tensor) else logits
        return [_with_logprobs(raw, token, num, self._weights) for raw, token in zip(arrays, tokens, strict=True)]

    def tokens(self, logits: Floats, rows: Sequence[LogitsRow]) -> list[int]:
        """The token of each row, or -1 if none can be drawn. `logits`: [rows, vocab], contiguous; unchanged afterwards."""
        edited: list[tuple[Floats, list[tuple[Ids, Floats]]]] = []
        try:
            for raw, row in zip(logits, rows, strict=True):
                if row.request.edits(row.draft):
                    edited.append((raw, self._edit(raw, row)))
            if self._kernel is not None:
                return self._kernel(logits, rows)
            return [_twin(raw, row, self._weights) for raw, row in zip(logits, rows, strict=True)]
        finally:
            for raw, before in edited:
                for tokens, values in reversed(before):
                    raw[tokens] = values

    def _edit(self, logits: Floats, row: LogitsRow) -> list[tuple[Ids, Floats]]:
        """Apply a row's edits in place. Returns the changed tokens and their previous logits."""
        edits = self._edits.get(row.request)
        if edits is None:
            edits = self._edits[row.request] = _Edits(row.request, self.vocab_size)
        return edits.apply(logits, row)


def _twin(logits: Floats, row: LogitsRow, scratch: Floats) -> int:
    """The numpy version of csrc/sample_body.h."""
    params = row.request.params
    if row.mask is not None:
        bits = np.unpackbits(row.mask.numpy().view(np.uint8), count=len(logits), bitorder="little")
        logits = np.where(bits != 0, logits, np.float32(-np.inf))
    if not math.isfinite(logits[token := int(logits.argmax())]):
        return -1
    if params.temperature == 0:
        return token
    weights = _exp(logits, token, params.temperature, scratch)
    ids = _filtered(weights, params)
    u = uniform(row.request.seed, _number(row))
    return _draw(weights, u) if ids is None else int(ids[_draw(weights[ids], u)])


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) of 53 bits: SplitMix64 (Steele et al., 2014) at `index` steps from a mixed seed."""
    return (_mix(_mix(seed) + (index + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x &= HASH
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & HASH
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & HASH
    return x ^ (x >> 31)


def _is_plain(row: LogitsRow) -> bool:
    """Whether the row needs only an argmax."""
    params = row.request.params
    return params.temperature == 0 and params.logprobs is None and row.mask is None and not row.request.edits(row.draft)


def _number(row: LogitsRow) -> int:
    """The index of the generated token that the row samples."""
    return row.request.num_generated + len(row.draft)


def _exp(logits: Floats, largest: int, temperature: float, out: Floats) -> Floats:
    """Probabilities up to a constant factor: token `largest` gets 1."""
    np.subtract(logits, logits[largest], out=out)
    if temperature != 1:
        with np.errstate(over="ignore"):  # overflow to -inf is intended
            np.divide(out, np.float32(max(temperature, 1e-30)), out=out)
    return np.exp(out, out=out)


def _filtered(weights: Floats, params: SamplingParams) -> Ids | None:
    """Indices, ascending, that the filters keep; None: all. `weights`: probabilities up to a factor, the largest is 1."""
    ids: Ids | None = None
    if 0 < params.top_k < len(weights):
        cut = np.partition(weights, -params.top_k)[-params.top_k]
        ids = np.flatnonzero(weights >= cut)  # includes ties with the last one, as in transformers
    if params.top_p < 1:
        within = weights if ids is None else weights[ids]
        nucleus = _nucleus(within, params.top_p)
        ids = nucleus if ids is None else ids[nucleus]
    if params.min_p > 0:
        ids = np.flatnonzero(weights >= np.float32(params.min_p)) if ids is None else ids[weights[ids] >= params.min_p]
    return ids


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest weights that sum to at least top_p of the total; among ties the first."""
    ordered = np.sort(weights)[::-1]
    sums = np.cumsum(ordered, dtype=np.float64)
    num = min(int(np.searchsorted(sums, top_p * weights.sum(dtype=np.float64))) + 1, len(ordered))
    last = ordered[num - 1]
    keep = weights > last
    ties = np.flatnonzero(weights == last)[: num - int(np.count_nonzero(keep))]
    keep[ties] = True
    return np.flatnonzero(keep)


def _draw(weights: Floats, u: float) -> int:
    """The index at which the running sum exceeds u times the total. Never the index of a zero weight."""
    sums = np.cumsum(weights, dtype=np.float64)
    # The last nonzero weight is at the first index where the sum equals the total.
    return min(int(np.searchsorted(sums, u * sums[-1], side="right")), int(np.searchsorted(sums, sums[-1])))


def log_total(raw: Floats, scratch: Floats) -> float:
    """log(sum(exp(raw))): a logit minus its log-probability."""
    largest = int(raw.argmax())
    return float(raw[largest]) + math.log(_exp(raw, largest, 1.0, scratch).sum())


def _with_logprobs(raw: Floats, token: int, num: int, scratch: Floats) -> Sampled:
    total = log_total(raw, scratch)
    num = min(num, len(raw))
    top: list[int] = []
    if num:
        ids = np.flatnonzero(raw >= np.partition(raw, -num)[-num])
        top = ids[np.argsort(-raw[ids], kind="stable")][:num].tolist()
    likeliest, rank = [(t, float(raw[t]) - total) for t in top], int(np.count_nonzero(raw >= raw[token]))
    return Sampled(token, float(raw[token]) - total, likeliest, rank)
