"""The leg `wire`: bytes that a rank sends per step, counted by the kernel outside every contender's code.

Each rank sits in a network namespace of its own, joined to the others by a bridge; what its interface has sent is read
after K and after 2K steps, while all ranks stand still. Shared memory sends nothing, so ours runs with gloo forced.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks import systems
from benchmarks.peers import Peers
from benchmarks.ranks import RunError, Seat, run_ranks
from benchmarks.report import machine, table, verdict, verdicts
from benchmarks.worker import Job
from benchmarks.workloads import Workload

WORK = Workload(name="wire", width=512, depth=6, heads=8, vocab=4096, batch=1, length=16)
K = 4
TARGET = 1.02
ITEMSIZE = 2  # bf16

# In units of (N-1)/N x the bytes of all parameters (performance.md 2.4), one micro-batch
FORMULA = {
    "slipstream:0:gloo": 2,
    "slipstream:1:gloo": 2,
    "slipstream:2:gloo": 2,
    "slipstream:3:gloo": 3,
    "ddp": 2,
    "fsdp2:keep": 2,
    "fsdp2:reshard": 3,
    "deepspeed:1": 2,
    "deepspeed:2": 2,
    "deepspeed:3": 3,
}


_networks = itertools.count()


class NoNetwork(RuntimeError):
    """Namespaces cannot be made here; the text says why."""


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoNetwork(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def network(world: int) -> Iterator[tuple[Seat, list[Path]]]:
    """One namespace per rank on a bridge; gives the seat of the ranks and the files that count what each has sent.

    Raises NoNetwork where this machine or user cannot have that.
    """
    if shutil.which("ip") is None:
        raise NoNetwork("the command `ip` is not there (package iproute2)")
    if os.geteuid() != 0:
        raise NoNetwork("making network namespaces needs root")
    tag = f"{os.getpid() % 10000}n{next(_networks)}"  # never used twice: the kernel removes interfaces when it gets to it
    bridge = f"sb{tag}"
    spaces = [f"slipstream-{tag}-{rank}" for rank in range(world)]
    outer = [f"sv{tag}r{rank}" for rank in range(world)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "mtu", "65535", "up")
        for rank, (space, link) in enumerate(zip(spaces, outer, strict=True)):
            _ip("netns", "add", space)
            _ip("link", "add", link, "mtu", "65535", "type", "veth", "peer", "name", "eth0", "mtu", "65535", "netns", space)
            _ip("link", "set", link, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        seat = Seat(
            prefix=lambda rank: ("ip", "netns", "exec", spaces[rank]), env={"GLOO_SOCKET_IFNAME": "eth0"}, address="10.77.0.1"
        )
        # What the outer end of a pair has received is what the rank's end has sent
        yield seat, [Path(f"/sys/class/net/{link}/statistics/rx_bytes") for link in outer]
    finally:
        for arguments in [("netns", "del", space) for space in spaces] + [("link", "del", bridge)]:
            with contextlib.suppress(NoNetwork):
                _ip(*arguments)


def sent_per_step(system: str, world: int, peers: Peers) -> list[float]:
    """Bytes per step, by rank."""
    with network(world) as (seat, counters):
        reads: list[list[int]] = []
        job = Job(system=system, work=WORK, dtype="bf16", steps=2 * K, marks=(K, 2 * K))
        run_ranks(
            job, world, peers, seat=seat, on_mark=lambda steps: reads.append([int(counter.read_text()) for counter in counters])
        )
        return [(after - before) / K for before, after in zip(*reads, strict=True)]


def run(peers: Peers, *, quick: bool) -> str:
    contenders = [name for name in FORMULA if peers.python or not systems.needs_peers(name)]
    if quick:
        contenders = ["slipstream:1:gloo", "slipstream:3:gloo"]
    rows, judged = [], []
    for world in (2,) if quick else (2, 4):
        unit = (world - 1) / world * WORK.num_params * ITEMSIZE
        for system in contenders:
            try:
                sent = max(sent_per_step(system, world, peers))
            except NoNetwork as error:
                return f"{machine(peers)}\n\nNot measured: {error}."
            except RunError as error:
                print(error)
                rows.append([str(world), systems.label(system), "", str(error).strip().splitlines()[-1], ""])
                continue
            formula = FORMULA[system] * unit * (2 if system == "ddp" else 1)
            print(f"  wire {world} ranks {system}: {sent / formula:.3f} of the formula", flush=True)
            name = systems.label(system) + (", fp32" if system == "ddp" else "")
            rows.append([str(world), name, f"{formula / 1e6:.2f}", f"{sent / 1e6:.2f}", f"{sent / formula:.3f}"])
            if system.startswith("slipstream"):
                judged.append((sent / formula, f"{world} ranks, {systems.label(system)}"))
    worst, where = max(judged)
    return "\n\n".join(
        (
            machine(peers),
            f"{WORK.num_params / 1e6:.1f}M parameters, bf16 ({ITEMSIZE} bytes each), one micro-batch; MB sent per step by the rank "
            f"that sends most, between {K} and {2 * K} steps, packet headers included. Each contender runs "
            f"once: bytes hardly vary. Gradients and weights travel in bf16; DDP's gradients in "
            f"fp32, and so is its formula: torch refuses its bf16 compression hook on CPUs.",
            table(["ranks", "contender", "formula, MB", "sent, MB", "over it"], rows),
            verdicts([verdict(f"bytes on the wire over the formula, worst ({where})", worst, TARGET, digits=3)]),
        )
    )
