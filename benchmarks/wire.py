"""The leg `wire`: bytes that a rank sends per step, counted by the kernel, outside every contender's code.

Each rank runs in a network namespace of its own; a bridge joins them. What its interface has sent is read before and after K
steps, while all ranks wait. Shared memory sends nothing, so ours runs with gloo forced.

Of slices and shares of sequences, steps of one and of three micro-batches differ by the activations of two: gradients are reduced
once a step at stage 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks import systems
from benchmarks.legs import Options
from benchmarks.peers import Peers, prepare
from benchmarks.ranks import Ranks, Seat
from benchmarks.report import table, verdict, verdicts
from benchmarks.step import start
from benchmarks.worker import Failed
from benchmarks.workloads import Workload

WORK = Workload(name="wire", width=512, depth=6, heads=8, vocab=4096, batch=1, length=16)
K = 2
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

AXES = Workload(name="axes", width=256, depth=4, heads=8, vocab=64, batch=2, length=512)
# In (N-1)/N x the bytes of a micro-batch's activations [b, S, h] (parallelism.md 3 and 4): four sums over slices, which send each
# element twice, or eight all-to-alls of shares
PER_BLOCK: Mapping[str, Callable[[int], float]] = {
    "slipstream:mesh:tp{}.gloo": lambda ranks: 8,
    "slipstream:sp:gloo": lambda ranks: 8 / ranks,
}

_networks = itertools.count()


class NoNetwork(RuntimeError):
    """Namespaces cannot be made here, for the reason in the text."""


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoNetwork(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _limit(space: str, rate: str) -> None:
    _ip("netns", "exec", space, *f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 400ms".split())


@contextlib.contextmanager
def two_groups(world: int, rate: str) -> Iterator[tuple[Seat, list[Path]]]:
    """As `network`, of two groups of neighboring ranks: within a group no limit, and one link between the groups.

    rate: of the link, each way. The files count what crosses it, each way. Raises NoNetwork.
    """
    with network(world) as (seat, counters):
        tag = counters[0].parts[-3].removeprefix("sv").rpartition("r")[0]
        other, ends = f"so{tag}", (f"sl{tag}a", f"sl{tag}b")
        try:
            _ip("link", "add", other, "type", "bridge")
            _ip("link", "set", other, "mtu", "65535", "up")
            _ip("link", "add", ends[0], "mtu", "65535", "type", "veth", "peer", "name", ends[1], "mtu", "65535")
            for end, bridge in zip(ends, (f"sb{tag}", other), strict=True):
                _ip("link", "set", end, "master", bridge, "up")
                shaped = subprocess.run(
                    f"tc qdisc add dev {end} root tbf rate {rate} burst 256kb latency 400ms".split(), capture_output=True, text=True
                )
                if shaped.returncode:
                    raise NoNetwork(f"tc: {shaped.stderr.strip()}")
            for rank in range(world // 2, world):
                _ip("link", "set", f"sv{tag}r{rank}", "master", other)
            yield seat, [Path(f"/sys/class/net/{end}/statistics/rx_bytes") for end in ends]
        finally:
            for link in (ends[0], other):
                with contextlib.suppress(NoNetwork):
                    _ip("link", "del", link)


@contextlib.contextmanager
def network(world: int, rate: str = "") -> Iterator[tuple[Seat, list[Path]]]:
    """One namespace per rank on a bridge: the seat of the ranks, and for each rank the file that counts what it has sent.

    rate: what a rank can send, in tc's units (200mbit); default: no limit.

    Raises NoNetwork if this machine or user cannot make them.
    """
    if shutil.which("ip") is None:
        raise NoNetwork("there is no command `ip` (package iproute2)")
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
            if rate:
                _limit(space, rate)
        seat = Seat(
            prefix=lambda rank: ("ip", "netns", "exec", spaces[rank]), env={"GLOO_SOCKET_IFNAME": "eth0"}, address="10.77.0.1"
        )
        # The outer end of a pair has received what the rank's end has sent
        yield seat, [Path(f"/sys/class/net/{link}/statistics/rx_bytes") for link in outer]
    finally:
        for arguments in [("netns", "del", space) for space in spaces] + [("link", "del", bridge)]:
            with contextlib.suppress(NoNetwork):
                _ip(*arguments)


def sent_per_step(system: str, world: int, peers: Peers) -> list[float]:
    """Bytes per step, by rank."""
    with network(world) as (seat, counters), start(system, WORK, "bf16", world, peers, seat) as ranks:

        def sent() -> list[int]:
            ranks.call("steps", count=K)
            return [int(counter.read_text()) for counter in counters]

        return [(after - before) / K for before, after in zip(sent(), sent(), strict=True)]


def sent_per_block(system: str, world: int) -> float:
    """Bytes of a block's forward and backward of a micro-batch, by the rank that sends most."""
    sent = []
    for micros in (1, 3):
        arguments = {"system": system, "work": dataclasses.asdict(AXES), "micros": micros, "stage": 0}
        with (
            network(world) as (seat, counters),
            Ranks("benchmarks.layouts_worker:train", arguments, world, name=system, seat=seat) as ranks,
        ):
            read = []
            for _ in range(2):
                ranks.call("steps", count=K)
                read.append([int(counter.read_text()) for counter in counters])
            sent.append([(after - before) / K for before, after in zip(*read, strict=True)])
    return max((three - one) / 2 / AXES.depth for one, three in zip(*sent, strict=True))


def run_axes(options: Options) -> str:
    rows, judged = [], []
    for name, factor in PER_BLOCK.items():
        for world in (2,) if options.quick else (2, 4):
            system = name.format(world)
            axis = "slices (tp)" if "tp" in name else "shares of sequences (Ulysses)"
            try:
                sent = sent_per_block(system, world)
            except NoNetwork as error:
                return f"Not measured: {error}."
            except Failed as error:
                print(error)
                rows.append([str(world), axis, "", error.reason])
                continue
            formula = factor(world) * (world - 1) / world * AXES.batch * AXES.length * AXES.width * 4
            print(f"  wire {world} ranks {system}: {sent / formula:.3f} of the formula", flush=True)
            rows.append([str(world), axis, f"{formula / 1e6:.3f}", f"{sent / 1e6:.3f}", f"{sent / formula:.3f}"])
            judged.append(verdict(f"bytes of a block over the formula, {axis}, {world} ranks", sent / formula, TARGET, digits=3))
    return "\n\n".join(
        (
            f"Activations of a block of a Llama (width {AXES.width}, {AXES.batch}x{AXES.length} tokens, fp32), forward and "
            f"backward of a micro-batch: MB sent by the rank that sends most, beside the formula.",
            table(["ranks", "axis", "formula, MB", "sent, MB", "over it"], rows),
            verdicts(judged),
        )
    )


def run(options: Options) -> str:
    peers = prepare(options.peers)
    names = [name for name in FORMULA if peers.python or not systems.needs_peers(name)]
    ours = [name for name in names if name.startswith("slipstream")]
    runs = [(2, name) for name in names] + [(4, name) for name in ours]
    if options.quick:
        runs = [(2, "slipstream:1:gloo"), (2, "slipstream:3:gloo")]
    rows, judged = [], []
    for world, system in runs:
        try:
            sent = max(sent_per_step(system, world, peers))
        except NoNetwork as error:
            return f"Not measured: {error}."
        except Failed as error:
            print(error)
            rows.append([str(world), systems.label(system), "", error.reason])
            continue
        formula = FORMULA[system] * (world - 1) / world * WORK.num_params * ITEMSIZE * (2 if system == "ddp" else 1)
        print(f"  wire {world} ranks {system}: {sent / formula:.3f} of the formula", flush=True)
        name = systems.label(system) + (", fp32" if system == "ddp" else "")
        rows.append([str(world), name, f"{formula / 1e6:.2f}", f"{sent / 1e6:.2f}", f"{sent / formula:.3f}"])
        if system in ours:
            judged.append((sent / formula, f"{world} ranks, {systems.label(system)}"))
    worst, where = max(judged)
    return "\n\n".join(
        (
            f"{WORK.num_params / 1e6:.1f}M parameters, bf16 ({ITEMSIZE} bytes each), one micro-batch; MB sent per step by the rank "
            f"that sends most, in the {K} steps after the first {K}, packet headers included. Each contender runs once: bytes "
            f"hardly vary. Gradients and weights are sent in bf16; DDP's in fp32, as in its formula: torch rejects its bf16 "
            f"compression hook on CPUs. {peers}.",
            table(["ranks", "contender", "formula, MB", "sent, MB", "over it"], rows),
            verdicts([verdict(f"bytes on the wire over the formula, worst ({where})", worst, TARGET, digits=3)]),
        )
    )
