"""The engine loop: requests in, text out. `Engine.step` is the main path; read it first.

One thread runs `step` while there is work, and sleeps while there is none. Requests come and go from any thread: `submit` and
`cancel` hold the lock for a moment and never wait for a forward. What happens to a request is told to its `sink`, a callable,
from the engine's thread and never under the lock. The last `Output` of each sequence carries `finish` and `usage`, whatever
happens: an error inside one request ends that request, and a forward that fails only those that fail alone, too.

Glossary: what a user submits is a `Handle` with `n` *sequences*, each a `Request` of the scheduler and what makes text of it.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from slipstream.inference.blocks import BlockPool
from slipstream.inference.constrain import Constraint, Grammars
from slipstream.inference.core import Batch, Chunk, Finish, Phase, Request, Runner, SamplingParams
from slipstream.inference.drafts import accept
from slipstream.inference.sampler import Row, Sampled, Sampler, SamplingError
from slipstream.inference.scheduler import Scheduler, receivers
from slipstream.inference.stats import Meters, Stats
from slipstream.inference.text import StopStrings, Stream, Tokenizer

__all__ = ["ClosedError", "Engine", "Handle", "Logprob", "Output", "Sink", "Usage"]

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # batches in a row of which no part could be computed; then a token that has worked shows whose fault it is


class ClosedError(RuntimeError):
    """The engine takes no more requests."""


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    completion_tokens: int  # the end token included


class Logprob(NamedTuple):
    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]  # params.logprobs likeliest tokens, likeliest first


@dataclass(frozen=True, slots=True)
class Output:
    """What is new in one sequence. `text` may lag behind `token_ids`: half a character, or what may become a stop string."""

    index: int  # which of the n
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()  # of each token, if they were asked for
    finish: Finish | None = None  # in the last one, as what follows
    usage: Usage | None = None
    error: str | None = None  # why, if finish is ERROR


Sink = Callable[[Output], object]


@dataclass(slots=True, eq=False)
class Handle:
    """What was submitted; give it back to `cancel`."""

    id: str
    sink: Sink
    sequences: list[_Sequence] = field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        return self.sequences[0].request.num_prompt


@dataclass(slots=True, eq=False, kw_only=True)
class _Sequence:
    """One of the n. After `submit` only the engine's thread touches it."""

    index: int
    handle: Handle
    request: Request
    stream: Stream | None  # None: there is no tokenizer, and no text
    stops: StopStrings
    constraint: Constraint | None
    submitted: float  # seconds, perf_counter
    last_token: float = 0.0  # when its last token came; 0: none yet
    num_told: int = 0  # tokens in the outputs so far

    def take(self, tokens: Sequence[Sampled], finish: Finish | None) -> Output:
        """The next tokens as text. `finish`: why the last of them is the last, unless a stop string is met before."""
        text = ""
        for num, sampled in enumerate(tokens, 1):
            self.num_told += 1
            if self.constraint is not None:
                self.constraint.accept(sampled.token)
            if finish is Finish.STOP and num == len(tokens):
                break  # the end token is not part of the text
            text += self._pass("" if self.stream is None else self.stream.push([sampled.token]))
            if self.stops.matched is not None:
                tokens, finish = tokens[:num], Finish.STOP
                break
        return self._output(text, tokens, finish)

    def end(self, finish: Finish, error: str | None = None) -> Output:
        """It ends without another token."""
        return replace(self._output("", (), finish), error=error)

    def _pass(self, text: str) -> str:
        """Through the stop strings; what comes before min_tokens are reached does not count."""
        return text if self.num_told < self.request.params.min_tokens else self.stops.push(text)

    def _output(self, text: str, tokens: Sequence[Sampled], finish: Finish | None) -> Output:
        usage = None
        if finish is not None:
            if self.stream is not None:
                text += self._pass(self.stream.finish())
            text += self.stops.finish()
            usage = Usage(self.request.num_prompt, self.request.num_cached, self.num_told)
        logprobs = () if self.request.params.logprobs is None else tuple(map(_logprob, tokens))
        return Output(self.index, text, tuple(sampled.token for sampled in tokens), logprobs, finish, usage)


@dataclass(slots=True)
class Pause:
    """What `Engine.paused` is told from inside."""

    changed: bool = False  # the weights; True before the first of them


class _State(Enum):
    SERVING = "is serving"
    DEAD = "is dead"
    CLOSED = "is closed"


class Engine:
    """Owns the loop. The scheduler decides what a forward computes, the runner computes it, the sampler chooses what is next."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        token_budget: int = 512,
        max_running: int = 64,
        max_waiting: int = 1024,
        num_draft: int = 0,
        token_interval: float | None = None,
        prefix_caching: bool = True,
        split: bool = True,
        end_ids: Iterable[int] = (),
        model_name: str = "model",
        sampling: Mapping[str, Any] | None = None,
        lacking: str = "",
    ) -> None:
        """`end_ids` are the model's, beside the tokenizer's. Without a tokenizer, prompts are token ids and there is no text.
        sampling: what the model's makers recommend, by the names of SamplingParams; for who asks (`recommended`).
        lacking: what keeps the model from being served until a pause has ended well. The other options are the scheduler's."""
        if token_budget < max_running:
            raise ValueError(
                f"token_budget ({token_budget}) is below max_running ({max_running}): a forward would not have a token for every "
                "generation, and some would stand still; raise the one or lower the other"
            )
        self.runner = runner
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids) | (frozenset() if tokenizer is None else tokenizer.end_ids)
        self.model_name = model_name
        self.sampling = dict(sampling or {})
        self._scheduler = Scheduler(
            BlockPool(runner.num_blocks, runner.block_size, prefix_caching),
            token_budget=token_budget,
            max_running=max_running,
            max_waiting=max_waiting,
            max_context=runner.max_context,
            split=split,
            num_draft=num_draft,
            token_interval=token_interval,
        )
        self._sampler = Sampler(runner.vocab_size)
        self._grammars_lock = threading.Lock()
        # Over the scheduler and all that follows. Reentrant: the garbage collector may close a forgotten engine at any allocation.
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._work = threading.Condition(self._lock)  # there is something to do
        self._state = _State.SERVING
        self._why = ""  # it is dead
        self._sequences: dict[Request, _Sequence] = {}  # that are not over
        self._cancelled: list[Handle] = []  # since the last forward
        self._outbox: list[tuple[_Sequence, Output]] = []  # to be told, without the lock
        self._failures = 0  # batches in a row
        self._proven = 0  # a token of the last batch that was computed
        self._lacking = lacking
        self._pause = threading.Lock()  # one at a time
        self._meters = Meters()
        self._ids = itertools.count()
        self._thread: threading.Thread | None = None

    # ---- for everybody, in any thread

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output together, at most."""
        return self._scheduler.max_context

    @property
    def healthy(self) -> bool:
        """False: it will never answer again."""
        return self._state is _State.SERVING

    def start(self) -> None:
        """Run in a thread of its own. What was submitted before is served now."""
        assert self._thread is None, "the engine's thread was started before"
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)
        self._thread.start()

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("the prompt is text, and this engine has no tokenizer; give token ids, or open it with one")
        return self.tokenizer.encode(prompt)

    def submit(
        self, prompt: str | Sequence[int], params: SamplingParams, *, sink: Sink, n: int = 1, priority: int = 0, salt: str = ""
    ) -> Handle:
        """Queue a prompt for `n` answers, and return. Lower `priority` goes first. Only requests of the same `salt` share what the
        prefix cache holds.

        Raises ValueError for what can never be served, QueueFullError if the queue is full, ClosedError if nothing is taken."""
        ids = self.encode(prompt)
        self._check(ids, params, n)
        with self._lock:
            self._check_open()
            self._scheduler.check(len(ids), n)  # before the schema is compiled and n answers take memory; `add` looks again
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos or params.json_schema is not None:  # after complete JSON, only an end token is allowed
            ends |= self.end_ids
        seed = secrets.randbits(63) if params.seed is None else params.seed
        handle = Handle(f"request-{next(self._ids)}", sink)
        now = time.perf_counter()
        for index in range(n):
            request = Request(
                id=f"{handle.id}.{index}",
                tokens=list(ids),
                params=params,
                end_ids=ends,
                priority=priority,
                salt=salt,
                arrival=now,
                seed=seed + index,
            )
            handle.sequences.append(
                _Sequence(
                    index=index,
                    handle=handle,
                    request=request,
                    stream=None if self.tokenizer is None else Stream(self.tokenizer, ids),
                    stops=StopStrings(params.stop),
                    constraint=None if params.json_schema is None else self._constraint(params.json_schema),
                    submitted=now,
                )
            )
        first, *others = (sequence.request for sequence in handle.sequences)
        first.siblings = others
        with self._lock:
            self._check_open()
            self._scheduler.add(first)
            self._sequences |= {sequence.request: sequence for sequence in handle.sequences}
            self._work.notify_all()
        return handle

    def cancel(self, handle: Handle) -> None:
        """End what of it is not over, before the next forward; the sink is told (Finish.CANCELLED)."""
        with self._lock:
            self._cancelled.append(handle)
            self._work.notify_all()

    def close(self) -> None:
        """End everything (Finish.CANCELLED) and the thread. May be called twice."""
        with self._lock:
            if self._state is not _State.DEAD:
                self._state = _State.CLOSED
            self._work.notify_all()
        if self._thread is None:
            self._shut(Finish.CANCELLED)
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def stats(self) -> Stats:
        with self._lock:
            scheduler, meters = self._scheduler, self._meters
            generated, computed = meters.rates(time.perf_counter())
            return Stats(
                healthy=self.healthy,
                waiting=len(scheduler.waiting),
                running=len(scheduler.running),
                blocks=scheduler.pool.num_blocks,
                blocks_used=scheduler.pool.num_blocks - scheduler.pool.num_free,
                block_size=scheduler.pool.block_size,
                prompt_tokens=meters.prompt_tokens,
                cached_tokens=meters.cached_tokens,
                generated_tokens=meters.generated_tokens,
                draft_tokens=scheduler.counters.proposed,
                accepted_tokens=scheduler.counters.accepted,
                preemptions=scheduler.counters.preemptions,
                forwards=scheduler.counters.forwards,
                finished=dict(meters.finished),
                tokens_per_second=generated,
                prompt_tokens_per_second=computed,
                time_to_first_token=meters.first_token.snapshot(),
                between_tokens=meters.between_tokens.snapshot(),
            )

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for. For tests, while no step runs."""
        with self._lock:
            self._scheduler.pool.check(request.blocks for request in self._scheduler.running)

    def prepare(self) -> None:
        """Make now what first requests would wait for, and the others with them: the tokenizer's tables, the vocabulary of JSON
        schemas."""
        if self.tokenizer is None:
            return
        self.tokenizer.prepare()
        try:
            self._constraint('{"type": "object"}')
        except ValueError as error:
            logger.info("no JSON schemas: %s", error)

    def _constraint(self, schema: str) -> Constraint:
        with self._grammars_lock:
            return self._grammars.constraint(schema)

    @cached_property
    def _grammars(self) -> Grammars:
        assert self.tokenizer is not None
        return Grammars(self.tokenizer, self.runner.vocab_size)

    def _check(self, ids: Sequence[int], params: SamplingParams, n: int) -> None:
        if self.tokenizer is None and (params.stop or params.json_schema is not None):
            raise ValueError("stop strings and json_schema need a tokenizer, and this engine has none")
        if n < 1:
            raise ValueError(f"n is {n}; it has to be at least 1")
        if unknown := [token for token in ids if not 0 <= token < self.runner.vocab_size]:
            raise ValueError(f"the prompt has token {unknown[0]}; this model's tokens are 0 to {self.runner.vocab_size - 1}")
        self._sampler.check(params)

    def _check_open(self, *, changing: bool = False) -> None:
        """Needs the lock. `changing`: what it lacks is about to come."""
        if os.getpid() != self._process:
            raise ClosedError("the engine's thread stayed in the parent when this process was forked; open an engine here")
        if self._state is not _State.SERVING:
            raise ClosedError(f"the engine {self._state.value}{self._why and f': {self._why}'}")
        if self._lacking and not changing:
            raise ClosedError(self._lacking)

    @contextmanager
    def paused(self, *, otherwise: str, then: str = "") -> Iterator[Pause]:
        """Inside, no request has begun and none begins, so that the runner's weights may be changed by who is here.

        [Note: Pause] What had begun before is finished first, so an answer is of one model from its first token to its last; what
        comes meanwhile waits in the queue. Where the weights have changed, what the cache holds is forgotten afterwards. `then`:
        what the engine lacks afterwards; `otherwise`: what it lacks after an exception inside, if they have changed. While it lacks
        something nothing is served, and who waits is told so.
        """
        pause = Pause()
        with self._pause:
            try:
                with self._lock:
                    self._scheduler.pausing = True
                    self._work.notify_all()
                    self._work.wait_for(lambda: self._scheduler.at_rest or not self.healthy)
                    self._check_open(changing=True)
                try:
                    yield pause
                    self._lacking = then
                except BaseException as error:
                    if pause.changed:
                        self._lacking = f"{otherwise}: {_text(error)}"
                    raise
                finally:
                    with self._lock:
                        if self.healthy and pause.changed:
                            self._scheduler.pool.forget()
            finally:
                with self._lock:
                    self._scheduler.pausing = False
                    self._work.notify_all()

    # ---- the loop: all of it in the engine's thread

    def step(self) -> bool:
        """One forward and what follows from it; False if there was nothing to compute."""
        start = time.perf_counter()
        batch = self._schedule()
        if batch is None:
            return False
        if self._compute(batch) is not None:
            self._compute_apart(batch)
        self._tell()
        self._scheduler.pace.add(batch.num_tokens, time.perf_counter() - start)
        return True

    def _run(self) -> None:
        try:
            while self._wait():
                self.step()
            self._shut(Finish.CANCELLED)
        except BaseException as error:  # a mistake of ours; nobody may wait for an answer that never comes
            logger.exception("the engine's loop failed")
            self._shut(Finish.ERROR, f"the engine's loop failed: {_text(error)}")

    def _wait(self) -> bool:
        """Sleep until there is work; False if it is over."""
        with self._lock:
            if self._scheduler.pausing and self._scheduler.at_rest:
                self._work.notify_all()
            self._work.wait_for(lambda: self._has_work or self._cancelled or not self.healthy)
            return self.healthy

    @property
    def _has_work(self) -> bool:
        return bool(self._sequences) and not (self._scheduler.pausing and self._scheduler.at_rest)

    def _schedule(self) -> Batch | None:
        """What the next forward computes, after those who left are gone."""
        with self._lock:
            for handle in self._cancelled:
                self._end(handle.sequences, Finish.CANCELLED)
            self._cancelled.clear()
            if self._lacking and not self._scheduler.pausing:
                self._end(list(self._sequences.values()), Finish.ERROR, self._lacking)
            batch = self._scheduler.schedule()
            assert batch is not None or not self._has_work, f"the scheduler has nothing to compute for {len(self._sequences)}"
        self._tell()
        return batch

    def _compute(self, batch: Batch) -> str | None:
        """The forward and its results; None, or why there are none: then nothing has changed for anybody.

        The error itself is not kept: its traceback would hold the memory that the next forward needs."""
        try:
            logits = self.runner.forward(batch)
            drawn = self._sample(batch, logits)
        except Exception as error:  # whatever the model or the device says: the requests must hear of it
            num = len(batch.chunks)
            logger.error("a forward of %d tokens of %d requests failed: %s", batch.num_tokens, num, _text(error), exc_info=num == 1)
            return _text(error)
        self._commit(batch, drawn)
        return None

    def _compute_apart(self, batch: Batch) -> None:
        """[Note: A forward that fails]

        One request must not end another's, nor change it. Nothing of a failed batch was committed, and to compute positions again
        writes the same keys and values, so the batch is tried again, then its halves, down to single requests and their halves:
        what was too much for the memory at once is computed in parts. A request ends if it fails alone with one token. After
        MAX_FAILURES batches in a row of which no part could be computed, a token that has worked before is computed alone: if it
        works, the requests were at fault, and the engine goes on; if it fails, the fault is the device's (an error of CUDA stays
        for the rest of the process), and the engine is dead."""
        self._failures += 1  # `_commit` sets it to 0
        with self._lock:
            chunks = self._scheduler.chunks_again(batch)
        parts = [chunks] if chunks else []  # the last one is next
        failed: dict[Request, str] = {}
        while parts:
            chunks = parts.pop()
            if chunks[0].request in failed:  # at an earlier position
                continue
            error = self._compute(Batch(chunks, ()))
            if error is not None:
                smaller = _smaller(chunks)
                parts += reversed(smaller)
                if not smaller:
                    failed[chunks[0].request] = error
        with self._lock:
            for request, error in failed.items():
                self._end([self._sequences[request]], Finish.ERROR, f"the forward failed: {error}")
        if self._failures == MAX_FAILURES:
            self._failures = 0
            if (error := self._probe()) is not None:
                why = f"{MAX_FAILURES} forwards in a row failed, and that of a single token after them: {error}"
                self._shut(Finish.ERROR, why)

    def _probe(self) -> str | None:
        """Computes one token that has worked, in a block of its own; None, or why that fails."""
        pool = self._scheduler.pool
        probe = Request(id="probe", tokens=[self._proven], params=SamplingParams())
        with self._lock:
            if not pool.num_free:
                return None  # others hold all blocks: there was a forward that worked
            pool.reserve(probe.blocks, 0, 1)
        try:
            self.runner.forward(Batch((Chunk(probe, 0, 1),), ()))
        except Exception as error:  # as in `_compute`
            return _text(error)
        finally:
            with self._lock:
                pool.free(probe.blocks)
        return None

    def _sample(self, batch: Batch, logits: Any) -> dict[Request, list[Sampled] | str]:
        """What each request that draws from the batch goes on with (guesses that came true and one more), or why it cannot."""
        rows: list[Row] = []
        places: list[int] = []  # their rows of the logits: siblings draw from the same ones
        place = 0
        drawn: dict[Request, list[Sampled] | str] = {}
        for chunk in batch.chunks:
            for request in receivers(chunk):
                constraint = self._sequences[request].constraint  # the scheduler guesses nothing where there is one
                try:
                    mask = None if constraint is None else constraint.mask()
                except Exception as error:  # the grammar's library's: the others go on
                    drawn[request] = _text(error)
                    continue
                rows += (Row(request, chunk.draft[:num], mask) for num in range(chunk.num_rows))
                places += range(place, place + chunk.num_rows)
                drawn[request] = []
            place += chunk.num_rows
        samples: dict[Request, list[Sampled]] = {}
        while rows:
            try:
                one_each = places == list(range(place))
                for row, one in zip(rows, self._sampler.sample(logits if one_each else logits[places], rows), strict=True):
                    samples.setdefault(row.request, []).append(one)
                break
            except SamplingError as error:
                # Behind a wrong guess there may be nothing to draw, which is no fault of the request's: then without guesses.
                again = {row.request for row in rows if row.draft} & set(error.requests)
                drawn |= {request: str(error) for request in error.requests if request not in again}
                kept = [
                    index
                    for index, row in enumerate(rows)
                    if row.request not in error.requests or (row.request in again and not row.draft)
                ]
                rows, places = [rows[index] for index in kept], [places[index] for index in kept]
        for chunk in batch.chunks:
            for request in receivers(chunk):
                if ones := samples.get(request):
                    drawn[request] = ones[: len(accept(chunk.draft[: len(ones) - 1], [one.token for one in ones]))]
        return drawn

    def _commit(self, batch: Batch, drawn: dict[Request, list[Sampled] | str]) -> None:
        """The forward's results become part of the requests; those that end give back their blocks."""
        now = time.perf_counter()
        with self._lock:
            self._failures = 0
            self._proven = batch.chunks[0].request.tokens[batch.chunks[0].start]
            computed = sum(max(0, min(chunk.stop, chunk.request.num_prompt) - chunk.start) for chunk in batch.chunks)
            for request, why in drawn.items():
                if isinstance(why, str) and request in self._sequences:  # not ended with its siblings
                    self._end([self._sequences[request]], Finish.ERROR, why)
            ones = {request: ones for request, ones in drawn.items() if not isinstance(ones, str)}
            results = self._scheduler.commit(batch, {request: [one.token for one in ones[request]] for request in ones})
            for request, new in results:
                sequence = self._sequences[request]
                try:
                    output = sequence.take(ones[request][: len(new)], request.finish)
                except Exception as error:  # of its constraint or its text: the others go on
                    logger.warning("%s ends with an error", request.id, exc_info=True)
                    output = sequence.end(Finish.ERROR, _text(error))
                self._measure(sequence, len(output.token_ids), now)
                if output.finish is not None:
                    self._scheduler.finish(request, output.finish)
                    self._forget(sequence, output.finish)
                self._outbox.append((sequence, output))
            self._meters.step(now, sum(len(new) for _, new in results), computed)

    def _shut(self, finish: Finish, error: str | None = None) -> None:
        """Nothing is taken or computed any more; with an error, the engine is dead."""
        with self._lock:
            if error is not None:
                self._state, self._why = _State.DEAD, error
            self._end(list(self._sequences.values()), finish, error)
        self._tell()

    def _end(self, sequences: Sequence[_Sequence], finish: Finish, error: str | None = None) -> None:
        """End those that are not over, and siblings that cannot begin without them. Needs the lock."""
        for sequence in sequences:
            self._scheduler.finish(sequence.request, finish)
        for handle in dict.fromkeys(sequence.handle for sequence in sequences):
            for sequence in handle.sequences:
                if sequence.request in self._sequences and sequence.request.phase is Phase.FINISHED:
                    self._forget(sequence, finish)
                    self._outbox.append((sequence, sequence.end(finish, error)))

    def _forget(self, sequence: _Sequence, finish: Finish) -> None:
        del self._sequences[sequence.request]
        self._sampler.forget(sequence.request)
        self._meters.finished[finish] += 1

    def _measure(self, sequence: _Sequence, num: int, now: float) -> None:
        """`num` tokens of a sequence came now."""
        if num and sequence.last_token:
            self._meters.between_tokens.add((now - sequence.last_token) / num, num)
        elif num:
            self._meters.first_token.add(now - sequence.submitted)
            if sequence.index == 0:
                self._meters.prompt_tokens += sequence.request.num_prompt
                self._meters.cached_tokens += sequence.request.num_cached
        sequence.last_token = now

    def _tell(self) -> None:
        told, self._outbox = self._outbox, []
        for sequence, output in told:
            try:
                sequence.handle.sink(output)
            except Exception:  # somebody else's code: an event loop that is closed, say
                logger.exception("the sink of %s failed; it is cancelled", sequence.handle.id)
                self.cancel(sequence.handle)


def _smaller(chunks: tuple[Chunk, ...]) -> list[tuple[Chunk, ...]]:
    """What can be computed one after another instead; of one request, without its guesses. Nothing if it is one token."""
    if len(chunks) > 1:
        half = len(chunks) // 2
        return [chunks[:half], chunks[half:]]
    (chunk,) = chunks
    if chunk.draft:
        return [(chunk._replace(draft=()),)]
    middle = (chunk.start + chunk.stop) // 2
    return [(chunk._replace(stop=middle),), (chunk._replace(start=middle),)] if middle > chunk.start else []


def _logprob(sampled: Sampled) -> Logprob:
    assert sampled.logprob is not None
    return Logprob(sampled.token, sampled.logprob, sampled.top)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
