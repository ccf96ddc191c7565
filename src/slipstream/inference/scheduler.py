"""Which tokens the next forward computes: Dynamic SplitFuse over paged blocks. Decisions only; no torch, no clock.

A forward's cost is flat up to some number of tokens and then grows with it, so every forward gets the same *budget* of
tokens (DeepSpeed-FastGen, arXiv 2401.08671): first one token for each running generation, so that no stream waits for
another's prompt; then prompts, cut to fill the budget exactly, short ones together; then, if there is room, guesses of
what the generations say next. The engine's loop is

    batch = scheduler.schedule()                            # None: nothing to do
    rows = runner.forward(batch)
    for chunk in batch.chunks:                              # chunk.num_rows rows each, in order
        for request in receivers(chunk):                    # none where the prompt goes on; its siblings where it ends
            sampled[request] = accept(chunk.draft, ...)     # each draws from the same rows, with its own seed
    for request, tokens in scheduler.commit(batch, sampled):
        ...                                                 # tokens: what is new; request.finish: why it ended, if it did

`add` and `finish` may come at any time, also between `schedule` and `commit`. A batch whose forward failed may be computed
and committed in parts, of `chunks_again`; who cannot be computed at all is told so by `finish(request, Finish.ERROR)`.

[Note: Nobody starves]
There is one order of importance: `arrival + patience * priority`, then order of `add`. It decides who is admitted, who
gets scarce blocks and who is preempted (the last one, by recompute: it gives back its blocks and waits again, keeping
its tokens and its place). A step of priority is worth `patience` seconds of waiting, so only requests that arrive within
a bounded time can come before a given one. Nobody overtakes the first of the queue when it lacks space, and what runs
ends by itself (max_tokens), so the first gets in. The most important of those that run is never preempted and can have
every block, and what could not be computed in an empty pool was refused by `add`: each forward makes progress.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.inference.blocks import BlockPool
from slipstream.inference.core import Batch, Chunk, Finish, Phase, QueueFullError, Request
from slipstream.inference.drafts import Lookup
from slipstream.inference.pace import Pace

LEAST_PROMPT = 8  # tokens of a forward that are left for prompts, whatever token_interval says


@dataclass(slots=True)
class Counters:
    """Since the scheduler was made."""

    forwards: int = 0
    full_forwards: int = 0  # that used their budget exactly
    tokens: int = 0  # computed, guesses among them
    preemptions: int = 0
    prefix_queries: int = 0  # tokens of admitted requests, and of these
    prefix_hits: int = 0  # found in the prefix cache
    proposed: int = 0  # guesses, and of these
    accepted: int = 0


class Output(NamedTuple):
    """What a request got from a forward: at least one token. It has ended if `request.finish` says why."""

    request: Request
    tokens: tuple[int, ...]  # the last of request.tokens; the end token is among them


@dataclass(slots=True)
class _Entry:
    """What the scheduler remembers of a request that has not ended."""

    rank: tuple[float, int]  # importance: lower goes first
    admitted: bool = False  # before now or now
    lookup: Lookup | None = None
    reach: int = 0  # how many tokens to guess next: few after a wrong guess, more after right ones


def receivers(chunk: Chunk) -> tuple[Request, ...]:
    """The requests that draw from the chunk's rows: its own and, when this completes their common prompt, the siblings."""
    if not chunk.samples:
        return ()
    return (chunk.request, *_unborn(chunk.request))


class Scheduler:
    """Holds all requests that have not ended. `waiting` and `running` are in order of importance."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        token_budget: int,
        max_running: int,
        max_waiting: int,
        max_context: int,
        split: bool = True,
        num_draft: int = 0,
        token_interval: float | None = None,
        patience: float = 10.0,
    ) -> None:
        """`token_interval`: seconds that a forward may take while anybody generates; what it takes of prompts is less then than
        token_budget allows. `split=False` is continuous batching as before SplitFuse, to compare with: whole prompts only, and
        before generations. `max_context` is lowered to what the pool holds; a request of that many tokens ends (LENGTH)."""
        for name, value in (("token_budget", token_budget), ("max_running", max_running), ("max_waiting", max_waiting)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it has to be at least 1")
        self.pool = pool
        self.token_budget = token_budget
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.max_context = min(max_context, pool.num_blocks * pool.block_size)
        self.split = split
        self.num_draft = num_draft
        self.token_interval = token_interval
        self.patience = patience
        self.pace = Pace()  # of what is computed; for token_interval
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pausing = False  # only what has begun goes on; `at_rest` once it has ended
        self.counters = Counters()
        self._entries: dict[Request, _Entry] = {}
        self._num_added = 0
        if token_interval is not None and not token_interval > 0:
            raise ValueError(f"token_interval is {token_interval}; it has to be more than 0 seconds")
        if not split and token_interval is not None:
            raise ValueError("token_interval splits prompts, and split=False does not; leave one of them out")
        if not split and token_budget < self.max_context:
            raise ValueError(
                f"split=False computes whole prompts, so token_budget ({token_budget}) has to be at least "
                f"the context of {self.max_context} tokens; raise it, lower max_context, or leave split on"
            )

    def add(self, request: Request) -> None:
        """Queue a request, whose siblings have the same prompt. Raises ValueError if it can never be served, and
        QueueFullError if the queue is full now."""
        assert request.phase is Phase.WAITING and request not in self._entries, f"{request.id} was added before"
        assert all(sibling.tokens == request.tokens for sibling in request.siblings), f"{request.id}: siblings share the prompt"
        self.check(len(request.tokens), _width(request))
        self._enter(request, request.arrival + self.patience * request.priority)
        insort(self.waiting, request, key=self._rank)

    def check(self, num_prompt: int, n: int) -> None:
        """Raises what `add` would for a request of so many tokens and answers, before anything is made of it."""
        if not num_prompt:
            raise ValueError("the prompt is empty; it needs at least one token")
        if num_prompt >= self.max_context:
            raise ValueError(
                f"the prompt has {num_prompt} tokens, but prompt and output together may have {self.max_context} "
                f"(the context, and a cache of {self.pool.num_blocks} blocks of {self.pool.block_size}); shorten it"
            )
        if n > self.max_running:
            raise ValueError(f"n is {n}, but at most {self.max_running} sequences run at once; ask for fewer")
        if len(self.waiting) >= self.max_waiting:
            raise QueueFullError(f"{len(self.waiting)} requests wait, and max_waiting is {self.max_waiting}; try again later")

    def finish(self, request: Request, reason: Finish) -> None:
        """End a request (a stop string, the client left, an error); nothing happens if it has ended. Siblings of it that
        have not begun, because the prompt is not computed yet, end with it."""
        if request.phase is Phase.FINISHED:
            return
        for sibling in _unborn(request):
            sibling.phase, sibling.finish = Phase.FINISHED, reason
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._release(request)
        self._entries.pop(request, None)
        request.phase, request.finish = Phase.FINISHED, reason

    @property
    def at_rest(self) -> bool:
        """Nothing has begun that has not ended: no request has blocks or tokens that the model's weights gave."""
        return not any(entry.admitted for entry in self._entries.values())

    def schedule(self) -> Batch | None:
        """The next forward, at most token_budget tokens. None only if there is nothing to do, or `pausing` has come to rest."""
        plan = _Plan(self._budget())
        if self.split:
            self._generate(plan)
            self._continue(plan)
            self._admit(plan)
        else:
            self._admit(plan)
            if not plan.chunks:
                self._generate(plan)
        self._guess(plan)
        return Batch(tuple(plan.chunks), tuple(plan.copies)) if plan.chunks else None

    def commit(self, batch: Batch, sampled: Mapping[Request, Sequence[int]]) -> list[Output]:
        """The batch has been computed, and `sampled` has the accepted tokens of each of its `receivers`. Requests take
        them up to their end; blocks become findable; siblings begin, with a fork of the prompt's blocks."""
        self.counters.forwards += 1
        self.counters.full_forwards += batch.num_tokens == self.token_budget
        self.counters.tokens += batch.num_tokens
        outputs = []
        for chunk in batch.chunks:
            request = chunk.request
            if request.phase is not Phase.RUNNING:  # it was ended meanwhile
                continue
            if chunk.draft:
                self._learn(chunk, len(sampled[request]) - 1)
            takers = receivers(chunk)
            request.num_computed = chunk.stop
            self.pool.publish(request.blocks, request.tokens, chunk.start, chunk.stop, request.salt)
            for sibling in takers[1:]:
                self._begin(sibling, request)
            for taker in takers:
                outputs.append(Output(taker, self._append(taker, sampled[taker])))
        return outputs

    def chunks_again(self, batch: Batch) -> tuple[Chunk, ...]:
        """The batch's forward failed: what of it can be computed as it is, whether its copies were made or not.

        Who writes to a copied block begins again instead. To copy once more would not do: the block that was copied may be
        another request's since, and written to."""
        copied = {target for _, target in batch.copies}
        for chunk in batch.chunks:
            if not copied.isdisjoint(chunk.request.blocks):
                self._preempt(chunk.request)
        return tuple(chunk for chunk in batch.chunks if chunk.request.phase is Phase.RUNNING)

    # ---- the parts of a plan, in the order of `schedule`

    def _budget(self) -> int:
        """Tokens of the next forward."""
        generating = sum(_pending(request) == 1 for request in self.running)
        if self.token_interval is None or not generating:
            return self.token_budget
        return min(self.token_budget, max(self.pace.most(self.token_interval), generating + LEAST_PROMPT))

    def _generate(self, plan: _Plan) -> None:
        """One token for each generation; whoever is less important gives way if it needs a block."""
        for request in list(self.running):
            if _pending(request) == 1 and plan.budget and request.phase is Phase.RUNNING and self._secure(request):
                self._plan(plan, request, 1)

    def _continue(self, plan: _Plan) -> None:
        """The next part of each prompt in progress, as far as budget and free blocks go. Generations may have taken blocks
        that `_admit` counted on; when the last of them has ended, there is room for all prompts in progress."""
        for request in self.running:
            if _pending(request) > 1:
                self._plan(plan, request, min(_pending(request), self._room(request)))

    def _admit(self, plan: _Plan) -> None:
        """Requests from the queue, in order, up to the first that does not fit: its whole prompt has to, beside what the
        running ones need for theirs and for the next block_size tokens, lest it be preempted at once."""
        if not self.waiting:
            return
        owed = sum(self._owed(request) for request in self.running)
        width = sum(_width(request) for request in self.running)
        while plan.budget and self.pool.num_free > owed:
            request = next((one for one in self.waiting if self._entries[one].admitted or not self.pausing), None)
            if request is None:
                break
            found = self.pool.fork(self.pool.match(request.tokens, request.salt))
            hits = len(found) * self.pool.block_size
            lacking = self.pool.num_needed(len(request.tokens)) - len(found)
            too_long = not self.split and len(request.tokens) - hits > plan.budget
            if too_long or lacking + owed > self.pool.num_free or width + _width(request) > self.max_running:
                self.pool.free(found)
                break
            self.waiting.remove(request)
            insort(self.running, request, key=self._rank)
            entry = self._entries[request]
            if not entry.admitted:
                entry.admitted, request.num_cached = True, hits
            self.counters.prefix_queries += len(request.tokens)
            self.counters.prefix_hits += hits
            request.phase, request.blocks, request.num_computed = Phase.RUNNING, found, hits
            self._plan(plan, request, _pending(request))
            owed += self._owed(request)
            width += _width(request)

    def _guess(self, plan: _Plan) -> None:
        """What budget and free blocks are left goes to guesses for the generations."""
        for index, chunk in enumerate(plan.chunks if self.num_draft else ()):
            request, entry = chunk.request, self._entries[chunk.request]
            generates = request.num_generated > 0 and chunk.samples and chunk.stop - chunk.start == 1
            if not generates or request.params.json_schema is not None:
                continue
            left = min(request.params.max_tokens - request.num_generated, self.max_context - len(request.tokens))
            num = min(entry.reach, left - 1, plan.budget, self._room(request) - 1)
            if num > 0:
                entry.lookup = entry.lookup or Lookup()
                draft = entry.lookup.guess(request.tokens, num)
                plan.copies += self.pool.reserve(request.blocks, chunk.stop, chunk.stop + len(draft))
                plan.chunks[index] = chunk._replace(draft=draft)
                plan.budget -= len(draft)

    # ---- steps of one request

    def _enter(self, request: Request, importance: float) -> None:
        self._entries[request] = _Entry((importance, self._num_added), reach=self.num_draft)
        self._num_added += 1

    def _rank(self, request: Request) -> tuple[float, int]:
        return self._entries[request].rank

    def _plan(self, plan: _Plan, request: Request, num: int) -> None:
        if num := min(num, plan.budget):
            chunk = Chunk(request, request.num_computed, request.num_computed + num)
            plan.copies += self.pool.reserve(request.blocks, chunk.start, chunk.stop)
            plan.chunks.append(chunk)
            plan.budget -= num

    def _secure(self, request: Request) -> bool:
        """Preempt the less important until the request's next position has its block; False if it had to go itself."""
        while self.pool.num_lacking(request.blocks, request.num_computed, request.num_computed + 1) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """It waits again, and will be computed again."""
        self.running.remove(request)
        self._release(request)
        request.phase = Phase.WAITING
        insort(self.waiting, request, key=self._rank)
        self.counters.preemptions += 1

    def _room(self, request: Request) -> int:
        """Positions from num_computed on that its own blocks and all free ones hold."""
        return (len(request.blocks) + self.pool.num_free) * self.pool.block_size - request.num_computed

    def _owed(self, request: Request) -> int:
        return max(0, self.pool.num_needed(len(request.tokens) + self.pool.block_size) - len(request.blocks))

    def _release(self, request: Request) -> None:
        self.pool.free(request.blocks)
        request.num_computed = 0

    def _begin(self, sibling: Request, first: Request) -> None:
        """A sibling goes on by itself from the end of the prompt that `first` has computed."""
        self._enter(sibling, self._entries[first].rank[0])
        self._entries[sibling].admitted = True
        sibling.phase, sibling.num_cached, sibling.num_computed = Phase.RUNNING, first.num_cached, first.num_computed
        sibling.blocks = self.pool.fork(first.blocks)
        insort(self.running, sibling, key=self._rank)

    def _append(self, request: Request, accepted: Sequence[int]) -> tuple[int, ...]:
        """Take tokens up to the first that ends the request. All but the last have been computed, as its guesses."""
        assert accepted, f"{request.id} was computed to its last token, but commit got no token for it"
        params, before, reason = request.params, request.num_computed, None
        for token in accepted:
            request.tokens.append(token)
            if token in request.end_ids:
                reason = Finish.STOP
            elif request.num_generated == params.max_tokens or len(request.tokens) == self.max_context:
                reason = Finish.LENGTH
            if reason:
                break
        request.num_computed = len(request.tokens) - 1
        self.pool.publish(request.blocks, request.tokens, before, request.num_computed, request.salt)
        new = tuple(request.tokens[before:])
        if reason:
            self.finish(request, reason)
        return new

    def _learn(self, chunk: Chunk, right: int) -> None:
        self.counters.proposed += len(chunk.draft)
        self.counters.accepted += right
        self._entries[chunk.request].reach = min(self.num_draft, 2 * right + 1)


@dataclass(slots=True)
class _Plan:
    """A batch in the making."""

    budget: int  # tokens left
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


def _pending(request: Request) -> int:
    """Known tokens that are not computed. 1: it generates (or is about to)."""
    return len(request.tokens) - request.num_computed


def _unborn(request: Request) -> tuple[Request, ...]:
    """Siblings that wait for the request's prompt."""
    return tuple(s for s in request.siblings if s.phase is not Phase.FINISHED) if request.num_generated == 0 else ()


def _width(request: Request) -> int:
    """How many sequences it is, or will be when its prompt is computed."""
    return 1 + len(_unborn(request))
