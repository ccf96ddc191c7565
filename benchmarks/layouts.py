"""The legs on layouts: `pipeline` (two stages over the bound, and DeepSpeed's) and `link` (a pipeline or data over a slow link).

All contenders stay alive and take turns of one step each, in both directions; idle ones wait in a read. A figure is the time of the
slowest rank over that of `compute` in the same turn: the forwards and backwards that a rank has to do, without communication.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.legs import Options
from benchmarks.peers import Peers, prepare
from benchmarks.ranks import Ranks, Seat
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.worker import Failed
from benchmarks.workloads import Workload

PIPELINE = Workload(name="pipeline", width=512, depth=8, heads=8, vocab=512, batch=2, length=128)
LINK = dataclasses.replace(PIPELINE, name="link", batch=1, length=64)
COMPUTE = "compute:half"


def measure(
    work: Workload, systems: Sequence[str], peers: Peers, micros: int, turns: int, seat: Seat | None = None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds per step of each contender, turn by turn; and of those that failed, why."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    troubles: dict[str, str] = {}
    with ExitStack() as stack:
        alive: dict[str, Ranks] = {}
        for name in systems:
            theirs = name.startswith("deepspeed")
            if theirs and peers.python is None:
                troubles[name] = peers.missing
                continue
            try:
                alive[name] = stack.enter_context(
                    Ranks(
                        "benchmarks.layouts_worker:train",
                        {"system": name, "work": dataclasses.asdict(work), "micros": micros},
                        2,
                        name=name,
                        python=peers.python if theirs else None,
                        env=peers.env() if theirs else {},
                        seat=seat,
                    )
                )
                alive[name].call("steps", count=1)
            except Failed as error:
                print(error)
                alive.pop(name, None)
                troubles[name] = error.reason
        for turn in range(turns):
            for name, ranks in list(alive.items())[:: 1 if turn % 2 == 0 else -1]:
                try:
                    replies = ranks.call("steps", count=1)
                except Failed as error:
                    print(error)
                    alive.pop(name)
                    troubles[name] = error.reason
                    continue
                seconds[name].append(max(statistics.mean(reply["times"]) for reply in replies))
    for name, values in seconds.items():
        if name not in troubles:
            print(f"  {work.name} m={micros} {name}: {statistics.median(values):.3f} s", flush=True)
    return seconds, troubles


_PIPES = ("slipstream:pp:1f1b", "slipstream:pp:zero_bubble", "slipstream:pp:gpipe", "deepspeed:pp")


def pipeline(options: Options) -> str:
    peers = prepare(options.peers)
    turns = options.num_rounds(7)
    rows, judged = [], []
    for micros in (4, 8):
        seconds, troubles = measure(PIPELINE, (COMPUTE, *_PIPES), peers, micros, turns)
        bound = (micros + 1) / micros
        for name in _PIPES:
            if name in troubles:
                rows.append([str(micros), name, troubles[name]])
                continue
            over = Spread.ratio(seconds[name], seconds[COMPUTE])
            one = Spread.of(seconds[name])
            rows.append([str(micros), name, one.show(), over.show(2), f"{over.median / bound:.3f}"])
        ours = Spread.ratio(seconds["slipstream:pp:1f1b"], seconds[COMPUTE]).median
        judged.append(verdict(f"m = {micros}: 1F1B over its bound (m + 1) / m", ours / bound, 1.06, digits=3))
        if micros == 4:
            gain = Spread.ratio(seconds["slipstream:pp:1f1b"], seconds["slipstream:pp:zero_bubble"]).median
            judged.append(verdict("m = 4: 1F1B over zero bubble", gain, 1.10, at_least=True))
        if "deepspeed:pp" not in troubles:
            best = Spread.ratio(seconds["deepspeed:pp"], seconds["slipstream:pp:1f1b"]).median
            judged.append(verdict(f"m = {micros}: DeepSpeed's PipelineModule over our 1F1B", best, 1.15, at_least=True))
    return "\n\n".join(
        (
            f"{PIPELINE.describe()} of a micro-batch, fp32, as a list of layers on two ranks; ZeRO-1. Seconds per step, median (min-max) "
            f"of {turns} turns; over the computing of m micro-batches on two cores at once. {peers}.",
            table(["m", "contender", "s", "over computing", "over 1F1B's bound"], rows),
            verdicts(judged),
        )
    )
