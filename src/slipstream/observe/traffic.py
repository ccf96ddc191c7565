"""The communication log: each operation between ranks, its bytes and its time, and how long this rank waited for others.

An operation's time is from its launch until this rank has its result, including the computation that overlaps with it. A wait is
the part in which the rank does nothing else. Shared memory sends nothing and has only waits.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import chain
from typing import Any

import torch

from slipstream.observe import clock
from slipstream.world.mesh import Axis
from slipstream.world.watch import Ledger, Watch

logger = logging.getLogger(__name__)

# operation here -> DeepSpeed's name; others keep their name
_NAMES = {
    "all-gather": "all_gather_into_tensor",
    "reduce-scatter": "reduce_scatter_tensor",
    "swap": "all_to_all_single",
    "all-to-all": "all_to_all_single",
    "exchange": "all_reduce",
}
KEPT = 10_000  # the number of times kept per operation and size
_TITLES = ("Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)")
_STRAGGLER_TITLES = ("Message Size", "Count", "Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)", "Avg straggler(ms)")


class CommLog:
    """The record of operations on this rank, of an engine's transports or of a script.

    plan       has `prof_all`, `prof_ops` and `verbose` (config/observing.py)
    sent       DeepSpeed's name of the operation -> bytes sent by this rank
    waited_ms  operation, or over shared memory the rank waited for -> ms
    """

    def __init__(self, plan: Any, world: Axis, device: torch.device) -> None:
        self.plan, self.world, self.device = plan, world, device
        self.sent: Counter[str] = Counter()
        self.waited_ms: defaultdict[str, float] = defaultdict(float)
        self._open: dict[tuple[str, int], tuple[str, int, str, Any]] = {}
        self._counts = Counter[tuple[str, int]]()  # by operation and bytes
        self._marks: dict[str, dict[tuple[int, int, str], deque[tuple[Any, Any]]]] = {}  # by (bytes, ranks, kind): the last KEPT

    def attach(self, watch: Watch) -> None:
        """Record the operations of an engine's transports."""
        self.watch = watch
        watch.record = self
        for ledger in watch.ledgers:
            ledger.record = self
        watch.around.append(self._waiting)

    def _name(self, operation: str) -> str:
        kind = "exchange" if operation.startswith("agreement on ") else operation
        return _NAMES.get(kind, kind.replace(" ", "_"))

    def _asked(self, name: str) -> bool:
        return self.plan.prof_all or name in self.plan.prof_ops

    def launch(self, ledger: Ledger, number: int, operation: str, nbytes: int, sent: int) -> None:
        if self._asked(name := self._name(operation)):
            self.sent[name] += sent
            self._open[ledger.name, number] = name, nbytes or sent, self.watch.unit, clock.mark(self.device)

    def finish(self, ledger: Ledger, number: int) -> None:
        if (ledger.name, number) not in self._open:
            return
        name, nbytes, unit, start = self._open.pop((ledger.name, number))
        self.add(name, nbytes, len(ledger.ranks), (start, clock.mark(self.device)), kind=name, unit=unit)

    def add(self, name: str, nbytes: int, ranks: int, marks: tuple[Any, Any], *, kind: str, unit: str = "") -> None:
        """Add an operation between `ranks` ranks on a whole buffer of `nbytes` bytes. `kind` names it for `bandwidth`."""
        self._marks.setdefault(name, {}).setdefault((nbytes, ranks, kind), deque(maxlen=KEPT)).append(marks)
        self._counts[name, nbytes] += 1
        if self.plan.verbose and self.world.index == 0:
            ms = 1e3 * clock.between(*marks)
            tput, busbw = bandwidth(kind, nbytes, ms, ranks)
            line = "comm op: %s | time (ms): %.2f | msg size: %s | algbw (Gbps): %.2f | busbw (Gbps): %.2f | unit: %s"
            logger.info(line, name, ms, size_text(nbytes), tput, busbw, unit or "-")

    @contextmanager
    def _waiting(self, operation: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            name, by, rank = operation.partition(" for rank ")
            if self._asked(self._name(name)):
                self.waited_ms[self._name(name) + by + rank] += 1e3 * (time.perf_counter() - start)

    def raw(self) -> dict[str, dict[int, list[Any]]]:
        """{operation: {bytes: [count, [ms], [algbw], [busbw]]}}, the last two in Gbps; lists hold the last KEPT operations."""
        found: dict[str, dict[int, list[Any]]] = {}
        for name, sizes in self._marks.items():
            for (nbytes, ranks, kind), marks in sorted(sizes.items()):
                entry = found.setdefault(name, {}).setdefault(nbytes, [0, [], [], []])
                for pair in marks:
                    ms = 1e3 * clock.between(*pair)
                    for values, value in zip(entry[1:], (ms, *bandwidth(kind, nbytes, ms, ranks)), strict=True):
                        values.append(value)
                entry[0] = self._counts[name, nbytes]
        return found

    def reset(self) -> None:
        self.sent.clear()
        self.waited_ms.clear()
        self._marks.clear()
        self._counts.clear()

    def summary(self, show_straggler: bool = False) -> dict[str, Any]:
        return summary([self], self.world, show_straggler)

    def close(self) -> None:
        self.watch.record = None
        for ledger in self.watch.ledgers:
            ledger.record = None
        self.watch.around.remove(self._waiting)


def merged(logs: Iterable[CommLog]) -> dict[str, dict[int, list[Any]]]:
    """`raw` of all logs together."""
    found: dict[str, dict[int, list[Any]]] = {}
    for log in logs:
        for name, sizes in log.raw().items():
            for nbytes, entry in sizes.items():
                before = found.setdefault(name, {}).get(nbytes, [0, [], [], []])
                found[name][nbytes] = [one + other for one, other in zip(before, entry, strict=True)]
    return found


def summary(logs: Iterable[CommLog], world: Axis, show_straggler: bool = False) -> dict[str, Any]:
    """What `deepspeed.comm.log_summary(return_dict=True)` returns, with `sent_bytes` and `waited_ms` of this rank.

    show_straggler: collective over `world`. An operation is taken to last as long as on the rank that joined it last; the
    additional time on this rank is caused by the straggler.
    """
    logs = list(logs)
    raw, found = merged(logs), dict[str, Any]()
    found["summary"] = table(raw)
    found["straggler_analysis"] = _stragglers(raw, world) if show_straggler else None
    found["metadata"] = {"world_size": world.size, "rank": world.ranks[world.index], "timestamp": datetime.now().isoformat()}
    for name, counters in (("sent_bytes", [log.sent for log in logs]), ("waited_ms", [log.waited_ms for log in logs])):
        found[name] = {key: sum(counter.get(key, 0) for counter in counters) for key in dict.fromkeys(chain(*counters))}
    return found


def table(raw: Mapping[str, Mapping[int, list[Any]]]) -> dict[str, dict[int, dict[str, Any]]]:
    """DeepSpeed's figures of each operation and size."""
    columns = ("count", "total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")
    return _table(raw, columns, lambda _, entry: (entry[0], sum(entry[1]), *map(trimmed, entry[1:])))


def _stragglers(raw: Mapping[str, Mapping[int, list[Any]]], world: Axis) -> dict[str, Any]:
    own = {(name, nbytes): entry[1] for name, sizes in raw.items() for nbytes, entry in sizes.items()}
    every = world.gather(own)

    def row(key: Any, entry: list[Any]) -> tuple[Any, ...]:
        least = [min(each) for each in zip(*(other[key] for other in every if key in other), strict=False)]
        extra = [ms - low for ms, low in zip(entry[1], least, strict=False)]
        return entry[0], sum(least), sum(extra), trimmed(least), trimmed(extra)

    return _table(raw, ("count", "total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms", "avg_straggler_ms"), row)


def write_tables(found: Mapping[str, Any]) -> None:
    """Write a summary to the standard output."""
    lines = [*_lines("Comm. Op", _TITLES, found["summary"])]
    if found["straggler_analysis"] is not None:
        lines += ["_______________________________", "Breakdown with straggler effect", "-------------------------------"]
        lines += _lines("Comm. Op", _STRAGGLER_TITLES, found["straggler_analysis"])
    lines += [f"sent {name: <35}{size_text(nbytes)}" for name, nbytes in found["sent_bytes"].items()]
    lines += [f"waited {name: <33}{ms:.2f} ms" for name, ms in found["waited_ms"].items()]
    sys.stdout.write("\n".join([*lines, ""]))


def _table(raw: Mapping[str, Mapping[int, list[Any]]], columns: tuple[str, ...], row: Any) -> dict[str, dict[int, dict[str, Any]]]:
    return {
        name: {
            nbytes: dict(zip(columns, row((name, nbytes), entry), strict=True))
            | {"msg_size_bytes": nbytes, "msg_size_str": size_text(nbytes)}
            for nbytes, entry in sorted(sizes.items())
        }
        for name, sizes in raw.items()
    }


def _lines(head: str, titles: tuple[str, ...], table: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Iterator[str]:
    yield "".join(f"{title: <20}" for title in (head, *titles))
    for name, sizes in table.items():
        yield name
        for row in sizes.values():
            count, *numbers = list(row.values())[:5]
            yield "".join([f"{' ': <20}{row['msg_size_str']: <20}{count: <20}", *(f"{value: <20.2f}" for value in numbers)])


def bandwidth(name: str, nbytes: int, ms: float, ranks: int) -> tuple[float, float]:
    """(algorithm, bus) bandwidth in Gbps of an operation on a buffer of `nbytes` bytes, by the conventions of nccl-tests."""
    gbps, share = 8e-6 * nbytes / max(ms, 1e-6), (ranks - 1) / ranks
    if name == "all_reduce":
        return 2 * gbps, 2 * share * gbps
    is_ring = name.startswith(("all_gather", "reduce_scatter", "all_to_all"))
    return gbps, share * gbps if is_ring else gbps


def size_text(nbytes: int) -> str:
    """1536 -> "1.5 KB"."""
    if not nbytes:
        return "0B"
    power = min(int(math.log(nbytes, 1024)), 4)
    return f"{round(nbytes / 1024**power, 2)} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def trimmed(values: list[float]) -> float:
    """The mean without the lowest and the highest tenth."""
    cut = round(len(values) / 10)
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept) if kept else 0.0


def record(engine: Any) -> None:
    """Record an engine's traffic, as its plan says."""
    states = engine.states
    states.resources["traffic"] = log = CommLog(engine.plan.traffic, engine.mesh.world, engine.device)
    log.attach(engine.watch)
