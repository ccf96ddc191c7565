"""The processes that compute one model, or its experts. Rank 0 schedules, samples and answers; the others follow its forwards.

`config.ModelPart` says which columns of which product a process computes: with `tp_size` those of all products, and its heads with
their cache; else only those of experts, and every process computes the rest for the whole batch. In the native forward, one process
computes a column from whole rows of inputs, in the same order as a single process would: results are bit-identical to those of one
process, and no quantization group is cut. On one host the rows are in memory that all processes map, and an exchange is a barrier
(ranks_meet of csrc/decoder.c), four per dense layer; between hosts gloo adds them to zeros. Other forwards add terms (`joined`).

Rank 0 posts each forward to the others before it computes its own part. On one host it writes the numbers to shared memory and
increments a counter on which the others wait, spinning at first. Between hosts it sends them, and a thread posts them there. Each
forward has an exchange, so no message is overwritten before all have read it. To stop the others, rank 0 sends a reason, or an
empty text. A process that ends closes its connection. Then waits in a forward end, rank 0's engine fails, and rank 0 names the lost
process to the others.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import secrets
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from multiprocessing import AuthenticationError
from multiprocessing import connection as connections
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream.inference.config import ModelPart
from slipstream.inference.core import NUM_ARRAYS, BatchNumbers, PartRunner, Runner
from slipstream.inference.load import LoadedModel
from slipstream.ops import cpu, words
from slipstream.parallel.exchange import Exchange, connect_activations
from slipstream.world.join import init_distributed
from slipstream.world.mesh import Axis
from slipstream.world.peers import Peer, meet
from slipstream.world.watch import PeerLostError, Watch

logger = logging.getLogger(__name__)

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_Exchange = ctypes.CFUNCTYPE(_int, ctypes.POINTER(ctypes.c_float), _long)
_LINE = 64  # bytes between counters
_FORWARD = b"\x80"  # first byte of a forward sent between hosts; texts never start with it
_DAY_S = 86400.0
_LOOK_S = 0.1  # seconds; the longest time until a thread notices that this process closes
_SPIN_US, _SPINS = 1000, 80_000  # before a wait sleeps: for the next forward, longer than rank 0 takes between two; in one
_CROWDED_SPINS = 100  # used if the processes of this host have more threads than cores
_NAMED_S = 3.0  # limit for rank 0 to name a lost process
_ABORT_S = 10.0  # limit for aborting GPU operations that wait for a lost process


class RanksRecord(ctypes.Structure):
    """`struct ranks` of csrc/decoder.h."""

    _fields_ = (
        *((name, _int) for name in ("size", "index", "lost", "spins")),
        *((name, ctypes.c_uint32) for name in ("meetings", "turn")),
        ("turn_size", _long),
        ("arrived", _pointer),
        ("exchange", _Exchange),
    )


class ServingRanks:
    """The constructor is collective over all processes of the job. `max_rows`: tokens of a forward; may change until `share`."""

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
        self.why = ""  # why this engine cannot continue; "" if it can
        self.watch = Watch(_DAY_S)  # for the sums of transformers' code, whose waits end with `why`
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
        self._sums: Exchange | None = None
        self._nccl: dist.ProcessGroup | None = None  # of the same processes
        self._aborting: threading.Thread | None = None
        self.release: Callable[[], object] = bool  # drops the graphs that hold operations of the group, which cannot end before
        self.axis = Axis("tp", self._group, tuple(range(size)), self.index, size)
        self.gather = self.axis.gather
        self._peers: list[Peer] = meet(self.axis)
        local = [peer.rank for peer in self._peers if peer.host == self._peers[self.index].host]
        self.neighbors, self.place = len(local), local.index(self.index)  # processes on this host; this one's index among them
        self.on_one_host = self.neighbors == size
        self.sharing, self.num_devices = self.neighbors, 1
        self._callback = _Exchange(self._exchange)  # kept alive: C has its address
        self._on_lost: Callable[[str], object] = lambda why: None
        self._sending, self._losing = threading.Lock(), threading.Lock()
        self._closing = threading.Event()
        self._posts, self._stopped = 0, False
        self._links = self._connect()  # rank 0: to the others, by rank - 1; others: to rank 0
        self._threads = [threading.Thread(target=self._look, name="slipstream-ranks", daemon=True)]
        self._threads[0].start()

    # -- opening; collective --

    def compute_on(self, device: torch.device) -> None:
        """Set `sharing`, the number of this host's processes on the same device, and `num_devices` of all. Collective."""
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        devices = self.gather((self._peers[self.index].host, device.type, uuid))
        self.sharing, self.num_devices = devices.count(devices[self.index]), len(set(devices))

    def together(self, read: Callable[[], LoadedModel], **options: object) -> LoadedModel:
        """Return `read()`. Raises ValueError on all ranks if one rank fails or differs, because all must compute the same bits with
        equal operations. `options`: other values that must be equal."""
        text = ""
        try:
            loaded = read()
            model = hashlib.sha256(repr(replace(loaded.config, part=ModelPart())).encode()).hexdigest()[:8]
            options |= {"token_budget": self.max_rows, "instructions": cpu.isa(), "part": replace(loaded.config.part, index=0)}
            text = f"model {model}, {loaded.opening.kind}, {loaded.dtype}, {', '.join(f'{key} {options[key]}' for key in options)}"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise
        finally:
            texts = self.gather(text)
        if len(set(texts)) > 1:
            raise ValueError(f"the ranks differ; open one model with the same options on like processors: {texts}")
        return loaded

    def exchange(self, device: torch.device) -> Exchange:
        """The exchange that sums the terms of all processes: NCCL if each process has its own GPU, gloo if they share one; on CPUs,
        shared memory within a host and gloo between hosts. Collective, after `compute_on`."""
        axis, transport = self.axis, "auto" if self.on_one_host else "gloo"
        if device.type == "cuda" and self.have_a_device_each:
            self._nccl = dist.new_group(backend="nccl")
            axis = replace(axis, group=self._nccl)
            if self.why:  # `_lose` ran before there was a group to abort
                raise self.error()
        self._sums = connect_activations(axis, device, transport, self.watch, in_rank_order=True)
        if self.over_nccl:  # create the communicator now, while no rank has work of its own that can fail
            self._sums.sum(torch.zeros(self.size, device=device))
            torch.cuda.synchronize(device)
        return self._sums

    @property
    def have_a_device_each(self) -> bool:
        return self.num_devices == self.size

    @property
    def over_nccl(self) -> bool:
        return self._nccl is not None

    def share(self, widths: Mapping[str, int], *, threads: int, message_nbytes: int) -> dict[str, int]:
        """Allocate memory that all processes fill: rows of these bytes. Returns the addresses. Pages take memory when written.
        `threads`: of this process. `message_nbytes`: the most bytes of a forward's numbers."""
        counters = -(-(self.size + 2) * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        sizes = [-(-one // _LINE) * _LINE for one in (message_nbytes, *(self.max_rows * width for width in widths.values()))]
        nbytes = counters + sum(sizes)
        with os.fdopen(os.memfd_create("slipstream-ranks", os.MFD_CLOEXEC), "r+b") as own:
            own.truncate(nbytes)
            pid, number = self._peers[0].pid if self.on_one_host else os.getpid(), self.gather(own.fileno())
            with open(f"/proc/{pid}/fd/{number[0 if self.on_one_host else self.index]}", "r+b", buffering=0) as file:
                self._mapping = mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED)
            self.gather(None)  # all processes have opened it
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.record.exchange = self._callback
        self.record.arrived = address if self.on_one_host else None
        self._posted, self._message = address + (self.size + 1) * _LINE, memoryview(self._mapping)[counters : counters + sizes[0]]
        crowded = self._are_crowded(threads)
        self.record.spins, self._spin_us = (_CROWDED_SPINS, 0) if crowded else (_SPINS, _SPIN_US)
        _, *rows = accumulate(sizes[:-1], initial=address + counters)
        return dict(zip(widths, rows, strict=True))

    def _are_crowded(self, threads: int) -> bool:
        host, shares = self._peers[self.index].host, self.gather((threads, os.sched_getaffinity(0)))
        local = [one for one, peer in zip(shares, self._peers, strict=True) if peer.host == host]
        return sum(num for num, _ in local) > len(set().union(*(cores for _, cores in local)))

    def _connect(self) -> list[Connection]:
        place = "127.0.0.1" if self.on_one_host else ""
        listener = Listener((place, 0), backlog=self.size, authkey=(key := secrets.token_bytes(16))) if self.index == 0 else None
        port, key = self.gather((listener.address[1], key) if listener else None)[0]
        if listener is None:
            links = {0: Client((place or os.environ.get("MASTER_ADDR", "127.0.0.1"), port), authkey=key)}
            links[0].send_bytes(str(self.index).encode())
        else:
            links = {}
            while len(links) < self.size - 1:
                with suppress(AuthenticationError, EOFError, OSError):  # not a process of this engine
                    link = listener.accept()
                    links[int(link.recv_bytes())] = link
            listener.close()
        for link in links.values():  # a forward must not wait until the last message is received
            with socket.socket(fileno=os.dup(link.fileno())) as end:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return [links[rank] for rank in sorted(links)]

    # -- a forward --

    @contextmanager
    def forward(self, numbers: BatchNumbers) -> Iterator[None]:
        """Rank 0's context for its part of a forward, which the others start too. An error inside is final for all."""
        if self.why:
            raise self.error()
        message = b"".join((array("i", map(len, numbers.arrays)), *numbers.arrays))
        if self.on_one_host:
            self._post(message)
        else:
            self._send(_FORWARD + message)
        try:
            yield
        except BaseException as error:
            self._lose(f"a forward failed on rank 0: {type(error).__name__}: {error}")
            raise

    def _post(self, message: bytes) -> None:
        self._message[: len(message)] = message
        self._posts += 1
        words.store_release_and_wake(self._posted, self._posts)

    def _follow(self, run: Callable[[BatchNumbers], object]) -> None:
        number = 1
        try:
            while self._comes(number):
                run(self._received())
                number += 1
        except PeerLostError as error:
            self._lose(str(error))
        except BaseException as error:
            if not self.why:  # else another process ended, and its operations were aborted
                logger.exception("rank %d cannot compute its part of a forward", self.index)
                self.fail(f"rank {self.index} failed: {type(error).__name__}: {error}")
        finally:
            self._closing.set()

    def _comes(self, number: int) -> bool:
        """Wait until forward `number` is posted; False if this engine stops."""
        spin = self._spin_us
        while not self.why and not self._stopped:
            if words.wait_at_least(self._posted, number, spin, int(_LOOK_S * 1000)):
                return True
            spin = 0
        return False

    def _received(self) -> BatchNumbers:
        sizes = array("i", bytes(self._message[: 4 * NUM_ARRAYS]))
        ends = accumulate(sizes, initial=len(sizes))
        return BatchNumbers(*(array("i", bytes(self._message[4 * start : 4 * stop])) for start, stop in pairwise(ends)))

    def _exchange(self, rows: Any, count: int) -> int:
        """Between hosts: add `rows`, fp32, of all processes."""
        try:
            dist.all_reduce(torch.from_numpy(np.ctypeslib.as_array(rows, (count,))), group=self._group)
        except Exception:  # C cannot raise; `native` does
            logger.debug("an exchange failed", exc_info=True)
            return 1
        return 0

    # -- lost processes --

    def start(self, run: Callable[[BatchNumbers], object], on_lost: Callable[[str], object]) -> None:
        """Threads: call `on_lost(why)` when a process is lost; above rank 0, compute rank 0's forwards by `run`."""
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

    def fail(self, why: str) -> None:
        """Report that this process cannot continue, and end the other processes' waits for it."""
        if self.index:
            self._send(why.encode())
        self._lose(why)

    def fail_opening(self, error: BaseException) -> None:
        if self.why:
            error.add_note(self.why)  # the cause: another process ended
        self.fail(f"rank {self.index} cannot open the model: {type(error).__name__}: {error}")

    def _lose(self, why: str) -> None:
        """End all waits, tell rank 0's engine and, on rank 0, the other processes."""
        with self._losing:
            if self.why or (self.index == 0 and self._closing.is_set()):
                return
            self.why, self.record.lost, self.watch.failure = why, 1, why
        self._on_lost(why)
        if self.index == 0:
            self._send(why.encode())
        if self._nccl is not None:  # its kernels wait on the GPU without end; the abort waits for `release` to drop the graphs
            self._aborting = threading.Thread(target=self._nccl.abort, name="slipstream-abort", daemon=True)
            self._aborting.start()

    def _send(self, message: bytes) -> None:
        for link in self._links:
            with suppress(OSError), self._sending:  # if the process is gone, the forward fails
                link.send_bytes(message)

    def _look(self) -> None:
        """Runs in a thread: receives messages of other processes, and notices when they end."""
        ranks = {link: rank for rank, link in enumerate(self._links, self.index == 0)}
        while not (self._closing.is_set() or self.why or self._stopped):
            for link in connections.wait([*ranks], _LOOK_S):
                assert isinstance(link, Connection), "one of ranks"
                try:
                    message = link.recv_bytes()
                except (EOFError, OSError):
                    message = self._gone(ranks[link]).encode()
                if message.startswith(_FORWARD):
                    self._post(message[1:])
                elif message:
                    self._lose(message.decode())
                else:
                    self._stopped = True

    def close(self) -> None:
        """Rank 0: stop the others. Others: wait until rank 0 stops, then raise PeerLostError if a process was lost. Idempotent."""
        if self.index == 0 and not self._closing.is_set():
            with self._losing:
                self._closing.set()
            if not self.why:
                self._send(b"")
        while self.index and len(self._threads) > 1 and not self._closing.is_set():
            with suppress(KeyboardInterrupt):  # Ctrl-C reaches all processes, and rank 0 ends them
                self._closing.wait()  # not join(): an interrupted join() takes the thread for ended
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for link in self._links:
            link.close()
        try:
            self.release()
        except RuntimeError:  # the device has failed
            logger.exception("rank %d cannot free its graphs", self.index)
        self._leave_groups()
        if self.index and self.why:
            raise PeerLostError(self.why)

    def _leave_groups(self) -> None:
        if self._sums is not None:
            self._sums.close()
        if self._aborting is not None:
            self._aborting.join(_ABORT_S)
        aborted = self._nccl if self.why else None
        for group in (self._nccl, self._group):
            if group is not None and group is not aborted and dist.is_initialized():
                dist.destroy_process_group(group)
        self._nccl = self._group = None


def message_nbytes(max_rows: int, runner: Runner) -> int:
    """The most bytes of a forward's numbers."""
    blocks = min(-(-runner.max_context // runner.block_size) + 1, runner.num_blocks)  # of a sequence
    return 4 * (max_rows * (7 + blocks) + 2 * runner.num_blocks + 16)


class RanksRunner(PartRunner):
    """Wraps the runner of this process's part; rank 0's calls are followed by the other processes.

    All processes exchange what a forward computes, so all are in it before rank 0 leaves it."""

    generate = None  # it does not run several steps per call

    def __init__(self, own: Any, ranks: ServingRanks, device: torch.device) -> None:
        self.own, self.ranks, self._device = own, ranks, device
        self.num_blocks, self.block_size, self.vocab_size = own.num_blocks, own.block_size, own.vocab_size
        self.max_context, self.short_context, self.config = own.max_context, own.short_context, getattr(own, "config", None)

    def put(self, role: str, weight: Any) -> None:
        raise AssertionError(f"{role}: a model over processes is opened again for new weights")

    def run(self, numbers: BatchNumbers) -> Any:
        with self.ranks.forward(numbers):
            return self.follow(numbers)

    def follow(self, numbers: BatchNumbers) -> Any:
        """Compute this process's part of a forward that rank 0 has posted."""
        self.ranks.watch.step += 1  # operations of a forward are compared with those of earlier forwards
        result = self.own.run(numbers)
        if self._device.type == "cuda":  # the next forward overwrites this one's numbers, which others may not have read yet
            torch.cuda.synchronize(self._device)
        if self.ranks.why:
            raise self.ranks.error()
        return result
