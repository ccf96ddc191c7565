"""Speculative decoding by a smaller model (Leviathan et al. 2023, arXiv 2211.17192), which proposes the next tokens one by one.

The small model has its own cache. In it, a *twin* of each request holds the request's tokens, followed by the proposed ones. When
the model rejects proposals, the twin's next tokens overwrite them. A proposed token is drawn as the model draws the token at that
position, with the same settings and the same random number, so both draw the same token if their distributions agree.

[Note: How many tokens] A forward of the model with k proposed tokens yields 1 + a + a^2 + ... + a^k tokens, where a is the share of
recent proposals that the model accepted. Its cost is one forward of k + 1 tokens, plus k forwards of the small model; both times
are measured. The k with the best rate is used; it is 0 if proposals do not pay. Then PROBES are still proposed every PROBE tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from slipstream.inference.blocks import BlockPool
from slipstream.inference.core import Batch, Chunk, Request, Runner, SamplingParams
from slipstream.inference.sampler import Floats, LogitsRow, Sampler

MOST = 8  # default limit of tokens proposed at once
FEW = 4  # the most requests that get proposals: with more, arithmetic limits the model's forwards
CATCH_UP = 512  # the most tokens in a forward of the small model: a long prompt takes several, one after each forward of the model
PROBE, PROBES = 32, 2
RECENT = 0.1  # weight of the newest proposal or duration in a moving average


@dataclass(slots=True, eq=False)
class _Twin:
    request: Request  # its tokens and blocks in the small model's cache
    known: int  # the first `known` tokens are the model's, the others are proposed
    published: int  # positions in the prefix cache
    likely: float  # moving average of the share of accepted proposals
    proposed: tuple[int, ...] = ()  # after the known tokens
    waited: int = 0  # tokens since the last proposal


class DraftModel:
    """Proposes tokens. Only the engine's thread calls it."""

    def __init__(self, runner: Runner, vocab_size: int, most: int = MOST) -> None:
        """`vocab_size`: the model's. The small model's logits may be padded to another size."""
        self._runner, self._vocab_size, self._most = runner, vocab_size, most
        self._pool = BlockPool(runner.num_blocks, runner.block_size)
        self._sampler = Sampler(vocab_size)
        self._twins: dict[Request, _Twin] = {}  # by the model's request, the most recently used last
        self._likely = 0.7  # average over the requests so far
        self._step = 0.0  # moving average, in seconds, of a forward with one token per request; 0: none measured yet

    def guess(self, wanted: Mapping[Request, int], seconds: Callable[[int], float]) -> dict[Request, tuple[int, ...]]:
        """Propose tokens after those of each request, at most as many as `wanted` says. `seconds`: number of tokens -> duration of
        the model's forward, or 0 if unknown."""
        numbers: dict[Request, int] = {}
        for request, most in wanted.items():
            known = self._twins.pop(request) if request in self._twins else None
            twin = self._twins[request] = known or self._begin(request)
            _follow(twin, request)
            most = min(most, self._most, self._runner.short_context - len(request.tokens))
            number = best_number(twin.likely, most, len(wanted), seconds, self._step)
            if number == 0 and twin.waited >= PROBE:
                number = min(PROBES, most)
            if number > 0:
                numbers[request], twin.waited = number, 0
        drafts: dict[Request, tuple[int, ...]] = dict.fromkeys(numbers, ())
        active = list(numbers)
        while active:
            start, is_step = time.perf_counter(), any(drafts.values())
            tokens = self._compute(active, drafts)
            if is_step and tokens:
                self._step += (time.perf_counter() - start - self._step) * (RECENT if self._step else 1.0)
            active = []
            for request, token in tokens.items():
                drafts[request] += (token,)
                if len(drafts[request]) < numbers[request] and token not in request.end_ids:
                    self._twins[request].request.tokens.append(token)
                    active.append(request)
        for request, draft in drafts.items():
            self._twins[request].proposed = draft
        return drafts

    def forget(self, request: Request) -> None:
        self._sampler.forget(request)
        if (twin := self._twins.pop(request, None)) is not None:
            self._likely += RECENT * (twin.likely - self._likely)
            self._pool.free(twin.request.blocks)

    def _begin(self, request: Request) -> _Twin:
        own = Request(id=f"{request.id}, drafted", tokens=list(request.tokens), params=SamplingParams(), salt=request.salt)
        own.num_prompt = request.num_prompt
        own.blocks = self._pool.fork(self._pool.match(own.tokens, own.salt))
        own.num_computed = len(own.blocks) * self._pool.block_size
        return _Twin(own, known=len(own.tokens), published=own.num_computed, likely=self._likely)

    def _compute(self, requests: Iterable[Request], drafts: Mapping[Request, tuple[int, ...]]) -> dict[Request, int]:
        """Compute missing tokens of the twins, CATCH_UP at most. Returns the next token of each twin that is then complete."""
        left, copies = CATCH_UP, list[tuple[int, int]]()
        chunks: dict[Request, Chunk] = {}
        for request in requests:
            own = self._twins[request].request
            start, num = own.num_computed, min(len(own.tokens) - own.num_computed, left)
            if num and self._make_room(own, start + num, drafts):
                copies += self._pool.reserve(own.blocks, start, start + num)
                chunks[request] = Chunk(own, start, start + num)
                left -= num
        if not chunks:
            return {}
        logits = self._fitted(self._runner.forward(Batch(tuple(chunks.values()), tuple(copies))))
        for request, chunk in chunks.items():
            twin, own = self._twins[request], chunk.request
            own.num_computed, known = chunk.stop, min(chunk.stop, twin.known)
            self._pool.publish(own.blocks, own.tokens, twin.published, known, own.salt)
            twin.published = known
        rows = [LogitsRow(request, drafts[request]) for request, chunk in chunks.items() if chunk.samples]
        return {row.request: token for row, token in zip(rows, self._sampler.tokens(logits, rows), strict=True) if token >= 0}

    def _make_room(self, own: Request, stop: int, kept: Mapping[Request, object]) -> bool:
        """Forget the least recently used requests outside `kept` until positions up to `stop` have blocks. Return False if not
        possible."""
        others = iter([request for request in self._twins if request not in kept])
        while self._pool.num_lacking(own.blocks, own.num_computed, stop) > self._pool.num_free:
            if (other := next(others, None)) is None:
                return False
            self.forget(other)
        return True

    def _fitted(self, logits: object) -> Floats:
        """Give the logits one column per token of the model. A token that the small model lacks is never proposed."""
        assert isinstance(logits, (Tensor, np.ndarray)), "what a runner returns"
        array: Floats = logits.cpu().numpy() if isinstance(logits, Tensor) else logits
        if array.shape[1] >= self._vocab_size:
            return np.ascontiguousarray(array[:, : self._vocab_size])
        return np.pad(array, ((0, 0), (0, self._vocab_size - array.shape[1])), constant_values=-np.inf)


def _follow(twin: _Twin, request: Request) -> None:
    """Replace the proposed tokens by the model's, and update the share of accepted ones."""
    new, right = request.tokens[twin.known :], 0
    while right < min(len(new), len(twin.proposed)) and new[right] == twin.proposed[right]:
        right += 1
    for index in range(min(right + 1, len(new), len(twin.proposed))):  # up to the first rejected one
        twin.likely += RECENT * ((index < right) - twin.likely)
    twin.request.tokens[twin.known :] = new
    twin.request.num_computed = min(twin.request.num_computed, twin.known + right)
    twin.known, twin.proposed, twin.waited = len(request.tokens), (), twin.waited + len(new)


def best_number(likely: float, most: int, num_requests: int, seconds: Callable[[int], float], step: float) -> int:
    """How many tokens to propose per request ([Note: How many tokens]). `step`: seconds of a forward of the small model."""
    alone = seconds(num_requests)
    if not alone:
        return 0  # measure a forward without proposals first
    best, rate, tokens = 0, 1 / alone, 1.0
    for number in range(1, most + 1):
        tokens += likely**number
        if (one := tokens / (seconds(num_requests * (number + 1)) + number * step)) > rate:
            best, rate = number, one
    return best
