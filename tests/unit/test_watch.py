"""When waiting ranks are told apart from lost, busy and slow ones: monitors over a store in this process, no ranks."""

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import pytest
import torch.distributed as dist

from slipstream.launch.agent import GRACE_S
from slipstream.launch.worker import EXIT_S
from slipstream.world.mesh import Axis
from slipstream.world.monitor import StatusMonitor
from slipstream.world.peers import Peer, Peers, _host
from slipstream.world.watch import Ledger, PeerError, PeerLostError, Watch

BOOK = "dp (0, 1)"


class Ranks:
    """Some ranks' watches and monitors; each beat is a call."""

    def __init__(self, hasty: bool = True, names: Mapping[int, str] | None = None, num: int = 2) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        self.watches = [Watch(timeout_s=100) for _ in range(num)]
        self.monitors = []
        for rank, watch in enumerate(self.watches):
            watch.rank, watch.names = rank, names or {}
            if hasty:
                watch.beat_s, watch.standstill_s, watch.name_busy_s = 0.02, 0.1, 0.1
            watch.ledgers.append(Ledger(BOOK, tuple(range(num)), None))
            self.monitors.append(StatusMonitor(watch, store, Axis("dp", None, tuple(range(num)), rank, num)))

    def wait(self, rank: int, what: str, number: int | None = None, launched: int = 0) -> None:
        """Rank `rank` waits in `what`; on a process group it is operation `number` of `launched`."""
        watch = self.watches[rank]
        watch.wait_for, watch.awaits = what, (BOOK, number) if number is not None else None
        watch.ledgers[0].launched = launched
        watch.ledgers[0].in_flight = {} if number is None else {number: what}

    def beat(self, seconds: float = 0.4) -> list[str | None]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for monitor, watch in zip(self.monitors, self.watches, strict=True):
                monitor._beat(watch)
                monitor._act(watch)
            time.sleep(0.01)
        return [watch.failure for watch in self.watches]


def test_waits_for_each_other_on_shared_memory_are_a_standstill(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    ranks.watches[1].step, ranks.watches[1].phase = 3, "backward"
    ranks.wait(0, "exchange for rank 1")
    ranks.wait(1, "reduce-scatter for rank 0")
    failures = ranks.beat()
    assert failures[0] == failures[1]
    assert failures[0] is not None and failures[0].splitlines()[-2:] == [
        "0     0     idle      -     exchange for rank 1",
        "1     3     backward  -     reduce-scatter for rank 0",
    ]
    assert caplog.text.count("can never match") == 1
    for watch in ranks.watches:
        with pytest.raises(PeerError, match="can never match") as caught:
            watch.check(time.monotonic())
        assert not isinstance(caught.value, PeerLostError)


def test_the_table_names_the_places_of_ranks() -> None:
    ranks = Ranks(names={0: "stage 0, tp 1", 1: "stage 1, tp 1"})
    ranks.wait(0, "mail from rank 1")
    ranks.wait(1, "reduce-scatter for rank 0")
    failure = ranks.beat()[0]
    assert failure is not None and failure.splitlines()[-3:] == [
        "rank  place          step  phase  unit  waits in",
        "0     stage 0, tp 1  0     idle   -     mail from rank 1",
        "1     stage 1, tp 1  0     idle   -     reduce-scatter for rank 0",
    ]


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [
        (("all-gather", 5, 5), ("all-gather", 5, 5), True),  # a slow transfer
        (("all-gather", 5, 6), ("reduce-scatter", 6, 6), True),  # the other's part of 5 is done
        (("all-gather", 5, 5), ("exchange", 5, 5), False),
        (("all-gather", 6, 6), ("exchange", 7, 7), True),
        (("agreement on all-gather", 5, 5), ("reduce-scatter", 5, 5), False),
    ],
)
def test_on_a_process_group_only_what_cannot_end_is(first: tuple[str, int, int], second: tuple[str, int, int], ends: bool) -> None:
    ranks = Ranks()
    ranks.wait(0, *first)
    ranks.wait(1, *second)
    assert (ranks.beat() == [None, None]) == ends


def test_one_who_moves_or_runs_is_no_standstill(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    ranks.wait(0, "exchange for rank 1")
    assert ranks.beat(0.5) == [None, None]
    assert 2 <= caplog.text.count("rank 1 has been busy for") <= 5
    ranks.wait(1, "weights for rank 0")
    for _ in range(20):
        ranks.watches[0].waits += 2
        assert ranks.beat(0.02) == [None, None]


def test_a_stopped_rank_is_named_and_no_standstill(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it has published last."""
    ranks = Ranks()
    ranks.wait(0, "exchange for rank 1")
    ranks.wait(1, "weights for rank 0")
    assert ranks.beat(0.02) == [None, None]
    monitor, watch = ranks.monitors.pop(), ranks.watches.pop()
    assert ranks.beat() == [None]
    named = r"rank 1 has been busy for .*\nrank .*\n0 .* exchange for rank 1\n1 .* \(gives no sign: stopped\?\)"
    assert re.search(named, caplog.text)
    ranks.monitors.append(monitor)
    ranks.watches.append(watch)
    assert ranks.beat(0.02) == [None, None]
    assert None not in ranks.beat(), "it goes on, and does not move"


def test_what_a_rank_said_before_it_was_stopped_is_old() -> None:
    """Its monitor wakes before its training: all seem to wait then, and it has had no time to move."""
    ranks = Ranks(num=3)
    for rank in (0, 1):
        ranks.wait(rank, "exchange for rank 2")
    assert ranks.beat(0.3) == [None, None, None]
    stopped = ranks.monitors.pop(0), ranks.watches.pop(0)
    ranks.watches[1].waits, ranks.watches[1].wait_for = 1, "exchange for rank 0"
    assert ranks.beat() == [None, None]
    ranks.monitors.insert(0, stopped[0])
    ranks.watches.insert(0, stopped[1])
    ranks.beat(0.001)
    stopped[1].waits, stopped[1].wait_for = 1, ""
    assert ranks.beat() == [None, None, None]


class Clock:
    """The time of day as the monitors see it, without waiting for it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_default_times_are_the_promised_ones(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A standstill ends within 30 s; a busy rank is named every 30 s and not stopped; a death is known within 5 s."""
    clock = Clock()
    monkeypatch.setattr("slipstream.world.monitor.time", clock)

    def seconds_until_failure(ranks: Ranks, most: float) -> float:
        began = clock.now
        while clock.now - began < most and None in [watch.failure for watch in ranks.watches]:
            clock.now += ranks.watches[0].beat_s
            for monitor, watch in zip(ranks.monitors, ranks.watches, strict=True):
                monitor._beat(watch)
                monitor._act(watch)
        return clock.now - began

    ranks = Ranks(hasty=False)
    ranks.wait(0, "exchange for rank 1")
    assert seconds_until_failure(ranks, 120) == 120
    assert [watch.failure for watch in ranks.watches] == [None, None]
    named = [int(seconds) for seconds in re.findall(r"rank 1 has been busy for (\d+) s", caplog.text)]
    assert named[0] <= 32 and len(named) == 3, named
    assert all(30 <= after - before <= 32 for before, after in itertools.pairwise(named)), named

    ranks.wait(1, "reduce-scatter for rank 0")
    watch = ranks.watches[1]
    watch.waits += 1
    in_torch = watch.patience_s + 2 * watch.beat_s  # a rank that torch holds is ended so much later
    assert 5 < seconds_until_failure(ranks, 120) <= 30 - in_torch

    assert watch.patience_s + 1.5 * watch.beat_s < 5  # `Watch.lost`: who went first, and its own words
    assert GRACE_S + EXIT_S <= 5  # the launcher's


def test_torch_collectives_of_one_name_may_match() -> None:
    ranks = Ranks()
    for rank in range(2):
        ranks.wait(rank, "torch's barrier")
    assert ranks.beat() == [None, None]
    ranks.wait(1, "torch's all_gather_object")
    assert None not in ranks.beat()


def test_how_a_rank_left_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    ranks.wait(0, "exchange for rank 1")
    monkeypatch.setattr(sys, "last_value", KeyError("boom"), raising=False)
    ranks.monitors[1].say_goodbye(ranks.watches[1])
    assert ranks.beat(0.1)[0] == "rank 1 failed: KeyError: 'boom'"
    with pytest.raises(PeerLostError, match="boom"):
        ranks.watches[0].check(time.monotonic())


def test_a_limit_that_is_reached_ends_every_later_wait_at_once() -> None:
    watch = Watch(timeout_s=5)
    watch.check(time.monotonic() - 4)
    for since in (6, 0):
        with pytest.raises(PeerError, match="waited 5 s") as caught:
            watch.check(time.monotonic() - since)
        assert not isinstance(caught.value, PeerLostError)


def test_a_watch_that_is_dropped_ends_its_thread() -> None:
    ranks = Ranks()
    monitor = ranks.monitors[0]
    ranks.watches.clear()
    ranks.monitors.clear()
    assert monitor.watch() is None
    monitor.run(threading.Event())  # returns


@pytest.mark.skipif(sys.platform != "linux", reason="reads pidfds")
@pytest.mark.parametrize("pidfds", [True, False])
def test_a_process_that_ends_is_seen_without_its_help(pidfds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pidfds:
        monkeypatch.delattr(os, "pidfd_open")
    children = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    local_peers = [Peer(rank, _host(), child.pid) for rank, child in enumerate(children)]
    peers = Peers([*local_peers, Peer(2, "another host", 1), Peer(3, _host(), os.getpid())])
    assert peers.gone() == {}
    for rank in (1, 0):
        children[rank].kill()
        if pidfds:  # also while nobody has reaped it
            time.sleep(0.1)
        else:
            children[rank].wait()
        assert rank in peers.gone()
    assert list(peers.gone()) == [1, 0]
    descriptors = len(os.listdir("/proc/self/fd"))
    peers.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors  # closed as they ended
    for child in children:
        child.wait()
