"""Several engines as one: `Router` has the parts of an engine that the HTTP server needs, and keeps the engines' processes alive.

A request goes to the engine with the least work before it (`ranked`). If an engine ends, requests without a delivered output go to
another engine as new ones; streams that have begun end with an error. Each engine has a thread that starts it, or connects to it on
another host, reads from it, and repeats this when it ends. The submitting thread sends a request.

[Note: Trials] One of the requests that an engine had when it ended may be the cause. If there was only one, and no network between,
it ends with an error. If there were several, they are tried one by one: another engine gets the next once it has made a token of
the previous one, or the vectors or scores of a call. So few requests are in two engines that end, and these end with an error.
"""

from __future__ import annotations

import base64
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from slipstream.inference import stats, wire
from slipstream.inference.core import Finish, QueueFullError, SamplingParams, target_of
from slipstream.inference.embedding import Embedded, EmbeddingEngine, Pooling, Scored
from slipstream.inference.engine import ClosedError, Engine, FailedError
from slipstream.inference.sequence import Output, Sink
from slipstream.inference.server.remote import MOVES, LostError, RemoteEngine, ReplicaState, Ticket
from slipstream.inference.server.sources import Connected, EngineProcess, ReplicaError, Source, Spare, Zygote
from slipstream.inference.source import open_tokenizer
from slipstream.inference.stats import Stats
from slipstream.inference.text import Tokenizer

logger = logging.getLogger(__name__)

SETTLED = 30.0  # seconds; an engine's end after this time is not a consequence of its start
PAUSE = 0.25  # seconds before a second start in a row; doubled for each further one
ON_DISK = ("expert_cache_bytes", "weights_bytes", "weights_folder")  # a fork cannot use the files and threads of its parent
CAUSE = "the request may be the cause, so it is not tried again"
ONE_TOKEN = SamplingParams(max_tokens=1)
AWAY = "no engine's process is ready; they start again; try again later"
AGREED = {  # facts that are equal for all engines -> the remedy
    "version": "install the same version of Slipstream",
    "model_name": "serve the same model, or give it this --model-name",
    "weights": "their files of the model differ; copy the same ones to both",
    "tokenizer": "their tokens differ; give both the same tokenizer",
    "dtype": "give both the same --dtype",
    "max_context": "give both the same --max-context, and a KV cache that has room for it",
    "adapters": "give both the same --lora-modules",
    "normalize": "serve the same model",
    "scores": "serve the same model",
    "block_size": "serve the same model",
}
LOOK = 0.05  # seconds between checks whether an engine has restarted
STATS_WAIT = 1.0  # seconds for an engine to report its figures; afterwards the last known ones are used


class Backlog(NamedTuple):
    """The work of one engine, from the point of view of one request."""

    outstanding: int  # tokens computed before the request's last one
    matched: int  # tokens of the prompt that its prefix cache has, as far as known
    all: int = 0  # outstanding tokens


def backlog(outstanding: Counter[str], tenant: str, size: int, matched: int) -> Backlog:
    """The backlog for a request of `size` tokens. [Note: Shares over engines] An engine shares its time evenly between the tenants
    that have requests (`scheduler`, [Note: Fair shares]). So until the tenant's last token is computed there, every other tenant
    gets as many tokens, or all of its own. By this measure each tenant's requests are spread over all engines, and even shares of
    each engine are even shares of all. If a prefix keeps a tenant with one engine, its requests are not spread; then the tokens
    that others got elsewhere in the meantime count there, too (`Request.elsewhere`)."""
    own = outstanding[tenant] + size
    others = sum(min(tokens, own) for other, tokens in outstanding.items() if other != tenant)
    return Backlog(own + others, matched, outstanding.total())


def ranked(loads: Sequence[Backlog]) -> list[int]:
    """The engines, best first: the one with the longest known prefix, unless another has so much less work that computing the
    prefix there is sooner; then the one with the fewest outstanding tokens."""
    return sorted(range(len(loads)), key=lambda i: (loads[i].outstanding - loads[i].matched, loads[i].outstanding, loads[i].all))


def prefix_keys(tokens: Sequence[int], block_size: int, salt: str, adapter: str) -> list[int]:
    """A number for each prefix of full blocks that the cache could have, the shortest first. Equal numbers almost surely mean equal
    prefixes of the same salt and adapter; if not, a request merely goes to another engine."""
    keys, key = [], hash((salt, adapter))
    for begin in range(0, len(tokens) - block_size, block_size):
        keys.append(key := hash((key, tuple(tokens[begin : begin + block_size]))))
    return keys


class Router:
    """Takes the place of an engine in the server, once `open` has returned."""

    def __init__(self, sources: Sequence[Source], tokenizer: Tokenizer | None, facts: Mapping[str, Any] | None = None) -> None:
        """`facts`: facts that the engines must have."""
        self.tokenizer, self.why = tokenizer, ""  # why it has failed
        self.engines = [RemoteEngine(source.name, source.address) for source in sources]
        self._agreed = {name: ("this server", value) for name, value in (facts or {}).items()}  # who said it first, and what
        for engine in self.engines:
            engine.others = [one for one in self.engines if one is not engine]
            engine.trial_ended = lambda: threading.Thread(target=self._house, daemon=True).start()  # its reader reads the replies
        self._lock = threading.Lock()  # for the choice of an engine: known prefixes and outstanding tokens
        self._housings = 0  # calls of `_house`
        self._loading = threading.Lock()  # for the adapters, which an engine gets before it is ready
        self._added: dict[str, str] = {}  # adapters that were loaded at run time: name -> folder
        self._removed: set[str] = set()  # adapters that were unloaded
        self._homeless: list[Ticket] = []  # lost by one engine while no other is ready
        self._closed = threading.Event()
        self._sources = sources
        self._first = [Future[None]() for _ in sources]
        self._threads = [
            threading.Thread(target=self._keep, args=each, name=f"slipstream-{each[0].name}", daemon=True)
            for each in zip(self.engines, sources, self._first, strict=True)
        ]

    def open(self) -> Router:
        """Start all engines, wait until they are ready, and return self. Engines on other hosts may come later, but one engine must
        be there. Raises ValueError for options that they reject or engines of other models, ReplicaError if one cannot start, and
        ClosedError if another thread closes it."""
        try:
            for thread in self._threads:
                thread.start()
            for one in self._first:
                one.result()
            self.wait()
        except BaseException:
            self.close()
            raise
        facts = next(engine.facts for engine in self.engines if engine.starts)
        self.model_name: str = facts["model_name"]
        self.max_context: int = facts["max_context"]
        self.sampling: Mapping[str, Any] = facts["sampling"]
        self.description: str = facts["description"]
        self.block_size: int = facts["block_size"]
        self.adapters: tuple[str, ...] = tuple(facts["adapters"])
        self.pooling = Pooling(normalize=bool(facts["normalize"]))
        self.embeds, self._scores = facts["normalize"] is not None, bool(facts["scores"])
        return self

    @classmethod
    def local(
        cls,
        model: str,
        options: Mapping[str, Any],
        cores: Sequence[Sequence[int]],
        spare: Spare,
        name: str = "replica",
        others: Sequence[Source] = (),
    ) -> Router:
        """Engines in processes of this machine, one for each of `cores`, on which it runs (empty: on all), and `others`. `options`:
        of `init_inference`; `spare`: of the server; `name`: of the processes, in the log. On CUDA, they take the GPUs in turn.
        Raises ValueError for a model without a tokenizer."""
        gpus = torch.cuda.device_count() if options.get("device") in (None, "cuda") else 0
        on_cpu = not gpus and options.get("device") in (None, "cpu")  # CUDA does not work in a fork
        if (waiting := options.get("max_waiting")) is not None and cores:
            options = {**options, "max_waiting": max(1, waiting // len(cores))}  # requests to a full engine go to others
        forks = on_cpu and sys.platform == "linux" and not any(option in options for option in ON_DISK)
        zygote = Zygote(name, model, options, len(cores), cores[0], spare) if forks and cores else None
        sources = [
            EngineProcess(
                name=f"{name} {index}",
                model=model,
                options={**options, "device": f"cuda:{index % gpus}"} if gpus else options,
                replicas=-(-len(cores) // max(gpus, 1)),
                cores=() if gpus else own,
                spare=spare,
                zygote=zygote,
            )
            for index, own in enumerate(cores)
        ]
        tokenizer = open_tokenizer(model, options.get("tokenizer"))
        facts = {"version": wire.VERSION, "model_name": options.get("model_name") or Path(model).name}
        return cls([*sources, *others], tokenizer, facts | ({} if tokenizer is None else {"tokenizer": tokenizer.digest()}))

    def wait(self) -> Router:
        """Wait until an engine is ready again. Returns self; raises ClosedError if none can be started."""
        while self.healthy and not self.ready:
            self._closed.wait(LOOK)
        if not self.healthy:
            raise ClosedError(self.why or "the engine is closed")
        return self

    @property
    def ready(self) -> bool:
        return bool(self._ready())

    @property
    def nbytes(self) -> int:
        """Memory of all engines on this host, as reported at their start; shared memory counts once."""
        facts = [engine.facts for engine in self.engines if not engine.address]
        return sum(one["nbytes"] for one in facts) + sum({one["zygote"]: one["shared"] for one in facts}.values())

    # ---- as an engine's

    @property
    def healthy(self) -> bool:
        """False once it is closed or has failed; that is final."""
        return not self.why and not self._closed.is_set()

    def prepare(self) -> None:
        """The engines prepare themselves."""
        if self.tokenizer is not None:
            self.tokenizer.prepare()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        sink: Sink,
        n: int = 1,
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
        adapter: str = "",
        first_within: float | None = None,
        wait_within: float | None = None,
        waited: float = 0.0,
        whole: bool = False,
    ) -> Ticket:
        """As `Engine.submit`. `whole`: the sink gets one output per sequence, when all have ended or one has failed. Until then
        another may start over."""
        if self.embeds:
            does, path = ("scores pairs of texts", "rerank") if self._scores else ("embeds texts", "embeddings")
            raise ValueError(f"{self.model_name} {does} and does not generate: POST /v1/{path}")
        if not self.healthy:
            raise ClosedError(self.why or "the engine is closed")
        more = {"n": n, "priority": priority, "salt": salt, "tenant": tenant, "adapter": adapter}
        more |= target_of(first_within, wait_within)._asdict()
        keys = prefix_keys(prompt, self.block_size, salt, adapter)
        arrival = time.monotonic() - waited
        ticket = Ticket(prompt=prompt, params=params, sink=sink, more=more, whole=whole, keys=keys, arrival=arrival)
        self._place(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        if ticket.engine is not None:
            ticket.engine.cancel(ticket)

    def hold(self, ticket: Ticket, held: bool) -> None:
        if ticket.engine is not None:
            ticket.engine.hold(ticket, held)

    def load_adapter(self, name: str, folder: Any, *, replace: bool = False) -> None:
        """Load it in every engine, or in none if one rejects it; a restarted engine gets it, too. Raises as
        `Engine.load_adapter`, and ClosedError if none is ready."""
        with self._loading:
            loaded: list[RemoteEngine] = []
            for engine in self._ready():
                try:
                    engine.call("load_adapter", name, str(folder), replace)
                    loaded.append(engine)
                except LostError:
                    continue
                except ValueError:
                    for other in () if name in self.adapters else loaded:
                        with suppress(ValueError, LostError):
                            other.call("unload_adapter", name)
                    raise
            if not loaded:
                raise ClosedError(self.why or AWAY)
            self._added[name] = str(folder)
            self._removed.discard(name)
            self.adapters = (*(one for one in self.adapters if one != name), name)

    def unload_adapter(self, name: str) -> None:
        """Raises ValueError if it is not loaded."""
        with self._loading:
            if name not in self.adapters:
                raise ValueError(f"there is no adapter {name!r:.100}; loaded: {', '.join(sorted(self.adapters)) or 'none'}")
            for engine in self._ready():
                with suppress(LostError):
                    engine.call("unload_adapter", name)
            self._added.pop(name, None)
            self._removed.add(name)
            self.adapters = tuple(one for one in self.adapters if one != name)

    def embed(self, texts: Sequence[str | Sequence[int]], *, truncate: int = False) -> Embedded:
        found = self._call("embed", texts, truncate)
        values = np.frombuffer(base64.b64decode(found["values"]), "<f4").reshape(found["shape"])
        return Embedded(torch.from_numpy(values.astype(np.float32)), found["num_tokens"])

    def score(self, pairs: Sequence[tuple[str, str]], *, truncate: int = False) -> Scored:
        return Scored(*self._call("score", pairs, truncate))

    def stats(self) -> Stats:
        return stats.total([one for one in self.each() if one is not None])

    def each(self) -> list[Stats | None]:
        """The figures of each engine since its first start, requested now, or the last known ones. None: it was never there."""
        return [engine.stats(STATS_WAIT) if engine.starts else None for engine in self.engines]

    def close(self) -> None:
        """End all engines; unfinished requests are cancelled."""
        self._closed.set()
        for engine, source in zip(self.engines, self._sources, strict=True):
            engine.close()
            if engine.state is ReplicaState.STARTING:
                source.stop()
        for thread in self._threads:
            if thread.ident is not None:  # else it was never started
                thread.join()
        for source in self._sources:
            source.stop()
        self._give_up()

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- requests

    def _ready(self) -> list[RemoteEngine]:
        return [engine for engine in self.engines if engine.state is ReplicaState.READY]

    def _free(self) -> list[RemoteEngine]:
        """The engines that may get a request with which another engine has ended: [Note: Trials]."""
        return [engine for engine in self._ready() if not engine.has_trial]

    def _place(self, ticket: Ticket) -> None:
        """Submit to the best engine that takes it. Raises as `Engine.submit`."""
        refused: set[RemoteEngine] = set()
        full: QueueFullError | None = None
        while engine := self._choose(ticket, refused):
            try:
                engine.submit(ticket)
            except LostError as error:
                self._move([ticket], str(error))
                return
            except (ClosedError, QueueFullError) as error:
                refused.add(engine)
                engine.owed[ticket.more["tenant"]] += ticket.elsewhere
                full = error if isinstance(error, QueueFullError) else full
            else:
                if ticket.cancelled:  # meanwhile
                    engine.cancel(ticket)
                return
        raise full or ClosedError(self.why or AWAY)

    def _choose(self, ticket: Ticket, refused: set[RemoteEngine]) -> RemoteEngine | None:
        """Choose the best engine outside `refused`, and record there that it has the ticket and the prompt's prefixes."""
        with self._lock:
            ready = self._free() if ticket.moves else self._ready()
            if not (engines := [engine for engine in ready if engine not in refused]):
                return None
            matched = [next((n for n, key in enumerate(ticket.keys) if key not in one.known), len(ticket.keys)) for one in engines]
            tenant, size = ticket.more["tenant"], ticket.size
            everywhere = {one: one.outstanding() for one in self.engines}
            outstanding = [everywhere[one] for one in engines]
            pairs = zip(outstanding, matched, strict=True)
            loads = [backlog(tokens, tenant, size, self.block_size * num) for tokens, num in pairs]
            best = ranked(loads)[0]
            engine, ticket.uncached = engines[best], len(ticket.prompt) - loads[best].matched
            for one, counts in everywhere.items():
                for name in list(one.owed) if not counts else counts if len(counts) == 1 else ():  # it kept no other waiting there
                    one.owed.pop(name, None)
            ticket.elsewhere = engine.owed.pop(tenant, 0)
            for key in reversed(ticket.keys):  # so that the shortest prefix is dropped last
                engine.known[key] = None
                engine.known.move_to_end(key)
            while len(engine.known) > engine.facts["num_blocks"]:
                engine.known.popitem(last=False)
            engine.take(ticket)
            return engine

    def _call(self, name: str, texts: Sequence[Any], truncate: int) -> Any:
        """Place a call as a request of one token, and wait for its reply. Raises as the engine does, FailedError if the call may be
        why engines end, ClosedError if none is ready or the router is closed."""

        def sink(output: Output) -> None:
            ticket.reply.set_exception((FailedError if self.healthy else ClosedError)(output.error or "the engine is closed"))

        more = {"n": 1, "tenant": "", "priority": 0}
        ticket = Ticket(prompt=texts, params=ONE_TOKEN, sink=sink, more=more, call=(name, (texts, truncate)))
        self._place(ticket)
        return ticket.reply.result()

    def _move(self, lost: Sequence[Ticket], why: str) -> None:
        """Requests that have not begun go to another engine; without one, to the next that is ready."""
        for ticket in lost:
            ticket.accepted = False
            if ticket.cancelled or self._closed.is_set():
                ticket.end(Finish.CANCELLED)
            elif self.why:
                ticket.end(Finish.ERROR, self.why)
            elif ticket.begun:
                ticket.end(Finish.ERROR, f"{why}; a part of the answer was sent, so send the request again")
            elif ticket.moves > MOVES:
                ticket.end(Finish.ERROR, f"{why}; {CAUSE}")
            else:
                with self._lock:
                    self._homeless.append(ticket)
        self._house()

    def _house(self) -> None:
        """Place waiting requests if an engine is free. Called whenever one may have become free."""
        with self._lock:
            self._housings += 1
        while free := self._free():
            with self._lock:
                if not self._homeless:
                    return
                housings = self._housings
                ticket = min(self._homeless, key=lambda ticket: ticket.more["priority"])
                self._homeless.remove(ticket)
            if ticket.cancelled:
                ticket.end(Finish.CANCELLED)
                continue
            try:
                self._place(ticket)
            except (ValueError, QueueFullError, FailedError, ClosedError) as error:
                is_short = isinstance(error, QueueFullError) and len(free) < len(self.engines)  # an engine may come back
                if not (is_short or isinstance(error, ClosedError)):
                    ticket.end(Finish.CANCELLED if isinstance(error, QueueFullError) else Finish.ERROR, str(error))
                    continue
                with self._lock:  # all have ended meanwhile, or the others are full
                    self._homeless.insert(0, ticket)
                    if housings == self._housings:
                        return  # else another thread, which did not find this ticket, has left the engine that became free

    # ---- engines; the thread of each

    def _keep(self, engine: RemoteEngine, source: Source, first: Future[None]) -> None:
        """Start the engine, serve it, and restart it when it ends."""
        failed = quick = 0  # consecutive failed starts; consecutive ends soon after a start
        while not self._closed.wait(_pause(max(failed, quick - 1), source.max_pause)):
            engine.state = ReplicaState.STARTING
            try:
                link, facts = self._connected(source)
            except (ValueError, OSError, ReplicaError) as error:
                failed += 1
                if self._missing(engine, error, failed == source.attempts, first):
                    break
                continue
            failed, began = 0, time.monotonic()
            engine.connect(link, facts)
            if self._closed.is_set():  # `close` came before the link
                engine.close()
            threading.Thread(target=self._welcome, args=(engine, first), daemon=True).start()  # `run` reads its replies
            lost = engine.run(link)
            why = f"the engine's process {source.end()} ({source.name})"
            quick = quick + 1 if time.monotonic() - began < SETTLED else 1
            if not self._closed.is_set():
                logger.error("%s with %d unfinished requests; it serves again when it is back", why, len(lost))
            self._move(lost, why)
        engine.state = ReplicaState.DOWN
        if not first.done():
            first.set_exception(ClosedError("the router was closed"))

    def _missing(self, engine: RemoteEngine, error: Exception, last: bool, first: Future[None]) -> bool:
        """Handle a failed start or connection. Returns whether to give up; if that was the last try, the server ends."""
        if self._closed.is_set():
            return True
        refused = isinstance(error, ValueError)
        if last or (refused and not first.done()):  # the same options would be rejected again
            self._fail(error, first)
            return True
        engine.state = ReplicaState.REFUSED if refused else ReplicaState.DOWN
        if engine.why != (why := str(error)):  # on another host, it is tried every second
            logger.warning("%s; it is tried again", why)
        engine.why = why
        if engine.address and not first.done():
            first.set_result(None)  # other engines may be there
        self._house()  # engines that were full may have room now
        return False

    def _connected(self, source: Source) -> Connected:
        """Raises ValueError for another model than the first engine's."""
        link, facts = source.open()
        with self._lock:
            for name, (stated_by, agreed) in self._agreed.items():
                if (found := facts.get(name)) != agreed:  # None: a version that does not report it
                    link.close()
                    source.end()
                    raise ValueError(f"{source.name} has {name} {found!r}, and {stated_by} has {agreed!r}; {AGREED[name]}")
            self._agreed = {name: (source.name, facts.get(name)) for name in AGREED} | self._agreed
        return Connected(link, facts)

    def _welcome(self, engine: RemoteEngine, first: Future[None]) -> None:
        """Bring a new engine to the state of the others, and let it serve."""
        with self._loading, suppress(LostError):
            for name in self._removed.intersection(engine.facts["adapters"]):
                with suppress(ValueError):  # it has lived on without it
                    engine.call("unload_adapter", name)
            for name, folder in self._added.items():
                try:
                    engine.call("load_adapter", name, folder, True)
                except ValueError as error:
                    logger.error("%s is without the adapter %s: %s", engine.name, name, error)
            engine.stats()
            if engine.serve() and not first.done():
                first.set_result(None)
        self._house()

    def _fail(self, error: Exception, first: Future[None]) -> None:
        """End the server, because an engine cannot be started."""
        self.why = str(error)
        if not first.done():
            first.set_exception(error)
            return
        logger.error("%s", error)
        self._give_up()

    def _give_up(self) -> None:
        """End the requests that wait for an engine."""
        with self._lock:
            homeless, self._homeless = self._homeless, []
        self._move(homeless, self.why)


def _pause(number: int, longest: float) -> float:
    """Seconds before the start after `number` bad ones in a row."""
    return 0.0 if number <= 0 else min(PAUSE * 2 ** min(number - 1, 10), longest)


Served: TypeAlias = Engine | EmbeddingEngine | Router  # what the HTTP server serves
