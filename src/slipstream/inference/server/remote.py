"""One engine behind a link, as the router sees it: its requests, their outputs, and calls that wait for a reply."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from slipstream.inference import wire
from slipstream.inference.core import Finish, SamplingParams
from slipstream.inference.engine import ClosedError
from slipstream.inference.sequence import Output, Sink, Usage
from slipstream.inference.server.answers import joined
from slipstream.inference.stats import Stats, settled, total
from slipstream.inference.wire import Link

logger = logging.getLogger(__name__)

MOVES = 1  # how many engines may end while they have a request among others: the request may be the cause
EXPECTED = 256  # the most tokens per output in the estimate of outstanding ones, because max_tokens is often the whole context


class LostError(ClosedError):
    """The connection ended before the reply."""


class ReplicaState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # it finishes its requests, then ends
    DOWN = "down"  # it restarts after a pause
    REFUSED = "refused"  # it has another model or another secret; it is tried again


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """A submitted prompt, for `Router.cancel`, or a call for vectors or scores. Once it is accepted, only the thread that reads the
    engine's messages changes it."""

    prompt: Sequence[Any]  # tokens; of a call, its texts
    params: SamplingParams
    sink: Sink  # of a call: gets only an end without a reply
    more: Mapping[str, Any]  # n, priority, salt, tenant, adapter, first_within, wait_within
    call: tuple[str, Sequence[Any]] | None = None  # its name and arguments
    reply: Future[Any] = field(default_factory=Future)  # to the call
    whole: bool = False  # nothing is delivered before the end, so that another engine can start over
    keys: Sequence[int] = ()  # of its prefixes, from `router.prefix_keys`
    number: int = 0  # at its engine
    engine: RemoteEngine | None = None
    accepted: bool = False
    begun: bool = False  # an output has been delivered
    cancelled: bool = False
    moves: int = 0  # engines that ended with it; a process that had no other request counts as too many
    uncached: int = 0  # tokens of the prompt that its engine must compute, as far as the router knows
    elsewhere: int = 0  # `Request.elsewhere`
    arrival: float = field(default_factory=time.monotonic)
    generated: int = 0
    unfinished: set[int] = field(default_factory=set)  # sequences
    kept: list[tuple[int, Output]] = field(default_factory=list)  # of a whole one: each output with its sequence

    @property
    def size(self) -> int:
        """Approximate tokens to compute for it in all."""
        return len(self.prompt) + self.more["n"] * min(self.params.max_tokens, EXPECTED)

    @property
    def outstanding(self) -> int:
        """Approximate tokens that its engine still has to compute."""
        rest = len(self.unfinished) * min(self.params.max_tokens, EXPECTED) - self.generated
        return (0 if self.generated else self.uncached) + max(rest, len(self.unfinished))

    @property
    def on_trial(self) -> bool:
        """Whether an engine ended with it, and the present one has made no token of it yet."""
        return self.moves > 0 and not self.generated and bool(self.unfinished)

    def begin(self, number: int, engine: RemoteEngine) -> None:
        """Start at an engine, which may not be the first one."""
        self.number, self.engine = number, engine
        self.unfinished, self.generated, self.kept = set(range(self.more["n"])), 0, []

    def deliver(self, output: Output) -> None:
        num = len(output.token_ids)
        if self.engine is not None and num:  # if the engine made no token, the request may only have waited
            self.engine.charge(self.more["tenant"], 2 * num + (0 if self.generated else self.uncached))
        self.generated += num
        if output.finish is not None:
            self.unfinished.discard(output.index)
        outputs = [output]
        if self.whole:
            self.kept.append((output.index, output))
            if self.unfinished and output.finish not in (Finish.CANCELLED, Finish.ERROR):
                return
            outputs, self.kept = joined(self.kept), []
        self.begun = True
        for one in outputs:
            self.sink(one)

    def end(self, finish: Finish, why: str | None = None) -> None:
        """Deliver the final outputs of its unfinished sequences."""
        for index in sorted(self.unfinished):
            usage = Usage(len(self.prompt), 0, self.generated)
            try:
                self.deliver(Output(index, "", (), (), finish, usage, why))
            except Exception:  # an error in the caller's code, as in `Engine`
                logger.exception("the sink of a request failed")


class RemoteEngine:
    """Any thread may call it; one thread calls `run` for each connection."""

    def __init__(self, name: str, address: str = "") -> None:
        """`address`: of an engine on another host."""
        self.name, self.address = name, address
        self.state = ReplicaState.STARTING
        self.starts = 0  # how often it has begun to serve
        self.why = ""  # error of the last start
        self.known: OrderedDict[int, None] = OrderedDict()  # keys of prefixes that its cache may have; set by the router
        self.others: Sequence[RemoteEngine] = ()  # the router's other engines
        self.trial_ended: Callable[[], object] = bool  # called when a trial ends; set by the router
        self.owed = Counter[str]()  # tenant -> approximate tokens: `Request.elsewhere` of its next request
        self.facts: Mapping[str, Any] = {}
        self._stats: Stats | None = None  # of this start of its process, the last known
        self._past: Stats | None = None  # totals of all earlier starts
        self._tickets: dict[int, Ticket] = {}  # unfinished ones, by number
        self._replies: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._link: Link | None = None
        self._turn = threading.Lock()  # guards READY and DOWN, which two threads set

    def outstanding(self) -> Counter[str]:
        """Approximate tokens to compute, per tenant."""
        tokens = Counter[str]()
        for ticket in list(self._tickets.values()):
            tokens[ticket.more["tenant"]] += ticket.outstanding
        return tokens

    def charge(self, tenant: str, tokens: int) -> None:
        """Record tokens computed and generated here for a tenant (generated ones count twice). They count at others that have
        requests."""
        for other in self.others:
            if other._tickets:
                other.owed[tenant] += tokens

    def connect(self, link: Link, facts: Mapping[str, Any]) -> None:
        if self._stats is not None and facts["start"] != self.facts["start"]:
            self._past, self._stats = self.stats(), None
        self._link, self.facts = link, facts
        self.known.clear()

    def serve(self) -> bool:
        """Accept requests, unless the connection has ended meanwhile."""
        with self._turn:
            if self._link is None:
                return False
            self.starts += 1
            self.state, self.why = ReplicaState.READY, ""
            return True

    @property
    def has_trial(self) -> bool:
        """Whether a request is `on_trial` here."""
        return any(ticket.on_trial for ticket in list(self._tickets.values()))

    def take(self, ticket: Ticket) -> None:
        """Count the request from now on; `submit` follows."""
        ticket.begin(next(self._numbers), self)
        self._tickets[ticket.number] = ticket

    def submit(self, ticket: Ticket) -> None:
        """Raises as `Engine.submit`, and LostError. A call is accepted at once; its reply comes later."""
        try:
            if ticket.call is not None:
                with self._turn:  # an end of the connection comes before, or finds it accepted
                    if (link := self._link) is None:
                        raise LostError(f"{self.name} is not connected")
                    self._tickets[ticket.number], ticket.accepted = ticket, True
                link.send("call", ticket.number, *ticket.call)
                return
            more = {**ticket.more, "elsewhere": ticket.elsewhere, "waited": time.monotonic() - ticket.arrival}
            self._ask("submit", ticket.number, ticket.prompt, wire.packed_params(ticket.params), more)
        except Exception:
            self._tickets.pop(ticket.number, None)
            raise

    def cancel(self, ticket: Ticket) -> None:
        if (link := self._link) is not None:
            link.send("cancel", ticket.number)

    def hold(self, ticket: Ticket, held: bool) -> None:
        if (link := self._link) is not None:  # read once: another thread sets it to None
            link.send("hold", ticket.number, held)

    def call(self, name: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Raises the engine's errors, LostError, TimeoutError."""
        return self._ask("call", next(self._numbers), name, arguments, timeout=timeout)

    def stats(self, timeout: float | None = None) -> Stats:
        """The engine's figures since its first start, or the last known ones if it does not reply within `timeout`. Raises
        LostError if there are none yet."""
        with suppress(LostError, TimeoutError):
            self._stats = wire.stats_of(self.call("stats", timeout=timeout))
        if not (known := [one for one in (self._stats, self._past) if one is not None]):
            raise LostError(f"{self.name} has ended before it told its figures")
        return total(known)

    def _ask(self, kind: str, number: int, *rest: Any, timeout: float | None = None) -> Any:
        reply = self._replies[number] = Future[Any]()
        if (link := self._link) is None:
            del self._replies[number]
            raise LostError(f"{self.name} is not connected")
        link.send(kind, number, *rest)
        try:
            return reply.result(timeout)
        finally:
            self._replies.pop(number, None)

    def run(self, link: Link) -> list[Ticket]:
        """Deliver the engine's messages until the connection ends. Returns the accepted requests that are unfinished. Any of them
        may be the cause, unless the engine announced its end. An only one is the cause, unless a network was between."""
        for kind, number, *rest in link.messages:
            if kind == "output":
                self._deliver(number, wire.output_of(rest[0]))
            elif kind == "leave":
                self.state = ReplicaState.DRAINING
                logger.warning("%s ends; it gets no further requests", self.name)
            else:
                self._reply(kind, number, *rest)
        return self._lose_all(link)

    def _lose_all(self, link: Link) -> list[Ticket]:
        """The connection has ended: fail what waits for a reply, and return the accepted requests that are unfinished."""
        with self._turn:
            announced = self.state is ReplicaState.DRAINING
            self._link, self.state = None, ReplicaState.DOWN
        link.close()
        tickets = list(self._tickets.values())
        self._tickets.clear()
        for ticket in () if announced else tickets:
            ticket.moves += MOVES + 1 if len(tickets) == 1 and ticket.accepted and not self.address else 1
        if self._stats is not None:
            self._stats = settled(self._stats)
        for reply in list(self._replies.values()):
            reply.set_exception(LostError(f"the engine's process ended ({self.name})"))
        return [ticket for ticket in tickets if ticket.accepted]

    def _deliver(self, number: int, output: Output) -> None:
        if (ticket := self._tickets.get(number)) is None:
            return  # it was cancelled
        if not ticket.accepted:  # the output came before the reply, which may never come
            self._reply("done", number, None)
        was_on_trial = ticket.on_trial
        try:
            ticket.deliver(output)
        except Exception:  # an error in the caller's code, for example a closed event loop
            logger.exception("the sink of a request failed; it is cancelled")
            ticket.unfinished.clear()
            self.cancel(ticket)
        if not ticket.unfinished:
            del self._tickets[number]
        if was_on_trial and not ticket.on_trial:
            self.trial_ended()

    def _reply(self, kind: str, number: int, *rest: Any) -> None:
        ticket, reply = self._tickets.get(number), self._replies.pop(number, None)
        if ticket is not None and ticket.call is not None:
            reply = ticket.reply
            del self._tickets[number]
            if ticket.on_trial:
                self.trial_ended()
        elif ticket is not None and kind == "done":
            ticket.accepted = True
        if reply is None:
            return  # nobody waits for it any more
        if kind == "failed":
            reply.set_exception(wire.error_of(*rest))
        else:
            reply.set_result(*rest)

    def close(self) -> None:
        """End the connection, from any thread; `run` then returns."""
        if (link := self._link) is not None:
            link.close()
