"""The other ranks as processes: which of those on this host have ended, seen at once and without their help.

A pidfd per peer becomes readable when its process ends, however it ends, so looking costs one system call and needs no
thread, no store and no socket (a killed rank's sockets can stay open in processes that it forked). Ranks on other hosts,
or in other containers, are known only by what the transports say of them.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import NamedTuple

import torch.distributed as dist

from slipstream.mesh import Axis


class Peer(NamedTuple):
    """One rank's process. `host` tells process namespaces apart, so that equal hosts can see each other's pids."""

    rank: int
    host: str
    pid: int


def meet(axis: Axis) -> list[Peer]:
    """Every rank of `axis`, in rank order. Collective."""
    told: list[Peer | None] = [None] * axis.size
    dist.all_gather_object(told, Peer(axis.ranks[axis.index], _host(), os.getpid()), group=axis.group)
    return [peer for peer in told if peer is not None]


class Peers:
    """Watches the processes of those peers that are on this host."""

    def __init__(self, everyone: list[Peer]) -> None:
        self.everyone = everyone
        self._gone: dict[int, float] = {}  # rank -> when it was first seen to have ended; in that order
        self._open: dict[int, Peer] = {}  # pidfd -> peer
        self._unopened: list[Peer] = []  # where there are no pidfds
        self._poll = select.poll()
        self._lock = threading.Lock()  # a poll object serves one thread at a time
        host = _host()
        for peer in everyone:
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
        """Ranks of this host that have ended, and when that was first seen, in the order in which it was."""
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
        return next(peer.pid for peer in self.everyone if peer.rank == rank)

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
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename
