"""Selects the tokens of the next forward: Dynamic SplitFuse over paged blocks. Pure decisions: no torch, no clock.

The time of a forward is constant up to some number of tokens and then grows with it, so every forward has the same token *budget*
(DeepSpeed-FastGen, arXiv 2401.08671). It is filled first with one token for each running generation, so that no stream waits for
another request's prompt; then with prompts, in chunks that fill the budget exactly; then with draft tokens (speculative decoding),
if budget and blocks are left. The engine's loop is

    batch = scheduler.schedule()                            # None: nothing to do
    rows = runner.forward(batch)
    for chunk in batch.chunks:                              # chunk.num_rows rows each, in order
        for request in receivers(chunk):                    # none inside a prompt; siblings too at its end
            sampled[request] = accept(chunk.draft, ...)     # each samples from the same rows, with its own seed
    for request, tokens in scheduler.commit(batch, sampled).items():
        ...                                                 # tokens: the new ones; request.finish: why it ended, if it did

If nothing waits, a batch has several *steps*: the runner makes one forward after the other (`core.Generate`), and `commit` gets all
their tokens. The engine looks at the queue only afterwards, so a thread that adds a request stops the remaining steps.

`add`, `hold`, `resume` and `finish` may be called at any time, also between `schedule` and `commit`. A batch whose forward failed
may be computed and committed in parts (`retryable_chunks`). `finish(request, Finish.ERROR)` ends a request that cannot be computed.

[Note: No starvation] Requests are ordered by `arrival + patience * priority`, then by order of `add`; lower is more important. The
order decides who is admitted, who gets scarce blocks and who is preempted. The least important running request is preempted, by
recomputation: it frees its blocks and returns to the queue with its tokens and its rank. One step of priority is worth `patience`
seconds of waiting, so only requests that arrive within a bounded time can precede a given one. No request overtakes the head of the
queue while the head lacks blocks, and running requests end (max_tokens), so the head is admitted eventually. The most important
running request is never preempted and can use every block, and `add` rejects requests that do not fit an empty pool: every forward
makes progress.

[Note: Targets] A request may state a target: the seconds to its first token, and between tokens. The first of these is added to its
arrival, up to `patience`; a request without a target counts as arriving `patience` seconds later. So the earliest deadline goes
first. While a request with a target between tokens generates, a forward takes prompts for at most SHARE of that time, because some
forwards take longer than expected. With several tenants, prompts may always take at least as long as a forward without any.

A request that has missed its target, or cannot meet it beside the running generations, is *late*. A late answer is of no use to
whoever set the target, and above capacity the engine would compute nothing else. If a tenant's prompts cannot all be in time, the
longest become late, so that most are in time (Moore, Management Science 15(1), 1968); otherwise each would begin when its time is
nearly over. A late request counts as one without a target. But while a request of its tenant waits that may still be in time, that
one goes first, unless it arrived LATE steps of priority later. A late request without a token also gives up its place; an answer
that has begun continues.

[Note: Fair shares] Requests of several *tenants* (API keys) are admitted in the order of what their tenants have received. Each
tenant has a virtual token counter (Sheng et al., OSDI 2024, arXiv 2401.00588) of the tokens computed and generated for it. The next
request is the most important one of the tenant with the lowest counter; among tenants, a step of priority is worth STEP tokens. A
tenant that returns does not catch up on the time it was away: its counter is raised to the lowest among tenants with requests,
minus 1, or to that of the last tenant that had some. Counters only grow, so the head of the queue stays the head until it is
admitted, unless a tenant returns with a lower counter. `max_waiting` is per tenant.

With several engines (`server.router`), a request states how many tokens its tenant got from the other engines since its last
request here, while other tenants also wanted this engine: these count as received here. Several servers may share the engine, and
each reports its own part.

A tenant does not wait for another's answers to end either. Each tenant has a right to an equal part of `max_running`. If the head's
tenant runs less than its part, the head preempts the least important requests of tenants that run more; these later find most of
their tokens in the prefix cache. Each such preemption reduces a surplus, so preemptions end. Prompts take their tokens of a forward
in the order of the counters. A forward with a prompt of the tenant with the lowest counter has no other tenants' prompts, which
would prolong it.

[Note: Held requests] A request whose outputs nobody reads is held: nothing is computed for it, and it has neither a place among the
running ones nor blocks. Its blocks stay in the prefix cache until others need them. So it can continue where it was, at the cost of
recomputing the last, partial block (all of them without a prefix cache). Until then its tenant counts as away, and the request does
not count for `max_waiting`: otherwise clients that do not read would keep others from an idle engine. It loses its target.
"""

from __future__ import annotations

import math
import sys
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from slipstream.inference.blocks import BlockPool
from slipstream.inference.core import NO_TARGET, Batch, Chunk, Finish, ForwardSize, QueueFullError, Request, RequestPhase, attended
from slipstream.inference.drafts import Lookup
from slipstream.inference.pace import Pace

STEPS_SECONDS = 0.025  # several steps run at once if they take less: a reader does not notice that the tokens come together
STEP = 4096  # tokens of a tenant's share that a step of priority is worth
SHARE = 0.6  # the share of a request's target between tokens that one forward may take
LATE = 6  # steps of priority by which a late request lets others of its tenant that may be in time go first
MATCHED = 16  # forwards for which a lookup of a prompt in the prefix cache stays valid
NOTHING = ForwardSize(0)
LEAST_PROMPT = 8  # tokens of a forward that are left for prompts, whatever token_interval says


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was created, for `Stats`."""

    forwards: int = 0
    preemptions: int = 0
    draft_tokens: int = 0  # proposed
    accepted_tokens: int = 0  # those of them that were accepted


@dataclass(slots=True)
class _Entry:
    """The scheduler's state of an unfinished request."""

    rank: tuple[float, int]  # the lowest goes first
    admitted: bool = False  # has run, even if it is preempted now
    lookup: Lookup | None = None
    num_draft: int = 0  # tokens to guess next: adapted to how many were accepted last
    late: bool = False  # has missed its target, or cannot meet it
    matched: tuple[int, int] | None = None  # (number of forwards at the lookup, tokens found in the prefix cache)


def receivers(chunk: Chunk) -> tuple[Request, ...]:
    """The requests that sample from the chunk's rows: its own and, when it completes their common prompt, the siblings."""
    return (chunk.request, *_pending_siblings(chunk.request)) if chunk.samples else ()


MAX_RUNNING = 64  # default limit of sequences


def budget_of(token_budget: int | None, max_running: int) -> int:
    """The tokens of a forward; None: 512, or `max_running` if that is more. Raises ValueError if it is below `max_running`."""
    if token_budget is None:
        return max(512, max_running)
    if token_budget < max_running:
        raise ValueError(
            f"token_budget ({token_budget}) is below max_running ({max_running}): a forward could not hold one token of every "
            "running sequence; raise token_budget or lower max_running"
        )
    return token_budget


@dataclass(eq=False)
class Scheduler:
    """Holds all unfinished requests. `waiting` and `running` are sorted by rank, the most important first."""

    pool: BlockPool
    _: KW_ONLY
    token_budget: int
    max_running: int
    max_waiting: int
    max_context: int  # lowered to the capacity of the pool; a request that reaches it ends (LENGTH)
    # a longer request is preempted and computed again with other rotary frequencies (`core.Runner`)
    short_context: int = sys.maxsize
    split: bool = True  # False: plain continuous batching, for comparison: whole prompts, before generations
    num_draft: int = 0
    # Seconds that a forward may take while a request generates; limits its prompt tokens below token_budget.
    token_interval: float | None = None
    patience: float = 10.0  # seconds of waiting that one step of priority is worth
    most_steps: int = 1  # of a batch, if nothing waits

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "max_waiting"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.max_context = min(self.max_context, self.pool.num_blocks * self.pool.block_size)
        self.pace = Pace()  # durations of past forwards, for token_interval
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.held: dict[Request, None] = {}  # [Note: Held requests]
        self.pausing = False  # admit only requests that have run before; `drained` once these have ended
        self.counters = Counters()
        self._entries: dict[Request, _Entry] = {}
        self._num_added = 0
        self._targeted: dict[Request, None] = {}  # unfinished requests that may still meet their target
        self._urgent: set[str] = set()  # tenants for which such a request waits
        self._served: dict[str, int] = {}  # tenant -> its virtual token counter
        self._floor = 0  # when no tenant has requests: the counter of the last one that had some
        self._active: Counter[str] = Counter()  # tenant -> its unfinished requests
        if self.token_interval is not None and not self.token_interval > 0:
            raise ValueError(f"token_interval is {self.token_interval}; it must be more than 0 seconds")
        if not self.split and self.token_interval is not None:
            raise ValueError("token_interval needs chunked prefill, which split=False disables; drop one of the two")
        if not self.split and self.token_budget < self.max_context:
            raise ValueError(
                f"split=False computes whole prompts, so token_budget ({self.token_budget}) must be at least the "
                f"context of {self.max_context} tokens; raise token_budget, lower max_context, or leave split on"
            )

    def add(self, request: Request) -> None:
        """Queue a request, whose siblings must have the same prompt. Raises ValueError if it can never be served, QueueFullError if
        the queue is full."""
        assert request.phase is RequestPhase.WAITING and request not in self._entries, f"{request.id} was added before"
        assert all(sibling.tokens == request.tokens for sibling in request.siblings), f"{request.id}: siblings share the prompt"
        self.check(len(request.tokens), request.tenant)
        within = self.patience if (first := request.target.first_within) is None else min(first, self.patience)
        self._enter(request, request.arrival + self.patience * request.priority + within)
        self._queue(request, request.elsewhere)

    def check(self, num_prompt: int, tenant: str = "") -> None:
        """Raise what `add` would raise for a prompt of `num_prompt` tokens."""
        if not num_prompt:
            raise ValueError("the prompt is empty; it needs at least one token")
        if num_prompt >= self.max_context:
            raise ValueError(
                f"the prompt has {num_prompt} tokens, but prompt and output together may have {self.max_context} "
                f"(the context, and a cache of {self.pool.num_blocks} blocks of {self.pool.block_size}); shorten it"
            )
        num_waiting = sum(request.tenant == tenant for request in self.waiting)
        if num_waiting >= self.max_waiting:
            raise QueueFullError(f"{num_waiting} requests wait, and max_waiting is {self.max_waiting}; try again later")

    def hold(self, request: Request) -> None:
        """Compute nothing for a request until `resume` ([Note: Held requests]); a no-op unless it waits or runs."""
        if request in self._entries and request not in self.held:
            self._withdraw(request)
            request.phase = RequestPhase.WAITING
            request.target, request.missed = NO_TARGET, False  # delays caused by its own client are no misses
            self.held[request] = None

    def resume(self, request: Request) -> None:
        """Return a held request to the queue; a no-op for others."""
        if request in self.held:
            del self.held[request]
            self._queue(request)

    def finish(self, request: Request, reason: Finish) -> None:
        """End a request; a no-op if it has ended. Siblings that wait for its prompt end with it."""
        if request.phase is RequestPhase.FINISHED:
            return
        for sibling in _pending_siblings(request):
            sibling.phase, sibling.finish = RequestPhase.FINISHED, reason
        if request in self.held:
            del self.held[request]
        elif request in self._entries:
            self._withdraw(request)
        self._entries.pop(request, None)
        request.phase, request.finish = RequestPhase.FINISHED, reason

    @property
    def busy(self) -> bool:
        """Whether `schedule` has something to compute."""
        return bool(self.running or self._firsts(self.waiting))

    @property
    def drained(self) -> bool:
        """Whether no unfinished request has run: none holds blocks or tokens that depend on the current weights."""
        return not any(entry.admitted for entry in self._entries.values())

    def schedule(self, now: float = 0.0) -> Batch | None:
        """The next forward, of at most token_budget tokens; None unless `busy`.

        `now`: seconds, on the clock of arrivals. Only targets need it."""
        self._give_up(now)
        self._make_room()
        plan = _Plan(self.token_budget, within=self._within())
        if self.split:
            self._generate(plan)
            self._add_prompts(plan)
        else:
            self._admit(plan)
            if not plan.chunks:
                self._generate(plan)
        self._add_drafts(plan)
        steps = self._steps(plan)
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.request.salt)  # requests of one adapter become neighbors
        return Batch(tuple(chunks), tuple(plan.copies), steps) if chunks else None

    def commit(self, batch: Batch, sampled: Mapping[Request, Sequence[int]], now: float = 0.0) -> dict[Request, tuple[int, ...]]:
        """Record a computed batch, whose `steps` are those that were completed. `sampled`: the accepted tokens of each of its
        `receivers`. `now`: as in `schedule`. Requests are extended up to their end, full blocks are published, and siblings start
        with a fork of the prompt's blocks. Returns each request's new tokens, at least one, including an end token."""
        self.counters.forwards += batch.steps
        outputs: dict[Request, tuple[int, ...]] = {}
        for chunk in batch.chunks:
            request = chunk.request
            if request.phase is not RequestPhase.RUNNING:  # ended in the meantime
                continue
            if chunk.draft:
                self._count_draft(chunk, len(sampled[request]) - 1)
            sampling = receivers(chunk)
            self._served[request.tenant] += batch.steps * (chunk.stop - chunk.start + len(sampling))
            request.num_computed = chunk.stop
            self.pool.publish(request.blocks, request.tokens, chunk.start, chunk.stop, self._salt(request))
            for sibling in sampling[1:]:
                self._start_sibling(sibling, request)
            for one in sampling:
                self._note_time(one, now)
            outputs |= {one: self._append(one, sampled[one]) for one in sampling}
            for sibling in reversed(sampling[1:]):
                if len(self.running) > self.max_running and sibling.phase is RequestPhase.RUNNING:
                    self._requeue(sibling)  # it has its first token, and finds the prompt in the prefix cache
        return outputs

    def retryable_chunks(self, batch: Batch) -> tuple[Chunk, ...]:
        """The chunks of a failed batch that can be computed again, whether or not its block copies were made.

        Requests that write to a copied block are preempted and start over. The copy cannot be repeated, because its source may
        belong to another request by now and be overwritten."""
        copied = {target for _, target in batch.copies}
        for chunk in batch.chunks:
            if not copied.isdisjoint(chunk.request.blocks):
                self._preempt(chunk.request)
        return tuple(chunk for chunk in batch.chunks if chunk.request.phase is RequestPhase.RUNNING)

    def draftable(self, batch: Batch, few: int) -> dict[Request, int]:
        """The requests of a batch to which `add_drafts` may add tokens, and the most tokens for each. Empty unless the whole batch
        generates and has at most `few` requests."""
        if len(batch.chunks) > few or not all(_generates(chunk) for chunk in batch.chunks):
            return {}
        left = self.token_budget - batch.num_tokens
        return {chunk.request: room for chunk in batch.chunks if (room := min(left, self._room(chunk))) > 0}

    def add_drafts(self, batch: Batch, drafts: Mapping[Request, tuple[int, ...]]) -> Batch:
        """Add draft tokens to the batch, as far as budget and free blocks allow."""
        plan = _Plan(self.token_budget - batch.num_tokens, list(batch.chunks), list(batch.copies))
        for index, chunk in enumerate(batch.chunks):
            draft = drafts.get(chunk.request, ())[: max(0, min(plan.budget, self._room(chunk)))]
            if draft:
                self._draft(plan, index, draft)
        return Batch(tuple(plan.chunks), tuple(plan.copies))

    # ---- the parts of a batch, in the order of `schedule`

    def _give_up(self, now: float) -> None:
        """Find the requests that can no longer meet their targets: [Note: Targets]."""
        of_answer, of_prompt = self._per_token() if self._targeted else (0.0, 0.0)
        kept, ends = dict[Request, float](), dict[str, float]()  # seconds of prompts in time; when a tenant's are all computed
        for request in sorted(self._targeted, key=lambda one: one.deadline):
            deadline, num = request.deadline, _pending(request)
            request.missed = now > deadline
            if num > 1 and request.phase is RequestPhase.WAITING and not request.missed:
                num -= self._cached(request)
            seconds = num * (of_prompt if num > 1 else of_answer)
            if now + seconds > deadline:
                self._put_back(request)
            elif num > 1:
                kept[request] = seconds
                ends[request.tenant] = ends.get(request.tenant, now) + seconds
                if ends[request.tenant] > deadline:
                    longest = max((one for one in kept if one.tenant == request.tenant), key=kept.__getitem__)
                    ends[request.tenant] -= kept.pop(longest)
                    self._put_back(longest)
        self._urgent = {one.tenant for one in self._targeted if one.phase is RequestPhase.WAITING and not self.pausing}

    def _per_token(self) -> tuple[float, float]:
        """Seconds per token at best, and per prompt token beside the generations; 0 if no forward is known."""
        least, within, answers = self.pace.per_token(), self._within(), self._answers()
        if within is None or not least:
            return least, least
        tokens = self.pace.max_tokens(within, answers, 0, self.token_budget)
        seconds = min(within, self.pace.seconds(answers._replace(tokens=tokens)))
        return least, max(least, seconds / max(tokens - answers.tokens, LEAST_PROMPT))

    def _answers(self) -> ForwardSize:
        """The size of a forward of the running generations."""
        contexts = [len(one.tokens) for one in self.running if _pending(one) == 1]
        return ForwardSize(len(contexts), len(contexts), sum(contexts))

    def _cached(self, request: Request) -> int:
        """Prompt tokens of a waiting request that the prefix cache has, or had a few forwards ago."""
        entry, now = self._entries[request], self.counters.forwards
        if entry.matched is None or now >= entry.matched[0] + MATCHED:
            entry.matched = now, len(self.pool.match(request.tokens, self._salt(request))) * self.pool.block_size
        return entry.matched[1]

    def _note_time(self, request: Request, now: float) -> None:
        """Note that a request gets tokens now."""
        if not request.missed and now > request.deadline:
            request.missed = True
            if request in self._targeted:
                self._put_back(request)
        request.token_at = now

    def _put_back(self, request: Request) -> None:
        """Mark a request late: it then counts as one without a target, except in `_order`."""
        entry, queue = self._entries[request], self.running if request.phase is RequestPhase.RUNNING else self.waiting
        del self._targeted[request]
        queue.remove(request)
        within = min(request.target.first_within or self.patience, self.patience)
        entry.late, entry.rank = True, (entry.rank[0] + self.patience - within, entry.rank[1])
        insort(queue, request, key=self._rank)

    def _order(self, request: Request) -> tuple[float, int]:
        """The request's rank; later, if it is late while a request of its tenant waits that may be in time."""
        importance, number = self._rank(request)
        late = self._entries[request].late and request.tenant in self._urgent
        return (importance + LATE * self.patience if late else importance), number

    def _within(self) -> float | None:
        """Seconds that a forward may take so that generations get their tokens in time; None: any."""
        generating = [one for one in self.running if _pending(one) == 1]
        if not generating or not self.split:
            return None
        waits = (one.target.wait_within for one in generating)
        within = min((SHARE * wait for wait in waits if wait is not None), default=math.inf)
        if len(self._active) > 1:
            within = max(within, 2 * self.pace.seconds(self._answers()))
        within = min(within, self.token_interval or math.inf)
        return None if within == math.inf else within

    def _fitting(self, plan: _Plan, context: int) -> int:
        """How many tokens of a prompt with `context` computed tokens fit into the rest of the forward's budget and time."""
        if plan.within is None:
            return plan.budget
        fitting = self.pace.max_tokens(plan.within, plan.size, context, plan.size.tokens + plan.budget) - plan.size.tokens
        return min(plan.budget, max(fitting, LEAST_PROMPT - plan.prompts, 0))

    def _generate(self, plan: _Plan) -> None:
        """Add one token for each generation. If it needs a block and none is free, less important requests are preempted."""
        surplus = self._surplus()
        order = [one for one in self.running if one not in surplus] + surplus  # the last are preempted first
        for request in list(order):
            if _pending(request) == 1 and plan.budget and request.phase is RequestPhase.RUNNING and self._secure(request, order):
                self._plan(plan, request, 1)

    def _add_prompts(self, plan: _Plan) -> None:
        """Add parts of prompts, of one tenant only if several have requests: [Note: Fair shares]."""
        if len(self._active) < 2:
            self._add_by_rank(plan)
            return
        firsts = self._firsts([one for one in self.running if _pending(one) > 1] + self.waiting)
        generations = len(plan.chunks)
        for tenant in sorted(firsts, key=lambda tenant: self._share(firsts[tenant])):
            if len(plan.chunks) == generations:
                self._add_by_rank(plan, tenant)

    def _add_by_rank(self, plan: _Plan, tenant: str | None = None) -> None:
        """Add parts of prompts, of one tenant or all: for each running request as far as free blocks allow, and before it for
        waiting ones that precede it. Generations may have used blocks that `_admit` counted on; once they have ended, blocks
        suffice for all running prompts."""
        for request in [one for one in self.running if _pending(one) > 1 and tenant in (None, one.tenant)]:
            self._admit(plan, tenant, before=request)
            fitting = self._fitting(plan, request.num_computed)
            self._plan(plan, request, min(_pending(request), self._capacity(request), fitting))
        self._admit(plan, tenant)

    def _make_room(self) -> None:
        """Preempt requests that yield to the head of the queue until it fits."""
        while (head := self._head()) is not None and (yielding := self._yielding(head)):
            if (cached := self._fit(head, self._owed())) is not None:
                self.pool.free(cached)
                return
            self._preempt(yielding[-1])

    def _yielding(self, head: Request) -> list[Request]:
        """The running requests, by rank, that give up their places to a waiting one: requests of tenants that run more than their
        part, if its own tenant runs less; else late requests of its own tenant without a token, if it may still be in time."""
        running = [one for one in self.running if one.tenant == head.tenant]
        if len(running) < self._part() and (surplus := self._surplus()):
            return surplus
        late = [one for one in running if self._entries[one].late and not one.num_generated]
        return [one for one in late if self._order(one) > self._order(head)] if head in self._targeted else []

    def _part(self) -> int:
        """The number of sequences that each tenant has a right to run."""
        return max(1, self.max_running // len(self._active))

    def _surplus(self) -> list[Request]:
        """The running requests, by rank, of tenants that run more than their part."""
        if len(self._active) < 2:
            return []
        running, part = Counter(one.tenant for one in self.running), self._part()
        return [one for one in self.running if running[one.tenant] > part]

    def _owed(self) -> int:
        """Blocks that running requests need for their prompts and their next block_size tokens."""
        return sum(self._blocks_owed(request) for request in self.running)

    def _fit(self, request: Request, owed: int) -> list[int] | None:
        """Fork the cached blocks of a waiting request if it can be admitted; else None. Its whole prompt must fit beside the `owed`
        blocks, or it would be preempted at once."""
        is_scored = request.params.prompt_logprobs is not None and not request.num_generated  # each position must be computed
        cached = [] if is_scored else self.pool.fork(self.pool.match(request.tokens, self._salt(request)))
        lacking = self.pool.num_needed(len(request.tokens)) - len(cached)
        if lacking + owed > self.pool.num_free or len(self.running) >= self.max_running:
            self.pool.free(cached)
            return None
        return cached

    def _admit(self, plan: _Plan, tenant: str | None = None, before: Request | None = None) -> None:
        """Admit requests from the queue in order, of one tenant or all, up to one that does not fit or comes after `before`."""
        owed = -1
        while plan.budget and (request := self._head()) is not None and tenant in (None, request.tenant):
            if before is not None and self._order(before) < self._order(request):
                break
            owed = self._owed() if owed < 0 else owed
            if self.pool.num_free <= owed or not self._fitting(plan, 0) or (cached := self._fit(request, owed)) is None:
                break
            hits = len(cached) * self.pool.block_size
            fitting = self._fitting(plan, hits)
            if not fitting or (not self.split and len(request.tokens) - hits > fitting):
                self.pool.free(cached)
                break
            self.waiting.remove(request)
            insort(self.running, request, key=self._rank)
            entry = self._entries[request]
            if not entry.admitted:
                entry.admitted, request.num_cached = True, hits
            request.phase, request.blocks, request.num_computed = RequestPhase.RUNNING, cached, hits
            self._plan(plan, request, min(_pending(request), fitting))
            owed += self._blocks_owed(request)

    def _head(self) -> Request | None:
        """The request to admit next ([Note: Fair shares])."""
        return min(self._firsts(self.waiting).values(), key=self._share, default=None)

    def _firsts(self, requests: Sequence[Request]) -> dict[str, Request]:
        """The first request of each tenant that may be computed now. `requests` must be sorted by rank."""
        firsts: dict[str, Request] = {}
        sure = set[str]()  # tenants whose later requests cannot go first
        for request in requests:
            if self._entries[request].admitted or not self.pausing:
                known = firsts.get(request.tenant)
                if known is None or self._order(request) < self._order(known):
                    firsts[request.tenant] = request
                if not self._entries[request].late or request.tenant not in self._urgent:
                    sure.add(request.tenant)
                    if len(sure) == len(self._active):
                        break
        return firsts

    def _share(self, request: Request) -> tuple[int, tuple[float, int]]:
        """The key for admission: its tenant's counter, and its rank; the lowest goes first."""
        return self._served[request.tenant] + STEP * request.priority, self._order(request)

    def _add_drafts(self, plan: _Plan) -> None:
        """Spend the remaining budget and free blocks on draft tokens for the generations."""
        for index, chunk in enumerate(plan.chunks if self.num_draft else ()):
            entry = self._entries[chunk.request]
            num = min(entry.num_draft, plan.budget, self._room(chunk))
            if num > 0:
                entry.lookup = entry.lookup or Lookup()
                self._draft(plan, index, entry.lookup.guess(chunk.request.tokens, num))

    def _room(self, chunk: Chunk) -> int:
        """How many draft tokens a chunk can take, apart from the budget."""
        request = chunk.request
        if not _generates(chunk) or request.params.constrained:
            return 0
        context = self.max_context if self._is_long(request) else min(self.max_context, self.short_context)
        left = min(request.params.max_tokens - request.num_generated, context - len(request.tokens))
        return min(left, self._capacity(request)) - 1

    def _draft(self, plan: _Plan, index: int, draft: tuple[int, ...]) -> None:
        chunk = plan.chunks[index]
        plan.copies += self.pool.reserve(chunk.request.blocks, chunk.stop, chunk.stop + len(draft))
        plan.chunks[index] = chunk._replace(draft=draft)
        plan.budget -= len(draft)

    def _steps(self, plan: _Plan) -> int:
        """Reserve blocks for the batch's steps. Returns their number: above 1 only if nothing waits and all requests generate
        plainly."""
        chunks = plan.chunks
        if self.most_steps == 1 or self.num_draft or self.waiting or len(chunks) < len(self.running):
            return 1
        if not all(_generates(chunk) and chunk.request.is_plain for chunk in chunks):
            return 1
        step = self.pace.seconds(Batch(tuple(chunks), ()).size)
        within = min(STEPS_SECONDS, plan.within or STEPS_SECONDS)
        steps = min([self.most_steps, int(within / step) if step else 1, *(1 + self._room(chunk) for chunk in chunks)])
        while steps > 1 and self.pool.num_free < sum(
            self.pool.num_lacking(chunk.request.blocks, chunk.stop, chunk.start + steps) for chunk in chunks
        ):
            steps -= 1
        for chunk in chunks if steps > 1 else ():
            plan.copies += self.pool.reserve(chunk.request.blocks, chunk.stop, chunk.start + steps)
        return max(1, steps)

    # ---- operations on one request

    def _enter(self, request: Request, importance: float) -> None:
        self._entries[request] = _Entry((importance, self._num_added), num_draft=self.num_draft)
        self._num_added += 1

    def _queue(self, request: Request, elsewhere: int = 0) -> None:
        """Queue a request that has entered. `elsewhere`: `Request.elsewhere`."""
        tenant, least = request.tenant, min((self._served[one] for one in self._active), default=self._floor)
        served = self._served.get(tenant, 0) + elsewhere
        self._served[tenant] = served if tenant in self._active else max(served, least - 1)
        self._join(request)
        insort(self.waiting, request, key=self._rank)

    def _join(self, request: Request) -> None:
        """Count a request for its tenant's share and for targets, until `_withdraw`."""
        self._active[request.tenant] += 1
        if request.target != NO_TARGET and not self._entries[request].late:
            self._targeted[request] = None

    def _withdraw(self, request: Request) -> None:
        """Remove a request from its queue, and free its blocks."""
        (self.running if request.phase is RequestPhase.RUNNING else self.waiting).remove(request)
        self._release(request)
        self._targeted.pop(request, None)
        self._active[request.tenant] -= 1
        self._active += Counter()  # drops entries that are 0
        if not self._active:
            self._floor = self._served[request.tenant]

    def _is_long(self, request: Request) -> bool:
        return len(request.tokens) > self.short_context

    def _salt(self, request: Request) -> str:
        """The salt under which its blocks are found: long requests have other keys and values."""
        return f"{request.salt}\0long" if self._is_long(request) else request.salt

    def _rank(self, request: Request) -> tuple[float, int]:
        return self._entries[request].rank

    def _plan(self, plan: _Plan, request: Request, num: int) -> None:
        if (num := min(num, plan.budget)) > 0:
            chunk = Chunk(request, request.num_computed, request.num_computed + num)
            plan.copies += self.pool.reserve(request.blocks, chunk.start, chunk.stop)
            plan.prompts += num if _pending(request) > 1 else 0
            plan.chunks.append(chunk)
            plan.budget -= num
            tokens, rows, positions = plan.size
            plan.size = ForwardSize(tokens + num, rows + chunk.samples, positions + attended(chunk.start, chunk.stop))

    def _secure(self, request: Request, order: list[Request]) -> bool:
        """Preempt the last of `order` until the next position of `request` has a block. False if it was preempted itself."""
        while self.pool.num_lacking(request.blocks, request.num_computed, request.num_computed + 1) > self.pool.num_free:
            victim = order.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Free a request's blocks and return it to the queue; its tokens are computed again later."""
        self._requeue(request)
        self.counters.preemptions += 1

    def _requeue(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.phase = RequestPhase.WAITING
        insort(self.waiting, request, key=self._rank)

    def _capacity(self, request: Request) -> int:
        """How many positions from num_computed on fit into its own blocks and all free ones."""
        return (len(request.blocks) + self.pool.num_free) * self.pool.block_size - request.num_computed

    def _blocks_owed(self, request: Request) -> int:
        return max(0, self.pool.num_needed(len(request.tokens) + self.pool.block_size) - len(request.blocks))

    def _release(self, request: Request) -> None:
        self.pool.free(request.blocks)
        request.num_computed = 0

    def _start_sibling(self, sibling: Request, first: Request) -> None:
        """Start a sibling at the end of the prompt that `first` has computed."""
        sibling.missed = first.missed
        self._enter(sibling, self._entries[first].rank[0])
        self._entries[sibling].late = self._entries[first].late
        self._join(sibling)
        self._entries[sibling].admitted = True
        sibling.phase, sibling.num_cached, sibling.num_computed = RequestPhase.RUNNING, first.num_cached, first.num_computed
        sibling.blocks = self.pool.fork(first.blocks)
        insort(self.running, sibling, key=self._rank)

    def _append(self, request: Request, accepted: Sequence[int]) -> tuple[int, ...]:
        """Append tokens up to the first that ends the request, and return them. All but the last are computed, as its draft."""
        assert accepted, f"{request.id} was computed to its last token, but commit got no token for it"
        params, before, reason = request.params, request.num_computed, None
        was_long, salt = self._is_long(request), self._salt(request)
        for token in accepted:
            request.append(token)
            if token in request.end_ids:
                reason = Finish.STOP
            elif request.num_generated == params.max_tokens or len(request.tokens) == self.max_context:
                reason = Finish.LENGTH
            if reason:
                break
        request.num_computed = len(request.tokens) - 1
        self.pool.publish(request.blocks, request.tokens, before, request.num_computed, salt)
        new = tuple(request.tokens[before:])
        if reason:
            self.finish(request, reason)
        elif was_long < self._is_long(request):
            self._requeue(request)
        return new

    def _count_draft(self, chunk: Chunk, accepted: int) -> None:
        self.counters.draft_tokens += len(chunk.draft)
        self.counters.accepted_tokens += accepted
        self._entries[chunk.request].num_draft = min(self.num_draft, 2 * accepted + 1)


@dataclass(slots=True)
class _Plan:
    """A batch under construction."""

    budget: int  # tokens left
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    within: float | None = None  # seconds that it may take; None: any
    size: ForwardSize = NOTHING
    prompts: int = 0  # number of prompt tokens in it


def _pending(request: Request) -> int:
    """Known tokens that are not computed yet. 1: the request generates, or is about to."""
    return len(request.tokens) - request.num_computed


def _generates(chunk: Chunk) -> bool:
    """Whether the chunk is the one token of a request that has generated before."""
    return chunk.request.num_generated > 0 and chunk.samples and chunk.stop - chunk.start == 1


def _pending_siblings(request: Request) -> tuple[Request, ...]:
    """Siblings that wait until the request's prompt is computed."""
    return tuple(s for s in request.siblings if s.phase is not RequestPhase.FINISHED) if request.num_generated == 0 else ()
