"""Detect at once which other ranks' processes on this host have ended.

A pidfd per peer becomes readable when its process ends for any reason, so a check is one system call and needs no thread,
store or socket (a killed rank's sockets can stay open in processes that it forked). The end of ranks on other hosts, or in
other containers, shows only in the transports' errors.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import NamedTuple

from slipstream.world.mesh import Axis


class Peer(NamedTuple):
    """One rank's process. `host` identifies the pid namespace: processes with equal `host` see each other's pids."""

    rank: int
    host: str
    pid: int


def meet(axis: Axis) -> list[Peer]:
    """Every rank's Peer, in rank order. Collective."""
    return axis.gather(Peer(axis.ranks[axis.index], _host(), os.getpid()))


class Peers:
    """Watches the processes of the peers on this host."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        self._gone: dict[int, float] = {}  # rank -> time at which its end was detected, in that order
        self._open: dict[int, Peer] = {}  # pidfd -> peer
        self._unopened: list[Peer] = []  # peers without pidfd
        self._poll = select.poll()
        self._lock = threading.Lock()  # a poll object is not thread-safe
        host = _host()
        for peer in peers:
            if peer.host == host and peer.pid != os.getpid():
                self._add(peer)

    def _add(self, peer: Peer) -> None:
        try:
            fd = os.pidfd_open(peer.pid)
        except ProcessLookupError:
            self._gone[peer.rank] = time.monotonic()
        except (AttributeError, OSError):  # not Linux, an old kernel, or forbidden
            self._unopened.append(peer)
        else:
            self._open[fd] = peer
            self._poll.register(fd, select.POLLIN)

    def gone(self) -> dict[int, float]:
        """The ranks on this host that have ended, with the time of detection, in that order."""
        with self._lock:
            for fd, _ in self._poll.poll(0) if self._open else ():
                self._poll.unregister(fd)
                os.close(fd)
                self._gone[self._open.pop(fd).rank] = time.monotonic()
            for peer in self._unopened:
                if peer.rank not in self._gone and not _exists(peer.pid):
                    self._gone[peer.rank] = time.monotonic()
            return dict(self._gone)

    def pid(self, rank: int) -> int:
        return next(peer.pid for peer in self.peers if peer.rank == rank)

    def close(self) -> None:
        with self._lock:
            for fd in self._open:
                self._poll.unregister(fd)
                os.close(fd)
            self._open.clear()
            self._unopened.clear()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # another user's process exists, and /proc may hide it
    return True


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename
