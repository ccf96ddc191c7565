"""Run one HTTP request, from submission to the last byte. Its sequences never outlive the client's connection or the time limit.

All events arrive in a `Mailbox` of the event loop: the engine's thread posts outputs, and a watcher task posts the client's
disconnect.

[Note: Back-pressure] If an engine makes outputs faster than the event loop takes them, its thread waits for the loop, and with it
all its requests: none could be faster. For a client that does not read, nothing more is generated: its request is held
(`scheduler`, [Note: Held requests]) until the client reads on, or ends if it reads nothing for long."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from slipstream.inference.core import NO_TARGET, Finish, QueueFullError, SamplingParams, Target
from slipstream.inference.engine import ClosedError, FailedError
from slipstream.inference.sequence import Output, Usage, nbytes_of
from slipstream.inference.server.answers import joined
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.gate import JSON
from slipstream.inference.server.router import Router, Served

if TYPE_CHECKING:
    from slipstream.inference.server.state import Front, Prepared

logger = logging.getLogger(__name__)

Batches = AsyncIterator[list[tuple[int, Output]]]  # (choice, output): all that arrived since the last batch

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers the stream
]


MAX_AHEAD = 512  # outputs that engines have posted and the event loop has not taken yet
MAX_WAIT = 1.0  # seconds that an engine waits at most for the event loop
SLICE = 64 << 10  # bytes that a client must read within `Unread.time_s`; also the approximate memory of unread outputs per sequence


class ClientLeftError(Exception):
    """The client has disconnected."""


class SlowClientError(RequestError):
    """The client does not read its response."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; the request was cancelled", status=408, code="client_too_slow")


class Unread:
    """The outputs of all requests that the event loop has not taken. Only the event loop calls methods other than `post`."""

    def __init__(self, time_s: float) -> None:
        """`time_s`: the time in which a client must read SLICE bytes."""
        self.time_s = time_s
        self._posted: list[tuple[Mailbox, tuple[int, Output]]] = []  # since the event loop last took them
        self._taken = threading.Condition(threading.Lock())

    def post(self, mailbox: Mailbox, entry: tuple[int, Output], loop: asyncio.AbstractEventLoop) -> None:
        """Called by an engine's thread, which waits if the event loop is behind. The loop takes all outputs at once: if it woke the
        thread for each output, the two would alternate, at a switch interval each. Raises RuntimeError if it is closed."""
        if loop.is_closed():
            raise RuntimeError("the event loop is closed")
        with self._taken:
            self._taken.wait_for(lambda: len(self._posted) < MAX_AHEAD, MAX_WAIT)
            self._posted.append((mailbox, entry))
            is_first = len(self._posted) == 1
        if is_first:
            loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        with self._taken:
            posted, self._posted = self._posted, []
            self._taken.notify_all()
        for mailbox, entry in posted:
            mailbox.arrive(entry)


class Mailbox:
    """The outputs of one request, between engine and client. Only the event loop calls methods other than `post`."""

    def __init__(self, unread: Unread, num: int) -> None:
        """`num`: sequences of the request."""
        self.unread = unread
        self.closed = False
        self.hold: Callable[[bool], object] = bool  # True holds the request, False continues it; set once the request is submitted
        self._limit = num * SLICE
        self._nbytes = 0  # approximate memory of outputs that have arrived and are not taken
        self._arrived: list[tuple[int, Output] | None] = []  # None: the client has disconnected
        self._has_arrived = asyncio.Event()
        self._last = 0  # bytes of the last piece, which the client may not have read
        self._loop = asyncio.get_running_loop()

    def post(self, choice: int, output: Output) -> None:
        """Called by an engine's thread. Raises RuntimeError if the loop is closed; the engine then cancels the request."""
        if not self.closed:
            self.unread.post(self, (choice, output), self._loop)

    def arrive(self, entry: tuple[int, Output]) -> None:
        """Receive a posted output."""
        if self.closed:
            return
        self._nbytes += nbytes_of(entry[1])
        self._arrived.append(entry)
        self._has_arrived.set()
        if self._nbytes > self._limit:
            self.hold(True)

    def leave(self) -> None:
        """Report that the client has disconnected."""
        self._arrived.append(None)
        self._has_arrived.set()

    async def take(self) -> list[tuple[int, Output] | None]:
        """Wait for at least one entry, and return all that have arrived."""
        await self._has_arrived.wait()
        self._has_arrived.clear()
        arrived, self._arrived = self._arrived, []
        if self._nbytes > self._limit:
            self.hold(False)
        self._nbytes = 0
        return arrived

    async def send(self, send: Send, body: bytes, more: bool) -> None:
        """Send events of a stream. Raises SlowClientError."""
        pieces = _pieces(body)
        for place, piece in enumerate(pieces, 1):
            try:
                async with asyncio.timeout(self.unread.time_s * max(1, self._last / SLICE)):
                    await send({"type": "http.response.body", "body": piece, "more_body": more or place < len(pieces)})
            except TimeoutError:
                raise SlowClientError(f"the client has read nothing of the response for {self.unread.time_s:g} s") from None
            self._last = len(piece)

    def close(self) -> None:
        """Accept no further outputs."""
        self.closed = True


def _pieces(body: bytes) -> list[bytes]:
    """Split a body into whole events, so that an error may follow each piece. A piece has at most SLICE bytes, or one event."""
    pieces, start = [], 0
    while len(body) - start > SLICE:
        end = body.rfind(b"\n\n", start, start + SLICE)
        end = body.index(b"\n\n", start) if end < 0 else end
        pieces.append(body[start : end + 2])
        start = end + 2
    return [*pieces, body[start:]] if start < len(body) or not pieces else pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request to the engine. Choice c is sequence c % n of prompt c // n."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    n: int
    priority: int
    salt: str
    target: Target = NO_TARGET
    tenant: str = ""
    adapter: str = ""  # name of the adapter; "": the model alone
    constraint: str = ""  # the request's field that constrains the output
    whole: bool = False  # nothing is sent to the client before the end


class Deadlines:
    """The time limits of requests. `stop` expires them all, so that every client gets a response before the server exits."""

    def __init__(self) -> None:
        self._stopped = False
        self._limits = set[asyncio.Timeout]()

    @asynccontextmanager
    async def within(self, timeout_s: float, late: RequestError) -> AsyncIterator[None]:
        """Raise `late` after `timeout_s`, or a RequestError with status 503 if `stop` is called first."""
        try:
            async with asyncio.timeout(0 if self._stopped else timeout_s) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if self._stopped:
                late = RequestError("the server is shutting down", status=503, code="draining", retry_after=5)
            raise late from None

    def stop(self) -> None:
        self._stopped = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())


class Compiling:
    """Submits requests with a JSON schema or a grammar one at a time, with tenants taking turns: compiling can take long and
    occupies one of the threads that all requests share. A request waits at most `timeout_s` for its turn, and for the compiler."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._turn = asyncio.Lock()  # at most one request per tenant waits for it
        self._tenant_locks = defaultdict[str, asyncio.Lock](asyncio.Lock)  # tenant -> lock among its requests

    async def submit(self, start: Callable[[], asyncio.Future[Any]], tenant: str) -> None:
        """Raises RequestError on a timeout. A submission that was started continues; the next one starts when it has ended."""
        with ExitStack() as turns:
            try:
                async with asyncio.timeout(self.timeout_s):
                    for lock in (self._tenant_locks[tenant], self._turn):
                        await lock.acquire()
                        turns.callback(lock.release)
            except TimeoutError:
                raise RequestError("other JSON schemas are being compiled", status=503, code="busy", retry_after=5) from None
            handle, held = start(), turns.pop_all()
        handle.add_done_callback(lambda _: held.close())
        try:
            async with asyncio.timeout(self.timeout_s):
                await asyncio.shield(handle)
        except TimeoutError:
            message = f"compiling the JSON schema takes longer than {self.timeout_s:g} s; simplify it"
            raise RequestError(message, code="schema_too_complex") from None


async def left(receive: Receive, call: Callable[[], object]) -> None:
    """Wait until the client disconnects, then call `call`."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call()


@asynccontextmanager
async def running(
    engine: Served, work: Work, receive: Receive, compiling: Compiling, mailbox: Mailbox, arrived: float
) -> AsyncIterator[Batches]:
    """Submit `work` and yield its outputs through `mailbox`; on exit, cancel unfinished sequences and close the mailbox. `arrived`:
    perf_counter when the body had arrived. Raises RequestError if the engine rejects the work or fails."""
    loop = asyncio.get_running_loop()
    handles: list[asyncio.Future[Any]] = []
    unfinished = [work.n] * len(work.prompts)

    def submit(prompt: Sequence[int], first: int) -> Any:
        def sink(output: Output) -> None:
            mailbox.post(first + output.index, output)

        more: dict[str, Any] = {"salt": work.salt, "tenant": work.tenant, "adapter": work.adapter, **work.target._asdict()}
        more |= {"whole": work.whole} if isinstance(engine, Router) else {}
        waited = time.perf_counter() - arrived  # seconds for preparation, and for the schema compiler's turn
        return engine.submit(prompt, work.params, n=work.n, priority=work.priority, sink=sink, waited=waited, **more)

    def start(prompt: Sequence[int], first: int) -> asyncio.Future[Any]:
        """Submit in a worker thread. The caller must shield the future, else a cancellation loses the handle."""
        handles.append(loop.run_in_executor(None, submit, prompt, first))
        return handles[-1]

    def cancel(handle: asyncio.Future[Any]) -> None:
        if handle.exception() is None:
            engine.cancel(handle.result())

    def hold(held: bool) -> None:
        for handle in handles:
            if handle.done() and handle.exception() is None:
                engine.hold(handle.result(), held)

    watcher, mailbox.hold = loop.create_task(left(receive, mailbox.leave)), hold
    try:
        try:
            for number, prompt in enumerate(work.prompts):
                if not work.params.constrained:
                    await asyncio.shield(start(prompt, number * work.n))
                else:
                    await compiling.submit(partial(start, prompt, number * work.n), work.tenant)
        except ValueError as error:
            raise _refusal(str(error), work.constraint) from None
        except QueueFullError as error:
            raise RequestError(str(error), status=429, code="queue_full", retry_after=1) from None
        except (FailedError, ClosedError) as error:
            raise RequestError.of(error) from None
        yield _batches(engine, mailbox, unfinished, work.n)
    finally:
        mailbox.close()
        watcher.cancel()
        for handle, count in zip(handles, unfinished, strict=False):  # fewer handles than prompts after a rejected one
            if count and handle.done():
                cancel(handle)
            elif count:
                handle.add_done_callback(cancel)


async def _batches(engine: Served, mailbox: Mailbox, unfinished: list[int], n: int) -> Batches:
    """Yield until all sequences have ended. `unfinished`: sequences per prompt, counted down from `n`."""
    while any(unfinished):
        arrived = await mailbox.take()
        batch = [entry for entry in arrived if entry is not None]
        for choice, output in batch:
            unfinished[choice // n] -= output.finish is not None
            if output.finish is Finish.ERROR:
                raise (RequestError.failed if engine.healthy else RequestError.unavailable)(output.error)
            if output.finish is Finish.CANCELLED:
                raise RequestError("the server cancelled the generation", status=503, code="cancelled", retry_after=5)
        if len(batch) < len(arrived):
            raise ClientLeftError
        yield batch


class Answer(Response):
    """The response. It runs the work itself, so that an error before the first byte still sets the status."""

    def __init__(self, front: Front, engine: Served, prepared: Prepared, arrived: float) -> None:
        """`arrived`: perf_counter when the body had arrived."""
        super().__init__()
        self.front, self.engine, self.work, self.form, self.arrived = front, engine, prepared.work, prepared.form, arrived
        self.write = self._respond if prepared.work.whole else self._stream
        self.headers_sent = front.headers(prepared.ignored)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracked(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        front = self.front
        mailbox = Mailbox(front.unread, self.work.n * len(self.work.prompts))
        try:
            async with front.in_time(), running(self.engine, self.work, receive, front.compiling, mailbox, self.arrived) as batches:
                await self.write(batches, mailbox, tracked)
        except ClientLeftError:
            front.traffic.abandoned += 1
        except SlowClientError as error:
            front.traffic.abandoned += 1
            logger.warning("%s", error)
            await self._send_error(error, send, front.unread.time_s)
        except RequestError as error:
            if not started:
                raise
            await self._send_error(error, send)
        except Exception:
            if not started:
                raise
            logger.exception("a stream failed")
            await self._send_error(RequestError("internal error; see the server's log", status=500), send)

    async def _stream(self, batches: Batches, mailbox: Mailbox, send: Send) -> None:
        usages: dict[int, Usage] = {}
        await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, *self.headers_sent]})
        first = self.form.begin()
        async for batch in batches:
            usages |= _usages(batch)
            if body := first + b"".join(self.form.events(part) for part in joined(batch)):
                await mailbox.send(send, body, more=True)
            first = b""
        await mailbox.send(send, first + self.form.end(usages), more=False)

    async def _respond(self, batches: Batches, mailbox: Mailbox, send: Send) -> None:
        outputs = [entry async for batch in batches for entry in batch]
        response = JSON(self.form.body(sorted(joined(outputs), key=lambda one: one.index), _usages(outputs)))
        headers = [*response.raw_headers, *self.headers_sent]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    async def _send_error(self, error: RequestError, send: Send, patience_s: float = 1.0) -> None:
        """Send the error as an event of the stream, whose status is sent already. Waits `patience_s` for the client to read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await send({"type": "http.response.body", "body": self.form.error(error)})


def _refusal(message: str, constraint: str) -> RequestError:
    """An engine's rejection as an error of the field that is its first word (`constraint`, if that constrains the output) or the
    prompt."""
    first, _, rest = message.partition(" ")
    if first in ("json_schema", "grammar") and constraint:
        return RequestError(f"{constraint} {rest}", param=constraint)
    known = first in SamplingParams.__dataclass_fields__ or first == "n"
    return RequestError(message, param=first if known else "prompt" if "prompt" in message else None)


def _usages(batch: list[tuple[int, Output]]) -> dict[int, Usage]:
    return {choice: output.usage for choice, output in batch if output.usage is not None}
