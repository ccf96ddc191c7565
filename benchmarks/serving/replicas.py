"""The leg `replicas`: engines in processes of their own. Tokens per second of two engines with a core each over one on one core,
all clients included; prefix hits of two over one's; their memory, and the return of one that is killed; the processor time of a
token in an engine's process beside its computation; the longest gap in a stream while others send requests that are expensive to
prepare.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.legs import Options
from benchmarks.report import table, verdict, verdicts
from benchmarks.serving import stall
from benchmarks.serving.load import server
from benchmarks.worker import ROOT

TWO = ("--replicas", "2")
GROUPS, TURNS, SHARED, OWN = 8, 6, 320, 32  # conversations; their requests; tokens that these share, and that they do not
LOADS = ("one prompt of 700 kB", "16 prompts of 4 MB", "the first JSON schema")


@contextmanager
def on(cores: Sequence[int]) -> Iterator[None]:
    """What is started meanwhile runs on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def rate(cores: Sequence[int], requests: int, *options: str, ready: Callable[[], object] = bool) -> float:
    """Output tokens per second of a server and its clients on these cores: requests of 64 + 64 tokens, 8 in flight for a core.
    `ready` is called before what is measured."""
    with on(cores), server(*options) as (address, _):
        command = [sys.executable, "-m", "slipstream.launch.cli", "bench-serve", f"http://{address}", "--json"]
        command += ["--prompt-tokens", "64", "--output-tokens", "64", "--concurrency", str(8 * len(cores))]
        results = []
        for number, before in ((4 * len(cores), bool), (requests * len(cores), ready)):  # the first warms
            before()
            done = subprocess.run([*command, "--requests", str(number)], cwd=ROOT, capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout))
        return float(results[-1]["output_tokens_per_second"])


def apart(cores: Sequence[int], requests: int) -> float:
    """Of a server and its clients on each core, which have nothing in common but the memory: the most that two replicas can do."""
    both = threading.Barrier(len(cores), timeout=300)
    with ThreadPoolExecutor(len(cores)) as servers:
        return sum(servers.map(lambda core: rate([core], requests, "--threads", "1", ready=both.wait), cores))


def hits(*options: str) -> float:
    """The part of the prompts' tokens that the prefix caches have: conversations in random order, four requests at once."""
    draw = random.Random(0)
    tokens = [[draw.randrange(1000, 40_000) for _ in range(SHARED)] for _ in range(GROUPS)]
    prompts = [[*group, *(draw.randrange(1000, 40_000) for _ in range(OWN))] for group in tokens for _ in range(TURNS)]
    draw.shuffle(prompts)
    with server(*options) as (address, _), ThreadPoolExecutor(4) as clients:

        def ask(prompt: list[int]) -> int:
            connection = http.client.HTTPConnection(address, timeout=stall.TIMEOUT)
            body = json.dumps({"model": "smollm2", "prompt": prompt, "max_tokens": 16, "ignore_eos": True})
            connection.request("POST", stall.COMPLETIONS, body, {"Content-Type": "application/json"})
            return connection.getresponse().status

        assert set(clients.map(ask, prompts)) == {200}
        connection = http.client.HTTPConnection(address, timeout=stall.TIMEOUT)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    cached, total = (float(re.search(rf"^slipstream_{name}_tokens_total (\S+)", text, re.M)[1]) for name in ("cached", "prompt"))  # type: ignore[index]
    return cached / total


def children(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def own_megabytes(pids: Sequence[int]) -> float:
    """Memory of processes, in which what several share counts once."""
    text = "".join(Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    return sum(map(int, re.findall(r"^Pss_Anon:\s+(\d+)", text, re.M))) / 1024


def killed(streams: int = 8) -> tuple[float, list[float]]:
    """Seconds from the SIGKILL of one of two replicas, while both work, until both serve again; and the memory of the processes of
    one engine and of two, without the spare."""
    sizes = []
    for options in (("--replicas", "1"), TWO):
        with server(*options) as (address, pid), ThreadPoolExecutor(streams) as clients:
            body = json.dumps({"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True})

            def ask(_: int, address: str = address, body: str = body) -> None:
                connection = http.client.HTTPConnection(address, timeout=stall.TIMEOUT)
                connection.request("POST", stall.COMPLETIONS, body, {"Content-Type": "application/json"})
                connection.getresponse().read()

            answers = [clients.submit(ask, number) for number in range(streams)]
            time.sleep(3)
            zygote = next(child for child in children(pid) if children(child))
            replicas = children(zygote)
            sizes.append(own_megabytes([zygote, *replicas]))
            os.kill(replicas[-1], signal.SIGKILL)
            began, down = time.monotonic(), False
            while time.monotonic() - began < 60:
                connection = http.client.HTTPConnection(address, timeout=stall.TIMEOUT)
                connection.request("GET", "/health")
                ready = json.loads(connection.getresponse().read()).get("replicas") == ["ready"] * len(replicas)
                down = down or not ready
                if down and ready:
                    break
                time.sleep(0.01)
            seconds = time.monotonic() - began
            for answer in answers:
                answer.result()
    return seconds, sizes


class Idle:
    """A runner that computes nothing, so that all time of the process is the engine's and the wire's."""

    num_blocks, block_size, vocab_size, max_context, short_context = 4096, 16, 64, 4096, 4096
    generate = None

    def __init__(self) -> None:
        self.logits = np.zeros((64, self.vocab_size), np.float32)

    def put(self, role: str, weight: Any) -> None:
        raise AssertionError("it has no weights")

    def forward(self, batch: Any) -> object:
        return self.logits[: sum(chunk.num_rows for chunk in batch.chunks)]


def token_time(wired: bool, streams: int = 16, length: int = 400) -> float:
    """Microseconds of processor time of a token in the engine's process. Not `wired`: of the engine alone, which counts them."""
    from slipstream.inference import wire
    from slipstream.inference.core import SamplingParams
    from slipstream.inference.engine import Engine
    from slipstream.inference.replica import Session

    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    engine = Engine(Idle(), None, max_running=streams)
    over, left = threading.Event(), streams

    def count(output: Any) -> None:
        nonlocal left
        left -= output.finish is not None
        if not left:
            over.set()

    ours, theirs = socket.socketpair()
    link = wire.Link(theirs)
    session = threading.Thread(target=Session(engine, link).run)
    if wired:
        session.start()
    client = wire.Link(ours)
    began = time.process_time()
    for number in range(streams):
        if wired:
            client.send("submit", number, [1, 2, 3], wire.packed_params(params), {"n": 1})
        else:
            engine.submit([1, 2, 3], params, sink=count)
    engine.start()
    ends, reading = 0, time.thread_time()
    if wired:
        while ends < streams:
            kind, _, *rest = next(client.messages)
            ends += kind == "output" and wire.output_of(rest[0]).finish is not None
        reading = time.thread_time() - reading  # the server's part
    else:
        over.wait()
        reading = 0.0
    seconds = time.process_time() - began - reading
    client.close()
    engine.close()
    if wired:
        session.join()
    link.close()
    return seconds / (streams * length) * 1e6


def run(options: Options) -> str:
    cores = sorted(os.sched_getaffinity(0))[:2]
    rounds, requests = options.num_rounds(3), 4 if options.quick else 24
    turns = [
        (rate(cores[:1], requests, "--threads", "1"), rate(cores, requests, *TWO), apart(cores, requests)) for _ in range(rounds)
    ]
    one, two, most = (median(turn[i] for turn in turns) for i in range(3))
    known = [hits("--threads", "1"), hits(*TWO)]
    times = [[token_time(wired) for _ in range(rounds)] for wired in (False, True)]
    alone, wired = (median(each) for each in times)
    loads = [load for load in stall.LOADS if load.name in LOADS[: 1 if options.quick else None]]
    back, sizes = killed()
    gaps = [stall.measure(load.name, lambda address, load=load: stall.send(address, load), *TWO) for load in loads]  # type: ignore[misc]
    rows = [
        ["output tokens per second", f"{one:.0f}", f"{two:.0f}", f"{most:.0f}"],
        ["tokens of prompts that were cached", f"{known[0]:.3f}", f"{known[1]:.3f}", "-"],
        ["MB of engines' processes", *(f"{size:.0f}" for size in sizes), "-"],
    ]
    return "\n\n".join(
        (
            "SmolLM2-135M-Instruct. One engine, its HTTP and its clients on one core; two engines with a core each, HTTP and "
            f"clients on the same two. Prompts of {GROUPS} conversations share {SHARED} of {SHARED + OWN} tokens with {TURNS - 1} "
            "others. Two servers apart, each with its clients on a core, have only the memory in common.",
            table(["", "one on one core", "two", "two servers apart"], rows),
            f"A token in the engine's process, without a model: {alone:.0f} us of the engine, {wired:.0f} us with the wire.",
            table(["load on two replicas", *stall.HEAD[1:]], gaps),
            verdicts(
                [
                    verdict("tokens per second of two over one", median(b / a for a, b, _ in turns), 1.9, at_least=True),
                    verdict(
                        "tokens per second of two over two servers apart", median(b / c for _, b, c in turns), 0.95, at_least=True
                    ),
                    verdict("prefix hits of two over one's", known[1] / known[0], 0.9, at_least=True),
                    verdict("us of a token for HTTP in the engine's process", wired - alone, 60, digits=0),
                    verdict("seconds until a killed replica serves again, under load", back, 5.0),
                    verdict("ms of the longest gap of another stream", max(float(row[1]) for row in gaps), 50, digits=0),
                ]
            ),
        )
    )
