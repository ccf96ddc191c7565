"""An engine in a process of its own, for an HTTP server (`server.router`) that it serves over one socket, in `wire`'s messages.

    python -m slipstream.inference.replica DESCRIPTOR       # of a connected socket; `server.process` starts it

The first message says what the process becomes: a replica (`open`), or the zygote of replicas (`load`, [Note: Zygote]).

The process ignores SIGINT and SIGTERM, which may be sent to all processes of a service: the server drains first. It ends when the
other end closes the connection, also when that process was killed, and with status 1 when its engine is dead.
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
from slipstream.inference.engine import Engine, Handle, Output
from slipstream.inference.kv_cache import reserved_nbytes

if TYPE_CHECKING:
    from slipstream.inference.assembly import Assembled

T = TypeVar("T")

SLOW_CALLS = 256  # threads for what may take long: schemas, adapters, vectors (`server.prepare`), whose texts share forwards
SWITCH_INTERVAL = 0.001  # seconds, as `server.run`'s
LOOK = 0.1  # seconds between looks at the engine's health


def facts_of(
    engine: Engine | EmbeddingEngine, description: str, dtype: str = "", weights: str = "", shared: int = 0
) -> dict[str, Any]:
    """What the server has to know of the engine. `weights`: `source.weights_digest`; `shared`: bytes of this process's memory
    that are other replicas', too."""
    return {
        "description": description,
        "version": wire.VERSION,
        "start": secrets.token_hex(8),  # no other one has it
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
        "zygote": os.getppid() if shared else 0,  # whose they are
        "normalize": engine.pooling.normalize if isinstance(engine, EmbeddingEngine) else None,  # None: it does not embed
        "scores": isinstance(engine, EmbeddingEngine) and engine.classifier is not None,
    }


def _memory() -> int:
    """Bytes that end with this process: of its GPU, else its own pages and all of the caches."""
    if torch.cuda.is_initialized():
        return sum(torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count()))
    return _resident() + reserved_nbytes()


def _resident() -> int:
    """Bytes of the pages that are of no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Session:
    """What one connection has asked of the engine."""

    def __init__(self, engine: Engine | EmbeddingEngine, link: wire.Link) -> None:
        self.engine, self.link = engine, link
        self._handles: dict[int, Handle] = {}  # unfinished ones, by the server's numbers
        self._held: set[int] = set()  # by the server, whose clients do not read

    def run(self) -> None:
        """Serve until the other end closes the connection; what is unfinished then is cancelled."""
        with ThreadPoolExecutor(SLOW_CALLS, "slipstream-call") as slow:
            for kind, number, *rest in self.link.messages:
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
                        constrained = "json_schema" in params or "grammar" in params
                        submit = partial(self._answer, number, self._submit, number, prompt, params, more)
                        slow.submit(submit) if constrained else submit()
                    case "call":
                        name, arguments = rest
                        call = partial(self._answer, number, _CALLS[name], self.engine, *arguments)
                        call() if name == "stats" else slow.submit(call)
        for handle in list(self._handles.values()):  # also of submissions that have ended meanwhile
            self.engine.cancel(handle)

    def _resume(self, number: int) -> None:
        """The server has taken what was sent."""
        if (handle := self._handles.get(number)) is not None and number not in self._held:
            self.engine.hold(handle, False)

    @property
    def idle(self) -> bool:
        """No request is unfinished."""
        return not self._handles

    def _answer(self, number: int, function: Any, *arguments: Any) -> None:
        try:
            self.link.send("done", number, function(*arguments))
        except Exception as error:  # the server raises it where the call was made
            self.link.send("failed", number, *wire.packed_error(error))

    def _submit(self, number: int, prompt: Sequence[int], params: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        unfinished = more["n"]

        def sink(output: Output) -> None:
            nonlocal unfinished
            if output.finish in (Finish.CANCELLED, Finish.ERROR) and not self.engine.healthy:
                return  # the connection ends with the engine, and the server asks another one
            self.link.send("output", number, output)
            if output.finish is not None:
                unfinished -= 1
                if not unfinished:
                    self._handles.pop(number, None)
                    self._held.discard(number)
            if self.link.full and (handle := self._handles.get(number)) is not None:  # or the next output holds it
                self.engine.hold(handle, True)
                self.link.when_room(partial(self._resume, number))

        self._handles[number] = self.engine.submit(prompt, SamplingParams(**params), sink=sink, **more)
        if not unfinished:  # the sink was first
            self._handles.pop(number, None)
            self._held.discard(number)


def _embed(engine: EmbeddingEngine, texts: Sequence[str | Sequence[int]], truncate: bool) -> dict[str, Any]:
    found = engine.embed(texts, truncate=truncate)
    values = base64.b64encode(found.vectors.numpy().astype("<f4").tobytes()).decode()
    return {"values": values, "shape": list(found.vectors.shape), "num_tokens": found.num_tokens}


def _score(engine: EmbeddingEngine, pairs: Sequence[tuple[str, str]], truncate: bool) -> Sequence[Any]:
    return engine.score([(first, second) for first, second in pairs], truncate=truncate)


_CALLS: Mapping[str, Any] = {  # (engine, *arguments) -> what JSON can say
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
    # A spare process has imported all before it knows its model.
    from slipstream.inference.initialize import assemble_replica
    from slipstream.inference.source import weights_digest

    if (message := next(link.messages, None)) is None:  # the server has ended
        return 0
    kind, model, options, replicas, cores = message
    _run_on(cores)
    try:
        assembled, digest = _in_thread(connection, lambda: (assemble_replica(model, options, replicas), weights_digest(model)))
    except (TypeError, ValueError) as error:  # of the user's options, as in one process
        link.send("refused", str(error))
        link.close()
        return 2
    if kind == "open":
        return _serve(link, assembled, digest)
    return _fork_on_demand(connection, assembled, digest)


def settle() -> None:
    """Of a process that serves from now on: its collector need not look at what is loaded. Looking at it took 0.3 s in a server, in
    which no request went on; and it writes to every object, so a fork would copy its page."""
    gc.collect()
    gc.freeze()


def _run_on(cores: Sequence[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))  # its default; `assemble_replica` sets the option's


def _in_thread(connection: socket.socket, load: Callable[[], T]) -> T:
    """The result of `load`, in a thread that then ends, and torch's threads with it. The process ends if the server closes the
    connection meanwhile, which nobody reads."""
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
    """Start the engine and serve the connection to its end. `shared`: as for `facts_of`. Returns the exit status."""
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
    """[Note: Zygote] Serve the server's requests for replicas: each is a fork of this process, which has loaded the model and runs
    nothing. Replicas so share the pages of all weights, which none writes, and start in no time. No thread of ours lives when it
    forks: those that loaded have ended, and native teams start in the process that uses them.

        to the zygote                              from it
                                                   loaded
        fork, cores     + a socket, stderr         forked, pid
        ended, pid                                 status, number (None: it runs)
    """
    assembled.engine.prepare()
    settle()
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of the threads of numpy's BLAS: it ends them before a fork
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
                os.close(connection.detach())  # `Link`'s reader would keep it open, and the end of the zygote unnoticed
                os._exit(_replica(descriptors, argument, assembled, digest))
            for descriptor in descriptors:
                os.close(descriptor)
            answer = ["forked", pid]
        connection.sendall(wire.frame_of([answer]))


def _replica(descriptors: Sequence[int], cores: Sequence[int], assembled: Assembled, digest: str) -> int:
    """A fork serves. Returns its exit status."""
    served, says = descriptors
    for stream in (1, 2):
        os.dup2(says, stream)
    os.close(says)
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
    os._exit(status)  # threads of a forward may be running, and nothing is left to save
