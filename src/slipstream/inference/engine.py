"""The engine loop: requests in, text out. `Engine.step` is the main path; read it first.

One thread calls `step` while there is work and sleeps otherwise. Any thread may call `submit` and `cancel`; they hold the lock only
briefly and never wait for a forward. The engine's thread reports a request's progress to its `sink`, a callable, without holding
the lock. The last `Output` of each sequence always carries `finish` and `usage`. An error inside one request ends only that
request. If a forward fails, only the requests that also fail alone end.

Glossary: `submit` returns a `Handle` with `n` *sequences* (`sequence`).
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from slipstream.inference.blocks import BlockPool
from slipstream.inference.constrain import Constraint, Grammars
from slipstream.inference.core import (
    Batch,
    Chunk,
    Finish,
    ForwardSize,
    Generate,
    Request,
    RequestPhase,
    Runner,
    SamplingParams,
    target_of,
)
from slipstream.inference.draft_model import FEW, DraftModel
from slipstream.inference.drafts import accept
from slipstream.inference.sampler import LogitsRow, Sampled, Sampler
from slipstream.inference.scheduler import MAX_RUNNING, Scheduler, budget_of, receivers
from slipstream.inference.sequence import AnswerSequence, Handle, Logprob, Output, Sink
from slipstream.inference.stats import Stats, Throughput, Use
from slipstream.inference.text import StopStrings, Stream, Tokenizer

__all__ = ["ClosedError", "Engine", "FailedError"]

logger = logging.getLogger(__name__)

MOST_STEPS = 16  # of a batch
PAUSES = (0.0, 0.1, 1.0)  # seconds before each probe of a device that failed before any token: memory may become free


class ClosedError(RuntimeError):
    """The engine accepts no more requests."""


class FailedError(RuntimeError):
    """A request fails, and would fail again; the engine serves others."""


@dataclass(slots=True)
class Pause:
    """The value of a `with Engine.paused()` block."""

    changed: bool = False  # the caller sets it before it overwrites the first weight


class _EngineState(Enum):
    SERVING = "is serving"
    DEAD = "is dead"
    CLOSED = "is closed"


class Engine:
    """Owns the loop: the scheduler picks the tokens of a forward, the runner computes it, the sampler picks the next tokens."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        token_budget: int | None = None,
        max_running: int = MAX_RUNNING,
        max_waiting: int = 1024,
        num_draft: int = 0,
        draft: DraftModel | None = None,
        token_interval: float | None = None,
        prefix_caching: bool = True,
        split: bool = True,
        end_ids: Iterable[int] = (),
        model_name: str = "model",
        sampling: Mapping[str, Any] | None = None,
        unavailable: str = "",
        expert_use: Callable[[], Use] = Use,
        open_adapter: Callable[[str, str | os.PathLike[str]], Any] | str = "this runner has none",
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> None:
        """Without a tokenizer, prompts are token ids and outputs have no text. The options not listed are the scheduler's.

        draft        speculates; num_draft, for lookup in the request's own tokens, is then 0
        end_ids      the model's end tokens; the tokenizer's are added
        sampling     the model's recommended SamplingParams by field name, for callers that ask for them (`recommended`)
        expert_use   reads the counts of `on_disk`, for `stats`
        open_adapter  reads an adapter, (name, folder) -> `Request.adapter`; or the reason that it cannot. `adapters` are loaded now
        unavailable  if not empty, every request is rejected with this text until a `paused` block succeeds
        """
        self.runner, self.tokenizer, self._expert_use, self._open_adapter = runner, tokenizer, expert_use, open_adapter
        self.end_ids = frozenset(end_ids) | (frozenset() if tokenizer is None else tokenizer.end_ids)
        self.model_name, self.sampling = model_name, dict(sampling or {})
        self._sampler, self._drafter = Sampler(runner.vocab_size), draft
        self._scheduler = Scheduler(
            BlockPool(runner.num_blocks, runner.block_size, prefix_caching),
            token_budget=budget_of(token_budget, max_running),
            max_running=max_running,
            max_waiting=max_waiting,
            max_context=runner.max_context,
            short_context=runner.short_context,
            split=split,
            num_draft=num_draft,
            token_interval=token_interval,
            most_steps=MOST_STEPS if runner.generate is not None and self._sampler.is_native and draft is None else 1,
        )
        self._lock = threading.RLock()  # for the scheduler and all below; reentrant: garbage collection can call close() anywhere
        # When work arrives or the state changes, `_work` is notified, and `_stop` becomes nonzero to end a batch of several steps.
        self._work, self._stop = threading.Condition(self._lock), ctypes.c_int32()
        self._state, self._why = _EngineState.SERVING, ""  # `_why`: the reason for DEAD
        self._sequences: dict[Request, AnswerSequence] = {}  # unfinished ones
        self._cancelled, self._holds = list[Handle](), dict[Handle, bool]()  # since the last forward; True: hold, False: resume
        self._outbox: list[tuple[AnswerSequence, Output]] = []  # to pass to the sinks without the lock
        self._proven = self._process = 0  # a token that was computed lately; the process of the thread
        self._unavailable, self._pause = unavailable, threading.Lock()  # why it cannot serve, or ""; lets one pause run at a time
        self._adapters, self._ids = dict[str, Any](), itertools.count()  # adapters by name
        self._totals, self._throughput, self._grammars_lock = Stats(), Throughput(), threading.Lock()
        self._thread: threading.Thread | None = None
        for name, folder in (adapters or {}).items():
            self.load_adapter(name, folder)

    # ---- public; any thread may call these

    @property
    def max_context(self) -> int:
        """Maximum number of prompt and output tokens together."""
        return self._scheduler.max_context

    @property
    def healthy(self) -> bool:
        """False once the engine is closed or dead; that is final."""
        return self._state is _EngineState.SERVING

    def start(self) -> None:
        """Start the engine's thread, which also serves the requests submitted before."""
        assert self._thread is None, "the engine's thread was started before"
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)
        self._thread.start()

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Tokenize a prompt. Token ids are returned as a list."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("the prompt is text, and this engine has no tokenizer; pass token ids or open it with a tokenizer")
        return self.tokenizer.encode(prompt)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        sink: Sink,
        n: int = 1,
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
        adapter: str = "",
        elsewhere: int = 0,
        first_within: float | None = None,
        wait_within: float | None = None,
        waited: float = 0.0,
    ) -> Handle:
        """Queue a prompt for `n` answers, of the model alone or with one of `adapters`, and return at once. Requests of the lowest
        `priority` go first. Only requests of the same `salt` and `adapter` share the prefix cache. Requests of different `tenant`
        share the engine evenly. `first_within` and `wait_within`: target seconds to the first token and between tokens
        (`core.Target`). `waited`: seconds already spent waiting elsewhere. Raises ValueError if the request can never be served,
        QueueFullError if the queue is full, ClosedError if the engine accepts no requests."""
        ids, target = self.encode(prompt), target_of(first_within, wait_within)
        forbids = self._check(ids, params, n)
        with self._lock:
            self._check_open()
            used, salt = self._adapter(adapter, salt)
            self._scheduler.check(len(ids), tenant)  # before the schema is compiled and n answers allocated; `add` checks again
        endless = params.ignore_eos and not params.constrained  # after complete JSON the grammar allows only an end token
        ends = frozenset(params.stop_token_ids) | (frozenset() if endless else self.end_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        handle, now = Handle(f"request-{next(self._ids)}", sink), time.perf_counter()
        for index in range(n):
            request = Request(
                id=f"{handle.id}.{index}",
                tokens=list(ids),
                params=params,
                end_ids=ends,
                priority=priority,
                salt=salt,
                tenant=tenant,
                elsewhere=elsewhere,
                target=target,
                **forbids,
                adapter=used,
                arrival=now - waited,
                seed=seed + index,
            )
            stream = None if self.tokenizer is None else Stream(self.tokenizer, ids, params.skip_special_tokens)
            stops = StopStrings(params.stop, params.include_stop_str_in_output)
            constraint = self._constraint(params) if params.constrained else None
            handle.sequences.append(AnswerSequence(index, handle, request, stream, stops, constraint))
        first, *others = (sequence.request for sequence in handle.sequences)
        first.siblings = others
        with self._lock:
            self._check_open()
            self._scheduler.add(first)
            self._sequences |= {sequence.request: sequence for sequence in handle.sequences}
            self._notify()
        return handle

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def load_adapter(self, name: str, folder: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Load a PEFT adapter for requests that name it. With `replace`, `name` may be loaded already: running requests keep the
        old one.

        Raises ValueError if the folder holds no adapter of this model, if the name is taken, or if this engine has no adapters."""
        if isinstance(self._open_adapter, str):
            raise ValueError(f"adapters cannot be loaded: {self._open_adapter}")
        if not name or not name.isprintable() or name == self.model_name:
            raise ValueError(f"an adapter cannot be named {name!r:.100}: it needs a name of its own, other than the model's")
        opened = self._open_adapter(name, folder)
        with self._lock:
            if name in self._adapters and not replace:
                raise ValueError(f"an adapter {name!r} is loaded already; unload it first, or load with replace (load_inplace)")
            self._adapters[name] = opened

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; running requests keep it until they end. Raises ValueError if it is not loaded."""
        with self._lock:
            self._adapter(name, "")
            self._adapters.pop(name, None)

    def _adapter(self, name: str, salt: str) -> tuple[Any, str]:
        """The adapter of a request, and the salt of its prefixes. Hold the lock."""
        if not name:
            return None, salt
        if name not in self._adapters:
            loaded = ", ".join(sorted(self._adapters)) or "none"
            raise ValueError(f"there is no adapter {name!r:.100}; loaded: {loaded}")
        return self._adapters[name], f"{self._adapters[name].key}\0{salt}"

    def cancel(self, handle: Handle) -> None:
        """Cancel the unfinished sequences of `handle` before the next forward; the sink receives Finish.CANCELLED."""
        with self._lock:
            self._cancelled.append(handle)
            self._notify()

    def hold(self, handle: Handle, held: bool) -> None:
        """Compute nothing more for `handle` from the next forward on, because nobody reads its outputs; with `held` False,
        continue. Meanwhile other requests have its place and, if they need them, its blocks. Its text does not change."""
        with self._lock:
            self._holds[handle] = held
            self._notify()

    def close(self) -> None:
        """Cancel all requests (Finish.CANCELLED) and stop the thread. Idempotent."""
        with self._lock:
            if self._state is not _EngineState.DEAD:
                self._state = _EngineState.CLOSED
            self._notify()
        if self._thread is None:
            self._shut(Finish.CANCELLED)
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def fail(self, why: str) -> None:
        """Mark the engine dead and return at once: running and waiting requests end with the error `why`."""
        with self._lock:
            if self._state is _EngineState.SERVING:
                self._state, self._why = _EngineState.DEAD, why
                logger.error("the engine of %s fails: %s", self.model_name, why)
            self._notify()

    def stats(self) -> Stats:
        with self._lock:
            scheduler, (generated, computed) = self._scheduler, self._throughput.rates(time.perf_counter())
            expert_hits, expert_misses = self._expert_use()
            return replace(
                deepcopy(self._totals),
                healthy=self.healthy,
                waiting=len(scheduler.waiting) + len(scheduler.held),
                running=len(scheduler.running),
                blocks=scheduler.pool.num_blocks,
                blocks_used=scheduler.pool.num_blocks - scheduler.pool.num_free,
                block_size=scheduler.pool.block_size,
                expert_hits=expert_hits,
                expert_misses=expert_misses,
                tokens_per_second=generated,
                prompt_tokens_per_second=computed,
                **asdict(scheduler.counters),
            )

    def prepare(self) -> None:
        """Build now what the first requests would wait for: the tokenizer's tables and the vocabulary of JSON schemas."""
        if self.tokenizer is None:
            return
        self.tokenizer.prepare()
        try:
            self._constraint(SamplingParams(json_schema='{"type": "object"}'))
        except ValueError as error:
            logger.info("JSON schemas are not available: %s", error)

    def _constraint(self, params: SamplingParams) -> Constraint:
        with self._grammars_lock:
            return self._grammars.constraint(params.json_schema, params.grammar)

    @cached_property
    def _grammars(self) -> Grammars:
        assert self.tokenizer is not None, "`_check` refuses schemas without a tokenizer"
        return Grammars(self.tokenizer, self.runner.vocab_size)

    def _check(self, ids: Sequence[int], params: SamplingParams, n: int) -> dict[str, Any]:
        """The fields of a request with the tokens of what `params` has as text. Raises ValueError for what cannot be served."""
        has_text = params.stop or params.bad_words or params.constrained or params.thinking_token_budget is not None
        if self.tokenizer is None and has_text:
            needing = "stop strings, bad_words, thinking_token_budget, json_schema and grammar"
            raise ValueError(f"{needing} need a tokenizer, and this engine has none")
        if n < 1:
            raise ValueError(f"n is {n}; it must be at least 1")
        if unknown := [token for token in ids if not 0 <= token < self.runner.vocab_size]:
            raise ValueError(f"the prompt has token {unknown[0]}; this model's tokens are 0 to {self.runner.vocab_size - 1}")
        self._sampler.check(params)
        fields: dict[str, Any] = {}
        if self.tokenizer is not None and params.bad_words:
            fields["bad_words"] = self.tokenizer.spell(params.bad_words, self.runner.vocab_size)
        if self.tokenizer is not None and params.thinking_token_budget is not None:
            fields["thought_marks"] = marks = self.tokenizer.thought_marks
            if max(marks[:2]) >= self.runner.vocab_size:
                last = self.runner.vocab_size - 1
                raise ValueError(f"thinking_token_budget needs marks of reasoning that are of the model's tokens, 0 to {last}")
            fields["opened"] = len(ids) if self.tokenizer.opens_thought(ids) else -1
        return fields

    def _check_open(self, *, changing: bool = False) -> None:
        """Raise ClosedError unless requests are accepted. Hold the lock. `changing`: the caller replaces the weights."""
        if self._process not in (0, os.getpid()):
            raise ClosedError(
                "this process was forked after the engine was started, and its thread is in the parent; open one here"
            )
        if self._state is not _EngineState.SERVING:
            raise ClosedError(f"the engine {self._state.value}{self._why and f': {self._why}'}")
        if self._unavailable and not changing:
            raise ClosedError(self._unavailable)

    @contextmanager
    def paused(self, *, otherwise: str, then: str = "") -> Iterator[Pause]:
        """A context in which no request is in flight, so that the caller may change the runner's weights.

        [Note: Pause] Requests that have started, held ones too, finish first, so all tokens of an answer come from the same
        weights. New requests wait in the queue. If the weights change, the prefix cache is cleared afterwards. `then` and
        `otherwise` are reasons that the engine cannot serve afterwards: `then` after success ("": it can serve), `otherwise` after
        an exception if the weights have changed. While it cannot serve, every request is rejected with that text.
        """
        pause = Pause()
        with self._pause:
            try:
                with self._lock:
                    self._scheduler.pausing = True
                    for request in list(self._scheduler.held):
                        self._scheduler.resume(request)
                    self._notify()
                    self._work.wait_for(lambda: self._scheduler.drained or not self.healthy)
                    self._check_open(changing=True)
                yield pause
                self._unavailable = then
            except BaseException as error:
                if pause.changed:
                    self._unavailable = f"{otherwise}: {text_of(error)}"
                raise
            finally:
                with self._lock:
                    if self.healthy and pause.changed:
                        self._scheduler.pool.forget()
                    self._scheduler.pausing = False
                    self._notify()

    def _notify(self) -> None:
        """Wake the engine's thread and those that wait for it. Hold the lock."""
        self._stop.value = 1
        self._work.notify_all()

    # ---- the loop; only the engine's thread runs it

    def step(self) -> bool:
        """Run one batch and process its results. Return False if there was nothing to compute."""
        start, counters = time.perf_counter(), self._scheduler.counters
        batch, forwards = self._schedule(), counters.forwards
        waited = self._send_outputs()  # the outputs of cancelled requests
        if batch is None:
            return False
        if self._drafter is not None:
            batch = self._speculate(batch, self._drafter)
            start, waited = time.perf_counter(), 0.0
        size = batch.size  # read before the commit changes it
        if self._compute(batch) is not None:
            self._compute_in_parts(batch)
        waited += self._send_outputs()
        self._scheduler.pace.add(size, (time.perf_counter() - start - waited) / max(1, counters.forwards - forwards))
        return True

    def _run(self) -> None:
        try:
            while self._wait():
                self.step()
            self._shut(Finish.ERROR if self._why else Finish.CANCELLED, self._why or None)
        except BaseException as error:  # a bug in the engine; every waiting client must get an answer
            logger.exception("the engine's loop failed")
            self._shut(Finish.ERROR, f"the engine's loop failed: {text_of(error)}")

    def _wait(self) -> bool:
        """Sleep until there is work. Return False if the engine is closed or dead."""
        with self._lock:
            if self._scheduler.pausing and self._scheduler.drained:
                self._notify()
            self._work.wait_for(lambda: self._scheduler.busy or self._cancelled or self._holds or not self.healthy)
            return self.healthy

    def _schedule(self) -> Batch | None:
        """End cancelled requests, hold and resume others, and return the next batch."""
        with self._lock:
            self._stop.value = 0
            for handle in self._cancelled:
                self._end(handle.sequences, Finish.CANCELLED)
            self._cancelled.clear()
            for handle, held in self._holds.items():
                change = self._scheduler.hold if held and not self._scheduler.pausing else self._scheduler.resume
                for sequence in handle.sequences:
                    change(sequence.request)
            self._holds.clear()
            if self._unavailable and not self._scheduler.pausing:
                self._end(list(self._sequences.values()), Finish.ERROR, self._unavailable)
            batch = self._scheduler.schedule(time.perf_counter())
            for chunk in () if batch is None else batch.chunks:
                if not (sequence := self._sequences[chunk.request]).started and not chunk.request.num_generated:
                    sequence.started = time.perf_counter()
                    self._totals.queue.add(sequence.started - sequence.request.arrival)
            assert batch is not None or not self._scheduler.busy, f"nothing to compute for {len(self._sequences)}"
        return batch

    def _speculate(self, batch: Batch, drafter: DraftModel) -> Batch:
        """Add the draft model's proposals. If it fails, continue without it."""
        with self._lock:
            wanted = self._scheduler.draftable(batch, FEW)
        if not wanted:
            return batch
        try:
            drafts = drafter.guess(wanted, self._seconds_of(batch.size))
        except Exception as error:  # any error of the model or device; requests do not need the draft model
            logger.error("the draft model failed, and is not used any more: %s", text_of(error), exc_info=True)
            self._drafter = None
            return batch
        with self._lock:
            return self._scheduler.add_drafts(batch, drafts)

    def _seconds_of(self, size: ForwardSize) -> Callable[[int], float]:
        """number of tokens -> seconds of a forward in which each is a generated token, with the mean context of `size`."""
        context = size.positions / size.tokens
        return lambda tokens: self._scheduler.pace.seconds(ForwardSize(tokens, tokens, int(context * tokens)))

    def _compute(self, batch: Batch) -> str | None:
        """Run the forwards, sample and commit. Return None, or the error text; in that case no request has changed.

        The exception itself is not kept: its traceback would hold memory that the next forward needs."""
        try:
            if batch.steps > 1 and (generate := self.runner.generate) is not None:
                batch, drawn = self._generate(batch, generate)
            else:
                drawn = self._sample(batch, self.runner.forward(batch))
        except Exception as error:  # any error of the model or device; it is reported to the requests
            num, why = len(batch.chunks), text_of(error)
            logger.error("a forward of %d tokens of %d requests failed: %s", batch.num_tokens, num, why, exc_info=num == 1)
            return why
        self._commit(batch, drawn)
        return None

    def _compute_in_parts(self, batch: Batch) -> None:
        """[Note: A forward that fails]

        One request must not end another's, nor change it. Nothing of a failed batch was committed, and computing a position again
        writes the same keys and values. So the batch is retried whole, then in halves, down to single requests and then halves of
        their chunks. Thus a batch that needs too much memory is computed in parts. A request ends if a single token of it fails
        alone. If the last part failed, a token that has worked before (0 if none has) is computed alone. If it works, the requests
        were at fault and the engine continues. If it fails again and again, the device is at fault (a CUDA error persists until the
        process ends): the engine is dead, and the error of these requests says so."""
        with self._lock:
            chunks = self._scheduler.retryable_chunks(batch)
        parts = [chunks] if chunks else []  # a stack
        failed = dict[Request, str]()
        error: str | None = None
        while parts:
            chunks = parts.pop()
            if chunks[0].request in failed:  # at an earlier position of its chunk
                continue
            if (error := self._compute(Batch(chunks, ()))) is None:
                continue
            smaller = _smaller(chunks)
            parts += reversed(smaller)
            if not smaller:
                failed[chunks[0].request] = error
        with self._lock:
            for request in failed:
                self._scheduler.finish(request, Finish.ERROR)  # this frees its blocks for the probe
        if error is not None and (broken := self._probe()) is not None:
            why = f"no part of a forward can be computed any more, nor a single token alone: {broken}"
            logger.error("the engine of %s fails: %s", self.model_name, why)
            self._shut(Finish.ERROR, why)
            return
        with self._lock:
            for request, error in failed.items():
                if request in self._sequences:  # it may have ended together with its siblings
                    self._end([self._sequences[request]], Finish.ERROR, f"the forward failed: {error}")

    def _probe(self) -> str | None:
        """Compute one token in its own block, if possible one that has worked before. Return None, or the error."""
        pool = self._scheduler.pool
        probe = Request(id="probe", tokens=[self._proven], params=SamplingParams())
        with self._lock:
            if not pool.num_free:
                return None  # running requests hold all blocks, so a forward has worked
            pool.reserve(probe.blocks, 0, 1)
        why = probed(lambda: self.runner.forward(Batch((Chunk(probe, 0, 1),), ())))
        with self._lock:
            pool.free(probe.blocks)
        return why

    def _generate(self, batch: Batch, generate: Generate) -> tuple[Batch, dict[Request, list[Sampled] | str]]:
        """Run the steps of a batch. Returns the batch with the completed steps, and the tokens of each request. A step in which a
        token cannot be drawn does not count: the next batch starts with it and finds the request at fault."""
        requests = [chunk.request for chunk in batch.chunks]
        made = generate(batch, self._sampler.draws(requests, batch.steps), self._stop)
        if -1 in made[-1]:
            made.pop()
        if not made:
            batch = Batch(batch.chunks, ())
            return batch, self._sample(batch, self.runner.forward(batch))
        each = zip(requests, zip(*made, strict=True), strict=True)
        return batch._replace(steps=len(made)), {request: [Sampled(token) for token in tokens] for request, tokens in each}

    def _sample(self, batch: Batch, logits: Any) -> dict[Request, list[Sampled] | str]:
        """For each request that samples from the batch: the accepted draft tokens and one more, or an error text."""
        rows: list[LogitsRow] = []
        places: list[int] = []  # the logits row of each of `rows`; siblings sample from the same row
        place = 0
        samples: dict[Request, list[Sampled]] = {}
        drawn: dict[Request, list[Sampled] | str] = {}
        for chunk in batch.chunks:
            self._score(chunk, logits, place)
            place += chunk.num_rows - chunk.num_sampled
            for request in receivers(chunk):
                constraint = self._sequences[request].constraint  # the scheduler makes no draft for constrained requests
                try:
                    mask = None if constraint is None else constraint.mask()
                except Exception as error:  # of the grammar library; the other requests continue
                    drawn[request] = text_of(error)
                    continue
                rows += (LogitsRow(request, chunk.draft[:num], mask) for num in range(chunk.num_sampled))
                places += range(place, place + chunk.num_sampled)
                samples[request] = []
            place += chunk.num_sampled
        one_to_one = places == list(range(len(logits)))
        sampled = self._sampler.sample(logits if one_to_one else logits[places], rows) if rows else []
        for row, one in zip(rows, sampled, strict=True):
            if one.token >= 0 and len(samples[row.request]) == len(row.draft):  # after a rejected draft token there may be none
                samples[row.request].append(one)
        for chunk in batch.chunks:
            for request in receivers(chunk):
                if ones := samples.get(request):
                    drawn[request] = ones[: len(accept(chunk.draft[: len(ones) - 1], [one.token for one in ones]))]
                elif request in samples:
                    drawn[request] = "no token can be chosen: logits are not finite, or every token is forbidden"
        return drawn

    def _score(self, chunk: Chunk, logits: Any, place: int) -> None:
        """Record the log-probabilities of the prompt tokens that the chunk predicts. `place`: the row of its first logits."""
        request, scored = chunk.request, self._sequences[chunk.request].handle.scored
        num = request.params.prompt_logprobs
        if num is None or chunk.start >= request.num_prompt - 1:
            return
        scored[:] = scored or [None]
        first, last = max(chunk.start, len(scored) - 1), min(chunk.stop, request.num_prompt - 1)
        rows = logits[place + first - chunk.start : place + last - chunk.start]
        for token, value, top, rank in self._sampler.score(rows, request.tokens[first + 1 : last + 1], num):
            scored.append(None if value is None else Logprob(token, value, top, rank))

    def _commit(self, batch: Batch, drawn: dict[Request, list[Sampled] | str]) -> None:
        """Commit the results to the requests. The scheduler frees the blocks of finished ones."""
        now = time.perf_counter()
        with self._lock:
            self._proven = batch.chunks[0].request.tokens[batch.chunks[0].start]
            computed = sum(max(0, min(chunk.stop, chunk.request.num_prompt) - chunk.start) for chunk in batch.chunks)
            for request, why in drawn.items():
                if isinstance(why, str) and request in self._sequences:  # it may have ended together with its siblings
                    self._end([self._sequences[request]], Finish.ERROR, why)
            ones = {request: ones for request, ones in drawn.items() if not isinstance(ones, str)}
            results = self._scheduler.commit(batch, {request: [one.token for one in ones[request]] for request in ones}, now)
            for request, new in results.items():
                sequence = self._sequences[request]
                try:
                    output = sequence.take(ones[request][: len(new)], request.finish)
                except Exception as error:  # an error in its constraint or its text; the other requests continue
                    logger.warning("%s ends with an error", request.id, exc_info=True)
                    output = sequence.end(Finish.ERROR, text_of(error))
                sequence.measure(self._totals, len(output.token_ids), now)
                if output.finish is not None:
                    self._scheduler.finish(request, output.finish)
                    self._forget(sequence, output.finish)
                self._outbox.append((sequence, output))
            generated = sum(map(len, results.values()))
            self._totals.generated_tokens += generated
            self._throughput.add(now, generated, computed)

    def _shut(self, finish: Finish, error: str | None = None) -> None:
        """End all requests. With an error, mark the engine dead."""
        with self._lock:
            if error is not None:
                self._state, self._why = _EngineState.DEAD, error
                error = f"the engine {self._state.value}: {error}"
            self._end(list(self._sequences.values()), finish, error)
        self._send_outputs()

    def _end(self, sequences: Sequence[AnswerSequence], finish: Finish, error: str | None = None) -> None:
        """End the unfinished ones, and the siblings that cannot start without them. Hold the lock."""
        for sequence in sequences:
            self._scheduler.finish(sequence.request, finish)
        for handle in dict.fromkeys(sequence.handle for sequence in sequences):
            for sequence in handle.sequences:
                if sequence.request in self._sequences and sequence.request.phase is RequestPhase.FINISHED:
                    self._forget(sequence, finish)
                    self._outbox.append((sequence, sequence.end(finish, error)))

    def _forget(self, sequence: AnswerSequence, finish: Finish) -> None:
        del self._sequences[sequence.request]
        self._sampler.forget(sequence.request)
        if self._drafter is not None:
            self._drafter.forget(sequence.request)
        sequence.measure_end(self._totals, finish, time.perf_counter())

    def _send_outputs(self) -> float:
        """Pass the outputs to the sinks. Returns the seconds that sinks blocked for slow readers: they are no time of a forward."""
        outputs, self._outbox = self._outbox, []
        start, busy = time.perf_counter(), time.thread_time()
        for sequence, output in outputs:
            try:
                sequence.handle.sink(output)
            except Exception:  # an error in the caller's code, for example a closed event loop
                logger.exception("the sink of %s failed; it is cancelled", sequence.handle.id)
                self.cancel(sequence.handle)
        return max(0.0, time.perf_counter() - start - (time.thread_time() - busy))


def _smaller(chunks: tuple[Chunk, ...]) -> list[tuple[Chunk, ...]]:
    """Split a failed batch into parts to compute one by one: halves, or one request without its draft. Empty for a single token."""
    if len(chunks) > 1:
        half = len(chunks) // 2
        return [chunks[:half], chunks[half:]]
    (chunk,) = chunks
    if chunk.draft:
        return [(chunk._replace(draft=()),)]
    middle = (chunk.start + chunk.stop) // 2
    return [(chunk._replace(stop=middle),), (chunk._replace(start=middle),)] if middle > chunk.start else []


def probed(compute: Callable[[], object]) -> str | None:
    """Compute a single token, and again after pauses. Return None, or why it fails."""
    why: str | None = None
    for pause in PAUSES:
        time.sleep(pause)
        try:
            compute()
            return None
        except Exception as error:  # any error of the model or device
            why = text_of(error)
    return why


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
