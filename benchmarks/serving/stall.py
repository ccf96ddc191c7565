"""`python -m benchmarks.serving.stall`: the longest gap in one client's stream while others send what is dear to prepare. Prints.

It starts `slipstream serve` (MODEL, by default smollm2) once per load, and reads a stream of it in a process of its own. The first
line is the machine's and the model's own: the stream alone. Memory is the server's, from /proc: before, at most, and 2 s after.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

TEXT = "The quick brown fox jumps over the lazy dog, number 17. "
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["city", "people"],
}
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


def chat(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}] * number}


def schema() -> dict[str, Any]:
    return {**chat(1), "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}}


LOADS = (
    Load("one prompt of 700 kB", COMPLETIONS, 1, lambda: {"prompt": text(700_000)}),
    Load("16 prompts of 4 MB", COMPLETIONS, 16, lambda: {"prompt": text(4_000_000)}),
    Load("16 prompts of 4 MB without a space", COMPLETIONS, 16, lambda: {"prompt": text(4_000_000).replace(" ", "")}),
    Load("8 prompts of 1.3 million ids", COMPLETIONS, 8, lambda: {"prompt": [1] * 1_300_000}),
    Load("8 chats of 80,000 messages", CHAT, 8, lambda: chat(80_000)),
    Load("200 chats of 1,500 messages", CHAT, 200, lambda: chat(1_500)),
    Load("the first JSON schema", CHAT, 1, schema),
)


def watch(address: str, tell: Connection) -> None:
    """Streams until told to end; sends the longest gap in seconds since it was last asked, and the number of events."""
    times: list[float] = []

    def read() -> None:
        while True:
            connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
            ask = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            connection.request("POST", COMPLETIONS, json.dumps(ask), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())

    threading.Thread(target=read, daemon=True).start()
    while tell.recv():
        known, times[:] = [*times, time.perf_counter()], times[-1:]
        tell.send((max((b - a for a, b in pairwise(known)), default=0.0), len(known)))


@contextmanager
def server(model: str) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "slipstream.launch.cli", "serve", model, "--port", port, "--model-name", "smollm2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://(\S+?:\d+)", line)
        assert found is not None, f"the server says {line!r}"
        yield found[1], process.pid
    finally:
        process.kill()
        process.wait()


def memory(pid: int, name: str = "VmRSS") -> float:
    """MB."""
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(f"{name}:")) / 1e3


def send(address: str, load: Load) -> dict[int, int]:
    """How many had each status."""
    body = json.dumps({"model": "smollm2", "max_tokens": 8, **load.fields()}).encode()
    statuses: list[int] = []

    def one() -> None:
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
        connection.request("POST", load.path, body, {"Content-Type": "application/json"})
        statuses.append(connection.getresponse().status)

    threads = [threading.Thread(target=one) for _ in range(load.times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {status: statuses.count(status) for status in sorted(set(statuses))}


def unfinished(address: str, number: int = 300, size: int = 4_000_000) -> dict[int, int]:
    """Bodies of which the last byte never comes."""
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


def measure(model: str, name: str, run: Callable[[str], dict[int, int]]) -> None:
    """One line."""
    context = multiprocessing.get_context("spawn")
    with server(model) as (address, pid):
        ours, other = context.Pipe()
        watcher = context.Process(target=watch, args=(address, other), daemon=True)
        watcher.start()
        time.sleep(3)
        before = memory(pid)
        ours.send(True)
        ours.recv()
        began = time.perf_counter()
        statuses = run(address)
        seconds = time.perf_counter() - began
        time.sleep(0.2)
        ours.send(True)
        gap, events = ours.recv()
        time.sleep(1.8)
        sizes = f"{before:.0f} -> {memory(pid, 'VmHWM'):.0f} -> {memory(pid):.0f} MB"
        print(f"{name:36} {gap * 1e3:8.0f} ms longest gap {events:6} events {seconds:7.1f} s  {sizes}  {statuses}", flush=True)
        ours.send(False)
        watcher.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.stall", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", default="", metavar="WORDS", help="loads whose name has these")
    options = parser.parse_args()
    loads: dict[str, Callable[[str], dict[int, int]]] = {"nothing": lambda address: time.sleep(5) or {}}
    loads |= {load.name: lambda address, load=load: send(address, load) for load in LOADS}  # type: ignore[misc]
    loads["300 unfinished bodies of 4 MB"] = unfinished
    for name, run in loads.items():
        if options.only in name:
            measure(options.model, name, run)


if __name__ == "__main__":
    main()
