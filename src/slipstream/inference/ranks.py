"""The processes that compute one model, or its experts: rank 0 schedules, samples and answers, the others compute what it says.

`config.ModelPart` says which columns of which product a process computes: with `tp_size` of all, heads and their cache included;
else of experts, and every process computes the rest for the whole batch. A column of a product is computed by one process, in the
order of one process, from whole rows of inputs: results are those of one process, bit for bit, and nothing that is quantized in
groups is cut. On one host the rows are in memory that all processes map, and an exchange is a barrier (ranks_meet of
csrc/decoder.c), four in a dense layer; between hosts gloo adds them to zeros.

Rank 0 sends each forward to the others before it computes its own part; to stop them, a text that says why, or is empty. A process
that ends closes its connection: waits in a forward end, rank 0's engine fails, and it names the process to the others.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import pickle
import secrets
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream.inference.config import ModelPart
from slipstream.inference.load import LoadedModel
from slipstream.ops import cpu
from slipstream.world.join import init_distributed
from slipstream.world.mesh import Axis
from slipstream.world.peers import Peer, meet
from slipstream.world.watch import PeerLostError

logger = logging.getLogger(__name__)

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_Exchange = ctypes.CFUNCTYPE(_int, ctypes.POINTER(ctypes.c_float), _long)
_LINE = 64  # bytes between counters
_PICKLE = b"\x80"  # the first byte of a forward; texts have another
_LOOK_S = 0.1  # between looks at the other processes
_NAMED_S = 3.0  # for rank 0 to name a lost process


class RanksRecord(ctypes.Structure):
    """`struct ranks` of csrc/decoder.h."""

    _fields_ = (
        *((name, _int) for name in ("size", "index", "lost")),
        *((name, ctypes.c_uint32) for name in ("meetings", "turn")),
        ("turn_size", _long),
        ("arrived", _pointer),
        ("exchange", _Exchange),
    )


class ServingRanks:
    """Creating it is collective over all processes of the job. `max_rows`: tokens of a forward."""

    def __init__(self, part: ModelPart, *, max_rows: int) -> None:
        init_distributed(verbose=False)
        size = part.size
        world = dist.get_world_size() if dist.is_initialized() else 1
        sizes = f"ep_size ({part.ep_size}) x moe_tp_size ({part.moe_tp_size})"
        if part.tp_size not in (1, size) or (part.tp_size > 1 and part.ep_size * part.moe_tp_size not in (1, size)):
            raise ValueError(f"tp_size ({part.tp_size}) != {sizes}: all processes cut the model; give the same, or one of them")
        if world != size:
            need = f"{sizes if part.tp_size == 1 else f'tp_size ({size})'} need {size} processes, and {world} run this"
            raise ValueError(f"{need}: start them by slipstream run --nproc {size} SCRIPT")
        self.index, self.size, self.max_rows = dist.get_rank(), size, max_rows
        self.part = replace(part, index=self.index)
        self.record = RanksRecord(size=size, index=self.index)
        self.why = ""  # this engine cannot go on; "" if it can
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
        self._peers: list[Peer] = meet(Axis("experts", self._group, tuple(range(size)), self.index, size))
        self.neighbors = sum(peer.host == self._peers[self.index].host for peer in self._peers)  # processes on this host
        self._one_host = self.neighbors == size
        self._callback = _Exchange(self._exchange)  # kept: C has its address
        self._on_lost: Callable[[str], object] = lambda why: None
        self._sending, self._losing, self._receiving = threading.Lock(), threading.Lock(), threading.Lock()
        self._closing = threading.Event()
        self._links = self._connect()  # rank 0's to the others, by rank - 1; theirs to rank 0
        self._threads = [threading.Thread(target=self._look, name="slipstream-ranks", daemon=True)]
        self._threads[0].start()

    # -- opening; collective --

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, read: Callable[[], LoadedModel]) -> LoadedModel:
        """`read()`. Raises ValueError on all ranks if one fails or is unlike the others: all must compute the same bits."""
        told = ""
        try:
            loaded = read()
            model = hashlib.sha256(repr(replace(loaded.config, part=ModelPart())).encode()).hexdigest()[:8]
            told = f"model {model}, {loaded.opening.kind}, {loaded.dtype}, token_budget {self.max_rows}, instructions {cpu.isa()}"
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise
        finally:
            known = self.gather(told)
        if len(set(known)) > 1:
            raise ValueError(f"the ranks differ; open one model with one dtype and token_budget on like processors: {known}")
        return loaded

    def share(self, widths: Mapping[str, int]) -> dict[str, int]:
        """Allocate what all processes fill: fp32 rows of these widths. Returns their addresses. Pages take memory when written."""
        counters = -(-self.size * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        sizes = [-(-self.max_rows * 4 * width // _LINE) * _LINE for width in widths.values()]
        nbytes = counters + sum(sizes)
        with os.fdopen(os.memfd_create("slipstream-ranks", os.MFD_CLOEXEC), "r+b") as own:
            own.truncate(nbytes)
            pid, number = self._peers[0].pid if self._one_host else os.getpid(), self.gather(own.fileno())
            with open(f"/proc/{pid}/fd/{number[0 if self._one_host else self.index]}", "r+b", buffering=0) as file:
                self._mapping = mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED)
            self.gather(None)  # all have opened it
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.record.exchange = self._callback
        self.record.arrived = address if self._one_host else None
        return dict(zip(widths, accumulate(sizes, initial=address + counters), strict=False))

    def _connect(self) -> list[Connection]:
        place = "127.0.0.1" if self._one_host else ""
        listener = Listener((place, 0), backlog=self.size, authkey=(key := secrets.token_bytes(16))) if self.index == 0 else None
        port, key = self.gather((listener.address[1], key) if listener else None)[0]
        if listener is None:
            links = {0: Client((place or os.environ.get("MASTER_ADDR", "127.0.0.1"), port), authkey=key)}
            links[0].send_bytes(str(self.index).encode())
        else:
            links = {}
            while len(links) < self.size - 1:
                with suppress(AuthenticationError, EOFError, OSError):  # a stranger
                    link = listener.accept()
                    links[int(link.recv_bytes())] = link
            listener.close()
        for link in links.values():  # a forward must not wait for the receipt of the last one
            with socket.socket(fileno=os.dup(link.fileno())) as end:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return [links[rank] for rank in sorted(links)]

    # -- a forward --

    @contextmanager
    def forward(self, copies: Sequence[tuple[int, int]], numbers: Sequence[array[int]]) -> Iterator[None]:
        """Rank 0's context of its part of a forward, which the others begin too. An error inside is final: the others are in it."""
        if self.why:
            raise self.error()
        for link in self._links:
            with suppress(OSError), self._sending:  # of one that has gone: the forward fails
                link.send((copies, numbers))
        try:
            yield
        except BaseException as error:
            self._lose(f"a forward failed on rank 0: {type(error).__name__}: {error}")
            raise

    def _follow(self, run: Callable[[Any, Any], object]) -> None:
        why = ""
        try:
            while isinstance(message := self._next(), tuple):
                run(*message)
            why = message
        except PeerLostError:  # rank 0 says which process is lost, or is that itself
            why = message if isinstance(message := self._next(), str) else self.why
        except BaseException as error:
            logger.exception("rank %d cannot compute its part of a forward", self.index)
            why = f"rank {self.index} failed: {type(error).__name__}: {error}"
            with suppress(OSError):
                self._links[0].send_bytes(why.encode())
        finally:
            if why:
                self._lose(why)
            self._closing.set()

    def _next(self) -> Any:
        """The next forward, or why there is none."""
        try:
            with self._receiving:
                message = self._links[0].recv_bytes()
        except (EOFError, OSError):
            return self._gone(0)
        return pickle.loads(message) if message.startswith(_PICKLE) else message.decode()

    def _exchange(self, rows: Any, count: int) -> int:
        """Between hosts: add `rows`, fp32, of all processes."""
        try:
            dist.all_reduce(torch.from_numpy(np.ctypeslib.as_array(rows, (count,))), group=self._group)
        except Exception:  # C cannot raise; `native` does
            logger.debug("an exchange failed", exc_info=True)
            return 1
        return 0

    # -- lost processes --

    def start(self, run: Callable[[Any, Any], object], on_lost: Callable[[str], object]) -> None:
        """In threads: call `on_lost(why)` when a process is lost; above rank 0, compute its forwards by `run` until it stops."""
        self._on_lost = on_lost
        if self.why:
            on_lost(self.why)
        if self.index > 0:
            self._threads.append(threading.Thread(target=self._follow, args=(run,), name="slipstream-follow", daemon=True))
            self._threads[-1].start()

    def error(self) -> PeerLostError:
        deadline = time.monotonic() + _NAMED_S
        while not self.why and time.monotonic() < deadline:
            time.sleep(0.02)
        return PeerLostError(self.why or "another process of this engine is lost")

    def _gone(self, rank: int) -> str:
        return f"rank {rank} (pid {self._peers[rank].pid}) is gone: its process was killed, crashed, or exited without cleanup"

    def _lose(self, why: str) -> None:
        """End waits, tell rank 0's engine, and of rank 0 the other processes."""
        with self._losing:
            if self.why or (self.index == 0 and self._closing.is_set()):
                return
            self.why, self.record.lost = why, 1
        self._on_lost(why)
        if self.index == 0:
            self._stop(why)

    def _stop(self, why: str) -> None:
        for link in self._links:
            with suppress(OSError), self._sending:  # of one that has gone
                link.send_bytes(why.encode())

    def _look(self) -> None:
        """A thread: look for processes that have ended."""
        while not self._closing.wait(_LOOK_S):
            if self.index > 0 and self._receiving.acquire(blocking=False):  # else the thread that computes sees what comes
                try:
                    self.record.lost |= self._links[0].poll(0) and self._ends()
                finally:
                    self._receiving.release()
            for rank, link in enumerate(self._links if self.index == 0 and not self.why else (), 1):
                if link.poll(0):
                    try:
                        self._lose(link.recv_bytes().decode())
                    except (EOFError, OSError):
                        self._lose(self._gone(rank))

    def _ends(self) -> bool:
        """Whether what has come from rank 0 is no forward: a text, or the end of the connection.

        [Note: Looking while nobody receives] A message is 4 bytes of its length and then itself. While the other thread is between
        the two, what comes next looks like a text: the forward would end, and its process with it. So who looks holds `_receiving`.
        """
        with socket.socket(fileno=os.dup(self._links[0].fileno())) as end:
            head = end.recv(5, socket.MSG_PEEK)
        return head[4:] != _PICKLE if len(head) == 5 else head in (b"", bytes(4))  # ended, or an empty text; else more comes

    def close(self) -> None:
        """Rank 0: stop the others. Others: wait until rank 0 stops, then raise PeerLostError if a process was lost. Idempotent."""
        if self.index == 0 and not self._closing.is_set():
            with self._losing:
                self._closing.set()
            if not self.why:
                self._stop("")
        while self.index and len(self._threads) > 1 and not self._closing.is_set():
            with suppress(KeyboardInterrupt):  # Ctrl-C reaches all processes, and rank 0 ends them
                self._closing.wait()  # not join(): an interrupted one takes the thread for ended
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for link in self._links:
            link.close()
        if dist.is_initialized() and self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        if self.index and self.why:
            raise PeerLostError(self.why)
