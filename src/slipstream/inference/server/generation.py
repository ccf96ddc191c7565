"""Run one HTTP request, from submission to the last byte. Its sequences never outlive the client's connection or the time limit.

All events arrive in one queue of the event loop: the engine's thread posts outputs, a watcher task posts the client's disconnect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from slipstream.inference.core import Finish, QueueFullError, SamplingParams
from slipstream.inference.engine import Output, Usage
from slipstream.inference.server.answers import Format, Joined, join
from slipstream.inference.server.errors import RequestError
from slipstream.inference.server.gate import JSON
from slipstream.inference.server.metrics import Traffic
from slipstream.inference.server.router import Served

logger = logging.getLogger(__name__)

Batches = AsyncIterator[list[tuple[int, Output]]]  # (choice, output): all that arrived since the last batch

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers the stream
]


class ClientLeftError(Exception):
    """The client has disconnected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request to the engine. Choice c is sequence c % n of prompt c // n."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    n: int
    priority: int
    salt: str
    tenant: str = ""
    adapter: str = ""  # its name; "": the model alone


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
    """Submits requests with a JSON schema or a grammar one at a time: the engine compiles it, which can take long and occupies one
    of the threads that all requests share. A request waits at most `timeout_s` for its turn, and as long for the compiler."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._turn = asyncio.Lock()

    async def submit(self, start: Callable[[], asyncio.Future[Any]]) -> None:
        """Raises RequestError on a timeout. The submission that was started continues; the next one starts when it has ended."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise RequestError("other JSON schemas are being compiled", status=503, code="busy", retry_after=5) from None
        handle = start()
        handle.add_done_callback(lambda _: self._turn.release())
        try:
            async with asyncio.timeout(self.timeout_s):
                await asyncio.shield(handle)
        except TimeoutError:
            message = f"compiling the JSON schema takes longer than {self.timeout_s:g} s; simplify it"
            raise RequestError(message, code="schema_too_complex") from None


@asynccontextmanager
async def running(engine: Served, work: Work, receive: Receive, compiling: Compiling) -> AsyncIterator[Batches]:
    """Submit `work` and yield its outputs; on exit, cancel the unfinished sequences. Raises RequestError if the engine rejects it
    or fails."""
    loop = asyncio.get_running_loop()
    mailbox: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()  # None: the client has disconnected
    handles: list[asyncio.Future[Any]] = []
    unfinished = [work.n] * len(work.prompts)
    over = False

    def submit(prompt: Sequence[int], first: int) -> Any:
        def sink(output: Output) -> None:  # raises if the loop is closed; the engine then cancels the request
            if not over:
                loop.call_soon_threadsafe(mailbox.put_nowait, (first + output.index, output))

        whose = {"salt": work.salt, "tenant": work.tenant, "adapter": work.adapter}
        return engine.submit(prompt, work.params, n=work.n, priority=work.priority, sink=sink, **whose)

    def start(prompt: Sequence[int], first: int) -> asyncio.Future[Any]:
        """Submit in a worker thread. The caller must shield the future, else a cancellation loses the handle."""
        handles.append(loop.run_in_executor(None, submit, prompt, first))
        return handles[-1]

    def cancel(handle: asyncio.Future[Any]) -> None:
        if handle.exception() is None:
            engine.cancel(handle.result())

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        mailbox.put_nowait(None)

    async def batches() -> Batches:
        while any(unfinished):
            arrived = [await mailbox.get()]
            while not mailbox.empty():
                arrived.append(mailbox.get_nowait())
            batch = [entry for entry in arrived if entry is not None]
            for choice, output in batch:
                unfinished[choice // work.n] -= output.finish is not None
                if output.finish is Finish.ERROR:
                    raise RequestError(f"the generation failed: {output.error}", status=500, code="generation_failed")
                if output.finish is Finish.CANCELLED:
                    raise RequestError("the server cancelled the generation", status=503, code="cancelled", retry_after=5)
            if len(batch) < len(arrived):
                raise ClientLeftError
            yield batch

    watcher = loop.create_task(watch())
    try:
        try:
            for number, prompt in enumerate(work.prompts):
                if not work.params.constrained:
                    await asyncio.shield(start(prompt, number * work.n))
                else:
                    await compiling.submit(partial(start, prompt, number * work.n))
        except ValueError as error:
            raise RequestError(str(error), param=_param(str(error))) from None
        except QueueFullError as error:
            raise RequestError(str(error), status=429, code="queue_full", retry_after=1) from None
        except RuntimeError as error:
            raise RequestError(str(error), status=503, code="unavailable", retry_after=5) from None
        yield batches()
    finally:
        over = True
        watcher.cancel()
        for handle, count in zip(handles, unfinished, strict=False):  # fewer handles than prompts after a rejected one
            if count and handle.done():
                cancel(handle)
            elif count:
                handle.add_done_callback(cancel)


class Answer(Response):
    """The response. It runs the work itself, so that an error before the first byte still sets the status."""

    def __init__(
        self,
        engine: Served,
        work: Work,
        form: Format,
        *,
        traffic: Traffic,
        compiling: Compiling,
        deadlines: Deadlines,
        stream: bool,
        include_usage: bool,
        timeout_s: float,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        super().__init__()
        self.headers_sent = headers
        self.engine = engine
        self.work = work
        self.form = form
        self.traffic = traffic
        self.compiling = compiling
        self.deadlines = deadlines
        self.write = self._stream if stream else self._respond
        self.include_usage = include_usage
        self.timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracked(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            late = RequestError(f"the request did not finish within {self.timeout_s:g} s", status=504, code="timeout")
            async with (
                self.deadlines.within(self.timeout_s, late),
                running(self.engine, self.work, receive, self.compiling) as batches,
            ):
                await self.write(batches, tracked)
        except ClientLeftError:
            self.traffic.abandoned += 1
        except RequestError as error:
            if not started:
                raise
            await self._send_error(error, send)
        except Exception:
            if not started:
                raise
            logger.exception("a stream failed")
            await self._send_error(RequestError("internal error; see the server's log", status=500), send)

    async def _stream(self, batches: Batches, send: Send) -> None:
        usages: dict[int, Usage] = {}
        await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, *self.headers_sent]})
        first = self.form.begin(self.include_usage)
        async for batch in batches:
            usages |= _usages(batch)
            if body := first + b"".join(self.form.events(part) for part in _joined(batch)):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            first = b""
        await send({"type": "http.response.body", "body": first + self.form.end(usages)})

    async def _respond(self, batches: Batches, send: Send) -> None:
        outputs = [entry async for batch in batches for entry in batch]
        response = JSON(self.form.body(sorted(_joined(outputs), key=lambda joined: joined.index), _usages(outputs)))
        headers = [*response.raw_headers, *self.headers_sent]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    async def _send_error(self, error: RequestError, send: Send) -> None:
        """Send the error as an event of the stream, whose status is already sent. Waits at most 1 s for the client to read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await send({"type": "http.response.body", "body": self.form.error(error)})


def _param(message: str) -> str | None:
    """The field that an engine's refusal is about: its first word, or the prompt."""
    first, *_ = message.split()
    return first if first in SamplingParams.__dataclass_fields__ or first == "n" else "prompt" if "prompt" in message else None


def _usages(batch: list[tuple[int, Output]]) -> dict[int, Usage]:
    return {choice: output.usage for choice, output in batch if output.usage is not None}


def _joined(batch: list[tuple[int, Output]]) -> list[Joined]:
    """Join the outputs of each choice, in the order of the choices' first outputs."""
    outputs: dict[int, list[Output]] = {}
    for choice, output in batch:
        outputs.setdefault(choice, []).append(output)
    return [join(choice, parts) for choice, parts in outputs.items()]
