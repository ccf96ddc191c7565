"""The leg `stall`: the longest gap in one client's stream while others send requests that are expensive to prepare.

`slipstream serve smollm2` runs once for each load, and a process of its own reads a stream of it. The first row is the stream
alone. Memory is the server's, from /proc: before, at most, and 2 s after.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.legs import Options
from benchmarks.report import table
from benchmarks.serving.load import server
from benchmarks.worker import Worker

if TYPE_CHECKING:
    from benchmarks.worker import Channel

TEXT = "The quick brown fox jumps over the lazy dog, number 17. "
PROPERTIES = {"city": {"type": "string"}, "people": {"type": "integer"}}
SCHEMA = {"name": "place", "schema": {"type": "object", "properties": PROPERTIES, "required": ["city", "people"]}}
TIMEOUT = 300.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Load(NamedTuple):
    """`times` requests of the same body at once."""

    name: str
    path: str
    times: int
    fields: Callable[[], dict[str, Any]]


def text(size: int) -> str:
    return (TEXT * (size // len(TEXT) + 1))[:size]


def chat(number: int, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}] * number, **fields}


LOADS = (
    Load("one prompt of 700 kB", COMPLETIONS, 1, lambda: {"prompt": text(700_000)}),
    Load("16 prompts of 4 MB", COMPLETIONS, 16, lambda: {"prompt": text(4_000_000)}),
    Load("16 prompts of 4 MB without a space", COMPLETIONS, 16, lambda: {"prompt": text(4_000_000).replace(" ", "")}),
    Load("8 prompts of 1.3 million ids", COMPLETIONS, 8, lambda: {"prompt": [1] * 1_300_000}),
    Load("8 chats of 80,000 messages", CHAT, 8, lambda: chat(80_000)),
    Load("200 chats of 1,500 messages", CHAT, 200, lambda: chat(1_500)),
    Load("the first JSON schema", CHAT, 1, lambda: chat(1, response_format={"type": "json_schema", "json_schema": SCHEMA})),
)


def watch(channel: Channel, address: str) -> None:
    """A worker that streams without end."""
    times: list[float] = []

    def read() -> None:
        while True:
            connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
            request = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            connection.request("POST", COMPLETIONS, json.dumps(request), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())

    def longest() -> tuple[float, int]:
        """The longest gap in seconds since the last call, and the number of events."""
        known, times[:] = [*times, time.perf_counter()], times[-1:]
        return max((b - a for a, b in pairwise(known)), default=0.0), len(known)

    threading.Thread(target=read, daemon=True).start()
    channel.serve({"longest": longest})


def memory(pid: int, name: str = "VmRSS") -> float:
    """MB."""
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(f"{name}:")) / 1e3


def send(address: str, load: Load) -> dict[int, int]:
    """The number of replies by status."""
    body = json.dumps({"model": "smollm2", "max_tokens": 8, **load.fields()}).encode()

    def status(_: int) -> int:
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
        connection.request("POST", load.path, body, {"Content-Type": "application/json"})
        return connection.getresponse().status

    with ThreadPoolExecutor(load.times) as pool:
        return dict(Counter(pool.map(status, range(load.times))))


def unfinished(address: str, number: int = 300, size: int = 4_000_000) -> dict[int, int]:
    """Bodies whose last byte never arrives. Returns those accepted (0) and rejected (503)."""
    sockets = []
    host, port = address.split(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    refused = 0
    for _ in range(number):
        one = socket.create_connection((host, int(port)), timeout=TIMEOUT)
        try:
            one.sendall(head.encode() + b" " * (size - 1))
            one.settimeout(0.001)
            refused += one.recv(12).startswith(b"HTTP/1.1 503")
        except TimeoutError:
            pass
        except OSError:
            refused += 1
        sockets.append(one)
    return {0: number - refused, 503: refused}


HEAD = ("load", "longest gap, ms", "events", "seconds", "server's memory before -> peak -> after, MB", "replies by status")


def measure(name: str, send_load: Callable[[str], dict[int, int]], *options: str) -> list[str]:
    """A row, of a server with these options."""
    with server(*options) as (address, pid), Worker("benchmarks.serving.stall:watch", {"address": address}) as watcher:
        watcher.ready()
        time.sleep(3)
        before = memory(pid)
        watcher.call("longest")
        began = time.perf_counter()
        statuses = send_load(address)
        seconds = time.perf_counter() - began
        time.sleep(0.2)
        gap, events = watcher.call("longest")
        time.sleep(1.8)
        sizes = f"{before:.0f} -> {memory(pid, 'VmHWM'):.0f} -> {memory(pid):.0f}"
        replies = ", ".join(f"{number} x {status or 'none'}" for status, number in statuses.items())
        row = [name, f"{gap * 1e3:.0f}", str(events), f"{seconds:.1f}", sizes, replies]
        print(f"  {' | '.join(row)}", flush=True)
        return row


def run(options: Options) -> str:
    def idle(address: str) -> dict[int, int]:
        time.sleep(5)
        return {}

    loads: dict[str, Callable[[str], dict[int, int]]] = {"nothing": idle}
    loads |= {load.name: lambda address, load=load: send(address, load) for load in LOADS[: 1 if options.quick else None]}  # type: ignore[misc]
    if not options.quick:
        loads["300 unfinished bodies of 4 MB"] = unfinished
    rows = [measure(name, load) for name, load in loads.items() if not options.only or any(word in name for word in options.only)]
    return f"SmolLM2-135M-Instruct; the server and its clients share all cores.\n\n{table(HEAD, rows)}"
