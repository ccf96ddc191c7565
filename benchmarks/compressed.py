"""The leg `compressed`: seconds and bytes per step when ranks send less than every element in bf16, over links of 1 Gbit/s.

Each rank runs in a network namespace of its own, whose interface is limited and counts what it sends (benchmarks/wire.py). A step
has few tokens, so that communication takes most of it. All contenders are Slipstream's, over gloo, in turns.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks import systems
from benchmarks.legs import Options
from benchmarks.report import Spread, table, verdict, verdicts
from benchmarks.step import start
from benchmarks.wire import NoNetwork, network
from benchmarks.worker import Failed
from benchmarks.workloads import WORKLOADS
from slipstream.optim.rounds import Round, Rounds

WORK = dataclasses.replace(WORKLOADS["moving"], name="compressed", batch=1, length=16)
WORLD = 4
RATE = "1gbit"
PLAIN, ZERO3 = "slipstream:0:gloo", "slipstream:3:gloo"
SIGNS, LOCAL = "slipstream:0:gloo:onebit", "slipstream:0:gloo:local"
TOGETHER = (  # contenders that are alive at once, after the one that they are compared with; a rank of 1-bit Adam has 1.7 GB
    (PLAIN, "slipstream:0:gloo:int8", "slipstream:0:gloo:int4"),
    (PLAIN, "slipstream:0:gloo:feedback", "slipstream:0:gloo:onebit"),
    (PLAIN, "slipstream:1:gloo:onebit", "slipstream:0:gloo:onebitlamb"),
    (PLAIN, LOCAL, "slipstream:1:gloo:published"),
    (ZERO3, "slipstream:3:gloo:zeropp"),
)
SCHEDULES = ((200_000, 23_000), (250_000, 100_000), (400_000, 100_000))  # steps, and the last one that updates the variance
WARMUP = 0.15  # share of the steps before 1-bit Adam freezes its variance
FIRST, COUNT = 4, 3  # steps before the first turn, in which 1-bit Adam freezes its variance, and steps of a turn


def run(options: Options) -> str:
    rounds = options.num_rounds(2)
    whole = 2 * (WORLD - 1) / WORLD * WORK.num_params * 4
    rows, gains, sent = [], dict[str, float](), dict[str, float]()
    for contenders in TOGETHER[: 2 if options.quick else None]:
        try:
            seconds, nbytes = _take_turns(contenders, rounds)
        except NoNetwork as error:
            return f"Not measured: {error}."
        except Failed as error:
            return f"Not measured: {error.reason}."
        for name in contenders:
            if name in sent:
                continue
            faster = Spread.ratio(seconds[contenders[0]], seconds[name])
            sent[name], gains[name] = nbytes[name], faster.median
            figures = f"{sent[name] / 1e6:.2f}", f"{whole / sent[name]:.1f}"
            rows.append([systems.label(name), Spread.of(seconds[name]).show(), faster.show(), *figures])
    savings = {schedule: _saved(*schedule, sent) for schedule in SCHEDULES if LOCAL in sent}
    return "\n\n".join(
        (
            f"{WORK.describe()}, bf16, {WORLD} ranks, 1 Gbit/s per rank (network namespaces, tbf). Seconds per step of the "
            f"slowest rank, median (min-max) of {rounds * COUNT} steps after {FIRST}; `faster`: than the same stage in bf16; MB "
            "sent per step by the rank that sends most, packet headers included; `fewer`: than an fp32 all-reduce by the formula. "
            "1-bit Adam and 1-bit LAMB are in their second phase.",
            table(["contender", "s", "faster", "sent, MB", "fewer"], rows),
            *([_whole_runs(savings)] if savings else []),
            verdicts([verdict(text, value, target, at_least=True) for text, value, target in _judged(whole, sent, gains, savings)]),
        )
    )


def _take_turns(contenders: tuple[str, ...], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each step, and bytes that the rank sends that sends most."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    sent: dict[str, list[float]] = {name: [] for name in contenders}
    with ExitStack() as stack:
        running = {}
        for name in contenders:
            seat, counters = stack.enter_context(network(WORLD, RATE))
            running[name] = (stack.enter_context(start(name, WORK, "bf16", WORLD, None, seat)), counters)
            running[name][0].call("steps", count=FIRST)
        for turn in range(rounds):
            for name, (ranks, counters) in running.items():
                before = [int(counter.read_text()) for counter in counters]
                done = ranks.call("steps", count=COUNT)
                after = [int(counter.read_text()) for counter in counters]
                seconds[name] += [max(rank["times"][i] for rank in done) for i in range(COUNT)]
                sent[name].append(max(b - a for a, b in zip(before, after, strict=True)) / COUNT)
                figures = f"{seconds[name][-1]:.3f} s, {sent[name][-1] / 1e6:.2f} MB"
                print(f"  compressed {turn + 1}/{rounds} {name}: {figures}", flush=True)
    return seconds, {name: statistics.median_low(each) for name, each in sent.items()}  # a busy machine repeats packets


def _saved(steps: int, freeze: int, sent: dict[str, float]) -> tuple[float, float]:
    """The parts of 1-bit Adam's bytes, and of Adam's rounds, that 0/1 Adam does without."""
    zero_one = Rounds(freeze=freeze, doubling=16, local_doubling=32_678, longest=16)
    kinds = Counter(zero_one.kind(step) for step in range(1, steps + 1))
    nbytes = kinds[Round.DENSE] * sent[PLAIN] + kinds[Round.SIGNS] * sent[SIGNS] + kinds[Round.LOCAL] * sent[LOCAL]
    whole = freeze * sent[PLAIN] + (steps - freeze) * sent[SIGNS]
    return 1 - nbytes / whole, kinds[Round.LOCAL] / steps


def _whole_runs(savings: dict[tuple[int, int], tuple[float, float]]) -> str:
    rows = [[f"{steps:,}", f"{freeze:,}", f"-{data:.0%}", f"-{rounds:.0%}"] for (steps, freeze), (data, rounds) in savings.items()]
    return (
        "Whole runs of 0/1 Adam by its schedule (other options are the defaults), from these bytes of dense steps, steps of "
        "signs and local steps: data less than that of 1-bit Adam, which freezes after as many steps, and rounds less than "
        "Adam's:\n\n" + table(["steps", "variance frozen after", "data", "rounds"], rows)
    )


def _judged(
    whole: float, sent: dict[str, float], gains: dict[str, float], savings: dict[tuple[int, int], tuple[float, float]]
) -> Iterator[tuple[str, float, float]]:
    """Each figure with its target."""
    one_bit, warm = SIGNS, "slipstream:0:gloo:feedback"
    yield "1-bit Adam: times fewer bytes than an fp32 all-reduce", whole / sent[one_bit], 30.0
    yield "1-bit Adam: times fewer bytes than bf16", sent[PLAIN] / sent[one_bit], 15.0
    yield "1-bit Adam: times faster than bf16", gains[one_bit], 3.5
    for text, before, target in (("", PLAIN, 4.8), (", int4 before", warm, 9.5)):
        mean = WARMUP * sent[before] + (1 - WARMUP) * sent[one_bit]
        yield f"1-bit Adam{text}: times fewer bytes than bf16, {WARMUP:.0%} of the steps before", sent[PLAIN] / mean, target
    if "slipstream:0:gloo:onebitlamb" in sent:
        lamb = sent["slipstream:0:gloo:onebitlamb"]
        yield "1-bit LAMB: times fewer bytes than an fp32 all-reduce", whole / lamb, 30.0
        yield "1-bit LAMB: times fewer bytes than bf16", sent[PLAIN] / lamb, 15.0
    if savings:
        data, rounds = savings[SCHEDULES[-1]]
        yield f"0/1 Adam, {SCHEDULES[-1][0]:,} steps: data less than 1-bit Adam's", data, 0.87
        yield f"0/1 Adam, {SCHEDULES[-1][0]:,} steps: rounds less than Adam's", rounds, 0.54
