"""The leg `load`: seconds from the start of a process to its first token, and of `slipstream serve` to its first answer over
HTTP.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from benchmarks.legs import Options
from benchmarks.ranks import free_port
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.serving.contenders import INT4, INT8, LLAMA, OURS, VLLM
from benchmarks.serving.measure import MODEL, Run, absent
from benchmarks.worker import ROOT, child_setup

ROUNDS = 2
SERVED = "slipstream serve smollm2 (GGUF), over HTTP"


class Server(NamedTuple):
    address: str  # host:port
    pid: int


@contextmanager
def server(*options: str) -> Iterator[Server]:
    """`slipstream serve smollm2`, which listens when it has loaded."""
    command = [sys.executable, "-m", "slipstream.launch.cli", "serve", "smollm2", "--model-name", "smollm2"]
    command += ["--port", str(free_port()), *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=child_setup()) as process:
        try:
            assert process.stdout is not None, "it is a pipe"
            line = process.stdout.readline()
            match = re.search(r"http://(\S+?:\d+)", line)
            if match is None:
                raise RuntimeError(f"the server printed {line!r} in place of its address")
            yield Server(match[1], process.pid)
        finally:
            process.kill()


def served() -> tuple[float, float]:
    """Seconds from the server's start until it is healthy, and to its first answer."""
    began = time.monotonic()
    with server() as (address, _):
        while not _answers(address, "GET", "/health"):
            if time.monotonic() - began > 60:
                raise RuntimeError("slipstream serve is not healthy after 60 s")
            time.sleep(0.01)
        healthy = time.monotonic() - began
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        if not _answers(address, "POST", "/v1/chat/completions", json.dumps(body)):
            raise RuntimeError("the server does not answer a chat")
        return healthy, time.monotonic() - began


def _answers(address: str, method: str, path: str, body: str | None = None) -> bool:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        return reply.status == 200
    except ConnectionRefusedError:
        return False
    finally:
        connection.close()


def run(options: Options) -> str:
    return measure(Run.of(options, ROUNDS))


def measure(run: Run) -> str:
    seconds: dict[str, list[tuple[float, float]]] = {}
    fleet = run.fleet()
    contenders = run.chosen((OURS, INT8, INT4, LLAMA, VLLM))
    fill = not run.quick  # one more at the beginning, for the page cache
    for turn in range(run.rounds + fill):
        for contender in contenders:
            with fleet:
                process = fleet.start(contender)
            if process is not None and turn >= fill:
                seconds.setdefault(contender.name, []).append((process.loaded, process.first_token))
        over_http = served()
        if turn >= fill:
            seconds.setdefault(SERVED, []).append(over_http)
    rows = [[name, *(Spread.of(column).show(2) for column in zip(*values, strict=True))] for name, values in seconds.items()]
    ours = [SERVED, *(one.name for one in contenders if one.kind == "ours")]
    slowest = max(Spread.of([first for _, first in seconds[name]]).median for name in ours)
    return "\n\n".join(
        (
            f"{MODEL} A fresh process, {run.rounds} times"
            + (" after one that is not counted and fills the page cache." if fill else "."),
            table(["contender", "process start to a loaded model, s", "to the first token, s"], [*rows, *absent(fleet)]),
            verdicts([verdict("process start to first token (serve: first answer), the slowest of ours, s", slowest, 5.0)]),
        )
    )
