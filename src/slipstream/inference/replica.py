"""An engine in its own process, for an HTTP server (`server.router`), connected by one socket with `wire`'s messages.

    python -m slipstream.inference.replica DESCRIPTOR       # of a connected socket; `server.sources` starts it

The first message decides what the process becomes: a replica (`open`), or the zygote of replicas (`load`, [Note: Zygote]).

The process ignores SIGINT and SIGTERM, which may be sent to all processes of a service, because the server drains first. It exits
when the other end closes the connection, also by being killed, and with status 1 when its engine is dead.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import secrets
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from slipstream.inference import wire
from slipstream.inference.core import Finish, SamplingParams
from slipstream.inference.embedding import EmbeddingEngine
from slipstream.inference.engine import Engine
from slipstream.inference.kv_cache import reserved_nbytes
from slipstream.inference.sequence import Handle, Output

if TYPE_CHECKING:
    from slipstream.inference.assembly import Assembled

T = TypeVar("T")

SLOW_CALLS = 256  # threads for calls that may take long: schemas, adapters, vectors (`server.prepare`), whose texts share forwards
SWITCH_INTERVAL = 0.001  # seconds, as in `server.run`
LOOK = 0.1  # seconds between checks of the engine's health


def facts_of(
    engine: Engine | EmbeddingEngine, description: str, dtype: str = "", weights: str = "", shared: int = 0
) -> dict[str, Any]:
    """What the server needs to know about the engine. `weights`: `source.weights_digest`. `shared`: bytes of this process's memory
    that it shares with other replicas."""
    return {
        "description": description,
        "version": wire.VERSION,
        "start": secrets.token_hex(8),  # unique per start
        "dtype": dtype,
        "weights": weights,
        "tokenizer": "" if engine.tokenizer is None else engine.tokenizer.digest(),
        "model_name": engine.model_name,
        "max_context": engine.max_context,
        "sampling": dict(engine.sampling),
        "adapters": list(engine.adapters),
        "num_blocks": engine.runner.num_blocks,
        "block_size": 1 if isinstance(engine, EmbeddingEngine) else engine.runner.block_size,
        "nbytes": max(0, _memory() - shared),
        "shared": shared,
        "zygote": os.getppid() if shared else 0,  # the process that they are shared with
        "normalize": engine.pooling.normalize if isinstance(engine, EmbeddingEngine) else None,  # None: it does not embed
        "scores": isinstance(engine, EmbeddingEngine) and engine.classifier is not None,
    }


def _memory() -> int:
    """Bytes that are freed when this process ends: its GPU's, or its own pages and all caches."""
    if torch.cuda.is_initialized():
        return sum(torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count()))
    return _resident() + reserved_nbytes()


def _resident() -> int:
    """Bytes of pages that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Session:
    """The requests of one connection to the engine."""

    def __init__(self, engine: Engine | EmbeddingEngine, link: wire.Link) -> None:
        self.engine, self.link = engine, link
        self._handles: dict[int, Handle] = {}  # unfinished requests, by the server's numbers
        self._held: set[int] = set()  # held by the server, because clients do not read
        self._unanswered: set[int] = set()  # messages that a reply is due to

    def run(self) -> None:
        """Serve until the other end closes the connection, then cancel unfinished requests."""
        with ThreadPoolExecutor(SLOW_CALLS, "slipstream-call") as slow:
            for kind, number, *rest in self.link.messages:
                if kind in ("submit", "call"):
                    self._unanswered.add(number)
                match kind:
                    case "cancel":
                        self._held.discard(number)
                        if (handle := self._handles.pop(number, None)) is not None:
                            self.engine.cancel(handle)
                    case "hold":
                        if (handle := self._handles.get(number)) is not None:
                            (self._held.add if rest[0] else self._held.discard)(number)
                            self.engine.hold(handle, *rest)
                    case "submit":
                        prompt, params, more = rest
                        takes_long = not params.keys().isdisjoint(("json_schema", "grammar", "bad_words"))
                        submit = partial(self._answer, number, self._submit, number, prompt, params, more)
                        slow.submit(submit) if takes_long else submit()
                    case "call":
                        name, arguments = rest
                        call = partial(self._answer, number, _CALLS[name], self.engine, *arguments)
                        call() if name == "stats" else slow.submit(call)
        for handle in list(self._handles.values()):  # including submissions that ended meanwhile
            self.engine.cancel(handle)

    def _resume(self, number: int) -> None:
        """Continue a request once the server has read the pending messages."""
        if (handle := self._handles.get(number)) is not None and number not in self._held:
            self.engine.hold(handle, False)

    @property
    def idle(self) -> bool:
        """Whether no request is unfinished and no call is being computed."""
        return not self._handles and not self._unanswered

    def _answer(self, number: int, function: Any, *arguments: Any) -> None:
        try:
            self.link.send("done", number, function(*arguments))
        except Exception as error:  # the server raises it at the call
            if self.engine.healthy:  # else as in `sink`
                self.link.send("failed", number, *wire.packed_error(error))
        finally:
            self._unanswered.discard(number)

    def _submit(self, number: int, prompt: Sequence[int], params: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        unfinished = more["n"]

        def sink(output: Output) -> None:
            nonlocal unfinished
            if output.finish in (Finish.CANCELLED, Finish.ERROR) and not self.engine.healthy:
                return  # the connection ends with the engine, and the server asks another engine
            self.link.send("output", number, output)
            if output.finish is not None:
                unfinished -= 1
                if not unfinished:
                    self._handles.pop(number, None)
                    self._held.discard(number)
            if self.link.full and (handle := self._handles.get(number)) is not None:  # if not, the next output holds it
                self.engine.hold(handle, True)
                self.link.when_room(partial(self._resume, number))

        self._handles[number] = self.engine.submit(prompt, SamplingParams(**params), sink=sink, **more)
        if not unfinished:  # the sink ran before submit returned
            self._handles.pop(number, None)
            self._held.discard(number)


def _embed(engine: EmbeddingEngine, texts: Sequence[str | Sequence[int]], truncate: int) -> dict[str, Any]:
    found = engine.embed(texts, truncate=truncate)
    values = base64.b64encode(found.vectors.numpy().astype("<f4").tobytes()).decode()
    return {"values": values, "shape": list(found.vectors.shape), "num_tokens": found.num_tokens}


def _score(engine: EmbeddingEngine, pairs: Sequence[tuple[str, str]], truncate: int) -> Sequence[Any]:
    return engine.score([(first, second) for first, second in pairs], truncate=truncate)


_CALLS: Mapping[str, Any] = {  # (engine, *arguments) -> a result that JSON can represent
    "stats": lambda engine: wire.packed_stats(engine.stats()),
    "load_adapter": lambda engine, name, folder, replace: engine.load_adapter(name, folder, replace=replace),
    "unload_adapter": lambda engine, name: engine.unload_adapter(name),
    "embed": _embed,
    "score": _score,
}


def main(descriptor: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    link = wire.Link(connection)
    # import everything now: a spare process waits for its model
    from slipstream.inference.initialize import assemble_replica
    from slipstream.inference.source import weights_digest

    if (message := next(link.messages, None)) is None:  # the server has ended
        return 0
    kind, model, options, replicas, cores = message
    _run_on(cores)
    try:
        assembled, digest = _in_thread(connection, lambda: (assemble_replica(model, options, replicas), weights_digest(model)))
    except (TypeError, ValueError) as error:  # errors in the user's options, raised as with one process
        link.send("refused", str(error))
        link.close()
        return 2
    if kind == "open":
        return _serve(link, assembled, digest)
    return _fork_on_demand(connection, assembled, digest)


def settle() -> None:
    """Exclude loaded objects from garbage collection in a process that serves from now on. A collection took 0.3 s in a server, in
    which no request went on. It also writes to every object, so that a fork would copy its page."""
    gc.collect()
    gc.freeze()


def _run_on(cores: Sequence[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))  # the default; `assemble_replica` applies the option


def _in_thread(connection: socket.socket, load: Callable[[], T]) -> T:
    """Run `load` in a thread that then ends, and torch's threads with it. If the server closes the connection meanwhile, the
    process ends: nobody needs the result."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(load())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="slipstream-load")
    thread.start()
    while thread.is_alive():
        if wire.is_readable(connection.fileno(), 0) and not connection.recv(1, socket.MSG_PEEK):
            os._exit(0)
        thread.join(LOOK)
    return future.result()


def _serve(link: wire.Link, assembled: Assembled, digest: str, shared: int = 0) -> int:
    """Start the engine and serve the connection until it ends. `shared`: as in `facts_of`. Returns the exit status."""
    engine = assembled.engine
    engine.start()
    engine.prepare()
    settle()
    sys.setswitchinterval(SWITCH_INTERVAL)
    link.live()
    link.send("ready", facts_of(engine, assembled.description, assembled.dtype, digest, shared))
    session = threading.Thread(target=Session(engine, link).run, name="slipstream-session", daemon=True)
    session.start()
    while engine.healthy and session.is_alive():
        session.join(LOOK)
    if not session.is_alive():
        return 0
    link.close()
    return 1


def _fork_on_demand(connection: socket.socket, assembled: Assembled, digest: str) -> int:
    """[Note: Zygote] Serve the server's requests for replicas. Each is a fork of this process, which has loaded the model and runs
    nothing. So replicas share the pages of all weights, which none writes, and start immediately. At a fork, this process has no
    threads of its own: those that loaded have ended, and native teams start in the process that uses them.

        to the zygote                              from it
                                                   loaded
        fork, cores     + a socket, stderr         forked, pid
        ended, pid                                 status, number (None: it runs)
    """
    assembled.engine.prepare()
    settle()
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads of numpy's BLAS, which end before a fork
    connection.sendall(wire.frame_of([["loaded"]]))
    while True:
        # Not by `Link`: a buffered reader would lose the descriptors. The server waits for each answer before it asks again.
        frame, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        if not frame:  # the server has ended, or closed the model
            return 0
        ((kind, argument),) = json.loads(frame[4:])
        if kind == "ended":
            pid, status = os.waitpid(argument, os.WNOHANG)
            answer = ["status", os.waitstatus_to_exitcode(status) if pid else None]
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            if not (pid := os.fork()):
                os.close(connection.detach())  # `Link`'s reader would keep it open, and the zygote's end would go unnoticed
                os._exit(_replica(descriptors, argument, assembled, digest))
            for descriptor in descriptors:
                os.close(descriptor)
            answer = ["forked", pid]
        connection.sendall(wire.frame_of([answer]))


def _replica(descriptors: Sequence[int], cores: Sequence[int], assembled: Assembled, digest: str) -> int:
    """Serve in a forked process. Returns its exit status."""
    served, stderr_fd = descriptors
    for stream in (1, 2):
        os.dup2(stderr_fd, stream)
    os.close(stderr_fd)
    shared = _resident()
    try:
        _run_on(cores)
        return _serve(wire.Link(socket.socket(fileno=served)), assembled, digest, shared)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)  # a forward's threads may be running, and nothing is left to save
